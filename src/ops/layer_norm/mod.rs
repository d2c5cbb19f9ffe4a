//! LayerNorm (Ba et al., 2016) with a weight and a bias, or modulated: gain and shift of every sequence come from a table
//! of the layer plus a time embedding (adaptive LayerNorm, Peebles and Xie, "DiT", 2023).

pub mod gate;
#[cfg(test)]
mod tests;

use super::rmsnorm::partials;
use super::{ArgSpec, CpuArgs, Op, Real, Sample, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

/// A table of the layer, `[slots, hidden]`: shift, scale and, with a third slot, gate; to which each sequence's time
/// embedding is added, `[sequences * time_slots, hidden]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Modulation {
    pub sequences: usize,
    pub slots: usize,
    /// Slots of a sequence's time embedding; 1: the same for all of the table's.
    pub time_slots: usize,
    /// The time embedding's slot of the table's first.
    pub time_first: usize,
}

/// Slots of the table.
pub const SHIFT: usize = 0;
pub const SCALE: usize = 1;
pub const GATE: usize = 2;

impl Modulation {
    /// Row of the time embedding that slot `slot` of the table gets for `sequence`.
    pub fn time_row(&self, sequence: usize, slot: usize) -> usize {
        let of = if self.time_slots == 1 { 0 } else { self.time_first + slot };
        sequence * self.time_slots + of
    }
    /// The two arguments.
    pub fn specs(&self, hidden: usize) -> [ArgSpec; 2] {
        [
            ArgSpec::read("table", DType::Bf16, &[self.slots, hidden]),
            ArgSpec::read("time", DType::Bf16, &[self.sequences * self.time_slots, hidden]),
        ]
    }
    /// `one + table + time` of a slot, for every sequence: `[sequences, hidden]`.
    pub fn values<T: Real>(&self, slot: usize, one: f64, hidden: usize, table: &[T], time: &[T]) -> Vec<T> {
        let of = |i: usize| {
            let (sequence, c) = (i / hidden, i % hidden);
            T::of(one) + table[slot * hidden + c] + time[self.time_row(sequence, slot) * hidden + c]
        };
        (0..self.sequences * hidden).map(of).collect()
    }
    /// What kernels are told.
    pub fn defines(&self) -> [(&'static str, String); 2] {
        let shared = self.time_slots == 1;
        let first = if shared { 0 } else { self.time_first };
        [("TIME_SLOTS", self.time_slots.to_string()), ("TIME_FIRST", first.to_string())]
    }
    fn check(&self, op: &str, slots: usize) -> Result<(), DeviceError> {
        let fits = self.time_slots == 1 || self.time_first + self.slots <= self.time_slots;
        if self.slots >= slots && fits {
            return Ok(());
        }
        Err(DeviceError::internal(format!("{op}: {self:?} has no {slots} slots")))
    }
}

/// y = n * gain + shift with n = (x - mean) / sqrt(var + eps) per row.
///
/// Args: x R bf16 `[R,H]`; weight R bf16 `[H]`, bias R bf16 `[H]` (gain and shift), or if `modulation` table R bf16
/// `[slots,H]`, time R bf16 `[sequences*time_slots,H]` (gain 1 + table + time of the scale's slot, shift table +
/// time of the shift's; rows of a sequence lie in a row); y W bf16 `[R,H]`, stats W f32 `[R,2]` (mean, 1 / standard deviation).
#[derive(Debug, Clone, PartialEq)]
pub struct LayerNormFwd {
    pub rows: usize,
    pub hidden: usize,
    pub eps: f64,
    pub modulation: Option<Modulation>,
}

/// With g = dy * gain: dx = rstd * (g - mean(g) - n * mean(g * n)) + dres; gradients of gain and shift as partial sums of
/// dy * n and dy.
///
/// Args: x R bf16 `[R,H]`, stats R f32 `[R,2]`, dy R bf16 `[R,H]`, weight R bf16 `[H]` or table and time as in the forward, [dres
/// R bf16 `[R,H]`], dx W bf16 `[R,H]`, partial W f32 `[sequences*P,2H]` (gain, then shift), P = [`LayerNormBwd::parts`] sums a
/// sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerNormBwd {
    pub rows: usize,
    pub hidden: usize,
    pub modulation: Option<Modulation>,
    /// Adds `dres`, the gradient that reaches x around the norm.
    pub residual: bool,
}

const SOURCE: KernelSource = KernelSource {
    name: "layer_norm/kernel.cu",
    text: concat!(include_str!("modulation.cuh"), include_str!("kernel.cu")),
};
/// Elements of a 16-byte vector of bf16.
const VECTOR: usize = 8;
/// Threads of a block at most; each holds one vector of a row, or of a long one several.
const MAX_THREADS: usize = 1024;
/// Vectors of a row that a thread can hold beside its sums.
const MAX_VECTORS: usize = 2;

