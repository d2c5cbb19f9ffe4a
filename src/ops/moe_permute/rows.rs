//! Row copies by index: tokens to expert rows, and the sum of a token's rows. Each is the other's transpose.

use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::ops::rng::philox;
use crate::ops::{ArgSpec, CpuArgs, Op, Real, Sample, tolerance};
use crate::program::DType;
use rayon::prelude::*;

const SOURCE: KernelSource = KernelSource { name: "moe_permute/rows.cu", text: include_str!("rows.cu") };

/// Rows move in 16-byte vectors of eight bf16.
const VECTOR: usize = 8;
/// Threads of a block; one warp a segment of a row.
const THREADS: u32 = 256;
/// Elements of a row that one warp moves: two vectors a lane, enough in flight with several warps a
/// multiprocessor and short enough to spread few rows over many.
const SEGMENT: usize = 512;

fn check(op: &str, rows: usize, hidden: usize) -> Result<(), DeviceError> {
    if hidden == 0 || !hidden.is_multiple_of(VECTOR) {
        return Err(DeviceError::Invalid(format!(
            "{op}: hidden size {hidden} is no multiple of {VECTOR}; choose one that is"
        )));
    }
    if rows.saturating_mul(hidden.div_ceil(SEGMENT)) > i32::MAX as usize {
        return Err(DeviceError::Invalid(format!(
            "{op}: {rows} rows of {hidden} exceed one launch; lower the micro-batch or the row bound"
        )));
    }
    Ok(())
}

fn config(rows: usize, hidden: usize) -> Config {
    let warps = rows * hidden.div_ceil(SEGMENT);
    Config::linear(warps.div_ceil(THREADS as usize / 32), THREADS)
}

fn flag(b: bool) -> String {
    (b as u32).to_string()
}

/// The row that index `i` names, if there is one among `rows`.
fn row_of(i: i32, rows: usize) -> Option<usize> {
    usize::try_from(i).ok().filter(|&r| r < rows)
}

/// `out[r] = x[src[r] / div]`, zeros where `src[r]` is negative. Args: `x` R bf16 `[in_rows,H]`, `src` R I32
/// `[rows]`, (`probs` R f32 `[in_rows*div]`), `out` W bf16 `[rows,H]`, (`row_probs` W f32 `[rows]` =
/// `probs[src]`, 0 for none).
#[derive(Debug, Clone, PartialEq)]
pub struct GatherRows {
    pub rows: usize,
    pub in_rows: usize,
    /// H, a multiple of 8.
    pub hidden: usize,
    /// Pairs a token (K): `src` holds t*K+k. 1: `src` holds rows.
    pub div: usize,
    pub probs: bool,
}

impl GatherRows {
    fn check(&self) -> Result<(), DeviceError> {
        check(self.name(), self.rows, self.hidden)?;
        if self.div == 0 || self.in_rows.saturating_mul(self.div) > i32::MAX as usize {
            return Err(DeviceError::Invalid(format!(
                "gather_rows: {} rows of {} choices each cannot be indexed by 32 bits; lower the micro-batch",
                self.in_rows, self.div
            )));
        }
        Ok(())
    }
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        self.check()?;
        let (hidden, pairs) = (self.hidden, self.in_rows * self.div);
        let (x, src) = (args.input(0)?, args.ints(1)?);
        let probs = if self.probs { Some(args.input(2)?) } else { None };
        let out = args.output(2 + self.probs as usize)?;
        out.par_chunks_mut(hidden).zip(src).for_each(|(out, &i)| match row_of(i, pairs) {
            Some(pair) => {
                let row = pair / self.div;
                out.copy_from_slice(&x[row * hidden..(row + 1) * hidden]);
            }
            None => out.fill(T::of(0.0)),
        });
        if let Some(probs) = probs {
            for (p, &i) in args.output(4)?.iter_mut().zip(src) {
                *p = row_of(i, pairs).map_or(T::of(0.0), |pair| probs[pair]);
            }
        }
        Ok(())
    }
}

