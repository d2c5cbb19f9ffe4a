//! What a measurement hands to the report: rows' figures, every step, and how it ended.

use super::stats::Interval;
use super::verdict::{SteadyState, Verdict};
use crate::device::record::Recorded;
use crate::device::{Arm, DeviceError, GraphCost, Health, Phase};
use serde::Serialize;

/// How steps of a block follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pacing {
    /// Step i+1 is submitted before step i is waited for: as a training loop runs.
    RunAhead,
    /// Every step is waited for before the next is submitted.
    Sync,
    /// As `Sync`, with waits in the middle of a step too, so that the launch queue never fills.
    Drained,
    /// As `RunAhead`, with the host model's time on the issuing thread.
    Modelled,
}

impl Pacing {
    pub fn name(self) -> &'static str {
        match self {
            Pacing::RunAhead => "run_ahead",
            Pacing::Sync => "sync",
            Pacing::Drained => "drained",
            Pacing::Modelled => "modelled",
        }
    }

    /// Whether a step is submitted while the one before it runs.
    pub fn runs_ahead(self) -> bool {
        !matches!(self, Pacing::Sync | Pacing::Drained)
    }
}

/// One step that was run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepRecord {
    /// Counts all steps of the measurement.
    pub index: usize,
    /// 0 or 1: which side of the comparison (both sides can be one arm, `--aa`).
    pub side: usize,
    pub arm: Arm,
    /// Counts blocks in the order they were run; `None` in the equality check.
    pub block: Option<usize>,
    pub phase: Phase,
    pub pacing: Pacing,
    pub submit_ms: f64,
    pub wait_ms: f64,
    /// Spun for the host model.
    pub modelled_ms: f64,
    pub device_span_ms: Option<f64>,
    /// Since the step before was seen to be done, or since submission when none was in flight.
    pub wall_ms: f64,
    pub loss: Option<f32>,
    pub grad_norm: Option<f32>,
}

/// One block of steps of one arm.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BlockRecord {
    /// As its steps have it ([`StepRecord::block`]); blocks of settling count too.
    pub number: usize,
    pub side: usize,
    pub pacing: Pacing,
    /// Median wall time of its steady steps.
    pub wall_ms_median: f64,
    /// Relative difference of the second half's median to the first's; `None` under four steady steps.
    pub half_change: Option<f64>,
    pub steady_steps: usize,
    /// Interleaved with the pair's other block: median log-ratio (side 0 over side 1) of the steps taken side by side.
    pub log_ratio: Option<f64>,
    /// The card's state while the block's last step was running.
    pub health: Health,
}

/// Figures of one side. `None`: not measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ArmResult {
    pub side: usize,
    pub arm: Arm,
    pub steps_steady: usize,
    pub blocks: usize,
    /// Median wall time of steady steps with one step of run-ahead.
    pub step_time_ms: Option<f64>,
    /// Several ranks: the fastest and the slowest one's own median, and the median over steps of what the slowest took
    /// longer than the fastest. `step_time_ms` is of the slowest rank of each step.
    pub rank_step_time_ms: Option<(f64, f64)>,
    pub rank_skew_ms: Option<f64>,
    /// 95 % interval of that median, from the medians of blocks.
    pub step_time_ms_ci95: Option<(f64, f64)>,
    pub step_time_ms_p05: Option<f64>,
    pub step_time_ms_p95: Option<f64>,
    pub host_submit_ms: Option<f64>,
    pub host_wait_ms: Option<f64>,
    pub device_span_ms: Option<f64>,
    /// The same with every step synchronised.
    pub steps_sync: usize,
    pub step_time_ms_sync: Option<f64>,
    pub host_submit_ms_sync: Option<f64>,
    pub device_span_ms_sync: Option<f64>,
    /// Host time of issuing a step while the launch queue never fills.
    pub host_issue_ms: Option<f64>,
    /// Under the host model: wall time of a step, and the host's time of issuing it, all of it.
    pub step_time_ms_modelled: Option<f64>,
    pub host_ms_modelled: Option<f64>,
    pub steps_modelled: usize,
    /// Share of the steady steps that were far longer than the shortest (5th percentile); `None` where times mean nothing.
    pub disturbed_fraction: Option<f64>,
    pub device_busy_ms: Option<f64>,
    /// Why `device_busy_ms` is empty.
    pub busy_note: Option<String>,
    /// Device calls of one step: in the eager arm kernels, copies and memsets.
    pub launches_per_step: usize,
    /// Planned device memory.
    pub planned_bytes: u64,
    pub loss_last: Option<f32>,
    pub grad_norm_last: Option<f32>,
    pub health: HealthSummary,
    pub steady: SteadyState,
}

