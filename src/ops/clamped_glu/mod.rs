//! The gated activation of gpt-oss: with x = min(gate, limit) and y = up clamped to [-limit, limit],
//! h = x * sigmoid(1.702 x) * (y + shift) (model card of gpt-oss, arXiv:2508.10925; Megatron-Core's names are
//! `quick_gelu`, `activation_func_clamp_value` and `glu_linear_offset`); and DeepSeek-V4's, with a factor of 1 in the sigmoid
//! in place of 1.702.
//!
//! The bias of the product before it is added here, so that it costs no pass over memory of its own: gate and up are
//! what the product gave, plus the bias, not rounded between. Routed rows are weighed with their probability and
//! padding rows written as zeros, as in `swiglu`.

#[cfg(test)]
mod tests;

use super::bias::experts_of_rows;
use super::owned_rows::{row_blocks, row_gradients, sample_bf16, sample_routed, used_rows};
use super::support::{VECTOR, sigmoid};
use super::{ArgSpec, CpuArgs, Op, Real, Sample, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

/// Factor in quick GELU's sigmoid (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016).
pub const QUICK_GELU: f64 = 1.702;
/// That of SiLU: DeepSeek-V4's clamped SwiGLU.
pub const SILU: f64 = 1.0;

/// Shapes and constants of both passes.
#[derive(Debug, Clone, PartialEq)]
pub struct GluShape {
    pub rows: usize,
    /// F, a multiple of 8.
    pub ffn: usize,
    /// Local experts; 0: rows are not routed.
    pub experts: usize,
    /// A bias is added to gate and up, one an expert.
    pub bias: bool,
    /// Bound of gate from above and of up from both sides; `None`: none.
    pub limit: Option<f64>,
    /// Added to up.
    pub shift: f64,
    /// Factor in the sigmoid: [`QUICK_GELU`] or [`SILU`].
    pub alpha: f64,
}

/// Args: gate_up R bf16 `[R,2F]` (gate, then up), [bias R bf16 `[max(experts,1),2F]` if `bias`], [probs R f32 `[R]`, offsets R
/// I32 [experts+1] when routed], h W bf16 `[R,F]`. Rows >= offsets`[experts]` give zeros.
#[derive(Debug, Clone, PartialEq)]
pub struct ClampedGluFwd {
    pub shape: GluShape,
}

/// Args: gate_up R, [bias R], dh R bf16 `[R,F]`, [probs R, offsets R], dgate_up W bf16 `[R,2F]`, [dprobs W f32 `[R]`]. Rows >=
/// offsets`[experts]` give zeros. The gradient of the bias is that of gate_up, summed over an expert's rows.
#[derive(Debug, Clone, PartialEq)]
pub struct ClampedGluBwd {
    pub shape: GluShape,
}

/// What both passes read beside the gradient.
struct Inputs<'a, T> {
    gate_up: &'a [T],
    bias: Option<&'a [T]>,
    probs: Option<&'a [T]>,
    /// Expert of every row that is used.
    of: Vec<usize>,
}

