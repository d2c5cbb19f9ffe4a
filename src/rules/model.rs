//! Rules about the parts of the model, each read by itself: sizes that a part cannot be without, and settings that do not
//! go together in any layout of ranks.

use super::{Effective, Rule};
use crate::config::LayerKind;
use crate::recipe::hybrid_kinds;

fn when(broken: bool, text: impl FnOnce() -> String) -> Option<String> {
    broken.then(text)
}

/// A part, the models that have it, and the sizes without which it would be of no width.
struct Part {
    name: &'static str,
    there: fn(&Effective) -> bool,
    sizes: &'static [&'static str],
}

/// Some layer, of the decoder or of multi-token prediction, is of such a kind.
fn some(e: &Effective, kinds: &[LayerKind]) -> bool {
    let depths = e.values.int("model.mtp_num_layers").unwrap_or(0);
    let pattern = e.values.text("model.mtp_hybrid_override_pattern").filter(|_| depths > 0);
    // A wrong letter is refused by `features`.
    let of_depths = pattern.and_then(|p| hybrid_kinds(p).ok()).unwrap_or_default();
    e.layers.iter().chain(&of_depths).any(|kind| kinds.contains(kind))
}

/// What is not here may be null: it then is another size (`model.ffn_hidden_size`, `model.kv_channels`), or the part is not
/// there (`model.q_lora_rank`, `model.moe_latent_size`). Ranges refuse numbers below 1 (M01), and M14 has DeepSeek-V4's.
const PARTS: &[Part] = &[
    Part { name: "every model", there: |_| true, sizes: &["model.hidden_size", "dataset.seq_length"] },
    Part {
        name: "a model of tokens",
        there: |e| !e.values.is_set("model.diffusion"),
        sizes: &["model.vocab_size"],
    },
    Part {
        name: "attention",
        there: |e| {
            use LayerKind::{AttnOnly, DeltaDense, DeltaMoe, Dense, Moe};
            some(e, &[Dense, Moe, AttnOnly, DeltaDense, DeltaMoe])
        },
        sizes: &["model.num_attention_heads"],
    },
    Part {
        name: "multi-latent attention",
        there: |e| e.values.on("model.multi_latent_attention") && !e.shared_kv(),
        sizes: &["model.kv_lora_rank", "model.qk_head_dim", "model.qk_pos_emb_head_dim", "model.v_head_dim"],
    },
    Part {
        name: "a gated delta net",
        there: Effective::delta_net,
        sizes: &[
            "model.linear_num_key_heads",
            "model.linear_num_value_heads",
            "model.linear_key_head_dim",
            "model.linear_value_head_dim",
        ],
    },
    Part {
        name: "a Mamba layer",
        there: |e| some(e, &[LayerKind::Mamba]),
        sizes: &["model.mamba_num_heads", "model.mamba_head_dim", "model.mamba_state_dim"],
    },
    Part {
        name: "a layer with experts",
        there: |e| some(e, &[LayerKind::Moe, LayerKind::MoeOnly, LayerKind::DeltaMoe]),
        sizes: &["model.num_moe_experts", "model.moe_router_topk", "model.moe_ffn_hidden_size"],
    },
];

/// Pairs of a head that are rotated.
fn rotated_pairs(e: &Effective) -> i64 {
    let heads = e.size("model.num_attention_heads").max(1);
    let head = e.values.int("model.kv_channels").unwrap_or(e.size("model.hidden_size") / heads);
    (head as f64 * e.values.float("model.rotary_percent").unwrap_or(1.0)) as i64 / 2
}

pub const RULES: &[Rule] = &[
    Rule {
        id: "M35",
        wrong: "a part of the model without one of its sizes",
        remedy: "Give the size that is named, as key=N with N at least 1; `mbperf recipes show` has those of a model with such a part.",
        broken: |e| {
            let mut there = PARTS.iter().filter(|p| (p.there)(e));
            there.find_map(|p| {
                let key = p.sizes.iter().find(|key| e.values.int(key).is_none_or(|n| n < 1))?;
                Some(format!("{} needs {key}, which is {}: give {key}=N", p.name, e.values.get(key)))
            })
        },
    },
    Rule {
        id: "M36",
        wrong: "model.mrope_section that does not share out the rotated pairs of a head",
        remedy: "Choose three numbers whose sum is model.kv_channels x model.rotary_percent / 2.",
        broken: |e| {
            let section = e.values.get("model.mrope_section").as_array()?;
            let sum: i64 = section.iter().filter_map(serde_json::Value::as_i64).sum();
            let pairs = rotated_pairs(e);
            let read = e.values.is_set("model.vision")
                && e.values.text("model.position_embedding_type") == Some("mrope");
            when(read && sum != pairs, || {
                format!(
                    "model.mrope_section has {sum} pairs for three axes, and {pairs} pairs of a head are rotated"
                )
            })
        },
    },
    Rule {
        id: "M37",
        wrong: "expert bias with softmax scores (Megatron-Core refuses it: the bias is for scores that are judged one by one)",
        remedy: "Set model.moe_router_enable_expert_bias=false, or model.moe_router_score_function=sigmoid.",
        broken: |e| {
            let bias = e.moe() && e.values.on("model.moe_router_enable_expert_bias");
            let scores = e.values.text("model.moe_router_score_function").unwrap_or("softmax");
            when(bias && scores == "softmax", || {
                "model.moe_router_enable_expert_bias=true with model.moe_router_score_function softmax"
                    .to_owned()
            })
        },
    },
    Rule {
        id: "M38",
        wrong: "a window that every 0-th layer has not",
        remedy: "Set model.window_attn_skip_freq=null for windows in every layer, or N for none in every N-th.",
        broken: |e| {
            let every = e.values.int("model.window_attn_skip_freq");
            when(e.values.is_set("model.window_size") && every.is_some_and(|n| n < 1), || {
                format!("model.window_attn_skip_freq is {}: layers are counted from 1 on", every.unwrap_or(0))
            })
        },
    },
];
