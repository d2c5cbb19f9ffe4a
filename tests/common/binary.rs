//! Runs of the binary, in a folder of their own.

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// A run on the CPU that is over in a second or two.
pub const RUN: &str = "-m llama -mr llama3_8b -g h100 -cp 1 -sl 16 --vocab_size 64 --device cpu \
                       --cuda_graph_impl transformer_engine --cuda_graph_scope attn";

/// The binary with these words (no quotes), in `dir`.
pub fn command(dir: &Path, line: &str) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("mbperf"));
    command.args(line.split_whitespace()).current_dir(dir).stdin(Stdio::null());
    command
}

pub fn run(dir: &Path, line: &str) -> Output {
    command(dir, line).output().unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Asserts the exit code and returns the last line of standard error.
pub fn fails(dir: &Path, line: &str, code: i32) -> String {
    let output = run(dir, line);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{line}\n{err}");
    let said: Vec<&str> = err.lines().filter(|l| l.starts_with("mbperf: ")).collect();
    assert_eq!(said.len(), 1, "one line says what failed: {line}\n{err}");
    assert!(err.trim_end().ends_with(said[0]), "{line}: the message goes on\n{err}");
    assert!(!err.contains("panicked"), "{line}\n{err}");
    said[0].to_owned()
}

/// Records of a CSV file as a strict reader sees them, header first.
pub fn records(bytes: &[u8]) -> Vec<csv::StringRecord> {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(false).from_reader(bytes);
    reader.records().collect::<Result<_, _>>().unwrap()
}

/// Cell of record `row` (0: the first under the header) in the column `name`.
pub fn cell(records: &[csv::StringRecord], row: usize, name: &str) -> String {
    let at = records[0].iter().position(|c| c == name).unwrap();
    records[row + 1][at].to_owned()
}

/// Names in a folder, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
