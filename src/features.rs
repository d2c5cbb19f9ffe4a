//! What a recipe can ask for beyond the plain model: run in simpler form, or not built. What is in neither list is
//! modelled.
//!
//! An approximated feature is named in the row's `approximations`. A feature that is not built passes a dry run with
//! the notice `not_built`; only the run is refused. What columns of the row say already is told in a notice of its own.

use crate::config::LayerKind;
use crate::rules::Effective;

/// What becomes of a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The run does less or other work than upstream, in the way that `note` says.
    Approximated,
    /// There is no code.
    NotBuilt,
    /// It was asked for by an option, and the row has columns that say it: a notice for whoever reads the terminal.
    Told,
}

/// One feature.
pub struct Feature {
    /// Name in the row's `approximations`, or in the reason.
    pub name: &'static str,
    pub state: State,
    /// How it is approximated, or what to do in its place.
    pub note: &'static str,
    pub asked: fn(&Effective) -> bool,
}

const fn approximated(name: &'static str, note: &'static str, asked: fn(&Effective) -> bool) -> Feature {
    Feature { name, state: State::Approximated, note, asked }
}

const fn not_built(name: &'static str, note: &'static str, asked: fn(&Effective) -> bool) -> Feature {
    Feature { name, state: State::NotBuilt, note, asked }
}

const fn told(name: &'static str, note: &'static str, asked: fn(&Effective) -> bool) -> Feature {
    Feature { name, state: State::Told, note, asked }
}