impl GluShape {
    fn routed(&self) -> bool {
        self.experts > 0
    }
    /// Index of the first argument after gate_up and bias.
    fn next(&self) -> usize {
        1 + usize::from(self.bias)
    }
    fn specs(&self, args: &mut Vec<ArgSpec>) {
        if self.routed() {
            args.push(ArgSpec::read("probs", DType::F32, &[self.rows]).sample(Sample::Custom));
            args.push(ArgSpec::read("offsets", DType::I32, &[self.experts + 1]).sample(Sample::Custom));
        }
    }
    fn gate_up_specs(&self) -> Vec<ArgSpec> {
        let wide = 2 * self.ffn;
        let mut args = vec![ArgSpec::read("gate_up", DType::Bf16, &[self.rows, wide]).sample(Sample::Custom)];
        if self.bias {
            args.push(ArgSpec::read("bias", DType::Bf16, &[self.experts.max(1), wide]));
        }
        args
    }
    /// `routing`: index of probs.
    fn inputs<'a, T: Real>(
        &self,
        args: &mut CpuArgs<'a, T>,
        routing: usize,
    ) -> Result<Inputs<'a, T>, DeviceError> {
        let (mut probs, mut of) = (None, vec![0; self.rows]);
        if self.routed() {
            probs = Some(args.input(routing)?);
            let offsets = args.ints(routing + 1)?;
            of = experts_of_rows(offsets, self.experts, self.rows);
            of.truncate(used_rows(offsets, self.experts, self.rows));
        }
        let bias = if self.bias { Some(args.input(1)?) } else { None };
        Ok(Inputs { gate_up: args.input(0)?, bias, probs, of })
    }
    fn limit(&self) -> f64 {
        self.limit.unwrap_or(f64::INFINITY)
    }
    fn clamp<T: Real>(&self, gate: T, up: T) -> (T, T) {
        let (low, high) = (T::of(-self.limit()), T::of(self.limit()));
        let least = |a: T, b: T| if a > b { b } else { a };
        (least(gate, high), least(up.max(low), high))
    }
    /// Structured values: gates and ups beyond the limit too.
    fn sample(&self, args: &[ArgSpec], seed: u64) -> Vec<Vec<f64>> {
        let (probs, offsets) = sample_routed(seed, self.rows, self.experts);
        let scale = self.limit.unwrap_or(1.0) / 2.0;
        let value = |(i, spec): (usize, &ArgSpec)| match spec.name {
            "gate_up" => {
                sample_bf16(seed, 3, spec.len()).iter().map(|x| f64::from((x * scale) as f32)).collect()
            }
            "probs" => probs.clone(),
            "offsets" => offsets.clone(),
            "bias" | "dh" => sample_bf16(seed, 4 + i as u32, spec.len()),
            _ => Vec::new(),
        };
        let mut values: Vec<Vec<f64>> = args.iter().enumerate().map(value).collect();
        values[0].iter_mut().for_each(|x| *x = f64::from((*x as f32).bf16()));
        values
    }
    fn defines(&self) -> Vec<(&'static str, String)> {
        let mut defines = vec![
            ("ROUTED", usize::from(self.routed()).to_string()),
            ("BIAS", usize::from(self.bias).to_string()),
            ("EXPERTS", self.experts.to_string()),
        ];
        if self.alpha != QUICK_GELU {
            defines.push(("ALPHA", format!("{:e}f", self.alpha as f32)));
        }
        defines
    }
    /// Every pointer of the kernel in order; those that the shape does not have are null.
    fn launch(
        &self,
        op: &str,
        entry: &'static str,
        cuda: &mut CudaPrep,
        pointers: &[DevPtr],
        whole_rows: bool,
    ) -> Result<Issue, DeviceError> {
        if self.rows == 0 {
            return Ok(Issue::Nothing);
        }
        check_multiple(op, "ffn", self.ffn, VECTOR)?;
        let (threads, column_blocks) = row_blocks(self.ffn);
        // A block that sums over its row takes the whole of it.
        let column_blocks = if whole_rows { 1 } else { column_blocks };
        let kernel = cuda.kernel(SOURCE, entry, &self.defines(), 0)?;
        let mut params: Vec<Param> = pointers.iter().map(|&p| p.into()).collect();
        params.push(int_param(op, "ffn", self.ffn)?.into());
        params.push(int_param(op, "column blocks", column_blocks)?.into());
        params.extend([self.limit(), self.shift].map(|x| Param::F32(x as f32)));
        let blocks = self.rows * column_blocks;
        int_param(op, "rows * column blocks", blocks)?;
        cuda.launch(&kernel, Config::linear(blocks, threads as u32), &params)
    }
}

impl<T: Real> Inputs<'_, T> {
    /// Gate and up of column `i` of `row`, with the bias.
    fn gate_up(&self, f: usize, row: usize, i: usize) -> (T, T) {
        let at = row * 2 * f + i;
        let (gate, up) = (self.gate_up[at], self.gate_up[at + f]);
        match self.bias {
            None => (gate, up),
            Some(bias) => {
                let at = self.of[row] * 2 * f + i;
                (gate + bias[at], up + bias[at + f])
            }
        }
    }
    fn prob(&self, row: usize) -> T {
        self.probs.map_or(T::of(1.0), |p| p[row])
    }
}

impl ClampedGluFwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (s, f) = (&self.shape, self.shape.ffn.max(1));
        let x = s.inputs(args, s.next())?;
        let h = args.output(s.next() + 2 * usize::from(s.routed()))?;
        h.par_chunks_mut(f).enumerate().for_each(|(row, h)| {
            if row >= x.of.len() {
                return h.fill(T::of(0.0));
            }
            for (i, h) in h.iter_mut().enumerate() {
                let (gate, up) = x.gate_up(f, row, i);
                let (gate, up) = s.clamp(gate, up);
                let act = gate * sigmoid(T::of(s.alpha) * gate);
                *h = (act * (up + T::of(s.shift)) * x.prob(row)).bf16();
            }
        });
        Ok(())
    }
}

