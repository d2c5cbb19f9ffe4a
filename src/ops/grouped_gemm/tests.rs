use super::*;
use crate::ops::testing::{check_f32_against_f64, inputs, run_f64};

fn gemm(layout: Layout, accumulate: bool, out: DType) -> GroupedGemm {
    GroupedGemm { experts: 6, rows: 61, filled: 61, n: 16, k: 24, layout, out, accumulate }
}

/// Plain triple loop of the definition.
fn plain(op: &GroupedGemm, values: &[Vec<f64>]) -> Vec<f64> {
    let (n, k) = (op.n, op.k);
    let (offsets, a, b) = (&values[0], &values[1], &values[2]);
    let len = op.args()[3].len();
    let mut d = if op.accumulate { values[3].clone() } else { vec![0.0; len] };
    for e in 0..op.experts {
        for r in offsets[e] as usize..offsets[e + 1] as usize {
            for j in 0..n {
                for i in 0..k {
                    match op.layout {
                        Layout::Nt => d[r * n + j] += a[r * k + i] * b[(e * n + j) * k + i],
                        Layout::Nn => d[r * n + j] += a[r * k + i] * b[(e * k + i) * n + j],
                        Layout::Tn => d[(e * n + j) * k + i] += a[r * n + j] * b[r * k + i],
                    }
                }
            }
        }
    }
    d
}

#[test]
fn every_layout_is_the_plain_product() {
    for (layout, accumulate) in
        [(Layout::Nt, false), (Layout::Nn, false), (Layout::Tn, false), (Layout::Tn, true)]
    {
        for seed in 0..4 {
            let op = gemm(layout, accumulate, DType::F32);
            let values = inputs(&op, seed);
            let got = run_f64(&op, &values);
            for (x, y) in got[3].iter().zip(plain(&op, &values)) {
                assert!((x - y).abs() < 1e-12, "{layout:?} seed {seed}: {x} not {y}");
            }
        }
    }
}

#[test]
fn samples_hold_empty_single_and_padding_rows() {
    let lengths: Vec<f64> = (0..4)
        .flat_map(|seed| {
            let offsets = inputs(&gemm(Layout::Nt, false, DType::Bf16), seed)[0].clone();
            offsets.windows(2).map(|w| w[1] - w[0]).collect::<Vec<_>>()
        })
        .collect();
    assert!(lengths.contains(&0.0) && lengths.contains(&1.0) && lengths.iter().any(|&l| l > 4.0));
}

#[test]
fn bf16_stays_within_tolerance() {
    for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
        let op = gemm(layout, layout == Layout::Tn, DType::Bf16);
        check_f32_against_f64(&op, &inputs(&op, 2));
    }
}

/// d(sum(dy * y)) of the forward product: Nn is the data gradient, Tn the weight gradient.
#[test]
fn backward_layouts_are_the_gradients_of_the_forward_one() {
    let forward = gemm(Layout::Nt, false, DType::F32);
    let values = inputs(&forward, 3);
    let rows = forward.rows;
    let dy: Vec<f64> = (0..rows * forward.n).map(|i| ((i * 37 % 101) as f64 - 50.0) / 50.0).collect();
    let dgrad = GroupedGemm { n: forward.k, k: forward.n, ..gemm(Layout::Nn, false, DType::F32) };
    let wgrad = gemm(Layout::Tn, false, DType::F32);
    let (offsets, x, w) = (values[0].clone(), values[1].clone(), values[2].clone());
    let dx = run_f64(&dgrad, &[offsets.clone(), dy.clone(), w, vec![]]);
    let dw = run_f64(&wgrad, &[offsets, dy.clone(), x, vec![]]);
    crate::ops::testing::check_op_gradient(&forward, &values, &[(3, &dy)], 1, &dx[3]);
    crate::ops::testing::check_op_gradient(&forward, &values, &[(3, &dy)], 2, &dw[3]);
}

#[test]
fn illegal_shapes_are_refused() {
    assert!(GroupedGemm { n: 12, ..gemm(Layout::Nt, false, DType::Bf16) }.check().is_err());
    assert!(GroupedGemm { experts: 0, ..gemm(Layout::Nt, false, DType::Bf16) }.check().is_err());
    assert!(GroupedGemm { accumulate: true, ..gemm(Layout::Nn, false, DType::Bf16) }.check().is_err());
    assert!(gemm(Layout::Nn, false, DType::I32).check().is_err());
    assert!(gemm(Layout::Tn, true, DType::Bf16).check().is_ok());
}
