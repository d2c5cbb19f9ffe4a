use super::*;
use crate::ops::testing::{normals, run_f32, run_f64, words};

fn forward(tokens: usize, experts: usize, topk: usize, score: ScoreFunction, pre: bool) -> RouterFwd {
    RouterFwd {
        tokens,
        experts,
        topk,
        score,
        pre_softmax: pre,
        scaling: Some(2.5),
        forced: None,
        skew: false,
        expert_bias: false,
        groups: None,
        hash: None,
        first_token: 0,
    }
}

/// (scores, probs, index, counts) of logits.
fn route(op: &RouterFwd, logits: &[f64]) -> [Vec<f64>; 4] {
    let mut out = run_f64(op, &[logits.to_vec(), vec![], vec![], vec![], vec![]]);
    let counts = out.pop().unwrap();
    let index = out.pop().unwrap();
    let probs = out.pop().unwrap();
    [out.pop().unwrap(), probs, index, counts]
}

const KINDS: [(ScoreFunction, bool); 4] = [
    (ScoreFunction::Softmax, false),
    (ScoreFunction::Softmax, true),
    (ScoreFunction::Sigmoid, false),
    (ScoreFunction::SqrtSoftplus, false),
];

#[test]
fn chooses_the_largest_and_counts_them() {
    let logits = [0.0, 2.0, 1.0, 2.0, -1.0, 5.0, 5.0, 5.0, 5.0, 5.0];
    for (score, pre) in KINDS {
        let [_, _, index, counts] = route(&forward(2, 5, 3, score, pre), &logits);
        assert_eq!(index, [1.0, 3.0, 2.0, 0.0, 1.0, 2.0], "ties go to the lower expert");
        assert_eq!(counts, [1.0, 2.0, 2.0, 1.0, 0.0]);
    }
}

#[test]
fn probabilities_follow_the_score_function() {
    let logits = [0.0f64, 3f64.ln(), -9.0];
    let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(x, y)| (x - y).abs() < 1e-3);
    let [scores, probs, ..] = route(&forward(1, 3, 2, ScoreFunction::Softmax, false), &logits);
    assert!(close(&scores, &[0.25, 0.75, 0.0]) && close(&probs, &[2.5 * 0.75, 2.5 * 0.25]));
    assert!((probs.iter().sum::<f64>() - 2.5).abs() < 1e-12, "softmax over the chosen sums to the scaling");
    let [scores, probs, ..] = route(&forward(1, 3, 2, ScoreFunction::Softmax, true), &logits);
    assert!((probs[0] - 2.5 * scores[1]).abs() < 1e-12 && (probs[1] - 2.5 * scores[0]).abs() < 1e-12);
    let [scores, probs, ..] = route(&forward(1, 3, 2, ScoreFunction::Sigmoid, false), &logits);
    assert!(close(&scores, &[0.5, 0.75, 0.0]) && close(&probs, &[2.5 * 0.6, 2.5 * 0.4]));
    let [scores, probs, ..] = route(&forward(1, 3, 1, ScoreFunction::Sigmoid, false), &logits);
    assert!((probs[0] - 2.5 * scores[1]).abs() < 1e-12, "one choice: not divided by itself");
}

#[test]
fn square_root_of_softplus() {
    let [scores, probs, ..] =
        route(&forward(1, 3, 2, ScoreFunction::SqrtSoftplus, false), &[0.0, 40.0, -40.0]);
    let want = [2f64.ln().sqrt(), 40f64.sqrt(), (-20f64).exp()];
    assert!(scores.iter().zip(want).all(|(a, b)| (a / b - 1.0).abs() < 1e-12), "{scores:?}");
    assert!((probs[0] - 2.5 * want[1] / (want[0] + want[1])).abs() < 1e-12);
}

