//! Heads of attention whose one key is its value too (DeepSeek-V4; Megatron-Core `deepseek_v4_hybrid_attention.py`): each query
//! head is divided by its root mean square, without a weight, and its last `rotary` elements are rotated; so are those of the
//! key, which all heads read as key and as value. The output's last elements are turned back at the query's position, so
//! that what a value brings depends on the distance alone.
//!
//! Rotation as in [`super::mla_rope`]: neighbours 2i and 2i + 1 turn together, the results lie at i and rotary / 2 + i, and
//! turning back puts them side by side again. Pure rotations: YaRN's amplitude is left out, as upstream does.

#[cfg(test)]
mod tests;

use super::rope::Positions;
use super::rope::scaling::{self, RopeScaling};
use super::{ArgSpec, CpuArgs, Op, Real, Sample, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

/// Sizes of one rank's heads. T = positions.rows().
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharedKvShape {
    pub positions: Positions,
    pub heads: usize,
    /// d: of a query head and of the key, a multiple of 8 up to 512 on the device.
    pub head_dim: usize,
    /// Rotated elements, the last ones: a power of two from 8 to 256 on the device.
    pub rotary: usize,
    /// Of the queries' norm.
    pub eps: f64,
    /// Frequencies are base^(-2i/rotary), scaled.
    pub base: f64,
    pub scaling: Option<RopeScaling>,
}

/// Args: q U bf16 `[T, heads*d]` (normed and rotated in place), kv R bf16 `[T,d]`, k W bf16 `[T,d]`, rstd W f32 `[T, heads]`.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedKvFwd {
    pub shape: SharedKvShape,
}

/// Gradient of [`SharedKvFwd`]. Args: q R bf16 `[T, heads*d]` (as the forward left it), rstd R f32 `[T, heads]`, dk R and dv R
/// bf16 `[T,d]` (of the key as key and as value), dq U bf16 `[T, heads*d]` (in place), dkv W bf16 `[T,d]`.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedKvBwd {
    pub shape: SharedKvShape,
}

/// Turns the last elements of every head back, or with `forth` as a query's. Args: x U bf16 `[T, heads*d]`. Each is the
/// other's gradient and inverse.
#[derive(Debug, Clone, PartialEq)]
pub struct TurnHeads {
    pub shape: SharedKvShape,
    pub forth: bool,
}

const SOURCE: KernelSource = KernelSource { name: "shared_kv/kernel.cu", text: include_str!("kernel.cu") };
/// As in kernel.cu; one block a token.
const THREADS: u32 = 256;
/// Widest head: a lane keeps two vectors of eight.
const MAX_HEAD_DIM: usize = 512;
const MAX_ROTARY: usize = 256;
/// Elements of one load.
const PIECE: usize = 8;

/// There are kernels for heads of this width with so many rotated elements.
pub fn has_kernels(head: usize, rotary: usize) -> bool {
    let turned = rotary.is_power_of_two() && (PIECE..=MAX_ROTARY).contains(&rotary);
    head.is_multiple_of(PIECE) && turned && rotary <= head && head <= MAX_HEAD_DIM
}

