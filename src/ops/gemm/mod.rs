//! Matrix product by cuBLASLt: bf16 operands, fp32 accumulation, one rounding at the store.

mod blocks;
mod separate;

pub use blocks::BlockGemm;
pub use separate::SeparateGemms;

use super::{ArgSpec, CpuArgs, Op, Real, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::matmul::{Layout, MatmulSpec, Matmuls};
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue};
use crate::program::DType;

/// What is added to the product before the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accumulate {
    /// Nothing.
    No,
    /// The old content of `d` (main gradients).
    InPlace,
    /// Another tensor `c` (the residual stream).
    Residual,
}

/// D = op(A) op(B) (+ C), `batch` products at tight strides.
///
/// Args: a R bf16, b R bf16, [c R `out` when `Residual`], d `out` (W; U when `InPlace`). Shapes by layout,
/// with a leading `batch` dimension when batch > 1: `Nt` a `[m,k]`, b `[n,k]`; `Nn` a `[m,k]`, b `[k,n]`; `Tn` a
/// `[k,m]`, b `[k,n]`; c and d `[m,n]` always.
#[derive(Debug, Clone, PartialEq)]
pub struct Gemm {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub layout: Layout,
    pub batch: usize,
    /// `Bf16` or `F32`.
    pub out: DType,
    pub accumulate: Accumulate,
}

impl Gemm {
    /// Index of `d` among the arguments.
    pub fn output_arg(&self) -> usize {
        if self.accumulate == Accumulate::Residual { 3 } else { 2 }
    }

    fn shape(&self, rows: usize, cols: usize) -> Vec<usize> {
        if self.batch == 1 { vec![rows, cols] } else { vec![self.batch, rows, cols] }
    }

    /// Row and column strides of op(A) [m,k] and op(B) [k,n].
    fn strides(&self) -> ((usize, usize), (usize, usize)) {
        let (m, n, k) = (self.m, self.n, self.k);
        match self.layout {
            Layout::Nt => ((k, 1), (1, k)),
            Layout::Nn => ((k, 1), (n, 1)),
            Layout::Tn => ((1, m), (n, 1)),
        }
    }

    /// Accumulates in `T`; C joins the sum before the one rounding of the store.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (m, n, k) = (self.m, self.n, self.k);
        let (a, b, d) = (args.input(0)?, args.input(1)?, args.output(self.output_arg())?);
        if self.accumulate == Accumulate::Residual {
            d.copy_from_slice(args.input(2)?);
        }
        let beta = if self.accumulate == Accumulate::No { 0.0 } else { 1.0 };
        if beta == 0.0 {
            // The product of the CPU library may leave d alone when k is 0.
            d.fill(T::of(0.0));
        }
        let (sa, sb) = self.strides();
        for i in 0..self.batch {
            let d = &mut d[i * m * n..(i + 1) * m * n];
            T::gemm(m, k, n, &a[i * m * k..], sa, &b[i * k * n..], sb, T::of(beta), d, (n, 1));
            if self.out == DType::Bf16 {
                d.iter_mut().for_each(|x| *x = x.bf16());
            }
        }
        Ok(())
    }
}

