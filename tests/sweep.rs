//! `--sweep` through the binary: which scopes are run, in what order, and what is said of them.

use crate::common::binary::{self, cell, records, run, text};
use crate::common::pages::page;
use serde_json::Value;
use tempfile::tempdir;

const LLAMA: &str = "-m llama -mr llama3_8b -g h100";
const QWEN: &str = "-m qwen -mr qwen3_30b_a3b -g h100";
const PADDED: &str = "--use_tokendrop true model.moe_token_dispatcher_type=alltoall";
const NANO: &str = "-m nemotronh -mr nemotron_3_nano -g h100";

fn planned(line: &str) -> Vec<String> {
    let dir = tempdir().unwrap();
    let output = run(dir.path(), &format!("{line} --sweep --dryrun"));
    assert_eq!(output.status.code(), Some(0), "{line}\n{}", text(&output.stderr));
    let list = text(&output.stdout);
    let list: String = list.lines().filter(|l| !l.starts_with("not ")).map(|l| format!("{l}\n")).collect();
    let scopes = list.lines().skip(1).map(|l| l.rsplit_once("  ").unwrap().0.trim().to_owned());
    let shares: Vec<f64> =
        list.lines().skip(1).map(|l| l.split_whitespace().rev().nth(6).unwrap().parse().unwrap()).collect();
    assert!(shares.windows(2).all(|w| w[0] <= w[1]), "narrowest first: {list}");
    scopes.map(|s| s.trim_end_matches(|c: char| c.is_ascii_digit() || c == ' ').to_owned()).collect()
}

#[test]
fn every_legal_scope_is_tried_once() {
    assert_eq!(planned(LLAMA), ["mlp", "attn", "attn,mlp", "full_iteration"]);
    // Dropless experts: their dispatch cannot lie in a graph (R63).
    let dropless = planned(QWEN);
    assert!(dropless.contains(&"attn,moe_router,moe_preprocess".to_owned()), "{dropless:?}");
    assert!(
        dropless.iter().all(|s| s != "moe" && s != "full_iteration" && s != "whole layer"),
        "{dropless:?}"
    );
    let padded = planned(&format!("{QWEN} {PADDED}"));
    assert!(
        ["moe", "attn,moe", "full_iteration"].iter().all(|s| padded.contains(&(*s).to_owned())),
        "{padded:?}"
    );
    let of = |line: &str, scopes: &[&str]| {
        let found = planned(line);
        assert!(scopes.iter().all(|s| found.contains(&(*s).to_owned())), "{line}: {found:?}");
    };
    let mixed = ["mlp,moe_router", "attn,mlp,moe_router", "attn,mlp,moe_router,moe_preprocess"];
    of("-m deepseek -mr deepseek_v3 -g h100", &mixed);
    of(&format!("{NANO} --recompute_modules core_attn"), &["moe_router,moe_preprocess,mamba"]);
    let hybrid = planned(NANO);
    assert!(hybrid.contains(&"mamba".to_owned()) && hybrid.contains(&"attn,mamba".to_owned()), "{hybrid:?}");
}

