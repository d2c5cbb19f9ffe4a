//! The column sum that turns partial sums, a row each, into weight gradients.

use super::grad_type;
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::ops::{ArgSpec, CpuArgs, Op, Real, check_multiple, int_param, tolerance};
use crate::program::DType;

/// dw (+)= column sums of `partial`, in a fixed order: the first `cols[0]` columns to the first gradient, and so on. Args:
/// partial R f32 `[rows, sum of cols]`, then for each of `cols` dw U `out` `[cols[i]]` (W unless `accumulate`).
#[derive(Debug, Clone, PartialEq)]
pub struct ColumnSum {
    pub rows: usize,
    /// Columns of each gradient, one to [`MAX_GRADIENTS`].
    pub cols: Vec<usize>,
    /// Adds to the gradients (beta 1), or overwrites them.
    pub accumulate: bool,
    /// `Bf16` or `F32`.
    pub out: DType,
}

/// Gradients of one launch: a state space scan has three.
pub const MAX_GRADIENTS: usize = 3;
const NAMES: [&str; MAX_GRADIENTS] = ["dw", "dw1", "dw2"];

const SOURCE: KernelSource =
    KernelSource { name: "rmsnorm/column_sum.cu", text: include_str!("column_sum.cu") };
/// Columns that one block of `column_sum` sums, and its threads.
const COLUMNS_PER_BLOCK: usize = 32;
const THREADS: u32 = 256;
/// Columns of one 16-byte access of fp32.
const COLUMNS_PER_THREAD: usize = 4;

impl ColumnSum {
    /// Columns of `partial`.
    fn width(&self) -> usize {
        self.cols.iter().sum()
    }

    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let partial = args.input(0)?;
        let mut sum = vec![0.0; self.width()];
        for row in partial.chunks(self.width().max(1)) {
            sum.iter_mut().zip(row).for_each(|(s, v)| *s += v.f64());
        }
        let mut first = 0;
        for (i, cols) in self.cols.iter().enumerate() {
            for (dw, s) in args.output(1 + i)?.iter_mut().zip(&sum[first..]) {
                let total = if self.accumulate { *dw + T::of(*s) } else { T::of(*s) };
                *dw = if self.out == DType::Bf16 { total.bf16() } else { total.f32() };
            }
            first += cols;
        }
        Ok(())
    }
}

impl Op for ColumnSum {
    fn name(&self) -> &'static str {
        "column_sum"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let dw = if self.accumulate { ArgSpec::update } else { ArgSpec::write };
        let mut args = vec![ArgSpec::read("partial", DType::F32, &[self.rows, self.width()])];
        args.extend(self.cols.iter().zip(NAMES).map(|(cols, name)| dw(name, self.out, &[*cols])));
        args
    }
    fn flops(&self) -> f64 {
        self.rows as f64 * self.width() as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(self.out, self.rows, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        if self.cols.is_empty() || self.cols.len() > MAX_GRADIENTS {
            return Err(DeviceError::Invalid(format!(
                "column_sum: {} gradients, the kernel writes 1 to {MAX_GRADIENTS}",
                self.cols.len()
            )));
        }
        let width = self.width();
        if width == 0 || (self.rows == 0 && self.accumulate) {
            return Ok(Issue::Nothing);
        }
        check_multiple(self.name(), "the sum of all columns", width, COLUMNS_PER_THREAD)?;
        let kernel =
            cuda.kernel(SOURCE, "column_sum", &[("OUT", grad_type(self.name(), self.out)?.to_string())], 0)?;
        // Gradients that are not there: the last one again, beyond whose columns there are none.
        let dw = |i: usize| args[1 + i.min(self.cols.len() - 1)];
        let end = |i: usize| int_param(self.name(), "columns", self.cols.iter().take(i).sum());
        let params: [Param; 9] = [
            args[0].into(),
            dw(0).into(),
            dw(1).into(),
            dw(2).into(),
            int_param(self.name(), "rows", self.rows)?.into(),
            int_param(self.name(), "columns", width)?.into(),
            end(1)?.into(),
            end(2)?.into(),
            i32::from(self.accumulate).into(),
        ];
        cuda.launch(&kernel, Config::linear(width.div_ceil(COLUMNS_PER_BLOCK), THREADS), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    /// Gradients side by side, written and added, with a bound inside a 16-byte access.
    #[test]
    fn every_gradient_gets_its_columns() {
        for cols in [vec![12], vec![8, 8], vec![6, 3, 7]] {
            for (out, accumulate) in [(DType::Bf16, true), (DType::F32, true), (DType::F32, false)] {
                let op = ColumnSum { rows: 5, cols: cols.clone(), accumulate, out };
                let (width, v) = (op.width(), inputs(&op, 9));
                let after = run_f64(&op, &v);
                let mut first = 0;
                for (i, n) in cols.iter().enumerate() {
                    let want = |c: usize| {
                        let sum: f64 = v[0].iter().skip(first + c).step_by(width).sum();
                        sum + if accumulate { v[1 + i][c] } else { 0.0 }
                    };
                    let want: Vec<f64> = (0..*n).map(want).collect();
                    assert!(relative_error(&after[1 + i], &want) < 1e-14, "{op:?}");
                    first += n;
                }
                check_f32_against_f64(&op, &v);
            }
        }
    }

    #[test]
    fn columns_are_checked_when_prepared() {
        let mut cuda = crate::device::cuda::prep::OfflinePrep::new("sm_90a").unwrap();
        for (cols, legal) in [
            (vec![16], true),
            (vec![6, 3, 7], true),
            (vec![8, 6], false),
            (vec![], false),
            (vec![4, 4, 4, 4], false),
        ] {
            let op = ColumnSum { rows: 3, cols, out: DType::Bf16, accumulate: true };
            assert_eq!(cuda.prepare(&op).is_ok(), legal, "{op:?}: {:?}", cuda.prepare(&op));
        }
    }
}