impl Op for Gemm {
    fn name(&self) -> &'static str {
        "gemm"
    }

    fn args(&self) -> Vec<ArgSpec> {
        let (m, n, k) = (self.m, self.n, self.k);
        let (a, b) = match self.layout {
            Layout::Nt => (self.shape(m, k), self.shape(n, k)),
            Layout::Nn => (self.shape(m, k), self.shape(k, n)),
            Layout::Tn => (self.shape(k, m), self.shape(k, n)),
        };
        let mut args = vec![ArgSpec::read("a", DType::Bf16, &a), ArgSpec::read("b", DType::Bf16, &b)];
        let d = self.shape(m, n);
        match self.accumulate {
            Accumulate::No => args.push(ArgSpec::write("d", self.out, &d)),
            Accumulate::InPlace => args.push(ArgSpec::update("d", self.out, &d)),
            Accumulate::Residual => {
                args.push(ArgSpec::read("c", self.out, &d));
                args.push(ArgSpec::write("d", self.out, &d));
            }
        }
        args
    }

    fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64 * self.batch as f64
    }

    fn workspace(&self) -> usize {
        Matmuls::WORKSPACE_BYTES
    }

    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(self.out, self.k, 0)
    }

    cpu_reference!();

    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], workspace: DevPtr) -> Result<Issue, DeviceError> {
        if !self.out.is_float() {
            return Err(DeviceError::Invalid(format!(
                "gemm: the output dtype is {:?}, bf16 and f32 are possible",
                self.out
            )));
        }
        let d = args[self.output_arg()];
        let elements = self.batch * self.m * self.n;
        if elements == 0 {
            return Ok(Issue::Nothing);
        }
        let bytes = elements * self.out.size();
        if self.k == 0 {
            // An empty sum: only C is left.
            return Ok(match self.accumulate {
                Accumulate::No => Issue::Zero { dst: d, bytes },
                Accumulate::InPlace => Issue::Nothing,
                Accumulate::Residual => Issue::Copy { dst: d, src: args[2], bytes },
            });
        }
        let spec = MatmulSpec {
            m: self.m,
            n: self.n,
            k: self.k,
            layout: self.layout,
            batch: self.batch,
            side_by_side: false,
            out: self.out,
            accumulate: self.accumulate != Accumulate::No,
        };
        let c = if self.accumulate == Accumulate::Residual { args[2] } else { d };
        cuda.matmul(&spec, args[0], args[1], c, d, workspace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    fn gemm(layout: Layout, accumulate: Accumulate, out: DType) -> Gemm {
        Gemm { m: 5, n: 7, k: 3, layout, batch: 2, out, accumulate }
    }

    /// Plain triple loop with indices written out by layout.
    fn expected(g: &Gemm, v: &[Vec<f64>], c: Option<&[f64]>) -> Vec<f64> {
        let (m, n, k) = (g.m, g.n, g.k);
        let mut d = vec![0.0; g.batch * m * n];
        for (t, d) in d.iter_mut().enumerate() {
            let (s, i, j) = (t / (m * n), t / n % m, t % n);
            for l in 0..k {
                let a = if g.layout == Layout::Tn { l * m + i } else { i * k + l };
                let b = if g.layout == Layout::Nt { j * k + l } else { l * n + j };
                *d += v[0][s * m * k + a] * v[1][s * k * n + b];
            }
            *d += c.map_or(0.0, |c| c[t]);
        }
        d
    }

    #[test]
    fn every_layout_and_accumulation_equals_the_triple_loop() {
        for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
            for accumulate in [Accumulate::No, Accumulate::InPlace, Accumulate::Residual] {
                for out in [DType::Bf16, DType::F32] {
                    let g = gemm(layout, accumulate, out);
                    let v = inputs(&g, 4);
                    let c = (accumulate != Accumulate::No).then(|| v[2].as_slice());
                    let got = &run_f64(&g, &v)[g.output_arg()];
                    assert!(relative_error(got, &expected(&g, &v, c)) < 1e-14, "{g:?}");
                    check_f32_against_f64(&g, &v);
                }
            }
        }
    }

    /// The data gradient of `Nt` is an `Nn` product, its weight gradient a `Tn` product.
    #[test]
    fn backward_products_are_the_forwards_gradients() {
        let (tokens, outs, ins) = (6, 4, 5);
        let make = |m, n, k, layout| Gemm {
            m,
            n,
            k,
            layout,
            batch: 1,
            out: DType::Bf16,
            accumulate: Accumulate::No,
        };
        let fwd = make(tokens, outs, ins, Layout::Nt);
        let v = inputs(&fwd, 6);
        let dout = normals(tokens * outs, 7, 1.0);
        let dx = run_f64(&make(tokens, ins, outs, Layout::Nn), &[dout.clone(), v[1].clone(), vec![]]);
        check_op_gradient(&fwd, &v, &[(2, &dout)], 0, &dx[2]);
        let dw = run_f64(&make(outs, ins, tokens, Layout::Tn), &[dout.clone(), v[0].clone(), vec![]]);
        check_op_gradient(&fwd, &v, &[(2, &dout)], 1, &dw[2]);
    }

    #[test]
    fn an_empty_sum_is_zero() {
        let g = Gemm { k: 0, batch: 1, ..gemm(Layout::Nt, Accumulate::No, DType::F32) };
        assert_eq!(run_f64(&g, &[vec![], vec![], vec![]])[2], vec![0.0; 35]);
    }
}
