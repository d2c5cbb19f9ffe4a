//! Queries, keys and values of multi-latent attention from its up-projections (DeepSeek-V2, arXiv:2405.04434,
//! section 2.1.3): the last `rotary` elements of every query head and one key part that all heads share are
//! rotated, the other elements pass through.
//!
//! Neighbours 2i and 2i + 1 turn together; the results lie at i and rotary / 2 + i, as in Megatron-LM. Frequencies
//! are those of [`super::rope`], angles in f64 on both sides.

#[cfg(test)]
mod tests;

use super::rope::Positions;
use super::rope::scaling::{self, RopeScaling};
use super::{ArgSpec, CpuArgs, Op, Real, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

/// Sizes of one rank's heads. T = positions.rows().
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MlaShape {
    pub positions: Positions,
    pub heads: usize,
    /// Elements of a query and key head that are not rotated.
    pub nope: usize,
    /// Rotated elements: on the device a power of two from 8 to 256.
    pub rotary: usize,
    /// Elements of a value head.
    pub value: usize,
    /// Frequencies are base^(-2i/rotary), scaled.
    pub base: f64,
    pub scaling: Option<RopeScaling>,
}

/// Args: q U bf16 `[T, heads*(nope+rotary)]` (rotated in place), kv R bf16 `[T, heads*(nope+value)]` (of each head the
/// key, then the value), k_rope R bf16 `[T, rotary]`, k W bf16 `[T, heads*(nope+rotary)]`, v W bf16 `[T, heads*value]`.
#[derive(Debug, Clone, PartialEq)]
pub struct MlaRopeFwd {
    pub shape: MlaShape,
}

/// Gradient of [`MlaRopeFwd`]. Args: dq U bf16 `[T, heads*(nope+rotary)]` (rotated back in place), dk R bf16
/// `[T, heads*(nope+rotary)]`, dv R bf16 `[T, heads*value]`, dkv W bf16 `[T, heads*(nope+value)]`, dk_rope W bf16
/// `[T, rotary]` (summed over the heads in fp32).
#[derive(Debug, Clone, PartialEq)]
pub struct MlaRopeBwd {
    pub shape: MlaShape,
}

const SOURCE: KernelSource = KernelSource { name: "mla_rope/kernel.cu", text: include_str!("kernel.cu") };
/// Threads of a block, as in kernel.cu; one block a token.
const THREADS: u32 = 256;
/// Widest rotated part: its eighths lie in one warp.
const MAX_ROTARY: usize = 256;

/// Elements of one load: unrotated parts and values are moved in such pieces.
const PIECE: usize = 8;

/// There are kernels for heads with so many unrotated, rotated and value elements.
pub fn has_kernels(nope: usize, rotary: usize, value: usize) -> bool {
    nope.is_multiple_of(PIECE) && value.is_multiple_of(PIECE) && can_turn(rotary)
}

fn can_turn(rotary: usize) -> bool {
    rotary.is_power_of_two() && (PIECE..=MAX_ROTARY).contains(&rotary)
}

impl MlaShape {
    fn tokens(&self) -> usize {
        self.positions.rows()
    }
    fn qk(&self) -> usize {
        self.nope + self.rotary
    }
    fn kv(&self) -> usize {
        self.nope + self.value
    }
    fn q_shape(&self) -> [usize; 2] {
        [self.tokens(), self.heads * self.qk()]
    }
    fn kv_shape(&self) -> [usize; 2] {
        [self.tokens(), self.heads * self.kv()]
    }
    fn v_shape(&self) -> [usize; 2] {
        [self.tokens(), self.heads * self.value]
    }
    fn rope_shape(&self) -> [usize; 2] {
        [self.tokens(), self.rotary]
    }
    /// Six a rotated pair, of every query head and of the key.
    fn flops(&self) -> f64 {
        (self.tokens() * (self.heads + 1) * self.rotary / 2 * 6) as f64
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
        check_multiple(entry, "the unrotated part of a head", self.nope, PIECE)?;
        check_multiple(entry, "a value head", self.value, PIECE)?;
        if !can_turn(self.rotary) {
            return Err(DeviceError::Invalid(format!(
                "{entry}: {} elements of a head are rotated, the kernel takes a power of two from 8 to \
                 {MAX_ROTARY}; use --device cpu",
                self.rotary
            )));
        }
        int_param(entry, "heads * width", self.heads * (self.qk() + self.kv()))?;
        let frequencies = scaling::frequencies(self.rotary, self.base, self.scaling);
        let defines = [
            ("NOPE", self.nope.to_string()),
            ("ROTARY", self.rotary.to_string()),
            ("VALUE", self.value.to_string()),
            ("INV_FREQ", scaling::table(&frequencies)),
            ("AMPLITUDE", format!("{:e}f", scaling::amplitude(self.scaling) as f32)),
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
        int_param(entry, "tokens", self.tokens())?;
        cuda.launch(&kernel, Config::linear(self.tokens(), THREADS), &params)
    }

    /// (cos, sin) times the amplitude of every pair at the position of row `token`.
    fn turns<T: Real>(&self, token: usize) -> Vec<(T, T)> {
        let position = self.positions.position(token) as f64;
        let amplitude = scaling::amplitude(self.scaling);
        scaling::frequencies(self.rotary, self.base, self.scaling)
            .iter()
            .map(|f| (amplitude * (position * f).cos(), amplitude * (position * f).sin()))
            .map(|(c, s)| (T::of(c), T::of(s)))
            .collect()
    }
}

/// Neighbours to halves, turned.
fn turn<T: Real>(x: &mut [T], turns: &[(T, T)]) {
    let old = x.to_vec();
    for (i, &(c, s)) in turns.iter().enumerate() {
        let (a, b) = (old[2 * i], old[2 * i + 1]);
        x[i] = (a * c - b * s).bf16();
        x[turns.len() + i] = (b * c + a * s).bf16();
    }
}

/// The transpose of [`turn`].
fn turn_back<T: Real>(x: &mut [T], turns: &[(T, T)]) {
    let old = x.to_vec();
    for (i, &(c, s)) in turns.iter().enumerate() {
        let (a, b) = (old[i], old[turns.len() + i]);
        x[2 * i] = (a * c + b * s).bf16();
        x[2 * i + 1] = (b * c - a * s).bf16();
    }
}

impl MlaRopeFwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let s = &self.shape;
        let (q, kv, k_rope) = (args.output(0)?, args.input(1)?, args.input(2)?);
        let (k, v) = (args.output(3)?, args.output(4)?);
        let (qk, both) = (s.qk(), s.kv());
        let kv_rows = k.par_chunks_mut(s.heads * qk).zip(v.par_chunks_mut(s.heads * s.value));
        let rows = q.par_chunks_mut(s.heads * qk).zip(kv_rows).enumerate();
        rows.for_each(|(token, (q, (k, v)))| {
            let turns: Vec<(T, T)> = s.turns(token);
            let mut shared = k_rope[token * s.rotary..][..s.rotary].to_vec();
            turn(&mut shared, &turns);
            for h in 0..s.heads {
                turn(&mut q[h * qk + s.nope..][..s.rotary], &turns);
                let from = &kv[(token * s.heads + h) * both..][..both];
                k[h * qk..][..s.nope].copy_from_slice(&from[..s.nope]);
                k[h * qk + s.nope..][..s.rotary].copy_from_slice(&shared);
                v[h * s.value..][..s.value].copy_from_slice(&from[s.nope..]);
            }
        });
        Ok(())
    }
}

