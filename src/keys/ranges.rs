//! The range of every number in the table of keys, and of every field of its groups: what lies outside is a slip of the
//! hand, and would take minutes or overflow before a rule about shapes could say so.

use super::short;
use crate::recipe::MAX_LAYERS;
use serde_json::{Map, Value};

/// Counts beyond this are typing errors.
pub const MAX_SIZE: i64 = 1 << 30;
/// Tokens of a micro-batch, and words of a vocabulary: kernels count elements of a row of them in 32 bits.
pub const MAX_LENGTH: i64 = 1 << 24;
/// A token of every expert lands on one of them at a capacity factor of the number of experts: more holds nothing more.
pub const MAX_CAPACITY_FACTOR: f64 = MAX_EXPERTS as f64;

/// Widths of the model beyond this are typing errors: the widest today are under 1 << 17.
const MAX_WIDTH: i64 = 1 << 20;
/// Experts, and choices a token: the largest models have under 1 << 10.
const MAX_EXPERTS: i64 = 1 << 14;
const LAYERS: i64 = MAX_LAYERS as i64;
/// Depths of multi-token prediction, each with layers of its own: models have one to three.
const MAX_DEPTHS: i64 = 64;
/// Taps of a causal convolution: models have 4.
const MAX_TAPS: i64 = 256;
/// Elements of a gradient bucket: those of the largest model.
const MAX_BUCKET: i64 = 1 << 40;
/// Multiprocessors: a GPU has under 200.
const MAX_SMS: i64 = 1024;
/// Warm-up steps before capture: upstream takes 3.
const MAX_WARMUP_STEPS: i64 = 1000;
/// Side of a patch: the image is 256 pixels wide, and two patches wide at least.
const MAX_PATCH: i64 = 128;
/// Residual streams, each a copy of the activations: models have 4.
const MAX_STREAMS: i64 = 64;
/// Sinkhorn iterations: models have 20.
const MAX_ITERATIONS: i64 = 1000;
/// Weights of losses, factors, learning rates and clamps: those in use are under 100.
const MAX_FACTOR: f64 = 1e4;
/// Below this a factor or a deviation is none.
const LEAST_FACTOR: f64 = 1e-6;
/// Epsilons in use lie from 1e-15 to 1e-3; in fp32 smaller ones vanish.
const EPSILON: (f64, f64) = (1e-20, 1.0);
/// Rotary bases in use lie from 1e4 to 1e9.
const BASE: (f64, f64) = (1.0, 1e12);
/// Capacity below a thousandth of the mean holds no token.
const LEAST_CAPACITY_FACTOR: f64 = 1e-3;
/// Less of a head than this holds no pair.
const LEAST_ROTARY_PERCENT: f64 = 1e-3;
/// Blocks of a vision tower: towers have under 64.
const MAX_TOWER_DEPTH: i64 = 512;
/// Width of a vision tower: towers have under 1 << 13.
const MAX_TOWER_WIDTH: i64 = 1 << 15;
/// Heads of a vision tower are loaded as whole vectors, and their pairs divide over two axes.
const HEAD_UNIT: i64 = 8;
/// Channels of an image: colours are 3, latents 16.
const MAX_CHANNELS: i64 = 1024;
/// Tokens of a text beside a video: its encoder gives 512.
const MAX_TEXT: i64 = 1 << 16;
/// Kinds of rotary scaling that models are published with; those that are not built are approximated by name.
const ROPE_TYPES: &[&str] = &["default", "linear", "dynamic", "yarn", "longrope", "llama3"];
const QKV_FORMATS: &[&str] = &["sbhd", "bshd", "thd"];

/// What a setting, or each number of a list, may be.
#[derive(Debug, Clone, Copy)]
enum Range {
    /// Whole numbers, ends included.
    Whole(i64, i64),
    /// Numbers, ends included.
    Real(f64, f64),
    /// Numbers from 0 to below 1.
    Share,
    /// Numbers, ends included, or -1 for none (Megatron-Core).
    OrNone(f64, f64),
    Words(&'static [&'static str]),
    Flag,
}

use Range::{Flag, OrNone, Real, Share, Whole, Words};

