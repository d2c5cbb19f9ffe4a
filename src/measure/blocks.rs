//! The timed part: settle, then blocks in ABBA order until the interval is narrow or the time is spent.

use super::options::{MIN_BLOCK_STEPS, Options};
use super::outcome::{BlockRecord, Pacing, Stopped};
use super::progress::Update;
use super::session::{Purpose, Session, Stop};
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

/// Runs the timed part; `step_ms` holds a first guess for each side.
pub(super) fn time(session: &mut Session, options: &Options, step_ms: &[f64]) -> Result<Stopped, Stop> {
    let sides = options.sides();
    match options.max_steps {
        Some(n) => fixed_steps(session, &sides, n - options.equality_steps().min(n), step_ms),
        None => until_precise(session, &sides, options, step_ms),
    }
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
) -> Result<Stopped, Stop> {
    let budget_ms = options.max_time_s * 1e3;
    let start = session.executor.now_ms();
    let timed = settle(session, sides, step_ms, budget_ms)?;
    session.hooks.progress.stage("timing");
    let limit = start + budget_ms * (1.0 - SYNC_SHARE);
    let mut pairs = 0;
    let stopped = loop {
        let begun = session.executor.now_ms();
        for (side, arm) in order(sides, pairs) {
            session.block(side, arm, timed, Pacing::RunAhead, Purpose::Timed)?;
        }
        pairs += 1;
        let now = session.executor.now_ms();
        // Judged after whole ABBA rounds only, so that drift has cancelled.
        let interval = if pairs % 2 == 0 { interval(&session.blocks, sides.len()) } else { None };
        session.hooks.progress.update(&Update {
            elapsed_s: (now - start) / 1e3,
            max_time_s: options.max_time_s,
            pairs,
            half_width: interval.map(|i| i.half_width()),
            speedup: interval.filter(|_| sides.len() == 2).map(|i| i.value.exp()),
        });
        if pairs >= MIN_PAIRS_TO_STOP && interval.is_some_and(|i| i.half_width() < HALF_WIDTH) {
            break Stopped::Precision;
        }
        if now + (now - begun) > limit {
            break Stopped::MaxTime;
        }
    };
    sync_blocks(session, sides, timed, budget_ms)?;
    Ok(stopped)
}

/// The interval that the stop rule looks at: of the log-ratio, or of one side's log step time.
fn interval(blocks: &[BlockRecord], sides: usize) -> Option<super::stats::Interval> {
    if sides == 2 {
        return verdict::log_ratio(&pairs(blocks, Pacing::RunAhead));
    }
    let logs: Vec<f64> = blocks.iter().map(|b| b.wall_ms_median.ln()).collect();
    super::stats::mean_interval(&logs, super::stats::CONFIDENCE)
}

/// Block medians (side 0, side 1) of each finished pair.
pub(super) fn pairs(blocks: &[BlockRecord], pacing: Pacing) -> Vec<(f64, f64)> {
    let blocks: Vec<&BlockRecord> = blocks.iter().filter(|b| b.pacing == pacing).collect();
    blocks
        .chunks_exact(2)
        .filter_map(|pair| match (pair[0].side, pair[1].side) {
            (0, 1) => Some((pair[0].wall_ms_median, pair[1].wall_ms_median)),
            (1, 0) => Some((pair[1].wall_ms_median, pair[0].wall_ms_median)),
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
        let timed = timed_steps(&step_ms, budget_ms);
        let round_ms = (timed + 2) as f64 * step_ms.iter().sum::<f64>();
        let spent_ms = session.executor.now_ms() - start;
        if spent_ms + round_ms > budget_ms * SETTLE_SHARE {
            return Ok(timed);
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

/// A few blocks with every step synchronised, within their share of the time.
fn sync_blocks(session: &mut Session, sides: &[Arm], timed: usize, budget_ms: f64) -> Result<(), Stop> {
    session.hooks.progress.stage("timing with every step synchronised");
    let timed = timed.min(SYNC_STEPS);
    let medians: f64 = (0..sides.len())
        .filter_map(|side| session.blocks.iter().rev().find(|b| b.side == side))
        .map(|b| b.wall_ms_median)
        .sum();
    let start = session.executor.now_ms();
    // A synchronised step is at least as long as one with run-ahead.
    let mut pair_ms = (timed + 1) as f64 * medians;
    for pair in 0..SYNC_PAIRS {
        let begun = session.executor.now_ms();
        if begun - start + pair_ms > budget_ms * SYNC_SHARE {
            break;
        }
        for (side, arm) in order(sides, pair) {
            session.block(side, arm, timed, Pacing::Sync, Purpose::Timed)?;
        }
        pair_ms = session.executor.now_ms() - begun;
    }
    Ok(())
}

/// `-ms`: exactly `steps` more steps of each side, in at least [`MIN_PAIRS`] blocks if that can be. Too few steps
/// for a block are steady ones without neighbours.
fn fixed_steps(session: &mut Session, sides: &[Arm], steps: usize, step_ms: &[f64]) -> Result<Stopped, Stop> {
    if steps < MIN_BLOCK_STEPS {
        session.hooks.progress.stage("timing");
        for (side, arm) in order(sides, 0) {
            session.lone_steps(side, arm, steps)?;
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
            session.block(
                side,
                arm,
                block_steps.saturating_sub(2).max(1),
                Pacing::RunAhead,
                Purpose::Timed,
            )?;
        }
        let interval = if pair % 2 == 1 { interval(&session.blocks, sides.len()) } else { None };
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
