//! CPU reference: one row of scores at a time, sums in the reference's own element type.

use super::AttnShape;
use crate::ops::Real;
use rayon::prelude::*;

/// What both passes read, in the layouts of [`super::AttnFwd`].
pub(super) struct Given<'a, T> {
    pub q: &'a [T],
    pub k: &'a [T],
    pub v: &'a [T],
    /// Empty without sinks.
    pub sinks: &'a [T],
    /// Step words; empty without dropout.
    pub words: &'a [i32],
}

/// What the backward pass reads, in the layouts of [`super::AttnBwd`].
pub(super) struct Saved<'a, T> {
    pub given: Given<'a, T>,
    pub o: &'a [T],
    pub lse: &'a [T],
    pub d_o: &'a [T],
}

/// One head of a row-major `[rows, heads * d]` matrix.
#[derive(Clone, Copy)]
struct Head<'a, T> {
    data: &'a [T],
    first_row: usize,
    width: usize,
    head: usize,
    d: usize,
}

impl<'a, T: Real> Head<'a, T> {
    fn row(&self, i: usize) -> &'a [T] {
        let at = (self.first_row + i) * self.width + self.head * self.d;
        &self.data[at..at + self.d]
    }
}

fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    a.iter().zip(b).map(|(x, y)| *x * *y).sum()
}

/// y += a * x
fn add_scaled<T: Real>(y: &mut [T], a: T, x: &[T]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += a * *x);
}

impl AttnShape {
    fn q_head<'a, T>(&self, data: &'a [T], b: usize, head: usize) -> Head<'a, T> {
        let d = self.head_dim;
        Head { data, first_row: b * self.q_len(), width: self.q_heads * d, head, d }
    }
    fn o_head<'a, T>(&self, data: &'a [T], b: usize, head: usize) -> Head<'a, T> {
        let d = self.value_dim();
        Head { data, first_row: b * self.q_len(), width: self.q_heads * d, head, d }
    }
    fn k_head<'a, T>(&self, data: &'a [T], b: usize, head: usize) -> Head<'a, T> {
        let d = self.head_dim;
        Head { data, first_row: b * self.kv_len, width: self.kv_heads * d, head, d }
    }
    fn v_head<'a, T>(&self, data: &'a [T], b: usize, head: usize) -> Head<'a, T> {
        let d = self.value_dim();
        Head { data, first_row: b * self.kv_len, width: self.kv_heads * d, head, d }
    }
    /// Factor of probability (b, h, i, j): 0 if dropped, 1 / (1 - p) if kept, 1 without dropout.
    fn keep<T: Real>(&self, words: &[i32], (b, h, i, j): (usize, usize, usize, usize)) -> T {
        let Some(dropout) = &self.dropout else { return T::of(1.0) };
        let index = ((b * self.q_heads + h) * self.q_len() + i) * self.kv_len + j;
        let kept = dropout.keeps(dropout.rng.word(words, index));
        T::of(if kept { dropout.scale() } else { 0.0 })
    }
}

/// Writes per-head blocks `[rows, d]` into a row-major `[rows, heads * d]` matrix; blocks in order (b, head).
fn scatter<'a, T: Real + 'a>(
    out: &mut [T],
    rows: usize,
    heads: usize,
    d: usize,
    blocks: impl Iterator<Item = &'a Vec<T>>,
) {
    for (n, block) in blocks.enumerate() {
        let (b, head) = (n / heads, n % heads);
        for (i, row) in block.chunks_exact(d).enumerate() {
            let at = ((b * rows + i) * heads + head) * d;
            out[at..at + d].iter_mut().zip(row).for_each(|(o, x)| *o = x.bf16());
        }
    }
}

pub(super) fn forward<T: Real>(s: &AttnShape, x: &Given<T>, o: &mut [T], lse: &mut [T]) {
    let (dv, scale, group) = (s.value_dim(), T::of(s.scale()), s.q_heads / s.kv_heads);
    let one_head = |(b, h): (usize, usize)| -> (Vec<T>, Vec<T>) {
        let q = s.q_head(x.q, b, h);
        let (k, v) = (s.k_head(x.k, b, h / group), s.v_head(x.v, b, h / group));
        let sink = x.sinks.get(h).copied();
        let (mut o, mut lse) = (vec![T::default(); s.q_len() * dv], Vec::with_capacity(s.q_len()));
        for (i, o) in o.chunks_exact_mut(dv).enumerate() {
            let seen = s.visible(i);
            let scores: Vec<T> = seen.clone().map(|j| scale * dot(q.row(i), k.row(j))).collect();
            let logits = || scores.iter().copied().chain(sink);
            let max = logits().fold(scores[0], Real::max);
            let sum: T = logits().map(|x| (x - max).exp()).sum();
            let row_lse = max + sum.ln();
            for (j, score) in seen.zip(&scores) {
                let p = (*score - row_lse).exp();
                add_scaled(o, p * s.keep(x.words, (b, h, i, j)), v.row(j));
            }
            lse.push(row_lse.f32());
        }
        (o, lse)
    };
    let heads: Vec<(usize, usize)> =
        (0..s.batch()).flat_map(|b| (0..s.q_heads).map(move |h| (b, h))).collect();
    let done: Vec<(Vec<T>, Vec<T>)> = heads.into_par_iter().map(one_head).collect();
    scatter(o, s.q_len(), s.q_heads, dv, done.iter().map(|(o, _)| o));
    for (out, (_, row)) in lse.chunks_exact_mut(s.q_len()).zip(&done) {
        out.copy_from_slice(row);
    }
}

