//! The gated delta net's norm with an output gate: y = rmsnorm over each group of x, times a weight that all groups share,
//! times silu(z). Norm first, where Mamba-2 gates first.

use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::ops::rmsnorm::scale_offset;
use crate::ops::support::{VECTOR, aligned, sigmoid};
use crate::ops::{ArgSpec, CpuArgs, Op, Real, Sample, check_multiple, int_param, tolerance};
use crate::program::DType;
use rayon::prelude::*;

/// Args: x R bf16 [rows, groups * group], z R bf16 [rows, z_stride] (its first groups * group columns are read), weight R bf16
/// `[group]`, y W bf16 [rows, groups * group], rstd W f32 [rows, groups].
#[derive(Debug, Clone, PartialEq)]
pub struct NormGateFwd {
    pub rows: usize,
    pub groups: usize,
    /// Width of a group.
    pub group: usize,
    pub z_stride: usize,
    pub eps: f64,
    /// The weight is stored less one.
    pub zero_centered: bool,
}

/// Args: x, z, weight as there, rstd R f32 [rows, groups], dy R bf16 [rows, groups * group], dx W bf16 [rows, groups * group],
/// dz W bf16 [rows, groups * group], dw_partial W f32 [`partials(rows * groups)`, group].
#[derive(Debug, Clone, PartialEq)]
pub struct NormGateBwd {
    pub rows: usize,
    pub groups: usize,
    pub group: usize,
    pub z_stride: usize,
    pub zero_centered: bool,
}

/// Blocks of the backward, and rows of the weight gradient's parts: four for each of the 132 multiprocessors of an H200,
/// nearly.
const MAX_PARTIALS: usize = 512;
/// Widest group whose values a warp's registers hold: two vectors a lane.
const MAX_GROUP: usize = 512;
const THREADS: usize = 256;
const SOURCE: KernelSource = KernelSource { name: "gated_norm/after.cu", text: include_str!("after.cu") };

/// Rows of the weight gradient's parts for so many groups in all.
pub fn partials(all_groups: usize) -> usize {
    all_groups.clamp(1, MAX_PARTIALS)
}

/// Lanes that share a group, and vectors that each holds.
fn cut(group: usize) -> (usize, usize) {
    let vectors = group.div_ceil(VECTOR);
    let lanes = vectors.next_power_of_two().min(32);
    (lanes, vectors.div_ceil(lanes))
}

fn check(op: &str, group: usize, z_stride: usize, args: &[DevPtr]) -> Result<(), DeviceError> {
    check_multiple(op, "group", group, VECTOR)?;
    check_multiple(op, "z_stride", z_stride, VECTOR)?;
    aligned(op, args)?;
    if group > MAX_GROUP {
        return Err(DeviceError::Invalid(format!(
            "{op}: a group is {group} wide, the kernel takes at most {MAX_GROUP}; use --device cpu"
        )));
    }
    Ok(())
}

fn defines(group: usize, zero_centered: bool) -> [(&'static str, String); 3] {
    let (lanes, items) = cut(group);
    [("LANES", lanes), ("ITEMS", items), ("ZERO_CENTERED", usize::from(zero_centered))]
        .map(|(name, value)| (name, value.to_string()))
}

fn ints(
    op: &str,
    z_stride: usize,
    group: usize,
    groups: usize,
    rows: usize,
) -> Result<Vec<Param>, DeviceError> {
    [("z_stride", z_stride), ("group", group), ("groups", groups), ("rows", rows)]
        .into_iter()
        .map(|(what, n)| int_param(op, what, n).map(Param::I32))
        .collect()
}

impl NormGateFwd {
    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (x, z, weight) = (args.input(0)?, args.input(1)?, args.input(2)?);
        let (y, rstd) = (args.output(3)?, args.output(4)?);
        let (group, groups) = (self.group, self.groups.max(1));
        let one = T::of(scale_offset(self.zero_centered));
        y.par_chunks_mut(group.max(1)).zip(rstd).enumerate().for_each(|(i, (y, rstd))| {
            let (row, g) = (i / groups, i % groups);
            let x = &x[i * group..][..group];
            let sum: f64 = x.iter().map(|x| x.f64() * x.f64()).sum();
            *rstd = T::of(1.0 / (sum / group as f64 + self.eps).sqrt()).f32();
            for (c, y) in y.iter_mut().enumerate() {
                let v = z[row * self.z_stride + g * group + c];
                *y = (x[c] * *rstd * (weight[c] + one) * v * sigmoid(v)).bf16();
            }
        });
        Ok(())
    }
}

