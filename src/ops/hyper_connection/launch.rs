//! CUDA side: checks, constants, grids. One block of [`THREADS`] a token, or a partial sum.

use super::{HYPER_EPS, HyperPreBwd, HyperPreFwd, HyperShape};
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::ops::rmsnorm::partials;
use crate::ops::support::VECTOR;
use crate::ops::{Op, check_multiple, int_param};

const SOURCE: KernelSource =
    KernelSource { name: "hyper_connection/kernel.cu", text: include_str!("kernel.cu") };
/// As in kernel.cu.
const THREADS: u32 = 256;
/// Each element of res has a lane of a warp, and rows and columns are summed by butterflies.
const STREAMS: [usize; 2] = [2, 4];
/// The backward keeps every iteration's maps in static shared memory, 512 bytes each, of the 48 KiB there are.
const MOST_ITERATIONS: usize = 64;

fn check(s: &HyperShape, op: &str) -> Result<(), DeviceError> {
    check_multiple(op, "hidden", s.hidden, VECTOR)?;
    int_param(op, "tokens", s.tokens)?;
    int_param(op, "streams * hidden", s.width())?;
    if !STREAMS.contains(&s.streams) || !(1..=MOST_ITERATIONS).contains(&s.iterations) {
        return Err(DeviceError::Invalid(format!(
            "{op}: {} residual streams and {} Sinkhorn iterations, the kernel takes 2 or 4 and 1 to {MOST_ITERATIONS}; use --device cpu",
            s.streams, s.iterations
        )));
    }
    Ok(())
}

fn defines(s: &HyperShape, carried: bool) -> Vec<(&'static str, String)> {
    vec![
        ("STREAMS", s.streams.to_string()),
        ("ITERATIONS", s.iterations.to_string()),
        ("HEAD", u32::from(s.head).to_string()),
        ("CARRIED", u32::from(carried).to_string()),
        ("EPS", format!("{HYPER_EPS:e}f")),
    ]
}

fn pointers(args: &[DevPtr]) -> Vec<Param> {
    args.iter().map(|&p| p.into()).collect()
}

pub(super) fn pre_forward(
    op: &HyperPreFwd,
    cuda: &mut CudaPrep,
    args: &[DevPtr],
) -> Result<Issue, DeviceError> {
    let s = &op.shape;
    if s.tokens == 0 {
        return Ok(Issue::Nothing);
    }
    check(s, op.name())?;
    let kernel = cuda.kernel(SOURCE, "hyper_pre_fwd", &defines(s, false), 0)?;
    let mut params = pointers(args);
    params.push(Param::I32(s.hidden as i32));
    params.push(Param::F32(s.eps as f32));
    cuda.launch(&kernel, Config::linear(s.tokens, THREADS), &params)
}

pub(super) fn pre_backward(
    op: &HyperPreBwd,
    cuda: &mut CudaPrep,
    args: &[DevPtr],
) -> Result<Issue, DeviceError> {
    let s = &op.shape;
    check(s, op.name())?;
    let kernel = cuda.kernel(SOURCE, "hyper_pre_bwd", &defines(s, op.carried), 0)?;
    let (given, rest) = args.split_at(7.min(args.len()));
    let (null, out) = (DevPtr::default(), rest.len().saturating_sub(3));
    // dmaps and dnext, null where there are none.
    let between = match (&rest[..out], s.head) {
        (&[dmaps, dnext], false) => [dmaps, dnext],
        (&[dnext], true) => [null, dnext],
        (&[], true) => [null, null],
        _ => return Err(DeviceError::internal("hyper_pre_bwd: wrong number of arguments")),
    };
    let mut params = pointers(&[given, &between, &rest[out..]].concat());
    params.push(Param::I32(s.tokens as i32));
    params.push(Param::I32(s.hidden as i32));
    cuda.launch(&kernel, Config::linear(partials(s.tokens), THREADS), &params)
}

/// A kernel that ends its parameters with hidden.
pub(super) fn by_token(
    s: &HyperShape,
    cuda: &mut CudaPrep,
    entry: &'static str,
    args: &[DevPtr],
) -> Result<Issue, DeviceError> {
    if s.tokens == 0 {
        return Ok(Issue::Nothing);
    }
    check(s, entry)?;
    let kernel = cuda.kernel(SOURCE, entry, &defines(s, false), 0)?;
    let mut params = pointers(args);
    params.push(Param::I32(s.hidden as i32));
    cuda.launch(&kernel, Config::linear(s.tokens, THREADS), &params)
}
