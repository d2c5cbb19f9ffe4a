//! A diffusion transformer on video latents, as Wan 2.1 has it (arXiv:2503.20314): blocks of self-attention, cross-attention to
//! text and a GELU MLP, whose norms, and the gates of whose residuals, follow the time step; patches, time and text are
//! embedded before the first block, a modulated head and a flow-matching loss end the last.
//!
//! Tensor parallelism splits heads and the MLP; the norm over all heads of q and k, which upstream gathers them for, is over
//! the rank's own (the gathers' bytes are copied all the same). Context parallelism splits video and text.

use super::linear_biased::{Product, layer_norm, linear};
use super::share::RankShare;
use super::weights::{Spec, Weight};
use super::{Stack, WorkloadError};
use crate::config::{Diffusion, RunConfig};
use crate::ops::attention::{AttnBwd, AttnFwd, AttnShape};
use crate::ops::collective::{Collective, StandIn};
use crate::ops::cross_entropy::LossSum;
use crate::ops::flow::{FlowLoss, FlowSample};
use crate::ops::gelu::{Curve, CurveBwd, CurveFwd};
use crate::ops::layer_norm::gate::{GatedResidualBwd, GatedResidualFwd, ModulationGrad, ToBf16};
use crate::ops::layer_norm::{LayerNormBwd, LayerNormFwd, Modulation};
use crate::ops::rmsnorm::partials;
use crate::ops::rope::{Axes, Positions};
use crate::ops::step::{RandomFill, Zero};
use crate::ops::wide_norm::{Parts, WideNormBwd, WideNormFwd, WideShape};
use crate::program::{BufId, DType, Init, Lifetime, Part, Pass, Shard};

/// Base of the rotary frequencies of all three axes (Wan's code has it fixed).
const ROTARY_BASE: f64 = 10_000.0;
/// Rows of a block's modulation for each of its two parts: shift, scale, gate; and of all.
const PART_SLOTS: usize = 3;
const SLOTS: usize = 2 * PART_SLOTS;
/// Rows of the head's: shift, scale.
const HEAD_SLOTS: usize = 2;

/// Static inputs of one micro-batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct VideoSample {
    noisy: BufId,
    target: BufId,
    /// Sines and cosines of the time step.
    time: BufId,
    text: BufId,
}

/// A gated residual in the backward pass: its partial sums, their number a sequence, and the bias that it added.
struct Gate {
    partial: BufId,
    parts: usize,
    bias: Weight,
}

fn table(name: String, slots: usize, hidden: usize) -> Spec {
    // As the authors initialise it.
    Spec::normal(name, slots, hidden, 1.0 / (hidden as f64).sqrt())
}

/// Weights of a block's attention part.
pub(super) fn attention_weights(
    cfg: &RunConfig,
    d: &Diffusion,
    share: &RankShare,
    index: usize,
) -> Vec<Spec> {
    let (m, h, std) = (&cfg.model, cfg.model.hidden_size, cfg.model.init_method_std);
    let (q, all) = (share.heads * m.kv_channels, m.num_attention_heads * m.kv_channels);
    let name = |what: &str| format!("layer{index}.{what}");
    let rows = |what: &str, n: usize, k: usize| -> Vec<Spec> {
        let blocks: Vec<(usize, usize)> = (0..n).map(|i| (i * all, q)).collect();
        linear(&name(what), n * q, k, std).into_iter().map(|s| s.row_blocks(&blocks)).collect()
    };
    let out = |what: &str| {
        let [weight, bias] = linear(&name(what), h, q, super::attention::output_std(cfg));
        [weight.col_block(0, all), bias]
    };
    let mut specs = vec![table(name("attn.mod.weight"), PART_SLOTS, h)];
    specs.extend(rows("attn.qkv", 3, h));
    specs.extend(out("attn.proj"));
    specs.extend(layer_norm(&name("cross.norm"), h, std));
    specs.extend(rows("cross.q", 1, h));
    specs.extend(rows("cross.kv", 2, d.context_size));
    specs.extend(out("cross.proj"));
    let norms = ["attn.q_norm.weight", "attn.k_norm.weight", "cross.q_norm.weight", "cross.k_norm.weight"];
    specs.extend(norms.map(|n| Spec::constant(name(n), q, 1.0)));
    specs
}

