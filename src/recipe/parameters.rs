//! Parameters of a model, counted from its architecture, and its layers by graph scope.
//!
//! h hidden, a heads of width d in g groups, f width of an MLP. Norms count their scale. By part:
//!
//! - embedding and head: 2 h x vocabulary (once if shared), final norm h;
//! - attention: norm h, q and o 2 a d h, k and v 2 g d h; an output gate a d h, q/k norms 2 d, sinks a, biases;
//! - multi-latent attention: q down and up h r + r + r a (n + p), k/v down and up h (s + p) + s + s a (n + v), o a v h, for ranks
//!   r and s, head widths n (not rotated), p (rotated), v; with a sparse indexer of b heads of width c: r b c + h c + 2 c + h b;
//! - DeepSeek-V4's attention: q h r + r + r a d, one k/v head h d + d, sinks a, o in G groups of rank R: a d R + G R h;
//! - gated delta net (H value heads, keys K wide, values V wide in all): in-projection h (2 K + 2 V + 2 H), convolution
//!   (2 K + V) x taps, step bias and decay 2 H, norm of a head, out-projection V h, norm h;
//! - Mamba-2: in-projection to z, x, B, C, dt, convolution with bias, A, D, dt bias, gated norm, out-projection, norm h;
//! - MLP: 3 h f with a gate, 2 h f without, norm h; experts: router, a bias an expert, experts (in the latent space, with a
//!   projection down and one up, if there is one), the shared expert with its gate;
//! - a diffusion block: attention, cross-attention, MLP, six vectors of modulation.
//!
//! [`uncounted`] names what is left out.

use serde_json::Value;

use super::{Values, layer_kinds, padded_vocab};
use crate::config::LayerKind;

/// Parameters of the decoder with embedding and head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Parameters {
    pub total: u64,
    /// Those that a token passes: of the experts only the chosen ones and the shared one.
    pub active: u64,
}

struct Architecture<'a>(&'a Values);

