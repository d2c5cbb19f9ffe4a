//! The command line: every option of the harness is known, spellings, help, and what is refused.

use crate::common::shell_words;
use mbperf::args::{Args, ArgsError, Command, SCOPES, parse};
use std::collections::BTreeSet;

const BASE: &str = "-m llama -mr llama3_8b -g h100";

fn read(line: &str) -> Result<Command, ArgsError> {
    parse(std::iter::once("mbperf".to_owned()).chain(shell_words(line)))
}

fn args(line: &str) -> Box<Args> {
    match read(&format!("{BASE} {line}")) {
        Ok(Command::Run(args)) => args,
        other => panic!("{line}: {other:?}"),
    }
}

fn usage(line: &str) -> String {
    match read(&format!("{BASE} {line}")) {
        Err(e @ ArgsError::Usage(_)) => {
            assert_eq!(e.exit_code(), 2);
            e.to_string()
        }
        other => panic!("{line}: {other:?}"),
    }
}

/// A value that the option takes, for the table's type and choices.
fn value(long: &str, kind: &str, choices: &str) -> String {
    match (long, choices.split('|').next().unwrap_or("")) {
        ("--cuda_graph_impl", _) => "none".into(),
        ("--cuda_graph_scope", _) => "attn".into(),
        (_, "") if kind.starts_with("int") || kind.starts_with("string, None") => "2".into(),
        (_, "") if kind.starts_with("float") => "0.5".into(),
        (_, "") if kind.starts_with("bool") => "true".into(),
        (_, "") => "x".into(),
        (_, choice) => choice.into(),
    }
}

#[test]
fn every_option_of_the_harness_is_known() {
    let rows = include_str!("data/harness_options.tsv").lines().filter(|l| !l.starts_with('#')).skip(1);
    let mut seen = 0;
    for row in rows {
        let cells: Vec<&str> = row.split('\t').collect();
        let (short, long, kind, choices, verdict) = (cells[1], cells[2], cells[3], cells[4], cells[7]);
        for name in [short, long].into_iter().filter(|n| !n.is_empty()) {
            let line = if kind == "flag" {
                name.to_owned()
            } else {
                format!("{name} {}", value(long, kind, choices))
            };
            match read(&format!("{BASE} {line}")) {
                Ok(_) => assert_ne!(verdict, "refuse", "{name} is accepted"),
                Err(e) => {
                    let text = e.to_string();
                    assert!(text.contains("refuses:") && text.lines().count() == 1, "{name}: {text}");
                    // Kept ones may wait for their part or be the subcommand's, but none is unknown.
                    let elsewhere = text.contains("not built yet") || text.contains("`mbperf compare`");
                    assert!(verdict != "keep" || elsewhere, "{name}: {text}");
                }
            }
        }
        seen += 1;
    }
    assert_eq!(seen, 134);
}

#[test]
fn spellings() {
    for line in [
        "-gb 64",
        "-gb=64",
        "--global_batch_size 64",
        "--global_batch_size=64",
        "-gb 32 --global_batch_size 64",
    ] {
        assert_eq!(args(line).training.global_batch_size, Some(64), "{line}");
    }
    let mixed = args("model.a=1 -mb 2 model.b=[x,y] -dq");
    assert_eq!(mixed.overrides, ["model.a=1", "model.b=[x,y]"]);
    assert!(mixed.general.dryrun && mixed.mbperf.quiet);
    assert_eq!(args("-et model.a=1").overrides, ["model.a=1"]);
    assert_eq!(args("-rl -1").performance.recompute_num_layers, Some(-1));
    assert_eq!(args("-o -").mbperf.output.as_deref(), Some(std::path::Path::new("-")));
    let last = args("--cuda_graph_scope attn --cuda_graph_scope mlp");
    assert!(
        last.scope_repeated && last.performance.cuda_graph_scope.as_ref().is_some_and(|s| s.0.len() == 1)
    );
    assert_eq!(args("-m QWEN").general.model_family_name, "qwen");
}