impl Op for GatherRows {
    fn name(&self) -> &'static str {
        "gather_rows"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let mut args = vec![
            ArgSpec::read("x", DType::Bf16, &[self.in_rows, self.hidden]),
            ArgSpec::read("src", DType::I32, &[self.rows]).sample(Sample::Custom),
        ];
        if self.probs {
            args.push(ArgSpec::read("probs", DType::F32, &[self.in_rows * self.div]));
        }
        args.push(ArgSpec::write("out", DType::Bf16, &[self.rows, self.hidden]));
        if self.probs {
            args.push(ArgSpec::write("row_probs", DType::F32, &[self.rows]));
        }
        args
    }
    /// Copies: exact.
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    /// One row in five has no source.
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        let mut values = vec![Vec::new(); self.args().len()];
        values[1] = indices(self.rows, self.in_rows * self.div, seed);
        fill_normals(&self.args(), &mut values, seed);
        Some(values)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        self.check()?;
        if self.rows == 0 {
            return Ok(Issue::Nothing);
        }
        // One source holds both kernels; the constants of the other one stand at their least.
        let defines = [
            ("TOPK", "1".to_string()),
            ("PROBS", flag(self.probs)),
            ("RESIDUAL", flag(false)),
            ("SHARED", flag(false)),
        ];
        let kernel = cuda.kernel(SOURCE, "gather_rows", &defines, 0)?;
        let none = DevPtr(0);
        let (probs, out, row_probs) =
            if self.probs { (args[2], args[3], args[4]) } else { (none, args[2], none) };
        let params = [
            args[0].into(),
            args[1].into(),
            probs.into(),
            out.into(),
            row_probs.into(),
            Param::I32(self.rows as i32),
            Param::I32((self.in_rows * self.div) as i32),
            Param::I32(self.hidden as i32),
            Param::I32(self.div as i32),
        ];
        cuda.launch(&kernel, config(self.rows, self.hidden), &params)
    }
}

/// `out[t] = sum_k rows[dest[t*K+k]] (+ residual[t] + shared[t])`, summed in that order in fp32, rounded once.
/// Args: `rows` R bf16 `[R,H]`, `dest` R I32 `[T*K]` (-1: dropped), (`residual` R bf16 `[T,H]`), (`shared` R
/// bf16 `[T,H]`), (`drow_probs` R f32 `[R]`), `out` W bf16 `[T,H]`, (`dprobs` W f32 `[T,K]` =
/// `drow_probs[dest]`, 0 for dropped).
#[derive(Debug, Clone, PartialEq)]
pub struct CombineRows {
    pub tokens: usize,
    pub topk: usize,
    pub rows: usize,
    /// H, a multiple of 8.
    pub hidden: usize,
    pub residual: bool,
    pub shared: bool,
    pub dprobs: bool,
}

impl CombineRows {
    fn check(&self) -> Result<(), DeviceError> {
        check(self.name(), self.tokens, self.hidden)?;
        if self.topk == 0 || self.tokens.saturating_mul(self.topk).max(self.rows) > i32::MAX as usize {
            return Err(DeviceError::Invalid(format!(
                "combine_rows: {} tokens of {} choices and {} rows cannot be indexed by 32 bits; lower the micro-batch",
                self.tokens, self.topk, self.rows
            )));
        }
        Ok(())
    }
    /// Index of `out`.
    fn out_at(&self) -> usize {
        2 + self.residual as usize + self.shared as usize + self.dprobs as usize
    }
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        self.check()?;
        let hidden = self.hidden;
        let (rows, dest) = (args.input(0)?, args.ints(1)?);
        let added = (2..2 + self.residual as usize + self.shared as usize)
            .map(|i| args.input(i))
            .collect::<Result<Vec<_>, _>>()?;
        let out = args.output(self.out_at())?;
        out.par_chunks_mut(hidden).enumerate().for_each(|(t, out)| {
            out.fill(T::of(0.0));
            for &i in &dest[t * self.topk..(t + 1) * self.topk] {
                if let Some(r) = row_of(i, self.rows) {
                    out.iter_mut().zip(&rows[r * hidden..]).for_each(|(o, &x)| *o += x);
                }
            }
            for add in &added {
                out.iter_mut().zip(&add[t * hidden..]).for_each(|(o, &x)| *o += x);
            }
            out.iter_mut().for_each(|o| *o = o.bf16());
        });
        if self.dprobs {
            let from = args.input(self.out_at() - 1)?;
            for (d, &i) in args.output(self.out_at() + 1)?.iter_mut().zip(dest) {
                *d = row_of(i, self.rows).map_or(T::of(0.0), |r| from[r]);
            }
        }
        Ok(())
    }
}

