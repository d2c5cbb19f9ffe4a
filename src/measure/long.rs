//! Blocks of long steps. Where a step takes a good part of a second, a block of one timed step between two that
//! do not count costs three, and the default time gives too few pairs for an interval. Here, without touching
//! what a pair is (neighbouring steady steps of both arms, ABBA):
//!
//! - blocks of one arm that meet (B of AB, then B of BA) follow each other without steps between them: the arm
//!   does not change, so there is nothing to drop;
//! - where the device is the limit, the next arm's first step, which is dropped anyway, is the step that runs
//!   ahead of the last timed one: nothing is run only to drain the queue.
//!
//! A pair costs three steps of the mean length, or four where the host is the limit, in place of six.

use super::blocks::{Limit, interval, pairs, precise};
use super::options::LONG_STEP_MS;
use super::outcome::{Pacing, Stopped};
use super::progress::Update;
use super::session::{Session, Step, Stop};
use super::verdict::MIN_PAIRS;
use crate::device::{Arm, Health, Phase};

/// A host that needs under half of a step's time never is the limit. One that may be must not get ahead while the other
/// arm's last step runs: its first steps would take the device's time and not its own.
const DEVICE_BOUND: f64 = 0.5;

/// Whether these steps are timed this way: one is long, and one is enough for a block of the other.
pub(super) fn applies(step_ms: &[f64], min_block_ms: f64) -> bool {
    step_ms.len() == 2
        && step_ms.iter().all(|ms| *ms >= min_block_ms)
        && step_ms.iter().any(|ms| *ms >= LONG_STEP_MS)
}

/// Whether the host needs little of a step's time in every arm, by the last step that met an idle device: behind
/// another one the host may have waited in a full queue.
pub(super) fn device_bound(session: &Session, sides: &[Arm]) -> bool {
    sides.iter().all(|arm| {
        let last = session.steps.iter().rev().find(|s| s.arm == *arm && s.pacing == Pacing::Sync);
        last.is_some_and(|s| s.submit_ms + s.wait_ms + s.modelled_ms < DEVICE_BOUND * s.wall_ms)
    })
}

/// Pairs of blocks of one step until the interval is narrow or the limit is reached; one pair always.
pub(super) fn time(
    session: &mut Session,
    sides: &[Arm],
    pacing: Pacing,
    step_ms: &[f64],
    start_ms: f64,
    limit: Limit,
) -> Result<Stopped, Stop> {
    // Under a host model the host is the limit more often than not; draining is right for both.
    let chained = pacing == Pacing::RunAhead && device_bound(session, sides);
    let idle_steps = if chained { 1 } else { 2 };
    let mut step_ms = step_ms.to_vec();
    let mut run = 0;
    let stopped = loop {
        let side = run % 2;
        let cost = |side: usize, blocks: usize| (idle_steps + blocks) as f64 * step_ms[side];
        let in_flight = if chained && run > 0 { step_ms[1 - side] } else { 0.0 };
        let now = session.executor.now_ms() + in_flight;
        // A second block opens the next pair, which must fit too. After run r there are r pairs.
        let next_ms = cost(side, 2) + cost(1 - side, 1);
        let enough_ms: f64 = (run..MIN_PAIRS).map(|r| cost(r % 2, 2)).sum::<f64>() + cost(MIN_PAIRS % 2, 1);
        let goes_on = run == 0 || limit.holds(now, next_ms, (run < MIN_PAIRS).then_some(enough_ms));
        let blocks = if run > 0 && goes_on { 2 } else { 1 };
        session.run_of_blocks(side, sides[side], blocks, pacing, !chained)?;
        run += 1;
        if let Some(last) = session.blocks.iter().rev().find(|b| b.side == side && b.pacing == pacing) {
            step_ms[side] = last.wall_ms_median;
        }
        let found = pairs(&session.blocks, pacing).len();
        let judged = if found.is_multiple_of(2) { interval(&session.blocks, 2, pacing) } else { None };
        session.hooks.progress.update(&Update {
            elapsed_s: (session.executor.now_ms() - start_ms) / 1e3,
            max_time_s: (limit.shown(session.executor.now_ms()) - start_ms) / 1e3,
            pairs: found,
            half_width: judged.map(|i| i.half_width()),
            speedup: judged.map(|i| i.value.exp()),
        });
        if precise(found, judged) {
            break Stopped::Precision;
        }
        if !goes_on {
            break Stopped::MaxTime;
        }
    };
    session.finish_run()?;
    Ok(stopped)
}

impl Session<'_> {
    /// Blocks of one timed step of one arm, one after the other, after a first step that does not count. `drain`: a
    /// last step that does not count runs ahead of the last timed one; otherwise that one is left in flight, for the
    /// next run's first step to run ahead of.
    fn run_of_blocks(
        &mut self,
        side: usize,
        arm: Arm,
        blocks: usize,
        pacing: Pacing,
        drain: bool,
    ) -> Result<(), Stop> {
        if let Err(stop) = self.check_interrupt() {
            self.finish_run()?;
            return Err(stop);
        }
        let first = (self.steps.len(), self.blocks.len());
        let count = 1 + blocks + usize::from(drain);
        let opened = self.blocks_begun;
        self.blocks_begun += blocks;
        self.whole(|s| {
            s.enter(Phase::Switch);
            s.executor.begin_steps(arm, count, true, drain)?;
            for i in 0..count {
                s.check_interrupt()?;
                let phase = if (1..=blocks).contains(&i) { Phase::Steady } else { Phase::Switch };
                let block = Some(opened + i.clamp(1, blocks) - 1);
                s.push(Step { side, arm, block, phase, pacing })?;
                if s.in_flight() > 1 {
                    s.pop_block()?;
                }
            }
            if drain { s.pop_block() } else { Ok(()) }
        })?;
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

    /// Waits for what the last run left in flight.
    fn finish_run(&mut self) -> Result<(), Stop> {
        if let Some(due) = self.oldest() {
            let first = (self.steps.len(), self.blocks.len());
            self.executor.begin_steps(due.arm, 0, true, true)?;
            self.whole(Self::pop_block)?;
            self.lone_blocks_of_ranks(first)?;
        }
        self.flush()
    }

    /// Waits for a step that is a block of its own if it is steady.
    fn pop_block(&mut self) -> Result<(), Stop> {
        let due = self.oldest().filter(|s| s.phase == Phase::Steady);
        // While it runs: a reading between steps would be a gap.
        let health = if due.is_some() { self.sample() } else { Health::default() };
        let first = self.steps.len();
        self.pop()?;
        if let Some(Step { side, block: Some(number), pacing, .. }) = due {
            let block = self.block_record(first, (number, side), pacing, health);
            self.blocks.push(block);
        }
        Ok(())
    }
}
