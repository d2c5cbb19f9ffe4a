//! Ops: shapes, costs, a CPU reference and a CUDA preparation each. One folder an op.
//!
//! An op knows no workload. Its arguments are positional: [`Op::args`] names them in order, with
//! shape, dtype and access, and the builder, both devices and `selftest` all go by that list.

pub mod attention;
pub mod bias;
pub mod chunked;
pub mod clamped_glu;
pub mod collective;
pub mod columns;
pub mod cpu_args;
pub mod cross_entropy;
pub mod delta_net;
pub mod dropout;
pub mod embedding;
pub mod flow;
pub mod gated_norm;
pub mod gelu;
pub mod gemm;
pub mod grouped_gemm;
pub mod hyper_connection;
pub mod image_rows;
pub mod layer_norm;
pub mod mamba_conv;
pub mod mla_rope;
pub mod moe_permute;
pub mod optimizer;
pub mod output_gate;
pub mod owned_rows;
pub mod patch_position;
pub mod rmsnorm;
pub mod rng;
pub mod rope;
pub mod router;
pub mod shared_kv;
pub mod squared_relu;
pub mod ssd;
pub mod step;
pub mod support;
pub mod swiglu;
#[cfg(test)]
pub mod testing;
pub mod token_gate;
pub mod wide_norm;

use crate::device::DeviceError;
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue};
use crate::program::DType;
pub use cpu_args::{CpuArgs, Real};
use std::fmt::Debug;

/// What a launch does with one of its buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    /// Every element is written; the old content is not read.
    Write,
    /// Read and written in place (accumulation).
    Update,
}

/// Values that `selftest` and the gradient checks fill an input with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sample {
    /// Normal(0, scale).
    Normal(f64),
    /// Uniform in [low, high).
    Uniform(f64, f64),
    /// Integers in [0, n).
    Below(u32),
    /// Filled by the op's own `sample` (needs consistent structure, e.g. expert offsets).
    Custom,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ArgSpec {
    pub name: &'static str,
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub access: Access,
    pub sample: Sample,
}

impl ArgSpec {
    pub fn read(name: &'static str, dtype: DType, shape: &[usize]) -> Self {
        Self::new(name, dtype, shape, Access::Read)
    }
    pub fn write(name: &'static str, dtype: DType, shape: &[usize]) -> Self {
        Self::new(name, dtype, shape, Access::Write)
    }
    pub fn update(name: &'static str, dtype: DType, shape: &[usize]) -> Self {
        Self::new(name, dtype, shape, Access::Update)
    }
    fn new(name: &'static str, dtype: DType, shape: &[usize], access: Access) -> Self {
        Self { name, shape: shape.to_vec(), dtype, access, sample: Sample::Normal(1.0) }
    }
    pub fn sample(mut self, sample: Sample) -> Self {
        self.sample = sample;
        self
    }
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }
}

/// One kind of work on the device, with its shapes fixed.
pub trait Op: Debug + Send + Sync {
    /// Name of the op, e.g. `rmsnorm_fwd`: as `mbperf ops` and the profile print it.
    fn name(&self) -> &'static str;

    /// Arguments in order.
    fn args(&self) -> Vec<ArgSpec>;

    /// Floating-point operations of one launch: multiply and add count two, and only the work the
    /// mathematics asks for (causal attention counts the lower half).
    fn flops(&self) -> f64 {
        0.0
    }

    /// Those that the model asks for: without what a backward computes again from the forward's inputs because its kernel
    /// does not keep it (scores, states). By the field's convention a backward is then twice its forward.
    fn model_flops(&self) -> f64 {
        self.flops()
    }

    /// Fewest bytes through device memory: each input read once, each output written once.
    fn bytes(&self) -> f64 {
        let moved = |a: &ArgSpec| a.bytes() * if a.access == Access::Update { 2 } else { 1 };
        self.args().iter().map(moved).sum::<usize>() as f64
    }

    /// Scratch bytes on the device. The planner gives the launch a private piece for its duration.
    fn workspace(&self) -> usize {
        0
    }

