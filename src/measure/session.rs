//! Runs single steps and blocks on an executor, and records them. Owns the clean-up.

use super::outcome::{BlockRecord, Failure, Pacing, StepRecord};
use super::{Hooks, stats};
use crate::device::{Arm, DeviceError, Executor, Finished, Phase, Submitted};
use std::sync::atomic::Ordering;

/// Why a measurement does not go on.
pub(super) enum Stop {
    Interrupted,
    Failed(Failure),
}

impl From<DeviceError> for Stop {
    fn from(error: DeviceError) -> Self {
        Stop::Failed(error.into())
    }
}

impl From<std::io::Error> for Stop {
    fn from(error: std::io::Error) -> Self {
        Stop::Failed(error.into())
    }
}

/// A wait blocked if it took more than this share of the step: far above what asking costs.
const BLOCKED: f64 = 0.01;
/// Share of a block that the device may still need after the last launch of a host-bound arm.
const NO_TAIL: f64 = 0.005;

/// What the steps of a block are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Brings clocks and caches to their working point: all steps are `warmup`.
    Settle,
    Timed,
}

/// A step in flight.
struct Flight {
    submitted: Submitted,
    arm: Arm,
    side: usize,
    block: Option<usize>,
    phase: Phase,
    pacing: Pacing,
}

/// One measurement in progress.
pub(super) struct Session<'a> {
    pub executor: &'a mut dyn Executor,
    pub hooks: Hooks<'a>,
    pub steps: Vec<StepRecord>,
    pub blocks: Vec<BlockRecord>,
    /// Steps that the sink has.
    flushed: usize,
    /// Blocks begun, settling ones too.
    blocks_begun: usize,
    phase: Option<Phase>,
    /// Sides whose waits never block: the host is the limit. `None`: no block yet.
    host_bound: [Option<bool>; 2],
    /// Timed run-ahead blocks of each side in which the queue never filled although the device is the limit.
    pub unfilled: [usize; 2],
    /// Graphs may exist: they are destroyed on every path, panics too.
    pub graphs: bool,
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if self.graphs {
            // Only on a panic: `close` has reported on every other path.
            let _ = self.executor.destroy_graphs();
        }
    }
}

impl<'a> Session<'a> {
    pub fn new(executor: &'a mut dyn Executor, hooks: Hooks<'a>) -> Self {
        Self {
            executor,
            hooks,
            steps: Vec::new(),
            blocks: Vec::new(),
            flushed: 0,
            blocks_begun: 0,
            phase: None,
            host_bound: [None; 2],
            unfilled: [0; 2],
            graphs: false,
        }
    }

    /// Destroys the graphs and hands the last steps to the sink.
    pub fn close(&mut self) -> Result<(), Stop> {
        let destroyed =
            if std::mem::take(&mut self.graphs) { self.executor.destroy_graphs() } else { Ok(()) };
        self.flush()?;
        Ok(destroyed?)
    }

    pub fn enter(&mut self, phase: Phase) {
        if self.phase != Some(phase) {
            self.phase = Some(phase);
            self.executor.set_phase(phase);
        }
    }

    /// Hands new steps to the sink.
    pub fn flush(&mut self) -> Result<(), Stop> {
        // Even if writing fails these are not offered again: a sink that failed half-way must not repeat.
        let from = std::mem::replace(&mut self.flushed, self.steps.len());
        if from < self.steps.len() {
            self.hooks.sink.steps(&self.steps[from..])?;
        }
        Ok(())
    }

    pub fn check_interrupt(&self) -> Result<(), Stop> {
        if self.hooks.interrupt.load(Ordering::Relaxed) { Err(Stop::Interrupted) } else { Ok(()) }
    }

    fn submit(
        &mut self,
        side: usize,
        arm: Arm,
        block: Option<usize>,
        phase: Phase,
        pacing: Pacing,
    ) -> Result<Flight, Stop> {
        self.enter(phase);
        let submitted = self.executor.submit(arm)?;
        Ok(Flight { submitted, arm, side, block, phase, pacing })
    }

    /// Waits for a step and records it; `since` is when its wall time began.
    fn finish(&mut self, flight: Flight, since_ms: f64) -> Result<(Finished, bool), Stop> {
        let waits_from = self.executor.now_ms();
        let done = self.executor.wait(flight.submitted)?;
        let blocked = done.done_at_ms - waits_from > BLOCKED * (done.done_at_ms - since_ms);
        let index = self.steps.len();
        self.steps.push(StepRecord {
            index,
            side: flight.side,
            arm: flight.arm,
            block: flight.block,
            phase: flight.phase,
            pacing: flight.pacing,
            submit_ms: flight.submitted.submit_ms,
            wait_ms: flight.submitted.wait_ms,
            device_span_ms: done.device_span_ms,
            wall_ms: done.done_at_ms - since_ms,
            loss: done.loss,
            grad_norm: done.grad_norm,
        });
        check_result(&done, flight.arm, index)?;
        Ok((done, blocked))
    }

    /// One step, waited for. Returns what it left.
    pub fn single(&mut self, side: usize, arm: Arm, phase: Phase) -> Result<Finished, Stop> {
        self.check_interrupt()?;
        let since = self.executor.now_ms();
        let flight = self.submit(side, arm, None, phase, Pacing::Sync)?;
        Ok(self.finish(flight, since)?.0)
    }

