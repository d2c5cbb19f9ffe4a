//! Bias, RMSNorm over all heads together and rotary embedding of interleaved pairs, on the parts of a fused product: what
//! lies between the products and the attention of a diffusion transformer (Wan 2.1, 2025). Queries and keys are normed,
//! values only get their bias; pairs are elements 2i and 2i + 1 of a head and turn with the axes of a video.

#[cfg(test)]
mod tests;

use super::rmsnorm::partials;
use super::rope::{Axes, Positions};
use super::{ArgSpec, CpuArgs, Op, Real, Sample, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::ops::rope::scaling;
use crate::program::DType;
use rayon::prelude::*;

/// What the product's columns are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parts {
    /// Queries.
    Q,
    /// Keys, then values.
    Kv,
    /// Queries, keys, values.
    Qkv,
}

impl Parts {
    fn names(self) -> &'static [&'static str] {
        match self {
            Parts::Q => &["q"],
            Parts::Kv => &["k", "v"],
            Parts::Qkv => &["q", "k", "v"],
        }
    }
    fn gradients(self) -> &'static [&'static str] {
        match self {
            Parts::Q => &["dq"],
            Parts::Kv => &["dk", "dv"],
            Parts::Qkv => &["dq", "dk", "dv"],
        }
    }
    /// Parts of the product.
    pub fn count(self) -> usize {
        self.names().len()
    }
    /// Normed ones, which come first.
    pub fn normed(self) -> usize {
        if self == Parts::Qkv { 2 } else { 1 }
    }
}

/// Shape of both passes.
#[derive(Debug, Clone, PartialEq)]
pub struct WideShape {
    pub parts: Parts,
    /// Of the rows.
    pub positions: Positions,
    /// Columns of a part: all heads.
    pub width: usize,
    pub head_dim: usize,
    /// Axes and base of the rotary frequencies; `None`: nothing turns.
    pub rotary: Option<(Axes, f64)>,
    pub eps: f64,
}

/// Args: x R bf16 `[T,parts*W]`, bias R bf16 `[parts*W]`, a weight R bf16 `[W]` for each normed part, every part W bf16 `[T,W]`, rstd W
/// f32 `[T,normed]`.
#[derive(Debug, Clone, PartialEq)]
pub struct WideNormFwd {
    pub shape: WideShape,
}

/// Args: the gradient R bf16 `[T,W]` of every part, x R, bias R, weights R, rstd R as in the forward, dx W bf16 `[T,parts*W]`, partial
/// W f32 `[P, (normed+parts)*W]`: sums of the weights' gradients, then of the bias', over rows p, p + P, ... (P =
/// [`rmsnorm::partials`](super::rmsnorm::partials) of the rows).
#[derive(Debug, Clone, PartialEq)]
pub struct WideNormBwd {
    pub shape: WideShape,
}

const SOURCE: KernelSource = KernelSource { name: "wide_norm/kernel.cu", text: include_str!("kernel.cu") };
const VECTOR: usize = 8;
/// A thread holds one vector of a row.
const MAX_THREADS: usize = 1024;