/// (threads of a block, 16-byte vectors a thread) for one row a block.
fn block(hidden: usize) -> (usize, usize) {
    let vectors = hidden / VECTOR;
    let per_thread = vectors.div_ceil(MAX_THREADS).max(1);
    (vectors.div_ceil(per_thread).next_multiple_of(32), per_thread)
}

fn sequences(modulation: Option<Modulation>) -> usize {
    modulation.map_or(1, |m| m.sequences.max(1))
}

fn check(
    op: &str,
    rows: usize,
    hidden: usize,
    modulation: Option<Modulation>,
) -> Result<(usize, usize), DeviceError> {
    check_multiple(op, "hidden", hidden, VECTOR)?;
    int_param(op, "rows", rows)?;
    let block = block(hidden);
    if block.1 > MAX_VECTORS {
        let most = MAX_THREADS * MAX_VECTORS * VECTOR;
        return Err(DeviceError::Invalid(format!(
            "{op}: hidden is {hidden}, the kernel keeps rows of at most {most} in registers"
        )));
    }
    modulation.map_or(Ok(()), |m| m.check(op, SCALE + 1))?;
    if !rows.is_multiple_of(sequences(modulation)) {
        return Err(DeviceError::internal(format!("{op}: {rows} rows of {modulation:?}")));
    }
    Ok(block)
}

fn defines((threads, vectors): (usize, usize), m: Option<Modulation>) -> Vec<(&'static str, String)> {
    let mut out = vec![("THREADS", threads.to_string()), ("VECS", vectors.to_string())];
    out.extend(m.iter().flat_map(Modulation::defines));
    out
}

/// Gain and shift of every sequence, `[sequences, hidden]` each, from the two arguments that hold them.
fn gains<T: Real>(m: Option<Modulation>, hidden: usize, a: &[T], b: &[T]) -> (Vec<T>, Vec<T>) {
    let Some(m) = m else { return (a.to_vec(), b.to_vec()) };
    (m.values(SCALE, 1.0, hidden, a, b), m.values(SHIFT, 0.0, hidden, a, b))
}

/// The two arguments that gain and shift come from.
fn gain_specs(m: Option<Modulation>, hidden: usize, both: bool) -> Vec<ArgSpec> {
    match m {
        Some(m) => m.specs(hidden).into(),
        None if both => vec![
            ArgSpec::read("weight", DType::Bf16, &[hidden]),
            ArgSpec::read("bias", DType::Bf16, &[hidden]),
        ],
        None => vec![ArgSpec::read("weight", DType::Bf16, &[hidden])],
    }
}

impl LayerNormFwd {
    /// Row sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (x, a, b) = (args.input(0)?, args.input(1)?, args.input(2)?);
        let (y, stats) = (args.output(3)?, args.output(4)?);
        let h = self.hidden.max(1);
        let (gain, shift) = gains(self.modulation, h, a, b);
        let of_sequence = (self.rows / sequences(self.modulation)).max(1);
        let rows = x.par_chunks(h).zip(y.par_chunks_mut(h)).zip(stats.par_chunks_mut(2)).enumerate();
        rows.for_each(|(row, ((x, y), stats))| {
            let mean = x.iter().map(|v| v.f64()).sum::<f64>() / h as f64;
            let var = x.iter().map(|v| (v.f64() - mean).powi(2)).sum::<f64>() / h as f64;
            let (mean, rstd) = (T::of(mean), T::of(1.0 / (var + self.eps).sqrt()));
            (stats[0], stats[1]) = (mean.f32(), rstd.f32());
            let at = row / of_sequence * h;
            for i in 0..h {
                y[i] = ((x[i] - mean) * rstd * gain[at + i] + shift[at + i]).bf16();
            }
        });
        Ok(())
    }
}

impl LayerNormBwd {
    /// Partial sums of a sequence: partial p of sequence s sums its rows p, p + parts, ...
    pub fn parts(&self) -> usize {
        partials(self.rows / sequences(self.modulation))
    }

    fn first_out(&self) -> usize {
        4 + usize::from(self.modulation.is_some()) + usize::from(self.residual)
    }

