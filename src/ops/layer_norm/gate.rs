//! The other half of adaptive LayerNorm: a gated residual, the gradients of table and time embedding, and the time
//! embedding's gradient back in bf16.

use super::{GATE, Modulation, SCALE, SHIFT};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::ops::owned_rows::row_blocks;
use crate::ops::rmsnorm::partials;
use crate::ops::support::{VECTOR, float_name};
use crate::ops::{ArgSpec, CpuArgs, Op, Real, check_multiple, int_param, tolerance};
use crate::program::DType;
use rayon::prelude::*;

/// out = x + (y + bias) * gate, with gate = table + time of the gate's slot.
///
/// Args: x R bf16 `[R,H]`, y R bf16 `[R,H]`, bias R bf16 `[H]`, table R bf16 `[slots,H]`, time R bf16 `[sequences*time_slots,H]`, out W
/// bf16 `[R,H]`.
#[derive(Debug, Clone, PartialEq)]
pub struct GatedResidualFwd {
    pub rows: usize,
    pub hidden: usize,
    pub modulation: Modulation,
}

/// dy = dout * gate, whose column sums are the bias' gradient; the gate's is the sum of dout * (y + bias).
///
/// Args: dout R bf16 `[R,H]`, y R bf16 `[R,H]`, bias R bf16 `[H]`, table R, time R as in the forward, dy W bf16 `[R,H]`, partial W f32
/// `[sequences*P,2H]` (gate, then bias), P = [`GatedResidualBwd::parts`] sums a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct GatedResidualBwd {
    pub rows: usize,
    pub hidden: usize,
    pub modulation: Modulation,
}

/// Sums a norm's partial sums, and those of a gated residual, into the gradients of the table, of the bias, and of every
/// sequence's time embedding, in a fixed order.
///
/// Args: norm R f32 `[sequences*norm_parts,2H]` (as [`super::LayerNormBwd`] writes it), [gate R f32 `[sequences*gate_parts,2H]`],
/// dtable `out` `[slots,H]` (U if `accumulate`, else W), dtime U f32 `[sequences*time_slots,H]`, [dbias `out` `[H]`]; those in
/// brackets with a gate, when the table has three slots.
#[derive(Debug, Clone, PartialEq)]
pub struct ModulationGrad {
    pub hidden: usize,
    pub modulation: Modulation,
    pub norm_parts: usize,
    /// `None`: no gate.
    pub gate_parts: Option<usize>,
    /// `Bf16` or `F32`.
    pub out: DType,
    pub accumulate: bool,
}

/// out = bf16(x (+ add)). Args: x R f32 `[len]`, [add R bf16 `[len]`], out W bf16 `[len]`.
#[derive(Debug, Clone, PartialEq)]
pub struct ToBf16 {
    /// A multiple of 8.
    pub len: usize,
    pub add: bool,
}

const SOURCE: KernelSource = KernelSource {
    name: "layer_norm/gate.cu",
    text: concat!(include_str!("modulation.cuh"), include_str!("gate.cu")),
};
/// Threads of a block of the backward kernel, each with eight columns.
const BWD_THREADS: usize = 128;
/// Columns that a block of the sums takes, and its threads.
const SUM_COLUMNS: usize = 32;
const SUM_THREADS: u32 = 256;

fn check(op: &str, rows: usize, hidden: usize, m: &Modulation) -> Result<usize, DeviceError> {
    check_multiple(op, "hidden", hidden, VECTOR)?;
    m.check(op, GATE + 1)?;
    if m.sequences == 0 || !rows.is_multiple_of(m.sequences) {
        return Err(DeviceError::internal(format!("{op}: {rows} rows of {m:?}")));
    }
    int_param(op, "rows", rows)?;
    Ok(rows / m.sequences)
}

impl GatedResidualFwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let of_sequence = check(self.name(), self.rows, self.hidden, &self.modulation)?.max(1);
        let (x, y, bias) = (args.input(0)?, args.input(1)?, args.input(2)?);
        let gate = self.modulation.values(GATE, 0.0, self.hidden, args.input(3)?, args.input(4)?);
        let (out, h) = (args.output(5)?, self.hidden);
        out.par_chunks_mut(h).enumerate().for_each(|(row, out)| {
            for (i, out) in out.iter_mut().enumerate() {
                let g = gate[row / of_sequence * h + i];
                *out = (x[row * h + i] + (y[row * h + i] + bias[i]) * g).bf16();
            }
        });
        Ok(())
    }
}

