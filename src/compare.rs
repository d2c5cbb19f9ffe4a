//! `mbperf compare`: files in, report out, exit code.

use crate::args::CompareArgs;
use crate::args::compare::{DEFAULT_THRESHOLD, ReportFormat, Undecided};
use crate::commands::{Usage, complain};
use crate::keys::short;
use crate::report::compare::{Gate, Options, Source, compare, keys, print};
use crate::report::{Paths, file};
use clap::ValueEnum;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Compares and reports; the report is whole before the exit code is given.
///
/// # Errors
/// An unknown field of `--allow-unlike`, a threshold of a gate that is off, an output that is an input, of another kind or in no folder (exit 2); a report that
/// cannot be written all the same (exit 1), after the others are.
pub fn run(args: &CompareArgs, out: &mut dyn Write) -> anyhow::Result<u8> {
    let options = options(args)?;
    check_outputs(args)?;
    let report = compare(&sources(&args.base), &sources(&args.new), &options);
    let text = match args.format {
        ReportFormat::Table => print::table(&report),
        ReportFormat::Markdown => print::markdown(&report),
        ReportFormat::Json => print::json(&report)?,
    };
    let printed = match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // A reader that closed the pipe has seen enough; the verdict stays.
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(anyhow::Error::from(e)),
        _ => Ok(()),
    };
    let json = args.json.as_ref().map(|path| write(path, &print::json(&report)?));
    let markdown = args.markdown.as_ref().map(|path| write(path, &print::markdown(&report)));
    // One that fails does not take the others along.
    printed.and(json.unwrap_or(Ok(()))).and(markdown.unwrap_or(Ok(())))?;
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
            "--allow-unlike: `{}` is no field that is compared.{hint} Fields: {}",
            short(field),
            known.join(", ")
        ))
        .into());
    }
    thresholds_in_use(args)?;
    let timing_threshold = args.timing_threshold.unwrap_or(DEFAULT_THRESHOLD);
    Ok(Options {
        gates: args.gate.clone(),
        timing_threshold,
        ratio_threshold: args.ratio_threshold.unwrap_or(timing_threshold),
        memory_threshold: args.memory_threshold.unwrap_or(DEFAULT_THRESHOLD),
        allow_unlike: args.allow_unlike.clone(),
        allow_missing: args.allow_missing,
        allow_unsteady: args.allow_unsteady,
        allow_undecided: args.undecided == Undecided::Pass,
    })
}

/// Refuses a threshold that nothing is held against: who gives it counts on a gate that is off.
fn thresholds_in_use(args: &CompareArgs) -> anyhow::Result<()> {
    let on = |gates: &[Gate]| args.gate.iter().any(|g| gates.contains(g));
    let (ratio, time, memory) =
        (on(&[Gate::Ratio, Gate::Both]), on(&[Gate::Time, Gate::Both]), on(&[Gate::Memory]));
    let own_ratio = args.ratio_threshold.is_some();
    for (option, given, used, gate) in [
        ("--memory_threshold", args.memory_threshold.is_some(), memory, "memory"),
        ("--ratio_threshold", own_ratio, ratio, "ratio"),
        ("--timing_threshold", args.timing_threshold.is_some(), time || ratio && !own_ratio, "time"),
    ] {
        if given && !used {
            let names = args.gate.iter().filter_map(|g| g.to_possible_value());
            let mut names: Vec<String> = names.map(|v| v.get_name().to_owned()).collect();
            let gates = names.join(",");
            names.push(gate.to_owned());
            let why = match option {
                "--timing_threshold" if ratio => ", and --ratio_threshold is given for the ratio",
                _ => "",
            };
            return Err(Usage(format!(
                "{option} would be held against nothing: --gate {gates} does not gate {gate}{why}. Give --gate {}, or \
                 leave {option} out",
                names.join(",")
            ))
            .into());
        }
    }
    Ok(())
}

/// Refuses to write over what is compared, and over any file that is no report.
fn check_outputs(args: &CompareArgs) -> anyhow::Result<()> {
    let mut paths = Paths::default();
    for path in &args.base {
        paths.reads("BASE", path);
    }
    for path in &args.new {
        paths.reads("--new", path);
    }
    let outputs = [
        ("--json", &args.json, print::JSON_START, "JSON report of `mbperf compare`"),
        ("--markdown", &args.markdown, print::MARKDOWN_START, "Markdown report of `mbperf compare`"),
    ];
    for (option, path, start, kind) in outputs {
        if path.as_deref() == Some(Path::new(file::STDOUT)) {
            let form = option.trim_start_matches('-');
            return Err(Usage(format!(
                "{option} -: standard output holds a report already: give --format {form} to have it in this form, or \
                 name a file"
            ))
            .into());
        }
        if let Some(path) = path {
            paths.replaces(option, path, start.as_bytes(), kind);
        }
    }
    Ok(paths.check().map_err(Usage)?)
}

fn sources(paths: &[PathBuf]) -> Vec<Source> {
    let source = |path: &PathBuf| Source {
        name: path.display().to_string(),
        bytes: file::read_results(path).map_err(|e| e.to_string()),
    };
    paths.iter().map(source).collect()
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    // With the cause in the same text: the cause alone is taken for standard output's.
    file::replace(path, text.as_bytes()).map_err(|e| {
        anyhow::anyhow!("cannot write the report to {}: {e}; choose another file", path.display())
    })
}
