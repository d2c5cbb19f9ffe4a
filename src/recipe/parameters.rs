//! Parameters of a model, counted from its architecture, and its layers by graph scope.

use serde_json::Value;

use super::{DELTA_NET, Values, layer_kinds, padded_vocab};
use crate::config::LayerKind;

/// Parameters of the decoder with embedding and head, without multi-token prediction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Parameters {
    pub total: u64,
    /// Those that a token passes: of the experts only the chosen ones and the shared one.
    pub active: u64,
}

/// What [`parameters`] has no formula for; a key that is set or on.
const UNCOUNTED: [&str; 4] = ["multi_latent_attention", "hyper_connections", "vision", "diffusion"];

struct Architecture<'a>(&'a Values);

impl Architecture<'_> {
    fn value(&self, key: &str) -> Option<&Value> {
        self.0.get(&format!("model.{key}")).filter(|v| !v.is_null())
    }
    fn size(&self, key: &str) -> u64 {
        self.value(key).and_then(Value::as_u64).unwrap_or(0)
    }
    fn on(&self, key: &str) -> bool {
        self.value(key).is_some_and(|v| v != &Value::Bool(false))
    }
    fn or(&self, key: &str, unset: u64) -> u64 {
        self.value(key).and_then(Value::as_u64).unwrap_or(unset)
    }
    /// Matrices [hidden, ffn] of an MLP: gate, up and down, or up and down.
    fn mlp_matrices(&self) -> u64 {
        let gated =
            !matches!(self.value("activation").and_then(Value::as_str), Some("squared_relu" | "gelu"));
        if gated { 3 } else { 2 }
    }
    /// An MLP from and to `width`, with its biases.
    fn mlp(&self, width: u64, ffn: u64) -> u64 {
        let bias = if self.on("add_bias_linear") { (self.mlp_matrices() - 1) * ffn + width } else { 0 };
        self.mlp_matrices() * width * ffn + bias
    }
    fn attention(&self, hidden: u64) -> u64 {
        let heads = self.size("num_attention_heads");
        let groups = self.or("num_query_groups", heads);
        let width = self.or("kv_channels", hidden / heads.max(1));
        let (q, kv) = (heads * width, groups * width);
        let gate = if self.on("attention_output_gate") { q * hidden } else { 0 };
        let qk_norms = if self.on("qk_layernorm") { 2 * width } else { 0 };
        let qkv_bias = if self.on("add_qkv_bias") || self.on("add_bias_linear") { q + 2 * kv } else { 0 };
        let bias = qkv_bias + if self.on("add_bias_linear") { hidden } else { 0 };
        hidden + (2 * q + 2 * kv) * hidden + gate + qk_norms + bias
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
        let bias = if self.on("moe_router_enable_expert_bias") { experts } else { 0 };
        let rest = hidden + experts * hidden + bias + shared + 2 * latent * hidden;
        (rest + experts * expert, rest + self.size("moe_router_topk") * expert)
    }
    fn delta_net(&self, hidden: u64) -> u64 {
        let (heads, width) = (self.size("linear_num_value_heads"), self.size("linear_value_head_dim"));
        let keys = self.size("linear_num_key_heads") * self.size("linear_key_head_dim");
        let (values, conv) = (heads * width, 2 * keys + heads * width);
        let taps = self.or("linear_conv_kernel_dim", 4);
        // Norm; in-projection to z, q, k, v, b, alpha; convolution; A and step bias; norm of a head; out-projection.
        hidden + (values + conv + 2 * heads) * hidden + conv * taps + 2 * heads + width + values * hidden
    }
    fn mamba(&self, hidden: u64) -> u64 {
        let heads = self.size("mamba_num_heads");
        let inner = heads * self.size("mamba_head_dim");
        let conv = inner + 2 * self.size("mamba_num_groups") * self.size("mamba_state_dim");
        let taps = self.or("mamba_conv_kernel", 4);
        // Norm; in-projection to z, x, B, C, dt; convolution; A, D and dt bias; gated norm; out-projection.
        hidden + (inner + conv + heads) * hidden + conv * (taps + 1) + 3 * heads + inner + inner * hidden
    }
}

/// Counts a model's parameters; `None` where a part has no formula here, or the layers cannot be told.
pub fn parameters(values: &Values) -> Option<Parameters> {
    let a = Architecture(values);
    let variant = a.value("attention_variant").is_some_and(|v| v.as_str() != Some(DELTA_NET));
    if variant || UNCOUNTED.iter().any(|key| a.on(key)) {
        return None;
    }
    let hidden = a.size("hidden_size");
    let ends = if a.on("share_embeddings_and_output_weights") { 1 } else { 2 };
    let first = hidden + ends * padded_vocab(values, 1) as u64 * hidden;
    let mut sum = Parameters { total: first, active: first };
    let dense = hidden + a.mlp(hidden, a.or("ffn_hidden_size", 4 * hidden));
    for kind in layer_kinds(values).ok()? {
        let (total, active) = match kind {
            LayerKind::Mamba => (a.mamba(hidden), a.mamba(hidden)),
            LayerKind::AttnOnly => (a.attention(hidden), a.attention(hidden)),
            LayerKind::MlpOnly => (dense, dense),
            LayerKind::Dense => (a.attention(hidden) + dense, a.attention(hidden) + dense),
            LayerKind::MoeOnly => a.experts(hidden),
            LayerKind::DeltaDense => (a.delta_net(hidden) + dense, a.delta_net(hidden) + dense),
            LayerKind::DeltaMoe => {
                let (total, active) = a.experts(hidden);
                (a.delta_net(hidden) + total, a.delta_net(hidden) + active)
            }
            LayerKind::Moe => {
                let (total, active) = a.experts(hidden);
                (a.attention(hidden) + total, a.attention(hidden) + active)
            }
        };
        sum.total += total;
        sum.active += active;
    }
    Some(sum)
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

    #[test]
    fn counts_are_the_published_ones() {
        let catalogue = Catalogue::load(None).unwrap();
        let mut counted = Vec::new();
        for m in catalogue.models() {
            let (Some(own), Some([total, active])) = (parameters(&m.architecture), m.params_b) else {
                continue;
            };
            for (what, own, given) in [("total", own.total, total), ("active", own.active, active)] {
                let own = own as f64 / 1e9;
                assert!((own / given - 1.0).abs() < 0.01, "{} {what}: {own:.3}, published {given}", m.model);
            }
            counted.push(m.model.as_str());
        }
        for model in [
            "llama3_8b",
            "llama31_405b",
            "qwen3_30b_a3b",
            "nemotronh_56b",
            "nemotron_3_nano",
            "qwen3_next_80b_a3b",
        ] {
            assert!(counted.contains(&model), "{model} is not counted: {counted:?}");
        }
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
        // A gated delta net is a self-attention: `attn` captures all 48 layers.
        let experts = [("moe", 48), ("moe_router", 48), ("moe_preprocess", 48)];
        assert_eq!(of("qwen3_next_80b_a3b"), [&[("attn", 48)][..], &experts].concat());
        assert_eq!(
            of("nemotron_3_nano"),
            [("attn", 6), ("moe", 23), ("moe_router", 23), ("moe_preprocess", 23), ("mamba", 23)]
        );
    }
}
