//! The step words, advanced by launches on the stream so that a replayed graph sees the next step.

use super::SOURCE;
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, Param};
use crate::ops::rng::{WORD_LR, WORD_MICRO_BATCH, WORD_STEP, WORDS};
use crate::ops::support::{addresses, sample_words};
use crate::ops::{ArgSpec, CpuArgs, Op, Real, Sample};
use crate::program::DType;

/// Learning rate of the words that `selftest` starts from.
const SAMPLE_LR: f32 = 1e-3;

/// Start of a step: micro-batch 0, loss 0.
///
/// Arguments: words `[WORDS]` (updated), loss `[1]`.
#[derive(Debug, Clone, PartialEq)]
pub struct StepBegin;

/// From here on draws are those of this micro-batch. Passes of several micro-batches interleave in a pipeline, and a
/// graph serves more than one micro-batch: so the number stands in device memory, set by a launch before the pass.
///
/// Arguments: words `[WORDS]` (updated).
#[derive(Debug, Clone, PartialEq)]
pub struct MicroBatchSet {
    pub micro_batch: u32,
}

/// End of a step: the step grows by one, the micro-batch is 0 again, the learning rate is that of the new step.
///
/// Arguments: words `[WORDS]` (updated).
#[derive(Debug, Clone, PartialEq)]
pub struct StepEnd {
    /// At the end of the warm-up.
    pub lr: f64,
    /// From step `decay_iters` on.
    pub min_lr: f64,
    /// Steps of linear growth from 0.
    pub warmup_iters: usize,
    /// Step at which the cosine ends, counted from step 0.
    pub decay_iters: usize,
}

/// A count of steps as the kernel takes it.
fn steps(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// cos(pi r) for r in [0, 1] by products and sums that every device rounds alike; see `cos_pi` in kernel.cu,
/// which does the same.
#[allow(clippy::approx_constant, clippy::excessive_precision)]
fn cos_pi(r: f32) -> f32 {
    const TERMS: [f32; 6] =
        [1.60590438e-10, -2.50521084e-8, 2.75573192e-6, -1.98412698e-4, 8.33333333e-3, -1.66666667e-1];
    let y = 3.14159265f32 * (0.5 - r);
    let y2 = y * y;
    let s = TERMS[1..].iter().fold(TERMS[0], |s, t| s * y2 + t);
    y + y * (s * y2)
}

impl StepEnd {
    /// Learning rate of step `step` (the first is 0): lr * step / warmup_iters below `warmup_iters`, then
    /// min_lr + (lr - min_lr) * (1 + cos(pi * progress)) / 2 until `decay_iters`, then min_lr. In f32, bit for
    /// bit what the kernel computes; also the first value of the lr word, as `learning_rate(0)`.
    pub fn learning_rate(&self, step: u32) -> f32 {
        let (lr, min_lr) = (self.lr as f32, self.min_lr as f32);
        let (warmup, decay) = (steps(self.warmup_iters), steps(self.decay_iters));
        if step < warmup {
            lr * (step as f32 / warmup as f32)
        } else if step >= decay {
            min_lr
        } else {
            let done = (step - warmup) as f32 / (decay - warmup) as f32;
            min_lr + 0.5 * (cos_pi(done) + 1.0) * (lr - min_lr)
        }
    }

    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let words = args.ints_out(0)?;
        let step = (words[WORD_STEP] as u32).wrapping_add(1);
        words[WORD_STEP] = step as i32;
        words[WORD_MICRO_BATCH] = 0;
        words[WORD_LR] = self.learning_rate(step).to_bits() as i32;
        Ok(())
    }
}

fn words_arg() -> ArgSpec {
    ArgSpec::update("words", DType::U32, &[WORDS]).sample(Sample::Custom)
}

impl Op for StepEnd {
    fn name(&self) -> &'static str {
        "step_end"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![words_arg()]
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        Some(vec![sample_words(seed, SAMPLE_LR)])
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [words] = addresses(self.name(), args)?;
        let kernel = cuda.kernel(SOURCE, "step_end", &[], 0)?;
        let params = [
            Param::Ptr(words),
            Param::F32(self.lr as f32),
            Param::F32(self.min_lr as f32),
            Param::U32(steps(self.warmup_iters)),
            Param::U32(steps(self.decay_iters)),
        ];
        cuda.launch(&kernel, Config::linear(1, 1), &params)
    }
}

