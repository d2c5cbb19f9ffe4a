//! `--sweep`: every legal scope that is worth a try, narrowest first, one run each; a table and a recommendation.

use super::interrupt::Interrupt;
use super::{alone, check, last, one, plan, say, target, usage};
use crate::args::{Args, Format, ScopeList, impl_name};
use crate::capture::{CaptureError, RunPlan};
use crate::config::{GraphImpl, Scope};
use crate::overrides::{self, Notice, Resolved, UsageError};
use crate::recipe::Catalogue;
use crate::report::COLUMNS;
use crate::report::recommend::{Tried, described, render};
use crate::report::xlsx::Book;
use crate::{keys, sweep};
use serde_json::json;
use std::collections::HashSet;
use std::io::Write;
use std::sync::{Arc, Mutex};

#[cfg(test)]
mod tests;

use GraphImpl::{Local, TransformerEngine};
use Scope::{Attn, FullIteration, Mamba, Mlp, Moe, MoePreprocess, MoeRouter};

/// What users of the harness try (rules file, section 5; the seed's bring-up order), for every kind of layer. An empty
/// scope is the whole layer. What a model has no layer for, or a rule forbids, is left out.
const SETS: &[(GraphImpl, &[Scope])] = &[
    (TransformerEngine, &[Mlp]),
    (TransformerEngine, &[Attn]),
    (TransformerEngine, &[Mamba]),
    (TransformerEngine, &[MoeRouter]),
    (TransformerEngine, &[MoeRouter, MoePreprocess]),
    (TransformerEngine, &[Moe]),
    (TransformerEngine, &[Attn, Mlp]),
    (TransformerEngine, &[Attn, Mamba]),
    (TransformerEngine, &[Mamba, Mlp]),
    (TransformerEngine, &[Mamba, MoeRouter]),
    (TransformerEngine, &[Mamba, MoeRouter, MoePreprocess]),
    (TransformerEngine, &[Attn, MoeRouter]),
    (TransformerEngine, &[Attn, MoeRouter, MoePreprocess]),
    // Models that begin with dense layers.
    (TransformerEngine, &[Mlp, MoeRouter]),
    (TransformerEngine, &[Attn, Mlp, MoeRouter]),
    (TransformerEngine, &[Attn, Mlp, MoeRouter, MoePreprocess]),
    (TransformerEngine, &[Attn, Mamba, MoeRouter]),
    (TransformerEngine, &[Attn, Mamba, MoeRouter, MoePreprocess]),
    (TransformerEngine, &[Attn, Moe]),
    (TransformerEngine, &[]),
    (Local, &[FullIteration]),
];

/// Rules that are broken where no layer of the model has the part (no experts, experts alone, no Mamba): such a scope is no loss.
const NO_SUCH_PART: [&str; 3] = ["R28", "R29", "R57"];

/// One run of the sweep.
struct Job {
    args: Args,
    resolved: Resolved,
    scope: String,
    captured: f64,
}

/// The command line of one scope.
fn with_scope(args: &Args, implementation: GraphImpl, scope: &[Scope]) -> Args {
    let mut own = args.clone();
    own.mbperf.sweep = false;
    own.mbperf.in_turn = true;
    own.argv.retain(|word| word != "--sweep");
    own.argv.extend(["--cuda_graph_impl".into(), impl_name(implementation).into()]);
    own.performance.cuda_graph_impl = Some(implementation);
    if implementation == GraphImpl::None {
        return own;
    }
    if scope.is_empty() {
        let whole = "model.cuda_graph_scope=[]".to_owned();
        own.overrides.push(whole.clone());
        own.argv.push(whole);
    } else {
        let names: Vec<&str> = scope.iter().map(|s| s.name()).collect();
        own.argv.extend(["--cuda_graph_scope".into(), names.join(",")]);
        own.performance.cuda_graph_scope = Some(ScopeList(scope.to_vec()));
    }
    own
}

/// Which of the step's launches the graphs hold, and their share.
pub(super) fn captured(plan: &RunPlan) -> (Vec<bool>, f64) {
    let Some(graph) = &plan.graph else { return (Vec::new(), 0.0) };
    let held: Vec<bool> = graph
        .segments
        .iter()
        .flat_map(|s| s.launches.clone().map(|i| (i, s.graph.is_some())))
        .filter(|(i, _)| !graph.program.launches[*i].staging)
        .map(|(_, held)| held)
        .collect();
    let share = held.iter().filter(|h| **h).count() as f64 / held.len().max(1) as f64;
    (held, share)
}

