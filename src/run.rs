//! One run: configuration, program, device, measurement, rows.

use crate::args::{Args, AttentionKernels, DeviceChoice, Format};
use crate::capture::{self, RunPlan};
use crate::commands::{self, Usage, broken_pipe, complain};
use crate::config::RunConfig;
use crate::device::cuda::executor::CudaOptions;
use crate::device::inject::{Inject, Kind};
use crate::host_model::HostModel;
use crate::measure::outcome::FinalCheck;
use crate::measure::{self, Options, Status};
use crate::ops::collective::held::{CommModel, hold};
use crate::overrides::{self, Resolved};
use crate::profile::Profile;
use crate::program::Program;
use crate::ranks::launch::Start;
use crate::recipe::Catalogue;
use crate::report::xlsx::Book;
use crate::report::{Row, RunFacts, Writer, file, summary};
use crate::workloads::{self, share::RankShare, shrink};
use crate::{dump, report_files, sweep};
use serde_json::{Value, json};
use std::io::Write;
use std::sync::{Arc, Mutex};

mod alone;
mod asked;
mod beside;
mod facts;
pub(crate) mod files;
mod in_turn;
mod interrupt;
mod last;
mod one;
mod open;
mod profile;
mod ranks;
mod scopes;
mod settings;
mod tally;
mod threads;

use alone::alone;
use asked::{dry_run, list_variants};
use interrupt::Interrupt;
use one::one;
use open::{check_spin, choose_device, cuda_options, faults, open_device};
use settings::{given, options, target};

/// Runs a command line; returns the exit code.
///
/// # Errors
/// Everything that stops before there is a row; [`crate::commands::exit_code`] gives its code.
pub fn run(args: &Args) -> anyhow::Result<u8> {
    let own = &args.mbperf;
    commands::folders(own.cuda_path.as_deref(), own.kernel_cache.as_deref())?;
    if own.format == Format::Csv {
        return Err(usage(
            "--format csv is of `mbperf ops`: a run writes its CSV to -o FILE (- for standard output); leave it out",
        ));
    }
    ranks::check_timeout(args)?;
    // From the start: as a container's first process it would not be ended by a signal that it does not handle.
    let start = ranks::start(args)?;
    if start.as_ref().is_some_and(|s| s.rank > 0) {
        return follow(args, start);
    }
    let interrupt = Interrupt::watch()?;
    let catalogue = Catalogue::load(args.mbperf.recipes_dir.as_deref())?;
    if args.variant.list_config_variants {
        return list_variants(&catalogue, args);
    }
    if !args.general.dryrun {
        profile::check(args)?;
    }
    if start.is_some() {
        ranks::check_options(args)?;
    }
    if args.mbperf.sweep {
        let book = report_files::book(args)?;
        let code = scopes::run(args, &catalogue, &interrupt, book.as_ref())?;
        last::clear();
        return report_files::save(args, book.as_deref(), code);
    }
    let mut resolved = overrides::resolve(args, &catalogue, &|name| std::env::var(name).ok())?;
    check(&resolved, args)?;
    if let Some(start) = &start {
        ranks::enter(&mut resolved.config, start)?;
    }
    say_notices(&resolved, args);
    if args.general.dryrun {
        save_config(&resolved.config, args)?;
        return match dry_run(&resolved, args) {
            Err(e) if broken_pipe(&e) => Ok(0),
            other => other,
        };
    }
    resolved.require_built()?;
    let book = report_files::book(args)?;
    if let Some(book) = book.clone() {
        let args = args.clone();
        last::words(move |code| save_last(&args, &book, code));
    }
    let _alone = alone(args, &target(&resolved, args))?;
    let start = start.as_ref();
    let code = sweep::each([resolved], |resolved| one(resolved, args, &interrupt, book.as_ref(), start));
    last::clear();
    report_files::save(args, book.as_deref(), code)
}

/// Saves the workbook of a run that ends in the middle.
fn save_last(args: &Args, book: &Arc<Mutex<Book>>, code: u8) {
    // What hangs does not hold it: else there is none.
    if last::book(book).is_some()
        && let Err(e) = report_files::save(args, Some(book), code)
    {
        commands::fail(&e);
    }
}

/// [`run`] on a rank that is not 0.
fn follow(args: &Args, start: Option<Start>) -> anyhow::Result<u8> {
    let Some(start) = start.filter(|_| !args.general.dryrun && !args.variant.list_config_variants) else {
        return Ok(0);
    };
    let alone = ranks::leave_signals()?;
    ranks::check_options(args)?;
    let catalogue = Catalogue::load(args.mbperf.recipes_dir.as_deref())?;
    let mut resolved = overrides::resolve(args, &catalogue, &|name| std::env::var(name).ok())?;
    ranks::enter(&mut resolved.config, &start)?;
    resolved.require_built()?;
    let on_gpu = choose_device(args)?;
    if !on_gpu && !args.mbperf.full_size {
        shrink::shrink(&mut resolved.config, given(args));
    }
    ranks::serve(&resolved.config, args, &start, on_gpu, &alone)
}

