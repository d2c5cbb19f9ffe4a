//! Subcommands that only print, and what a failure's exit code is.

use crate::args::shells;
use crate::args::{ArgsError, Command, CompileKernelsArgs, Format, RecipesCommand, SelftestArgs};
use crate::capture::CaptureError;
use crate::device::DeviceError;
use crate::device::cuda::executor::CudaOptions;
use crate::device::cuda::libraries::{self, Availability, probe, set_path};
use crate::keys::short;
use crate::overrides::UsageError;
use crate::recipe::{Catalogue, RecipeError, ShowError, print_list, print_show};
use crate::report::{OutputError, file};
use crate::workloads::{WorkloadError, share::ShareError};
use crate::{compare, compile, doctor, measure, report_files, rules, run, selftest};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// Wrong use found after parsing: exit 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// One line on standard error, come what may: a reader that closed it is no reason to stop.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{}", visible(line));
}

/// A user's text may hold what a terminal acts on, or what turns the direction of writing: it is shown, not sent.
fn visible(text: &str) -> std::borrow::Cow<'_, str> {
    let hidden = |c: char| {
        (c.is_control() && c != '\n' && c != '\t')
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(hidden) {
        return text.into();
    }
    let shown = |c: char| if hidden(c) { c.escape_unicode().to_string() } else { c.to_string() };
    text.chars().map(shown).collect::<String>().into()
}

/// Looks at the folders that a user names for what runs on a GPU, and sets that of the libraries: before these are looked
/// for.
///
/// # Errors
/// What is no folder (exit 2).
pub fn folders(cuda_path: Option<&Path>, kernel_cache: Option<&Path>) -> Result<(), Usage> {
    if let Some(path) = cuda_path {
        if !path.is_dir() {
            return Err(Usage(format!(
                "--cuda_path {}: there is no such folder; give the one that the CUDA libraries lie in",
                path.display()
            )));
        }
        set_path(path);
    }
    let Some(path) = kernel_cache else { return Ok(()) };
    file::check_folder(path).map_err(|e| {
        Usage(format!("--kernel_cache {}: {e}; give a folder, or where one can be made", path.display()))
    })
}

/// Looks at the folder that the environment names for what runs on a GPU; the one of `--cuda_path` takes its place.
///
/// # Errors
/// What is no folder (exit 2).
pub fn folder_of_environment(cuda_path: Option<&Path>) -> Result<(), Usage> {
    let named = libraries::folder_of_variable().filter(|p| cuda_path.is_none() && !p.is_dir());
    named.map_or(Ok(()), |path| {
        Err(Usage(format!(
            "{}={}: there is no such folder; name the one that the CUDA libraries lie in, or unset it",
            libraries::PATH_VARIABLE,
            path.display()
        )))
    })
}

/// Says what stops the program, in one line.
pub fn complain(message: &str) {
    say(&format!("mbperf: {}", one_line(message)));
}

/// A failure with its causes, but none that is told already.
pub fn told(failure: &anyhow::Error) -> String {
    failure.chain().map(ToString::to_string).fold(String::new(), |told, cause| match told.is_empty() {
        true => cause,
        false if told.contains(&cause) => told,
        false => format!("{told}: {cause}"),
    })
}

/// Says why the program or one of its runs ends; returns the exit code.
pub fn fail(failure: &anyhow::Error) -> u8 {
    // Files are named where they fail: an error of the system with nothing around it is of what is printed.
    let bare = failure.chain().next().and_then(|e| e.downcast_ref::<std::io::Error>());
    complain(&match bare {
        Some(e) => format!("cannot write standard output: {e}"),
        None => told(failure),
    });
    exit_code(failure)
}

/// Paragraphs and lines of a message joined, so that a log holds one line a failure.
pub fn one_line(message: &str) -> String {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut line = String::new();
    for paragraph in message.split("\n\n").map(words).filter(|p| !p.is_empty()) {
        if !line.is_empty() {
            line.push_str(if line.ends_with(['.', '?', ':', ';']) { " " } else { "; " });
        }
        line.push_str(&paragraph);
    }
    line
}

/// Whether a reader closed the pipe: it has seen enough of what is only printed.
pub fn broken_pipe(failure: &anyhow::Error) -> bool {
    let closed = |e: &std::io::Error| e.kind() == std::io::ErrorKind::BrokenPipe;
    failure.downcast_ref::<std::io::Error>().is_some_and(closed)
        || matches!(failure.downcast_ref::<ShowError>(), Some(ShowError::Write(e)) if closed(e))
}

/// Prints what the command line parser says.
pub fn show(e: &ArgsError) -> ExitCode {
    match e {
        ArgsError::Show(text) => {
            let mut out = std::io::stdout().lock();
            match writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush()) {
                // A reader that closed the pipe has seen enough.
                Err(failure) if failure.kind() != std::io::ErrorKind::BrokenPipe => {
                    return ExitCode::from(fail(&failure.into()));
                }
                _ => {}
            }
        }
        ArgsError::Help(text) => say(text.trim_end()),
        ArgsError::Usage(text) => complain(text.trim_start_matches("error: ")),
    }
    ExitCode::from(e.exit_code())
}