/// Gradients of one kv head and its group: dq `[q_len, d]` a query head, dk `[kv_len, d]`, dv `[kv_len, dv]`.
struct Grads<T> {
    dq: Vec<Vec<T>>,
    dk: Vec<T>,
    dv: Vec<T>,
}

/// With z the dropout factors and delta_i = do_i . o_i: dv_j = sum_i z p do_i; dp = z do_i . v_j;
/// ds = p (dp - delta_i); dq_i = scale sum_j ds k_j; dk_j = scale sum_i ds q_i.
pub(super) fn backward<T: Real>(s: &AttnShape, x: &Saved<T>, dq: &mut [T], dk: &mut [T], dv: &mut [T]) {
    let (d, width_v, scale) = (s.head_dim, s.value_dim(), T::of(s.scale()));
    let group = s.q_heads / s.kv_heads;
    let one_kv_head = |(b, kv): (usize, usize)| -> Grads<T> {
        let (k, v) = (s.k_head(x.given.k, b, kv), s.v_head(x.given.v, b, kv));
        let zeros = |rows: usize, width: usize| vec![T::default(); rows * width];
        let mut grads = Grads { dq: Vec::new(), dk: zeros(s.kv_len, d), dv: zeros(s.kv_len, width_v) };
        for h in kv * group..(kv + 1) * group {
            let (q, o, d_o) = (s.q_head(x.given.q, b, h), s.o_head(x.o, b, h), s.o_head(x.d_o, b, h));
            let mut dq = zeros(s.q_len(), d);
            for (i, dq) in dq.chunks_exact_mut(d).enumerate() {
                let lse = x.lse[(b * s.q_heads + h) * s.q_len() + i];
                let delta = dot(d_o.row(i), o.row(i));
                for j in s.visible(i) {
                    let p = (scale * dot(q.row(i), k.row(j)) - lse).exp();
                    let keep: T = s.keep(x.given.words, (b, h, i, j));
                    let ds = scale * p * (keep * dot(d_o.row(i), v.row(j)) - delta);
                    add_scaled(&mut grads.dv[j * width_v..(j + 1) * width_v], keep * p, d_o.row(i));
                    add_scaled(&mut grads.dk[j * d..(j + 1) * d], ds, q.row(i));
                    add_scaled(dq, ds, k.row(j));
                }
            }
            grads.dq.push(dq);
        }
        grads
    };
    let heads: Vec<(usize, usize)> =
        (0..s.batch()).flat_map(|b| (0..s.kv_heads).map(move |h| (b, h))).collect();
    let done: Vec<Grads<T>> = heads.into_par_iter().map(one_kv_head).collect();
    scatter(dq, s.q_len(), s.q_heads, d, done.iter().flat_map(|g| &g.dq));
    scatter(dk, s.kv_len, s.kv_heads, d, done.iter().map(|g| &g.dk));
    scatter(dv, s.kv_len, s.kv_heads, width_v, done.iter().map(|g| &g.dv));
}

/// A sink's probability is exp(sink - lse) and it has no value: dsink = -sum_i exp(sink - lse_i) delta_i, `[batch, q_heads]`.
pub(super) fn sink_gradient<T: Real>(s: &AttnShape, x: &Saved<T>, dsinks: &mut [T]) {
    for (n, dsink) in dsinks.iter_mut().enumerate() {
        let (b, h) = (n / s.q_heads, n % s.q_heads);
        let (o, d_o) = (s.o_head(x.o, b, h), s.o_head(x.d_o, b, h));
        let of_row = |i: usize| {
            let p = (x.given.sinks[h] - x.lse[n * s.q_len() + i]).exp();
            (p * dot(d_o.row(i), o.row(i))).f64()
        };
        *dsink = T::of(-(0..s.q_len()).map(of_row).sum::<f64>()).f32();
    }
}
