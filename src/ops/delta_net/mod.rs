//! The gated delta rule (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024) as Qwen3-Next has it, in chunks.
//!
//! Per value head, with the state S [V, K] and k, q scaled to length 1 (q by 1/sqrt(K) too):
//!   S_t = a_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,   o_t = S_t q_t,
//! a_t = exp(g_t), g = -exp(a_log) softplus(alpha + dt_bias), beta = sigmoid(b). Key heads serve groups of value heads.
//!
//! Inside a chunk of Q tokens (WY form), with c the running sum of g and S the state at its start:
//!   A_ts = beta_t e^(c_t - c_s) k_t k_s (s < t),  T = (I + A)^-1,  U = T beta (V - e^c K S^T),
//!   o_t = e^(c_t) S q_t + sum_{s <= t} e^(c_t - c_s) (q_t k_s) u_s,   S' = e^(c_Q) S + sum_s e^(c_Q - c_s) u_s k_s^T.
//! The kernels compute this; the reference is the recurrence itself, token by token.
//!
//! `qkv` [T, 2 key_heads K + value_heads V] is the convolution's output: q, then k, then v. b and alpha are the last
//! 2 value_heads columns of the in-projection's output `proj` [T, value_heads V + width of qkv + 2 value_heads] (z, q,
//! k, v, b, alpha).

mod hopper;
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

/// Tokens of a chunk: what the reference implementations of the paper take, too; a triangle of 64 is inverted in blocks
/// of 16, which are joined twice.
pub const CHUNK: usize = 64;
/// Added to the square sum before the root when q and k are scaled to length 1 (flash-linear-attention's default).
const NORM_EPS: f64 = 1e-6;

/// Sizes of one rank's layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaShape {
    pub batch: usize,
    /// Tokens of a sequence; each sequence starts from state 0.
    pub seq: usize,
    pub key_heads: usize,
    /// A multiple of `key_heads`.
    pub value_heads: usize,
    /// K: width of a q and of a k head.
    pub key_dim: usize,
    /// V.
    pub value_dim: usize,
}

impl DeltaShape {
    pub fn tokens(&self) -> usize {
        self.batch * self.seq
    }
    /// Width of q, and of k.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }
    /// Width of v, of z and of the output.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }
    /// Width of a row of `qkv`.
    pub fn qkv_width(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }
    /// Width of a row of `proj`.
    pub fn projected_width(&self) -> usize {
        self.value_width() + self.qkv_width() + 2 * self.value_heads
    }
    pub fn chunks(&self) -> usize {
        self.seq.div_ceil(CHUNK)
    }
    /// States at the chunks' starts: [batch, chunks, value heads, V, K].
    pub fn states_shape(&self) -> [usize; 5] {
        [self.batch, self.chunks(), self.value_heads, self.value_dim, self.key_dim]
    }
    /// Rows of the gradient parts of a_log and dt_bias.
    pub fn partial_rows(&self) -> usize {
        self.batch * self.chunks()
    }
    fn inputs(&self) -> Vec<ArgSpec> {
        let bf16 = DType::Bf16;
        vec![
            ArgSpec::read("qkv", bf16, &[self.tokens(), self.qkv_width()]),
            ArgSpec::read("proj", bf16, &[self.tokens(), self.projected_width()]),
            // A from -1 to -16, as the layer starts; steps of 0.01 to 0.7: states that live from a token to a few chunks.
            ArgSpec::read("a_log", bf16, &[self.value_heads]).sample(Sample::Uniform(0.0, 2.77)),
            ArgSpec::read("dt_bias", bf16, &[self.value_heads]).sample(Sample::Uniform(-4.6, 0.0)),
        ]
    }
    /// Sums over the chunks of one sequence: of pairs (s <= t), and of the cubes of their lengths.
    fn pairs_and_cubes(&self) -> (f64, f64) {
        let (whole, rest) = ((self.seq / CHUNK) as f64, (self.seq % CHUNK) as f64);
        let q = CHUNK as f64;
        (whole * q * (q + 1.0) / 2.0 + rest * (rest + 1.0) / 2.0, whole * q.powi(3) + rest.powi(3))
    }
    /// Chunk-local products over K of key heads and of value heads, and over V, each one product a pair; products of a
    /// state with a vector a token. The triangle's inverse takes a third of a cube.
    fn work(&self, keys: usize, own_keys: usize, values: usize, states: usize) -> f64 {
        let (pairs, cubes) = self.pairs_and_cubes();
        let heads = self.value_heads;
        let local =
            2 * (keys * self.key_width() + heads * (own_keys * self.key_dim + values * self.value_dim));
        let passed = 2 * states * self.value_width() * self.key_dim;
        self.batch as f64
            * (pairs * local as f64 + cubes / 3.0 * heads as f64 + self.seq as f64 * passed as f64)
    }
    /// Bytes of q, k, v, the raw b and alpha, the states, and `outputs` more.
    fn traffic(&self, outputs: usize) -> f64 {
        let read = self.tokens() * (self.qkv_width() + 2 * self.value_heads) * 2;
        (read + self.states_shape().iter().product::<usize>() * 2 + outputs) as f64
    }
}

