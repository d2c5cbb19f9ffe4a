//! Settings that the user gave and that change nothing in what is run. They are found by leaving each of them out: where
//! the same is run without it, and nothing was said about it, it did nothing. A table says why, and what becomes of it; a
//! key that is in no row is refused all the same, so that a new key cannot be taken in silence.
//!
//! A recipe's own settings are not looked at, nor a setting that says what is in force without it.

use super::{Configured, Notice, Setting, UsageError};
use crate::config::{Activation, Ddp, LayerKind, RunConfig, Scope};
use crate::rules::{self, Effective, off};
use serde_json::Value;

/// What becomes of a setting that changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Treatment {
    /// It says how mbperf runs, or what has been refused as not built already: it passes.
    Fact,
    /// It is for the host, or for jobs around the step: a notice says so.
    Told,
    /// It asks for another computation, for which there is no code: a dry run passes.
    NotBuilt,
    /// It asks for something of a part that the run has not, or is said in another way: exit 2.
    Refused,
}

use Treatment::{Fact, NotBuilt, Refused, Told};

/// Some keys, the values and configurations that the row is about, and why.
struct Row {
    /// Whole keys, or beginnings of keys that end in `_` or `.`.
    keys: &'static [&'static str],
    of: fn(&Effective, &Value) -> bool,
    treatment: Treatment,
    /// The feature and what to do (`NotBuilt`, a colon between), or why there is no effect.
    text: &'static str,
}

const fn row(
    treatment: Treatment,
    keys: &'static [&'static str],
    of: fn(&Effective, &Value) -> bool,
    text: &'static str,
) -> Row {
    Row { keys, of, treatment, text }
}

fn any(_: &Effective, _: &Value) -> bool {
    true
}

fn says_off(_: &Effective, value: &Value) -> bool {
    off(value)
}

fn says_on(_: &Effective, value: &Value) -> bool {
    value == &Value::Bool(true)
}

fn in_bf16(e: &Effective, _: &Value) -> bool {
    e.args.mbperf.run_dtype.is_some()
}

fn offloads(e: &Effective, _: &Value) -> bool {
    e.values.on("model.cpu_offloading") || e.values.on("model.fine_grained_activation_offloading")
}

fn fsdp(e: &Effective, _: &Value) -> bool {
    e.values.on("ddp.use_megatron_fsdp")
}

/// Attention of another kind than plain one, which has its own projections.
fn other_attention(e: &Effective) -> bool {
    e.values.on("model.multi_latent_attention") || e.shared_kv() || e.values.is_set("model.diffusion")
}

const RECOMPUTE: &[&str] =
    &["model.recompute_modules", "model.recompute_method", "model.recompute_num_layers"];
const OF_FSDP: &[&str] = &[
    "ddp.num_buckets",
    "ddp.fsdp_double_buffer",
    "ddp.data_parallel_sharding_strategy",
    "ddp.outer_dp_sharding_strategy",
];

