//! The timed part: settle, then blocks in ABBA order until the interval is narrow or the time is spent.

use super::long;
use super::options::{MIN_BLOCK_STEPS, Options};
use super::outcome::{BlockRecord, Pacing, Stopped};
use super::progress::Update;
use super::session::{Session, Stop};
use super::stats::{self, Interval};
use super::timed::Purpose;
use super::verdict::{self, MIN_PAIRS};
use crate::device::{Arm, Phase};

/// A block is at least this long: many times the resolution of clocks and the length of a hiccup.
const MIN_BLOCK_MS: f64 = 50.0;
/// Steps shorter than this vary enough one by one that a block takes ten of them, the first dropped.
const SHORT_STEP_MS: f64 = 5.0;
const MIN_TIMED_OF_SHORT_STEPS: usize = 9;
/// Two timed steps a block are worth more than one, if this many pairs still fit the time.
const PAIRS_WORTH_HAVING: f64 = 12.0;
/// Timing stops when the 95 % interval of the log-ratio is under +- 0.5 %: half the default margin.
const HALF_WIDTH: f64 = 0.005;
/// Not before this many pairs: an interval that may stop the run at any pair is too narrow too often
/// while its variance rests on a few pairs (simulated in the tests).
const MIN_PAIRS_TO_STOP: usize = 20;
/// Share of the time for settling at most, and for `_sync` blocks.
const SETTLE_SHARE: f64 = 0.1;
const SYNC_SHARE: f64 = 0.1;
/// Blocks of both arms have settled when their medians moved by less than this since the round before.
const SETTLED: f64 = 0.01;
/// `_sync` blocks: two ABBA rounds of up to ten steps.
const SYNC_PAIRS: usize = 4;
const SYNC_STEPS: usize = 10;

/// Steps of each side that are issued to a short queue, if so many take no more than this share of the time; one always.
const ISSUE_STEPS: usize = 5;
const ISSUE_SHARE: f64 = 0.05;

/// When timing ends, on the executor's clock: by the time asked for, and at the latest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Limit {
    pub soft_ms: f64,
    pub hard_ms: f64,
}

impl Limit {
    /// Whether there is time for `next_ms` of work from `now` on. Beyond the time asked for only while there are too
    /// few pairs for an interval, and if what is missing (`enough_ms`) ends before the latest time.
    pub fn holds(self, now_ms: f64, next_ms: f64, enough_ms: Option<f64>) -> bool {
        now_ms + next_ms <= self.soft_ms || enough_ms.is_some_and(|ms| now_ms + ms <= self.hard_ms)
    }

    /// The end to show at `now`.
    pub fn shown(self, now_ms: f64) -> f64 {
        if now_ms <= self.soft_ms { self.soft_ms } else { self.hard_ms }
    }

    fn earlier_by(self, ms: f64) -> Self {
        Self { soft_ms: self.soft_ms - ms, hard_ms: self.hard_ms - ms }
    }
}

/// With a host model the bare blocks get this share of the time, the modelled ones the rest.
const BARE_SHARE: f64 = 0.6;

/// Runs the timed part; `step_ms` holds a first guess for each side. Under a host model a second set of blocks
/// follows, in which issuing takes the model's time. `reserve_ms` of the time is for what comes after.
pub(super) fn time(
    session: &mut Session,
    options: &Options,
    step_ms: &[f64],
    reserve_ms: f64,
) -> Result<Stopped, Stop> {
    let sides = options.sides();
    let (budget_ms, longest_ms) = (options.max_time_s * 1e3 - reserve_ms, options.longest_ms() - reserve_ms);
    let bare = if options.host_costs.is_some() { BARE_SHARE } else { 1.0 };
    session.spin_ms = options.device_spin * step_ms.get(1).copied().unwrap_or(0.0);
    let begun = session.executor.now_ms();
    let taken = options.equality_steps() + options.final_steps();
    let fixed = options.max_steps.map(|n| n - taken.min(n));
    let stopped = match fixed {
        Some(n) => fixed_steps(session, &sides, n, step_ms, Pacing::RunAhead)?,
        None => until_precise(session, &sides, options, step_ms, [budget_ms * bare, longest_ms * bare])?,
    };
    if let Some(costs) = &options.host_costs {
        session.hooks.progress.stage("timing under the host model");
        session.model(Some(costs.clone()))?;
        let step_ms: Vec<f64> = (0..sides.len())
            .map(|side| {
                let bare = last_wall(session, side, Pacing::RunAhead).unwrap_or(step_ms[side]);
                costs.arm(sides[side]).map(|c| c.step_ms.max(bare))
            })
            .collect::<Result<_, _>>()?;
        match fixed {
            Some(n) => fixed_steps(session, &sides, n, &step_ms, Pacing::Modelled)?,
            // What the bare blocks left, which is more than their share when the interval closed early.
            None => {
                let limit = Limit { soft_ms: begun + budget_ms, hard_ms: begun + longest_ms };
                modelled(session, &sides, options, &step_ms, limit)?
            }
        };
        session.model(None)?;
    }
    if std::mem::take(&mut session.spin_ms) > 0.0 {
        session.executor.set_device_spin_ms(0.0)?;
    }
    Ok(stopped)
}