/// The exit code that README.md lists for a failure outside measuring.
pub fn exit_code(failure: &anyhow::Error) -> u8 {
    if let Some(e) = failure.downcast_ref::<DeviceError>() {
        return measure::exit_code(e);
    }
    if let Some(e) = failure.downcast_ref::<OutputError>() {
        return e.exit_code();
    }
    let usage = failure.is::<UsageError>()
        || failure.is::<RecipeError>()
        || failure.is::<Usage>()
        || failure.is::<crate::host_model::HostModelError>()
        || matches!(
            failure.downcast_ref::<ShowError>(),
            Some(ShowError::Unknown { .. } | ShowError::Recipe(_))
        )
        || failure.is::<ShareError>();
    let unbuilt = matches!(failure.downcast_ref::<WorkloadError>(), Some(WorkloadError::Unsupported(_)));
    let no_scope = matches!(failure.downcast_ref::<CaptureError>(), Some(CaptureError::Nothing { .. }));
    if usage || unbuilt || no_scope { 2 } else { 1 }
}

/// Runs a subcommand; returns the exit code.
///
/// # Errors
/// What stops it, see [`exit_code`].
pub fn dispatch(command: &Command) -> anyhow::Result<u8> {
    let mut out = std::io::stdout().lock();
    let printed = match command {
        Command::Recipes(c) => recipes(c, &mut out),
        Command::Rules => rules(&mut out),
        Command::Ops(name, None) => compile::list(name.as_deref(), &mut out),
        Command::Ops(name, Some(args)) => {
            compile::known(name.as_deref()).and_then(|()| run::time_ops(args, name.as_deref(), &mut out))
        }
        Command::Doctor(a) => {
            folders(a.cuda_path.as_deref(), None)?;
            folder_of_environment(a.cuda_path.as_deref())?;
            match doctor::report(&mut out) {
                Ok(ready) => return Ok(if ready { 0 } else { measure::NO_DEVICE }),
                Err(e) => Err(e.into()),
            }
        }
        Command::Selftest(a) => return self_test(a, &mut out),
        Command::Compare(a) => return compare::run(a, &mut out),
        Command::Report(a) => report_files::run(a, &mut out),
        Command::Completions(a) => shells::completions(a.shell, &mut out).map_err(Into::into),
        Command::Man(a) => shells::man(&a.command, &mut out),
        Command::CompileKernels(a) => return compile_kernels(a, &mut out),
        Command::Run(_) => Err(DeviceError::internal("a run is no subcommand").into()),
    };
    match printed {
        // `mbperf rules | head` is no failure.
        Err(e) if broken_pipe(&e) => Ok(0),
        other => other.map(|()| 0),
    }
}

fn self_test(args: &SelftestArgs, out: &mut dyn Write) -> anyhow::Result<u8> {
    folders(args.cuda_path.as_deref(), args.kernel_cache.as_deref())?;
    if let Availability::NoDriver(why) | Availability::NoDevice(why) | Availability::Unusable(why) = probe()
        && !args.list
    {
        return Err(DeviceError::Unavailable(format!(
            "selftest needs a GPU: {why}; `cargo test` checks what needs none"
        ))
        .into());
    }
    let options = CudaOptions {
        cache_dir: args.kernel_cache.clone(),
        cuda_path: args.cuda_path.clone(),
        ..Default::default()
    };
    Ok(if selftest::run(args, &options, out) { 0 } else { 1 })
}

fn compile_kernels(args: &CompileKernelsArgs, out: &mut dyn Write) -> anyhow::Result<u8> {
    let (path, cache) = (args.cuda_path.as_deref(), args.kernel_cache.as_deref());
    folders(path, cache)?;
    Ok(if compile::run(&args.arch, path, cache, out)? { 0 } else { 1 })
}

/// `mbperf recipes list|show`, written to `out`.
///
/// # Errors
/// Recipes that do not load, no recipe of that name, or an output that cannot be written.
pub fn recipes(command: &RecipesCommand, out: &mut dyn Write) -> anyhow::Result<()> {
    match command {
        RecipesCommand::List { filter, recipes_dir, format } => {
            if *format == Format::Csv {
                return Err(Usage("recipes list has no CSV form; use --format text or json".into()).into());
            }
            let catalogue = Catalogue::load(recipes_dir.as_deref())?;
            if !print_list(&catalogue, filter.as_deref(), *format == Format::Json, out)? {
                let asked = short(filter.as_deref().unwrap_or_default());
                return Err(Usage(format!(
                    "no recipe has `{asked}` in its family, name, GPU, dtype, task or variant; `mbperf recipes list` \
                     prints all {}",
                    catalogue.recipes().len()
                ))
                .into());
            }
        }
        RecipesCommand::Show { name, recipes_dir } => {
            let catalogue = Catalogue::load(recipes_dir.as_deref())?;
            print_show(&catalogue, name, out)?;
        }
    }
    Ok(())
}

/// `mbperf rules`: the table in the code, written to `out`.
///
/// # Errors
/// An output that cannot be written.
pub fn rules(out: &mut dyn Write) -> anyhow::Result<()> {
    Ok(out.write_all(rules::print().as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_acts_on_is_shown() {
        assert_eq!(visible("a\u{1b}[2Jb\u{202e}c\n"), "a\\u{1b}[2Jb\\u{202e}c\n");
        assert_eq!(visible("größer\t1"), "größer\t1");
    }
}
