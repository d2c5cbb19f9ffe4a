//! Rules about recompute, offload, overlap of the expert all-to-all, and packing.

use super::{Effective, Rule};
use crate::config::Scope;

/// Modules that upstream can recompute selectively.
const RECOMPUTABLE: [&str; 11] = [
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
    "gdn_norm_out",
    "gdp_in_proj",
    "gdp_qkv",
    "mhc",
];

fn when(broken: bool, text: impl FnOnce() -> String) -> Option<String> {
    broken.then(text)
}

/// Weight gradients of this region are delayed and lie in a graph.
fn delayed_attn(e: &Effective) -> bool {
    e.te() && (e.has(Scope::Attn) || e.whole_layer())
}

fn delayed_router(e: &Effective) -> bool {
    let shared = e.shared_expert() && !e.values.on("model.moe_shared_expert_overlap");
    e.te() && (e.has(Scope::MoeRouter) || e.whole_layer()) && shared
}

pub const RULES: &[Rule] = &[
    Rule {
        id: "R16",
        wrong: "-rl and --recompute_modules together",
        remedy: "Give -rl for full recompute or --recompute_modules for selective recompute, not both.",
        broken: |e| {
            when(
                e.args.performance.recompute_num_layers.is_some()
                    && e.args.performance.recompute_modules.is_some(),
                || "-rl recomputes whole layers, --recompute_modules parts of them".to_owned(),
            )
        },
    },
    Rule {
        id: "R25b",
        wrong: "CPU offloading of all layers, with pipeline stages, or with recompute",
        remedy: "Offload fewer layers than the model has, with -pp 1 and no recompute; -ol 0 switches it off.",
        broken: |e| {
            let n = e.values.int("model.cpu_offloading_num_layers").unwrap_or(0);
            let layers = e.values.int("model.num_layers").unwrap_or(0);
            let recompute = e.values.is_set("model.recompute_granularity");
            when(
                e.values.on("model.cpu_offloading") && (n < 1 || n >= layers || e.pp() > 1 || recompute),
                || {
                    format!(
                        "-ol {n} with {layers} layers, -pp {}, recompute {}",
                        e.pp(),
                        if recompute { "on" } else { "off" }
                    )
                },
            )
        },
    },
    Rule {
        id: "R33",
        wrong: "full recompute with graphs other than full_iteration",
        remedy: "Take --recompute_modules in its place, or no recompute (model.recompute_granularity=null), or --cuda_graph_impl none, or \
                 --cuda_graph_impl local --cuda_graph_scope full_iteration (dropless experts are not for that).",
        broken: |e| {
            when(e.graphs() && !e.full_iteration() && e.full_recompute(), || {
                let n = e.values.int("model.recompute_num_layers").unwrap_or(0);
                format!(
                    "-rl {n} (model.recompute_granularity=full) with --cuda_graph_impl transformer_engine"
                )
            })
        },
    },
    Rule {
        id: "R34",
        wrong: "selective recompute of moe with the scope moe_router",
        remedy: "Recompute moe_act in its place, or leave moe_router out of the scope.",
        broken: |e| {
            when(e.te() && e.recomputes("moe") && e.has(Scope::MoeRouter), || {
                "--recompute_modules moe with --cuda_graph_scope moe_router: the recomputed layer would cross the graph's edge".to_owned()
            })
        },
    },
    Rule {
        id: "R35",
        wrong: "attention dropout in attention that is both captured and recomputed",
        remedy: "Leave core_attn out of --recompute_modules, attn out of the scope, or model.attention_dropout at 0.",
        broken: |e| {
            when(
                e.nonzero("model.attention_dropout") && e.recomputes("core_attn") && e.captured(Scope::Attn),
                || {
                    "model.attention_dropout: recompute inside a graph cannot draw the same mask again (--recompute_modules core_attn)".to_owned()
                },
            )
        },
    },
    Rule {
        id: "R36",
        wrong: "hidden dropout in an MLP or MoE layer that is both captured and recomputed",
        remedy: "Leave the module out of --recompute_modules or of the scope, or model.hidden_dropout at 0.",
        broken: |e| {
            let both = |module: &str, scope: Scope| e.recomputes(module) && e.captured(scope);
            when(
                e.nonzero("model.hidden_dropout") && (both("mlp", Scope::Mlp) || both("moe", Scope::Moe)),
                || {
                    "model.hidden_dropout: recompute inside a graph cannot draw the same mask again (--recompute_modules)".to_owned()
                },
            )
        },
    },
    Rule {
        id: "R37",
        wrong: "input jitter in a MoE layer that is both captured and recomputed",
        remedy: "Leave moe out of --recompute_modules or of the scope, or model.moe_input_jitter_eps unset.",
        broken: |e| {
            when(
                e.values.is_set("model.moe_input_jitter_eps")
                    && e.recomputes("moe")
                    && e.captured(Scope::Moe),
                || {
                    "model.moe_input_jitter_eps: recompute inside a graph cannot draw the same noise again (--recompute_modules moe)".to_owned()
                },
            )
        },
    },
    Rule {
        id: "R38",
        wrong: "a selective recompute that does not fit the model",
        remedy: "Name modules that the model has, out of core_attn, moe_act, layernorm, mla_up_proj, mlp, moe, shared_experts, gdn_norm_out, \
                 gdp_in_proj, gdp_qkv and mhc, without a layer count; model.recompute_granularity=null is no recompute.",
        broken: |e| {
            let modules = e.recomputed();
            if let Some(unknown) = modules.iter().find(|m| !RECOMPUTABLE.contains(m)) {
                return Some(format!(
                    "--recompute_modules {}: there is no such module",
                    crate::keys::short(unknown)
                ));
            }
            let selective = e.values.text("model.recompute_granularity") == Some("selective");
            let count = e.values.int("model.recompute_num_layers").filter(|_| selective);
            let lacks = [
                (count.is_some(), "model.recompute_num_layers is for full recompute only"),
                (
                    e.recomputes("mla_up_proj") && !e.values.on("model.multi_latent_attention"),
                    "mla_up_proj: the model has no MLA",
                ),
                (
                    e.recomputes("gdn_norm_out")
                        && e.values.text("model.attention_variant") != Some("gated_delta_net"),
                    "gdn_norm_out: the model has no gated delta net",
                ),
                (
                    e.recomputes("mhc") && !e.values.is_set("model.hyper_connections"),
                    "mhc: the model has no hyper-connections",
                ),
                (
                    e.recomputes("mhc") && e.recomputes("mlp"),
                    "mhc recomputes the MLP's surroundings already: leave mlp out",
                ),
                (
                    e.recomputes("moe_act") && !e.values.on("model.moe_grouped_gemm"),
                    "moe_act needs model.moe_grouped_gemm=true",
                ),
                (
                    e.recomputes("shared_experts") && e.values.on("model.moe_shared_expert_overlap"),
                    "shared_experts cannot be recomputed while they overlap the dispatch",
                ),
            ];
            lacks
                .into_iter()
                .find(|(broken, _)| *broken)
                .map(|(_, what)| format!("--recompute_modules: {what}"))
        },
    },
    Rule {
        id: "R38b",
        wrong: "full recompute without a method or a number of layers that fits",
        remedy: "Give -rl N, or set model.recompute_method to block or uniform and model.recompute_num_layers \
                 (at least 1 for uniform, and 1 with multi-token prediction).",
        broken: |e| {
            let method = e.values.text("model.recompute_method");
            let layers = e.values.int("model.recompute_num_layers");
            let lacks = [
                (method.is_none(), "no model.recompute_method".to_owned()),
                (layers.is_none(), "no model.recompute_num_layers".to_owned()),
                (
                    method == Some("uniform") && layers.is_some_and(|n| n < 1),
                    format!("uniform groups of {} layers", layers.unwrap_or(0)),
                ),
                (
                    method == Some("uniform")
                        && layers.is_some_and(|n| n > 1)
                        && e.values.int("model.mtp_num_layers").unwrap_or(0) > 0,
                    "layers of multi-token prediction are recomputed one by one, and uniform groups are larger".to_owned(),
                ),
            ];
            let (_, why) = lacks.into_iter().find(|(lacking, _)| e.full_recompute() && *lacking)?;
            Some(format!("model.recompute_granularity=full: {why}"))
        },
    },
    Rule {
        id: "R42",
        wrong: "overlap of the expert all-to-all with captured moe, mlp or whole layers",
        remedy: "Take --moe_a2a_overlap false, or leave moe and mlp out of --cuda_graph_scope.",
        broken: |e| {
            when(
                e.ep_overlap() && e.te() && (e.has(Scope::Moe) || e.has(Scope::Mlp) || e.whole_layer()),
                || {
                    "--moe_a2a_overlap true: the overlapped schedule cuts the layer where this scope captures it whole".to_owned()
                },
            )
        },
    },
    Rule {
        id: "R42b",
        wrong: "overlap of the expert all-to-all on a layout that has no room for it",
        remedy: "Take --moe_a2a_overlap false; it needs experts, -ep above 1, alltoall or flex, virtual stages where -pp is above 1, \
                 no full or moe recompute, at most one MTP layer and no shared-expert overlap.",
        broken: |e| {
            let lacks = [
                (!e.moe(), "the model has no experts"),
                (e.ep() <= 1, "-ep is 1"),
                (!["alltoall", "flex"].contains(&e.dispatcher()), "the dispatcher is allgather"),
                (
                    e.pp() > 1
                        && !e.values.is_set("model.virtual_pipeline_model_parallel_size")
                        && !e.values.is_set("model.pipeline_model_parallel_layout"),
                    "there are pipeline stages without virtual ones",
                ),
                (e.full_recompute(), "whole layers are recomputed"),
                (e.recomputes("moe"), "moe is recomputed"),
                (e.values.int("model.mtp_num_layers").unwrap_or(0) > 1, "there is more than one MTP layer"),
                (e.values.on("model.moe_shared_expert_overlap"), "the shared expert overlaps the dispatch"),
            ];
            let (_, why) = lacks.into_iter().find(|(lacking, _)| e.ep_overlap() && *lacking)?;
            Some(format!("--moe_a2a_overlap true: {why}"))
        },
    },
    Rule {
        id: "R43",
        wrong: "delayed weight gradients without overlap of the expert all-to-all",
        remedy: "Add --moe_a2a_overlap true, or leave comm_overlap.delay_wgrad_compute=true out.",
        broken: |e| {
            when(e.delay_wgrad() && !e.ep_overlap(), || {
                "comm_overlap.delay_wgrad_compute=true without --moe_a2a_overlap true".to_owned()
            })
        },
    },
    Rule {
        id: "R44",
        wrong: "delayed weight gradients inside a graph without static gradient addresses, or with attention biases",
        remedy: "Keep model.gradient_accumulation_fusion=true and no attention bias, leave attn out of the scope, or take --moe_a2a_overlap false.",
        broken: |e| {
            let inside = e.delay_wgrad() && (delayed_attn(e) || delayed_router(e));
            let bias = ["model.add_bias_linear", "model.add_qkv_bias"].into_iter().find(|k| e.values.on(k));
            when(inside && !e.values.on("model.gradient_accumulation_fusion"), || {
                "model.gradient_accumulation_fusion=false: a captured weight gradient needs a fixed address (--moe_a2a_overlap true)".to_owned()
            })
            .or_else(|| {
                let key = bias.filter(|_| e.delay_wgrad() && delayed_attn(e))?;
                Some(format!("{key}=true: bias gradients of a captured attention cannot be delayed (--moe_a2a_overlap true)"))
            })
        },
    },
    Rule {
        id: "R46",
        wrong: "--data squad_packed on a MoE model with captured MoE parts",
        remedy: "Leave the MoE scopes out: --cuda_graph_scope attn.",
        broken: |e| {
            let moe = [Scope::Moe, Scope::MoeRouter, Scope::MoePreprocess].into_iter().any(|s| e.has(s));
            when(e.args.data.data == "squad_packed" && e.moe() && e.te() && (moe || e.whole_layer()), || {
                "--data squad_packed: the padding mask of a packed batch cannot enter a captured router"
                    .to_owned()
            })
        },
    },
    Rule {
        id: "R48",
        wrong: "fine-grained activation offload where the graph does not allow it",
        remedy: "Set model.fine_grained_offloading_max_inflight_offloads for full_iteration, a warm-up above 0, and leave the scope moe out.",
        broken: |e| {
            let on = e.values.on("model.fine_grained_activation_offloading") && e.graphs();
            let lacks = [
                (
                    e.full_iteration()
                        && !e.values.is_set("model.fine_grained_offloading_max_inflight_offloads"),
                    "full_iteration needs a bound on offloads in flight",
                ),
                (
                    e.values.int("model.cuda_graph_warmup_steps").unwrap_or(0) < 1,
                    "the warm-up must be above 0",
                ),
                (e.has(Scope::Moe), "the scope moe cannot be offloaded"),
            ];
            let (_, why) = lacks.into_iter().find(|(lacking, _)| on && *lacking)?;
            Some(format!("model.fine_grained_activation_offloading=true: {why}"))
        },
    },
    Rule {
        id: "R49",
        wrong: "FSDP with overlap of the expert all-to-all and graphs by layer",
        remedy: "Take --moe_a2a_overlap false or --use_megatron_fsdp false.",
        broken: |e| {
            when(e.values.on("ddp.use_megatron_fsdp") && e.ep_overlap() && e.te(), || {
                "--use_megatron_fsdp true with --moe_a2a_overlap true and --cuda_graph_impl transformer_engine".to_owned()
            })
        },
    },
    Rule {
        id: "R49b",
        wrong: "NCCL user buffers with expandable segments",
        remedy: "Take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF, or --nccl_ub false.",
        broken: |e| {
            when(e.values.on("ddp.nccl_ub") && e.expandable_segments, || {
                "--nccl_ub true with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF".to_owned()
            })
        },
    },
];
