//! All 438 recipes in process, at full size: what becomes of each, its graphs, its FLOPs.
//!
//! `tests/data/recipes_438.tsv` has one line a recipe: implementation and scope that are in force upstream (facts of
//! Megatron-Bridge at 067f987, never rewritten here), and what mbperf makes of it: `plans`, `not_built` or `refused`, with
//! the first reason; the same with `--run_dtype bf16` and without recompute. With that, and with what is not built switched
//! off, the launches' FLOPs are compared with the model's. `MBPERF_BLESS=1 cargo test --test all recipes_all` writes the outcomes anew: read the difference.

use crate::common::{catalogue, model_flops::model_flops};
use mbperf::args::{self, Command, impl_name};
use mbperf::overrides::{Resolved, UsageError, resolve};
use mbperf::program::Program;
use mbperf::recipe::Recipe;
use mbperf::workloads::share::RankShare;
use mbperf::{capture, workloads};
use rayon::prelude::*;
use std::collections::HashSet;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest time on two cores.
const LONGEST: Duration = Duration::from_secs(60);
/// Relative difference allowed between the launches' FLOPs and the formula's.
const FLOPS_TOLERANCE: f64 = 0.02;
const FACTS: usize = 3;
const HEADER: &str = "recipe\timpl\tscope\toutcome\treason\tbf16\tbf16_reason";

/// The command line that chooses a recipe.
fn line(recipe: &Recipe) -> String {
    let Recipe { family, model, gpu, task, num_gpus, .. } = recipe;
    let variant = match (recipe.dtype.as_str(), recipe.variant.as_deref()) {
        // `-c` has no such dtype.
        ("fp8_ds", _) => "-cv fp8_ds".to_owned(),
        (dtype, None) => format!("-c {dtype}"),
        (dtype, Some(variant)) => format!("-c {dtype} -cv {variant}"),
    };
    format!("mbperf -m {family} -mr {model} -g {gpu} --task {task} -ng {num_gpus} {variant}")
}

fn resolved(line: &str) -> Result<Resolved, UsageError> {
    match args::parse(line.split_whitespace()) {
        Ok(Command::Run(args)) => resolve(&args, catalogue(), &|_| None),
        other => panic!("{line}: {other:?}"),
    }
}

/// Outcome and first reason, tab between.
fn outcome(resolved: &Result<Resolved, UsageError>) -> String {
    match resolved {
        Ok(r) => match r.config.not_built.first() {
            None => "plans\t".into(),
            Some(reason) => format!("not_built\t{}", reason.split(" not built yet").next().unwrap()),
        },
        Err(UsageError::Share(_)) => "refused\tlayout".into(),
        Err(e) => format!("refused\t{}", e.rule().unwrap_or_else(|| panic!("{e}"))),
    }
}

fn program(r: &Resolved, line: &str) -> Result<(RankShare, Program), String> {
    let share = RankShare::of(&r.config).map_err(|e| format!("{line}: {e}"))?;
    let program = workloads::build(&r.config, &share).map_err(|e| format!("{line}: {e}"))?;
    Ok((share, program))
}

/// What is not built of a recipe whose layers are, switched off for its FLOPs: activations moved out of the way, another
/// optimizer than Adam, NCCL's user buffers, packed sequences, overlaps, Megatron's FSDP. None changes a launch's FLOPs.
const SWITCHED_OFF: &str = "model.moe_paged_stash=false model.fine_grained_activation_offloading=false -ol 0 \
                            optimizer.optimizer=adam --nccl_ub false --moe_a2a_overlap false --use_megatron_fsdp false";
/// Of fine-tuning alone, whose recipes have the key.
const UNPACKED: &str = "dataset.packed_sequence_specs.packed_sequence_size=null";
/// Adapters (LoRA) are not built, nor their FLOPs: recipes of this task have no comparison.
const ADAPTERS: &str = "peft";

fn check_flops(r: &Resolved, line: &str) -> Result<(), String> {
    if !r.config.not_built.is_empty() {
        return Err(format!("{line}: {:?}", r.config.not_built));
    }
    let (share, program) = program(r, line)?;
    let (launches, model) = (program.model_flops(), model_flops(&r.config, &share));
    let difference = launches / model - 1.0;
    if difference.abs() > FLOPS_TOLERANCE {
        let percent = 100.0 * difference;
        return Err(format!(
            "{line}: the launches have {launches:.4e} FLOPs, the model {model:.4e}: {percent:.2} %"
        ));
    }
    Ok(())
}

/// The line of the table, or what is wrong with the recipe.
fn judge(recipe: &Recipe, expected: &[&str]) -> Result<String, String> {
    let line = line(recipe);
    let own = resolved(&line);
    if let Ok(r) = &own {
        let graph = &r.config.graph;
        let mut scope: Vec<&str> = graph.scope.iter().map(|s| s.name()).collect();
        scope.sort_unstable();
        let effective = [impl_name(graph.implementation), &scope.join("+")];
        if effective != expected[1..FACTS] {
            return Err(format!("{line}: {effective:?} are in force, upstream {:?}", &expected[1..FACTS]));
        }
        if recipe.alias_of.is_none() && r.recipe.function != recipe.function {
            return Err(format!("{line}: selects {}", r.recipe.function));
        }
        if r.config.not_built.is_empty() {
            let (_, program) = program(r, &line)?;
            capture::plan(program, graph, r.config.seed).map_err(|e| format!("{line}: {e}"))?;
        }
    }
    let bf16 = format!("{line} --run_dtype bf16 model.recompute_granularity=null");
    let plain = resolved(&bf16);
    if let Ok(r) = &plain
        && recipe.task != ADAPTERS
    {
        let built = r.config.not_built.is_empty();
        let unpacked = if recipe.task == "pretrain" { "" } else { UNPACKED };
        let line = if built { bf16 } else { format!("{bf16} {SWITCHED_OFF} {unpacked}") };
        let r = resolved(&line).map_err(|e| format!("{line}: {e}"))?;
        check_flops(&r, &line)?;
    }
    Ok([&expected[..FACTS].join("\t"), &outcome(&own), &outcome(&plain)].map(String::as_str).join("\t"))
}

