//! A gate on every token: the shared expert's output times the sigmoid of a product of the token with one vector
//! (Qwen 2 and 3 Next; Megatron-Core `transformer/moe/shared_experts.py`, `moe_shared_expert_gate`).
//!
//! T tokens, H hidden. The product, the sigmoid and the multiplication are one kernel; nothing between is rounded.

use super::rmsnorm::partials;
use super::{ArgSpec, CpuArgs, Op, Real, Sample, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

/// out = x * gate with gate = sigmoid(y . weight) per token. Args: y R bf16 `[T,H]`, weight R bf16 `[H]`, x R bf16
/// `[T,H]`, out W bf16 `[T,H]`, gate W f32 `[T]`.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenGateFwd {
    pub tokens: usize,
    pub hidden: usize,
}

/// Gradients of [`TokenGateFwd`]: with l = gate (1 - gate) (dout . x) per token, dx = dout * gate, dy = dres + l * weight,
/// dw = sum of l * y. Args: y R bf16 `[T,H]`, weight R bf16 `[H]`, x R bf16 `[T,H]`, gate R f32 `[T]`, dout R bf16 `[T,H]`,
/// dres R bf16 `[T,H]` (what reaches y on other ways), dx W bf16 `[T,H]`, dy W bf16 `[T,H]`, dw_partial W f32
/// [partials(T),H] (partial p sums rows p, p + partials, ...).
#[derive(Debug, Clone, PartialEq)]
pub struct TokenGateBwd {
    pub tokens: usize,
    pub hidden: usize,
}

impl TokenGateFwd {
    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (y, weight, x) = (args.input(0)?, args.input(1)?, args.input(2)?);
        let (out, gate) = (args.output(3)?, args.output(4)?);
        let h = self.hidden.max(1);
        out.par_chunks_mut(h).zip(gate).enumerate().for_each(|(row, (out, gate))| {
            let (y, x) = (&y[row * h..][..h], &x[row * h..][..h]);
            let logit = T::of(y.iter().zip(weight).map(|(a, b)| (*a * *b).f64()).sum());
            let g = T::of(1.0) / (T::of(1.0) + (-logit).exp());
            *gate = g.f32();
            out.iter_mut().zip(x).for_each(|(o, x)| *o = (*x * g).bf16());
        });
        Ok(())
    }
}

impl TokenGateBwd {
    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (y, weight, x) = (args.input(0)?, args.input(1)?, args.input(2)?);
        let (gate, dout, dres) = (args.input(3)?, args.input(4)?, args.input(5)?);
        let (dx, dy, dw_partial) = (args.output(6)?, args.output(7)?, args.output(8)?);
        let h = self.hidden.max(1);
        let dlogit = |row: usize| -> T {
            let (x, dout) = (&x[row * h..][..h], &dout[row * h..][..h]);
            let dot = T::of(x.iter().zip(dout).map(|(a, b)| (*a * *b).f64()).sum());
            dot * gate[row] * (T::of(1.0) - gate[row])
        };
        dx.par_chunks_mut(h).zip(dy.par_chunks_mut(h)).enumerate().for_each(|(row, (dx, dy))| {
            let l = dlogit(row);
            for i in 0..h {
                dx[i] = (dout[row * h + i] * gate[row]).bf16();
                dy[i] = (dres[row * h + i] + l * weight[i]).bf16();
            }
        });
        dw_partial.par_chunks_mut(h).enumerate().for_each(|(p, dw)| {
            let mut sum = vec![0.0; h];
            for row in (p..self.tokens).step_by(partials(self.tokens)) {
                let l = dlogit(row);
                sum.iter_mut().zip(&y[row * h..]).for_each(|(s, y)| *s += (l * *y).f64());
            }
            dw.iter_mut().zip(sum).for_each(|(dw, s)| *dw = T::of(s).f32());
        });
        Ok(())
    }
}

const SOURCE: KernelSource = KernelSource { name: "token_gate/kernel.cu", text: include_str!("kernel.cu") };
/// Elements of a 16-byte vector of bf16.
const VECTOR: usize = 8;
/// Threads of a block at most; longer rows give each thread more vectors.
const MAX_THREADS: usize = 512;
/// Longest row: four vectors a thread of 32 bytes of sums each leave room in the registers.
const MAX_HIDDEN: usize = 4 * MAX_THREADS * VECTOR;

/// (threads of a block, 16-byte vectors a thread) for one row a block.
fn block(op: &str, hidden: usize) -> Result<(usize, usize), DeviceError> {
    check_multiple(op, "hidden", hidden, VECTOR)?;
    if hidden > MAX_HIDDEN {
        return Err(DeviceError::Invalid(format!(
            "{op}: hidden is {hidden}, the kernel keeps sums of at most {MAX_HIDDEN} in registers"
        )));
    }
    let vectors = hidden / VECTOR;
    let threads = vectors.next_multiple_of(32).min(MAX_THREADS);
    Ok((threads, vectors.div_ceil(threads)))
}

/// Parameters of either kernel: the arguments, tokens, hidden.
fn params(op: &str, args: &[DevPtr], tokens: usize, hidden: usize) -> Result<Vec<Param>, DeviceError> {
    let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
    params.push(int_param(op, "tokens", tokens)?.into());
    params.push(int_param(op, "hidden", hidden)?.into());
    Ok(params)
}

