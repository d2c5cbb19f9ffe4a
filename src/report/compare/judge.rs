//! From the runs of two sides to a change with its interval, and from that to a verdict.
//!
//! All arithmetic is on logarithms of a *cost* (step time, eager-over-graph upside down, memory), so that a
//! change and its reverse are judged alike. The interval is 99 %: of comparisons of equal things at most one in a
//! hundred excludes "no change", half of them on either side.

use crate::measure::stats::{Interval, t_quantile};
use serde::Serialize;

/// Confidence of the interval of a change: one false alarm in a hundred comparisons at most, both directions.
pub const CONFIDENCE: f64 = 0.99;
/// Normal quantiles, two-sided: of the intervals in the files (95 %) and of [`CONFIDENCE`].
const Z95: f64 = 1.959_964;
const Z99: f64 = 2.575_829;
/// Half width (95 %) that a run counts with when its interval is empty, i.e. under eight pairs of blocks: steps of
/// a GPU left alone repeat within this. Such a run cannot pass a 5 % gate, yet a change of 20 % is called.
const HALF_WIDTH_WITHOUT_INTERVAL: f64 = 0.05;
/// Degrees of freedom that [`Scatter::run_sd`] counts for beside those of the runs seen. Few runs tell little of
/// their spread (t with 2 degrees of freedom: 9.9), and it is not unknown: a moderated t (Smyth 2004). One: with two,
/// runs that scatter by 3 % are judged as if by less, and 1.7 % of equal pairs of two runs a side, 1.3 % of three, are
/// called regressions (simulated: `rates`).
const ASSUMED_DEGREES: f64 = 1.0;
/// A spread over this many times the assumed one shows the assumption to be wrong: the data then stand alone.
const ASSUMPTION_HOLDS_TO: f64 = 2.0;

/// Share of the threshold that the estimate of a change must reach. With less, three runs a side whose clock jumps
/// between values 3 % apart are called a regression in over 1 % of equal pairs: all fast, then all slow (`rates`).
const LEAST_SHARE: f64 = 2.0 / 3.0;

/// What is known about the spread between runs before any is seen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scatter {
    /// One run a side: the interval of the logarithm is widened by this much either way (99 %), if runs scatter little.
    pub one_run_half_width: f64,
    /// One run a side: a smaller change of the logarithm than this, up or down, may be the spread between runs that
    /// scatter much, and is not called.
    pub one_run_least: f64,
    /// Standard deviation between runs of one configuration.
    pub run_sd: f64,
}

impl Scatter {
    /// Times and their ratios. Processes started anew differ by up to one percent (clocks, temperature, where
    /// buffers lie). 3 % is 3 sigma of a difference of two runs that scatter by 0.7 %: a wider interval would let no
    /// single run pass the default threshold of 5 %. 0.11 (-10.4 to +11.6 %) is 2.6 sigma where they scatter by 3 %, and
    /// finds 20 %.
    pub const TIMING: Scatter = Scatter { one_run_half_width: 0.03, one_run_least: 0.11, run_sd: 0.01 };
    /// Device memory repeats but for the driver's pages of 2 MiB.
    pub const MEMORY: Scatter = Scatter { one_run_half_width: 0.002, one_run_least: 0.002, run_sd: 0.0005 };
}

/// One run's figure: a positive cost, with its own 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    pub cost: f64,
    pub ci95: Option<(f64, f64)>,
}

impl Sample {
    /// Standard error of the logarithm within the run; `None` without an interval.
    fn error(&self) -> Option<f64> {
        self.ci95.map(|(low, high)| (high / low).ln().max(0.0) / 2.0 / Z95)
    }
}

/// Where the width of an interval comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// One run a side: widened by the default.
    OneRun,
    /// The spread between runs.
    Spread,
}

/// Log of new over base.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Change {
    pub log: Interval,
    /// The smallest change that is called one, up or down.
    pub least: f64,
    pub basis: Basis,
    /// A run without an interval of its own was used.
    pub interval_assumed: bool,
}

