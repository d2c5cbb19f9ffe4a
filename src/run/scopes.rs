//! `--sweep`: every legal scope that is worth a try, narrowest first, one run each; a table and a recommendation.

use super::interrupt::Interrupt;
use super::{alone, check, one, plan, say, say_notices, target, usage};
use crate::args::{Args, Format, ScopeList, impl_name};
use crate::capture::RunPlan;
use crate::config::{GraphImpl, Scope};
use crate::overrides::{self, Resolved};
use crate::recipe::Catalogue;
use crate::report::recommend::{Tried, described, render};
use crate::report::xlsx::Book;
use crate::sweep;
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
    (TransformerEngine, &[Attn, MoeRouter]),
    (TransformerEngine, &[Attn, MoeRouter, MoePreprocess]),
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
    rule: Option<&'static str>,
    why: String,
}

/// The reason that most of the scopes have in common: of others each is about its own scope alone.
fn commonest(refused: &[Refused]) -> Option<&Refused> {
    // Of equals the first.
    refused.iter().rev().max_by_key(|r| alike(refused, r))
}

fn alike(refused: &[Refused], to: &Refused) -> usize {
    refused.iter().filter(|other| other.rule == to.rule).count()
}

fn scope_name(scope: &[Scope]) -> String {
    let names: Vec<&str> = scope.iter().map(|s| s.name()).collect();
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
                refused.push(Refused { scope: scope_name(scope), rule: e.rule(), why: e.to_string() });
                continue;
            }
        };
        resolved.require_built()?;
        // A scope that finds no launch is none for this model.
        let Ok(plan) = plan(&resolved.config, false, args.mbperf.comm_model) else { continue };
        let (held, share) = captured(&plan);
        let graph = &resolved.config.graph;
        if !held.contains(&true) || !seen.insert((graph.implementation == Local, held)) {
            continue;
        }
        let scope = scope_name(&graph.scope);
        jobs.push(Job { args: own, resolved, scope, captured: share });
    }
    if jobs.is_empty() {
        let why = match commonest(&refused) {
            Some(r) => format!("{} of {} for this reason: {}", alike(&refused, r), SETS.len(), r.why),
            None => "none holds a launch of it".into(),
        };
        return Err(usage(&format!("--sweep: no scope is legal for this model: {why}")));
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
        let refused: Vec<_> =
            refused.iter().map(|r| json!({ "scope": r.scope, "rule": r.rule, "reason": r.why })).collect();
        return json!({ "scopes": scopes, "refused": refused }).to_string() + "\n";
    }
    let mut text = String::from("What --sweep would run, narrowest first:\n");
    for job in jobs {
        text += &format!("{:<40}{:>4.0} % of the launches in graphs\n", job.scope, job.captured * 100.0);
    }
    let lost = refused.iter().filter(|r| !r.rule.is_some_and(|rule| NO_SUCH_PART.contains(&rule)));
    // A line a reason, as its first scope has it.
    let mut reasons: Vec<(&Refused, Vec<&str>)> = Vec::new();
    for r in lost {
        match reasons.iter_mut().find(|(first, _)| first.rule == r.rule) {
            Some((_, scopes)) => scopes.push(&r.scope),
            None => reasons.push((r, vec![&r.scope])),
        }
    }
    for (first, scopes) in reasons {
        text += &format!("not {}: {}\n", scopes.join("; "), first.why.replace('\n', ""));
    }
    text
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
    if let Some((name, _)) = clash.iter().find(|(_, given)| *given) {
        return Err(usage(&format!("--sweep runs every legal scope once: leave {name} out")));
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
        say_notices(&first.resolved, args);
        _alone = alone(args, &target(&first.resolved, args))?;
    }
    let names: Vec<&str> = jobs.iter().map(|j| j.scope.as_str()).collect();
    say(args, &format!("--sweep: {} scopes, narrowest first: {}", names.len(), names.join("; ")));
    let book = book.cloned().unwrap_or_default();
    let scopes = jobs.len();
    let (code, tried) =
        sweep::tried(jobs, &book, |job| one(job.resolved, &job.args, interrupt, Some(&book), None));
    if own.format == Format::Json {
        let said = json!({ "sweep": described(&tried, scopes, own.margin) });
        writeln!(std::io::stdout().lock(), "{said}")?;
    } else {
        say(args, &format!("\n{}", told(&tried, scopes, own.margin).trim_end()));
    }
    Ok(code)
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
