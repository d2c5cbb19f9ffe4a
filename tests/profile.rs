//! `--profile` through the binary: table, profile file and trace of a run on the CPU, whose references stand for
//! kernels; and what is said where nobody records.

use crate::common::binary::{RUN, fails, names, records, run, text};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use tempfile::tempdir;

fn profiled(dir: &Path, more: &str) -> std::process::Output {
    let output = run(dir, &format!("{RUN} -ms 6 --profile {more}"));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    output
}

fn trace(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Slices of a process, in order of time.
fn slices(trace: &Value, process: &str) -> Vec<Value> {
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |e: &&Value| e["name"] == "process_name" && e["args"]["name"] == process;
    let pid = &events.iter().find(named).unwrap()["pid"];
    events.iter().filter(|e| e["ph"] == "X" && &e["pid"] == pid).cloned().collect()
}

#[test]
fn a_run_leaves_a_table_a_file_and_a_trace() {
    let dir = tempdir().unwrap();
    let output = profiled(dir.path(), "-o x.csv");
    let said = text(&output.stderr);
    for arm in ["eager", "graph"] {
        assert!(said.contains(&format!("Profile of one {arm} step, recorded by the CPU's clock")), "{said}");
    }
    assert_eq!(said.matches("recorded names are the launch list's").count(), 2, "{said}");
    assert!(said.contains("trace: x.trace.json"), "{said}");
    assert!(names(dir.path()).contains(&"x.profile.csv".to_owned()));

    let trace = trace(&dir.path().join("x.trace.json"));
    let lines = records(&fs::read(dir.path().join("x.profile.csv")).unwrap());
    assert_eq!(
        lines[0].iter().take(6).collect::<Vec<_>>(),
        ["run_id", "arm", "part", "kernel", "launches", "device_ms"]
    );
    for (process, arm) in [("eager step", "eager"), ("graph step", "graph")] {
        let slices = slices(&trace, process);
        // The file's sums by part and kernel are the trace's slices, and both the time that the device was busy.
        let mut of_trace: BTreeMap<(String, String), (u64, f64)> = BTreeMap::new();
        for slice in &slices {
            assert_eq!(slice["name"], slice["args"]["op"], "on a CPU a kernel is its op's reference");
            let key =
                (slice["args"]["part"].as_str().unwrap().into(), slice["name"].as_str().unwrap().into());
            let sum = of_trace.entry(key).or_default();
            sum.0 += 1;
            sum.1 += slice["dur"].as_f64().unwrap() / 1e3;
        }
        let of_file: Vec<_> = lines[1..].iter().filter(|l| &l[1] == arm).collect();
        assert_eq!(of_file.len(), of_trace.len());
        for line in of_file {
            let (count, ms) = of_trace[&(line[2].to_owned(), line[3].to_owned())];
            assert_eq!(line[4].parse::<u64>().unwrap(), count);
            assert!((line[5].parse::<f64>().unwrap() - ms).abs() < 1e-6 * ms.max(1.0), "{line:?} {ms}");
        }
        assert!(
            of_trace.keys().any(|(part, _)| part == "attn")
                && !of_trace.keys().any(|(p, _)| p == "unattributed")
        );
        let ends = |s: &Value| s["ts"].as_f64().unwrap() + s["dur"].as_f64().unwrap();
        assert!(
            slices.windows(2).all(|w| ends(&w[0]) <= w[1]["ts"].as_f64().unwrap() + 1e-6),
            "one at a time"
        );
    }
    // Launches of both arms are the same, staging apart.
    let ops = |process: &str| {
        let names = slices(&trace, process).iter().map(|s| s["name"].to_string()).collect::<Vec<_>>();
        names.into_iter().filter(|n| n != "\"copy\"").collect::<Vec<_>>()
    };
    assert_eq!(ops("eager step"), ops("graph step"));
    // The page draws it.
    let page = run(dir.path(), "report x.csv -o -");
    assert!(text(&page.stdout).contains("Where the step goes"), "{}", text(&page.stderr));
    // Another run continues the file and replaces the trace.
    let before = lines.len() - 1;
    profiled(dir.path(), "-o x.csv");
    assert_eq!(records(&fs::read(dir.path().join("x.profile.csv")).unwrap()).len(), 1 + 2 * before);
}

#[test]
fn json_and_standard_output_have_it_too() {
    let dir = tempdir().unwrap();
    let output = profiled(dir.path(), "-o x.csv --format json");
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let profiles = json["profiles"].as_array().unwrap();
    assert_eq!(profiles.len(), 2);
    for profile in profiles {
        let parts = profile["parts"].as_object().unwrap();
        let sum: f64 = parts.values().map(|p| p["device_ms"].as_f64().unwrap()).sum();
        let busy = profile["device_busy_ms"].as_f64().unwrap();
        assert!((sum / busy - 1.0).abs() < 0.03, "{sum} of {busy}");
        assert_eq!(profile["names_equal_launch_list"], true);
    }
    let empty = tempdir().unwrap();
    let output = profiled(empty.path(), "-o -");
    assert!(text(&output.stderr).contains("Profile of one eager step"));
    assert_eq!(records(&output.stdout).len(), 3);
    assert!(names(empty.path()).is_empty());
    // Unasked, nothing of it.
    let plain = run(dir.path(), &format!("{RUN} -ms 6 -o y.csv --format json"));
    assert!(!text(&plain.stdout).contains("profiles"));
    assert!(!names(dir.path()).iter().any(|n| n.starts_with("y.profile") || n.starts_with("y.trace")));
}

#[test]
fn files_of_others_are_left_alone() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("x.trace.json"), "{\"mine\":1}").unwrap();
    let said = fails(dir.path(), &format!("{RUN} -ms 6 --profile -o x.csv"), 2);
    assert!(said.contains("x.trace.json") && said.contains("no trace of --profile"), "{said}");
    fs::write(dir.path().join("y.profile.csv"), "a,b\n").unwrap();
    let said = fails(dir.path(), &format!("{RUN} -ms 6 --profile -o y.csv"), 2);
    assert!(said.contains("y.profile.csv"), "{said}");
    assert_eq!(names(dir.path()), ["x.trace.json", "y.profile.csv"]);
}

#[test]
fn a_sweep_profiles_its_last_scope_and_samplers_must_run() {
    let dir = tempdir().unwrap();
    let llama = "-m llama -mr llama3_8b -g h100 -cp 1 -sl 16 --vocab_size 64 --num_layers 1 --device cpu";
    let output = run(dir.path(), &format!("{llama} -ms 6 --sweep --profile -o x.csv"));
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert_eq!(said.matches("Profile of one").count(), 2, "{said}");
    let said = fails(dir.path(), &format!("{RUN} --profile --no_samplers -o z.csv"), 2);
    assert!(said.contains("--no_samplers"), "{said}");
}
