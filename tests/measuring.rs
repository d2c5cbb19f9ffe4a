//! The binary on the CPU device: host model, repetitions, extrapolation, disturbing faults, the watchdog.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Output;

const BASE: &str = "-m llama -mr llama3_8b -g h100 --device cpu --cuda_graph_scope attn --num_layers 2 \
                    --hidden_size 64 -sl 32 -q";

fn mbperf(folder: &Path, line: &str) -> Output {
    let time = if line.contains("-ms ") { "" } else { "--max_time 0.5" };
    let words = [BASE, time, line].into_iter().flat_map(str::split_whitespace);
    let mut command = assert_cmd::Command::cargo_bin("mbperf").unwrap();
    command.current_dir(folder).args(words).args(["-o", "rows.csv"]).output().unwrap()
}

fn rows(folder: &Path) -> Vec<BTreeMap<String, String>> {
    csv::Reader::from_path(folder.join("rows.csv")).unwrap().deserialize().map(Result::unwrap).collect()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn repetitions_are_runs_of_their_own_with_host_model_and_extrapolation() {
    let folder = tempfile::tempdir().unwrap();
    // A fixed number of steps: as many blocks on a loaded machine.
    let out = mbperf(folder.path(), "--repeat 2 --host_model pytorch --extrapolate -ms 40");
    assert_eq!(out.status.code(), Some(0), "{}", text(&out));
    let rows = rows(folder.path());
    assert_eq!(rows.len(), 4);
    assert!(rows.iter().all(|r| r["status"] == "ok" && r["host_model"] == "pytorch"));
    let column = |name: &str| rows.iter().map(|r| r[name].clone()).collect::<Vec<_>>();
    assert_eq!(column("repetition"), ["1", "1", "2", "2"]);
    assert!(rows[0]["run_id"] == rows[1]["run_id"] && rows[0]["run_id"] != rows[2]["run_id"]);
    let number = |row: &BTreeMap<String, String>, name: &str| -> f64 { row[name].parse().unwrap() };
    for row in &rows {
        // The CPU has no speedup of any kind, but its host spins as told.
        assert!(row["speedup_modelled"].is_empty() && row["speedup_extrapolated"].is_empty());
        assert!(number(row, "step_time_ms_modelled_median") >= 0.5 * number(row, "host_ms_modelled_median"));
        assert_eq!(row["extrapolated_from"], "1+2+3");
        assert!(number(row, "microbatches_extrapolated") > 3.0);
        // On a loaded machine three micro-batches may seem faster than one, and then there is no figure.
        if !row["step_time_ms_extrapolated"].is_empty() {
            assert!(number(row, "step_time_ms_extrapolated") > 0.0);
            assert!(number(row, "step_time_ms_extrapolated_error") > 0.0);
        }
    }
    // Two micro-batches of two layers of 2.16 ms each (128 tokens and fewer).
    assert!(number(&rows[0], "host_ms_modelled_median") > 8.0, "{}", rows[0]["host_ms_modelled_median"]);
    let steps = std::fs::read_to_string(folder.path().join("rows.steps.csv")).unwrap();
    assert!(steps.contains(",modelled,") && steps.contains(&rows[2]["run_id"]));
    let runs = std::fs::read_to_string(folder.path().join("rows.runs.jsonl")).unwrap();
    assert_eq!(runs.lines().count(), 2);
}

#[test]
fn a_hang_ends_the_run_in_time_and_leaves_whole_files() {
    for (phase, named) in [("equality", "equality"), ("instantiate", "instantiate"), ("steady", "steady")] {
        let folder = tempfile::tempdir().unwrap();
        let start = std::time::Instant::now();
        let out = mbperf(folder.path(), &format!("--inject {phase}:hang --watchdog 1"));
        assert_eq!(out.status.code(), Some(1), "{}", text(&out));
        assert!(start.elapsed().as_secs() < 30);
        assert!(
            text(&out).contains(&format!("phase {named} did not come back within 1 s")),
            "{}",
            text(&out)
        );
        let rows = rows(folder.path());
        assert_eq!(rows.len(), 2);
        assert!(rows.iter().all(|r| r["status"] == "failed" && r["status_reason"].contains("--watchdog")));
        // The next run appends.
        if phase == "steady" {
            let out = mbperf(folder.path(), "");
            assert_eq!(out.status.code(), Some(0), "{}", text(&out));
        }
    }
}

/// What the other scopes found is not lost with the one that hangs.
#[test]
fn a_hang_in_a_sweep_says_what_was_found() {
    let folder = tempfile::tempdir().unwrap();
    let line = BASE.replace("--cuda_graph_scope attn", "").replace(" -q", "")
        + " --sweep -ms 6 --inject capture:hang --watchdog 1 -o rows.csv --xlsx rows.xlsx";
    let mut command = assert_cmd::Command::cargo_bin("mbperf").unwrap();
    let out = command.current_dir(folder.path()).args(line.split_whitespace()).output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", text(&out));
    let said = text(&out);
    assert!(
        said.contains("Recommended: nothing: ") && said.contains("3 of the 4 scopes left no row"),
        "{said}"
    );
    assert!(said.contains("workbook: rows.xlsx") && folder.path().join("rows.xlsx").exists(), "{said}");
    assert_eq!(rows(folder.path()).len(), 2);
}

#[test]
fn disturbed_runs_are_fine_and_refused_by_strict() {
    let folder = tempfile::tempdir().unwrap();
    let out = mbperf(folder.path(), "--inject steady:slow_step:3");
    assert_eq!(out.status.code(), Some(0), "{}", text(&out));
    let out = mbperf(folder.path(), "--inject steady:throttled_clock --repeat 2");
    assert_eq!(out.status.code(), Some(0), "{}", text(&out));
    let reasons: Vec<String> = rows(folder.path()).iter().map(|r| r["throttle_reasons"].clone()).collect();
    assert!(reasons[2..4].contains(&"injected".to_owned()), "{reasons:?}");
    assert!(!reasons[4..6].contains(&"injected".to_owned()), "{reasons:?}");
    let out = mbperf(folder.path(), "--inject steady:throttled_clock --strict");
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out).contains("clocks were held back"), "{}", text(&out));
    // A CPU never has a verdict, which is no reason of its own.
    assert!(!text(&out).contains("undecided"), "{}", text(&out));
}

