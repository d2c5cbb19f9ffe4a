//! The clamped gated unit against its formula and by finite differences.

use super::*;
use crate::ops::testing::{check_f32_against_f64, check_op_gradient, inputs, normals, run_f64};

fn shapes() -> Vec<GluShape> {
    let mut out = Vec::new();
    for experts in [0, 3] {
        for bias in [false, true] {
            for limit in [None, Some(1.5)] {
                for (shift, alpha) in [(1.0, QUICK_GELU), (0.0, SILU)] {
                    out.push(GluShape { rows: 7, ffn: 8, experts, bias, limit, shift, alpha });
                }
            }
        }
    }
    out
}

/// Values of the forward, none within 1e-2 of a bound, where a difference would straddle the corner.
fn forward_inputs(s: &GluShape) -> Vec<Vec<f64>> {
    let op = ClampedGluFwd { shape: s.clone() };
    let mut v = inputs(&op, 3);
    let Some(limit) = s.limit else { return v };
    for (i, x) in v[0].clone().iter().enumerate() {
        let (row, col) = (i / (2 * s.ffn), i % (2 * s.ffn));
        let e = if s.experts == 0 {
            0
        } else {
            experts_of_rows(&ints(&v[s.next() + 1]), s.experts, s.rows).get(row).copied().unwrap_or(0)
        };
        let bias = if s.bias { v[1][e * 2 * s.ffn + col] } else { 0.0 };
        if ((x + bias).abs() - limit).abs() < 1e-2 {
            v[0][i] += 0.0625;
        }
    }
    v
}

fn ints(v: &[f64]) -> Vec<i32> {
    v.iter().map(|x| *x as i32).collect()
}

#[test]
fn gradients_agree_with_finite_differences() {
    for s in shapes() {
        let (forward, backward) = (ClampedGluFwd { shape: s.clone() }, ClampedGluBwd { shape: s.clone() });
        let v = forward_inputs(&s);
        check_f32_against_f64(&forward, &v);
        let dh = normals(s.rows * s.ffn, 5, 1.0);
        let mut b = v[..s.next()].to_vec();
        b.push(dh.clone());
        b.extend(v[s.next()..v.len() - 1].to_vec());
        let out = b.len();
        b.push(vec![]);
        if s.routed() {
            b.push(vec![]);
        }
        check_f32_against_f64(&backward, &inputs(&backward, 6));
        let grads = run_f64(&backward, &b);
        let outs = [(v.len() - 1, dh.as_slice())];
        check_op_gradient(&forward, &v, &outs, 0, &grads[out]);
        if s.routed() {
            check_op_gradient(&forward, &v, &outs, s.next(), &grads[out + 1]);
        }
        if s.bias {
            // The bias' gradient is the sum over the rows of its expert.
            let wide = 2 * s.ffn;
            let mut sums = vec![0.0; v[1].len()];
            let of = if s.routed() {
                experts_of_rows(&ints(&v[s.next() + 1]), s.experts, s.rows)
            } else {
                vec![0; s.rows]
            };
            for (row, e) in of.into_iter().enumerate() {
                for c in 0..wide {
                    sums[e * wide + c] += grads[out][row * wide + c];
                }
            }
            check_op_gradient(&forward, &v, &outs, 1, &sums);
        }
    }
}

/// The formula written out for one gate and up, in and beyond the bounds.
#[test]
fn values_are_those_of_the_formula() {
    let s =
        GluShape { rows: 1, ffn: 8, experts: 0, bias: true, limit: Some(7.0), shift: 1.0, alpha: QUICK_GELU };
    let gate = [0.5, -2.0, 9.0, 7.0, -20.0, 1.0, 1.0, 6.0];
    let up = [0.25, 3.0, -9.0, 8.0, 1.0, -1.0, 0.0, -7.0];
    let mut bias = vec![0.0; 16];
    (bias[0], bias[7]) = (0.5, 3.0);
    let gate_up: Vec<f64> = gate.iter().chain(&up).copied().collect();
    let h = &run_f64(&ClampedGluFwd { shape: s }, &[gate_up, bias.clone(), vec![]])[2];
    for i in 0..8 {
        let x = (gate[i] + bias[i]).min(7.0);
        let y = (up[i] + bias[8 + i]).clamp(-7.0, 7.0);
        let want = x / (1.0 + (-1.702 * x).exp()) * (y + 1.0);
        assert!((h[i] - want).abs() < 1e-12, "{i}: {} {want}", h[i]);
    }
}

#[test]
fn rows_of_no_expert_are_zeros() {
    let s =
        GluShape { rows: 4, ffn: 8, experts: 2, bias: true, limit: Some(7.0), shift: 1.0, alpha: QUICK_GELU };
    let routing = [vec![1.0; 4], vec![0.0, 1.0, 3.0]];
    let [probs, offsets] = routing;
    let (gate_up, bias, dh) = (vec![1.0; 64], vec![1.0; 32], vec![1.0; 32]);
    let h = run_f64(
        &ClampedGluFwd { shape: s.clone() },
        &[gate_up.clone(), bias.clone(), probs.clone(), offsets.clone(), vec![]],
    );
    assert!(h[4][..24].iter().all(|x| *x > 1.0) && h[4][24..].iter().all(|x| *x == 0.0));
    let d = run_f64(&ClampedGluBwd { shape: s }, &[gate_up, bias, dh, probs, offsets, vec![], vec![]]);
    assert!(d[5][48..].iter().all(|x| *x == 0.0) && d[6][3] == 0.0 && d[6][2] > 0.0);
}