/// The card over the blocks of one side.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct HealthSummary {
    pub sm_clock_mhz_median: Option<f64>,
    pub temperature_c_max: Option<f64>,
    pub power_w_median: Option<f64>,
    pub power_limit_w: Option<f64>,
    /// All reasons that were seen, joined with `+`; empty text: read, and none.
    pub throttle_reasons: Option<String>,
    pub other_processes_max: Option<usize>,
}

/// Result of the equality check.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Equality {
    /// Steps of each arm.
    pub steps: usize,
    /// Buffers hashed.
    pub buffers: usize,
    /// Hash over all buffers of the first side, in order.
    pub digest: u64,
}

/// What became of the check after timing.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinalCheck {
    /// The arms left the same bits once more, over so many steps each.
    Equal { steps: usize },
    /// It was left out, with the reason.
    Skipped(String),
}

/// Why timing ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stopped {
    /// The interval is narrow enough.
    Precision,
    MaxTime,
    /// `-ms`.
    MaxSteps,
}

/// A failed measurement.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The steps file could not be written.
    #[error("could not write results: {0}")]
    Output(#[from] std::io::Error),
}

/// How a measurement ended.
#[derive(Debug)]
pub enum Status {
    Ok,
    /// SIGINT or SIGTERM; the figures cover the steps until then and make no row.
    Interrupted,
    Failed(Failure),
}

impl Status {
    /// The exit code that README.md lists.
    pub fn exit_code(&self) -> u8 {
        match self {
            Status::Ok => 0,
            Status::Interrupted => 130,
            Status::Failed(Failure::Device(error)) => exit_code(error),
            Status::Failed(Failure::Output(_)) => 1,
        }
    }

    /// Why it failed, as its rows tell it; empty otherwise.
    pub fn reason(&self) -> String {
        match self {
            Status::Failed(failure) => failure.to_string(),
            Status::Ok | Status::Interrupted => String::new(),
        }
    }
}

/// Exit code where there is no usable device, or a library that it needs is missing.
pub const NO_DEVICE: u8 = 3;

/// The exit code that a device error asks for.
pub fn exit_code(error: &DeviceError) -> u8 {
    match error {
        DeviceError::Unavailable(_) => NO_DEVICE,
        DeviceError::Capture { .. } => 4,
        DeviceError::OutOfMemory { .. } => 5,
        DeviceError::Unequal(_) => 6,
        DeviceError::Rank { code, .. } => *code,
        DeviceError::Driver { .. } | DeviceError::Invalid(_) | DeviceError::Internal(_) => 1,
    }
}

/// Everything that one measurement found.
#[derive(Debug)]
pub struct Outcome {
    pub status: Status,
    /// One or two sides; with `status` other than `Ok` their figures cover what was run.
    pub arms: Vec<ArmResult>,
    /// Time of side 0 over time of side 1 (eager over graph): above 1 the graph is faster. `None` with one
    /// side, without two pairs, or after a failure.
    pub speedup: Option<f64>,
    /// Its 95 % interval; `None` under [`super::MIN_PAIRS`] pairs.
    pub speedup_ci95: Option<(f64, f64)>,
    /// `speedup` times the ratio of SM clocks: what it would be in cycles. `None` when clocks are unknown.
    pub speedup_cycles: Option<f64>,
    /// The same ratio where every step is synchronised.
    pub speedup_sync: Option<f64>,
    /// The same ratio under the host model, its interval, and the pairs behind it.
    pub speedup_modelled: Option<f64>,
    pub speedup_modelled_ci95: Option<(f64, f64)>,
    pub pairs_modelled: usize,
    /// Device memory that the run held when timing ended, by the driver's figures: both arms and graphs.
    pub memory_used_mib: Option<f64>,
    /// Pairs of blocks behind `speedup`.
    pub pairs: usize,
    pub verdict: Option<Verdict>,
    pub margin: f64,
    pub stopped: Option<Stopped>,
    pub equality: Option<Equality>,
    /// The arms differ in bits, in words, where the device may add in any order: equal work is not shown, so that there
    /// are times and no speedup.
    pub unequal: Option<String>,
    /// `None`: nothing to compare, or the run did not come so far.
    pub final_check: Option<FinalCheck>,
    pub graph_cost: Option<GraphCost>,
    pub first_replay_ms: Option<f64>,
    /// Steps after which the one-off cost of the graphs is earned back; `None` unless the graph is faster.
    pub break_even_steps: Option<f64>,
    pub blocks: Vec<BlockRecord>,
    pub steps: Vec<StepRecord>,
    /// The arms did not fit in memory together and were timed one after the other: no speedup, no interval.
    pub in_turn: bool,
    /// One step of each arm, recorded kernel by kernel, or why it was not; empty unless asked for.
    pub profiles: Vec<(Arm, Result<Recorded, String>)>,
    /// What a reader must know to trust the figures, most important first.
    pub notices: Vec<String>,
}

