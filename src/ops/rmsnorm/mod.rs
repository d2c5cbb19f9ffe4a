//! RMSNorm (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019) with a weight, and the column
//! sum that turns per-block partial sums into a weight gradient.

use super::{ArgSpec, CpuArgs, Op, Real, Sample, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

/// Partial sums at most: two blocks for each of the 132 multiprocessors of an H100 or H200. More would add
/// traffic (each writes `hidden` floats) and hide no more latency. Fixed, so that every device sums alike.
const MAX_PARTIALS: usize = 264;

/// Number of partial weight gradients for `tokens` rows. Partial p sums rows p, p + partials, ...
pub fn partials(tokens: usize) -> usize {
    tokens.clamp(1, MAX_PARTIALS)
}

/// y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps) per row.
/// Args: x R bf16 `[T,H]`, weight R bf16 `[H]`, y W bf16 `[T,H]`, rstd W f32 `[T]`.
#[derive(Debug, Clone, PartialEq)]
pub struct RmsNormFwd {
    pub tokens: usize,
    pub hidden: usize,
    pub eps: f64,
    /// `weight` is stored less one: w + 1 is used.
    pub zero_centered: bool,
}

/// With g = dy * weight and n = x * rstd: dx = rstd * (g - n * mean(g * n)) + dres, dw = sum of dy * n.
/// Args: x R bf16 `[T,H]`, weight R bf16 `[H]`, rstd R f32 `[T]`, dy R bf16 `[T,H]`, [dres R bf16 `[T,H]`],
/// dx W bf16 `[T,H]`, dw_partial W f32 [partials(T),H].
#[derive(Debug, Clone, PartialEq)]
pub struct RmsNormBwd {
    pub tokens: usize,
    pub hidden: usize,
    /// Adds `dres`, the gradient that reaches x around the norm.
    pub residual: bool,
    /// As in the forward.
    pub zero_centered: bool,
}

/// What is added to a stored scale.
pub fn scale_offset(zero_centered: bool) -> f64 {
    if zero_centered { 1.0 } else { 0.0 }
}

/// dw (+)= sums of columns `first..first + cols` of `partial`, in a fixed order. Args: partial R f32 `[rows,width]`,
/// dw U `out` `[cols]` (W unless `accumulate`).
#[derive(Debug, Clone, PartialEq)]
pub struct ColumnSum {
    pub rows: usize,
    /// Columns of `partial`.
    pub width: usize,
    /// First column that is summed.
    pub first: usize,
    pub cols: usize,
    /// Adds to `dw` (beta 1), or overwrites it.
    pub accumulate: bool,
    /// `Bf16` or `F32`.
    pub out: DType,
}

impl RmsNormFwd {
    /// Row sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (x, weight, y, rstd) = (args.input(0)?, args.input(1)?, args.output(2)?, args.output(3)?);
        let (h, one) = (self.hidden.max(1), T::of(scale_offset(self.zero_centered)));
        let rows = x.par_chunks(h).zip(y.par_chunks_mut(h)).zip(rstd);
        rows.for_each(|((x, y), rstd)| {
            let mean = x.iter().map(|v| v.f64() * v.f64()).sum::<f64>() / h as f64;
            let r = T::of(1.0 / (mean + self.eps).sqrt());
            *rstd = r.f32();
            for i in 0..h {
                y[i] = (x[i] * r * (weight[i] + one)).bf16();
            }
        });
        Ok(())
    }
}

impl RmsNormBwd {
    /// Row and column sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (x, weight, rstd, dy) = (args.input(0)?, args.input(1)?, args.input(2)?, args.input(3)?);
        let dres = if self.residual { Some(args.input(4)?) } else { None };
        let first_out = 4 + self.residual as usize;
        let (dx, dw_partial) = (args.output(first_out)?, args.output(first_out + 1)?);
        let (h, one) = (self.hidden.max(1), T::of(scale_offset(self.zero_centered)));
        dx.par_chunks_mut(h).enumerate().for_each(|(row, dx)| {
            let (x, dy, r) = (&x[row * h..][..h], &dy[row * h..][..h], rstd[row]);
            let dot: f64 = (0..h).map(|i| (dy[i] * (weight[i] + one) * x[i] * r).f64()).sum();
            let mean = T::of(dot / h as f64);
            for i in 0..h {
                let around = dres.map_or(T::of(0.0), |d| d[row * h + i]);
                dx[i] = (r * (dy[i] * (weight[i] + one) - x[i] * r * mean) + around).bf16();
            }
        });
        dw_partial.par_chunks_mut(h).enumerate().for_each(|(p, dw)| {
            let mut sum = vec![0.0; h];
            for row in (p..self.tokens).step_by(partials(self.tokens)) {
                for i in 0..h {
                    sum[i] += (dy[row * h + i] * x[row * h + i] * rstd[row]).f64();
                }
            }
            dw.iter_mut().zip(sum).for_each(|(dw, s)| *dw = T::of(s).f32());
        });
        Ok(())
    }
}

