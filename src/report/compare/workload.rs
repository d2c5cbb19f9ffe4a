//! Settings of a command line that change the work of a step and have no column of their own: read back from
//! the column `command`, so that a `--hidden_size` on one side is no regression of the other.

use super::roles::{ROLES, Role};
use crate::args::{self, Args, Command};
use std::collections::BTreeMap;

/// The settings in one canonical text; empty when there are none. `None`: no command line of a run.
pub fn settings(command: &str) -> Option<String> {
    let words = words(command)?;
    if words.first()? != "mbperf" {
        return None;
    }
    match args::parse(words).ok()? {
        Command::Run(args) => Some(of(&args)),
        _ => None,
    }
}

/// Whether a row's command let attention add in any order: its arms may then differ in bits and be sound.
pub fn unordered(command: &str) -> bool {
    let args = words(command).and_then(|words| args::parse(words).ok());
    matches!(args, Some(Command::Run(args)) if !args.mbperf.attention_deterministic)
}

/// Keys whose values are in columns of their own.
const IN_COLUMNS: [&str; 3] = ["model.cuda_graph_impl", "model.cuda_graph_scope", "rng.seed"];

/// A `key=value` setting under the key's own name, whichever was typed.
pub fn setting(text: &str) -> Option<(&str, &str)> {
    let (key, value) = text.split_once('=')?;
    Some((crate::keys::find(key).map_or(key, |k| k.name), value))
}

fn of(args: &Args) -> String {
    let options = ROLES.iter().filter_map(|(name, role)| match role {
        Role::Workload(text) => Some((format!("--{name}"), text(args)?)),
        Role::Key(_) | Role::Alike(_) | Role::Same => None,
    });
    // The last of a repeated key is in force.
    let given = args.overrides.iter().filter_map(|o| setting(o));
    let given = given.filter(|(key, _)| !IN_COLUMNS.contains(key)).map(|(k, v)| (k.to_owned(), v.to_owned()));
    let settings: BTreeMap<String, String> = options.chain(given).collect();
    settings.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}

/// Words of a line as `run` quoted them: blanks apart, single quotes around, `'\''` for a quote.
fn words(line: &str) -> Option<Vec<String>> {
    let (mut words, mut word, mut quoted) = (Vec::new(), None::<String>, false);
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            '\'' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            _ if quoted => word.get_or_insert_default().push(c),
            '\\' => word.get_or_insert_default().push(chars.next()?),
            ' ' => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    (!quoted).then_some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = "mbperf -m llama -mr llama3_8b -g h100";

    #[test]
    fn words_come_back_as_they_were_quoted() {
        assert_eq!(words("a 'b c' 'it'\\''s' ''").unwrap(), ["a", "b c", "it's", ""]);
        assert_eq!(words("a 'b"), None);
        assert_eq!(words(""), Some(vec![]));
    }

    #[test]
    fn outputs_and_budgets_are_no_workload_and_sizes_are() {
        let plain = settings(RUN).unwrap();
        assert_eq!(plain, "");
        for same in [
            "-o x.csv --max_time 5 -q",
            "--moe_routing recipe",
            "-tp 1",
            "--margin 0.02",
            "model.cuda_graph_scope=[]",
            "model.cuda_graph_modules=[]",
        ] {
            assert_eq!(settings(&format!("{RUN} {same}")).unwrap(), plain, "{same}");
        }
        for other in
            ["--hidden_size 512", "--moe_routing skewed", "model.ffn_hidden_size=64", "--optimizer none"]
        {
            assert_ne!(settings(&format!("{RUN} {other}")).unwrap(), plain, "{other}");
        }
        let repeated = settings(&format!("{RUN} model.num_layers=2 model.num_layers=4")).unwrap();
        assert_eq!(repeated, settings(&format!("{RUN} model.num_layers=4")).unwrap());
        assert_eq!(settings("mbperf rules"), None);
        assert_eq!(settings("python run_script.py"), None);
    }
}
