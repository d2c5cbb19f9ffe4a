//! Squared ReLU (So et al., "Primer", 2021), the activation of Nemotron's MLPs, which have no gate: y = max(x, 0)^2.
//!
//! Routed rows (tokens sorted by expert) are also weighed with their routing probability, and padding rows past the
//! last expert's are written as zeros, as in `swiglu`.

use super::owned_rows::{OwnedRows, row_gradients, sample_bf16, sample_routed, used_rows};
use super::{ArgSpec, CpuArgs, Op, Real, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue, KernelSource};
use crate::program::DType;
use rayon::prelude::*;

/// y = max(x, 0)^2 (* prob). Args: x R bf16 `[R,F]`, [probs R f32 `[R]`, offsets R I32 [experts+1] when routed], y W bf16 `[R,F]`.
/// Rows >= offsets`[experts]` give zeros.
#[derive(Debug, Clone, PartialEq)]
pub struct SquaredReluFwd {
    pub rows: usize,
    pub ffn: usize,
    pub routed: bool,
    /// Local experts; not used unless `routed`.
    pub experts: usize,
}

/// Gradients of [`SquaredReluFwd`]. Args: x R bf16 `[R,F]`, dy R bf16 `[R,F]`, [probs R f32 `[R]`, offsets R I32 [experts+1]], dx W
/// bf16 `[R,F]`, [dprobs W f32 `[R]`]. Rows >= offsets`[experts]` give zeros.
#[derive(Debug, Clone, PartialEq)]
pub struct SquaredReluBwd {
    pub rows: usize,
    pub ffn: usize,
    pub routed: bool,
    /// Local experts; not used unless `routed`.
    pub experts: usize,
}

fn relu<T: Real>(x: T) -> T {
    x.max(T::of(0.0))
}

impl SquaredReluFwd {
    fn owned(&self) -> OwnedRows {
        OwnedRows { rows: self.rows, ffn: self.ffn, experts: self.routed.then_some(self.experts) }
    }
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let x = args.input(0)?;
        let (probs, used) = if self.routed {
            (Some(args.input(1)?), used_rows(args.ints(2)?, self.experts, self.rows))
        } else {
            (None, self.rows)
        };
        let y = args.output(if self.routed { 3 } else { 1 })?;
        let f = self.ffn.max(1);
        y.par_chunks_mut(f).zip(x.par_chunks(f)).enumerate().for_each(|(row, (y, x))| {
            if row >= used {
                return y.fill(T::of(0.0));
            }
            let prob = probs.map_or(T::of(1.0), |p| p[row]);
            y.iter_mut().zip(x).for_each(|(y, x)| *y = (relu(*x) * relu(*x) * prob).bf16());
        });
        Ok(())
    }
}

impl SquaredReluBwd {
    fn owned(&self) -> OwnedRows {
        OwnedRows { rows: self.rows, ffn: self.ffn, experts: self.routed.then_some(self.experts) }
    }
    /// Sums dprob in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (x, dy) = (args.input(0)?, args.input(1)?);
        let (probs, used) = if self.routed {
            (Some(args.input(2)?), used_rows(args.ints(3)?, self.experts, self.rows))
        } else {
            (None, self.rows)
        };
        let dx = args.output(if self.routed { 4 } else { 2 })?;
        let f = self.ffn.max(1);
        let row_gradient = |row: usize, out: &mut [T]| -> T {
            if row >= used {
                out.fill(T::of(0.0));
                return T::of(0.0);
            }
            let prob = probs.map_or(T::of(1.0), |p| p[row]);
            let mut dprob = 0.0;
            for (i, out) in out.iter_mut().enumerate() {
                let (u, d) = (relu(x[row * f + i]), dy[row * f + i]);
                dprob += (d * u * u).f64();
                *out = (d * T::of(2.0) * u * prob).bf16();
            }
            T::of(dprob).f32()
        };
        let dprobs = if self.routed { Some(args.output(5)?) } else { None };
        row_gradients(dx, f, dprobs, row_gradient);
        Ok(())
    }
}