    /// A block of steps that all count, for a `-ms` too short for the steps around them: there is no step to run
    /// ahead of, so each is waited for.
    pub fn lone_steps(&mut self, side: usize, arm: Arm, steps: usize) -> Result<(), Stop> {
        let number = self.blocks_begun;
        self.blocks_begun += 1;
        let first = self.steps.len();
        for _ in 0..steps {
            self.check_interrupt()?;
            let since = self.executor.now_ms();
            let flight = self.submit(side, arm, Some(number), Phase::Steady, Pacing::RunAhead)?;
            self.finish(flight, since)?;
        }
        let health = self.executor.health();
        let walls: Vec<f64> = self.steps[first..].iter().map(|s| s.wall_ms).collect();
        self.blocks.push(BlockRecord {
            side,
            pacing: Pacing::RunAhead,
            wall_ms_median: stats::median(&walls).unwrap_or(f64::NAN),
            half_change: None,
            steady_steps: walls.len(),
            health,
        });
        self.flush()
    }

    /// One block of `timed` steps that count, between steps that do not. With run-ahead:
    ///
    /// - the first fills the queue. While submitting takes over half of the device's time, the end of a step
    ///   is seen late until a wait has blocked once; up to half of the timed steps are given to that, as
    ///   `switch`. Where the host is the limit no wait ever blocks, and there is nothing to fill.
    /// - the last drains it: where the host is the limit it is seen to be done at once. The card is read
    ///   while it runs.
    ///
    /// Returns the median wall time of the steps that count.
    pub fn block(
        &mut self,
        side: usize,
        arm: Arm,
        timed: usize,
        pacing: Pacing,
        purpose: Purpose,
    ) -> Result<f64, Stop> {
        let number = self.blocks_begun;
        self.blocks_begun += 1;
        let first = self.steps.len();
        let start = self.executor.now_ms();
        let total = timed + if pacing == Pacing::RunAhead { 2 } else { 1 };
        let fill = pacing == Pacing::RunAhead && self.host_bound[side] != Some(true);
        let mut since = start;
        let mut ahead: Option<Flight> = None;
        let mut full = false;
        let mut began_full = !fill;
        let mut first_steady = true;
        for i in 0..total {
            if let Err(stop) = self.check_interrupt() {
                // What is in flight is finished first, so that it is recorded and nothing runs on.
                if let Some(flight) = ahead.take() {
                    self.finish(flight, since)?;
                }
                return Err(stop);
            }
            let edge = i == 0 || i > timed;
            let phase = match purpose {
                Purpose::Settle => Phase::Warmup,
                Purpose::Timed if edge => Phase::Switch,
                Purpose::Timed => Phase::Steady,
            };
            if pacing == Pacing::Sync {
                since = self.executor.now_ms();
            }
            let flight = self.submit(side, arm, Some(number), phase, pacing)?;
            let due = match pacing {
                Pacing::Sync => Some(flight),
                Pacing::RunAhead => ahead.replace(flight),
            };
            if let Some(mut due) = due {
                // With run-ahead this is step i - 1.
                let filling = fill && !full && i > 1 && i - 1 <= timed / 2;
                if due.phase == Phase::Steady && filling {
                    due.phase = Phase::Switch;
                } else if due.phase == Phase::Steady && std::mem::take(&mut first_steady) {
                    // Only the first says so: one that fills up later has counted steps that were seen late.
                    began_full |= full;
                }
                let (done, blocked) = self.finish(due, since)?;
                since = done.done_at_ms;
                full |= blocked;
            }
        }
        let health = self.executor.health();
        if let Some(last) = ahead {
            let submitted = self.executor.now_ms();
            since = self.finish(last, since)?.0.done_at_ms;
            // A host that is the limit leaves the device little to do after the last launch.
            let tail = (since - submitted) / (since - start);
            let host_bound = !full && tail < NO_TAIL;
            began_full |= host_bound;
            self.host_bound[side] = Some(host_bound);
        }
        if purpose == Purpose::Timed && pacing == Pacing::RunAhead && !began_full {
            self.unfilled[side] += 1;
        }
        let block = &self.steps[first..];
        if purpose == Purpose::Settle {
            let walls: Vec<f64> = block[1..=timed].iter().map(|s| s.wall_ms).collect();
            self.flush()?;
            return Ok(stats::median(&walls).unwrap_or(f64::NAN));
        }
        let counted: Vec<f64> =
            block.iter().filter(|s| s.phase == Phase::Steady).map(|s| s.wall_ms).collect();
        let wall_ms_median = stats::median(&counted).unwrap_or(f64::NAN);
        let (early, late) = counted.split_at(counted.len() / 2);
        let half_change = match (stats::median(early), stats::median(late)) {
            (Some(a), Some(b)) if counted.len() >= 4 && a > 0.0 => Some(b / a - 1.0),
            _ => None,
        };
        let steady_steps = counted.len();
        self.blocks.push(BlockRecord { side, pacing, wall_ms_median, half_change, steady_steps, health });
        self.flush()?;
        Ok(wall_ms_median)
    }
}

/// A step whose result must not be used ends the run.
fn check_result(done: &Finished, arm: Arm, index: usize) -> Result<(), DeviceError> {
    let not_finite = [("loss", done.loss), ("gradient norm", done.grad_norm)]
        .into_iter()
        .find_map(|(what, value)| value.filter(|v| !v.is_finite()).map(|v| (what, v)));
    if let Some((what, value)) = not_finite {
        return Err(DeviceError::Invalid(format!(
            "{what} is {value} at step {index} ({arm} arm): equal values that are not finite prove nothing; \
             lower optimizer.lr, or check the recipe's initialisation"
        )));
    }
    match done.fault {
        Some(fault) => Err(DeviceError::Invalid(format!("step {index} ({arm} arm): {fault}"))),
        None => Ok(()),
    }
}
