//! What `cargo install` from a clone needs: a file that git ignores is here and in no clone.

use std::path::Path;
use std::process::Command;

/// What the program is built from, without its tests.
const BUILT_FROM: [&str; 6] = ["src", "recipes", "host_models", "build.rs", "Cargo.toml", "Cargo.lock"];

/// Files that git names; `None`: this is no clone, or there is no git.
fn git(args: &[&str]) -> Option<Vec<String>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = Command::new("git").current_dir(here).args(args).args(["--"]).args(BUILT_FROM).output().ok()?;
    let text = String::from_utf8_lossy(&out.stdout);
    out.status.success().then(|| text.lines().map(String::from).collect())
}

#[test]
fn a_clone_holds_all_that_is_built_from() {
    let (Some(kept), Some(ignored)) =
        (git(&["ls-files"]), git(&["ls-files", "--others", "--ignored", "--exclude-standard"]))
    else {
        eprintln!("skipped: no git, or no clone");
        return;
    };
    assert_eq!(ignored, Vec::<String>::new(), "git ignores these: a clone lacks them");
    // `--locked` needs the last of them; each of the others is read by the build.
    for name in BUILT_FROM {
        let inside = |file: &String| file == name || file.starts_with(&format!("{name}/"));
        assert!(kept.iter().any(inside), "{name} is not committed");
    }
}