#[test]
fn a_plan_says_what_is_left_out_and_why() {
    let dir = tempdir().unwrap();
    let of = |line: &str| run(dir.path(), &format!("{line} --sweep --dryrun"));
    // The recipe recomputes experts, which the router's graph does not go with.
    let list = text(&of(NANO).stdout);
    assert!(list.lines().any(|l| l.starts_with("not moe_router; ") && l.contains(": R34: ")), "{list}");
    // Parts that the model has not are no loss.
    assert!(!list.contains("R29"), "{list}");
    let described: Value = serde_json::from_slice(&of(&format!("{NANO} --format json")).stdout).unwrap();
    assert_eq!(described["scopes"][0]["scope"], "attn");
    let refused = described["refused"].as_array().unwrap();
    assert!(refused.iter().any(|r| r["scope"] == "moe_router" && r["rule"] == "R34"), "{described}");
    // One rule, two reasons.
    let list = text(&of(QWEN).stdout);
    let full = list.lines().find(|l| l.starts_with("not full_iteration: R63: ")).unwrap();
    assert!(full.contains("--cuda_graph_scope full_iteration: "), "{list}");
    // What is wrong without graphs too is said as without --sweep, and what is wrong with graphs of any kind.
    for line in
        [&format!("{QWEN} --use_tokendrop true"), "-m qwen -mr nope -g h100", &format!("{LLAMA} -ms 1")]
    {
        let (output, alone) =
            (of(line), run(dir.path(), &format!("{line} --dryrun --cuda_graph_scope attn")));
        assert_eq!((output.status.code(), alone.status.code()), (Some(2), Some(2)), "{line}");
        assert_eq!(text(&output.stderr), text(&alone.stderr), "{line}");
    }
}

#[test]
fn the_recommendation_is_an_object_too() {
    let dir = tempdir().unwrap();
    let line = format!(
        "{LLAMA} --device cpu -ms 6 --num_layers 1 -sl 16 --vocab_size 64 -cp 1 --sweep -o x.csv --format json"
    );
    for more in ["", " --resume"] {
        let output = run(dir.path(), &format!("{line}{more}"));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let said: Vec<Value> =
            text(&output.stdout).lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        let (sweep, runs) = said.split_last().unwrap();
        assert!(runs.len() == 4 && runs.iter().all(|r| r["rows"].is_array()), "{said:?}");
        let sweep = &sweep["sweep"];
        let scopes: Vec<&str> =
            sweep["scopes"].as_array().unwrap().iter().map(|s| s["scope"].as_str().unwrap()).collect();
        assert_eq!(scopes, ["mlp", "attn", "attn,mlp", "full_iteration"]);
        assert_eq!((&sweep["recommended"], &sweep["without_row"]), (&Value::Null, &Value::from(0)));
        assert!(sweep["said"][0].as_str().unwrap().starts_with("Recommended: nothing: "), "{sweep}");
    }
}

#[test]
fn rows_of_every_scope_and_what_is_said_on_a_cpu() {
    let dir = tempdir().unwrap();
    let line = format!("{LLAMA} --device cpu -ms 6 --num_layers 2 -sl 32 --sweep -o x.csv");
    let output = run(dir.path(), &line);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let rows = records(&std::fs::read(dir.path().join("x.csv")).unwrap());
    let scopes: Vec<String> =
        (0..rows.len() - 1).step_by(2).map(|r| cell(&rows, r, "cuda_graph_scope")).collect();
    assert_eq!(scopes, ["mlp", "attn", "attn+mlp", "full_iteration"]);
    for row in 0..rows.len() - 1 {
        assert_eq!(
            (cell(&rows, row, "status"), cell(&rows, row, "digest_match")),
            ("ok".into(), "true".into())
        );
        // The command of a row runs that row alone.
        let command = cell(&rows, row, "command");
        assert!(!command.contains("--sweep") && command.contains("--cuda_graph_impl"), "{command}");
    }
    assert!(said.contains("Recommended: nothing: the scopes ran on a CPU, which gives no speedup"), "{said}");
    // Resumed, nothing is run again.
    let before = std::fs::read(dir.path().join("x.csv")).unwrap();
    let again = run(dir.path(), &format!("{line} --resume"));
    assert_eq!(again.status.code(), Some(0), "{}", text(&again.stderr));
    assert_eq!(std::fs::read(dir.path().join("x.csv")).unwrap(), before);
    // And said again, table and recommendation.
    assert_eq!(conclusion(&text(&again.stderr)), conclusion(&said));
    // Of a part that is run anew, with what the file holds: the last scope's rows are gone.
    let rows = text(&before);
    let whole: Vec<&str> = rows.split_inclusive("\r\n").collect();
    std::fs::write(dir.path().join("x.csv"), whole[..whole.len() - 2].concat()).unwrap();
    let again = run(dir.path(), &format!("{line} --resume"));
    assert_eq!(again.status.code(), Some(0), "{}", text(&again.stderr));
    assert_eq!(records(&std::fs::read(dir.path().join("x.csv")).unwrap()).len(), 1 + 8);
    assert_eq!(conclusion(&text(&again.stderr)), conclusion(&said));
}