    /// Waits for the device on the host.
    fn host_sync(&self) -> bool {
        false
    }

    /// Arguments that are read on the host, when the launch is issued: a `host_sync` launch before it has filled them.
    fn host_inputs(&self) -> &'static [usize] {
        &[]
    }

    /// A device copy that stands in for a collective with other ranks.
    fn stand_in(&self) -> bool {
        false
    }

    /// That one, if it is none of another kind around it.
    fn as_stand_in(&self) -> Option<&collective::StandIn> {
        None
    }

    /// Relative norm error allowed against the f64 reference for output `arg`: from the reduction
    /// length and the dtype of the op, see [`tolerance`].
    fn tolerance(&self, arg: usize) -> f64;

    /// Inputs with structure (offsets, indices) for `selftest`; `None`: each by its [`Sample`].
    /// Values are given as f64 in the order of `args`; outputs get an empty vector.
    fn sample(&self, _seed: u64) -> Option<Vec<Vec<f64>>> {
        None
    }

    /// CPU reference with rounding to bf16 at the contract's points (arithmetic in f32).
    fn cpu_f32(&self, args: &mut CpuArgs<f32>) -> Result<(), DeviceError>;

    /// CPU reference without rounding.
    fn cpu_f64(&self, args: &mut CpuArgs<f64>) -> Result<(), DeviceError>;

    /// Everything slow: kernels compiled and looked up, plans made. The returned [`Issue`] only launches.
    /// `args[i]` is the device address of argument i, `workspace` that of the scratch piece.
    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], workspace: DevPtr) -> Result<Issue, DeviceError>;
}

/// `n` as a kernel's `int` parameter; an error names the op and the size.
pub fn int_param(op: &str, what: &str, n: usize) -> Result<i32, DeviceError> {
    i32::try_from(n).map_err(|_| {
        DeviceError::Invalid(format!(
            "{op}: {what} is {n}, the kernel takes at most {}; use a smaller shape",
            i32::MAX
        ))
    })
}

/// Refuses a size that the vector accesses of a kernel cannot take.
pub fn check_multiple(op: &str, what: &str, n: usize, of: usize) -> Result<(), DeviceError> {
    if n > 0 && n.is_multiple_of(of) {
        return Ok(());
    }
    Err(DeviceError::Invalid(format!("{op}: {what} is {n}, the kernel needs a positive multiple of {of}")))
}

/// The generic reference `fn run<T: Real>(&self, args: &mut CpuArgs<T>)` of an op serves both element types.
#[macro_export]
macro_rules! cpu_reference {
    () => {
        fn cpu_f32(&self, args: &mut $crate::ops::CpuArgs<f32>) -> Result<(), $crate::device::DeviceError> {
            self.run(args)
        }
        fn cpu_f64(&self, args: &mut $crate::ops::CpuArgs<f64>) -> Result<(), $crate::device::DeviceError> {
            self.run(args)
        }
    };
}

/// Relative norm error that rounding explains, for a result stored as `dtype` whose elements sum
/// `terms` products of bf16 values accumulated in fp32.
///
/// The store rounds once: unit round-off u = 2^-9 (bf16) or 2^-24 (fp32), about u/sqrt(3) in the norm. The
/// fp32 accumulation adds about sqrt(terms) * 2^-24. Four times their sum is allowed. Ops that round
/// intermediates (`rounded` of them) get one more store rounding each.
pub fn tolerance(dtype: DType, terms: usize, rounded: usize) -> f64 {
    const BF16_ROUNDOFF: f64 = 1.0 / 512.0;
    const F32_ROUNDOFF: f64 = 1.0 / 16_777_216.0;
    let store = if dtype == DType::Bf16 { BF16_ROUNDOFF } else { F32_ROUNDOFF };
    4.0 * ((terms as f64).sqrt() * F32_ROUNDOFF
        + store / 3f64.sqrt()
        + rounded as f64 * BF16_ROUNDOFF / 3f64.sqrt())
}
