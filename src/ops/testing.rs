//! Helpers of the op tests: arguments from plain `f64` values, runs in f64 or f32, finite differences.
//!
//! Values are given as one `Vec<f64>` an argument, in the order of `Op::args`, whatever the dtype; the
//! vector of a `Write` argument may be empty. Outputs start as NaN (floats) or `i32::MIN` (integers), so that
//! an element that was not written shows.

use super::rng::{WORDS, normal_of, philox, unit};
use super::{Access, ArgSpec, CpuArgs, Op, Real, Sample};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue};
use crate::program::DType;

/// What an integer output holds before the op has run.
pub const UNWRITTEN: i32 = i32::MIN;

/// The float and the integer content of one argument; only one of them is in use.
enum Memory<T> {
    Float(Vec<T>),
    Int(Vec<i32>),
}

fn memory<T: Real>(op: &dyn Op, spec: &ArgSpec, values: &[f64]) -> Memory<T> {
    let given = !values.is_empty() || spec.is_empty();
    assert!(
        given || spec.access == Access::Write,
        "{}: argument `{}` is read and has no values",
        op.name(),
        spec.name
    );
    assert!(
        !given || values.len() == spec.len(),
        "{}: argument `{}` has {} values, its shape {:?} needs {}",
        op.name(),
        spec.name,
        values.len(),
        spec.shape,
        spec.len()
    );
    let poisoned = spec.access == Access::Write;
    if spec.dtype.is_float() {
        let value = |i: usize| if poisoned { T::of(f64::NAN) } else { T::of(values[i]) };
        Memory::Float((0..spec.len()).map(value).collect())
    } else {
        // U32 words keep their bits: 4294967295 becomes -1.
        let value = |i: usize| if poisoned { UNWRITTEN } else { values[i] as i64 as i32 };
        Memory::Int((0..spec.len()).map(value).collect())
    }
}

fn run<T: Real>(
    op: &dyn Op,
    values: &[Vec<f64>],
    call: impl Fn(&mut CpuArgs<T>) -> Result<(), DeviceError>,
) -> Result<Vec<Vec<f64>>, DeviceError> {
    let specs = op.args();
    assert_eq!(specs.len(), values.len(), "{} takes {} arguments", op.name(), specs.len());
    let mut memories: Vec<Memory<T>> =
        specs.iter().zip(values).map(|(spec, v)| memory(op, spec, v)).collect();
    let slots = specs.iter().zip(&mut memories).map(|(spec, m)| match (m, spec.access) {
        (Memory::Float(v), Access::Read) => super::cpu_args::Slot::In(v),
        (Memory::Float(v), _) => super::cpu_args::Slot::Out(v),
        (Memory::Int(v), Access::Read) => super::cpu_args::Slot::IntIn(v),
        (Memory::Int(v), _) => super::cpu_args::Slot::IntOut(v),
    });
    let mut args = CpuArgs::new(op.name(), slots.collect());
    call(&mut args)?;
    Ok(memories
        .into_iter()
        .map(|m| match m {
            Memory::Float(v) => v.into_iter().map(|x| x.f64()).collect(),
            Memory::Int(v) => v.into_iter().map(|x| x as f64).collect(),
        })
        .collect())
}

/// Runs the f64 reference; returns the content of every argument afterwards.
pub fn run_f64(op: &dyn Op, values: &[Vec<f64>]) -> Vec<Vec<f64>> {
    run::<f64>(op, values, |a| op.cpu_f64(a)).unwrap()
}

/// Runs the f32 reference (bf16 stores rounded); returns the content of every argument afterwards.
pub fn run_f32(op: &dyn Op, values: &[Vec<f64>]) -> Vec<Vec<f64>> {
    run::<f32>(op, values, |a| op.cpu_f32(a)).unwrap()
}

/// Normal(0, std) values, the same for the same seed.
pub fn normals(n: usize, seed: u32, std: f64) -> Vec<f64> {
    (0..n).map(|i| std * normal_of(philox([i as u32, 1, 0, 0], [seed, 0])) as f64).collect()
}