/// The table of a sweep and what follows it.
fn conclusion(said: &str) -> &str {
    said.rsplit_once("\n\n").unwrap().1
}

#[test]
fn a_failing_scope_does_not_stop_the_others() {
    let dir = tempdir().unwrap();
    let line = format!(
        "{LLAMA} --device cpu -ms 6 --num_layers 2 -sl 32 --sweep -o - --inject capture:out_of_memory"
    );
    let output = run(dir.path(), &line);
    assert_eq!(output.status.code(), Some(5), "{}", text(&output.stderr));
    let rows = records(&output.stdout);
    assert_eq!(rows.len(), 1 + 8, "one header, and every scope leaves its rows");
    for row in 0..8 {
        assert_eq!(cell(&rows, row, "status"), "failed");
        assert!(cell(&rows, row, "status_reason").contains("out of memory"));
    }
    let said = text(&output.stderr);
    let said = conclusion(&said);
    assert_eq!(said.matches("  failed  ").count(), 4, "{said}");
    assert!(said.contains("attn,mlp: out of memory in phase capture"), "{said}");
    assert!(said.ends_with("Recommended: nothing: no scope was measured\n"), "{said}");
}

#[test]
fn a_device_that_is_not_there_is_told_once() {
    let dir = tempdir().unwrap();
    let mut command = binary::command(dir.path(), &format!("{LLAMA} --device cuda -ms 6 --sweep -o x.csv"));
    let output = command.env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    // Where there is a GPU that hides itself from this, the sweep fails alike.
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    let said = text(&output.stderr);
    assert_eq!(said.lines().filter(|l| l.starts_with("mbperf: ")).count(), 1, "{said}");
}

#[test]
fn options_that_choose_a_scope_are_refused() {
    let dir = tempdir().unwrap();
    for option in [
        "--cuda_graph_scope attn",
        "--cuda_graph_impl local",
        "--repeat 2",
        "model.cuda_graph_scope=[attn]",
        "model.cuda_graph_impl=local",
        "--dryrun --save_config_filepath c.json",
    ] {
        let output = run(dir.path(), &format!("{LLAMA} --device cpu --sweep {option} -o x.csv"));
        assert_eq!(output.status.code(), Some(2), "{option}");
        assert!(text(&output.stderr).contains("--sweep"), "{option}");
        assert!(!dir.path().join("x.csv").exists());
    }
}

#[test]
fn the_page_says_what_the_sweep_said() {
    let dir = tempdir().unwrap();
    let line =
        format!("{LLAMA} --device cpu -ms 6 --num_layers 1 -sl 16 --vocab_size 64 -cp 1 --sweep -o x.csv");
    let output = run(dir.path(), &line);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let said = text(&output.stderr);
    let page = page(dir.path(), "x.csv");
    page.needs_nothing();
    let table = page.table("sweep_scopes");
    assert_eq!(table.len(), 4);
    let lines: Vec<Vec<&str>> =
        said.lines().map(|l| l.split("  ").map(str::trim).filter(|c| !c.is_empty()).collect()).collect();
    for row in &table {
        let cells = row.iter().map(String::as_str).filter(|c| !c.is_empty()).collect();
        assert!(lines.contains(&cells), "{row:?}\n{said}");
    }
    let recommended = said.lines().find(|l| l.starts_with("Recommended: ")).unwrap();
    assert!(page.html.contains(&format!("<b>{recommended}</b>")), "{recommended}");
}
