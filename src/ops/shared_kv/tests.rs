use super::*;
use crate::ops::rope::scaling::Yarn;
use crate::ops::testing::*;

fn shape(batch: usize, seq: usize, heads: usize) -> SharedKvShape {
    SharedKvShape {
        positions: Positions::whole(batch, seq),
        heads,
        head_dim: 24,
        rotary: 8,
        eps: 1e-6,
        base: 1e4,
        scaling: Some(RopeScaling::Yarn(Yarn {
            factor: 4.0,
            original_max_position: 4096.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: 1.0,
            mscale_all_dim: 0.0,
            rounded: true,
        })),
    }
}

#[test]
fn backward_is_the_forwards_gradient() {
    for s in [shape(1, 1, 1), shape(2, 5, 3)] {
        let (fwd, bwd) = (SharedKvFwd { shape: s }, SharedKvBwd { shape: s });
        let v = inputs(&fwd, 3);
        check_f32_against_f64(&fwd, &v);
        let of = run_f64(&fwd, &v);
        let dq = normals(v[0].len(), 5, 1.0);
        let (dk, dv) = (normals(v[1].len(), 6, 1.0), normals(v[1].len(), 7, 1.0));
        let given = vec![of[0].clone(), of[3].clone(), dk.clone(), dv.clone(), dq.clone(), vec![]];
        check_f32_against_f64(&bwd, &inputs(&bwd, 8));
        let got = run_f64(&bwd, &given);
        let both: Vec<f64> = dk.iter().zip(&dv).map(|(a, b)| a + b).collect();
        let outs: [(usize, &[f64]); 2] = [(0, &dq), (2, &both)];
        check_op_gradient(&fwd, &v, &outs, 0, &got[4]);
        check_op_gradient(&fwd, &v, &outs, 1, &got[5]);
    }
}

/// A query and the key at one distance score alike wherever they stand, and turning back is the inverse of turning.
#[test]
fn scores_depend_on_the_distance_alone() {
    let s = SharedKvShape { scaling: None, ..shape(1, 6, 1) };
    let one = normals(24, 9, 1.0);
    let after = run_f64(&SharedKvFwd { shape: s }, &[one.repeat(6), one.repeat(6), vec![], vec![]]);
    let score = |i: usize, j: usize| -> f64 {
        after[0][i * 24..][..24].iter().zip(&after[2][j * 24..][..24]).map(|(a, b)| a * b).sum()
    };
    assert!((score(2, 1) - score(5, 4)).abs() < 1e-12 && (score(2, 1) - score(2, 0)).abs() > 1e-6);
    let x = normals(6 * 24, 4, 1.0);
    let forth = run_f64(&TurnHeads { shape: s, forth: true }, std::slice::from_ref(&x));
    let back = run_f64(&TurnHeads { shape: s, forth: false }, &forth);
    assert!(relative_error(&back[0], &x) < 1e-14 && forth[0] != x);
    for forth in [true, false] {
        let op = TurnHeads { shape: shape(2, 5, 3), forth };
        check_f32_against_f64(&op, &inputs(&op, 2));
    }
}
