use super::*;
use crate::ops::testing::*;

fn cases() -> Vec<WideShape> {
    let video = Some((Axes::Video { height: 2, width: 3 }, 100.0));
    let shape =
        |parts, positions, rotary| WideShape { parts, positions, width: 32, head_dim: 16, rotary, eps: 1e-5 };
    vec![
        shape(Parts::Qkv, Positions::whole(2, 12), video),
        // A context-parallel rank's rows.
        shape(Parts::Qkv, Positions { batch: 1, seq: 6, chunks: [(3, 3), (9, 3)] }, video),
        shape(Parts::Q, Positions::whole(1, 5), None),
        shape(Parts::Kv, Positions::whole(2, 3), None),
    ]
}

#[test]
fn backward_is_the_forwards_gradient() {
    for shape in cases() {
        let (fwd, bwd) = (WideNormFwd { shape: shape.clone() }, WideNormBwd { shape: shape.clone() });
        let (normed, count, w) = (shape.parts.normed(), shape.parts.count(), shape.width);
        let v = inputs(&fwd, 5);
        check_f32_against_f64(&fwd, &v);
        let after = run_f64(&fwd, &v);
        let first = 2 + normed;
        let douts: Vec<Vec<f64>> =
            (0..count).map(|i| to_bf16(&normals(shape.rows() * w, 40 + i as u32, 1.0))).collect();
        let outs: Vec<(usize, &[f64])> =
            douts.iter().enumerate().map(|(i, d)| (first + i, d.as_slice())).collect();
        let mut b = douts.clone();
        b.extend(v[..first].to_vec());
        b.push(after[first + count].iter().map(|r| *r as f32 as f64).collect());
        b.extend([vec![], vec![]]);
        check_f32_against_f64(&bwd, &b);
        let at = b.len() - 3;
        b[at] = after[first + count].clone();
        let grads = run_f64(&bwd, &b);
        let (dx, partial) = (&grads[at + 1], &grads[at + 2]);
        check_op_gradient(&fwd, &v, &outs, 0, dx);
        let columns = (normed + count) * w;
        let sums: Vec<f64> = (0..columns).map(|c| partial.iter().skip(c).step_by(columns).sum()).collect();
        check_op_gradient(&fwd, &v, &outs, 1, &sums[normed * w..]);
        for part in 0..normed {
            check_op_gradient(&fwd, &v, &outs, 2 + part, &sums[part * w..][..w]);
        }
    }
}

/// A head's neighbours turn by frame, row and column times frequency; the norm is over all heads.
#[test]
fn the_definition_written_out() {
    let shape = cases().swap_remove(0);
    let op = WideNormFwd { shape: shape.clone() };
    let v = inputs(&op, 6);
    let after = run_f64(&op, &v);
    let (axes, base) = shape.rotary.unwrap();
    let row = 12 + 10; // second sequence, frame 1, row 1, column 1
    let x: Vec<f64> = (0..32).map(|i| v[0][row * 96 + i] + v[1][i]).collect();
    let r = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / 32.0 + 1e-5).sqrt();
    for (i, f) in axes.frequencies(8, base).iter().enumerate() {
        // All coordinates are 1.
        let (a, b) = (x[16 + 2 * i] * r * v[2][16 + 2 * i], x[17 + 2 * i] * r * v[2][17 + 2 * i]);
        let want = [a * f.cos() - b * f.sin(), b * f.cos() + a * f.sin()];
        let got = &after[4][row * 32 + 16 + 2 * i..][..2];
        assert!((got[0] - want[0]).abs() < 1e-12 && (got[1] - want[1]).abs() < 1e-12);
    }
    for i in 0..32 {
        assert!((after[6][row * 32 + i] - v[0][row * 96 + 64 + i] - v[1][64 + i]).abs() < 1e-12);
    }
}