/// Weights of a block's MLP part.
pub(super) fn mlp_weights(cfg: &RunConfig, share: &RankShare, index: usize) -> Vec<Spec> {
    let (m, h, f) = (&cfg.model, cfg.model.hidden_size, share.ffn);
    let name = |what: &str| format!("layer{index}.{what}");
    let up = linear(&name("mlp.fc1"), f, h, m.init_method_std).map(|s| s.row_blocks(&[(0, f)]));
    let [down, bias] = linear(&name("mlp.fc2"), h, f, super::attention::output_std(cfg));
    let mut specs = vec![table(name("mlp.mod.weight"), PART_SLOTS, h)];
    specs.extend(up);
    specs.extend([down.col_block(0, m.ffn_hidden_size), bias]);
    specs
}

/// Weights before the first and after the last block.
pub(super) fn weights(cfg: &RunConfig, d: &Diffusion) -> Vec<Spec> {
    let (h, std) = (cfg.model.hidden_size, cfg.model.init_method_std);
    let mut specs = Vec::from(linear("dit.patch", h, d.in_values, std));
    specs.extend(linear("dit.time1", h, d.freq_dim, std));
    specs.extend(linear("dit.time2", h, h, std));
    specs.extend(linear("dit.time3", SLOTS * h, h, std));
    specs.extend(linear("dit.text1", d.context_size, d.text_dim, std));
    specs.extend(linear("dit.text2", d.context_size, d.context_size, std));
    specs.push(table("dit.head.mod.weight".into(), HEAD_SLOTS, h));
    specs.extend(linear("dit.head", d.out_values, h, std));
    specs
}

/// Sizes of a rank's transformer.
#[derive(Debug, Clone)]
struct Sizes {
    /// Rows of video of this rank, and those that sequence parallelism leaves it.
    t: usize,
    split: usize,
    /// Rows of text.
    text: usize,
    h: usize,
    /// Columns of the rank's heads.
    q: usize,
    f: usize,
    sequences: usize,
    d: Diffusion,
}

impl Sizes {
    fn patch(&self) -> Product<'static> {
        Product { name: "dit.patch", rows: self.t, k: self.d.in_values, n: self.h }
    }
    fn time(&self, name: &'static str, k: usize, n: usize) -> Product<'static> {
        Product { name, rows: self.sequences, k, n }
    }
    fn text(&self, name: &'static str, k: usize) -> Product<'static> {
        Product { name, rows: self.text, k, n: self.d.context_size }
    }
    fn head(&self) -> Product<'static> {
        Product { name: "dit.head", rows: self.split, k: self.h, n: self.d.out_values }
    }
    /// Modulation of a block's first or second part.
    fn of_block(&self, part: usize) -> Modulation {
        Modulation {
            sequences: self.sequences,
            slots: PART_SLOTS,
            time_slots: SLOTS,
            time_first: part * PART_SLOTS,
        }
    }
    fn of_head(&self) -> Modulation {
        Modulation { sequences: self.sequences, slots: HEAD_SLOTS, time_slots: 1, time_first: 0 }
    }
}

