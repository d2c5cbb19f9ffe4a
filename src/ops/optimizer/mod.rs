//! Norm of the gradients, clipping, and fused AdamW with fp32 master weights.

mod adam;

pub use adam::Adam;

use super::support::{VECTOR, VECTOR_BYTES, addresses, float_name};
use super::{ArgSpec, CpuArgs, Op, Real, Sample, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

const SOURCE: KernelSource = KernelSource { name: "optimizer/kernel.cu", text: include_str!("kernel.cu") };
/// Threads of a block of the norm's first kernel; part of the order of its sums.
const NORM_THREADS: usize = 512;
const FINISH_THREADS: u32 = 1024;
/// Partial sums of a large gradient: eight blocks a multiprocessor of 132. A constant, so that the order of the
/// sums, and with it the norm's bits, is the same on every device.
const MAX_PARTIALS: usize = 1056;
/// Added to the norm before dividing, as PyTorch's `clip_grad_norm_` and Megatron's clipping do.
const CLIP_FLOOR: f64 = 1e-6;

/// A sensible number of partial sums for a gradient of `len` elements.
pub fn partials(len: usize) -> usize {
    len.div_ceil(NORM_THREADS * VECTOR).clamp(1, MAX_PARTIALS)
}

/// Partial sums of squares of a flat gradient, in a fixed order.
///
/// Arguments: grad `[len]` of `dtype`, partial `[partials]`. See [`partials`] for a good number.
#[derive(Debug, Clone, PartialEq)]
pub struct GradNormPartial {
    pub len: usize,
    /// Bf16 or F32.
    pub dtype: DType,
    pub partials: usize,
}

/// norm = sqrt(sum of partials); scale = min(1, clip / (norm + 1e-6)) if clip > 0, else 1.
///
/// Arguments: partial `[partials]`, norm `[1]`, scale `[1]`.
#[derive(Debug, Clone, PartialEq)]
pub struct GradNormFinish {
    pub partials: usize,
    /// Largest norm that passes unscaled; 0: no clipping.
    pub clip: f64,
}

/// Defines of the kernels over a flat gradient: its element, and whether all addresses allow vectors. A shard
/// of a flat array may start anywhere.
fn flat_defines(op: &str, grad: DType, args: &[DevPtr]) -> Result<[(&'static str, String); 2], DeviceError> {
    let vectors = args.iter().all(|a| a.0.is_multiple_of(VECTOR_BYTES as u64));
    Ok([("GRAD", float_name(op, grad)?), ("VECTORS", u8::from(vectors).to_string())])
}

impl GradNormPartial {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (grad, partial) = (args.input(0)?, args.output(1)?);
        // Partial p takes the same vectors as block p of the kernel.
        let width = NORM_THREADS * VECTOR;
        let whole = self.len - self.len % VECTOR;
        partial.par_iter_mut().enumerate().for_each(|(p, out)| {
            let mut sum = 0.0;
            for start in (p * width..whole).step_by(self.partials * width) {
                let end = (start + width).min(whole);
                sum += grad[start..end].iter().map(|x| x.f64() * x.f64()).sum::<f64>();
            }
            if p + 1 == self.partials {
                sum += grad[whole..].iter().map(|x| x.f64() * x.f64()).sum::<f64>();
            }
            *out = T::of(sum).f32();
        });
        Ok(())
    }
}

impl Op for GradNormPartial {
    fn name(&self) -> &'static str {
        "grad_norm_partial"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("grad", self.dtype, &[self.len]),
            ArgSpec::write("partial", DType::F32, &[self.partials]),
        ]
    }
    fn flops(&self) -> f64 {
        2.0 * self.len as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::F32, self.len.div_ceil(self.partials.max(1)), 0)
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [grad, partial] = addresses(self.name(), args)?;
        if self.partials == 0 {
            return Ok(Issue::Nothing);
        }
        int_param(self.name(), "partials", self.partials)?;
        let [element, vectors] = flat_defines(self.name(), self.dtype, &[grad])?;
        let defines = [element, vectors, ("THREADS", NORM_THREADS.to_string())];
        let kernel = cuda.kernel(SOURCE, "grad_norm_partial", &defines, 0)?;
        let params = [Param::Ptr(grad), Param::Ptr(partial), Param::I64(self.len as i64)];
        cuda.launch(&kernel, Config::linear(self.partials, NORM_THREADS as u32), &params)
    }
}

