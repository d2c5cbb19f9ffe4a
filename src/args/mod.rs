//! The command line: the harness's spellings (`-mr X`, `-mr=X`, underscores), then clap.
//!
//! argparse knows options of several letters behind one dash, clap does not: they are declared as aliases and
//! `normalise` turns `-mr` into `--mr` before clap reads it. A repeated option: the last one wins. Shortened
//! long options are not accepted, since their meaning would change with every new option.

pub mod compare;
mod help;
mod options;
mod refused;
pub mod report;
pub mod shells;
mod values;

pub use compare::CompareArgs;
pub use options::*;
pub use refused::REFUSED;
pub use report::{CompletionsArgs, ManArgs, ReportArgs};
pub use values::*;

use crate::keys::{short, short_words};
use clap::builder::NonEmptyStringValueParser;
use clap::error::{ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;

/// Why there is no command to run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArgsError {
    /// `--help` or `--version`: goes to standard output, exit code 0.
    #[error("{0}")]
    Show(String),
    /// A command without its subcommand: its help goes to standard error as it is, exit code 2.
    #[error("{0}")]
    Help(String),
    /// Wrong use: goes to standard error, exit code 2.
    #[error("{0}")]
    Usage(String),
}

impl ArgsError {
    pub fn exit_code(&self) -> u8 {
        match self {
            ArgsError::Show(_) => 0,
            ArgsError::Help(_) | ArgsError::Usage(_) => 2,
        }
    }
}

/// What the user asked for.
#[derive(Debug, Clone)]
pub enum Command {
    Run(Box<Args>),
    Recipes(RecipesCommand),
    Rules,
    Doctor(DoctorArgs),
    Selftest(SelftestArgs),
    /// Times the ops of a run; without a run, lists them.
    Ops(Option<String>, Option<Box<Args>>),
    Compare(Box<CompareArgs>),
    Report(ReportArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
    CompileKernels(CompileKernelsArgs),
}

#[derive(Debug, Clone, clap::Parser)]
#[command(name = "mbperf", disable_help_subcommand = true)]
struct SubCli {
    #[command(subcommand)]
    command: Sub,
}

#[derive(Debug, Clone, clap::Subcommand)]
#[command(rename_all = "snake_case")]
enum Sub {
    /// List the recipes, or show one
    #[command(subcommand)]
    Recipes(RecipesCommand),
    /// Print the rules that a configuration is judged by
    Rules,
    /// Look for the driver and the CUDA libraries
    Doctor(DoctorArgs),
    /// Check every op of a device against its reference, and capture and replay
    Selftest(SelftestArgs),
    /// List the ops; with the options of a run: time each op of its step alone
    #[command(
        override_usage = "mbperf ops [NAME] [OPTIONS OF A RUN]",
        after_help = "Options of a run that say what its step is are taken, as `mbperf --help` lists them; those of measuring, of files and of \
            processes are refused: mbperf ops gemm -m llama -mr llama3_8b -g h100\n\n\
            Ceilings are a copy of 1 GiB, past the L2, and a product of 8192^3. A product is also held against the fastest of \
            cuBLASLt's list, which takes seconds for a large one. --format csv: docs/ops.md has the columns."
    )]
    Ops {
        /// Only ops whose name holds this
        name: Option<String>,
    },
    /// Compare result files with those of a baseline, for CI
    Compare(CompareArgs),
    /// Write a page with pictures, or a workbook, from result files
    Report(ReportArgs),
    /// Print completions for a shell
    Completions(CompletionsArgs),
    /// Print a manual page
    Man(ManArgs),
    /// Compile every kernel for an architecture; needs NVRTC, no GPU
    #[command(hide = true)]
    CompileKernels(CompileKernelsArgs),
}

/// Names of the subcommands, `compile_kernels` (hidden) included.
const SUBCOMMANDS: [&str; 10] = [
    "recipes",
    "rules",
    "doctor",
    "selftest",
    "ops",
    "compare",
    "report",
    "completions",
    "man",
    "compile_kernels",
];

