//! CPU references: the recurrence and its adjoint, token by token. One head at a time, sums in the element type.

use super::{CHUNK, DeltaShape, NORM_EPS};
use crate::device::DeviceError;
use crate::ops::{CpuArgs, Real};
use rayon::prelude::*;

/// What both directions read.
struct Inputs<'a, T> {
    s: DeltaShape,
    qkv: &'a [T],
    proj: &'a [T],
    a_log: &'a [T],
    dt_bias: &'a [T],
}

/// One token of one value head, ready for the recurrence.
struct Token<'a, T> {
    /// Scaled to length 1; q by 1/sqrt(K) too.
    q: Vec<T>,
    k: Vec<T>,
    v: &'a [T],
    /// What q and k were scaled by.
    q_scale: T,
    k_scale: T,
    /// Logarithm of the decay, and beta.
    g: f64,
    beta: f64,
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    a.iter().zip(b).map(|(a, b)| *a * *b).sum()
}
fn axpy<T: Real>(y: &mut [T], w: T, x: &[T]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += w * *x);
}
/// `state [V, K] += left right^T`.
fn add_outer<T: Real>(state: &mut [T], left: &[T], right: &[T]) {
    state.chunks_mut(right.len().max(1)).zip(left).for_each(|(row, w)| axpy(row, *w, right));
}
/// `state [V, K]` times a vector over K, and its transpose times one over V.
fn times<T: Real>(state: &[T], x: &[T]) -> Vec<T> {
    state.chunks(x.len().max(1)).map(|row| dot(row, x)).collect()
}
fn transposed_times<T: Real>(state: &[T], x: &[T], k: usize) -> Vec<T> {
    let mut out = vec![T::of(0.0); k];
    state.chunks(k.max(1)).zip(x).for_each(|(row, w)| axpy(&mut out, *w, row));
    out
}

impl<'a, T: Real> Inputs<'a, T> {
    fn take(s: &DeltaShape, args: &mut CpuArgs<'a, T>) -> Result<Self, DeviceError> {
        if s.key_heads == 0 || !s.value_heads.is_multiple_of(s.key_heads) {
            return Err(DeviceError::Invalid(format!(
                "delta net: {} value heads do not divide among {} key heads; change the heads or -tp",
                s.value_heads, s.key_heads
            )));
        }
        Ok(Self {
            s: *s,
            qkv: args.input(0)?,
            proj: args.input(1)?,
            a_log: args.input(2)?,
            dt_bias: args.input(3)?,
        })
    }
    fn key_head(&self, h: usize) -> usize {
        h / (self.s.value_heads / self.s.key_heads)
    }
    /// Raw q (which 0) or k (which 1) of value head `h`'s key head.
    fn raw(&self, token: usize, h: usize, which: usize) -> &'a [T] {
        let s = &self.s;
        let first = which * s.key_width() + self.key_head(h) * s.key_dim;
        &self.qkv[token * s.qkv_width() + first..][..s.key_dim]
    }
    /// Raw b (which 0) or alpha (which 1).
    fn gate(&self, token: usize, h: usize, which: usize) -> f64 {
        let s = &self.s;
        self.proj[(token + 1) * s.projected_width() - (2 - which) * s.value_heads + h].f64()
    }
    /// A = -exp(a_log), and the argument of softplus.
    fn a(&self, h: usize) -> f64 {
        -self.a_log[h].f64().exp()
    }
    fn step(&self, token: usize, h: usize) -> f64 {
        self.gate(token, h, 1) + self.dt_bias[h].f64()
    }
    fn token(&self, token: usize, h: usize) -> Token<'a, T> {
        let s = &self.s;
        let scaled = |which: usize, by: f64| {
            let raw = self.raw(token, h, which);
            let square: f64 = raw.iter().map(|x| x.f64() * x.f64()).sum();
            let scale = T::of(by / (square + NORM_EPS).sqrt());
            (raw.iter().map(|x| *x * scale).collect::<Vec<T>>(), scale)
        };
        let (q, q_scale) = scaled(0, 1.0 / (s.key_dim as f64).sqrt());
        let (k, k_scale) = scaled(1, 1.0);
        let v = &self.qkv[token * s.qkv_width() + 2 * s.key_width() + h * s.value_dim..][..s.value_dim];
        let x = self.step(token, h);
        let softplus = if x > 20.0 { x } else { x.exp().ln_1p() };
        Token { q, k, v, q_scale, k_scale, g: self.a(h) * softplus, beta: sigmoid(self.gate(token, h, 0)) }
    }
    /// First token and length of every chunk of sequence `b`.
    fn chunks(&self, b: usize) -> impl DoubleEndedIterator<Item = (usize, usize, usize)> + use<T> {
        let seq = self.s.seq;
        (0..self.s.chunks()).map(move |c| (c, b * seq + c * CHUNK, CHUNK.min(seq - c * CHUNK)))
    }
}

