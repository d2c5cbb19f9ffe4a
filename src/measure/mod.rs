//! Measuring: equality of the arms first, then blocks in ABBA order, an interval and a verdict.
//!
//! Knows the [`Executor`] alone: neither kernels nor recipes. Statistics rest on steps of phase `steady`.

mod blocks;
mod equality;
mod in_turn;
mod long;
pub mod options;
pub mod outcome;
pub mod progress;
mod session;
pub mod stats;
mod timed;
pub mod verdict;

#[cfg(test)]
mod tests;

pub use in_turn::in_turn;
pub use options::Options;
pub use outcome::{ArmResult, NO_DEVICE, Outcome, Status, StepRecord, exit_code};
pub use progress::{Hooks, Progress, Silent, StepSink, Update};
pub use verdict::{MIN_PAIRS, Verdict};

use crate::device::record::Recorded;
use crate::device::{Arm, DeviceError, Executor, GraphCost, Phase};
use outcome::{Equality, FinalCheck, Pacing, Stopped, split, summarise_health};
use session::{Session, Stop};

/// What is known so far; survives a failure.
#[derive(Default)]
struct Found {
    cost: Option<GraphCost>,
    equality: Option<Equality>,
    unequal: Option<String>,
    first_replay_ms: Option<f64>,
    stopped: Option<Stopped>,
    /// Wall time of the timed part and the final check.
    timed_ms: f64,
    final_check: Option<FinalCheck>,
    busy: Vec<Result<f64, String>>,
    profiles: Vec<(Arm, Result<Recorded, String>)>,
    memory_used_mib: Option<f64>,
    /// What the only side left before timing.
    left: Option<equality::Trace>,
}

/// Measures one program. Graphs are destroyed when it returns, however it ends; how it ended is in
/// [`Outcome::status`]. `options` must have passed [`Options::check`].
pub fn run<'a>(executor: &'a mut dyn Executor, options: &Options, hooks: Hooks<'a>) -> Outcome {
    traced(executor, options, hooks).0
}

/// [`run`], and what the only side left before timing.
fn traced<'a>(
    executor: &'a mut dyn Executor,
    options: &Options,
    hooks: Hooks<'a>,
) -> (Outcome, Option<equality::Trace>) {
    let mut session = Session::new(executor, hooks, options.samplers);
    let mut found = Found::default();
    let run = measure(&mut session, options, &mut found);
    let closed = session.close();
    let status = match run.and(closed) {
        Ok(()) => Status::Ok,
        Err(Stop::Interrupted) => Status::Interrupted,
        Err(Stop::Failed(failure)) => Status::Failed(failure),
    };
    let left = found.left.take();
    (conclude(session, options, found, status), left)
}

fn measure(session: &mut Session, options: &Options, found: &mut Found) -> Result<(), Stop> {
    options.check().map_err(DeviceError::internal)?;
    let proof = equality::check(session, options, &mut found.cost)?;
    (found.equality, found.unequal) = (proof.equality.clone(), proof.unequal.clone());
    found.left = options.alone.is_some().then(|| proof.eager.clone());
    found.first_replay_ms = proof.first_replay_ms;
    let again = match session.executor.info().unordered {
        true => Err(equality::UNORDERED.to_owned()),
        false => equality::final_ms(options, &proof),
    };
    let begun = session.executor.now_ms();
    let reserve_ms = again.as_ref().map_or(0.0, |ms| *ms);
    found.stopped = Some(blocks::time(session, options, &proof.step_ms, reserve_ms)?);
    check_phases(session)?;
    found.memory_used_mib = session.executor.memory_used_mib();
    if options.sides().len() == 2 {
        found.final_check = Some(match again {
            Ok(_) => equality::check_again(session, options, &proof)?,
            Err(reason) => FinalCheck::Skipped(reason),
        });
    }
    found.timed_ms = session.executor.now_ms() - begun;
    if options.busy || options.profile {
        session.hooks.progress.stage("profiling pass");
    }
    if options.busy {
        // Before the records of single kernels, which slow the host down further.
        for arm in options.sides() {
            session.check_interrupt()?;
            found.busy.push(session.executor.busy_ms(arm));
        }
    }
    if options.profile {
        let mut arms = options.sides();
        arms.dedup();
        for arm in arms {
            session.check_interrupt()?;
            found.profiles.push((arm, session.executor.profile(arm)));
        }
    }
    Ok(())
}

