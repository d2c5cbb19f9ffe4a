//! Flags onto settings: each flag sets the setting of upstream's name, and flags win over overrides.

use super::{Notice, layers};
use crate::args::{Args, FlexBackend, GradDtype, OptimizerChoice, OrNone};
use crate::recipe::Recipe;
use crate::rules::Values;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Applies every flag that sets a setting (R15 to R21), and what follows from flags and overrides together.
pub fn flags(
    args: &Args,
    recipe: &Recipe,
    values: &mut Values,
    explicit: &BTreeSet<String>,
    notices: &mut Vec<Notice>,
) {
    shape(args, recipe, values, explicit, notices);
    experts(args, values, notices);
    recompute_and_offload(args, values);
    let perf = &args.performance;
    let mut set = |key: &str, value: Option<Value>| {
        if let Some(v) = value {
            values.set(key, v);
        }
    };
    set("optimizer.lr", args.optimizer.lr.map(Value::from));
    set("optimizer.min_lr", args.optimizer.min_lr.map(Value::from));
    let warmup = args.optimizer.warmup_iters;
    if args.given.contains("warmup_iters") || !explicit.contains("scheduler.lr_warmup_iters") {
        set("scheduler.lr_warmup_iters", Some(json!(warmup)));
    }
    let optimizer =
        perf.optimizer_type.as_deref().map(|t| json!(if t == "muon" { "dist_muon" } else { "adam" }));
    set("optimizer.optimizer", optimizer);
    set("ddp.use_megatron_fsdp", perf.use_megatron_fsdp.map(Value::from));
    set("ddp.nccl_ub", perf.nccl_ub.map(Value::from));
    set("ddp.grad_reduce_in_fp32", args.mbperf.grad_dtype.map(|d| json!(d == GradDtype::Fp32)));
    // R15: the harness switches these off for every run; only an explicit override has them on.
    for key in [
        "rerun_state_machine.check_for_nan_in_loss",
        "ddp.check_for_nan_in_grad",
        "ddp.check_for_large_grads",
    ] {
        if !explicit.contains(key) {
            values.set(key, false);
        }
    }
    let spoken = [
        (
            perf.deterministic,
            "deterministic_always",
            "--deterministic: every op here gives the same bits in every run anyway",
        ),
        (args.logging.dump_env, "dump_env_always", "--dump_env: the run file holds the environment anyway"),
        (
            args.scope_repeated,
            "scope_repeated",
            "--cuda_graph_scope was given more than once: the last one is in force",
        ),
    ];
    for (_, id, text) in spoken.into_iter().filter(|(said, ..)| *said) {
        notices.push(Notice::new(id, text));
    }
    if args.mbperf.optimizer == OptimizerChoice::None && perf.optimizer_type.is_some() {
        notices.push(Notice::new(
            "optimizer_left_out",
            "--optimizer none: the step ends before the optimizer that --optimizer_type names",
        ));
    }
}

/// Model shape, batch and parallel layout.
fn shape(
    args: &Args,
    recipe: &Recipe,
    values: &mut Values,
    explicit: &BTreeSet<String>,
    notices: &mut Vec<Notice>,
) {
    let (general, training, parallel) = (&args.general, &args.training, &args.parallelism);
    let before = values.int("model.num_layers");
    let numbers = [
        ("model.hidden_size", general.hidden_size),
        ("model.num_layers", general.num_layers),
        ("model.num_moe_experts", general.num_moe_experts),
        ("model.vocab_size", args.data.vocab_size),
        ("train.global_batch_size", training.global_batch_size),
        ("train.micro_batch_size", training.micro_batch_size),
        ("model.seq_length", training.seq_length),
        ("dataset.seq_length", training.seq_length),
        ("model.tensor_model_parallel_size", parallel.tensor_model_parallel_size),
        ("model.pipeline_model_parallel_size", parallel.pipeline_model_parallel_size),
        ("model.context_parallel_size", parallel.context_parallel_size),
        ("model.expert_model_parallel_size", parallel.expert_model_parallel_size),
    ];
    for (key, number) in numbers {
        if let Some(n) = number {
            values.set(key, n);
        }
    }
    if training.seq_length.is_none() {
        // One of the two lengths named: the other follows, one length is meant.
        let (model, data) = ("model.seq_length", "dataset.seq_length");
        match (explicit.contains(model), explicit.contains(data)) {
            (true, false) => values.set(data, values.get(model).clone()),
            (false, true) => values.set(model, values.get(data).clone()),
            _ => {}
        }
    }
    if let Some(vp) =
        parallel.virtual_pipeline_model_parallel_size.as_ref().filter(|v| v.value() != Some(&-1))
    {
        values.set("model.virtual_pipeline_model_parallel_size", vp.value().copied());
    }
    if let Some(et) = &parallel.expert_tensor_parallel_size {
        values.set("model.expert_tensor_parallel_size", et.value().copied());
    }
    if let Some(layout) = &general.pipeline_model_parallel_layout {
        values.set(
            "model.pipeline_model_parallel_layout",
            if layout == "None" { Value::Null } else { json!(layout) },
        );
    }
    // The harness ties sequence parallelism to tensor parallelism.
    if parallel.tensor_model_parallel_size.is_some() && !explicit.contains("model.sequence_parallel") {
        values
            .set("model.sequence_parallel", values.int("model.tensor_model_parallel_size").unwrap_or(1) > 1);
    }
    layers::adapt(args, values, explicit, before, notices);
    scale_batch(args, recipe, values, explicit, notices);
}