#[derive(Debug, Clone, clap::Subcommand)]
#[command(rename_all = "snake_case")]
pub enum RecipesCommand {
    /// One line a recipe
    #[command(rename_all = "snake_case")]
    List {
        /// Only recipes whose name holds this
        filter: Option<String>,
        /// Folder of your own recipes
        #[arg(long, value_name = "DIR")]
        recipes_dir: Option<PathBuf>,
        /// text or json
        #[arg(long, value_name = "FORM", default_value = "text", hide_possible_values = true)]
        format: Format,
    },
    /// Every setting of one recipe
    #[command(rename_all = "snake_case")]
    Show {
        /// A model (`llama3_8b`), or a recipe's full name, as `show MODEL` and `list --format json` print it
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Folder of your own recipes
        #[arg(long, value_name = "DIR")]
        recipes_dir: Option<PathBuf>,
    },
}

#[derive(Debug, Clone, clap::Args)]
#[command(rename_all = "snake_case")]
pub struct DoctorArgs {
    /// Folder to look for the CUDA libraries in first
    #[arg(long, value_name = "DIR")]
    pub cuda_path: Option<PathBuf>,
}

#[derive(Debug, Clone, clap::Args)]
#[command(rename_all = "snake_case")]
pub struct SelftestArgs {
    /// Only checks whose name holds this
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Leave out checks whose name holds this
    #[arg(long, value_name = "TEXT")]
    pub except: Option<String>,
    /// Print the names of the checks and run none (needs no GPU)
    #[arg(long)]
    pub list: bool,
    /// Small shapes and few steps only: for an emulated GPU (tests/emulated_cuda)
    #[arg(long, hide = true)]
    pub small: bool,
    /// Folder of compiled kernels
    #[arg(long, value_name = "DIR")]
    pub kernel_cache: Option<PathBuf>,
    /// Folder to look for the CUDA libraries in first
    #[arg(long, value_name = "DIR")]
    pub cuda_path: Option<PathBuf>,
}

#[derive(Debug, Clone, clap::Args)]
#[command(rename_all = "snake_case")]
pub struct CompileKernelsArgs {
    /// Architecture, e.g. sm_90a
    #[arg(long, value_name = "NAME", required = true)]
    pub arch: Vec<String>,
    /// Folder to look for NVRTC in first
    #[arg(long, value_name = "DIR")]
    pub cuda_path: Option<PathBuf>,
    /// Keep the compiled kernels here, for `selftest --kernel_cache` on a machine with a GPU
    #[arg(long, value_name = "DIR")]
    pub kernel_cache: Option<PathBuf>,
}

/// Reads a command line, `argv[0]` being the program's name.
///
/// # Errors
/// [`ArgsError::Show`] for `--help` and `--version`, [`ArgsError::Usage`] with the remedy for everything else.
pub fn parse<I, T>(argv: I) -> Result<Command, ArgsError>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString>,
{
    let tokens: Vec<String> = argv
        .into_iter()
        .skip(1)
        .map(|t| t.into().into_string())
        .collect::<Result<_, _>>()
        .map_err(|t| ArgsError::Usage(format!("error: the argument {t:?} is not valid UTF-8")))?;
    let with_name = |tokens: &[String]| [&["mbperf".to_owned()], tokens].concat();
    if tokens.first().is_some_and(|t| t == "ops")
        && tokens.len() > 1
        && !matches!(tokens[1].as_str(), "-h" | "--help")
    {
        return ops_command(&tokens[1..]);
    }
    if tokens.first().is_some_and(|t| SUBCOMMANDS.contains(&t.as_str())) {
        let cli = SubCli::try_parse_from(with_name(&tokens)).map_err(from_clap)?;
        return Ok(match cli.command {
            Sub::Recipes(c) => Command::Recipes(c),
            Sub::Rules => Command::Rules,
            Sub::Doctor(a) => Command::Doctor(a),
            Sub::Selftest(a) => Command::Selftest(a),
            Sub::Ops { name } => Command::Ops(name, None),
            Sub::Compare(a) => Command::Compare(Box::new(a)),
            Sub::Report(a) => Command::Report(a),
            Sub::Completions(a) => Command::Completions(a),
            Sub::Man(a) => Command::Man(a),
            Sub::CompileKernels(a) => Command::CompileKernels(a),
        });
    }
    // A lone word in front is meant as a subcommand.
    if let Some(word) = tokens.first().filter(|t| !t.starts_with('-') && !t.contains('=')) {
        check_override(word)?;
    }
    let (normal, scopes) = normalise(&Args::command(), &tokens)?;
    let matches = Args::command().try_get_matches_from(with_name(&normal));
    let read = matches.and_then(|m| Args::from_arg_matches(&m).map(|args| (args, given(&m))));
    let (mut args, given) = match read {
        Ok(read) => read,
        Err(e) if e.kind() == ErrorKind::DisplayHelp => {
            let whole = tokens.iter().any(|t| t == "--help");
            let length = if whole { help::Length::Whole } else { help::Length::Brief };
            return Err(ArgsError::Show(help::render(&mut Args::command(), &SubCli::command(), length)));
        }
        Err(e) => return Err(from_clap(e)),
    };
    for text in &args.overrides {
        check_override(text)?;
    }
    args.argv = tokens;
    args.scope_repeated = scopes > 1;
    args.given = given;
    Ok(Command::Run(Box::new(args)))
}