impl Outcome {
    /// What `--strict` refuses: times that are unsteady or too few to tell, neighbours, throttling, no verdict.
    pub fn disturbances(&self) -> Vec<String> {
        let mut found = Vec::new();
        for arm in &self.arms {
            if let Some(reason) = arm.steady.reason.as_ref().filter(|_| arm.steady.reached == Some(false)) {
                found.push(format!("{} arm not steady: {reason}", arm.arm));
            }
            if let (None, Some(reason)) = (arm.steady.reached, &arm.steady.reason) {
                let more = match self.stopped {
                    Some(Stopped::MaxSteps) => "raise -ms, or leave it out",
                    _ => "raise --max_time",
                };
                found.push(format!("{} arm not known to be steady: {reason}; {more}", arm.arm));
            }
            if let Some(share) = arm.disturbed_fraction.filter(|s| *s > MAX_DISTURBED) {
                found.push(format!(
                    "{:.0} % of the {} arm's steps were far longer than the shortest: something else used the GPU",
                    share * 100.0,
                    arm.arm
                ));
            }
            if let Some(others) = arm.health.other_processes_max.filter(|n| *n > 0) {
                found.push(format!("{others} other process(es) computed on this GPU in the {} arm", arm.arm));
            }
            let held_back = |r: &&String| r.split('+').any(|r| !r.is_empty() && r != POWER_CAP);
            if let Some(reasons) = arm.health.throttle_reasons.as_ref().filter(held_back) {
                found.push(format!("clocks were held back in the {} arm: {reasons}", arm.arm));
            }
        }
        if self.verdict == Some(Verdict::Undecided) {
            found.push(match self.stopped {
                Some(Stopped::MaxSteps) => format!("{UNDECIDED}: raise -ms, or leave it out"),
                _ => format!("{UNDECIDED}: raise --max_time"),
            });
        }
        if self.unequal.is_some() {
            found.push("equal work is not shown: leave out --attention_deterministic false".into());
        }
        found.dedup();
        found
    }
}

/// No verdict where one was to be had.
pub const UNDECIDED: &str = "undecided";

/// A loaded card's ordinary state, which both arms meet; told, but no disturbance.
pub const POWER_CAP: &str = "sw_power_cap";

/// A step this much longer than its arm's 5th percentile did not run alone: the clock of an H200 at its power cap, alone,
/// makes steps up to 20 % longer (measured), one that shares the GPU takes half as long again at least.
pub(crate) const FAR_LONGER: f64 = 1.25;
/// More such steps than this are no hiccup: the machine is shared.
pub(crate) const MAX_DISTURBED: f64 = 0.05;

/// Folds the health of one side's blocks.
pub(super) fn summarise_health<'a>(blocks: impl Iterator<Item = &'a Health>) -> HealthSummary {
    let blocks: Vec<&Health> = blocks.collect();
    let values = |pick: fn(&Health) -> Option<f64>| blocks.iter().filter_map(|h| pick(h)).collect::<Vec<_>>();
    let mut reasons: Vec<&str> =
        blocks.iter().filter_map(|h| h.throttle_reasons.as_deref()).flat_map(|r| r.split('+')).collect();
    let read = !reasons.is_empty();
    reasons.retain(|r| !r.is_empty());
    reasons.sort_unstable();
    reasons.dedup();
    HealthSummary {
        sm_clock_mhz_median: super::stats::median(&values(|h| h.sm_clock_mhz)),
        temperature_c_max: values(|h| h.temperature_c).into_iter().reduce(f64::max),
        power_w_median: super::stats::median(&values(|h| h.power_w)),
        power_limit_w: values(|h| h.power_limit_w).into_iter().reduce(f64::min),
        throttle_reasons: read.then(|| reasons.join("+")),
        other_processes_max: blocks.iter().filter_map(|h| h.other_processes).max(),
    }
}

/// Splits an interval for the outcome.
pub(super) fn split(interval: Interval) -> (f64, (f64, f64)) {
    (interval.value, (interval.low, interval.high))
}