const SOURCE: KernelSource = KernelSource { name: "squared_relu/kernel.cu", text: include_str!("kernel.cu") };
impl Op for SquaredReluFwd {
    fn name(&self) -> &'static str {
        "squared_relu_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let shape = [self.rows, self.ffn];
        let mut args = vec![ArgSpec::read("x", DType::Bf16, &shape)];
        self.owned().specs(&mut args);
        args.push(ArgSpec::write("y", DType::Bf16, &shape));
        args
    }
    /// Maximum and square, one product more when routed.
    fn flops(&self) -> f64 {
        (2.0 + self.routed as usize as f64) * self.rows as f64 * self.ffn as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 1, 0)
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        if !self.routed {
            return None;
        }
        let (probs, offsets) = sample_routed(seed, self.rows, self.experts);
        Some(vec![sample_bf16(seed, 3, self.rows * self.ffn), probs, offsets, vec![]])
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        self.owned().forward(cuda, self.name(), SOURCE, ["squared_relu_fwd", "squared_relu_routed_fwd"], args)
    }
}

impl Op for SquaredReluBwd {
    fn name(&self) -> &'static str {
        "squared_relu_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let shape = [self.rows, self.ffn];
        let mut args =
            vec![ArgSpec::read("x", DType::Bf16, &shape), ArgSpec::read("dy", DType::Bf16, &shape)];
        self.owned().specs(&mut args);
        args.push(ArgSpec::write("dx", DType::Bf16, &shape));
        if self.routed {
            args.push(ArgSpec::write("dprobs", DType::F32, &[self.rows]));
        }
        args
    }
    /// Maximum and two products; when routed prob * dx and dprob (three) too.
    fn flops(&self) -> f64 {
        (3.0 + 4.0 * self.routed as usize as f64) * self.rows as f64 * self.ffn as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        tolerance(if arg == 5 { DType::F32 } else { DType::Bf16 }, if arg == 5 { self.ffn } else { 1 }, 0)
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        if !self.routed {
            return None;
        }
        let (probs, offsets) = sample_routed(seed, self.rows, self.experts);
        let [x, dy] = [3, 4].map(|key| sample_bf16(seed, key, self.rows * self.ffn));
        Some(vec![x, dy, probs, offsets, vec![], vec![]])
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        self.owned().backward(
            cuda,
            self.name(),
            SOURCE,
            ["squared_relu_bwd", "squared_relu_routed_bwd"],
            args,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    #[test]
    fn backward_is_the_forwards_gradient() {
        for (rows, ffn, routed) in [(1, 8, false), (7, 16, false), (9, 8, true)] {
            let experts = 3;
            let fwd = SquaredReluFwd { rows, ffn, routed, experts };
            let bwd = SquaredReluBwd { rows, ffn, routed, experts };
            let mut v = inputs(&fwd, 4);
            // Differences must not step over the kink.
            v[0].iter_mut().filter(|x| x.abs() < 1e-3).for_each(|x| *x = 0.25);
            check_f32_against_f64(&fwd, &v);
            let out = v.len() - 1;
            let dy = to_bf16(&normals(rows * ffn, 31, 1.0));
            let mut b = vec![v[0].clone(), dy.clone()];
            b.extend_from_slice(&v[1..out]);
            let first_out = b.len();
            b.resize(bwd.args().len(), vec![]);
            check_f32_against_f64(&bwd, &b);
            let after = run_f64(&bwd, &b);
            check_op_gradient(&fwd, &v, &[(out, &dy)], 0, &after[first_out]);
            if routed {
                check_op_gradient(&fwd, &v, &[(out, &dy)], 1, &after[5]);
            }
        }
    }

    #[test]
    fn padding_rows_are_zero_whatever_they_hold() {
        let fwd = SquaredReluFwd { rows: 8, ffn: 8, routed: true, experts: 3 };
        let mut v = inputs(&fwd, 4);
        assert_eq!(v[2][3], 6.0, "offsets {:?}", v[2]);
        v[0][6 * 8..].fill(f64::NAN);
        let y = &run_f64(&fwd, &v)[3];
        assert!(y[6 * 8..].iter().all(|x| *x == 0.0) && y[..6 * 8].iter().any(|x| *x != 0.0));
    }
}
