//! benches/models25.sh without a GPU: a row of each of the 25 models can be planned, fits one GPU, and is of the recipe, scope and
//! size that `results/h200/models.csv` is to have.

use crate::common::binary::{run, text};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::tempdir;

/// Memory of an H200, `gpu_memory_mib` in results/h200.
const GPU_MIB: f64 = 143_155.0;
/// What a plan leaves free: a process took up to 511 MiB more than was planned (results/h200).
const ROOM_MIB: f64 = 755.0;
/// What may stand in `approximations`, by the model's name: parts that are built in simpler form.
const SIMPLER: [(&str, &str); 3] = [
    ("deepseek_v4", "compressed_attention"),
    ("glm5", "sparse_attention"),
    ("qwen35_vl_35b_a3b", "vision_graphs"),
];

/// The script with these words after the binary, no GPU in sight.
fn script(out: &Path, models: &str, variables: &[(&str, &str)]) -> Output {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/models25.sh");
    let mut command = Command::new("bash");
    command.arg(path).arg(assert_cmd::cargo::cargo_bin!("mbperf")).arg(out).args(models.split_whitespace());
    command.env_remove("DRYRUN").env_remove("DEVICE").env_remove("MAX_TIME").env("CUDA_VISIBLE_DEVICES", "");
    command.envs(variables.iter().copied()).output().unwrap()
}

/// A line of the dry run.
struct Planned {
    model: String,
    mib: f64,
    approximations: BTreeSet<String>,
    words: String,
}

fn planned(line: &str) -> Planned {
    let (model, rest) = line.split_once(": planned, ").expect(line);
    let (mib, rest) = rest.split_once(" MiB, approximations ").expect(line);
    let (names, words) = rest.split_once(": ").expect(line);
    let names = names.split(", ").filter(|n| *n != "none");
    Planned {
        model: model.to_owned(),
        mib: mib.parse().unwrap(),
        approximations: names.map(str::to_owned).collect(),
        words: words.to_owned(),
    }
}

/// The words without an option and its value.
fn without(words: &str, option: &str) -> String {
    let mut left = Vec::new();
    let mut all = words.split_whitespace();
    while let Some(word) = all.next() {
        if word == option {
            all.next();
        } else {
            left.push(word);
        }
    }
    left.join(" ")
}

fn value<'a>(words: &'a str, option: &str) -> &'a str {
    words.split_whitespace().skip_while(|w| *w != option).nth(1).unwrap_or_default()
}

