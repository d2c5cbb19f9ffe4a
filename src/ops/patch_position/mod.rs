//! Learned positions of patches: a square table of rows, read between its rows when the image has another number of patches
//! (bilinear, corners on corners, as Qwen3-VL's tower does), added to the patches' products together with their bias.

use super::rope::axes::patch;
use super::support::{VECTOR, float_name};
use super::{ArgSpec, CpuArgs, Op, Real, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

/// y = x + bias + position. Args: x R bf16 `[images*side^2,H]` (patches in the order of `rope::axes::patch`), bias R bf16 `[H]`,
/// table R bf16 `[table_side^2,H]`, y W bf16 like x.
#[derive(Debug, Clone, PartialEq)]
pub struct PatchPositionFwd {
    pub images: usize,
    /// Patches in a row and in a column of an image, even.
    pub side: usize,
    /// The same of the table.
    pub table_side: usize,
    pub hidden: usize,
}

/// Gradient of the table. Args: dy R bf16 `[images*side^2,H]`, dtable `out` `[table_side^2,H]` (U if `accumulate`, else W).
#[derive(Debug, Clone, PartialEq)]
pub struct PatchPositionBwd {
    pub images: usize,
    pub side: usize,
    pub table_side: usize,
    pub hidden: usize,
    /// `Bf16` or `F32`.
    pub out: DType,
    pub accumulate: bool,
}

const SOURCE: KernelSource =
    KernelSource { name: "patch_position/kernel.cu", text: include_str!("kernel.cu") };
const MAX_THREADS: usize = 256;

/// Where coordinate `i` of `side` falls among `table_side` rows: row before, row after, share of the row after.
fn between(i: usize, side: usize, table_side: usize) -> (usize, usize, f64) {
    let (steps, last) = (side.saturating_sub(1).max(1), table_side.saturating_sub(1));
    let low = i * last / steps;
    (low, (low + 1).min(last), (i * last % steps) as f64 / steps as f64)
}

/// How much coordinate `i` takes of row `row` of the table.
fn share(i: usize, row: usize, side: usize, table_side: usize) -> f64 {
    let (low, high, of_high) = between(i, side, table_side);
    let take = |at: usize, part: f64| if at == row { part } else { 0.0 };
    take(low, 1.0 - of_high) + take(high, of_high)
}

fn check(op: &str, side: usize, table_side: usize, hidden: usize) -> Result<(), DeviceError> {
    check_multiple(op, "hidden", hidden, VECTOR)?;
    if side == 0 || !side.is_multiple_of(2) || table_side == 0 {
        return Err(DeviceError::Invalid(format!(
            "{op}: images of {side} x {side} patches and a table of {table_side} x {table_side}: the first must be even, none 0"
        )));
    }
    int_param(op, "patches of an image times rows of the table", side * table_side * table_side)?;
    Ok(())
}

fn threads(hidden: usize) -> u32 {
    (hidden / VECTOR).next_multiple_of(32).min(MAX_THREADS) as u32
}

impl PatchPositionFwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        check(self.name(), self.side, self.table_side, self.hidden)?;
        let (x, bias, table, y) = (args.input(0)?, args.input(1)?, args.input(2)?, args.output(3)?);
        let (h, n, s) = (self.hidden, self.side, self.table_side);
        y.par_chunks_mut(h).enumerate().for_each(|(row, y)| {
            let (r, c) = patch(row % (n * n), n);
            let ((r0, r1, dr), (c0, c1, dc)) = (between(r, n, s), between(c, n, s));
            let corners = [(r0, c0, (1.0 - dr) * (1.0 - dc)), (r0, c1, (1.0 - dr) * dc)];
            let corners = corners.into_iter().chain([(r1, c0, dr * (1.0 - dc)), (r1, c1, dr * dc)]);
            let corners: Vec<(usize, T)> = corners.map(|(r, c, w)| ((r * s + c) * h, T::of(w))).collect();
            for (i, y) in y.iter_mut().enumerate() {
                let position: T = corners.iter().map(|(at, w)| *w * table[at + i]).sum();
                *y = (x[row * h + i] + bias[i] + position).bf16();
            }
        });
        Ok(())
    }
}

impl PatchPositionBwd {
    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        check(self.name(), self.side, self.table_side, self.hidden)?;
        let (dy, dtable) = (args.input(0)?, args.output(1)?);
        let (h, n, s) = (self.hidden, self.side, self.table_side);
        let all = self.images * n * n;
        dtable.par_chunks_mut(h).enumerate().for_each(|(at, out)| {
            let mut sums = vec![0.0; h];
            for row in 0..all {
                let (r, c) = patch(row % (n * n), n);
                let weight = share(r, at / s, n, s) * share(c, at % s, n, s);
                if weight != 0.0 {
                    sums.iter_mut().zip(&dy[row * h..]).for_each(|(sum, d)| *sum += weight * d.f64());
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                let total = if self.accumulate { *out + T::of(sum) } else { T::of(sum) };
                *out = if self.out == DType::Bf16 { total.bf16() } else { total.f32() };
            }
        });
        Ok(())
    }
}