/// A scope that a rule or the model's layers forbid, and why.
struct Refused {
    scope: String,
    error: UsageError,
}

impl Refused {
    fn no_such_part(&self) -> bool {
        self.rule().is_some_and(|rule| NO_SUCH_PART.contains(&rule))
    }

    fn rule(&self) -> Option<&'static str> {
        self.error.rule()
    }

    /// The reason without the scope that it names: alike for all that are refused alike. One rule may have several.
    fn kind(&self) -> String {
        let why = self.error.to_string();
        let Some((before, rest)) = why.split_once("--cuda_graph_scope ") else { return why };
        format!("{before}{}", rest.split_once(':').map_or("", |(_, after)| after))
    }

    /// The reason, and what to do instead but for what is refused too.
    fn told(&self, refused: &[Refused]) -> String {
        let UsageError::Rule(violation) = &self.error else { return self.error.to_string() };
        let is_refused = |part: &str| {
            let named = part.split_once("apture ").and_then(|(_, rest)| rest.split([' ', '.']).next());
            named.is_some_and(|scope| refused.iter().any(|r| r.scope == scope.trim_end_matches(',')))
        };
        let ways: Vec<&str> = violation.remedy.split(", or ").filter(|part| !is_refused(part)).collect();
        let mut said = format!("{}: {}", violation.id, violation.what);
        if let Some((first, rest)) = ways.join(", or ").split_at_checked(1) {
            said += &format!(". {}{}", first.to_uppercase(), rest.trim_end_matches('.'));
        }
        said + "."
    }
}

/// The reason that most of the scopes have in common: of others each is about its own scope alone. Parts that the model has not
/// are no reason where there is another.
fn commonest(refused: &[Refused]) -> Option<usize> {
    // Of equals the first.
    (0..refused.len()).rev().max_by_key(|at| (!refused[*at].no_such_part(), alike(refused, &refused[*at])))
}

fn alike(refused: &[Refused], to: &Refused) -> usize {
    refused.iter().filter(|other| other.rule() == to.rule()).count()
}

fn scope_name(scope: &[Scope]) -> String {
    let mut sorted = scope.to_vec();
    sorted.sort_unstable();
    let names: Vec<&str> = sorted.iter().map(|s| s.name()).collect();
    if names.is_empty() { "whole layer".to_owned() } else { names.join(",") }
}

/// The legal scopes of this model, narrowest first, and the others.
fn jobs(args: &Args, catalogue: &Catalogue) -> anyhow::Result<(Vec<Job>, Vec<Refused>)> {
    let mut jobs: Vec<Job> = Vec::new();
    let mut refused: Vec<Refused> = Vec::new();
    // By implementation and captured launches: two names of one set are one run.
    let mut seen: HashSet<(bool, Vec<bool>)> = HashSet::new();
    for (implementation, scope) in SETS {
        let own = with_scope(args, *implementation, scope);
        let resolved = match overrides::resolve(&own, catalogue, &|name| std::env::var(name).ok()) {
            Ok(resolved) => resolved,
            Err(e) => {
                refused.push(Refused { scope: scope_name(scope), error: e });
                continue;
            }
        };
        resolved.require_built()?;
        let plan = match plan(&resolved.config, false, args.mbperf.comm_model) {
            Ok(plan) => plan,
            // A scope that finds no launch is none for this model.
            Err(e) if e.is::<CaptureError>() => continue,
            Err(e) => return Err(e),
        };
        let (held, share) = captured(&plan);
        let graph = &resolved.config.graph;
        if !held.contains(&true) || !seen.insert((graph.implementation == Local, held)) {
            continue;
        }
        let scope = scope_name(&graph.scope);
        jobs.push(Job { args: own, resolved, scope, captured: share });
    }
    if jobs.is_empty() {
        let Some(at) = commonest(&refused) else {
            return Err(usage("--sweep: no scope is legal for this model: none holds a launch of it"));
        };
        let why = refused[at].error.to_string();
        // What is wrong without graphs too, or with each scope alike, is no fault of the scopes.
        let same = |e: &UsageError| e.to_string() == why;
        let without = with_scope(args, GraphImpl::None, &[]);
        let eager = overrides::resolve(&without, catalogue, &|name| std::env::var(name).ok());
        if eager.is_err_and(|e| same(&e)) || refused.iter().all(|r| r.no_such_part() || same(&r.error)) {
            return Err(refused.swap_remove(at).error.into());
        }
        let (most, all) = (alike(&refused, &refused[at]), SETS.len());
        return Err(usage(&format!(
            "--sweep: no scope is legal for this model: {most} of {all} for this reason: {why}"
        )));
    }
    jobs.sort_by(|a, b| a.captured.total_cmp(&b.captured));
    // A profiler slows down all that follows it in the process.
    let last = jobs.len() - 1;
    jobs[..last].iter_mut().for_each(|job| job.args.mbperf.no_profile = true);
    Ok((jobs, refused))
}