#[rustfmt::skip]
const RANGES: &[(Range, &[&str])] = &[
    (Whole(1, LAYERS), &["model.num_layers"]),
    (Whole(0, LAYERS), &[
        "model.num_layers_in_first_pipeline_stage", "model.num_layers_in_last_pipeline_stage",
        "model.cpu_offloading_num_layers", "model.moe_n_hash_layers", "model.mhc_recompute_layer_num",
        "mixed_precision.num_layers_at_start_in_bf16", "mixed_precision.num_layers_at_end_in_bf16",
        "model.vision.deepstack_visual_indexes", "model.sparse_attention.dsa_indexer_topk_freq",
        "model.sparse_attention.dsa_indexer_skip_topk_offset",
    ]),
    (Whole(0, MAX_DEPTHS), &["model.mtp_num_layers"]),
    (Whole(1, MAX_WIDTH), &[
        "model.hidden_size", "model.num_attention_heads", "model.num_query_groups", "model.kv_channels",
        "model.ffn_hidden_size", "model.moe_ffn_hidden_size", "model.moe_shared_expert_intermediate_size",
        "model.moe_latent_size", "model.moe_mlp_glu_interleave_size", "train.micro_batch_size",
        "model.q_lora_rank", "model.kv_lora_rank", "model.qk_head_dim", "model.qk_pos_emb_head_dim", "model.v_head_dim",
        "model.linear_key_head_dim", "model.linear_value_head_dim", "model.linear_num_key_heads",
        "model.linear_num_value_heads", "model.mamba_num_heads", "model.mamba_head_dim", "model.mamba_state_dim",
        "model.mamba_num_groups", "model.mamba_chunk_size", "peft.dim",
        "model.vision.intermediate_size", "model.vision.num_heads",
        "model.vision.out_hidden_size", "model.diffusion.crossattn_emb_size", "model.diffusion.freq_dim", "model.diffusion.text_dim",
        "model.sparse_attention.dsa_indexer_n_heads", "model.sparse_attention.dsa_indexer_head_dim",
        "model.sparse_attention.o_groups", "model.sparse_attention.o_lora_rank",
    ]),
    (Whole(1, MAX_TOWER_DEPTH), &["model.vision.depth"]),
    (Whole(1, MAX_TOWER_WIDTH), &["model.vision.hidden_size"]),
    (Whole(1, MAX_CHANNELS), &[
        "model.vision.in_channels", "model.diffusion.in_channels", "model.diffusion.out_channels",
    ]),
    (Whole(1, MAX_TEXT), &["model.diffusion.text_len"]),
    (Whole(0, MAX_WIDTH), &["model.mrope_section"]),
    (Whole(1, MAX_TAPS), &["model.linear_conv_kernel_dim", "model.mamba_conv_kernel"]),
    (Whole(1, MAX_LENGTH), &[
        "model.vocab_size", "model.make_vocab_size_divisible_by", "model.seq_length", "dataset.seq_length",
        "model.yarn_original_max_position_embeddings", "dataset.packed_sequence_specs.packed_sequence_size",
        "model.vision.num_position_embeddings", "model.sparse_attention.csa_window_size",
        "model.sparse_attention.dsa_indexer_topk",
    ]),
    (Whole(0, MAX_LENGTH), &["model.sparse_attention.csa_compress_ratios"]),
    // -1 is no bound.
    (Whole(-1, MAX_LENGTH), &["model.window_size"]),
    (Whole(1, MAX_EXPERTS), &[
        "model.num_moe_experts", "model.moe_router_topk", "model.moe_router_num_groups", "model.moe_router_group_topk",
    ]),
    (Whole(0, MAX_SMS), &["model.moe_flex_dispatcher_num_sms", "model.moe_hybridep_num_sms"]),
    (Whole(1, MAX_PATCH), &[
        "model.vision.patch_size", "model.vision.spatial_merge_size", "model.vision.temporal_patch_size",
        "model.diffusion.patch_spatial", "model.diffusion.patch_temporal",
    ]),
    (Whole(1, MAX_STREAMS), &["model.hyper_connections.num_residual_streams"]),
    (Whole(1, MAX_ITERATIONS), &["model.hyper_connections.sinkhorn_iterations"]),
    (Whole(1, MAX_SIZE), &[
        "train.global_batch_size", "train.train_iters", "model.tensor_model_parallel_size",
        "model.pipeline_model_parallel_size", "model.context_parallel_size", "model.expert_model_parallel_size",
        "model.expert_tensor_parallel_size", "model.virtual_pipeline_model_parallel_size",
        "model.microbatch_group_size_per_vp_stage", "ddp.num_buckets", "ddp.num_distributed_optimizer_instances",
        "scheduler.lr_decay_iters", "peft.alpha",
    ]),
    (Whole(0, MAX_SIZE), &[
        "scheduler.lr_warmup_iters", "comm_overlap.wgrad_deferral_limit", "train.manual_gc_interval",
        "model.fine_grained_offloading_max_inflight_offloads",
    ]),
    // Any number is legal there (R16): below 1, no layer is recomputed.
    (Whole(-MAX_SIZE, MAX_SIZE), &["model.recompute_num_layers"]),
    (Whole(1, MAX_BUCKET), &["ddp.bucket_size"]),
    // R56 says what fewer than one would do.
    (Whole(-MAX_SIZE, MAX_WARMUP_STEPS), &["model.cuda_graph_warmup_steps"]),
    (Whole(0, i64::MAX), &["rng.seed"]),
    (Share, &[
        "model.attention_dropout", "model.hidden_dropout", "peft.dropout", "optimizer.adam_beta1", "optimizer.adam_beta2",
        "model.moe_input_jitter_eps",
    ]),
    (Real(0.0, MAX_FACTOR), &[
        "optimizer.lr", "optimizer.min_lr", "optimizer.weight_decay", "optimizer.clip_grad", "model.moe_aux_loss_coeff",
        "model.moe_z_loss_coeff", "model.moe_router_bias_update_rate", "model.mtp_loss_scaling_factor",
        "model.activation_func_clamp_value", "model.rope_scaling.mscale", "model.rope_scaling.mscale_all_dim",
    ]),
    (Real(-MAX_FACTOR, MAX_FACTOR), &["model.glu_linear_offset"]),
    (Real(LEAST_FACTOR, MAX_FACTOR), &[
        "model.init_method_std", "model.moe_router_topk_scaling_factor", "model.mamba_expand",
    ]),
    (Real(1.0, MAX_FACTOR), &["model.rope_scaling.factor"]),
    (Real(1.0, MAX_LENGTH as f64), &["model.rope_scaling.original_max_position_embeddings"]),
    (Real(EPSILON.0, EPSILON.1), &["model.layernorm_epsilon", "optimizer.adam_eps"]),
    (Real(BASE.0, BASE.1), &["model.rotary_base", "model.sparse_attention.csa_compress_rotary_base"]),
    (Real(LEAST_ROTARY_PERCENT, 1.0), &["model.rotary_percent"]),
    (Real(LEAST_CAPACITY_FACTOR, MAX_CAPACITY_FACTOR), &["model.moe_expert_rank_capacity_factor"]),
    (OrNone(LEAST_CAPACITY_FACTOR, MAX_CAPACITY_FACTOR), &["model.moe_expert_capacity_factor"]),
    (Words(ROPE_TYPES), &["model.rope_scaling.type"]),
    (Words(QKV_FORMATS), &["model.diffusion.qkv_format"]),
    (Flag, &["model.diffusion.layernorm_across_heads", "model.diffusion.rotary_interleaved"]),
];

