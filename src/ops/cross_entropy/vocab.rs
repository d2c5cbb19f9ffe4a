//! Cross-entropy over a vocabulary that tensor ranks share: each reduces its own columns, three numbers a token are
//! gathered, and each finishes its own part of the gradient.
//!
//! Megatron-Core (`tensor_parallel/cross_entropy.py`) reduces the maximum first and then the sum and the target's logit:
//! two or three all-reduces of one and two numbers. One gather of three carries as much and is summed in the ranks'
//! order.

use super::super::support::{Draws, addresses};
use super::super::{ArgSpec, CpuArgs, Op, Real, Sample, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

const SOURCE: KernelSource = KernelSource { name: "cross_entropy/vocab.cu", text: include_str!("vocab.cu") };
/// Threads of a block, one block a token.
const THREADS: u32 = 512;
/// Numbers a token: maximum, sum of exp(x - maximum), the target's logit (0 on the ranks that do not hold it).
pub const STATS: usize = 3;

/// Arguments: logits R bf16 `[tokens, vocab]`, labels R I32 `[tokens]`, stats W f32 `[tokens, 3]`. `vocab`: columns of
/// this rank, from `vocab_start` on.
#[derive(Debug, Clone, PartialEq)]
pub struct VocabStats {
    pub tokens: usize,
    pub vocab: usize,
    pub vocab_start: usize,
}

/// Arguments: logits U bf16 `[tokens, vocab]` (become (softmax - onehot) * grad_scale), labels R I32 `[tokens]`, stats R f32
/// `[ranks, tokens, 3]`, loss W f32 `[tokens]`: log-sum-exp over all ranks' columns less the target's logit.
#[derive(Debug, Clone, PartialEq)]
pub struct VocabCrossEntropy {
    pub tokens: usize,
    pub vocab: usize,
    pub vocab_start: usize,
    pub ranks: usize,
    pub grad_scale: f32,
}

fn check(op: &str, vocab: usize) -> Result<(), DeviceError> {
    if vocab > 0 {
        return Ok(());
    }
    Err(DeviceError::Invalid(format!("{op}: vocab is 0; there is no softmax of nothing")))
}

fn local(label: i32, start: usize, vocab: usize) -> Option<usize> {
    usize::try_from(label).ok()?.checked_sub(start).filter(|l| *l < vocab)
}

impl VocabStats {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        check("vocab_stats", self.vocab)?;
        let (logits, labels, stats) = (args.input(0)?, args.ints(1)?, args.output(2)?);
        let rows = logits.par_chunks(self.vocab).zip(labels).zip(stats.par_chunks_mut(STATS));
        rows.for_each(|((row, &label), stats)| {
            let max = row.iter().copied().fold(row[0], T::max);
            let sum: T = row.iter().map(|x| (*x - max).exp()).sum();
            let target = local(label, self.vocab_start, self.vocab).map_or(T::default(), |l| row[l]);
            stats.copy_from_slice(&[max.f32(), sum.f32(), target.f32()]);
        });
        Ok(())
    }
}

impl VocabCrossEntropy {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        check("vocab_cross_entropy", self.vocab)?;
        let (logits, labels) = (args.output(0)?, args.ints(1)?);
        let (stats, loss) = (args.input(2)?, args.output(3)?);
        let scale = T::of(self.grad_scale as f64);
        let rows = logits.par_chunks_mut(self.vocab).zip(labels).zip(loss).enumerate();
        rows.for_each(|(t, ((row, &label), loss))| {
            let of = |rank: usize, i: usize| stats[(rank * self.tokens + t) * STATS + i];
            let max = (1..self.ranks).fold(of(0, 0), |m, r| m.max(of(r, 0)));
            let sum: T = (0..self.ranks).map(|r| of(r, 1) * (of(r, 0) - max).exp()).sum();
            let target: T = (0..self.ranks).map(|r| of(r, 2)).sum();
            *loss = ((max - target) + sum.ln()).f32();
            let hit = local(label, self.vocab_start, self.vocab);
            for (i, x) in row.iter_mut().enumerate() {
                let onehot = T::of(if Some(i) == hit { 1.0 } else { 0.0 });
                *x = (((*x - max).exp() / sum - onehot) * scale).bf16();
            }
        });
        Ok(())
    }
}

fn labels(seed: u64, tokens: usize, start: usize, vocab: usize, all: usize) -> Vec<f64> {
    let draws = Draws { seed, stream: 1 };
    (0..tokens)
        .map(|t| match t % 3 {
            0 => draws.below(t, all.max(1)) as f64,
            _ => (start + draws.below(t, vocab)) as f64,
        })
        .collect()
}

impl Op for VocabStats {
    fn name(&self) -> &'static str {
        "vocab_stats"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("logits", DType::Bf16, &[self.tokens, self.vocab]).sample(Sample::Normal(2.0)),
            ArgSpec::read("labels", DType::I32, &[self.tokens]).sample(Sample::Custom),
            ArgSpec::write("stats", DType::F32, &[self.tokens, STATS]),
        ]
    }
    fn flops(&self) -> f64 {
        3.0 * (self.tokens * self.vocab) as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::F32, self.vocab, 0)
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        let logits = Draws { seed, stream: 0 }.bf16_normals(self.tokens * self.vocab, 2.0);
        let all = self.vocab_start + 2 * self.vocab;
        Some(vec![logits, labels(seed, self.tokens, self.vocab_start, self.vocab, all), vec![]])
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        check(self.name(), self.vocab)?;
        let [logits, labels, stats] = addresses(self.name(), args)?;
        if self.tokens == 0 {
            return Ok(Issue::Nothing);
        }
        let kernel = cuda.kernel(SOURCE, "vocab_stats", &[], 0)?;
        let params = [
            Param::Ptr(logits),
            Param::Ptr(labels),
            Param::Ptr(stats),
            Param::I32(int_param(self.name(), "vocab", self.vocab)?),
            Param::I32(
                int_param(self.name(), "vocab_start + vocab", self.vocab_start + self.vocab)?
                    - self.vocab as i32,
            ),
        ];
        int_param(self.name(), "tokens", self.tokens)?;
        cuda.launch(&kernel, Config::linear(self.tokens, THREADS), &params)
    }
}