impl Architecture<'_> {
    fn value(&self, key: &str) -> Option<&Value> {
        self.0.get(&format!("model.{key}")).filter(|v| !v.is_null())
    }
    fn size(&self, key: &str) -> u64 {
        self.or(key, 0)
    }
    fn or(&self, key: &str, unset: u64) -> u64 {
        self.value(key).and_then(Value::as_u64).unwrap_or(unset)
    }
    fn on(&self, key: &str) -> bool {
        self.value(key).is_some_and(|v| v != &Value::Bool(false))
    }
    fn text(&self, key: &str) -> Option<&str> {
        self.value(key).and_then(Value::as_str)
    }
    /// A number of `model.sparse_attention`.
    fn sparse(&self, key: &str) -> u64 {
        self.value("sparse_attention").and_then(|s| s.get(key)).and_then(Value::as_u64).unwrap_or(0)
    }
    /// Matrices of an MLP before the last: gate and up, or up alone.
    fn mlp_inputs(&self) -> u64 {
        if matches!(self.text("activation"), Some("squared_relu" | "gelu")) { 1 } else { 2 }
    }
    /// An MLP from and to `width`, with its biases.
    fn mlp(&self, width: u64, ffn: u64) -> u64 {
        let inputs = self.mlp_inputs();
        let bias = if self.on("add_bias_linear") { inputs * ffn + width } else { 0 };
        (inputs + 1) * width * ffn + bias
    }
    fn head_width(&self, hidden: u64) -> u64 {
        self.or("kv_channels", hidden / self.size("num_attention_heads").max(1))
    }
    fn attention(&self, hidden: u64) -> u64 {
        let heads = self.size("num_attention_heads");
        let groups = self.or("num_query_groups", heads);
        let width = self.head_width(hidden);
        let (q, kv) = (heads * width, groups * width);
        let gate = if self.on("attention_output_gate") { q * hidden } else { 0 };
        let qk_norms = if self.on("qk_layernorm") { 2 * width } else { 0 };
        let qkv_bias = if self.on("add_qkv_bias") || self.on("add_bias_linear") { q + 2 * kv } else { 0 };
        let bias = qkv_bias + if self.on("add_bias_linear") { hidden } else { 0 };
        let sinks = if self.text("softmax_type") == Some("learnable") { heads } else { 0 };
        hidden + (2 * q + 2 * kv) * hidden + gate + qk_norms + bias + sinks
    }
    fn latent_attention(&self, hidden: u64) -> u64 {
        let heads = self.size("num_attention_heads");
        let (r, s) = (self.size("q_lora_rank"), self.size("kv_lora_rank"));
        let (n, p, v) = (self.size("qk_head_dim"), self.size("qk_pos_emb_head_dim"), self.size("v_head_dim"));
        let q = if r > 0 { hidden * r + r + r * heads * (n + p) } else { hidden * heads * (n + p) };
        let kv = hidden * (s + p) + s + s * heads * (n + v);
        let (b, c) = (self.sparse("dsa_indexer_n_heads"), self.sparse("dsa_indexer_head_dim"));
        let indexer = if b > 0 { r * b * c + hidden * c + 2 * c + hidden * b } else { 0 };
        hidden + q + kv + heads * v * hidden + indexer
    }
    fn grouped_output_attention(&self, hidden: u64) -> u64 {
        let (heads, width, r) =
            (self.size("num_attention_heads"), self.head_width(hidden), self.size("q_lora_rank"));
        let (groups, rank) = (self.sparse("o_groups"), self.sparse("o_lora_rank"));
        let q = hidden * r + r + r * heads * width;
        let out = heads * width * rank + groups * rank * hidden;
        hidden + q + hidden * width + width + heads + out
    }
    fn delta_net(&self, hidden: u64) -> u64 {
        let (heads, width) = (self.size("linear_num_value_heads"), self.size("linear_value_head_dim"));
        let keys = self.size("linear_num_key_heads") * self.size("linear_key_head_dim");
        let (values, conv) = (heads * width, 2 * keys + heads * width);
        let taps = self.or("linear_conv_kernel_dim", 4);
        hidden + (values + conv + 2 * heads) * hidden + conv * taps + 2 * heads + width + values * hidden
    }
    /// Whether layer `i` has a gated delta net in place of attention.
    fn is_delta(&self, i: usize) -> bool {
        let linear = match self.value("linear_attention_freq") {
            Some(Value::Array(flags)) => flags.get(i).and_then(Value::as_u64) != Some(0),
            other => {
                other.and_then(Value::as_u64).is_some_and(|n| n > 0 && !(i as u64 + 1).is_multiple_of(n))
            }
        };
        linear && self.text("attention_variant") == Some("gated_delta_net")
    }
    /// What mixes the tokens of layer `i`.
    fn mixer(&self, i: usize, hidden: u64) -> u64 {
        if self.on("diffusion") {
            return 2 * self.attention(hidden) + 6 * hidden;
        }
        match self.text("attention_variant") {
            Some("dsv4_hybrid") => self.grouped_output_attention(hidden),
            _ if self.is_delta(i) => self.delta_net(hidden),
            _ if self.on("multi_latent_attention") => self.latent_attention(hidden),
            _ => self.attention(hidden),
        }
    }
    /// (total, active) of an expert layer.
    fn experts(&self, hidden: u64) -> (u64, u64) {
        let experts = self.size("num_moe_experts");
        let latent = self.size("moe_latent_size");
        let width = if latent > 0 { latent } else { hidden };
        let expert = self.mlp(width, self.size("moe_ffn_hidden_size"));
        let shared = match self.size("moe_shared_expert_intermediate_size") {
            0 => 0,
            ffn => self.mlp(hidden, ffn) + if self.on("moe_shared_expert_gate") { hidden } else { 0 },
        };
        let biases = self.on("moe_router_enable_expert_bias") as u64 + self.on("add_bias_linear") as u64;
        let rest = hidden + experts * (hidden + biases) + shared + 2 * latent * hidden;
        (rest + experts * expert, rest + self.size("moe_router_topk") * expert)
    }
    fn mamba(&self, hidden: u64) -> u64 {
        let heads = self.size("mamba_num_heads");
        let inner = heads * self.size("mamba_head_dim");
        let conv = inner + 2 * self.size("mamba_num_groups") * self.size("mamba_state_dim");
        let taps = self.or("mamba_conv_kernel", 4);
        hidden + (inner + conv + heads) * hidden + conv * (taps + 1) + 3 * heads + inner + inner * hidden
    }
}