impl MlaRopeBwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let s = &self.shape;
        let (dq, dk, dv) = (args.output(0)?, args.input(1)?, args.input(2)?);
        let (dkv, dk_rope) = (args.output(3)?, args.output(4)?);
        let (qk, both) = (s.qk(), s.kv());
        let kv_rows = dkv.par_chunks_mut(s.heads * both).zip(dk_rope.par_chunks_mut(s.rotary));
        let rows = dq.par_chunks_mut(s.heads * qk).zip(kv_rows).enumerate();
        rows.for_each(|(token, (dq, (dkv, dk_rope)))| {
            let turns: Vec<(T, T)> = s.turns(token);
            dk_rope.fill(T::of(0.0));
            for h in 0..s.heads {
                turn_back(&mut dq[h * qk + s.nope..][..s.rotary], &turns);
                let dk = &dk[(token * s.heads + h) * qk..][..qk];
                let dv = &dv[(token * s.heads + h) * s.value..][..s.value];
                dkv[h * both..][..s.nope].copy_from_slice(&dk[..s.nope]);
                dkv[h * both + s.nope..][..s.value].copy_from_slice(dv);
                dk_rope.iter_mut().zip(&dk[s.nope..]).for_each(|(sum, x)| *sum += *x);
            }
            turn_back(dk_rope, &turns);
        });
        Ok(())
    }
}

impl Op for MlaRopeFwd {
    fn name(&self) -> &'static str {
        "mla_rope_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        vec![
            ArgSpec::update("q", DType::Bf16, &s.q_shape()),
            ArgSpec::read("kv", DType::Bf16, &s.kv_shape()),
            ArgSpec::read("k_rope", DType::Bf16, &s.rope_shape()),
            ArgSpec::write("k", DType::Bf16, &s.q_shape()),
            ArgSpec::write("v", DType::Bf16, &s.v_shape()),
        ]
    }
    fn flops(&self) -> f64 {
        self.shape.flops()
    }
    /// Of q only the rotated part moves.
    fn bytes(&self) -> f64 {
        let s = &self.shape;
        let moved = 2 * s.heads * s.rotary + 2 * s.heads * s.kv() + (s.heads + 1) * s.rotary;
        (s.tokens() * moved * DType::Bf16.size()) as f64
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

impl Op for MlaRopeBwd {
    fn name(&self) -> &'static str {
        "mla_rope_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        vec![
            ArgSpec::update("dq", DType::Bf16, &s.q_shape()),
            ArgSpec::read("dk", DType::Bf16, &s.q_shape()),
            ArgSpec::read("dv", DType::Bf16, &s.v_shape()),
            ArgSpec::write("dkv", DType::Bf16, &s.kv_shape()),
            ArgSpec::write("dk_rope", DType::Bf16, &s.rope_shape()),
        ]
    }
    /// The rotations, and the sum over the heads.
    fn flops(&self) -> f64 {
        let s = &self.shape;
        s.flops() + (s.tokens() * s.heads * s.rotary) as f64
    }
    fn bytes(&self) -> f64 {
        MlaRopeFwd { shape: self.shape }.bytes()
    }
    fn tolerance(&self, arg: usize) -> f64 {
        tolerance(DType::Bf16, if arg == 4 { 2 * self.shape.heads } else { 2 }, 0)
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