/// The first row that a setting fits is the one that counts.
#[rustfmt::skip]
const TABLE: &[Row] = &[
    // How mbperf runs anyway.
    // Where it contradicts the activation, `features` has it.
    row(Fact, &["model.gated_linear_unit"], any, ""),
    row(Fact, &["model.moe_expert_capacity_factor"], |e, _| e.capacity_factor().is_none(), ""),
    row(Fact, &["model.apply_rope_fusion", "model.cross_entropy_loss_fusion", "model.moe_permute_fusion", "model.moe_router_fusion"],
        says_on, ""),
    row(NotBuilt, &["model.apply_rope_fusion"], any, "an unfused rotary embedding: leave model.apply_rope_fusion=false out"),
    row(NotBuilt, &["model.cross_entropy_loss_fusion"], any,
        "an unfused cross-entropy: leave model.cross_entropy_loss_fusion=false out"),
    row(NotBuilt, &["model.moe_permute_fusion"], any, "an unfused permutation: leave model.moe_permute_fusion=false out"),
    row(NotBuilt, &["model.moe_router_fusion"], any, "an unfused router: leave model.moe_router_fusion=false out"),
    row(Refused, &["model.cross_entropy_fusion_impl"], any, "mbperf has one fused cross-entropy, of its own"),
    row(Fact, &["model.attention_backend"], |_, v| v.is_null() || v == "auto", ""),
    row(Refused, &["model.attention_backend"], any,
        "mbperf's kernels are not Transformer Engine's: --attention_backend chooses between its own and cuDNN's"),
    row(Fact, &["model.moe_router_dtype"], |_, v| v == "fp32" || v == "float32", ""),
    row(NotBuilt, &["model.moe_router_dtype"], any,
        "a router in another type than fp32: set model.moe_router_dtype=fp32"),
    row(Refused, &["model.moe_grouped_gemm"], any,
        "--expert_gemm says whether experts are one grouped product (grouped) or one each (per_expert)"),
    row(Fact, &[
        "model.use_transformer_engine_op_fuser", "model.high_priority_a2a_comm_stream",
        "model.moe_mlp_glu_interleave_size", "model.moe_router_padding_for_quantization",
        "model.moe_pad_experts_for_cuda_graph_inference", "comm_overlap.overlap_param_gather_with_optimizer_step",
        "model.moe_flex_dispatcher_num_sms", "model.moe_hybridep_num_sms",
    ], says_off, ""),
    row(NotBuilt, &["model.use_transformer_engine_op_fuser"], any,
        "Transformer Engine's operation fuser: set model.use_transformer_engine_op_fuser=false"),
    row(Refused, &["model.high_priority_a2a_comm_stream"], |e, _| !e.moe(), "the model has no experts, so no all-to-all"),
    row(NotBuilt, &["model.high_priority_a2a_comm_stream"], any,
        "an all-to-all on a stream of high priority: set model.high_priority_a2a_comm_stream=false"),
    row(NotBuilt, &["model.moe_mlp_glu_interleave_size"], any,
        "interleaved gate and up columns: set model.moe_mlp_glu_interleave_size=null"),
    row(NotBuilt, &["model.moe_router_padding_for_quantization"], any,
        "padding of experts' rows for low-precision products: set model.moe_router_padding_for_quantization=false"),
    row(Refused, &["model.moe_pad_experts_for_cuda_graph_inference"], any, "no inference is run"),
    // Number formats.
    row(Told, &["mixed_precision."], in_bf16, "--run_dtype bf16 runs all in bf16"),
    row(NotBuilt, &["mixed_precision."], any,
        "another number format than the recipe's by key: leave mixed_precision settings out (-c chooses the recipe's), \
         --run_dtype bf16 runs any layout in bf16"),
    // Data parallelism.
    row(Fact, OF_FSDP, fsdp, ""),
    row(Fact, OF_FSDP, |_, v| off(v) || v == "no_shard", ""),
    row(NotBuilt, OF_FSDP, any, "sharding by FSDP and its buffers: leave FSDP's ddp settings out"),
    // Refused as not built by either of the two.
    row(Fact, &["comm_overlap.delay_wgrad_compute", "comm_overlap.overlap_moe_expert_parallel_comm"],
        |e, _| e.ep_overlap() || e.delay_wgrad(), ""),
    row(NotBuilt, &["ddp.num_distributed_optimizer_instances"], any,
        "several copies of the sharded optimizer state: set ddp.num_distributed_optimizer_instances=1"),
    row(Told, &["ddp.overlap_param_gather"], any, "parameters are gathered after the optimizer, in the same step"),
    row(NotBuilt, &["comm_overlap.overlap_param_gather_with_optimizer_step"], any,
        "a parameter gather beside the optimizer: set comm_overlap.overlap_param_gather_with_optimizer_step=false"),
    row(Told, &["comm_overlap.wgrad_deferral_limit"], |e, _| e.values.on("comm_overlap.defer_embedding_wgrad_compute"),
        "the head's weight gradient is not deferred"),
    row(Refused, &["comm_overlap.wgrad_deferral_limit"], any,
        "comm_overlap.defer_embedding_wgrad_compute is off, so nothing is deferred"),
    row(Refused, &["comm_overlap.tp_comm_overlap", "model.sequence_parallel"], |e, _| e.tp() == 1,
        "-tp 1: there are no tensor-parallel ranks"),
    row(Refused, &["ddp.use_distributed_optimizer", "ddp.overlap_grad_reduce", "ddp.bucket_size"], any,
        "it says how several processes (--nproc_per_node) reduce gradients, and this is one"),
    row(Fact, &["model.expert_tensor_parallel_size"], |_, v| v == 1, ""),
    // Pipeline.
    row(Refused, &["model.account_for_embedding_in_pipeline_split", "model.account_for_loss_in_pipeline_split",
        "model.num_layers_in_first_pipeline_stage", "model.num_layers_in_last_pipeline_stage",
        "model.pipeline_model_parallel_layout"], |e, _| e.pp() == 1,
        "-pp 1: there are no pipeline stages to split layers over"),
    row(Refused, &["model.microbatch_group_size_per_vp_stage"], any, "-vp is off: there is no interleaved order"),
    // Recompute and offload.
    row(Fact, &["model.recompute_granularity"], says_off, ""),
    row(Told, &["model.recompute_granularity"], any, "model.recompute_modules names no module"),
    row(Refused, RECOMPUTE, |e, _| !e.values.is_set("model.recompute_granularity"),
        "model.recompute_granularity is null, so nothing is recomputed: set it too (full or selective)"),
    row(Refused, RECOMPUTE, any, "it is for the other model.recompute_granularity (modules: selective; the rest: full)"),
    row(Refused, &["model.mhc_recompute_layer_num"], any, "mhc is not among model.recompute_modules"),
    row(Fact, &["model.offload_modules", "model.fine_grained_offloading_max_inflight_offloads",
        "model.cpu_offloading_num_layers"], offloads, ""),
    row(Refused, &["model.offload_modules", "model.fine_grained_offloading_max_inflight_offloads"], any,
        "model.fine_grained_activation_offloading is off, so nothing is offloaded"),
    row(Refused, &["model.cpu_offloading_num_layers"], any,
        "model.cpu_offloading is off, so nothing is offloaded (-ol N offloads N layers)"),
    // Parts that a model has, read in another way.
    row(Refused, &["model.glu_linear_offset", "model.activation_func_clamp_value"], any,
        "only clamped activations read it (quick_geglu_clamped both, swiglu_clamped the clamp)"),
    row(NotBuilt, &["model.attention_output_gate"], |e, _| other_attention(e),
        "an output gate of multi-latent attention or of a diffusion transformer: set model.attention_output_gate=false"),
    row(NotBuilt, &["model.qk_layernorm"], |e, _| e.shared_kv(),
        "DeepSeek-V4's attention without norms of queries and keys: set model.qk_layernorm=true"),
    row(NotBuilt, &["model.num_query_groups"], |e, _| other_attention(e),
        "query groups where attention has its own keys (multi-latent, diffusion): leave model.num_query_groups out"),
    row(Refused, &["model.kv_channels", "model.num_query_groups", "model.num_attention_heads"], any,
        "attention of this model has its own widths"),
    row(Refused, &["model.yarn_original_max_position_embeddings"], any,
        "the group model.rope_scaling of the recipe file says it (original_max_position_embeddings)"),
    row(Refused, &["model.mrope_section", "model.position_embedding_type"],
        |e, _| !other_attention(e) && !e.values.is_set("model.vision") && e.values.text("model.position_embedding_type") != Some("none"),
        "without an image tower a token has one position, so that mrope and its sections are rope"),
    row(Refused, &["model.rotary_base", "model.rotary_percent", "model.mrope_section", "model.position_embedding_type"], any,
        "attention of this model rotates nothing, or in a way of its own"),
    row(Refused, &["model.add_qkv_bias"], any, "model.add_bias_linear=true gives queries, keys and values their bias"),
    row(Refused, &["model.ffn_hidden_size"], any, "no layer has a dense MLP"),
    row(Refused, &["model.mtp_use_repeated_layer"], any, "there are no two depths of multi-token prediction"),
    row(Refused, &["model.vocab_size", "model.make_vocab_size_divisible_by", "model.should_pad_vocab",
        "model.share_embeddings_and_output_weights", "model.layernorm_zero_centered_gamma"],
        |e, _| e.values.is_set("model.diffusion"), "a diffusion transformer has no vocabulary, and no such norms"),
    row(Refused, &["model.mamba_expand"], any, "model.mamba_num_heads times model.mamba_head_dim is the inner width"),
    row(Refused, &["model.moe_layer_freq"], any,
        "model.hybrid_override_pattern says which layers have experts: edit the pattern"),
    row(Refused, &["model.moe_flex_dispatcher_backend"], any,
        "model.moe_token_dispatcher_type is not flex: --moe_flex_dispatcher_backend sets both"),
    row(Refused, &["model.moe_flex_dispatcher_num_sms", "model.moe_hybridep_num_sms"], |e, _| e.dispatcher() != "flex",
        "model.moe_token_dispatcher_type is not flex"),
    row(NotBuilt, &["model.moe_flex_dispatcher_num_sms", "model.moe_hybridep_num_sms"], any,
        "a dispatcher that takes a number of SMs: leave it out"),
    row(Refused, &["model.moe_token_drop_policy"], any, "no token is dropped (model.moe_expert_capacity_factor)"),
    row(Refused, &["model.moe_router_bias_update_rate"], any, "model.moe_router_enable_expert_bias is off"),
    row(Refused, &["model.moe_aux_loss_coeff"], any, "model.moe_router_load_balancing_type has no such loss"),
    row(Refused, &["model.moe_router_load_balancing_type"], any, "model.moe_aux_loss_coeff is 0: there is no such loss"),
    row(Refused, &["model.moe_router_pre_softmax"], any, "model.moe_router_score_function is not softmax"),
    row(Refused, &["model.make_vocab_size_divisible_by", "model.should_pad_vocab"], any,
        "the vocabulary is a multiple already, or is not padded (model.should_pad_vocab)"),
    row(Refused, &["model.moe_", "model.num_moe_experts", "model.expert_tensor_parallel_size"],
        |e, _| e.layers_of(Scope::Moe) == 0, "no layer has experts"),
    row(Told, &["rng.seed"], |e, _| e.given("seed"), "--seed wins"),
    row(Told, &["model.vision_cuda_graph_impl"], any, "the tower runs eagerly whichever it names"),
    row(Fact, &["dataset.packed_sequence_specs."], |e, _| e.packed, ""),
    row(Refused, &["dataset.packed_sequence_specs."], any, "no sequences are packed"),
    row(Fact, &["peft."], any, ""),
    // Around the step: `mbperf rules` lists them.
    row(Told, HARNESS, any, "taken for the harness's sake"),
    row(Told, &["model.cuda_graph_use_single_mempool"], any, "all graphs use the program's one piece of memory anyway"),
    row(Told, CHECKS, any, "mbperf adds no look of the host at numbers to a step"),
];

