//! SIGINT and SIGTERM in the middle of a run: exit 130, finished rows stay, no half row.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

#[path = "common/binary.rs"]
mod binary;

use binary::{RUN, command, names, records, run};
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
