//! QKV split, optional RMSNorm of each q and k head, and rotary embedding (Su et al., "RoFormer", 2021) in
//! rotate-half form: element i of the rotated part is paired with i + rotary_dim / 2.
//!
//! Angles are position * inverse frequency in f64 on both sides, from the same table of f64 frequencies that
//! the host computes, so that they agree at any position; a model that rounds its frequencies to fp32 turns
//! by up to position * 2^-24 radians less or more.

pub mod axes;
mod positions;
mod reference;
pub mod scaling;
#[cfg(test)]
mod tests;

use super::rmsnorm::partials;
use super::{ArgSpec, CpuArgs, Op, Sample, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
pub use axes::Axes;
pub use positions::Positions;
pub use scaling::RopeScaling;

/// q, k, v from qkv: per-head RMSNorm of q and k if `qk_norm`, then rotary on the first `rotary_dim` elements.
///
/// T = positions.rows(), d = head_dim. Args: qkv R bf16 [T,(q_heads+2*kv_heads)*d] (q heads, then k, then v), (bias R bf16
/// [(q_heads+2*kv_heads)*d] if `bias`: added to every row first, not rounded between), [q_weight R bf16 `[d]`, k_weight R bf16 `[d]`], q W bf16 `[T,q_heads*d]`, k W `[T,kv_heads*d]`, v W
/// `[T,kv_heads*d]`, [rstd W f32 [T,q_heads+kv_heads]]; those in brackets when `qk_norm`.
#[derive(Debug, Clone, PartialEq)]
pub struct QkvRopeFwd {
    pub positions: Positions,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Rotated elements of each head, even, at most `head_dim`.
    pub rotary_dim: usize,
    /// Frequencies are base^(-2i/rotary_dim).
    pub base: f64,
    /// Epsilon of the per-head RMSNorm; `None`: no norm.
    pub qk_norm: Option<f64>,
    pub scaling: Option<RopeScaling>,
    /// Several coordinates a position; not with `scaling`.
    pub axes: Option<Axes>,
    /// The norms' weights are stored less one.
    pub zero_centered: bool,
    /// Rows of qkv end in `q_heads` more heads, the output gate's: skipped, and in the backward copied from `dgate`.
    pub gated: bool,
    /// The product's bias is added here; not with `qk_norm` or `gated`, where qkv is read again.
    pub bias: bool,
}

/// Gradient of [`QkvRopeFwd`], with the same fields.
///
/// Args: dq R bf16 `[T,q_heads*d]`, dk R, dv R `[T,kv_heads*d]`, [dgate R `[T,q_heads*d]` when `gated`], [qkv R, q_weight R, k_weight R, rstd R as in the
/// forward], dqkv W bf16 [T,(q_heads+2*kv_heads)*d], [dw_partial W f32 [rmsnorm::partials(T), 2*d]: of the q
/// weight, then of the k weight; partial p sums tokens p, p + partials, ...].
#[derive(Debug, Clone, PartialEq)]
pub struct QkvRopeBwd {
    pub positions: Positions,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub rotary_dim: usize,
    pub base: f64,
    pub qk_norm: Option<f64>,
    pub scaling: Option<RopeScaling>,
    pub axes: Option<Axes>,
    pub zero_centered: bool,
    pub gated: bool,
}

impl QkvRopeBwd {
    /// The gradient of a forward op.
    pub fn of(f: &QkvRopeFwd) -> Self {
        Self {
            positions: f.positions,
            q_heads: f.q_heads,
            kv_heads: f.kv_heads,
            head_dim: f.head_dim,
            rotary_dim: f.rotary_dim,
            base: f.base,
            qk_norm: f.qk_norm,
            scaling: f.scaling,
            axes: f.axes,
            zero_centered: f.zero_centered,
            gated: f.gated,
        }
    }
    /// The forward op of the same shape, without a bias, which no gradient of qkv depends on.
    pub fn forward(&self) -> QkvRopeFwd {
        QkvRopeFwd {
            positions: self.positions,
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            rotary_dim: self.rotary_dim,
            base: self.base,
            qk_norm: self.qk_norm,
            scaling: self.scaling,
            axes: self.axes,
            zero_centered: self.zero_centered,
            gated: self.gated,
            bias: false,
        }
    }
}

const SOURCE: KernelSource = KernelSource { name: "rope/kernel.cu", text: include_str!("kernel.cu") };
/// Warps of a block, as in kernel.cu.
const FWD_WARPS: usize = 4;
const BWD_WARPS: usize = 8;
/// Warps that keep an H200 busy (132 multiprocessors, 32 warps each): with fewer tokens than that, several
/// warps share a token.
const BUSY_WARPS: usize = 132 * 32;
/// Lanes of a warp, the most that can share a head.
const WARP: usize = 32;

/// How the kernels cut a head: elements of a vector access and lanes that share it.
struct Cut {
    vector: usize,
    group: usize,
}

impl QkvRopeFwd {
    fn tokens(&self) -> usize {
        self.positions.rows()
    }

    /// Radians per token of pair i, for i < rotary_dim / 2.
    pub fn inverse_frequencies(&self) -> Vec<f64> {
        match self.axes {
            Some(axes) => axes.frequencies(self.rotary_dim / 2, self.base),
            None => scaling::frequencies(self.rotary_dim, self.base, self.scaling),
        }
    }

    /// Shapes of qkv, q, and k or v.
    fn shapes(&self) -> ([usize; 2], [usize; 2], [usize; 2]) {
        let (t, d) = (self.tokens(), self.head_dim);
        let heads = self.q_heads * if self.gated { 2 } else { 1 } + 2 * self.kv_heads;
        ([t, heads * d], [t, self.q_heads * d], [t, self.kv_heads * d])
    }

    fn cut(&self, op: &str) -> Result<Cut, DeviceError> {
        check_multiple(op, "head_dim", self.head_dim, 8)?;
        if self.rotary_dim > self.head_dim || !self.rotary_dim.is_multiple_of(8) {
            return Err(DeviceError::Invalid(format!(
                "{op}: rotary_dim is {}, the kernel needs a multiple of 8 up to head_dim {}",
                self.rotary_dim, self.head_dim
            )));
        }
        let vector = if self.rotary_dim.is_multiple_of(16) { 8 } else { 4 };
        let rest = (self.head_dim - self.rotary_dim) / vector;
        let items = self.rotary_dim / 2 / vector + rest.div_ceil(2);
        if items > WARP {
            return Err(DeviceError::Invalid(format!(
                "{op}: head_dim {} is more than a warp holds, at most {}",
                self.head_dim,
                WARP * 2 * vector
            )));
        }
        Ok(Cut { vector, group: items.next_power_of_two() })
    }

    fn defines(&self, cut: &Cut) -> Vec<(&'static str, String)> {
        let mut all = vec![
            ("HEAD_DIM", self.head_dim.to_string()),
            ("ROTARY_DIM", self.rotary_dim.to_string()),
            ("VEC", cut.vector.to_string()),
            ("GROUP", cut.group.to_string()),
            ("INV_FREQ", scaling::table(&self.inverse_frequencies())),
            ("AMPLITUDE", format!("{:e}f", scaling::amplitude(self.scaling) as f32)),
            ("ZERO_CENTERED", usize::from(self.zero_centered).to_string()),
            ("GATED", usize::from(self.gated).to_string()),
            ("BIAS", usize::from(self.bias).to_string()),
        ];
        all.extend(self.axes.map_or(Vec::new(), |axes| axes.defines(self.rotary_dim / 2)));
        all
    }

    /// Warps that share a token: one when there are tokens enough, never more than it has head groups.
    fn splits(&self, cut: &Cut) -> usize {
        let groups = (self.q_heads + 2 * self.kv_heads).div_ceil(WARP / cut.group);
        BUSY_WARPS.div_ceil(self.tokens().max(1)).clamp(1, groups.max(1))
    }

    /// The kernels' integer parameters after the pointers.
    fn params(&self, op: &str, splits: usize) -> Result<Vec<Param>, DeviceError> {
        // The kernels index (token, split) pairs of whole blocks with an int.
        int_param(op, "tokens * splits", (self.tokens() + BWD_WARPS) * splits)?;
        let [(start0, len0), (start1, _)] = self.positions.chunks;
        let ints = [
            ("tokens", self.tokens()),
            ("q_heads", self.q_heads),
            ("kv_heads", self.kv_heads),
            ("splits", splits),
            ("seq", self.positions.seq),
            ("start of chunk 0", start0),
            ("length of chunk 0", len0),
            ("start of chunk 1", start1),
        ];
        ints.iter().map(|(what, n)| int_param(op, what, *n).map(Param::I32)).collect()
    }

    /// Floating-point operations a token: six for each rotated pair, and `norm` for each normed element.
    fn token_flops(&self, norm: usize) -> f64 {
        let normed = self.q_heads + self.kv_heads;
        let norm = if self.qk_norm.is_some() { norm * self.head_dim } else { 0 };
        (normed * (self.rotary_dim / 2 * 6 + norm)) as f64
    }
}

impl Op for QkvRopeFwd {
    fn name(&self) -> &'static str {
        "qkv_rope_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let (qkv, q, kv) = self.shapes();
        let mut args = vec![ArgSpec::read("qkv", DType::Bf16, &qkv)];
        if self.bias {
            args.push(ArgSpec::read("bias", DType::Bf16, &qkv[1..]));
        }
        if self.qk_norm.is_some() {
            args.push(ArgSpec::read("q_weight", DType::Bf16, &[self.head_dim]));
            args.push(ArgSpec::read("k_weight", DType::Bf16, &[self.head_dim]));
        }
        args.push(ArgSpec::write("q", DType::Bf16, &q));
        args.push(ArgSpec::write("k", DType::Bf16, &kv));
        args.push(ArgSpec::write("v", DType::Bf16, &kv));
        if self.qk_norm.is_some() {
            args.push(ArgSpec::write("rstd", DType::F32, &[self.tokens(), self.q_heads + self.kv_heads]));
        }
        args
    }
    fn flops(&self) -> f64 {
        self.token_flops(4) * self.tokens() as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        let dtype = if self.qk_norm.is_some() && arg == 6 { DType::F32 } else { DType::Bf16 };
        tolerance(dtype, self.head_dim, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        if self.tokens() == 0 {
            return Ok(Issue::Nothing);
        }
        if self.bias && (self.qk_norm.is_some() || self.gated) {
            return Err(DeviceError::internal("qkv_rope_fwd: a bias beside q/k norms or an output gate"));
        }
        let cut = self.cut(self.name())?;
        let splits = self.splits(&cut);
        let entry = match (self.qk_norm.is_some(), self.bias) {
            (true, _) => "qkv_norm_rope_fwd",
            (false, false) => "qkv_rope_fwd",
            (false, true) => "qkv_rope_bias_fwd",
        };
        let kernel = cuda.kernel(SOURCE, entry, &self.defines(&cut), 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        params.extend(self.params(self.name(), splits)?);
        if let Some(eps) = self.qk_norm {
            params.push(Param::F32(eps as f32));
        }
        let blocks = (self.tokens() * splits).div_ceil(FWD_WARPS);
        cuda.launch(&kernel, Config::linear(blocks, (FWD_WARPS * WARP) as u32), &params)
    }
}

impl Op for QkvRopeBwd {
    fn name(&self) -> &'static str {
        "qkv_rope_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let fwd = self.forward();
        let (qkv, q, kv) = fwd.shapes();
        let (t, d) = (fwd.tokens(), self.head_dim);
        let mut args = vec![
            ArgSpec::read("dq", DType::Bf16, &q),
            ArgSpec::read("dk", DType::Bf16, &kv),
            ArgSpec::read("dv", DType::Bf16, &kv),
        ];
        if self.gated {
            args.push(ArgSpec::read("dgate", DType::Bf16, &q));
        }
        if self.qk_norm.is_some() {
            args.push(ArgSpec::read("qkv", DType::Bf16, &qkv));
            args.push(ArgSpec::read("q_weight", DType::Bf16, &[d]));
            args.push(ArgSpec::read("k_weight", DType::Bf16, &[d]));
            // Any positive numbers do: the formula holds for a given rstd.
            args.push(
                ArgSpec::read("rstd", DType::F32, &[t, self.q_heads + self.kv_heads])
                    .sample(Sample::Uniform(0.5, 1.5)),
            );
        }
        args.push(ArgSpec::write("dqkv", DType::Bf16, &qkv));
        if self.qk_norm.is_some() {
            args.push(ArgSpec::write("dw_partial", DType::F32, &[partials(t), 2 * d]));
        }
        args
    }
    fn flops(&self) -> f64 {
        let fwd = self.forward();
        fwd.token_flops(9) * fwd.tokens() as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        let tokens = self.positions.rows();
        if self.qk_norm.is_some() && arg == 8 + usize::from(self.gated) {
            // Its terms are products with cosines and sines that the fast functions give to 2^-21: eight times
            // the fp32 round-off, as much as a sum of 64 more terms.
            let terms = tokens.div_ceil(partials(tokens)) * self.q_heads.max(self.kv_heads);
            return tolerance(DType::F32, terms + 64, 0);
        }
        tolerance(DType::Bf16, self.head_dim, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let fwd = self.forward();
        let norm = self.qk_norm.is_some();
        if fwd.tokens() == 0 {
            let bytes = partials(0) * 2 * self.head_dim * DType::F32.size();
            let partial = args[args.len() - 1];
            return Ok(if norm { Issue::Zero { dst: partial, bytes } } else { Issue::Nothing });
        }
        let cut = fwd.cut(self.name())?;
        // A block's warps share its tokens' head groups; without weight gradients a block takes as many
        // tokens as it has warps for.
        let splits = fwd.splits(&cut).min(BWD_WARPS);
        let blocks = if norm { partials(fwd.tokens()) } else { (fwd.tokens() * splits).div_ceil(BWD_WARPS) };
        let entry = if norm { "qkv_norm_rope_bwd" } else { "qkv_rope_bwd" };
        let kernel = cuda.kernel(SOURCE, entry, &fwd.defines(&cut), 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        if !self.gated {
            params.insert(3, args[0].into()); // in dgate's place, not read
        }
        params.extend(fwd.params(self.name(), splits)?);
        cuda.launch(&kernel, Config::linear(blocks, (BWD_WARPS * WARP) as u32), &params)
    }
}