/// Lists of numbers, and the fewest and most that they hold.
const LISTS: &[(&str, usize, usize)] = &[
    ("model.window_size", 2, 2),
    ("model.mrope_section", 3, 3),
    ("model.vision.deepstack_visual_indexes", 0, MAX_LAYERS as usize),
    ("model.sparse_attention.csa_compress_ratios", 0, MAX_LAYERS as usize),
];

/// Fields without which a group means nothing.
const NEEDED: &[(&str, &[&str])] = &[
    ("model.rope_scaling", &["type"]),
    (
        "model.vision",
        &[
            "depth",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "in_channels",
            "patch_size",
            "temporal_patch_size",
            "num_position_embeddings",
        ],
    ),
    ("model.diffusion", &["in_channels", "out_channels", "freq_dim", "text_len", "text_dim"]),
    ("model.hyper_connections", &["num_residual_streams", "sinkhorn_iterations"]),
];

/// A number as a person writes it: 1e308 is not spelt out in 309 digits.
pub fn figure(x: f64) -> String {
    if x == 0.0 || (1e-6..1e15).contains(&x.abs()) { x.to_string() } else { format!("{x:e}") }
}

/// What is wrong with the numbers of a key's value, which has the key's type. Null is right where the key takes it.
pub fn out_of_range(name: &str, value: &Value) -> Option<String> {
    match value {
        Value::Null | Value::Bool(_) | Value::String(_) => None,
        Value::Object(fields) => group(name, fields),
        _ => setting(name, value),
    }
}

