//! CPU references of the scan, in the same chunked form as the kernels; tests hold them against the plain recurrence.
//! One head at a time, sums in the element type, decays in f64.

use super::SsdShape;
use crate::device::DeviceError;
use crate::ops::{CpuArgs, Real};
use rayon::prelude::*;

/// dt = softplus(raw + bias), without loss for very negative arguments.
fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// What both directions read.
struct Inputs<'a, T> {
    s: SsdShape,
    xbc: &'a [T],
    zxbcdt: &'a [T],
    a_log: &'a [T],
    d: &'a [T],
    dt_bias: &'a [T],
}

impl<'a, T: Real> Inputs<'a, T> {
    fn take(s: &SsdShape, args: &mut CpuArgs<'a, T>) -> Result<Self, DeviceError> {
        Ok(Self {
            s: *s,
            xbc: args.input(0)?,
            zxbcdt: args.input(1)?,
            a_log: args.input(2)?,
            d: args.input(3)?,
            dt_bias: args.input(4)?,
        })
    }
    fn row(&self, token: usize) -> &'a [T] {
        &self.xbc[token * self.s.conv_width()..][..self.s.conv_width()]
    }
    fn x(&self, token: usize, h: usize) -> &'a [T] {
        &self.row(token)[h * self.s.head_dim..][..self.s.head_dim]
    }
    /// B (which 0) or C (which 1) of head `h`'s group.
    fn mat(&self, token: usize, h: usize, which: usize) -> &'a [T] {
        let s = &self.s;
        let group = h / (s.heads / s.groups) + which * s.groups;
        &self.row(token)[s.inner() + group * s.state..][..s.state]
    }
    fn a(&self, h: usize) -> f64 {
        -self.a_log[h].f64().exp()
    }
    fn raw(&self, token: usize, h: usize) -> f64 {
        let w = self.s.projected_width();
        self.zxbcdt[token * w + w - self.s.heads + h].f64() + self.dt_bias[h].f64()
    }
    /// (dt, running sum of dt A) of tokens `t0..t0 + len`.
    fn series(&self, t0: usize, len: usize, h: usize) -> (Vec<f64>, Vec<f64>) {
        let dt: Vec<f64> = (t0..t0 + len).map(|t| softplus(self.raw(t, h))).collect();
        let mut sum = 0.0;
        let cum = dt.iter().map(|dt| {
            sum += dt * self.a(h);
            sum
        });
        let cum = cum.collect();
        (dt, cum)
    }
    /// First token and length of every chunk of sequence `b`.
    fn chunks(&self, b: usize) -> Vec<(usize, usize)> {
        let (seq, q) = (self.s.seq, self.s.chunk);
        (0..self.s.chunks()).map(|c| (b * seq + c * q, q.min(seq - c * q))).collect()
    }
}

fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    a.iter().zip(b).map(|(a, b)| *a * *b).sum()
}
fn axpy<T: Real>(y: &mut [T], w: T, x: &[T]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += w * *x);
}

/// State [P, N] times a vector over N, and its transpose times one over P.
fn times<T: Real>(state: &[T], v: &[T]) -> Vec<T> {
    state.chunks(v.len()).map(|row| dot(row, v)).collect()
}
fn transposed_times<T: Real>(state: &[T], v: &[T], n: usize) -> Vec<T> {
    let mut out = vec![T::of(0.0); n];
    state.chunks(n).zip(v).for_each(|(row, v)| axpy(&mut out, *v, row));
    out
}

