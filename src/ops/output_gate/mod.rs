//! Gate on the output of attention (`attention_output_gate`): y = o * sigmoid(gate). The gate is a block of columns of the
//! fused QKV product.

use super::support::{VECTOR, aligned, sigmoid};
use super::{ArgSpec, CpuArgs, Op, Real, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

/// Where the gate lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GateShape {
    pub rows: usize,
    /// Columns of o and of the gate.
    pub width: usize,
    /// Columns of `proj`, and those before the gate.
    pub stride: usize,
    pub first: usize,
}

/// Args: o R bf16 [rows, width], proj R bf16 [rows, stride], y W bf16 [rows, width].
#[derive(Debug, Clone, PartialEq)]
pub struct OutputGateFwd {
    pub shape: GateShape,
}

/// Args: o, proj as in [`OutputGateFwd`], dy R bf16 [rows, width], do W bf16 [rows, width], dgate W bf16 [rows, width].
#[derive(Debug, Clone, PartialEq)]
pub struct OutputGateBwd {
    pub shape: GateShape,
}

const SOURCE: KernelSource = KernelSource { name: "output_gate/kernel.cu", text: include_str!("kernel.cu") };
const THREADS: usize = 256;

impl GateShape {
    fn inputs(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("o", DType::Bf16, &[self.rows, self.width]),
            ArgSpec::read("proj", DType::Bf16, &[self.rows, self.stride]),
        ]
    }
    /// Columns of the gate in row `row` of `proj`.
    fn gate<'a, T>(&self, proj: &'a [T], row: usize) -> &'a [T] {
        &proj[row * self.stride + self.first..][..self.width]
    }
    fn issue(&self, entry: &str, cuda: &mut CudaPrep, args: &[DevPtr]) -> Result<Issue, DeviceError> {
        if self.rows * self.width == 0 {
            return Ok(Issue::Nothing);
        }
        check_multiple(entry, "width", self.width, VECTOR)?;
        check_multiple(entry, "stride", self.stride, VECTOR)?;
        aligned(entry, args)?;
        if !self.first.is_multiple_of(VECTOR) || self.first + self.width > self.stride {
            return Err(DeviceError::Invalid(format!(
                "{entry}: columns {}..{} of {} do not fit; the kernel needs a first column that is a multiple of {VECTOR}",
                self.first,
                self.first + self.width,
                self.stride
            )));
        }
        let kernel = cuda.kernel(SOURCE, entry, &[], 0)?;
        let pieces = self.rows * self.width / VECTOR;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        params.push(Param::I64(pieces as i64));
        for (what, n) in [("width", self.width), ("stride", self.stride), ("first", self.first)] {
            params.push(int_param(entry, what, n)?.into());
        }
        cuda.launch(&kernel, Config::linear(pieces.div_ceil(THREADS), THREADS as u32), &params)
    }
}

impl OutputGateFwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (s, o, proj, y) = (&self.shape, args.input(0)?, args.input(1)?, args.output(2)?);
        let width = s.width.max(1);
        y.par_chunks_mut(width).zip(o.par_chunks(width)).enumerate().for_each(|(row, (y, o))| {
            let gate = s.gate(proj, row);
            y.iter_mut().zip(o.iter().zip(gate)).for_each(|(y, (o, g))| *y = (*o * sigmoid(*g)).bf16());
        });
        Ok(())
    }
}

impl OutputGateBwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (s, o, proj, dy) = (&self.shape, args.input(0)?, args.input(1)?, args.input(2)?);
        let (d_o, dgate) = (args.output(3)?, args.output(4)?);
        let width = s.width.max(1);
        d_o.par_chunks_mut(width).zip(dgate.par_chunks_mut(width)).enumerate().for_each(
            |(row, (d_o, dgate))| {
                for (c, g) in s.gate(proj, row).iter().enumerate() {
                    let (gate, at) = (sigmoid(*g), row * width + c);
                    d_o[c] = (dy[at] * gate).bf16();
                    dgate[c] = (dy[at] * o[at] * gate * (T::of(1.0) - gate)).bf16();
                }
            },
        );
        Ok(())
    }
}

impl Op for OutputGateFwd {
    fn name(&self) -> &'static str {
        "output_gate_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let mut args = self.shape.inputs();
        args.push(ArgSpec::write("y", DType::Bf16, &[self.shape.rows, self.shape.width]));
        args
    }
    /// Sigmoid (four) and a product.
    fn flops(&self) -> f64 {
        (5 * self.shape.rows * self.shape.width) as f64
    }
    /// Of `proj`, the gate's columns alone are read.
    fn bytes(&self) -> f64 {
        (6 * self.shape.rows * self.shape.width) as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 1, 0)
    }
    cpu_reference!();
    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], _: DevPtr) -> Result<Issue, DeviceError> {
        self.shape.issue("output_gate_fwd", cuda, args)
    }
}

impl Op for OutputGateBwd {
    fn name(&self) -> &'static str {
        "output_gate_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let shape = [self.shape.rows, self.shape.width];
        let mut args = self.shape.inputs();
        args.push(ArgSpec::read("dy", DType::Bf16, &shape));
        args.push(ArgSpec::write("do", DType::Bf16, &shape));
        args.push(ArgSpec::write("dgate", DType::Bf16, &shape));
        args
    }
    /// Sigmoid (four), its slope (two) and three products.
    fn flops(&self) -> f64 {
        (9 * self.shape.rows * self.shape.width) as f64
    }
    fn bytes(&self) -> f64 {
        (10 * self.shape.rows * self.shape.width) as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 1, 0)
    }
    cpu_reference!();
    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], _: DevPtr) -> Result<Issue, DeviceError> {
        self.shape.issue("output_gate_bwd", cuda, args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    #[test]
    fn backward_is_the_forwards_gradient() {
        for (rows, width, stride, first) in [(1, 8, 8, 0), (5, 6, 17, 9), (3, 16, 48, 32)] {
            let shape = GateShape { rows, width, stride, first };
            let (fwd, bwd) = (OutputGateFwd { shape }, OutputGateBwd { shape });
            let v = inputs(&fwd, 3);
            check_f32_against_f64(&fwd, &v);
            let dy = to_bf16(&normals(rows * width, 8, 1.0));
            let b = vec![v[0].clone(), v[1].clone(), dy.clone(), vec![], vec![]];
            check_f32_against_f64(&bwd, &b);
            let after = run_f64(&bwd, &b);
            check_op_gradient(&fwd, &v, &[(2, &dy)], 0, &after[3]);
            let mut dproj = vec![0.0; rows * stride];
            for (row, d) in dproj.chunks_mut(stride).zip(after[4].chunks(width)) {
                row[first..][..width].copy_from_slice(d);
            }
            check_op_gradient(&fwd, &v, &[(2, &dy)], 1, &dproj);
        }
    }

    #[test]
    fn the_gates_columns_are_checked_when_prepared() {
        let mut cuda = crate::device::cuda::prep::OfflinePrep::new("sm_90a").unwrap();
        for (first, legal) in [(0, true), (16, true), (4, false), (24, false)] {
            let shape = GateShape { rows: 3, width: 16, stride: 32, first };
            assert_eq!(cuda.prepare(&OutputGateFwd { shape }).is_ok(), legal, "{first}");
            assert_eq!(cuda.prepare(&OutputGateBwd { shape }).is_ok(), legal, "{first}");
        }
    }
}
