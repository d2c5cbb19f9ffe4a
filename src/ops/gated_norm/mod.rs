//! Mamba-2's gated group norm (Dao and Gu, 2024): y = rmsnorm over each group of (x * silu(z)), times a weight.
//!
//! z is the first `groups * group` columns of rows of `z_stride`: the in-projection's output. [`after`] has the order of the
//! gated delta net, which norms first.

pub mod after;

use super::support::{VECTOR, addresses, aligned, sigmoid};
use super::{ArgSpec, CpuArgs, Op, Real, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource};
use crate::program::DType;
use rayon::prelude::*;

/// Args: x R bf16 [rows, groups * group], z R bf16 [rows, z_stride], weight R bf16 [groups * group], y W bf16 [rows, groups *
/// group], rstd W f32 [rows, groups].
#[derive(Debug, Clone, PartialEq)]
pub struct GatedNormFwd {
    pub rows: usize,
    pub groups: usize,
    /// Width of a group.
    pub group: usize,
    pub z_stride: usize,
    pub eps: f64,
}

/// Args: x, z, weight as there, rstd R f32 [rows, groups], dy R bf16 [rows, groups * group], dx W bf16 [rows, groups * group],
/// dz W bf16 [rows, groups * group], dw_partial W f32 [partials(rows, groups, group), groups * group].
#[derive(Debug, Clone, PartialEq)]
pub struct GatedNormBwd {
    pub rows: usize,
    pub groups: usize,
    pub group: usize,
    pub z_stride: usize,
}

/// Multiprocessors of an H100 or H200.
const MULTIPROCESSORS: usize = 132;
/// Warps of the backward that a multiprocessor holds, by vectors a lane: one of them a block, of which it takes 32, and the kernel's
/// launch bounds keep its registers to that.
const fn resident_warps(items: usize) -> usize {
    match items {
        0 | 1 => 32,
        2..=4 => 20,
        _ => 12,
    }
}
/// Widest group whose values a warp's registers hold: 8 vectors a lane.
const MAX_GROUP: usize = 2048;
const FWD_THREADS: usize = 256;
const SOURCE: KernelSource = KernelSource { name: "gated_norm/kernel.cu", text: include_str!("kernel.cu") };

/// Rows of the weight gradient's parts: warps a group. All of them are resident at once (4096 in two rounds, the second a tenth
/// full, took 118 us of an H200 at 8192 rows of 8 groups of 512, 0.72 of a copy's rate), and each walks as many rows, but the last.
pub fn partials(rows: usize, groups: usize, group: usize) -> usize {
    let most = (MULTIPROCESSORS * resident_warps(items(group)) / groups.max(1)).max(1);
    rows.div_ceil(rows.div_ceil(most).max(1))
}

/// Vectors a lane.
fn items(group: usize) -> usize {
    group.div_ceil(VECTOR * 32)
}

fn check(op: &str, group: usize, z_stride: usize, args: &[DevPtr]) -> Result<usize, DeviceError> {
    check_multiple(op, "group", group, VECTOR)?;
    check_multiple(op, "z_stride", z_stride, VECTOR)?;
    aligned(op, args)?;
    if group > MAX_GROUP {
        return Err(DeviceError::Invalid(format!(
            "{op}: a group is {group} wide, the kernel takes at most {MAX_GROUP}; use more groups or --device cpu"
        )));
    }
    Ok(items(group))
}

impl GatedNormFwd {
    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (x, z, weight) = (args.input(0)?, args.input(1)?, args.input(2)?);
        let (y, rstd) = (args.output(3)?, args.output(4)?);
        let (group, groups) = (self.group, self.groups);
        y.par_chunks_mut(group.max(1)).zip(rstd).enumerate().for_each(|(i, (y, rstd))| {
            let (row, g) = (i / groups, i % groups);
            let u = |c: usize| {
                let v = z[row * self.z_stride + g * group + c];
                x[i * group + c] * v * sigmoid(v)
            };
            let sum: f64 = (0..group).map(|c| u(c).f64() * u(c).f64()).sum();
            *rstd = T::of(1.0 / (sum / group as f64 + self.eps).sqrt()).f32();
            for (c, y) in y.iter_mut().enumerate() {
                *y = (u(c) * *rstd * weight[g * group + c]).bf16();
            }
        });
        Ok(())
    }
}

