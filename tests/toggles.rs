//! No key is taken in silence: every key of the table, set to other legal values on several models, must give another
//! program or configuration, a notice, a reason why it is not built, or a refusal.

use crate::common::{Outcome, catalogue, outcome};
use mbperf::features::{FEATURES, State};
use mbperf::keys::{KEYS, Key, Kind, parse_value};
use mbperf::overrides::{Resolved, not_built_by_key};
use mbperf::rules::off;
use mbperf::workloads;
use mbperf::workloads::share::RankShare;
use rayon::prelude::*;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

/// Small shares of models of each kind.
const MODELS: &[&str] = &[
    "-m llama -mr llama3_8b -g h100 -ng 4 -cp 1 -gb 4 --num_layers 2 -sl 512",
    "-m qwen -mr qwen3_30b_a3b -g h100 --num_layers 2 -sl 512 --max_microbatches 1",
    "-m deepseek -mr deepseek_v3 -g h100 -pp 1 -vp None -ng 64 -gb 64 --num_layers 4 -sl 512 --max_microbatches 1 \
     --moe_a2a_overlap false model.recompute_granularity=null --cuda_graph_impl none",
    "-m wan -mr wan_14b -g h100 --num_layers 2 --max_microbatches 1",
    "-m gpt_oss -mr gpt_oss_20b -g gb200 -c fp8_mx --run_dtype bf16 --nccl_ub false --num_layers 2 -sl 512 --max_microbatches 1",
    "-m nemotronh -mr nemotron_3_nano -g h100 --num_layers 7 -sl 512 --max_microbatches 1",
    "-m qwen -mr qwen3_next_80b_a3b -g h100 -pp 1 --num_layers 4 -sl 512 --max_microbatches 1",
    "-m deepseek -mr deepseek_v4_flash -g gb200 -c fp8_mx --run_dtype bf16 -pp 1 --num_layers 4 -sl 512 \
     --max_microbatches 1",
    "-m qwen_vl -mr qwen3_vl_30b_a3b -g h100 -pp 1 -vp None --num_layers 4 -sl 1024 --max_microbatches 1",
];
/// Longest time on two cores.
const LONGEST: Duration = Duration::from_secs(20);
/// Keys that only name something, and values that say in other words what is in force.
const ALLOWED: &[&str] = &[
    // How mbperf runs anyway.
    " model.attention_backend=auto",
    " model.attention_backend=null",
    " model.moe_router_dtype=fp32",
    " model.moe_router_dtype=float32",
    " model.apply_rope_fusion=true",
    " model.cross_entropy_loss_fusion=true",
    " model.moe_permute_fusion=true",
    " model.moe_router_fusion=true",
    " model.use_transformer_engine_op_fuser=false",
    " model.moe_router_padding_for_quantization=false",
    " model.moe_hybridep_num_sms=null",
    " model.moe_mlp_glu_interleave_size=null",
    " comm_overlap.overlap_param_gather_with_optimizer_step=false",
    " ddp.data_parallel_sharding_strategy=no_shard",
    " ddp.fsdp_double_buffer=false",
    " model.moe_router_padding_for_quantization=null",
    " model.moe_pad_experts_for_cuda_graph_inference=",
    " model.moe_flex_dispatcher_num_sms=null",
    " model.expert_tensor_parallel_size=1",
    // The overlap that it is a part of is not built, and refused by its name.
    " comm_overlap.delay_wgrad_compute=false",
    // Of a micro-batch of one sequence they are one loss.
    " model.moe_router_load_balancing_type=aux_loss",
    " model.moe_router_load_balancing_type=seq_aux_loss",
    // Named in the row; the work of a rank is the same.
    " model.moe_flex_dispatcher_backend=",
    " model.moe_token_dispatcher_type=",
    " train.global_batch_size=",
];

/// Other values than `now`, as they are typed.
fn others(key: &Key, now: &Value) -> Vec<String> {
    let mut all: Vec<String> = match key.kind {
        Kind::Bool => vec![(!now.as_bool().unwrap_or(false)).to_string()],
        Kind::Enum(words) => words.iter().map(|w| (*w).to_owned()).collect(),
        Kind::Int => now
            .as_i64()
            .map_or(vec!["1".into(), "2".into(), "64".into()], |n| vec![(2 * n.max(1)).to_string()]),
        Kind::Float => match now.as_f64() {
            Some(n) if n > 0.0 => vec![(n / 2.0).to_string()],
            _ => vec!["0.5".into()],
        },
        Kind::LayerPattern => vec!["3".into()],
        Kind::IntList => vec!["[64,0]".into(), "[8,4,4]".into()],
        Kind::StrList => vec!["[mlp]".into(), "[core_attn,moe_act]".into()],
        Kind::Str => vec!["M*".into(), "M*-M*-M".into(), "Et*2L".into()],
        Kind::Object(_) => return Vec::new(),
    };
    all.retain(|text| now.as_str() != Some(text));
    if key.nullable && !now.is_null() {
        all.push("null".into());
    }
    all
}