impl Op for CombineRows {
    fn name(&self) -> &'static str {
        "combine_rows"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let out = [self.tokens, self.hidden];
        let mut args = vec![
            ArgSpec::read("rows", DType::Bf16, &[self.rows, self.hidden]),
            ArgSpec::read("dest", DType::I32, &[self.tokens * self.topk]).sample(Sample::Custom),
        ];
        if self.residual {
            args.push(ArgSpec::read("residual", DType::Bf16, &out));
        }
        if self.shared {
            args.push(ArgSpec::read("shared", DType::Bf16, &out));
        }
        if self.dprobs {
            args.push(ArgSpec::read("drow_probs", DType::F32, &[self.rows]));
        }
        args.push(ArgSpec::write("out", DType::Bf16, &out));
        if self.dprobs {
            args.push(ArgSpec::write("dprobs", DType::F32, &[self.tokens, self.topk]));
        }
        args
    }
    fn flops(&self) -> f64 {
        let terms = self.topk - 1 + self.residual as usize + self.shared as usize;
        self.tokens as f64 * self.hidden as f64 * terms as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        // `dprobs` is a copy.
        if arg == self.out_at() { tolerance(DType::Bf16, self.topk + 2, 0) } else { 0.0 }
    }
    /// One pair in five is dropped.
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        let mut values = vec![Vec::new(); self.args().len()];
        values[1] = indices(self.tokens * self.topk, self.rows, seed);
        fill_normals(&self.args(), &mut values, seed);
        Some(values)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        self.check()?;
        if self.tokens == 0 {
            return Ok(Issue::Nothing);
        }
        let defines = [
            ("TOPK", self.topk.to_string()),
            ("PROBS", flag(self.dprobs)),
            ("RESIDUAL", flag(self.residual)),
            ("SHARED", flag(self.shared)),
        ];
        let kernel = cuda.kernel(SOURCE, "combine_rows", &defines, 0)?;
        let out = self.out_at();
        let pick = |there: bool, i: usize| if there { args[i] } else { DevPtr(0) };
        let params = [
            args[0].into(),
            args[1].into(),
            pick(self.residual, 2).into(),
            pick(self.shared, 2 + self.residual as usize).into(),
            pick(self.dprobs, out - 1).into(),
            args[out].into(),
            pick(self.dprobs, out + 1).into(),
            Param::I32(self.tokens as i32),
            Param::I32(self.rows as i32),
            Param::I32(self.hidden as i32),
        ];
        cuda.launch(&kernel, config(self.tokens, self.hidden), &params)
    }
}

/// `len` indices below `below`, one in five -1.
fn indices(len: usize, below: usize, seed: u64) -> Vec<f64> {
    let draw = |i: usize| philox([i as u32, 7, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let index = |w: [u32; 4]| {
        if w[0].is_multiple_of(5) || below == 0 { -1.0 } else { (w[1] as usize % below) as f64 }
    };
    (0..len).map(|i| index(draw(i))).collect()
}

/// Normal values, representable in bf16, for every read argument that has none yet.
fn fill_normals(specs: &[ArgSpec], values: &mut [Vec<f64>], seed: u64) {
    use crate::ops::rng::normal_of;
    let key = [seed as u32, (seed >> 32) as u32];
    for (a, (spec, values)) in specs.iter().zip(values).enumerate() {
        if spec.access == crate::ops::Access::Read && values.is_empty() {
            let draw = |i: usize| normal_of(philox([i as u32, 8 + a as u32, 0, 0], key)).bf16() as f64;
            *values = (0..spec.len()).map(draw).collect();
        }
    }
}
