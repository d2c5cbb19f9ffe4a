//! The references: gradients by finite differences, masks, chunks, dropout; and the shapes of the launches.

use super::*;
use crate::ops::rng::Rng;
use crate::ops::testing::{check_f32_against_f64, check_op_gradient, inputs, normals, run_f64};

fn shape(positions: Positions, kv_len: usize, q_heads: usize, kv_heads: usize, head_dim: usize) -> AttnShape {
    AttnShape { positions, kv_len, q_heads, kv_heads, head_dim, ..AttnShape::default() }
}

/// Unlike widths of keys and values, and a scale of its own, as multi-latent attention has them.
fn latent(mut s: AttnShape, value_dim: usize) -> AttnShape {
    (s.head_dim_v, s.scale) = (Some(value_dim), Some(0.3));
    s
}

fn dropped(mut s: AttnShape, p: f64) -> AttnShape {
    s.dropout = Some(Dropout { p, rng: Rng { seed_offset: 5, draw: 11 } });
    s
}

fn windowed(mut s: AttnShape, keys: usize) -> AttnShape {
    s.window = Some(keys);
    s
}

fn sunk(mut s: AttnShape) -> AttnShape {
    s.sinks = true;
    s
}

fn both_ways(mut s: AttnShape) -> AttnShape {
    s.bidirectional = true;
    s
}

/// Context-parallel rank 0 of 2 over 10 tokens: chunks 0 and 3, of odd and unequal lengths.
fn two_chunks() -> Positions {
    Positions { batch: 2, seq: 5, chunks: [(0, 3), (8, 2)] }
}

fn cases() -> Vec<AttnShape> {
    vec![
        shape(Positions::whole(2, 7), 7, 2, 2, 8),
        shape(Positions::whole(1, 9), 9, 6, 2, 8),
        shape(two_chunks(), 10, 4, 2, 8),
        dropped(shape(Positions::whole(1, 6), 6, 2, 1, 8), 0.3),
        dropped(shape(two_chunks(), 10, 4, 2, 8), 0.5),
        shape(Positions::whole(1, 1), 1, 1, 1, 16),
        latent(shape(Positions::whole(2, 5), 5, 2, 2, 12), 8),
        latent(dropped(shape(two_chunks(), 10, 4, 2, 8), 0.2), 6),
        windowed(shape(Positions::whole(2, 9), 9, 4, 2, 8), 3),
        windowed(shape(two_chunks(), 10, 4, 2, 8), 4),
        sunk(shape(Positions::whole(2, 7), 7, 4, 2, 8)),
        sunk(windowed(shape(two_chunks(), 10, 4, 2, 8), 4)),
        sunk(windowed(dropped(shape(Positions::whole(2, 9), 9, 2, 1, 8), 0.3), 1)),
        both_ways(shape(Positions::whole(2, 5), 5, 2, 2, 8)),
        // Cross-attention: fewer and more keys than queries, grouped; a context-parallel rank's rows.
        both_ways(shape(Positions::whole(2, 7), 3, 4, 2, 8)),
        both_ways(shape(two_chunks(), 11, 2, 1, 8)),
        both_ways(dropped(shape(Positions::whole(1, 3), 6, 2, 2, 8), 0.3)),
    ]
}

#[test]
fn gradients_agree_with_finite_differences() {
    for s in cases() {
        let (forward, backward) = (AttnFwd { shape: s.clone() }, AttnBwd { shape: s.clone() });
        let values = inputs(&forward, 3);
        let after = run_f64(&forward, &values);
        let at = values.len() - 2;
        let d_o = normals(after[at].len(), 77, 1.0);
        let mut saved = values[..3].to_vec();
        saved.extend([after[at].clone(), after[at + 1].clone(), d_o.clone()]);
        saved.extend(values[3..at].to_vec());
        saved.resize(backward.args().len(), vec![]);
        let grads = run_f64(&backward, &saved);
        let first = grads.len() - 3 - usize::from(s.sinks);
        if s.sinks {
            let parts = grads[first + 3].chunks(s.q_heads);
            let dsinks =
                parts.fold(vec![0.0; s.q_heads], |a, b| a.iter().zip(b).map(|(a, b)| a + b).collect());
            check_op_gradient(&forward, &values, &[(at, &d_o)], 3, &dsinks);
        }
        for wrt in 0..3 {
            // One row that sees one key: the probability is 1 whatever q and k are.
            if s.kv_len == 1 && wrt < 2 {
                assert!(grads[first + wrt].iter().all(|g| g.abs() < 1e-12), "{s:?}");
                continue;
            }
            check_op_gradient(&forward, &values, &[(at, &d_o)], wrt, &grads[first + wrt]);
        }
    }
}