impl WideShape {
    pub fn rows(&self) -> usize {
        self.positions.rows()
    }
    fn pairs(&self) -> usize {
        self.head_dim / 2
    }
    /// (cos, sin) of every pair of a head in row `row`.
    fn turns<T: Real>(&self, row: usize) -> Vec<(T, T)> {
        let Some((axes, base)) = self.rotary else { return vec![(T::of(1.0), T::of(0.0)); self.pairs()] };
        let position = self.positions.position(row);
        let angle =
            |(i, f): (usize, f64)| axes.coordinate(position, axes.of_pair(i, self.pairs())) as f64 * f;
        let angles = axes.frequencies(self.pairs(), base).into_iter().enumerate().map(angle);
        angles.map(|a| (T::of(a.cos()), T::of(a.sin()))).collect()
    }
    /// Turns every head's pairs; backward: back.
    fn rotate<T: Real>(&self, x: &mut [T], turns: &[(T, T)], back: bool) {
        for head in x.chunks_exact_mut(self.head_dim) {
            for (pair, (c, s)) in head.chunks_exact_mut(2).zip(turns) {
                let s = if back { -*s } else { *s };
                (pair[0], pair[1]) = (pair[0] * *c - pair[1] * s, pair[1] * *c + pair[0] * s);
            }
        }
    }
    fn check(&self, op: &str) -> Result<usize, DeviceError> {
        check_multiple(op, "width", self.width, VECTOR)?;
        check_multiple(op, "head_dim", self.head_dim, VECTOR)?;
        check_multiple(op, "width", self.width, self.head_dim)?;
        int_param(op, "rows", self.rows())?;
        let threads = (self.width / VECTOR).next_multiple_of(32);
        if threads <= MAX_THREADS {
            return Ok(threads);
        }
        Err(DeviceError::Invalid(format!(
            "{op}: rows of {} columns, the kernel holds at most {} of a block",
            self.width,
            MAX_THREADS * VECTOR
        )))
    }
    fn defines(&self, threads: usize) -> Vec<(&'static str, String)> {
        let mut out = vec![
            ("THREADS", threads.to_string()),
            ("HEAD_DIM", self.head_dim.to_string()),
            ("PARTS", self.parts.count().to_string()),
            ("NORMED", self.parts.normed().to_string()),
        ];
        if let Some((axes, base)) = self.rotary {
            out.extend(axes.defines(self.pairs()));
            out.push(("INV_FREQ", scaling::table(&axes.frequencies(self.pairs(), base))));
        }
        out
    }
    fn params(&self, op: &str) -> Result<Vec<Param>, DeviceError> {
        let [(start0, len0), (start1, _)] = self.positions.chunks;
        let ints = [
            ("rows", self.rows()),
            ("width", self.width),
            ("rows of a sequence", self.positions.seq),
            ("start of chunk 0", start0),
            ("length of chunk 0", len0),
            ("start of chunk 1", start1),
        ];
        ints.iter().map(|(what, n)| int_param(op, what, *n).map(Param::I32)).collect()
    }
    /// x, bias, weights.
    fn inputs(&self) -> Vec<ArgSpec> {
        const WEIGHTS: [&str; 2] = ["weight0", "weight1"];
        let wide = self.parts.count() * self.width;
        let mut args = vec![
            ArgSpec::read("x", DType::Bf16, &[self.rows(), wide]),
            ArgSpec::read("bias", DType::Bf16, &[wide]),
        ];
        args.extend(
            WEIGHTS[..self.parts.normed()].iter().map(|n| ArgSpec::read(n, DType::Bf16, &[self.width])),
        );
        args
    }
    fn rotary_flops(&self, normed: f64, plain: f64) -> f64 {
        let turning = if self.rotary.is_some() { 3.0 } else { 0.0 };
        let parts = self.parts.normed() as f64 * (normed + turning)
            + (self.parts.count() - self.parts.normed()) as f64 * plain;
        parts * (self.rows() * self.width) as f64
    }
    /// The kernel's pointers: for three parts, two weights and as many outputs whatever there is of them; what is not there
    /// repeats what is and is not touched.
    fn spread(&self, list: &[DevPtr], of: usize) -> Vec<DevPtr> {
        (0..of).map(|i| list.get(i).or(list.first()).copied().unwrap_or_default()).collect()
    }
}

impl WideNormFwd {
    /// Row sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let s = &self.shape;
        let (w, count, normed) = (s.width, s.parts.count(), s.parts.normed());
        let (x, bias) = (args.input(0)?, args.input(1)?);
        let weights: Vec<&[T]> = (0..normed).map(|i| args.input(2 + i)).collect::<Result<_, _>>()?;
        let mut rstd = vec![T::default(); s.rows() * normed];
        for part in 0..count {
            let out = args.output(2 + normed + part)?;
            let one = |row: usize, out: &mut [T]| -> T {
                let at = row * count * w + part * w;
                let mut v: Vec<T> = (0..w).map(|i| x[at + i] + bias[part * w + i]).collect();
                let mut r = T::of(1.0);
                if part < normed {
                    let mean = v.iter().map(|v| v.f64() * v.f64()).sum::<f64>() / w as f64;
                    r = T::of(1.0 / (mean + s.eps).sqrt());
                    v.iter_mut().zip(weights[part]).for_each(|(v, weight)| *v = *v * r * *weight);
                    s.rotate(&mut v, &s.turns(row), false);
                }
                out.iter_mut().zip(v).for_each(|(out, v)| *out = v.bf16());
                r.f32()
            };
            let rs: Vec<T> = out.par_chunks_mut(w).enumerate().map(|(row, out)| one(row, out)).collect();
            if part < normed {
                rs.into_iter().enumerate().for_each(|(row, r)| rstd[row * normed + part] = r);
            }
        }
        args.output(2 + normed + count)?.copy_from_slice(&rstd);
        Ok(())
    }
}