#[test]
fn one_arm_of_too_few_blocks_is_refused_by_strict() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = assert_cmd::Command::cargo_bin("mbperf").unwrap();
    let words = "-m llama -mr llama3_8b -g h100 --device cpu --cuda_graph_impl none --num_layers 2 \
                 --hidden_size 64 -sl 32 -ms 3 --strict -q -o rows.csv";
    let out = command.current_dir(folder.path()).args(words.split_whitespace()).output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", text(&out));
    assert!(text(&out).contains("eager arm not known to be steady"), "{}", text(&out));
    assert!(text(&out).contains("raise -ms, or leave it out"), "{}", text(&out));
    // The row stays, and is no failure.
    assert!(rows(folder.path()).iter().all(|r| r["status"] == "ok" && r["steady_reached"].is_empty()));
}

#[test]
fn mistakes_are_usage_errors() {
    let folder = tempfile::tempdir().unwrap();
    for (line, part) in [
        ("--host_model nowhere.json", "nowhere.json"),
        ("--repeat 0", "--repeat"),
        ("--watchdog -1", "--watchdog"),
        ("--inject steady:boom", "slow_step"),
    ] {
        let out = mbperf(folder.path(), line);
        assert_eq!(out.status.code(), Some(2), "{line}: {}", text(&out));
        assert!(text(&out).contains(part), "{line}: {}", text(&out));
    }
}