/// What is launched, in which order, on which buffers.
fn program(r: &Resolved) -> Option<u64> {
    let share = RankShare::of(&r.config).ok()?;
    let program = workloads::build(&r.config, &share).ok()?;
    let mut hash = DefaultHasher::new();
    format!("{program:?}").hash(&mut hash);
    Some(hash.finish())
}

/// What was silent.
fn silent(model: &str, base: &Resolved, launched: Option<u64>, key: &Key, text: &str) -> Option<String> {
    // What is off and stays off states a fact.
    let value = parse_value(key.name, text).map_or(Value::Null, |(_, v)| v);
    if off(&value) && off(base.values.get(key.name)) {
        return None;
    }
    let Outcome::Ok(r) = outcome(&format!("{model} {}={text}", key.name), &BTreeMap::new()) else {
        return None;
    };
    let (own, plain) = (&r.config, &base.config);
    if r.notices != base.notices
        || own.not_built != plain.not_built
        || own.approximations != plain.approximations
    {
        return None;
    }
    let other = serde_json::to_value(&r.config).unwrap() != serde_json::to_value(&base.config).unwrap();
    let said = format!("{} {}={text}", base.config.identity.recipe, key.name);
    if !other && r.max_steps == base.max_steps {
        return Some(format!("nothing: {said}"));
    }
    (r.max_steps == base.max_steps && program(&r) == launched && r.config.graph == base.config.graph)
        .then(|| format!("config: {said}"))
}

#[test]
fn no_key_is_taken_in_silence() {
    let start = Instant::now();
    let _ = catalogue();
    let models: Vec<(&str, Box<Resolved>, Option<u64>)> = MODELS
        .iter()
        .map(|model| match outcome(model, &BTreeMap::new()) {
            Outcome::Ok(r) => {
                let launched = program(&r);
                assert!(launched.is_some(), "{model}");
                (*model, r, launched)
            }
            Outcome::Error { message, .. } => panic!("{model}: {message}"),
        })
        .collect();
    let cases: Vec<_> = models.iter().flat_map(|m| KEYS.iter().map(move |k| (m, k))).collect();
    let found: Vec<String> = cases
        .par_iter()
        .flat_map_iter(|((model, base, launched), key)| {
            let texts = others(key, base.values.get(key.name));
            texts.into_iter().filter_map(move |text| silent(model, base, *launched, key, &text))
        })
        .filter(|said| !ALLOWED.iter().any(|a| said.contains(a)))
        .collect();
    let took = start.elapsed();
    eprintln!("{} keys on {} models in {took:.1?}", KEYS.len(), MODELS.len());
    assert!(found.is_empty(), "{} settings are taken in silence:\n{}", found.len(), found.join("\n"));
    assert!(took < LONGEST, "{took:?}");
}

/// Counts of the model that may be 0.
const MAY_BE_0: [&str; 2] = ["mtp_num_layers", "hash_layers"];

/// Numbers of a configuration that are 0, by their path.
fn zeros(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Number(n) if n.as_u64() == Some(0) => _ = found.insert(path.to_owned()),
        Value::Array(list) => list.iter().for_each(|v| zeros(v, path, found)),
        Value::Object(fields) => fields.iter().for_each(|(k, v)| zeros(v, &format!("{path}.{k}"), found)),
        _ => {}
    }
}

