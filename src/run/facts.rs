//! What rows and the runs file say of a run beside its measurement.

use super::scopes;
use crate::args::{Args, impl_name};
use crate::capture::RunPlan;
use crate::config::Routing;
use crate::device::DeviceInfo;
use crate::overrides::Resolved;
use crate::report::{RunFacts, run_id};
use crate::workloads::share::RankShare;
use serde_json::{Value, json};

/// What a row says of the run before anything was measured.
pub(super) fn facts(resolved: &Resolved, plan: &RunPlan, args: &Args) -> RunFacts {
    let cfg = &resolved.config;
    let (i, p, b) = (&cfg.identity, &cfg.parallel, &cfg.batch);
    let share = RankShare::of(cfg).ok();
    let program = &plan.eager.program;
    let stand_in = program.launches.iter().any(|l| l.op.stand_in());
    // Planned; what the device counts takes its place. Recomputed launches send nothing.
    let sorts = program.launches.iter().filter(|l| l.op.name() == "moe_sort" && !l.recompute);
    let moe_layers = sorts.count() as u64;
    let routed = cfg
        .model
        .moe
        .as_ref()
        .zip(share.as_ref())
        .map(|(m, s)| (m.router_topk * s.tokens_sequence_parallel) as u64 * moe_layers);
    let dropless = cfg.model.moe.as_ref().is_some_and(|m| m.capacity_factor.is_none());
    RunFacts {
        run_id: run_id::new(),
        started_at: run_id::utc_now(),
        host_name: std::fs::read_to_string("/etc/hostname").ok().map(|s| s.trim().to_string()),
        gpu_target: i.gpu.clone(),
        model_family: i.family.clone(),
        model_recipe: i.recipe.clone(),
        task: i.task.clone(),
        variant: i.variant.clone(),
        recipe_dtype: i.recipe_dtype.clone(),
        compute_dtype: i.compute_dtype.clone(),
        num_gpus: i.num_gpus,
        world_size: p.world.size,
        comm: if stand_in { "stand_in" } else { "none" }.into(),
        real_groups: share
            .as_ref()
            .map(|s| super::ranks::real_groups(&s.place, cfg.model.moe.is_some()))
            .filter(|g| !g.is_empty()),
        comm_model: stand_in.then(|| args.mbperf.comm_model.to_string()),
        tp: p.tp,
        pp: p.pp,
        cp: p.cp,
        ep: p.ep,
        pp_rank: p.pp_rank,
        micro_batch_size: b.micro_batch_size,
        num_microbatches: b.num_microbatches,
        num_microbatches_recipe: b.num_microbatches_recipe,
        seq_length: b.seq_length,
        num_layers: share.as_ref().map_or(0, |s| s.layers.len()),
        stack_only: cfg.stack_only,
        overlap_wgrad: cfg.overlap_wgrad,
        seed: cfg.seed,
        cuda_graph_impl: impl_name(cfg.graph.implementation).into(),
        cuda_graph_scope: cfg.graph.scope.iter().map(|s| s.name().to_string()).collect(),
        te_rng_tracker: cfg.graph.te_rng_tracker,
        captured_layers: share.as_ref().map_or(String::new(), |s| s.captured_layers(&cfg.graph)),
        moe_routing: cfg.model.moe.as_ref().map(|m| match m.routing {
            Routing::Balanced => "balanced",
            Routing::Skewed => "skewed",
            Routing::Recipe if m.force_load_balancing => "balanced",
            Routing::Recipe => "router",
        }),
        approximations: cfg.approximations.clone(),
        tokens_per_step: share.as_ref().map(|s| (s.tokens * b.num_microbatches) as u64),
        model_flops_per_step: Some(program.model_flops()),
        tokens_routed: routed,
        tokens_padded: routed.filter(|_| dropless).map(|_| 0),
        tokens_dropped: routed.filter(|_| dropless).map(|_| 0),
        host_model: "bare".into(),
        captured_fraction: plan.graph.is_some().then(|| scopes::captured(plan).1),
        mbperf_version: env!("CARGO_PKG_VERSION").into(),
        git_commit: option_env!("MBPERF_GIT_COMMIT").map(Into::into),
        git_dirty: option_env!("MBPERF_GIT_DIRTY").and_then(|d| d.parse().ok()),
        command: command_line(args),
        ..Default::default()
    }
}

/// The command as a shell would take it.
fn command_line(args: &Args) -> String {
    let plain =
        |t: &str| !t.is_empty() && t.chars().all(|c| c.is_ascii_alphanumeric() || "-_=.,/:+@%".contains(c));
    let quote = |t: &String| if plain(t) { t.clone() } else { format!("'{}'", t.replace('\'', "'\\''")) };
    std::iter::once("mbperf".to_string()).chain(args.argv.iter().map(quote)).collect::<Vec<_>>().join(" ")
}

/// What the device adds to it.
pub(super) fn add_device(facts: &mut RunFacts, info: &DeviceInfo) {
    facts.device = info.device.clone();
    facts.gpu_name = info.gpu_name.clone();
    facts.gpu_uuid = info.gpu_uuid.clone();
    facts.gpu_memory_mib = info.total_memory_mib;
    facts.driver_version = info.driver_version.clone();
    facts.cuda_version = info.cuda_version.clone();
    facts.attention_backend = info.attention_backend.clone();
    facts.gemm_plan_digest = info.gemm_plan_digest.clone();
}

