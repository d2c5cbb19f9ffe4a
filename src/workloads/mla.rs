//! Multi-latent attention (DeepSeek-V2, arXiv:2405.04434): queries, keys and values come from low-rank latents with
//! norms of their own; one rotated key part is shared by all heads; keys are wider than values.
//!
//! Down-projections are the same on every tensor rank and work on the rows that sequence parallelism leaves; the
//! up-projections split the heads (Megatron-Core `multi_latent_attention.py`). Everything is part `attn`.

use super::attention::output_std;
use super::share::RankShare;
use super::weights::{Spec, Weight};
use super::{Stack, WorkloadError};
use crate::config::{Mla, RunConfig};
use crate::ops::attention::{AttnBwd, AttnFwd, AttnShape};
use crate::ops::columns::{JoinColumns, SplitColumns};
use crate::ops::mla_rope::{MlaRopeBwd, MlaRopeFwd, MlaShape};
use crate::ops::rmsnorm::RmsNormFwd;
use crate::ops::rope::RopeScaling;
use crate::program::{BufId, DType, Part, Pass};

/// Widths of one rank's attention.
struct Dims {
    /// Rows outside and inside sequence-parallel regions.
    t: usize,
    split: usize,
    h: usize,
    /// Latents; no query latent: queries come straight from the hidden state.
    q_rank: Option<usize>,
    kv_rank: usize,
    rotary: usize,
    /// All local query (and key) heads, their up-projected keys and values, and their values alone.
    q: usize,
    kv: usize,
    v: usize,
}

/// A weight `[n, k]`.
struct Product {
    weight: Weight,
    n: usize,
    k: usize,
}

/// Columns of the queries, of the up-projected keys and values, and of the values of so many heads.
fn whole(m: &Mla, heads: usize) -> (usize, usize, usize) {
    (
        heads * (m.qk_head_dim + m.qk_pos_emb_head_dim),
        heads * (m.qk_head_dim + m.v_head_dim),
        heads * m.v_head_dim,
    )
}

pub(super) fn weights(cfg: &RunConfig, m: &Mla, share: &RankShare, index: usize) -> Vec<Spec> {
    let (h, std) = (cfg.model.hidden_size, cfg.model.init_method_std);
    let name = |what: &str| format!("layer{index}.attn.{what}.weight");
    let (q, kv, v) = whole(m, share.heads);
    let (.., v_all) = whole(m, cfg.model.num_attention_heads);
    // Tensor rank 0 holds the first heads: its rows are the first ones.
    let normal = |what: &str, rows: usize, cols: usize| Spec::normal(name(what), rows, cols, std);
    let mut out = vec![Spec::ones(name("norm"), h)];
    match m.q_lora_rank {
        Some(rank) => out.extend([normal("q_down", rank, h), normal("q_up", q, rank)]),
        None => out.push(normal("q", q, h)),
    }
    out.extend([
        normal("kv_down", m.kv_lora_rank + m.qk_pos_emb_head_dim, h),
        normal("kv_up", kv, m.kv_lora_rank),
    ]);
    if cfg.model.qk_layernorm {
        out.extend(m.q_lora_rank.map(|rank| Spec::ones(name("q_norm"), rank)));
        out.push(Spec::ones(name("kv_norm"), m.kv_lora_rank));
    }
    out.push(Spec::normal(name("proj"), h, v, output_std(cfg)).col_block(0, v_all));
    out
}

/// Widths and scale of the core: 1 / sqrt(d), times YaRN's temperature.
pub(super) fn core(cfg: &RunConfig, m: &Mla, shape: AttnShape) -> AttnShape {
    let d = m.qk_head_dim + m.qk_pos_emb_head_dim;
    let factor = match cfg.model.rope_scaling {
        Some(RopeScaling::Yarn(yarn)) => yarn.score_factor(),
        _ => 1.0,
    };
    AttnShape {
        kv_heads: shape.q_heads,
        head_dim: d,
        head_dim_v: Some(m.v_head_dim),
        scale: Some(factor / (d as f64).sqrt()),
        ..shape
    }
}

