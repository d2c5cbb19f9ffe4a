//! The recurrence's gradients by finite differences, and the chunked form that the kernels compute, written once more
//! in f64, against the recurrence.

use super::{CHUNK, DeltaBwd, DeltaFwd, DeltaShape, NORM_EPS};
use crate::device::cuda::prep::OfflinePrep;
use crate::ops::Op;
use crate::ops::testing::*;

/// Odd lengths: within a chunk, one over, several chunks with a short last one, in two sequences; groups of one to three.
const SHAPES: [DeltaShape; 4] = [
    DeltaShape { batch: 2, seq: 5, key_heads: 1, value_heads: 2, key_dim: 3, value_dim: 4 },
    DeltaShape { batch: 1, seq: CHUNK + 1, key_heads: 2, value_heads: 2, key_dim: 4, value_dim: 2 },
    DeltaShape { batch: 2, seq: 2 * CHUNK + 23, key_heads: 2, value_heads: 4, key_dim: 5, value_dim: 3 },
    DeltaShape { batch: 1, seq: 3 * CHUNK, key_heads: 1, value_heads: 3, key_dim: 2, value_dim: 6 },
];

/// A small dense matrix.
#[derive(Clone)]
struct Mat {
    rows: usize,
    cols: usize,
    at: Vec<f64>,
}

impl Mat {
    fn of(rows: usize, cols: usize, f: impl Fn(usize, usize) -> f64) -> Self {
        Self { rows, cols, at: (0..rows * cols).map(|i| f(i / cols, i % cols)).collect() }
    }
    fn get(&self, r: usize, c: usize) -> f64 {
        self.at[r * self.cols + c]
    }
    fn t(&self) -> Self {
        Self::of(self.cols, self.rows, |r, c| self.get(c, r))
    }
    fn times(&self, o: &Self) -> Self {
        assert_eq!(self.cols, o.rows);
        Self::of(self.rows, o.cols, |r, c| (0..self.cols).map(|k| self.get(r, k) * o.get(k, c)).sum())
    }
    /// Element by element with `o`.
    fn with(&self, o: &Self, f: impl Fn(f64, f64) -> f64) -> Self {
        Self::of(self.rows, self.cols, |r, c| f(self.get(r, c), o.get(r, c)))
    }
    fn plus(&self, o: &Self) -> Self {
        self.with(o, |a, b| a + b)
    }
    /// Row r times w[r].
    fn scaled(&self, w: impl Fn(usize) -> f64) -> Self {
        Self::of(self.rows, self.cols, |r, c| self.get(r, c) * w(r))
    }
    fn row_dot(&self, o: &Self, r: usize) -> f64 {
        (0..self.cols).map(|c| self.get(r, c) * o.get(r, c)).sum()
    }
}

/// What the kernels' first launch leaves of one chunk and value head. q and k are raw, `rq` and `rk` scale them.
struct Chunk {
    q: Mat,
    k: Mat,
    v: Mat,
    c: Vec<f64>,
    beta: Vec<f64>,
    rq: Vec<f64>,
    rk: Vec<f64>,
    /// (I + A)^-1 and the masked q k^T.
    t: Mat,
    p: Mat,
}

fn head_chunk(s: &DeltaShape, x: &[Vec<f64>], b: usize, h: usize, chunk: usize) -> Chunk {
    let t0 = b * s.seq + chunk * CHUNK;
    let n = CHUNK.min(s.seq - chunk * CHUNK);
    let key = h / (s.value_heads / s.key_heads);
    let raw =
        |first: usize, width: usize| Mat::of(n, width, |t, i| x[0][(t0 + t) * s.qkv_width() + first + i]);
    let (q, k) = (raw(key * s.key_dim, s.key_dim), raw(s.key_width() + key * s.key_dim, s.key_dim));
    let v = raw(2 * s.key_width() + h * s.value_dim, s.value_dim);
    let gate =
        |t: usize, which: usize| x[1][(t0 + t + 1) * s.projected_width() - (2 - which) * s.value_heads + h];
    let beta: Vec<f64> = (0..n).map(|t| 1.0 / (1.0 + (-gate(t, 0)).exp())).collect();
    let mut sum = 0.0;
    let mut running = |t: usize| {
        sum -= x[2][h].exp() * (gate(t, 1) + x[3][h]).exp().ln_1p();
        sum
    };
    let c: Vec<f64> = (0..n).map(&mut running).collect();
    let scale =
        |m: &Mat, by: f64| (0..n).map(|t| by / (m.row_dot(m, t) + NORM_EPS).sqrt()).collect::<Vec<f64>>();
    let (rq, rk) = (scale(&q, 1.0 / (s.key_dim as f64).sqrt()), scale(&k, 1.0));
    let (kk, qk) = (k.times(&k.t()), q.times(&k.t()));
    let a =
        Mat::of(
            n,
            n,
            |t, r| {
                if r < t { beta[t] * (c[t] - c[r]).exp() * rk[t] * rk[r] * kk.get(t, r) } else { 0.0 }
            },
        );
    let p =
        Mat::of(n, n, |t, r| if r <= t { (c[t] - c[r]).exp() * rq[t] * rk[r] * qk.get(t, r) } else { 0.0 });
    // Column by column, as the kernel's threads do.
    let mut t = Mat::of(n, n, |r, c| if r == c { 1.0 } else { 0.0 });
    for j in 0..n {
        for i in j + 1..n {
            t.at[i * n + j] = -(j..i).map(|m| a.get(i, m) * t.get(m, j)).sum::<f64>();
        }
    }
    Chunk { q, k, v, c, beta, rq, rk, t, p }
}

