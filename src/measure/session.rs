//! Runs single steps and blocks on an executor, and records them. Owns the clean-up.

use super::options::Samplers;
use super::outcome::{BlockRecord, Failure, Pacing, StepRecord};
use super::{Hooks, stats};
use crate::device::host::HostCosts;
use crate::device::{Arm, DeviceError, Executor, Finished, Health, Phase, Submitted};
use crate::ranks::control::RankStep;
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

/// What the steps of a block are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Brings clocks and caches to their working point: all steps are `warmup`.
    Settle,
    Timed,
}

/// A step in flight.
pub(super) struct Flight {
    submitted: Submitted,
    arm: Arm,
    side: usize,
    block: Option<usize>,
    phase: Phase,
    pacing: Pacing,
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
    /// Steps that the sink has.
    flushed: usize,
    /// Blocks begun, settling ones too.
    blocks_begun: usize,
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

    fn sample(&mut self) -> Health {
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
    fn slowest_of_ranks(&mut self, first: usize) -> Result<(), Stop> {
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

    fn submit(
        &mut self,
        side: usize,
        arm: Arm,
        block: Option<usize>,
        phase: Phase,
        pacing: Pacing,
        behind: bool,
    ) -> Result<Flight, Stop> {
        self.enter(phase);
        if self.spin_ms > 0.0 {
            self.executor.set_device_spin_ms(if side == 1 { self.spin_ms } else { 0.0 })?;
        }
        let submitted = self.executor.submit(arm)?;
        Ok(Flight { submitted, arm, side, block, phase, pacing, behind })
    }

    /// Waits for a step and records it; `since` is when its wall time began, as the host saw it.
    fn finish(&mut self, flight: Flight, since_ms: f64) -> Result<Finished, Stop> {
        let done = self.executor.wait(flight.submitted)?;
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
            modelled_ms: flight.submitted.modelled_ms,
            device_span_ms: done.device_span_ms,
            wall_ms: done.wall_ms(flight.pacing.runs_ahead(), flight.behind, since_ms),
            loss: done.loss,
            grad_norm: done.grad_norm,
        });
        check_result(&done, flight.arm, index)?;
        Ok(done)
    }

    /// One step, waited for. Returns what it left.
    pub fn single(&mut self, side: usize, arm: Arm, phase: Phase) -> Result<Finished, Stop> {
        self.check_interrupt()?;
        let first = self.steps.len();
        self.enter(phase);
        self.executor.begin_steps(arm, 1, false, true)?;
        let since = self.executor.now_ms();
        let flight = self.submit(side, arm, None, phase, Pacing::Sync, false)?;
        let done = self.finish(flight, since)?;
        self.slowest_of_ranks(first)?;
        Ok(done)
    }

    /// A block of steps that all count, for a `-ms` too short for the steps around them: there is no step to run
    /// ahead of, so each is waited for.
    pub fn lone_steps(&mut self, side: usize, arm: Arm, steps: usize, pacing: Pacing) -> Result<(), Stop> {
        let number = self.blocks_begun;
        self.blocks_begun += 1;
        let first = self.steps.len();
        self.enter(Phase::Steady);
        self.executor.begin_steps(arm, steps, false, true)?;
        for _ in 0..steps {
            if let Err(stop) = self.check_interrupt() {
                self.leave_block((first, self.blocks.len()));
                return Err(stop);
            }
            let since = self.executor.now_ms();
            let flight = self.submit(side, arm, Some(number), Phase::Steady, pacing, false)?;
            self.finish(flight, since)?;
        }
        let health = self.sample();
        self.slowest_of_ranks(first)?;
        let walls: Vec<f64> = self.steps[first..].iter().map(|s| s.wall_ms).collect();
        self.blocks.push(BlockRecord {
            number,
            side,
            pacing,
            wall_ms_median: stats::median(&walls).unwrap_or(f64::NAN),
            half_change: None,
            steady_steps: walls.len(),
            log_ratio: None,
            health,
        });
        self.flush()
    }

