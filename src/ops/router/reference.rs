//! CPU reference of the router.

use super::{Groups, RouterBwd, RouterFwd, SUM_EPS};
use crate::config::ScoreFunction;
use crate::device::DeviceError;
use crate::ops::cpu_args::Slot;
use crate::ops::rng::{Rng, normal_of, philox};
use crate::ops::{CpuArgs, Op, Real};
use rayon::prelude::*;

/// Softmax of a row in place.
fn softmax<T: Real>(row: &mut [T]) {
    let top = row.iter().copied().fold(T::of(f64::NEG_INFINITY), T::max);
    row.iter_mut().for_each(|x| *x = (*x - top).exp());
    let sum: T = row.iter().copied().sum();
    row.iter_mut().for_each(|x| *x = *x / sum);
}

/// The largest `out.len()` values, descending, lower index first among equals. NaN counts as the smallest.
#[allow(clippy::eq_op)] // x != x is what NaN means, and Real has no is_nan
fn choose<T: Real>(values: &[T], out: &mut [i32]) {
    let mut taken = vec![false; values.len()];
    for slot in out {
        let mut best: Option<usize> = None;
        for (e, &v) in values.iter().enumerate().filter(|(e, _)| !taken[*e]) {
            if best.is_none_or(|b| v > values[b] || (values[b] != values[b] && v == v)) {
                best = Some(e);
            }
        }
        let e = best.unwrap_or(0);
        taken[e] = true;
        *slot = e as i32;
    }
}

/// [`choose`] among the experts of the best groups: those whose `out.len() / chosen` largest values have the
/// largest sums, the lower group first among equals.
fn choose_in_groups<T: Real>(values: &[T], Groups { count, chosen }: Groups, out: &mut [i32]) {
    let size = values.len() / count;
    let mut top = vec![0; out.len() / chosen];
    let sums: Vec<T> = values
        .chunks(size)
        .map(|group| {
            choose(group, &mut top);
            top.iter().map(|&e| group[e as usize]).sum()
        })
        .collect();
    let mut best = vec![0; chosen];
    choose(&sums, &mut best);
    let mut groups: Vec<usize> = best.into_iter().map(|g| g as usize).collect();
    groups.sort_unstable();
    // In the order of the experts, so that the lower one is first among equals.
    let experts: Vec<usize> = groups.iter().flat_map(|g| g * size..(g + 1) * size).collect();
    let kept: Vec<T> = experts.iter().map(|&e| values[e]).collect();
    choose(&kept, out);
    out.iter_mut().for_each(|e| *e = experts[*e as usize] as i32);
}

impl RouterFwd {
    /// Forced logit of (token, expert), in f32 on every device: the choice must not depend on it.
    fn forced_logit(&self, rng: &Rng, words: &[i32], t: usize, e: usize) -> f32 {
        let draw = normal_of(rng.draw4(words, ((self.first_token + t) * self.experts + e) as u32));
        if self.skew { draw + -(1.0 + e as f64).ln() as f32 } else { draw }
    }

    pub(super) fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (experts, topk) = (self.experts, self.topk);
        super::check(self.name(), self.tokens, experts, topk)?;
        super::check_groups(self.name(), experts, topk, self.groups)?;
        let out = self.outputs_at();
        let logits = args.input(0)?;
        let words = if self.forced.is_some() { args.ints(1)? } else { &[] };
        let hashed = usize::from(self.hash.is_some());
        let bias = if self.expert_bias { Some(args.input(out - 1 - hashed)?) } else { None };
        let ids = if self.hash.is_some() { args.ints(out - 1)? } else { &[] };
        let (scores, probs) = (args.output(out)?, args.output(out + 1)?);
        let (index, counts) = (args.ints_out(out + 2)?, args.ints_out(out + 3)?);
        let scaling = T::of(self.scaling.unwrap_or(1.0));

        let rows = scores.par_chunks_mut(experts).zip(probs.par_chunks_mut(topk));
        rows.zip(index.par_chunks_mut(topk)).enumerate().for_each(|(t, ((scores, probs), index))| {
            let mut logits = logits[t * experts..(t + 1) * experts].to_vec();
            if let Some(rng) = &self.forced {
                for (e, x) in logits.iter_mut().enumerate() {
                    *x = T::of(self.forced_logit(rng, words, t, e) as f64);
                }
            }
            scores.copy_from_slice(&logits);
            match self.score {
                ScoreFunction::Softmax => softmax(scores),
                ScoreFunction::Sigmoid => {
                    scores.iter_mut().for_each(|x| *x = T::of(1.0) / (T::of(1.0) + (-*x).exp()))
                }
                ScoreFunction::SqrtSoftplus => scores.iter_mut().for_each(|x| {
                    // ln(1 + e^x) without overflow.
                    *x = (x.max(T::of(0.0)) + T::of((-x.f64().abs()).exp().ln_1p())).sqrt()
                }),
            }
            let post_softmax = self.score == ScoreFunction::Softmax && !self.pre_softmax;
            let biased: Option<Vec<T>> =
                bias.map(|bias| scores.iter().zip(bias).map(|(&s, &b)| s + b).collect());
            match (self.groups, &biased) {
                _ if self.hash.is_some() => {
                    self.hash.iter().for_each(|hash| hash.experts(ids[t], experts, index))
                }
                (None, None) => choose(&logits, index),
                (None, Some(biased)) => choose(biased, index),
                (Some(groups), None) if post_softmax => choose_in_groups(&logits, groups, index),
                (Some(groups), None) => choose_in_groups(scores, groups, index),
                (Some(groups), Some(biased)) => choose_in_groups(biased, groups, index),
            }
            let from = if post_softmax { &logits[..] } else { &scores[..] };
            for (p, &e) in probs.iter_mut().zip(index.iter()) {
                *p = from[e as usize];
            }
            if post_softmax {
                softmax(probs);
            } else if self.score != ScoreFunction::Softmax && topk > 1 {
                let sum = probs.iter().copied().sum::<T>() + T::of(SUM_EPS);
                probs.iter_mut().for_each(|p| *p = *p / sum);
            }
            probs.iter_mut().for_each(|p| *p *= scaling);
        });
        counts.fill(0);
        index.iter().for_each(|&e| counts[e as usize] += 1);
        Ok(())
    }
}

