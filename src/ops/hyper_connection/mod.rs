//! Manifold-constrained hyper-connections (mHC, arXiv:2512.24880; Megatron-Core `hyper_connection.py`): the residual is n
//! streams side by side, `[T, n*H]`. Around a sublayer F, with weights that each token computes from its own streams x,
//!
//! ```text
//! y = sum_j pre_j x_j,    x'_j = sum_i res_ij x_i + post_j F(y)
//! ```
//!
//! From the logits h = (x W^T) rstd(x) scale + base: pre = sigmoid(h) + eps, post = 2 sigmoid(h), and res the
//! Sinkhorn-Knopp projection of exp(h) to matrices whose rows and columns sum to one. A *head* has pre alone and makes one
//! stream of the n before the last norm.
//!
//! The product x W^T is a GEMM before [`HyperPreFwd`]; all else is in these kernels, nothing between rounded. W has
//! [`HyperShape::rows`] rows, a multiple of 8 as GEMMs want it; those beyond the maps get no gradient. Upstream keeps W,
//! scale and base in fp32; here they are bf16 with fp32 masters, like every weight.

mod launch;
mod post;
mod reference;
mod streams;
#[cfg(test)]
mod tests;

use super::rmsnorm::partials;
use super::{ArgSpec, CpuArgs, Op, Sample, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue};
use crate::program::DType;
pub use post::{HyperPostBwd, HyperPostFwd};
pub use streams::{HyperExpand, HyperSum};

/// Added to pre and to what Sinkhorn-Knopp divides by (Megatron-Core `_MHC_COMPUTE_H_EPS`, `_MHC_SINKHORN_EPS`).
pub const HYPER_EPS: f64 = 1e-6;
/// Values of `scale`: of pre, post and res, and one that makes rows of partial sums multiples of four.
pub const SCALES: usize = 4;
/// W's rows are a multiple of this.
const ROWS: usize = 8;

/// Shapes of all ops here.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HyperShape {
    /// T.
    pub tokens: usize,
    /// H: of one stream.
    pub hidden: usize,
    /// n.
    pub streams: usize,
    /// Of Sinkhorn-Knopp: the first is a softmax by rows, then columns; each later one rows, then columns.
    pub iterations: usize,
    /// Inside the root of rstd.
    pub eps: f64,
    /// pre alone.
    pub head: bool,
}

impl HyperShape {
    /// n * H.
    pub fn width(&self) -> usize {
        self.streams * self.hidden
    }
    /// Weights that a token computes: pre, post, res (row by row); of a head pre.
    pub fn maps(&self) -> usize {
        if self.head { self.streams } else { self.streams * (self.streams + 2) }
    }
    /// Rows of W, elements of base.
    pub fn rows(&self) -> usize {
        self.maps().next_multiple_of(ROWS)
    }
    /// post and res.
    fn later_maps(&self) -> usize {
        self.maps() - self.streams
    }
    /// Terms of the sums that a map passes: the root mean square, and rows and columns of each iteration.
    fn terms(&self) -> usize {
        self.width() + if self.head { 0 } else { 2 * self.iterations * self.streams * self.streams }
    }
    fn streams_shape(&self) -> [usize; 2] {
        [self.tokens, self.width()]
    }
    fn one_shape(&self) -> [usize; 2] {
        [self.tokens, self.hidden]
    }
    fn floats(&self, per_token: usize) -> f64 {
        self.tokens as f64 * per_token as f64
    }
}

/// Args: x R bf16 `[T, n*H]`, proj R f32 `[T, rows]` (x W^T), scale R bf16 `[4]`, base R bf16 `[rows]`, y W bf16 `[T,H]`, maps W
/// f32 `[T, maps]`, rstd W f32 `[T]`.
#[derive(Debug, Clone, PartialEq)]
pub struct HyperPreFwd {
    pub shape: HyperShape,
}

/// Args: x R, proj R, scale R, base R, maps R, rstd R (as in [`HyperPreFwd`]), dy R bf16 `[T,H]`, (dmaps R f32
/// `[T, maps - n]` of post and res, unless a head), (dnext R bf16 `[T, n*H]`: unless a head, the gradient of x', which
/// res carries to x; of a head with `carried` another gradient of x), dx W bf16 `[T, n*H]` (all but what comes through
/// proj), dproj W bf16 `[T, rows]`, partial W f32 `[partials(T), rows + 4]` (of base, then of scale; partial p sums tokens
/// p, p + partials, ...).
#[derive(Debug, Clone, PartialEq)]
pub struct HyperPreBwd {
    pub shape: HyperShape,
    pub carried: bool,
}

