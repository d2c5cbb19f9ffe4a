//! The chunked form against the plain recurrence and its adjoint, token by token in f64.

use super::{SsdBwd, SsdFwd, SsdShape};
use crate::device::cuda::prep::OfflinePrep;
use crate::ops::Op;
use crate::ops::testing::*;

const SHAPES: [SsdShape; 4] = [
    // Odd lengths: shorter than a chunk, one over, a short last chunk, and chunks of one length in two sequences.
    SsdShape { batch: 2, seq: 5, heads: 2, head_dim: 3, groups: 1, state: 4, chunk: 8 },
    SsdShape { batch: 1, seq: 9, heads: 4, head_dim: 2, groups: 2, state: 3, chunk: 8 },
    SsdShape { batch: 2, seq: 23, heads: 4, head_dim: 4, groups: 2, state: 5, chunk: 4 },
    SsdShape { batch: 1, seq: 33, heads: 2, head_dim: 4, groups: 2, state: 6, chunk: 11 },
];

/// Everything of one token step: y and all gradients, in the order of the backward's outputs.
struct Plain {
    y: Vec<f64>,
    dxbc: Vec<f64>,
    ddt: Vec<f64>,
    /// a_log, D, dt_bias of every head.
    dparams: Vec<f64>,
}

/// H_t = exp(dt A) H_{t-1} + dt x B^T and y = H C + D x, forward and adjoint, without any chunk.
fn plain(s: &SsdShape, v: &[Vec<f64>], dy: &[f64]) -> Plain {
    let (p, n, w, pw) = (s.head_dim, s.state, s.conv_width(), s.projected_width());
    let mut out = Plain {
        y: vec![0.0; s.tokens() * s.inner()],
        dxbc: vec![0.0; s.tokens() * w],
        ddt: vec![0.0; s.tokens() * s.heads],
        dparams: vec![0.0; 3 * s.heads],
    };
    for b in 0..s.batch {
        for h in 0..s.heads {
            let group = h / (s.heads / s.groups);
            let b_at = s.inner() + group * n;
            let c_at = b_at + s.groups * n;
            let a = -v[2][h].exp();
            let raw = |t: usize| v[1][(b * s.seq + t) * pw + pw - s.heads + h] + v[4][h];
            let dt = |t: usize| raw(t).exp().ln_1p();
            let row = |t: usize| &v[0][(b * s.seq + t) * w..][..w];
            let mut states = vec![vec![0.0; p * n]];
            for t in 0..s.seq {
                let (r, old) = (row(t), &states[t]);
                let mut new = vec![0.0; p * n];
                for i in 0..p {
                    let x = r[h * p + i];
                    let mut y = v[3][h] * x;
                    for j in 0..n {
                        new[i * n + j] = (dt(t) * a).exp() * old[i * n + j] + dt(t) * x * r[b_at + j];
                        y += new[i * n + j] * r[c_at + j];
                    }
                    out.y[(b * s.seq + t) * s.inner() + h * p + i] = y;
                }
                states.push(new);
            }
            let mut dstate = vec![0.0; p * n];
            for t in (0..s.seq).rev() {
                let (r, d) = (row(t), &mut out.dxbc[(b * s.seq + t) * w..][..w]);
                let (mut ddt, decay) = (0.0, (dt(t) * a).exp());
                for i in 0..p {
                    let (x, g) = (r[h * p + i], dy[(b * s.seq + t) * s.inner() + h * p + i]);
                    d[h * p + i] += v[3][h] * g;
                    out.dparams[s.heads + h] += g * x;
                    for j in 0..n {
                        let at = i * n + j;
                        d[c_at + j] += g * states[t + 1][at];
                        dstate[at] += g * r[c_at + j];
                        d[h * p + i] += dstate[at] * dt(t) * r[b_at + j];
                        d[b_at + j] += dstate[at] * dt(t) * x;
                        let through = dstate[at] * decay * states[t][at];
                        ddt += dstate[at] * x * r[b_at + j] + through * a;
                        out.dparams[h] += through * dt(t) * a;
                        dstate[at] *= decay;
                    }
                }
                let draw = ddt / (1.0 + (-raw(t)).exp());
                out.ddt[(b * s.seq + t) * s.heads + h] = draw;
                out.dparams[2 * s.heads + h] += draw;
            }
        }
    }
    out
}

fn close(what: &str, s: &SsdShape, got: &[f64], want: &[f64]) {
    let error = relative_error(got, want);
    assert!(error < 1e-11, "{what} of {s:?} differs from the recurrence by {error:e}");
}