/// Values rounded to what a bf16 buffer can hold.
pub fn to_bf16(values: &[f64]) -> Vec<f64> {
    values.iter().map(|&v| (v as f32).bf16().f64()).collect()
}

/// Step words: seed, step 3, micro-batch 1, learning rate 0.01.
pub fn words(seed: u32) -> Vec<f64> {
    let mut w = vec![0.0; WORDS];
    w[0] = seed as f64;
    w[1] = 17.0;
    w[2] = 3.0;
    w[3] = 1.0;
    w[4] = 0.01f32.to_bits() as f64;
    w
}

/// Values for every argument: the op's own `sample`, or each by its [`Sample`], representable in its dtype.
pub fn inputs(op: &dyn Op, seed: u32) -> Vec<Vec<f64>> {
    let specs = op.args();
    let own = op.sample(seed as u64);
    let value = |i: usize, spec: &ArgSpec| -> Vec<f64> {
        if let Some(own) = &own
            && !own[i].is_empty()
        {
            return own[i].clone();
        }
        if spec.access == Access::Write {
            return Vec::new();
        }
        if spec.dtype == DType::U32 && spec.len() == WORDS {
            return words(seed);
        }
        let key = seed.wrapping_mul(1000).wrapping_add(i as u32);
        let word = |j: usize| philox([j as u32, 2, 0, 0], [key, 0])[0];
        match spec.sample {
            Sample::Normal(std) if spec.dtype.is_float() => normals(spec.len(), key, std),
            Sample::Uniform(a, b) => (0..spec.len()).map(|j| a + (b - a) * unit(word(j)) as f64).collect(),
            Sample::Below(n) => (0..spec.len()).map(|j| (word(j) % n) as f64).collect(),
            _ => panic!("{}: argument `{}` needs values from `Op::sample`", op.name(), spec.name),
        }
    };
    let round = |spec: &ArgSpec, v: Vec<f64>| match spec.dtype {
        DType::Bf16 => to_bf16(&v),
        DType::F32 => v.into_iter().map(|x| x as f32 as f64).collect(),
        _ => v,
    };
    specs.iter().enumerate().map(|(i, s)| round(s, value(i, s))).collect()
}

/// |a - b| / |b| in the Euclidean norm; infinite when something is not a number.
pub fn relative_error(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |x: f64, y: f64| x + y * y;
    let diff = a.iter().zip(b).map(|(x, y)| x - y).fold(0.0, norm).sqrt();
    let size = b.iter().copied().fold(0.0, norm).sqrt();
    let error = if diff == 0.0 { 0.0 } else { diff / size };
    if error.is_nan() { f64::INFINITY } else { error }
}

/// The f32 reference against the f64 one: every output is written and within the op's tolerance.
pub fn check_f32_against_f64(op: &dyn Op, values: &[Vec<f64>]) {
    let (low, high) = (run_f32(op, values), run_f64(op, values));
    for (i, spec) in op.args().iter().enumerate().filter(|(_, s)| s.access != Access::Read) {
        let unwritten = |v: &f64| v.is_nan() || (!spec.dtype.is_float() && *v == UNWRITTEN as f64);
        let holes = high[i].iter().filter(|v| unwritten(v)).count();
        assert_eq!(holes, 0, "{}: {holes} elements of `{}` were not written", op.name(), spec.name);
        let (error, limit) = (relative_error(&low[i], &high[i]), op.tolerance(i));
        assert!(
            error <= limit,
            "{}: `{}` {:?} has relative error {error:e}, allowed are {limit:e}",
            op.name(),
            spec.name,
            spec.shape
        );
    }
}

/// Half width of the central difference. Its own error is about STEP^2 * f''' / 6 = 1e-9 and round-off about
/// 1e-16 / STEP = 1e-12 for values of order 1.
const STEP: f64 = 1e-4;
/// Relative norm error allowed between an analytic gradient and the central difference.
const GRAD_TOLERANCE: f64 = 1e-6;
/// Elements of one argument that are perturbed; larger arguments are sampled at an even stride.
const MAX_PROBES: usize = 400;

