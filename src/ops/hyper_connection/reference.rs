//! CPU reference of the mappings: one token at a time, sums over a stream in f64.

use super::{HYPER_EPS, HyperPreBwd, HyperPreFwd, HyperShape, SCALES};
use crate::device::DeviceError;
use crate::ops::cpu_args::Slot;
use crate::ops::rmsnorm::partials;
use crate::ops::support::{Draws, sigmoid};
use crate::ops::{CpuArgs, Op, Real};
use rayon::prelude::*;

/// The first four arguments of both passes.
pub(super) struct Given<'a, T> {
    pub x: &'a [T],
    pub proj: &'a [T],
    pub scale: &'a [T],
    pub base: &'a [T],
}

impl<'a, T: Real> Given<'a, T> {
    pub fn of(args: &mut CpuArgs<'a, T>) -> Result<Self, DeviceError> {
        Ok(Self { x: args.input(0)?, proj: args.input(1)?, scale: args.input(2)?, base: args.input(3)? })
    }
}

/// What the backward pass reads; empty where there is none.
pub(super) struct Saved<'a, T> {
    pub given: Given<'a, T>,
    pub maps: &'a [T],
    pub rstd: &'a [T],
    pub dy: &'a [T],
    pub dmaps: &'a [T],
    pub dnext: &'a [T],
}

/// A matrix on its way to one whose rows and columns sum to one.
struct Trail<T> {
    /// Softmax of the rows.
    softmax: Vec<T>,
    /// After each normalisation: the matrix, what its lines were divided by, and whether the lines are rows.
    steps: Vec<(Vec<T>, Vec<T>, bool)>,
}

/// Index of element k of line `line`.
fn at(n: usize, line: usize, k: usize, rows: bool) -> usize {
    if rows { line * n + k } else { k * n + line }
}

fn sinkhorn<T: Real>(logits: &[T], n: usize, iterations: usize) -> Trail<T> {
    let eps = T::of(HYPER_EPS);
    let mut m = logits.to_vec();
    for row in m.chunks_mut(n) {
        let top = row.iter().copied().fold(row[0], T::max);
        row.iter_mut().for_each(|v| *v = (*v - top).exp());
        let sum: T = row.iter().copied().sum();
        row.iter_mut().for_each(|v| *v = *v / sum);
    }
    let softmax = m.clone();
    m.iter_mut().for_each(|v| *v += eps);
    let mut steps = Vec::new();
    for step in 1..2 * iterations {
        let rows = step % 2 == 0;
        let mut by = Vec::new();
        for line in 0..n {
            let sum = (0..n).map(|k| m[at(n, line, k, rows)]).sum::<T>() + eps;
            (0..n).for_each(|k| m[at(n, line, k, rows)] = m[at(n, line, k, rows)] / sum);
            by.push(sum);
        }
        steps.push((m.clone(), by, rows));
    }
    Trail { softmax, steps }
}

/// Gradient of the logits from that of the result.
fn sinkhorn_backward<T: Real>(trail: &Trail<T>, n: usize, dm: &mut [T]) {
    for (m, by, rows) in trail.steps.iter().rev() {
        for (line, by) in by.iter().enumerate() {
            let index = |k| at(n, line, k, *rows);
            let dot: T = (0..n).map(|k| dm[index(k)] * m[index(k)]).sum();
            (0..n).for_each(|k| dm[index(k)] = (dm[index(k)] - dot) / *by);
        }
    }
    for (d, p) in dm.chunks_mut(n).zip(trail.softmax.chunks(n)) {
        let dot: T = d.iter().zip(p).map(|(d, p)| *d * *p).sum();
        d.iter_mut().zip(p).for_each(|(d, p)| *d = *p * (*d - dot));
    }
}

impl HyperShape {
    /// The scale that map k takes.
    fn segment(&self, k: usize) -> usize {
        (k / self.streams).min(2)
    }
    fn logits<T: Real>(&self, g: &Given<T>, token: usize, rstd: T) -> Vec<T> {
        let proj = &g.proj[token * self.rows()..];
        (0..self.maps()).map(|k| rstd * proj[k] * g.scale[self.segment(k)] + g.base[k]).collect()
    }
}

