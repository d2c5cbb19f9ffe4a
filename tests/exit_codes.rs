//! Exit codes and one-line messages of wrong use, hostile numbers, recipe files and injected faults.

use crate::common::binary::{self, RUN, cell, fails, names, records, run, text};
use mbperf::device::Phase;
use mbperf::device::inject::Kind;
use std::fs;
use tempfile::tempdir;

#[test]
fn wrong_use_is_one_line_exit_2_and_nothing_written() {
    let dir = tempdir().unwrap();
    for (more, part) in [
        ("-ms 4", "-ms"),
        ("-ms 0", "M01"),
        ("-ms 99999999999999999999", "--max_steps"),
        ("--num_layers 0", "M01"),
        ("--num_layers -1", "M01"),
        ("--num_layers 1000000000", "4096"),
        ("--hidden_size 1073741824", "outside"),
        ("--vocab_size 1000000000", "outside"),
        ("-sl 16777216 --full_size", "FLOPs"),
        ("-mb 1048576 -sl 1048576 -gb 1073741824", "tokens"),
        ("--num_layers 4096 --max_microbatches 0 -gb 1024", "--max_microbatches"),
        ("--max_microbatches 9999999999999", "outside"),
        ("-tp 3", "M05"),
        ("-gb 7", "M06"),
        ("--seed -1", "seed"),
        ("--max_time nan", "finite"),
        ("--max_time 0", "--max_time"),
        ("--margin 1", "--margin is 1, outside 0.000001 to 0.999"),
        ("--moe_row_bound 1e300", "--moe_row_bound is 1e300, outside 1 to 16384"),
        ("--comm_model nvlink:1e300", "0.001 to 100000"),
        ("--aa graph --cuda_graph_impl none", "--aa"),
        ("--inject nowhere:driver_error", "first_replay"),
        ("--inject upload:not_finite", "upload"),
        ("-cv zzz", "without -cv"),
        ("-c int3", "bf16"),
        ("model.foo=1", "model.foo"),
        ("model.num_layers=1e99", "whole number"),
        ("-o", "--output"),
    ] {
        let said = fails(dir.path(), &format!("{RUN} {more}"), 2);
        assert!(said.contains(part), "{more}: {said}");
    }
    assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
}

#[test]
fn other_commands() {
    let dir = tempdir().unwrap();
    for (line, part) in [
        ("rule", "mbperf rules"),
        ("", "--model_family_name"),
        ("recipes show zz", "recipes list"),
        ("recipes list --format csv", "json"),
        ("recipes list nothing_like_it", "nothing_like_it"),
        ("recipes list nothing_like_it --format json", "nothing_like_it"),
        ("recipes list --recipes_dir /nonexistent", "/nonexistent"),
        ("-m lama -mr llama3_8b -g h100", "llama"),
        ("-m llama -mr llama3_9b -g h100", "llama3_8b"),
        ("-m llama -mr llama3_8b -g h101", "h100"),
    ] {
        let said = fails(dir.path(), line, 2);
        assert!(said.contains(part), "{line}: {said}");
    }
}

#[test]
fn a_long_word_is_not_repeated() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("a.csv"), "").unwrap();
    let long = "x".repeat(3000);
    for line in [
        "recipes show",
        "recipes",
        "man",
        "compare a.csv --new a.csv --gate",
        "compare a.csv --new a.csv --allow-unlike",
    ]
    .into_iter()
    .map(str::to_owned)
    .chain(
        [
            "--lr",
            "--seed",
            "--inject",
            "--comm_model",
            "--cuda_graph_scope",
            "--cuda_graph_impl",
            "-g",
            "-m",
            "-mr",
        ]
        .map(|option| format!("{RUN} {option}")),
    ) {
        let said = fails(dir.path(), &format!("{line} {long}"), 2);
        assert!(said.len() < 1000, "{line}: {}", said.len());
    }
    for line in [format!("{RUN} --{long}"), format!("ops {long}")] {
        // Every op's name is told.
        assert!(fails(dir.path(), &line, 2).len() < 2000);
    }
}

#[test]
fn folders_that_are_none_are_refused() {
    let dir = tempdir().unwrap();
    let run_of = "-m llama -mr llama3_8b -g h100";
    for command in [
        "selftest",
        "doctor",
        "compile_kernels --arch sm_90a",
        &format!("ops {run_of}"),
        &format!("{RUN} -d"),
    ] {
        let said = fails(dir.path(), &format!("{command} --cuda_path none"), 2);
        assert!(said.contains("--cuda_path none"), "{said}");
        if command != "doctor" {
            let said = fails(dir.path(), &format!("{command} --kernel_cache /dev/null"), 2);
            assert!(said.contains("--kernel_cache /dev/null"), "{said}");
        }
    }
}