impl SharedKvShape {
    fn tokens(&self) -> usize {
        self.positions.rows()
    }
    fn q_shape(&self) -> [usize; 2] {
        [self.tokens(), self.heads * self.head_dim]
    }
    fn k_shape(&self) -> [usize; 2] {
        [self.tokens(), self.head_dim]
    }
    fn rstd_shape(&self) -> [usize; 2] {
        [self.tokens(), self.heads]
    }
    fn nope(&self) -> usize {
        self.head_dim - self.rotary
    }
    /// Six a rotated pair of so many heads a token.
    fn rotations(&self, heads: usize) -> f64 {
        (self.tokens() * heads * self.rotary / 2 * 6) as f64
    }
    /// (cos, sin) of every pair at the position of row `token`.
    fn turns<T: Real>(&self, token: usize) -> Vec<(T, T)> {
        let position = self.positions.position(token) as f64;
        scaling::frequencies(self.rotary, self.base, self.scaling)
            .iter()
            .map(|f| (T::of((position * f).cos()), T::of((position * f).sin())))
            .collect()
    }

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        entry: &'static str,
        args: &[DevPtr],
    ) -> Result<Issue, DeviceError> {
        if self.tokens() == 0 {
            return Ok(Issue::Nothing);
        }
        check_multiple(entry, "a head", self.head_dim, PIECE)?;
        let rotary = self.rotary;
        if !has_kernels(self.head_dim, rotary) {
            return Err(DeviceError::Invalid(format!(
                "{entry}: {rotary} of a head's {} elements are rotated; the kernel takes a power of two from 8 to \
                 {MAX_ROTARY} of at most {MAX_HEAD_DIM}; use --device cpu",
                self.head_dim
            )));
        }
        int_param(entry, "heads * width", self.heads * self.head_dim)?;
        let frequencies = scaling::frequencies(rotary, self.base, self.scaling);
        let defines = [
            ("HEAD_DIM", self.head_dim.to_string()),
            ("ROTARY", rotary.to_string()),
            ("INV_FREQ", scaling::table(&frequencies)),
        ];
        let kernel = cuda.kernel(SOURCE, entry, &defines, 0)?;
        let [(start0, len0), (start1, _)] = self.positions.chunks;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        for (what, n) in [
            ("heads", self.heads),
            ("seq", self.positions.seq),
            ("start of chunk 0", start0),
            ("length of chunk 0", len0),
            ("start of chunk 1", start1),
        ] {
            params.push(Param::I32(int_param(entry, what, n)?));
        }
        params.push(Param::F32(self.eps as f32));
        int_param(entry, "tokens", self.tokens())?;
        cuda.launch(&kernel, Config::linear(self.tokens(), THREADS), &params)
    }
}

/// Neighbours to halves, turned; `x` is rounded by the caller.
fn turn<T: Real>(x: &mut [T], turns: &[(T, T)]) {
    let old = x.to_vec();
    for (i, &(c, s)) in turns.iter().enumerate() {
        let (a, b) = (old[2 * i], old[2 * i + 1]);
        x[i] = a * c - b * s;
        x[turns.len() + i] = b * c + a * s;
    }
}

/// The transpose of [`turn`].
fn turn_back<T: Real>(x: &mut [T], turns: &[(T, T)]) {
    let old = x.to_vec();
    for (i, &(c, s)) in turns.iter().enumerate() {
        let (a, b) = (old[i], old[turns.len() + i]);
        x[2 * i] = a * c + b * s;
        x[2 * i + 1] = b * c - a * s;
    }
}

impl SharedKvFwd {
    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let s = &self.shape;
        let (q, kv) = (args.output(0)?, args.input(1)?);
        let (k, rstd) = (args.output(2)?, args.output(3)?);
        let (d, heads) = (s.head_dim, s.heads.max(1));
        let keys = k.par_chunks_mut(d).zip(rstd.par_chunks_mut(heads));
        q.par_chunks_mut(heads * d).zip(keys).enumerate().for_each(|(token, (q, (k, rstd)))| {
            let turns: Vec<(T, T)> = s.turns(token);
            for (q, rstd) in q.chunks_mut(d).zip(rstd) {
                let mean = q.iter().map(|v| (*v * *v).f64()).sum::<f64>() / d as f64;
                let r = T::of(1.0 / (mean + s.eps).sqrt()).f32();
                *rstd = r;
                q.iter_mut().for_each(|v| *v *= r);
                turn(&mut q[s.nope()..], &turns);
                q.iter_mut().for_each(|v| *v = v.bf16());
            }
            k.copy_from_slice(&kv[token * d..][..d]);
            turn(&mut k[s.nope()..], &turns);
            k.iter_mut().for_each(|v| *v = v.bf16());
        });
        Ok(())
    }
}