/// Without a size a model has no such part, or another size stands for it, or it is refused: nothing is run 0 wide.
#[test]
fn no_size_is_left_at_0() {
    let of_model = |r: &Resolved| {
        let mut found = BTreeSet::new();
        zeros(&serde_json::to_value(&r.config.model).unwrap(), "model", &mut found);
        found
    };
    let sizes: Vec<&Key> =
        KEYS.iter().filter(|k| k.kind == Kind::Int && k.name.starts_with("model.")).collect();
    let models: Vec<_> = MODELS
        .iter()
        .map(|model| match outcome(model, &BTreeMap::new()) {
            Outcome::Ok(r) => (*model, of_model(&r)),
            Outcome::Error { message, .. } => panic!("{model}: {message}"),
        })
        .collect();
    let cases: Vec<_> = models
        .iter()
        .flat_map(|m| sizes.iter().flat_map(move |k| ["null", "0"].map(|text| (m, k.name, text))))
        .collect();
    let wrong: Vec<String> = cases
        .par_iter()
        .filter_map(|((model, known), name, text)| {
            let Outcome::Ok(r) = outcome(&format!("{model} {name}={text}"), &BTreeMap::new()) else {
                return None;
            };
            let new = of_model(&r);
            let new: Vec<&String> = new
                .difference(known)
                .filter(|path| !MAY_BE_0.iter().any(|name| path.ends_with(name)))
                .collect();
            let none = r.config.not_built.is_empty() && RankShare::of(&r.config).is_err();
            (!new.is_empty() || none).then(|| format!("{model} {name}={text}: {new:?}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

const LLAMA: &str = "-m llama -mr llama3_8b -g h100";
const QWEN: &str = "-m qwen -mr qwen3_30b_a3b -g h100";
const DEEPSEEK: &str = "-m deepseek -mr deepseek_v3 -g h100";
const HYBRID: &str = "-m nemotronh -mr nemotron_3_nano -g h100";
const DELTA: &str = "-m qwen -mr qwen3_next_80b_a3b -g h100";
const V4: &str = "-m deepseek -mr deepseek_v4_flash -g gb200 -c fp8_mx --run_dtype bf16";
const VISION: &str = "-m qwen_vl -mr qwen3_vl_30b_a3b -g h100";
const WAN: &str = "-m wan -mr wan_14b -g h100";

/// The beginning of a feature's name, and what asks for it.
const ASKED: &[(&str, &str, &str)] = &[
    ("kernels for this dtype", LLAMA, "-c fp8_cs"),
    ("Mamba layers with context", HYBRID, "-cp 2"),
    ("a Mamba convolution", HYBRID, "model.mamba_conv_kernel=3"),
    ("gated delta net layers with context", DELTA, "-cp 2"),
    ("a gated delta net convolution", DELTA, "model.linear_conv_kernel_dim=3"),
    ("an output of DeepSeek-V4's", V4, "model.qk_pos_emb_head_dim=63"),
    ("DeepSeek-V4's attention over", V4, "-tp 2"),
    ("an output of DeepSeek-V4's", V4, "model.kv_channels=1024"),
    ("multi-latent attention of widths", DEEPSEEK, "model.qk_pos_emb_head_dim=63"),
    ("multi-latent attention of widths", DEEPSEEK, "model.v_head_dim=99 model.qk_head_dim=77"),
    ("multi-latent attention of widths", DEEPSEEK, "model.v_head_dim=256"),
    ("attention heads of a width", LLAMA, "model.kv_channels=1024"),
    ("rotary embedding of one axis", VISION, "model.position_embedding_type=rope"),
    ("hyper-connections around", V4, "model.hidden_dropout=0.1"),
    ("a fixed sink", LLAMA, "model.softmax_type=off-by-one"),
    ("sinks or windows in", DEEPSEEK, "model.softmax_type=learnable"),
    ("windows that look ahead", LLAMA, "model.window_size=[64,1]"),
    ("a diffusion transformer with", WAN, "model.qk_layernorm=false"),
    ("rotary embedding of another", LLAMA, "model.position_embedding_type=mrope"),
    ("this pattern of multi", LLAMA, "model.mtp_num_layers=1 model.mtp_hybrid_override_pattern=X"),
    ("an activation other", LLAMA, "model.activation=gelu"),
    ("a gate that model", LLAMA, "model.gated_linear_unit=false"),
    ("a gate that model", LLAMA, "model.activation=squared_relu model.gated_linear_unit=true"),
    ("a norm other", LLAMA, "model.normalization=LayerNorm"),
    ("biases outside", HYBRID, "model.add_bias_linear=true"),
    ("this load balancing", QWEN, "model.moe_router_load_balancing_type=sinkhorn"),
    ("layers routed by token ids", QWEN, "model.moe_n_hash_layers=1 -tp 2"),
    ("a router z-loss", QWEN, "model.moe_z_loss_coeff=0.1"),
    ("router input jitter", QWEN, "model.moe_input_jitter_eps=0.1"),
    ("the allgather dispatcher", QWEN, "model.moe_token_dispatcher_type=allgather"),
    (
        "a rank capacity factor",
        QWEN,
        "model.moe_expert_rank_capacity_factor=1.5 model.moe_token_dispatcher_type=alltoall",
    ),
    ("one product an expert", QWEN, "model.moe_expert_rank_capacity_factor=1.5 --expert_gemm per_expert"),
    ("paged stash", QWEN, "model.moe_paged_stash=true"),
    ("tensor-parallel experts", QWEN, "-et 2 -ep 8"),
    ("offload of activations", LLAMA, "model.fine_grained_activation_offloading=true"),
    ("overlap of the expert", QWEN, "--moe_a2a_overlap true"),
    ("an optimizer other", LLAMA, "optimizer.optimizer=dist_muon"),
    ("a graph of the optimizer", LLAMA, "optimizer.optimizer_cuda_graph=true"),
    ("FSDP", LLAMA, "ddp.use_megatron_fsdp=true"),
    ("NCCL user buffers", LLAMA, "ddp.nccl_ub=true"),
    ("packed sequences", LLAMA, "dataset.packed_sequence_specs.packed_sequence_size=4096"),
    ("LoRA", LLAMA, "peft.scheme=lora"),
    ("an unfused rotary", LLAMA, "model.apply_rope_fusion=false"),
    ("an unfused cross", LLAMA, "model.cross_entropy_loss_fusion=false"),
    ("an unfused permutation", QWEN, "model.moe_permute_fusion=false"),
    ("an unfused router", QWEN, "model.moe_router_fusion=false"),
    ("a router in another type", DEEPSEEK, "model.moe_router_dtype=fp64"),
    ("Transformer Engine's", LLAMA, "model.use_transformer_engine_op_fuser=true"),
    ("an all-to-all on", QWEN, "model.high_priority_a2a_comm_stream=true"),
    ("interleaved gate", QWEN, "model.moe_mlp_glu_interleave_size=32"),
    ("padding of experts", QWEN, "model.moe_router_padding_for_quantization=true"),
    ("another number format", LLAMA, "mixed_precision.fp8=hybrid"),
    ("another number format", LLAMA, "mixed_precision.fp8_dot_product_attention=true"),
    ("sharding by FSDP", LLAMA, "ddp.num_buckets=2"),
    ("several copies", LLAMA, "ddp.num_distributed_optimizer_instances=2"),
    ("a parameter gather beside", LLAMA, "comm_overlap.overlap_param_gather_with_optimizer_step=true"),
    ("an output gate of", DEEPSEEK, "model.attention_output_gate=true"),
    ("DeepSeek-V4's attention without", V4, "model.qk_layernorm=false"),
    ("query groups where", WAN, "model.num_query_groups=8"),
    ("a dispatcher that takes", QWEN, "model.moe_flex_dispatcher_num_sms=8"),
];
/// Every word that the key takes is built: the rows stand for words to come.
const ALL_BUILT: [&str; 2] = ["this attention variant", "this router score function"];

#[test]
fn what_is_not_built_is_refused_by_its_name() {
    let mut wrong = Vec::new();
    for (name, model, rest) in ASKED {
        match outcome(&format!("{model} {rest}"), &BTreeMap::new()) {
            Outcome::Ok(r) => match r.require_built() {
                Err(e) if e.to_string().contains(name) => {}
                other => wrong.push(format!("{name}: {rest}: {other:?}")),
            },
            Outcome::Error { message, .. } => wrong.push(format!("{name}: {rest}: {message}")),
        }
    }
    let of_table = FEATURES.iter().filter(|f| f.state == State::NotBuilt).map(|f| f.name);
    let covered = |n: &str| ASKED.iter().any(|(name, ..)| n.starts_with(name)) || ALL_BUILT.contains(&n);
    wrong.extend(
        of_table.chain(not_built_by_key()).filter(|n| !covered(n)).map(|n| format!("no line asks for {n}")),
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A refusal gives the reason that holds.
#[test]
fn rotary_settings_are_refused_for_what_they_are() {
    for rest in [
        "model.position_embedding_type=mrope model.mrope_section=[24,20,20]",
        "model.mrope_section=[24,20,20]",
    ] {
        match outcome(&format!("{LLAMA} {rest}"), &BTreeMap::new()) {
            Outcome::Error { rule: Some("M32"), message } => {
                assert!(message.contains("without an image tower"), "{message}")
            }
            Outcome::Error { message, .. } => panic!("{rest}: {message}"),
            Outcome::Ok(r) => panic!("{rest}: {:?}", r.notices),
        }
    }
}
