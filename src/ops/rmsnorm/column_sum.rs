//! The column sum that turns partial sums, a row each, into weight gradients.

use super::grad_type;
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::ops::{ArgSpec, CpuArgs, Op, Real, check_multiple, int_param, tolerance};
use crate::program::DType;

/// A matrix of partial sums, `[rows, sum of cols]` f32, a row each.
#[derive(Debug, Clone, PartialEq)]
pub struct Partial {
    pub rows: usize,
    /// Columns of each gradient, one to [`MAX_GRADIENTS`].
    pub cols: Vec<usize>,
}

impl Partial {
    /// Columns of all gradients.
    fn width(&self) -> usize {
        self.cols.iter().sum()
    }
}

/// dw (+)= column sums of partial sums, in a fixed order: the first `cols[0]` columns to the first gradient, and so on. Args: for
/// each of `partials` its sums R f32 `[rows, sum of cols]`, then for each of its `cols` dw U `out` `[cols[i]]` (W unless `accumulate`).
#[derive(Debug, Clone, PartialEq)]
pub struct ColumnSum {
    /// One to `MAX_MATRICES`.
    pub partials: Vec<Partial>,
    /// Adds to the gradients (beta 1), or overwrites them.
    pub accumulate: bool,
    /// `Bf16` or `F32`.
    pub out: DType,
}

/// Matrices of one launch: a Mamba or delta net layer has three.
pub const MAX_MATRICES: usize = 3;
/// Gradients of one matrix: a state space scan has three.
pub const MAX_GRADIENTS: usize = 3;
const NAMES: [(&str, [&str; MAX_GRADIENTS]); MAX_MATRICES] = [
    ("partial", ["dw", "dw1", "dw2"]),
    ("partial_b", ["dw_b", "dw1_b", "dw2_b"]),
    ("partial_c", ["dw_c", "dw1_c", "dw2_c"]),
];

const SOURCE: KernelSource =
    KernelSource { name: "rmsnorm/column_sum.cu", text: include_str!("column_sum.cu") };
/// Columns that one block of `column_sum` sums, and its threads.
const COLUMNS_PER_BLOCK: usize = 32;
const THREADS: u32 = 256;
/// Columns of one 16-byte access of fp32.
const COLUMNS_PER_THREAD: usize = 4;

impl ColumnSum {
    /// Each matrix with the index of its argument.
    fn indexed(&self) -> impl Iterator<Item = (usize, &Partial)> {
        self.partials.iter().scan(0, |next, p| {
            let at = *next;
            *next += 1 + p.cols.len();
            Some((at, p))
        })
    }

    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        for (at, p) in self.indexed() {
            let partial = args.input(at)?;
            let mut sum = vec![0.0; p.width()];
            for row in partial.chunks(p.width().max(1)) {
                sum.iter_mut().zip(row).for_each(|(s, v)| *s += v.f64());
            }
            let mut first = 0;
            for (i, cols) in p.cols.iter().enumerate() {
                for (dw, s) in args.output(at + 1 + i)?.iter_mut().zip(&sum[first..]) {
                    let total = if self.accumulate { *dw + T::of(*s) } else { T::of(*s) };
                    *dw = if self.out == DType::Bf16 { total.bf16() } else { total.f32() };
                }
                first += cols;
            }
        }
        Ok(())
    }

    /// Parameters of one matrix; `args`: its own.
    fn params(&self, p: &Partial, args: &[DevPtr]) -> Result<[Param; 8], DeviceError> {
        // Gradients that are not there: the last one again, beyond whose columns there are none.
        let dw = |i: usize| args[1 + i.min(p.cols.len() - 1)];
        let end = |i: usize| int_param(self.name(), "columns", p.cols.iter().take(i).sum());
        Ok([
            args[0].into(),
            dw(0).into(),
            dw(1).into(),
            dw(2).into(),
            int_param(self.name(), "rows", p.rows)?.into(),
            int_param(self.name(), "columns", p.width())?.into(),
            end(1)?.into(),
            end(2)?.into(),
        ])
    }
}