/// The table.
pub const FEATURES: &[Feature] = &[
    told(
        "run_dtype_bf16",
        "--run_dtype bf16: the recipe's layout is run in bf16, not in the recipe's own type (columns recipe_dtype and compute_dtype)",
        |e| e.args.mbperf.run_dtype.is_some() && e.dtype != "bf16",
    ),
    approximated("rope_scaling", "unscaled rotary frequencies: other angles, the same work", |e| {
        let of = e.values.get("model.rope_scaling");
        !of.is_null()
            && !matches!(of.get("type").and_then(serde_json::Value::as_str), Some("llama3" | "yarn"))
    }),
    // Of a micro-batch of one sequence the loss by sequence is the loss over the micro-batch (Megatron-Core, `TopKRouter`:
    // `_apply_seq_aux_loss` divides by the sequences of the micro-batch what `_apply_aux_loss` takes over all its tokens).
    approximated("seq_aux_loss", "the balancing loss is over the micro-batch, not by sequence", |e| {
        e.values.text("model.moe_router_load_balancing_type") == Some("seq_aux_loss")
            && e.values.int("train.micro_batch_size") != Some(1)
    }),
    approximated(
        "global_aux_loss",
        "the balancing loss is over the micro-batch, not over all ranks and micro-batches",
        |e| e.values.text("model.moe_router_load_balancing_type") == Some("global_aux_loss"),
    ),
    approximated(
        "sparse_attention",
        "every earlier token is attended to, and there is no indexer that would choose some",
        |e| e.values.text("model.attention_variant") == Some("dsa"),
    ),
    approximated("vision_graphs", "the vision tower runs eagerly in both arms", |e| {
        let asked = e.values.text("model.vision_cuda_graph_impl").is_some_and(|i| i != "none");
        // A full-iteration graph holds the tower too.
        asked && e.values.is_set("model.vision") && e.implementation != crate::config::GraphImpl::Local
    }),
    approximated(
        "compressed_attention",
        "where upstream compresses keys every earlier token is attended to: no key compressors, no indexer",
        Effective::shared_kv,
    ),
    approximated("embedding_dropout", "hidden dropout leaves the embedding's output as it is", |e| {
        e.nonzero("model.hidden_dropout") && !e.args.mbperf.stack_only
    }),
    approximated("shared_expert_overlap", "the shared expert runs before the dispatch, not beside it", |e| {
        e.moe() && e.values.on("model.moe_shared_expert_overlap")
    }),
    approximated("tp_comm_overlap", "tensor-parallel collectives are not overlapped", |e| {
        e.tp() > 1 && e.values.on("comm_overlap.tp_comm_overlap")
    }),
    approximated("precision_aware_optimizer", "optimizer state is fp32", |e| {
        e.values.on("optimizer.use_precision_aware_optimizer")
    }),
    approximated(
        "gradient_accumulation_fusion",
        "weight gradients are accumulated by the product all the same",
        |e| !e.values.on("model.gradient_accumulation_fusion"),
    ),
    approximated("defer_embedding_wgrad", "the head's weight gradient is not deferred", |e| {
        e.values.on("comm_overlap.defer_embedding_wgrad_compute")
    }),
    not_built("kernels for this dtype", "add --run_dtype bf16 to run the recipe's layout in bf16", |e| {
        e.args.mbperf.run_dtype.is_none() && e.dtype != "bf16"
    }),
    not_built("Mamba layers with context parallelism", "give -cp 1", |e| {
        e.layers.contains(&LayerKind::Mamba) && crate::rules::layout_of(e).cp > 1
    }),
    not_built("a Mamba convolution of another width than 4", "set model.mamba_conv_kernel=4", |e| {
        e.layers.contains(&LayerKind::Mamba)
            && e.values
                .int("model.mamba_conv_kernel")
                .is_some_and(|k| k != crate::ops::mamba_conv::TAPS as i64)
    }),
    not_built("gated delta net layers with context parallelism", "give -cp 1", |e| {
        e.delta_net() && crate::rules::layout_of(e).cp > 1
    }),
    not_built(
        "a gated delta net convolution of another width than 4",
        "set model.linear_conv_kernel_dim=4",
        |e| {
            e.delta_net()
                && e.values
                    .int("model.linear_conv_kernel_dim")
                    .is_some_and(|k| k != crate::ops::mamba_conv::TAPS as i64)
        },
    ),
    not_built(
        "multi-latent attention of widths that its kernels lack",
        "choose model.qk_pos_emb_head_dim a power of two from 8 to 256, and model.qk_head_dim and model.v_head_dim multiples of 16 \
         (32 where qk_head_dim and qk_pos_emb_head_dim together are above 256, to 512), values no wider than keys",
        |e| {
            let n = |key: &str| e.values.int(key).and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
            let (nope, rotary, value) =
                (n("model.qk_head_dim"), n("model.qk_pos_emb_head_dim"), n("model.v_head_dim"));
            let kernels = crate::ops::mla_rope::has_kernels(nope, rotary, value)
                && crate::ops::attention::has_kernels(nope + rotary, value);
            e.values.on("model.multi_latent_attention") && !e.shared_kv() && !kernels
        },
    ),
    not_built("attention heads of a width that its kernels lack", "choose another model.kv_channels", |e| {
        let attends = e.count(&[LayerKind::Dense, LayerKind::Moe, LayerKind::AttnOnly]) > 0;
        let head = e.values.int("model.kv_channels").and_then(|n| usize::try_from(n).ok());
        let lacks = head.is_some_and(|n| !crate::ops::attention::has_kernels(n, n));
        attends && !e.shared_kv() && !e.own_keys() && lacks
    }),
    not_built("this attention variant", "set model.attention_variant=null", |e| {
        let built = ["dsa", crate::recipe::DELTA_NET, crate::recipe::SHARED_KV];
        e.values.text("model.attention_variant").is_some_and(|v| !built.contains(&v))
    }),
    not_built(
        "an output of DeepSeek-V4's attention that its groups do not divide, or a head or rotated part that its kernels lack",
        "change model.num_attention_heads, model.kv_channels or model.qk_pos_emb_head_dim",
        |e| {
            let n = |key: &str| e.values.int(key).unwrap_or(0);
            let groups = e.values.get("model.sparse_attention").get("o_groups");
            let groups = groups.and_then(serde_json::Value::as_i64).unwrap_or(1).max(1);
            let head = n("model.kv_channels");
            let (width, rotary) =
                (n("model.num_attention_heads").saturating_mul(head), n("model.qk_pos_emb_head_dim"));
            let whole = |n: i64| usize::try_from(n).unwrap_or(0);
            let kernels = crate::ops::shared_kv::has_kernels(whole(head), whole(rotary));
            e.shared_kv() && (width % groups != 0 || !kernels)
        },
    ),
    not_built(
        "DeepSeek-V4's attention over several tensor or context ranks, which upstream has not",
        "give -tp 1 -cp 1",
        |e| e.shared_kv() && (e.tp() > 1 || crate::rules::layout_of(e).cp > 1),
    ),
    not_built(
        "hyper-connections around other layers than DeepSeek-V4's, or with dropout",
        "set model.hyper_connections=null, or model.hidden_dropout=0",
        |e| {
            let other = !e.shared_kv()
                || e.layers.iter().any(|l| *l != LayerKind::Moe)
                || e.values.is_set("model.moe_latent_size")
                || e.nonzero("model.hidden_dropout");
            e.values.is_set("model.hyper_connections") && other
        },
    ),
    not_built("a fixed sink in attention's softmax", "set model.softmax_type=vanilla or learnable", |e| {
        e.values.text("model.softmax_type").is_some_and(|t| t != "vanilla" && t != "learnable")
    }),
    not_built(
        "sinks or windows in multi-latent attention",
        "set model.softmax_type=vanilla model.window_size=null",
        |e| {
            let sinks = e.values.text("model.softmax_type") == Some("learnable");
            e.values.on("model.multi_latent_attention") && (sinks || e.values.is_set("model.window_size"))
        },
    ),
    not_built(
        "windows that look ahead, or on layers named one by one",
        "set model.window_size=null to run with full attention",
        |e| {
            let size = e.values.get("model.window_size");
            let ahead = size.get(1).and_then(serde_json::Value::as_i64);
            let layers = "model.window_attn_skip_freq";
            e.values.is_set("model.window_size")
                && (ahead != Some(0) || (e.values.is_set(layers) && e.values.int(layers).is_none()))
        },
    ),
    not_built(
        "a diffusion transformer with pipeline stages, experts, sinks or windows, or without norms over all heads",
        "give -pp 1, and set model.qk_layernorm=true model.softmax_type=vanilla model.window_size=null",
        |e| {
            let v = &e.values;
            let of = v.get("model.diffusion");
            let on = |key: &str| of.get(key).and_then(serde_json::Value::as_bool).unwrap_or(false);
            let plain = e.layers.iter().all(|l| *l == LayerKind::Dense)
                && v.on("model.qk_layernorm")
                && v.on("model.add_bias_linear")
                && on("layernorm_across_heads")
                && on("rotary_interleaved")
                && v.text("model.activation") == Some("gelu")
                && !v.on("model.multi_latent_attention")
                && v.text("model.softmax_type").is_none_or(|t| t == "vanilla")
                && !v.is_set("model.window_size")
                && !e.nonzero("model.attention_dropout")
                && !e.nonzero("model.hidden_dropout")
                && v.int("model.mtp_num_layers").unwrap_or(0) == 0;
            !of.is_null() && (!plain || crate::rules::layout_of(e).pp > 1)
        },
    ),
    not_built("rotary embedding of another kind than rope", "set model.position_embedding_type=rope", |e| {
        let scaling = e.values.get("model.rope_scaling");
        let yarn = scaling.get("type").and_then(serde_json::Value::as_str) == Some("yarn");
        let sections = e.values.is_set("model.mrope_section");
        let built =
            |t: &str| matches!(t, "rope" | "none") || (t == "yarn" && yarn) || (t == "mrope" && sections);
        e.values.text("model.position_embedding_type").is_some_and(|t| !built(t))
    }),
    not_built(
        "rotary embedding of one axis beside an image tower",
        "set model.position_embedding_type=mrope",
        |e| {
            let kind = e.values.text("model.position_embedding_type").unwrap_or("rope");
            e.values.is_set("model.vision") && (kind == "rope" || kind == "yarn")
        },
    ),
    not_built(
        "this pattern of multi-token prediction",
        "write M, *, - or E for each layer in model.mtp_hybrid_override_pattern, or set model.mtp_num_layers=0",
        |e| {
            let pattern = e.values.text("model.mtp_hybrid_override_pattern");
            e.values.int("model.mtp_num_layers").unwrap_or(0) > 0
                && pattern.is_some_and(|p| p.is_empty() || crate::recipe::hybrid_kinds(p).is_err())
        },
    ),
    not_built(
        "an activation other than SwiGLU (clamped too), squared ReLU and clamped quick GEGLU",
        "set model.activation=swiglu",
        |e| {
            let built = ["swiglu", "swiglu_clamped", "squared_relu", "quick_geglu_clamped"];
            let of_diffusion = |a: &str| a == "gelu" && e.values.is_set("model.diffusion");
            e.values.text("model.activation").is_some_and(|a| !built.contains(&a) && !of_diffusion(a))
        },
    ),
    not_built(
        "a gate that model.activation does not have, or an activation without its gate",
        "leave model.gated_linear_unit out: swiglu is gated, squared_relu is not",
        |e| {
            let key = "model.gated_linear_unit";
            e.explicit.contains(key) && e.values.on(key) != e.gated()
        },
    ),
    not_built("a norm other than RMSNorm", "set model.normalization=RMSNorm", |e| {
        e.values.text("model.normalization").is_some_and(|n| n != "RMSNorm")
    }),
    not_built(
        "biases outside plain attention, MLP and experts",
        "set model.add_bias_linear=false model.add_qkv_bias=false",
        |e| {
            let v = &e.values;
            let other = e.layers.contains(&LayerKind::Mamba) || e.delta_net() || e.shared_expert();
            (v.on("model.add_bias_linear") || v.on("model.add_qkv_bias"))
                && (other || v.on("model.multi_latent_attention") || v.is_set("model.moe_latent_size"))
        },
    ),
    not_built("this router score function", "set model.moe_router_score_function=softmax", |e| {
        e.moe()
            && !matches!(
                e.values.text("model.moe_router_score_function"),
                None | Some("softmax" | "sigmoid" | "sqrtsoftplus")
            )
    }),
    not_built("this load balancing", "set model.moe_router_load_balancing_type=aux_loss", |e| {
        e.values.text("model.moe_router_load_balancing_type") == Some("sinkhorn")
    }),
    not_built("layers routed by token ids over several tensor ranks", "give -tp 1", |e| {
        e.tp() > 1 && e.values.int("model.moe_n_hash_layers").unwrap_or(0) > 0
    }),
    not_built("a router z-loss", "set model.moe_z_loss_coeff=null", |e| e.nonzero("model.moe_z_loss_coeff")),
    not_built("router input jitter", "set model.moe_input_jitter_eps=null", |e| {
        e.nonzero("model.moe_input_jitter_eps")
    }),
    not_built("the allgather dispatcher", "set model.moe_token_dispatcher_type=alltoall", |e| {
        e.moe() && e.dispatcher() == "allgather"
    }),
    not_built(
        "a rank capacity factor without the flex dispatcher and HybridEP",
        "set model.moe_expert_rank_capacity_factor=null, or --moe_flex_dispatcher_backend hybridep",
        |e| e.moe() && e.values.is_set("model.moe_expert_rank_capacity_factor") && !e.static_rank_rows(),
    ),
    not_built(
        "one product an expert with a rank capacity factor, which leaves row counts on the device",
        "give --expert_gemm grouped",
        |e| {
            let dropless = e.moe() && !e.drop_and_pad() && e.static_rank_rows();
            dropless && e.args.mbperf.expert_gemm == crate::config::ExpertGemm::PerExpert
        },
    ),
    not_built("paged stash", "set model.moe_paged_stash=false", |e| e.values.on("model.moe_paged_stash")),
    not_built("tensor-parallel experts", "give -et 1", |e| e.moe() && e.etp() > 1),
    not_built(
        "offload of activations",
        "give -ol 0, and model.fine_grained_activation_offloading=false",
        |e| e.values.on("model.cpu_offloading") || e.values.on("model.fine_grained_activation_offloading"),
    ),
    not_built("overlap of the expert all-to-all", "give --moe_a2a_overlap false", |e| {
        e.ep_overlap() || e.delay_wgrad()
    }),
    not_built("an optimizer other than Adam", "give --optimizer_type adam, or --optimizer none", |e| {
        e.args.mbperf.optimizer == crate::args::OptimizerChoice::Adam
            && e.values.text("optimizer.optimizer").is_some_and(|o| o != "adam")
    }),
    not_built("a graph of the optimizer", "set optimizer.optimizer_cuda_graph=false", |e| {
        e.values.on("optimizer.optimizer_cuda_graph")
    }),
    not_built("FSDP", "give --use_megatron_fsdp false", |e| e.values.on("ddp.use_megatron_fsdp")),
    not_built("NCCL user buffers", "give --nccl_ub false", |e| e.values.on("ddp.nccl_ub")),
    not_built(
        "packed sequences",
        "leave --packed_sequence and --data out, set dataset.packed_sequence_specs.packed_sequence_size=null",
        |e| e.packed,
    ),
    not_built("LoRA", "choose --task pretrain", |e| e.values.is_set("peft.scheme")),
];