/// # Errors
/// Another order is allowed to kernels that have one (exit 2).
fn one_order(args: &Args) -> anyhow::Result<()> {
    let own = &args.mbperf;
    if own.attention_backend == AttentionKernels::Own && !own.attention_deterministic {
        return Err(usage(
            "--attention_deterministic false with --attention_backend own: mbperf's own kernels add in one order, it would \
             change nothing; leave one of the two out",
        ));
    }
    Ok(())
}

/// What a command line asks for that no run can give, and files that it may not write; nothing is touched yet.
fn check(resolved: &Resolved, args: &Args) -> anyhow::Result<()> {
    options(resolved, args, false).check().map_err(|e| usage(&e))?;
    beside::limit(args)?;
    faults(args)?;
    check_spin(args, args.mbperf.device != DeviceChoice::Cpu)?;
    one_order(args)?;
    HostModel::load(&args.mbperf.host_model)?;
    let target = target(resolved, args);
    if target.file().is_none() && args.mbperf.format == Format::Json && !args.general.dryrun {
        return Err(usage(
            "-o - puts CSV on standard output, where --format json goes too: leave one of them out",
        ));
    }
    if args.mbperf.resume && target.file().is_none() {
        return Err(usage("--resume needs a file to resume: give -o FILE instead of -o -"));
    }
    files::paths(args, &target).check().map_err(|e| usage(&e))?;
    Writer::judge(&target, args.mbperf.csv_dialect, args.mbperf.profile)?;
    // After what the run refuses too: it says the same.
    if args.general.dryrun && args.mbperf.xlsx.is_some() {
        return Err(usage("--dryrun runs nothing that --xlsx could hold: leave one of the two out"));
    }
    let Some(dir) = &args.mbperf.dump else { return Ok(()) };
    file::check_folder(dir).map_err(|e| {
        usage(&format!("--dump: cannot write to {}: {e}; choose another folder for --dump", dir.display()))
    })
}

/// A fault that has just happened and shows in no result must not be taken for one that was found harmless.
fn say_unseen(fault: &Inject, outcome: &measure::Outcome) {
    if fault.kind == Kind::WrongResult && outcome.status.exit_code() == 0 {
        let why = match &outcome.final_check {
            Some(FinalCheck::Skipped(reason)) => format!("the final check was left out: {reason}"),
            _ => "nothing is compared after that phase".into(),
        };
        complain(&format!("--inject {fault} happened and nothing saw it: {why}"));
    }
}

/// Starts a thread; what could keep it from starting is told in one line.
fn thread(name: &str, body: impl FnOnce() + Send + 'static) -> anyhow::Result<()> {
    let started = std::thread::Builder::new().name(name.into()).spawn(body);
    started.map(drop).map_err(|e| threads::none(&format!("the thread {name:?}"), &e))
}

/// `--resume`: the repetitions that the output file lacks.
fn lacking(args: &Args, facts: &RunFacts, options: &Options, writer: &Writer) -> anyhow::Result<Vec<u32>> {
    let wanted = 1..=args.mbperf.repeat;
    let Some(path) = writer.path() else { return Ok(wanted.collect()) };
    let rows = Row::without_outcome(facts, options, "skipped", "");
    // Figures that a row of the same configuration need not have.
    let mut filled = vec!["step_time_ms_median"];
    if rows.len() > 1 {
        filled.push("digest_match");
    }
    if facts.host_model != "bare" {
        filled.push("step_time_ms_modelled_median");
    }
    if args.mbperf.extrapolate && facts.num_microbatches < facts.num_microbatches_recipe {
        filled.push("step_time_ms_extrapolated");
    }
    let done = sweep::already_run(path, &rows, sweep::Asked { filled: &filled, strict: args.mbperf.strict })?;
    let lacking: Vec<u32> = wanted.filter(|n| !done.iter().any(|d| d.repetition == *n)).collect();
    let held = args.mbperf.repeat - lacking.len() as u32;
    match done.last() {
        Some(sweep::Done { run_id, rows, .. }) if lacking.is_empty() => {
            writer.found(rows.clone());
            say(
                args,
                &format!(
                    "--resume: {} holds this run already ({run_id}); it is not run again",
                    path.display()
                ),
            );
            not_made(args);
            if args.mbperf.format == Format::Json {
                writeln!(std::io::stdout().lock(), "{}", json!({ "rows": [] }))?;
            }
        }
        _ if held > 0 => {
            let wanted = args.mbperf.repeat;
            say(args, &format!("--resume: {} holds {held} of {wanted} repetitions already", path.display()));
        }
        _ => {}
    }
    Ok(lacking)
}