impl WideNormBwd {
    /// Row and column sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let s = &self.shape;
        let (w, count, normed) = (s.width, s.parts.count(), s.parts.normed());
        let gradients: Vec<&[T]> = (0..count).map(|i| args.input(i)).collect::<Result<_, _>>()?;
        let (x, bias) = (args.input(count)?, args.input(count + 1)?);
        let weights: Vec<&[T]> = (0..normed).map(|i| args.input(count + 2 + i)).collect::<Result<_, _>>()?;
        let first_out = count + 3 + normed;
        let rstd = args.input(first_out - 1)?;
        let (dx, partial) = (args.output(first_out)?, args.output(first_out + 1)?);
        // Writes a row's dx; returns its gradients of the weights, then of the bias.
        let one = |row: usize, dx: &mut [T]| -> Vec<f64> {
            let mut sums = vec![0.0; (normed + count) * w];
            let turns = s.turns(row);
            for part in 0..count {
                let mut g = gradients[part][row * w..][..w].to_vec();
                if part < normed {
                    s.rotate(&mut g, &turns, true);
                    let r = rstd[row * normed + part];
                    let n = |i: usize| (x[row * count * w + part * w + i] + bias[part * w + i]) * r;
                    let dot: f64 = (0..w).map(|i| (g[i] * weights[part][i] * n(i)).f64()).sum();
                    let mean = T::of(dot / w as f64);
                    for i in 0..w {
                        sums[part * w + i] = (g[i] * n(i)).f64();
                        g[i] = r * (g[i] * weights[part][i] - n(i) * mean);
                    }
                }
                for i in 0..w {
                    sums[(normed + part) * w + i] = g[i].f64();
                    dx[part * w + i] = g[i].bf16();
                }
            }
            sums
        };
        let rows: Vec<Vec<f64>> =
            dx.par_chunks_mut(count * w).enumerate().map(|(row, dx)| one(row, dx)).collect();
        let parts = partials(s.rows());
        for (p, out) in partial.chunks_mut((normed + count) * w).enumerate() {
            for (i, out) in out.iter_mut().enumerate() {
                *out = T::of(rows.iter().skip(p).step_by(parts).map(|r| r[i]).sum()).f32();
            }
        }
        Ok(())
    }
}

impl Op for WideNormFwd {
    fn name(&self) -> &'static str {
        "wide_norm_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let mut args = s.inputs();
        args.extend(s.parts.names().iter().map(|n| ArgSpec::write(n, DType::Bf16, &[s.rows(), s.width])));
        args.push(ArgSpec::write("rstd", DType::F32, &[s.rows(), s.parts.normed()]));
        args
    }
    /// Bias, square and sum, two products, and of a pair six.
    fn flops(&self) -> f64 {
        self.shape.rotary_flops(5.0, 1.0)
    }
    fn tolerance(&self, arg: usize) -> f64 {
        let dtype = if arg + 1 == self.args().len() { DType::F32 } else { DType::Bf16 };
        tolerance(dtype, self.shape.width, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let s = &self.shape;
        let threads = s.check(self.name())?;
        if s.rows() == 0 {
            return Ok(Issue::Nothing);
        }
        let (normed, count) = (s.parts.normed(), s.parts.count());
        let kernel = cuda.kernel(SOURCE, "wide_norm_fwd", &s.defines(threads), 0)?;
        let mut pointers = args[..2].to_vec();
        pointers.extend(s.spread(&args[2..2 + normed], 2));
        pointers.extend(s.spread(&args[2 + normed..2 + normed + count], 3));
        pointers.push(args[2 + normed + count]);
        let mut params: Vec<Param> = pointers.into_iter().map(Param::Ptr).collect();
        params.extend(s.params(self.name())?);
        params.push(Param::F32(s.eps as f32));
        let config = Config::linear(s.rows(), threads as u32);
        cuda.launch(&kernel, Config { grid: [config.grid[0], count as u32, 1], ..config }, &params)
    }
}

impl Op for WideNormBwd {
    fn name(&self) -> &'static str {
        "wide_norm_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let (normed, count) = (s.parts.normed(), s.parts.count());
        let gradient = |n: &&'static str| ArgSpec::read(n, DType::Bf16, &[s.rows(), s.width]);
        let mut args: Vec<ArgSpec> = s.parts.gradients().iter().map(gradient).collect();
        args.extend(s.inputs());
        // Any positive numbers do: the formula holds for a given rstd.
        args.push(ArgSpec::read("rstd", DType::F32, &[s.rows(), normed]).sample(Sample::Uniform(0.5, 1.5)));
        args.push(ArgSpec::write("dx", DType::Bf16, &[s.rows(), count * s.width]));
        let partial = [partials(s.rows()), (normed + count) * s.width];
        args.push(ArgSpec::write("partial", DType::F32, &partial));
        args
    }
    fn flops(&self) -> f64 {
        self.shape.rotary_flops(12.0, 1.0)
    }
    fn tolerance(&self, arg: usize) -> f64 {
        let s = &self.shape;
        if arg + 1 == self.args().len() {
            // Products with fast cosines and sines, as in `rope`, and row means over the width.
            let terms = s.rows().div_ceil(partials(s.rows()));
            return tolerance(DType::F32, terms + s.width + 64, 0);
        }
        tolerance(DType::Bf16, s.width, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let s = &self.shape;
        let threads = s.check(self.name())?;
        let (normed, count) = (s.parts.normed(), s.parts.count());
        let kernel = cuda.kernel(SOURCE, "wide_norm_bwd", &s.defines(threads), 0)?;
        let mut pointers = s.spread(&args[..count], 3);
        pointers.extend(&args[count..count + 2]);
        pointers.extend(s.spread(&args[count + 2..count + 2 + normed], 2));
        pointers.extend(&args[count + 2 + normed..]);
        let mut params: Vec<Param> = pointers.into_iter().map(Param::Ptr).collect();
        params.extend(s.params(self.name())?);
        let config = Config::linear(partials(s.rows()), threads as u32);
        cuda.launch(&kernel, Config { grid: [config.grid[0], count as u32, 1], ..config }, &params)
    }
}