impl Stack<'_> {
    fn sizes(&self, d: &Diffusion) -> Sizes {
        let m = &self.cfg.model;
        let sequences = self.cfg.batch.micro_batch_size;
        Sizes {
            t: self.tokens,
            split: self.split_tokens,
            text: sequences * d.text_len / self.context_ranks(),
            h: m.hidden_size,
            q: self.share.heads * m.kv_channels,
            f: self.share.ffn,
            sequences,
            d: d.clone(),
        }
    }

    fn f32_named(&mut self, name: &str, shape: &[usize]) -> BufId {
        self.b.activation(name, DType::F32, shape)
    }

    /// Text and time embeddings of the current slot; a bare stack is given both.
    fn conditions(&mut self, s: &Sizes) -> (BufId, BufId) {
        let shapes = [[s.text, s.d.context_size], [s.sequences, SLOTS * s.h]];
        if self.cfg.stack_only {
            let mut given = |name: &str, shape: &[usize]| {
                let init = Init::Normal { std: 1.0 };
                self.b.buffer(name, DType::Bf16, shape, Lifetime::Constant, init)
            };
            return (given("stack.context", &shapes[0]), given("stack.time", &shapes[1]));
        }
        (self.named("dit.text2.out", &shapes[0]), self.named("dit.time3.out", &shapes[1]))
    }

    fn dtime(&mut self, s: &Sizes) -> BufId {
        self.f32_named("dit.dtime", &[s.sequences * SLOTS, s.h])
    }
    fn dtime_of_head(&mut self, s: &Sizes) -> BufId {
        self.f32_named("dit.dtime_of_head", &[s.sequences, s.h])
    }

    /// Samples of one micro-batch, drawn like tokens; static, as those are.
    pub(super) fn video_sample(&mut self, d: &Diffusion, mb: usize) -> Result<VideoSample, WorkloadError> {
        let s = self.sizes(d);
        let length = self.cfg.batch.seq_length;
        if d.in_values != d.out_values {
            return Err(WorkloadError::Unsupported(format!(
                "a diffusion transformer from {} numbers a patch to {}: the loss needs as many",
                d.in_values, d.out_values
            )));
        }
        if !d.text_len.is_multiple_of(self.context_ranks()) {
            return Err(WorkloadError::Unsupported(format!(
                "{} tokens of text cannot be split over {} context-parallel ranks; change -cp",
                d.text_len,
                self.context_ranks()
            )));
        }
        let mut input = |what: &str, shape: &[usize]| {
            let zero = Init::Const { value: 0.0 };
            self.b.buffer(&format!("{what}.mb{mb}"), DType::Bf16, shape, Lifetime::StepState, zero)
        };
        let sample = VideoSample {
            noisy: input("noisy", &[s.t, d.in_values]),
            target: input("target", &[s.t, d.in_values]),
            time: input("time", &[s.sequences, d.freq_dim]),
            text: input("text", &[s.text, d.text_dim]),
        };
        let op = FlowSample {
            positions: self.positions,
            length,
            values: d.in_values,
            frequencies: d.freq_dim,
            sample: self.b.rng("video", 0),
            noise: self.b.rng("noise", 0),
            time: self.b.rng("time", 0),
        };
        self.b.launch(op, &[self.words, sample.noisy, sample.target, sample.time]);
        let rng = self.b.rng("text", 0);
        let op = RandomFill { len: s.text * d.text_dim, std: 1.0, rng, dtype: DType::Bf16 };
        self.b.launch(op, &[self.words, sample.text]);
        Ok(sample)
    }

    /// Of rows of all tensor ranks those that are this rank's.
    fn own_rows(&mut self, x: BufId, cols: usize) -> BufId {
        if !self.split() {
            return x;
        }
        let name = format!("{}.own", self.b.program.buffer(x).name);
        let shape = [self.split_tokens, cols];
        let found = self.b.find(&name);
        found.unwrap_or_else(|| self.b.view(&name, x, 0, &shape, Init::Inherit, Shard::default()))
    }

    /// Embeddings of patches, time and text; returns the first block's input.
    pub(super) fn dit_begin(&mut self, d: &Diffusion, x: VideoSample) -> Result<BufId, WorkloadError> {
        self.b.at(None, Part::Embedding, Pass::Forward);
        let s = self.sizes(d);
        let patches = self.biased_product(s.patch(), x.noisy, None)?;
        let act = self.curved_product(s.time("dit.time1", d.freq_dim, s.h), Curve::Silu, x.time)?;
        let time = self.biased_product(s.time("dit.time2", s.h, s.h), act, None)?;
        let curved = self.named("dit.time.silu", &[s.sequences, s.h]);
        let op = CurveFwd { rows: s.sequences, cols: s.h, curve: Curve::Silu, bias: false };
        self.b.launch(op, &[time, curved]);
        self.biased_product(s.time("dit.time3", s.h, SLOTS * s.h), curved, None)?;
        let act = self.curved_product(s.text("dit.text1", d.text_dim), Curve::Gelu, x.text)?;
        self.biased_product(s.text("dit.text2", d.context_size), act, None)?;
        Ok(self.own_rows(patches, s.h))
    }

    /// Gradients of the embeddings, from that of the first block's input.
    pub(super) fn dit_end(&mut self, d: &Diffusion, x: VideoSample, dx: BufId) -> Result<(), WorkloadError> {
        self.b.at(None, Part::Embedding, Pass::Backward);
        let s = self.sizes(d);
        let dx = self.gather_tokens(0, "dit.dx", dx, s.h);
        self.product_gradients(s.patch(), x.noisy, dx)?;

        let dtext = self.act(0, "cross.dcontext", &[s.text, d.context_size]);
        if self.cfg.parallel.tp > 1 {
            let ranks = self.cfg.parallel.tp;
            let (rows, cols) = (s.text, d.context_size);
            let op = StandIn { kind: Collective::AllReduce, rows, cols, ranks, dtype: DType::Bf16 };
            self.b.launch(op, &[dtext]);
        }
        let first = s.text("dit.text1", d.text_dim);
        let act = self.named("dit.text1.act", &[s.text, d.context_size]);
        let dact = self.product_backward(s.text("dit.text2", d.context_size), act, dtext, None)?;
        let dh = self.curve_backward(first, Curve::Gelu, dact)?;
        self.product_gradients(first, x.text, dh)?;

        let (sum, of_head) = (self.dtime(&s), self.dtime_of_head(&s));
        let dslots = self.named("dit.dslots", &[s.sequences, SLOTS * s.h]);
        self.b.launch(ToBf16 { len: s.sequences * SLOTS * s.h, add: false }, &[sum, dslots]);
        let [curved, time] = ["dit.time.silu", "dit.time2.out"].map(|n| self.named(n, &[s.sequences, s.h]));
        let dcurved = self.product_backward(s.time("dit.time3", s.h, SLOTS * s.h), curved, dslots, None)?;
        let [through, dtime] = ["dit.dsilu", "dit.dtime2"].map(|n| self.named(n, &[s.sequences, s.h]));
        let op = CurveBwd { rows: s.sequences, cols: s.h, curve: Curve::Silu, bias: false };
        self.b.launch(op, &[time, dcurved, through]);
        self.b.launch(ToBf16 { len: s.sequences * s.h, add: true }, &[of_head, through, dtime]);
        let act = self.named("dit.time1.act", &[s.sequences, s.h]);
        let dact = self.product_backward(s.time("dit.time2", s.h, s.h), act, dtime, None)?;
        let first = s.time("dit.time1", d.freq_dim, s.h);
        let dh = self.curve_backward(first, Curve::Silu, dact)?;
        self.product_gradients(first, x.time, dh)
    }

    /// The head's prediction and the loss: the mean over the step's tokens of this rank.
    pub(super) fn dit_head(
        &mut self,
        d: &Diffusion,
        x: BufId,
        sample: VideoSample,
        loss: BufId,
    ) -> Result<(), WorkloadError> {
        let s = self.sizes(d);
        self.b.at(None, Part::Head, Pass::Forward);
        let time = self.named("dit.time2.out", &[s.sequences, s.h]);
        let y = self.modulated_norm("dit.head", x, time, &s, s.of_head())?;
        let out = self.biased_product(s.head(), y, None)?;
        let l = self.share.layers.len();
        let out = self.gather_tokens(l, "dit.head", out, d.out_values);
        self.b.at(None, Part::Loss, Pass::Forward);
        let scale = 1.0 / (s.t * self.cfg.batch.num_microbatches) as f32;
        let per_token = self.f32_named("loss.per_token", &[s.t]);
        let op = FlowLoss { tokens: s.t, values: d.out_values, grad_scale: scale };
        self.b.launch(op, &[out, sample.target, per_token]);
        self.b.launch(LossSum { tokens: s.t, scale }, &[per_token, loss]);
        Ok(())
    }

    /// Sums of the time embedding's gradients begin at zero.
    pub(super) fn dit_begin_backward(&mut self, d: &Diffusion) {
        let s = self.sizes(d);
        self.b.at(None, Part::Embedding, Pass::Backward);
        let (all, head) = (self.dtime(&s), self.dtime_of_head(&s));
        self.b.launch(Zero { dtype: DType::F32, len: s.sequences * SLOTS * s.h }, &[all]);
        if !self.cfg.stack_only {
            self.b.launch(Zero { dtype: DType::F32, len: s.sequences * s.h }, &[head]);
        }
    }

    /// From the prediction's gradient to that of the last block's output `x`.
    pub(super) fn dit_head_backward(&mut self, d: &Diffusion, x: BufId) -> Result<BufId, WorkloadError> {
        let s = self.sizes(d);
        self.b.at(None, Part::Head, Pass::Backward);
        let l = self.share.layers.len();
        let mut dout = self.named("dit.head.out", &[s.split, d.out_values]);
        if self.split() {
            let all = self.act(l, "dit.head.gathered", &[s.t, d.out_values]);
            dout = self.reduce_tokens(l, "dit.head", all, d.out_values);
        }
        let y = self.named("dit.head.norm.out", &[s.split, s.h]);
        let dy = self.product_backward(s.head(), y, dout, None)?;
        let time = self.named("dit.time2.out", &[s.sequences, s.h]);
        let dtime = self.dtime_of_head(&s);
        self.modulated_norm_backward("dit.head", x, [time, dtime], &s, s.of_head(), dy, None, None)
    }

    /// LayerNorm `[split, h]` modulated by `<name>.mod.weight` and the time embedding.
    fn modulated_norm(
        &mut self,
        name: &str,
        x: BufId,
        time: BufId,
        s: &Sizes,
        m: Modulation,
    ) -> Result<BufId, WorkloadError> {
        let table = self.weights.get(&format!("{name}.mod.weight"))?;
        let y = self.named(&format!("{name}.norm.out"), &[s.split, s.h]);
        let stats = self.f32_named(&format!("{name}.norm.stats"), &[s.split, 2]);
        let eps = self.cfg.model.layernorm_epsilon;
        let op = LayerNormFwd { rows: s.split, hidden: s.h, eps, modulation: Some(m) };
        self.b.launch(op, &[x, table.value, time, y, stats]);
        Ok(y)
    }

    /// Its gradient (`+ dres`), and those of the table, the time embedding, and the bias of a gated residual.
    #[allow(clippy::too_many_arguments)]
    fn modulated_norm_backward(
        &mut self,
        name: &str,
        x: BufId,
        [time, dtime]: [BufId; 2],
        s: &Sizes,
        m: Modulation,
        dy: BufId,
        dres: Option<BufId>,
        gate: Option<Gate>,
    ) -> Result<BufId, WorkloadError> {
        let table = self.weights.get(&format!("{name}.mod.weight"))?;
        let stats = self.f32_named(&format!("{name}.norm.stats"), &[s.split, 2]);
        let dx = self.named(&format!("{name}.norm.dx"), &[s.split, s.h]);
        let op = LayerNormBwd { rows: s.split, hidden: s.h, modulation: Some(m), residual: dres.is_some() };
        let parts = op.parts();
        let partial = self.f32_named(&format!("{name}.norm.partial"), &[m.sequences * parts, 2 * s.h]);
        let mut args = vec![x, stats, dy, table.value, time];
        args.extend(dres);
        args.extend([dx, partial]);
        self.b.launch(op, &args);
        let op = ModulationGrad {
            hidden: s.h,
            modulation: m,
            norm_parts: parts,
            gate_parts: gate.as_ref().map(|g| g.parts),
            out: self.grad_dtype(),
            accumulate: self.accumulate == crate::ops::gemm::Accumulate::InPlace,
        };
        let mut args = vec![partial];
        args.extend(gate.as_ref().map(|g| g.partial));
        args.extend([table.grad, dtime]);
        args.extend(gate.map(|g| g.bias.grad));
        self.b.launch(op, &args);
        Ok(dx)
    }

    /// `x + (y + bias) * gate`: `<name>.gated`.
    fn gated(
        &mut self,
        name: &str,
        [x, y, time]: [BufId; 3],
        bias: Weight,
        s: &Sizes,
        modulation: Modulation,
    ) -> Result<BufId, WorkloadError> {
        let table = self.weights.get(&format!("{name}.mod.weight"))?;
        let out = self.named(&format!("{name}.gated"), &[s.split, s.h]);
        let op = GatedResidualFwd { rows: s.split, hidden: s.h, modulation };
        self.b.launch(op, &[x, y, bias.value, table.value, time, out]);
        Ok(out)
    }

    /// Gradient of `y`, and what the gate's, the table's and the bias' gradients are summed from.
    fn gated_residual_backward(
        &mut self,
        name: &str,
        [dout, y, time]: [BufId; 3],
        bias: Weight,
        s: &Sizes,
        modulation: Modulation,
    ) -> Result<(BufId, Gate), WorkloadError> {
        let table = self.weights.get(&format!("{name}.mod.weight"))?;
        let dy = self.named(&format!("{name}.dgated"), &[s.split, s.h]);
        let op = GatedResidualBwd { rows: s.split, hidden: s.h, modulation };
        let parts = op.parts();
        let partial = self.f32_named(&format!("{name}.gate.partial"), &[s.sequences * parts, 2 * s.h]);
        self.b.launch(op, &[dout, y, bias.value, table.value, time, dy, partial]);
        Ok((dy, Gate { partial, parts, bias }))
    }

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
    pub(super) fn dit_attention_forward(
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

    pub(super) fn dit_attention_backward(
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
    pub(super) fn dit_mlp_forward(
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

    pub(super) fn dit_mlp_backward(
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
