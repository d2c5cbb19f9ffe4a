//! Attention with grouped query heads, forward and backward: causal, or bidirectional, where every query sees every key
//! and there may be more or fewer keys than queries (cross-attention, image towers, diffusion).
//!
//! `o = softmax(mask(q k^T / sqrt(d))) v` per head; query head h reads key and value head
//! `h / (q_heads / kv_heads)`. A query row at global position p sees the keys at positions 0..=p, or with a window of w
//! keys the last w of them. With sinks (Xiao et al., "StreamingLLM", 2023; learned: gpt-oss, arXiv:2508.10925) every head
//! has one more logit in its softmax, which belongs to no key: it only takes probability away. The scores
//! are never stored: the forward pass keeps one log-sum-exp a row, the backward pass recomputes from it
//! (Dao, "FlashAttention-2", 2023; online softmax: Milakov and Gimelshein, 2018).
//!
//! Rounding on the device: inputs and outputs bf16; scores, softmax and all sums fp32; the (dropped)
//! probabilities and the score gradients are rounded to bf16 where they enter the second products. The CPU
//! reference leaves those two unrounded.

mod hopper;
mod launch;
mod reference;
#[cfg(test)]
mod tests;
mod window;

pub use launch::has_kernels;

use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue};
use crate::ops::dropout::Dropout;
use crate::ops::rng::{WORDS, normal_of, philox};
use crate::ops::rope::Positions;
use crate::ops::{ArgSpec, CpuArgs, Op, Real, Sample, tolerance};
use crate::program::DType;
use std::ops::Range;

/// Shapes of one attention. Rows of q, o and their gradients are `b * q_len + i`; rows of k and v are
/// `b * kv_len + j` with j the global position (bidirectional: any order).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AttnShape {
    /// Of the query rows: `batch` sequences of `seq` = q_len local rows, in up to two chunks.
    pub positions: Positions,
    /// Keys a sequence: the global length.
    pub kv_len: usize,
    pub q_heads: usize,
    /// Divides `q_heads`.
    pub kv_heads: usize,
    /// Width of a query and key head, d: on the device a multiple of 16 up to 256 (of 8 where values are as wide), or of 32
    /// up to 512.
    pub head_dim: usize,
    /// Width of a value head, dv, where it is another one (multi-latent attention); `None`: `head_dim`.
    pub head_dim_v: Option<usize>,
    /// Factor of the scores; `None`: 1 / sqrt(head_dim).
    pub scale: Option<f64>,
    /// Every row sees every key, whatever the positions.
    pub bidirectional: bool,
    /// Keys that a row sees at most, its own among them; `None`: all up to its own.
    pub window: Option<usize>,
    /// One learned logit a head in the denominator, not scaled.
    pub sinks: bool,
    /// On the probabilities. Element index `((b * q_heads + h) * q_len + i) * kv_len + j`, modulo 2^34.
    pub dropout: Option<Dropout>,
}

impl AttnShape {
    pub fn batch(&self) -> usize {
        self.positions.batch
    }
    /// Query rows a sequence.
    pub fn q_len(&self) -> usize {
        self.positions.seq
    }
    /// Factor of the scores: 1 / sqrt(head_dim), or what was given.
    pub fn scale(&self) -> f64 {
        self.scale.unwrap_or(1.0 / (self.head_dim as f64).sqrt())
    }
    /// Width of a value head.
    pub fn value_dim(&self) -> usize {
        self.head_dim_v.unwrap_or(self.head_dim)
    }
    /// The window, where it hides anything.
    pub fn window(&self) -> Option<usize> {
        self.window.filter(|w| *w < self.kv_len)
    }
    /// Keys that local query row `i` sees.
    pub fn visible(&self, i: usize) -> Range<usize> {
        if self.bidirectional {
            return 0..self.kv_len;
        }
        let end = self.positions.position(i) + 1;
        let first = self.window().map_or(0, |w| end.saturating_sub(w));
        first.min(self.kv_len)..end.min(self.kv_len)
    }
    /// Pairs of a query and a key that it sees, over all heads and sequences.
    pub fn pairs(&self) -> f64 {
        let one: f64 = (0..self.q_len()).map(|i| self.visible(i).len() as f64).sum();
        one * (self.batch() * self.q_heads) as f64
    }
    fn q_shape(&self) -> [usize; 2] {
        [self.batch() * self.q_len(), self.q_heads * self.head_dim]
    }
    fn o_shape(&self) -> [usize; 2] {
        [self.batch() * self.q_len(), self.q_heads * self.value_dim()]
    }
    fn k_shape(&self) -> [usize; 2] {
        [self.batch() * self.kv_len, self.kv_heads * self.head_dim]
    }
    fn v_shape(&self) -> [usize; 2] {
        [self.batch() * self.kv_len, self.kv_heads * self.value_dim()]
    }
    fn lse_shape(&self) -> [usize; 3] {
        [self.batch(), self.q_heads, self.q_len()]
    }
}