impl GatedNormBwd {
    fn parts(&self) -> usize {
        partials(self.rows, self.groups, self.group)
    }

    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (x, z, weight) = (args.input(0)?, args.input(1)?, args.input(2)?);
        let (rstd, dy) = (args.input(3)?, args.input(4)?);
        let (dx, dz, partial) = (args.output(5)?, args.output(6)?, args.output(7)?);
        let (group, groups) = (self.group, self.groups);
        let width = group * groups;
        let gate = |row: usize, col: usize| z[row * self.z_stride + col];
        let normed = |row: usize, col: usize| {
            let v = gate(row, col);
            x[row * width + col] * v * sigmoid(v) * rstd[row * groups + col / group]
        };
        dx.par_chunks_mut(group.max(1)).zip(dz.par_chunks_mut(group.max(1))).enumerate().for_each(
            |(i, (dx, dz))| {
                let (row, first) = (i / groups, i % groups * group);
                let dn = |c: usize| dy[row * width + first + c] * weight[first + c];
                let dot: f64 = (0..group).map(|c| (dn(c) * normed(row, first + c)).f64()).sum();
                let mean = T::of(dot / group as f64);
                for c in 0..group {
                    let (v, du) = (gate(row, first + c), (dn(c) - normed(row, first + c) * mean) * rstd[i]);
                    let s = sigmoid(v);
                    dx[c] = (du * v * s).bf16();
                    dz[c] =
                        (du * x[row * width + first + c] * s * (T::of(1.0) + v * (T::of(1.0) - s))).bf16();
                }
            },
        );
        let parts = partials(self.rows, groups, group);
        partial.par_chunks_mut(width.max(1)).enumerate().for_each(|(part, out)| {
            for (col, out) in out.iter_mut().enumerate() {
                let term = |row: usize| (dy[row * width + col] * normed(row, col)).f64();
                *out = T::of((part..self.rows).step_by(parts).map(term).sum::<f64>()).f32();
            }
        });
        Ok(())
    }
}

impl Op for GatedNormFwd {
    fn name(&self) -> &'static str {
        "gated_norm_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let (rows, width) = (self.rows, self.groups * self.group);
        vec![
            ArgSpec::read("x", DType::Bf16, &[rows, width]),
            ArgSpec::read("z", DType::Bf16, &[rows, self.z_stride]),
            ArgSpec::read("weight", DType::Bf16, &[width]),
            ArgSpec::write("y", DType::Bf16, &[rows, width]),
            ArgSpec::write("rstd", DType::F32, &[rows, self.groups]),
        ]
    }
    /// Gate (six), square and sum, scale by 1/rms and weight.
    fn flops(&self) -> f64 {
        (10 * self.rows * self.groups * self.group) as f64
    }
    /// Of z, the gate's columns alone are read.
    fn bytes(&self) -> f64 {
        let width = self.groups * self.group;
        (self.rows * (6 * width + 4 * self.groups) + 2 * width) as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        tolerance(if arg == 4 { DType::F32 } else { DType::Bf16 }, self.group, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        if self.rows * self.groups == 0 {
            return Ok(Issue::Nothing);
        }
        let op = self.name();
        let items = check(op, self.group, self.z_stride, args)?;
        let [x, z, weight, y, rstd] = addresses(op, args)?;
        let kernel = cuda.kernel(SOURCE, "gated_norm_fwd", &[("ITEMS", items.to_string())], 0)?;
        let int = |what: &str, n: usize| int_param(op, what, n);
        let warps = self.rows * self.groups;
        int("rows * groups", warps)?;
        let params = [
            x.into(),
            z.into(),
            weight.into(),
            y.into(),
            rstd.into(),
            int("z_stride", self.z_stride)?.into(),
            int("group", self.group)?.into(),
            int("groups", self.groups)?.into(),
            int("rows", self.rows)?.into(),
            (self.eps as f32).into(),
        ];
        cuda.launch(&kernel, Config::linear(warps.div_ceil(FWD_THREADS / 32), FWD_THREADS as u32), &params)
    }
}

