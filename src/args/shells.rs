//! Completions and manual pages, from the same declarations as `--help`. The options of several letters behind one
//! dash are clap's aliases (`--mr`): they are printed as they are typed (`-mr`).

use super::{Args, SubCli};
use crate::commands::Usage;
use crate::keys::short;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use std::io::{self, Write};

/// The main command with its subcommands, in one tree.
fn tree() -> Command {
    let subcommands: Vec<Command> =
        SubCli::command().get_subcommands().filter(|c| !c.is_hide_set()).cloned().collect();
    Args::command().subcommands(subcommands).args_conflicts_with_subcommands(true)
}

/// Aliases of more than one letter.
fn short_names() -> Vec<String> {
    let aliases =
        |a: &clap::Arg| a.get_visible_aliases().unwrap_or_default().into_iter().map(String::from).collect();
    Args::command().get_arguments().flat_map(|a| -> Vec<String> { aliases(a) }).collect()
}

/// `mbperf completions SHELL`, written to `out`.
///
/// # Errors
/// An output that cannot be written.
pub fn completions(shell: Shell, out: &mut dyn Write) -> io::Result<()> {
    let mut script = Vec::new();
    // clap's own `print` panics when a pipe is closed.
    clap_complete::generate(shell, &mut tree(), "mbperf", &mut script);
    let mut script = String::from_utf8(script).map_err(io::Error::other)?;
    for name in short_names() {
        script = one_dash(&script, &name, shell);
    }
    out.write_all(script.as_bytes())
}

/// `--NAME` as `-NAME`, where it is a word.
fn one_dash(script: &str, name: &str, shell: Shell) -> String {
    if shell == Shell::Fish {
        // fish's word for a long option behind one dash.
        return script.replace(&format!(" -l {name} "), &format!(" -o {name} "));
    }
    let long = format!("--{name}");
    let mut text = String::with_capacity(script.len());
    let mut rest = script;
    while let Some(at) = rest.find(&long) {
        let after = rest[at + long.len()..].chars().next();
        let word_goes_on = after.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
        text += &rest[..at];
        text += if word_goes_on { &long } else { &long[1..] };
        rest = &rest[at + long.len()..];
    }
    text + rest
}

/// The names of several letters behind one dash, which a page would leave out as aliases.
fn with_short_names(arg: clap::Arg) -> clap::Arg {
    let aliases = arg.get_visible_aliases().unwrap_or_default();
    let names: Vec<String> = aliases.iter().filter(|a| a.len() > 1).map(|a| format!("-{a}")).collect();
    if names.is_empty() {
        return arg;
    }
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    arg.help(format!("{help} (also {})", names.join(", ")))
}

/// `mbperf man [COMMAND]`, written to `out`.
///
/// # Errors
/// A command that is none (exit 2), or an output that cannot be written.
pub fn man(command: Option<&str>, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut tree = tree().mut_args(with_short_names);
    tree.build();
    let page = match command {
        None => tree,
        Some(name) => {
            let names: Vec<String> = tree.get_subcommands().map(|c| c.get_name().to_owned()).collect();
            let found = tree.get_subcommands().find(|c| c.get_name() == name).cloned();
            let found = found.ok_or_else(|| {
                Usage(format!(
                    "man: `{}` is no command: {}; the main command's page needs no name",
                    short(name),
                    names.join(", ")
                ))
            })?;
            found.name(format!("mbperf-{name}")).version(env!("CARGO_PKG_VERSION"))
        }
    };
    let mut text = Vec::new();
    clap_mangen::Man::new(page).render(&mut text)?;
    Ok(out.write_all(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    fn script(shell: Shell) -> String {
        let mut out = Vec::new();
        completions(shell, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn every_shell_completes_the_options_as_they_are_typed() {
        for shell in Shell::value_variants() {
            let script = script(*shell);
            let (long, short) = match shell {
                Shell::Fish => ("-l model_recipe_name", "-o mr "),
                _ => ("--model_recipe_name", "-mr"),
            };
            assert!(script.contains(long) && script.contains(short), "{shell}");
            assert!(script.contains("--csv_dialect") || script.contains("-l csv_dialect"), "{shell}");
            // clap's scripts for Elvish and PowerShell offer no values.
            let values = !matches!(shell, Shell::Elvish | Shell::PowerShell);
            assert!(script.contains("excel_eu") || !values, "{shell}");
            assert!(script.contains("completions"), "{shell}");
            assert!(!script.contains("--mr ") && !script.contains("compile_kernels"), "{shell}");
        }
    }

    #[test]
    fn pages_name_every_option_and_command() {
        let page = |command| {
            let mut out = Vec::new();
            man(command, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let main = page(None);
        for arg in Args::command().get_arguments().filter(|a| !a.is_hide_set() && !a.is_positional()) {
            let name = arg.get_long().unwrap_or_default();
            assert!(main.contains(&name.replace('-', "\\-")), "{name}");
        }
        assert!(main.contains("report") && main.contains("(also \\-mr)"));
        assert!(page(Some("compare")).contains("allow\\-unlike"));
        assert!(man(Some("nothing"), &mut Vec::new()).is_err());
    }

    /// The package has a page of every command and a script of every shell.
    #[test]
    fn a_release_packs_every_page_and_script() {
        let release = include_str!("../../.ci/release");
        let list = |start: &str| -> Vec<String> {
            let words = release.split_once(start).unwrap().1.split_once(';').unwrap().0;
            words.split_whitespace().map(String::from).collect()
        };
        let commands: Vec<String> = tree().get_subcommands().map(|c| c.get_name().to_owned()).collect();
        assert_eq!(list("for command in "), commands);
        let mut shells: Vec<String> = Shell::value_variants().iter().map(ToString::to_string).collect();
        let mut packed = list("for shell in ");
        shells.sort();
        packed.sort();
        assert_eq!(packed, shells);
    }
}