impl Op for ColumnSum {
    fn name(&self) -> &'static str {
        "column_sum"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let dw = if self.accumulate { ArgSpec::update } else { ArgSpec::write };
        let mut args = Vec::new();
        for (p, (partial, names)) in self.partials.iter().zip(NAMES) {
            args.push(ArgSpec::read(partial, DType::F32, &[p.rows, p.width()]));
            args.extend(p.cols.iter().zip(names).map(|(cols, name)| dw(name, self.out, &[*cols])));
        }
        args
    }
    fn flops(&self) -> f64 {
        self.partials.iter().map(|p| p.rows as f64 * p.width() as f64).sum()
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(self.out, self.partials.iter().map(|p| p.rows).max().unwrap_or(0), 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let (matrices, most) = (self.partials.len(), self.partials.iter().map(|p| p.cols.len()).max());
        let least = self.partials.iter().map(|p| p.cols.len()).min();
        if !(1..=MAX_MATRICES).contains(&matrices) || least == Some(0) || most > Some(MAX_GRADIENTS) {
            return Err(DeviceError::Invalid(format!(
                "column_sum: {matrices} matrices of {least:?} to {most:?} gradients, the kernel takes 1 to {MAX_MATRICES} of 1 to {MAX_GRADIENTS}"
            )));
        }
        // Nothing to add, or nowhere to write to.
        let idle = |p: &Partial| p.width() == 0 || (p.rows == 0 && self.accumulate);
        if self.partials.iter().all(idle) {
            return Ok(Issue::Nothing);
        }
        let mut params: Vec<Param> = Vec::new();
        let (mut blocks, mut firsts) = (0, Vec::new());
        for (at, p) in self.indexed() {
            check_multiple(self.name(), "the sum of all columns", p.width(), COLUMNS_PER_THREAD)?;
            params.extend(self.params(p, &args[at..])?);
            firsts.push(blocks);
            blocks += p.width().div_ceil(COLUMNS_PER_BLOCK);
        }
        // Matrices that are not there: the last one again.
        let (last, p) = self.indexed().last().unwrap_or((0, &self.partials[0]));
        for _ in matrices..MAX_MATRICES {
            params.extend(self.params(p, &args[last..])?);
            firsts.push(blocks);
        }
        for first in &firsts[1..] {
            params.push(int_param(self.name(), "blocks", *first)?.into());
        }
        params.push(i32::from(self.accumulate).into());
        let defines =
            [("OUT", grad_type(self.name(), self.out)?.to_string()), ("SOURCES", matrices.to_string())];
        let kernel = cuda.kernel(SOURCE, "column_sum", &defines, 0)?;
        cuda.launch(&kernel, Config::linear(blocks, THREADS), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    /// Rows and columns of each gradient.
    type Matrix = (usize, &'static [usize]);

    fn of(partials: &[Matrix], out: DType, accumulate: bool) -> ColumnSum {
        let partials = partials.iter().map(|(rows, cols)| Partial { rows: *rows, cols: cols.to_vec() });
        ColumnSum { partials: partials.collect(), out, accumulate }
    }

    /// Gradients side by side, written and added, with a bound inside a 16-byte access; several matrices.
    #[test]
    fn every_gradient_gets_its_columns() {
        let all: [&[Matrix]; 5] = [
            &[(5, &[12])],
            &[(5, &[8, 8])],
            &[(5, &[6, 3, 7])],
            &[(5, &[12]), (3, &[8, 8])],
            &[(1, &[4]), (6, &[6, 3, 7]), (2, &[36, 4])],
        ];
        for partials in all {
            for (out, accumulate) in [(DType::Bf16, true), (DType::F32, true), (DType::F32, false)] {
                let op = of(partials, out, accumulate);
                let v = inputs(&op, 9);
                let after = run_f64(&op, &v);
                for (at, p) in op.indexed() {
                    let mut first = 0;
                    for (i, n) in p.cols.iter().enumerate() {
                        let want = |c: usize| {
                            let sum: f64 = v[at].iter().skip(first + c).step_by(p.width()).sum();
                            sum + if accumulate { v[at + 1 + i][c] } else { 0.0 }
                        };
                        let want: Vec<f64> = (0..*n).map(want).collect();
                        assert!(relative_error(&after[at + 1 + i], &want) < 1e-14, "{op:?}");
                        first += n;
                    }
                }
                check_f32_against_f64(&op, &v);
            }
        }
    }

    #[test]
    fn columns_are_checked_when_prepared() {
        let mut cuda = crate::device::cuda::prep::OfflinePrep::new("sm_90a").unwrap();
        let all: [(&[Matrix], bool); 9] = [
            (&[(3, &[16])], true),
            (&[(3, &[6, 3, 7])], true),
            (&[(3, &[16]), (5, &[8, 8])], true),
            (&[(3, &[16]), (5, &[8, 8]), (1, &[4])], true),
            (&[(3, &[8, 6])], false),
            (&[(3, &[16]), (3, &[8, 6])], false),
            (&[(3, &[])], false),
            (&[(3, &[4, 4, 4, 4])], false),
            (&[(1, &[4]), (1, &[4]), (1, &[4]), (1, &[4])], false),
        ];
        for (partials, legal) in all {
            let op = of(partials, DType::Bf16, true);
            assert_eq!(cuda.prepare(&op).is_ok(), legal, "{op:?}: {:?}", cuda.prepare(&op));
        }
        assert!(cuda.prepare(&of(&[], DType::Bf16, true)).is_err());
    }
}
