//! Every recipe through the binary: a dry run passes or says why not; what is built runs on the CPU and proves
//! equal work.

use crate::common::binary::{cell, records, run, text};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tempfile::tempdir;

/// Longest CPU run of a recipe (DESIGN 4 aims at 6 s with the default time of 3 s; a debug build is slower).
const LONGEST: Duration = Duration::from_secs(60);

fn recipes() -> Vec<Value> {
    let dir = tempdir().unwrap();
    let output = run(dir.path(), "recipes list --format json");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The words that choose a recipe.
fn words(recipe: &Value) -> String {
    let of = |key: &str| recipe[key].as_str().unwrap_or_default();
    let variant = match (of("dtype"), of("variant")) {
        // `-c` has no such dtype.
        ("fp8_ds", _) => "-cv fp8_ds".to_owned(),
        (dtype, "") => format!("-c {dtype}"),
        (dtype, variant) => format!("-c {dtype} -cv {variant}"),
    };
    let (family, model, gpu, task) = (of("family"), of("model"), of("gpu"), of("task"));
    format!("-m {family} -mr {model} -g {gpu} --task {task} -ng {} {variant}", recipe["num_gpus"])
}

fn dry(recipe: &Value) {
    let dir = tempdir().unwrap();
    let line = format!("{} --dryrun --format json", words(recipe));
    let output = run(dir.path(), &line);
    let err = text(&output.stderr);
    match output.status.code() {
        Some(0) => {
            let head: Value = serde_json::from_slice(&output.stdout).unwrap();
            let notices = head["notices"].as_array().unwrap();
            let not_built = notices.iter().any(|n| n["id"] == "not_built");
            assert_eq!(head["program"].is_null(), not_built, "{line}");
            if recipe["alias_of"].is_null() {
                assert_eq!(head["recipe"], recipe["function"], "{line}");
            }
        }
        Some(2) => assert_eq!(err.lines().filter(|l| l.starts_with("mbperf: ")).count(), 1, "{line}\n{err}"),
        code => assert_eq!(code, Some(0), "{line}\n{err}"),
    }
}

/// Runs a recipe in small, with settings of its own; false if its features are not built or its layout is impossible.
fn runs(recipe: &Value, settings: &str) -> bool {
    let dir = tempdir().unwrap();
    let line = format!("{} --device cpu --run_dtype bf16 --max_time 0.1 -q -o - {settings}", words(recipe));
    let start = Instant::now();
    let output = run(dir.path(), &line);
    if output.status.code() == Some(2) {
        return false;
    }
    assert_eq!(output.status.code(), Some(0), "{line}\n{}", text(&output.stderr));
    let took = start.elapsed();
    eprintln!("{took:5.1?} {}", recipe["function"]);
    assert!(took < LONGEST, "{line}: {took:?}");
    let rows = records(&output.stdout);
    for row in 0..rows.len() - 1 {
        assert_eq!(cell(&rows, row, "status"), "ok", "{line}");
        let proved = if rows.len() == 2 { "" } else { "true" };
        assert_eq!(cell(&rows, row, "digest_match"), proved, "{line}");
    }
    true
}

/// The first recipe of each kind of key.
fn one_of_each(recipes: &[Value], keys: &[&str]) -> Vec<Value> {
    let mut first: BTreeMap<String, Value> = BTreeMap::new();
    for recipe in recipes {
        let key = keys.iter().map(|k| recipe[*k].to_string()).collect::<String>();
        first.entry(key).or_insert_with(|| recipe.clone());
    }
    first.into_values().collect()
}

#[test]
fn one_recipe_of_each_model_passes_a_dry_run() {
    one_of_each(&recipes(), &["family", "model"]).iter().for_each(dry);
}

/// What is not built yet and does not change a layer's kind.
const PLAIN: &str = "model.mtp_num_layers=0 model.recompute_granularity=null";

/// Attention and MLP; experts; Mamba, attention and MLP alone; latent experts alone.
#[test]
fn one_model_of_each_layer_kind_runs() {
    let recipes = recipes();
    for function in [
        "llama3_8b_pretrain_8gpu_h100_bf16_config",
        "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config",
        "nemotronh_56b_pretrain_64gpu_h100_fp8cs_config",
        "nemotron_3_super_pretrain_64gpu_gb200_bf16_config",
    ] {
        assert!(runs(recipes.iter().find(|r| r["function"] == function).unwrap(), PLAIN), "{function}");
    }
}

#[test]
#[ignore = "half a minute: one recipe of each hybrid model on the CPU"]
fn every_hybrid_model_runs() {
    let recipes = recipes();
    let hybrids = one_of_each(&recipes, &["family", "model"]);
    let hybrids: Vec<&Value> = hybrids.iter().filter(|r| r["kind"] == "hybrid-mamba").collect();
    assert_eq!(hybrids.len(), 5);
    for first in hybrids {
        let mut of_model = recipes.iter().filter(|r| r["model"] == first["model"]);
        assert!(of_model.any(|r| runs(r, PLAIN)), "{}: no recipe runs", first["model"]);
    }
}

#[test]
#[ignore = "a minute or two: all 438 recipes"]
fn every_recipe_passes_a_dry_run() {
    recipes().iter().for_each(dry);
}

#[test]
#[ignore = "some minutes: one recipe of each model, GPU and dtype on the CPU"]
fn what_is_built_runs() {
    let mut recipes = recipes();
    recipes.retain(|r| r["gpu"] == "h100" || r["gpu"] == "b200");
    let chosen = one_of_each(&recipes, &["family", "model", "gpu", "dtype"]);
    assert!(chosen.iter().filter(|r| runs(r, "")).count() >= 12);
}

/// One product an expert gives what one product of all experts gives, whatever brings the rows.
#[test]
fn products_by_expert_end_in_the_same_loss() {
    let dropless = ["model.moe_token_dispatcher_type=alltoall", "model.moe_token_dispatcher_type=flex"];
    let padded = "--use_tokendrop true model.moe_token_dispatcher_type=alltoall";
    for routing in [dropless[0], dropless[1], padded] {
        let loss = |products: &str| {
            let dir = tempdir().unwrap();
            let line = format!(
                "-m qwen -mr qwen3_30b_a3b -g h100 --cuda_graph_scope attn,moe_router --device cpu --num_layers 1 \
                 --max_microbatches 1 model.seq_length=32 -ms 8 -q -o - {routing} --expert_gemm {products}"
            );
            let output = run(dir.path(), &line);
            assert_eq!(output.status.code(), Some(0), "{line}\n{}", text(&output.stderr));
            let rows = records(&output.stdout);
            assert_eq!(cell(&rows, 1, "digest_match"), "true", "{line}");
            cell(&rows, 0, "loss_last")
        };
        let (grouped, by_expert) = (loss("grouped"), loss("per_expert"));
        assert!(!grouped.is_empty());
        assert_eq!(grouped, by_expert, "{routing}");
    }
}

/// Static rows by a rank capacity factor: the full iteration is one graph and proves equal work; too small a factor is
/// exit 1.
#[test]
fn a_rank_capacity_factor_runs_in_one_graph_and_overflow_fails() {
    let dir = tempdir().unwrap();
    let of = |factor: &str| {
        let line = format!(
            "-m gpt_oss -mr gpt_oss_20b -g b300 -c fp8_mx -ng 8 --nccl_ub false --run_dtype bf16 --device cpu -ms 8 -q -o - \
             model.seq_length=32 model.moe_expert_rank_capacity_factor={factor}"
        );
        run(dir.path(), &line)
    };
    let output = of("5.0");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = records(&output.stdout);
    assert_eq!(cell(&rows, 1, "digest_match"), "true");
    assert_eq!(
        [cell(&rows, 1, "cuda_graph_scope"), cell(&rows, 1, "graph_launches_per_step")],
        ["full_iteration", "1"]
    );
    let output = of("0.5");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("rank capacity factor"), "{}", text(&output.stderr));
}

