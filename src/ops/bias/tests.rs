//! Biases against their definition, and every gradient by finite differences.

use super::*;
use crate::ops::testing::{check_f32_against_f64, check_op_gradient, inputs, normals, run_f64};

const ROWS: usize = 13;
const COLS: usize = 16;

fn add(experts: usize, weighted: bool) -> BiasAdd {
    BiasAdd { rows: ROWS, cols: COLS, experts, weighted, dtype: DType::Bf16 }
}

#[test]
fn gradients_agree_with_finite_differences() {
    for (experts, weighted) in [(0, false), (3, false), (3, true), (1, true)] {
        let forward = add(experts, weighted);
        let v = inputs(&forward, 4);
        check_f32_against_f64(&forward, &v);
        check_f32_against_f64(&BiasAdd { dtype: DType::F32, ..forward.clone() }, &v);
        let dy = normals(ROWS * COLS, 7, 1.0);
        for accumulate in [false, true] {
            let op = BiasGrad { rows: ROWS, cols: COLS, experts, weighted, out: DType::F32, accumulate };
            let mut given = vec![dy.clone()];
            given.extend(v[2..].to_vec());
            let old = vec![if accumulate { 0.5 } else { 0.0 }; v[1].len()];
            given.push(old.clone());
            check_f32_against_f64(&op, &given);
            let after = run_f64(&op, &given);
            let grad: Vec<f64> = after[op.grad_arg()].iter().zip(&old).map(|(g, o)| g - o).collect();
            check_op_gradient(&forward, &v, &[(0, &dy)], 1, &grad);
        }
        if weighted {
            let op = BiasProbGrad { rows: ROWS, cols: COLS, experts };
            let given = [dy.clone(), v[1].clone(), v[2].clone(), vec![0.0; ROWS]];
            check_f32_against_f64(&op, &inputs(&op, 9));
            check_op_gradient(&forward, &v, &[(0, &dy)], 3, &run_f64(&op, &given)[3]);
        }
    }
}

/// Experts 0 and 2 have rows, 1 has none, and the last rows belong to nobody.
#[test]
fn rows_get_the_bias_of_their_expert() {
    let op = BiasAdd { rows: 6, cols: 8, ..add(3, true) };
    let bias = (0..24).map(|i| f64::from(1 + i / 8)).collect();
    let probs = vec![0.5, 1.0, 2.0, 1.0, 9.0, 9.0];
    let given = [vec![1.0; 48], bias, vec![0.0, 2.0, 2.0, 4.0], probs];
    let x = &run_f64(&op, &given)[0];
    let firsts: Vec<f64> = x.chunks(8).map(|row| row[0]).collect();
    assert_eq!(firsts, [1.5, 2.0, 7.0, 4.0, 1.0, 1.0]);
    assert_eq!(experts_of_rows(&[0, 2, 2, 4], 3, 6), [0, 0, 2, 2]);
}

/// An expert without rows: its gradient is zero, or stays.
#[test]
fn an_expert_without_rows_has_no_gradient() {
    for accumulate in [false, true] {
        let op = BiasGrad { rows: 2, cols: 8, experts: 2, weighted: false, out: DType::F32, accumulate };
        let after = run_f64(&op, &[vec![1.0; 16], vec![0.0, 2.0, 2.0], vec![3.0; 16]]);
        let kept = if accumulate { 3.0 } else { 0.0 };
        assert_eq!(after[2][..8], [2.0 + kept; 8]);
        assert_eq!(after[2][8..], [kept; 8]);
    }
}

#[test]
fn a_probability_without_experts_is_refused() {
    assert!(check("bias_add", 16, 0, true).is_err());
    assert!(check("bias_add", 12, 2, true).unwrap_err().to_string().contains("multiple of 8"));
}