/// The first field of a group that is missing or outside its range.
fn group(name: &str, fields: &Map<String, Value>) -> Option<String> {
    let needed = NEEDED.iter().find(|(n, _)| *n == name).map_or(&[][..], |(_, needed)| needed);
    if let Some(missing) = needed.iter().find(|f| fields.get(**f).is_none_or(Value::is_null)) {
        return Some(format!("{name}.{missing} is missing"));
    }
    let mut set = fields.iter().filter(|(_, v)| !v.is_null());
    set.find_map(|(field, v)| setting(&format!("{name}.{field}"), v)).or_else(|| {
        let number = |field: &str| fields.get(field)?.as_i64();
        let (width, heads) = (number("hidden_size")?, number("num_heads")?);
        (width % (heads * HEAD_UNIT) != 0).then(|| {
            format!("{name}.hidden_size is {width}, no multiple of {HEAD_UNIT} for each of {name}.num_heads {heads}")
        })
    })
}

fn setting(name: &str, value: &Value) -> Option<String> {
    let range = RANGES.iter().find(|(_, names)| names.contains(&name)).map(|(range, _)| range)?;
    let list = LISTS.iter().find(|(n, ..)| *n == name);
    match (list, value) {
        (None, one) => outside(name, range, one),
        (Some((_, fewest, most)), Value::Array(items)) => {
            let count = items.len();
            if (*fewest..=*most).contains(&count) {
                return items.iter().find_map(|item| outside(name, range, item));
            }
            let takes = if fewest == most { fewest.to_string() } else { format!("{fewest} to {most}") };
            Some(format!("{name} has {count} numbers: it takes {takes}"))
        }
        (Some(_), other) => {
            Some(format!("{name} is {}: it takes a list of numbers", short(&other.to_string())))
        }
    }
}

/// `Some` if the value is none of the range.
fn outside(name: &str, range: &Range, value: &Value) -> Option<String> {
    let real = value.as_f64();
    let within = |least: f64, most: f64| real.is_some_and(|v| (least..=most).contains(&v));
    let (fits, takes) = match *range {
        Whole(least, most) => (
            value.as_i64().is_some_and(|v| (least..=most).contains(&v)),
            // What is below 0 and in range is for a rule to explain.
            format!("outside {} to {most}", if least == -MAX_SIZE { 0 } else { least }),
        ),
        Real(least, most) => (within(least, most), format!("outside {} to {}", figure(least), figure(most))),
        OrNone(least, most) => (
            within(least, most) || real == Some(-1.0),
            format!("outside {} to {}, and not -1 for none", figure(least), figure(most)),
        ),
        Share => (real.is_some_and(|v| (0.0..1.0).contains(&v)), "outside 0 to below 1".to_owned()),
        Words(words) => {
            (value.as_str().is_some_and(|v| words.contains(&v)), format!("none of {}", words.join(", ")))
        }
        Flag => (value.is_boolean(), "neither true nor false".to_owned()),
    };
    // Whole numbers have 20 digits at most.
    let shown = match real {
        Some(v) if !value.is_i64() && !value.is_u64() => figure(v),
        _ => short(&value.to_string()),
    };
    (!fits).then(|| format!("{name} is {shown}, {takes}"))
}

#[cfg(test)]
mod tests {
    use super::super::{KEYS, Kind, find};
    use super::*;
    use serde_json::json;