/// The run's line of the runs file.
pub(super) fn run_line(resolved: &Resolved, info: &DeviceInfo, facts: &RunFacts) -> Value {
    let environment: serde_json::Map<String, Value> = std::env::vars_os()
        // What is no text stays readable, and other variables are not looked at.
        .filter_map(|(k, v)| Some((k.into_string().ok()?, v.to_string_lossy().into_owned())))
        .filter(|(k, _)| ["CUDA_", "NCCL_", "NVTE_", "PYTORCH_", "MBPERF_"].iter().any(|p| k.starts_with(p)))
        .map(|(k, v)| (k, Value::String(v)))
        .collect();
    json!({
        "command": facts.command, "started_at": facts.started_at, "host_name": facts.host_name,
        "recipe": resolved.recipe.function, "config": resolved.config, "device": info,
        "notices": resolved.notices, "environment": environment,
    })
}

#[cfg(test)]
mod tests {
    use super::super::{plan, settings};
    use super::*;
    use crate::args::{self, Command};
    use crate::overrides::resolve;
    use crate::recipe::Catalogue;
    use crate::report::compare::roles::{ROLES, Role};
    use crate::report::{COLUMNS, Row};

    /// Cells of the last row that a command line would leave, by column.
    fn cells(line: &str) -> Vec<(&'static str, String)> {
        let words = std::iter::once("mbperf").chain(line.split_whitespace());
        let Command::Run(args) = args::parse(words).unwrap() else { panic!("{line} is no run") };
        let resolved = resolve(&args, &Catalogue::load(None).unwrap(), &|_| None).unwrap();
        let plan = plan(&resolved.config, false, args.mbperf.comm_model).unwrap();
        let (facts, options) = (facts(&resolved, &plan, &args), settings::options(&resolved, &args, false));
        let rows = Row::without_outcome(&facts, &options, "skipped", "");
        COLUMNS.iter().map(|c| (c.name, (c.value)(&rows[rows.len() - 1]).cell())).collect()
    }

    /// `compare` and `--resume` read these options from their columns: each must move one of its own.
    #[test]
    fn an_option_of_the_key_shows_in_its_columns() {
        const LLAMA: &str = "-m llama -mr llama3_8b -g h100";
        const QWEN: &str = "-m qwen -mr qwen3_30b_a3b -g h100";
        const FP8: &str = "-m llama -mr llama3_8b -g h100 -c fp8_cs";
        // Told by the process that runs: what it was started as, what the file calls itself.
        const LATER: [&str; 2] = ["nproc_per_node", "host_model"];
        let lines = [
            ("model_family_name", LLAMA, QWEN),
            ("model_recipe_name", LLAMA, "-m llama -mr llama3_70b -g h100"),
            ("num_gpus", LLAMA, "-m llama -mr llama3_8b -g h100 -ng 16"),
            ("task", LLAMA, "-m llama -mr llama3_8b -g h100 --task sft"),
            ("global_batch_size", LLAMA, "-m llama -mr llama3_8b -g h100 -gb 64"),
            ("micro_batch_size", LLAMA, "-m llama -mr llama3_8b -g h100 -mb 2"),
            ("seq_length", LLAMA, "-m llama -mr llama3_8b -g h100 -sl 512"),
            ("tensor_model_parallel_size", LLAMA, "-m llama -mr llama3_8b -g h100 -tp 2"),
            ("pipeline_model_parallel_size", LLAMA, "-m llama -mr llama3_8b -g h100 -pp 2"),
            ("context_parallel_size", LLAMA, "-m llama -mr llama3_8b -g h100 -cp 1"),
            ("expert_model_parallel_size", QWEN, "-m qwen -mr qwen3_30b_a3b -g h100 -ep 4"),
            ("gpu", LLAMA, "-m llama -mr llama3_8b -g b200"),
            ("compute_dtype", LLAMA, FP8),
            ("run_dtype", FP8, "-m llama -mr llama3_8b -g h100 -c fp8_cs --run_dtype bf16"),
            ("cuda_graph_impl", LLAMA, "-m llama -mr llama3_8b -g h100 --cuda_graph_scope attn"),
            (
                "cuda_graph_scope",
                "-m llama -mr llama3_8b -g h100 --cuda_graph_scope attn",
                "-m llama -mr llama3_8b -g h100 --cuda_graph_scope mlp",
            ),
            ("config_variant", QWEN, "-m qwen -mr qwen3_30b_a3b -g h100 -cv dev"),
            ("stack_only", LLAMA, "-m llama -mr llama3_8b -g h100 --stack_only"),
            ("overlap_wgrad", LLAMA, "-m llama -mr llama3_8b -g h100 --overlap_wgrad"),
            ("max_microbatches", LLAMA, "-m llama -mr llama3_8b -g h100 --max_microbatches 1"),
            (
                "pp_rank",
                "-m llama -mr llama3_8b -g h100 -pp 2",
                "-m llama -mr llama3_8b -g h100 -pp 2 --pp_rank 1",
            ),
            ("aa", LLAMA, "-m llama -mr llama3_8b -g h100 --aa eager"),
            ("seed", LLAMA, "-m llama -mr llama3_8b -g h100 --seed 7"),
        ];
        for (option, role) in ROLES {
            let columns = match role {
                Role::Key(columns) => *columns,
                Role::Alike("seed") => &["seed"],
                _ => continue,
            };
            if !LATER.contains(option) {
                let (_, plain, other) = lines.iter().find(|(name, ..)| name == option).unwrap();
                let (plain, other) = (cells(plain), cells(other));
                let moved = plain.iter().zip(&other).any(|(a, b)| columns.contains(&a.0) && a != b);
                assert!(moved, "--{option} moves none of {columns:?}");
            }
        }
    }
}