/// Experts by the token's id: distinct, the same for the same id, of another layer others, each as often as another; the
/// probabilities are those of the scores.
#[test]
fn a_hash_chooses_by_the_tokens_id() {
    let (experts, topk) = (16, 6);
    let of = |salt: u32| RouterFwd {
        hash: Some(Hash { salt }),
        ..forward(4000, experts, topk, ScoreFunction::SqrtSoftplus, false)
    };
    let logits = normals(4000 * experts, 3, 1.0);
    let ids: Vec<f64> = (0..4000).map(|i| (i / 2) as f64).collect();
    let run = |salt| run_f64(&of(salt), &[logits.clone(), ids.clone(), vec![], vec![], vec![], vec![]]);
    let out = run(0);
    let rows: Vec<&[f64]> = out[4].chunks(topk).collect();
    for pair in rows.chunks(2) {
        assert_eq!(pair[0], pair[1]);
        let mut sorted = pair[0].to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted.dedup();
        assert!(sorted.len() == topk && sorted.iter().all(|e| (0.0..16.0).contains(e)));
    }
    assert!(out[5].iter().all(|c| (c - 1500.0).abs() < 150.0), "{:?}", out[5]);
    assert_ne!(run(1)[4], out[4]);
    let scores = &out[2][..experts];
    let sum: f64 = rows[0].iter().map(|e| scores[*e as usize]).sum();
    assert!((out[3][0] - 2.5 * scores[rows[0][0] as usize] / sum).abs() < 1e-12);
}

#[test]
fn expert_bias_changes_the_choice_only() {
    let op = RouterFwd { expert_bias: true, ..forward(1, 3, 2, ScoreFunction::Sigmoid, false) };
    let out = run_f64(&op, &[vec![0.0, 1.0, 2.0], vec![1.0, 0.0, -1.0], vec![], vec![], vec![], vec![]]);
    assert_eq!(out[4], [0.0, 1.0]);
    let (s0, s1) = (out[2][0], out[2][1]);
    assert!((out[3][0] - 2.5 * s0 / (s0 + s1)).abs() < 1e-12);
}

#[test]
fn forced_routing_is_balanced_or_skewed_and_equal_in_both_types() {
    let rng = Rng { seed_offset: 5, draw: 9 };
    let op = RouterFwd { forced: Some(rng), ..forward(2000, 8, 2, ScoreFunction::Softmax, false) };
    let values = [vec![0.0; 16000], words(1), vec![], vec![], vec![], vec![]];
    let (wide, narrow) = (run_f64(&op, &values), run_f32(&op, &values));
    assert_eq!(wide[4], narrow[4]);
    assert!(wide[5].iter().all(|c| (c - 500.0).abs() < 100.0), "balanced: {:?}", wide[5]);
    let skewed = run_f64(&RouterFwd { skew: true, ..op }, &values);
    assert!(skewed[5][0] > 3.0 * skewed[5][7], "skewed: {:?}", skewed[5]);
    assert_eq!(skewed[5].iter().sum::<f64>(), 4000.0);
}

/// Finite differences of sum(dprobs * probs) + the auxiliary loss, counts and choice held fixed.
#[test]
fn gradient_is_that_of_probabilities_and_auxiliary_loss() {
    const STEP: f64 = 1e-6;
    let (t, e, k) = (3, 7, 3);
    for (score, pre) in KINDS {
        for topk in [1, k] {
            let fwd = forward(t, e, topk, score, pre);
            let bwd = RouterBwd {
                tokens: t,
                experts: e,
                topk,
                score,
                pre_softmax: pre,
                scaling: fwd.scaling,
                aux_coeff: 0.3,
                aux_scale: 2.0,
            };
            let logits = normals(t * e, 4, 1.5);
            let dprobs = normals(t * topk, 8, 1.0);
            let [scores, probs, index, counts] = route(&fwd, &logits);
            let loss = |logits: &[f64]| {
                let [scores, probs, chosen, _] = route(&fwd, logits);
                assert_eq!(chosen, index, "the step must not change the choice");
                let direct: f64 = probs.iter().zip(&dprobs).map(|(p, d)| p * d).sum();
                let mut aux = 0.0;
                for row in scores.chunks(e) {
                    let sum = if score != ScoreFunction::Softmax { row.iter().sum() } else { 1.0 };
                    aux += row.iter().zip(&counts).map(|(s, c)| s / sum * c).sum::<f64>();
                }
                let coefficient = 2.0 * 0.3 * e as f64 / (topk * t * t) as f64;
                direct + coefficient * aux
            };
            let grad = run_f64(&bwd, &[scores, probs, index.clone(), dprobs.clone(), counts.clone(), vec![]]);
            for i in 0..t * e {
                let at = |step: f64| {
                    let mut x = logits.clone();
                    x[i] += step;
                    loss(&x)
                };
                let want = (at(STEP) - at(-STEP)) / (2.0 * STEP);
                assert!(
                    (grad[5][i] - want).abs() < 1e-7,
                    "{score:?} pre {pre} {i}: {} not {want}",
                    grad[5][i]
                );
            }
        }
    }
}

