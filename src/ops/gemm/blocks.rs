//! Products of a block-diagonal weight: each group of columns has a matrix of its own.

use super::{Accumulate, Gemm};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::matmul::{Layout, MatmulSpec, Matmuls};
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue};
use crate::ops::{ArgSpec, CpuArgs, Op, Real};
use crate::program::DType;

/// [`Gemm`] with a batch whose activations lie side by side in one row: a token's groups (DeepSeek-V4's output projection).
///
/// Args: a R bf16, b R bf16, d `out` (W; U when `InPlace`; there is no `Residual`). With G = batch: `Nt` a `[m, G*k]`, b `[G,n,k]`, d
/// `[m, G*n]`; `Nn` a `[m, G*k]`, b `[G,k,n]`, d `[m, G*n]`; `Tn` a `[k, G*m]`, b `[k, G*n]`, d `[G,m,n]`.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockGemm {
    pub all: Gemm,
}

impl BlockGemm {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let Gemm { m, n, k, batch, layout, accumulate, out } = self.all;
        let (a, b, d) = (args.input(0)?, args.input(1)?, args.output(2)?);
        let beta = if accumulate == Accumulate::No { 0.0 } else { 1.0 };
        if beta == 0.0 {
            d.fill(T::of(0.0));
        }
        let g = batch;
        for i in 0..batch {
            // Row and column strides of op(A) and op(B), and of d.
            let (a, sa) = match layout {
                Layout::Tn => (&a[i * m..], (1, g * m)),
                _ => (&a[i * k..], (g * k, 1)),
            };
            let (b, sb) = match layout {
                Layout::Nt => (&b[i * n * k..], (1, k)),
                Layout::Nn => (&b[i * n * k..], (n, 1)),
                Layout::Tn => (&b[i * n..], (g * n, 1)),
            };
            let (at, sd) = if layout == Layout::Tn { (i * m * n, (n, 1)) } else { (i * n, (g * n, 1)) };
            T::gemm(m, k, n, a, sa, b, sb, T::of(beta), &mut d[at..], sd);
        }
        if out == DType::Bf16 {
            d.iter_mut().for_each(|x| *x = x.bf16());
        }
        Ok(())
    }
}

impl Op for BlockGemm {
    fn name(&self) -> &'static str {
        "block_gemm"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let Gemm { m, n, k, batch: g, layout, accumulate, out } = self.all;
        let (a, b, d) = match layout {
            Layout::Nt => (vec![m, g * k], vec![g, n, k], vec![m, g * n]),
            Layout::Nn => (vec![m, g * k], vec![g, k, n], vec![m, g * n]),
            Layout::Tn => (vec![k, g * m], vec![k, g * n], vec![g, m, n]),
        };
        let to = if accumulate == Accumulate::No { ArgSpec::write } else { ArgSpec::update };
        vec![ArgSpec::read("a", DType::Bf16, &a), ArgSpec::read("b", DType::Bf16, &b), to("d", out, &d)]
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
        let Gemm { m, n, k, batch, layout, out, accumulate } = self.all;
        if !out.is_float() || accumulate == Accumulate::Residual || m * n * k * batch == 0 {
            return Err(DeviceError::internal(format!("{:?} is no product of blocks", self.all)));
        }
        let accumulate = accumulate == Accumulate::InPlace;
        let spec = MatmulSpec { m, n, k, layout, batch, side_by_side: batch > 1, out, accumulate };
        cuda.matmul(&spec, args[0], args[1], args[2], args[2], workspace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{
        check_f32_against_f64, check_op_gradient, inputs, normals, relative_error, run_f64,
    };

    fn op(m: usize, n: usize, k: usize, layout: Layout, accumulate: Accumulate) -> BlockGemm {
        BlockGemm { all: Gemm { m, n, k, layout, batch: 3, out: DType::Bf16, accumulate } }
    }

    /// Columns `first..first + width` of rows of `all`.
    fn columns(x: &[f64], all: usize, first: usize, width: usize) -> Vec<f64> {
        x.chunks(all).flat_map(|row| row[first..first + width].to_vec()).collect()
    }

    #[test]
    fn blocks_are_products_of_their_own() {
        let (m, n, k) = (5, 7, 4);
        let block = op(m, n, k, Layout::Nt, Accumulate::No);
        let v = inputs(&block, 2);
        check_f32_against_f64(&block, &v);
        let got = &run_f64(&block, &v)[2];
        for i in 0..3 {
            let one = Gemm { batch: 1, ..block.all.clone() };
            let b = v[1][i * n * k..][..n * k].to_vec();
            let want = &run_f64(&one, &[columns(&v[0], 3 * k, i * k, k), b, vec![]])[2];
            assert!(relative_error(&columns(got, 3 * n, i * n, n), want) < 1e-14);
        }
    }

    #[test]
    fn the_other_layouts_are_its_gradients() {
        let (tokens, outs, ins) = (6, 4, 5);
        let fwd = op(tokens, outs, ins, Layout::Nt, Accumulate::No);
        let v = inputs(&fwd, 6);
        let dout = normals(tokens * 3 * outs, 7, 1.0);
        let data = op(tokens, ins, outs, Layout::Nn, Accumulate::No);
        let dx = run_f64(&data, &[dout.clone(), v[1].clone(), vec![]]);
        check_op_gradient(&fwd, &v, &[(2, &dout)], 0, &dx[2]);
        let weight = op(outs, ins, tokens, Layout::Tn, Accumulate::No);
        let dw = run_f64(&weight, &[dout.clone(), v[0].clone(), vec![]]);
        check_op_gradient(&fwd, &v, &[(2, &dout)], 1, &dw[2]);
        let added = op(outs, ins, tokens, Layout::Tn, Accumulate::InPlace);
        let twice = run_f64(&added, &[dout, v[0].clone(), dw[2].clone()]);
        assert!(relative_error(&twice[2], &dw[2].iter().map(|x| 2.0 * x).collect::<Vec<_>>()) < 1e-14);
    }
}
