//! Where results go: refused before the run, whole whatever happens, the same bytes under every locale.

use crate::common::binary::{RUN, cell, command, fails, names, records, run, text};
use std::fs;
use std::process::Stdio;
use tempfile::tempdir;

fn short(more: &str) -> String {
    format!("{RUN} -ms 5 {more}")
}

#[test]
fn standard_output_is_csv_and_nothing_else() {
    let dir = tempdir().unwrap();
    let output = run(dir.path(), &short("-o -"));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = records(&output.stdout);
    assert_eq!(rows.len(), 3);
    assert!(text(&output.stdout).lines().all(|l| !l.is_empty()));
    assert_eq!((cell(&rows, 0, "arm"), cell(&rows, 1, "arm")), ("eager".into(), "graph".into()));
    assert!((0..2).all(|row| cell(&rows, row, "digest_match") == "true"));
    assert!(names(dir.path()).is_empty(), "side files: {:?}", names(dir.path()));
}

#[test]
fn the_shortest_run_has_one_steady_step() {
    let dir = tempdir().unwrap();
    let rows = records(&run(dir.path(), &short("-o -")).stdout);
    for row in 0..2 {
        assert_eq!(cell(&rows, row, "steps_steady"), "1");
        assert!(!cell(&rows, row, "step_time_ms_median").is_empty());
        assert!(cell(&rows, row, "step_time_ms_ci95_low").is_empty());
    }
}

#[test]
fn files_that_cannot_take_rows_are_refused_untouched() {
    let dir = tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("foreign.csv"), "a,b\n1,2\n").unwrap();
    fs::write(at("beside.steps.csv"), "x\n").unwrap();
    fs::create_dir(at("folder.csv")).unwrap();
    fs::create_dir(at("runs.runs.jsonl")).unwrap();
    assert_eq!(run(dir.path(), &short("-q -o good.csv")).status.code(), Some(0));
    let good = fs::read(at("good.csv")).unwrap();
    fs::write(at("half.csv"), &good[..good.len() - 20]).unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink("/nonexistent/x", at("link.csv")).unwrap();
    let before = names(dir.path());
    for (file, reason) in [
        ("foreign.csv", "something else"),
        ("beside.csv", "beside.steps.csv"),
        ("folder.csv", "directory"),
        ("runs.csv", "runs.runs.jsonl"),
        ("half.csv", "not complete"),
        ("link.csv", "link"),
        ("no/such.csv", "the folder no does not exist"),
    ] {
        let said = fails(dir.path(), &short(&format!("-o {file}")), 2);
        assert!(said.contains(reason) && said.contains("-o"), "{said}");
    }
    assert_eq!(names(dir.path()), before);
    assert_eq!(fs::read_to_string(at("foreign.csv")).unwrap(), "a,b\n1,2\n");
    // A good one grows by two rows.
    assert_eq!(run(dir.path(), &short("-q -o good.csv")).status.code(), Some(0));
    assert_eq!(records(&fs::read(at("good.csv")).unwrap()).len(), 5);
}

#[test]
fn other_files_are_tried_before_the_run_too() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    for more in ["--dump file", "--save_config_filepath no/such.json", "--format json -o -"] {
        fails(dir.path(), &short(more), 2);
    }
    assert_eq!(names(dir.path()), ["file"]);
}