/// What a run that `--resume` leaves out would have made beside its rows.
fn not_made(args: &Args) {
    let own = &args.mbperf;
    let others = [("--profile", own.profile), ("--dump", own.dump.is_some()), ("--xlsx", own.xlsx.is_some())];
    for (option, _) in others.iter().filter(|(_, asked)| *asked) {
        complain(&format!("{option} has nothing of this run: it was not run again (leave out --resume)"));
    }
}

fn usage(message: &str) -> anyhow::Error {
    Usage(message.to_owned()).into()
}

/// `--save_config_filepath`: the effective configuration, before a CPU run makes it small.
fn save_config(config: &RunConfig, args: &Args) -> anyhow::Result<()> {
    let Some(path) = &args.logging.save_config_filepath else { return Ok(()) };
    file::replace(path, serde_json::to_string_pretty(config)?.as_bytes()).map_err(|e| {
        usage(&format!("--save_config_filepath: cannot write {}: {e}; choose another file", path.display()))
    })
}

fn conclude(
    args: &Args,
    rows: &[Row],
    profiles: &[Profile],
    outcome: &measure::Outcome,
    reason: &str,
    writer: &Writer,
) -> anyhow::Result<u8> {
    if args.mbperf.format == Format::Json {
        let rows: Vec<Value> = rows.iter().map(crate::report::columns::json).collect();
        let mut said = json!({ "rows": rows });
        if !profiles.is_empty() {
            said["profiles"] = profiles.iter().map(crate::profile::json).collect();
        }
        writeln!(std::io::stdout().lock(), "{said}")?;
    } else {
        say(args, summary::render(rows).trim_end());
    }
    if let Some(path) = writer.path().filter(|_| !rows.is_empty()) {
        say(args, &format!("rows: {}", path.display()));
    }
    match &outcome.status {
        Status::Interrupted => complain("interrupted; finished rows stay"),
        Status::Failed(_) => complain(reason),
        Status::Ok => {}
    }
    let mut disturbances = outcome.disturbances();
    if rows.iter().any(|r| r.facts.device == "cpu") {
        // A CPU's rows have no verdict, however long it runs.
        disturbances.retain(|d| !d.starts_with(measure::outcome::UNDECIDED));
        if args.mbperf.device == DeviceChoice::Auto {
            disturbances
                .insert(0, "no GPU was found and the CPU ran in its place (--device cpu if so meant)".into());
        }
    }
    if args.mbperf.strict && outcome.status.exit_code() == 0 && !disturbances.is_empty() {
        complain(&format!("--strict: {}", disturbances.join("; ")));
        return Ok(1);
    }
    Ok(outcome.status.exit_code())
}

fn say(args: &Args, line: &str) {
    if !args.mbperf.quiet {
        commands::say(line);
    }
}

fn say_notices(resolved: &Resolved, args: &Args) {
    for n in &resolved.notices {
        say(args, &format!("notice {}: {}", n.id, n.message));
    }
}

/// `mbperf ops`: the ops of a run's step, each alone.
///
/// # Errors
/// As [`run`]; a GPU is needed.
pub fn time_ops(args: &Args, only: Option<&str>, out: &mut dyn Write) -> anyhow::Result<()> {
    commands::folders(args.mbperf.cuda_path.as_deref(), args.mbperf.kernel_cache.as_deref())?;
    // A signal ends it at once: nothing is open that it could spoil.
    let _interrupt = Interrupt::watch()?;
    crate::bench_ops::options::check(args)?;
    one_order(args)?;
    let (plan, options) = ops_of(args)?;
    let ops = crate::bench_ops::chosen(&plan.eager.program, only)?;
    if args.mbperf.device == DeviceChoice::Cpu {
        return Err(usage("ops: --device cpu: kernels are timed, and the CPU has none; leave it out"));
    }
    open::need_gpu(args, "`mbperf ops`")?;
    crate::bench_ops::run(args, ops, &options, out)
}

/// The step whose ops are timed, and how the GPU is opened for them.
pub(crate) fn ops_of(args: &Args) -> anyhow::Result<(RunPlan, CudaOptions)> {
    let catalogue = Catalogue::load(args.mbperf.recipes_dir.as_deref())?;
    let resolved = overrides::resolve(args, &catalogue, &|name| std::env::var(name).ok())?;
    resolved.require_built()?;
    Ok((plan(&resolved.config, false, args.mbperf.comm_model)?, cuda_options(args)))
}

/// Share, program and both arms.
fn plan(cfg: &RunConfig, keep_routing: bool, comm: CommModel) -> anyhow::Result<RunPlan> {
    let share = RankShare::of(cfg)?;
    let mut program: Program = workloads::build(cfg, &share)?;
    if keep_routing {
        dump::keep_routing(&mut program);
    }
    hold(&mut program, comm);
    Ok(capture::plan(program, &cfg.graph, cfg.seed)?)
}
