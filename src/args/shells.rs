//! Completions and manual pages, from the same declarations as `--help`. The options of several letters behind one
//! dash are clap's aliases (`--mr`): they are printed as they are typed (`-mr`). What completions offer for a value is
//! known here alone: parsing takes what it took, a recipe of the user's own with it.

use super::{Args, GRAPH_IMPLS, SCOPES, SubCli};
use crate::commands::Usage;
use crate::keys::short;
use crate::recipe::Catalogue;
use crate::selftest::cases;
use clap::builder::PossibleValuesParser;
use clap::{Arg, Command, CommandFactory, ValueHint};
use clap_complete::Shell;
use std::io::{self, Write};

/// The main command with its subcommands, in one tree.
fn tree() -> Command {
    let subcommands: Vec<Command> =
        SubCli::command().get_subcommands().filter(|c| !c.is_hide_set()).cloned().collect();
    Args::command().subcommands(subcommands).args_conflicts_with_subcommands(true)
}

/// Modules of a selective recompute, as docs/recompute.md lists them.
const RECOMPUTE_MODULES: [&str; 9] = [
    "core_attn",
    "gdn_norm_out",
    "layernorm",
    "mhc",
    "mla_up_proj",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
];

/// Names that completions offer, where parsing takes any text.
struct Names {
    families: Vec<String>,
    models: Vec<String>,
    ops: Vec<String>,
    pages: Vec<String>,
}

impl Names {
    fn known() -> Self {
        // Without recipes there is nothing to offer, and the script is still of use.
        let catalogue = Catalogue::load(None).ok();
        let models = || catalogue.iter().flat_map(Catalogue::models);
        let sorted = |mut names: Vec<String>| {
            names.sort();
            names.dedup();
            names
        };
        Names {
            families: sorted(models().map(|m| m.family.clone()).collect()),
            models: sorted(models().map(|m| m.model.clone()).collect()),
            ops: sorted(cases::odd().iter().map(|op| op.name().to_owned()).collect()),
            pages: pages(&SubCli::command(), ""),
        }
    }

    /// Of an argument of a run, or of a command.
    fn of(&self, command: &str, arg: &str) -> Vec<String> {
        let all = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect();
        match (command, arg) {
            ("list", "filter") => self.families.clone(),
            ("show", "name") => self.models.clone(),
            ("ops", "name") => self.ops.clone(),
            ("man", "command") => self.pages.clone(),
            (_, "model_family_name") => self.families.clone(),
            (_, "model_recipe_name") => self.models.clone(),
            (_, "cuda_graph_impl") => all(&GRAPH_IMPLS.map(|(name, _)| name)),
            (_, "cuda_graph_scope") => all(&SCOPES.map(|(name, _)| name)),
            (_, "recompute_modules") => all(&RECOMPUTE_MODULES),
            (_, "moe_flex_dispatcher_backend") => all(&["deepep", "hybridep", "None"]),
            (_, "comm_model") => all(&["copy", "nvlink"]),
            (_, "use_tokendrop" | "use_megatron_fsdp" | "nccl_ub" | "moe_a2a_overlap") => {
                all(&["true", "false"])
            }
            _ => Vec::new(),
        }
    }

    /// With what is offered for its value; without that, file names for paths alone.
    fn offered(&self, command: &str, arg: Arg) -> Arg {
        let names = self.of(command, arg.get_id().as_str());
        if !names.is_empty() {
            return arg.value_parser(PossibleValuesParser::new(names));
        }
        let paths = [ValueHint::AnyPath, ValueHint::FilePath, ValueHint::DirPath];
        // `--host_model` takes a name or a file.
        if paths.contains(&arg.get_value_hint())
            || arg.get_id() == "host_model"
            || !arg.get_action().takes_values()
        {
            return arg;
        }
        arg.value_hint(ValueHint::Other)
    }

    fn offered_by(&self, command: Command) -> Command {
        let name = command.get_name().to_owned();
        let inner: Vec<String> = command.get_subcommands().map(|c| c.get_name().to_owned()).collect();
        let command = command.mut_args(|arg| self.offered(&name, arg));
        inner.into_iter().fold(command, |c, inner| c.mut_subcommand(inner, |sub| self.offered_by(sub)))
    }
}

/// Names of the commands' pages, those of commands in commands joined by a hyphen.
fn pages(tree: &Command, before: &str) -> Vec<String> {
    let page = |c: &Command| {
        let name = format!("{before}{}", c.get_name());
        let inner = pages(c, &format!("{name}-"));
        std::iter::once(name).chain(inner).collect::<Vec<_>>()
    };
    tree.get_subcommands().flat_map(page).collect()
}