/// Residual streams, experts by token id, shared keys and values, multi-token prediction: one graph proves equal work.
#[test]
fn deepseek_v4_runs_in_one_graph() {
    let dir = tempdir().unwrap();
    let line = "-m deepseek -mr deepseek_v4_flash -g gb200 -c fp8_mx -ng 128 --run_dtype bf16 --device cpu -ms 7 -q -o - \
                --equality_steps 2 --max_microbatches 1 model.seq_length=32 model.moe_paged_stash=false";
    let output = run(dir.path(), line);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = records(&output.stdout);
    assert_eq!([cell(&rows, 1, "digest_match"), cell(&rows, 1, "graph_launches_per_step")], ["true", "1"]);
    let approximations = cell(&rows, 1, "approximations");
    assert!(approximations.contains("compressed_attention") && !approximations.contains("hyper"));
}

/// Graphs of one stage: 2 x its layers x micro-batches (2 are run), the layers by hand from the recipe's split.
#[test]
fn a_stage_has_as_many_graphs_as_upstream() {
    let dir = tempdir().unwrap();
    let qwen = "-m qwen -mr qwen3_235b_a22b -g gb200 -c bf16 -ng 64";
    let llama = "-m llama -mr llama3_70b -g gb200 -c nvfp4 --run_dtype bf16";
    for (line, graphs, in_flight, job) in [
        // 94 layers, embedding and loss over 8 stages: 12 places each, 11 layers in the first and the last.
        (format!("{qwen} --pp_rank 0"), 44, 2, 8),
        (format!("{qwen} --pp_rank 4"), 48, 2, 4),
        (format!("{qwen} --pp_rank 7"), 44, 1, 1),
        // 80 layers over 4 stages of 5 chunks: 20 a stage. In flight (4 - 1) x 2 + 4 x 4 + 1 on the first stage.
        (format!("{llama} --pp_rank 0"), 80, 10, 23),
        (format!("{llama} --pp_rank 3"), 80, 9, 17),
        (format!("{llama} --pp_rank 3 --max_microbatches 8"), 320, 17, 17),
    ] {
        let output = run(dir.path(), &format!("{line} --dryrun --format json"));
        let head: Value = serde_json::from_slice(&output.stdout).unwrap();
        let (arm, pipeline) = (&head["program"]["graph_arm"], &head["program"]["pipeline"]);
        assert_eq!((&arm["graphs"], &arm["replays_per_step"]), (&graphs.into(), &graphs.into()), "{line}");
        assert_eq!(
            (&pipeline["in_flight"], &pipeline["in_flight_job"]),
            (&in_flight.into(), &job.into()),
            "{line}"
        );
        let told = head["notices"].as_array().unwrap().iter().any(|n| n["id"] == "pipeline_shortened");
        assert_eq!(told, in_flight < job, "{line}");
    }
}