impl<T: Real> Token<'_, T> {
    /// Decays the state and writes the token into it; returns u = beta (v - S k) with S decayed.
    fn step(&self, state: &mut [T]) -> Vec<T> {
        let decay = T::of(self.g.exp());
        state.iter_mut().for_each(|x| *x *= decay);
        let held = times(state, &self.k);
        let beta = T::of(self.beta);
        let u: Vec<T> = self.v.iter().zip(held).map(|(v, p)| beta * (*v - p)).collect();
        add_outer(state, &u, &self.k);
        u
    }
}

pub(super) fn forward<T: Real>(s: &DeltaShape, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
    let input = Inputs::take(s, args)?;
    let (o, states) = (args.output(4)?, args.output(5)?);
    let (v, k) = (s.value_dim, s.key_dim);
    let one = |bh: usize| {
        let (b, h) = (bh / s.value_heads, bh % s.value_heads);
        let (mut out, mut kept) = (Vec::with_capacity(s.seq * v), Vec::new());
        let mut state = vec![T::of(0.0); v * k];
        for (_, t0, len) in input.chunks(b) {
            kept.extend_from_slice(&state);
            for t in t0..t0 + len {
                let token = input.token(t, h);
                token.step(&mut state);
                out.extend(times(&state, &token.q));
            }
        }
        (out, kept)
    };
    let heads: Vec<(Vec<T>, Vec<T>)> = (0..s.batch * s.value_heads).into_par_iter().map(one).collect();
    for (bh, (out, kept)) in heads.into_iter().enumerate() {
        let (b, h) = (bh / s.value_heads, bh % s.value_heads);
        for (t, row) in out.chunks(v.max(1)).enumerate() {
            let to = &mut o[(b * s.seq + t) * s.value_width() + h * v..][..v];
            to.iter_mut().zip(row).for_each(|(to, x)| *to = x.bf16());
        }
        for (c, state) in kept.chunks((v * k).max(1)).enumerate() {
            let to = &mut states[((b * s.chunks() + c) * s.value_heads + h) * v * k..][..v * k];
            to.iter_mut().zip(state).for_each(|(to, x)| *to = x.bf16());
        }
    }
    Ok(())
}

/// Gradients of one value head, by token of its sequence; of q and k before they were scaled.
struct HeadGradients<T> {
    dq: Vec<T>,
    dk: Vec<T>,
    dv: Vec<T>,
    db: Vec<T>,
    dalpha: Vec<T>,
    /// (a_log, dt_bias) by chunk.
    partial: Vec<[T; 2]>,
}

/// Gradient of x from that of y = scale x / sqrt(x x + eps), where x was multiplied by `by`.
fn unscale<T: Real>(x: &[T], dy: &[T], by: T, scale: f64) -> Vec<T> {
    let shrink = by / T::of(scale);
    let along = dot(x, dy) * by * shrink * shrink;
    x.iter().zip(dy).map(|(x, dy)| by * *dy - along * *x).collect()
}