/// Change of the cost from base to new; `None` without a run on either side.
pub fn change(base: &[Sample], new: &[Sample], scatter: Scatter) -> Option<Change> {
    if base.is_empty() || new.is_empty() {
        return None;
    }
    let logs = |side: &[Sample]| side.iter().map(|s| s.cost.ln()).collect::<Vec<f64>>();
    let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
    let (b, n) = (logs(base), logs(new));
    let value = mean(&n) - mean(&b);
    let freedom = b.len() + n.len() - 2;
    let mut interval_assumed = false;
    // Variance of a side's mean by the intervals within its runs.
    let mut within = |side: &[Sample], assume: bool| {
        let squares = side.iter().map(|s| match s.error() {
            Some(error) => error * error,
            None if assume => {
                interval_assumed = true;
                (HALF_WIDTH_WITHOUT_INTERVAL / Z95).powi(2)
            }
            None => 0.0,
        });
        squares.sum::<f64>() / (side.len() as f64).powi(2)
    };
    let within = within(base, freedom == 0) + within(new, freedom == 0);
    let (reach, least, basis) = if freedom == 0 {
        let widened = |by: f64| by.hypot(Z99 * within.sqrt());
        (widened(scatter.one_run_half_width), widened(scatter.one_run_least), Basis::OneRun)
    } else {
        let squares = |x: &[f64]| x.iter().map(|v| (v - mean(x)).powi(2)).sum::<f64>();
        let observed = (squares(&b) + squares(&n)) / freedom as f64;
        let assumed = scatter.run_sd.powi(2);
        let (variance, degrees) = if observed > assumed * ASSUMPTION_HOLDS_TO.powi(2) {
            (observed, freedom)
        } else {
            let degrees = freedom as f64 + ASSUMED_DEGREES;
            ((observed * freedom as f64 + assumed * ASSUMED_DEGREES) / degrees, degrees as usize)
        };
        let between = variance * (1.0 / b.len() as f64 + 1.0 / n.len() as f64);
        // Means cannot vary less than what each run knows of itself.
        (t_quantile(CONFIDENCE, degrees)? * between.max(within).sqrt(), 0.0, Basis::Spread)
    };
    let log = Interval { value, low: value - reach, high: value + reach };
    Some(Change { log, least, basis, interval_assumed })
}

