//! Every test from outside, as one program: twenty of them took as long to link as to run, each holding the whole
//! library, and each ended with one core waiting for its last test. `cargo test --test all page::` runs one file's.

// A test says what went wrong by failing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

mod args;
mod cli_cases;
mod clone;
mod compare;
mod compare_noise;
mod cuda_without_gpu;
mod dialects;
mod emulated;
mod exit_codes;
mod hard_cases;
mod masks;
mod measuring;
mod models25;
mod outputs;
mod page;
mod profile;
mod ranks;
mod recipes_all;
mod recipes_smoke;
mod resume;
mod rules;
mod segments;
mod signals;
mod sweep;
mod toggles;

/// A file that is not named above would be no test at all, and nobody would miss it.
#[test]
fn every_file_is_among_them() {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let named = include_str!("all.rs");
    for entry in std::fs::read_dir(here).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        if path.extension().is_some_and(|e| e == "rs") && name != "all" {
            assert!(
                named.lines().any(|l| l == format!("mod {name};")),
                "mod {name}; is missing in tests/all.rs"
            );
        }
    }
}
