//! `compare` on simulated runs: false alarms, true slowdowns, and files that are broken at random.

use crate::common::results::Results;
use mbperf::report::compare::{Gate, Options, Report, Source, Verdict, compare, keys};
use proptest::prelude::*;

/// Normal numbers, reproducible (splitmix64, Box and Muller).
struct Noise(u64);

impl Noise {
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

fn source(name: &str, bytes: Vec<u8>) -> Source {
    Source { name: name.into(), bytes: Ok(bytes) }
}

fn judged(base: &Results, new: &Results) -> Report {
    compare(&[source("base.csv", base.bytes())], &[source("new.csv", new.bytes())], &Options::default())
}

/// Runs whose speedup is `ratio` of the true one, with noise between runs.
fn side(noise: &mut Noise, name: &str, runs: usize, ratio: f64, sd: f64, half: f64) -> Results {
    (0..runs).fold(Results::default(), |r, i| {
        let speedup = 1.25 * ratio * (sd * noise.normal()).exp();
        r.run(&format!("{name}{i}"), 100.0, speedup, half)
    })
}

/// Counts of (regression, improvement, undecided) over pairs of sides.
fn counts(seed: u64, pairs: usize, runs: usize, ratio: f64, sd: f64, half: f64) -> (usize, usize, usize) {
    let mut noise = Noise(seed);
    let mut counts = (0, 0, 0);
    for _ in 0..pairs {
        let base = side(&mut noise, "b", runs, 1.0, sd, half);
        let new = side(&mut noise, "n", runs, ratio, sd, half);
        match judged(&base, &new).rows[0].verdict {
            Verdict::Regression => counts.0 += 1,
            Verdict::Improvement => counts.1 += 1,
            Verdict::Undecided => counts.2 += 1,
            _ => {}
        }
    }
    counts
}

const PAIRS: usize = 1000;
/// Runs a side, and the standard deviation between runs.
const RUNS_AND_NOISE: [(usize, f64); 9] =
    [(1, 0.003), (1, 0.03), (2, 0.01), (2, 0.03), (3, 0.01), (3, 0.02), (3, 0.03), (5, 0.03), (10, 0.015)];

/// From file to verdict; kinds of noise and larger numbers are in the unit tests of `judge`.
#[test]
fn equal_things_are_called_regressions_once_in_a_hundred_at_most_and_evenly() {
    for (runs, sd) in RUNS_AND_NOISE {
        let (slower, faster, undecided) = counts(41 + runs as u64, PAIRS, runs, 1.0, sd, 0.003);
        println!("A/A {runs} runs, {sd}: {slower} slower, {faster} faster, {undecided} undecided of {PAIRS}");
        // 1 % is 10; 20 in 1,000 are 3 sigma above it.
        assert!(slower <= 20 && faster <= 20, "{runs} runs, {sd}: {slower} + {faster}");
        // Evenly: within 4 sigma of a coin.
        let odd = slower.abs_diff(faster) as f64;
        assert!(odd <= 4.0 * ((slower + faster) as f64).sqrt(), "{slower} slower, {faster} faster");
        // Runs that scatter as little as on a quiet machine pass, most of them.
        assert!(sd > 0.005 || undecided * 10 <= PAIRS, "{runs} runs, {sd}: {undecided} undecided");
    }
}

#[test]
fn a_slowdown_of_five_percent_on_one_percent_noise_is_found() {
    for (runs, least) in [(3, 88), (4, 95), (5, 95), (10, 95)] {
        let (found, faster, undecided) = counts(7 + runs as u64, PAIRS, runs, 1.0 / 1.05, 0.01, 0.003);
        println!("5 % slower, {runs} runs: {found} found, {undecided} undecided, {faster} faster of {PAIRS}");
        assert!(found * 100 >= PAIRS * least, "{runs} runs: {found}");
        assert!((found + undecided) * 1000 >= PAIRS * 995 && faster == 0, "{runs} runs: {undecided}");
    }
    // Two runs or one seldom suffice: what they miss is undecided, not passed.
    for (runs, sd) in [(2, 0.01), (1, 0.007)] {
        let (found, _, undecided) = counts(9, PAIRS, runs, 1.0 / 1.05, sd, 0.003);
        println!("5 % slower, {runs} runs: {found} found, {undecided} undecided of {PAIRS}");
        assert!((found + undecided) * 100 >= PAIRS * 98, "{found} {undecided}");
    }
    let (found, _, _) = counts(6, PAIRS, 1, 1.0 / 1.2, 0.01, 0.005);
    assert_eq!(found, PAIRS);
}

#[test]
fn two_percent_on_half_a_percent_of_noise_are_found_by_a_threshold_of_two_percent() {
    let options = Options { ratio_threshold: 0.02, ..Options::default() };
    let mut noise = Noise(12);
    let found = (0..PAIRS)
        .filter(|_| {
            let base = side(&mut noise, "b", 6, 1.0, 0.005, 0.003);
            let new = side(&mut noise, "n", 6, 1.0 / 1.02, 0.005, 0.003);
            let report =
                compare(&[source("base.csv", base.bytes())], &[source("new.csv", new.bytes())], &options);
            report.rows[0].verdict == Verdict::Regression
        })
        .count();
    println!("2 % slower on 0.5 %, 6 runs: {found} found of {PAIRS}");
    assert!(found * 100 >= PAIRS * 95, "{found}");
}

/// A pass means that every gated figure was a figure, checked here without the code under test.
fn may_pass(report: &Report) -> bool {
    report.exit_code != 0
        || !report.rows.is_empty()
            && report.rows.iter().all(|r| {
                [r.base, r.new, r.change_ci99_low, r.change_ci99_high]
                    .iter()
                    .all(|x| x.is_some_and(f64::is_finite))
                    && r.base.unwrap() > 0.0
                    && r.new.unwrap() > 0.0
            })
}

fn all_gates() -> Options {
    Options { gates: vec![Gate::Both, Gate::Memory], ..Options::default() }
}

/// A configuration a sequence length; commands differ too, as they do by `-o`.
fn many(count: usize, from: usize) -> Results {
    let mut results = Results::default();
    for i in from..from + count {
        results = results.run(&format!("r{i}"), 100.0, 1.25, 0.003);
        let rows = results.rows.len();
        let (sequence, command) = (results.at("seq_length"), results.at("command"));
        for row in &mut results.rows[rows - 2..] {
            row[sequence] = (i + 1).to_string();
            row[command] = format!("mbperf -m llama -mr llama3_8b -g h100 -sl {} -o r{i}.csv", i + 1);
        }
    }
    results
}

/// Far below what a comparison of each with each takes: minutes.
#[test]
fn thousands_of_configurations_take_seconds() {
    for (base, new, missing) in [(many(3000, 0), many(3000, 0), 0), (many(3000, 0), many(3000, 3000), 12_000)]
    {
        let started = std::time::Instant::now();
        let report = judged(&base, &new);
        let took = started.elapsed().as_secs_f64();
        println!("{missing} missing: {took:.2} s");
        assert_eq!((report.missing.len(), report.rows.len()), (missing, if missing == 0 { 3000 } else { 0 }));
        assert!(report.missing.iter().all(|m| m.reason.contains("differs in seq_length")));
        assert!(took < 40.0, "{took}");
    }
}

/// What becomes of a column's cells.
#[derive(Debug, Clone)]
enum Change {
    Cell(String),
    Gone,
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => "[a-z0-9]{1,6}".prop_map(Change::Cell),
        1 => "[0-9]{1,4}".prop_map(Change::Cell),
        1 => prop::sample::select(vec!["true", "false", "cpu", "a", "b"]).prop_map(|c| Change::Cell(c.into())),
        2 => Just(Change::Cell(String::new())),
        1 => Just(Change::Cell(" ".into())),
        2 => Just(Change::Gone),
    ]
}

