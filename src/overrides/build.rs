//! Settings to the structs that are judged and run.

use super::{Notice, graphs::Graph};
use crate::args::{Args, OptimizerChoice, Staging};
use crate::config::{
    Activation, Batch, DeltaNet, Diffusion, Dispatcher, Graph as GraphConfig, HyperConnections, Identity,
    LayerKind, Mamba, Mla, Model, Moe, Optimizer, Recompute, RunConfig, ScoreFunction, SharedKv, Vision,
    Window,
};
use crate::ops::rope::RopeScaling;
use crate::ops::rope::axes::MERGE;
use crate::ops::rope::scaling::{Llama3, Yarn};
use crate::ranks::launch;
use crate::recipe::{Recipe, hybrid_kinds, layer_kinds, padded_vocab};
use crate::rules::{Effective, Values, layout_of};
use std::collections::BTreeSet;

/// Everything the rules look at.
pub fn effective(
    args: &Args,
    recipe: &Recipe,
    mut values: Values,
    explicit: BTreeSet<String>,
    graph: Graph,
    env: &dyn Fn(&str) -> Option<String>,
    notices: &mut Vec<Notice>,
) -> Effective {
    // No layers where a rule will say what is wrong with them.
    let layers = layer_kinds(&values.0).unwrap_or_default();
    let squad_packed = args.data.data == "squad_packed";
    let packing = "dataset.packed_sequence_specs.packed_sequence_size";
    let padding = "dataset.packed_sequence_specs.pad_cu_seqlens";
    if squad_packed && graph.implementation != crate::config::GraphImpl::None {
        values.set(padding, true); // R21
    }
    if args.data.packed_sequence {
        notices.push(Notice::new(
            "packed_sequence_judged",
            "--packed_sequence is judged by the rules; upstream reads it nowhere",
        ));
    }
    let max_steps = args.training.max_steps.or_else(|| {
        let key = "train.train_iters";
        explicit.contains(key).then(|| values.int(key)).flatten()
    });
    Effective {
        packed: squad_packed || args.data.packed_sequence || values.is_set(packing),
        pad_cu_seqlens: values.on(padding),
        expandable_segments: env("PYTORCH_CUDA_ALLOC_CONF")
            .is_some_and(|v| v.contains("expandable_segments:True")),
        nccl_graph_register: env("NCCL_GRAPH_REGISTER"),
        // What a launcher's variables contradict is told where processes are started.
        several_processes: launch::start(args.mbperf.nproc_per_node, env).is_ok_and(|s| s.is_some()),
        num_gpus: args.general.num_gpus.unwrap_or_else(|| i64::try_from(recipe.num_gpus).unwrap_or(1)),
        family: recipe.family.clone(),
        recipe: recipe.model.clone(),
        dtype: recipe.dtype.clone(),
        gpu: recipe.gpu.clone(),
        args: args.clone(),
        implementation: graph.implementation,
        scope: graph.scope,
        te_rng_tracker: graph.te_rng_tracker,
        values,
        explicit,
        layers,
        max_steps,
        idle: Vec::new(),
    }
}

fn size(e: &Effective, key: &str) -> usize {
    e.values.int(key).and_then(|v| usize::try_from(v).ok()).unwrap_or(0)
}