/// Ids of what the command line names itself: a default that is typed is given too.
fn given(matches: &clap::ArgMatches) -> BTreeSet<String> {
    let typed = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
    matches.ids().map(clap::Id::as_str).filter(|id| typed(id)).map(str::to_owned).collect()
}

/// `ops [NAME] <a run's options>`.
fn ops_command(tokens: &[String]) -> Result<Command, ArgsError> {
    let named = tokens.first().filter(|t| !t.starts_with('-') && !t.contains('='));
    let rest = &tokens[usize::from(named.is_some())..];
    if rest.is_empty() {
        return Ok(Command::Ops(named.cloned(), None));
    }
    match parse(std::iter::once("mbperf".to_owned()).chain(rest.iter().cloned()))? {
        Command::Run(args) => Ok(Command::Ops(named.cloned(), Some(args))),
        _ => Err(ArgsError::Usage("error: `mbperf ops [NAME]` takes the options of a run: mbperf ops gemm -m llama -mr llama3_8b -g h100".into())),
    }
}

/// clap's message without its usage lines: what is wrong, and its tip.
fn from_clap(e: clap::Error) -> ArgsError {
    if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return ArgsError::Show(e.to_string());
    }
    if e.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return ArgsError::Help(e.to_string());
    }
    let mut text = e.to_string();
    for (_, value) in e.context() {
        match value {
            // Values may hold blanks.
            ContextValue::String(value) if !value.is_empty() => text = text.replace(value, &short(value)),
            _ => {}
        }
    }
    let text = short_words(&text);
    let keep = |p: &&str| !p.starts_with("Usage:") && !p.starts_with("For more information");
    let paragraphs: Vec<&str> = text.trim().split("\n\n").filter(keep).collect();
    ArgsError::Usage(format!("{}\n\n`mbperf --help` lists every option.", paragraphs.join("\n\n")))
}