impl Op for TokenGateFwd {
    fn name(&self) -> &'static str {
        "token_gate_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let rows = [self.tokens, self.hidden];
        vec![
            ArgSpec::read("y", DType::Bf16, &rows),
            // Logits of order 1, so that gates are neither 0 nor 1.
            ArgSpec::read("weight", DType::Bf16, &[self.hidden])
                .sample(Sample::Normal(1.0 / (self.hidden.max(1) as f64).sqrt())),
            ArgSpec::read("x", DType::Bf16, &rows),
            ArgSpec::write("out", DType::Bf16, &rows),
            ArgSpec::write("gate", DType::F32, &[self.tokens]),
        ]
    }
    /// The product (two) and the multiplication.
    fn flops(&self) -> f64 {
        3.0 * self.tokens as f64 * self.hidden as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        tolerance(if arg == 4 { DType::F32 } else { DType::Bf16 }, self.hidden, 0)
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
        let (threads, vectors) = block(self.name(), self.hidden)?;
        let defines = [("THREADS", threads.to_string()), ("VECS", vectors.to_string())];
        let kernel = cuda.kernel(SOURCE, "token_gate_fwd", &defines, 0)?;
        let params = params(self.name(), args, self.tokens, self.hidden)?;
        cuda.launch(&kernel, Config::linear(self.tokens, threads as u32), &params)
    }
}

impl Op for TokenGateBwd {
    fn name(&self) -> &'static str {
        "token_gate_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let rows = [self.tokens, self.hidden];
        vec![
            ArgSpec::read("y", DType::Bf16, &rows),
            ArgSpec::read("weight", DType::Bf16, &[self.hidden]),
            ArgSpec::read("x", DType::Bf16, &rows),
            // Any gates do: the formula holds for given ones.
            ArgSpec::read("gate", DType::F32, &[self.tokens]).sample(Sample::Uniform(0.1, 0.9)),
            ArgSpec::read("dout", DType::Bf16, &rows),
            ArgSpec::read("dres", DType::Bf16, &rows),
            ArgSpec::write("dx", DType::Bf16, &rows),
            ArgSpec::write("dy", DType::Bf16, &rows),
            ArgSpec::write("dw_partial", DType::F32, &[partials(self.tokens), self.hidden]),
        ]
    }
    /// The dot, dy and dw (two each), dx.
    fn flops(&self) -> f64 {
        7.0 * self.tokens as f64 * self.hidden as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        if arg == 8 {
            tolerance(DType::F32, self.hidden + self.tokens.div_ceil(partials(self.tokens)), 0)
        } else {
            tolerance(DType::Bf16, self.hidden, 0)
        }
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let (threads, vectors) = block(self.name(), self.hidden)?;
        let defines = [("THREADS", threads.to_string()), ("VECS", vectors.to_string())];
        let kernel = cuda.kernel(SOURCE, "token_gate_bwd", &defines, 0)?;
        let params = params(self.name(), args, self.tokens, self.hidden)?;
        cuda.launch(&kernel, Config::linear(partials(self.tokens), threads as u32), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    #[test]
    fn backward_is_the_forwards_gradient() {
        for (tokens, hidden) in [(1, 8), (7, 24), (300, 8)] {
            let fwd = TokenGateFwd { tokens, hidden };
            let bwd = TokenGateBwd { tokens, hidden };
            let v = inputs(&fwd, 5);
            check_f32_against_f64(&fwd, &v);
            let gate = run_f64(&fwd, &v)[4].clone();
            let dout = to_bf16(&normals(tokens * hidden, 21, 1.0));
            let dres = to_bf16(&normals(tokens * hidden, 22, 1.0));
            let b = vec![
                v[0].clone(),
                v[1].clone(),
                v[2].clone(),
                gate,
                dout.clone(),
                dres.clone(),
                vec![],
                vec![],
                vec![],
            ];
            check_f32_against_f64(&bwd, &b);
            let after = run_f64(&bwd, &b);
            check_op_gradient(&fwd, &v, &[(3, &dout)], 2, &after[6]);
            // What reaches y on other ways is no gradient of this op.
            let dy: Vec<f64> = after[7].iter().zip(&dres).map(|(d, r)| d - r).collect();
            check_op_gradient(&fwd, &v, &[(3, &dout)], 0, &dy);
            let dw: Vec<f64> = (0..hidden).map(|c| after[8].iter().skip(c).step_by(hidden).sum()).collect();
            check_op_gradient(&fwd, &v, &[(3, &dout)], 1, &dw);
        }
    }

    #[test]
    fn a_zero_weight_halves() {
        let op = TokenGateFwd { tokens: 3, hidden: 8 };
        let mut v = inputs(&op, 2);
        v[1].fill(0.0);
        let after = run_f64(&op, &v);
        assert!(after[4].iter().all(|g| *g == 0.5));
        assert!(after[3].iter().zip(&v[2]).all(|(o, x)| *o == 0.5 * x));
    }

    #[test]
    fn blocks_cover_every_row_length() {
        for hidden in (8..=MAX_HIDDEN).step_by(8) {
            let (threads, vectors) = block("token_gate", hidden).unwrap();
            assert!(threads % 32 == 0 && threads * vectors * VECTOR >= hidden && vectors <= 4);
        }
        assert!(block("token_gate", MAX_HIDDEN + 8).is_err() && block("token_gate", 12).is_err());
    }
}