/// The configuration that is run. Call after the rules have passed.
pub fn config(
    e: &Effective,
    recipe: &Recipe,
    approximations: Vec<String>,
    not_built: Vec<String>,
) -> RunConfig {
    let v = &e.values;
    let args = &e.args;
    let float = |key: &str, unset: f64| v.float(key).unwrap_or(unset);
    let parallel = layout_of(e);
    let micro = size(e, "train.micro_batch_size").max(1);
    let global = size(e, "train.global_batch_size").max(1);
    let job = global / micro.saturating_mul(parallel.dp);
    let limit = usize::try_from(args.mbperf.max_microbatches).unwrap_or(0);
    let run = match (args.mbperf.stack_only, limit) {
        (true, _) => 1,
        (false, 0) => job,
        (false, limit) => job.min(limit),
    };
    let compute_dtype =
        if args.mbperf.run_dtype.is_some() { "bf16".to_owned() } else { recipe.dtype.clone() };
    RunConfig {
        identity: Identity {
            family: recipe.family.clone(),
            recipe: recipe.model.clone(),
            gpu: recipe.gpu.clone(),
            recipe_dtype: recipe.dtype.clone(),
            compute_dtype,
            task: recipe.task.clone(),
            variant: recipe.variant.clone(),
            num_gpus_recipe: recipe.num_gpus,
            num_gpus: usize::try_from(e.num_gpus).unwrap_or(1),
        },
        model: model(e),
        batch: Batch {
            micro_batch_size: micro,
            global_batch_size: global,
            seq_length: sequence(e),
            num_microbatches_recipe: job,
            num_microbatches: run,
        },
        graph: GraphConfig {
            implementation: e.implementation,
            scope: e.scope.clone(),
            warmup_steps: size(e, "model.cuda_graph_warmup_steps"),
            te_rng_tracker: e.te_rng_tracker,
            staging: args.mbperf.graph_staging == Staging::Auto,
        },
        recompute: Recompute {
            granularity: v.text("model.recompute_granularity").map(str::to_owned),
            method: v.text("model.recompute_method").map(str::to_owned),
            num_layers: v.int("model.recompute_num_layers").map(|n| usize::try_from(n).unwrap_or(0)),
            modules: e.recomputed().into_iter().map(str::to_owned).collect(),
            mhc_layers: v
                .int("model.mhc_recompute_layer_num")
                .and_then(|n| usize::try_from(n).ok())
                .filter(|n| *n > 0),
        },
        optimizer: Optimizer {
            kind: match args.mbperf.optimizer {
                OptimizerChoice::None => "none".to_owned(),
                OptimizerChoice::Adam => v.text("optimizer.optimizer").unwrap_or("adam").to_owned(),
            },
            lr: float("optimizer.lr", 0.0),
            min_lr: float("optimizer.min_lr", 0.0),
            warmup_iters: size(e, "scheduler.lr_warmup_iters"),
            clip_grad: float("optimizer.clip_grad", 0.0),
            beta1: float("optimizer.adam_beta1", 0.0),
            beta2: float("optimizer.adam_beta2", 0.0),
            eps: float("optimizer.adam_eps", 0.0),
            weight_decay: float("optimizer.weight_decay", 0.0),
            decay_iters: v
                .int("scheduler.lr_decay_iters")
                .and_then(|n| usize::try_from(n).ok())
                .unwrap_or(size(e, "train.train_iters")),
            grad_dtype: if v.on("ddp.grad_reduce_in_fp32") { "fp32".to_owned() } else { "bf16".to_owned() },
        },
        stack_only: args.mbperf.stack_only,
        overlap_wgrad: args.mbperf.overlap_wgrad,
        seed: seed(e),
        parallel,
        approximations,
        not_built,
    }
}

/// `--seed`, or `rng.seed` where the user names that alone: a recipe's own is the harness's, which is the default here.
fn seed(e: &Effective) -> u64 {
    let key = "rng.seed";
    let named = e.values.int(key).filter(|_| e.explicit.contains(key) && !e.given("seed"));
    named.and_then(|n| u64::try_from(n).ok()).unwrap_or(e.args.mbperf.seed)
}