impl ColumnSum {
    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (partial, dw) = (args.input(0)?, args.output(1)?);
        let mut sum = vec![0.0; self.cols];
        for row in partial.chunks(self.width.max(1)) {
            sum.iter_mut().zip(&row[self.first..]).for_each(|(s, v)| *s += v.f64());
        }
        for (dw, s) in dw.iter_mut().zip(sum) {
            let total = if self.accumulate { *dw + T::of(s) } else { T::of(s) };
            *dw = if self.out == DType::Bf16 { total.bf16() } else { total.f32() };
        }
        Ok(())
    }
}

const SOURCE: KernelSource = KernelSource { name: "rmsnorm/kernel.cu", text: include_str!("kernel.cu") };
/// Elements of a 16-byte vector of bf16.
const VECTOR: usize = 8;
/// Longest row that the kernels keep in registers.
const MAX_HIDDEN: usize = 16_384;
/// Rows longer than a block of this size takes at `vectors_per_thread` give each thread more vectors.
const MAX_FWD_THREADS: usize = 512;
/// The backward needs under 64 registers at one vector a thread, so that a whole 1024-thread block fits.
const MAX_BWD_THREADS: usize = 1024;
/// Block of the backward when a row is too long for one vector a thread.
const LONG_ROW_BWD_THREADS: usize = 512;

/// (threads of a block, 16-byte vectors a thread) for one row a block.
fn fwd_block(hidden: usize) -> (usize, usize) {
    let vectors = hidden / VECTOR;
    let threads = vectors.div_ceil(2).next_multiple_of(32).min(MAX_FWD_THREADS);
    (threads, vectors.div_ceil(threads))
}

fn bwd_block(hidden: usize) -> (usize, usize) {
    let vectors = hidden / VECTOR;
    if vectors <= MAX_BWD_THREADS {
        return (vectors.next_multiple_of(32), 1);
    }
    (LONG_ROW_BWD_THREADS, vectors.div_ceil(LONG_ROW_BWD_THREADS))
}

fn check_hidden(op: &str, hidden: usize) -> Result<(), DeviceError> {
    check_multiple(op, "hidden", hidden, VECTOR)?;
    if hidden > MAX_HIDDEN {
        return Err(DeviceError::Invalid(format!(
            "{op}: hidden is {hidden}, the kernel keeps rows of at most {MAX_HIDDEN} in registers"
        )));
    }
    Ok(())
}

fn defines((threads, vectors): (usize, usize), zero_centered: bool) -> Vec<(&'static str, String)> {
    let mut out = vec![("THREADS", threads.to_string()), ("VECS", vectors.to_string())];
    if zero_centered {
        out.push(("ZERO_CENTERED", "1".into()));
    }
    out
}