/// `--sweep --dryrun`: what would be run, and what not, with the rule that forbids it.
fn plan_of(jobs: &[Job], refused: &[Refused], format: Format) -> String {
    if format == Format::Json {
        let scopes: Vec<_> =
            jobs.iter().map(|j| json!({ "scope": j.scope, "captured_fraction": j.captured })).collect();
        let refused: Vec<_> = refused
            .iter()
            .map(|r| json!({ "scope": r.scope, "rule": r.rule(), "reason": r.error.to_string() }))
            .collect();
        return json!({ "scopes": scopes, "refused": refused }).to_string() + "\n";
    }
    let mut text = String::from("What --sweep would run, narrowest first:\n");
    for job in jobs {
        text += &format!("{:<40}{:>4.0} % of the launches in graphs\n", job.scope, job.captured * 100.0);
    }
    for (first, scopes) in reasons(refused) {
        text += &format!("not {}: {}\n", scopes.join("; "), first.told(refused));
    }
    text
}

/// A line a reason, as its first scope has it; parts that the model has not are no loss.
fn reasons(refused: &[Refused]) -> Vec<(&Refused, Vec<&str>)> {
    let mut reasons: Vec<(&Refused, Vec<&str>)> = Vec::new();
    for r in refused.iter().filter(|r| !r.no_such_part()) {
        match reasons.iter_mut().find(|(first, _)| first.rule() == r.rule() && first.kind() == r.kind()) {
            Some((_, scopes)) => scopes.push(&r.scope),
            None => reasons.push((r, vec![&r.scope])),
        }
    }
    reasons
}

/// What is left out, in one line; empty where nothing is.
fn left_out(refused: &[Refused]) -> String {
    let of = |(first, scopes): (&Refused, Vec<&str>)| {
        format!("{} ({})", scopes.join("; "), first.rule().unwrap_or("see there"))
    };
    let all: Vec<String> = reasons(refused).into_iter().map(of).collect();
    if all.is_empty() {
        String::new()
    } else {
        format!("left out: {}; --sweep --dryrun says why", all.join("; "))
    }
}

/// The key of an override that chooses what graphs hold, as the user wrote it.
fn chooses_scope(args: &Args) -> Option<&str> {
    const KEYS: [&str; 2] = ["model.cuda_graph_impl", "model.cuda_graph_scope"];
    args.overrides.iter().find_map(|text| {
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        // What cannot be read is refused by the one who resolves it.
        let known = keys::parse_value(key, value).map_or(key, |(known, _)| known);
        KEYS.contains(&known).then_some(key)
    })
}

/// Notices of every scope alike: one that a scope brings is about an option that the user did not give.
fn shared(jobs: &[Job]) -> Vec<Notice> {
    let Some((first, others)) = jobs.split_first() else { return Vec::new() };
    let in_all = |n: &&Notice| others.iter().all(|job| job.resolved.notices.contains(n));
    let named = |n: &&Notice| n.message.contains("--cuda_graph_") || n.id == "whole_layer_capture";
    first.resolved.notices.iter().filter(|n| in_all(n) && !named(n)).cloned().collect()
}

