use super::*;
use crate::ops::testing::*;

/// Two sequences, of each the first and the last two of 12 tokens.
const POSITIONS: Positions = Positions { batch: 2, seq: 4, chunks: [(0, 2), (10, 2)] };

fn forward(head_dim: usize, rotary_dim: usize, qk_norm: Option<f64>) -> QkvRopeFwd {
    QkvRopeFwd {
        positions: POSITIONS,
        q_heads: 3,
        kv_heads: 2,
        head_dim,
        rotary_dim,
        base: 100.0,
        qk_norm,
        scaling: None,
        axes: None,
        zero_centered: false,
        gated: false,
        bias: false,
    }
}

/// A bias is added before the rotation, to v too: the same as on qkv itself.
#[test]
fn a_bias_is_added_to_every_row() {
    let plain = forward(16, 8, None);
    let fwd = QkvRopeFwd { bias: true, ..plain.clone() };
    let v = inputs(&fwd, 5);
    check_f32_against_f64(&fwd, &v);
    let (with, width) = (run_f64(&fwd, &v), v[1].len());
    let sum = v[0].iter().enumerate().map(|(i, x)| x + v[1][i % width]).collect();
    let want = run_f64(&plain, &[sum, vec![], vec![], vec![]]);
    assert_eq!(with[2..], want[1..]);
    // Its gradient is the column sum of that of qkv.
    let douts: Vec<Vec<f64>> = (2..5).map(|i| normals(with[i].len(), 50 + i as u32, 1.0)).collect();
    let outs: Vec<(usize, &[f64])> = douts.iter().enumerate().map(|(i, d)| (2 + i, d.as_slice())).collect();
    let mut b = douts.clone();
    b.push(vec![]);
    let dqkv = &run_f64(&backward(&plain), &b)[3];
    let dbias: Vec<f64> = (0..width).map(|c| dqkv.iter().skip(c).step_by(width).sum()).collect();
    check_op_gradient(&fwd, &v, &outs, 1, &dbias);
}

fn backward(f: &QkvRopeFwd) -> QkvRopeBwd {
    QkvRopeBwd {
        positions: f.positions,
        q_heads: f.q_heads,
        kv_heads: f.kv_heads,
        head_dim: f.head_dim,
        rotary_dim: f.rotary_dim,
        base: f.base,
        qk_norm: f.qk_norm,
        scaling: f.scaling,
        axes: f.axes,
        zero_centered: f.zero_centered,
        gated: f.gated,
    }
}

#[test]
fn backward_is_the_forwards_gradient() {
    for (head_dim, rotary_dim, qk_norm, gated) in [
        (8, 8, None, false),
        (16, 16, Some(1e-5), false),
        (24, 8, Some(1e-6), false),
        (8, 8, None, true),
        (24, 8, Some(1e-6), true),
    ] {
        let mut fwd = forward(head_dim, rotary_dim, qk_norm);
        (fwd.gated, fwd.zero_centered) = (gated, gated);
        let gate = usize::from(gated);
        let bwd = backward(&fwd);
        assert_eq!(bwd.forward(), fwd);
        let v = inputs(&fwd, 2);
        check_f32_against_f64(&fwd, &v);
        let after = run_f64(&fwd, &v);
        let q_at = if qk_norm.is_some() { 3 } else { 1 };
        let douts: Vec<Vec<f64>> =
            (0..3).map(|i| to_bf16(&normals(after[q_at + i].len(), 40 + i as u32, 1.0))).collect();
        let outs: Vec<(usize, &[f64])> =
            douts.iter().enumerate().map(|(i, d)| (q_at + i, d.as_slice())).collect();
        let mut b = douts.clone();
        let dgate = to_bf16(&normals(after[q_at].len(), 44, 1.0));
        if gated {
            b.push(dgate.clone());
        }
        if qk_norm.is_some() {
            let rstd = after[6].iter().map(|r| *r as f32 as f64).collect();
            b.extend([v[0].clone(), v[1].clone(), v[2].clone(), rstd, vec![]]);
        }
        b.push(vec![]);
        check_f32_against_f64(&bwd, &b);
        if qk_norm.is_some() {
            b[6 + gate] = after[6].clone();
        }
        let grads = run_f64(&bwd, &b);
        let mut dqkv = grads[gate + if qk_norm.is_some() { 7 } else { 3 }].clone();
        if gated {
            // The gate's columns carry what was given; the forward does not read them.
            let (row, q) = ((2 * 3 + 2 * 2) * head_dim, 3 * head_dim);
            for (row, given) in dqkv.chunks_mut(row).zip(dgate.chunks(q)) {
                let own = row.len() - q;
                assert_eq!(&row[own..], given);
                row[own..].fill(0.0);
            }
        }
        check_op_gradient(&fwd, &v, &outs, 0, &dqkv);
        if qk_norm.is_some() {
            let d = head_dim;
            let dw: Vec<f64> =
                (0..2 * d).map(|c| grads[8 + gate].iter().skip(c).step_by(2 * d).sum::<f64>()).collect();
            check_op_gradient(&fwd, &v, &outs, 1, &dw[..d]);
            check_op_gradient(&fwd, &v, &outs, 2, &dw[d..]);
        }
    }
}