pub(super) fn pre_forward<T: Real>(
    s: &HyperShape,
    g: &Given<T>,
    y: &mut [T],
    maps: &mut [T],
    rstd: &mut [T],
) {
    let (n, h, width) = (s.streams, s.hidden.max(1), s.width().max(1));
    let rows = y.par_chunks_mut(h).zip(maps.par_chunks_mut(s.maps())).zip(rstd).enumerate();
    rows.for_each(|(token, ((y, maps), rstd))| {
        let x = &g.x[token * width..][..width];
        let mean = x.iter().map(|v| (*v * *v).f64()).sum::<f64>() / width as f64;
        let r = T::of(1.0 / (mean + s.eps).sqrt()).f32();
        *rstd = r;
        let logits = s.logits(g, token, r);
        for k in 0..n {
            maps[k] = sigmoid(logits[k]) + T::of(HYPER_EPS);
        }
        if !s.head {
            for k in n..2 * n {
                maps[k] = T::of(2.0) * sigmoid(logits[k]);
            }
            let trail = sinkhorn(&logits[2 * n..], n, s.iterations);
            if let Some((m, ..)) = trail.steps.last() {
                maps[2 * n..].copy_from_slice(m);
            }
        }
        maps.iter_mut().for_each(|m| *m = m.f32());
        y.fill(T::of(0.0));
        (0..n).for_each(|j| add_scaled(y, maps[j], &x[j * h..]));
        y.iter_mut().for_each(|y| *y = y.bf16());
    });
}

/// y += a * x
pub(super) fn add_scaled<T: Real>(y: &mut [T], a: T, x: &[T]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * *x;
    }
}

/// Gradients of one token's logits, and of rstd.
struct OfLogits<T> {
    dlogits: Vec<T>,
    drstd: T,
}

fn logits_backward<T: Real>(s: &HyperShape, v: &Saved<T>, token: usize) -> OfLogits<T> {
    let (n, h, width) = (s.streams, s.hidden, s.width());
    let x = &v.given.x[token * width..][..width];
    let dy = &v.dy[token * h..][..h];
    let maps = &v.maps[token * s.maps()..][..s.maps()];
    let mut d = vec![T::of(0.0); s.maps()];
    for j in 0..n {
        let dot = T::of(x[j * h..][..h].iter().zip(dy).map(|(a, b)| (*a * *b).f64()).sum());
        let sig = maps[j] - T::of(HYPER_EPS);
        d[j] = dot * sig * (T::of(1.0) - sig);
    }
    if !s.head {
        let dmaps = &v.dmaps[token * s.later_maps()..][..s.later_maps()];
        for j in 0..n {
            let sig = maps[n + j] / T::of(2.0);
            d[n + j] = dmaps[j] * maps[n + j] * (T::of(1.0) - sig);
        }
        let logits = s.logits(&v.given, token, v.rstd[token]);
        let trail = sinkhorn(&logits[2 * n..], n, s.iterations);
        d[2 * n..].copy_from_slice(&dmaps[n..]);
        sinkhorn_backward(&trail, n, &mut d[2 * n..]);
    }
    let proj = &v.given.proj[token * s.rows()..];
    let drstd = (0..s.maps()).map(|k| d[k] * proj[k] * v.given.scale[s.segment(k)]).sum();
    OfLogits { dlogits: d, drstd }
}

