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

/// A run of the whole step: `--stack_only` is in the way of some options.
fn step(folder: &Path, more: &str) -> usize {
    let line = "-m llama -mr llama3_8b -g h100 --device cpu --num_layers 1 --seq_length 16 -ms 12 -q -o x.csv \
        --cuda_graph_impl local --cuda_graph_scope full_iteration --resume";
    let words = line.split_whitespace().chain(more.split_whitespace());
    let mut command = assert_cmd::Command::cargo_bin("mbperf").unwrap();
    let output = command.current_dir(folder).args(words).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{more}: {}", String::from_utf8_lossy(&output.stderr));
    rows(folder)
}

/// A row with another setting, whether it has a column or not, is not the row that is asked for.
#[test]
fn another_setting_is_run_and_then_held() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut expected = 0;
    for more in [
        "",
        "--attention_deterministic false",
        "--no_samplers",
        "--overlap_wgrad",
        "--lr 0.01",
        "--max_microbatches 1",
        "--host_model pytorch",
    ] {
        expected += 2;
        assert_eq!((step(folder, more), step(folder, more)), (expected, expected), "{more}");
    }
}

/// Writes `cell` into a column of the file's last rows.
fn fill(folder: &Path, column: &str, cell: &str, last: usize) {
    let path = folder.join("x.csv");
    let mut reader = csv::Reader::from_path(&path).unwrap();
    let header = reader.headers().unwrap().clone();
    let mut rows: Vec<Vec<String>> =
        reader.records().map(|r| r.unwrap().iter().map(String::from).collect()).collect();
    let (at, first) = (header.iter().position(|c| c == column).unwrap(), rows.len() - last);
    rows[first..].iter_mut().for_each(|r| r[at] = cell.into());
    let mut writer = csv::WriterBuilder::new().terminator(csv::Terminator::CRLF).from_path(path).unwrap();
    writer.write_record(&header).unwrap();
    rows.iter().for_each(|r| writer.write_record(r).unwrap());
    writer.flush().unwrap();
}

/// Figures that are asked for must be there, in both rows.
#[test]
fn figures_that_a_row_lacks_are_measured() {
    for (option, column) in [
        ("--extrapolate", "step_time_ms_extrapolated"),
        ("--host_model pytorch", "step_time_ms_modelled_median"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        assert_eq!((step(folder, ""), step(folder, option)), (2, 4), "{option}");
        // Of so few steps there may be no figure.
        fill(folder, column, "5", 2);
        assert_eq!(step(folder, option), 4, "{option}");
        fill(folder, column, "", 1);
        assert_eq!(step(folder, option), 6, "{option}");
        // Who does not ask for them finds the row anyway.
        assert_eq!(step(folder, ""), 6, "{option}");
    }
}
