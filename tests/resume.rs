//! `--resume` through the binary, on the CPU device.

use std::path::Path;

const RUN: &str = "-m llama -mr llama3_8b -g h100 --cuda_graph_impl local --cuda_graph_scope full_iteration \
    --stack_only --device cpu --num_layers 1 --seq_length 16 -ms 12 -q";

fn run(folder: &Path, more: &str) -> (Option<i32>, String) {
    let words = RUN.split_whitespace().chain(more.split_whitespace());
    let output =
        assert_cmd::Command::cargo_bin("mbperf").unwrap().current_dir(folder).args(words).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

fn rows(folder: &Path) -> usize {
    csv::Reader::from_path(folder.join("x.csv")).unwrap().records().map(Result::unwrap).count()
}

#[test]
fn what_is_in_the_file_is_not_run_again_and_anything_else_is() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // A failed run is no result.
    assert_eq!(run(folder, "-o x.csv --inject capture:driver_error").0, Some(4));
    let failed = rows(folder);
    for (more, expected) in [
        ("-o x.csv --resume", 2),
        ("-o x.csv --resume", 2),
        ("-o x.csv --resume --margin 0.02", 2),
        ("-o x.csv --resume --seed 2", 4),
        ("-o x.csv --resume --seq_length 24", 6),
        ("-o x.csv --resume --seed 2", 6),
        ("-o x.csv", 8),
    ] {
        let (code, stderr) = run(folder, more);
        assert_eq!((code, rows(folder)), (Some(0), failed + expected), "{more}: {stderr}");
    }
    let (code, stderr) = run(folder, "-o - --resume");
    assert_eq!(code, Some(2));
    assert!(stderr.contains("--resume needs a file"), "{stderr}");
}
