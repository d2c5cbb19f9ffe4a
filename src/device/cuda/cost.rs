//! Host cost of a launch through an [`super::prep::Issue`] against the bare driver call: eager must not be made to
//! look slow by our own loop.

use super::context::{Stream, check};
use super::kernels::KernelLaunch;
use super::memory::UTILITY;
use super::prep::{Config, Issue, Param};
use super::session::{CudaOptions, Session};
use crate::device::DeviceError;
use cudarc::driver::sys;
use std::time::{Duration, Instant};

/// Launches of one round, and rounds of each kind; the median round counts.
const LAUNCHES: usize = 1000;
const ROUNDS: usize = 15;

/// Microseconds of host time of one launch: (our own issue, bare `cuLaunchKernel`) of the same kernel on the same
/// stream, in turn.
pub fn launch_cost(options: &CudaOptions) -> Result<(f64, f64), DeviceError> {
    let session = Session::open(options)?;
    let stream = session.context.stream()?;
    let memory = session.context.alloc(512, "the launch cost check")?;
    stream.fill(memory.ptr, 0, 512)?;
    let kernel = session.kernels.borrow_mut().get(UTILITY, "widen", &[], 0)?;
    let bind = || {
        let params = [memory.ptr.into(), memory.ptr.offset(256).into(), Param::I64(32)];
        kernel.bind(Config::linear(1, 32), &params)
    };
    let own = Issue::Kernel(bind()?);
    let same = bind()?;
    let (mut own_us, mut bare_us) = (Vec::new(), Vec::new());
    for _ in 0..=ROUNDS {
        let mut waited = Duration::ZERO;
        own_us.push(round(&stream, || own.issue(&stream, &mut waited))?);
        bare_us.push(bare_round(&stream, &same)?);
    }
    // The first round of each loads and warms.
    Ok((median(&mut own_us[1..]), median(&mut bare_us[1..])))
}

fn round(stream: &Stream, mut launch: impl FnMut() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
    let start = Instant::now();
    for _ in 0..LAUNCHES {
        launch()?;
    }
    let us = start.elapsed().as_secs_f64() * 1e6 / LAUNCHES as f64;
    stream.synchronize()?;
    Ok(us)
}

fn bare_round(stream: &Stream, launch: &KernelLaunch) -> Result<f64, DeviceError> {
    let (function, config, values) = launch.parts();
    let mut values = values.to_vec();
    let mut pointers: Vec<_> = values.iter_mut().map(|v| std::ptr::from_mut(v).cast()).collect();
    let pointers = pointers.as_mut_ptr();
    let ([gx, gy, gz], [bx, by, bz]) = (config.grid, config.block);
    round(stream, || {
        // SAFETY: the launch was bound and checked; function, values and pointers outlive the call.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                function,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                config.shared_bytes,
                stream.raw,
                pointers,
                std::ptr::null_mut(),
            )
        })
    })
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert!(median(&mut []).is_nan());
    }
}
