//! What may explain a change, or weakens it. What many rows share is said once, with their number.

use super::keys::WORTH_A_WARNING;
use super::pair::Pair;
use super::read::Record;

/// Share of long steps above which a run counts as disturbed: the column's own meaning.
const DISTURBED: f64 = 0.05;

/// Something that rows have in common.
struct Shared {
    what: String,
    /// The first row that has it, and how many do.
    first: String,
    rows: usize,
}

/// Warnings of all pairs; labels name the configuration by the `telling` columns.
pub fn warnings(pairs: &[Pair], telling: &[&str]) -> Vec<String> {
    let (mut differing, mut shared, mut failed) = (Vec::new(), Vec::<Shared>::new(), Vec::new());
    let mut all = 0;
    for pair in pairs {
        let (base, new) = (pair.base.records(), pair.new.records());
        all += base.len() + new.len();
        differing.extend(differences(&base, &new));
        for row in base.iter().chain(&new) {
            for what in of_row(row) {
                match shared.iter_mut().find(|s| s.what == what) {
                    Some(known) => known.rows += 1,
                    None => shared.push(Shared { what, first: row.place(), rows: 1 }),
                }
            }
        }
        for (side, runs) in [("base", &pair.base), ("new", &pair.new)] {
            if !runs.failed.is_empty() {
                let (label, count) = (pair.key.label(telling), runs.failed.len());
                failed
                    .push(format!("{label}: {count} of its runs failed in {side}; the others are compared"));
            }
        }
    }
    let mut warnings: Vec<String> = Vec::new();
    for text in differing {
        if !warnings.contains(&text) {
            warnings.push(text);
        }
    }
    let line = |s: &Shared| match s.rows {
        1 => format!("{}: {}", s.first, s.what),
        rows => format!("{}: {rows} of {all} rows, the first {}", s.what, s.first),
    };
    warnings.extend(shared.iter().map(line));
    warnings.extend(failed);
    warnings
}

/// Columns that differ and may be the cause of a change.
fn differences(base: &[&Record], new: &[&Record]) -> Vec<String> {
    let there = |column: &str| base.iter().chain(new).any(|row| row.get(column).is_some());
    let differs = WORTH_A_WARNING.iter().filter(|f| there(f.name)).filter_map(|field| {
        field.unlike(base, new, &|row| field.cell(row).map(str::to_owned).map_err(str::to_owned))
    });
    differs.map(|u| format!("{} differs: {} in base, {} in new", u.field, u.base, u.new)).collect()
}

/// What a row says of its own figures.
fn of_row(row: &Record) -> Vec<String> {
    let mut found = Vec::new();
    let throttled = row.cell("throttle_reasons");
    if !throttled.is_empty() && throttled != "none" {
        found.push(format!("clocks were held back ({throttled})"));
    }
    if row.cell("disturbed_fraction").parse::<f64>().is_ok_and(|share| share > DISTURBED) {
        found.push("step times look disturbed by something else on the GPU".into());
    }
    if row.cell("other_processes_max").parse::<u64>().is_ok_and(|n| n > 0) {
        found.push("other processes computed on the GPU".into());
    }
    if row.cell("repetition").parse::<u64>().is_ok_and(|n| n > 1) {
        let why = "their spread lacks what processes differ by";
        found.push(format!("repetitions in one process count as runs: {why}"));
    }
    if row.cell("device") == "cpu" {
        found.push("device cpu: its times say nothing about a GPU".into());
    }
    found
}
