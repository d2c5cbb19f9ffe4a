//! Biases of linear layers: one for all rows, or one an expert for rows sorted by expert, with their gradients.
//!
//! Upstream weighs the bias of an expert's second product with the row's routing probability (Megatron-Core
//! `transformer/moe/experts.py`, `_apply_bias`), since the activation before that product was weighed already. Rows
//! from `offsets[experts]` on belong to no expert and are left alone.

#[cfg(test)]
mod tests;

use super::owned_rows::{row_blocks, sample_routed, used_rows};
use super::support::{Draws, VECTOR, float_name};
use super::{Access, ArgSpec, CpuArgs, Op, Real, Sample, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

/// x += bias (* prob). Args: x U `dtype` `[R,C]`, bias R bf16 `[max(experts,1),C]`, [offsets R I32 [experts+1] when
/// `experts` > 0, probs R f32 `[R]` when `weighted`].
#[derive(Debug, Clone, PartialEq)]
pub struct BiasAdd {
    pub rows: usize,
    /// C, a multiple of 8.
    pub cols: usize,
    /// Local experts; 0: one bias for all rows.
    pub experts: usize,
    /// Times the row's probability; with experts alone.
    pub weighted: bool,
    /// Of x: `Bf16` or `F32`.
    pub dtype: DType,
}

/// Gradient of a bias: sums of dy (* prob) over all rows, or over each expert's. Args: dy R bf16 `[R,C]`, [offsets, probs as
/// in [`BiasAdd`]], grad `out` `[max(experts,1),C]` (U if `accumulate`, else W).
#[derive(Debug, Clone, PartialEq)]
pub struct BiasGrad {
    pub rows: usize,
    /// C, a multiple of 8.
    pub cols: usize,
    pub experts: usize,
    pub weighted: bool,
    /// `Bf16` or `F32`.
    pub out: DType,
    pub accumulate: bool,
}

/// What a weighted bias adds to the gradient of the probabilities: dprobs += dy . bias of the row's expert. Args: dy R bf16
/// `[R,C]`, bias R bf16 `[experts,C]`, offsets R I32 [experts+1], dprobs U f32 `[R]`.
#[derive(Debug, Clone, PartialEq)]
pub struct BiasProbGrad {
    pub rows: usize,
    /// C, a multiple of 8.
    pub cols: usize,
    pub experts: usize,
}

const SOURCE: KernelSource = KernelSource {
    name: "bias/kernel.cu",
    text: concat!(include_str!("expert.cuh"), include_str!("kernel.cu")),
};
/// Threads of a block of `bias_grad`, and columns that it sums, as in kernel.cu.
const GRAD_THREADS: u32 = 512;
const GRAD_COLUMNS: usize = 64;

/// Expert of every row below `offsets[experts]`, expert after expert.
pub(super) fn experts_of_rows(offsets: &[i32], experts: usize, rows: usize) -> Vec<usize> {
    let used = used_rows(offsets, experts, rows);
    let mut of = vec![0; used];
    for (e, ends) in offsets.windows(2).take(experts).enumerate() {
        let at = |o: i32| usize::try_from(o).unwrap_or(0).min(used);
        of[at(ends[0])..at(ends[1]).max(at(ends[0]))].fill(e);
    }
    of
}

/// The arguments that say which rows are whose.
fn routing(args: &mut Vec<ArgSpec>, rows: usize, experts: usize, weighted: bool) {
    if experts > 0 {
        args.push(ArgSpec::read("offsets", DType::I32, &[experts + 1]).sample(Sample::Custom));
    }
    if weighted {
        args.push(ArgSpec::read("probs", DType::F32, &[rows]).sample(Sample::Custom));
    }
}

/// (expert of every row that has one, factor of every row).
#[allow(clippy::type_complexity)]
fn routes<'a, T: Real>(
    args: &mut CpuArgs<'a, T>,
    first: usize,
    [rows, experts]: [usize; 2],
    weighted: bool,
) -> Result<(Vec<usize>, Option<&'a [T]>), DeviceError> {
    let of = if experts > 0 { experts_of_rows(args.ints(first)?, experts, rows) } else { vec![0; rows] };
    Ok((of, if weighted { Some(args.input(first + 1)?) } else { None }))
}