impl Op for GatedNormBwd {
    fn name(&self) -> &'static str {
        "gated_norm_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let (rows, width) = (self.rows, self.groups * self.group);
        vec![
            ArgSpec::read("x", DType::Bf16, &[rows, width]),
            ArgSpec::read("z", DType::Bf16, &[rows, self.z_stride]),
            ArgSpec::read("weight", DType::Bf16, &[width]),
            ArgSpec::read("rstd", DType::F32, &[rows, self.groups]).sample(super::Sample::Uniform(0.5, 2.0)),
            ArgSpec::read("dy", DType::Bf16, &[rows, width]),
            ArgSpec::write("dx", DType::Bf16, &[rows, width]),
            ArgSpec::write("dz", DType::Bf16, &[rows, width]),
            ArgSpec::write("dw_partial", DType::F32, &[partials(rows, self.groups, self.group), width]),
        ]
    }
    /// The forward's gate and norm again (eight), the mean (three), du (four), both gates (eight), dw (two).
    fn flops(&self) -> f64 {
        (25 * self.rows * self.groups * self.group) as f64
    }
    /// Of z, the gate's columns alone are read.
    fn bytes(&self) -> f64 {
        let width = self.groups * self.group;
        (self.rows * (10 * width + 4 * self.groups) + 2 * width + 4 * self.parts() * width) as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        if arg == 7 {
            return tolerance(DType::F32, self.rows.div_ceil(self.parts().max(1)), 0);
        }
        tolerance(DType::Bf16, self.group, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        if self.rows * self.groups == 0 {
            return Ok(Issue::Nothing);
        }
        let op = self.name();
        let items = check(op, self.group, self.z_stride, args)?;
        let [x, z, weight, rstd, dy, dx, dz, partial] = addresses(op, args)?;
        let kernel = cuda.kernel(SOURCE, "gated_norm_bwd", &[("ITEMS", items.to_string())], 0)?;
        let int = |what: &str, n: usize| int_param(op, what, n);
        let params = [
            x.into(),
            z.into(),
            weight.into(),
            rstd.into(),
            dy.into(),
            dx.into(),
            dz.into(),
            partial.into(),
            int("z_stride", self.z_stride)?.into(),
            int("group", self.group)?.into(),
            int("groups", self.groups)?.into(),
            int("rows", self.rows)?.into(),
        ];
        let grid = [self.parts() as u32, self.groups as u32, 1];
        cuda.launch(&kernel, Config { grid, block: [32, 1, 1], shared_bytes: 0 }, &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    #[test]
    fn backward_is_the_forwards_gradient() {
        for (rows, groups, group, z_stride) in [(1, 1, 16, 16), (5, 2, 24, 55), (7, 3, 16, 48)] {
            let fwd = GatedNormFwd { rows, groups, group, z_stride, eps: 1e-5 };
            let bwd = GatedNormBwd { rows, groups, group, z_stride };
            let v = inputs(&fwd, 5);
            check_f32_against_f64(&fwd, &v);
            let width = groups * group;
            let dy = to_bf16(&normals(rows * width, 77, 1.0));
            let rstd = run_f64(&fwd, &v)[4].clone();
            let mut b = v[..3].to_vec();
            b.extend([rstd, dy.clone(), vec![], vec![], vec![]]);
            check_f32_against_f64(&bwd, &b);
            let after = run_f64(&bwd, &b);
            check_op_gradient(&fwd, &v, &[(3, &dy)], 0, &after[5]);
            let mut dz = vec![0.0; rows * z_stride];
            for row in 0..rows {
                dz[row * z_stride..][..width].copy_from_slice(&after[6][row * width..][..width]);
            }
            check_op_gradient(&fwd, &v, &[(3, &dy)], 1, &dz);
            let sum = |c: usize| (0..bwd.parts()).map(|r| after[7][r * width + c]).sum();
            check_op_gradient(&fwd, &v, &[(3, &dy)], 2, &(0..width).map(sum).collect::<Vec<_>>());
        }
    }

    #[test]
    fn every_group_has_norm_one() {
        let fwd = GatedNormFwd { rows: 3, groups: 2, group: 8, z_stride: 16, eps: 0.0 };
        let mut v = inputs(&fwd, 6);
        v[2].fill(1.0);
        for group in run_f64(&fwd, &v)[3].chunks(8) {
            let mean: f64 = group.iter().map(|x| x * x / 8.0).sum();
            assert!((mean - 1.0).abs() < 1e-12, "{mean}");
        }
    }
}