#[test]
fn f32_references_stay_within_tolerance() {
    for s in cases() {
        let forward = AttnFwd { shape: s.clone() };
        check_f32_against_f64(&forward, &inputs(&forward, 4));
        let backward = AttnBwd { shape: s };
        check_f32_against_f64(&backward, &inputs(&backward, 5));
    }
}

/// Row 0 sees key 0 alone: its output is that value row, its log-sum-exp the one score.
#[test]
fn first_row_copies_the_first_value() {
    let s = shape(Positions::whole(1, 5), 5, 4, 2, 8);
    let after = run_f64(&AttnFwd { shape: s.clone() }, &inputs(&AttnFwd { shape: s }, 1));
    let (q, k, v, o, lse) = (&after[0], &after[1], &after[2], &after[3], &after[4]);
    for h in 0..4 {
        let kv = h / 2;
        let score: f64 = (0..8).map(|c| q[h * 8 + c] * k[kv * 8 + c]).sum::<f64>() / 8f64.sqrt();
        assert!((lse[h * 5] - score).abs() < 1e-12);
        for c in 0..8 {
            assert!((o[h * 8 + c] - v[kv * 8 + c]).abs() < 1e-12);
        }
    }
}

/// The two chunks of a rank give the rows that the whole sequence gives there.
#[test]
fn chunks_are_rows_of_the_whole() {
    let (whole, part) = (shape(Positions::whole(2, 10), 10, 4, 2, 8), shape(two_chunks(), 10, 4, 2, 8));
    let values = inputs(&AttnFwd { shape: whole.clone() }, 8);
    let all = run_f64(&AttnFwd { shape: whole }, &values);
    let width = 32;
    let row_of = |r: usize| (r / 5) * 10 + part.positions.position(r);
    let q = (0..10).flat_map(|r| values[0][row_of(r) * width..(row_of(r) + 1) * width].to_vec()).collect();
    let some =
        run_f64(&AttnFwd { shape: part.clone() }, &[q, values[1].clone(), values[2].clone(), vec![], vec![]]);
    for r in 0..10 {
        let (a, b) =
            (&some[3][r * width..(r + 1) * width], &all[3][row_of(r) * width..(row_of(r) + 1) * width]);
        assert_eq!(a, b, "row {r}");
    }
}

/// Dropout keeps a fraction 1 - p, scaled by 1 / (1 - p): with equal values the mean output stays near 1.
#[test]
fn dropout_keeps_the_mean() {
    let s = dropped(shape(Positions::whole(2, 64), 64, 4, 4, 8), 0.25);
    let op = AttnFwd { shape: s };
    let mut values = inputs(&op, 2);
    values[2].iter_mut().for_each(|v| *v = 1.0);
    let o = &run_f64(&op, &values)[4];
    let mean = o.iter().sum::<f64>() / o.len() as f64;
    // 512 rows with 1 to 64 effective keys: the mean's standard deviation is about 0.008.
    assert!((mean - 1.0).abs() < 0.04, "mean {mean}");
    assert!(o.iter().any(|x| (x - 1.0).abs() > 0.01));
}

