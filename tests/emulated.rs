//! The CUDA device and its kernels on an emulated GPU (tests/emulated_cuda): every op against its reference, both
//! arms of a run, and faults that must be found.

// A test says what went wrong by failing.
#![allow(clippy::unwrap_used)]

#[path = "common/binary.rs"]
mod binary;

use binary::{cell, records};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Folder of the libraries, kept between runs; `None` without a C++ compiler.
fn libraries() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        if !Command::new(&compiler).arg("--version").output().is_ok_and(|o| o.status.success()) {
            eprintln!("skipped: no C++ compiler ({compiler})");
            return None;
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated_cuda");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulated_cuda/build.sh");
        let out = Command::new("sh").arg(script).arg(&folder).output().unwrap();
        assert!(out.status.success(), "{}", said(&out));
        Some(folder)
    };
    BUILT.get_or_init(build).as_deref()
}

fn said(out: &Output) -> String {
    String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
}

/// Runs mbperf on the emulated GPU.
fn mbperf(libraries: &Path, line: &str, variables: &[(&str, &str)]) -> Output {
    binary::command(Path::new("."), line)
        .env("LD_LIBRARY_PATH", libraries)
        .env("XDG_CACHE_HOME", libraries.join("cache"))
        .env("MBPERF_EMULATED_CACHE", libraries.join("kernels"))
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

#[test]
fn kernels_agree_with_their_references_and_arms_with_each_other() {
    let Some(libraries) = libraries() else { return };
    let out = mbperf(libraries, "selftest --small", &[]);
    assert!(out.status.success(), "{:?}\n{}", out.status, said(&out));
}

/// Threads, streams and graph nodes in another order, copies to shared memory at once: kernels that work by barriers,
/// and lanes beside each other.
#[test]
fn kernels_agree_in_another_order() {
    let Some(libraries) = libraries() else { return };
    for only in ["norm", "attention_", "grouped_gemm", "moe_sort", "ssd", "router_fwd", "alltoall"] {
        let line = format!("selftest --small --only {only}");
        let out = mbperf(libraries, &line, &[("MBPERF_EMULATED_SEED", "3")]);
        let text = said(&out);
        let passed = text.lines().filter(|l| l.starts_with("ok ")).count();
        assert!(out.status.success() && passed > 0, "{only}: {:?}\n{text}", out.status);
    }
}

/// A run of two layers, small enough for a few seconds.
const RUN: &str = "-m llama -mr llama3_8b -g h100 --cuda_graph_scope attn --device cuda --num_layers 2 -sl 64 -cp 1 \
    model.hidden_size=128 model.ffn_hidden_size=256 model.num_attention_heads=2 model.num_query_groups=1 \
    model.kv_channels=64 model.vocab_size=256 --max_microbatches 2 --max_time 1 -o -";

#[test]
fn both_arms_of_a_run_are_equal() {
    let Some(libraries) = libraries() else { return };
    let out = mbperf(libraries, RUN, &[]);
    assert_eq!(out.status.code(), Some(0), "{}", said(&out));
    let rows = records(&out.stdout);
    assert_eq!(rows.len(), 3, "{}", said(&out));
    for row in [0, 1] {
        for (name, value) in [("device", "cuda"), ("status", "ok"), ("digest_match", "true")] {
            assert_eq!(cell(&rows, row, name), value, "{name}\n{}", said(&out));
        }
    }
    assert_eq!(cell(&rows, 0, "digest"), cell(&rows, 1, "digest"));
}

#[test]
fn a_wrong_graph_is_found() {
    let Some(libraries) = libraries() else { return };
    for (inject, code) in [("capture:wrong_result", 6), ("capture:driver_error", 4)] {
        let out = mbperf(libraries, &format!("{RUN} --inject {inject}"), &[]);
        assert_eq!(out.status.code(), Some(code), "{inject}: {}", said(&out));
    }
}

/// Kernels broken on purpose: a barrier taken out, and a store past the end of its buffer.
#[test]
fn broken_kernels_are_found() {
    let Some(libraries) = libraries() else { return };
    let barrier = "|groups[group][lane] = s;\n    __syncthreads();|groups[group][lane] = s;|";
    let out =
        mbperf(libraries, "selftest --small --only column_sum", &[("MBPERF_EMULATED_REPLACE", barrier)]);
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    assert!(said(&out).contains("FAILED column_sum"), "{}", said(&out));

    let bound = "|if (c < vectors) store8(dw_partial|store8(dw_partial|";
    let out = mbperf(libraries, "selftest --small --only rmsnorm_bwd", &[("MBPERF_EMULATED_REPLACE", bound)]);
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    assert!(said(&out).contains("past the end of an allocation"), "{}", said(&out));
}
