//! AdamW, fused: moments, master weights and the bf16 weights in one pass.

use super::{SOURCE, flat_defines};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, Param};
use crate::ops::rng::{WORD_LR, WORD_STEP, WORDS};
use crate::ops::support::{Draws, VECTOR, addresses, sample_words};
use crate::ops::{ArgSpec, CpuArgs, Op, Real, Sample, tolerance};
use crate::program::DType;
use rayon::prelude::*;

const THREADS: u32 = 256;
/// Blocks beyond which the kernel strides: 16 a multiprocessor of 132 keep every one full. Elements are
/// independent, so the number does not touch the result.
const MAX_BLOCKS: usize = 2112;
/// Rounded fp32 operations in the chain that yields one element, for the tolerance.
const ROUNDED_OPERATIONS: usize = 16;
/// Learning rate in `selftest`: large, so that a wrong update shows beside weights of order 1.
const SAMPLE_LR: f32 = 0.5;

/// One step of AdamW (Loshchilov, Hutter: "Decoupled weight decay regularization", ICLR 2019, algorithm 2) with
/// bias correction, t = step word + 1 and the learning rate from the lr word:
///
/// g = grad * scale; m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
/// master = master (1 - lr weight_decay) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps);
/// param = master, rounded to bf16.
///
/// Arguments: grad `[len]`, scale `[1]`, words `[WORDS]`, master, m, v `[len]` f32 (updated), param `[len]` bf16.
#[derive(Debug, Clone, PartialEq)]
pub struct Adam {
    pub len: usize,
    /// Bf16 or F32.
    pub grad: DType,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
}

impl Adam {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (grad, scale, words) = (args.input(0)?, args.input(1)?[0], args.ints(2)?);
        let (master, m, v) = (args.output(3)?, args.output(4)?, args.output(5)?);
        let param = args.output(6)?;
        let t = (words[WORD_STEP] as u32).wrapping_add(1) as f64;
        let lr = f32::from_bits(words[WORD_LR] as u32) as f64;
        let (beta1, beta2) = (T::of(self.beta1), T::of(self.beta2));
        let (rest1, rest2) = (T::of(1.0 - self.beta1), T::of(1.0 - self.beta2));
        let decay = T::of(1.0 - lr * self.weight_decay);
        let size = T::of(lr / (1.0 - self.beta1.powf(t)));
        let root = T::of(1.0 / (1.0 - self.beta2.powf(t)).sqrt());
        let eps = T::of(self.eps);
        let elements = master.par_iter_mut().zip(m).zip(v).zip(param).zip(grad);
        elements.with_min_len(4096).for_each(|((((w, m), v), p), g)| {
            let g = *g * scale;
            *m = (beta1 * *m + rest1 * g).f32();
            *v = (beta2 * *v + rest2 * (g * g)).f32();
            *w = (*w * decay - size * (*m / (v.sqrt() * root + eps))).f32();
            *p = w.bf16();
        });
        Ok(())
    }
}