/// The gated delta rule. Args: qkv R bf16 [T, 2 key_heads K + value_heads V], proj R bf16 (its last 2 value_heads columns
/// are read: b, then alpha), a_log R bf16 `[value_heads]`, dt_bias R bf16 `[value_heads]`, o W bf16 [T, value_heads V],
/// states W bf16 [batch, chunks, value_heads, V, K] (at each chunk's start, for the backward).
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaFwd {
    pub shape: DeltaShape,
}

/// All gradients of [`DeltaFwd`]. Args: qkv, proj, a_log, dt_bias, states as there, do R bf16 [T, value_heads V], dqkv W
/// bf16 as qkv, dba W bf16 [T, 2 value_heads] (of the raw b, then alpha), partial W f32 [batch*chunks, 2 value_heads]
/// (a_log, then dt_bias; rows to be summed).
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaBwd {
    pub shape: DeltaShape,
}

impl DeltaFwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        reference::forward(&self.shape, args)
    }
}

impl DeltaBwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        reference::backward(&self.shape, args)
    }
}

/// Values that the kernels round to bf16 on the way to the output: the state, V - K S, T, U, and the masked q k^T.
const FWD_ROUNDED: usize = 5;
/// On the way to a gradient: the state, its gradient, T, the masked q k^T, V - K S, U, dU, dV, the weighed operand of the
/// pass, and a masked product.
const BWD_ROUNDED: usize = 10;

impl Op for DeltaFwd {
    fn name(&self) -> &'static str {
        "delta_net_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let mut args = s.inputs();
        args.push(ArgSpec::write("o", DType::Bf16, &[s.tokens(), s.value_width()]));
        args.push(ArgSpec::write("states", DType::Bf16, &s.states_shape()));
        args
    }
    /// k k^T and q k^T a key head; T R and P U a value head; S with k, with q and its update a token.
    fn flops(&self) -> f64 {
        self.shape.work(2, 0, 2, 3)
    }
    fn bytes(&self) -> f64 {
        self.shape.traffic(self.shape.tokens() * self.shape.value_width() * 2)
    }
    fn workspace(&self) -> usize {
        launch::forward_workspace(&self.shape)
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, self.shape.key_dim + CHUNK, FWD_ROUNDED)
    }
    cpu_reference!();
    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], workspace: DevPtr) -> Result<Issue, DeviceError> {
        launch::forward(&self.shape, cuda, args, workspace)
    }
}

impl Op for DeltaBwd {
    fn name(&self) -> &'static str {
        "delta_net_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let mut args = s.inputs();
        args.push(ArgSpec::read("states", DType::Bf16, &s.states_shape()));
        args.push(ArgSpec::read("do", DType::Bf16, &[s.tokens(), s.value_width()]));
        args.push(ArgSpec::write("dqkv", DType::Bf16, &[s.tokens(), s.qkv_width()]));
        args.push(ArgSpec::write("dba", DType::Bf16, &[s.tokens(), 2 * s.value_heads]));
        args.push(ArgSpec::write("partial", DType::F32, &[s.partial_rows(), 2 * s.value_heads]));
        args
    }
    /// k k^T and q k^T a key head; of a value head over K: dq and dk inside the chunk (four), over V: T R, P^T dO, T^T dU,
    /// dO U^T, dV U^T; S with k, dO and dV, its gradient with k and U, and its gradient's two updates a token.
    fn flops(&self) -> f64 {
        self.shape.work(2, 4, 5, 7)
    }
    fn bytes(&self) -> f64 {
        let s = &self.shape;
        let outputs = s.tokens() * (s.qkv_width() + 2 * s.value_heads) + s.partial_rows() * 4 * s.value_heads;
        s.traffic((outputs + s.tokens() * s.value_width()) * 2)
    }
    fn workspace(&self) -> usize {
        launch::backward_workspace(&self.shape)
    }
    fn tolerance(&self, arg: usize) -> f64 {
        let s = &self.shape;
        let dtype = if arg == 8 { DType::F32 } else { DType::Bf16 };
        let group = s.value_heads / s.key_heads.max(1);
        tolerance(dtype, (s.key_dim.max(s.value_dim) + CHUNK) * group, BWD_ROUNDED)
    }
    /// States as a forward would leave them in size: any values are legal.
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        let mut out = vec![Vec::new(); self.args().len()];
        let len = self.shape.states_shape().iter().product();
        out[4] = Draws { seed, stream: 4 }.bf16_normals(len, 0.2);
        Some(out)
    }
    cpu_reference!();
    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], workspace: DevPtr) -> Result<Issue, DeviceError> {
        launch::backward(&self.shape, cuda, args, workspace)
    }
}
