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