impl Chunk {
    fn last(&self) -> f64 {
        self.c[self.c.len() - 1]
    }
    /// U for the state [V, K] at the chunk's start.
    fn u(&self, state: &Mat) -> Mat {
        let held = self.k.times(&state.t()).scaled(|t| self.c[t].exp() * self.rk[t]);
        self.t.times(&self.v.with(&held, |v, p| v - p).scaled(|t| self.beta[t]))
    }
    /// (output, state at the chunk's end).
    fn forward(&self, state: &Mat) -> (Mat, Mat) {
        let u = self.u(state);
        let o = self.q.times(&state.t()).scaled(|t| self.c[t].exp() * self.rq[t]).plus(&self.p.times(&u));
        let weighed = u.scaled(|t| (self.last() - self.c[t]).exp() * self.rk[t]);
        (o, state.scaled(|_| self.last().exp()).plus(&weighed.t().times(&self.k)))
    }
    /// The pass's step: (dV, gradient of the state at the chunk's start) from that at its end.
    fn pass_back(&self, dstate: &Mat, d_o: &Mat) -> (Mat, Mat) {
        let into_u = self.k.times(&dstate.t()).scaled(|t| (self.last() - self.c[t]).exp() * self.rk[t]);
        let du = into_u.plus(&self.p.t().times(d_o));
        let dv = self.t.t().times(&du).scaled(|t| self.beta[t]);
        let by_q = d_o.scaled(|t| self.c[t].exp() * self.rq[t]).t().times(&self.q);
        let by_k = dv.scaled(|t| -self.c[t].exp() * self.rk[t]).t().times(&self.k);
        (dv, dstate.scaled(|_| self.last().exp()).plus(&by_q).plus(&by_k))
    }
    /// The last launch: (dq, dk, before the norms' own gradient), dbeta, dg.
    fn gradients(
        &self,
        s: &DeltaShape,
        state: &Mat,
        dstate: &Mat,
        dv: &Mat,
        d_o: &Mat,
    ) -> (Mat, Mat, Vec<f64>, Vec<f64>) {
        let n = self.c.len();
        let u = self.u(state);
        let (dp, e) = (d_o.times(&u.t()), dv.times(&u.t()));
        let h = Mat::of(n, n, |t, r| {
            if r <= t { dp.get(t, r) * (self.c[t] - self.c[r]).exp() * self.rq[t] * self.rk[r] } else { 0.0 }
        });
        let j = Mat::of(n, n, |t, r| {
            if r < t { e.get(t, r) * (self.c[t] - self.c[r]).exp() * self.rk[t] * self.rk[r] } else { 0.0 }
        });
        let dq = d_o.times(state).scaled(|t| self.c[t].exp() * self.rq[t]).plus(&h.times(&self.k));
        let minus = |m: Mat| m.scaled(|_| -1.0);
        let earlier =
            minus(dv.times(state).scaled(|t| self.c[t].exp() * self.rk[t])).plus(&minus(j.times(&self.k)));
        let end = u.times(dstate).scaled(|t| (self.last() - self.c[t]).exp() * self.rk[t]);
        let later = end.plus(&h.t().times(&self.q)).plus(&minus(j.t().times(&self.k)));
        let dc = |t: usize| self.q.row_dot(&dq, t) + self.k.row_dot(&earlier, t) - self.k.row_dot(&later, t);
        let whole: f64 = (0..n).map(|t| self.k.row_dot(&end, t)).sum::<f64>()
            + self.last().exp() * (0..s.value_dim).map(|r| state.row_dot(dstate, r)).sum::<f64>();
        let dg = (0..n).map(|r| (r..n).map(dc).sum::<f64>() + whole).collect();
        let dbeta = (0..n).map(|t| e.get(t, t) / self.beta[t] / self.beta[t]).collect();
        (dq, earlier.plus(&later), dbeta, dg)
    }
}

