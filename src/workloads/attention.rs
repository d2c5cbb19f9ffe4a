//! Self-attention: norm, QKV, q/k norm and RoPE, causal grouped-query attention, output gate if the model has one,
//! projection, residual.

use super::rng::State;
use super::share::RankShare;
use super::weights::{Spec, Weight};
use super::{Stack, WorkloadError};
use crate::config::RunConfig;
use crate::ops::attention::{AttnBwd, AttnFwd, AttnShape};
use crate::ops::collective::{Collective, StandIn};
use crate::ops::dropout::Dropout;
use crate::ops::output_gate::{GateShape, OutputGateBwd, OutputGateFwd};
use crate::ops::rmsnorm::partials;
use crate::ops::rope::{QkvRopeBwd, QkvRopeFwd};
use crate::program::{BufId, DType, Part, Pass};

/// Sizes of one rank's attention.
struct Dims {
    head: usize,
    q: usize,
    kv: usize,
    /// Width of the fused QKV product: q, k, v, and the output gate if there is one.
    qkv: usize,
}

fn dims(cfg: &RunConfig, share: &RankShare) -> Dims {
    let head = cfg.model.kv_channels;
    Dims {
        head,
        q: share.heads * head,
        kv: share.kv_heads * head,
        qkv: (share.heads * if cfg.model.attention_output_gate { 2 } else { 1 } + 2 * share.kv_heads) * head,
    }
}

/// Residual products are scaled by the depth: std / sqrt(2 layers) (Megatron-Core `scaled_init_method_normal`).
pub(super) fn output_std(cfg: &RunConfig) -> f64 {
    cfg.model.init_method_std / (2.0 * cfg.model.layers.len() as f64).sqrt()
}

pub(super) fn weights(cfg: &RunConfig, share: &RankShare, index: usize) -> Vec<Spec> {
    if let Some(kv) = &cfg.model.shared_kv {
        return super::shared_kv::weights(cfg, kv, share, index);
    }
    if let Some(mla) = &cfg.model.mla {
        return super::mla::weights(cfg, mla, share, index);
    }
    if let Some(d) = &cfg.model.diffusion {
        return super::dit::attention_weights(cfg, d, share, index);
    }
    let (m, d) = (&cfg.model, dims(cfg, share));
    let (q_all, kv_all) = (m.num_attention_heads * d.head, m.num_query_groups * d.head);
    let name = |what: &str| format!("layer{index}.attn.{what}.weight");
    let mut qkv_rows = vec![(0, d.q), (q_all, d.kv), (q_all + kv_all, d.kv)];
    qkv_rows.extend(m.attention_output_gate.then_some((q_all + 2 * kv_all, d.q)));
    let mut out = vec![
        Spec::ones(name("norm"), m.hidden_size),
        Spec::normal(name("qkv"), d.qkv, m.hidden_size, m.init_method_std).row_blocks(&qkv_rows),
        Spec::normal(name("proj"), m.hidden_size, d.q, output_std(cfg)).col_block(0, q_all),
    ];
    let bias =
        |what: &str, len: usize| Spec::bias(format!("layer{index}.attn.{what}.bias"), len, m.init_method_std);
    if m.qkv_bias() {
        out.push(bias("qkv", d.qkv).row_blocks(&qkv_rows));
    }
    if m.add_bias_linear {
        out.push(bias("proj", m.hidden_size));
    }
    if m.attention_sinks {
        out.push(Spec::bias(format!("layer{index}.attn.sinks"), share.heads, m.init_method_std));
    }
    if m.qk_layernorm {
        out.push(Spec::ones(name("q_norm"), d.head));
        out.push(Spec::ones(name("k_norm"), d.head));
    }
    out
}

