//! Mamba-2's state space scan (Dao and Gu, "Transformers are SSMs", 2024), in chunks.
//!
//! Per head, with state H [P, N] and a = dt * A, A = -exp(a_log), dt = softplus(raw + bias):
//!   H_t = exp(a_t) H_{t-1} + dt_t x_t B_t^T,   y_t = H_t C_t + D x_t.
//! B and C belong to groups of heads. Inside a chunk of Q tokens this is a product of a masked matrix
//! (C_t B_s) exp(c_t - c_s) dt_s with x, c the running sum of a; between chunks the state is handed on.
//!
//! `xbc` [T, heads*P + 2*groups*N] is the convolution's output: x, then B, then C. The raw dt are the last `heads`
//! columns of the in-projection's output `zxbcdt` [T, 2*heads*P + 2*groups*N + heads] (z, x, B, C, dt).

mod launch;
mod reference;
#[cfg(test)]
mod tests;

use super::support::Draws;
use super::{ArgSpec, CpuArgs, Op, Real, Sample, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue};
use crate::program::DType;

/// Sizes of one rank's scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SsdShape {
    pub batch: usize,
    /// Tokens of a sequence; each sequence starts from state 0.
    pub seq: usize,
    pub heads: usize,
    /// P.
    pub head_dim: usize,
    /// Groups of heads that share B and C.
    pub groups: usize,
    /// N.
    pub state: usize,
    /// Q.
    pub chunk: usize,
}

impl SsdShape {
    pub fn tokens(&self) -> usize {
        self.batch * self.seq
    }
    /// Width of x.
    pub fn inner(&self) -> usize {
        self.heads * self.head_dim
    }
    /// Width of a row of `xbc`.
    pub fn conv_width(&self) -> usize {
        self.inner() + 2 * self.groups * self.state
    }
    /// Width of a row of `zxbcdt`.
    pub fn projected_width(&self) -> usize {
        self.inner() + self.conv_width() + self.heads
    }
    pub fn chunks(&self) -> usize {
        self.seq.div_ceil(self.chunk.max(1))
    }
    /// States at the chunks' starts: [batch, chunks, heads, P, N].
    pub fn states_shape(&self) -> [usize; 5] {
        [self.batch, self.chunks(), self.heads, self.head_dim, self.state]
    }
    /// Rows of the gradient parts of a_log, D and dt_bias.
    pub fn partial_rows(&self) -> usize {
        self.batch * self.chunks()
    }
    fn inputs(&self) -> Vec<ArgSpec> {
        let bf16 = DType::Bf16;
        vec![
            ArgSpec::read("xbc", bf16, &[self.tokens(), self.conv_width()]),
            ArgSpec::read("zxbcdt", bf16, &[self.tokens(), self.projected_width()]),
            // A from -1 to -16, as Mamba-2 starts.
            ArgSpec::read("a_log", bf16, &[self.heads]).sample(Sample::Uniform(0.0, 2.77)),
            ArgSpec::read("d", bf16, &[self.heads]),
            // dt of about 0.01 to 0.7 at a raw value of 0: states that live from a token to a few chunks.
            ArgSpec::read("dt_bias", bf16, &[self.heads]).sample(Sample::Uniform(-4.6, 0.0)),
        ]
    }
    /// Pairs (s <= t) of the tokens of one sequence's chunks.
    fn pairs(&self) -> f64 {
        let of = |q: usize| (q * (q + 1) / 2) as f64;
        (self.seq / self.chunk) as f64 * of(self.chunk) + of(self.seq % self.chunk)
    }
    /// Bytes of x, B and C, the raw dt, the states, and `outputs` more.
    fn traffic(&self, outputs: usize) -> f64 {
        let xbc = self.tokens() * (self.conv_width() + self.heads) * 2;
        (xbc + self.states_shape().iter().product::<usize>() * 2 + outputs) as f64
    }
}

/// The scan. Args: xbc R bf16 [T, inner + 2 groups N], zxbcdt R bf16 [T, 2 inner + 2 groups N + heads], a_log R bf16
/// `[heads]`, d R bf16 `[heads]`, dt_bias R bf16 `[heads]`, y W bf16 [T, inner], states W bf16 [batch, chunks, heads, P, N]
/// (at each chunk's start, for the backward).
#[derive(Debug, Clone, PartialEq)]
pub struct SsdFwd {
    pub shape: SsdShape,
}