fn model(e: &Effective) -> Model {
    let v = &e.values;
    let heads = size(e, "model.num_attention_heads").max(1);
    let hidden = size(e, "model.hidden_size");
    let or = |key: &str, unset: usize| if v.is_set(key) { size(e, key) } else { unset };
    Model {
        layers: e.layers.clone(),
        hidden_size: hidden,
        ffn_hidden_size: or("model.ffn_hidden_size", 4 * hidden),
        num_attention_heads: heads,
        num_query_groups: or("model.num_query_groups", heads),
        kv_channels: or("model.kv_channels", hidden / heads),
        vocab_size: padded_vocab(&v.0, usize::try_from(e.tp()).unwrap_or(1)),
        activation: match v.text("model.activation") {
            Some("squared_relu") => Activation::SquaredRelu,
            Some("quick_geglu_clamped") => Activation::QuickGeglu,
            Some("gelu") => Activation::Gelu,
            Some("swiglu_clamped") => Activation::SwigluClamped,
            _ => Activation::Swiglu,
        },
        activation_clamp: v.float("model.activation_func_clamp_value"),
        glu_linear_offset: v.float("model.glu_linear_offset").unwrap_or(0.0),
        layernorm_epsilon: v.float("model.layernorm_epsilon").unwrap_or(1e-5),
        zero_centered_norms: v.on("model.layernorm_zero_centered_gamma"),
        attention_output_gate: v.on("model.attention_output_gate"),
        qk_layernorm: v.on("model.qk_layernorm"),
        add_qkv_bias: v.on("model.add_qkv_bias"),
        add_bias_linear: v.on("model.add_bias_linear"),
        window: window(v),
        attention_sinks: v.text("model.softmax_type") == Some("learnable") || e.shared_kv(),
        rotary_base: v.float("model.rotary_base").unwrap_or(10000.0),
        // Hybrids have no position embedding: attention then rotates nothing.
        rotary_percent: match v.text("model.position_embedding_type") {
            Some("none") => 0.0,
            _ => v.float("model.rotary_percent").unwrap_or(1.0),
        },
        rope_scaling: rope_scaling(v),
        mrope_section: mrope_section(v),
        vision: vision(v),
        diffusion: diffusion(v, hidden),
        tied_embeddings: v.on("model.share_embeddings_and_output_weights"),
        init_method_std: v.float("model.init_method_std").unwrap_or(0.02),
        attention_dropout: v.float("model.attention_dropout").unwrap_or(0.0),
        hidden_dropout: v.float("model.hidden_dropout").unwrap_or(0.0),
        moe: e.moe().then(|| moe(e)),
        mamba: e.layers.contains(&crate::config::LayerKind::Mamba).then(|| mamba(e)),
        delta_net: e.delta_net().then(|| DeltaNet {
            key_heads: size(e, "model.linear_num_key_heads"),
            value_heads: size(e, "model.linear_num_value_heads"),
            key_dim: size(e, "model.linear_key_head_dim"),
            value_dim: size(e, "model.linear_value_head_dim"),
        }),
        mla: (v.on("model.multi_latent_attention") && !e.shared_kv()).then(|| mla(e)),
        shared_kv: e.shared_kv().then(|| shared_kv(e)),
        hyper_connections: v.is_set("model.hyper_connections").then(|| hyper_connections(v)),
        mtp_num_layers: size(e, "model.mtp_num_layers"),
        mtp_layers: mtp_layers(e),
        mtp_repeated: v.on("model.mtp_use_repeated_layer"),
        // Megatron-Core's default.
        mtp_loss_scaling_factor: v.float("model.mtp_loss_scaling_factor").unwrap_or(0.1),
    }
}

/// `[left, right]`: so many tokens before and after a token's own; -1 is no bound. Other forms are refused by `features`.
fn window(v: &Values) -> Option<Window> {
    let left = v.get("model.window_size").get(0).and_then(serde_json::Value::as_i64)?;
    let skip = v.int("model.window_attn_skip_freq").and_then(|n| usize::try_from(n).ok());
    usize::try_from(left).ok().map(|left| Window { keys: left + 1, skip_freq: skip })
}

/// Pairs of time, height and width.
fn mrope_section(v: &Values) -> Option<[usize; 3]> {
    let pairs = |i: usize| v.get("model.mrope_section").get(i)?.as_u64().map(|n| n as usize);
    Some([pairs(0)?, pairs(1)?, pairs(2)?])
}

/// The tower, and the image of a sequence as Megatron-Bridge's mock data for these recipes makes it (one image of 256 x 256
/// pixels, `data/vlm_datasets/mock_provider.py`), after the four tokens that open a turn and an image in Qwen's template.
fn vision(v: &Values) -> Option<Vision> {
    const PIXELS: usize = 256;
    const TOKENS_BEFORE: usize = 4;
    let of = v.get("model.vision");
    let size = |key: &str| of.get(key).and_then(serde_json::Value::as_u64).unwrap_or(0) as usize;
    let list = |key: &str| -> Vec<usize> {
        let list = of.get(key).and_then(serde_json::Value::as_array);
        list.into_iter().flatten().filter_map(|n| Some(n.as_u64()? as usize)).collect()
    };
    let patch = size("patch_size").max(1);
    (!of.is_null()).then(|| Vision {
        depth: size("depth"),
        hidden_size: size("hidden_size"),
        ffn_hidden_size: size("intermediate_size"),
        num_heads: size("num_heads").max(1),
        patch_values: size("in_channels") * size("temporal_patch_size") * patch * patch,
        table_side: size("num_position_embeddings").isqrt(),
        // Images are resized to whole merged patches, as Qwen's processor does.
        side: PIXELS / patch / MERGE * MERGE,
        start: TOKENS_BEFORE,
        deepstack: list("deepstack_visual_indexes"),
    })
}

