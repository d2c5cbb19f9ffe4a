//! Blocks: self-attention, cross-attention to text, and an MLP.

use super::super::linear_biased::Product;
use super::super::{Stack, WorkloadError};
use super::{ROTARY_BASE, Sizes};
use crate::config::Diffusion;
use crate::ops::attention::{AttnBwd, AttnFwd, AttnShape};
use crate::ops::collective::{Collective, StandIn};
use crate::ops::gelu::Curve;
use crate::ops::rmsnorm::partials;
use crate::ops::rope::{Axes, Positions};
use crate::ops::wide_norm::{Parts, WideNormBwd, WideNormFwd, WideShape};
use crate::program::{BufId, DType, Part, Pass};

impl Stack<'_> {
    /// Copies what upstream gathers of all ranks' heads, to norm them together.
    fn across_heads(&mut self, name: &str, x: BufId, rows: usize, cols: usize) {
        let ranks = self.cfg.parallel.tp;
        if ranks > 1 && !self.cfg.stack_only {
            let all = self.named(&format!("{name}.all_heads"), &[rows * ranks, cols]);
            let op = StandIn { kind: Collective::AllGather, rows, cols, ranks, dtype: DType::Bf16 };
            self.b.launch(op, &[x, all]);
        }
    }

    /// Text keys or values of all context-parallel ranks, or the sum of their gradients.
    fn text_over_ranks(&mut self, kind: Collective, name: &str, x: BufId, s: &Sizes) -> BufId {
        let ranks = self.context_ranks();
        if ranks == 1 {
            return x;
        }
        let gathers = kind == Collective::AllGather;
        let rows = if gathers { s.text * ranks } else { s.text };
        let out = self.named(&format!("{name}.over_ranks"), &[rows, s.q]);
        self.b.launch(StandIn { kind, rows: s.text, cols: s.q, ranks, dtype: DType::Bf16 }, &[x, out]);
        out
    }

    fn wide(&self, parts: Parts, s: &Sizes) -> WideShape {
        let [_, height, width] = Diffusion::grid(self.cfg.batch.seq_length);
        let axes = Axes::Video { height, width };
        WideShape {
            parts,
            positions: if parts == Parts::Kv { Positions::whole(1, s.text) } else { self.positions },
            width: s.q,
            head_dim: self.cfg.model.kv_channels,
            rotary: (parts == Parts::Qkv).then_some((axes, ROTARY_BASE)),
            eps: self.cfg.model.layernorm_epsilon,
        }
    }

    /// Bias, norm and rotation of a product's parts; returns them. `weights`: of the norms. Activations `<name>.0` and on.
    fn wide_norm(
        &mut self,
        name: &str,
        shape: WideShape,
        x: BufId,
        norms: &[&str],
    ) -> Result<Vec<BufId>, WorkloadError> {
        let bias = self.weights.get(&format!("{name}.bias"))?;
        let mut args = vec![x, bias.value];
        for norm in norms {
            args.push(self.weights.get(norm)?.value);
        }
        let (rows, width) = (shape.rows(), shape.width);
        let parts: Vec<BufId> =
            (0..shape.parts.count()).map(|i| self.named(&format!("{name}.{i}"), &[rows, width])).collect();
        args.extend(&parts);
        args.push(self.f32_named(&format!("{name}.rstd"), &[rows, shape.parts.normed()]));
        self.b.launch(WideNormFwd { shape }, &args);
        Ok(parts)
    }

    /// Gradient of the product from those of its parts, and those of norms and bias.
    fn wide_norm_backward(
        &mut self,
        name: &str,
        shape: WideShape,
        dparts: &[BufId],
        norms: &[&str],
    ) -> Result<BufId, WorkloadError> {
        let bias = self.weights.get(&format!("{name}.bias"))?;
        let (rows, width, count, normed) =
            (shape.rows(), shape.width, shape.parts.count(), shape.parts.normed());
        let x = self.named(&format!("{name}.out"), &[rows, count * width]);
        let mut args = dparts.to_vec();
        args.extend([x, bias.value]);
        let mut grads = Vec::new();
        for norm in norms {
            let weight = self.weights.get(norm)?;
            args.push(weight.value);
            grads.push((width, weight.grad));
        }
        grads.push((count * width, bias.grad));
        args.push(self.f32_named(&format!("{name}.rstd"), &[rows, normed]));
        let dx = self.named(&format!("{name}.dx"), &[rows, count * width]);
        let sums = partials(rows);
        let partial = self.f32_named(&format!("{name}.partial"), &[sums, (normed + count) * width]);
        args.extend([dx, partial]);
        self.b.launch(WideNormBwd { shape }, &args);
        self.column_sum(sums, partial, &grads);
        Ok(dx)
    }

    /// Attention of the video's rows to `kv_len` keys a sequence.
    fn video_attention(&self, kv_len: usize) -> AttnShape {
        AttnShape {
            positions: self.positions,
            kv_len,
            q_heads: self.share.heads,
            kv_heads: self.share.heads,
            head_dim: self.cfg.model.kv_channels,
            bidirectional: true,
            ..AttnShape::default()
        }
    }

    fn video_lse(&mut self, name: &str) -> BufId {
        let shape = [self.positions.batch, self.share.heads, self.positions.seq];
        self.f32_named(&format!("{name}.lse"), &shape)
    }

    /// `x + gate * attention(modulated norm(x))`, then plus cross-attention of its norm to the text.
    pub(in crate::workloads) fn dit_attention_forward(
        &mut self,
        l: usize,
        d: &Diffusion,
        x: BufId,
    ) -> Result<BufId, WorkloadError> {
        self.b.at(Some(l), Part::Attn, Pass::Forward);
        let s = self.sizes(d);
        let index = self.share.layers[l].index;
        let n = |what: &str| format!("layer{index}.{what}");
        let (context, time) = self.conditions(&s);
        let m = s.of_block(0);
        let y = self.modulated_norm(&n("attn"), x, time, &s, m)?;
        let y = self.gather_tokens(l, "attn.norm", y, s.h);
        let qkv = self.product(Product { name: &n("attn.qkv"), rows: s.t, k: s.h, n: 3 * s.q }, y, None)?;
        let norms = [n("attn.q_norm.weight"), n("attn.k_norm.weight")];
        let norms = [norms[0].as_str(), norms[1].as_str()];
        let parts = self.wide_norm(&n("attn.qkv"), self.wide(Parts::Qkv, &s), qkv, &norms)?;
        let (q, k, v) = (parts[0], parts[1], parts[2]);
        self.across_heads(&n("attn.q"), q, s.t, s.q);
        self.across_heads(&n("attn.k"), k, s.t, s.q);
        let (k, v) = (self.gather_context(l, "k", k, s.q), self.gather_context(l, "v", v, s.q));
        let shape = self.video_attention(self.positions.seq * self.context_ranks());
        let o = self.named(&n("attn.o"), &[s.t, s.q]);
        let lse = self.video_lse(&n("attn"));
        self.b.launch(AttnFwd { shape }, &[q, k, v, o, lse]);
        let y = self.product(Product { name: &n("attn.proj"), rows: s.t, k: s.q, n: s.h }, o, None)?;
        let y = self.reduce_tokens(l, "attn.proj", y, s.h);
        let bias = self.weights.get(&n("attn.proj.bias"))?;
        let x = self.gated(&n("attn"), [x, y, time], bias, &s, m)?;
        self.cross_forward(l, &s, context, x)
    }

    fn cross_forward(
        &mut self,
        l: usize,
        s: &Sizes,
        context: BufId,
        x: BufId,
    ) -> Result<BufId, WorkloadError> {
        let index = self.share.layers[l].index;
        let n = |what: &str| format!("layer{index}.{what}");
        let eps = self.cfg.model.layernorm_epsilon;
        let y = self.layer_norm(&n("cross.norm"), x, [s.split, s.h], eps)?;
        let y = self.gather_tokens(l, "cross.norm", y, s.h);
        let q = self.product(Product { name: &n("cross.q"), rows: s.t, k: s.h, n: s.q }, y, None)?;
        let wide = Product { name: &n("cross.kv"), rows: s.text, k: s.d.context_size, n: 2 * s.q };
        let kv = self.product(wide, context, None)?;
        let q = self.wide_norm(&n("cross.q"), self.wide(Parts::Q, s), q, &[&n("cross.q_norm.weight")])?[0];
        let kv = self.wide_norm(&n("cross.kv"), self.wide(Parts::Kv, s), kv, &[&n("cross.k_norm.weight")])?;
        self.across_heads(&n("cross.q"), q, s.t, s.q);
        self.across_heads(&n("cross.k"), kv[0], s.text, s.q);
        let [k, v] = [("k", kv[0]), ("v", kv[1])]
            .map(|(what, x)| self.text_over_ranks(Collective::AllGather, &n(&format!("cross.{what}")), x, s));
        let shape = self.video_attention(s.d.text_len);
        let o = self.named(&n("cross.o"), &[s.t, s.q]);
        let lse = self.video_lse(&n("cross"));
        self.b.launch(AttnFwd { shape }, &[q, k, v, o, lse]);
        let proj = n("cross.proj");
        let proj = Product { name: &proj, rows: s.t, k: s.q, n: s.h };
        if self.cfg.parallel.tp == 1 || self.cfg.stack_only {
            return self.biased_product(proj, o, Some(x));
        }
        let y = self.product(proj, o, None)?;
        let y = self.reduce_tokens(l, "cross.proj", y, s.h);
        let bias = self.weights.get(&n("cross.proj.bias"))?;
        self.add_bias(y, Some(bias), s.split, s.h);
        let out = self.act(l, "cross.sum", &[s.split, s.h]);
        self.add_residual(l, "cross", y, x, out);
        Ok(out)
    }

    pub(in crate::workloads) fn dit_attention_backward(
        &mut self,
        l: usize,
        d: &Diffusion,
        x: BufId,
        dout: BufId,
    ) -> Result<BufId, WorkloadError> {
        self.b.at(Some(l), Part::Attn, Pass::Backward);
        let s = self.sizes(d);
        let index = self.share.layers[l].index;
        let n = |what: &str| format!("layer{index}.{what}");
        let (context, time) = self.conditions(&s);
        let m = s.of_block(0);
        let dmiddle = self.cross_backward(l, &s, context, dout)?;
        let bias = self.weights.get(&n("attn.proj.bias"))?;
        let y = if self.split() {
            self.act(l, "attn.proj.reduced", &[s.split, s.h])
        } else {
            self.named(&n("attn.proj.out"), &[s.t, s.h])
        };
        let (dy, gate) = self.gated_residual_backward(&n("attn"), [dmiddle, y, time], bias, &s, m)?;
        let dy = self.gather_tokens(l, "attn.dgated", dy, s.h);
        let proj = self.weights.get(&n("attn.proj.weight"))?;
        let [o, d_o] = ["attn.o", "attn.do"].map(|what| self.named(&n(what), &[s.t, s.q]));
        self.data_gradient(d_o, dy, proj.value, s.t, s.h, s.q, None);
        self.weight_gradient(proj.grad, dy, o, s.t, s.h, s.q);

        let ranks = self.context_ranks();
        let q = self.named(&n("attn.qkv.0"), &[s.t, s.q]);
        let [k, v] = [("k", 1), ("v", 2)].map(|(what, i)| match ranks {
            1 => self.named(&n(&format!("attn.qkv.{i}")), &[s.t, s.q]),
            _ => self.act(l, &format!("attn.{what}.context"), &[s.t * ranks, s.q]),
        });
        let lse = self.video_lse(&n("attn"));
        let dq = self.named(&n("attn.dq"), &[s.t, s.q]);
        let [dk, dv] = ["attn.dk", "attn.dv"].map(|what| self.named(&n(what), &[s.t * ranks, s.q]));
        let shape = self.video_attention(self.positions.seq * ranks);
        self.b.launch(AttnBwd { shape }, &[q, k, v, o, lse, d_o, dq, dk, dv]);
        let (dk, dv) = (self.reduce_context(l, "dk", dk, s.q), self.reduce_context(l, "dv", dv, s.q));
        self.across_heads(&n("attn.dq"), dq, s.t, s.q);
        self.across_heads(&n("attn.dk"), dk, s.t, s.q);
        let norms = [n("attn.q_norm.weight"), n("attn.k_norm.weight")];
        let norms = [norms[0].as_str(), norms[1].as_str()];
        let shape = self.wide(Parts::Qkv, &s);
        let dqkv = self.wide_norm_backward(&n("attn.qkv"), shape, &[dq, dk, dv], &norms)?;
        let y = self.named(&n("attn.norm.out"), &[s.split, s.h]);
        let y = self.gather_tokens(l, "attn.norm", y, s.h);
        let dy = self.through_product(&n("attn.qkv"), y, dqkv, [s.t, 3 * s.q, s.h], None)?;
        let dy = self.reduce_tokens(l, "attn.dy", dy, s.h);
        let dtime = self.dtime(&s);
        let (time, around) = ([time, dtime], Some(dmiddle));
        self.modulated_norm_backward(&n("attn"), x, time, &s, m, dy, around, Some(gate))
    }

    /// Gradients of a product's weight and input (`+ add`): `<name>.din`. Its bias is another's.
    fn through_product(
        &mut self,
        name: &str,
        x: BufId,
        dy: BufId,
        [rows, n, k]: [usize; 3],
        add: Option<BufId>,
    ) -> Result<BufId, WorkloadError> {
        let weight = self.weights.get(&format!("{name}.weight"))?;
        self.weight_gradient(weight.grad, dy, x, rows, n, k);
        let dx = self.named(&format!("{name}.din"), &[rows, k]);
        self.data_gradient(dx, dy, weight.value, rows, n, k, add);
        Ok(dx)
    }

    /// Gradient of cross-attention's input; that of the text is added up over the layers.
    fn cross_backward(
        &mut self,
        l: usize,
        s: &Sizes,
        context: BufId,
        dout: BufId,
    ) -> Result<BufId, WorkloadError> {
        let index = self.share.layers[l].index;
        let n = |what: &str| format!("layer{index}.{what}");
        let bias = self.weights.get(&n("cross.proj.bias"))?;
        self.bias_gradient(dout, Some(bias), s.split, s.h);
        let dproj = self.gather_tokens(l, "cross.dout", dout, s.h);
        let o = self.named(&n("cross.o"), &[s.t, s.q]);
        let d_o = self.through_product(&n("cross.proj"), o, dproj, [s.t, s.h, s.q], None)?;
        let ranks = self.context_ranks();
        let q = self.named(&n("cross.q.0"), &[s.t, s.q]);
        let [k, v] = [("k", 0), ("v", 1)].map(|(what, i)| match ranks {
            1 => self.named(&n(&format!("cross.kv.{i}")), &[s.text, s.q]),
            _ => self.named(&n(&format!("cross.{what}.over_ranks")), &[s.text * ranks, s.q]),
        });
        let lse = self.video_lse(&n("cross"));
        let dq = self.named(&n("cross.dq"), &[s.t, s.q]);
        let [dk, dv] = ["cross.dk", "cross.dv"].map(|what| self.named(&n(what), &[s.text * ranks, s.q]));
        let shape = self.video_attention(s.d.text_len);
        self.b.launch(AttnBwd { shape }, &[q, k, v, o, lse, d_o, dq, dk, dv]);
        let [dk, dv] = [("dk", dk), ("dv", dv)].map(|(what, x)| {
            self.text_over_ranks(Collective::ReduceScatter, &n(&format!("cross.{what}")), x, s)
        });
        self.across_heads(&n("cross.dq"), dq, s.t, s.q);
        self.across_heads(&n("cross.dk"), dk, s.text, s.q);
        let (of_q, of_kv) = (self.wide(Parts::Q, s), self.wide(Parts::Kv, s));
        let dq = self.wide_norm_backward(&n("cross.q"), of_q, &[dq], &[&n("cross.q_norm.weight")])?;
        let dkv = self.wide_norm_backward(&n("cross.kv"), of_kv, &[dk, dv], &[&n("cross.k_norm.weight")])?;
        // The text's gradient: this layer's and those of all after it.
        let kv = self.weights.get(&n("cross.kv.weight"))?;
        let (rows, wide, ce) = (s.text, 2 * s.q, s.d.context_size);
        self.weight_gradient(kv.grad, dkv, context, rows, wide, ce);
        let later = (l + 1 < self.share.layers.len()).then(|| self.act(l + 1, "cross.dcontext", &[rows, ce]));
        let dcontext = self.act(l, "cross.dcontext", &[rows, ce]);
        self.data_gradient(dcontext, dkv, kv.value, rows, wide, ce, later);
        let y = self.named(&n("cross.norm.out"), &[s.split, s.h]);
        let y = self.gather_tokens(l, "cross.norm", y, s.h);
        let dy = self.through_product(&n("cross.q"), y, dq, [s.t, s.q, s.h], None)?;
        let dy = self.reduce_tokens(l, "cross.dy", dy, s.h);
        let x = self.named(&n("attn.gated"), &[s.split, s.h]);
        self.layer_norm_backward(&n("cross.norm"), x, [s.split, s.h], dy, Some(dout))
    }

    /// `x + gate * mlp(modulated norm(x))`.
    pub(in crate::workloads) fn dit_mlp_forward(
        &mut self,
        l: usize,
        d: &Diffusion,
        x: BufId,
    ) -> Result<BufId, WorkloadError> {
        self.b.at(Some(l), Part::Mlp, Pass::Forward);
        let s = self.sizes(d);
        let index = self.share.layers[l].index;
        let n = |what: &str| format!("layer{index}.{what}");
        let (_, time) = self.conditions(&s);
        let m = s.of_block(1);
        let y = self.modulated_norm(&n("mlp"), x, time, &s, m)?;
        let y = self.gather_tokens(l, "mlp.norm", y, s.h);
        let up = Product { name: &n("mlp.fc1"), rows: s.t, k: s.h, n: s.f };
        let act = self.curved_product(up, Curve::Gelu, y)?;
        let y = self.product(Product { name: &n("mlp.fc2"), rows: s.t, k: s.f, n: s.h }, act, None)?;
        let y = self.reduce_tokens(l, "mlp.fc2", y, s.h);
        let bias = self.weights.get(&n("mlp.fc2.bias"))?;
        self.gated(&n("mlp"), [x, y, time], bias, &s, m)
    }

    pub(in crate::workloads) fn dit_mlp_backward(
        &mut self,
        l: usize,
        d: &Diffusion,
        x: BufId,
        dout: BufId,
    ) -> Result<BufId, WorkloadError> {
        self.b.at(Some(l), Part::Mlp, Pass::Backward);
        let s = self.sizes(d);
        let index = self.share.layers[l].index;
        let n = |what: &str| format!("layer{index}.{what}");
        let (_, time) = self.conditions(&s);
        let m = s.of_block(1);
        let bias = self.weights.get(&n("mlp.fc2.bias"))?;
        let y = if self.split() {
            self.act(l, "mlp.fc2.reduced", &[s.split, s.h])
        } else {
            self.named(&n("mlp.fc2.out"), &[s.t, s.h])
        };
        let (dy, gate) = self.gated_residual_backward(&n("mlp"), [dout, y, time], bias, &s, m)?;
        let dy = self.gather_tokens(l, "mlp.dgated", dy, s.h);
        let act = self.named(&n("mlp.fc1.act"), &[s.t, s.f]);
        let dact = self.through_product(&n("mlp.fc2"), act, dy, [s.t, s.h, s.f], None)?;
        let up = n("mlp.fc1");
        let up = Product { name: &up, rows: s.t, k: s.h, n: s.f };
        let dh = self.curve_backward(up, Curve::Gelu, dact)?;
        let y = self.named(&n("mlp.norm.out"), &[s.split, s.h]);
        let y = self.gather_tokens(l, "mlp.norm", y, s.h);
        let dy = self.product_backward(up, y, dh, None)?;
        let dy = self.reduce_tokens(l, "mlp.dy", dy, s.h);
        let dtime = self.dtime(&s);
        self.modulated_norm_backward(&n("mlp"), x, [time, dtime], &s, m, dy, Some(dout), Some(gate))
    }
}
