//! CPU references of the QKV split with norm and rotary embedding: one head at a time, sums in f64.

use super::{CpuArgs, QkvRopeBwd, QkvRopeFwd, scaling};
use crate::device::DeviceError;
use crate::ops::Real;
use crate::ops::rmsnorm::{partials, scale_offset};
use rayon::prelude::*;

impl QkvRopeFwd {
    /// (cos, sin) times the amplitude of every pair at the position of row `token`.
    fn turns<T: Real>(&self, inv_freq: &[f64], token: usize) -> Vec<(T, T)> {
        let position = self.positions.position(token);
        let amplitude = scaling::amplitude(self.scaling);
        let at = |i: usize| match self.axes {
            Some(axes) => axes.coordinate(position, axes.of_pair(i, inv_freq.len())) as f64,
            None => position as f64,
        };
        inv_freq
            .iter()
            .enumerate()
            .map(|(i, f)| ((at(i) * f).cos(), (at(i) * f).sin()))
            .map(|(c, s)| (T::of(amplitude * c), T::of(amplitude * s)))
            .collect()
    }

    pub(super) fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let qkv = args.input(0)?;
        let weights = match self.qk_norm {
            Some(eps) => Some((eps, args.input(1)?, args.input(2)?)),
            None => None,
        };
        let bias = if self.bias { Some(args.input(1)?) } else { None };
        let first_out = if self.qk_norm.is_some() { 3 } else { 1 + usize::from(self.bias) };
        let (q, k, v) = (args.output(first_out)?, args.output(first_out + 1)?, args.output(first_out + 2)?);
        let (d, inv_freq) = (self.head_dim, self.inverse_frequencies());
        let (q_row, kv_row, normed) = (self.q_heads * d, self.kv_heads * d, self.q_heads + self.kv_heads);
        // Writes one token's q, k and v; returns 1 / rms of its q and k heads.
        let width = q_row + 2 * kv_row + if self.gated { q_row } else { 0 };
        let one = T::of(scale_offset(self.zero_centered));
        let one_token = |token: usize, q: &mut [T], k: &mut [T], v: &mut [T]| -> Vec<T> {
            let turns: Vec<(T, T)> = self.turns(&inv_freq, token);
            let mut row = qkv[token * width..][..q_row + 2 * kv_row].to_vec();
            for (x, b) in row.iter_mut().zip(bias.unwrap_or_default()) {
                *x += *b;
            }
            v.iter_mut().zip(&row[q_row + kv_row..]).for_each(|(v, x)| *v = x.bf16());
            let mut rstd = Vec::with_capacity(normed);
            for h in 0..normed {
                let mut head = row[h * d..][..d].to_vec();
                if let Some((eps, q_weight, k_weight)) = weights {
                    let mean = head.iter().map(|x| x.f64() * x.f64()).sum::<f64>() / d as f64;
                    let r = T::of(1.0 / (mean + eps).sqrt());
                    rstd.push(r.f32());
                    let weight = if h < self.q_heads { q_weight } else { k_weight };
                    head.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * r * (*w + one));
                }
                rotate(&mut head, &turns);
                let out = if h < self.q_heads {
                    &mut q[h * d..][..d]
                } else {
                    &mut k[(h - self.q_heads) * d..][..d]
                };
                out.iter_mut().zip(head).for_each(|(out, x)| *out = x.bf16());
            }
            rstd
        };
        let kv = k.par_chunks_mut(kv_row.max(1)).zip(v.par_chunks_mut(kv_row.max(1)));
        let rows = q.par_chunks_mut(q_row.max(1)).zip(kv).enumerate();
        let rstd: Vec<Vec<T>> = rows.map(|(token, (q, (k, v)))| one_token(token, q, k, v)).collect();
        if self.qk_norm.is_some() {
            args.output(first_out + 3)?.copy_from_slice(&rstd.concat());
        }
        Ok(())
    }
}