impl Op for VocabCrossEntropy {
    fn name(&self) -> &'static str {
        "vocab_cross_entropy"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::update("logits", DType::Bf16, &[self.tokens, self.vocab]).sample(Sample::Normal(2.0)),
            ArgSpec::read("labels", DType::I32, &[self.tokens]).sample(Sample::Custom),
            ArgSpec::read("stats", DType::F32, &[self.ranks, self.tokens, STATS]).sample(Sample::Custom),
            ArgSpec::write("loss", DType::F32, &[self.tokens]),
        ]
    }
    fn flops(&self) -> f64 {
        3.0 * (self.tokens * self.vocab) as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        tolerance(if arg == 0 { DType::Bf16 } else { DType::F32 }, self.vocab, 0)
    }
    /// Maxima around 8, sums of some tens: what logits of a standard deviation of 2 leave.
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        let logits = Draws { seed, stream: 0 }.bf16_normals(self.tokens * self.vocab, 2.0);
        let all = self.vocab_start + 2 * self.vocab;
        let draws = Draws { seed, stream: 2 };
        let stat = |i: usize| match i % STATS {
            0 => 7.5 + draws.below(i, 64) as f64 / 64.0,
            1 => 20.0 + draws.below(i, 64) as f64,
            _ => draws.below(i, 64) as f64 / 32.0,
        };
        let stats = (0..self.ranks * self.tokens * STATS).map(stat).collect();
        Some(vec![logits, labels(seed, self.tokens, self.vocab_start, self.vocab, all), stats, vec![]])
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        check(self.name(), self.vocab)?;
        let [logits, labels, stats, loss] = addresses(self.name(), args)?;
        if self.tokens == 0 {
            return Ok(Issue::Nothing);
        }
        let kernel = cuda.kernel(SOURCE, "vocab_cross_entropy", &[], 0)?;
        let params = [
            Param::Ptr(logits),
            Param::Ptr(labels),
            Param::Ptr(stats),
            Param::Ptr(loss),
            Param::I32(int_param(self.name(), "tokens", self.tokens)?),
            Param::I32(int_param(self.name(), "vocab", self.vocab)?),
            Param::I32(
                int_param(self.name(), "vocab_start + vocab", self.vocab_start + self.vocab)?
                    - self.vocab as i32,
            ),
            Param::I32(self.ranks as i32),
            Param::F32(self.grad_scale),
        ];
        cuda.launch(&kernel, Config::linear(self.tokens, THREADS), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{check_f32_against_f64, inputs, run_f64};
    use super::super::CrossEntropy;
    use super::*;
    use crate::device::cuda::prep::OfflinePrep;

    /// Three ranks' columns side by side give what one rank's loss and gradient are.
    #[test]
    fn parts_of_a_vocabulary_make_the_whole() {
        let (tokens, ranks, vocab) = (7, 3, 5);
        let whole = CrossEntropy { tokens, vocab: ranks * vocab, grad_scale: 0.25 };
        let values = inputs(&whole, 3);
        let expected = run_f64(&whole, &values);
        let columns = |all: &[f64], r: usize| -> Vec<f64> {
            all.chunks(ranks * vocab).flat_map(|row| row[r * vocab..][..vocab].to_vec()).collect()
        };
        let stats: Vec<f64> = (0..ranks)
            .flat_map(|r| {
                let op = VocabStats { tokens, vocab, vocab_start: r * vocab };
                run_f64(&op, &[columns(&values[0], r), values[1].clone(), vec![]]).remove(2)
            })
            .collect();
        for r in 0..ranks {
            let op = VocabCrossEntropy { tokens, vocab, vocab_start: r * vocab, ranks, grad_scale: 0.25 };
            let after = run_f64(&op, &[columns(&values[0], r), values[1].clone(), stats.clone(), vec![]]);
            let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12);
            assert!(close(&after[0], &columns(&expected[0], r)), "rank {r}");
            assert!(close(&after[3], &expected[2]), "rank {r}");
        }
    }

    #[test]
    fn rounding_is_within_tolerance() {
        for (tokens, vocab, vocab_start) in [(1, 3, 0), (7, 1021, 1021)] {
            let op = VocabStats { tokens, vocab, vocab_start };
            check_f32_against_f64(&op, &inputs(&op, 5));
            let op = VocabCrossEntropy { tokens, vocab, vocab_start, ranks: 2, grad_scale: 0.5 };
            check_f32_against_f64(&op, &inputs(&op, 6));
        }
    }

    #[test]
    fn kernels_prepare() {
        let mut offline = OfflinePrep::new("sm_90a").unwrap();
        let (tokens, vocab, vocab_start) = (7, 50_257, 3);
        offline.prepare(&VocabStats { tokens, vocab, vocab_start }).unwrap();
        let op = VocabCrossEntropy { tokens, vocab, vocab_start, ranks: 2, grad_scale: 1.0 };
        offline.prepare(&op).unwrap();
    }
}