impl SharedKvBwd {
    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let s = &self.shape;
        let (q, rstd, dk, dv) = (args.input(0)?, args.input(1)?, args.input(2)?, args.input(3)?);
        let (dq, dkv) = (args.output(4)?, args.output(5)?);
        let (d, heads) = (s.head_dim, s.heads.max(1));
        let rows = dq.par_chunks_mut(heads * d).zip(dkv.par_chunks_mut(d)).enumerate();
        rows.for_each(|(token, (dq, dkv))| {
            let turns: Vec<(T, T)> = s.turns(token);
            for (h, dq) in dq.chunks_mut(d).enumerate() {
                let q = &q[(token * heads + h) * d..][..d];
                // The norm is that of the rotated head too.
                let mean = T::of(q.iter().zip(&*dq).map(|(a, b)| (*a * *b).f64()).sum::<f64>() / d as f64);
                let r = rstd[token * heads + h];
                dq.iter_mut().zip(q).for_each(|(g, q)| *g = r * (*g - *q * mean));
                turn_back(&mut dq[s.nope()..], &turns);
                dq.iter_mut().for_each(|v| *v = v.bf16());
            }
            for (c, g) in dkv.iter_mut().enumerate() {
                *g = dk[token * d + c] + dv[token * d + c];
            }
            turn_back(&mut dkv[s.nope()..], &turns);
            dkv.iter_mut().for_each(|v| *v = v.bf16());
        });
        Ok(())
    }
}

impl TurnHeads {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let s = &self.shape;
        let (x, d) = (args.output(0)?, s.head_dim);
        x.par_chunks_mut(s.heads.max(1) * d).enumerate().for_each(|(token, x)| {
            let turns: Vec<(T, T)> = s.turns(token);
            for head in x.chunks_mut(d) {
                let part = &mut head[s.nope()..];
                if self.forth {
                    turn(part, &turns)
                } else {
                    turn_back(part, &turns)
                }
                part.iter_mut().for_each(|v| *v = v.bf16());
            }
        });
        Ok(())
    }
}

impl Op for SharedKvFwd {
    fn name(&self) -> &'static str {
        "shared_kv_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        vec![
            ArgSpec::update("q", DType::Bf16, &s.q_shape()),
            ArgSpec::read("kv", DType::Bf16, &s.k_shape()),
            ArgSpec::write("k", DType::Bf16, &s.k_shape()),
            ArgSpec::write("rstd", DType::F32, &s.rstd_shape()),
        ]
    }
    /// Squares (two), the scale, and the rotations.
    fn flops(&self) -> f64 {
        let s = &self.shape;
        (3 * s.tokens() * s.heads * s.head_dim) as f64 + s.rotations(s.heads + 1)
    }
    fn tolerance(&self, arg: usize) -> f64 {
        tolerance(if arg == 3 { DType::F32 } else { DType::Bf16 }, self.shape.head_dim, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        self.shape.prepare(cuda, self.name(), args)
    }
}

impl Op for SharedKvBwd {
    fn name(&self) -> &'static str {
        "shared_kv_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        vec![
            // Any queries and scales do: the formula holds for given ones.
            ArgSpec::read("q", DType::Bf16, &s.q_shape()),
            ArgSpec::read("rstd", DType::F32, &s.rstd_shape()).sample(Sample::Uniform(0.5, 2.0)),
            ArgSpec::read("dk", DType::Bf16, &s.k_shape()),
            ArgSpec::read("dv", DType::Bf16, &s.k_shape()),
            ArgSpec::update("dq", DType::Bf16, &s.q_shape()),
            ArgSpec::write("dkv", DType::Bf16, &s.k_shape()),
        ]
    }
    /// The dot (two), the gradient (three), and the rotations.
    fn flops(&self) -> f64 {
        let s = &self.shape;
        (5 * s.tokens() * s.heads * s.head_dim) as f64 + s.rotations(s.heads + 1)
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, self.shape.head_dim, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        self.shape.prepare(cuda, self.name(), args)
    }
}

impl Op for TurnHeads {
    fn name(&self) -> &'static str {
        if self.forth { "turn_heads" } else { "turn_heads_back" }
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![ArgSpec::update("x", DType::Bf16, &self.shape.q_shape())]
    }
    fn flops(&self) -> f64 {
        self.shape.rotations(self.shape.heads)
    }
    /// Only the rotated part moves.
    fn bytes(&self) -> f64 {
        let s = &self.shape;
        (2 * s.tokens() * s.heads * s.rotary * DType::Bf16.size()) as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 2, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        self.shape.prepare(cuda, self.name(), args)
    }
}
