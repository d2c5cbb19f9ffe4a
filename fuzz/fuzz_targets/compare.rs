//! `mbperf compare` on arbitrary files: no panic in reading, judging or printing, and a pass only with figures.
//!
//! Input: the baseline file, a line `=====`, the new file. Without the line both sides are the whole input.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mbperf::report::compare::{Gate, Options, Source, Verdict, compare, print};

const SEPARATOR: &[u8] = b"\n=====\n";
/// Columns without which no two rows are known to be of one workload.
const TOLD: [&str; 10] = [
    "device",
    "seed",
    "comm",
    "te_rng_tracker",
    "overlap_wgrad",
    "stack_only",
    "seq_length",
    "host_model",
    "moe_routing",
    "command",
];

fuzz_target!(|data: &[u8]| {
    let (base, new) = match data.windows(SEPARATOR.len()).position(|w| w == SEPARATOR) {
        Some(at) => (&data[..at + 1], &data[at + SEPARATOR.len()..]),
        None => (data, data),
    };
    let source = |name: &str, bytes: &[u8]| Source { name: name.into(), bytes: Ok(bytes.to_vec()) };
    for gates in [vec![Gate::Ratio], vec![Gate::Both, Gate::Memory]] {
        for lenient in [false, true] {
            let options = Options {
                gates: gates.clone(),
                allow_missing: lenient,
                allow_unsteady: lenient,
                allow_undecided: lenient,
                ..Options::default()
            };
            let report = compare(&[source("base.csv", base)], &[source("new.csv", new)], &options);
            let text = print::json(&report).unwrap();
            let json: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(json["exit_code"], report.exit_code);
            assert!(!print::table(&report).is_empty() && !print::markdown(&report).is_empty());
            match report.exit_code {
                0 => {
                    assert!(!report.rows.is_empty() && report.reasons.is_empty() && report.unlike.is_empty());
                    // Both files name what must be told; that cells hold it is judged by the tests.
                    for file in [base, new] {
                        let text = String::from_utf8_lossy(file);
                        assert!(TOLD.iter().all(|column| text.contains(column)), "{text}");
                    }
                    for row in &report.rows {
                        assert!(row.verdict != Verdict::Regression && row.verdict != Verdict::CannotCompare);
                        assert!(
                            [row.base, row.new].iter().all(|x| x.is_some_and(|x| x.is_finite() && x > 0.0))
                        );
                    }
                }
                10..=12 => {}
                code => panic!("exit code {code}"),
            }
        }
    }
});