impl Op for Adam {
    fn name(&self) -> &'static str {
        "adam"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let len = &[self.len];
        vec![
            ArgSpec::read("grad", self.grad, len),
            ArgSpec::read("scale", DType::F32, &[1]).sample(Sample::Uniform(0.1, 1.0)),
            ArgSpec::read("words", DType::U32, &[WORDS]).sample(Sample::Custom),
            ArgSpec::update("master", DType::F32, len),
            ArgSpec::update("m", DType::F32, len),
            // A second moment is never negative.
            ArgSpec::update("v", DType::F32, len).sample(Sample::Uniform(0.0, 1.0)),
            ArgSpec::write("param", DType::Bf16, len),
        ]
    }
    /// An element: 1 for the scale, 3 and 4 for the moments, 7 for the step (root and quotient count one each).
    fn flops(&self) -> f64 {
        15.0 * self.len as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        tolerance(if arg == 6 { DType::Bf16 } else { DType::F32 }, ROUNDED_OPERATIONS, 0)
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        let draws = |stream| Draws { seed, stream };
        Some(vec![
            draws(0).bf16_normals(self.len, 1.0),
            vec![0.75],
            sample_words(seed, SAMPLE_LR),
            draws(1).normals(self.len, 1.0),
            draws(2).normals(self.len, 1.0),
            draws(3).uniforms(self.len, 0.0, 1.0),
            vec![],
        ])
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [grad, scale, words, master, m, v, param] = addresses(self.name(), args)?;
        let defines = flat_defines(self.name(), self.grad, &[grad, master, m, v, param])?;
        if self.len == 0 {
            return Ok(Issue::Nothing);
        }
        let kernel = cuda.kernel(SOURCE, "adam", &defines, 0)?;
        let params = [
            Param::Ptr(grad),
            Param::Ptr(scale),
            Param::Ptr(words),
            Param::Ptr(master),
            Param::Ptr(m),
            Param::Ptr(v),
            Param::Ptr(param),
            Param::I64(self.len as i64),
            Param::F32(self.beta1 as f32),
            Param::F32(self.beta2 as f32),
            Param::F32((1.0 - self.beta1) as f32),
            Param::F32((1.0 - self.beta2) as f32),
            Param::F32(self.beta1.ln() as f32),
            Param::F32(self.beta2.ln() as f32),
            Param::F32(self.eps as f32),
            Param::F32(self.weight_decay as f32),
        ];
        let blocks = self.len.div_ceil(VECTOR * THREADS as usize).min(MAX_BLOCKS);
        cuda.launch(&kernel, Config::linear(blocks, THREADS), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::prep::OfflinePrep;
    use crate::ops::testing::{check_f32_against_f64, inputs, run_f64};

    fn adam(len: usize, grad: DType) -> Adam {
        Adam { len, grad, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }
    }

    /// From zero moments the first step is lr * sign(g), beside the decay: the bias correction cancels.
    #[test]
    fn first_step_is_the_sign_of_the_gradient() {
        let op = adam(2, DType::F32);
        let mut words = sample_words(1, 0.25);
        words[WORD_STEP] = 0.0;
        let values = [vec![4.0, -2.0], vec![0.5], words, vec![1.0; 2], vec![0.0; 2], vec![0.0; 2], vec![]];
        let after = run_f64(&op, &values);
        for (i, sign) in [1.0, -1.0].into_iter().enumerate() {
            let want = 1.0 - 0.25 * 0.1 - 0.25 * sign;
            assert!((after[3][i] - want).abs() < 1e-7, "{} for {want}", after[3][i]);
            assert_eq!(after[6][i], after[3][i]);
        }
        assert!((after[4][0] - 0.1 * 2.0).abs() < 1e-12 && (after[5][0] - 0.05 * 4.0).abs() < 1e-12);
    }

    /// Steps down a parabola (w - 3)^2 to its bottom.
    #[test]
    fn minimises() {
        let op = Adam { weight_decay: 0.0, ..adam(1, DType::F32) };
        let (mut w, mut m, mut v) = (0.0, 0.0, 0.0);
        let mut words = sample_words(1, 0.05);
        for step in 0..400 {
            words[WORD_STEP] = step as f64;
            let values = [vec![2.0 * (w - 3.0)], vec![1.0], words.clone(), vec![w], vec![m], vec![v], vec![]];
            let after = run_f64(&op, &values);
            (w, m, v) = (after[3][0], after[4][0], after[5][0]);
        }
        assert!((w - 3.0).abs() < 0.05, "{w}");
    }

    #[test]
    fn rounding_is_within_tolerance() {
        for (len, grad) in [(1, DType::Bf16), (7, DType::F32), (20_011, DType::Bf16)] {
            let op = adam(len, grad);
            check_f32_against_f64(&op, &inputs(&op, 3));
        }
    }

    /// Kernels exist, take these parameters, and compile where NVRTC is there.
    #[test]
    fn kernels_prepare() {
        let mut offline = OfflinePrep::new("sm_90a").unwrap();
        for grad in [DType::Bf16, DType::F32] {
            let op = adam(3_000_000_001, grad);
            offline.prepare(&op).unwrap();
            // A shard that starts at an odd element takes the kernel without vectors.
            let shifted: Vec<DevPtr> = (1..=7).map(|i| DevPtr((i << 40) + 4)).collect();
            op.prepare(&mut offline.prep(), &shifted, DevPtr(0)).unwrap();
        }
    }
}