/// Args: q R bf16 `[B*q_len, q_heads*d]`, k R bf16 `[B*kv_len, kv_heads*d]`, v R bf16 `[B*kv_len, kv_heads*dv]`,
/// (sinks R bf16 `[q_heads]` with sinks), (words R u32 `[WORDS]` with dropout), o W bf16 `[B*q_len, q_heads*dv]`, lse W f32
/// `[B, q_heads, q_len]` (natural logarithm, of the scaled scores and the sink).
#[derive(Debug, Clone, PartialEq)]
pub struct AttnFwd {
    pub shape: AttnShape,
}

/// Args: q R, k R, v R, o R, lse R, do R (as in [`AttnFwd`]), (sinks R with sinks), (words R with dropout), dq W, dk W, dv W
/// bf16, (dsinks W f32 `[B, q_heads]` with sinks: a sequence's part of their gradient).
#[derive(Debug, Clone, PartialEq)]
pub struct AttnBwd {
    pub shape: AttnShape,
}

impl Op for AttnFwd {
    fn name(&self) -> &'static str {
        "attention_fwd"
    }

    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let mut args = vec![
            ArgSpec::read("q", DType::Bf16, &s.q_shape()),
            ArgSpec::read("k", DType::Bf16, &s.k_shape()),
            ArgSpec::read("v", DType::Bf16, &s.v_shape()),
        ];
        if s.sinks {
            args.push(ArgSpec::read("sinks", DType::Bf16, &[s.q_heads]));
        }
        if s.dropout.is_some() {
            args.push(ArgSpec::read("words", DType::U32, &[WORDS]));
        }
        args.push(ArgSpec::write("o", DType::Bf16, &s.o_shape()));
        args.push(ArgSpec::write("lse", DType::F32, &s.lse_shape()));
        args
    }

    /// Two products over the visible pairs.
    fn flops(&self) -> f64 {
        2.0 * self.shape.pairs() * (self.shape.head_dim + self.shape.value_dim()) as f64
    }

    fn tolerance(&self, arg: usize) -> f64 {
        let s = &self.shape;
        if self.args().get(arg).is_some_and(|a| a.dtype == DType::F32) {
            return tolerance(DType::F32, s.head_dim + s.kv_len, 0);
        }
        // The probabilities are rounded on the device.
        tolerance(DType::Bf16, s.head_dim + s.kv_len, 1)
    }

    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        launch::forward(&self.shape, cuda, args)
    }
}

impl AttnFwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let s = &self.shape;
        launch::check(s)?;
        let (q, k, v) = (args.input(0)?, args.input(1)?, args.input(2)?);
        let sinks = if s.sinks { args.input(3)? } else { &[] };
        let at = 3 + usize::from(s.sinks);
        let words = if s.dropout.is_some() { args.ints(at)? } else { &[] };
        let out = at + usize::from(s.dropout.is_some());
        let given = reference::Given { q, k, v, sinks, words };
        reference::forward(s, &given, args.output(out)?, args.output(out + 1)?);
        Ok(())
    }
}