impl GatedResidualBwd {
    /// Partial sums of a sequence: partial p of sequence s sums its rows p, p + parts, ...
    pub fn parts(&self) -> usize {
        partials(self.rows / self.modulation.sequences.max(1))
    }

    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let of_sequence = check(self.name(), self.rows, self.hidden, &self.modulation)?.max(1);
        let (dout, y, bias) = (args.input(0)?, args.input(1)?, args.input(2)?);
        let gate = self.modulation.values(GATE, 0.0, self.hidden, args.input(3)?, args.input(4)?);
        let (dy, partial, h) = (args.output(5)?, args.output(6)?, self.hidden);
        let of_row = |row: usize, i: usize| dout[row * h + i] * gate[row / of_sequence * h + i];
        dy.par_chunks_mut(h).enumerate().for_each(|(row, dy)| {
            dy.iter_mut().enumerate().for_each(|(i, dy)| *dy = of_row(row, i).bf16());
        });
        let parts = self.parts();
        partial.par_chunks_mut(2 * h).enumerate().for_each(|(p, out)| {
            let first = p / parts * of_sequence;
            let mut sums = vec![0.0; 2 * h];
            for row in (first + p % parts..(first + of_sequence).min(self.rows)).step_by(parts) {
                for i in 0..h {
                    sums[i] += (dout[row * h + i] * (y[row * h + i] + bias[i])).f64();
                    sums[h + i] += of_row(row, i).f64();
                }
            }
            out.iter_mut().zip(sums).for_each(|(o, s)| *o = T::of(s).f32());
        });
        Ok(())
    }
}

impl ModulationGrad {
    fn gated(&self) -> bool {
        self.gate_parts.is_some()
    }

    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (h, m) = (self.hidden, &self.modulation);
        let norm = args.input(0)?;
        let gate = if self.gated() { args.input(1)? } else { &[] };
        let at = 1 + usize::from(self.gated());
        let (dtable, dtime) = (args.output(at)?, args.output(at + 1)?);
        let sum = |partial: &[T], parts: usize, sequence: usize, column: usize| -> f64 {
            (0..parts).map(|p| partial[(sequence * parts + p) * 2 * h + column].f64()).sum()
        };
        let stored = |old: T, sum: f64| {
            let total = if self.accumulate { old + T::of(sum) } else { T::of(sum) };
            if self.out == DType::Bf16 { total.bf16() } else { total.f32() }
        };
        let mut sources = vec![(SHIFT, norm, self.norm_parts, h), (SCALE, norm, self.norm_parts, 0)];
        sources.extend(self.gate_parts.map(|parts| (GATE, gate, parts, 0)));
        for (slot, partial, parts, first) in sources {
            for c in 0..h {
                let mut whole = 0.0;
                for s in 0..m.sequences {
                    let own = sum(partial, parts, s, first + c);
                    let time = &mut dtime[m.time_row(s, slot) * h + c];
                    *time = (*time + T::of(own)).f32();
                    whole += own;
                }
                dtable[slot * h + c] = stored(dtable[slot * h + c], whole);
            }
        }
        if let Some(parts) = self.gate_parts {
            for (c, dbias) in args.output(at + 2)?.iter_mut().enumerate() {
                *dbias = stored(*dbias, (0..m.sequences).map(|s| sum(gate, parts, s, h + c)).sum());
            }
        }
        Ok(())
    }
}

impl ToBf16 {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let x = args.input(0)?;
        let add = if self.add { Some(args.input(1)?) } else { None };
        for (i, out) in args.output(1 + usize::from(self.add))?.iter_mut().enumerate() {
            *out = (x[i] + add.map_or(T::of(0.0), |a| a[i])).bf16();
        }
        Ok(())
    }
}