/// Counts a model's parameters, but for the parts that [`uncounted`] names; `None` where the layers cannot be told.
pub fn parameters(values: &Values) -> Option<Parameters> {
    let a = Architecture(values);
    let hidden = a.size("hidden_size");
    let ends = match (a.on("diffusion"), a.on("share_embeddings_and_output_weights")) {
        (true, _) => 0,
        (false, true) => 1,
        (false, false) => 2,
    };
    let first = hidden + ends * padded_vocab(values, 1) as u64 * hidden;
    let mut sum = Parameters { total: first, active: first };
    let dense = hidden + a.mlp(hidden, a.or("ffn_hidden_size", 4 * hidden));
    let experts = a.experts(hidden);
    for (i, kind) in layer_kinds(values).ok()?.into_iter().enumerate() {
        let (mixer, (total, active)) = match kind {
            LayerKind::Mamba => (a.mamba(hidden), (0, 0)),
            LayerKind::AttnOnly => (a.mixer(i, hidden), (0, 0)),
            LayerKind::MlpOnly => (0, (dense, dense)),
            LayerKind::MoeOnly => (0, experts),
            LayerKind::Dense | LayerKind::DeltaDense => (a.mixer(i, hidden), (dense, dense)),
            LayerKind::Moe | LayerKind::DeltaMoe => (a.mixer(i, hidden), experts),
        };
        // Every part fits; thousands of layers of the widest do not.
        sum.total = sum.total.saturating_add(mixer + total);
        sum.active = sum.active.saturating_add(mixer + active);
    }
    Some(sum)
}

/// The parts of a model that [`parameters`] leaves out, as the published counts do.
pub fn uncounted(values: &Values) -> Vec<&'static str> {
    let a = Architecture(values);
    let parts = [
        (a.size("mtp_num_layers") > 0, "multi-token prediction"),
        (a.on("vision"), "the vision tower"),
        (a.text("attention_variant") == Some("dsv4_hybrid"), "key compressors and their indexers"),
        (a.on("hyper_connections"), "hyper-connections"),
        (a.on("diffusion"), "embeddings of patches, text and time"),
    ];
    parts.into_iter().filter(|(there, _)| *there).map(|(_, part)| part).collect()
}

/// Layers of the whole model that each scope can capture, scopes without any left out (rules file, section 5).
pub fn graphable(kinds: &[LayerKind]) -> Vec<(&'static str, usize)> {
    use LayerKind::{AttnOnly, DeltaDense, DeltaMoe, Dense, Mamba, MlpOnly, Moe, MoeOnly};
    let count = |of: &[LayerKind]| kinds.iter().filter(|k| of.contains(k)).count();
    let experts = count(&[Moe, MoeOnly, DeltaMoe]);
    let scopes = [
        ("attn", count(&[Dense, Moe, AttnOnly, DeltaDense, DeltaMoe])),
        ("mlp", count(&[Dense, MlpOnly, DeltaDense])),
        ("moe", experts),
        ("moe_router", experts),
        ("moe_preprocess", experts),
        ("mamba", count(&[Mamba])),
    ];
    scopes.into_iter().filter(|(_, layers)| *layers > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::Catalogue;

    /// `tests/data/model_parameters.tsv`: billions, derived from the architectures by other code than ours, and compared
    /// with the published sizes.
    #[test]
    fn counts_are_the_published_ones() {
        let catalogue = Catalogue::load(None).unwrap();
        let table = include_str!("../../tests/data/model_parameters.tsv");
        let mut names = Vec::new();
        for line in table.lines().skip(1) {
            let [name, total, active] = line.split('\t').collect::<Vec<_>>()[..] else { panic!("{line}") };
            let model = catalogue.models().iter().find(|m| m.model == name).unwrap();
            let own = parameters(&model.architecture).unwrap();
            for (what, own, given) in [("total", own.total, total), ("active", own.active, active)] {
                let (own, given) = (own as f64 / 1e9, given.parse::<f64>().unwrap());
                assert!((own / given - 1.0).abs() < 0.01, "{name} {what}: {own:.3}, published {given}");
            }
            names.push(name);
        }
        assert_eq!(names.len(), catalogue.models().len());
    }

    #[test]
    fn what_is_not_counted_is_named() {
        let catalogue = Catalogue::load(None).unwrap();
        let of = |name: &str| {
            let model = catalogue.models().iter().find(|m| m.model == name).unwrap();
            uncounted(&model.architecture)
        };
        assert!(of("llama3_8b").is_empty());
        assert_eq!(of("qwen35_vl_35b_a3b"), ["multi-token prediction", "the vision tower"]);
        assert_eq!(of("wan_14b"), ["embeddings of patches, text and time"]);
    }

    #[test]
    fn hybrid_layers_by_scope() {
        let catalogue = Catalogue::load(None).unwrap();
        let of = |name: &str| {
            let model = catalogue.models().iter().find(|m| m.model == name).unwrap();
            graphable(&layer_kinds(&model.architecture).unwrap())
        };
        // Rules file, section 4.
        assert_eq!(of("nemotronh_56b"), [("attn", 10), ("mlp", 54), ("mamba", 54)]);
        assert_eq!(
            of("nemotron_3_nano"),
            [("attn", 6), ("moe", 23), ("moe_router", 23), ("moe_preprocess", 23), ("mamba", 23)]
        );
    }
}
