//! A diffusion transformer on video latents, as Wan 2.1 has it (arXiv:2503.20314): blocks of self-attention, cross-attention to
//! text and a GELU MLP, whose norms, and the gates of whose residuals, follow the time step; patches, time and text are
//! embedded before the first block, a modulated head and a flow-matching loss end the last.
//!
//! Tensor parallelism splits heads and the MLP; the norm over all heads of q and k, which upstream gathers them for, is over
//! the rank's own (the gathers' bytes are copied all the same). Context parallelism splits video and text.

mod blocks;
mod modulation;

use super::linear_biased::{Product, layer_norm, linear};
use super::rng::INPUTS;
use super::share::RankShare;
use super::weights::Spec;
use super::{Stack, WorkloadError};
use crate::config::{Diffusion, RunConfig};
use crate::ops::collective::{Collective, StandIn};
use crate::ops::cross_entropy::LossSum;
use crate::ops::flow::{FlowLoss, FlowSample};
use crate::ops::gelu::{Curve, CurveBwd, CurveFwd};
use crate::ops::layer_norm::Modulation;
use crate::ops::layer_norm::gate::ToBf16;
use crate::ops::step::{RandomFill, Zero};
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
            sample: self.b.rng("video", INPUTS),
            noise: self.b.rng("noise", INPUTS),
            time: self.b.rng("time", INPUTS),
        };
        self.b.launch(op, &[self.words, sample.noisy, sample.target, sample.time]);
        let rng = self.b.rng("text", INPUTS);
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
}