/// Settings of the host and of jobs around the step.
pub const HARNESS: &[&str] = &["train.manual_gc", "train.manual_gc_interval", "dataset.kind"];
/// Looks at numbers every step.
const CHECKS: &[&str] =
    &["rerun_state_machine.check_for_nan_in_loss", "ddp.check_for_nan_in_grad", "ddp.check_for_large_grads"];

/// Names of what is not built and asked for by a key that nothing else reads.
pub fn not_built() -> impl Iterator<Item = &'static str> {
    let names = TABLE.iter().filter(|r| r.treatment == NotBuilt);
    names.filter_map(|r| r.text.split_once(": ")).map(|(name, _)| name)
}

/// Settings that the coercion of graphs decides and tells of in its own notices.
const COERCED: &[&str] = &["model.cuda_graph_scope", "model.use_te_rng_tracker", "rng.te_rng_tracker"];

/// Settings in whose place an option was taken.
fn overruled(e: &Effective, settings: &[Setting]) -> Vec<Notice> {
    let other = settings.iter().filter(|(key, value)| e.values.get(key) != value && !COERCED.contains(key));
    let told = other.map(|(key, value)| {
        let (said, now) = (crate::keys::short(&shown(value)), shown(e.values.get(key)));
        Notice::new(
            "setting_overruled",
            format!("{key}={said}: options win, {} is in force", crate::keys::short(&now)),
        )
    });
    told.collect()
}

