//! Softmax cross-entropy, loss and gradient in one pass over the logits, and the sum of the losses.

mod vocab;

pub use vocab::{STATS, VocabCrossEntropy, VocabStats};

use super::support::{Draws, VECTOR, VECTOR_BYTES, addresses, aligned};
use super::{ArgSpec, CpuArgs, Op, Real, Sample, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

const SOURCE: KernelSource =
    KernelSource { name: "cross_entropy/kernel.cu", text: include_str!("kernel.cu") };
/// Threads of a block when a row is long: one block fills a multiprocessor's shared memory, so it must bring
/// enough loads in flight alone.
const THREADS_LONG: u32 = 1024;
/// Threads of a block for short rows, several of which share a multiprocessor.
const THREADS_SHORT: u32 = 256;
/// Logits from which a row counts as long (64 KiB: three blocks a multiprocessor).
const LONG_ROW: usize = 32 * 1024;
/// Shared memory left for the reduction's scratch (128 bytes) and the driver.
const SHARED_RESERVE: usize = 1024;
const LOSS_SUM_THREADS: u32 = 1024;

/// loss = log-sum-exp(logits) - logits\[label\] per token; the logits become
/// (softmax - onehot(label)) * grad_scale.
///
/// Arguments: logits `[tokens, vocab]` (updated), labels `[tokens]`, loss `[tokens]`. A label outside
/// `[0, vocab)` has no one-hot: its loss is the log-sum-exp alone.
#[derive(Debug, Clone, PartialEq)]
pub struct CrossEntropy {
    pub tokens: usize,
    /// Any number from 1 on.
    pub vocab: usize,
    pub grad_scale: f32,
}

/// loss += scale * sum of the tokens' losses, in a fixed order.
///
/// Arguments: loss_per_token `[tokens]`, loss `[1]` (updated).
#[derive(Debug, Clone, PartialEq)]
pub struct LossSum {
    pub tokens: usize,
    pub scale: f32,
}

/// Most shared memory a block may have, in bytes, by compute capability (CUDA programming guide, table of
/// technical specifications); 48 KiB, which every device grants, where it is not known.
fn shared_limit(cc: u32) -> usize {
    match cc {
        80 | 87 => 163 << 10,
        86 | 89 | 120 | 121 => 99 << 10,
        90 | 100 | 101 | 103 | 110 => 227 << 10,
        _ => 48 << 10,
    }
}

impl CrossEntropy {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (logits, labels, loss) = (args.output(0)?, args.ints(1)?, args.output(2)?);
        let scale = T::of(self.grad_scale as f64);
        if self.vocab == 0 {
            return Err(DeviceError::Invalid(
                "cross_entropy: vocab is 0; there is no softmax of nothing".into(),
            ));
        }
        logits.par_chunks_mut(self.vocab).zip(labels).zip(loss).for_each(|((row, &label), loss)| {
            let max = row.iter().copied().fold(row[0], T::max);
            let sum: T = row.iter().map(|x| (*x - max).exp()).sum();
            let label = usize::try_from(label).ok().filter(|l| *l < self.vocab);
            let target = label.map_or(T::default(), |l| row[l]);
            *loss = ((max - target) + sum.ln()).f32();
            for (i, x) in row.iter_mut().enumerate() {
                let onehot = T::of(if Some(i) == label { 1.0 } else { 0.0 });
                *x = (((*x - max).exp() / sum - onehot) * scale).bf16();
            }
        });
        Ok(())
    }
}

impl Op for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::update("logits", DType::Bf16, &[self.tokens, self.vocab]).sample(Sample::Normal(2.0)),
            ArgSpec::read("labels", DType::I32, &[self.tokens]).sample(Sample::Custom),
            ArgSpec::write("loss", DType::F32, &[self.tokens]),
        ]
    }
    /// An element: maximum, difference, exponential, sum; then exponential's quotient and scale.
    fn flops(&self) -> f64 {
        6.0 * (self.tokens * self.vocab) as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        tolerance(if arg == 0 { DType::Bf16 } else { DType::F32 }, self.vocab, 0)
    }
    /// One label in five lies outside the vocabulary.
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        let draws = Draws { seed, stream: 1 };
        let label = |t: usize| match t % 10 {
            2 => -100.0,
            7 => self.vocab as f64,
            _ => draws.below(t, self.vocab) as f64,
        };
        let logits = Draws { seed, stream: 0 }.bf16_normals(self.tokens * self.vocab, 2.0);
        Some(vec![logits, (0..self.tokens).map(label).collect(), vec![]])
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [logits, labels, loss] = addresses(self.name(), args)?;
        if self.tokens == 0 {
            return Ok(Issue::Nothing);
        }
        if self.vocab == 0 {
            return Err(DeviceError::Invalid(
                "cross_entropy: vocab is 0; there is no softmax of nothing".into(),
            ));
        }
        aligned(self.name(), &[logits])?;
        // A row has at most vocab / 8 whole vectors, wherever it starts.
        let row_vectors = self.vocab / VECTOR;
        let kept = row_vectors.min((shared_limit(cuda.cc) - SHARED_RESERVE) / VECTOR_BYTES);
        let shared_bytes = (kept * VECTOR_BYTES) as u32;
        let threads = if self.vocab >= LONG_ROW { THREADS_LONG } else { THREADS_SHORT };
        let kernel =
            cuda.kernel(SOURCE, "cross_entropy", &[("THREADS", threads.to_string())], shared_bytes)?;
        let grid = int_param(self.name(), "tokens", self.tokens)? as u32;
        let config = Config { grid: [grid, 1, 1], block: [threads, 1, 1], shared_bytes };
        let params = [
            Param::Ptr(logits),
            Param::Ptr(labels),
            Param::Ptr(loss),
            Param::I32(int_param(self.name(), "vocab", self.vocab)?),
            Param::I32(kept as i32),
            Param::F32(self.grad_scale),
        ];
        cuda.launch(&kernel, config, &params)
    }
}