pub(super) fn pre_backward<T: Real>(
    s: &HyperShape,
    v: &Saved<T>,
    dx: &mut [T],
    dproj: &mut [T],
    partial: &mut [T],
) {
    let (n, h, width, rows) = (s.streams, s.hidden.max(1), s.width().max(1), s.rows());
    let all: Vec<OfLogits<T>> = (0..s.tokens).into_par_iter().map(|t| logits_backward(s, v, t)).collect();
    dx.par_chunks_mut(width).zip(dproj.par_chunks_mut(rows)).enumerate().for_each(|(token, (dx, dproj))| {
        let of = &all[token];
        let r = v.rstd[token];
        dproj.fill(T::of(0.0));
        for (k, d) in of.dlogits.iter().enumerate() {
            dproj[k] = (*d * r * v.given.scale[s.segment(k)]).bf16();
        }
        let pull = -of.drstd * r * r * r / T::of(width as f64);
        let maps = &v.maps[token * s.maps()..][..s.maps()];
        let (x, dy) = (&v.given.x[token * width..][..width], &v.dy[token * h..][..h]);
        let dnext = v.dnext.get(token * width..(token + 1) * width);
        dx.fill(T::of(0.0));
        add_scaled(dx, pull, x);
        for (i, dx) in dx.chunks_mut(h).enumerate() {
            add_scaled(dx, maps[i], dy);
            match dnext {
                Some(next) if s.head => add_scaled(dx, T::of(1.0), &next[i * h..]),
                Some(next) => {
                    (0..n).for_each(|j| add_scaled(dx, maps[(2 + i) * n + j], &next[j * h..]));
                }
                None => {}
            }
            dx.iter_mut().for_each(|d| *d = d.bf16());
        }
    });
    partial.par_chunks_mut(rows + SCALES).enumerate().for_each(|(p, out)| {
        let mut sums = vec![0.0; rows + SCALES];
        for token in (p..s.tokens).step_by(partials(s.tokens)) {
            let of = &all[token];
            for (k, d) in of.dlogits.iter().enumerate() {
                sums[k] += d.f64();
                sums[rows + s.segment(k)] += (*d * v.rstd[token] * v.given.proj[token * rows + k]).f64();
            }
        }
        out.iter_mut().zip(sums).for_each(|(o, s)| *o = T::of(s).f32());
    });
}

/// Random streams and weights, with the maps that the forward reference makes of them.
pub(super) fn consistent_inputs(op: &HyperPreBwd, seed: u64) -> Vec<Vec<f64>> {
    let s = op.shape;
    let draws = |stream| Draws { seed, stream };
    let x = draws(1).bf16_normals(s.tokens * s.width(), 1.0);
    let proj: Vec<f64> =
        draws(2).normals(s.tokens * s.rows(), 1.0).iter().map(|v| f64::from(*v as f32)).collect();
    let scale = draws(3).bf16_normals(SCALES, 1.0);
    let base = draws(4).bf16_normals(s.rows(), 0.5);
    let narrow = |v: &[f64]| v.iter().map(|v| *v as f32).collect::<Vec<f32>>();
    let inputs = [&x, &proj, &scale, &base].map(|v| narrow(v));
    let mut y = vec![0f32; s.tokens * s.hidden];
    let (mut maps, mut rstd) = (vec![0f32; s.tokens * s.maps()], vec![0f32; s.tokens]);
    let forward = HyperPreFwd { shape: s };
    let mut slots: Vec<Slot<f32>> = inputs.iter().map(|v| Slot::In(v)).collect();
    slots.extend([Slot::Out(&mut y), Slot::Out(&mut maps), Slot::Out(&mut rstd)]);
    let ran = forward.run(&mut CpuArgs::new(forward.name(), slots));
    debug_assert!(ran.is_ok());
    let wide = |v: &[f32]| v.iter().map(|v| f64::from(*v)).collect::<Vec<f64>>();
    let mut values = vec![x, proj, scale, base, wide(&maps), wide(&rstd)];
    values.push(draws(5).bf16_normals(s.tokens * s.hidden, 1.0));
    if !s.head {
        let dmaps = draws(6).normals(s.tokens * s.later_maps(), 1.0);
        values.push(dmaps.iter().map(|v| f64::from(*v as f32)).collect());
    }
    if op.has_next() {
        values.push(draws(7).bf16_normals(s.tokens * s.width(), 1.0));
    }
    values.resize(op.args().len(), Vec::new());
    values
}
