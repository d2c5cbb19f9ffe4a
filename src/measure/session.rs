//! Runs single steps and blocks on an executor, and records them. Owns the clean-up.

use super::options::Samplers;
use super::outcome::{BlockRecord, Failure, Pacing, StepRecord};
use super::{Hooks, stats};
use crate::device::host::HostCosts;
use crate::device::{Arm, DeviceError, Executor, Finished, Health, Phase, Submitted};
use crate::ranks::control::RankStep;
use std::collections::VecDeque;
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

/// A step to run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub side: usize,
    pub arm: Arm,
    pub block: Option<usize>,
    pub phase: Phase,
    pub pacing: Pacing,
}

/// A step in flight.
struct Flight {
    step: Step,
    submitted: Submitted,
    /// When its wall time began, as the host saw it.
    since_ms: f64,
    /// Submitted while the step before was in flight: its wall time is from end to end on the device.
    behind: bool,
}

/// One measurement in progress.
pub(super) struct Session<'a> {
    pub executor: &'a mut dyn Executor,
    pub hooks: Hooks<'a>,
    pub steps: Vec<StepRecord>,
    pub blocks: Vec<BlockRecord>,
    /// What every rank saw of each step, in the order of `steps`; empty for one process.
    pub of_ranks: Vec<Vec<RankStep>>,
    /// Submitted and not waited for, oldest first: one in a run-ahead block, two between [`Session::push`] and
    /// [`Session::pop`].
    in_flight: VecDeque<Flight>,
    /// Steps that the sink has.
    flushed: usize,
    /// Blocks begun, settling ones too.
    pub blocks_begun: usize,
    phase: Option<Phase>,
    /// Spun on the device at the end of each step of side 1, in milliseconds.
    pub spin_ms: f64,
    samplers: Samplers,
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
    pub fn new(executor: &'a mut dyn Executor, hooks: Hooks<'a>, samplers: Samplers) -> Self {
        Self {
            executor,
            hooks,
            steps: Vec::new(),
            blocks: Vec::new(),
            of_ranks: Vec::new(),
            in_flight: VecDeque::new(),
            flushed: 0,
            blocks_begun: 0,
            phase: None,
            spin_ms: 0.0,
            samplers,
            graphs: false,
        }
    }

    /// Issuing takes the host model's time from now on, or no longer.
    pub fn model(&mut self, costs: Option<HostCosts>) -> Result<(), Stop> {
        Ok(self.executor.set_host_costs(costs)?)
    }

    pub fn sample(&mut self) -> Health {
        let due = match self.samplers {
            Samplers::EveryBlock => true,
            // Two blocks are a pair.
            Samplers::EverySecondPair => (self.blocks_begun / 2).is_multiple_of(2),
            Samplers::Off => false,
        };
        if due { self.executor.health() } else { Health::default() }
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
            if self.of_ranks.len() > from {
                self.hooks.sink.rank_steps(&self.steps[from..], &self.of_ranks[from..])?;
            }
        }
        Ok(())
    }

    /// Of several ranks only whole blocks stay: how the others saw the steps of one that is left is not known.
    fn leave_block(&mut self, (steps, blocks): (usize, usize)) {
        if self.executor.ranks() > 1 {
            self.steps.truncate(steps);
            self.blocks.truncate(blocks);
        }
    }

    /// Steps from `first` on as the slowest rank saw them; what each saw is kept. A step that is still in flight comes
    /// with the next call.
    pub fn slowest_of_ranks(&mut self, first: usize) -> Result<(), Stop> {
        let others = self.executor.of_other_ranks()?;
        let Some(seen) = others.iter().map(Vec::len).min() else { return Ok(()) };
        if others.iter().any(|o| o.len() != seen) || self.steps.len() != first + seen {
            return Err(DeviceError::internal(format!(
                "rank 0 finished {} steps, the others {seen}",
                self.steps.len() - first
            ))
            .into());
        }
        for (i, step) in self.steps[first..].iter_mut().enumerate() {
            let own = RankStep {
                submit_ms: step.submit_ms,
                wait_ms: step.wait_ms,
                device_span_ms: step.device_span_ms,
                wall_ms: step.wall_ms,
                loss: step.loss,
                grad_norm: step.grad_norm,
            };
            let all: Vec<RankStep> = std::iter::once(own).chain(others.iter().map(|o| o[i])).collect();
            step.wall_ms = all.iter().map(|s| s.wall_ms).fold(f64::NEG_INFINITY, f64::max);
            self.of_ranks.push(all);
        }
        Ok(())
    }

    pub fn check_interrupt(&self) -> Result<(), Stop> {
        if self.hooks.interrupt.load(Ordering::Relaxed) { Err(Stop::Interrupted) } else { Ok(()) }
    }

    /// Submits a step behind those in flight.
    pub fn push(&mut self, step: Step) -> Result<(), Stop> {
        let since_ms = self.executor.now_ms();
        self.enter(step.phase);
        if self.spin_ms > 0.0 {
            self.executor.set_device_spin_ms(if step.side == 1 { self.spin_ms } else { 0.0 })?;
        }
        let submitted = self.executor.submit(step.arm)?;
        let behind = !self.in_flight.is_empty();
        self.in_flight.push_back(Flight { step, submitted, since_ms, behind });
        Ok(())
    }

    /// Steps in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The step that [`Self::pop`] would wait for.
    pub fn oldest(&self) -> Option<Step> {
        self.in_flight.front().map(|f| f.step)
    }

    /// Waits for the oldest step in flight and records it.
    pub fn pop(&mut self) -> Result<Finished, Stop> {
        let Some(Flight { step, submitted, since_ms, behind }) = self.in_flight.pop_front() else {
            return Err(DeviceError::internal("no step is in flight").into());
        };
        let done = self.executor.wait(submitted)?;
        let index = self.steps.len();
        self.steps.push(StepRecord {
            index,
            side: step.side,
            arm: step.arm,
            block: step.block,
            phase: step.phase,
            pacing: step.pacing,
            submit_ms: submitted.submit_ms,
            wait_ms: submitted.wait_ms,
            modelled_ms: submitted.modelled_ms,
            device_span_ms: done.device_span_ms,
            wall_ms: done.wall_ms(step.pacing.runs_ahead(), behind, since_ms),
            loss: done.loss,
            grad_norm: done.grad_norm,
        });
        if let Some(next) = self.in_flight.front_mut() {
            next.since_ms = done.done_at_ms;
        }
        check_result(&done, step.arm, index)?;
        Ok(done)
    }

    /// Runs `steps`. However they end, nothing stays in flight that the next measurement of this executor would meet:
    /// if they end early, what is in flight is waited for and recorded, and of several ranks only whole blocks stay.
    pub fn whole<T>(&mut self, steps: impl FnOnce(&mut Self) -> Result<T, Stop>) -> Result<T, Stop> {
        let first = (self.steps.len(), self.blocks.len());
        let result = steps(self);
        if let Err(stop) = &result {
            // A step that waits for a rank that has failed does not end.
            if self.executor.ranks() > 1 && matches!(stop, Stop::Failed(_)) {
                self.in_flight.clear();
            }
            // The first error is the one to tell.
            while !self.in_flight.is_empty() {
                let _ = self.pop();
            }
            self.leave_block(first);
        }
        result
    }

    /// One step, waited for. Returns what it left.
    pub fn single(&mut self, side: usize, arm: Arm, phase: Phase) -> Result<Finished, Stop> {
        self.check_interrupt()?;
        let first = self.steps.len();
        self.enter(phase);
        self.executor.begin_steps(arm, 1, false, true)?;
        let done = self.whole(|s| {
            s.push(Step { side, arm, block: None, phase, pacing: Pacing::Sync })?;
            s.pop()
        })?;
        self.slowest_of_ranks(first)?;
        Ok(done)
    }

    /// The block that the steady steps of `side` from `first` on are.
    pub fn block_record(
        &self,
        first: usize,
        (number, side): (usize, usize),
        pacing: Pacing,
        health: Health,
    ) -> BlockRecord {
        let counts = |s: &&StepRecord| s.side == side && s.phase == Phase::Steady;
        let counted: Vec<f64> = self.steps[first..].iter().filter(counts).map(|s| s.wall_ms).collect();
        let wall_ms_median = stats::median(&counted).unwrap_or(f64::NAN);
        let (early, late) = counted.split_at(counted.len() / 2);
        let half_change = match (stats::median(early), stats::median(late)) {
            (Some(a), Some(b)) if counted.len() >= 4 && a > 0.0 => Some(b / a - 1.0),
            _ => None,
        };
        let steady_steps = counted.len();
        BlockRecord {
            number,
            side,
            pacing,
            wall_ms_median,
            half_change,
            steady_steps,
            log_ratio: None,
            health,
        }
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