/// The definition, written out: a complex number x + iy for each pair, times e^(i * position * frequency).
#[test]
fn pairs_turn_by_position_times_frequency() {
    let fwd = forward(8, 4, None);
    let v = inputs(&fwd, 3);
    let after = run_f64(&fwd, &v);
    let (row, head) = (6, 1); // position 10 of the second sequence, q head 1
    let x = &v[0][row * 7 * 8 + head * 8..][..8];
    let q = &after[1][row * 3 * 8 + head * 8..][..8];
    for i in 0..2 {
        let angle = 10.0 * 100f64.powf(-2.0 * i as f64 / 4.0);
        let want = (x[i] * angle.cos() - x[i + 2] * angle.sin(), x[i + 2] * angle.cos() + x[i] * angle.sin());
        assert!((q[i] - want.0).abs() < 1e-12 && (q[i + 2] - want.1).abs() < 1e-12);
    }
    assert_eq!(&q[4..], &x[4..]);
    // v is copied: head 5 and 6 of the row.
    assert_eq!(&after[3][row * 16..][..16], &v[0][row * 56 + 40..][..16]);
}

/// YaRN's amplitude scales what is rotated, forward and backward, and nothing else.
#[test]
fn scaled_rotation_has_its_gradient() {
    let yarn = scaling::Yarn {
        factor: 4.0,
        original_max_position: 8.0,
        beta_fast: 2.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 0.0,
        rounded: true,
    };
    let mut fwd = forward(16, 8, None);
    fwd.scaling = Some(RopeScaling::Yarn(yarn));
    let v = inputs(&fwd, 4);
    check_f32_against_f64(&fwd, &v);
    let after = run_f64(&fwd, &v);
    let size = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let grown = size(&after[1][..8]) / size(&v[0][..8]);
    assert!((grown - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12, "{grown}");
    assert_eq!(after[1][8..16], v[0][8..16]);
    let douts: Vec<Vec<f64>> = (0..3).map(|i| normals(after[1 + i].len(), 50 + i as u32, 1.0)).collect();
    let mut b = douts.clone();
    b.push(vec![]);
    let grads = run_f64(&QkvRopeBwd::of(&fwd), &b);
    let outs: Vec<(usize, &[f64])> = douts.iter().enumerate().map(|(i, d)| (1 + i, d.as_slice())).collect();
    check_op_gradient(&fwd, &v, &outs, 0, &grads[3]);
}

/// Several axes: a pair of an image's token turns with its row or column, a pair of text with its place; and the gradient.
#[test]
fn axes_turn_pairs_by_their_coordinates() {
    let text = Axes::Text { start: 1, side: 2, section: [2, 1, 1] };
    for (axes, positions) in
        [(text, Positions::whole(2, 7)), (Axes::Patches { side: 4 }, Positions::whole(1, 16))]
    {
        let mut fwd = forward(8, 8, None);
        (fwd.axes, fwd.positions) = (Some(axes), positions);
        let v = inputs(&fwd, 4);
        check_f32_against_f64(&fwd, &v);
        let after = run_f64(&fwd, &v);
        let frequencies = axes.frequencies(4, 100.0);
        for row in 0..positions.rows() {
            for (i, f) in frequencies.iter().enumerate() {
                let angle = axes.coordinate(row % positions.seq, axes.of_pair(i, 4)) as f64 * f;
                let (x, y) = (v[0][row * 56 + i], v[0][row * 56 + i + 4]);
                let q = &after[1][row * 24..];
                assert!((q[i] - (x * angle.cos() - y * angle.sin())).abs() < 1e-12, "{axes:?} row {row}");
            }
        }
        let douts: Vec<Vec<f64>> = (0..3).map(|i| normals(after[1 + i].len(), 50 + i as u32, 1.0)).collect();
        let mut b = douts.clone();
        b.push(vec![]);
        let grads = run_f64(&QkvRopeBwd::of(&fwd), &b);
        let outs: Vec<(usize, &[f64])> =
            douts.iter().enumerate().map(|(i, d)| (1 + i, d.as_slice())).collect();
        check_op_gradient(&fwd, &v, &outs, 0, &grads[3]);
    }
}

#[test]
fn f32_agrees_far_into_the_sequence() {
    let mut fwd = forward(64, 64, None);
    fwd.base = 500_000.0;
    fwd.positions = Positions { batch: 1, seq: 3, chunks: [(8189, 3), (0, 0)] };
    check_f32_against_f64(&fwd, &inputs(&fwd, 3));
}

#[test]
fn heads_are_cut_so_that_a_group_of_lanes_holds_them() {
    for (head_dim, rotary_dim, want) in [
        (128, 128, Some((8, 8))),
        (64, 64, Some((8, 4))),
        (96, 96, Some((8, 8))),
        (256, 64, Some((8, 16))),
        (24, 8, Some((4, 4))),
        (8, 8, Some((4, 1))),
        (512, 512, Some((8, 32))),
        (520, 520, None),
        (12, 8, None),
        (64, 68, None),
    ] {
        let got = forward(head_dim, rotary_dim, None).cut("qkv_rope_fwd").ok().map(|c| (c.vector, c.group));
        assert_eq!(got, want, "head_dim {head_dim}, rotary_dim {rotary_dim}");
    }
}