/// Median of the last timed block of a side under a pacing.
fn last_wall(session: &Session, side: usize, pacing: Pacing) -> Option<f64> {
    session.blocks.iter().rev().find(|b| b.side == side && b.pacing == pacing).map(|b| b.wall_ms_median)
}

/// Blocks under the host model until the limit: one of each side to settle, then pairs as ever.
fn modelled(
    session: &mut Session,
    sides: &[Arm],
    options: &Options,
    step_ms: &[f64],
    limit: Limit,
) -> Result<Stopped, Stop> {
    let start = session.executor.now_ms();
    if long::applies(step_ms, MIN_BLOCK_MS) && sides.len() == 2 {
        return long::time(session, sides, Pacing::Modelled, step_ms, start, limit);
    }
    let mut step_ms = step_ms.to_vec();
    let timed = options.block_steps.unwrap_or_else(|| timed_steps(&step_ms, limit.soft_ms - start));
    for (side, arm) in order(sides, 0) {
        step_ms[side] = session.block(side, arm, timed, Pacing::Modelled, Purpose::Settle)?;
    }
    let left_ms = limit.soft_ms - session.executor.now_ms();
    let timed = options.block_steps.unwrap_or_else(|| timed_steps(&step_ms, left_ms));
    pairs_until(session, sides, Pacing::Modelled, (timed, false), start, limit)
}

/// Steps that count in a block.
fn timed_steps(step_ms: &[f64], budget_ms: f64) -> usize {
    let fastest = step_ms.iter().copied().fold(f64::INFINITY, f64::min).max(1e-3);
    let needed = (MIN_BLOCK_MS / fastest).ceil() as usize;
    if fastest < SHORT_STEP_MS {
        return needed.max(MIN_TIMED_OF_SHORT_STEPS);
    }
    let pair_of_two_ms = 4.0 * step_ms.iter().sum::<f64>();
    needed.max(if pair_of_two_ms * PAIRS_WORTH_HAVING <= budget_ms { 2 } else { 1 })
}

/// The order of the sides in pair `pair`: AB, BA, AB, ...
fn order(sides: &[Arm], pair: usize) -> Vec<(usize, Arm)> {
    let mut order: Vec<(usize, Arm)> = sides.iter().copied().enumerate().collect();
    if pair % 2 == 1 {
        order.reverse();
    }
    order
}

fn until_precise(
    session: &mut Session,
    sides: &[Arm],
    options: &Options,
    step_ms: &[f64],
    [budget_ms, longest_ms]: [f64; 2],
) -> Result<Stopped, Stop> {
    let start = session.executor.now_ms();
    let limit = Limit { soft_ms: start + budget_ms, hard_ms: start + longest_ms };
    if options.block_steps.is_none() && long::applies(step_ms, MIN_BLOCK_MS) {
        // Long steps were warmed by the equality check; what pairs leave of the time goes to `_sync` blocks.
        session.hooks.progress.stage("timing");
        let stopped = long::time(session, sides, Pacing::RunAhead, step_ms, start, limit)?;
        let left_ms = limit.soft_ms - session.executor.now_ms();
        sync_blocks(session, sides, 1, left_ms.min(budget_ms * SYNC_SHARE))?;
        issue_steps(session, sides, budget_ms * ISSUE_SHARE)?;
        return Ok(stopped);
    }
    let settled = settle(session, sides, step_ms, budget_ms)?;
    // Not of several ranks: their steps are agreed on by blocks of one arm.
    let interleaved = session.executor.ranks() == 1 && long::device_bound(session, sides);
    let timed = options.block_steps.unwrap_or(if interleaved { settled.div_ceil(2) } else { settled });
    session.hooks.progress.stage("timing");
    let limit = limit.earlier_by(budget_ms * SYNC_SHARE);
    let stopped = pairs_until(session, sides, Pacing::RunAhead, (timed, interleaved), start, limit)?;
    sync_blocks(session, sides, timed, budget_ms * SYNC_SHARE)?;
    issue_steps(session, sides, budget_ms * ISSUE_SHARE)?;
    Ok(stopped)
}