/// Turns `-mr X` and `-mr=X` into `--mr X` and `--mr=X` for every declared alias, and refuses the harness's
/// options that have no meaning here. Also counts `--cuda_graph_scope`.
fn normalise(command: &clap::Command, tokens: &[String]) -> Result<(Vec<String>, usize), ArgsError> {
    let find = |name: &str| {
        command.get_arguments().find(|a| {
            let long = name.strip_prefix("--");
            let short = name.strip_prefix('-').filter(|_| long.is_none());
            let alias = |n: &str| a.get_visible_aliases().is_some_and(|v| v.contains(&n));
            long.is_some_and(|n| a.get_long() == Some(n) || alias(n))
                || short.is_some_and(|n| alias(n) || a.get_short().is_some_and(|s| n == s.to_string()))
        })
    };
    let takes_value = |a: &clap::Arg| a.get_action().takes_values();
    let (mut out, mut scopes) = (Vec::with_capacity(tokens.len()), 0);
    let mut rest = tokens.iter().peekable();
    while let Some(token) = rest.next() {
        if token == "--" {
            out.extend(std::iter::once(token).chain(rest).cloned());
            break;
        }
        let (name, value) = match token.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (token.as_str(), None),
        };
        if !token.starts_with('-') || name.len() < 2 || matches!(name, "-h" | "--help" | "-V" | "--version") {
            out.push(token.clone());
            continue;
        }
        if let Some(reason) = refused::reason(name) {
            return Err(ArgsError::Usage(format!(
                "error: {name} is an option of the harness that mbperf refuses: {reason}. Leave it out."
            )));
        }
        let Some(arg) = find(name) else {
            let flag = |c: char| command.get_arguments().any(|a| a.get_short() == Some(c) && !takes_value(a));
            let bundle = !name.starts_with("--") && value.is_none() && name.chars().skip(1).all(flag);
            if bundle || token.parse::<f64>().is_ok() {
                out.push(token.clone());
                continue;
            }
            return Err(unknown(command, name));
        };
        scopes += usize::from(arg.get_id() == "cuda_graph_scope");
        let long = arg.get_long().unwrap_or_default();
        match value {
            Some(v) => out.push(format!("--{long}={v}")),
            // The value may be left out: an override that follows is not it.
            None if takes_value(arg) && arg.get_num_args().is_some_and(|n| n.min_values() == 0) => match rest
                .next_if(|t| !t.contains('=') && (!t.starts_with('-') || t.parse::<f64>().is_ok()))
            {
                Some(v) => out.push(format!("--{long}={v}")),
                None => out.push(format!("--{long}=None")),
            },
            None if takes_value(arg) => {
                out.push(format!("--{long}"));
                // A lone value that looks like an option is clap's to refuse.
                out.extend(
                    rest.next_if(|t| !t.starts_with('-') || *t == "-" || t.parse::<f64>().is_ok()).cloned(),
                );
            }
            None => out.push(format!("--{long}")),
        }
    }
    Ok((out, scopes))
}

/// The message for an option that is neither ours nor the harness's.
fn unknown(command: &clap::Command, name: &str) -> ArgsError {
    let longs = command
        .get_arguments()
        .filter(|a| !a.is_hide_set())
        .filter_map(|a| a.get_long())
        .map(|l| format!("--{l}"));
    let shorts = command.get_arguments().flat_map(|a| {
        let one = a.get_short().map(|c| format!("-{c}"));
        one.into_iter()
            .chain(a.get_visible_aliases().unwrap_or_default().into_iter().map(|n| format!("-{n}")))
    });
    let names: Vec<String> = if name.starts_with("--") { longs.collect() } else { shorts.collect() };
    let wanted = name.replace('-', "_").replacen("__", "--", 1);
    let hint = match nearest(
        if name.starts_with("--") { &wanted } else { name },
        names.iter().map(String::as_str),
    ) {
        Some(n) => format!(" Did you mean `{n}`?"),
        None => " `mbperf --help` lists every option.".to_owned(),
    };
    ArgsError::Usage(format!("error: there is no option `{}`.{hint}", short(name)))
}

/// A token that is no option must be `key=value`.
fn check_override(text: &str) -> Result<(), ArgsError> {
    let usage = |message: String| Err(ArgsError::Usage(format!("error: {message}")));
    let shown = short(text);
    let legal =
        |key: &str| !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || "._".contains(c));
    match text.split_once('=') {
        Some((key, _)) if legal(key) => Ok(()),
        Some((key, _)) => {
            let key = short(key);
            usage(format!("`{shown}`: `{key}` is no configuration key; write it as model.num_layers=16"))
        }
        None if SCOPES.iter().any(|(n, _)| *n == text) => usage(format!(
            "`{text}` stands alone; scopes are joined by commas: --cuda_graph_scope attn,{text}"
        )),
        None => {
            let hint =
                nearest(text, SUBCOMMANDS).map_or(String::new(), |n| format!(" Did you mean `mbperf {n}`?"));
            usage(format!("`{shown}` is neither an option nor a `key=value` override.{hint}"))
        }
    }
}