/// Windows, chunks and sinks against a softmax over all scores with those of unseen keys at minus infinity, the sink one
/// more logit.
#[test]
fn windows_and_sinks_are_a_masked_softmax() {
    for s in [
        windowed(shape(Positions::whole(2, 9), 9, 4, 2, 8), 3),
        sunk(windowed(shape(two_chunks(), 10, 4, 2, 8), 4)),
        sunk(shape(Positions::whole(1, 6), 6, 2, 2, 8)),
        both_ways(shape(Positions::whole(2, 4), 9, 4, 2, 8)),
        both_ways(shape(two_chunks(), 3, 2, 2, 8)),
        // As wide as the sequence: hides nothing.
        windowed(shape(Positions::whole(1, 6), 6, 2, 2, 8), 6),
    ] {
        let op = AttnFwd { shape: s.clone() };
        let values = inputs(&op, 9);
        let o = &run_f64(&op, &values)[3 + usize::from(s.sinks)];
        let (d, group) = (s.head_dim, s.q_heads / s.kv_heads);
        for r in 0..s.batch() * s.q_len() {
            let (b, here) = (r / s.q_len(), s.positions.position(r) as i64);
            for h in 0..s.q_heads {
                let q = &values[0][(r * s.q_heads + h) * d..][..d];
                let row = |m: &[f64], j: usize| -> Vec<f64> {
                    m[((b * s.kv_len + j) * s.kv_heads + h / group) * d..][..d].to_vec()
                };
                let mut logits: Vec<f64> = (0..s.kv_len)
                    .map(|j| {
                        let score: f64 = q.iter().zip(row(&values[1], j)).map(|(a, b)| a * b).sum();
                        let back = here - j as i64;
                        let seen = s.bidirectional || (back >= 0 && s.window.is_none_or(|w| back < w as i64));
                        if seen { score / (d as f64).sqrt() } else { f64::NEG_INFINITY }
                    })
                    .collect();
                if s.sinks {
                    logits.push(values[3][h]);
                }
                let sum: f64 = logits.iter().map(|x| x.exp()).sum();
                for c in 0..d {
                    let want: f64 =
                        (0..s.kv_len).map(|j| logits[j].exp() / sum * row(&values[2], j)[c]).sum();
                    let got = o[(r * s.q_heads + h) * d + c];
                    assert!((got - want).abs() < 1e-12, "{s:?} row {r} head {h}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn windows_and_sinks_are_not_for_cudnn() {
    use crate::device::cuda::cudnn::Pass;
    let plain = shape(Positions::whole(1, 64), 64, 4, 2, 64);
    let why = |s: AttnShape| launch::sdpa(&s, Pass::Forward).unwrap_err();
    assert!(launch::sdpa(&plain, Pass::Forward).is_ok());
    assert!(why(sunk(plain.clone())).contains("sink"));
    assert!(why(windowed(plain.clone(), 16)).contains("window of 16 keys"));
    assert!(launch::sdpa(&windowed(plain.clone(), 64), Pass::Forward).is_ok());
    // The rows of a context-parallel rank are for cuDNN where no key is hidden from any.
    let part = Positions { batch: 1, seq: 32, chunks: [(0, 16), (48, 16)] };
    let part = AttnShape { positions: part, ..plain };
    assert!(why(part.clone()).contains("context parallelism"));
    let spec = launch::sdpa(&both_ways(part), Pass::Backward).unwrap();
    assert_eq!((spec.seq, spec.kv_seq, spec.causal), (32, 64, false));
}

#[test]
fn illegal_shapes_are_refused_with_a_reason() {
    let good = shape(Positions::whole(1, 4), 4, 4, 2, 8);
    let refused = |s: AttnShape, word: &str| {
        let message = launch::check(&s).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    };
    assert!(launch::check(&good).is_ok());
    refused(AttnShape { kv_heads: 3, ..good.clone() }, "multiple");
    refused(AttnShape { kv_len: 0, ..good.clone() }, "at least 1");
    refused(dropped(good.clone(), 1.0), "[0, 1)");
    refused(windowed(good.clone(), 0), "see none");
    refused(both_ways(windowed(good.clone(), 2)), "bidirectional");
    let short = Positions { batch: 1, seq: 4, chunks: [(0, 3), (0, 0)] };
    refused(AttnShape { positions: short, ..good }, "do not make 4");
}

#[test]
fn causal_work_is_counted_once() {
    let s = shape(Positions::whole(2, 4), 4, 3, 1, 8);
    assert_eq!(s.pairs(), (2 * 3 * 10) as f64);
    assert_eq!(AttnFwd { shape: s.clone() }.flops(), 60.0 * 8.0 * 4.0);
    assert_eq!(AttnBwd { shape: s.clone() }.flops(), 60.0 * 8.0 * 10.0);
    let s = latent(s, 4);
    assert_eq!(AttnFwd { shape: s.clone() }.flops(), 60.0 * (8.0 + 4.0) * 2.0);
    assert_eq!(AttnBwd { shape: s }.flops(), 60.0 * (3.0 * 8.0 + 2.0 * 4.0) * 2.0);
    assert_eq!(both_ways(shape(Positions::whole(2, 4), 7, 3, 1, 8)).pairs(), (2 * 3 * 4 * 7) as f64);
    // 1 + 2 + 2 + 2 keys of four.
    assert_eq!(windowed(shape(Positions::whole(2, 4), 4, 3, 1, 8), 2).pairs(), (2 * 3 * 7) as f64);
}

/// Enough dk/dv blocks for an H200 even with few kv heads, and a workspace for the parts.
#[test]
fn groups_are_split_where_kv_heads_are_few() {
    let qwen3_30b = shape(Positions::whole(1, 4096), 4096, 32, 4, 128);
    assert_eq!(launch::dkv_splits(&qwen3_30b), 4);
    let (delta, part) = (32 * 4096 * 4, 4096 * 4 * 128 * 4);
    assert_eq!(AttnBwd { shape: qwen3_30b }.workspace(), delta + 2 * 4 * part);
    let llama3_8b = shape(Positions::whole(1, 8192), 8192, 32, 8, 128);
    assert_eq!(launch::dkv_splits(&llama3_8b), 1);
    assert_eq!(AttnBwd { shape: llama3_8b }.workspace(), 32 * 8192 * 4);
    // Never more parts than the group has heads.
    assert_eq!(launch::dkv_splits(&shape(Positions::whole(1, 16), 16, 6, 2, 64)), 3);
}

#[test]
fn wgmma_kernels_take_plain_causal_heads_of_128() {
    let plain = shape(Positions::whole(1, 300), 300, 8, 2, 128);
    assert!(hopper::takes(&plain, 90));
    assert!(!hopper::takes(&plain, 80) && !hopper::takes(&plain, 100));
    assert!(hopper::takes(&windowed(plain.clone(), 300), 90));
    for other in [
        windowed(plain.clone(), 299),
        sunk(plain.clone()),
        both_ways(plain.clone()),
        dropped(plain.clone(), 0.1),
        latent(plain.clone(), 64),
        AttnShape { head_dim: 64, ..plain.clone() },
        shape(Positions { batch: 1, seq: 96, chunks: [(0, 48), (144, 48)] }, 192, 8, 2, 128),
    ] {
        assert!(!hopper::takes(&other, 90), "{other:?}");
    }
}

#[test]
fn narrow_windows_have_kernels_of_their_own() {
    let narrow = windowed(shape(Positions::whole(2, 300), 300, 8, 2, 64), 128);
    for cc in [80, 90, 100] {
        assert!(window::takes(&narrow, cc) && window::takes(&sunk(narrow.clone()), cc));
    }
    assert!(!window::takes(&narrow, 86), "99 KiB of shared memory");
    for other in [
        AttnShape { window: None, ..narrow.clone() },
        AttnShape { window: Some(129), ..narrow.clone() },
        dropped(narrow.clone(), 0.1),
        latent(narrow.clone(), 32),
        AttnShape { head_dim: 128, ..narrow.clone() },
        windowed(shape(Positions { batch: 1, seq: 96, chunks: [(0, 48), (144, 48)] }, 192, 8, 2, 64), 24),
        windowed(shape(Positions::whole(2, 100), 100, 8, 2, 64), 128),
    ] {
        assert!(!window::takes(&other, 90), "{other:?}");
    }
}

/// As many query heads a block, and as wide tiles of keys, as leave enough blocks.
#[test]
fn narrow_windows_fill_the_device() {
    let of = |batch, seq, q, k| {
        let s = windowed(shape(Positions::whole(batch, seq), seq, q, k, 64), 128);
        (window::heads(&s), window::dkv_block(&s, 90))
    };
    assert_eq!(of(1, 4096, 64, 8), (8, (8, 2)));
    assert_eq!(of(1, 2048, 64, 8), (4, (8, 1)));
    assert_eq!(of(4, 4096, 64, 8), (8, (8, 2)));
    assert_eq!(of(1, 300, 64, 8), (1, (1, 1)));
    assert_eq!(of(1, 4096, 48, 8), (6, (8, 2)));
    assert_eq!(of(1, 3000, 48, 8), (3, (8, 1)));
    let long = windowed(shape(Positions::whole(1, 4096), 4096, 64, 8, 64), 128);
    assert_eq!(window::dkv_block(&long, 80), (8, 1), "two strips a warp take 198 KiB");
    assert_eq!(window::dkv_block(&windowed(long, 100), 90), (8, 1), "and a window of whole strips");
}

/// dq and delta, then dk and dv, then the sinks' gradients.
#[test]
fn gradients_in_a_narrow_window_take_three_launches() {
    use crate::device::cuda::prep::OfflinePrep;
    let narrow = windowed(shape(Positions::whole(1, 300), 300, 8, 2, 64), 128);
    for (s, launches) in [(narrow.clone(), 2), (sunk(narrow), 3)] {
        let mut prep = OfflinePrep::new("sm_90a").unwrap();
        assert_eq!(prep.launches(&AttnBwd { shape: s.clone() }).unwrap(), launches);
        assert_eq!(prep.launches(&AttnFwd { shape: s }).unwrap(), 1);
    }
}

#[test]
fn clusters_divide_the_group() {
    let clusters = [(8, 1), (8, 2), (8, 8), (16, 1), (6, 1), (5, 1), (4, 2)];
    let found = clusters.map(|(q, k)| hopper::cluster(&shape(Positions::whole(1, 64), 64, q, k, 128)));
    assert_eq!(found, [8, 4, 1, 8, 2, 1, 2]);
    assert_eq!(hopper::cluster(&shape(Positions::whole(1, 4096), 4096, 8, 1, 128)), 4);
}

/// Within what was measured; cuDNN elsewhere.
#[test]
fn short_sequences_are_faster_on_own_kernels() {
    use crate::device::cuda::cudnn::Pass;
    let llama = |batch, seq| shape(Positions::whole(batch, seq), seq, 32, 8, 128);
    let faster = |s: AttnShape| [Pass::Forward, Pass::Backward].map(|p| hopper::faster_than_cudnn(&s, 90, p));
    assert_eq!(faster(llama(1, 128)), [true; 2]);
    assert_eq!(faster(llama(1, 2048)), [false, true]);
    assert_eq!(faster(llama(1, 4096)), [false; 2]);
    assert_eq!(faster(llama(2, 128)), [false; 2]);
    assert!(!hopper::faster_than_cudnn(&llama(1, 128), 100, Pass::Forward));
}

/// One launch for the gradients of a short sequence on compute capability 9.0, one more for delta beyond; none of it changes the
/// workspace, which no device is known for.
#[test]
fn wgmma_gradients_take_one_launch() {
    use crate::device::cuda::prep::OfflinePrep;
    for (arch, seq, launches) in [("sm_90a", 512, 1), ("sm_90a", 513, 2), ("sm_80", 512, 4)] {
        let s = shape(Positions::whole(1, seq), seq, 8, 2, 128);
        let mut prep = OfflinePrep::new(arch).unwrap();
        assert_eq!(prep.launches(&AttnBwd { shape: s.clone() }).unwrap(), launches, "{arch} {seq}");
        assert_eq!(prep.launches(&AttnFwd { shape: s }).unwrap(), 1);
    }
}