/// What the row's columns say already, by the notice's name and words.
pub fn told_of(e: &Effective) -> impl Iterator<Item = (&'static str, &'static str)> {
    FEATURES.iter().filter(|f| f.state == State::Told && (f.asked)(e)).map(|f| (f.name, f.note))
}

/// The approximations by name, and the reasons why there is no code, each with what to do.
pub fn sort(e: &Effective) -> (Vec<String>, Vec<String>) {
    let of = |state: State| FEATURES.iter().filter(move |f| f.state == state && (f.asked)(e));
    let approximations = of(State::Approximated).map(|f| f.name.to_owned()).collect();
    let reasons = of(State::NotBuilt).map(|f| format!("{} not built yet: {}", f.name, f.note)).collect();
    (approximations, reasons)
}

#[cfg(test)]
mod tests {
    use crate::args::{self, Command};
    use crate::overrides;
    use crate::recipe::Catalogue;

    /// What the runnable configuration of a line approximates.
    fn approximations(line: &str) -> Vec<String> {
        let catalogue = Catalogue::load(None).unwrap();
        let argv = ["mbperf"].into_iter().chain(line.split_whitespace()).map(String::from);
        let Ok(Command::Run(args)) = args::parse(argv) else { panic!("{line}") };
        let cfg = overrides::resolve(&args, &catalogue, &|_| None).unwrap().config;
        assert!(cfg.not_built.is_empty(), "{line}: {:?}", cfg.not_built);
        cfg.approximations
    }

