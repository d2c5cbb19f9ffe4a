//! Puts the commit into the binary, so that a row says what made it. Without git the cells stay empty.

use std::process::Command;

fn git(args: &[&str]) -> Option<String> {
    let out = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&out.stdout).trim().to_string())
}

fn main() {
    // Not `.git/index`: every `git status` writes it anew. A commit moves what HEAD stands for, and logs that.
    for path in ["src", "recipes", "benches", "Cargo.toml", "Cargo.lock", ".git/HEAD", ".git/logs/HEAD"] {
        println!("cargo:rerun-if-changed={path}");
    }
    if let Some(commit) = git(&["rev-parse", "HEAD"]) {
        println!("cargo:rustc-env=MBPERF_GIT_COMMIT={commit}");
    }
    if let Some(changes) =
        git(&["--no-optional-locks", "status", "--porcelain", "--", "src", "recipes", "benches", "Cargo.toml", "Cargo.lock"])
    {
        println!("cargo:rustc-env=MBPERF_GIT_DIRTY={}", !changes.is_empty());
    }
}