/// One rank that holds the whole model, without what `model_parameters.tsv` leaves out.
const ONE_RANK: &str = "-ng 1 -tp 1 -cp 1 -pp 1 -vp None -ep 1 -et None -gb 8 -mb 1 --run_dtype bf16 --cuda_graph_impl none \
                        model.recompute_granularity=null model.mtp_num_layers=0";
/// Weights that the table leaves out: the image tower; patches, text and time around the blocks of a diffusion transformer.
const AROUND: [&str; 2] = ["vision.", "dit."];
/// Relative difference allowed between declared and published weights: biases, sinks and norms that the table rounds away.
const WEIGHTS_TOLERANCE: f64 = 1e-3;

/// What a program declares, not what a formula says of it: a matrix that is missing or doubled shows.
#[test]
fn every_model_declares_the_weights_that_were_published() {
    let table = include_str!("data/model_parameters.tsv");
    let models: Vec<&str> = table.lines().skip(1).collect();
    assert_eq!(models.len(), 25);
    let wrong: Vec<String> = models
        .par_iter()
        .filter_map(|line| {
            let cells: Vec<&str> = line.split('\t').collect();
            let (name, published) = (cells[0], cells[1].parse::<f64>().unwrap());
            let recipes = catalogue().recipes().iter();
            let recipe = recipes.clone().find(|r| r.model == name && r.task != ADAPTERS).unwrap();
            let Recipe { family, gpu, task, .. } = recipe;
            let dtype = if recipe.dtype == "fp8_ds" { "bf16" } else { &recipe.dtype };
            let unpacked = if task == "pretrain" { "" } else { UNPACKED };
            let line = format!(
                "mbperf -m {family} -mr {name} -g {gpu} --task {task} -c {dtype} {ONE_RANK} {SWITCHED_OFF} {unpacked}"
            );
            let r = resolved(&line).unwrap_or_else(|e| panic!("{line}: {e}"));
            assert!(r.config.not_built.is_empty(), "{line}: {:?}", r.config.not_built);
            let (_, program) = program(&r, &line).unwrap();
            // A weight has its gradient beside it; what the optimizer cuts the whole into has none.
            let names: HashSet<&str> = program.buffers.iter().map(|b| b.name.as_str()).collect();
            let weights = program.buffers.iter().filter(|b| names.contains(format!("{}.grad", b.name).as_str()));
            let counted = weights.filter(|b| !AROUND.iter().any(|name| b.name.starts_with(name)));
            let billions = counted.map(|b| b.len() as f64).sum::<f64>() / 1e9;
            let difference = billions / published - 1.0;
            (difference.abs() > WEIGHTS_TOLERANCE)
                .then(|| format!("{name}: {billions:.4} declared, {published} published: {:.3} %", 100.0 * difference))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_recipe_is_judged_as_the_table_says() {
    let start = Instant::now();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/recipes_438.tsv");
    let table = std::fs::read_to_string(&path).unwrap();
    let (header, lines) = table.split_once('\n').unwrap();
    assert_eq!(header, HEADER);
    let lines: Vec<&str> = lines.lines().collect();
    assert_eq!((lines.len(), catalogue().recipes().len()), (438, 438));
    let judged: Vec<Result<String, String>> = lines
        .par_iter()
        .map(|expected| {
            let cells: Vec<&str> = expected.split('\t').collect();
            let recipe = catalogue().recipes().iter().find(|r| r.function == cells[0]).unwrap();
            judge(recipe, &cells)
        })
        .collect();
    let took = start.elapsed();
    eprintln!("438 recipes in {took:.1?}");
    let wrong: Vec<&str> = judged.iter().filter_map(|r| r.as_ref().err().map(String::as_str)).collect();
    assert!(wrong.is_empty(), "{} recipes are wrong\n{}", wrong.len(), wrong.join("\n"));
    let judged: Vec<String> = judged.into_iter().map(Result::unwrap).collect();
    if std::env::var_os("MBPERF_BLESS").is_some() {
        std::fs::write(&path, format!("{HEADER}\n{}\n", judged.join("\n"))).unwrap();
    } else {
        let other: Vec<String> = judged
            .iter()
            .zip(&lines)
            .filter(|(own, line)| own != *line)
            .map(|(own, line)| format!("table: {line}\nnow:   {own}"))
            .collect();
        let how = "if this is meant: MBPERF_BLESS=1 cargo test --test all recipes_all";
        assert!(other.is_empty(), "{} recipes differ; {how}\n{}", other.len(), other.join("\n"));
    }
    assert!(took < LONGEST, "{took:?}");
}
