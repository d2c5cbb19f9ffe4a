//! SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020): h = silu(gate) * up, silu(x) = x * sigmoid(x).
//!
//! Routed rows (tokens sorted by expert) are also weighed with their routing probability, as the expert MLP
//! does before its second product, and padding rows past the last expert's are written as zeros.

use super::owned_rows::{OwnedRows, row_gradients, sample_bf16, sample_routed, used_rows};
use super::support::sigmoid;
use super::{ArgSpec, CpuArgs, Op, Real, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue, KernelSource};
use crate::program::DType;
use rayon::prelude::*;

/// h = silu(gate) * up (* prob). Args: gate_up R bf16 `[R,2F]` (gate, then up), [probs R f32 `[R]`, offsets R I32
/// [experts+1] when routed], h W bf16 `[R,F]`. Rows >= offsets`[experts]` give zeros.
#[derive(Debug, Clone, PartialEq)]
pub struct SwigluFwd {
    pub rows: usize,
    pub ffn: usize,
    pub routed: bool,
    /// Local experts; not used unless `routed`.
    pub experts: usize,
}

/// Gradients of [`SwigluFwd`]. Args: gate_up R bf16 `[R,2F]`, dh R bf16 `[R,F]`, [probs R f32 `[R]`, offsets R I32
/// [experts+1]], dgate_up W bf16 `[R,2F]`, [dprobs W f32 `[R]`]. Rows >= offsets`[experts]` give zeros.
#[derive(Debug, Clone, PartialEq)]
pub struct SwigluBwd {
    pub rows: usize,
    pub ffn: usize,
    pub routed: bool,
    /// Local experts; not used unless `routed`.
    pub experts: usize,
}

impl SwigluFwd {
    fn owned(&self) -> OwnedRows {
        OwnedRows { rows: self.rows, ffn: self.ffn, experts: self.routed.then_some(self.experts) }
    }
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let gate_up = args.input(0)?;
        let (probs, used) = if self.routed {
            (Some(args.input(1)?), used_rows(args.ints(2)?, self.experts, self.rows))
        } else {
            (None, self.rows)
        };
        let h = args.output(if self.routed { 3 } else { 1 })?;
        let f = self.ffn.max(1);
        h.par_chunks_mut(f).enumerate().for_each(|(row, h)| {
            if row >= used {
                return h.fill(T::of(0.0));
            }
            let (gate, up) = gate_up[row * 2 * f..][..2 * f].split_at(f);
            let prob = probs.map_or(T::of(1.0), |p| p[row]);
            for i in 0..f {
                h[i] = (gate[i] * sigmoid(gate[i]) * up[i] * prob).bf16();
            }
        });
        Ok(())
    }
}

impl SwigluBwd {
    fn owned(&self) -> OwnedRows {
        OwnedRows { rows: self.rows, ffn: self.ffn, experts: self.routed.then_some(self.experts) }
    }
    /// Sums dprob in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (gate_up, dh) = (args.input(0)?, args.input(1)?);
        let (probs, used) = if self.routed {
            (Some(args.input(2)?), used_rows(args.ints(3)?, self.experts, self.rows))
        } else {
            (None, self.rows)
        };
        let dgate_up = args.output(if self.routed { 4 } else { 2 })?;
        let f = self.ffn.max(1);
        let row_gradient = |row: usize, out: &mut [T]| -> T {
            if row >= used {
                out.fill(T::of(0.0));
                return T::of(0.0);
            }
            let (gate, up) = gate_up[row * 2 * f..][..2 * f].split_at(f);
            let (dgate, dup) = out.split_at_mut(f);
            let prob = probs.map_or(T::of(1.0), |p| p[row]);
            let mut dprob = 0.0;
            for i in 0..f {
                let d = dh[row * f + i];
                let s = sigmoid(gate[i]);
                let silu = gate[i] * s;
                dprob += (d * silu * up[i]).f64();
                dgate[i] = (d * prob * up[i] * (s + silu * (T::of(1.0) - s))).bf16();
                dup[i] = (d * prob * silu).bf16();
            }
            T::of(dprob).f32()
        };
        let dprobs = if self.routed { Some(args.output(5)?) } else { None };
        row_gradients(dgate_up, 2 * f, dprobs, row_gradient);
        Ok(())
    }
}