impl RouterBwd {
    pub(super) fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (experts, topk) = (self.experts, self.topk);
        super::check(self.name(), self.tokens, experts, topk)?;
        let (scores, probs, index) = (args.input(0)?, args.input(1)?, args.ints(2)?);
        let (dprobs, counts, dlogits) = (args.input(3)?, args.ints(4)?, args.output(5)?);
        let scaling = T::of(self.scaling.unwrap_or(1.0));
        let aux = T::of(self.aux_factor());
        let dot = |a: &[T], b: &[T]| a.iter().zip(b).map(|(&x, &y)| x * y).sum::<T>();

        dlogits.par_chunks_mut(experts).enumerate().for_each(|(t, dx)| {
            let s = &scores[t * experts..(t + 1) * experts];
            let of_token = t * topk..(t + 1) * topk;
            let chosen: Vec<usize> = index[of_token.clone()].iter().map(|&e| e as usize).collect();
            // Gradient of the (scaled) probabilities before scaling.
            let dq: Vec<T> = dprobs[of_token.clone()].iter().map(|&d| d * scaling).collect();
            // Gradient of the (normalised) scores from the auxiliary loss.
            let mut ds: Vec<T> = counts.iter().map(|&c| aux * T::of(c as f64)).collect();
            match self.score {
                ScoreFunction::Softmax => {
                    if self.pre_softmax {
                        chosen.iter().zip(&dq).for_each(|(&e, &d)| ds[e] += d);
                    }
                    let mean = dot(&ds, s);
                    for e in 0..experts {
                        dx[e] = s[e] * (ds[e] - mean);
                    }
                    if !self.pre_softmax {
                        let q: Vec<T> = probs[of_token].iter().map(|&p| p / scaling).collect();
                        let mean = dot(&dq, &q);
                        for (k, &e) in chosen.iter().enumerate() {
                            dx[e] += q[k] * (dq[k] - mean);
                        }
                    }
                }
                ScoreFunction::Sigmoid | ScoreFunction::SqrtSoftplus => {
                    let sum = s.iter().copied().sum::<T>() + T::of(SUM_EPS);
                    let mean = dot(&ds, s) / sum;
                    ds.iter_mut().for_each(|d| *d = (*d - mean) / sum);
                    let kept: Vec<T> = chosen.iter().map(|&e| s[e]).collect();
                    let kept_sum = kept.iter().copied().sum::<T>() + T::of(SUM_EPS);
                    let mean = dot(&dq, &kept) / kept_sum;
                    for (k, &e) in chosen.iter().enumerate() {
                        ds[e] += if topk > 1 { (dq[k] - mean) / kept_sum } else { dq[k] };
                    }
                    for e in 0..experts {
                        dx[e] = match self.score {
                            // Softplus' slope is the sigmoid, 1 - exp(-softplus).
                            ScoreFunction::SqrtSoftplus if s[e] > T::of(0.0) => {
                                let slope = T::of(-(-(s[e] * s[e]).f64()).exp_m1());
                                ds[e] * slope / (T::of(2.0) * s[e])
                            }
                            _ => ds[e] * s[e] * (T::of(1.0) - s[e]),
                        };
                    }
                }
            }
            dx.iter_mut().for_each(|d| *d = d.bf16());
        });
        Ok(())
    }
}

/// Scores, probabilities, choice and counts that belong together: the forward reference of random logits.
pub(super) fn consistent_inputs(op: &RouterBwd, seed: u64) -> Option<Vec<Vec<f64>>> {
    let (t, e, k) = (op.tokens, op.experts, op.topk);
    let draw =
        |part: u32, i: usize| normal_of(philox([i as u32, part, 0, 0], [seed as u32, (seed >> 32) as u32]));
    let logits: Vec<f32> = (0..t * e).map(|i| draw(0, i)).collect();
    let forward = RouterFwd {
        tokens: t,
        experts: e,
        topk: k,
        score: op.score,
        pre_softmax: op.pre_softmax,
        scaling: op.scaling,
        forced: None,
        skew: false,
        expert_bias: false,
        groups: None,
        hash: None,
        first_token: 0,
    };
    let (mut scores, mut probs) = (vec![0f32; t * e], vec![0f32; t * k]);
    let (mut index, mut counts) = (vec![0i32; t * k], vec![0i32; e]);
    let slots = vec![
        Slot::In(&logits),
        Slot::Out(&mut scores),
        Slot::Out(&mut probs),
        Slot::IntOut(&mut index),
        Slot::IntOut(&mut counts),
    ];
    forward.run(&mut CpuArgs::new(forward.name(), slots)).ok()?;
    let wide = |x: &[f32]| x.iter().map(|&v| v as f64).collect::<Vec<_>>();
    let ints = |x: &[i32]| x.iter().map(|&v| v as f64).collect::<Vec<_>>();
    let dprobs = (0..t * k).map(|i| draw(1, i) as f64).collect();
    Some(vec![wide(&scores), wide(&probs), ints(&index), dprobs, ints(&counts), Vec::new()])
}
