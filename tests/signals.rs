//! SIGINT and SIGTERM in the middle of a run: exit 130, finished rows stay, no half row.
#![cfg(unix)]

use crate::common::binary::{RUN, command, names, records, run};
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::tempdir;

/// Starts a long run, waits until it has written steps, sends the signal; returns the exit code.
fn interrupted(dir: &std::path::Path, signal: &str) -> Option<i32> {
    let before = fs::metadata(dir.join("rows.steps.csv")).map_or(0, |m| m.len());
    let mut child =
        command(dir, &format!("{RUN} --max_time 300 -o rows.csv")).stderr(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    while fs::metadata(dir.join("rows.steps.csv")).map_or(0, |m| m.len()) == before {
        assert!(start.elapsed() < Duration::from_secs(60), "no steps");
        std::thread::sleep(Duration::from_millis(20));
    }
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    child.wait().unwrap().code()
}

#[test]
fn signals_leave_whole_files() {
    let dir = tempdir().unwrap();
    for signal in ["-INT", "-TERM"] {
        assert_eq!(interrupted(dir.path(), signal), Some(130), "{signal}");
        assert!(!names(dir.path()).contains(&"rows.csv".to_owned()), "{signal}: a file without rows");
    }
    assert_eq!(run(dir.path(), &format!("{RUN} -ms 5 -q -o rows.csv")).status.code(), Some(0));
    assert_eq!(interrupted(dir.path(), "-INT"), Some(130));
    assert_eq!(records(&fs::read(dir.path().join("rows.csv")).unwrap()).len(), 3);
    records(&fs::read(dir.path().join("rows.steps.csv")).unwrap());
}

/// Sends the signal once `ready` says so; returns the exit code, what was said, and how long the end took.
fn once(mut command: Command, signal: &str, ready: impl Fn(&str) -> bool) -> (Option<i32>, String, Duration) {
    use std::io::{BufRead, BufReader, Read};
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    while !ready(&said) {
        assert_ne!(stderr.read_line(&mut said).unwrap(), 0, "{said}");
    }
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let begun = Instant::now();
    let code = child.wait().unwrap().code();
    let took = begun.elapsed();
    stderr.read_to_string(&mut said).unwrap();
    (code, said, took)
}

/// Of a signal that nobody repeats, as a scheduler's.
const SECONDS: Duration = Duration::from_secs(30);

#[test]
fn what_does_not_come_back_is_left_within_seconds() {
    let dir = tempdir().unwrap();
    for phase in ["capture", "steady"] {
        let hung = command(dir.path(), &format!("{RUN} -ms 30 -o rows.csv --inject {phase}:hang"));
        let stage = if phase == "capture" { "equality check: graph arm" } else { "timing" };
        let (code, said, took) = once(hung, "-TERM", |said| {
            let begun = said.contains(stage);
            if begun {
                // Until it hangs: it says nothing then.
                std::thread::sleep(Duration::from_secs(3));
            }
            begun
        });
        assert_eq!(code, Some(130), "{said}");
        assert!(took < SECONDS, "{took:?}");
        assert!(said.contains("interrupt noted") && said.contains("finished rows stay"), "{said}");
        assert!(!names(dir.path()).contains(&"rows.csv".to_owned()), "a file without rows");
    }
}

#[test]
fn planning_ends_at_once() {
    let dir = tempdir().unwrap();
    let line = "-m qwen -mr qwen3_30b_a3b -g h100 --device cpu --num_layers 2048 -o rows.csv";
    let mut planning = command(dir.path(), line);
    planning.stderr(Stdio::piped());
    let mut child = planning.spawn().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let begun = Instant::now();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
}

#[test]
fn a_locked_file_is_told_and_can_be_left() {
    let dir = tempdir().unwrap();
    assert_eq!(run(dir.path(), &format!("{RUN} -ms 5 -q -o o.csv")).status.code(), Some(0));
    let before = fs::read(dir.path().join("o.csv")).unwrap();
    let held = fs::File::open(dir.path().join("o.csv")).unwrap();
    held.lock().unwrap();
    let waiting = command(dir.path(), &format!("{RUN} -ms 5 -q -o o.csv"));
    let (code, said, took) = once(waiting, "-TERM", |said| said.contains("locked by another process"));
    assert_eq!(code, Some(130), "{said}");
    assert!(took < SECONDS, "{took:?}");
    assert_eq!(fs::read(dir.path().join("o.csv")).unwrap(), before);
}
