//! RMSNorm (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019) with a weight. The weight's gradient
//! comes whole from the backward's own launch, or as partial sums that [`ColumnSum`] adds up: [`gradient_is_whole`].

mod column_sum;

use super::{ArgSpec, CpuArgs, Op, Real, Sample, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
pub use column_sum::{ColumnSum, MAX_GRADIENTS, Partial};
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
/// dx W bf16 `[T,H]`, and by `grad` dw_partial W f32 [partials(T),H] or dw U `out` `[H]` (W unless `accumulate`).
#[derive(Debug, Clone, PartialEq)]
pub struct RmsNormBwd {
    pub tokens: usize,
    pub hidden: usize,
    /// Adds `dres`, the gradient that reaches x around the norm.
    pub residual: bool,
    /// As in the forward.
    pub zero_centered: bool,
    pub grad: WeightGrad,
}

/// How the backward hands out the gradient of the weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WeightGrad {
    /// A partial sum a block, for [`ColumnSum`].
    Partial,
    /// Summed over all rows, and added to what is there if `accumulate`. `out`: `Bf16` or `F32`.
    Whole { out: DType, accumulate: bool },
}

/// What a launch costs in a graph, about 2 us from the end of a kernel to the full rate of the next that waits for
/// it, as bytes that an H200 moves in that time (4.09 TB/s, results/h200/notes.md).
const LAUNCH_BYTES: usize = 8_000_000;
/// Rows that a thread of the blocks of columns may add up: eight loads of x and eight of dy, in two rounds of latency,
/// about as long as a block takes for its row. With more, these few blocks would still run when the rows are done.
const MAX_ROWS_PER_THREAD: usize = 8;

/// Whether [`WeightGrad::Whole`] is expected to be faster than partial sums and a [`ColumnSum`]. Its blocks of columns
/// read x and dy a second time (4 bytes an element, mostly from the second-level cache, since other blocks of the
/// launch read them too); partial sums are written and read (8 bytes an element of `partials(tokens)` rows) and take a
/// launch more. So it holds for few tokens, where launches count. A last block that adds up the partial sums would be
/// slower than either: one multiprocessor takes 40 us for 264 rows of 4096 (64 bytes a clock from the second-level cache).
pub fn gradient_is_whole(tokens: usize, hidden: usize) -> bool {
    let rows_at_once = (bwd_block(hidden).0 / STRIPE_LANES).max(1);
    tokens <= rows_at_once * MAX_ROWS_PER_THREAD
        && 4 * tokens * hidden <= 8 * partials(tokens) * hidden + LAUNCH_BYTES
}

