use super::*;
use crate::ops::testing::*;

fn shape(tokens: usize, hidden: usize, streams: usize, head: bool) -> HyperShape {
    HyperShape { tokens, hidden, streams, iterations: 20, eps: 1e-6, head }
}

#[test]
fn rows_and_columns_of_the_mixture_sum_to_one() {
    let s = shape(5, 8, 4, false);
    let values = inputs(&HyperPreFwd { shape: s }, 3);
    let maps = &run_f64(&HyperPreFwd { shape: s }, &values)[5];
    for maps in maps.chunks(s.maps()) {
        let (pre, rest) = maps.split_at(4);
        let (post, res) = rest.split_at(4);
        assert!(
            pre.iter().all(|m| (0.0..1.0 + 2e-6).contains(m)) && post.iter().all(|m| (0.0..2.0).contains(m))
        );
        for i in 0..4 {
            let row: f64 = res[i * 4..][..4].iter().sum();
            let column: f64 = res.iter().skip(i).step_by(4).sum();
            assert!((row - 1.0).abs() < 1e-3 && (column - 1.0).abs() < 1e-5, "{row} {column}");
        }
    }
}

/// With maps of one stream that passes through: y is that stream, and the output is added to it.
#[test]
fn plain_residuals_are_a_special_case() {
    let s = shape(3, 8, 2, false);
    let x = to_bf16(&normals(3 * 16, 1, 1.0));
    let out = to_bf16(&normals(3 * 8, 2, 1.0));
    let maps: Vec<f64> = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0].repeat(3);
    let next = &run_f64(&HyperPostFwd { shape: s }, &[x.clone(), out.clone(), maps, vec![]])[3];
    for (i, next) in next.iter().enumerate() {
        let (token, c) = (i / 16, i % 8);
        assert_eq!(*next, x[i] + out[token * 8 + c]);
    }
}

/// All of a token's way, from streams to streams, for a loss of the next streams.
#[test]
fn backward_is_the_forwards_gradient() {
    for (tokens, hidden, streams) in [(1, 8, 4), (5, 16, 4), (3, 8, 2), (2, 8, 3)] {
        let s = shape(tokens, hidden, streams, false);
        let (pre, post) = (HyperPreFwd { shape: s }, HyperPostFwd { shape: s });
        let values = inputs(&HyperPreBwd { shape: s, carried: false }, 7);
        let v: Vec<Vec<f64>> = [&values[..4], &[vec![], vec![], vec![]]].concat();
        check_f32_against_f64(&pre, &v);
        // A sublayer that squares: the gradient of its output meets that of its input.
        let after = |v: &[Vec<f64>]| {
            let of = run_f64(&pre, v);
            let out: Vec<f64> = of[4].iter().map(|y| 0.3 * y * y).collect();
            let next = run_f64(&post, &[v[0].clone(), out.clone(), of[5].clone(), vec![]])[3].clone();
            (of, out, next)
        };
        let (of, out, next) = after(&v);
        let dnext = normals(next.len(), 31, 1.0);
        let back = HyperPostBwd { shape: s };
        let given = vec![v[0].clone(), out, of[5].clone(), dnext.clone(), vec![], vec![]];
        check_f32_against_f64(&back, &given);
        let of_out = run_f64(&back, &given);
        let dy: Vec<f64> = of_out[4].iter().zip(&of[4]).map(|(d, y)| 0.6 * y * d).collect();
        let bwd = HyperPreBwd { shape: s, carried: false };
        let mut given = v[..4].to_vec();
        given.extend([of[5].clone(), of[6].clone(), dy, of_out[5].clone(), dnext.clone()]);
        given.extend([vec![], vec![], vec![]]);
        check_f32_against_f64(&bwd, &values);
        let got = run_f64(&bwd, &given);
        let loss = |at: usize| {
            let (after, v, dnext) = (&after, v.clone(), dnext.clone());
            move |x: &[f64]| {
                let mut moved = v.clone();
                moved[at] = x.to_vec();
                after(&moved).2.iter().zip(&dnext).map(|(a, b)| a * b).sum::<f64>()
            }
        };
        check_gradient("x", loss(0), &v[0], &got[9]);
        check_gradient("proj", loss(1), &v[1], &got[10]);
        let sums = |first: usize, n: usize| -> Vec<f64> {
            let row = s.rows() + SCALES;
            (first..first + n).map(|c| got[11].iter().skip(c).step_by(row).sum()).collect()
        };
        check_gradient("base", loss(3), &v[3], &sums(0, s.rows()));
        check_gradient("scale", loss(2), &v[2], &sums(s.rows(), SCALES));
    }
}

#[test]
fn a_heads_backward_is_its_forwards_gradient() {
    for carried in [false, true] {
        let s = shape(5, 16, 4, true);
        let (fwd, bwd) = (HyperPreFwd { shape: s }, HyperPreBwd { shape: s, carried });
        let values = inputs(&bwd, 9);
        check_f32_against_f64(&bwd, &values);
        let v: Vec<Vec<f64>> = [&values[..4], &[vec![], vec![], vec![]]].concat();
        check_f32_against_f64(&fwd, &v);
        let of = run_f64(&fwd, &v);
        let mut given = v[..4].to_vec();
        given.extend([of[5].clone(), of[6].clone(), values[6].clone()]);
        given.extend(carried.then(|| values[7].clone()));
        given.extend([vec![], vec![], vec![]]);
        let got = run_f64(&bwd, &given);
        let out = bwd.output_at();
        let other = if carried { values[7].clone() } else { vec![0.0; v[0].len()] };
        let dx: Vec<f64> = got[out].iter().zip(other).map(|(d, o)| d - o).collect();
        let dy = &values[6];
        check_op_gradient(&fwd, &v, &[(4, dy)], 0, &dx);
        check_op_gradient(&fwd, &v, &[(4, dy)], 1, &got[out + 1]);
    }
}

#[test]
fn streams_are_made_and_summed() {
    let s = shape(3, 8, 4, false);
    for add in [false, true] {
        let op = HyperExpand { shape: s, add };
        let v = inputs(&op, 2);
        check_f32_against_f64(&op, &v);
        let out = &run_f64(&op, &v)[op.args().len() - 1];
        let dout = normals(out.len(), 3, 1.0);
        let sum = HyperSum { shape: s };
        let dx = run_f64(&sum, &[dout.clone(), vec![]]);
        check_op_gradient(&op, &v, &[(op.args().len() - 1, &dout)], 0, &dx[1]);
        check_f32_against_f64(&sum, &inputs(&sum, 4));
    }
}