fn close(what: &str, s: &DeltaShape, got: &[f64], want: &[f64]) {
    let error = relative_error(got, want);
    assert!(error < 1e-10, "{what} of {s:?}: chunks differ from the recurrence by {error:e}");
}

/// (forward's arguments, backward's arguments, gradient of the output).
fn backward_inputs(s: &DeltaShape, seed: u32) -> (Vec<Vec<f64>>, Vec<Vec<f64>>, Vec<f64>) {
    let v = inputs(&DeltaFwd { shape: *s }, seed);
    let after = run_f64(&DeltaFwd { shape: *s }, &v);
    let d_o = to_bf16(&normals(s.tokens() * s.value_width(), seed + 40, 1.0));
    let mut b = v[..4].to_vec();
    b.extend([after[5].clone(), d_o.clone(), vec![], vec![], vec![]]);
    (v, b, d_o)
}

#[test]
fn chunks_equal_the_recurrence() {
    for (seed, s) in SHAPES.iter().enumerate() {
        let (x, b, d_o) = backward_inputs(s, seed as u32);
        let fwd = run_f64(&DeltaFwd { shape: *s }, &x);
        let bwd = run_f64(&DeltaBwd { shape: *s }, &b);
        let (heads, w, kw) = (s.value_heads, s.qkv_width(), s.key_width());
        let mut o = vec![0.0; d_o.len()];
        let mut states = vec![0.0; fwd[5].len()];
        let mut dqkv = vec![0.0; s.tokens() * w];
        let (mut dba, mut partial) =
            (vec![0.0; s.tokens() * 2 * heads], vec![0.0; s.partial_rows() * 2 * heads]);
        for (b, h) in (0..s.batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            let chunks: Vec<Chunk> = (0..s.chunks()).map(|c| head_chunk(s, &x, b, h, c)).collect();
            let key = h / (heads / s.key_heads) * s.key_dim;
            let mut kept = vec![Mat::of(s.value_dim, s.key_dim, |_, _| 0.0)];
            for (c, chunk) in chunks.iter().enumerate() {
                let (out, next) = chunk.forward(&kept[c]);
                let at = ((b * s.chunks() + c) * heads + h) * s.value_dim * s.key_dim;
                states[at..][..s.value_dim * s.key_dim].copy_from_slice(&kept[c].at);
                for t in 0..out.rows {
                    let to = (b * s.seq + c * CHUNK + t) * s.value_width() + h * s.value_dim;
                    o[to..][..s.value_dim].copy_from_slice(&out.at[t * s.value_dim..][..s.value_dim]);
                }
                kept.push(next);
            }
            let mut dstate = Mat::of(s.value_dim, s.key_dim, |_, _| 0.0);
            for (c, chunk) in chunks.iter().enumerate().rev() {
                let (t0, n) = (b * s.seq + c * CHUNK, chunk.c.len());
                let own =
                    Mat::of(n, s.value_dim, |t, i| d_o[(t0 + t) * s.value_width() + h * s.value_dim + i]);
                let (dv, next) = chunk.pass_back(&dstate, &own);
                let (dq, dk, dbeta, dg) = chunk.gradients(s, &kept[c], &dstate, &dv, &own);
                for t in 0..n {
                    let row = &mut dqkv[(t0 + t) * w..][..w];
                    for (first, d, x, by, scale) in [
                        (0, &dq, &chunk.q, chunk.rq[t], 1.0 / (s.key_dim as f64).sqrt()),
                        (kw, &dk, &chunk.k, chunk.rk[t], 1.0),
                    ] {
                        let along = d.row_dot(x, t) * (by / scale) * (by / scale);
                        (0..s.key_dim)
                            .for_each(|i| row[first + key + i] += d.get(t, i) - along * x.get(t, i));
                    }
                    row[2 * kw + h * s.value_dim..][..s.value_dim]
                        .copy_from_slice(&dv.at[t * s.value_dim..][..s.value_dim]);
                    let gate = x[1][(t0 + t + 1) * s.projected_width() - heads + h] + x[3][h];
                    let dalpha = -dg[t] * x[2][h].exp() / (1.0 + (-gate).exp());
                    dba[(t0 + t) * 2 * heads + h] = dbeta[t] * chunk.beta[t] * (1.0 - chunk.beta[t]);
                    dba[(t0 + t) * 2 * heads + heads + h] = dalpha;
                    let part = (b * s.chunks() + c) * 2 * heads + h;
                    partial[part] -= dg[t] * x[2][h].exp() * gate.exp().ln_1p();
                    partial[part + heads] += dalpha;
                }
                dstate = next;
            }
        }
        close("o", s, &o, &fwd[4]);
        close("states", s, &states, &fwd[5]);
        close("dqkv", s, &dqkv, &bwd[6]);
        close("db and dalpha", s, &dba, &bwd[7]);
        close("da_log and ddt_bias", s, &partial, &bwd[8]);
    }
}

