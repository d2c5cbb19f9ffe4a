use super::*;
use crate::ops::rope::scaling::Yarn;
use crate::ops::testing::*;

fn shape(heads: usize, rotary: usize) -> MlaShape {
    let yarn = Yarn {
        factor: 4.0,
        original_max_position: 16.0,
        beta_fast: 2.0,
        beta_slow: 0.5,
        mscale: 1.0,
        mscale_all_dim: 0.5,
        rounded: true,
    };
    MlaShape {
        // Two sequences, of each the first and the last two of 12 tokens.
        positions: Positions { batch: 2, seq: 4, chunks: [(0, 2), (10, 2)] },
        heads,
        nope: 6,
        rotary,
        value: 5,
        base: 100.0,
        scaling: Some(RopeScaling::Yarn(yarn)),
    }
}

#[test]
fn backward_is_the_forwards_gradient() {
    for (heads, rotary) in [(3, 8), (1, 2)] {
        let shape = shape(heads, rotary);
        let (fwd, bwd) = (MlaRopeFwd { shape }, MlaRopeBwd { shape });
        let v = inputs(&fwd, 2);
        check_f32_against_f64(&fwd, &v);
        let after = run_f64(&fwd, &v);
        let gradient = |arg: usize| to_bf16(&normals(after[arg].len(), 40 + arg as u32, 1.0));
        let (dq, dk, dv) = (gradient(0), gradient(3), gradient(4));
        let b = vec![dq.clone(), dk.clone(), dv.clone(), vec![], vec![]];
        check_f32_against_f64(&bwd, &b);
        let grads = run_f64(&bwd, &b);
        let outs: [(usize, &[f64]); 3] = [(0, &dq), (3, &dk), (4, &dv)];
        for (wrt, grad) in [(0, 0), (1, 3), (2, 4)] {
            check_op_gradient(&fwd, &v, &outs, wrt, &grads[grad]);
        }
    }
}

/// The definition, written out: neighbours as one complex number, turned by position times frequency; every key head
/// ends with the same rotated part.
#[test]
fn neighbours_turn_and_all_keys_share_the_rotated_part() {
    let mut s = shape(2, 4);
    s.scaling = None;
    let fwd = MlaRopeFwd { shape: s };
    let v = inputs(&fwd, 3);
    let after = run_f64(&fwd, &v);
    let (row, position) = (6, 10.0); // the third row of the second sequence
    let turned = |x: &[f64]| -> Vec<f64> {
        let angle = |i: usize| position * 100f64.powf(-2.0 * i as f64 / 4.0);
        let re = (0..2).map(|i| x[2 * i] * angle(i).cos() - x[2 * i + 1] * angle(i).sin());
        let im = (0..2).map(|i| x[2 * i + 1] * angle(i).cos() + x[2 * i] * angle(i).sin());
        re.chain(im).collect()
    };
    let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(x, y)| (x - y).abs() < 1e-12);
    let shared = turned(&v[2][row * 4..][..4]);
    for h in 0..2 {
        let (q, k) = (&after[0][(row * 2 + h) * 10..][..10], &after[3][(row * 2 + h) * 10..][..10]);
        assert_eq!(q[..6], v[0][(row * 2 + h) * 10..][..6]);
        assert!(close(&q[6..], &turned(&v[0][(row * 2 + h) * 10 + 6..][..4])));
        let kv = &v[1][(row * 2 + h) * 11..][..11];
        assert_eq!(k[..6], kv[..6]);
        assert!(close(&k[6..], &shared));
        assert_eq!(after[4][(row * 2 + h) * 5..][..5], kv[6..]);
    }
}