/// `-ng` unlike the recipe's without `-gb`: the global batch scales with the data-parallel ranks, as upstream.
fn scale_batch(
    args: &Args,
    recipe: &Recipe,
    values: &mut Values,
    explicit: &BTreeSet<String>,
    notices: &mut Vec<Notice>,
) {
    let given = args.training.global_batch_size.is_some() || explicit.contains("train.global_batch_size");
    let Some(num_gpus) =
        args.general.num_gpus.filter(|n| !given && usize::try_from(*n) != Ok(recipe.num_gpus))
    else {
        return;
    };
    let ranks = |v: &Values| {
        [
            "model.tensor_model_parallel_size",
            "model.pipeline_model_parallel_size",
            "model.context_parallel_size",
        ]
        .into_iter()
        .map(|k| i128::from(v.int(k).unwrap_or(1).max(1)))
        .product::<i128>()
    };
    let old_dp = (recipe.num_gpus as i128 / ranks(&Values(recipe.values.clone()))).max(1);
    let new_dp = i128::from(num_gpus.max(0)) / ranks(values);
    let old = i128::from(values.int("train.global_batch_size").unwrap_or(1));
    let scaled = i64::try_from(old * new_dp / old_dp).unwrap_or(i64::MAX);
    if new_dp > 0 && i128::from(scaled) != old {
        values.set("train.global_batch_size", scaled);
        let text = format!(
            "-ng {num_gpus} in place of the recipe's {}: global batch {old} becomes {scaled} (dp {old_dp} to {new_dp})",
            recipe.num_gpus
        );
        notices.push(Notice::new("global_batch_scaled", text));
    }
}

/// Token drop, dispatcher and overlap of the expert all-to-all.
fn experts(args: &Args, values: &mut Values, notices: &mut Vec<Notice>) {
    let perf = &args.performance;
    let moe = values.int("model.num_moe_experts").unwrap_or(0) > 1;
    match &perf.moe_flex_dispatcher_backend {
        Some(OrNone::Off) => values.set("model.moe_token_dispatcher_type", "alltoall"),
        Some(OrNone::Value(backend)) => {
            values.set("model.moe_token_dispatcher_type", "flex");
            let name = if *backend == FlexBackend::Deepep { "deepep" } else { "hybridep" };
            values.set("model.moe_flex_dispatcher_backend", name);
            values.set("model.moe_shared_expert_overlap", false);
        }
        None => {}
    }
    match perf.moe_a2a_overlap {
        Some(true) => {
            values.set("comm_overlap.overlap_moe_expert_parallel_comm", true);
            values.set("comm_overlap.delay_wgrad_compute", true);
            values.set("model.moe_shared_expert_overlap", false);
        }
        Some(false) => {
            values.set("comm_overlap.overlap_moe_expert_parallel_comm", false);
            values.set("comm_overlap.delay_wgrad_compute", false);
        }
        None => {}
    }
    match perf.use_tokendrop {
        Some(true) if !moe => {
            notices.push(Notice::new(
                "tokendrop_ignored",
                "--use_tokendrop true: the model has no experts, so no token is dropped",
            ));
        }
        Some(true) => {
            values.set("model.moe_expert_capacity_factor", 1.0);
            values.set("model.moe_pad_expert_input_to_capacity", true);
            values.set("model.moe_router_force_load_balancing", false);
        }
        Some(false) if moe => {
            values.set("model.moe_expert_capacity_factor", Value::Null);
            values.set("model.moe_pad_expert_input_to_capacity", false);
            values.set("model.moe_router_force_load_balancing", true);
        }
        _ => {}
    }
}

fn recompute_and_offload(args: &Args, values: &mut Values) {
    let perf = &args.performance;
    if let Some(n) = perf.recompute_num_layers {
        values.set("model.recompute_granularity", "full");
        values.set("model.recompute_method", "block");
        values.set("model.recompute_num_layers", n);
        values.set("model.recompute_modules", Value::Null);
    }
    if let Some(modules) = &perf.recompute_modules {
        values.set("model.recompute_granularity", "selective");
        values.set("model.recompute_method", Value::Null);
        values.set("model.recompute_num_layers", Value::Null);
        values.set("model.recompute_modules", modules.0.clone());
    }
    if let Some(n) = perf.activation_offload_layers {
        values.set("model.cpu_offloading", n > 0);
        values.set("model.cpu_offloading_num_layers", n);
    }
}