fn dry(words: &str) -> Value {
    let dir = tempdir().unwrap();
    let output = run(dir.path(), &format!("{words} --dryrun --format json"));
    assert_eq!(output.status.code(), Some(0), "{words}\n{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The first scope that `--sweep` would run.
fn narrowest(words: &str) -> String {
    let dir = tempdir().unwrap();
    let output = run(dir.path(), &format!("{words} --sweep --dryrun"));
    assert_eq!(output.status.code(), Some(0), "{words}\n{}", text(&output.stderr));
    let list = text(&output.stdout);
    list.lines().nth(1).and_then(|l| l.split_whitespace().next()).expect(&list).to_owned()
}

fn approximations(row: &Planned) {
    let allowed: BTreeSet<String> = SIMPLER
        .iter()
        .filter(|(model, _)| row.model.starts_with(model))
        .map(|(_, name)| (*name).to_owned())
        .collect();
    assert!(row.approximations.is_subset(&allowed), "{}: {:?}", row.words, row.approximations);
}

/// The h100 bf16 recipe, but where it is not there or refused as it stands.
fn recipe(row: &Planned) {
    if row.words.contains("-g h100 -c bf16") {
        return;
    }
    let dir = tempdir().unwrap();
    let line = format!("-m {} -mr {} -g h100 -c bf16 --dryrun", value(&row.words, "-m"), row.model);
    assert_eq!(run(dir.path(), &line).status.code(), Some(2), "{line}");
}

/// The recipe's own graphs, or the narrowest scope where it has none.
fn scope(row: &Planned) {
    let own = without(&without(&row.words, "--cuda_graph_impl"), "--cuda_graph_scope");
    let has_graphs = dry(&own)["cuda_graph_impl"] != "none";
    assert_eq!(has_graphs, own == row.words, "{}", row.words);
    if !has_graphs {
        assert_eq!(value(&row.words, "--cuda_graph_scope"), narrowest(&own), "{}", row.words);
    }
}

/// Fewer layers only where all of them leave no room.
fn size(row: &Planned) {
    assert!(row.mib + ROOM_MIB <= GPU_MIB, "{}: {} MiB", row.words, row.mib);
    let whole = without(&row.words, "--num_layers");
    if whole != row.words {
        let mib = dry(&whole)["program"]["graph_arm"]["memory"]["total_mib"].as_f64().unwrap();
        assert!(mib + ROOM_MIB > GPU_MIB, "{whole}: {mib} MiB");
    }
}

#[test]
fn every_model_is_planned() {
    let dir = tempdir().unwrap();
    let out = dir.path().join("out");
    let output = script(&out, "", &[("DRYRUN", "1")]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    assert!(!out.exists(), "a dry run writes nothing");
    let (last, lines) = said.lines().collect::<Vec<_>>().split_last().map(|(l, r)| (*l, r.to_vec())).unwrap();
    assert!(last.starts_with("25 models, 0 failed, "), "{last}");
    let rows: Vec<Planned> = lines.into_iter().map(planned).collect();
    assert_eq!(rows.len(), 25);

    let list = run(dir.path(), "recipes list --format json");
    let recipes: Value = serde_json::from_slice(&list.stdout).unwrap();
    let models: BTreeSet<&str> =
        recipes.as_array().unwrap().iter().map(|r| r["model"].as_str().unwrap()).collect();
    assert_eq!(rows.iter().map(|r| r.model.as_str()).collect::<BTreeSet<_>>(), models);

    for row in &rows {
        assert_eq!(value(&row.words, "-mr"), row.model);
        approximations(row);
        recipe(row);
        scope(row);
        size(row);
    }
}

#[test]
fn rows_are_made_and_counted() {
    let dir = tempdir().unwrap();
    let output = script(dir.path(), "llama3_8b", &[("MAX_TIME", "0.1"), ("DEVICE", "cpu")]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with("llama3_8b: exit 0, "), "{said}");
    assert_eq!(lines[1], "models.csv: 2 rows, 2 with digest_match=true, 0 with approximations");
    assert!(lines[2].starts_with("1 models, 0 failed, "), "{said}");
    // Without a GPU there is no row, and none is made elsewhere in its place.
    let output = script(dir.path(), "llama3_8b", &[("MAX_TIME", "0.1")]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.starts_with("llama3_8b: FAILED: exit 3, "), "{said}");
}

#[test]
fn a_row_that_fails_is_told_and_the_others_are_run() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("models.csv");
    std::fs::write(&file, "no rows\n").unwrap();
    let output = script(dir.path(), "wan_14b llama3_8b", &[]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for model in ["wan_14b", "llama3_8b"] {
        assert!(said.lines().any(|l| l.starts_with(&format!("{model}: FAILED: exit 2, "))), "{said}");
    }
    assert!(said.lines().last().unwrap().starts_with("2 models, 2 failed, "), "{said}");
    assert_eq!(std::fs::read(&file).unwrap(), b"no rows\n");
}

#[test]
fn what_is_wrong_is_said_before_anything_runs() {
    let dir = tempdir().unwrap();
    let out = dir.path().join("out");
    let refused = |output: Output, what: &str| {
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{err}");
        assert!(err.starts_with("models25.sh: ") && err.contains(what), "{err}");
        assert_eq!(text(&output.stdout), "");
        assert!(!out.exists());
    };
    refused(script(&out, "llama3_8b llama", &[]), "no model llama: ");
    refused(script(&out, "llama3_8b", &[("MAX_TIME", "soon")]), "MAX_TIME=soon");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/models25.sh");
    let missing = dir.path().join("mbperf");
    refused(
        Command::new("bash").arg(&path).arg(&missing).arg(&out).output().unwrap(),
        "mbperf cannot be run: ",
    );
    let help = Command::new("bash").arg(&path).arg("-h").output().unwrap();
    assert_eq!(help.status.code(), Some(0));
    assert!(text(&help.stdout).contains("usage: benches/models25.sh "), "{}", text(&help.stdout));
}