fn diffusion(v: &Values, hidden: usize) -> Option<Diffusion> {
    let of = v.get("model.diffusion");
    let or = |key: &str, unset: usize| {
        of.get(key).and_then(serde_json::Value::as_u64).map_or(unset, |n| n as usize)
    };
    let patch = or("patch_temporal", 1) * or("patch_spatial", 1).pow(2);
    (!of.is_null()).then(|| Diffusion {
        in_values: or("in_channels", 0) * patch,
        out_values: or("out_channels", 0) * patch,
        freq_dim: or("freq_dim", 0),
        text_len: or("text_len", 0),
        text_dim: or("text_dim", 0),
        context_size: or("crossattn_emb_size", hidden),
    })
}

/// Tokens of a sequence. A diffusion recipe's own length is a number that its model never reads: a video's patches stand for
/// it unless a length was given.
fn sequence(e: &Effective) -> usize {
    let given = e.args.training.seq_length.is_some()
        || ["dataset.seq_length", "model.seq_length"].iter().any(|key| e.explicit.contains(*key));
    if e.values.is_set("model.diffusion") && !given {
        return Diffusion::VIDEO.iter().product();
    }
    size(e, "dataset.seq_length")
}

fn mla(e: &Effective) -> Mla {
    Mla {
        q_lora_rank: e.values.is_set("model.q_lora_rank").then(|| size(e, "model.q_lora_rank")),
        kv_lora_rank: size(e, "model.kv_lora_rank"),
        qk_head_dim: size(e, "model.qk_head_dim"),
        qk_pos_emb_head_dim: size(e, "model.qk_pos_emb_head_dim"),
        v_head_dim: size(e, "model.v_head_dim"),
    }
}

/// A number of an object.
fn part(of: &serde_json::Value, key: &str) -> usize {
    of.get(key).and_then(serde_json::Value::as_u64).and_then(|n| usize::try_from(n).ok()).unwrap_or(0)
}

fn shared_kv(e: &Effective) -> SharedKv {
    let of = e.values.get("model.sparse_attention");
    let ratios = of.get("csa_compress_ratios").and_then(serde_json::Value::as_array);
    let ratio = |r: &serde_json::Value| r.as_u64().and_then(|r| usize::try_from(r).ok()).unwrap_or(0);
    SharedKv {
        q_lora_rank: size(e, "model.q_lora_rank"),
        rotary: size(e, "model.qk_pos_emb_head_dim"),
        o_groups: part(of, "o_groups").max(1),
        o_lora_rank: part(of, "o_lora_rank"),
        window: part(of, "csa_window_size").max(1),
        compress_ratios: ratios.map(|all| all.iter().map(ratio).collect()).unwrap_or_default(),
        compress_rotary_base: of
            .get("csa_compress_rotary_base")
            .and_then(serde_json::Value::as_f64)
            .or(e.values.float("model.rotary_base"))
            .unwrap_or(10000.0),
    }
}

fn hyper_connections(v: &Values) -> HyperConnections {
    let of = v.get("model.hyper_connections");
    HyperConnections {
        num_residual_streams: part(of, "num_residual_streams").max(1),
        sinkhorn_iterations: part(of, "sinkhorn_iterations").max(1),
    }
}

/// A depth of multi-token prediction is like the last decoder layer, or follows a pattern of its own in hybrids.
fn mtp_layers(e: &Effective) -> Vec<LayerKind> {
    let pattern = e.values.text("model.mtp_hybrid_override_pattern");
    // A wrong letter is refused by `features`.
    pattern
        .and_then(|p| hybrid_kinds(p).ok())
        .unwrap_or_else(|| e.layers.last().copied().into_iter().collect())
}

/// The chunk is a choice of the implementation; upstream's default is 128 too.
fn mamba(e: &Effective) -> Mamba {
    const CHUNK: usize = 128;
    let chunk = size(e, "model.mamba_chunk_size");
    Mamba {
        num_heads: size(e, "model.mamba_num_heads"),
        head_dim: size(e, "model.mamba_head_dim"),
        state_dim: size(e, "model.mamba_state_dim"),
        num_groups: size(e, "model.mamba_num_groups").max(1),
        chunk_size: if chunk == 0 { CHUNK } else { chunk },
    }
}