impl NormGateBwd {
    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (x, z, weight) = (args.input(0)?, args.input(1)?, args.input(2)?);
        let (rstd, dy) = (args.input(3)?, args.input(4)?);
        let (dx, dz, partial) = (args.output(5)?, args.output(6)?, args.output(7)?);
        let (group, groups) = (self.group, self.groups.max(1));
        let one = T::of(scale_offset(self.zero_centered));
        let gate = |i: usize, c: usize| z[i / groups * self.z_stride + i % groups * group + c];
        let normed = |i: usize, c: usize| x[i * group + c] * rstd[i];
        dx.par_chunks_mut(group.max(1)).zip(dz.par_chunks_mut(group.max(1))).enumerate().for_each(
            |(i, (dx, dz))| {
                let dn = |c: usize| {
                    let v = gate(i, c);
                    dy[i * group + c] * (weight[c] + one) * v * sigmoid(v)
                };
                let dot: f64 = (0..group).map(|c| (dn(c) * normed(i, c)).f64()).sum();
                let mean = T::of(dot / group as f64);
                for c in 0..group {
                    let (v, n) = (gate(i, c), normed(i, c));
                    let s = sigmoid(v);
                    dx[c] = (rstd[i] * (dn(c) - n * mean)).bf16();
                    let slope = s * (T::of(1.0) + v * (T::of(1.0) - s));
                    dz[c] = (dy[i * group + c] * n * (weight[c] + one) * slope).bf16();
                }
            },
        );
        // Which groups a part sums does not matter to what is tested, their total does: part p takes p, p + parts, ...
        let (all, owners) = (self.rows * groups, THREADS / cut(group).0);
        let parts = partials(all);
        partial.par_chunks_mut(group.max(1)).enumerate().for_each(|(part, out)| {
            for (c, out) in out.iter_mut().enumerate() {
                let term = |i: usize| {
                    let v = gate(i, c);
                    (dy[i * group + c] * normed(i, c) * v * sigmoid(v)).f64()
                };
                let blocks = (part * owners..all).step_by(parts * owners);
                let sum = blocks.flat_map(|first| first..(first + owners).min(all)).map(term).sum::<f64>();
                *out = T::of(sum).f32();
            }
        });
        Ok(())
    }
}

impl Op for NormGateFwd {
    fn name(&self) -> &'static str {
        "norm_gate_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let (rows, width) = (self.rows, self.groups * self.group);
        vec![
            ArgSpec::read("x", DType::Bf16, &[rows, width]),
            ArgSpec::read("z", DType::Bf16, &[rows, self.z_stride]),
            ArgSpec::read("weight", DType::Bf16, &[self.group]),
            ArgSpec::write("y", DType::Bf16, &[rows, width]),
            ArgSpec::write("rstd", DType::F32, &[rows, self.groups]),
        ]
    }
    /// Square and sum, scale by 1/rms and weight, gate (six).
    fn flops(&self) -> f64 {
        (10 * self.rows * self.groups * self.group) as f64
    }
    /// Of z, the gate's columns alone are read.
    fn bytes(&self) -> f64 {
        let width = self.groups * self.group;
        (self.rows * (6 * width + 4 * self.groups) + 2 * self.group) as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        tolerance(if arg == 4 { DType::F32 } else { DType::Bf16 }, self.group, 0)
    }
    cpu_reference!();
    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], _: DevPtr) -> Result<Issue, DeviceError> {
        let all = self.rows * self.groups;
        if all == 0 {
            return Ok(Issue::Nothing);
        }
        let op = self.name();
        check(op, self.group, self.z_stride, args)?;
        int_param(op, "rows * groups", all)?;
        let kernel = cuda.kernel(SOURCE, "norm_gate_fwd", &defines(self.group, self.zero_centered), 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        params.extend(ints(op, self.z_stride, self.group, self.groups, self.rows)?);
        params.push((self.eps as f32).into());
        let blocks = (all * cut(self.group).0).div_ceil(THREADS);
        cuda.launch(&kernel, Config::linear(blocks, THREADS as u32), &params)
    }
}