/// Checks `grad`, the gradient of `loss(x)`, by central differences at `x`.
pub fn check_gradient(what: &str, loss: impl Fn(&[f64]) -> f64, x: &[f64], grad: &[f64]) {
    assert_eq!(x.len(), grad.len(), "{what}: gradient and argument differ in length");
    let stride = x.len().div_ceil(MAX_PROBES).max(1);
    let mut moved = x.to_vec();
    let (mut numeric, mut analytic) = (Vec::new(), Vec::new());
    for i in (0..x.len()).step_by(stride) {
        moved[i] = x[i] + STEP;
        let up = loss(&moved);
        moved[i] = x[i] - STEP;
        let down = loss(&moved);
        moved[i] = x[i];
        numeric.push((up - down) / (2.0 * STEP));
        analytic.push(grad[i]);
    }
    assert!(numeric.iter().any(|v| *v != 0.0), "{what}: the loss does not depend on the argument");
    let error = relative_error(&analytic, &numeric);
    assert!(
        error <= GRAD_TOLERANCE,
        "{what}: gradient differs from finite differences by {error:e}; analytic {:?}, numeric {:?}",
        &analytic[..analytic.len().min(6)],
        &numeric[..numeric.len().min(6)]
    );
}

/// Checks the gradient of loss = sum over `outs` of (dout * out) with respect to argument `wrt` of `forward`.
///
/// `outs` pairs indices of the forward's output arguments with their gradients; `grad` is what the backward
/// op gave (in f64). `values` are the forward's arguments.
pub fn check_op_gradient(
    forward: &dyn Op,
    values: &[Vec<f64>],
    outs: &[(usize, &[f64])],
    wrt: usize,
    grad: &[f64],
) {
    let loss = |x: &[f64]| {
        let mut values = values.to_vec();
        values[wrt] = x.to_vec();
        let after = run_f64(forward, &values);
        outs.iter().map(|(o, dout)| after[*o].iter().zip(*dout).map(|(a, b)| a * b).sum::<f64>()).sum()
    };
    let what = format!("{} by `{}`", forward.name(), forward.args()[wrt].name);
    check_gradient(&what, loss, &values[wrt], grad);
}

/// y = x^2 with its gradient, to show that the checks can fail.
#[derive(Debug)]
struct Square;
impl Square {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (x, y) = (args.input(0)?, args.output(1)?);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = (*x * *x).bf16());
        Ok(())
    }
}
impl Op for Square {
    fn name(&self) -> &'static str {
        "square"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![ArgSpec::read("x", DType::Bf16, &[5]), ArgSpec::write("y", DType::Bf16, &[5])]
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        super::tolerance(DType::Bf16, 1, 0)
    }
    cpu_reference!();
    fn prepare(&self, _: &mut CudaPrep, _: &[DevPtr], _: DevPtr) -> Result<Issue, DeviceError> {
        Ok(Issue::Nothing)
    }
}

#[test]
fn a_right_gradient_passes() {
    let values = inputs(&Square, 1);
    check_f32_against_f64(&Square, &values);
    let dout = normals(5, 9, 1.0);
    let grad: Vec<f64> = values[0].iter().zip(&dout).map(|(x, d)| 2.0 * x * d).collect();
    check_op_gradient(&Square, &values, &[(1, &dout)], 0, &grad);
}

#[test]
#[should_panic(expected = "gradient differs")]
fn a_wrong_gradient_fails() {
    let values = inputs(&Square, 1);
    let dout = normals(5, 9, 1.0);
    let grad: Vec<f64> = values[0].iter().zip(&dout).map(|(x, d)| 2.001 * x * d).collect();
    check_op_gradient(&Square, &values, &[(1, &dout)], 0, &grad);
}