/// Values of every argument, probabilities and offsets as the experts' rows have them.
fn sample(specs: &[ArgSpec], seed: u64, rows: usize, experts: usize) -> Vec<Vec<f64>> {
    let (probs, offsets) = sample_routed(seed, rows, experts);
    let value = |(i, spec): (usize, &ArgSpec)| match (spec.name, spec.access) {
        ("offsets", _) => offsets.clone(),
        ("probs", _) => probs.clone(),
        (_, Access::Write) => Vec::new(),
        _ => Draws { seed, stream: 20 + i as u32 }.bf16_normals(spec.len(), 1.0),
    };
    specs.iter().enumerate().map(value).collect()
}

fn defines(
    op: &str,
    x: DType,
    out: DType,
    experts: usize,
    [weighted, accumulate]: [bool; 2],
) -> Result<Vec<(&'static str, String)>, DeviceError> {
    Ok(vec![
        ("ROWS", float_name(op, x)?),
        ("OUT", float_name(op, out)?),
        ("EXPERTS", experts.to_string()),
        ("WEIGHTED", usize::from(weighted).to_string()),
        ("ACCUMULATE", usize::from(accumulate).to_string()),
    ])
}

fn check(op: &str, cols: usize, experts: usize, weighted: bool) -> Result<(), DeviceError> {
    if weighted && experts == 0 {
        return Err(DeviceError::internal(format!("{op}: rows without experts have no probabilities")));
    }
    check_multiple(op, "columns", cols, VECTOR)
}

impl BiasAdd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (bias, c) = (args.input(1)?, self.cols.max(1));
        let (of, probs) = routes(args, 2, [self.rows, self.experts], self.weighted)?;
        let x = args.output(0)?;
        x.par_chunks_mut(c).zip(of).enumerate().for_each(|(row, (x, e))| {
            let factor = probs.map_or(T::of(1.0), |p| p[row]);
            for (x, b) in x.iter_mut().zip(&bias[e * c..]) {
                let sum = *x + *b * factor;
                *x = if self.dtype == DType::Bf16 { sum.bf16() } else { sum.f32() };
            }
        });
        Ok(())
    }
}

impl Op for BiasAdd {
    fn name(&self) -> &'static str {
        "bias_add"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let mut args = vec![
            ArgSpec::update("x", self.dtype, &[self.rows, self.cols]),
            ArgSpec::read("bias", DType::Bf16, &[self.experts.max(1), self.cols]),
        ];
        routing(&mut args, self.rows, self.experts, self.weighted);
        args
    }
    fn flops(&self) -> f64 {
        (1.0 + f64::from(self.weighted)) * self.rows as f64 * self.cols as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(self.dtype, 1, 0)
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        Some(sample(&self.args(), seed, self.rows, self.experts))
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        if self.rows == 0 {
            return Ok(Issue::Nothing);
        }
        check(self.name(), self.cols, self.experts, self.weighted)?;
        let flags = [self.weighted, false];
        let defines = defines(self.name(), self.dtype, DType::Bf16, self.experts, flags)?;
        let kernel = cuda.kernel(SOURCE, "bias_add", &defines, 0)?;
        let (threads, column_blocks) = row_blocks(self.cols);
        let blocks = self.rows * column_blocks;
        int_param(self.name(), "rows * column blocks", blocks)?;
        let at = |i: usize| Param::Ptr(args.get(i).copied().unwrap_or_default());
        let cols = int_param(self.name(), "columns", self.cols)?;
        let params = [at(0), at(1), at(2), at(3), cols.into(), Param::I32(column_blocks as i32)];
        cuda.launch(&kernel, Config::linear(blocks, threads as u32), &params)
    }
}