impl ClampedGluBwd {
    /// Sums dprob in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (s, f) = (&self.shape, self.shape.ffn.max(1));
        let x = s.inputs(args, s.next() + 1)?;
        let dh = args.input(s.next())?;
        let out = s.next() + 1 + 2 * usize::from(s.routed());
        let dgate_up = args.output(out)?;
        let limit = s.limit();
        let row_gradient = |row: usize, out: &mut [T]| -> T {
            if row >= x.of.len() {
                out.fill(T::of(0.0));
                return T::of(0.0);
            }
            let (dgate, dup) = out.split_at_mut(f);
            let mut dprob = 0.0;
            for i in 0..f {
                let (gate, up) = x.gate_up(f, row, i);
                let (cut, y) = s.clamp(gate, up);
                let (sig, y, d) = (sigmoid(T::of(s.alpha) * cut), y + T::of(s.shift), dh[row * f + i]);
                let (act, q) = (cut * sig, d * x.prob(row));
                dprob += (d * act * y).f64();
                let slope = sig + T::of(s.alpha) * act * (T::of(1.0) - sig);
                let passes = |inside: bool, g: T| if inside { g.bf16() } else { T::of(0.0) };
                dgate[i] = passes(gate.f64() <= limit, q * y * slope);
                dup[i] = passes(up.f64().abs() <= limit, q * act);
            }
            T::of(dprob).f32()
        };
        let dprobs = if s.routed() { Some(args.output(out + 1)?) } else { None };
        row_gradients(dgate_up, 2 * f, dprobs, row_gradient);
        Ok(())
    }
}

const SOURCE: KernelSource = KernelSource {
    name: "clamped_glu/kernel.cu",
    text: concat!(include_str!("../bias/expert.cuh"), include_str!("kernel.cu")),
};
impl Op for ClampedGluFwd {
    fn name(&self) -> &'static str {
        "clamped_glu_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let mut args = s.gate_up_specs();
        s.specs(&mut args);
        args.push(ArgSpec::write("h", DType::Bf16, &[s.rows, s.ffn]));
        args
    }
    /// Three bounds, the sigmoid (five), shift and two products; biases (two) and the probability.
    fn flops(&self) -> f64 {
        let s = &self.shape;
        let each = 11.0 + 2.0 * f64::from(s.bias) + f64::from(s.routed());
        each * s.rows as f64 * s.ffn as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 1, 0)
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        Some(self.shape.sample(&self.args(), seed))
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let s = &self.shape;
        let null = DevPtr::default();
        let bias = if s.bias { args[1] } else { null };
        let [probs, offsets] = if s.routed() { [args[s.next()], args[s.next() + 1]] } else { [null; 2] };
        let pointers = [args[0], bias, probs, offsets, args[args.len() - 1]];
        s.launch(self.name(), "clamped_glu_fwd", cuda, &pointers, false)
    }
}

impl Op for ClampedGluBwd {
    fn name(&self) -> &'static str {
        "clamped_glu_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let mut args = s.gate_up_specs();
        args.push(ArgSpec::read("dh", DType::Bf16, &[s.rows, s.ffn]));
        s.specs(&mut args);
        args.push(ArgSpec::write("dgate_up", DType::Bf16, &[s.rows, 2 * s.ffn]));
        if s.routed() {
            args.push(ArgSpec::write("dprobs", DType::F32, &[s.rows]));
        }
        args
    }
    /// What the forward does but one product, the slope (four), dgate (two), dup; routed prob * dh and dprob (three) too.
    fn flops(&self) -> f64 {
        let s = &self.shape;
        let each = 17.0 + 2.0 * f64::from(s.bias) + 4.0 * f64::from(s.routed());
        each * s.rows as f64 * s.ffn as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        let f32_arg = self.args().get(arg).is_some_and(|a| a.dtype == DType::F32);
        if f32_arg { tolerance(DType::F32, self.shape.ffn, 0) } else { tolerance(DType::Bf16, 1, 0) }
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        Some(self.shape.sample(&self.args(), seed))
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let s = &self.shape;
        let null = DevPtr::default();
        let bias = if s.bias { args[1] } else { null };
        let dh = args[s.next()];
        let rest = &args[s.next() + 1..];
        let pointers = match *rest {
            [probs, offsets, dgate_up, dprobs] => [args[0], bias, dh, probs, offsets, dgate_up, dprobs],
            [dgate_up] => [args[0], bias, dh, null, null, dgate_up, null],
            _ => return Err(DeviceError::internal("clamped_glu_bwd: wrong number of arguments")),
        };
        // dprob is summed over a routed row.
        s.launch(self.name(), "clamped_glu_bwd", cuda, &pointers, s.routed())
    }
}
