//! Columns of a matrix as two matrices, and back: the latents and the rotary key of multi-latent attention, the
//! embedding and the hidden state of multi-token prediction. Each is the other's gradient.

use super::support::VECTOR;
use super::{ArgSpec, CpuArgs, Op, Real, check_multiple, int_param};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;

/// Args: x R bf16 `[rows, first + second]`, y W bf16 `[rows, first]`, z W bf16 `[rows, second]`.
#[derive(Debug, Clone, PartialEq)]
pub struct SplitColumns {
    pub rows: usize,
    /// Columns of y and of z: on the device multiples of 8.
    pub first: usize,
    pub second: usize,
}

/// Args: y R bf16 `[rows, first]`, z R bf16 `[rows, second]`, x W bf16 `[rows, first + second]`.
#[derive(Debug, Clone, PartialEq)]
pub struct JoinColumns {
    pub rows: usize,
    pub first: usize,
    pub second: usize,
}

const SOURCE: KernelSource = KernelSource { name: "columns/kernel.cu", text: include_str!("kernel.cu") };
const THREADS: usize = 256;

fn prepare(
    cuda: &mut CudaPrep,
    entry: &'static str,
    [rows, first, second]: [usize; 3],
    args: &[DevPtr],
) -> Result<Issue, DeviceError> {
    if rows == 0 {
        return Ok(Issue::Nothing);
    }
    check_multiple(entry, "the first part's columns", first, VECTOR)?;
    check_multiple(entry, "the second part's columns", second, VECTOR)?;
    let kernel = cuda.kernel(SOURCE, entry, &[], 0)?;
    let pieces = rows * ((first + second) / VECTOR);
    int_param(entry, "columns", first + second)?;
    let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
    params.push(Param::I64(pieces as i64));
    params.extend([first, second].map(|n| Param::I32((n / VECTOR) as i32)));
    cuda.launch(&kernel, Config::linear(pieces.div_ceil(THREADS), THREADS as u32), &params)
}

impl SplitColumns {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (x, y, z) = (args.input(0)?, args.output(1)?, args.output(2)?);
        for row in 0..self.rows {
            let x = &x[row * (self.first + self.second)..][..self.first + self.second];
            y[row * self.first..][..self.first].copy_from_slice(&x[..self.first]);
            z[row * self.second..][..self.second].copy_from_slice(&x[self.first..]);
        }
        Ok(())
    }
}

impl JoinColumns {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (y, z, x) = (args.input(0)?, args.input(1)?, args.output(2)?);
        for row in 0..self.rows {
            let x = &mut x[row * (self.first + self.second)..][..self.first + self.second];
            x[..self.first].copy_from_slice(&y[row * self.first..][..self.first]);
            x[self.first..].copy_from_slice(&z[row * self.second..][..self.second]);
        }
        Ok(())
    }
}

impl Op for SplitColumns {
    fn name(&self) -> &'static str {
        "split_columns"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("x", DType::Bf16, &[self.rows, self.first + self.second]),
            ArgSpec::write("y", DType::Bf16, &[self.rows, self.first]),
            ArgSpec::write("z", DType::Bf16, &[self.rows, self.second]),
        ]
    }
    /// Exact.
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        prepare(cuda, self.name(), [self.rows, self.first, self.second], args)
    }
}

impl Op for JoinColumns {
    fn name(&self) -> &'static str {
        "join_columns"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("y", DType::Bf16, &[self.rows, self.first]),
            ArgSpec::read("z", DType::Bf16, &[self.rows, self.second]),
            ArgSpec::write("x", DType::Bf16, &[self.rows, self.first + self.second]),
        ]
    }
    /// Exact.
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        prepare(cuda, self.name(), [self.rows, self.first, self.second], args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{check_op_gradient, inputs, normals, run_f64};

    #[test]
    fn a_split_is_undone_by_a_join_and_is_its_gradient() {
        let (split, join) =
            (SplitColumns { rows: 3, first: 5, second: 2 }, JoinColumns { rows: 3, first: 5, second: 2 });
        let v = inputs(&split, 1);
        let parts = run_f64(&split, &v);
        assert_eq!(parts[1][5..10], v[0][7..12]);
        assert_eq!(parts[2][2..4], v[0][12..14]);
        let back = run_f64(&join, &[parts[1].clone(), parts[2].clone(), vec![]]);
        assert_eq!(back[2], v[0]);
        let (dy, dz) = (normals(15, 2, 1.0), normals(6, 3, 1.0));
        let dx = run_f64(&join, &[dy.clone(), dz.clone(), vec![]]);
        check_op_gradient(&split, &v, &[(1, &dy), (2, &dz)], 0, &dx[2]);
        let dx = normals(21, 4, 1.0);
        let parts = run_f64(&split, &[dx.clone(), vec![], vec![]]);
        let v = inputs(&join, 5);
        check_op_gradient(&join, &v, &[(2, &dx)], 0, &parts[1]);
        check_op_gradient(&join, &v, &[(2, &dx)], 1, &parts[2]);
    }
}