pub(super) fn forward<T: Real>(s: &SsdShape, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
    let input = Inputs::take(s, args)?;
    let (y, states) = (args.output(5)?, args.output(6)?);
    let (p, n) = (s.head_dim, s.state);
    let one = |bh: usize| {
        let (b, h) = (bh / s.heads, bh % s.heads);
        let (mut out, mut kept) = (Vec::with_capacity(s.seq * p), Vec::new());
        let mut state = vec![T::of(0.0); p * n];
        for (t0, len) in input.chunks(b) {
            let (dt, c) = input.series(t0, len, h);
            kept.extend_from_slice(&state);
            for t in 0..len {
                let (ct, xt) = (input.mat(t0 + t, h, 1), input.x(t0 + t, h));
                let begin = T::of(c[t].exp());
                let mut row: Vec<T> = times(&state, ct).into_iter().map(|v| v * begin).collect();
                for from in 0..=t {
                    let score = dot(ct, input.mat(t0 + from, h, 0));
                    let w = score * T::of((c[t] - c[from]).exp() * dt[from]);
                    axpy(&mut row, w, input.x(t0 + from, h));
                }
                axpy(&mut row, input.d[h], xt);
                out.extend(row);
            }
            let last = c[len - 1];
            state.iter_mut().for_each(|v| *v *= T::of(last.exp()));
            for t in 0..len {
                let w = T::of(dt[t] * (last - c[t]).exp());
                for (row, x) in state.chunks_mut(n).zip(input.x(t0 + t, h)) {
                    axpy(row, w * *x, input.mat(t0 + t, h, 0));
                }
            }
        }
        (out, kept)
    };
    let heads: Vec<(Vec<T>, Vec<T>)> = (0..s.batch * s.heads).into_par_iter().map(one).collect();
    for (bh, (out, kept)) in heads.into_iter().enumerate() {
        let (b, h) = (bh / s.heads, bh % s.heads);
        for (t, row) in out.chunks(p).enumerate() {
            let to = &mut y[(b * s.seq + t) * s.inner() + h * p..][..p];
            to.iter_mut().zip(row).for_each(|(to, v)| *to = v.bf16());
        }
        for (c, state) in kept.chunks(p * n).enumerate() {
            let to = &mut states[((b * s.chunks() + c) * s.heads + h) * p * n..][..p * n];
            to.iter_mut().zip(state).for_each(|(to, v)| *to = v.bf16());
        }
    }
    Ok(())
}

/// Gradients of one head: by token of its sequence, and (a_log, D, bias) by chunk.
struct HeadGradients<T> {
    dx: Vec<T>,
    db: Vec<T>,
    dc: Vec<T>,
    draw: Vec<T>,
    partial: Vec<[T; 3]>,
}