#[test]
fn a_full_disk_is_told() {
    if !std::path::Path::new("/dev/full").exists() {
        return;
    }
    let dir = tempdir().unwrap();
    assert!(fails(dir.path(), &short("-q -o /dev/full"), 1).contains("No space left"));
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for line in [short("-q -o -"), short("--dryrun"), "rules".to_owned()] {
        let output = command(dir.path(), &line).stdout(full()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{line}");
        assert_eq!(text(&output.stderr).matches("No space left").count(), 1, "{line}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn pipes_are_neither_waited_for_nor_written() {
    let dir = tempdir().unwrap();
    let made = std::process::Command::new("mkfifo").arg(dir.path().join("pipe")).status();
    assert!(made.unwrap().success());
    fs::write(dir.path().join("rows.csv"), "").unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
    for place in ["pipe", "socket"] {
        for line in [
            short(&format!("-q -o {place}")),
            short(&format!("-q -o {place} --resume")),
            short(&format!("-q -o new.csv --xlsx {place}")),
            short(&format!("-q -o new.csv --save_config_filepath {place}")),
            format!("compare {place} --new rows.csv"),
            format!("compare rows.csv --new rows.csv --json {place}"),
            format!("report {place} -o page.html"),
            format!("report rows.csv -o {place}"),
        ] {
            let said = fails(dir.path(), &line, 2);
            assert!(said.contains(place), "{line}: {said}");
        }
    }
    assert_eq!(names(dir.path()), ["pipe", "rows.csv", "socket"]);
    // A pipe without a name is read: it holds no results here.
    let mut child = command(dir.path(), "compare /dev/stdin --new rows.csv")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(12));
}

#[test]
#[cfg(target_os = "linux")]
fn rows_that_nobody_can_read_are_a_failure() {
    let dir = tempdir().unwrap();
    // A standard output that is closed at the start is /dev/null to a Rust program: that cannot be told here.
    let mut child =
        command(dir.path(), &short("-q -o -")).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
}

#[test]
fn closed_pipes_are_no_panic() {
    let dir = tempdir().unwrap();
    for line in
        ["rules".to_owned(), "recipes list".to_owned(), "recipes show llama3_8b".to_owned(), short("-d")]
    {
        let mut child =
            command(dir.path(), &line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{line}: {}", text(&output.stderr));
    }
    // Nobody reads the progress: the rows are written all the same.
    let mut child = command(dir.path(), &short("-o rows.csv")).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(records(&fs::read(dir.path().join("rows.csv")).unwrap()).len(), 3);
}

#[test]
fn every_locale_gives_the_same_form() {
    let dir = tempdir().unwrap();
    // Times differ by run; everything that does not must be the same bytes, and no number has a comma.
    let stable = ["loss_last", "peak_memory_mib", "launches_per_step", "cuda_graph_scope", "seq_length"];
    let cells = |locale: &str| {
        let output = command(dir.path(), &short("-q -o -")).env("LC_ALL", locale).output().unwrap();
        let rows = records(&output.stdout);
        assert!(rows[1..].iter().flatten().all(|c| c.parse::<f64>().is_ok()
            || !c.chars().all(|c| ",0123456789".contains(c))
            || c.is_empty()));
        stable.map(|name| cell(&rows, 1, name))
    };
    let c = cells("C");
    assert!(!c[0].is_empty());
    assert_eq!(cells("de_DE.UTF-8"), c);
    assert_eq!(cells("fr_FR.UTF-8"), c);
}

#[test]
fn several_processes_share_a_file() {
    let dir = tempdir().unwrap();
    let line = short("-q -o rows.csv");
    let children: Vec<_> = (0..3).map(|_| command(dir.path(), &line).spawn().unwrap()).collect();
    for mut child in children {
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
    assert_eq!(records(&fs::read(dir.path().join("rows.csv")).unwrap()).len(), 7);
    records(&fs::read(dir.path().join("rows.steps.csv")).unwrap());
    let runs = fs::read_to_string(dir.path().join("rows.runs.jsonl")).unwrap();
    assert_eq!(runs.lines().filter(|l| serde_json::from_str::<serde_json::Value>(l).is_ok()).count(), 3);
}

#[test]
fn quiet_says_nothing() {
    let dir = tempdir().unwrap();
    let output = run(dir.path(), &short("-q -o rows.csv"));
    assert_eq!((text(&output.stdout), text(&output.stderr)), (String::new(), String::new()));
}

#[test]
fn a_dry_run_tells_recompute_from_the_model() {
    let dir = tempdir().unwrap();
    let described = |more: &str| -> serde_json::Value {
        let output =
            run(dir.path(), &format!("-m llama -mr llama3_8b -g h100 --dryrun --format json {more}"));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let (plain, again) = (described(""), described("-rl 2"));
    let [plain, again] = [&plain["program"], &again["program"]];
    assert_eq!(plain["recompute"]["launches"], 0);
    // Two layers of nine launches, in two micro-batches; the context ranks' gather of keys and values is two more.
    assert_eq!(again["recompute"]["launches"], 2 * 2 * (9 + 2));
    assert_eq!(plain["gflops"], again["gflops"]);
    let planned = |p: &serde_json::Value| p["memory"]["activations_mib"].as_f64().unwrap();
    assert!(planned(again) < planned(plain));
}