impl Op for GatedResidualFwd {
    fn name(&self) -> &'static str {
        "gated_residual_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let rows = [self.rows, self.hidden];
        let mut args = vec![
            ArgSpec::read("x", DType::Bf16, &rows),
            ArgSpec::read("y", DType::Bf16, &rows),
            ArgSpec::read("bias", DType::Bf16, &[self.hidden]),
        ];
        args.extend(self.modulation.specs(self.hidden));
        args.push(ArgSpec::write("out", DType::Bf16, &rows));
        args
    }
    fn flops(&self) -> f64 {
        3.0 * self.rows as f64 * self.hidden as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 4, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let of_sequence = check(self.name(), self.rows, self.hidden, &self.modulation)?;
        if self.rows == 0 {
            return Ok(Issue::Nothing);
        }
        let (threads, column_blocks) = row_blocks(self.hidden);
        let blocks = self.rows * column_blocks;
        int_param(self.name(), "rows * column blocks", blocks)?;
        let kernel = cuda.kernel(SOURCE, "gated_residual_fwd", &self.modulation.defines(), 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        params.extend([self.hidden, of_sequence, column_blocks].map(|n| Param::I32(n as i32)));
        cuda.launch(&kernel, Config::linear(blocks, threads as u32), &params)
    }
}