fn head_backward<T: Real>(input: &Inputs<T>, states: &[T], dy: &[T], b: usize, h: usize) -> HeadGradients<T> {
    let s = &input.s;
    let (p, n, a) = (s.head_dim, s.state, input.a(h));
    let zeros = |len: usize| vec![T::of(0.0); len];
    let mut g = HeadGradients {
        dx: zeros(s.seq * p),
        db: zeros(s.seq * n),
        dc: zeros(s.seq * n),
        draw: zeros(s.seq),
        partial: vec![[T::of(0.0); 3]; s.chunks()],
    };
    let mut dstate = zeros(p * n);
    for (chunk, (t0, len)) in input.chunks(b).into_iter().enumerate().rev() {
        let first = t0 - b * s.seq;
        let state = &states[((b * s.chunks() + chunk) * s.heads + h) * p * n..][..p * n];
        let (dt, c) = input.series(t0, len, h);
        let last = c[len - 1];
        let dyt = |t: usize| &dy[(t0 + t) * s.inner() + h * p..][..p];
        // What flows to t from before, from s onwards, and directly through dt.
        let (mut into, mut out_of, mut direct) = (zeros(len), zeros(len), zeros(len));
        let mut dskip = T::of(0.0);
        for t in 0..len {
            let ct = input.mat(t0 + t, h, 1);
            for from in 0..=t {
                let bs = input.mat(t0 + from, h, 0);
                let l = T::of((c[t] - c[from]).exp());
                let (e, score) = (dot(dyt(t), input.x(t0 + from, h)), dot(ct, bs));
                let dts = T::of(dt[from]);
                axpy(&mut g.dx[(first + from) * p..][..p], score * l * dts, dyt(t));
                axpy(&mut g.db[(first + from) * n..][..n], e * l * dts, ct);
                axpy(&mut g.dc[(first + t) * n..][..n], e * l * dts, bs);
                let z = e * score * l;
                direct[from] += z;
                into[t] += z * dts;
                out_of[from] += z * dts;
            }
            dskip += dot(dyt(t), input.x(t0 + t, h));
            axpy(&mut g.dx[(first + t) * p..][..p], input.d[h], dyt(t));
        }
        let mut ends = zeros(len);
        for t in 0..len {
            let (bt, ct) = (input.mat(t0 + t, h, 0), input.mat(t0 + t, h, 1));
            let (begin, end) = (T::of(c[t].exp()), T::of((last - c[t]).exp()));
            into[t] += begin * dot(dyt(t), &times(state, ct));
            axpy(&mut g.dc[(first + t) * n..][..n], begin, &transposed_times(state, dyt(t), n));
            let from_end = times(&dstate, bt);
            ends[t] = end * dot(input.x(t0 + t, h), &from_end);
            direct[t] += ends[t];
            let w = end * T::of(dt[t]);
            axpy(&mut g.dx[(first + t) * p..][..p], w, &from_end);
            axpy(&mut g.db[(first + t) * n..][..n], w, &transposed_times(&dstate, input.x(t0 + t, h), n));
        }
        // da_u: what crosses the border before u.
        let through = T::of(last.exp()) * dot(state, &dstate);
        let (mut da, mut after) = (zeros(len), T::of(0.0));
        for u in (0..len).rev() {
            after += into[u] - out_of[u];
            da[u] = after + through;
        }
        let mut before = T::of(0.0);
        for u in 0..len {
            da[u] += before;
            before += ends[u] * T::of(dt[u]);
        }
        let part = &mut g.partial[chunk];
        part[1] = dskip;
        for u in 0..len {
            let slope = T::of(1.0 / (1.0 + (-input.raw(t0 + u, h)).exp()));
            let draw = (direct[u] + T::of(a) * da[u]) * slope;
            part[0] += T::of(a * dt[u]) * da[u];
            part[2] += draw;
            g.draw[first + u] = draw;
        }
        dstate.iter_mut().for_each(|v| *v *= T::of(last.exp()));
        for (t, sum) in c.iter().enumerate() {
            let begin = T::of(sum.exp());
            for (row, d) in dstate.chunks_mut(n).zip(dyt(t)) {
                axpy(row, begin * *d, input.mat(t0 + t, h, 1));
            }
        }
    }
    g
}

pub(super) fn backward<T: Real>(s: &SsdShape, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
    let input = Inputs::take(s, args)?;
    let (states, dy) = (args.input(5)?, args.input(6)?);
    let (dxbc, ddt, partial) = (args.output(7)?, args.output(8)?, args.output(9)?);
    let (p, n, width) = (s.head_dim, s.state, s.conv_width());
    let heads: Vec<HeadGradients<T>> = (0..s.batch * s.heads)
        .into_par_iter()
        .map(|bh| head_backward(&input, states, dy, bh / s.heads, bh % s.heads))
        .collect();
    for b in 0..s.batch {
        let of = |h: usize| &heads[b * s.heads + h];
        for t in 0..s.seq {
            let token = b * s.seq + t;
            let row = &mut dxbc[token * width..][..width];
            let (dx, mats) = row.split_at_mut(s.inner());
            for h in 0..s.heads {
                let from = &of(h).dx[t * p..][..p];
                dx[h * p..][..p].iter_mut().zip(from).for_each(|(to, v)| *to = v.bf16());
                ddt[token * s.heads + h] = of(h).draw[t].bf16();
            }
            let per_group = s.heads / s.groups;
            for (i, to) in mats.iter_mut().enumerate() {
                let (which, group, col) = (i / (s.groups * n), i / n % s.groups, i % n);
                let value = |h: usize| if which == 0 { of(h).db[t * n + col] } else { of(h).dc[t * n + col] };
                *to = (group * per_group..(group + 1) * per_group).map(value).sum::<T>().bf16();
            }
        }
        for chunk in 0..s.chunks() {
            let row = &mut partial[(b * s.chunks() + chunk) * 3 * s.heads..][..3 * s.heads];
            for h in 0..s.heads {
                for (k, v) in of(h).partial[chunk].into_iter().enumerate() {
                    row[k * s.heads + h] = v.f32();
                }
            }
        }
    }
    Ok(())
}