fn head_backward<T: Real>(
    input: &Inputs<T>,
    states: &[T],
    d_o: &[T],
    b: usize,
    h: usize,
) -> HeadGradients<T> {
    let s = &input.s;
    let (v, k) = (s.value_dim, s.key_dim);
    let zeros = |len: usize| vec![T::of(0.0); len];
    let mut g = HeadGradients {
        dq: zeros(s.seq * k),
        dk: zeros(s.seq * k),
        dv: zeros(s.seq * v),
        db: zeros(s.seq),
        dalpha: zeros(s.seq),
        partial: vec![[T::of(0.0); 2]; s.chunks()],
    };
    let mut dstate = zeros(v * k);
    for (c, t0, len) in input.chunks(b).rev() {
        // The chunk again from its saved state: the state before every token, and u.
        let mut state = states[((b * s.chunks() + c) * s.value_heads + h) * v * k..][..v * k].to_vec();
        let mut before = Vec::with_capacity(len);
        let tokens: Vec<_> = (t0..t0 + len).map(|t| input.token(t, h)).collect();
        let us: Vec<Vec<T>> = tokens
            .iter()
            .map(|token| {
                before.push(state.clone());
                token.step(&mut state)
            })
            .collect();
        for i in (0..len).rev() {
            let (token, u, t) = (&tokens[i], &us[i], t0 + i);
            let dout = &d_o[t * s.value_width() + h * v..][..v];
            // `state` is the one after this token.
            let dq = transposed_times(&state, dout, k);
            add_outer(&mut dstate, dout, &token.q);
            let du = times(&dstate, &token.k);
            let mut dk = transposed_times(&dstate, u, k);
            let decay = T::of(token.g.exp());
            state.copy_from_slice(&before[i]);
            let decayed: Vec<T> = state.iter().map(|x| *x * decay).collect();
            let held = times(&decayed, &token.k);
            let dbeta: T = (0..v).map(|j| du[j] * (token.v[j] - held[j])).sum();
            let beta = T::of(token.beta);
            let dv: Vec<T> = du.iter().map(|x| beta * *x).collect();
            let dheld: Vec<T> = dv.iter().map(|x| -*x).collect();
            axpy(&mut dk, T::of(1.0), &transposed_times(&decayed, &dheld, k));
            add_outer(&mut dstate, &dheld, &token.k);
            let dg = dot(&dstate, &decayed);
            dstate.iter_mut().for_each(|x| *x *= decay);

            let at = t - b * s.seq;
            let of_q = unscale(input.raw(t, h, 0), &dq, token.q_scale, 1.0 / (k as f64).sqrt());
            g.dq[at * k..][..k].copy_from_slice(&of_q);
            g.dk[at * k..][..k].copy_from_slice(&unscale(input.raw(t, h, 1), &dk, token.k_scale, 1.0));
            g.dv[at * v..][..v].copy_from_slice(&dv);
            g.db[at] = dbeta * T::of(token.beta * (1.0 - token.beta));
            let dalpha = dg * T::of(input.a(h) * sigmoid(input.step(t, h)));
            g.dalpha[at] = dalpha;
            g.partial[c][0] += dg * T::of(token.g);
            g.partial[c][1] += dalpha;
        }
    }
    g
}

pub(super) fn backward<T: Real>(s: &DeltaShape, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
    let input = Inputs::take(s, args)?;
    let (states, d_o) = (args.input(4)?, args.input(5)?);
    let (dqkv, dba, partial) = (args.output(6)?, args.output(7)?, args.output(8)?);
    let (v, k, heads) = (s.value_dim, s.key_dim, s.value_heads);
    let all: Vec<HeadGradients<T>> = (0..s.batch * heads)
        .into_par_iter()
        .map(|bh| head_backward(&input, states, d_o, bh / heads, bh % heads))
        .collect();
    let group = heads / s.key_heads;
    for b in 0..s.batch {
        let of = |h: usize| &all[b * heads + h];
        for t in 0..s.seq {
            let token = b * s.seq + t;
            let (dqk, dv) = dqkv[token * s.qkv_width()..][..s.qkv_width()].split_at_mut(2 * s.key_width());
            for (i, to) in dqk.iter_mut().enumerate() {
                let (which, head, col) = (i / s.key_width(), i / k % s.key_heads, i % k);
                let one = |h: usize| if which == 0 { of(h).dq[t * k + col] } else { of(h).dk[t * k + col] };
                *to = (head * group..(head + 1) * group).map(one).sum::<T>().bf16();
            }
            for (i, to) in dv.iter_mut().enumerate() {
                *to = of(i / v).dv[t * v + i % v].bf16();
            }
            for h in 0..heads {
                dba[token * 2 * heads + h] = of(h).db[t].bf16();
                dba[token * 2 * heads + heads + h] = of(h).dalpha[t].bf16();
            }
        }
        for c in 0..s.chunks() {
            let row = &mut partial[(b * s.chunks() + c) * 2 * heads..][..2 * heads];
            for h in 0..heads {
                for (which, x) in of(h).partial[c].into_iter().enumerate() {
                    row[which * heads + h] = x.f32();
                }
            }
        }
    }
    Ok(())
}
