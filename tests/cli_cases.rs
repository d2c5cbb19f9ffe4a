//! The table of command lines (`tests/data/cli_cases.tsv`): what must be accepted with which effective values, and
//! what must be refused, judged in process.

use crate::common::{Outcome, catalogue, outcome, shell_words};
use std::collections::BTreeMap;

/// Rows of the table by column name.
fn rows() -> Vec<BTreeMap<&'static str, &'static str>> {
    let mut lines =
        include_str!("data/cli_cases.tsv").lines().filter(|l| !l.trim().is_empty() && !l.starts_with('#'));
    let header: Vec<&str> = lines.next().unwrap().split('\t').collect();
    lines.map(|l| header.iter().copied().zip(l.split('\t')).collect()).collect()
}

/// What differs from the row, if anything.
fn differs(row: &BTreeMap<&str, &str>) -> Option<String> {
    let env: BTreeMap<String, String> = shell_words(row["env"])
        .iter()
        .filter_map(|w| w.split_once('='))
        .map(|(k, v)| (k.to_owned(), v.to_owned()))
        .collect();
    let got = outcome(row["args"], &env);
    if row["expect"] == "error" {
        return match got {
            Outcome::Error { message, .. } if message.len() >= 10 => None,
            Outcome::Error { message, .. } => Some(format!("message too short: {message}")),
            Outcome::Ok(_) => Some("accepted".to_owned()),
        };
    }
    let resolved = match got {
        Outcome::Ok(resolved) => resolved,
        Outcome::Error { message, .. } => return Some(message),
    };
    let head = mbperf::overrides::dryrun_head(&resolved);
    let mut wanted: Vec<&str> = if row["scope"] == "whole_layer" {
        vec![]
    } else {
        row["scope"].split(',').filter(|s| !s.is_empty()).collect()
    };
    let mut scope: Vec<&str> =
        head["cuda_graph_scope"].as_array().unwrap().iter().filter_map(|v| v.as_str()).collect();
    wanted.sort_unstable();
    scope.sort_unstable();
    let notices: Vec<&str> = resolved.notices.iter().map(|n| n.id).collect();
    let lacking: Vec<&str> =
        row["warnings"].split([',', ' ']).filter(|w| !w.is_empty() && !notices.contains(w)).collect();
    if head["cuda_graph_impl"] != row["impl"]
        || scope != wanted
        || head["te_rng_tracker"] != (row["rng"] == "on")
    {
        return Some(format!("{} {scope:?} {}", head["cuda_graph_impl"], head["te_rng_tracker"]));
    }
    (!lacking.is_empty()).then(|| format!("notices {notices:?} lack {lacking:?}"))
}

#[test]
fn every_row_holds() {
    let rows = rows();
    assert_eq!(rows.len(), 75);
    let bad: Vec<String> =
        rows.iter().filter_map(|r| differs(r).map(|d| format!("{} {}: {d}", r["id"], r["args"]))).collect();
    assert!(bad.is_empty(), "{} rows fail:\n{}", bad.len(), bad.join("\n"));
}

/// Rows that a rule refuses are refused by a rule that the row names, where it names a rule that we have.
#[test]
fn refusals_name_the_rule_of_the_row() {
    for row in rows().iter().filter(|r| r["expect"] == "error") {
        let env = shell_words(row["env"])
            .iter()
            .filter_map(|w| w.split_once('='))
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .collect();
        if let Outcome::Error { rule: Some(rule), message } = outcome(row["args"], &env) {
            let bare = rule.trim_end_matches('b');
            // R45 is how a packed batch is refused before the replay that upstream's R58 fails at.
            let named = row["rules"].split(' ').any(|r| r == bare || (r == "R58" && bare == "R45"));
            assert!(named, "{}: refused by {rule}, the row says {}: {message}", row["id"], row["rules"]);
        }
    }
}

/// Every recipe resolves as it is; only those with an impossible layout or graph setting are refused.
#[test]
fn every_recipe_resolves_or_is_known_to_be_odd() {
    let impossible = [
        "expert_grid_does_not_fit",
        "gbs_not_multiple_of_mbs_times_dp",
        "vp_conflicts_with_pipeline_layout",
        // Upstream's deprecated flag captures whole layers of a dropless MoE there.
        "impl_none_but_external_cuda_graph_set",
    ];
    let (mut wrong, mut odd, mut unsplit) = (Vec::new(), 0, 0);
    // -c has no fp8_ds: that recipe is reachable by its variant only.
    for recipe in catalogue().recipes().iter().filter(|r| r.dtype != "fp8_ds") {
        let variant = recipe.variant.as_ref().map(|v| format!("-cv {v}")).unwrap_or_default();
        let line = format!(
            "-m {} -mr {} -g {} -c {} --task {} -ng {} {variant}",
            recipe.family, recipe.model, recipe.gpu, recipe.dtype, recipe.task, recipe.num_gpus
        );
        let stated = recipe.issues.iter().any(|i| impossible.contains(&i.as_str()));
        match outcome(&line, &BTreeMap::new()) {
            Outcome::Error { .. } if stated => odd += 1,
            // Vision-language recipes of the text model's pipeline size without its counting of embedding and loss.
            Outcome::Error { message, .. }
                if recipe.family == "qwen_vl" && message.contains("do not fill the pipeline") =>
            {
                unsplit += 1
            }
            Outcome::Error { rule, message } => {
                wrong.push(format!("{} {rule:?}: {message}", recipe.function))
            }
            Outcome::Ok(_) if stated => wrong.push(format!("{} should be refused", recipe.function)),
            Outcome::Ok(_) => {}
        }
    }
    assert!(wrong.is_empty(), "{} recipes:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!((odd, unsplit), (18, 11));
}

/// The same through the binary: one object on standard output, or exit code 2 and nothing there.
#[test]
fn the_binary_answers_alike() {
    let run = |line: &str| {
        let words = shell_words(&format!("{line} --dryrun --format json"));
        let output = assert_cmd::Command::cargo_bin("mbperf")
            .unwrap()
            .args(words)
            .env_remove("PYTORCH_CUDA_ALLOC_CONF")
            .env_remove("NCCL_GRAPH_REGISTER")
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let rows = rows();
    for id in ["C01", "C05", "C15", "C19", "C24", "C72"] {
        let row = rows.iter().find(|r| r["id"] == id).unwrap();
        let (code, out, err) = run(row["args"]);
        if row["expect"] == "ok" {
            assert_eq!(code, Some(0), "{id}: {err}");
            let json: serde_json::Value = serde_json::from_str(&out).unwrap();
            assert_eq!(json["cuda_graph_impl"], row["impl"], "{id}");
        } else {
            assert_eq!((code, out.as_str()), (Some(2), ""), "{id}: {err}");
            // Once, not once for each layer of the error.
            let first = err.lines().next().unwrap_or_default();
            assert_eq!(err.matches(first).count(), 1, "{id}: {err}");
        }
    }
}