#[test]
fn a_folder_in_the_environment_is_looked_at_too() {
    let dir = tempdir().unwrap();
    for (folder, code) in [("none", 2), ("", 3)] {
        let output = binary::command(dir.path(), "doctor").env("MBPERF_CUDA_PATH", folder).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{folder}: {}", text(&output.stdout));
        assert_eq!(text(&output.stderr).contains("MBPERF_CUDA_PATH=none"), code == 2);
    }
}

/// `mbperf doctor && mbperf ...`: it says what a run would.
#[test]
fn the_doctor_tells_whether_a_gpu_can_be_used() {
    let dir = tempdir().unwrap();
    let output = run(dir.path(), "doctor");
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stdout));
    assert!(text(&output.stdout).contains("There is no usable GPU"));
}

/// Only cuDNN's attention has another order to add in.
#[test]
fn own_attention_has_one_order() {
    let dir = tempdir().unwrap();
    let line = "-m llama -mr llama3_8b -g h100 -d --attention_deterministic false";
    let said = fails(dir.path(), &format!("{line} --attention_backend own"), 2);
    let told = "--attention_deterministic false with --attention_backend own";
    assert!(said.contains(told), "{said}");
    let of_ops = "ops attention -m llama -mr llama3_8b -g h100 --attention_deterministic false";
    assert!(fails(dir.path(), &format!("{of_ops} --attention_backend own"), 2).contains(told));
    assert_eq!(run(dir.path(), &format!("{line} --attention_backend cudnn")).status.code(), Some(0));
}

#[test]
fn ops_that_are_not_there_are_told() {
    let dir = tempdir().unwrap();
    let run_of = "-m llama -mr llama3_8b -g h100";
    for line in ["ops extra".to_owned(), format!("ops extra {run_of}")] {
        let said = fails(dir.path(), &line, 2);
        assert!(said.contains("`extra`") && said.contains("rmsnorm"), "{line}: {said}");
    }
    // One that there is, but not in this step: told before a GPU is looked for.
    let said = fails(dir.path(), &format!("ops ssd {run_of}"), 2);
    assert!(said.contains("`ssd`") && said.contains("It has:"), "{said}");
    let listed = run(dir.path(), "ops gemm");
    assert_eq!((listed.status.code(), text(&listed.stderr)), (Some(0), String::new()));
}

#[test]
fn help_that_cannot_be_written_is_a_failure() {
    let dir = tempdir().unwrap();
    if !std::path::Path::new("/dev/full").exists() {
        return;
    }
    for line in ["--help", "-V", "compare --help", "recipes list --help"] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = binary::command(dir.path(), line).stdout(full).output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        assert!(said.contains("cannot write standard output"), "{line}: {said}");
    }
}

#[test]
fn a_failed_dump_leaves_no_file_and_a_host_model_is_a_plain_file() {
    let dir = tempdir().unwrap();
    fails(dir.path(), &format!("{RUN} -ms 8 -q -o x.csv --dump d --inject prepare:driver_error"), 1);
    assert!(names(&dir.path().join("d")).is_empty(), "{:?}", names(&dir.path().join("d")));
    let fifo = dir.path().join("model.json");
    if std::process::Command::new("mkfifo").arg(&fifo).status().is_ok_and(|s| s.success()) {
        let said = fails(dir.path(), &format!("{RUN} -ms 8 --host_model model.json -o y.csv"), 2);
        assert!(said.contains("model.json") && said.contains("no plain file"), "{said}");
        assert!(!dir.path().join("y.csv").exists());
    }
}

#[cfg(unix)]
#[test]
fn arguments_that_are_no_text() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempdir().unwrap();
    let mut command = binary::command(dir.path(), RUN);
    let output = command.arg("-o").arg(std::ffi::OsStr::from_bytes(b"a\xff.csv")).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("UTF-8"));
}

#[test]
fn variants_are_listed() {
    let dir = tempdir().unwrap();
    let output = run(dir.path(), "-m qwen -mr qwen3_30b_a3b -g h100 --list_config_variants");
    assert_eq!(output.status.code(), Some(0));
    let listed = text(&output.stdout);
    assert!(listed.lines().any(|l| l.starts_with("dev ")) && listed.contains("(none"), "{listed}");
    // What `-c` cannot ask for.
    let delayed = "qwen3_30b_a3b_pretrain_16gpu_h100_fp8ds_config";
    assert!(listed.lines().any(|l| l.starts_with("fp8_ds ") && l.ends_with(delayed)), "{listed}");
    let other = run(dir.path(), "-m qwen -mr qwen3_30b_a3b -g b200 --list_config_variants");
    assert!(!text(&other.stdout).contains("fp8_ds"), "{}", text(&other.stdout));
    assert!(names(dir.path()).is_empty());
}

