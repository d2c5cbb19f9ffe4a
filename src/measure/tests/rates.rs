//! How often a verdict is right: simulated runs of each kind of noise, under the stop rule with its default time.

use super::*;
use rayon::prelude::*;
use std::sync::Arc;

/// Simulated runs of one kind of noise: of a share of 95 % they scatter by 0.4 %. All of these tests together
/// are 45 s of one core's time.
const RUNS: usize = 3000;
/// What an issue asks for, in thousandths of the runs: verdicts on equal arms, and on arms 2 % apart.
const WRONG_AT_MOST: usize = 10;
const EQUIVALENT_AT_LEAST: usize = 900;
const FOUND_AT_LEAST: usize = 950;
/// Intervals of 95 % that hold the truth.
const HELD: std::ops::RangeInclusive<usize> = 930..=970;
/// A split this unlike halves, by chance once in a thousand tries, is none: some hundred splits are looked at here.
const UNEVEN: f64 = 1e-3;

/// One simulated run; logarithms of the speedup and of its interval's ends are over those of the truth.
struct Run {
    verdict: Verdict,
    error: f64,
    low: f64,
    high: f64,
    /// Log-ratios of the pairs, the true one subtracted.
    pairs: Vec<f64>,
}

/// What came of some runs.
struct Judged(Vec<Run>);

