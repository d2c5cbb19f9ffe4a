//! Robust statistics for step times: quantiles, Student's t, trimmed and order-statistic intervals, trends.
//!
//! Step times are skewed, autocorrelated and now and then disturbed, so locations are medians or trimmed
//! means and every interval is made from *blocks* or *pairs of blocks*, never from single steps.

/// Share trimmed off each end before a mean is taken: one pair in ten may be disturbed by a neighbour
/// without moving the estimate. Under 10 values nothing is trimmed.
const TRIM: f64 = 0.1;
/// Confidence of every interval that mbperf prints.
pub const CONFIDENCE: f64 = 0.95;
/// Under this many blocks a distribution-free 95 % interval of the median does not exist
/// (2 * 0.5^5 = 6.3 %, 2 * 0.5^6 = 3.1 %).
pub const MIN_FOR_MEDIAN_INTERVAL: usize = 6;

/// An estimate with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Interval {
    pub value: f64,
    pub low: f64,
    pub high: f64,
}

impl Interval {
    pub fn half_width(&self) -> f64 {
        (self.high - self.low) / 2.0
    }
    /// The same interval after an increasing function.
    pub fn map(self, f: impl Fn(f64) -> f64) -> Self {
        Self { value: f(self.value), low: f(self.low), high: f(self.high) }
    }
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Median; `None` without values.
pub fn median(values: &[f64]) -> Option<f64> {
    percentile(values, 0.5)
}

/// Quantile `p` in 0..=1 with linear interpolation between order statistics (Hyndman and Fan, type 7).
pub fn percentile(values: &[f64], p: f64) -> Option<f64> {
    let sorted = sorted(values);
    let last = sorted.len().checked_sub(1)?;
    let at = p.clamp(0.0, 1.0) * last as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    Some(below + (above - below) * at.fract())
}

/// P(|T| < t) of Student's t with `df` degrees of freedom: the finite trigonometric series of
/// Abramowitz and Stegun 26.7.3 (odd) and 26.7.4 (even).
fn t_two_sided(t: f64, df: usize) -> f64 {
    let theta = (t / (df as f64).sqrt()).atan();
    let (sin, cos) = theta.sin_cos();
    let mut sum = 0.0;
    if df % 2 == 1 {
        let mut term = cos;
        for i in (2..df).step_by(2) {
            sum += term;
            term *= cos * cos * i as f64 / (i + 1) as f64;
        }
        std::f64::consts::FRAC_2_PI * (theta + sin * sum)
    } else {
        let mut term = 1.0;
        for i in (1..df).step_by(2) {
            sum += term;
            term *= cos * cos * i as f64 / (i + 1) as f64;
        }
        sin * sum
    }
}

/// The t with P(|T| < t) = `confidence`, by bisection of the exact series. `df` of 0 has no quantile.
pub fn t_quantile(confidence: f64, df: usize) -> Option<f64> {
    if df == 0 {
        return None;
    }
    // Beyond this many degrees of freedom the quantile differs from the normal one by under 0.1 %.
    let df = df.min(1000);
    // Most quantiles are near 2, that at df = 1 and 99.9 % is 637. 40 halvings leave a 10^-12th of the bracket.
    let (mut low, mut high) = (0.0, 2.0);
    while high < 1000.0 && t_two_sided(high, df) < confidence {
        (low, high) = (high, 2.0 * high);
    }
    for _ in 0..40 {
        let middle = (low + high) / 2.0;
        if t_two_sided(middle, df) < confidence { low = middle } else { high = middle }
    }
    Some((low + high) / 2.0)
}

/// Trimmed mean with the studentised interval of Tukey and McLaughlin (1963): the standard error is that of
/// the winsorised values, over `1 - 2 * trim`, and t has the degrees of freedom of the values kept.
/// Under 10 values this is the plain t interval. `None` under two values.
pub fn mean_interval(values: &[f64], confidence: f64) -> Option<Interval> {
    let n = values.len();
    if n < 2 {
        return None;
    }
    let sorted = sorted(values);
    let cut = (TRIM * n as f64) as usize;
    let kept = &sorted[cut..n - cut];
    let mean = kept.iter().sum::<f64>() / kept.len() as f64;
    let winsorised = |i: usize| sorted[i.clamp(cut, n - 1 - cut)];
    let centre = (0..n).map(winsorised).sum::<f64>() / n as f64;
    let variance = (0..n).map(|i| (winsorised(i) - centre).powi(2)).sum::<f64>() / (n - 1) as f64;
    let error = variance.sqrt() * (n as f64).sqrt() / kept.len() as f64;
    let reach = t_quantile(confidence, kept.len() - 1)? * error;
    Some(Interval { value: mean, low: mean - reach, high: mean + reach })
}

/// Walsh averages grow with the square: more values than this are first averaged in groups of neighbours.
const RANKED_VALUES: usize = 200;

/// Median of all pairwise means with the interval of Wilcoxon's signed ranks (Hodges and Lehmann 1963), by the normal
/// approximation of the rank sum: from some 20 values on. It asks for symmetry alone, which a log-ratio of two arms
/// under common noise has. Under heavy tails or two modes the studentised interval is too wide, this one is not.
pub fn signed_rank_interval(values: &[f64], confidence: f64) -> Option<Interval> {
    let group = values.len().div_ceil(RANKED_VALUES).max(1);
    let x: Vec<f64> = values.chunks(group).map(|c| c.iter().sum::<f64>() / c.len() as f64).collect();
    let n = x.len() as f64;
    let mut means = Vec::with_capacity(x.len() * (x.len() + 1) / 2);
    for (i, a) in x.iter().enumerate() {
        means.extend(x[i..].iter().map(|b| (a + b) / 2.0));
    }
    means.sort_by(f64::total_cmp);
    let last = means.len().checked_sub(1)?;
    let rank_sum = n * (n + 1.0) / 4.0;
    let deviation = (n * (n + 1.0) * (2.0 * n + 1.0) / 24.0).sqrt();
    let cut = (rank_sum - t_quantile(confidence, usize::MAX)? * deviation).max(0.0) as usize;
    let cut = cut.min(last / 2);
    Some(Interval { value: median(&means)?, low: means[cut], high: means[last - cut] })
}

/// How much wider an interval of the mean must be because neighbours in the series are alike:
/// sqrt(1 + 2 r1), r1 the lag-1 autocorrelation of the winsorised values (first term of Bartlett's formula).
/// At least 1: unlike neighbours never make an interval narrower.
pub fn autocorrelation_widening(series: &[f64]) -> f64 {
    let sorted = sorted(series);
    let cut = (TRIM * series.len() as f64) as usize;
    if series.len() < 3 {
        return 1.0;
    }
    let (low, high) = (sorted[cut], sorted[series.len() - 1 - cut]);
    let values: Vec<f64> = series.iter().map(|x| x.clamp(low, high)).collect();
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let total: f64 = values.iter().map(|x| (x - mean).powi(2)).sum();
    let lagged: f64 = values.windows(2).map(|w| (w[0] - mean) * (w[1] - mean)).sum();
    if total > 0.0 { (1.0 + 2.0 * (lagged / total).max(0.0)).sqrt() } else { 1.0 }
}

/// Distribution-free 95 % interval of the median from order statistics (binomial, conservative).
/// `None` under [`MIN_FOR_MEDIAN_INTERVAL`] values.
pub fn median_interval(values: &[f64]) -> Option<(f64, f64)> {
    let n = values.len();
    if n < MIN_FOR_MEDIAN_INTERVAL {
        return None;
    }
    // Largest k with P(Binomial(n, 1/2) < k) <= 2.5 %; the interval is the k-th value from either end.
    let mut log_term = n as f64 * 0.5f64.ln();
    let mut below = log_term.exp();
    let mut k = 0;
    while below <= (1.0 - CONFIDENCE) / 2.0 {
        k += 1;
        log_term += ((n - k + 1) as f64 / k as f64).ln();
        below += log_term.exp();
    }
    let sorted = sorted(values);
    let k = k.max(1);
    Some((sorted[k - 1], sorted[n - k]))
}

/// A monotone trend over a series in time order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trend {
    /// Theil-Sen slope: median of the slopes between all pairs, per item.
    pub slope: f64,
    /// Mann-Kendall statistic, standard normal without a trend.
    pub z: f64,
}