#[test]
fn wrong_lines_say_what_is_right() {
    for (line, hint) in [
        ("--cuda-graph-impl none", "--cuda_graph_impl"),
        ("--cuda_graph_scop attn", "--cuda_graph_scope"),
        ("-mrr x", "-mr"),
        ("attn", "--cuda_graph_scope"),
        ("recipe", "mbperf recipes"),
        ("--cuda_graph_impl TE", "transformer_engine"),
        ("--cuda_graph_scope attn,moe_ruter", "moe_router"),
        ("--cuda_graph_scope ''", "empty"),
        ("-mr ''", "empty"),
        ("-cv ''", "--config_variant"),
        ("--host_model ''", "--host_model"),
        ("-tp", "--tensor_model_parallel_size"),
        ("-c fp8", "fp8_cs"),
        ("--lr nan", "finite"),
        ("-a x", "srun"),
        ("--save_dir=x", "synthetic"),
    ] {
        let text = usage(line);
        assert!(text.starts_with("error: ") && text.contains(hint), "{line}: {text}");
    }
    assert!(matches!(read(""), Err(ArgsError::Usage(t)) if t.contains("--model_family_name")));
}

#[test]
fn help_names_every_option_with_its_short_forms() {
    let Err(ArgsError::Show(page)) = read("--help") else { panic!("no help") };
    for line in [
        "-mr, --model_recipe_name <NAME>",
        "-g, --gpu <GPU>",
        "Parallelism arguments:",
        "[default: 0.01]",
        "recipes",
        "--nemo_home",
    ] {
        assert!(page.contains(line), "{line} is not in\n{page}");
    }
    assert!(page.lines().all(|l| l.len() <= 110), "a line is too long");
    assert!(!page.contains("--inject"));
}

#[test]
fn the_brief_help_has_every_option_and_says_less_of_it() {
    let page = |line: &str| {
        let Err(ArgsError::Show(page)) = read(line) else { panic!("no help") };
        page
    };
    let (whole, brief) = (page("--help"), page("-h"));
    assert!(brief.lines().count() * 3 < whole.lines().count() * 2, "{brief}");
    assert!(brief.lines().all(|l| l.len() <= 110) && brief.contains("mbperf --help"), "{brief}");
    // A heading has something below it.
    let lines: Vec<&str> = brief.lines().collect();
    let bare = |two: &&[&str]| !two[0].starts_with(' ') && two[0].ends_with(':') && !two[1].starts_with(' ');
    assert_eq!(lines.windows(2).find(bare), None);
    let command = <Args as clap::CommandFactory>::command();
    let shown = command.get_arguments().filter(|a| !a.is_hide_set());
    let longs: Vec<String> = shown.filter_map(|a| a.get_long()).map(|l| format!("--{l}")).collect();
    assert!(longs.len() > 80 && longs.iter().all(|l| whole.contains(l) && brief.contains(l)), "{brief}");
}

/// `-dq` is two flags: no alias may read as such a bundle, and no two options share a name.
#[test]
fn aliases_are_no_bundles_and_unique() {
    let command = <Args as clap::CommandFactory>::command();
    let flags: BTreeSet<char> = command
        .get_arguments()
        .filter(|a| !a.get_action().takes_values())
        .filter_map(|a| a.get_short())
        .chain(['h', 'V'])
        .collect();
    let mut names = BTreeSet::new();
    for alias in command.get_arguments().flat_map(|a| a.get_visible_aliases().unwrap_or_default()) {
        assert!(!alias.chars().all(|c| flags.contains(&c)), "-{alias} reads as a bundle");
        assert!(names.insert(alias.to_owned()), "-{alias} twice");
    }
    for refused in mbperf::args::REFUSED.iter().flat_map(|r| r.options) {
        let bare = refused.0.trim_start_matches('-');
        assert!(bare.is_empty() || names.insert(bare.to_owned()), "{} twice", refused.0);
    }
}

#[test]
fn subcommands() {
    assert!(matches!(read("rules"), Ok(Command::Rules)));
    assert!(matches!(read("recipes list qwen"), Ok(Command::Recipes(_))));
    assert!(matches!(read("recipes --help"), Err(ArgsError::Show(_))));
    assert!(matches!(read("recipes lst"), Err(ArgsError::Usage(t)) if t.contains("list")));
    assert!(matches!(read("recipes"), Err(ArgsError::Help(t)) if t.contains("\n  list  ")));
    assert!(matches!(read("ops --help"), Err(ArgsError::Show(t)) if t.contains("[NAME] [OPTIONS OF A RUN]")));
    assert!(matches!(read("ops gemm"), Ok(Command::Ops(Some(name), None)) if name == "gemm"));
    assert!(matches!(read("selftest --device cpu"), Err(ArgsError::Usage(_))));
    assert_eq!(SCOPES.len(), 7);
}