/// Every step behind a statistic is `steady`, and every steady step is behind one.
fn check_phases(session: &Session) -> Result<(), DeviceError> {
    let counted: usize = session.blocks.iter().map(|b| b.steady_steps).sum();
    let steady = session.steps.iter().filter(|s| s.phase == Phase::Steady).count();
    if counted == steady && steady > 0 {
        return Ok(());
    }
    Err(DeviceError::internal(format!("{counted} steps were counted, {steady} were steady")))
}

/// Figures of one side from its steady steps and blocks.
fn arm_result(session: &Session, options: &Options, found: &Found, side: usize, arm: Arm) -> ArmResult {
    let steady = |pacing| {
        session.steps.iter().filter(move |s| s.side == side && s.phase == Phase::Steady && s.pacing == pacing)
    };
    let of =
        |pacing, pick: fn(&StepRecord) -> Option<f64>| steady(pacing).filter_map(pick).collect::<Vec<_>>();
    let median = |pacing, pick| stats::median(&of(pacing, pick));
    let wall = of(Pacing::RunAhead, |s| Some(s.wall_ms));
    let blocks: Vec<_> =
        session.blocks.iter().filter(|b| b.side == side && b.pacing == Pacing::RunAhead).collect();
    let block_medians: Vec<f64> = blocks.iter().map(|b| b.wall_ms_median).collect();
    let half_changes: Vec<f64> = blocks.iter().filter_map(|b| b.half_change).collect();
    let step_time_ms = stats::median(&wall);
    let (rank_step_time_ms, rank_skew_ms) = rank_figures(session, side).unzip();
    let last = session.steps.iter().rev().find(|s| s.side == side && s.phase != Phase::FinalCheck);
    let busy = found.busy.get(side);
    ArmResult {
        side,
        arm,
        steps_steady: wall.len(),
        blocks: blocks.len(),
        step_time_ms,
        rank_step_time_ms,
        rank_skew_ms,
        // Blocks give the interval, steps the median: the interval is widened if need be to hold it.
        step_time_ms_ci95: stats::median_interval(&block_medians)
            .zip(step_time_ms)
            .map(|((low, high), middle)| (low.min(middle), high.max(middle))),
        step_time_ms_p05: stats::percentile(&wall, 0.05),
        step_time_ms_p95: stats::percentile(&wall, 0.95),
        host_submit_ms: median(Pacing::RunAhead, |s| Some(s.submit_ms)),
        host_wait_ms: median(Pacing::RunAhead, |s| Some(s.wait_ms)),
        device_span_ms: median(Pacing::RunAhead, |s| s.device_span_ms),
        steps_sync: steady(Pacing::Sync).count(),
        step_time_ms_sync: median(Pacing::Sync, |s| Some(s.wall_ms)),
        host_submit_ms_sync: median(Pacing::Sync, |s| Some(s.submit_ms)),
        device_span_ms_sync: median(Pacing::Sync, |s| s.device_span_ms),
        host_issue_ms: median(Pacing::Drained, |s| Some(s.submit_ms)),
        step_time_ms_modelled: median(Pacing::Modelled, |s| Some(s.wall_ms)),
        host_ms_modelled: median(Pacing::Modelled, |s| Some(s.submit_ms + s.wait_ms + s.modelled_ms)),
        steps_modelled: steady(Pacing::Modelled).count(),
        // Times of the CPU device are the machine's whole load.
        disturbed_fraction: stats::percentile(&wall, 0.05)
            .filter(|_| session.executor.info().device != "cpu")
            .map(|quiet| {
                let far = wall.iter().filter(|ms| **ms > outcome::FAR_LONGER * quiet).count();
                far as f64 / wall.len() as f64
            }),
        device_busy_ms: busy.and_then(|b| b.as_ref().ok()).copied(),
        busy_note: match busy {
            Some(found) => found.as_ref().err().cloned(),
            None if options.busy => None,
            None if session.executor.info().device == "cpu" => Some("a CPU has no profiling pass".into()),
            None => Some(
                "no profiling pass: it is made in the last repetition, and with --no_profile or --no_samplers in none"
                    .into(),
            ),
        },
        launches_per_step: session.executor.launches_per_step(arm),
        planned_bytes: session.executor.planned_bytes(arm),
        loss_last: last.and_then(|s| s.loss),
        grad_norm_last: last.and_then(|s| s.grad_norm),
        health: summarise_health(blocks.iter().map(|b| &b.health)),
        steady: verdict::steady_state(&block_medians, &half_changes, options.margin),
    }
}