impl StepBegin {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        args.ints_out(0)?[WORD_MICRO_BATCH] = 0;
        args.output(1)?[0] = T::default();
        Ok(())
    }
}

impl Op for StepBegin {
    fn name(&self) -> &'static str {
        "step_begin"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![words_arg(), ArgSpec::write("loss", DType::F32, &[1])]
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        Some(vec![sample_words(seed, SAMPLE_LR), vec![]])
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [words, loss] = addresses(self.name(), args)?;
        let kernel = cuda.kernel(SOURCE, "step_begin", &[], 0)?;
        cuda.launch(&kernel, Config::linear(1, 1), &[words.into(), loss.into()])
    }
}

impl MicroBatchSet {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        args.ints_out(0)?[WORD_MICRO_BATCH] = self.micro_batch as i32;
        Ok(())
    }
}

impl Op for MicroBatchSet {
    fn name(&self) -> &'static str {
        "micro_batch_set"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![words_arg()]
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        Some(vec![sample_words(seed, SAMPLE_LR)])
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [words] = addresses(self.name(), args)?;
        let kernel = cuda.kernel(SOURCE, "micro_batch_set", &[], 0)?;
        cuda.launch(&kernel, Config::linear(1, 1), &[words.into(), self.micro_batch.into()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::prep::OfflinePrep;
    use crate::ops::rng::{WORD_SEED_HI, WORD_SEED_LO};
    use crate::ops::testing::run_f64;

    const SCHEDULE: StepEnd = StepEnd { lr: 3e-4, min_lr: 3e-5, warmup_iters: 10, decay_iters: 110 };

    #[test]
    fn cosine_is_right_to_single_precision() {
        for i in 0..=1000 {
            let r = i as f32 / 1000.0;
            let want = (std::f64::consts::PI * r as f64).cos();
            assert!((cos_pi(r) as f64 - want).abs() < 3e-7, "{r}: {} for {want}", cos_pi(r));
        }
    }

    #[test]
    fn schedule_warms_up_decays_and_stays() {
        let at = |step| SCHEDULE.learning_rate(step) as f64;
        assert_eq!(at(0), 0.0);
        assert!((at(5) - 1.5e-4).abs() < 1e-10);
        assert!((at(10) - 3e-4).abs() < 1e-10);
        assert!((at(60) - 1.65e-4).abs() < 1e-10);
        assert!((10..110).all(|s| at(s + 1) < at(s)));
        assert_eq!(at(110) as f32, 3e-5);
        assert_eq!(at(u32::MAX) as f32, 3e-5);
        let constant = StepEnd { lr: 1.0, min_lr: 0.5, warmup_iters: 0, decay_iters: 0 };
        assert_eq!(constant.learning_rate(0), 0.5);
    }

    #[test]
    fn words_advance() {
        let mut words = sample_words(1, 0.0);
        let (seed_lo, seed_hi) = (words[WORD_SEED_LO], words[WORD_SEED_HI]);
        words[WORD_STEP] = 9.0;
        words[WORD_MICRO_BATCH] = 1.0;
        let words = run_f64(&MicroBatchSet { micro_batch: 7 }, &[words]).remove(0);
        assert_eq!((words[WORD_STEP], words[WORD_MICRO_BATCH]), (9.0, 7.0));
        let words = run_f64(&SCHEDULE, &[words]).remove(0);
        assert_eq!((words[WORD_STEP], words[WORD_MICRO_BATCH]), (10.0, 0.0));
        assert_eq!(f32::from_bits(words[WORD_LR] as u32), 3e-4);
        let mut busy = words;
        busy[WORD_MICRO_BATCH] = 4.0;
        let after = run_f64(&StepBegin, &[busy, vec![]]);
        assert_eq!((after[0][WORD_MICRO_BATCH], after[0][WORD_STEP], after[1][0]), (0.0, 10.0, 0.0));
        assert_eq!((after[0][WORD_SEED_LO], after[0][WORD_SEED_HI]), (seed_lo, seed_hi));
    }

    /// Kernels exist, take these parameters, and compile where NVRTC is there.
    #[test]
    fn kernels_prepare() {
        let mut offline = OfflinePrep::new("sm_90a").unwrap();
        let ops: [&dyn Op; 3] = [&StepBegin, &MicroBatchSet { micro_batch: 1 }, &SCHEDULE];
        for op in ops {
            offline.prepare(op).unwrap();
        }
    }
}