#[test]
fn recipe_files_of_all_sorts() {
    let dir = tempdir().unwrap();
    let folder = dir.path().join("own");
    fs::create_dir(&folder).unwrap();
    let line = "recipes list --recipes_dir own";
    assert!(fails(dir.path(), line, 2).contains("no .json file"));
    let deep = "[".repeat(200_000);
    for bytes in [
        &b""[..],
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        br#"{"a":1}"#,
        br#"{"family":"llama","family":"x"}"#,
        br#"{"family":"llama","model":"llama3_8b","recipes":[{"gpu":"h100"}]}"#,
        br#"{"family":"llama","model":"llama3_8b","recipes":[{"gpu":"h100","dtype":"bf16","gpus":-1}]}"#,
        br#"{"family":"llama","model":"new","architecture":{"num_layers":1e99},"recipes":[]}"#,
        br#"{"family":"llama","model":"new","architecture":{"vision":{"depth":1000000000}},"recipes":[]}"#,
        br#"{"family":"../x","model":"../../a/b","recipes":[]}"#,
        deep.as_bytes(),
    ] {
        fs::write(folder.join("x.json"), bytes).unwrap();
        let said = fails(dir.path(), line, 2);
        assert!(said.contains("x.json"), "{said}");
    }
    // Sparse: read as a whole it would take all memory.
    fs::File::create(folder.join("x.json")).unwrap().set_len(3 << 30).unwrap();
    let said = fails(dir.path(), line, 2);
    assert!(said.contains("x.json: it has 3221225472 bytes"), "{said}");
}

/// As little work as shows a fault: there are over thirty.
const SMALL: &str = "--num_layers 1 --hidden_size 64";

/// Exit code and `digest_match` of every fault that can be asked for on the CPU; the repetitions behind it are sound.
#[test]
fn injected_faults() {
    let dir = tempdir().unwrap();
    for phase in Phase::ALL.iter().copied() {
        let proved = [Phase::Switch, Phase::Steady, Phase::FinalCheck].contains(&phase);
        // So many that there is a final check.
        let steps = if proved { 20 } else { 8 };
        for of in Kind::ALL.iter().copied().filter(|k| k.shows_in(phase)) {
            let code = match of {
                Kind::DriverError if phase.makes_graphs() => 4,
                Kind::DriverError | Kind::NotFinite | Kind::RowOverflow => 1,
                Kind::OutOfMemory => 5,
                Kind::WrongResult => 6,
                // No run fails of them: `measuring` and the guard's own tests.
                Kind::SlowStep | Kind::ThrottledClock | Kind::Hang => continue,
            };
            let kind = of.name();
            let fault = format!("{phase}:{kind}");
            let line =
                format!("{RUN} {SMALL} -ms {steps} -q -o {phase}_{kind}.csv --repeat 2 --inject {fault}");
            let said = fails(dir.path(), &line, code);
            assert!(!said.contains("nothing saw it"), "{fault}: {said}");
            let rows = records(&fs::read(dir.path().join(format!("{phase}_{kind}.csv"))).unwrap());
            // Without a device there is nothing to repeat on.
            assert_eq!(rows.len(), if phase == Phase::Prepare { 3 } else { 5 }, "{fault}");
            for row in 2..rows.len() - 1 {
                assert_eq!(
                    cell(&rows, row, "status"),
                    "ok",
                    "{fault}: {}",
                    cell(&rows, row, "status_reason")
                );
                assert_eq!(cell(&rows, row, "digest_match"), "true", "{fault}");
            }
            for row in 0..2 {
                assert_eq!(cell(&rows, row, "status"), "failed", "{fault}");
                assert!(!cell(&rows, row, "status_reason").is_empty(), "{fault}");
                assert!(cell(&rows, row, "speedup").is_empty(), "{fault}");
                let digests = match (code, proved) {
                    (6, _) => "false",
                    (_, true) => "true",
                    _ => "",
                };
                assert_eq!(cell(&rows, row, "digest_match"), digests, "{fault}");
            }
        }
    }
}

#[test]
fn a_model_larger_than_memory() {
    let dir = tempdir().unwrap();
    let line = "-m llama -mr llama31_405b -g gb200 -c bf16 -tp 1 -pp 1 -cp 1 -vp None --device cpu --full_size \
                --run_dtype bf16 -o - model.pipeline_model_parallel_layout=null";
    let said = fails(dir.path(), line, 5);
    assert!(said.contains("MiB are free") && said.contains("--num_layers"), "{said}");
}