    /// Row and column sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (x, stats, dy, a) = (args.input(0)?, args.input(1)?, args.input(2)?, args.input(3)?);
        let b = if self.modulation.is_some() { args.input(4)? } else { a };
        let dres = if self.residual { Some(args.input(self.first_out() - 1)?) } else { None };
        let (dx, partial) = (args.output(self.first_out())?, args.output(self.first_out() + 1)?);
        let h = self.hidden.max(1);
        let (gain, _) = gains(self.modulation, h, a, b);
        let of_sequence = (self.rows / sequences(self.modulation)).max(1);
        let normed = |row: usize, i: usize| (x[row * h + i] - stats[2 * row]) * stats[2 * row + 1];
        dx.par_chunks_mut(h).enumerate().for_each(|(row, dx)| {
            let at = row / of_sequence * h;
            let g = |i: usize| dy[row * h + i] * gain[at + i];
            let mean = T::of((0..h).map(|i| g(i).f64()).sum::<f64>() / h as f64);
            let dot = T::of((0..h).map(|i| (g(i) * normed(row, i)).f64()).sum::<f64>() / h as f64);
            for (i, dx) in dx.iter_mut().enumerate() {
                let around = dres.map_or(T::of(0.0), |d| d[row * h + i]);
                *dx = (stats[2 * row + 1] * (g(i) - mean - normed(row, i) * dot) + around).bf16();
            }
        });
        let parts = self.parts();
        partial.par_chunks_mut(2 * h).enumerate().for_each(|(p, out)| {
            let first = p / parts * of_sequence;
            let mut sums = vec![0.0; 2 * h];
            for row in (first + p % parts..(first + of_sequence).min(self.rows)).step_by(parts) {
                for i in 0..h {
                    sums[i] += (dy[row * h + i] * normed(row, i)).f64();
                    sums[h + i] += dy[row * h + i].f64();
                }
            }
            out.iter_mut().zip(sums).for_each(|(o, s)| *o = T::of(s).f32());
        });
        Ok(())
    }
}

impl Op for LayerNormFwd {
    fn name(&self) -> &'static str {
        "layer_norm_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let rows = [self.rows, self.hidden];
        let mut args = vec![ArgSpec::read("x", DType::Bf16, &rows)];
        args.extend(gain_specs(self.modulation, self.hidden, true));
        args.push(ArgSpec::write("y", DType::Bf16, &rows));
        args.push(ArgSpec::write("stats", DType::F32, &[self.rows, 2]));
        args
    }
    /// Mean, variance (difference, square and add), norm, gain and shift.
    fn flops(&self) -> f64 {
        8.0 * self.rows as f64 * self.hidden as f64
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
        if self.rows == 0 {
            return Ok(Issue::Nothing);
        }
        let block = check(self.name(), self.rows, self.hidden, self.modulation)?;
        let kernel = cuda.kernel(SOURCE, "layer_norm_fwd", &defines(block, self.modulation), 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        params.push(int_param(self.name(), "hidden", self.hidden)?.into());
        params.push(Param::I32((self.rows / sequences(self.modulation)) as i32));
        params.push((self.eps as f32).into());
        cuda.launch(&kernel, Config::linear(self.rows, block.0 as u32), &params)
    }
}

impl Op for LayerNormBwd {
    fn name(&self) -> &'static str {
        "layer_norm_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let rows = [self.rows, self.hidden];
        let mut args = vec![
            ArgSpec::read("x", DType::Bf16, &rows),
            // Any numbers do: the formula holds for given statistics.
            ArgSpec::read("stats", DType::F32, &[self.rows, 2]).sample(Sample::Uniform(0.5, 1.5)),
            ArgSpec::read("dy", DType::Bf16, &rows),
        ];
        args.extend(gain_specs(self.modulation, self.hidden, false));
        if self.residual {
            args.push(ArgSpec::read("dres", DType::Bf16, &rows));
        }
        args.push(ArgSpec::write("dx", DType::Bf16, &rows));
        let parts = [sequences(self.modulation) * self.parts(), 2 * self.hidden];
        args.push(ArgSpec::write("partial", DType::F32, &parts));
        args
    }
    /// n (two), g, both means (three), the sums (three), dx (four), the residual.
    fn flops(&self) -> f64 {
        (13.0 + f64::from(self.residual)) * self.rows as f64 * self.hidden as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        if arg == self.first_out() {
            return tolerance(DType::Bf16, self.hidden, 0);
        }
        tolerance(DType::F32, self.rows.div_ceil(self.parts()), 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let block = check(self.name(), self.rows, self.hidden, self.modulation)?;
        let entry = match (self.modulation.is_some(), self.residual) {
            (false, false) => "layer_norm_bwd",
            (false, true) => "layer_norm_bwd_residual",
            (true, false) => "layer_norm_modulated_bwd",
            (true, true) => "layer_norm_modulated_bwd_residual",
        };
        let kernel = cuda.kernel(SOURCE, entry, &defines(block, self.modulation), 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        params.push(int_param(self.name(), "hidden", self.hidden)?.into());
        params.push(Param::I32((self.rows / sequences(self.modulation)) as i32));
        params.push(Param::I32(self.parts() as i32));
        let blocks = sequences(self.modulation) * self.parts();
        cuda.launch(&kernel, Config::linear(blocks, block.0 as u32), &params)
    }
}
