//! `--help` of the main command, by group, with the harness's short forms beside the long ones. clap would
//! print `-mr` as "[alias: --mr]", so the page is rendered here from the same declarations.

use super::refused::REFUSED;
use clap::{Arg, Command};
use std::fmt::Write;

/// Columns of the page.
const WIDTH: usize = 100;
/// Column at which an option's description begins.
const INDENT: usize = 10;

/// The same on the brief page: what follows an option on its own line.
const BRIEF_INDENT: usize = 42;

/// How much the page says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// `-h`: what each option is, in its first clause.
    Brief,
    /// `--help`
    Whole,
}

/// The page.
pub fn render(main: &mut Command, subcommands: &Command, length: Length) -> String {
    main.build();
    let mut page = format!("{}\n\n", main.get_about().map(ToString::to_string).unwrap_or_default());
    page += "Usage: mbperf -m FAMILY -mr RECIPE -g GPU [OPTIONS] [KEY=VALUE]...\n       mbperf COMMAND\n\n";
    page += "Options are the Megatron-Bridge performance harness's, in its groups, and mbperf's own in the last one.\n";
    page += "One without a default keeps the recipe's value. The last of a repeated option wins; names are written in\n";
    page += "full. KEY=VALUE replaces a setting of the recipe and may stand anywhere; options win over it.\n\nCommands:\n";
    for c in subcommands.get_subcommands().filter(|c| !c.is_hide_set()) {
        let about = c.get_about().map(ToString::to_string).unwrap_or_default();
        let _ = writeln!(page, "  {:<12} {about}", c.get_name());
    }
    let mut groups: Vec<&str> = Vec::new();
    let headings =
        main.get_arguments().filter(|a| !a.is_positional()).map(|a| a.get_help_heading().unwrap_or("Other"));
    for heading in headings.chain(REFUSED.iter().map(|r| r.group)) {
        if !groups.contains(&heading) {
            groups.push(heading);
        }
    }
    for group in groups {
        let ours = |a: &&Arg| {
            !a.is_positional() && !a.is_hide_set() && a.get_help_heading().unwrap_or("Other") == group
        };
        // The brief page leaves out what is refused, and many groups hold nothing else.
        if length == Length::Brief && !main.get_arguments().any(|a| ours(&a)) {
            continue;
        }
        let _ = writeln!(page, "\n{group}:");
        for arg in main.get_arguments().filter(ours) {
            page += &option(arg, length);
        }
        for refused in REFUSED.iter().filter(|r| r.group == group && length == Length::Whole) {
            let names: Vec<String> = refused
                .options
                .iter()
                .map(
                    |(short, long)| {
                        if short.is_empty() { (*long).to_owned() } else { format!("{short} {long}") }
                    },
                )
                .collect();
            page += &wrap(&format!("Refused ({}): {}", refused.reason, names.join(", ")), 2);
        }
    }
    if length == Length::Brief {
        page +=
            "\n`mbperf --help` says all of every option, its choices and its default, and what is refused.\n";
    }
    page
}

/// `  -gb, --global_batch_size <N>` and its description on the next line.
fn option(arg: &Arg, length: Length) -> String {
    let mut names: Vec<String> = arg.get_short().map(|c| format!("-{c}")).into_iter().collect();
    names.extend(arg.get_visible_aliases().unwrap_or_default().iter().map(|a| format!("-{a}")));
    names.push(format!("--{}", arg.get_long().unwrap_or_default()));
    let takes = arg.get_action().takes_values();
    let value = arg
        .get_value_names()
        .filter(|_| takes)
        .and_then(|v| v.first())
        .map_or(String::new(), |v| format!(" <{v}>"));
    let mut text = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let names = names.join(", ");
    if length == Length::Brief {
        return brief(&format!("  {names}{value}"), &text);
    }
    let choices: Vec<String> = arg.get_possible_values().iter().map(|v| v.get_name().to_owned()).collect();
    if takes && !choices.is_empty() && !arg.is_hide_possible_values_set() {
        let _ = write!(text, " [{}]", choices.join(", "));
    }
    if let (true, Some(default)) = (takes, arg.get_default_values().first()) {
        let _ = write!(text, " [default: {}]", default.to_string_lossy());
    }
    format!("  {names}{value}\n{}", wrap(&text, INDENT))
}

/// An option with the first clause of its description beside it, or below where the names are long.
fn brief(names: &str, text: &str) -> String {
    let told = wrap(clause(text), BRIEF_INDENT);
    match names.len() < BRIEF_INDENT {
        true => format!("{names:<BRIEF_INDENT$}{}", &told[BRIEF_INDENT..]),
        false => format!("{names}\n{told}"),
    }
}

/// A description up to what is said beyond it: outside brackets, for what they hold is part of a clause.
fn clause(text: &str) -> &str {
    const ENDS: [&str; 4] = ["; ", ". ", ", e.g. ", " [default"];
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        // `0.. of` ends nothing.
        let ends = ENDS.iter().any(|end| text[at..].starts_with(end)) && !text[..at].ends_with('.');
        if depth == 0 && ends {
            return &text[..at];
        }
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            _ => {}
        }
    }
    text
}

/// Lines of at most [`WIDTH`] columns, each indented.
fn wrap(text: &str, indent: usize) -> String {
    let (mut out, mut line) = (String::new(), " ".repeat(indent));
    for word in text.split_whitespace() {
        if line.len() + word.len() + 1 > WIDTH && line.len() > indent {
            out += line.trim_end();
            out.push('\n');
            line = " ".repeat(indent);
        }
        line += word;
        line.push(' ');
    }
    out + line.trim_end() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clause_ends_outside_brackets() {
        for (text, expected) in [
            ("Model family, e.g. qwen", "Model family"),
            ("GPUs of the job; the batch scales", "GPUs of the job"),
            (
                "A stream of its own (both arms; slower). Not with --x",
                "A stream of its own (both arms; slower)",
            ),
            ("Time for it [default: 20; 60 at most]", "Time for it"),
            ("Ranks 0.. of the job. Left out: one", "Ranks 0.. of the job"),
            ("Bits", "Bits"),
        ] {
            assert_eq!(clause(text), expected);
        }
    }
}