    /// One block of `timed` steps that count, between steps that do not. With run-ahead the first has no step in
    /// flight before it, and the last has none behind it; the card is read while that one runs.
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
        let total = timed + if pacing.runs_ahead() { 2 } else { 1 };
        self.enter(if purpose == Purpose::Timed { Phase::Switch } else { Phase::Warmup });
        self.executor.begin_steps(arm, total, pacing.runs_ahead(), true)?;
        let mut since = self.executor.now_ms();
        let mut ahead: Option<Flight> = None;
        for i in 0..total {
            if let Err(stop) = self.check_interrupt() {
                // What is in flight is finished first, so that it is recorded and nothing runs on.
                if let Some(flight) = ahead.take() {
                    self.finish(flight, since)?;
                }
                self.leave_block((first, self.blocks.len()));
                return Err(stop);
            }
            let edge = i == 0 || i > timed;
            let phase = match purpose {
                Purpose::Settle => Phase::Warmup,
                Purpose::Timed if edge => Phase::Switch,
                Purpose::Timed => Phase::Steady,
            };
            if !pacing.runs_ahead() {
                since = self.executor.now_ms();
            }
            let flight = self.submit(side, arm, Some(number), phase, pacing, ahead.is_some())?;
            // With run-ahead this is step i - 1.
            let due = if pacing.runs_ahead() { ahead.replace(flight) } else { Some(flight) };
            if let Some(due) = due {
                since = self.finish(due, since)?.done_at_ms;
            }
        }
        let health = self.sample();
        if let Some(last) = ahead {
            self.finish(last, since)?;
        }
        self.slowest_of_ranks(first)?;
        let block = &self.steps[first..];
        if purpose == Purpose::Settle {
            let walls: Vec<f64> = block[1..=timed].iter().map(|s| s.wall_ms).collect();
            self.flush()?;
            return Ok(stats::median(&walls).unwrap_or(f64::NAN));
        }
        let block = self.block_record(first, (number, side), pacing, health);
        let wall_ms_median = block.wall_ms_median;
        self.blocks.push(block);
        self.flush()?;
        Ok(wall_ms_median)
    }

    /// One block of each side, of `timed` steps that count, step by step in turn: AB, BA, AB, ... A power cap moves the
    /// clock by several percent within 50 ms (measured on an H200), which blocks one after the other see as a difference
    /// of the arms and neighbouring steps do not. A turn begins with a step that does not count, and runs ahead of the
    /// other side's last one: only for arms that the device limits, as a host that is behind would catch up in it.
    pub fn pair(&mut self, order: [(usize, Arm); 2], timed: usize, pacing: Pacing) -> Result<(), Stop> {
        let number = self.blocks_begun;
        self.blocks_begun += order.len();
        let first = self.steps.len();
        let mut ahead: Option<Flight> = None;
        let mut since = self.executor.now_ms();
        for (at, phase) in turns(timed) {
            if let Err(stop) = self.check_interrupt() {
                if let Some(flight) = ahead.take() {
                    self.finish(flight, since)?;
                }
                return Err(stop);
            }
            let (side, arm) = order[at];
            let flight = self.submit(side, arm, Some(number + at), phase, pacing, ahead.is_some())?;
            if let Some(due) = ahead.replace(flight) {
                since = self.finish(due, since)?.done_at_ms;
            }
        }
        let health = self.sample();
        if let Some(last) = ahead {
            self.finish(last, since)?;
        }
        let log_ratio = stats::median(&side_by_side(&self.steps[first..]));
        for (at, (side, _)) in order.into_iter().enumerate() {
            let block = self.block_record(first, (number + at, side), pacing, health.clone());
            self.blocks.push(BlockRecord { log_ratio, ..block });
        }
        self.flush()
    }

    /// The block that the steady steps of `side` from `first` on are.
    fn block_record(
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

    /// Blocks of one timed step of one arm, one after the other, after a first step that does not count; see
    /// [`super::long`]. `drain`: a last step that does not count runs ahead of the last timed one; otherwise that
    /// one is left in flight in `carry`, for the next run's first step to run ahead of.
    pub fn run_of_blocks(
        &mut self,
        carry: &mut Carry,
        side: usize,
        arm: Arm,
        blocks: usize,
        pacing: Pacing,
        drain: bool,
    ) -> Result<(), Stop> {
        if let Err(stop) = self.check_interrupt() {
            self.finish_carry(carry)?;
            return Err(stop);
        }
        let first = (self.steps.len(), self.blocks.len());
        let count = 1 + blocks + usize::from(drain);
        self.enter(Phase::Switch);
        self.executor.begin_steps(arm, count, true, drain)?;
        for i in 0..count {
            if let Err(stop) = self.check_interrupt() {
                if let Some((due, since)) = carry.take() {
                    self.finish_block_of_one(due, since)?;
                }
                self.leave_block(first);
                self.flush()?;
                return Err(stop);
            }
            let phase = if (1..=blocks).contains(&i) { Phase::Steady } else { Phase::Switch };
            let number = self.blocks_begun + i.clamp(1, blocks) - 1;
            let begun = self.executor.now_ms();
            let flight = self.submit(side, arm, Some(number), phase, pacing, carry.is_some())?;
            let since = match carry.take() {
                Some((due, since)) => self.finish_block_of_one(due, since)?,
                None => begun,
            };
            *carry = Some((flight, since));
        }
        self.blocks_begun += blocks;
        if let Some((last, since)) = carry.take_if(|_| drain) {
            self.finish_block_of_one(last, since)?;
        }
        self.lone_blocks_of_ranks(first)?;
        self.flush()
    }

    /// [`Self::slowest_of_ranks`], and the blocks of one step from there on by it.
    fn lone_blocks_of_ranks(&mut self, (step, block): (usize, usize)) -> Result<(), Stop> {
        self.slowest_of_ranks(step)?;
        let steady = self.steps[step..].iter().filter(|s| s.phase == Phase::Steady);
        self.blocks[block..].iter_mut().zip(steady).for_each(|(b, s)| b.wall_ms_median = s.wall_ms);
        Ok(())
    }

    /// Waits for what a run left in flight.
    pub fn finish_carry(&mut self, carry: &mut Carry) -> Result<(), Stop> {
        if let Some((due, since)) = carry.take() {
            let first = (self.steps.len(), self.blocks.len());
            self.executor.begin_steps(due.arm, 0, true, true)?;
            self.finish_block_of_one(due, since)?;
            self.lone_blocks_of_ranks(first)?;
        }
        self.flush()
    }

    /// Waits for a step that is a block of its own if it is steady. Returns when it was seen to be done.
    fn finish_block_of_one(&mut self, due: Flight, since_ms: f64) -> Result<f64, Stop> {
        let (side, pacing, steady) = (due.side, due.pacing, due.phase == Phase::Steady);
        let number = due.block;
        let health = if steady { self.sample() } else { Health::default() };
        let done = self.finish(due, since_ms)?;
        if let (true, Some(number)) = (steady, number) {
            let wall_ms_median = self.steps.last().map_or(f64::NAN, |s| s.wall_ms);
            self.blocks.push(BlockRecord {
                number,
                side,
                pacing,
                wall_ms_median,
                half_change: None,
                steady_steps: 1,
                log_ratio: None,
                health,
            });
        }
        Ok(done.done_at_ms)
    }
}

