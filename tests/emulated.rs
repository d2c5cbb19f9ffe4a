//! The CUDA device and its kernels on an emulated GPU (tests/emulated_cuda): every op against its reference, both
//! arms of a run, and faults that must be found.

use crate::common::binary::{self, cell, records};
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
    for only in [
        "norm",
        "attention_",
        "grouped_gemm",
        "moe_sort",
        "ssd",
        "router_fwd",
        "hyper",
        "shared_kv",
        "alltoall",
    ] {
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

/// Two processes over an emulated NCCL: every kind of collective, eager, captured and beside the backward pass.
#[test]
fn ranks_agree_with_collectives_in_their_graphs() {
    let Some(libraries) = libraries() else { return };
    let line = "-m qwen -mr qwen3_30b_a3b -g h100 --num_moe_experts 8 model.moe_ffn_hidden_size=64 \
        model.moe_router_topk=2 --moe_flex_dispatcher_backend None --device cuda --num_layers 1 -sl 32 -pp 1 -cp 1 -mb 1 \
        model.hidden_size=64 model.num_attention_heads=2 model.num_query_groups=2 model.kv_channels=32 \
        model.vocab_size=256 ddp.bucket_size=16384 --max_microbatches 1 -ms 5 -q -ng 2 -tp 1 -ep 2 -gb 2 \
        --nproc_per_node 2 --cuda_graph_impl transformer_engine --cuda_graph_scope attn,moe_router,moe_preprocess -o -";
    let out = mbperf(libraries, line, &[]);
    assert_eq!(out.status.code(), Some(0), "{}", said(&out));
    let rows = records(&out.stdout);
    for row in [0, 1] {
        for (name, value) in
            [("status", "ok"), ("comm", "nccl"), ("real_groups", "ep+dp"), ("digest_match", "true")]
        {
            assert_eq!(cell(&rows, row, name), value, "{name}\n{}", said(&out));
        }
    }
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

    // A mask that no replay changes: both arms have it, so that only the check of random numbers can see it.
    for (only, frozen) in [
        ("attention dropout", "|step = words[WORD_STEP];|step = 0;|"),
        ("hidden dropout", "|philox(quad, draw, words[WORD_STEP],|philox(quad, draw, 0u,|"),
    ] {
        let mut command = binary::command(Path::new("."), "selftest --small --only");
        let out = command
            .arg(format!("fresh random numbers: {only}"))
            .env("LD_LIBRARY_PATH", libraries)
            .env("XDG_CACHE_HOME", libraries.join("cache"))
            .env("MBPERF_EMULATED_CACHE", libraries.join("kernels"))
            .env("MBPERF_EMULATED_REPLACE", frozen)
            .output()
            .unwrap();
        assert_eq!(out.status.code(), Some(1), "{only}: {}", said(&out));
        assert!(said(&out).contains("the same bits with another random state"), "{only}: {}", said(&out));
    }

    let bound = "|if (c < vectors) store8(dw_partial|store8(dw_partial|";
    let out = mbperf(libraries, "selftest --small --only rmsnorm_bwd", &[("MBPERF_EMULATED_REPLACE", bound)]);
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    assert!(said(&out).contains("past the end of an allocation"), "{}", said(&out));
}

/// A profiler's ranges are the profile's names: step, layer, part; without one nothing is opened.
#[test]
fn an_attached_profiler_is_told_of_ranges() {
    let Some(libraries) = libraries() else { return };
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("ranges.txt");
    let tool = libraries.join("libmbperf_nvtx.so");
    let variables =
        [("NVTX_INJECTION64_PATH", tool.to_str().unwrap()), ("MBPERF_NVTX_LOG", log.to_str().unwrap())];
    let out = mbperf(libraries, RUN, &variables);
    assert_eq!(out.status.code(), Some(0), "{}", said(&out));
    let ranges = std::fs::read_to_string(&log).unwrap();
    let lines: Vec<&str> = ranges.lines().collect();
    let steps: Vec<&&str> = lines.iter().filter(|l| !l.starts_with(' ')).collect();
    assert!(steps.contains(&&"eager step") && steps.contains(&&"graph step"), "{steps:?}");
    assert!(steps.iter().all(|s| **s == "eager step" || **s == "graph step"));
    for name in [" layer 1 forward, micro-batch 0", "  attn", "  mlp", "  graph attn", " optimizer"] {
        assert!(lines.contains(&name), "{name:?} is not among\n{}", lines[..40.min(lines.len())].join("\n"));
    }
    // A tool that cannot be opened is none.
    let out = mbperf(libraries, RUN, &[("NVTX_INJECTION64_PATH", "/nonexistent/tool.so")]);
    assert_eq!(out.status.code(), Some(0), "{}", said(&out));
}

#[test]
fn without_cupti_there_is_no_profile_and_one_line_says_why() {
    let Some(libraries) = libraries() else { return };
    let out = mbperf(libraries, &format!("{RUN} --profile"), &[]);
    assert_eq!(out.status.code(), Some(3), "{}", said(&out));
    let lines: Vec<String> = said(&out).lines().map(String::from).collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("no profile") && lines[0].contains("CUPTI"), "{lines:?}");
}