/// Smallest and largest median of a rank, and the median skew of a step, over the steady steps of a side.
fn rank_figures(session: &Session, side: usize) -> Option<((f64, f64), f64)> {
    let counts = |s: &StepRecord| s.side == side && s.phase == Phase::Steady && s.pacing == Pacing::RunAhead;
    let of: Vec<Vec<f64>> = session
        .steps
        .iter()
        .zip(&session.of_ranks)
        .filter(|(s, _)| counts(s))
        .map(|(_, ranks)| ranks.iter().map(|r| r.wall_ms).collect())
        .collect();
    let ends = |all: &[f64]| {
        let low = all.iter().copied().fold(f64::INFINITY, f64::min);
        (low, all.iter().copied().fold(f64::NEG_INFINITY, f64::max))
    };
    let ranks = of.first()?.len();
    let medians: Vec<f64> =
        (0..ranks).filter_map(|r| stats::median(&of.iter().map(|s| s[r]).collect::<Vec<_>>())).collect();
    let skews: Vec<f64> = of.iter().map(|s| ends(s)).map(|(low, high)| high - low).collect();
    Some((ends(&medians), stats::median(&skews)?))
}

fn conclude(mut session: Session, options: &Options, found: Found, status: Status) -> Outcome {
    let arms: Vec<ArmResult> = options
        .sides()
        .into_iter()
        .enumerate()
        .map(|(side, arm)| arm_result(&session, options, &found, side, arm))
        .collect();
    // Times of unequal arms are no ratio.
    let ok = matches!(status, Status::Ok) && found.unequal.is_none();
    let pairs = blocks::pairs(&session.blocks, Pacing::RunAhead);
    let ratio = verdict::log_ratio(&pairs).filter(|_| ok).map(|i| split(i.map(f64::exp)));
    let speedup = ratio.map(|(value, _)| value);
    let speedup_ci95 = ratio.map(|(_, ci95)| ci95).filter(|_| pairs.len() >= MIN_PAIRS);
    let clocks: Vec<f64> = arms.iter().filter_map(|a| a.health.sm_clock_mhz_median).collect();
    // Steps in turns have readings in common: they tell of no difference between the arms.
    let in_turns = session.blocks.iter().any(|b| b.log_ratio.is_some());
    let speedup_cycles = match clocks[..] {
        _ if in_turns => None,
        [a, b] if b > 0.0 => speedup.map(|s| s * a / b),
        _ => None,
    };
    let verdict = (ok && arms.len() == 2).then(|| verdict::judge(speedup_ci95, options.margin));
    let saved_ms = match (&arms[..], speedup_ci95) {
        ([a, b], Some((low, _))) if low > 1.0 && options.aa.is_none() => a.step_time_ms.zip(b.step_time_ms),
        _ => None,
    };
    let break_even_steps = found.cost.as_ref().zip(saved_ms).and_then(|(cost, (a, b))| {
        verdict::break_even(cost.capture_ms + cost.instantiate_ms + cost.upload_ms, a - b)
    });
    let mut notices = notices(&arms, pairs.len(), found.stopped);
    if options.max_steps.is_none()
        && options.longest_time_s.is_some()
        && found.timed_ms > options.max_time_s * 1e3
    {
        notices.push(format!(
            "timing took {:.1} s in place of {}: steps are long, and an interval needs {MIN_PAIRS} pairs of blocks; \
             --max_time sets a fixed time",
            found.timed_ms / 1e3,
            options.max_time_s
        ));
    }
    if found.stopped.is_some() && session.steps.iter().all(|s| s.phase != Phase::Switch) {
        notices.push(
            "-ms leaves room for no step around the steady ones: each was waited for, as in the _sync columns; \
             raise -ms"
                .into(),
        );
    }
    let modelled = blocks::pairs(&session.blocks, Pacing::Modelled);
    let modelled_ratio = verdict::log_ratio(&modelled).filter(|_| ok).map(|i| split(i.map(f64::exp)));
    let sync = verdict::log_ratio(&blocks::pairs(&session.blocks, Pacing::Sync)).filter(|_| ok);
    Outcome {
        status,
        arms,
        speedup,
        speedup_ci95,
        speedup_cycles,
        speedup_sync: sync.map(|i| i.value.exp()),
        speedup_modelled: modelled_ratio.map(|(value, _)| value),
        speedup_modelled_ci95: modelled_ratio.map(|(_, ci95)| ci95).filter(|_| modelled.len() >= MIN_PAIRS),
        pairs_modelled: modelled.len(),
        memory_used_mib: found.memory_used_mib,
        pairs: pairs.len(),
        verdict,
        margin: options.margin,
        stopped: found.stopped,
        equality: found.equality,
        unequal: found.unequal,
        final_check: found.final_check,
        graph_cost: found.cost,
        first_replay_ms: found.first_replay_ms,
        break_even_steps,
        blocks: std::mem::take(&mut session.blocks),
        steps: std::mem::take(&mut session.steps),
        profiles: found.profiles,
        in_turn: false,
        notices,
    }
}