/// A side's figure for the report: the geometric mean over its runs, of which the change is the ratio.
pub fn middle(side: &[Sample]) -> Option<f64> {
    match side {
        [] => None,
        [one] => Some(one.cost),
        _ => Some((side.iter().map(|s| s.cost.ln()).sum::<f64>() / side.len() as f64).exp()),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Surely worse, and by the threshold for all that is known.
    Regression,
    /// Surely better, and by the threshold for all that is known.
    Improvement,
    /// Not worse by the threshold.
    WithinThreshold,
    /// The interval holds both no change and the threshold.
    Undecided,
    /// A cell cannot be read, or the runs are unlike.
    CannotCompare,
}

/// Judges the change of a cost against a relative threshold.
///
/// - whole interval below the threshold: fine, `improvement` if it also lies below zero and reaches the
///   threshold's mirror image;
/// - it reaches the threshold and excludes no change, and the estimate is at least `LEAST_SHARE` of the threshold and
///   `least`: `regression`. A true slowdown by just the threshold is thus found, which a rule that asks the estimate
///   to exceed it would miss every other time;
/// - otherwise: `undecided`.
pub fn judge(log: Interval, least: f64, threshold: f64) -> Verdict {
    let limit = threshold.ln_1p();
    let large = log.value.abs() >= least.max(LEAST_SHARE * limit);
    if log.low > 0.0 && log.high >= limit && large {
        Verdict::Regression
    } else if log.high < 0.0 && log.low <= -limit && large {
        Verdict::Improvement
    } else if log.high < limit {
        Verdict::WithinThreshold
    } else {
        Verdict::Undecided
    }
}

#[cfg(test)]
#[path = "rates.rs"]
mod rates;

#[cfg(test)]
mod tests {
    use super::*;

    fn one(cost: f64) -> Sample {
        Sample { cost, ci95: Some((cost * 0.997, cost * 1.003)) }
    }

    fn interval(low: f64, high: f64) -> Interval {
        Interval { value: (low + high) / 2.0, low, high }
    }

    #[test]
    fn verdicts_follow_the_threshold() {
        for (low, high, expected) in [
            (-0.01, 0.01, Verdict::WithinThreshold),
            (0.01, 0.04, Verdict::WithinThreshold),
            (0.01, 0.05, Verdict::Undecided),
            (0.01, 0.06, Verdict::Regression),
            (0.06, 0.08, Verdict::Regression),
            (-0.01, 0.06, Verdict::Undecided),
            (-0.06, 0.06, Verdict::Undecided),
            (-0.06, -0.01, Verdict::Improvement),
            (-0.04, -0.01, Verdict::WithinThreshold),
            (-0.08, 0.01, Verdict::WithinThreshold),
        ] {
            assert_eq!(judge(interval(low, high), 0.0, 0.05), expected, "{low} {high}");
        }
        // A change that may be the spread between runs: a slowdown is told, a gain claimed by nobody.
        for (low, high, expected) in [
            (0.03, 0.09, Verdict::Undecided),
            (0.09, 0.15, Verdict::Regression),
            (-0.09, -0.03, Verdict::WithinThreshold),
            (-0.15, -0.09, Verdict::Improvement),
            (-0.03, 0.03, Verdict::WithinThreshold),
        ] {
            assert_eq!(judge(interval(low, high), 0.11, 0.05), expected, "{low} {high}");
        }
    }

    #[test]
    fn one_run_is_widened_and_more_runs_narrow() {
        let single = change(&[one(1.0)], &[one(1.02)], Scatter::TIMING).unwrap();
        assert_eq!((single.basis, single.interval_assumed), (Basis::OneRun, false));
        assert!((single.log.value - 1.02f64.ln()).abs() < 1e-12);
        assert!(single.log.half_width() > 0.03 && single.log.half_width() < 0.032);
        let side = |n: usize| (0..n).map(|i| one(1.0 + 0.002 * (i % 2) as f64)).collect::<Vec<_>>();
        let widths: Vec<f64> = [2, 3, 5, 10]
            .map(|n| change(&side(n), &side(n), Scatter::TIMING).unwrap().log.half_width())
            .to_vec();
        assert!(widths.windows(2).all(|w| w[1] < w[0]), "{widths:?}");
        assert!(change(&[], &side(3), Scatter::TIMING).is_none());
        // One side's spread serves the other.
        assert_eq!(change(&side(1), &side(3), Scatter::TIMING).unwrap().basis, Basis::Spread);
    }

    /// The page tells the constants as they are.
    #[test]
    fn the_docs_tell_the_widening_of_one_run() {
        let words: Vec<&str> = include_str!("../../../docs/ci.md").split_whitespace().collect();
        let page = words.join(" ");
        for (scatter, of) in [(Scatter::TIMING, "3 %"), (Scatter::MEMORY, "0.2 % for memory")] {
            let width = crate::report::columns::number(scatter.one_run_half_width * 100.0);
            assert!(of.starts_with(&format!("{width} %")) && page.contains(of), "{width}");
        }
        let least = Scatter::TIMING.one_run_least;
        let (down, up) = ((-least).exp_m1() * 100.0, least.exp_m1() * 100.0);
        let told = format!("no change between {down:.1} and {up:+.1} % is called");
        assert!(page.contains(&told), "docs/ci.md does not say: {told}");
    }

    #[test]
    fn a_spread_far_above_the_assumed_one_stands_alone() {
        let wide: Vec<Sample> = [0.9, 1.0, 1.1].map(one).to_vec();
        let found = change(&wide, &wide, Scatter::TIMING).unwrap().log.half_width();
        // t(4) = 4.604 at 99 %, on the pooled standard deviation of the logs.
        let sd = {
            let logs = [0.9f64.ln(), 0.0, 1.1f64.ln()];
            let mean = logs.iter().sum::<f64>() / 3.0;
            (logs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 2.0).sqrt()
        };
        assert!((found - 4.604 * sd * (2.0f64 / 3.0).sqrt()).abs() < 1e-3, "{found}");
    }

    #[test]
    fn intervals_within_runs_are_a_floor() {
        let loose = |c: f64| Sample { cost: c, ci95: Some((c * 0.9, c * 1.1)) };
        let side = [loose(1.0), loose(1.0), loose(1.0)];
        assert!(change(&side, &side, Scatter::TIMING).unwrap().log.half_width() > 0.1);
        let bare = Sample { cost: 1.0, ci95: None };
        let assumed = change(&[bare], &[bare], Scatter::TIMING).unwrap();
        assert!(assumed.interval_assumed && assumed.log.high > 0.05f64.ln_1p());
    }
}
