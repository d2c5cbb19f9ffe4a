//! From blocks to an answer: paired log-ratio, verdict against a margin, steady state, break-even.

use super::stats::{self, Interval};
use serde::Serialize;
use std::fmt;

/// Fewest pairs of blocks from which an interval is given.
pub const MIN_PAIRS: usize = 8;

/// The answer, from the 95 % interval of the speedup and the band `1 / (1 + margin) ..= 1 + margin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The interval lies above the band: side 1 (graph) is faster by more than the margin.
    Faster,
    /// The interval lies below the band.
    Slower,
    /// The interval lies within the band.
    Equivalent,
    /// The interval crosses an edge of the band, or there is none.
    Undecided,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Verdict::Faster => "faster",
            Verdict::Slower => "slower",
            Verdict::Equivalent => "equivalent",
            Verdict::Undecided => "undecided",
        })
    }
}

/// Judges a speedup's interval.
pub fn judge(ci95: Option<(f64, f64)>, margin: f64) -> Verdict {
    let upper = 1.0 + margin;
    match ci95 {
        Some((low, _)) if low > upper => Verdict::Faster,
        Some((_, high)) if high < 1.0 / upper => Verdict::Slower,
        Some((low, high)) if low >= 1.0 / upper && high <= upper => Verdict::Equivalent,
        _ => Verdict::Undecided,
    }
}

/// From this many pairs on their ranks give the interval: its normal approximation holds there, and a clock that
/// jumps between two values makes the studentised one too wide (simulated in the tests: 97.8 % for 95 %).
const MIN_PAIRS_TO_RANK: usize = 20;

/// Typical log-ratio of pairs (of the time of side 0 over that of side 1) with its 95 % interval: studentised under
/// `MIN_PAIRS_TO_RANK`, of signed ranks from there on. The two blocks of a pair are neighbours in time, so slow
/// drift cancels; either estimate bears a disturbed pair in ten. In ABBA order blocks of one arm meet at the joint
/// of two pairs, so noise that outlasts a block makes neighbouring pairs alike: the interval is widened by what
/// their autocorrelation asks for.
pub fn log_ratio(pairs: &[f64]) -> Option<Interval> {
    let ratios: Vec<f64> = pairs.iter().copied().filter(|r| r.is_finite()).collect();
    let of =
        if ratios.len() < MIN_PAIRS_TO_RANK { stats::mean_interval } else { stats::signed_rank_interval };
    let plain = of(&ratios, stats::CONFIDENCE)?;
    let wider = stats::autocorrelation_widening(&ratios);
    let (below, above) = (plain.value - plain.low, plain.high - plain.value);
    Some(Interval { value: plain.value, low: plain.value - below * wider, high: plain.value + above * wider })
}

/// Whether the timed steps had settled.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct SteadyState {
    /// `None`: too few blocks to tell.
    pub reached: Option<bool>,
    /// The trend that was found, or why none could be looked for.
    pub reason: Option<String>,
}

/// Fewest blocks in which a trend is looked for.
const MIN_BLOCKS: usize = 6;
/// A trend must be this sure (two-sided 99.9 %): autocorrelated noise makes trends look surer than they are.
const SURE_Z: f64 = 3.29;
const SURE_CONFIDENCE: f64 = 0.999;

/// Tests a side's blocks for a trend across blocks (Mann-Kendall, Theil-Sen) and within blocks (second half
/// against first). A trend counts when it is sure and moves the step time by more than `margin`.
pub fn steady_state(block_medians: &[f64], half_changes: &[f64], margin: f64) -> SteadyState {
    if block_medians.len() < MIN_BLOCKS {
        let reason = format!("{} blocks are too few to see a trend in", block_medians.len());
        return SteadyState { reached: None, reason: Some(reason) };
    }
    let typical = stats::median(block_medians).unwrap_or(f64::NAN);
    let across = stats::trend(block_medians)
        .filter(|t| t.z.abs() > SURE_Z)
        .map(|t| t.slope * (block_medians.len() - 1) as f64 / typical)
        .filter(|change| change.abs() > margin)
        .map(|change| format!("step time moved by {:+.1} % over the timed blocks", change * 100.0));
    let within = stats::mean_interval(half_changes, SURE_CONFIDENCE)
        .filter(|i| half_changes.len() >= MIN_BLOCKS && (i.low > margin || i.high < -margin))
        .map(|i| format!("step time moved by {:+.1} % within a block", i.value * 100.0));
    let reason = across.or(within);
    SteadyState { reached: Some(reason.is_none()), reason }
}

/// Steps after which `cost_ms` is earned back at `saved_ms` a step.
pub fn break_even(cost_ms: f64, saved_ms: f64) -> Option<f64> {
    let steps = (cost_ms / saved_ms).ceil();
    (saved_ms > 0.0 && steps.is_finite()).then_some(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_follow_the_band() {
        let judged = |low, high| judge(Some((low, high)), 0.01);
        assert_eq!(judged(1.011, 1.5), Verdict::Faster);
        assert_eq!(judged(0.5, 0.99), Verdict::Slower);
        assert_eq!(judged(0.995, 1.005), Verdict::Equivalent);
        assert_eq!(judged(1.002, 1.008), Verdict::Equivalent);
        assert_eq!(judged(1.005, 1.02), Verdict::Undecided);
        assert_eq!(judged(0.98, 1.02), Verdict::Undecided);
        assert_eq!(judge(None, 0.01), Verdict::Undecided);
    }

    #[test]
    fn the_band_is_symmetric_in_the_ratio() {
        // Swapping the sides turns faster into slower and nothing else.
        for (low, high) in [(1.0105, 1.02), (1.003, 1.009), (1.005, 1.03), (0.97, 0.985)] {
            let swapped = match judge(Some((low, high)), 0.01) {
                Verdict::Faster => Verdict::Slower,
                Verdict::Slower => Verdict::Faster,
                same => same,
            };
            assert_eq!(judge(Some((1.0 / high, 1.0 / low)), 0.01), swapped);
        }
    }

    #[test]
    fn trends_across_and_within_blocks_are_found() {
        let flat = [10.0, 10.01, 9.99, 10.0, 10.02, 9.98, 10.0, 10.01];
        let rising: Vec<f64> = (0..12).map(|i| 10.0 + 0.05 * f64::from(i)).collect();
        let none = [0.001, -0.001, 0.0, 0.002, -0.002, 0.001];
        assert_eq!(steady_state(&flat, &none, 0.01).reached, Some(true));
        let across = steady_state(&rising, &none, 0.01);
        assert_eq!(across.reached, Some(false));
        assert!(across.reason.unwrap().contains("+5.4 %"));
        let within = steady_state(&flat, &[0.05, 0.051, 0.049, 0.05, 0.052, 0.05], 0.01);
        assert!(within.reason.unwrap().contains("within a block"));
        assert_eq!(steady_state(&flat[..3], &[], 0.01).reached, None);
    }

    #[test]
    fn break_even_needs_a_gain() {
        assert_eq!(break_even(100.0, 3.0), Some(34.0));
        assert_eq!(break_even(100.0, 0.0), None);
        assert_eq!(break_even(100.0, -1.0), None);
    }
}