/// The backward's arguments after its forward.
fn backward_inputs(s: &SsdShape, seed: u32) -> (Vec<Vec<f64>>, Vec<Vec<f64>>, Vec<f64>) {
    let v = inputs(&SsdFwd { shape: *s }, seed);
    let after = run_f64(&SsdFwd { shape: *s }, &v);
    let dy = to_bf16(&normals(s.tokens() * s.inner(), seed + 40, 1.0));
    let mut b = v[..5].to_vec();
    b.extend([after[6].clone(), dy.clone(), vec![], vec![], vec![]]);
    (v, b, dy)
}

#[test]
fn chunks_equal_the_recurrence() {
    for (seed, s) in SHAPES.iter().enumerate() {
        let (v, b, dy) = backward_inputs(s, seed as u32);
        let want = plain(s, &v, &dy);
        close("y", s, &run_f64(&SsdFwd { shape: *s }, &v)[5], &want.y);
        let got = run_f64(&SsdBwd { shape: *s }, &b);
        close("dxbc", s, &got[7], &want.dxbc);
        close("ddt", s, &got[8], &want.ddt);
        let width = 3 * s.heads;
        let sum = |i: usize| (0..s.partial_rows()).map(|r| got[9][r * width + i]).sum::<f64>();
        close("a_log, D and dt_bias", s, &(0..width).map(sum).collect::<Vec<_>>(), &want.dparams);
    }
}

#[test]
fn the_chunk_does_not_matter() {
    let s = SHAPES[2];
    let v = inputs(&SsdFwd { shape: s }, 3);
    let y = run_f64(&SsdFwd { shape: s }, &v)[5].clone();
    let other = SsdShape { chunk: 7, ..s };
    let mut v = v[..5].to_vec();
    v.extend([vec![], vec![]]);
    close("y", &s, &run_f64(&SsdFwd { shape: other }, &v)[5], &y);
}

#[test]
fn backward_is_the_forwards_gradient() {
    let s = SHAPES[1];
    let (v, b, dy) = backward_inputs(&s, 7);
    let fwd = SsdFwd { shape: s };
    let got = run_f64(&SsdBwd { shape: s }, &b);
    check_op_gradient(&fwd, &v, &[(5, &dy)], 0, &got[7]);
    let mut dz = vec![0.0; s.tokens() * s.projected_width()];
    let w = s.projected_width();
    for t in 0..s.tokens() {
        dz[t * w + w - s.heads..][..s.heads].copy_from_slice(&got[8][t * s.heads..][..s.heads]);
    }
    check_op_gradient(&fwd, &v, &[(5, &dy)], 1, &dz);
    for (arg, first) in [(2, 0), (3, s.heads), (4, 2 * s.heads)] {
        let sum = |h: usize| (0..s.partial_rows()).map(|r| got[9][r * 3 * s.heads + first + h]).sum();
        let grad: Vec<f64> = (0..s.heads).map(sum).collect();
        check_op_gradient(&fwd, &v, &[(5, &dy)], arg, &grad);
    }
}

#[test]
fn bf16_stays_within_tolerance() {
    for s in SHAPES {
        let (v, b, _) = backward_inputs(&s, 11);
        check_f32_against_f64(&SsdFwd { shape: s }, &v);
        let b: Vec<Vec<f64>> =
            b.iter().enumerate().map(|(i, x)| if i == 5 { to_bf16(x) } else { x.clone() }).collect();
        check_f32_against_f64(&SsdBwd { shape: s }, &b);
    }
}

#[test]
fn kernels_prepare_at_every_models_sizes() {
    for arch in ["sm_80", "sm_90a"] {
        let mut prep = OfflinePrep::new(arch).unwrap();
        for (heads, head_dim, groups, state, chunk) in
            [(64, 64, 8, 128, 128), (256, 64, 8, 256, 128), (32, 64, 1, 256, 128), (8, 32, 2, 32, 32)]
        {
            let shape = SsdShape { batch: 1, seq: 1000, heads, head_dim, groups, state, chunk };
            prep.prepare(&SsdFwd { shape }).unwrap();
            prep.prepare(&SsdBwd { shape }).unwrap();
        }
        let shape = SsdShape { state: 264, ..SHAPES[0] };
        let e = prep.prepare(&SsdFwd { shape }).unwrap_err().to_string();
        assert!(e.contains("chunks of 8 tokens"), "{e}");
    }
    assert_eq!(SsdFwd { shape: SHAPES[0] }.args().len(), 7);
}