/// An emulated CUPTI records what the emulated driver ran: every record finds its launch, by numbered calls and graph
/// nodes, in both arms.
#[test]
fn a_profile_matches_every_kernel() {
    let Some(libraries) = libraries() else { return };
    let folder = tempfile::tempdir().unwrap();
    for (more, variables) in [
        ("", vec![]),
        ("--cuda_graph_impl local --cuda_graph_scope full_iteration", vec![]),
        // Without numbers, by the order of the driver's calls.
        ("", vec![("MBPERF_EMULATED_CUPTI", "plain")]),
    ] {
        let path = format!("{0}:{0}/cupti", libraries.display());
        let file = folder.path().join("x.csv");
        let line = format!("{} {more} --profile -o {}", RUN.trim_end_matches(" -o -"), file.display());
        let mut variables = variables;
        variables.push(("LD_LIBRARY_PATH", path.as_str()));
        let out = mbperf(libraries, &line, &variables);
        let text = said(&out);
        assert_eq!(out.status.code(), Some(0), "{text}");
        assert_eq!(text.matches("recorded names are the launch list's").count(), 2, "{text}");
        assert!(!text.contains("unattributed") && !text.contains("off the busy time"), "{text}");
        let trace = std::fs::read_to_string(folder.path().join("x.trace.json")).unwrap();
        let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
        let slices: Vec<_> =
            trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X").collect();
        for arm in [1, 2] {
            let of =
                |part: &str| slices.iter().filter(|s| s["pid"] == arm && s["args"]["part"] == part).count();
            assert!(of("attn") > 0 && of("mlp") > 0 && of("optimizer") > 0, "{text}");
        }
        assert!(slices.iter().any(|s| s["pid"] == 2 && s["args"]["graph"] == true));
        // The library's memset before each weight gradient (4 a layer, and the head's) is one launch a layer's pass.
        let zeroing = |arm| slices.iter().filter(|s| s["pid"] == arm && s["name"] == "zero_counters").count();
        assert_eq!([zeroing(1), zeroing(2)], [2 * (2 + 1); 2], "micro-batches, layers and the head: {text}");
        assert!(slices.iter().all(|s| s["pid"] == 2 || s["args"]["graph"] == false));
        let rows = records(&std::fs::read(&file).unwrap());
        let last = rows.len() - 2;
        assert!(!cell(&rows, last, "device_busy_ms").is_empty());
    }
}

/// The selftest's own check of profiles: passed with a CUPTI, left out without one, failed with one that loses records.
#[test]
fn the_selftest_judges_profiles() {
    let Some(libraries) = libraries() else { return };
    let with = format!("{0}:{0}/cupti", libraries.display());
    let lossy = [("LD_LIBRARY_PATH", with.as_str()), ("MBPERF_EMULATED_CUPTI", "lossy")];
    for (variables, code, words) in [
        (&lossy[..1], 0, "are the launch list's"),
        (&[], 0, "left out, CUPTI is not installed"),
        (&lossy[..], 1, "FAILED"),
    ] {
        let out = mbperf(libraries, "selftest --small --only profile:", variables);
        let text = said(&out);
        assert_eq!(out.status.code(), Some(code), "{text}");
        let lines: Vec<&str> = text.lines().filter(|l| l.contains(" profile: ")).collect();
        assert!(lines.len() == 3 && lines.iter().all(|l| l.contains(words)), "{words}: {text}");
    }
}

/// A cuBLASLt that the loader finds under its plain name, beside the one that the user named: said, not mixed.
#[test]
fn two_files_of_one_library_are_not_mixed() {
    let Some(libraries) = libraries() else { return };
    let folder = tempfile::tempdir().unwrap();
    let [plain, named] = ["plain", "named"].map(|name| folder.path().join(name));
    for (to, name) in [(&plain, "libcublasLt.so"), (&named, "libcublasLt.so.13")] {
        std::fs::create_dir(to).unwrap();
        std::fs::copy(libraries.join("libcublasLt.so.13"), to.join(name)).unwrap();
    }
    let path = format!("{}:{}", plain.display(), libraries.display());
    let line = format!("{RUN} --cuda_path {}", named.display());
    let out = mbperf(libraries, &line, &[("LD_LIBRARY_PATH", path.as_str())]);
    let text = said(&out);
    assert_eq!(out.status.code(), Some(3), "{text}");
    for part in ["named/libcublasLt.so.13", "plain/libcublasLt.so for libcublasLt.so", "LD_LIBRARY_PATH"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Without another one named, the loader's is the only one.
    let out = mbperf(libraries, RUN, &[("LD_LIBRARY_PATH", path.as_str())]);
    assert_eq!(out.status.code(), Some(0), "{}", said(&out));
}