impl Stack<'_> {
    fn rope(&self) -> QkvRopeFwd {
        let m = &self.cfg.model;
        QkvRopeFwd {
            positions: self.positions,
            q_heads: self.share.heads,
            kv_heads: self.share.kv_heads,
            head_dim: m.kv_channels,
            rotary_dim: (m.kv_channels as f64 * m.rotary_percent) as usize,
            base: m.rotary_base,
            qk_norm: m.qk_layernorm.then_some(m.layernorm_epsilon),
            scaling: m.rope_scaling,
            axes: self.text_axes(),
            zero_centered: m.zero_centered_norms,
            gated: m.attention_output_gate,
            bias: m.qkv_bias() && !m.qk_layernorm && !m.attention_output_gate,
        }
    }

    /// Where the output gate lies in the QKV product.
    fn output_gate(&self, d: &Dims) -> Option<GateShape> {
        self.cfg.model.attention_output_gate.then_some(GateShape {
            rows: self.tokens,
            width: d.q,
            stride: d.qkv,
            first: d.q + 2 * d.kv,
        })
    }

    /// Keys and values of all context-parallel ranks: an all-gather when there are several.
    pub(super) fn context_ranks(&self) -> usize {
        if self.cfg.stack_only { 1 } else { self.cfg.parallel.cp }
    }

    pub(super) fn attn_shape(&mut self, l: usize) -> AttnShape {
        let m = &self.cfg.model;
        let (p, index) = (m.attention_dropout, self.share.layers[l].index);
        let site = format!("layer{index}.attn.core_dropout");
        let dropout = (p > 0.0).then(|| Dropout { p, rng: self.rng(&site, State::ModelParallel) });
        let shape = AttnShape {
            positions: self.positions,
            kv_len: self.positions.seq * self.context_ranks(),
            q_heads: self.share.heads,
            kv_heads: self.share.kv_heads,
            head_dim: self.cfg.model.kv_channels,
            window: m.window_of(index),
            sinks: m.attention_sinks,
            dropout,
            ..AttnShape::default()
        };
        match &self.cfg.model.mla {
            Some(mla) => super::mla::core(self.cfg, mla, shape),
            None => shape,
        }
    }

    /// The sinks of layer `l`, if the model has them.
    fn sinks(&self, l: usize) -> Option<Weight> {
        self.weights.find(&format!("layer{}.attn.sinks", self.share.layers[l].index))
    }

    /// Log-sum-exp of every row of scores.
    pub(super) fn attn_lse(&mut self, l: usize) -> BufId {
        let shape = [self.positions.batch, self.share.heads, self.positions.seq];
        self.act_as(l, "attn.lse", DType::F32, &shape)
    }

    /// `x -> x + attention(norm(x))`, `[split_tokens, hidden]`.
    pub(super) fn attention_forward(&mut self, l: usize, x: BufId) -> Result<BufId, WorkloadError> {
        if let Some(kv) = &self.cfg.model.shared_kv {
            return self.shared_kv_forward(l, kv, x);
        }
        if let Some(mla) = &self.cfg.model.mla {
            return self.mla_forward(l, mla, x);
        }
        if let Some(d) = &self.cfg.model.diffusion {
            return self.dit_attention_forward(l, d, x);
        }
        self.b.at(Some(l), Part::Attn, Pass::Forward);
        let (d, t, h) = (dims(self.cfg, self.share), self.tokens, self.cfg.model.hidden_size);
        let index = self.share.layers[l].index;
        let w = |s: &Self, what: &str| s.weights.get(&format!("layer{index}.attn.{what}.weight"));
        let (norm_w, qkv_w, proj_w) = (w(self, "norm")?, w(self, "qkv")?, w(self, "proj")?);
        let (y, _) = self.norm(l, "attn.norm", x, norm_w);
        let y = self.gather_tokens(l, "attn.norm", y, h);
        let qkv = self.act(l, "attn.qkv", &[t, d.qkv]);
        self.forward_product(qkv, y, qkv_w.value, t, d.qkv, h, None);
        let (rope, bias) = (self.rope(), self.bias(l, "attn.qkv"));
        self.add_bias(qkv, bias.filter(|_| !rope.bias), t, d.qkv);
        let [q, k, v] = [("q", d.q), ("k", d.kv), ("v", d.kv)]
            .map(|(n, width)| self.act(l, &format!("attn.{n}"), &[t, width]));
        let mut args = vec![qkv];
        args.extend(bias.filter(|_| rope.bias).map(|b| b.value));
        if self.cfg.model.qk_layernorm {
            args.extend([w(self, "q_norm")?.value, w(self, "k_norm")?.value]);
        }
        args.extend([q, k, v]);
        if self.cfg.model.qk_layernorm {
            args.push(self.act_as(
                l,
                "attn.qk_rstd",
                DType::F32,
                &[t, self.share.heads + self.share.kv_heads],
            ));
        }
        self.b.launch(rope, &args);
        let core = self.here();
        let (k, v) = (self.gather_context(l, "k", k, d.kv), self.gather_context(l, "v", v, d.kv));
        let shape = self.attn_shape(l);
        let o = self.act(l, "attn.o", &[t, d.q]);
        let lse = self.attn_lse(l);
        let mut args = vec![q, k, v];
        args.extend(self.sinks(l).map(|s| s.value));
        args.extend(shape.dropout.map(|_| self.words));
        args.extend([o, lse]);
        self.b.launch(AttnFwd { shape }, &args);
        self.recomputable("core_attn", core, &[o]);
        let o = match self.output_gate(&d) {
            None => o,
            Some(shape) => {
                let gated = self.act(l, "attn.gated", &[t, d.q]);
                self.b.launch(OutputGateFwd { shape }, &[o, qkv, gated]);
                gated
            }
        };
        Ok(self.closing_product(l, "attn", o, proj_w.value, h, d.q, x))
    }

    /// Gradient of the layer's input from that of the attention part's output.
    pub(super) fn attention_backward(
        &mut self,
        l: usize,
        x: BufId,
        dout: BufId,
    ) -> Result<BufId, WorkloadError> {
        if let Some(kv) = &self.cfg.model.shared_kv {
            return self.shared_kv_backward(l, kv, x, dout);
        }
        if let Some(mla) = &self.cfg.model.mla {
            return self.mla_backward(l, mla, x, dout);
        }
        if let Some(d) = &self.cfg.model.diffusion {
            return self.dit_attention_backward(l, d, x, dout);
        }
        self.b.at(Some(l), Part::Attn, Pass::Backward);
        let (d, t, h) = (dims(self.cfg, self.share), self.tokens, self.cfg.model.hidden_size);
        let index = self.share.layers[l].index;
        let w = |s: &Self, what: &str| s.weights.get(&format!("layer{index}.attn.{what}.weight"));
        let (norm_w, qkv_w, proj_w) = (w(self, "norm")?, w(self, "qkv")?, w(self, "proj")?);
        let dproj = self.closing_gradient(l, "attn", dout);
        let o = self.act(l, "attn.o", &[t, d.q]);
        let d_o = self.act(l, "attn.do", &[t, d.q]);
        let qkv = self.act(l, "attn.qkv", &[t, d.qkv]);
        let mut dgate = None;
        if let Some(shape) = self.output_gate(&d) {
            let gated = self.act(l, "attn.gated", &[t, d.q]);
            let [dgated, gradient] =
                ["dgated", "dgate"].map(|n| self.act(l, &format!("attn.{n}"), &[t, d.q]));
            self.data_gradient(dgated, dproj, proj_w.value, t, h, d.q, None);
            self.weight_gradient(proj_w.grad, dproj, gated, t, h, d.q);
            self.b.launch(OutputGateBwd { shape }, &[o, qkv, dgated, d_o, gradient]);
            dgate = Some(gradient);
        } else {
            self.data_gradient(d_o, dproj, proj_w.value, t, h, d.q, None);
            self.weight_gradient(proj_w.grad, dproj, o, t, h, d.q);
        }

        let ranks = self.context_ranks();
        let kv_rows = t * ranks;
        let gathered = |n: &str| if ranks > 1 { format!("attn.{n}.context") } else { format!("attn.{n}") };
        let q = self.act(l, "attn.q", &[t, d.q]);
        let [k, v] = ["k", "v"].map(|n| self.act(l, &gathered(n), &[kv_rows, d.kv]));
        let lse = self.attn_lse(l);
        let dq = self.act(l, "attn.dq", &[t, d.q]);
        let [dk, dv] = ["dk", "dv"].map(|n| self.act(l, &gathered(n), &[kv_rows, d.kv]));
        let shape = self.attn_shape(l);
        let mut args = vec![q, k, v, o, lse, d_o];
        let sinks = self.sinks(l);
        args.extend(sinks.map(|s| s.value));
        args.extend(shape.dropout.map(|_| self.words));
        args.extend([dq, dk, dv]);
        let (batch, heads) = (shape.batch(), shape.q_heads);
        let dsinks = sinks.map(|_| self.act_as(l, "attn.dsinks", DType::F32, &[batch, heads]));
        args.extend(dsinks);
        self.b.launch(AttnBwd { shape }, &args);
        if let (Some(sinks), Some(dsinks)) = (sinks, dsinks) {
            self.column_sum(batch, dsinks, &[(heads, sinks.grad)]);
        }
        let (dk, dv) = (self.reduce_context(l, "dk", dk, d.kv), self.reduce_context(l, "dv", dv, d.kv));

        let dqkv = self.act(l, "attn.dqkv", &[t, d.qkv]);
        let rope = self.rope();
        let mut args = vec![dq, dk, dv];
        args.extend(dgate);
        if self.cfg.model.qk_layernorm {
            let rstd =
                self.act_as(l, "attn.qk_rstd", DType::F32, &[t, self.share.heads + self.share.kv_heads]);
            args.extend([qkv, w(self, "q_norm")?.value, w(self, "k_norm")?.value, rstd]);
        }
        args.push(dqkv);
        let rows = partials(t);
        let mut partial = None;
        if self.cfg.model.qk_layernorm {
            partial = Some(self.act_as(l, "attn.qk_norm.dw_partial", DType::F32, &[rows, 2 * d.head]));
            args.extend(partial);
        }
        self.b.launch(QkvRopeBwd::of(&rope), &args);
        if let Some(partial) = partial {
            let [q, k] = [w(self, "q_norm")?.grad, w(self, "k_norm")?.grad];
            self.column_sum(rows, partial, &[(d.head, q), (d.head, k)]);
        }
        let y = self.act(l, "attn.norm.out", &[self.split_tokens, h]);
        let y = self.gather_tokens(l, "attn.norm", y, h);
        self.weight_gradient(qkv_w.grad, dqkv, y, t, d.qkv, h);
        self.bias_gradient(dqkv, self.bias(l, "attn.qkv"), t, d.qkv);
        let dy = self.act(l, "attn.dy", &[t, h]);
        self.data_gradient(dy, dqkv, qkv_w.value, t, d.qkv, h, None);
        let dy = self.reduce_tokens(l, "attn.dy", dy, h);
        let rstd = self.act_as(l, "attn.norm.rstd", DType::F32, &[self.split_tokens]);
        Ok(self.norm_backward(l, "attn.norm", x, rstd, norm_w, dy, Some(dout)))
    }

    pub(super) fn gather_context(&mut self, l: usize, n: &str, x: BufId, cols: usize) -> BufId {
        let ranks = self.context_ranks();
        if ranks == 1 {
            return x;
        }
        let out = self.act(l, &format!("attn.{n}.context"), &[self.tokens * ranks, cols]);
        self.b.launch(
            StandIn { kind: Collective::AllGather, rows: self.tokens, cols, ranks, dtype: DType::Bf16 },
            &[x, out],
        );
        out
    }

    pub(super) fn reduce_context(&mut self, l: usize, n: &str, x: BufId, cols: usize) -> BufId {
        let ranks = self.context_ranks();
        if ranks == 1 {
            return x;
        }
        let out = self.act(l, &format!("attn.{n}.own"), &[self.tokens, cols]);
        self.b.launch(
            StandIn { kind: Collective::ReduceScatter, rows: self.tokens, cols, ranks, dtype: DType::Bf16 },
            &[x, out],
        );
        out
    }
}