impl Op for GatedResidualBwd {
    fn name(&self) -> &'static str {
        "gated_residual_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let rows = [self.rows, self.hidden];
        let mut args = vec![
            ArgSpec::read("dout", DType::Bf16, &rows),
            ArgSpec::read("y", DType::Bf16, &rows),
            ArgSpec::read("bias", DType::Bf16, &[self.hidden]),
        ];
        args.extend(self.modulation.specs(self.hidden));
        args.push(ArgSpec::write("dy", DType::Bf16, &rows));
        let parts = [self.modulation.sequences * self.parts(), 2 * self.hidden];
        args.push(ArgSpec::write("partial", DType::F32, &parts));
        args
    }
    fn flops(&self) -> f64 {
        5.0 * self.rows as f64 * self.hidden as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        if arg == 5 {
            return tolerance(DType::Bf16, 2, 0);
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
        let of_sequence = check(self.name(), self.rows, self.hidden, &self.modulation)?;
        let kernel = cuda.kernel(SOURCE, "gated_residual_bwd", &self.modulation.defines(), 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        params.extend([self.hidden, of_sequence, self.parts()].map(|n| Param::I32(n as i32)));
        // Columns are apart: rows are summed by more blocks than there are partial sums.
        let columns = (self.hidden / VECTOR).div_ceil(BWD_THREADS);
        let blocks = self.modulation.sequences * self.parts();
        let config = Config::linear(blocks, BWD_THREADS as u32);
        cuda.launch(&kernel, Config { grid: [config.grid[0], columns as u32, 1], ..config }, &params)
    }
}

impl Op for ModulationGrad {
    fn name(&self) -> &'static str {
        "modulation_grad"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let (h, m) = (self.hidden, &self.modulation);
        let partial = |name, parts| ArgSpec::read(name, DType::F32, &[m.sequences * parts, 2 * h]);
        let grad = |name, shape: &[usize]| match self.accumulate {
            true => ArgSpec::update(name, self.out, shape),
            false => ArgSpec::write(name, self.out, shape),
        };
        let mut args = vec![partial("norm", self.norm_parts)];
        args.extend(self.gate_parts.map(|parts| partial("gate", parts)));
        args.push(grad("dtable", &[m.slots, h]));
        args.push(ArgSpec::update("dtime", DType::F32, &[m.sequences * m.time_slots, h]));
        args.extend(self.gate_parts.map(|_| grad("dbias", &[h])));
        args
    }
    fn flops(&self) -> f64 {
        let parts = self.norm_parts + self.gate_parts.unwrap_or(0);
        (2 * self.modulation.sequences * parts * self.hidden) as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        let at = 1 + usize::from(self.gated());
        let dtype = if arg == at + 1 { DType::F32 } else { self.out };
        let parts = self.norm_parts.max(self.gate_parts.unwrap_or(0));
        tolerance(dtype, parts * self.modulation.sequences, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        check_multiple(self.name(), "hidden", self.hidden, VECTOR)?;
        let m = &self.modulation;
        let slots = if self.gated() { GATE + 1 } else { SCALE + 1 };
        m.check(self.name(), slots)?;
        if m.slots != slots {
            return Err(DeviceError::internal(format!("{}: {m:?} with {slots} slots", self.name())));
        }
        let mut defines = m.defines().to_vec();
        defines.push(("OUT", float_name(self.name(), self.out)?));
        defines.push(("ACCUMULATE", usize::from(self.accumulate).to_string()));
        let entry = if self.gated() { "modulation_gate_grad" } else { "modulation_grad" };
        let kernel = cuda.kernel(SOURCE, entry, &defines, 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        let mut numbers = vec![m.sequences, self.hidden, self.norm_parts];
        numbers.extend(self.gate_parts);
        params.extend(numbers.into_iter().map(|n| Param::I32(n as i32)));
        cuda.launch(&kernel, Config::linear(self.hidden.div_ceil(SUM_COLUMNS), SUM_THREADS), &params)
    }
}

impl Op for ToBf16 {
    fn name(&self) -> &'static str {
        "to_bf16"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let mut args = vec![ArgSpec::read("x", DType::F32, &[self.len])];
        if self.add {
            args.push(ArgSpec::read("add", DType::Bf16, &[self.len]));
        }
        args.push(ArgSpec::write("out", DType::Bf16, &[self.len]));
        args
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 2, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        check_multiple(self.name(), "elements", self.len, VECTOR)?;
        let entry = if self.add { "sum_to_bf16" } else { "to_bf16_rows" };
        let kernel = cuda.kernel(SOURCE, entry, &[], 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        params.push(int_param(self.name(), "elements", self.len)?.into());
        cuda.launch(&kernel, Config::linear((self.len / VECTOR).div_ceil(256), 256), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    fn modulation(sequences: usize, time_slots: usize) -> Modulation {
        Modulation { sequences, slots: 3, time_slots, time_first: if time_slots == 1 { 0 } else { 3 } }
    }

    /// Forward and backward, and the sums of the partial sums into every gradient.
    #[test]
    fn gates_tables_times_and_biases_get_their_gradients() {
        for (rows, hidden, modulation) in [(6, 8, modulation(2, 6)), (5, 16, modulation(1, 1))] {
            let fwd = GatedResidualFwd { rows, hidden, modulation };
            let bwd = GatedResidualBwd { rows, hidden, modulation };
            let v = inputs(&fwd, 5);
            check_f32_against_f64(&fwd, &v);
            let dout = to_bf16(&normals(rows * hidden, 21, 1.0));
            let b =
                vec![dout.clone(), v[1].clone(), v[2].clone(), v[3].clone(), v[4].clone(), vec![], vec![]];
            check_f32_against_f64(&bwd, &b);
            let after = run_f64(&bwd, &b);
            check_op_gradient(&fwd, &v, &[(5, &dout)], 1, &after[5]);
            let sum = ModulationGrad {
                hidden,
                modulation,
                norm_parts: 2,
                gate_parts: Some(bwd.parts()),
                out: DType::F32,
                accumulate: false,
            };
            let norm = normals(modulation.sequences * 2 * 2 * hidden, 4, 1.0);
            let zeros = vec![0.0; modulation.sequences * modulation.time_slots * hidden];
            let values = vec![norm.clone(), after[6].clone(), vec![], zeros.clone(), vec![]];
            check_f32_against_f64(&sum, &values);
            let grads = run_f64(&sum, &values);
            check_op_gradient(&fwd, &v, &[(5, &dout)], 2, &grads[4]);
            // Of the gate's slots alone: the norm's partial sums are of another op.
            let gate = &grads[2][GATE * hidden..];
            let mut table = vec![0.0; 3 * hidden];
            table[GATE * hidden..].copy_from_slice(gate);
            check_op_gradient(&fwd, &v, &[(5, &dout)], 3, &table);
            let without =
                run_f64(&sum, &[norm.iter().map(|_| 0.0).collect(), after[6].clone(), vec![], zeros, vec![]]);
            check_op_gradient(&fwd, &v, &[(5, &dout)], 4, &without[3]);
        }
    }

    #[test]
    fn sums_are_added_to_what_is_there() {
        let m = Modulation { sequences: 2, slots: 2, time_slots: 1, time_first: 0 };
        let of = |accumulate| ModulationGrad {
            hidden: 8,
            modulation: m,
            norm_parts: 3,
            gate_parts: None,
            out: DType::F32,
            accumulate,
        };
        let norm = normals(2 * 3 * 16, 4, 1.0);
        let (old, time) = (normals(16, 5, 1.0), normals(16, 6, 1.0));
        let fresh = run_f64(&of(false), &[norm.clone(), vec![], time.clone()]);
        let added = run_f64(&of(true), &[norm, old.clone(), time.clone()]);
        for i in 0..16 {
            assert!((added[1][i] - fresh[1][i] - old[i]).abs() < 1e-12);
        }
        assert_eq!(added[2], fresh[2]);
        assert_ne!(added[2], time);
        let cast = ToBf16 { len: 16, add: true };
        check_f32_against_f64(&cast, &inputs(&cast, 3));
    }
}