const SOURCE: KernelSource = KernelSource { name: "swiglu/kernel.cu", text: include_str!("kernel.cu") };
impl Op for SwigluFwd {
    fn name(&self) -> &'static str {
        "swiglu_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let mut args = vec![ArgSpec::read("gate_up", DType::Bf16, &[self.rows, 2 * self.ffn])];
        self.owned().specs(&mut args);
        args.push(ArgSpec::write("h", DType::Bf16, &[self.rows, self.ffn]));
        args
    }
    /// Sigmoid (negate, exp, add, divide), two products, one more when routed.
    fn flops(&self) -> f64 {
        (6.0 + self.routed as usize as f64) * self.rows as f64 * self.ffn as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 1, 0)
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        if !self.routed {
            return None;
        }
        let (probs, offsets) = sample_routed(seed, self.rows, self.experts);
        Some(vec![sample_bf16(seed, 3, self.rows * 2 * self.ffn), probs, offsets, vec![]])
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        self.owned().forward(cuda, self.name(), SOURCE, ["swiglu_fwd", "swiglu_routed_fwd"], args)
    }
}

impl Op for SwigluBwd {
    fn name(&self) -> &'static str {
        "swiglu_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let mut args = vec![
            ArgSpec::read("gate_up", DType::Bf16, &[self.rows, 2 * self.ffn]),
            ArgSpec::read("dh", DType::Bf16, &[self.rows, self.ffn]),
        ];
        self.owned().specs(&mut args);
        args.push(ArgSpec::write("dgate_up", DType::Bf16, &[self.rows, 2 * self.ffn]));
        if self.routed {
            args.push(ArgSpec::write("dprobs", DType::F32, &[self.rows]));
        }
        args
    }
    /// Sigmoid (four), silu, its slope (three), dgate (two), dup; when routed prob * dh and dprob (three) too.
    fn flops(&self) -> f64 {
        (11.0 + 4.0 * self.routed as usize as f64) * self.rows as f64 * self.ffn as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        tolerance(if arg == 5 { DType::F32 } else { DType::Bf16 }, if arg == 5 { self.ffn } else { 1 }, 0)
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        if !self.routed {
            return None;
        }
        let (probs, offsets) = sample_routed(seed, self.rows, self.experts);
        let gate_up = sample_bf16(seed, 3, self.rows * 2 * self.ffn);
        let dh = sample_bf16(seed, 4, self.rows * self.ffn);
        Some(vec![gate_up, dh, probs, offsets, vec![], vec![]])
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        self.owned().backward(cuda, self.name(), SOURCE, ["swiglu_bwd", "swiglu_routed_bwd"], args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    fn pair(rows: usize, ffn: usize, routed: bool) -> (SwigluFwd, SwigluBwd) {
        let experts = 3;
        (SwigluFwd { rows, ffn, routed, experts }, SwigluBwd { rows, ffn, routed, experts })
    }

    #[test]
    fn backward_is_the_forwards_gradient() {
        for (rows, ffn, routed) in [(1, 8, false), (7, 16, false), (9, 8, true)] {
            let (fwd, bwd) = pair(rows, ffn, routed);
            let v = inputs(&fwd, 4);
            check_f32_against_f64(&fwd, &v);
            let out = v.len() - 1;
            let dh = to_bf16(&normals(rows * ffn, 31, 1.0));
            let mut b = vec![v[0].clone(), dh.clone()];
            b.extend_from_slice(&v[1..out]);
            let first_out = b.len();
            b.resize(bwd.args().len(), vec![]);
            check_f32_against_f64(&bwd, &b);
            let after = run_f64(&bwd, &b);
            check_op_gradient(&fwd, &v, &[(out, &dh)], 0, &after[first_out]);
            if routed {
                check_op_gradient(&fwd, &v, &[(out, &dh)], 1, &after[5]);
            }
        }
    }

    #[test]
    fn padding_rows_are_zero_whatever_they_hold() {
        let (fwd, bwd) = pair(8, 8, true);
        let mut v = inputs(&fwd, 4);
        assert_eq!(v[2][3], 6.0, "offsets {:?}", v[2]);
        v[0][6 * 16..].fill(f64::NAN);
        let h = &run_f64(&fwd, &v)[3];
        assert!(h[6 * 8..].iter().all(|x| *x == 0.0) && h[..6 * 8].iter().all(|x| *x != 0.0));
        let dh = vec![1.0; 64];
        let after = run_f64(&bwd, &[v[0].clone(), dh, v[1].clone(), v[2].clone(), vec![], vec![]]);
        assert!(after[4][6 * 16..].iter().chain(&after[5][6..]).all(|x| *x == 0.0));
    }

    #[test]
    fn large_gates_saturate() {
        let (fwd, _) = pair(1, 8, false);
        let mut gate_up = vec![1.0; 16];
        gate_up[0] = 200.0;
        gate_up[1] = -200.0;
        let h = &run_f32(&fwd, &[gate_up, vec![]])[1];
        assert_eq!((h[0], h[1].abs() < 1e-30), (200.0, true));
    }
}