/// SM clocks of the arms that differ by more than this make the time ratio unlike the cycle ratio.
const CLOCK_DIFFERENCE: f64 = 0.01;

fn notices(arms: &[ArmResult], pairs: usize, stopped: Option<Stopped>) -> Vec<String> {
    let mut notices = Vec::new();
    if stopped.is_none() {
        return notices;
    }
    if arms.len() == 2 && pairs < MIN_PAIRS {
        let more = if stopped == Some(Stopped::MaxSteps) { "-ms" } else { "--max_time" };
        let found = match pairs {
            0 => "no pair of blocks was timed".to_owned(),
            1 => "one pair of blocks is too little".to_owned(),
            _ => format!("{pairs} pairs of blocks are too few"),
        };
        notices.push(format!("{found} for an interval ({MIN_PAIRS} are needed): raise {more}"));
    }
    for arm in arms {
        if let Some(reason) = arm.steady.reason.as_ref().filter(|_| arm.steady.reached == Some(false)) {
            notices.push(format!("{} arm: steady state not reached: {reason}", arm.arm));
        }
    }
    if let [Some(a), Some(b)] = arms.iter().map(|a| a.health.sm_clock_mhz_median).collect::<Vec<_>>()[..]
        && (a / b - 1.0).abs() > CLOCK_DIFFERENCE
    {
        notices
            .push(format!("the arms ran at different SM clocks ({a:.0} and {b:.0} MHz): see speedup_cycles"));
    }
    for arm in arms {
        if let Some(share) = arm.disturbed_fraction.filter(|s| *s > outcome::MAX_DISTURBED) {
            notices.push(format!(
                "{} arm: {:.0} % of the steps took over {:.0} % longer than the shortest: something else used this GPU",
                arm.arm,
                share * 100.0,
                (outcome::FAR_LONGER - 1.0) * 100.0
            ));
        }
    }
    let throttled = arms.iter().filter_map(|a| a.health.throttle_reasons.as_deref()).find(|r| !r.is_empty());
    if let Some(reasons) = throttled {
        notices.push(format!("clocks were held back: {reasons}"));
    }
    if let Some(others) = arms.iter().filter_map(|a| a.health.other_processes_max).max().filter(|n| *n > 0) {
        notices.push(format!("{others} other process(es) computed on this GPU"));
    }
    notices
}