/// The steps of [`Session::pair`]: which of the two sides, and whether it counts. The last drains the queue.
fn turns(timed: usize) -> Vec<(usize, Phase)> {
    let mut steps = Vec::new();
    let mut side = None;
    for turn in (0..timed).flat_map(|round| if round % 2 == 0 { [0, 1] } else { [1, 0] }) {
        if side.replace(turn) != Some(turn) {
            steps.push((turn, Phase::Switch));
        }
        steps.push((turn, Phase::Steady));
    }
    steps.extend(side.map(|last| (last, Phase::Switch)));
    steps
}

/// Log-ratios (side 0 over side 1) of the rounds of [`turns`]: two steady steps, one of each side.
fn side_by_side(steps: &[StepRecord]) -> Vec<f64> {
    let steady: Vec<&StepRecord> = steps.iter().filter(|s| s.phase == Phase::Steady).collect();
    let ratio = |a: &StepRecord, b: &StepRecord| (a.wall_ms / b.wall_ms).ln();
    steady
        .chunks_exact(2)
        .map(|round| if round[0].side == 0 { ratio(round[0], round[1]) } else { ratio(round[1], round[0]) })
        .collect()
}

/// A step in flight and when its wall time began.
pub(super) type Carry = Option<(Flight, f64)>;

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
