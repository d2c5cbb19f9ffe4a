//! Rules about implementation, scope, and what may lie in a graph.

use super::Rule;
use crate::config::{GraphImpl, LayerKind, Scope};

/// Blackwell and later, for which upstream's `local` exempts expandable segments (sm_100 on).
const BEFORE_SM_100: [&str; 1] = ["h100"];

fn names(scope: &[Scope]) -> String {
    scope.iter().map(|s| s.name()).collect::<Vec<_>>().join(",")
}

/// `Some(text)` if the condition holds: a broken rule.
fn when(broken: bool, text: impl FnOnce() -> String) -> Option<String> {
    broken.then(text)
}

pub const RULES: &[Rule] = &[
    Rule {
        id: "R12",
        wrong: "--cuda_graph_scope full_iteration together with another name",
        remedy: "Name full_iteration alone: --cuda_graph_impl local --cuda_graph_scope full_iteration.",
        broken: |e| {
            when(e.graphs() && e.scope.contains(&Scope::FullIteration) && e.scope.len() > 1, || {
                format!(
                    "--cuda_graph_scope {}: full_iteration holds everything and stands alone",
                    names(&e.scope)
                )
            })
        },
    },
    Rule {
        id: "R11",
        wrong: "--cuda_graph_impl transformer_engine with the scope full_iteration",
        remedy: "Take --cuda_graph_impl local for full_iteration, or scopes of attn, mlp, moe, moe_router, moe_preprocess, mamba.",
        broken: |e| {
            when(e.te() && e.scope.contains(&Scope::FullIteration), || {
                "--cuda_graph_scope full_iteration: transformer_engine captures by layer, not the iteration"
                    .to_owned()
            })
        },
    },
    Rule {
        id: "R13",
        wrong: "--cuda_graph_impl local with a scope other than full_iteration, or with none",
        remedy: "Add --cuda_graph_scope full_iteration, or take --cuda_graph_impl transformer_engine for scopes by layer.",
        broken: |e| {
            when(e.implementation == GraphImpl::Local && !e.full_iteration(), || {
                let given = if e.scope.is_empty() {
                    "no scope".to_owned()
                } else {
                    format!("--cuda_graph_scope {}", names(&e.scope))
                };
                format!("--cuda_graph_impl local with {given}: local captures the full iteration only")
            })
        },
    },
    Rule {
        id: "R26",
        wrong: "the scopes moe and moe_router together",
        remedy: "Keep moe (drop-and-pad only) or moe_router, not both.",
        broken: |e| {
            when(e.has(Scope::Moe) && e.has(Scope::MoeRouter), || {
                format!("--cuda_graph_scope {}: moe already holds the router", names(&e.scope))
            })
        },
    },
    Rule {
        id: "R27",
        wrong: "the scope moe_preprocess without moe_router",
        remedy: "Add moe_router: --cuda_graph_scope moe_router,moe_preprocess.",
        broken: |e| {
            when(e.has(Scope::MoePreprocess) && !e.has(Scope::MoeRouter), || {
                format!(
                    "--cuda_graph_scope {}: moe_preprocess follows the router and needs it in the graph",
                    names(&e.scope)
                )
            })
        },
    },
    Rule {
        id: "R28",
        wrong: "a MoE scope on a model without experts",
        remedy: "Leave the MoE scopes out; attn and mlp fit a dense model, mamba and attn a hybrid one.",
        broken: |e| {
            when(e.te() && !e.moe() && (e.has(Scope::Moe) || e.has(Scope::MoeRouter)), || {
                format!(
                    "--cuda_graph_scope {}: {} has no experts (model.num_moe_experts {})",
                    names(&e.scope),
                    e.recipe,
                    e.experts()
                )
            })
        },
    },
    Rule {
        id: "R29",
        wrong: "the scope mlp on a model whose every layer has experts",
        remedy: "Leave mlp out; moe_router captures the dense front of a MoE layer.",
        broken: |e| {
            when(e.te() && e.has(Scope::Mlp) && e.moe() && e.layers_of(Scope::Mlp) == 0, || {
                format!(
                    "--cuda_graph_scope {}: all {} MLP layers of {} are MoE",
                    names(&e.scope),
                    e.layers_of(Scope::Moe),
                    e.recipe
                )
            })
        },
    },
    Rule {
        id: "R19",
        wrong: "--use_tokendrop true on the flex or allgather dispatcher, or with another balancing than aux_loss, seq_aux_loss, none",
        remedy: "Add model.moe_token_dispatcher_type=alltoall (and model.moe_router_load_balancing_type=aux_loss if that is what is named).",
        broken: |e| {
            let balancing = e.values.text("model.moe_router_load_balancing_type").unwrap_or("none");
            let fits =
                e.dispatcher() == "alltoall" && ["aux_loss", "seq_aux_loss", "none"].contains(&balancing);
            when(e.args.performance.use_tokendrop == Some(true) && e.moe() && !fits, || {
                format!(
                    "--use_tokendrop true with dispatcher {} and load balancing {balancing}",
                    e.dispatcher()
                )
            })
        },
    },
    Rule {
        id: "R30",
        wrong: "the scope moe without drop-and-pad on the alltoall dispatcher",
        remedy: "Add --use_tokendrop true model.moe_token_dispatcher_type=alltoall, or capture moe_router,moe_preprocess.",
        broken: |e| {
            when(e.te() && e.has(Scope::Moe) && (!e.drop_and_pad() || e.dispatcher() == "flex"), || {
                let factor = e.capacity_factor().map_or("unset".to_owned(), |f| f.to_string());
                let padded = e.values.on("model.moe_pad_expert_input_to_capacity");
                format!(
                    "--cuda_graph_scope moe: expert shapes must be static, but capacity factor is {factor}, padding to it {padded}, \
                     dispatcher {}",
                    e.dispatcher()
                )
            })
        },
    },
    Rule {
        id: "R30b",
        wrong: "padding experts to a capacity that is not set",
        remedy: "Set model.moe_expert_capacity_factor too, or --use_tokendrop true for both.",
        broken: |e| {
            when(
                e.moe()
                    && e.values.on("model.moe_pad_expert_input_to_capacity")
                    && e.capacity_factor().is_none(),
                || {
                    "model.moe_pad_expert_input_to_capacity=true without model.moe_expert_capacity_factor"
                        .to_owned()
                },
            )
        },
    },
    Rule {
        id: "R31",
        wrong: "the scope moe_preprocess where the alltoall dispatcher copies counts to the host inside it",
        remedy: "Capture moe_router alone, or make shapes static with --use_tokendrop true.",
        broken: |e| {
            let quantization = e.values.on("model.moe_router_padding_for_quantization");
            let copies = e.capacity_factor().is_some() || quantization;
            when(
                e.te()
                    && e.has(Scope::MoePreprocess)
                    && e.dispatcher() == "alltoall"
                    && !e.drop_and_pad()
                    && copies,
                || {
                    let why = if quantization {
                        "padding for quantization"
                    } else {
                        "a capacity factor without padding"
                    };
                    format!(
                        "--cuda_graph_scope {}: {why} copies counts to the host inside moe_preprocess",
                        names(&e.scope)
                    )
                },
            )
        },
    },
    Rule {
        id: "R63",
        wrong: "dropless experts in a whole-layer or full-iteration graph",
        remedy: "Capture attn,moe_router,moe_preprocess, or make shapes static: --use_tokendrop true model.moe_token_dispatcher_type=alltoall.",
        broken: |e| {
            let inside = (e.whole_layer() || e.full_iteration()) && e.moe() && e.layers_of(Scope::Moe) > 0;
            when(inside && !e.drop_and_pad() && !e.static_rank_rows(), || {
                let what = if e.full_iteration() {
                    "--cuda_graph_scope full_iteration"
                } else {
                    "--cuda_graph_impl transformer_engine without a scope"
                };
                format!(
                    "{what}: {} is a dropless MoE, whose dispatch reads token counts on the host",
                    e.recipe
                )
            })
        },
    },
    Rule {
        id: "R23",
        wrong: "model.cuda_graph_scope: the older word `full` beside other names",
        remedy: "Leave the list empty for whole layers ([full] alone means that), or take `full` out of it.",
        broken: |e| {
            when(e.values.list("model.cuda_graph_scope").contains(&"full"), || {
                "model.cuda_graph_scope names `full`, each whole layer, and parts of layers too".into()
            })
        },
    },
    Rule {
        id: "R25",
        wrong: "CPU offloading of activations together with graphs",
        remedy: "Leave -ol out (or -ol 0, where the recipe offloads), or take --cuda_graph_impl none.",
        broken: |e| {
            when(e.graphs() && e.values.on("model.cpu_offloading"), || {
                let n = e.values.int("model.cpu_offloading_num_layers").unwrap_or(0);
                format!(
                    "-ol {n} (model.cpu_offloading) with --cuda_graph_impl: a graph cannot move activations to the host"
                )
            })
        },
    },
    Rule {
        id: "R39",
        wrong: "a check for NaN losses with full-iteration capture",
        remedy: "Leave rerun_state_machine.check_for_nan_in_loss=true out.",
        broken: |e| {
            when(e.full_iteration() && e.values.on("rerun_state_machine.check_for_nan_in_loss"), || {
                "rerun_state_machine.check_for_nan_in_loss=true: the host cannot read the loss inside a full-iteration graph".to_owned()
            })
        },
    },
    Rule {
        id: "R40",
        wrong: "a check for NaN or large gradients with full-iteration capture",
        remedy: "Leave ddp.check_for_nan_in_grad=true and ddp.check_for_large_grads=true out.",
        broken: |e| {
            let keys = ["ddp.check_for_nan_in_grad", "ddp.check_for_large_grads"];
            let key = keys.into_iter().find(|k| e.values.on(k)).filter(|_| e.full_iteration())?;
            Some(format!("{key}=true: the host cannot read the gradient norm inside a full-iteration graph"))
        },
    },
    Rule {
        id: "R41",
        wrong: "graphs without the RNG tracker",
        remedy: "Give --cuda_graph_impl as a flag, which switches the tracker on, or set model.use_te_rng_tracker=true.",
        broken: |e| {
            when(e.graphs() && !e.te_rng_tracker, || {
                "model.use_te_rng_tracker and rng.te_rng_tracker are false: every replay would draw the same random numbers".to_owned()
            })
        },
    },
    Rule {
        id: "R45",
        wrong: "packed sequences of changing number in a graph that holds attention",
        remedy: "Leave attn out of --cuda_graph_scope, or set dataset.packed_sequence_specs.pad_cu_seqlens=true for a packed data set.",
        broken: |e| {
            when(e.packed && e.captured(Scope::Attn) && !e.pad_cu_seqlens, || {
                "--packed_sequence: the list of sequence starts changes its length, a captured attention cannot".to_owned()
            })
        },
    },
    Rule {
        id: "R55",
        wrong: "expandable segments without NCCL_GRAPH_REGISTER=0 (transformer_engine; local below sm_100)",
        remedy: "Set NCCL_GRAPH_REGISTER=0, or take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF.",
        broken: |e| {
            let enforced =
                e.te() || (e.implementation == GraphImpl::Local && BEFORE_SM_100.contains(&e.gpu.as_str()));
            when(enforced && e.expandable_segments && e.nccl_graph_register.as_deref() != Some("0"), || {
                let value = e.nccl_graph_register.as_deref().map_or("unset".to_owned(), |v| format!("`{v}`"));
                format!(
                    "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True and NCCL_GRAPH_REGISTER is {value}: upstream refuses graphs then"
                )
            })
        },
    },
    Rule {
        id: "R56",
        wrong: "a warm-up that is negative, or too few steps for warm-up, capture and one steady step",
        remedy: "Give -ms at least model.cuda_graph_warmup_steps + 2, or leave -ms out.",
        broken: |e| {
            let warmup = e.values.int("model.cuda_graph_warmup_steps").unwrap_or(0);
            when(e.graphs() && warmup < 0, || {
                format!("model.cuda_graph_warmup_steps={warmup}: the capture step would never come")
            })
            .or_else(|| {
                let steps = e.max_steps.filter(|s| e.graphs() && *s < warmup.saturating_add(2))?;
                Some(format!(
                    "-ms {steps} with {warmup} warm-up steps: one capture step and one steady step do not fit"
                ))
            })
        },
    },
    Rule {
        id: "R57",
        wrong: "a scope of which no name fits a layer of the model",
        remedy: "Name a scope that the model has: attn and mlp (dense), attn and moe_router (MoE), mamba (hybrid).",
        broken: |e| {
            when(e.te() && !e.scope.is_empty() && e.scope.iter().all(|s| e.layers_of(*s) == 0), || {
                format!(
                    "--cuda_graph_scope {}: {} has no such layer, the run would be eager",
                    names(&e.scope),
                    e.recipe
                )
            })
        },
    },
    Rule {
        id: "M22",
        wrong: "--first_k_dense_replace above the number of layers, or on a hybrid pattern",
        remedy: "Give a number from 0 to the number of layers less one; leave it out where there is a hybrid pattern.",
        broken: |e| {
            let k = e.args.general.first_k_dense_replace?;
            let n = i64::try_from(e.layers.len()).unwrap_or(i64::MAX);
            let hybrid = e.layers.iter().any(|l| {
                matches!(l, LayerKind::AttnOnly | LayerKind::MlpOnly | LayerKind::MoeOnly | LayerKind::Mamba)
            });
            when(hybrid, || {
                format!(
                    "--first_k_dense_replace {k}: the hybrid pattern of {} says what each layer is: edit model.hybrid_override_pattern",
                    e.recipe
                )
            })
            .or_else(|| {
                when(k < 0 || k >= n, || format!("--first_k_dense_replace {k}: {} has {n} layers", e.recipe))
            })
        },
    },
];
