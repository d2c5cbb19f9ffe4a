//! Options of `mbperf report`, `completions` and `man`.

use std::path::PathBuf;

#[derive(Debug, Clone, clap::Args)]
#[command(rename_all = "snake_case")]
#[command(group = clap::ArgGroup::new("outputs").args(["output", "xlsx"]).required(true).multiple(true))]
pub struct ReportArgs {
    /// Result files (CSV, either dialect, also packed by gzip), `-` for standard input; steps, blocks and profile are found
    /// beside each
    #[arg(value_name = "FILE", required = true, num_args = 1..)]
    pub files: Vec<PathBuf>,
    /// Page to write (HTML, one file that needs nothing else), `-` for standard output
    #[arg(short = 'o', long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Workbook to write (xlsx): rows, steps and what the columns mean
    #[arg(long, value_name = "FILE")]
    pub xlsx: Option<PathBuf>,
}

#[derive(Debug, Clone, clap::Args)]
#[command(rename_all = "snake_case")]
pub struct CompletionsArgs {
    /// Shell whose completions are printed
    #[arg(value_name = "SHELL")]
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Clone, clap::Args)]
#[command(rename_all = "snake_case")]
pub struct ManArgs {
    /// Subcommand whose page is printed, e.g. `report` or `recipes list`; left out: the main command's
    #[arg(value_name = "COMMAND", num_args = 0..=2)]
    pub command: Vec<String>,
}