impl Op for PatchPositionFwd {
    fn name(&self) -> &'static str {
        "patch_position_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let rows = [self.images * self.side * self.side, self.hidden];
        vec![
            ArgSpec::read("x", DType::Bf16, &rows),
            ArgSpec::read("bias", DType::Bf16, &[self.hidden]),
            ArgSpec::read("table", DType::Bf16, &[self.table_side * self.table_side, self.hidden]),
            ArgSpec::write("y", DType::Bf16, &rows),
        ]
    }
    /// Four products with their sums, and two more sums.
    fn flops(&self) -> f64 {
        10.0 * (self.images * self.side * self.side * self.hidden) as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 6, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        check(self.name(), self.side, self.table_side, self.hidden)?;
        let rows = self.images * self.side * self.side;
        if rows == 0 {
            return Ok(Issue::Nothing);
        }
        int_param(self.name(), "patches", rows)?;
        let kernel = cuda.kernel(SOURCE, "patch_position_fwd", &[], 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        params.extend([self.side, self.table_side, self.hidden].map(|n| Param::I32(n as i32)));
        cuda.launch(&kernel, Config::linear(rows, threads(self.hidden)), &params)
    }
}

impl Op for PatchPositionBwd {
    fn name(&self) -> &'static str {
        "patch_position_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let rows = [self.images * self.side * self.side, self.hidden];
        let table = [self.table_side * self.table_side, self.hidden];
        vec![
            ArgSpec::read("dy", DType::Bf16, &rows),
            if self.accumulate {
                ArgSpec::update("dtable", self.out, &table)
            } else {
                ArgSpec::write("dtable", self.out, &table)
            },
        ]
    }
    /// Every patch is added to four rows.
    fn flops(&self) -> f64 {
        8.0 * (self.images * self.side * self.side * self.hidden) as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(self.out, self.images * 4, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        check(self.name(), self.side, self.table_side, self.hidden)?;
        int_param(self.name(), "patches", self.images * self.side * self.side)?;
        let defines = [
            ("OUT", float_name(self.name(), self.out)?),
            ("ACCUMULATE", usize::from(self.accumulate).to_string()),
        ];
        let kernel = cuda.kernel(SOURCE, "patch_position_bwd", &defines, 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        let numbers = [self.images, self.side, self.table_side, self.hidden];
        params.extend(numbers.map(|n| Param::I32(n as i32)));
        let blocks = self.table_side * self.table_side;
        cuda.launch(&kernel, Config::linear(blocks, threads(self.hidden)), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    #[test]
    fn backward_is_the_forwards_gradient() {
        // Fewer patches than the table has rows, as many, more, and one row of all.
        for (images, side, table_side) in [(2, 4, 7), (1, 6, 6), (2, 4, 3), (1, 2, 1)] {
            let fwd = PatchPositionFwd { images, side, table_side, hidden: 8 };
            let out = DType::F32;
            let bwd = PatchPositionBwd { images, side, table_side, hidden: 8, out, accumulate: false };
            let v = inputs(&fwd, 3);
            check_f32_against_f64(&fwd, &v);
            let dy = normals(images * side * side * 8, 9, 1.0);
            let dtable = run_f64(&bwd, &[dy.clone(), vec![]]).swap_remove(1);
            check_op_gradient(&fwd, &v, &[(3, &dy)], 2, &dtable);
            let old = normals(table_side * table_side * 8, 10, 1.0);
            let added = PatchPositionBwd { accumulate: true, ..bwd };
            let sum = run_f64(&added, &[dy, old.clone()]).swap_remove(1);
            let want: Vec<f64> = dtable.iter().zip(old).map(|(a, b)| a + b).collect();
            assert!(relative_error(&sum, &want) < 1e-12);
        }
    }

    #[test]
    fn corners_lie_on_corners() {
        assert_eq!(between(0, 16, 48), (0, 1, 0.0));
        assert_eq!(between(15, 16, 48), (47, 47, 0.0));
        let (low, high, part) = between(1, 16, 48);
        assert_eq!((low, high), (3, 4));
        assert!((part - (47.0 / 15.0 - 3.0)).abs() < 1e-12);
        let of = |i: usize| (0..48).map(|row| share(i, row, 16, 48)).sum::<f64>();
        assert!((0..16).all(|i| (of(i) - 1.0).abs() < 1e-12));
    }
}
