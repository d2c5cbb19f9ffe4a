//! What stands beside a run: the watchdog, and the programs that `--extrapolate` times.

use super::{open_device, plan, ranks, say};
use crate::args::Args;
use crate::commands::{Usage, complain};
use crate::device::DeviceError;
use crate::device::guard::{self, Beat};
use crate::extrapolate::{self, Extrapolation, Point};
use crate::measure::{self, Hooks, Options, Outcome, Status};
use crate::overrides::Resolved;
use crate::report::xlsx::Book;
use crate::report::{Row, RunFacts, Target, Terminal, Writer};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// `--watchdog`; zero: none.
///
/// # Errors
/// A negative time (exit 2).
pub(super) fn limit(args: &Args) -> anyhow::Result<Duration> {
    let seconds = args.mbperf.watchdog;
    if seconds < 0.0 {
        return Err(Usage(format!("--watchdog {seconds}: give seconds, or 0 for none")).into());
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// Watches every device call. A hung one cannot be taken back: the failed rows are written from the watching
/// thread, a sweep's table and a workbook with them, and the process ends.
pub(super) fn watchdog(
    args: &Args,
    facts: Arc<Mutex<RunFacts>>,
    options: Options,
    target: Target,
    book: Option<Arc<Mutex<Book>>>,
    several: bool,
) -> anyhow::Result<Beat> {
    let beat = Beat::default();
    let dialect = args.mbperf.csv_dialect;
    let (limit, more) = ranks::watchdog_limit(args, several)?;
    if limit.is_zero() {
        return Ok(beat);
    }
    let expired = move |phase| {
        let reason =
            if several { ranks::hang_message(0, phase, limit) } else { guard::hang_message(phase, limit) };
        if let Ok(facts) = facts.lock() {
            let rows = Row::without_outcome(&facts, &options, "failed", &reason);
            let written = Writer::open_in(&target, dialect).and_then(|mut writer| {
                book.into_iter().for_each(|book| writer.keep(book));
                writer.rows(&rows)
            });
            if let Err(e) = written {
                complain(&e.to_string());
            }
        }
        complain(&reason);
        // A sweep's table, a workbook: what was measured before is not lost with it.
        super::last::say(1);
        // Without the driver's own clean-up at exit, which would wait for the call that hangs.
        signal_hook::low_level::exit(1);
    };
    guard::watch(beat.clone(), limit + more, expired)
        .map_err(|e| super::threads::none("the watchdog", &e))?;
    Ok(beat)
}

/// Shares of `--max_time` with `--extrapolate`: each program beside the run's own, and that one.
const SIDE_SHARE: f64 = 0.25;

/// Step times by side of the programs of 1, 2 and 3 micro-batches but the run's own. `None`: not asked for.
pub(super) fn side_points(
    resolved: &Resolved,
    args: &Args,
    on_gpu: bool,
    options: &Options,
    beat: &Beat,
    interrupt: &AtomicBool,
    terminal: &mut Terminal,
) -> Result<Option<Vec<[Option<Point>; 2]>>, DeviceError> {
    struct NoSteps;
    impl measure::StepSink for NoSteps {
        fn steps(&mut self, _: &[measure::StepRecord]) -> std::io::Result<()> {
            Ok(())
        }
    }
    let own = resolved.config.batch.num_microbatches;
    let whole = resolved.config.batch.num_microbatches_recipe;
    if !args.mbperf.extrapolate {
        return Ok(None);
    }
    if own >= whole {
        say(
            args,
            &format!("--extrapolate: all {whole} micro-batches of the job are run: nothing to extrapolate"),
        );
        return Ok(None);
    }
    let internal = |e: anyhow::Error| DeviceError::internal(format!("--extrapolate: {e:#}"));
    let mut points = Vec::new();
    for count in extrapolate::COUNTS.into_iter().filter(|n| *n != own) {
        say(args, &format!("--extrapolate: a step of {count} micro-batches"));
        let mut cfg = resolved.config.clone();
        cfg.batch.num_microbatches = count;
        let plan = plan(&cfg, false, args.mbperf.comm_model).map_err(internal)?;
        let mut executor = open_device(&plan, args, on_gpu, None, beat.clone())?;
        let options = Options {
            max_time_s: options.max_time_s * SIDE_SHARE,
            longest_time_s: None,
            busy: false,
            profile: false,
            host_costs: None,
            ..options.clone()
        };
        let hooks = Hooks { interrupt, progress: &mut *terminal, sink: &mut NoSteps };
        let outcome = measure::run(&mut executor, &options, hooks);
        match outcome.status {
            Status::Failed(measure::outcome::Failure::Device(e)) => return Err(e),
            Status::Failed(e) => return Err(DeviceError::internal(e.to_string())),
            // The run's own measurement sees the flag too.
            Status::Interrupted => return Ok(None),
            Status::Ok => {
                let found = points_of(&outcome, count);
                if outcome.arms.iter().any(|a| found[a.side.min(1)].is_none()) {
                    let more = if options.max_steps.is_some() { "-ms" } else { "--max_time" };
                    say(args, &format!("--extrapolate: too few steps to know their spread: raise {more}"));
                }
                points.push(found);
            }
        }
    }
    Ok(Some(points))
}

/// A point by side. Without an interval (under six blocks) the range of the steps stands for it: far wider, never
/// narrower.
fn points_of(outcome: &Outcome, micro_batches: usize) -> [Option<Point>; 2] {
    [0, 1].map(|side| {
        let arm = outcome.arms.get(side)?;
        let range = arm.step_time_ms_p05.zip(arm.step_time_ms_p95).filter(|_| arm.steps_steady > 1);
        let (low, high) = arm.step_time_ms_ci95.or(range)?;
        Some(Point { micro_batches, step_time_ms: arm.step_time_ms?, half_width_ms: (high - low) / 2.0 })
    })
}

pub(super) fn extrapolation(
    resolved: &Resolved,
    beside: &[[Option<Point>; 2]],
    outcome: &Outcome,
) -> Extrapolation {
    let batch = &resolved.config.batch;
    let own = points_of(outcome, batch.num_microbatches);
    let of = |side: usize| -> Vec<Point> { beside.iter().chain([&own]).filter_map(|p| p[side]).collect() };
    let mut from: Vec<usize> = of(0).iter().map(|p| p.micro_batches).collect();
    from.sort_unstable();
    let to = batch.num_microbatches_recipe;
    Extrapolation { to, from, arms: [0, 1].map(|side| extrapolate::fit(&of(side), to)) }
}