/// Turns pair (i, i + n) of the head by angle i, for the n given (cos, sin).
fn rotate<T: Real>(head: &mut [T], turns: &[(T, T)]) {
    let n = turns.len();
    for (i, &(c, s)) in turns.iter().enumerate() {
        let (x, y) = (head[i], head[i + n]);
        head[i] = x * c - y * s;
        head[i + n] = y * c + x * s;
    }
}

/// What the norm's backward needs of the forward.
struct Saved<'a, T> {
    qkv: &'a [T],
    q_weight: &'a [T],
    k_weight: &'a [T],
    rstd: &'a [T],
}

impl QkvRopeBwd {
    pub(super) fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (dq, dk, dv) = (args.input(0)?, args.input(1)?, args.input(2)?);
        let gate = usize::from(self.gated);
        let dgate = if self.gated { Some(args.input(3)?) } else { None };
        let saved = if self.qk_norm.is_some() {
            let at = 3 + gate;
            let (qkv, q_weight, k_weight) = (args.input(at)?, args.input(at + 1)?, args.input(at + 2)?);
            Some(Saved { qkv, q_weight, k_weight, rstd: args.input(at + 3)? })
        } else {
            None
        };
        let dqkv = args.output(gate + if saved.is_some() { 7 } else { 3 })?;
        let (d, fwd) = (self.head_dim, self.forward());
        let inv_freq = fwd.inverse_frequencies();
        let (q_row, kv_row, normed) = (self.q_heads * d, self.kv_heads * d, self.q_heads + self.kv_heads);
        let tokens = self.positions.rows();
        let width = q_row * (1 + gate) + 2 * kv_row;
        let one = T::of(scale_offset(self.zero_centered));
        // Weight gradient of one token: [q weights, then k weights].
        let token_gradient = |token: usize, out: &mut [T]| -> Vec<f64> {
            let mut dw = vec![0.0; 2 * d];
            let mut turns: Vec<(T, T)> = fwd.turns(&inv_freq, token);
            turns.iter_mut().for_each(|(_, s)| *s = -*s);
            out[q_row + kv_row..][..kv_row].copy_from_slice(&dv[token * kv_row..][..kv_row]);
            if let Some(dgate) = dgate {
                out[q_row + 2 * kv_row..].copy_from_slice(&dgate[token * q_row..][..q_row]);
            }
            for h in 0..normed {
                let is_q = h < self.q_heads;
                let mut g = if is_q {
                    dq[token * q_row + h * d..][..d].to_vec()
                } else {
                    dk[token * kv_row + (h - self.q_heads) * d..][..d].to_vec()
                };
                rotate(&mut g, &turns);
                if let Some(saved) = &saved {
                    let x = &saved.qkv[token * width + h * d..][..d];
                    let (weight, r) =
                        (if is_q { saved.q_weight } else { saved.k_weight }, saved.rstd[token * normed + h]);
                    let dw = &mut dw[if is_q { 0 } else { d }..][..d];
                    let mut dot = 0.0;
                    for i in 0..d {
                        let through = g[i] * x[i] * r;
                        dw[i] += through.f64();
                        dot += (through * (weight[i] + one)).f64();
                    }
                    let mean = T::of(dot / d as f64);
                    for i in 0..d {
                        g[i] = r * (g[i] * (weight[i] + one) - x[i] * r * mean);
                    }
                }
                out[h * d..][..d].iter_mut().zip(g).for_each(|(out, g)| *out = g.bf16());
            }
            dw
        };
        let rows = dqkv.par_chunks_mut(width.max(1)).enumerate();
        let dw: Vec<Vec<f64>> = rows.map(|(token, out)| token_gradient(token, out)).collect();
        if saved.is_some() {
            let dw_partial = args.output(8 + gate)?;
            for (p, out) in dw_partial.chunks_mut(2 * d).enumerate() {
                for (i, out) in out.iter_mut().enumerate() {
                    let tokens = (p..tokens).step_by(partials(tokens));
                    *out = T::of(tokens.map(|t| dw[t][i]).sum()).f32();
                }
            }
        }
        Ok(())
    }
}
