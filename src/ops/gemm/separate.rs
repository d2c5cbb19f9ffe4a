//! The products of a batch as one library call each, in place of one batched call.

use super::{Accumulate, Gemm};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::matmul::Matmuls;
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue};
use crate::ops::{ArgSpec, CpuArgs, Op, Real};

/// [`Gemm`] with a batch, issued product by product: experts of equal size as Transformer Engine's grouped linear
/// layer issues them. Same arguments and results.
#[derive(Debug, Clone, PartialEq)]
pub struct SeparateGemms {
    pub all: Gemm,
}

impl SeparateGemms {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        self.all.run(args)
    }
}

impl Op for SeparateGemms {
    fn name(&self) -> &'static str {
        "separate_gemms"
    }
    fn args(&self) -> Vec<ArgSpec> {
        self.all.args()
    }
    fn flops(&self) -> f64 {
        self.all.flops()
    }
    fn workspace(&self) -> usize {
        Matmuls::WORKSPACE_BYTES
    }
    fn tolerance(&self, arg: usize) -> f64 {
        self.all.tolerance(arg)
    }
    cpu_reference!();

    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], workspace: DevPtr) -> Result<Issue, DeviceError> {
        let Gemm { m, n, k, out, accumulate, .. } = self.all;
        let one = Gemm { batch: 1, ..self.all.clone() };
        // Bytes from one product's operand to the next's, by argument.
        let mut strides = vec![m * k * 2, k * n * 2];
        if accumulate == Accumulate::Residual {
            strides.push(m * n * out.size());
        }
        strides.push(m * n * out.size());
        let product = |i: usize, cuda: &mut CudaPrep| {
            let of_one: Vec<DevPtr> = args.iter().zip(&strides).map(|(p, s)| p.offset(i * s)).collect();
            one.prepare(cuda, &of_one, workspace)
        };
        (0..self.all.batch).map(|i| product(i, cuda)).collect::<Result<_, _>>().map(Issue::Many)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::matmul::Layout;
    use crate::device::cuda::prep::OfflinePrep;
    use crate::ops::testing::{inputs, run_f64};
    use crate::program::DType;

    #[test]
    fn products_are_those_of_the_batch() {
        for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
            for accumulate in [Accumulate::No, Accumulate::InPlace, Accumulate::Residual] {
                let all = Gemm { m: 8, n: 16, k: 24, layout, batch: 3, out: DType::Bf16, accumulate };
                let op = SeparateGemms { all: all.clone() };
                let values = inputs(&all, 1);
                assert_eq!(run_f64(&op, &values), run_f64(&all, &values));
                let args: Vec<DevPtr> = (1..=op.args().len() as u64).map(|i| DevPtr(i << 40)).collect();
                let mut offline = OfflinePrep::new("sm_90a").unwrap();
                let issue = op.prepare(&mut offline.prep(), &args, DevPtr(1 << 50)).unwrap();
                let Issue::Many(parts) = issue else { panic!("{issue:?}") };
                assert_eq!(parts.len(), 3);
            }
        }
    }
}
