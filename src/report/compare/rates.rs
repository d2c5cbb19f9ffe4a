//! How often equal things are called changed, and true changes found: simulated, over kinds of noise between runs.
//!
//! The constants of `judge` were chosen on other seeds. Those here gave their first figures after the last change.

use super::*;

/// Reproducible numbers (splitmix64; Box and Muller).
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
    fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Noise {
    /// Independent, normal.
    White,
    /// First-order autoregression over the runs in time order, correlation 0.7.
    Alike,
    /// A line over all runs, up or down, of twice the level in all, and half the level of white noise.
    Drift,
    /// One of two values that lie the level apart, evenly or one in five, and a quarter of the level of white noise.
    TwoModes,
    RareMode,
}

const KINDS: [Noise; 5] = [Noise::White, Noise::Alike, Noise::Drift, Noise::TwoModes, Noise::RareMode];
/// Level of the noise: its standard deviation, unless the kind says otherwise.
const LEVELS: [f64; 4] = [0.002, 0.01, 0.02, 0.03];
const PAIRS: usize = 10_000;

/// Logarithms of `count` runs in the order they were made.
fn series(random: &mut Random, noise: Noise, level: f64, count: usize) -> Vec<f64> {
    const ALIKE: f64 = 0.7;
    let mut state = random.normal();
    let up = if random.unit() < 0.5 { 1.0 } else { -1.0 };
    let modes = |random: &mut Random, share: f64| if random.unit() < share { level } else { 0.0 };
    (0..count)
        .map(|i| match noise {
            Noise::White => level * random.normal(),
            Noise::Alike => {
                let now = level * state;
                state = ALIKE * state + (1.0 - ALIKE * ALIKE).sqrt() * random.normal();
                now
            }
            Noise::Drift => {
                let at = i as f64 / (count - 1) as f64 - 0.5;
                level * (2.0 * up * at + 0.5 * random.normal())
            }
            Noise::TwoModes => modes(random, 0.5) + 0.25 * level * random.normal(),
            Noise::RareMode => modes(random, 0.2) + 0.25 * level * random.normal(),
        })
        .collect()
}

/// Runs of both sides: made in turn (base, new, new, base, ...), or all of one side before the other's.
fn sides(all: &[f64], in_turn: bool, shift: f64) -> [Vec<Sample>; 2] {
    let mut sides = [Vec::new(), Vec::new()];
    for (i, log) in all.iter().enumerate() {
        let side = if in_turn { usize::from(i % 4 == 1 || i % 4 == 2) } else { i / (all.len() / 2) };
        let cost = (log + if side == 1 { shift } else { 0.0 }).exp();
        sides[side].push(Sample { cost, ci95: Some((cost * 0.997, cost * 1.003)) });
    }
    sides
}

/// Share called (regression, improvement, undecided), in percent.
fn rates(seed: u64, noise: Noise, level: f64, runs: usize, in_turn: bool, slowdown: f64) -> [f64; 3] {
    let mut random = Random(seed);
    let mut counts = [0usize; 3];
    for _ in 0..PAIRS {
        let [base, new] = sides(&series(&mut random, noise, level, 2 * runs), in_turn, slowdown.ln_1p());
        let change = change(&base, &new, Scatter::TIMING).unwrap();
        match judge(change.log, change.least, 0.05) {
            Verdict::Regression => counts[0] += 1,
            Verdict::Improvement => counts[1] += 1,
            Verdict::Undecided => counts[2] += 1,
            _ => {}
        }
    }
    counts.map(|n| n as f64 * 100.0 / PAIRS as f64)
}

/// A seed of its own for each cell.
fn seed(kind: usize, level: usize, runs: usize) -> u64 {
    0x1129_2026_0a5e + (kind * 100 + level * 10 + runs) as u64 * 0x1_0000_0001
}

#[test]
fn equal_things_are_seldom_called_regressions_whatever_the_noise() {
    for (k, noise) in KINDS.into_iter().enumerate() {
        for runs in 1..=5 {
            let found: Vec<[f64; 3]> = LEVELS
                .into_iter()
                .enumerate()
                .map(|(l, level)| rates(seed(k, l, runs), noise, level, runs, true, 0.0))
                .collect();
            let regressions: Vec<f64> = found.iter().map(|f| f[0]).collect();
            println!("{noise:?}, {runs} runs: {regressions:.2?} %");
            assert!(regressions.iter().all(|r| *r <= 1.0), "{noise:?}, {runs} runs: {regressions:?}");
            // Both directions alike, within 4 sigma of a coin (in counts).
            for [slower, faster, _] in found {
                let (slower, faster) = (slower * PAIRS as f64 / 100.0, faster * PAIRS as f64 / 100.0);
                assert!((slower - faster).abs() <= 4.0 * (slower + faster).sqrt() + 1.0, "{slower} {faster}");
            }
        }
    }
}

/// Why runs of both sides should be made in turn: no spread within a side shows a drift between them.
#[test]
fn drift_between_the_sides_is_no_noise() {
    for runs in 2..=5 {
        let share = |in_turn| rates(seed(7, 0, runs), Noise::Drift, 0.03, runs, in_turn, 0.0)[0];
        let (turns, apart) = (share(true), share(false));
        println!("drift of 6 % over {runs} runs a side: in turn {turns:.2} %, one side first {apart:.2} %");
        assert!(turns <= 0.1 && apart > turns, "{runs} runs: {turns} {apart}");
    }
}

#[test]
fn true_changes_are_found() {
    // (slowdown, noise, runs, found at least, passed at most), in percent but for the runs.
    for (slowdown, level, runs, least, passed) in [
        (0.05, 0.01, 3, 90.0, 0.5),
        (0.05, 0.01, 4, 95.0, 0.5),
        (0.05, 0.01, 5, 95.0, 0.5),
        (0.05, 0.005, 3, 99.0, 0.5),
        (0.05, 0.01, 2, 30.0, 0.5),
        (0.05, 0.01, 1, 0.0, 3.0),
        (0.2, 0.01, 1, 99.0, 0.1),
        (0.2, 0.01, 2, 95.0, 0.1),
        (0.2, 0.03, 1, 95.0, 0.1),
        (0.2, 0.03, 5, 99.0, 0.1),
    ] {
        let [found, faster, undecided] = rates(seed(8, 0, runs), Noise::White, level, runs, true, slowdown);
        let pass = 100.0 - found - faster - undecided;
        println!(
            "{slowdown} slower on {level}, {runs} runs: {found:.1} % found, {undecided:.1} % undecided, {pass:.2} % passed"
        );
        assert!(
            found >= least && faster == 0.0 && pass <= passed,
            "{slowdown} {level} {runs}: {found} {pass}"
        );
    }
}