/// What is added to a stored scale.
pub fn scale_offset(zero_centered: bool) -> f64 {
    if zero_centered { 1.0 } else { 0.0 }
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
        let (dx, dw) = (args.output(first_out)?, args.output(first_out + 1)?);
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
        // Adds rows `first`, `first + step`, ... of dy * n to `sum`, columns `at` onward.
        let add_rows = |sum: &mut [f64], at: usize, first: usize, step: usize| {
            for row in (first..self.tokens).step_by(step) {
                for (i, s) in sum.iter_mut().enumerate() {
                    let c = row * h + at + i;
                    *s += (dy[c] * x[c] * rstd[row]).f64();
                }
            }
        };
        match self.grad {
            WeightGrad::Partial => dw.par_chunks_mut(h).enumerate().for_each(|(p, dw)| {
                let mut sum = vec![0.0; h];
                add_rows(&mut sum, 0, p, partials(self.tokens));
                dw.iter_mut().zip(sum).for_each(|(dw, s)| *dw = T::of(s).f32());
            }),
            WeightGrad::Whole { out, accumulate } => {
                dw.par_chunks_mut(STRIPE).enumerate().for_each(|(stripe, dw)| {
                    let mut sum = [0.0; STRIPE];
                    add_rows(&mut sum[..dw.len()], stripe * STRIPE, 0, 1);
                    for (dw, s) in dw.iter_mut().zip(sum) {
                        let total = if accumulate { *dw + T::of(s) } else { T::of(s) };
                        *dw = if out == DType::Bf16 { total.bf16() } else { total.f32() };
                    }
                });
            }
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

/// Columns that a block sums where the gradient is whole, 64 bytes of a row of x, by this many lanes of 16 bytes.
const STRIPE: usize = 32;
const STRIPE_LANES: usize = STRIPE / VECTOR;

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

/// A gradient's type as the kernels name it.
fn grad_type(op: &str, out: DType) -> Result<&'static str, DeviceError> {
    match out {
        DType::Bf16 => Ok("bf16"),
        DType::F32 => Ok("float"),
        other => Err(DeviceError::Invalid(format!(
            "{op}: the output dtype is {other:?}, bf16 and f32 are possible"
        ))),
    }
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
        args.push(match self.grad {
            WeightGrad::Partial => {
                ArgSpec::write("dw_partial", DType::F32, &[partials(self.tokens), self.hidden])
            }
            WeightGrad::Whole { out, accumulate: true } => ArgSpec::update("dw", out, &[self.hidden]),
            WeightGrad::Whole { out, accumulate: false } => ArgSpec::write("dw", out, &[self.hidden]),
        });
        args
    }
    /// g, n (one product each), the dot and dw (two each), dx (three), the residual.
    fn flops(&self) -> f64 {
        (9.0 + self.residual as usize as f64) * self.tokens as f64 * self.hidden as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        if arg == 4 + self.residual as usize {
            return tolerance(DType::Bf16, self.hidden, 0);
        }
        match self.grad {
            WeightGrad::Partial => tolerance(DType::F32, self.tokens.div_ceil(partials(self.tokens)), 0),
            WeightGrad::Whole { out, .. } => tolerance(out, self.tokens, 0),
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
        let mut defines = defines(block, self.zero_centered);
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        let tokens = int_param(self.name(), "tokens", self.tokens)?;
        params.push(tokens.into());
        params.push(int_param(self.name(), "hidden", self.hidden)?.into());
        let (entry, blocks) = match self.grad {
            WeightGrad::Partial => {
                (["rmsnorm_bwd", "rmsnorm_bwd_residual"][self.residual as usize], partials(self.tokens))
            }
            WeightGrad::Whole { out, accumulate } => {
                defines.push(("GRAD", grad_type(self.name(), out)?.into()));
                params.push(i32::from(accumulate).into());
                let blocks = self.tokens + self.hidden.div_ceil(STRIPE);
                (["rmsnorm_bwd_whole", "rmsnorm_bwd_whole_residual"][self.residual as usize], blocks)
            }
        };
        let kernel = cuda.kernel(SOURCE, entry, &defines, 0)?;
        cuda.launch(&kernel, Config::linear(blocks, block.0 as u32), &params)
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
            let grad = WeightGrad::Partial;
            let bwd = RmsNormBwd { tokens, hidden, residual, zero_centered, grad };
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
            let dw = column_sums(partial, hidden);
            check_op_gradient(&fwd, &v, &[(2, &dy)], 1, &dw);

            // Whole in one launch: the same dx, and the gradient written or added.
            let old = normals(hidden, 23, 1.0);
            for accumulate in [false, true] {
                let grad = WeightGrad::Whole { out: DType::F32, accumulate };
                *b.last_mut().unwrap() = if accumulate { old.clone() } else { vec![] };
                let whole = run_f64(&RmsNormBwd { grad, ..bwd.clone() }, &b);
                assert_eq!(&whole[whole.len() - 2], dx);
                let want: Vec<f64> =
                    dw.iter().zip(&old).map(|(d, o)| d + if accumulate { *o } else { 0.0 }).collect();
                assert!(relative_error(&whole[whole.len() - 1], &want) < 1e-12);
            }
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
            for grad in [
                WeightGrad::Partial,
                WeightGrad::Whole { out: DType::F32, accumulate: false },
                WeightGrad::Whole { out: DType::Bf16, accumulate: true },
            ] {
                let bwd = RmsNormBwd { tokens, hidden, residual, zero_centered: residual, grad };
                check_f32_against_f64(&bwd, &inputs(&bwd, 3));
            }
        }
    }

    /// At the shapes of the targets: few tokens in one launch, and a launch of its own where reading x and dy twice
    /// costs more, or where too few blocks would do the sums.
    #[test]
    fn the_gradient_is_whole_where_tokens_are_few() {
        for (tokens, hidden, whole) in [
            (128, 4096, true),
            (512, 4096, true),
            (1016, 4096, true),
            (1024, 4096, false),
            (8192, 4096, false),
            (512, 2048, true),
            (4096, 2048, false),
            (512, 512, false),
            (64, 8, true),
            (65, 8, false),
            (0, 4096, true),
        ] {
            assert_eq!(gradient_is_whole(tokens, hidden), whole, "{tokens} x {hidden}");
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