/// The row of a setting.
fn find(e: &Effective, key: &str, value: &Value) -> Option<&'static Row> {
    let fits = |k: &&'static str| if k.ends_with(['_', '.']) { key.starts_with(*k) } else { key == *k };
    TABLE.iter().find(|r| r.keys.iter().any(&fits) && (r.of)(e, value))
}

/// What is run, without the settings that nothing of this configuration reads.
fn what_is_run(c: &Configured) -> (RunConfig, Vec<Notice>, Option<i64>) {
    let mut cfg = c.config.clone();
    let kinds: Vec<LayerKind> = cfg.model.layers.iter().chain(&cfg.model.mtp_layers).copied().collect();
    let no = |of: &[LayerKind]| !kinds.iter().any(|k| of.contains(k));
    let m = &mut cfg.model;
    if no(&[LayerKind::Dense, LayerKind::MlpOnly, LayerKind::DeltaDense]) {
        m.ffn_hidden_size = 0;
    }
    if no(&[LayerKind::Moe, LayerKind::MoeOnly, LayerKind::DeltaMoe]) {
        m.moe = None;
    }
    if no(&[
        LayerKind::Dense,
        LayerKind::Moe,
        LayerKind::AttnOnly,
        LayerKind::DeltaDense,
        LayerKind::DeltaMoe,
    ]) {
        m.rotary_percent = 0.0;
    }
    // These have rotations of their own, and a tower alone turns tokens by three axes.
    if m.mla.is_some() || m.shared_kv.is_some() || m.diffusion.is_some() {
        m.rotary_percent = 1.0;
    }
    if m.vision.is_none() {
        m.mrope_section = None;
    }
    m.add_qkv_bias |= m.add_bias_linear;
    m.qk_layernorm |= m.shared_kv.is_some();
    m.mtp_repeated &= m.mtp_num_layers > 1;
    let clamped = matches!(m.activation, Activation::QuickGeglu | Activation::SwigluClamped);
    if !clamped {
        m.activation_clamp = None;
    }
    if m.activation != Activation::QuickGeglu {
        m.glu_linear_offset = 0.0;
    }
    if m.mla.is_some() {
        (m.num_query_groups, m.kv_channels) = (0, 0);
    }
    if m.diffusion.is_some() {
        (m.num_query_groups, m.vocab_size) = (0, 0);
        (m.tied_embeddings, m.zero_centered_norms) = (false, false);
    }
    if other_attention(&c.effective) {
        m.attention_output_gate = false;
    }
    if m.rotary_percent == 0.0 {
        (m.rotary_base, m.rope_scaling, m.mrope_section) = (0.0, None, None);
    }
    if let Some(moe) = &mut m.moe {
        if moe.capacity_factor.is_none() {
            moe.drop_by_position = false;
        }
        if !moe.expert_bias {
            moe.bias_update_rate = 0.0;
        }
        if matches!(moe.load_balancing_type.as_str(), "none" | "noaux_tc") {
            moe.aux_loss_coeff = 0.0;
        }
        if moe.aux_loss_coeff == 0.0 {
            "none".clone_into(&mut moe.load_balancing_type);
        }
        moe.grouped_gemm = false;
    }
    if !cfg.recompute.modules.iter().any(|m| m == "mhc") {
        cfg.recompute.mhc_layers = None;
    }
    match cfg.recompute.granularity.as_deref() {
        Some("selective") if cfg.recompute.modules.is_empty() => cfg.recompute.granularity = None,
        Some("full") => cfg.recompute.modules.clear(),
        _ => (cfg.recompute.method, cfg.recompute.num_layers) = (None, None),
    }
    let p = &mut cfg.parallel;
    if p.vp == 1 {
        p.microbatch_group_size = None;
    }
    if p.pp == 1 {
        (p.account_for_embedding, p.account_for_loss, p.pipeline_layout) = (false, false, None);
        (p.first_stage_layers, p.last_stage_layers) = (None, None);
    }
    if cfg.model.moe.is_none() {
        p.etp = 1;
    }
    if !c.effective.several_processes {
        p.ddp = Ddp::default();
    }
    (cfg, c.notices.clone(), c.effective.max_steps)
}