/// Items beyond this are thinned evenly first: the pairs grow with the square.
const TREND_ITEMS: usize = 512;

/// Trend of a series; `None` under four values, where no order is remarkable.
pub fn trend(values: &[f64]) -> Option<Trend> {
    let stride = values.len().div_ceil(TREND_ITEMS).max(1);
    let series: Vec<f64> = values.iter().copied().step_by(stride).collect();
    let n = series.len();
    if n < 4 {
        return None;
    }
    let mut slopes = Vec::with_capacity(n * (n - 1) / 2);
    let mut score = 0.0;
    for i in 0..n {
        for j in i + 1..n {
            let rise = series[j] - series[i];
            slopes.push(rise / (j - i) as f64);
            score += if rise == 0.0 { 0.0 } else { rise.signum() };
        }
    }
    let variance = (n * (n - 1) * (2 * n + 5)) as f64 / 18.0;
    Some(Trend { slope: median(&slopes)? / stride as f64, z: score / variance.sqrt() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quantiles_of_t_match_printed_tables() {
        // Two-sided 95 % and 99 %, as in any printed table.
        for (df, t95, t99) in [
            (1, 12.7062, 63.6567),
            (2, 4.3027, 9.9248),
            (3, 3.1824, 5.8409),
            (7, 2.3646, 3.4995),
            (19, 2.0930, 2.8609),
            (30, 2.0423, 2.7500),
            (120, 1.9799, 2.6174),
        ] {
            assert!((t_quantile(0.95, df).unwrap() - t95).abs() < 1e-3, "df {df}");
            assert!((t_quantile(0.99, df).unwrap() - t99).abs() < 1e-3, "df {df}");
        }
        assert!((t_quantile(0.95, 1_000_000).unwrap() - 1.96).abs() < 3e-3);
        assert_eq!(t_quantile(0.95, 0), None);
    }

    #[test]
    fn small_cases_are_exact() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(percentile(&[1.0, 2.0, 3.0, 4.0, 5.0], 0.25), Some(2.0));
        assert_eq!(mean_interval(&[1.0], 0.95), None);
        // Mean 2, standard error 1/sqrt(3), t(2) = 4.3027.
        let plain = mean_interval(&[1.0, 2.0, 3.0], 0.95).unwrap();
        assert!(
            (plain.value - 2.0).abs() < 1e-12 && (plain.half_width() - 4.3027 / 3f64.sqrt()).abs() < 1e-3
        );
        // Ten values, one cut at each end: the outlier does not count.
        let mut values: Vec<f64> = (0..10).map(f64::from).collect();
        values[9] = 1e9;
        assert!((mean_interval(&values, 0.95).unwrap().value - 4.5).abs() < 1e-12);
        // Tables of the sign test: n = 6 gives the extremes, n = 20 the 6th from each end.
        let twenty: Vec<f64> = (1..=20).map(f64::from).collect();
        assert_eq!(median_interval(&twenty[..6]), Some((1.0, 6.0)));
        assert_eq!(median_interval(&twenty), Some((6.0, 15.0)));
        assert_eq!(median_interval(&twenty[..5]), None);
    }

    #[test]
    fn signed_ranks_follow_the_printed_table_and_bear_outliers() {
        // n = 20: the critical rank sum at 5 % two-sided is 52, so that the 53rd mean from either end bounds it.
        let values: Vec<f64> = (0..20).map(f64::from).collect();
        let mut means: Vec<f64> =
            (0..20).flat_map(|i| (i..20).map(move |j| f64::from(i + j) / 2.0)).collect();
        means.sort_by(f64::total_cmp);
        let found = signed_rank_interval(&values, CONFIDENCE).unwrap();
        assert_eq!((found.value, found.low, found.high), (9.5, means[52], means[209 - 52]));
        let mut spoilt = values.clone();
        (spoilt[18], spoilt[19]) = (1e6, 1e6);
        assert!(signed_rank_interval(&spoilt, CONFIDENCE).unwrap().high < 30.0);
        assert_eq!(signed_rank_interval(&[], CONFIDENCE), None);
        // Many values are taken in groups: the mean of a line stays.
        let many: Vec<f64> = (0..5000).map(f64::from).collect();
        assert!((signed_rank_interval(&many, CONFIDENCE).unwrap().value - 2499.5).abs() < 1e-9);
    }

    #[test]
    fn alike_neighbours_widen_an_interval_and_nothing_narrows_it() {
        let alternating: Vec<f64> = (0..40).map(|i| f64::from(i % 2)).collect();
        let waves: Vec<f64> = (0..40).map(|i| f64::from(i / 10 % 2)).collect();
        assert_eq!(autocorrelation_widening(&alternating), 1.0);
        assert_eq!(autocorrelation_widening(&[5.0; 9]), 1.0);
        assert!(autocorrelation_widening(&waves) > 1.5);
    }

    #[test]
    fn a_line_is_a_trend_and_a_constant_is_none() {
        let line: Vec<f64> = (0..30).map(|i| 5.0 + 0.25 * f64::from(i)).collect();
        let found = trend(&line).unwrap();
        assert!((found.slope - 0.25).abs() < 1e-12 && found.z > 5.0);
        assert_eq!(trend(&[1.0; 30]), Some(Trend { slope: 0.0, z: 0.0 }));
        assert_eq!(trend(&line[..3]), None);
        let long: Vec<f64> = (0..5000).map(f64::from).collect();
        assert!((trend(&long).unwrap().slope - 1.0).abs() < 1e-12);
    }

    proptest! {
        #[test]
        fn estimates_lie_in_their_intervals(values in prop::collection::vec(0.001f64..1e4, 6..200)) {
            let middle = median(&values).unwrap();
            let (low, high) = median_interval(&values).unwrap();
            prop_assert!(low <= middle && middle <= high);
            let mean = mean_interval(&values, CONFIDENCE).unwrap();
            prop_assert!(mean.low <= mean.value && mean.value <= mean.high);
            let ranks = signed_rank_interval(&values, CONFIDENCE).unwrap();
            prop_assert!(ranks.low <= ranks.value && ranks.value <= ranks.high);
            let top = values.iter().copied().fold(f64::MIN, f64::max);
            prop_assert!(percentile(&values, 1.0).unwrap() == top && mean.value <= top + 1e-9);
        }
    }
}