#[test]
fn bf16_gradient_is_within_tolerance_of_f64() {
    for (score, pre_softmax) in KINDS {
        let op = RouterBwd {
            tokens: 33,
            experts: 40,
            topk: 5,
            score,
            pre_softmax,
            scaling: None,
            aux_coeff: 0.01,
            aux_scale: 1.0,
        };
        let values = op.sample(3).unwrap();
        let (want, got) = (run_f64(&op, &values), run_f32(&op, &values));
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
        let error = norm(&mut want[5].iter().zip(&got[5]).map(|(a, b)| a - b));
        assert!(error <= op.tolerance(5) * norm(&mut want[5].iter().copied()));
    }
}

/// Written anew from the definition: score every group, sort the groups, sort the experts of the best.
fn naive_choice(values: &[f64], groups: Groups, topk: usize) -> Vec<f64> {
    let size = values.len() / groups.count;
    let descending = |indices: &mut Vec<usize>, of: &dyn Fn(usize) -> f64| {
        indices.sort_by(|&a, &b| of(b).partial_cmp(&of(a)).unwrap());
    };
    let score = |g: usize| {
        let mut members: Vec<f64> = values[g * size..(g + 1) * size].to_vec();
        members.sort_by(|a, b| b.partial_cmp(a).unwrap());
        members[..topk / groups.chosen].iter().sum::<f64>()
    };
    let mut order: Vec<usize> = (0..groups.count).collect();
    descending(&mut order, &score);
    let kept = &order[..groups.chosen];
    let mut experts: Vec<usize> = (0..values.len()).filter(|e| kept.contains(&(e / size))).collect();
    descending(&mut experts, &|e| values[e]);
    experts[..topk].iter().map(|&e| e as f64).collect()
}

#[test]
fn experts_come_from_the_best_groups() {
    let (tokens, experts) = (40, 24);
    for (count, chosen, topk) in [(4, 2, 4), (8, 4, 8), (3, 1, 2), (6, 3, 3), (24, 4, 4)] {
        let groups = Groups { count, chosen };
        for (score, pre) in KINDS {
            for biased in [false, true] {
                let op = RouterFwd {
                    groups: Some(groups),
                    first_token: 0,
                    expert_bias: biased,
                    ..forward(tokens, experts, topk, score, pre)
                };
                let logits = normals(tokens * experts, 7, 1.0);
                let bias = normals(experts, 8, 0.2);
                let mut values = vec![logits.clone()];
                values.extend(biased.then(|| bias.clone()));
                values.extend([vec![], vec![], vec![], vec![]]);
                let out = run_f64(&op, &values);
                let (scores, index) = (&out[1 + biased as usize], &out[3 + biased as usize]);
                for t in 0..tokens {
                    let scores = &scores[t * experts..][..experts];
                    let of_choice: Vec<f64> = match (biased, score == ScoreFunction::Softmax && !pre) {
                        (true, _) => scores.iter().zip(&bias).map(|(s, b)| s + b).collect(),
                        (false, true) => logits[t * experts..][..experts].to_vec(),
                        (false, false) => scores.to_vec(),
                    };
                    let want = naive_choice(&of_choice, groups, topk);
                    assert_eq!(index[t * topk..][..topk], want, "{groups:?} {score:?} {biased}");
                }
            }
        }
    }
}

#[test]
fn impossible_groups_are_refused() {
    let refused = |experts, topk, count, chosen| {
        let message = check_groups("router_fwd", experts, topk, Some(Groups { count, chosen }));
        message.unwrap_err().to_string()
    };
    assert!(refused(24, 4, 5, 2).contains("equal size"));
    for (experts, topk, count, chosen) in
        [(24, 4, 4, 5), (24, 8, 8, 2), (24, 4, 0, 1), (64, 2, 64, 2), (8, 2, 4, 0)]
    {
        refused(experts, topk, count, chosen);
    }
    assert!(check_groups("router_fwd", 256, 8, Some(Groups { count: 8, chosen: 4 })).is_ok());
}

#[test]
fn impossible_shapes_are_refused() {
    assert!(check("router_fwd", 4, 0, 1).is_err());
    assert!(check("router_fwd", 4, 513, 1).is_err());
    assert!(check("router_fwd", 4, 8, 9).is_err());
    assert!(check("router_fwd", 1 << 26, 128, 8).is_err());
    assert!(check("router_fwd", 4096, 128, 8).is_ok());
}