impl HyperPreBwd {
    fn has_next(&self) -> bool {
        !self.shape.head || self.carried
    }
    /// Index of dx.
    fn output_at(&self) -> usize {
        7 + usize::from(!self.shape.head) + usize::from(self.has_next())
    }
}

fn weight_specs(s: &HyperShape) -> [ArgSpec; 5] {
    [
        ArgSpec::read("x", DType::Bf16, &s.streams_shape()),
        ArgSpec::read("proj", DType::F32, &[s.tokens, s.rows()]),
        ArgSpec::read("scale", DType::Bf16, &[SCALES]),
        ArgSpec::read("base", DType::Bf16, &[s.rows()]),
        ArgSpec::read("maps", DType::F32, &[s.tokens, s.maps()]),
    ]
}

impl Op for HyperPreFwd {
    fn name(&self) -> &'static str {
        if self.shape.head { "hyper_head_fwd" } else { "hyper_pre_fwd" }
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let [x, proj, scale, base, maps] = weight_specs(s);
        vec![
            x,
            proj,
            scale,
            base,
            ArgSpec::write("y", DType::Bf16, &s.one_shape()),
            ArgSpec { access: super::Access::Write, ..maps },
            ArgSpec::write("rstd", DType::F32, &[s.tokens]),
        ]
    }
    /// Squares and the weighted sum, two each.
    fn flops(&self) -> f64 {
        self.shape.floats(4 * self.shape.width())
    }
    fn tolerance(&self, arg: usize) -> f64 {
        tolerance(if arg == 4 { DType::Bf16 } else { DType::F32 }, self.shape.terms(), 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        launch::pre_forward(self, cuda, args)
    }
}

impl Op for HyperPreBwd {
    fn name(&self) -> &'static str {
        if self.shape.head { "hyper_head_bwd" } else { "hyper_pre_bwd" }
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let mut args: Vec<ArgSpec> = weight_specs(s).into_iter().map(|a| a.sample(Sample::Custom)).collect();
        args.push(ArgSpec::read("rstd", DType::F32, &[s.tokens]).sample(Sample::Custom));
        args.push(ArgSpec::read("dy", DType::Bf16, &s.one_shape()));
        if !s.head {
            args.push(ArgSpec::read("dmaps", DType::F32, &[s.tokens, s.later_maps()]));
        }
        if self.has_next() {
            args.push(ArgSpec::read("dnext", DType::Bf16, &s.streams_shape()));
        }
        args.push(ArgSpec::write("dx", DType::Bf16, &s.streams_shape()));
        args.push(ArgSpec::write("dproj", DType::Bf16, &[s.tokens, s.rows()]));
        args.push(ArgSpec::write("partial", DType::F32, &[partials(s.tokens), s.rows() + SCALES]));
        args
    }
    /// The dots with dy, what dy and rstd give (two a value each), and res on the gradients of x'.
    fn flops(&self) -> f64 {
        let s = &self.shape;
        let mixed = if s.head { 0 } else { 2 * s.streams };
        s.floats((6 + mixed) * s.width())
    }
    fn tolerance(&self, arg: usize) -> f64 {
        let s = &self.shape;
        match arg - self.output_at() {
            2 => tolerance(DType::F32, s.terms() + s.tokens.div_ceil(partials(s.tokens)), 0),
            _ => tolerance(DType::Bf16, s.terms(), 0),
        }
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        Some(reference::consistent_inputs(self, seed))
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        launch::pre_backward(self, cuda, args)
    }
}

impl HyperPreFwd {
    fn run<T: super::Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let given = reference::Given::of(args)?;
        reference::pre_forward(&self.shape, &given, args.output(4)?, args.output(5)?, args.output(6)?);
        Ok(())
    }
}

impl HyperPreBwd {
    fn run<T: super::Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let given = reference::Given::of(args)?;
        let (maps, rstd, dy) = (args.input(4)?, args.input(5)?, args.input(6)?);
        let dmaps = if self.shape.head { &[] } else { args.input(7)? };
        let out = self.output_at();
        let dnext = if self.has_next() { args.input(out - 1)? } else { &[] };
        let saved = reference::Saved { given, maps, rstd, dy, dmaps, dnext };
        let (dx, dproj) = (args.output(out)?, args.output(out + 1)?);
        reference::pre_backward(&self.shape, &saved, dx, dproj, args.output(out + 2)?);
        Ok(())
    }
}