impl Op for NormGateBwd {
    fn name(&self) -> &'static str {
        "norm_gate_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let (rows, width) = (self.rows, self.groups * self.group);
        vec![
            ArgSpec::read("x", DType::Bf16, &[rows, width]),
            ArgSpec::read("z", DType::Bf16, &[rows, self.z_stride]),
            ArgSpec::read("weight", DType::Bf16, &[self.group]),
            // Any positive numbers do: the formula holds for a given rstd.
            ArgSpec::read("rstd", DType::F32, &[rows, self.groups]).sample(Sample::Uniform(0.5, 2.0)),
            ArgSpec::read("dy", DType::Bf16, &[rows, width]),
            ArgSpec::write("dx", DType::Bf16, &[rows, width]),
            ArgSpec::write("dz", DType::Bf16, &[rows, width]),
            ArgSpec::write("dw_partial", DType::F32, &[partials(rows * self.groups), self.group]),
        ]
    }
    /// The gate (five), the norm, dw (three), dz (six), dn and its mean (four), dx (three).
    fn flops(&self) -> f64 {
        (22 * self.rows * self.groups * self.group) as f64
    }
    /// Of z, the gate's columns alone are read.
    fn bytes(&self) -> f64 {
        let (width, parts) = (self.groups * self.group, partials(self.rows * self.groups));
        (self.rows * (10 * width + 4 * self.groups) + 2 * self.group + 4 * parts * self.group) as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        if arg == 7 {
            let all = self.rows * self.groups;
            return tolerance(DType::F32, all.div_ceil(partials(all)), 0);
        }
        tolerance(DType::Bf16, self.group, 0)
    }
    cpu_reference!();
    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], _: DevPtr) -> Result<Issue, DeviceError> {
        let all = self.rows * self.groups;
        if all == 0 {
            let bytes = partials(0) * self.group * DType::F32.size();
            return Ok(Issue::Zero { dst: args[7], bytes });
        }
        let op = self.name();
        check(op, self.group, self.z_stride, args)?;
        int_param(op, "rows * groups", all)?;
        let kernel = cuda.kernel(SOURCE, "norm_gate_bwd", &defines(self.group, self.zero_centered), 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        params.extend(ints(op, self.z_stride, self.group, self.groups, self.rows)?);
        cuda.launch(&kernel, Config::linear(partials(all), THREADS as u32), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    #[test]
    fn backward_is_the_forwards_gradient() {
        for (rows, groups, group, z_stride, zero_centered) in
            [(1, 1, 16, 16, false), (5, 2, 24, 55, true), (7, 3, 16, 48, false), (300, 2, 8, 16, true)]
        {
            let fwd = NormGateFwd { rows, groups, group, z_stride, eps: 1e-5, zero_centered };
            let bwd = NormGateBwd { rows, groups, group, z_stride, zero_centered };
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
            for (row, dz) in dz.chunks_mut(z_stride).enumerate() {
                dz[..width].copy_from_slice(&after[6][row * width..][..width]);
            }
            check_op_gradient(&fwd, &v, &[(3, &dy)], 1, &dz);
            let sum = |c: usize| after[7].iter().skip(c).step_by(group).sum();
            check_op_gradient(&fwd, &v, &[(3, &dy)], 2, &(0..group).map(sum).collect::<Vec<_>>());
        }
    }

    #[test]
    fn an_open_gate_passes_normed_groups() {
        let fwd = NormGateFwd { rows: 3, groups: 2, group: 8, z_stride: 16, eps: 0.0, zero_centered: true };
        let mut v = inputs(&fwd, 6);
        v[1].fill(40.0); // silu(40) = 40
        v[2].fill(0.0);
        for group in run_f64(&fwd, &v)[3].chunks(8) {
            let mean: f64 = group.iter().map(|x| (x / 40.0).powi(2) / 8.0).sum();
            assert!((mean - 1.0).abs() < 1e-12, "{mean}");
        }
    }

    #[test]
    fn groups_are_cut_so_that_lanes_hold_them() {
        assert_eq!(
            [8, 24, 128, 256, 264, 512].map(cut),
            [(1, 1), (4, 1), (16, 1), (32, 1), (32, 2), (32, 2)]
        );
    }
}