impl Stack<'_> {
    fn mla_dims(&self, m: &Mla) -> Dims {
        let (q, kv, v) = whole(m, self.share.heads);
        Dims {
            t: self.tokens,
            split: self.split_tokens,
            h: self.cfg.model.hidden_size,
            q_rank: m.q_lora_rank,
            kv_rank: m.kv_lora_rank,
            rotary: m.qk_pos_emb_head_dim,
            q,
            kv,
            v,
        }
    }

    fn mla_rope(&self, m: &Mla) -> MlaShape {
        MlaShape {
            positions: self.positions,
            heads: self.share.heads,
            nope: m.qk_head_dim,
            rotary: m.qk_pos_emb_head_dim,
            value: m.v_head_dim,
            base: self.cfg.model.rotary_base,
            scaling: self.cfg.model.rope_scaling,
        }
    }

    fn mla_weight(&self, l: usize, what: &str) -> Result<Weight, WorkloadError> {
        self.weights.get(&format!("layer{}.attn.{what}.weight", self.share.layers[l].index))
    }

    /// A latent `[split, rank]`, normed if the model norms its latents.
    fn latent_norm(&mut self, l: usize, what: &str, x: BufId, rank: usize) -> Result<BufId, WorkloadError> {
        if !self.cfg.model.qk_layernorm {
            return Ok(x);
        }
        let (tokens, weight) = (self.split_tokens, self.mla_weight(l, &format!("{what}_norm"))?);
        let y = self.act(l, &format!("attn.{what}_norm.out"), &[tokens, rank]);
        let rstd = self.act_as(l, &format!("attn.{what}_norm.rstd"), DType::F32, &[tokens]);
        let (eps, zero_centered) = (self.cfg.model.layernorm_epsilon, self.cfg.model.zero_centered_norms);
        self.b.launch(RmsNormFwd { tokens, hidden: rank, eps, zero_centered }, &[x, weight.value, y, rstd]);
        Ok(y)
    }

    fn latent_norm_backward(
        &mut self,
        l: usize,
        what: &str,
        x: BufId,
        dy: BufId,
        rank: usize,
    ) -> Result<BufId, WorkloadError> {
        if !self.cfg.model.qk_layernorm {
            return Ok(dy);
        }
        let (tokens, weight) = (self.split_tokens, self.mla_weight(l, &format!("{what}_norm"))?);
        let rstd = self.act_as(l, &format!("attn.{what}_norm.rstd"), DType::F32, &[tokens]);
        let inputs = vec![x, weight.value, rstd, dy];
        let name = format!("attn.{what}_norm");
        Ok(self.rows_norm_backward(l, &name, inputs, [tokens, rank], false, weight.grad))
    }

    /// `x -> x + attention(norm(x))`, `[split_tokens, hidden]`.
    pub(super) fn mla_forward(&mut self, l: usize, m: &Mla, x: BufId) -> Result<BufId, WorkloadError> {
        self.b.at(Some(l), Part::Attn, Pass::Forward);
        let d = self.mla_dims(m);
        let norm_w = self.mla_weight(l, "norm")?;
        let norm = self.here();
        let (y, _) = self.norm(l, "attn.norm", x, norm_w);
        self.recomputable("layernorm", norm, &[]);

        let q = self.act(l, "attn.q", &[d.t, d.q]);
        let q_latent = match d.q_rank {
            Some(rank) => {
                let latent = self.act(l, "attn.q_latent", &[d.split, rank]);
                let w = self.mla_weight(l, "q_down")?;
                self.forward_product(latent, y, w.value, d.split, rank, d.h, None);
                Some(latent)
            }
            None => None,
        };
        let down = self.act(l, "attn.kv_down", &[d.split, d.kv_rank + d.rotary]);
        let w = self.mla_weight(l, "kv_down")?;
        self.forward_product(down, y, w.value, d.split, d.kv_rank + d.rotary, d.h, None);
        let kv_latent = self.act(l, "attn.kv_latent", &[d.split, d.kv_rank]);
        let k_rope = self.act(l, "attn.k_rope", &[d.split, d.rotary]);
        self.b.launch(
            SplitColumns { rows: d.split, first: d.kv_rank, second: d.rotary },
            &[down, kv_latent, k_rope],
        );
        let k_rope = self.gather_tokens(l, "attn.k_rope", k_rope, d.rotary);

        // With the latents' norms, which upstream fuses with the up-projections.
        let up = self.here();
        let q_latent = match (q_latent, d.q_rank) {
            (Some(latent), Some(rank)) => Some(self.latent_norm(l, "q", latent, rank)?),
            _ => None,
        };
        let kv_latent = self.latent_norm(l, "kv", kv_latent, d.kv_rank)?;
        match (q_latent, d.q_rank) {
            (Some(latent), Some(rank)) => {
                let latent = self.gather_tokens(l, "attn.q_latent", latent, rank);
                let w = self.mla_weight(l, "q_up")?;
                self.forward_product(q, latent, w.value, d.t, d.q, rank, None);
            }
            _ => {
                let y = self.gather_tokens(l, "attn.norm", y, d.h);
                let w = self.mla_weight(l, "q")?;
                self.forward_product(q, y, w.value, d.t, d.q, d.h, None);
            }
        }
        let kv_latent = self.gather_tokens(l, "attn.kv_latent", kv_latent, d.kv_rank);
        let kv = self.act(l, "attn.kv", &[d.t, d.kv]);
        let w = self.mla_weight(l, "kv_up")?;
        self.forward_product(kv, kv_latent, w.value, d.t, d.kv, d.kv_rank, None);
        let (k, v) = (self.act(l, "attn.k", &[d.t, d.q]), self.act(l, "attn.v", &[d.t, d.v]));
        self.b.launch(MlaRopeFwd { shape: self.mla_rope(m) }, &[q, kv, k_rope, k, v]);
        self.recomputable("mla_up_proj", up, &[]);

        let core = self.here();
        let (k, v) = (self.gather_context(l, "k", k, d.q), self.gather_context(l, "v", v, d.v));
        let shape = self.attn_shape(l);
        let o = self.act(l, "attn.o", &[d.t, d.v]);
        let lse = self.attn_lse(l);
        let mut args = vec![q, k, v];
        args.extend(shape.dropout.map(|_| self.words));
        args.extend([o, lse]);
        self.b.launch(AttnFwd { shape }, &args);
        self.recomputable("core_attn", core, &[o]);
        let w = self.mla_weight(l, "proj")?;
        Ok(self.closing_product(l, "attn", o, w.value, d.h, d.v, x))
    }

    /// Gradient of the layer's input from that of the attention part's output.
    pub(super) fn mla_backward(
        &mut self,
        l: usize,
        m: &Mla,
        x: BufId,
        dout: BufId,
    ) -> Result<BufId, WorkloadError> {
        self.b.at(Some(l), Part::Attn, Pass::Backward);
        let d = self.mla_dims(m);
        let proj = self.mla_weight(l, "proj")?;
        let dproj = self.closing_gradient(l, "attn", dout);
        let (o, d_o) = (self.act(l, "attn.o", &[d.t, d.v]), self.act(l, "attn.do", &[d.t, d.v]));
        self.data_gradient(d_o, dproj, proj.value, d.t, d.h, d.v, None);
        self.weight_gradient(proj.grad, dproj, o, d.t, d.h, d.v);

        let ranks = self.context_ranks();
        let gathered = |n: &str| if ranks > 1 { format!("attn.{n}.context") } else { format!("attn.{n}") };
        let [q, dq] = ["attn.q", "attn.dq"].map(|n| self.act(l, n, &[d.t, d.q]));
        let [k, dk] = ["k", "dk"].map(|n| self.act(l, &gathered(n), &[d.t * ranks, d.q]));
        let [v, dv] = ["v", "dv"].map(|n| self.act(l, &gathered(n), &[d.t * ranks, d.v]));
        let (shape, lse) = (self.attn_shape(l), self.attn_lse(l));
        let mut args = vec![q, k, v, o, lse, d_o];
        args.extend(shape.dropout.map(|_| self.words));
        args.extend([dq, dk, dv]);
        self.b.launch(AttnBwd { shape }, &args);
        let (dk, dv) = (self.reduce_context(l, "dk", dk, d.q), self.reduce_context(l, "dv", dv, d.v));
        let dkv = self.act(l, "attn.dkv", &[d.t, d.kv]);
        let dk_rope = self.act(l, "attn.dk_rope", &[d.t, d.rotary]);
        self.b.launch(MlaRopeBwd { shape: self.mla_rope(m) }, &[dq, dk, dv, dkv, dk_rope]);

        let y = self.act(l, "attn.norm.out", &[d.split, d.h]);
        let dy = match d.q_rank {
            Some(rank) => {
                let latent = self.up_gradient(l, "q", dq, d.q, rank)?;
                let product = Product { weight: self.mla_weight(l, "q_down")?, n: rank, k: d.h };
                self.product_gradient(l, "attn.dy_q", product, latent, y, None)
            }
            None => {
                let y = self.gather_tokens(l, "attn.norm", y, d.h);
                let w = self.mla_weight(l, "q")?;
                self.weight_gradient(w.grad, dq, y, d.t, d.q, d.h);
                let dy = self.act(l, "attn.dy_q", &[d.t, d.h]);
                self.data_gradient(dy, dq, w.value, d.t, d.q, d.h, None);
                self.reduce_tokens(l, "attn.dy_q", dy, d.h)
            }
        };
        let dlatent = self.up_gradient(l, "kv", dkv, d.kv, d.kv_rank)?;
        let dk_rope = self.reduce_tokens(l, "attn.dk_rope", dk_rope, d.rotary);
        let down = self.act(l, "attn.dkv_down", &[d.split, d.kv_rank + d.rotary]);
        self.b.launch(
            JoinColumns { rows: d.split, first: d.kv_rank, second: d.rotary },
            &[dlatent, dk_rope, down],
        );
        let product = Product { weight: self.mla_weight(l, "kv_down")?, n: d.kv_rank + d.rotary, k: d.h };
        let dy = self.product_gradient(l, "attn.dy", product, down, y, Some(dy));
        let rstd = self.act_as(l, "attn.norm.rstd", DType::F32, &[d.split]);
        let norm_w = self.mla_weight(l, "norm")?;
        Ok(self.norm_backward(l, "attn.norm", x, rstd, norm_w, dy, Some(dout)))
    }

    /// Back through an up-projection and the latent's norm: gradient of the latent, `[split, rank]`, from that of
    /// the `width` columns of the local heads.
    fn up_gradient(
        &mut self,
        l: usize,
        what: &str,
        dout: BufId,
        width: usize,
        rank: usize,
    ) -> Result<BufId, WorkloadError> {
        let (t, split) = (self.tokens, self.split_tokens);
        let w = self.mla_weight(l, &format!("{what}_up"))?;
        let latent = self.act(l, &format!("attn.{what}_latent"), &[split, rank]);
        let normed = match self.cfg.model.qk_layernorm {
            true => self.act(l, &format!("attn.{what}_norm.out"), &[split, rank]),
            false => latent,
        };
        let normed = self.gather_tokens(l, &format!("attn.{what}_latent"), normed, rank);
        self.weight_gradient(w.grad, dout, normed, t, width, rank);
        let dlatent = self.act(l, &format!("attn.d{what}_latent"), &[t, rank]);
        self.data_gradient(dlatent, dout, w.value, t, width, rank, None);
        let dlatent = self.reduce_tokens(l, &format!("attn.d{what}_latent"), dlatent, rank);
        self.latent_norm_backward(l, what, latent, dlatent, rank)
    }

    /// Both gradients of a product on sequence-parallel rows: the weight's, and `dx (+ add)`.
    fn product_gradient(
        &mut self,
        l: usize,
        name: &str,
        p: Product,
        dout: BufId,
        x: BufId,
        add: Option<BufId>,
    ) -> BufId {
        let rows = self.split_tokens;
        self.weight_gradient(p.weight.grad, dout, x, rows, p.n, p.k);
        let dx = self.act(l, name, &[rows, p.k]);
        self.data_gradient(dx, dout, p.weight.value, rows, p.n, p.k, add);
        dx
    }
}

#[cfg(test)]
mod tests;
