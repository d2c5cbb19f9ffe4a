//! The ways in which steps are timed: blocks of one arm, pairs of blocks in turns, and steps that are each waited for.

use super::outcome::{BlockRecord, Pacing, StepRecord};
use super::session::{Session, Step, Stop};
use super::stats;
use crate::device::{Arm, Phase};

/// What the steps of a block are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Brings clocks and caches to their working point: all steps are `warmup`.
    Settle,
    Timed,
}

impl Session<'_> {
    /// A block of steps that all count, for a `-ms` too short for the steps around them: there is no step to run
    /// ahead of, so each is waited for.
    pub fn lone_steps(&mut self, side: usize, arm: Arm, steps: usize, pacing: Pacing) -> Result<(), Stop> {
        let block = self.blocks_begun;
        self.blocks_begun += 1;
        let first = self.steps.len();
        self.enter(Phase::Steady);
        self.executor.begin_steps(arm, steps, false, true)?;
        self.whole(|s| {
            for _ in 0..steps {
                s.check_interrupt()?;
                s.push(Step { side, arm, block: Some(block), phase: Phase::Steady, pacing })?;
                s.pop()?;
            }
            Ok(())
        })?;
        let health = self.sample();
        self.slowest_of_ranks(first)?;
        let record = self.block_record(first, (block, side), pacing, health);
        self.blocks.push(record);
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
        let ahead = pacing.runs_ahead();
        let total = timed + if ahead { 2 } else { 1 };
        self.enter(if purpose == Purpose::Timed { Phase::Switch } else { Phase::Warmup });
        self.executor.begin_steps(arm, total, ahead, true)?;
        let health = self.whole(|s| {
            for i in 0..total {
                s.check_interrupt()?;
                let edge = i == 0 || i > timed;
                let phase = match purpose {
                    Purpose::Settle => Phase::Warmup,
                    Purpose::Timed if edge => Phase::Switch,
                    Purpose::Timed => Phase::Steady,
                };
                s.push(Step { side, arm, block: Some(number), phase, pacing })?;
                s.wait_behind(usize::from(ahead))?;
            }
            let health = s.sample();
            s.wait_behind(0)?;
            Ok(health)
        })?;
        self.slowest_of_ranks(first)?;
        if purpose == Purpose::Settle {
            let walls: Vec<f64> = self.steps[first + 1..=first + timed].iter().map(|s| s.wall_ms).collect();
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
    /// Both blocks hold the one reading of the card: it cannot tell steps a few milliseconds apart.
    pub fn pair(&mut self, order: [(usize, Arm); 2], timed: usize, pacing: Pacing) -> Result<(), Stop> {
        let number = self.blocks_begun;
        self.blocks_begun += order.len();
        let first = self.steps.len();
        let health = self.whole(|s| {
            for (at, phase) in turns(timed) {
                s.check_interrupt()?;
                let (side, arm) = order[at];
                s.push(Step { side, arm, block: Some(number + at), phase, pacing })?;
                s.wait_behind(1)?;
            }
            let health = s.sample();
            s.wait_behind(0)?;
            Ok(health)
        })?;
        let log_ratio = stats::median(&side_by_side(&self.steps[first..]));
        for (at, (side, _)) in order.into_iter().enumerate() {
            let block = self.block_record(first, (number + at, side), pacing, health.clone());
            self.blocks.push(BlockRecord { log_ratio, ..block });
        }
        self.flush()
    }

    /// Waits for steps until no more than `left` are in flight.
    fn wait_behind(&mut self, left: usize) -> Result<(), Stop> {
        while self.in_flight() > left {
            self.pop()?;
        }
        Ok(())
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
