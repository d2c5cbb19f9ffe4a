//! DeepSeek-V4's attention: queries from a normed latent, each head divided by its root mean square; one key head that is
//! its value too; learned sinks; the output turned back and projected group by group, then as a whole (Megatron-Core
//! `deepseek_v4_hybrid_attention.py`). Part `attn`.
//!
//! Layers whose keys upstream does not compress see a sliding window, as there. The others attend here to every earlier
//! token: their compressors and indexer are left out (`compressed_attention` in `approximations`). They have YaRN and a
//! rotary base of their own, the first ones plain frequencies.

use super::attention::output_std;
use super::share::RankShare;
use super::weights::{Spec, Weight};
use super::{Stack, WorkloadError};
use crate::config::{RunConfig, SharedKv};
use crate::device::cuda::matmul::Layout;
use crate::ops::attention::{AttnBwd, AttnFwd};
use crate::ops::gemm::{Accumulate, BlockGemm, Gemm};
use crate::ops::rmsnorm::RmsNormFwd;
use crate::ops::shared_kv::{SharedKvBwd, SharedKvFwd, SharedKvShape, TurnHeads};
use crate::program::{BufId, DType, Part, Pass};

/// Widths of attention; the tensor rank holds all of it.
struct Dims {
    t: usize,
    h: usize,
    rank: usize,
    head: usize,
    /// All query heads.
    q: usize,
    groups: usize,
    /// Of one group's output: before and after its projection.
    group: usize,
    group_rank: usize,
}

fn dims(cfg: &RunConfig, kv: &SharedKv, share: &RankShare, t: usize) -> Dims {
    let (m, q) = (&cfg.model, share.heads * cfg.model.kv_channels);
    Dims {
        t,
        h: m.hidden_size,
        rank: kv.q_lora_rank,
        head: m.kv_channels,
        q,
        groups: kv.o_groups,
        group: q / kv.o_groups.max(1),
        group_rank: kv.o_lora_rank,
    }
}

pub(super) fn weights(cfg: &RunConfig, kv: &SharedKv, share: &RankShare, index: usize) -> Vec<Spec> {
    let (d, std) = (dims(cfg, kv, share, 0), cfg.model.init_method_std);
    let name = |what: &str| format!("layer{index}.attn.{what}.weight");
    vec![
        Spec::ones(name("norm"), d.h),
        Spec::normal(name("q_down"), d.rank, d.h, std),
        Spec::ones(name("q_norm"), d.rank),
        Spec::normal(name("q_up"), d.q, d.rank, std),
        Spec::normal(name("kv"), d.head, d.h, std),
        Spec::ones(name("kv_norm"), d.head),
        Spec::bias(format!("layer{index}.attn.sinks"), share.heads, std),
        Spec::normal(name("group_proj"), d.groups * d.group_rank, d.group, std),
        Spec::normal(name("proj"), d.h, d.groups * d.group_rank, output_std(cfg)),
    ]
}