#[test]
fn backward_is_the_forwards_gradient() {
    for s in &SHAPES[..3] {
        let (v, b, d_o) = backward_inputs(s, 7);
        let fwd = DeltaFwd { shape: *s };
        let got = run_f64(&DeltaBwd { shape: *s }, &b);
        check_op_gradient(&fwd, &v, &[(4, &d_o)], 0, &got[6]);
        let (heads, w) = (s.value_heads, s.projected_width());
        let mut dproj = vec![0.0; s.tokens() * w];
        for (row, dba) in dproj.chunks_mut(w).zip(got[7].chunks(2 * heads)) {
            row[w - 2 * heads..].copy_from_slice(dba);
        }
        check_op_gradient(&fwd, &v, &[(4, &d_o)], 1, &dproj);
        for (arg, first) in [(2, 0), (3, heads)] {
            let sum = |h: usize| (0..s.partial_rows()).map(|r| got[8][r * 2 * heads + first + h]).sum();
            let grad: Vec<f64> = (0..heads).map(sum).collect();
            check_op_gradient(&fwd, &v, &[(4, &d_o)], arg, &grad);
        }
    }
}

#[test]
fn a_write_is_read_back_and_overwritten() {
    // No decay (g -> 0) and beta -> 1: after v was written under k, S k = v; another v under the same k replaces it.
    let s = DeltaShape { batch: 1, seq: 2, key_heads: 1, value_heads: 1, key_dim: 2, value_dim: 2 };
    let qkv = vec![3.0, 4.0, 3.0, 4.0, 1.0, 2.0, 6.0, 8.0, 6.0, 8.0, -5.0, 7.0];
    let row = [0.0; 8].into_iter().chain([40.0, -40.0]);
    let proj: Vec<f64> = row.clone().chain(row).collect();
    let v = vec![qkv, proj, vec![0.0], vec![0.0], vec![], vec![]];
    let o = &run_f64(&DeltaFwd { shape: s }, &v)[4];
    // q is k scaled by 1/sqrt(2).
    let want: Vec<f64> = [1.0, 2.0, -5.0, 7.0].iter().map(|x| x / 2f64.sqrt()).collect();
    assert!(relative_error(o, &want) < 1e-6, "{o:?}");
}

#[test]
fn bf16_stays_within_tolerance() {
    for s in SHAPES {
        let (v, b, _) = backward_inputs(&s, 11);
        check_f32_against_f64(&DeltaFwd { shape: s }, &v);
        let round = |(i, x): (usize, &Vec<f64>)| if i == 4 { to_bf16(x) } else { x.clone() };
        let b: Vec<Vec<f64>> = b.iter().enumerate().map(round).collect();
        check_f32_against_f64(&DeltaBwd { shape: s }, &b);
    }
}

#[test]
fn kernels_prepare_at_every_models_sizes() {
    for arch in ["sm_80", "sm_90a"] {
        let mut prep = OfflinePrep::new(arch).unwrap();
        for (key_heads, value_heads, dim) in [(16, 32, 128), (16, 64, 128), (2, 8, 128), (4, 4, 32)] {
            let shape =
                DeltaShape { batch: 1, seq: 1000, key_heads, value_heads, key_dim: dim, value_dim: dim };
            prep.prepare(&DeltaFwd { shape }).unwrap();
            prep.prepare(&DeltaBwd { shape }).unwrap();
        }
        let e = prep.prepare(&DeltaFwd { shape: SHAPES[0] }).unwrap_err().to_string();
        assert!(e.contains("q and k heads of width 3"), "{e}");
    }
    assert_eq!(DeltaBwd { shape: SHAPES[0] }.args().len(), 9);
}