/// The tree with what its values may be, and with the options of a run that `ops` takes, which it reads itself.
fn completed() -> Command {
    let options: Vec<Arg> =
        Args::command().get_arguments().filter(|a| !a.is_positional() && !a.is_hide_set()).cloned().collect();
    // Of the subcommand nothing is required: `mbperf ops` alone is a command too.
    let tree = tree().mut_subcommand("ops", |ops| ops.args(options.into_iter().map(|a| a.required(false))));
    Names::known().offered_by(tree)
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
    clap_complete::generate(shell, &mut completed(), "mbperf", &mut script);
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

/// `mbperf man [COMMAND]`, written to `out`. A command in a command is named by both words (`recipes list`), or joined
/// as its page is (`recipes-list`).
///
/// # Errors
/// A command that is none (exit 2), or an output that cannot be written.
pub fn man(command: &[String], out: &mut dyn Write) -> anyhow::Result<()> {
    let asked = command.join("-");
    let mut page = if asked.is_empty() { tree() } else { SubCli::command() }.mut_args(with_short_names);
    page.build();
    for name in asked.split('-').filter(|_| !asked.is_empty()) {
        let found = page.get_subcommands().find(|c| c.get_name() == name).cloned();
        page = found.ok_or_else(|| {
            Usage(format!(
                "man: `{}` is no command: {}; the main command's page needs no name",
                short(&command.join(" ")),
                pages(&SubCli::command(), "").join(", ")
            ))
        })?;
    }
    if !asked.is_empty() {
        page = page.name(format!("mbperf-{asked}")).version(env!("CARGO_PKG_VERSION"));
    }
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
            assert!(!script.contains("--mr "), "{shell}");
        }
    }

    /// What bash offers for these words, the last of which is being typed.
    fn offered(script: &str, words: &[&str]) -> Option<Vec<String>> {
        let program = format!(
            "{script}\nCOMP_WORDS=(\"$@\"); COMP_CWORD=$(($#-1)); _mbperf mbperf \"${{COMP_WORDS[COMP_CWORD]}}\" \
             \"${{COMP_WORDS[COMP_CWORD-1]}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        );
        let mut bash = std::process::Command::new("bash");
        let output = bash.args(["-c", &program, "bash"]).args(words).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).lines().map(String::from).collect())
    }

    #[test]
    fn bash_offers_what_a_value_may_be() {
        let script = script(Shell::Bash);
        for (line, wanted) in [
            ("mbperf ops ge", "gemm"),
            ("mbperf ops gemm --cuda_graph_s", "--cuda_graph_scope"),
            ("mbperf ops gemm -m lla", "llama"),
            ("mbperf --cuda_graph_impl tr", "transformer_engine"),
            ("mbperf --cuda_graph_scope moe_r", "moe_router"),
            ("mbperf -m qwe", "qwen"),
            ("mbperf -mr llama3_8", "llama3_8b"),
            ("mbperf --model_recipe_name llama3_8", "llama3_8b"),
            ("mbperf --recompute_modules core", "core_attn"),
            ("mbperf recipes show nemo", "nemotron_3_nano"),
            ("mbperf man rec", "recipes-list"),
            ("mbperf man comp", "compile_kernels"),
        ] {
            let words: Vec<&str> = line.split(' ').collect();
            // Where there is no bash, nothing is to be checked.
            let Some(said) = offered(&script, &words) else { return };
            assert!(said.iter().any(|s| s == wanted), "{line}: {said:?}");
        }
        assert!(
            offered(&script, &["mbperf", "ops", "-mr", "zz"]).is_some_and(|said| said.concat().is_empty())
        );
    }

    #[test]
    fn what_is_offered_is_what_is_taken() {
        for module in RECOMPUTE_MODULES {
            assert!(include_str!("../../docs/recompute.md").contains(&format!("`{module}`")), "{module}");
        }
        let mut tree = completed();
        tree.build();
        // Parsing knows nothing of what is offered.
        let plain = Args::command();
        let names = |c: &Command| -> Vec<String> {
            let arg = c.get_arguments().find(|a| a.get_id() == "model_recipe_name");
            arg.map(|a| a.get_possible_values().iter().map(|v| v.get_name().to_owned()).collect())
                .unwrap_or_default()
        };
        assert!(names(&plain).is_empty() && names(&tree).contains(&"llama3_8b".to_owned()));
    }

    #[test]
    fn pages_name_every_option_and_command() {
        let page = |command| {
            let mut out = Vec::new();
            let command: Option<&str> = command;
            let words: Vec<String> = command.iter().flat_map(|c| c.split(' ')).map(String::from).collect();
            man(&words, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let main = page(None);
        for arg in Args::command().get_arguments().filter(|a| !a.is_hide_set() && !a.is_positional()) {
            let name = arg.get_long().unwrap_or_default();
            assert!(main.contains(&name.replace('-', "\\-")), "{name}");
        }
        assert!(main.contains("report") && main.contains("(also \\-mr)"));
        assert!(page(Some("compare")).contains("allow\\-unlike"));
        assert_eq!(page(Some("recipes list")), page(Some("recipes-list")));
        assert!(page(Some("recipes list")).contains("mbperf\\-recipes\\-list"));
        assert!(page(Some("recipes-show")).contains("recipes_dir"));
        assert!(page(Some("compile_kernels")).contains("arch") && !main.contains("compile_kernels"));
        for wrong in [&["nothing"][..], &["recipes", "nothing"], &["recipes-"], &["-"]] {
            let words: Vec<String> = wrong.iter().map(|w| (*w).to_owned()).collect();
            assert!(man(&words, &mut Vec::new()).is_err(), "{wrong:?}");
        }
    }

    /// The package has a page of every command and a script of every shell.
    #[test]
    fn a_release_packs_every_page_and_script() {
        let release = include_str!("../../.ci/release");
        let list = |start: &str| -> Vec<String> {
            let words = release.split_once(start).unwrap().1.split_once(';').unwrap().0;
            words.split_whitespace().map(String::from).collect()
        };
        let mut commands: Vec<String> = Vec::new();
        for command in tree().get_subcommands() {
            commands.push(command.get_name().to_owned());
            let own = command.get_subcommands().map(|c| format!("{}-{}", command.get_name(), c.get_name()));
            commands.extend(own);
        }
        assert_eq!(list("for command in "), commands);
        let mut shells: Vec<String> = Shell::value_variants().iter().map(ToString::to_string).collect();
        let mut packed = list("for shell in ");
        shells.sort();
        packed.sort();
        assert_eq!(packed, shells);
    }
}