impl BiasGrad {
    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (dy, c) = (args.input(0)?, self.cols.max(1));
        let (of, probs) = routes(args, 1, [self.rows, self.experts], self.weighted)?;
        let mut sums = vec![0.0; self.experts.max(1) * c];
        for (row, e) in of.into_iter().enumerate() {
            let factor = probs.map_or(T::of(1.0), |p| p[row]);
            let sums = sums[e * c..][..c].iter_mut();
            sums.zip(&dy[row * c..]).for_each(|(s, d)| *s += (*d * factor).f64());
        }
        let grad = args.output(self.grad_arg())?;
        for (g, s) in grad.iter_mut().zip(sums) {
            let sum = if self.accumulate { *g + T::of(s) } else { T::of(s) };
            *g = if self.out == DType::Bf16 { sum.bf16() } else { sum.f32() };
        }
        Ok(())
    }
    fn grad_arg(&self) -> usize {
        1 + usize::from(self.experts > 0) + usize::from(self.weighted)
    }
}

impl Op for BiasGrad {
    fn name(&self) -> &'static str {
        "bias_grad"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let mut args = vec![ArgSpec::read("dy", DType::Bf16, &[self.rows, self.cols])];
        routing(&mut args, self.rows, self.experts, self.weighted);
        let shape = [self.experts.max(1), self.cols];
        args.push(if self.accumulate {
            ArgSpec::update("grad", self.out, &shape)
        } else {
            ArgSpec::write("grad", self.out, &shape)
        });
        args
    }
    fn flops(&self) -> f64 {
        (1.0 + f64::from(self.weighted)) * self.rows as f64 * self.cols as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(self.out, self.rows, 0)
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        Some(sample(&self.args(), seed, self.rows, self.experts))
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        check(self.name(), self.cols, self.experts, self.weighted)?;
        let flags = [self.weighted, self.accumulate];
        let defines = defines(self.name(), DType::Bf16, self.out, self.experts, flags)?;
        let kernel = cuda.kernel(SOURCE, "bias_grad", &defines, 0)?;
        let given = |there: bool, i: usize| Param::Ptr(if there { args[i] } else { DevPtr::default() });
        let params = [
            Param::Ptr(args[0]),
            given(self.experts > 0, 1),
            given(self.weighted, 2),
            Param::Ptr(args[self.grad_arg()]),
            int_param(self.name(), "rows", self.rows)?.into(),
            int_param(self.name(), "columns", self.cols)?.into(),
        ];
        let grid = Config::linear(self.cols.div_ceil(GRAD_COLUMNS), GRAD_THREADS);
        let config = Config { grid: [grid.grid[0], self.experts.max(1) as u32, 1], ..grid };
        cuda.launch(&kernel, config, &params)
    }
}

impl BiasProbGrad {
    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (dy, bias, c) = (args.input(0)?, args.input(1)?, self.cols.max(1));
        let of = experts_of_rows(args.ints(2)?, self.experts, self.rows);
        for ((row, e), dprob) in of.into_iter().enumerate().zip(args.output(3)?) {
            let products = dy[row * c..][..c].iter().zip(&bias[e * c..]).map(|(d, b)| (*d * *b).f64());
            *dprob = (*dprob + T::of(products.sum())).f32();
        }
        Ok(())
    }
}

impl Op for BiasProbGrad {
    fn name(&self) -> &'static str {
        "bias_prob_grad"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("dy", DType::Bf16, &[self.rows, self.cols]),
            ArgSpec::read("bias", DType::Bf16, &[self.experts, self.cols]),
            ArgSpec::read("offsets", DType::I32, &[self.experts + 1]).sample(Sample::Custom),
            ArgSpec::update("dprobs", DType::F32, &[self.rows]),
        ]
    }
    fn flops(&self) -> f64 {
        2.0 * self.rows as f64 * self.cols as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::F32, self.cols, 0)
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        Some(sample(&self.args(), seed, self.rows, self.experts))
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        if self.rows == 0 {
            return Ok(Issue::Nothing);
        }
        check(self.name(), self.cols, self.experts, true)?;
        let defines = defines(self.name(), DType::Bf16, DType::Bf16, self.experts, [true, false])?;
        let kernel = cuda.kernel(SOURCE, "bias_prob_grad", &defines, 0)?;
        int_param(self.name(), "rows", self.rows)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        params.push(int_param(self.name(), "columns", self.cols)?.into());
        cuda.launch(&kernel, Config::linear(self.rows, row_blocks(self.cols).0 as u32), &params)
    }
}