impl Judged {
    fn count(&self, verdict: Verdict) -> usize {
        self.0.iter().filter(|r| r.verdict == verdict).count()
    }
    /// Intervals that lie above the truth, and below it.
    fn missed(&self) -> (usize, usize) {
        let count = |missed: fn(&Run) -> bool| self.0.iter().filter(|r| missed(r)).count();
        (count(|r| r.low > 0.0), count(|r| r.high < 0.0))
    }
    /// Intervals that hold the truth when each end is `wider` times as far from the estimate, in thousandths.
    fn held(&self, wider: f64) -> usize {
        let held = |r: &&Run| {
            let end = |end: f64| r.error + (end - r.error) * wider;
            end(r.low) <= 0.0 && 0.0 <= end(r.high)
        };
        self.0.iter().filter(held).count() * 1000 / self.0.len()
    }
    /// Mean of the log speedup over its truth, and its standard deviation.
    fn error(&self) -> (f64, f64) {
        let n = self.0.len() as f64;
        let mean = self.0.iter().map(|r| r.error).sum::<f64>() / n;
        (mean, (self.0.iter().map(|r| (r.error - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt())
    }
    fn half_width(&self) -> f64 {
        let half_widths: Vec<f64> = self.0.iter().map(|r| (r.high - r.low) / 2.0).collect();
        stats::median(&half_widths).unwrap()
    }
    /// Correlation of neighbouring pairs, over all runs.
    fn neighbours_alike(&self) -> f64 {
        let products = self.0.iter().flat_map(|r| r.pairs.windows(2).map(|w| w[0] * w[1]));
        let squares = self.0.iter().flat_map(|r| r.pairs.iter().map(|x| x * x));
        let mean = |all: &mut dyn Iterator<Item = f64>| {
            let (sum, n) = all.fold((0.0, 0.0), |(sum, n), x| (sum + x, n + 1.0));
            sum / n
        };
        mean(&mut products.into_iter()) / mean(&mut squares.into_iter())
    }
}

/// Runs `runs` times what `script` makes of the run's number. `ratio`: the true speedup.
fn judged(runs: usize, ratio: f64, options: &Options, script: impl Fn(u64) -> Script + Sync) -> Judged {
    // The profiling pass comes after the verdict.
    let options = Options { busy: false, ..options.clone() };
    let one = |run| {
        let outcome = measure_script(script(run).without_log(), &options);
        let over_truth = |speedup: f64| (speedup / ratio).ln();
        let (low, high) = outcome.speedup_ci95.unwrap();
        Run {
            verdict: outcome.verdict.unwrap(),
            error: over_truth(outcome.speedup.unwrap()),
            low: over_truth(low),
            high: over_truth(high),
            pairs: blocks::pairs(&outcome.blocks, Pacing::RunAhead).iter().map(|r| r - ratio.ln()).collect(),
        }
    };
    Judged((0..runs as u64).into_par_iter().map(one).collect())
}

/// Chance that a fair coin splits `a + b` throws at least as unevenly.
fn evenness(a: usize, b: usize) -> f64 {
    let (n, few) = ((a + b) as f64, a.min(b));
    let mut log_term = n * 0.5f64.ln();
    let mut tail = log_term.exp();
    for k in 1..=few {
        log_term += ((n - k as f64 + 1.0) / k as f64).ln();
        tail += log_term.exp();
    }
    (2.0 * tail).min(1.0)
}

/// Arms of 5 ms, the eager one `ratio` times as long, issued in `submit_ms` (up to half a step blocks are interleaved),
/// each with independent noise of its own; `common` of the machine.
fn pair(
    (ratio, submit_ms, own): (f64, f64, f64),
    common: impl Fn(u64) -> Noise + Sync,
) -> impl Fn(u64) -> Script + Sync {
    move |run| {
        let own = |side: u64| Noise::seeded(run * 31 + side + 1000).white(own);
        FakeExecutor::script()
            .eager(Times::new(5.0 * ratio).submit_ms(submit_ms).noise(own(1)))
            .graph(Times::new(5.0).submit_ms(submit_ms).noise(own(2)))
            .noise(common(run))
    }
}

/// Noise that the arms have by themselves beside the machine's.
const OWN: f64 = 0.003;

/// A kind of noise: its name, noise of each arm, and how a seed makes the machine's.
type Kind = (&'static str, f64, fn(u64) -> Noise);

const KINDS: [Kind; 7] = [
    ("independent", 0.005, |_| Noise::none()),
    ("white", OWN, |seed| Noise::seeded(seed).white(0.005)),
    ("autocorrelated", OWN, |seed| Noise::seeded(seed).autocorrelated(0.005, 0.9)),
    ("slow", OWN, |seed| Noise::seeded(seed).autocorrelated(0.005, 0.98)),
    ("drifting", OWN, |seed| Noise::seeded(seed).autocorrelated(0.003, 0.7).drift_per_s(0.002)),
    ("two modes", OWN, |seed| Noise::seeded(seed).white(0.002).modes(0.02, 0.02)),
    ("two modes, often", OWN, |seed| Noise::seeded(seed).white(0.002).modes(0.02, 0.1)),
];

/// Whether verdicts and intervals are what is asked for, for equal arms and for 2 % between them.
fn check(name: &str, ratio: f64, found: &Judged) {
    check_intervals(name, ratio, found, 1.0);
    check_verdicts(name, ratio, found);
}

fn check_verdicts(name: &str, ratio: f64, found: &Judged) {
    let [faster, slower, equivalent] =
        [Verdict::Faster, Verdict::Slower, Verdict::Equivalent].map(|v| found.count(v));
    let runs = found.0.len();
    println!("{name} x{ratio:.4}: {faster} of {runs} faster, {slower} slower, {equivalent} equivalent");
    let share = |n: usize| n * 1000 / runs;
    if ratio == 1.0 {
        check_wrong(name, found);
        assert!(share(equivalent) >= EQUIVALENT_AT_LEAST, "{name}: {equivalent} of {runs} equivalent");
    } else {
        let (right, wrong) = if ratio > 1.0 { (faster, slower) } else { (slower, faster) };
        assert!(share(right) >= FOUND_AT_LEAST, "{name} x{ratio}: {right} of {runs} found");
        assert_eq!(wrong, 0, "{name} x{ratio}: verdicts the wrong way round");
    }
}

/// Equal arms that are called different.
fn check_wrong(name: &str, found: &Judged) {
    let (faster, slower) = (found.count(Verdict::Faster), found.count(Verdict::Slower));
    assert!(
        (faster + slower) * 1000 <= WRONG_AT_MOST * found.0.len(),
        "{name}: {faster} faster, {slower} slower"
    );
    assert!(evenness(faster, slower) > UNEVEN, "{name}: {faster} faster, {slower} slower");
}

/// `wider`: what the intervals are known to be too wide by, 1 unless said why.
fn check_intervals(name: &str, ratio: f64, found: &Judged, wider: f64) {
    let (held, (above, below)) = (found.held(1.0 / wider), found.missed());
    println!(
        "{name} x{ratio:.4}: {held} of 1000 intervals hold the truth, in all {above} lie above, {below} below"
    );
    assert!(HELD.contains(&held), "{name} x{ratio}: {held} of 1000 intervals hold the truth");
    assert!(evenness(above, below) > UNEVEN, "{name} x{ratio}: {above} intervals too high, {below} too low");
}

#[test]
fn a_fair_split_is_told_from_another() {
    // Printed binomial tables: 2 * P(X <= 1 of 10) = 0.0215, 2 * P(X <= 0 of 10) = 0.00195.
    assert!((evenness(1, 9) - 0.0215).abs() < 1e-4 && (evenness(10, 0) - 0.00195).abs() < 1e-5);
    assert_eq!((evenness(0, 0), evenness(5, 5)), (1.0, 1.0));
    assert!(evenness(14, 36) > UNEVEN && evenness(12, 38) < UNEVEN);
}

#[test]
fn equal_arms_are_not_told_apart() {
    let mut all = Judged(Vec::new());
    for (name, own, noise) in KINDS {
        for submit_ms in [0.1, 3.0] {
            let found = judged(RUNS, 1.0, &Options::default(), pair((1.0, submit_ms, own), noise));
            check(&format!("{name}, {submit_ms} ms issued"), 1.0, &found);
            all.0.extend(found.0);
        }
    }
    // What is too little to see in one kind may be seen in all of them.
    check("all kinds", 1.0, &all);
}

#[test]
fn two_percent_are_found() {
    for (name, own, noise) in KINDS {
        for (ratio, submit_ms) in [(1.02, 0.1), (1.0 / 1.02, 3.0)] {
            let found = judged(RUNS, ratio, &Options::default(), pair((ratio, submit_ms, own), noise));
            check(&format!("{name}, {submit_ms} ms issued"), ratio, &found);
        }
    }
}

/// Run-ahead steps of an H200 as they followed one another, of four layers against themselves, by workload and run, as
/// factors of the arm's median over all runs. Recorded by `benches/verdict.sh aa` (results/h200/aa.steps.csv.gz).
fn recorded_factors(workload: &str) -> Arc<[Vec<f64>]> {
    let mut csv = csv::Reader::from_reader(include_str!("../../../tests/data/h200_steps.csv").as_bytes());
    let mut runs: Vec<(String, Vec<f64>)> = csv
        .records()
        .map(|record| record.unwrap())
        .filter(|record| &record[0] == workload)
        .map(|record| (record[1].to_string(), record[2].split(' ').map(|us| us.parse().unwrap()).collect()))
        .collect();
    assert_eq!(runs.len(), 40, "{workload}");
    for arm in ["eager", "graph"] {
        let own = || runs.iter().filter(|(a, _)| a == arm).flat_map(|(_, us)| us.iter().copied());
        let middle = stats::median(&own().collect::<Vec<f64>>()).unwrap();
        for (_, us) in runs.iter_mut().filter(|(a, _)| a == arm) {
            us.iter_mut().for_each(|us| *us /= middle);
        }
    }
    runs.into_iter().map(|(_, factors)| factors).collect()
}

/// Steps of a recording that stay together, in the mean: ten times as long as steps there are alike (on neither workload
/// are steps 20 apart).
const STRETCH: f64 = 200.0;

/// The stop rule on the noise of a real card at its power cap, with and without 2 % between the arms.
#[test]
fn recorded_steps_are_judged_as_fairly() {
    for (workload, base_ms, alternates) in [("llama3_8b_512", 4.8, false), ("qwen3_30b_a3b_4096", 17.5, true)]
    {
        let factors = recorded_factors(workload);
        for ratio in [1.0, 1.02, 1.0 / 1.02] {
            let script = |run| {
                FakeExecutor::script()
                    .eager(Times::new(base_ms * ratio))
                    .graph(Times::new(base_ms))
                    .noise(Noise::seeded(run).resampled(factors.clone(), STRETCH))
            };
            let found = judged(RUNS, ratio, &Options::default(), script);
            let alike = found.neighbours_alike();
            println!("{workload} x{ratio:.4}: neighbouring pairs are alike by {alike:.3}");
            assert_eq!(alike < -0.1, alternates, "{workload} x{ratio}: {alike}");
            // Two timed steps a block, and steps that are alike over three or four: a pair's outer steps are of one arm and
            // meet the next pair's, which are of the other. The mean of the pairs then scatters by sqrt(1 + 2 r) of
            // what independent ones would, and no interval is made narrower for it (docs/measuring.md).
            let wider = if alternates { 1.0 / (1.0 + 2.0 * alike).sqrt() } else { 1.0 };
            check_intervals(workload, ratio, &found, wider);
            assert!(found.held(1.0) >= *HELD.start(), "{workload} x{ratio}");
            check_verdicts(workload, ratio, &found);
        }
    }
}

/// A clock that wanders within 50 ms by more than the interval is to be wide: seen by blocks one after the other, not by
/// steps side by side.
#[test]
fn a_fast_wander_of_the_clock_does_not_widen_the_interval() {
    let options = Options { aa: Some(Arm::Graph), max_time_s: 2.0, longest_time_s: None, ..quick() };
    let seen = |submit_ms: f64| {
        judged(RUNS, 1.0, &options, |seed| {
            let own = |seed| Times::new(5.0).submit_ms(submit_ms).noise(Noise::seeded(seed).white(0.003));
            // Half of a deviation is left after 35 ms.
            let clock = Noise::seeded(seed + 3000).autocorrelated(0.02, 0.9);
            FakeExecutor::script().eager(own(seed)).noise(clock).graph(own(seed + 1000))
        })
    };
    let (apart, interleaved) = (seen(3.0), seen(0.1));
    let (wide, narrow) = (apart.half_width(), interleaved.half_width());
    assert!(narrow < 0.005 && wide > 2.5 * narrow, "{wide} {narrow}");
    check("fast wander, interleaved", 1.0, &interleaved);
}

#[test]
fn long_noisy_steps_are_judged_as_fairly() {
    let found = judged(RUNS, 1.0, &Options::default(), |seed| {
        let own = |side: u64| Noise::seeded(seed * 31 + side + 1000).white(0.003);
        FakeExecutor::script()
            .eager(Times::new(500.0).noise(own(1)))
            .graph(Times::new(500.0).noise(own(2)))
            .noise(Noise::seeded(seed).autocorrelated(0.005, 0.5))
    });
    // Some 12 pairs of single steps: not every interval is narrow enough to lie in the band.
    check_intervals("long steps", 1.0, &found, 1.0);
    check_wrong("long steps", &found);
}

/// Runs on each side of a comparison of two settings, with the same seeds.
const RUNS_TO_COMPARE: usize = 500;
/// Means of that many runs may differ by so many of their standard errors, and never by more than a tenth of the
/// interval's half-width at which timing stops.
const ERRORS_APART: f64 = 3.0;
const MOVED_AT_MOST: f64 = 0.0005;

/// Arms of 2.04 and 2 ms under noise that outlasts a step, the machine cold at first and the graph arm more so.
fn cold_arms(seed: u64) -> Script {
    let own = Noise::seeded(seed + 1000).white(OWN);
    FakeExecutor::script()
        .eager(Times::new(2.04).noise(own))
        .graph(Times::new(2.0).noise(Noise::seeded(seed + 2000).white(OWN).cold(0.2, 50.0)))
        .noise(Noise::seeded(seed).autocorrelated(0.003, 0.8).cold(0.3, 500.0))
}

/// The settings find the same speedup, and each as surely as its intervals say. Returns the spread of each.
fn finds_the_same(what: &str, settings: [Options; 2]) -> [f64; 2] {
    let found = settings.map(|options| judged(RUNS_TO_COMPARE, 1.02, &options, cold_arms));
    let [(mean, spread), (other_mean, other_spread)] = found.each_ref().map(Judged::error);
    let error = ((spread.powi(2) + other_spread.powi(2)) / RUNS_TO_COMPARE as f64).sqrt();
    let moved = (mean - other_mean).abs();
    println!("{what}: {mean:.6} +- {spread:.6}, {other_mean:.6} +- {other_spread:.6}");
    assert!(moved <= ERRORS_APART * error && moved <= MOVED_AT_MOST, "{what}: {moved}, {error}");
    for found in &found {
        check(what, 1.02, found);
    }
    [spread, other_spread]
}

#[test]
fn warm_up_does_not_move_the_result() {
    let [few, many] = finds_the_same(
        "warm-up of 3 and of 30 steps",
        [3, 30].map(|warmup_steps| Options { warmup_steps, ..Options::default() }),
    );
    // The ratio of two spreads of 500 runs scatters by 4.5 %.
    assert!((0.8..1.25).contains(&(few / many)), "{few} {many}");
}

#[test]
fn the_length_of_blocks_does_not_move_the_result() {
    for block_steps in [10, 100] {
        let options = Options { block_steps: Some(block_steps), ..Options::default() };
        let outcome = measure_script(cold_arms(0), &options);
        let blocks = || outcome.blocks.iter().filter(|b| b.pacing == Pacing::RunAhead);
        assert!(blocks().count() >= 40 && blocks().all(|b| b.steady_steps == block_steps));
    }
    let [short, long] = finds_the_same(
        "blocks of 10 and of 100 steps",
        [10, 100].map(|n| Options { block_steps: Some(n), ..Options::default() }),
    );
    // As many pairs of ten times the steps.
    assert!(long < short, "{long} {short}");
}

#[test]
fn a_device_that_spins_two_percent_longer_is_found() {
    for arm in [Arm::Eager, Arm::Graph] {
        let options = Options { aa: Some(arm), device_spin: 0.02, ..Options::default() };
        let noise = |seed| FakeExecutor::script().noise(Noise::seeded(seed).white(0.003));
        let found = judged(RUNS_TO_COMPARE, 1.0 / 1.02, &options, noise);
        assert!(found.count(Verdict::Slower) * 1000 >= FOUND_AT_LEAST * RUNS_TO_COMPARE);
        // The spin is 2 % of the first steps' time, which has noise too.
        assert!(found.error().0.abs() < MOVED_AT_MOST, "{:?}", found.error());
    }
}
