//! Puts the commit into the binary, so that a row says what made it. Without git the cells stay empty.

use std::process::Command;

fn git(args: &[&str]) -> Option<String> {
    let out = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&out.stdout).trim().to_string())
}

fn main() {
    for path in ["src", "recipes", "Cargo.toml", "Cargo.lock", ".git/HEAD", ".git/index"] {
        println!("cargo:rerun-if-changed={path}");
    }
    if let Some(commit) = git(&["rev-parse", "HEAD"]) {
        println!("cargo:rustc-env=MBPERF_GIT_COMMIT={commit}");
    }
    if let Some(changes) =
        git(&["status", "--porcelain", "--", "src", "recipes", "benches", "Cargo.toml", "Cargo.lock"])
    {
        println!("cargo:rustc-env=MBPERF_GIT_DIRTY={}", !changes.is_empty());
    }
}