impl Op for RmsNormFwd {
    fn name(&self) -> &'static str {
        "rmsnorm_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("x", DType::Bf16, &[self.tokens, self.hidden]),
            ArgSpec::read("weight", DType::Bf16, &[self.hidden]),
            ArgSpec::write("y", DType::Bf16, &[self.tokens, self.hidden]),
            ArgSpec::write("rstd", DType::F32, &[self.tokens]),
        ]
    }
    /// Square and add, two products.
    fn flops(&self) -> f64 {
        4.0 * self.tokens as f64 * self.hidden as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        tolerance(if arg == 3 { DType::F32 } else { DType::Bf16 }, self.hidden, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        if self.tokens == 0 {
            return Ok(Issue::Nothing);
        }
        check_hidden(self.name(), self.hidden)?;
        int_param(self.name(), "tokens", self.tokens)?;
        let block = fwd_block(self.hidden);
        let kernel = cuda.kernel(SOURCE, "rmsnorm_fwd", &defines(block, self.zero_centered), 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        params.push(int_param(self.name(), "hidden", self.hidden)?.into());
        params.push((self.eps as f32).into());
        cuda.launch(&kernel, Config::linear(self.tokens, block.0 as u32), &params)
    }
}

impl Op for RmsNormBwd {
    fn name(&self) -> &'static str {
        "rmsnorm_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let rows = [self.tokens, self.hidden];
        let mut args = vec![
            ArgSpec::read("x", DType::Bf16, &rows),
            ArgSpec::read("weight", DType::Bf16, &[self.hidden]),
            // Any positive numbers do: the formula holds for a given rstd.
            ArgSpec::read("rstd", DType::F32, &[self.tokens]).sample(Sample::Uniform(0.5, 1.5)),
            ArgSpec::read("dy", DType::Bf16, &rows),
        ];
        if self.residual {
            args.push(ArgSpec::read("dres", DType::Bf16, &rows));
        }
        args.push(ArgSpec::write("dx", DType::Bf16, &rows));
        args.push(ArgSpec::write("dw_partial", DType::F32, &[partials(self.tokens), self.hidden]));
        args
    }
    /// g, n (one product each), the dot and dw (two each), dx (three), the residual.
    fn flops(&self) -> f64 {
        (9.0 + self.residual as usize as f64) * self.tokens as f64 * self.hidden as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        if arg == 4 + self.residual as usize {
            tolerance(DType::Bf16, self.hidden, 0)
        } else {
            tolerance(DType::F32, self.tokens.div_ceil(partials(self.tokens)), 0)
        }
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        check_hidden(self.name(), self.hidden)?;
        let block = bwd_block(self.hidden);
        let entry = if self.residual { "rmsnorm_bwd_residual" } else { "rmsnorm_bwd" };
        let kernel = cuda.kernel(SOURCE, entry, &defines(block, self.zero_centered), 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        params.push(int_param(self.name(), "tokens", self.tokens)?.into());
        params.push(int_param(self.name(), "hidden", self.hidden)?.into());
        cuda.launch(&kernel, Config::linear(partials(self.tokens), block.0 as u32), &params)
    }
}

/// Columns that one block of `column_sum` sums, and its threads.
const COLUMNS_PER_BLOCK: usize = 32;
const COLUMN_SUM_THREADS: u32 = 256;
/// Columns of one 16-byte access of fp32.
const COLUMNS_PER_THREAD: usize = 4;

impl Op for ColumnSum {
    fn name(&self) -> &'static str {
        "column_sum"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("partial", DType::F32, &[self.rows, self.width]),
            if self.accumulate {
                ArgSpec::update("dw", self.out, &[self.cols])
            } else {
                ArgSpec::write("dw", self.out, &[self.cols])
            },
        ]
    }
    fn flops(&self) -> f64 {
        self.rows as f64 * self.cols as f64
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
        if self.cols == 0 || (self.rows == 0 && self.accumulate) {
            return Ok(Issue::Nothing);
        }
        if self.rows == 0 {
            return Ok(Issue::Zero { dst: args[1], bytes: self.cols * self.out.size() });
        }
        check_multiple(self.name(), "cols", self.cols, COLUMNS_PER_THREAD)?;
        check_multiple(self.name(), "width", self.width, COLUMNS_PER_THREAD)?;
        let end = self.first + self.cols;
        if !self.first.is_multiple_of(COLUMNS_PER_THREAD) || end > self.width {
            return Err(DeviceError::Invalid(format!(
                "column_sum: columns {}..{end} of {} do not fit, the kernel needs a first column that is a \
                 multiple of {COLUMNS_PER_THREAD} and an end inside the row",
                self.first, self.width
            )));
        }
        let out = match self.out {
            DType::Bf16 => "bf16",
            DType::F32 => "float",
            other => {
                return Err(DeviceError::Invalid(format!(
                    "column_sum: the output dtype is {other:?}, bf16 and f32 are possible"
                )));
            }
        };
        let kernel = cuda.kernel(SOURCE, "column_sum", &[("OUT", out.to_string())], 0)?;
        let params = [
            args[0].into(),
            args[1].into(),
            int_param(self.name(), "rows", self.rows)?.into(),
            int_param(self.name(), "width", self.width)?.into(),
            int_param(self.name(), "first", self.first)?.into(),
            int_param(self.name(), "cols", self.cols)?.into(),
            i32::from(self.accumulate).into(),
        ];
        let blocks = self.cols.div_ceil(COLUMNS_PER_BLOCK);
        cuda.launch(&kernel, Config::linear(blocks, COLUMN_SUM_THREADS), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    fn column_sums(rows: &[f64], cols: usize) -> Vec<f64> {
        (0..cols).map(|c| rows.iter().skip(c).step_by(cols).sum()).collect()
    }

    #[test]
    fn rows_have_unit_mean_square_before_the_weight() {
        let op = RmsNormFwd { tokens: 3, hidden: 16, eps: 0.0, zero_centered: false };
        let mut v = inputs(&op, 2);
        v[1] = vec![1.0; 16];
        for row in run_f64(&op, &v)[2].chunks(16) {
            assert!((row.iter().map(|y| y * y).sum::<f64>() / 16.0 - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn backward_is_the_forwards_gradient() {
        for (tokens, hidden, residual, zero_centered) in
            [(1, 8, false, false), (7, 24, true, true), (300, 8, true, false)]
        {
            let fwd = RmsNormFwd { tokens, hidden, eps: 1e-5, zero_centered };
            let bwd = RmsNormBwd { tokens, hidden, residual, zero_centered };
            let v = inputs(&fwd, 5);
            check_f32_against_f64(&fwd, &v);
            let rstd = run_f64(&fwd, &v)[3].clone();
            let dy = normals(tokens * hidden, 21, 1.0);
            let dres = normals(tokens * hidden, 22, 1.0);
            let mut b = vec![v[0].clone(), v[1].clone(), rstd, dy.clone()];
            if residual {
                b.push(dres.clone());
            }
            b.extend([vec![], vec![]]);
            let after = run_f64(&bwd, &b);
            let (dx, partial) = (&after[after.len() - 2], &after[after.len() - 1]);
            // The residual branch adds x itself to the output, with gradient dres.
            let norm_dx: Vec<f64> =
                dx.iter().zip(&dres).map(|(d, r)| d - if residual { *r } else { 0.0 }).collect();
            check_op_gradient(&fwd, &v, &[(2, &dy)], 0, &norm_dx);
            check_op_gradient(&fwd, &v, &[(2, &dy)], 1, &column_sums(partial, hidden));
        }
    }

    #[test]
    fn a_zero_centered_weight_is_a_plain_one_less_one() {
        let plain = RmsNormFwd { tokens: 3, hidden: 16, eps: 1e-5, zero_centered: false };
        let mut v = inputs(&plain, 2);
        let y = run_f64(&plain, &v)[2].clone();
        v[1].iter_mut().for_each(|w| *w -= 1.0);
        let centered = run_f64(&RmsNormFwd { zero_centered: true, ..plain }, &v)[2].clone();
        assert!(relative_error(&centered, &y) < 1e-14);
    }

    #[test]
    fn f32_backward_is_within_tolerance() {
        for (tokens, hidden, residual) in [(7, 64, true), (600, 16, false)] {
            let bwd = RmsNormBwd { tokens, hidden, residual, zero_centered: residual };
            check_f32_against_f64(&bwd, &inputs(&bwd, 3));
        }
    }

    #[test]
    fn column_sum_adds_to_what_is_there() {
        for out in [DType::Bf16, DType::F32] {
            let op = ColumnSum { rows: 5, width: 12, first: 0, cols: 12, out, accumulate: true };
            let v = inputs(&op, 9);
            let want: Vec<f64> = column_sums(&v[0], 12).iter().zip(&v[1]).map(|(s, d)| s + d).collect();
            assert!(relative_error(&run_f64(&op, &v)[1], &want) < 1e-14);
            check_f32_against_f64(&op, &v);
        }
    }

    /// The k half of q and k weight gradients that lie side by side, overwritten and added.
    #[test]
    fn column_sum_takes_a_range_of_columns() {
        for accumulate in [false, true] {
            let op = ColumnSum { rows: 3, width: 16, first: 8, cols: 8, out: DType::F32, accumulate };
            let v = inputs(&op, 9);
            let old = |c: usize| if accumulate { v[1][c] } else { 0.0 };
            let sums = column_sums(&v[0], 16);
            let want: Vec<f64> = (0..8).map(|c| sums[8 + c] + old(c)).collect();
            assert!(relative_error(&run_f64(&op, &v)[1], &want) < 1e-14);
        }
    }

    #[test]
    fn column_ranges_are_checked_when_prepared() {
        let mut cuda = crate::device::cuda::prep::OfflinePrep::new("sm_90a").unwrap();
        for (first, cols, legal) in
            [(0, 16, true), (8, 8, true), (2, 8, false), (8, 12, false), (0, 6, false)]
        {
            let op = ColumnSum { rows: 3, width: 16, first, cols, out: DType::Bf16, accumulate: true };
            assert_eq!(cuda.prepare(&op).is_ok(), legal, "{op:?}: {:?}", cuda.prepare(&op));
        }
    }

    #[test]
    fn blocks_cover_every_row_length() {
        for hidden in (8..=MAX_HIDDEN).step_by(8) {
            for (threads, vectors) in [fwd_block(hidden), bwd_block(hidden)] {
                assert!(threads % 32 == 0 && threads <= 1024 && threads * vectors * VECTOR >= hidden);
                assert!(vectors <= 4, "hidden {hidden}: {vectors} vectors a thread would spill");
            }
        }
    }
}
