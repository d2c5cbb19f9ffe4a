//! Memory filled with random values, set to zero, copied.

use super::{SOURCE, THREADS};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, Param};
use crate::ops::rng::{Rng, WORDS, normal_of};
use crate::ops::support::{addresses, float_name, sample_of, sample_words};
use crate::ops::{ArgSpec, CpuArgs, Op, Real, Sample};
use crate::program::DType;
use rayon::prelude::*;

/// Blocks beyond which `random_fill` strides: 16 a multiprocessor of 132 keep every one full.
const MAX_BLOCKS: usize = 2112;

/// Given inputs and output gradients of a share without embedding or loss: Normal(0, std).
///
/// Element i is std times the normal of draw number i, so that it depends on seed, step, micro-batch and i alone.
/// Arguments: words `[WORDS]`, out `[len]` of `dtype`.
#[derive(Debug, Clone, PartialEq)]
pub struct RandomFill {
    /// Below 2^32.
    pub len: usize,
    pub std: f64,
    pub rng: Rng,
    /// Bf16 or F32.
    pub dtype: DType,
}

impl RandomFill {
    /// Draws are numbered by 32 bits.
    fn len_u32(&self) -> Result<u32, DeviceError> {
        u32::try_from(self.len).map_err(|_| {
            DeviceError::Invalid(format!(
                "random_fill: {} elements, one launch draws up to {}",
                self.len,
                u32::MAX
            ))
        })
    }

    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        self.len_u32()?;
        let (words, out) = (args.ints(0)?, args.output(1)?);
        out.par_iter_mut().enumerate().for_each(|(i, x)| {
            let value = normal_of(self.rng.draw4(words, i as u32)) * self.std as f32;
            let value = T::of(value as f64);
            *x = if self.dtype == DType::Bf16 { value.bf16() } else { value };
        });
        Ok(())
    }
}

impl Op for RandomFill {
    fn name(&self) -> &'static str {
        "random_fill"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("words", DType::U32, &[WORDS]).sample(Sample::Custom),
            ArgSpec::write("out", self.dtype, &[self.len]),
        ]
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        crate::ops::tolerance(self.dtype, 1, 0)
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        Some(vec![sample_words(seed, 0.0), vec![]])
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [words, out] = addresses(self.name(), args)?;
        let len = self.len_u32()?;
        let element = float_name(self.name(), self.dtype)?;
        if len == 0 {
            return Ok(Issue::Nothing);
        }
        let kernel = cuda.kernel(SOURCE, "random_fill", &[("OUT", element)], 0)?;
        let params = [
            Param::Ptr(words),
            Param::Ptr(out),
            Param::U32(len),
            Param::F32(self.std as f32),
            Param::U32(self.rng.seed_offset),
            Param::U32(self.rng.draw),
        ];
        let blocks = self.len.div_ceil(THREADS as usize).min(MAX_BLOCKS);
        cuda.launch(&kernel, Config::linear(blocks, THREADS), &params)
    }
}

/// Sets a buffer to zero. Arguments: out `[len]` of `dtype`.
#[derive(Debug, Clone, PartialEq)]
pub struct Zero {
    pub dtype: DType,
    pub len: usize,
}

impl Zero {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        if self.dtype.is_float() {
            args.output(0)?.fill(T::default());
        } else {
            args.ints_out(0)?.fill(0);
        }
        Ok(())
    }
}

impl Op for Zero {
    fn name(&self) -> &'static str {
        "zero"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![ArgSpec::write("out", self.dtype, &[self.len])]
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    cpu_reference!();

    fn prepare(
        &self,
        _cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [dst] = addresses(self.name(), args)?;
        let bytes = self.len * self.dtype.size();
        Ok(if bytes == 0 { Issue::Nothing } else { Issue::Zero { dst, bytes } })
    }
}

/// Bytes of a vector of `copy_vectors`, and vectors that a block of it copies.
const COPY_VECTOR: usize = 16;
const VECTORS_PER_BLOCK: usize = 1024;

/// Copies a buffer. Arguments: x `[len]`, out `[len]`, both of `dtype`.
#[derive(Debug, Clone, PartialEq)]
pub struct Copy {
    pub dtype: DType,
    pub len: usize,
}

impl Copy {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        if self.dtype.is_float() {
            args.output(1)?.copy_from_slice(args.input(0)?);
        } else {
            args.ints_out(1)?.copy_from_slice(args.ints(0)?);
        }
        Ok(())
    }
}

impl Op for Copy {
    fn name(&self) -> &'static str {
        "copy"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("x", self.dtype, &[self.len]).sample(sample_of(self.dtype)),
            ArgSpec::write("out", self.dtype, &[self.len]),
        ]
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [src, dst] = addresses(self.name(), args)?;
        let bytes = self.len * self.dtype.size();
        let aligned = [src.0, dst.0, bytes as u64].iter().all(|n| n % COPY_VECTOR as u64 == 0);
        if bytes == 0 {
            return Ok(Issue::Nothing);
        }
        if !aligned {
            return Ok(Issue::Copy { dst, src, bytes });
        }
        let vectors = bytes / COPY_VECTOR;
        let kernel = cuda.kernel(SOURCE, "copy_vectors", &[], 0)?;
        let config = Config::linear(vectors.div_ceil(VECTORS_PER_BLOCK), THREADS);
        cuda.launch(&kernel, config, &[src.into(), dst.into(), Param::I64(vectors as i64)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::prep::OfflinePrep;
    use crate::ops::testing::{check_f32_against_f64, inputs, run_f64};

    #[test]
    fn random_fill_has_its_standard_deviation_and_changes_with_the_step() {
        for dtype in [DType::Bf16, DType::F32] {
            let op = RandomFill { len: 20_001, std: 0.5, rng: Rng { seed_offset: 3, draw: 1 }, dtype };
            let mut values = inputs(&op, 1);
            check_f32_against_f64(&op, &values);
            let x = run_f64(&op, &values).remove(1);
            let variance = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
            assert!((variance - 0.25).abs() < 0.01, "{variance}");
            values[0][crate::ops::rng::WORD_STEP] += 1.0;
            assert_ne!(run_f64(&op, &values)[1], x);
        }
    }

    #[test]
    fn zero_and_copy_serve_every_dtype() {
        for dtype in [DType::Bf16, DType::F32, DType::I32, DType::U32, DType::U8] {
            assert_eq!(run_f64(&Zero { dtype, len: 7 }, &[vec![]])[0], [0.0; 7]);
            let copy = Copy { dtype, len: 7 };
            let values = inputs(&copy, 2);
            assert_eq!(run_f64(&copy, &values)[1], values[0]);
        }
    }

    /// Kernels exist, take these parameters, and compile where NVRTC is there.
    #[test]
    fn kernels_prepare() {
        let mut offline = OfflinePrep::new("sm_90a").unwrap();
        let rng = Rng { seed_offset: 3, draw: 1 };
        for dtype in [DType::Bf16, DType::F32] {
            offline.prepare(&RandomFill { len: 20_001, std: 0.5, rng, dtype }).unwrap();
        }
        let large = RandomFill { len: 1 << 32, std: 0.5, rng, dtype: DType::F32 };
        assert!(offline.prepare(&large).is_err());
    }
}
