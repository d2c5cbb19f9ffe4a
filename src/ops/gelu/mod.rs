//! GELU in its tanh form (Hendrycks and Gimpel, 2016) with the bias of the product before it: the activation of image
//! towers' and diffusion transformers' MLPs, and of the small MLPs around them; or SiLU in its place.

use super::owned_rows::row_blocks;
use super::support::VECTOR;
use super::{ArgSpec, CpuArgs, Op, Real, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

/// Which function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Curve {
    /// 0.5 z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))).
    Gelu,
    /// z / (1 + e^-z).
    Silu,
}

/// y = f(x + bias). Args: x R bf16 `[R,C]`, [bias R bf16 `[C]`], y W bf16 `[R,C]`.
#[derive(Debug, Clone, PartialEq)]
pub struct CurveFwd {
    pub rows: usize,
    /// C, a multiple of 8.
    pub cols: usize,
    pub curve: Curve,
    pub bias: bool,
}

/// dx = f'(x + bias) dy, whose column sums are the bias' gradient. Args: x R bf16 `[R,C]`, [bias R bf16 `[C]`], dy R bf16 `[R,C]`,
/// dx W bf16 `[R,C]`.
#[derive(Debug, Clone, PartialEq)]
pub struct CurveBwd {
    pub rows: usize,
    /// C, a multiple of 8.
    pub cols: usize,
    pub curve: Curve,
    pub bias: bool,
}

const SOURCE: KernelSource = KernelSource { name: "gelu/kernel.cu", text: include_str!("kernel.cu") };
/// sqrt(2 / pi), and the weight of the cube.
const SLOPE: f64 = 0.797_884_560_802_865_4;
const CUBE: f64 = 0.044_715;

fn sigmoid<T: Real>(z: T) -> T {
    super::support::sigmoid(z)
}

impl Curve {
    /// Value and slope at z. tanh u is 2 sigmoid(2u) - 1.
    fn at<T: Real>(self, z: T) -> (T, T) {
        let one = T::of(1.0);
        match self {
            Curve::Silu => {
                let s = sigmoid(z);
                (z * s, s * (one + z * (one - s)))
            }
            Curve::Gelu => {
                let u = T::of(SLOPE) * (z + T::of(CUBE) * z * z * z);
                let s = sigmoid(u + u);
                let slope = T::of(SLOPE) * (one + T::of(3.0 * CUBE) * z * z);
                (z * s, s + T::of(2.0) * z * s * (one - s) * slope)
            }
        }
    }
    fn defines(self, bias: bool) -> Vec<(&'static str, String)> {
        let of = |flag: bool| usize::from(flag).to_string();
        vec![("SILU", of(self == Curve::Silu)), ("BIAS", of(bias))]
    }
}

fn issue(
    op: &str,
    [rows, cols]: [usize; 2],
    cuda: &mut CudaPrep,
    entry: &str,
    defines: &[(&str, String)],
    args: &[DevPtr],
) -> Result<Issue, DeviceError> {
    if rows == 0 {
        return Ok(Issue::Nothing);
    }
    check_multiple(op, "columns", cols, VECTOR)?;
    let (threads, column_blocks) = row_blocks(cols);
    let blocks = rows * column_blocks;
    int_param(op, "rows * column blocks", blocks)?;
    let kernel = cuda.kernel(SOURCE, entry, defines, 0)?;
    let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
    params.push(int_param(op, "columns", cols)?.into());
    params.push(Param::I32(column_blocks as i32));
    cuda.launch(&kernel, Config::linear(blocks, threads as u32), &params)
}

fn bias_spec(args: &mut Vec<ArgSpec>, bias: bool, cols: usize) {
    if bias {
        args.push(ArgSpec::read("bias", DType::Bf16, &[cols]));
    }
}

impl CurveFwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let x = args.input(0)?;
        let bias = if self.bias { Some(args.input(1)?) } else { None };
        let (y, c) = (args.output(1 + usize::from(self.bias))?, self.cols.max(1));
        y.par_chunks_mut(c).zip(x.par_chunks(c)).for_each(|(y, x)| {
            for (i, y) in y.iter_mut().enumerate() {
                *y = self.curve.at(x[i] + bias.map_or(T::of(0.0), |b| b[i])).0.bf16();
            }
        });
        Ok(())
    }
}