/// Pairs of blocks until the interval is narrow or the limit does not hold the next pair; one pair always. `timed`: steps
/// that count in a block, and whether the blocks of a pair are interleaved. Those are half as long, so that a pair lasts
/// as long as a block: more pairs of less scatter (simulated in the tests; a third or a sixth gains no more).
fn pairs_until(
    session: &mut Session,
    sides: &[Arm],
    pacing: Pacing,
    (timed, interleaved): (usize, bool),
    start_ms: f64,
    limit: Limit,
) -> Result<Stopped, Stop> {
    let mut pairs = 0;
    loop {
        let begun = session.executor.now_ms();
        match order(sides, pairs)[..] {
            [a, b] if interleaved => session.pair([a, b], timed, pacing)?,
            ref alone => {
                for (side, arm) in alone {
                    session.block(*side, *arm, timed, pacing, Purpose::Timed)?;
                }
            }
        }
        pairs += 1;
        let now = session.executor.now_ms();
        // Judged after whole ABBA rounds only, so that drift has cancelled.
        let interval = if pairs % 2 == 0 { interval(&session.blocks, sides.len(), pacing) } else { None };
        session.hooks.progress.update(&Update {
            elapsed_s: (now - start_ms) / 1e3,
            max_time_s: (limit.shown(now) - start_ms) / 1e3,
            pairs,
            half_width: interval.map(|i| i.half_width()),
            speedup: interval.filter(|_| sides.len() == 2).map(|i| i.value.exp()),
        });
        if precise(pairs, interval) {
            return Ok(Stopped::Precision);
        }
        let pair_ms = now - begun;
        // One arm alone has no pairs to wait for.
        let missing = MIN_PAIRS.checked_sub(pairs).filter(|n| *n > 0 && sides.len() == 2);
        if !limit.holds(now, pair_ms, missing.map(|n| n as f64 * pair_ms)) {
            return Ok(Stopped::MaxTime);
        }
    }
}

/// Whether timing may stop.
pub(super) fn precise(pairs: usize, interval: Option<Interval>) -> bool {
    pairs >= MIN_PAIRS_TO_STOP && interval.is_some_and(|i| i.half_width() < HALF_WIDTH)
}

/// The interval that the stop rule looks at: of the log-ratio, or of one side's log step time.
pub(super) fn interval(blocks: &[BlockRecord], sides: usize, pacing: Pacing) -> Option<Interval> {
    if sides == 2 {
        return verdict::log_ratio(&pairs(blocks, pacing));
    }
    let logs: Vec<f64> =
        blocks.iter().filter(|b| b.pacing == pacing).map(|b| b.wall_ms_median.ln()).collect();
    stats::mean_interval(&logs, stats::CONFIDENCE)
}

/// Log-ratio (side 0 over side 1) of each finished pair: of steps side by side where its blocks are interleaved, as their
/// medians may be of other moments; of the blocks' medians otherwise.
pub(super) fn pairs(blocks: &[BlockRecord], pacing: Pacing) -> Vec<f64> {
    let blocks: Vec<&BlockRecord> = blocks.iter().filter(|b| b.pacing == pacing).collect();
    let of_medians = |a: &BlockRecord, b: &BlockRecord| (a.wall_ms_median / b.wall_ms_median).ln();
    blocks
        .chunks_exact(2)
        .filter_map(|pair| match (pair[0].side, pair[1].side) {
            (0, 1) => Some(pair[0].log_ratio.unwrap_or_else(|| of_medians(pair[0], pair[1]))),
            (1, 0) => Some(pair[0].log_ratio.unwrap_or_else(|| of_medians(pair[1], pair[0]))),
            _ => None,
        })
        .collect()
}

