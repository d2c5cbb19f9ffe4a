//! Options of `mbperf compare`.

use crate::report::compare::Gate;
use clap::ValueEnum;
use std::path::PathBuf;

/// The harness's default of `--timing_threshold` and `--memory_threshold`.
pub const DEFAULT_THRESHOLD: f64 = 0.05;
/// A threshold above this lets everything pass: more likely 5 was written for 5 %.
const LARGEST_THRESHOLD: f64 = 1.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReportFormat {
    Table,
    Markdown,
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Undecided {
    /// Exit 11.
    Fail,
    /// Exit 0.
    Pass,
}

/// Gates exit with 0 fine, 10 regression, 11 undecided, 12 cannot compare, 2 wrong use.
#[derive(Debug, Clone, clap::Args)]
#[command(rename_all = "snake_case")]
pub struct CompareArgs {
    /// Result files (CSV) of the baseline; each run of a configuration counts
    #[arg(value_name = "BASE", required = true, num_args = 1..)]
    pub base: Vec<PathBuf>,
    /// Result files (CSV) to be judged
    #[arg(long, value_name = "NEW", required = true, num_args = 1..)]
    pub new: Vec<PathBuf>,
    /// What is gated, joined by commas: ratio (speedup of graph over eager within each run), time (step times),
    /// both (ratio and time), memory
    #[arg(long, value_name = "NAMES", default_value = "ratio", value_delimiter = ',')]
    pub gate: Vec<Gate>,
    #[arg(long, value_name = "X", value_parser = threshold, allow_negative_numbers = true, help = format!(
        "Relative slowdown that fails, of step times and, unless --ratio_threshold is given, of the speedup \
         [default: {DEFAULT_THRESHOLD}]"))]
    pub timing_threshold: Option<f64>,
    /// Relative loss of speedup that fails [default: --timing_threshold]
    #[arg(long, value_name = "X", value_parser = threshold, allow_negative_numbers = true)]
    pub ratio_threshold: Option<f64>,
    #[arg(long, value_name = "X", value_parser = threshold, allow_negative_numbers = true, help = format!(
        "Relative growth of memory that fails [default: {DEFAULT_THRESHOLD}]"))]
    pub memory_threshold: Option<f64>,
    /// Compare although this field differs, e.g. driver_version; may be repeated. The report records it
    #[arg(long = "allow-unlike", alias = "allow_unlike", value_name = "FIELD", value_delimiter = ',')]
    pub allow_unlike: Vec<String>,
    /// Rows that one side lacks do not fail
    #[arg(long = "allow-missing", alias = "allow_missing")]
    pub allow_missing: bool,
    /// Rows that had not reached steady state are judged as the others
    #[arg(long = "allow-unsteady", alias = "allow_unsteady")]
    pub allow_unsteady: bool,
    /// Whether an undecided row fails (exit 11) or passes
    #[arg(long, value_name = "POLICY", default_value = "fail")]
    pub undecided: Undecided,
    /// Form of the report on standard output
    #[arg(long, value_name = "FORM", default_value = "table")]
    pub format: ReportFormat,
    /// Also write the report to this file as JSON; standard output has it with `--format json`
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Also write the report to this file as Markdown; standard output has it with `--format markdown`
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
}

/// A relative threshold: above 0, at most 1.
fn threshold(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x > 0.0 && x <= LARGEST_THRESHOLD => Ok(x),
        _ => Err(format!("`{text}` is no threshold: give a part of 1, e.g. 0.05 for 5 %")),
    }
}