impl GradNormFinish {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (partial, norm, scale) = (args.input(0)?, args.output(1)?, args.output(2)?);
        let value = partial.iter().map(|x| x.f64()).sum::<f64>().sqrt();
        let clipped = self.clip / (value + CLIP_FLOOR);
        norm[0] = T::of(value).f32();
        // Not `min`: a norm that is not a number must reach the weights.
        scale[0] = T::of(if self.clip <= 0.0 || clipped > 1.0 { 1.0 } else { clipped }).f32();
        Ok(())
    }
}

impl Op for GradNormFinish {
    fn name(&self) -> &'static str {
        "grad_norm_finish"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("partial", DType::F32, &[self.partials]).sample(Sample::Uniform(0.0, 2.0)),
            ArgSpec::write("norm", DType::F32, &[1]),
            ArgSpec::write("scale", DType::F32, &[1]),
        ]
    }
    fn flops(&self) -> f64 {
        self.partials as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::F32, self.partials, 0)
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [partial, norm, scale] = addresses(self.name(), args)?;
        let kernel = cuda.kernel(SOURCE, "grad_norm_finish", &[], 0)?;
        let params = [
            Param::Ptr(partial),
            Param::Ptr(norm),
            Param::Ptr(scale),
            Param::I32(int_param(self.name(), "partials", self.partials)?),
            Param::F32(self.clip as f32),
            Param::F32(CLIP_FLOOR as f32),
        ];
        cuda.launch(&kernel, Config::linear(1, FINISH_THREADS), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check_f32_against_f64, inputs, run_f64};
    use super::*;
    use crate::device::cuda::prep::OfflinePrep;

    #[test]
    fn partials_hold_every_element_once() {
        // Below a vector, around a block's width, and enough for each partial to stride.
        for (len, partials) in [(1, 1), (7, 3), (4096, 2), (4103, 1), (100_003, 5)] {
            let op = GradNormPartial { len, dtype: DType::F32, partials };
            let sums = run_f64(&op, &[vec![2.0; len], vec![]]).remove(1);
            assert_eq!(sums.iter().sum::<f64>(), 4.0 * len as f64, "{len} in {partials}");
            check_f32_against_f64(&op, &inputs(&op, 1));
        }
    }

    #[test]
    fn norm_and_scale() {
        let finish = |clip, sum| {
            let after = run_f64(&GradNormFinish { partials: 2, clip }, &[vec![sum, sum], vec![], vec![]]);
            (after[1][0], after[2][0])
        };
        assert_eq!(finish(1.0, 8.0), (4.0, 1.0 / (4.0 + 1e-6)));
        assert_eq!(finish(10.0, 8.0), (4.0, 1.0));
        assert_eq!(finish(0.0, 8.0), (4.0, 1.0));
        assert!(finish(1.0, f64::NAN).1.is_nan());
        let op = GradNormFinish { partials: MAX_PARTIALS, clip: 1.0 };
        check_f32_against_f64(&op, &inputs(&op, 2));
    }

    #[test]
    fn the_number_of_partials_is_bounded() {
        assert_eq!((partials(0), partials(4096), partials(4097)), (1, 1, 2));
        assert_eq!(partials(2_000_000_000), MAX_PARTIALS);
    }

    /// Kernels exist, take these parameters, and compile where NVRTC is there.
    #[test]
    fn kernels_prepare() {
        let mut offline = OfflinePrep::new("sm_90a").unwrap();
        for dtype in [DType::Bf16, DType::F32] {
            offline.prepare(&GradNormPartial { len: 3_000_000_001, dtype, partials: MAX_PARTIALS }).unwrap();
        }
        offline.prepare(&GradNormFinish { partials: MAX_PARTIALS, clip: 1.0 }).unwrap();
    }
}