/// Blocks of both sides until step times have stopped moving; returns the timed steps a block. The
/// equality check has warmed the arms before, so long steps need none of this.
fn settle(session: &mut Session, sides: &[Arm], step_ms: &[f64], budget_ms: f64) -> Result<usize, Stop> {
    session.hooks.progress.stage("settling");
    let start = session.executor.now_ms();
    let mut step_ms = step_ms.to_vec();
    let mut rounds = 0;
    loop {
        // The guess is one step's time: before a round has borne it out, no long block rests on it.
        let most = if rounds == 0 { MIN_TIMED_OF_SHORT_STEPS } else { usize::MAX };
        let timed = timed_steps(&step_ms, budget_ms).min(most);
        let round_ms = (timed + 2) as f64 * step_ms.iter().sum::<f64>();
        let spent_ms = session.executor.now_ms() - start;
        if spent_ms + round_ms > budget_ms * SETTLE_SHARE {
            return Ok(timed_steps(&step_ms, budget_ms));
        }
        let before = step_ms.clone();
        for (side, arm) in order(sides, rounds) {
            step_ms[side] = session.block(side, arm, timed, Pacing::RunAhead, Purpose::Settle)?;
        }
        rounds += 1;
        let moved = step_ms.iter().zip(&before).any(|(now, then)| (now / then - 1.0).abs() >= SETTLED);
        if rounds >= 2 && !moved {
            return Ok(timed_steps(&step_ms, budget_ms));
        }
    }
}

/// A few blocks with every step synchronised, within `share_ms`.
fn sync_blocks(session: &mut Session, sides: &[Arm], timed: usize, share_ms: f64) -> Result<(), Stop> {
    session.hooks.progress.stage("timing with every step synchronised");
    let timed = timed.min(SYNC_STEPS);
    let medians: f64 = (0..sides.len()).filter_map(|side| last_wall(session, side, Pacing::RunAhead)).sum();
    let start = session.executor.now_ms();
    // A synchronised step is at least as long as one with run-ahead.
    let mut pair_ms = (timed + 1) as f64 * medians;
    for pair in 0..SYNC_PAIRS {
        let begun = session.executor.now_ms();
        if begun - start + pair_ms > share_ms {
            break;
        }
        for (side, arm) in order(sides, pair) {
            session.block(side, arm, timed, Pacing::Sync, Purpose::Timed)?;
        }
        pair_ms = session.executor.now_ms() - begun;
    }
    Ok(())
}

/// A few steps that meet no full queue, for the host's time alone: within `share_ms`, but at least one of each side,
/// as nothing else tells what issuing costs where a step is longer than the queue.
fn issue_steps(session: &mut Session, sides: &[Arm], share_ms: f64) -> Result<(), Stop> {
    if !session.executor.set_drained(true) {
        return Ok(());
    }
    let medians: f64 = (0..sides.len()).filter_map(|side| last_wall(session, side, Pacing::RunAhead)).sum();
    let fit = (share_ms / medians.max(1e-3)) as usize;
    let steps = fit.clamp(1, ISSUE_STEPS);
    let done = order(sides, 0)
        .into_iter()
        .try_for_each(|(side, arm)| session.lone_steps(side, arm, steps, Pacing::Drained));
    session.executor.set_drained(false);
    done
}

/// `-ms`: exactly `steps` more steps of each side, in at least [`MIN_PAIRS`] blocks if that can be. Too few steps
/// for a block are steady ones without neighbours.
fn fixed_steps(
    session: &mut Session,
    sides: &[Arm],
    steps: usize,
    step_ms: &[f64],
    pacing: Pacing,
) -> Result<Stopped, Stop> {
    if steps < MIN_BLOCK_STEPS {
        session.hooks.progress.stage("timing");
        for (side, arm) in order(sides, 0) {
            session.lone_steps(side, arm, steps, pacing)?;
        }
        return Ok(Stopped::MaxSteps);
    }
    let by_time = timed_steps(step_ms, 0.0) + 2;
    let blocks = (steps / by_time).max(MIN_PAIRS).min(steps / MIN_BLOCK_STEPS).max(1);
    let block_steps = steps / blocks;
    session.hooks.progress.stage("timing");
    for _ in 0..steps - blocks * block_steps {
        for (side, arm) in order(sides, 0) {
            session.single(side, arm, Phase::Warmup)?;
        }
    }
    for pair in 0..blocks {
        for (side, arm) in order(sides, pair) {
            session.block(side, arm, block_steps.saturating_sub(2).max(1), pacing, Purpose::Timed)?;
        }
        let interval = if pair % 2 == 1 { interval(&session.blocks, sides.len(), pacing) } else { None };
        session.hooks.progress.update(&Update {
            elapsed_s: 0.0,
            max_time_s: 0.0,
            pairs: pair + 1,
            half_width: interval.map(|i| i.half_width()),
            speedup: interval.filter(|_| sides.len() == 2).map(|i| i.value.exp()),
        });
    }
    Ok(Stopped::MaxSteps)
}