/// Rows in which every field holds something.
fn told(name: &str) -> Results {
    [
        ("variant", "large"),
        ("approximations", "x"),
        ("moe_routing", "router"),
        ("microbatches_extrapolated", "16"),
    ]
    .into_iter()
    .chain([("tokens_routed", "64"), ("tokens_padded", "0"), ("tokens_dropped", "0")])
    .fold(Results::three(name, 1.0, 1.0), |r, (column, cell)| r.with(column, cell))
}

/// A column cannot be gone from one row.
fn changed(results: Results, column: &str, change: &Change, row: Option<usize>) -> Results {
    match (change, row) {
        (Change::Gone, _) => results.without(column),
        (Change::Cell(cell), None) => results.with(column, cell),
        (Change::Cell(cell), Some(row)) => results.with_row(row, column, cell),
    }
}

/// Columns of which an empty cell says something, named here without the code under test.
const MAY_BE_EMPTY: [&str; 6] =
    ["variant", "cuda_graph_scope", "approximations", "moe_routing", "microbatches_extrapolated", "aa"];

/// Whether a column tells that all rows of both sides are of one kind, judged without the code under test.
fn alike(base: &Results, new: &Results, column: &str) -> bool {
    let cells = |r: &Results| -> Option<Vec<String>> {
        let at = r.header.iter().position(|c| c == column)?;
        Some(r.rows.iter().map(|row| row[at].clone()).collect())
    };
    let (Some(mut all), Some(more)) = (cells(base), cells(new)) else { return false };
    all.extend(more);
    if all.iter().any(|c| c.trim().is_empty()) && !MAY_BE_EMPTY.contains(&column) {
        return false;
    }
    if column == "sm_clock_mhz_median" {
        let clocks: Option<Vec<f64>> = all.iter().map(|c| c.parse().ok()).collect();
        return clocks.is_some_and(|c| c.iter().all(|a| c.iter().all(|b| *a > 0.0 && a / b <= 1.0501)));
    }
    all.iter().all(|c| *c == all[0]) && (column != "command" || all[0].starts_with("mbperf -m llama"))
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic_and_never_pass(bytes in prop::collection::vec(any::<u8>(), 0..2000), text in "\\PC*") {
        let good = Results::three("base", 1.0, 1.0).bytes();
        for broken in [bytes, text.into_bytes()] {
            for (base, new) in [(good.clone(), broken.clone()), (broken.clone(), good.clone()), (broken.clone(), broken.clone())] {
                prop_assert_eq!(compare(&[source("b", base)], &[source("n", new)], &all_gates()).exit_code, 12);
            }
        }
    }

    #[test]
    fn mutated_bytes_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..3), 1..6)) {
        let good = Results::three("base", 1.0, 1.0).bytes();
        let mut bytes = good.clone();
        for (at, byte, kind) in edits {
            let at = at.index(bytes.len());
            match kind {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ => { bytes.remove(at); }
            }
        }
        for (base, new) in [(&good, &bytes), (&bytes, &good)] {
            let report = compare(&[source("b", base.clone())], &[source("n", new.clone())], &all_gates());
            prop_assert!(may_pass(&report), "{:?}", report);
        }
    }

    #[test]
    fn a_cell_that_counts_and_is_no_figure_never_passes(
        column in prop::sample::select(vec!["speedup", "step_time_ms_median", "peak_memory_mib", "speedup_ci95_low", "step_time_ms_ci95_high"]),
        row in 0usize..6,
        cell in "[^0-9]*|-[0-9.]+|[0-9]+,[0-9]+|0*|[0-9]+[a-df-z ]+",
    ) {
        // The speedup is read from the graph's row of a run.
        let row = if column.starts_with("speedup") { row | 1 } else { row };
        let good = Results::three("base", 1.0, 1.0);
        let broken = Results::three("new", 1.0, 1.0).with_row(row, column, &cell);
        for (base, new) in [(&good, &broken), (&broken, &good)] {
            let report = compare(&[source("b", base.bytes())], &[source("n", new.bytes())], &all_gates());
            prop_assert_eq!(report.exit_code, 12, "{:?}", report);
            let row_name = format!("row {}", row + 1);
            let named = report.reasons.iter().any(|r| r.contains(column) && r.contains(&row_name));
            prop_assert!(named);
        }
    }

    #[test]
    fn a_field_that_differs_or_is_not_told_never_passes(
        field in prop::sample::select(keys::fields().collect::<Vec<_>>()),
        change in change(),
        sides in 0usize..3,
        row in prop::option::of(0usize..6),
    ) {
        let column = if field == keys::WORKLOAD { "command" } else { field };
        let (base, new) = (told("base"), told("new"));
        let (base, new) = match sides {
            0 => (changed(base, column, &change, row), new),
            1 => (base, changed(new, column, &change, row)),
            // Of both sides all rows: equal rows of a pair are alike, whatever the others hold.
            _ => (changed(base, column, &change, None), changed(new, column, &change, None)),
        };
        let report = judged(&base, &new);
        if alike(&base, &new, column) {
            prop_assert!(report.exit_code == 0 || !report.reasons.is_empty(), "{:?}", report);
        } else {
            prop_assert_eq!(report.exit_code, 12, "{} {:?} {:?}", field, change, row);
            let unlike = report.unlike.iter().any(|u| u.field == field);
            let missing = report.missing.iter().any(|m| m.reason.contains(field));
            let reason = report.reasons.iter().any(|r| r.contains(column));
            prop_assert!(unlike || missing || reason, "{}: {:?}", field, report);
        }
    }

    #[test]
    fn swapping_the_sides_swaps_the_verdict(ratio in 0.7f64..1.4, runs in 1usize..4) {
        let mut noise = Noise(11);
        let base = side(&mut noise, "b", runs, 1.0, 0.005, 0.003);
        let new = side(&mut noise, "n", runs, ratio, 0.005, 0.003);
        let (there, back) = (judged(&base, &new).rows[0].verdict, judged(&new, &base).rows[0].verdict);
        prop_assert_eq!(there == Verdict::Regression, back == Verdict::Improvement);
        prop_assert_eq!(there == Verdict::Improvement, back == Verdict::Regression);
    }
}

/// The fuzzer begins with two files that pass: bytes that it changes there must not pass for no reason.
#[test]
fn the_fuzzer_has_a_pair_that_passes() {
    let pair = std::fs::read("fuzz/corpus/compare/passes").unwrap();
    let separator = b"\n=====\n";
    let at = pair.windows(separator.len()).position(|w| w == separator).unwrap();
    let (base, new) = (pair[..at + 1].to_vec(), pair[at + separator.len()..].to_vec());
    for gates in [vec![Gate::Ratio], vec![Gate::Both, Gate::Memory]] {
        let options = Options { gates, ..Options::default() };
        let report =
            compare(&[source("base.csv", base.clone())], &[source("new.csv", new.clone())], &options);
        assert_eq!(report.exit_code, 0, "{report:?}");
    }
}