impl Op for AttnBwd {
    fn name(&self) -> &'static str {
        "attention_bwd"
    }

    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let mut args = vec![
            ArgSpec::read("q", DType::Bf16, &s.q_shape()),
            ArgSpec::read("k", DType::Bf16, &s.k_shape()),
            ArgSpec::read("v", DType::Bf16, &s.v_shape()),
            ArgSpec::read("o", DType::Bf16, &s.o_shape()).sample(Sample::Custom),
            ArgSpec::read("lse", DType::F32, &s.lse_shape()).sample(Sample::Custom),
            ArgSpec::read("do", DType::Bf16, &s.o_shape()),
        ];
        if s.sinks {
            args.push(ArgSpec::read("sinks", DType::Bf16, &[s.q_heads]));
        }
        if s.dropout.is_some() {
            args.push(ArgSpec::read("words", DType::U32, &[WORDS]));
        }
        args.push(ArgSpec::write("dq", DType::Bf16, &s.q_shape()));
        args.push(ArgSpec::write("dk", DType::Bf16, &s.k_shape()));
        args.push(ArgSpec::write("dv", DType::Bf16, &s.v_shape()));
        if s.sinks {
            args.push(ArgSpec::write("dsinks", DType::F32, &[s.batch(), s.q_heads]));
        }
        args
    }

    /// Five products over the visible pairs (the scores once more, and four gradients); what the kernels
    /// recompute beyond that is not counted.
    fn flops(&self) -> f64 {
        // Scores, dq and dk are as wide as a key, dp and dv as a value.
        2.0 * self.shape.pairs() * (3 * self.shape.head_dim + 2 * self.shape.value_dim()) as f64
    }

    /// Without the scores, which are formed again.
    fn model_flops(&self) -> f64 {
        2.0 * AttnFwd { shape: self.shape.clone() }.flops()
    }

    fn workspace(&self) -> usize {
        launch::backward_workspace(&self.shape)
    }

    fn tolerance(&self, arg: usize) -> f64 {
        let f32_arg = self.args().get(arg).is_some_and(|a| a.dtype == DType::F32);
        if f32_arg {
            return tolerance(DType::F32, self.shape.value_dim() + self.shape.q_len(), 0);
        }
        // Probabilities and score gradients are rounded on the device; dk and dv sum over the group's rows.
        let s = &self.shape;
        let rows = s.q_len() * s.q_heads / s.kv_heads.max(1);
        tolerance(DType::Bf16, s.head_dim + s.kv_len.max(rows), 2)
    }

    /// q, k, v and do random; o and lse those of the forward pass, as bf16 and f32 hold them.
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        let s = &self.shape;
        let normals = |arg: u32, n: usize| -> Vec<f64> {
            let value =
                |i: usize| normal_of(philox([i as u32, arg, 0, 0], [seed as u32, (seed >> 32) as u32]));
            (0..n).map(|i| value(i).bf16().f64()).collect()
        };
        let len = |shape: [usize; 2]| shape.iter().product::<usize>();
        let (q, k) = (normals(0, len(s.q_shape())), normals(1, len(s.k_shape())));
        let (v, d_o) = (normals(2, len(s.v_shape())), normals(3, len(s.o_shape())));
        let words: Vec<i32> = (0..WORDS as i32).map(|i| i + 1).collect();
        let (mut o, mut lse) = (vec![0.0f64; d_o.len()], vec![0.0f64; s.lse_shape().iter().product()]);
        let sinks = if s.sinks { normals(4, s.q_heads) } else { Vec::new() };
        let given = reference::Given { q: &q, k: &k, v: &v, sinks: &sinks, words: &words };
        reference::forward(s, &given, &mut o, &mut lse);
        o.iter_mut().for_each(|x| *x = (*x as f32).bf16().f64());
        lse.iter_mut().for_each(|x| *x = *x as f32 as f64);
        let mut values = vec![q, k, v, o, lse, d_o];
        if s.sinks {
            values.push(sinks);
        }
        if s.dropout.is_some() {
            values.push(words.into_iter().map(f64::from).collect());
        }
        values.resize(self.args().len(), Vec::new());
        Some(values)
    }

    cpu_reference!();

    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], workspace: DevPtr) -> Result<Issue, DeviceError> {
        launch::backward(&self.shape, cuda, args, workspace)
    }
}

impl AttnBwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let s = &self.shape;
        launch::check(s)?;
        let at = 6 + usize::from(s.sinks);
        let given = reference::Given {
            q: args.input(0)?,
            k: args.input(1)?,
            v: args.input(2)?,
            sinks: if s.sinks { args.input(6)? } else { &[] },
            words: if s.dropout.is_some() { args.ints(at)? } else { &[] },
        };
        let saved = reference::Saved { given, o: args.input(3)?, lse: args.input(4)?, d_o: args.input(5)? };
        let out = at + usize::from(s.dropout.is_some());
        reference::backward(s, &saved, args.output(out)?, args.output(out + 1)?, args.output(out + 2)?);
        if s.sinks {
            reference::sink_gradient(s, &saved, args.output(out + 3)?);
        }
        Ok(())
    }
}