/// Judges the settings that change nothing: refused, told, or not built. `again` configures with other settings.
///
/// # Errors
/// The rule's violation.
pub fn treat(
    c: &mut Configured,
    recipe: &rules::Values,
    settings: &[Setting],
    again: &dyn Fn(&[Setting]) -> Result<Configured, UsageError>,
) -> Result<(), UsageError> {
    let e = &c.effective;
    let asked: Vec<&Setting> = settings
        .iter()
        .filter(|(key, value)| {
            let before = recipe.get(key);
            // Options win over settings: `overruled` tells those.
            e.values.get(key) == value && before != value && !(off(before) && off(value))
        })
        .collect();
    let overruled = overruled(e, settings);
    if asked.is_empty() {
        c.notices.extend(overruled);
        return Ok(());
    }
    let without = |left_out: &[&Setting]| {
        let rest: Vec<Setting> =
            settings.iter().filter(|(k, _)| !left_out.iter().any(|(l, _)| l == k)).cloned().collect();
        again(&rest).ok()
    };
    let run = what_is_run(c);
    let same = |other: &Configured| what_is_run(other) == run;
    // What is in force without it too, by another setting or an option, is stated and not asked for.
    let nothing =
        |(key, value): &Setting, other: &Configured| other.effective.values.get(key) != value && same(other);
    let mut idle: Vec<&Setting> =
        asked.into_iter().filter(|s| without(&[*s]).is_some_and(|other| nothing(s, &other))).collect();
    // Two that say the same are idle one by one, and not both together.
    if idle.len() > 1 {
        let none = without(&idle).map(|c| what_is_run(&c));
        if none.as_ref() != Some(&run) {
            let all = idle.clone();
            idle.retain(|s| {
                let others: Vec<&Setting> = all.iter().copied().filter(|o| o.0 != s.0).collect();
                without(&others).map(|c| what_is_run(&c)) == none
            });
        }
    }
    // A recipe that leaves a key null has a default in force: who gives just that states it, if the key is read at all.
    let read = |key: &'static str, value: &Value| {
        recipe.get(key).is_null()
            && probes(value).into_iter().any(|probe| {
                let others = settings.iter().filter(|(k, _)| *k != key).cloned();
                let changed: Vec<Setting> = others.chain([(key, probe)]).collect();
                again(&changed).is_ok_and(|other| !same(&other))
            })
    };
    idle.retain(|(key, value)| !read(key, value));
    let (mut refused, mut notices, mut reasons) = (Vec::new(), Vec::new(), Vec::new());
    for (key, value) in idle {
        let row = find(e, key, value);
        match row.map_or(Refused, |r| r.treatment) {
            Fact => {}
            Told => notices
                .push(Notice::new("no_effect", format!("{key}: {}, no effect", row.map_or("", |r| r.text)))),
            NotBuilt => {
                let (name, note) = row.and_then(|r| r.text.split_once(": ")).unwrap_or((key, "leave it out"));
                let reason = format!("{name} not built yet: {note}");
                if !reasons.contains(&reason) {
                    reasons.push(reason);
                }
            }
            Refused => {
                let why = row.map_or("nothing that is run reads it", |r| r.text);
                refused.push(format!("{key}={}: {why}", crate::keys::short(&shown(value))));
            }
        }
    }
    c.effective.idle = refused;
    rules::judge(&c.effective)?;
    notices.extend(reasons.iter().map(|r| Notice::new("not_built", r.clone())));
    c.notices.extend(overruled);
    c.notices.extend(notices);
    c.config.not_built.extend(reasons);
    Ok(())
}

/// Other numbers near a number.
fn probes(value: &Value) -> Vec<Value> {
    match (value.as_i64(), value.as_f64()) {
        (Some(n), _) => vec![n.saturating_mul(2).into(), (n / 2).max(1).into()],
        (None, Some(x)) => vec![(x / 2.0).into(), (x * 2.0).into()],
        _ => Vec::new(),
    }
}

/// A value as it is typed.
fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