/// Runs the sweep. A scope that fails does not stop the others.
///
/// # Errors
/// Options that choose a scope, or a model that no scope is legal for (exit 2).
pub(super) fn run(
    args: &Args,
    catalogue: &Catalogue,
    interrupt: &Interrupt,
    book: Option<&Arc<Mutex<Book>>>,
) -> anyhow::Result<u8> {
    let own = &args.mbperf;
    let clash = [
        ("--cuda_graph_impl", args.performance.cuda_graph_impl.is_some()),
        ("--cuda_graph_scope", args.performance.cuda_graph_scope.is_some()),
        ("--repeat", own.repeat > 1),
        ("--aa", own.aa.is_some()),
        ("--dump", own.dump.is_some()),
    ];
    let given = clash.iter().find(|(_, given)| *given).map(|(name, _)| *name);
    if let Some(name) = given.or_else(|| chooses_scope(args)) {
        return Err(usage(&format!("--sweep runs every legal scope once: leave {name} out")));
    }
    if args.general.dryrun && args.logging.save_config_filepath.is_some() {
        return Err(usage(
            "--sweep --dryrun lists configurations and saves none: leave --save_config_filepath out",
        ));
    }
    let (jobs, refused) = jobs(args, catalogue)?;
    if let Some(first) = jobs.first() {
        check(&first.resolved, args)?;
    }
    if args.general.dryrun {
        let text = plan_of(&jobs, &refused, own.format);
        return match std::io::stdout().lock().write_all(text.as_bytes()) {
            Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(e.into()),
            _ => Ok(0),
        };
    }
    // For all scopes: between two of them nobody else may begin.
    let mut _alone = None;
    if let Some(first) = jobs.first() {
        for n in shared(&jobs) {
            say(args, &format!("notice {}: {}", n.id, n.message));
        }
        _alone = alone(args, &target(&first.resolved, args))?;
    }
    let names: Vec<&str> = jobs.iter().map(|j| j.scope.as_str()).collect();
    say(args, &format!("--sweep: {} scopes, narrowest first: {}", names.len(), names.join("; ")));
    let left_out = left_out(&refused);
    if !left_out.is_empty() {
        say(args, &format!("--sweep: {left_out}"));
    }
    let book = book.cloned().unwrap_or_default();
    let scopes = jobs.len();
    let (asked, kept) = (args.clone(), book.clone());
    last::words(move |code| {
        let tried = last::book(&kept).map(|book| so_far(&book)).unwrap_or_default();
        // As the process ends: nobody is left to tell of a reader that has gone.
        let _ = conclude(&asked, &tried, scopes);
        super::save_last(&asked, &kept, code);
    });
    let (code, tried) =
        sweep::tried(jobs, &book, |job| one(job.resolved, &job.args, interrupt, Some(&book), None));
    last::clear();
    conclude(args, &tried, scopes)?;
    Ok(code)
}

/// Says what was found, in the form that was asked for.
fn conclude(args: &Args, tried: &[Tried], scopes: usize) -> std::io::Result<()> {
    let own = &args.mbperf;
    if own.format == Format::Json {
        let said = json!({ "sweep": described(tried, scopes, own.margin) });
        return writeln!(std::io::stdout().lock(), "{said}");
    }
    say(args, &format!("\n{}", told(tried, scopes, own.margin).trim_end()));
    Ok(())
}

/// What the book holds of a sweep that ends in the middle, narrowest first.
fn so_far(book: &Book) -> Vec<Tried> {
    let id = COLUMNS.iter().position(|c| c.name == "run_id").unwrap_or(0);
    let runs = [&book.found, &book.rows].into_iter().flat_map(|rows| rows.chunk_by(|a, b| a[id] == b[id]));
    let mut tried: Vec<Tried> = runs.filter_map(Tried::of_run).collect();
    tried.sort_by(|a, b| a.captured.partial_cmp(&b.captured).unwrap_or(std::cmp::Ordering::Equal));
    tried
}

/// Table and recommendation. A sweep that was cut short must not be taken for a whole one.
fn told(tried: &[Tried], scopes: usize, margin: f64) -> String {
    let mut text = render(tried, margin);
    let lacking = scopes - tried.len().min(scopes);
    if lacking > 0 {
        text += &format!("{lacking} of the {scopes} scopes left no row: --resume runs what is lacking\n");
    }
    text
}