    /// Another type than the recipe's is what was asked for, and two columns say it: no approximation, but a notice.
    #[test]
    fn another_type_is_told_and_no_approximation() {
        let catalogue = Catalogue::load(None).unwrap();
        let told = |line: &str| {
            let argv = ["mbperf"].into_iter().chain(line.split_whitespace()).map(String::from);
            let Ok(Command::Run(args)) = args::parse(argv) else { panic!("{line}") };
            let r = overrides::resolve(&args, &catalogue, &|_| None).unwrap();
            assert!(!r.config.approximations.iter().any(|a| a.contains("bf16")), "{line}");
            let notice = r.notices.iter().find(|n| n.id == "run_dtype_bf16");
            notice.is_some_and(|n| n.message.contains("in bf16, not in the recipe's own type"))
        };
        let other = "-m nemotronh -mr nemotronh_56b -g h100 -c fp8_cs comm_overlap.tp_comm_overlap=false";
        assert!(told(&format!("{other} --run_dtype bf16")));
        assert!(!told(other));
        assert!(!told("-m llama -mr llama3_8b -g h100 --run_dtype bf16"));
        assert_eq!(approximations(&format!("{other} --run_dtype bf16")), Vec::<String>::new());
    }

    /// A tower's graphs are named for recipes that ask for them, and where nothing else holds the tower.
    #[test]
    fn graphs_of_a_tower_are_approximated_only_where_they_are_asked_for() {
        let named = |line: &str| approximations(line).iter().any(|a| a == "vision_graphs");
        assert!(named("-m qwen_vl -mr qwen35_vl_35b_a3b -g h100"));
        assert!(!named("-m qwen_vl -mr qwen35_vl_35b_a3b -g b200"));
        assert!(!named("-m qwen_vl -mr qwen3_vl_30b_a3b -g b200"));
        assert!(!named("-m wan -mr wan_14b -g h100"));
    }

    /// One sequence is the whole micro-batch, several are not.
    #[test]
    fn a_loss_by_sequence_is_modelled_where_a_micro_batch_has_one() {
        let nano = "-m nemotronh -mr nemotron_3_nano -g h100";
        let aux = |line: &str| {
            let all = approximations(line);
            all.into_iter().filter(|a| a.ends_with("aux_loss")).collect::<Vec<_>>().join(",")
        };
        assert_eq!(aux(nano), "");
        assert_eq!(aux(&format!("{nano} -mb 2")), "seq_aux_loss");
        assert_eq!(aux("-m qwen -mr qwen3_next_80b_a3b -g h100"), "global_aux_loss");
        assert_eq!(aux("-m qwen -mr qwen3_30b_a3b -g h100"), "");
    }
}