    #[test]
    fn every_number_has_one_range() {
        let listed: Vec<&str> = RANGES.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        let mut needed = Vec::new();
        for key in KEYS {
            match key.kind {
                Kind::Int | Kind::Float | Kind::IntList => needed.push(key.name.to_owned()),
                Kind::Object(fields) => needed.extend(fields.iter().map(|f| format!("{}.{f}", key.name))),
                _ => {}
            }
        }
        for name in &needed {
            let times = listed.iter().filter(|n| *n == name).count();
            assert_eq!(times, 1, "{name} has {times} ranges: give it one row of RANGES");
        }
        for name in listed.iter().chain(LISTS.iter().map(|(name, ..)| name)) {
            assert!(needed.iter().any(|n| n == name), "{name} is no number of the table");
        }
        for (name, fields) in NEEDED {
            let Ok(Kind::Object(all)) = find(name).map(|k| k.kind) else { panic!("{name} is no group") };
            assert!(fields.iter().all(|f| all.contains(f)), "{name}");
        }
    }

    #[test]
    fn no_number_at_the_end_of_its_type_is_taken() {
        for key in KEYS.iter().filter(|k| matches!(k.kind, Kind::Int | Kind::Float) && k.name != "rng.seed") {
            for value in [json!(i64::MAX), json!(i64::MIN), json!(1e300), json!(-1e300)] {
                let said = out_of_range(key.name, &value).unwrap_or_default();
                assert!(said.contains(key.name) && said.len() < 140, "{} {value}: {said}", key.name);
            }
        }
    }

    #[test]
    fn fields_and_lists_are_told() {
        let vision = json!({
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3,
            "patch_size": 16, "temporal_patch_size": 2, "num_position_embeddings": 2304
        });
        assert_eq!(out_of_range("model.vision", &vision), None);
        let with = |field: &str, value: Value| {
            let mut changed = vision.clone();
            changed[field] = value;
            out_of_range("model.vision", &changed).unwrap_or_default()
        };
        for value in
            [json!(-1), json!(0), json!(1_000_000_000), json!("x"), json!(1.5), json!([1]), json!(null)]
        {
            for field in ["depth", "hidden_size", "num_heads", "patch_size", "num_position_embeddings"] {
                let said = with(field, value.clone());
                assert!(said.starts_with(&format!("model.vision.{field} is ")), "{field} {value}: {said}");
            }
        }
        assert!(with("num_heads", json!(5)).contains("hidden_size is 1152, no multiple of 8 for each"));
        assert!(with("deepstack_visual_indexes", json!([8, -1])).contains("is -1, outside 0 to 4096"));
        assert!(with("num_heads", json!(5)).contains("hidden_size is 1152, no multiple of 8 for each"));
        assert!(with("deepstack_visual_indexes", json!(8)).contains("a list"));
        let said = |name: &str, value: Value| out_of_range(name, &value).unwrap_or_default();
        assert_eq!(said("model.vision", json!({})), "model.vision.depth is missing");
        let rope = |more: Value| {
            let mut of = json!({ "type": "yarn", "factor": 4 });
            of.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
            said("model.rope_scaling", of)
        };
        assert_eq!(rope(json!({ "original_max_position_embeddings": 4096, "mscale": 1 })), "");
        for (more, part) in [
            (json!({ "type": "zzz" }), r#"model.rope_scaling.type is "zzz", none of default"#),
            (json!({ "factor": "x" }), r#"model.rope_scaling.factor is "x", outside 1 to 10000"#),
            (json!({ "factor": -1 }), "factor is -1"),
            (json!({ "factor": 0 }), "factor is 0"),
            (json!({ "factor": 1e300 }), "factor is 1e300"),
            (json!({ "original_max_position_embeddings": 0 }), "original_max_position_embeddings is 0"),
        ] {
            let said = rope(more);
            assert!(said.contains(part), "{part}: {said}");
        }
        for fine in [json!([-1, -1]), json!([127, 0]), json!([-1, 0])] {
            assert_eq!(said("model.window_size", fine), "");
        }
        assert_eq!(
            said("model.window_size", json!([-5, 0])),
            "model.window_size is -5, outside -1 to 16777216"
        );
        assert_eq!(said("model.window_size", json!([5])), "model.window_size has 1 numbers: it takes 2");
        assert!(said("model.mrope_section", json!([-1, 5, 4])).contains("is -1"));
        assert!(said("model.mrope_section", json!([i64::MAX, 5, 4])).contains("outside 0 to"));
        assert_eq!(said("model.moe_expert_capacity_factor", json!(-1.0)), "");
        assert!(said("model.moe_expert_capacity_factor", json!(-0.5)).contains("not -1 for none"));
    }
}
