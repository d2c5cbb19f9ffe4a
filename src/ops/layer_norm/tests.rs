use super::*;
use crate::ops::testing::*;

fn cases() -> Vec<(usize, usize, Option<Modulation>)> {
    let modulated = |sequences, time_slots| {
        Some(Modulation { sequences, slots: 3, time_slots, time_first: if time_slots == 1 { 0 } else { 3 } })
    };
    vec![(1, 8, None), (7, 24, None), (300, 8, None), (6, 16, modulated(2, 6)), (5, 8, modulated(1, 1))]
}

/// Sums of the partial sums of each sequence: gains, then shifts, `[sequences, 2H]`.
fn sums(partial: &[f64], sequences: usize, hidden: usize) -> Vec<Vec<f64>> {
    let of = |rows: &[f64]| (0..2 * hidden).map(|c| rows.iter().skip(c).step_by(2 * hidden).sum()).collect();
    partial.chunks(partial.len() / sequences).map(of).collect()
}

#[test]
fn backward_is_the_forwards_gradient() {
    for (rows, hidden, modulation) in cases() {
        for residual in [false, true] {
            let fwd = LayerNormFwd { rows, hidden, eps: 1e-5, modulation };
            let bwd = LayerNormBwd { rows, hidden, modulation, residual };
            let v = inputs(&fwd, 5);
            check_f32_against_f64(&fwd, &v);
            let stats = run_f64(&fwd, &v)[4].clone();
            let (dy, dres) = (normals(rows * hidden, 21, 1.0), normals(rows * hidden, 22, 1.0));
            let mut b = vec![v[0].clone(), stats, dy.clone(), v[1].clone()];
            b.extend(modulation.map(|_| v[2].clone()));
            b.extend(residual.then(|| dres.clone()));
            b.extend([vec![], vec![]]);
            let after = run_f64(&bwd, &b);
            let (dx, partial) = (&after[after.len() - 2], &after[after.len() - 1]);
            let around = |r: &f64| if residual { *r } else { 0.0 };
            let dx: Vec<f64> = dx.iter().zip(&dres).map(|(d, r)| d - around(r)).collect();
            check_op_gradient(&fwd, &v, &[(3, &dy)], 0, &dx);
            let of = sums(partial, sequences(modulation), hidden);
            match modulation {
                None => {
                    check_op_gradient(&fwd, &v, &[(3, &dy)], 1, &of[0][..hidden]);
                    check_op_gradient(&fwd, &v, &[(3, &dy)], 2, &of[0][hidden..]);
                }
                Some(m) => {
                    // Of a sequence's time embedding; of the table, over all sequences.
                    let mut time = vec![0.0; m.sequences * m.time_slots * hidden];
                    let mut table = vec![0.0; m.slots * hidden];
                    for (s, sums) in of.iter().enumerate() {
                        for (slot, first) in [(SCALE, 0), (SHIFT, hidden)] {
                            for i in 0..hidden {
                                time[m.time_row(s, slot) * hidden + i] += sums[first + i];
                                table[slot * hidden + i] += sums[first + i];
                            }
                        }
                    }
                    check_op_gradient(&fwd, &v, &[(3, &dy)], 1, &table);
                    check_op_gradient(&fwd, &v, &[(3, &dy)], 2, &time);
                }
            }
        }
    }
}

#[test]
fn f32_backward_is_within_tolerance() {
    for (rows, hidden, modulation) in cases() {
        let bwd = LayerNormBwd { rows, hidden, modulation, residual: rows > 5 };
        check_f32_against_f64(&bwd, &inputs(&bwd, 3));
    }
}

#[test]
fn blocks_cover_every_row_length() {
    for hidden in (8..=MAX_THREADS * MAX_VECTORS * VECTOR).step_by(8) {
        let (threads, vectors) = block(hidden);
        assert!(threads % 32 == 0 && threads <= MAX_THREADS && threads * vectors * VECTOR >= hidden);
    }
}