/// All gradients of [`SsdFwd`]. Args: xbc, zxbcdt, a_log, d, dt_bias, states as there, dy R bf16 [T, inner], dxbc W bf16
/// [T, inner + 2 groups N], ddt W bf16 [T, heads] (of the raw dt), partial W f32 [batch*chunks, 3 heads] (a_log, d,
/// dt_bias; rows to be summed).
#[derive(Debug, Clone, PartialEq)]
pub struct SsdBwd {
    pub shape: SsdShape,
}

impl SsdFwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        reference::forward(&self.shape, args)
    }
}

impl SsdBwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        reference::backward(&self.shape, args)
    }
}

/// Values that the kernels round to bf16 before a product: C B^T, the masked matrix or a weighed operand, and the state.
const ROUNDED: usize = 3;

impl Op for SsdFwd {
    fn name(&self) -> &'static str {
        "ssd_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let mut args = s.inputs();
        args.push(ArgSpec::write("y", DType::Bf16, &[s.tokens(), s.inner()]));
        args.push(ArgSpec::write("states", DType::Bf16, &s.states_shape()));
        args
    }
    /// Inside chunks C B^T a group and its product with x a head; a state's update and its product with C a token.
    fn flops(&self) -> f64 {
        let s = &self.shape;
        let inside = s.pairs() * (2 * s.groups * s.state + 2 * s.inner()) as f64;
        s.batch as f64 * (inside + s.seq as f64 * (4 * s.inner() * s.state) as f64)
    }
    fn bytes(&self) -> f64 {
        self.shape.traffic(self.shape.tokens() * self.shape.inner() * 2)
    }
    fn workspace(&self) -> usize {
        launch::forward_workspace(&self.shape)
    }
    fn tolerance(&self, arg: usize) -> f64 {
        let terms = self.shape.state + self.shape.chunk;
        tolerance(DType::Bf16, terms, if arg == 6 { 1 } else { ROUNDED })
    }
    cpu_reference!();
    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], workspace: DevPtr) -> Result<Issue, DeviceError> {
        launch::forward(&self.shape, cuda, args, workspace)
    }
}

impl Op for SsdBwd {
    fn name(&self) -> &'static str {
        "ssd_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let mut args = s.inputs();
        args.push(ArgSpec::read("states", DType::Bf16, &s.states_shape()));
        args.push(ArgSpec::read("dy", DType::Bf16, &[s.tokens(), s.inner()]));
        args.push(ArgSpec::write("dxbc", DType::Bf16, &[s.tokens(), s.conv_width()]));
        args.push(ArgSpec::write("ddt", DType::Bf16, &[s.tokens(), s.heads]));
        args.push(ArgSpec::write("partial", DType::F32, &[s.partial_rows(), 3 * s.heads]));
        args
    }
    /// Inside chunks: C B^T and the two products of B and C a group, dy x^T and dx a head; per token the states'
    /// gradient and their products with x, dy and B.
    fn flops(&self) -> f64 {
        let s = &self.shape;
        let inside = s.pairs() * (6 * s.groups * s.state + 4 * s.inner()) as f64;
        s.batch as f64 * (inside + s.seq as f64 * (8 * s.inner() * s.state) as f64)
    }
    /// Without the products of B and C inside the chunks, which are formed again.
    fn model_flops(&self) -> f64 {
        2.0 * SsdFwd { shape: self.shape }.flops()
    }
    fn bytes(&self) -> f64 {
        let s = &self.shape;
        let outputs = s.tokens() * (s.conv_width() + s.heads) + s.partial_rows() * 6 * s.heads;
        s.traffic((outputs + s.tokens() * s.inner()) * 2)
    }
    fn workspace(&self) -> usize {
        launch::backward_workspace(&self.shape)
    }
    fn tolerance(&self, arg: usize) -> f64 {
        let s = &self.shape;
        let dtype = if arg == 9 { DType::F32 } else { DType::Bf16 };
        tolerance(dtype, (s.state + s.chunk) * (s.heads / s.groups.max(1)), ROUNDED)
    }
    /// States as a forward would leave them in size: any values are legal.
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        let mut out = vec![Vec::new(); self.args().len()];
        let len = self.shape.states_shape().iter().product();
        out[5] = Draws { seed, stream: 5 }.bf16_normals(len, 0.5);
        Some(out)
    }
    cpu_reference!();
    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], workspace: DevPtr) -> Result<Issue, DeviceError> {
        launch::backward(&self.shape, cuda, args, workspace)
    }
}
