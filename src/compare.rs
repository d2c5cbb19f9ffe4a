//! `mbperf compare`: files in, report out, exit code.

use crate::args::CompareArgs;
use crate::args::compare::{ReportFormat, Undecided};
use crate::commands::{Usage, complain};
use crate::report::compare::{Options, Source, compare, keys, print};
use anyhow::Context;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Compares and reports; the report is whole before the exit code is given.
///
/// # Errors
/// An unknown field of `--allow-unlike` (exit 2), a report that cannot be written (exit 1).
pub fn run(args: &CompareArgs, out: &mut dyn Write) -> anyhow::Result<u8> {
    let options = options(args)?;
    let report = compare(&sources(&args.base), &sources(&args.new), &options);
    let text = match args.format {
        ReportFormat::Table => print::table(&report),
        ReportFormat::Markdown => print::markdown(&report),
        ReportFormat::Json => print::json(&report)?,
    };
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // A reader that closed the pipe has seen enough; the verdict stays.
        Err(e) if e.kind() != ErrorKind::BrokenPipe => return Err(e).context("cannot write the report"),
        _ => {}
    }
    if let Some(path) = &args.json {
        write(path, &print::json(&report)?)?;
    }
    if let Some(path) = &args.markdown {
        write(path, &print::markdown(&report))?;
    }
    if report.exit_code != 0 {
        complain(&print::headline(&report));
    }
    Ok(report.exit_code)
}

fn options(args: &CompareArgs) -> anyhow::Result<Options> {
    if let Some(field) = args.allow_unlike.iter().find(|f| !keys::fields().any(|k| k == f.as_str())) {
        let known: Vec<&str> = keys::fields().collect();
        let hint = crate::args::nearest(field, known.iter().copied())
            .map_or(String::new(), |n| format!(" Did you mean `{n}`?"));
        return Err(Usage(format!(
            "--allow-unlike: `{field}` is no field that is compared.{hint} Fields: {}",
            known.join(", ")
        ))
        .into());
    }
    Ok(Options {
        gates: args.gate.clone(),
        timing_threshold: args.timing_threshold,
        ratio_threshold: args.ratio_threshold.unwrap_or(args.timing_threshold),
        memory_threshold: args.memory_threshold,
        allow_unlike: args.allow_unlike.clone(),
        allow_missing: args.allow_missing,
        allow_unsteady: args.allow_unsteady,
        allow_undecided: args.undecided == Undecided::Pass,
    })
}

fn sources(paths: &[PathBuf]) -> Vec<Source> {
    let source = |path: &PathBuf| Source {
        name: path.display().to_string(),
        bytes: std::fs::read(path).map_err(|e| e.to_string()),
    };
    paths.iter().map(source).collect()
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write the report to {}", path.display()))
}