impl LossSum {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (per_token, loss) = (args.input(0)?, args.output(1)?);
        let sum: f64 = per_token.iter().map(|x| x.f64()).sum();
        for l in loss {
            *l = (*l + T::of(self.scale as f64 * sum)).f32();
        }
        Ok(())
    }
}

impl Op for LossSum {
    fn name(&self) -> &'static str {
        "loss_sum"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            // Losses are positive; so no cancellation hides behind a relative error.
            ArgSpec::read("loss_per_token", DType::F32, &[self.tokens]).sample(Sample::Uniform(0.0, 12.0)),
            ArgSpec::update("loss", DType::F32, &[1]).sample(Sample::Uniform(0.0, 1.0)),
        ]
    }
    fn flops(&self) -> f64 {
        self.tokens as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::F32, self.tokens + 1, 0)
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [per_token, loss] = addresses(self.name(), args)?;
        if self.tokens == 0 {
            return Ok(Issue::Nothing);
        }
        let kernel = cuda.kernel(SOURCE, "loss_sum", &[("THREADS", THREADS_SHORT.to_string())], 0)?;
        let params = [
            Param::Ptr(per_token),
            Param::Ptr(loss),
            Param::I32(int_param(self.name(), "tokens", self.tokens)?),
            Param::F32(self.scale),
        ];
        cuda.launch(&kernel, Config::linear(1, LOSS_SUM_THREADS), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check_f32_against_f64, check_gradient, inputs, run_f64};
    use super::*;
    use crate::device::cuda::prep::OfflinePrep;

    #[test]
    fn gradient_agrees_with_finite_differences() {
        for (tokens, vocab) in [(1, 1), (1, 2), (7, 13), (10, 8)] {
            let op = CrossEntropy { tokens, vocab, grad_scale: 0.25 };
            let values = inputs(&op, 1);
            let after = run_f64(&op, &values);
            // With one class and a label in range the loss is 0 whatever the logit is: nothing to differentiate.
            if vocab == 1 {
                assert!(after[0][0].abs() < 1e-12 && after[2][0].abs() < 1e-12, "{after:?}");
                continue;
            }
            let loss = |x: &[f64]| {
                let losses = &run_f64(&op, &[x.to_vec(), values[1].clone(), vec![]])[2];
                0.25 * losses.iter().sum::<f64>()
            };
            check_gradient("cross_entropy", loss, &values[0], &after[0]);
        }
    }

    #[test]
    fn a_label_outside_the_vocabulary_leaves_the_log_sum_exp() {
        let op = CrossEntropy { tokens: 2, vocab: 2, grad_scale: 1.0 };
        let after = run_f64(&op, &[vec![0.0; 4], vec![-100.0, 2.0], vec![]]);
        assert!(after[2].iter().all(|l| (l - 2f64.ln()).abs() < 1e-12), "{:?}", after[2]);
        assert_eq!(after[0], [0.5; 4]);
    }

    #[test]
    fn rounding_is_within_tolerance() {
        for (tokens, vocab) in [(1, 3), (7, 1021), (20, 50_257)] {
            let op = CrossEntropy { tokens, vocab, grad_scale: 1.0 / tokens as f32 };
            check_f32_against_f64(&op, &inputs(&op, 5));
        }
        let op = LossSum { tokens: 1023, scale: 1.0 / 1023.0 };
        check_f32_against_f64(&op, &inputs(&op, 6));
    }

    #[test]
    fn losses_add_to_what_was_there() {
        let op = LossSum { tokens: 3, scale: 0.5 };
        assert_eq!(run_f64(&op, &[vec![1.0, 2.0, 3.0], vec![10.0]])[1], [13.0]);
    }

    /// Kernels exist, take these parameters, and compile where NVRTC is there.
    #[test]
    fn kernels_prepare() {
        let mut offline = OfflinePrep::new("sm_90a").unwrap();
        for (tokens, vocab) in [(1, 1), (7, 50_257), (8192, 128_256), (3, 1_000_003)] {
            offline.prepare(&CrossEntropy { tokens, vocab, grad_scale: 1.0 }).unwrap();
            offline.prepare(&LossSum { tokens, scale: 1.0 }).unwrap();
        }
        let e = offline.prepare(&CrossEntropy { tokens: 1, vocab: 0, grad_scale: 1.0 }).unwrap_err();
        assert!(e.to_string().contains("vocab is 0"), "{e}");
    }
}