impl CurveBwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let x = args.input(0)?;
        let bias = if self.bias { Some(args.input(1)?) } else { None };
        let at = 1 + usize::from(self.bias);
        let (dy, dx, c) = (args.input(at)?, args.output(at + 1)?, self.cols.max(1));
        dx.par_chunks_mut(c).enumerate().for_each(|(row, dx)| {
            for (i, dx) in dx.iter_mut().enumerate() {
                let z = x[row * c + i] + bias.map_or(T::of(0.0), |b| b[i]);
                *dx = (self.curve.at(z).1 * dy[row * c + i]).bf16();
            }
        });
        Ok(())
    }
}

impl Op for CurveFwd {
    fn name(&self) -> &'static str {
        if self.curve == Curve::Gelu { "gelu_fwd" } else { "silu_fwd" }
    }
    fn args(&self) -> Vec<ArgSpec> {
        let shape = [self.rows, self.cols];
        let mut args = vec![ArgSpec::read("x", DType::Bf16, &shape)];
        bias_spec(&mut args, self.bias, self.cols);
        args.push(ArgSpec::write("y", DType::Bf16, &shape));
        args
    }
    /// The bias; six for the cube's polynomial, four for the sigmoid and its product.
    fn flops(&self) -> f64 {
        11.0 * self.rows as f64 * self.cols as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 1, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let entry = if self.bias { "curve_bias_fwd" } else { "curve_fwd" };
        issue(self.name(), [self.rows, self.cols], cuda, entry, &self.curve.defines(self.bias), args)
    }
}

impl Op for CurveBwd {
    fn name(&self) -> &'static str {
        if self.curve == Curve::Gelu { "gelu_bwd" } else { "silu_bwd" }
    }
    fn args(&self) -> Vec<ArgSpec> {
        let shape = [self.rows, self.cols];
        let mut args = vec![ArgSpec::read("x", DType::Bf16, &shape)];
        bias_spec(&mut args, self.bias, self.cols);
        args.push(ArgSpec::read("dy", DType::Bf16, &shape));
        args.push(ArgSpec::write("dx", DType::Bf16, &shape));
        args
    }
    /// The forward's, and the slope with its product.
    fn flops(&self) -> f64 {
        19.0 * self.rows as f64 * self.cols as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 1, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let entry = if self.bias { "curve_bias_bwd" } else { "curve_bwd" };
        issue(self.name(), [self.rows, self.cols], cuda, entry, &self.curve.defines(self.bias), args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    #[test]
    fn backward_is_the_forwards_gradient() {
        for (rows, cols, curve, bias) in [
            (1, 8, Curve::Gelu, true),
            (7, 16, Curve::Gelu, false),
            (3, 8, Curve::Silu, false),
            (5, 24, Curve::Silu, true),
        ] {
            let (fwd, bwd) = (CurveFwd { rows, cols, curve, bias }, CurveBwd { rows, cols, curve, bias });
            let v = inputs(&fwd, 4);
            check_f32_against_f64(&fwd, &v);
            let out = v.len() - 1;
            let dy = to_bf16(&normals(rows * cols, 31, 1.0));
            let mut b = v[..out].to_vec();
            b.extend([dy.clone(), vec![]]);
            check_f32_against_f64(&bwd, &b);
            let dx = run_f64(&bwd, &b).swap_remove(out + 1);
            check_op_gradient(&fwd, &v, &[(out, &dy)], 0, &dx);
            if bias {
                let sums: Vec<f64> = (0..cols).map(|c| dx.iter().skip(c).step_by(cols).sum()).collect();
                check_op_gradient(&fwd, &v, &[(out, &dy)], 1, &sums);
            }
        }
    }

    /// Values of the tanh form, by an independent calculator: 0.841192 at 1, -0.158808 at -1, -0.0036374 at -3.
    #[test]
    fn known_values() {
        for (z, want) in [(1.0, 0.841_191_99), (-1.0, -0.158_808_01), (-3.0, -0.003_637_39), (60.0, 60.0)] {
            let (y, _) = Curve::Gelu.at::<f64>(z);
            assert!((y - want).abs() < 1e-7, "{z}: {y}");
        }
        assert_eq!(Curve::Gelu.at::<f64>(-60.0).0, 0.0);
    }
}