impl Stack<'_> {
    fn shared_kv_weight(&self, l: usize, what: &str) -> Result<Weight, WorkloadError> {
        self.weights.get(&format!("layer{}.attn.{what}.weight", self.share.layers[l].index))
    }

    fn shared_kv_shape(&self, l: usize, kv: &SharedKv) -> SharedKvShape {
        let m = &self.cfg.model;
        let compressed = kv.compresses(self.share.layers[l].index);
        SharedKvShape {
            positions: self.positions,
            heads: self.share.heads,
            head_dim: m.kv_channels,
            rotary: kv.rotary,
            eps: m.layernorm_epsilon,
            base: if compressed { kv.compress_rotary_base } else { m.rotary_base },
            scaling: m.rope_scaling.filter(|_| compressed),
        }
    }

    /// A normed latent of `width` columns and its 1/rms, kept.
    fn rows_norm(&mut self, l: usize, what: &str, x: BufId, width: usize) -> Result<BufId, WorkloadError> {
        let (tokens, weight) = (self.tokens, self.shared_kv_weight(l, what)?);
        let y = self.act(l, &format!("attn.{what}.out"), &[tokens, width]);
        let rstd = self.act_as(l, &format!("attn.{what}.rstd"), DType::F32, &[tokens]);
        let (eps, zero_centered) = (self.cfg.model.layernorm_epsilon, self.cfg.model.zero_centered_norms);
        self.b.launch(RmsNormFwd { tokens, hidden: width, eps, zero_centered }, &[x, weight.value, y, rstd]);
        Ok(y)
    }

    fn rows_norm_gradient(
        &mut self,
        l: usize,
        what: &str,
        x: BufId,
        dy: BufId,
        width: usize,
    ) -> Result<BufId, WorkloadError> {
        let weight = self.shared_kv_weight(l, what)?;
        let rstd = self.act_as(l, &format!("attn.{what}.rstd"), DType::F32, &[self.tokens]);
        let (name, inputs) = (format!("attn.{what}"), vec![x, weight.value, rstd, dy]);
        Ok(self.rows_norm_backward(l, &name, inputs, [self.tokens, width], false, weight.grad))
    }

    /// The groups' products.
    fn group_product(
        &mut self,
        args: [BufId; 3],
        m: usize,
        n: usize,
        k: usize,
        groups: usize,
        layout: Layout,
    ) {
        let (out, accumulate) = match layout {
            Layout::Tn => (self.grad_dtype(), self.accumulate),
            _ => (DType::Bf16, Accumulate::No),
        };
        self.b.launch(BlockGemm { all: Gemm { m, n, k, layout, batch: groups, out, accumulate } }, &args);
    }

    /// `x -> x + attention(norm(x))`, or with hyper-connections `attention(norm(x))`, `[tokens, hidden]`.
    pub(super) fn shared_kv_forward(
        &mut self,
        l: usize,
        kv: &SharedKv,
        x: BufId,
    ) -> Result<BufId, WorkloadError> {
        self.b.at(Some(l), Part::Attn, Pass::Forward);
        let d = dims(self.cfg, kv, self.share, self.tokens);
        let w = |s: &Self, what: &str| s.shared_kv_weight(l, what).map(|w| w.value);
        let (norm_w, norm) = (self.shared_kv_weight(l, "norm")?, self.here());
        let (y, _) = self.norm(l, "attn.norm", x, norm_w);
        self.recomputable("layernorm", norm, &[]);
        let latent = self.act(l, "attn.q_latent", &[d.t, d.rank]);
        self.forward_product(latent, y, w(self, "q_down")?, d.t, d.rank, d.h, None);
        let key = self.act(l, "attn.kv", &[d.t, d.head]);
        self.forward_product(key, y, w(self, "kv")?, d.t, d.head, d.h, None);

        // Upstream's checkpoint: the up-projection, the norms beside it and the rotation.
        let up = self.here();
        let normed = self.rows_norm(l, "q_norm", latent, d.rank)?;
        let key = self.rows_norm(l, "kv_norm", key, d.head)?;
        let q = self.act(l, "attn.q", &[d.t, d.q]);
        self.forward_product(q, normed, w(self, "q_up")?, d.t, d.q, d.rank, None);
        let k = self.act(l, "attn.k", &[d.t, d.head]);
        let rstd = self.act_as(l, "attn.q_rstd", DType::F32, &[d.t, self.share.heads]);
        let heads = self.shared_kv_shape(l, kv);
        self.b.launch(SharedKvFwd { shape: heads }, &[q, key, k, rstd]);
        self.recomputable("mla_up_proj", up, &[]);

        let shape = self.attn_shape(l);
        let (o, lse) = (self.act(l, "attn.o", &[d.t, d.q]), self.attn_lse(l));
        let mut args = vec![q, k, k, self.weights.get(&self.sinks_name(l))?.value];
        args.extend(shape.dropout.map(|_| self.words));
        args.extend([o, lse]);
        self.b.launch(AttnFwd { shape }, &args);
        self.b.launch(TurnHeads { shape: heads, forth: false }, &[o]);
        let width = d.groups * d.group_rank;
        let grouped = self.act(l, "attn.grouped", &[d.t, width]);
        let group_w = w(self, "group_proj")?;
        self.group_product([o, group_w, grouped], d.t, d.group_rank, d.group, d.groups, Layout::Nt);
        let proj = w(self, "proj")?;
        if !self.hyper() {
            return Ok(self.closing_product(l, "attn", grouped, proj, d.h, width, x));
        }
        let out = self.act(l, "attn.out", &[d.t, d.h]);
        self.forward_product(out, grouped, proj, d.t, d.h, width, None);
        Ok(out)
    }

    fn sinks_name(&self, l: usize) -> String {
        format!("layer{}.attn.sinks", self.share.layers[l].index)
    }

    /// Gradient of what attention read from that of its output.
    pub(super) fn shared_kv_backward(
        &mut self,
        l: usize,
        kv: &SharedKv,
        x: BufId,
        dout: BufId,
    ) -> Result<BufId, WorkloadError> {
        self.b.at(Some(l), Part::Attn, Pass::Backward);
        let d = dims(self.cfg, kv, self.share, self.tokens);
        let width = d.groups * d.group_rank;
        let proj = self.shared_kv_weight(l, "proj")?;
        let dproj = if self.hyper() { dout } else { self.closing_gradient(l, "attn", dout) };
        let [grouped, dgrouped] =
            ["grouped", "dgrouped"].map(|n| self.act(l, &format!("attn.{n}"), &[d.t, width]));
        self.data_gradient(dgrouped, dproj, proj.value, d.t, d.h, width, None);
        self.weight_gradient(proj.grad, dproj, grouped, d.t, d.h, width);
        let group_w = self.shared_kv_weight(l, "group_proj")?;
        let [o, d_o] = ["o", "do"].map(|n| self.act(l, &format!("attn.{n}"), &[d.t, d.q]));
        self.group_product([dgrouped, group_w.value, d_o], d.t, d.group, d.group_rank, d.groups, Layout::Nn);
        self.group_product([dgrouped, o, group_w.grad], d.group_rank, d.group, d.t, d.groups, Layout::Tn);
        // The output as attention left it, and the gradient of that.
        let heads = self.shared_kv_shape(l, kv);
        for buffer in [o, d_o] {
            self.b.launch(TurnHeads { shape: heads, forth: true }, &[buffer]);
        }

        let [q, dq] = ["q", "dq"].map(|n| self.act(l, &format!("attn.{n}"), &[d.t, d.q]));
        let [k, dk, dv, dkv] =
            ["k", "dk", "dv", "dkv"].map(|n| self.act(l, &format!("attn.{n}"), &[d.t, d.head]));
        let (shape, lse) = (self.attn_shape(l), self.attn_lse(l));
        let (batch, q_heads) = (shape.batch(), shape.q_heads);
        let sinks = self.weights.get(&self.sinks_name(l))?;
        let dsinks = self.act_as(l, "attn.dsinks", DType::F32, &[batch, q_heads]);
        let mut args = vec![q, k, k, o, lse, d_o, sinks.value];
        args.extend(shape.dropout.map(|_| self.words));
        args.extend([dq, dk, dv, dsinks]);
        self.b.launch(AttnBwd { shape }, &args);
        self.column_sum(batch, dsinks, &[(q_heads, sinks.grad)]);
        let rstd = self.act_as(l, "attn.q_rstd", DType::F32, &[d.t, q_heads]);
        self.b.launch(SharedKvBwd { shape: heads }, &[q, rstd, dk, dv, dq, dkv]);

        let y = self.act(l, "attn.norm.out", &[d.t, d.h]);
        let (up, down) = (self.shared_kv_weight(l, "q_up")?, self.shared_kv_weight(l, "q_down")?);
        let normed = self.act(l, "attn.q_norm.out", &[d.t, d.rank]);
        self.weight_gradient(up.grad, dq, normed, d.t, d.q, d.rank);
        let dnormed = self.act(l, "attn.dq_normed", &[d.t, d.rank]);
        self.data_gradient(dnormed, dq, up.value, d.t, d.q, d.rank, None);
        let latent = self.act(l, "attn.q_latent", &[d.t, d.rank]);
        let dlatent = self.rows_norm_gradient(l, "q_norm", latent, dnormed, d.rank)?;
        self.weight_gradient(down.grad, dlatent, y, d.t, d.rank, d.h);
        let dy = self.act(l, "attn.dy_q", &[d.t, d.h]);
        self.data_gradient(dy, dlatent, down.value, d.t, d.rank, d.h, None);

        let (key, key_w) = (self.act(l, "attn.kv", &[d.t, d.head]), self.shared_kv_weight(l, "kv")?);
        let dkey = self.rows_norm_gradient(l, "kv_norm", key, dkv, d.head)?;
        self.weight_gradient(key_w.grad, dkey, y, d.t, d.head, d.h);
        let sum = self.act(l, "attn.dy", &[d.t, d.h]);
        self.data_gradient(sum, dkey, key_w.value, d.t, d.head, d.h, Some(dy));
        let (rstd, norm_w) =
            (self.act_as(l, "attn.norm.rstd", DType::F32, &[d.t]), self.shared_kv_weight(l, "norm")?);
        let residual = (!self.hyper()).then_some(dout);
        Ok(self.norm_backward(l, "attn.norm", x, rstd, norm_w, sum, residual))
    }
}

#[cfg(test)]
mod tests;