fn moe(e: &Effective) -> Moe {
    let v = &e.values;
    let own = &e.args.mbperf;
    Moe {
        num_experts: size(e, "model.num_moe_experts"),
        router_topk: size(e, "model.moe_router_topk"),
        ffn_hidden_size: size(e, "model.moe_ffn_hidden_size"),
        shared_expert_intermediate_size: e
            .shared_expert()
            .then(|| size(e, "model.moe_shared_expert_intermediate_size")),
        shared_expert_gate: e.shared_expert() && v.on("model.moe_shared_expert_gate"),
        latent_size: v.is_set("model.moe_latent_size").then(|| size(e, "model.moe_latent_size")),
        score_function: match v.text("model.moe_router_score_function") {
            Some("sigmoid") => ScoreFunction::Sigmoid,
            Some("sqrtsoftplus") => ScoreFunction::SqrtSoftplus,
            _ => ScoreFunction::Softmax,
        },
        pre_softmax: v.on("model.moe_router_pre_softmax"),
        topk_scaling_factor: v.float("model.moe_router_topk_scaling_factor"),
        num_groups: size(e, "model.moe_router_num_groups").max(1),
        group_topk: size(e, "model.moe_router_group_topk").max(1),
        expert_bias: v.on("model.moe_router_enable_expert_bias"),
        hash_layers: size(e, "model.moe_n_hash_layers"),
        // Megatron-Core's default.
        bias_update_rate: v.float("model.moe_router_bias_update_rate").unwrap_or(1e-3),
        aux_loss_coeff: v.float("model.moe_aux_loss_coeff").unwrap_or(0.0),
        load_balancing_type: v.text("model.moe_router_load_balancing_type").unwrap_or("none").to_owned(),
        force_load_balancing: v.on("model.moe_router_force_load_balancing"),
        routing: own.moe_routing,
        dispatcher: match e.dispatcher() {
            "flex" => Dispatcher::Flex,
            "allgather" => Dispatcher::Allgather,
            _ => Dispatcher::Alltoall,
        },
        flex_backend: v
            .text("model.moe_flex_dispatcher_backend")
            .filter(|_| e.dispatcher() == "flex")
            .map(str::to_owned),
        capacity_factor: e.capacity_factor(),
        pad_to_capacity: v.on("model.moe_pad_expert_input_to_capacity"),
        drop_by_position: v.text("model.moe_token_drop_policy") == Some("position"),
        rank_capacity_factor: v.float("model.moe_expert_rank_capacity_factor"),
        shared_expert_overlap: v.on("model.moe_shared_expert_overlap"),
        input_jitter_eps: v.float("model.moe_input_jitter_eps"),
        grouped_gemm: v.on("model.moe_grouped_gemm"),
        row_bound: own.moe_row_bound,
        expert_gemm: own.expert_gemm,
    }
}

/// The model's scaling of rotary frequencies. What recipes leave out is what the models were published with: Llama
/// 3.x blends between 1 and 4 waves of a context of 8192 tokens, YaRN's ramp is between 32 turns and 1 within 4096
/// (Megatron-Core's defaults too).
fn rope_scaling(v: &Values) -> Option<RopeScaling> {
    let of = v.get("model.rope_scaling");
    let number = |key: &str, unset: f64| of.get(key).and_then(serde_json::Value::as_f64).unwrap_or(unset);
    let original = |unset: f64| number("original_max_position_embeddings", unset);
    match of.get("type").and_then(serde_json::Value::as_str) {
        Some("llama3") => Some(RopeScaling::Llama3(Llama3 {
            factor: number("factor", 8.0),
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: original(8192.0),
        })),
        Some("yarn") => Some(RopeScaling::Yarn(Yarn {
            factor: number("factor", 1.0),
            original_max_position: original(4096.0),
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: number("mscale", 1.0),
            mscale_all_dim: number("mscale_all_dim", 0.0),
            // gpt-oss alone ramps between broken pairs.
            rounded: v.on("model.multi_latent_attention"),
        })),
        _ => None,
    }
}
