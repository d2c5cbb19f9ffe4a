//! Which device runs, with which fault.

use super::usage;
use crate::args::{Args, AttentionKernels, DeviceChoice};
use crate::capture::RunPlan;
use crate::commands;
use crate::device::cpu::CpuExecutor;
use crate::device::cuda::cudnn::{AttentionBackend, AttentionChoice};
use crate::device::cuda::executor::{CudaExecutor, CudaOptions};
use crate::device::cuda::libraries::{Availability, probe};
use crate::device::guard::{Beat, Guarded};
use crate::device::inject::Inject;
use crate::device::{DeviceError, Executor};
use crate::keys::short_words;
use crate::ranks::control::{self, Share};
use crate::ranks::lead::Leading;

/// What needs a GPU looks for one: in its place there is nothing.
pub(super) fn need_gpu(args: &Args, what: &str) -> anyhow::Result<()> {
    commands::folder_of_environment(args.mbperf.cuda_path.as_deref())?;
    match probe() {
        Availability::Ready(_) => Ok(()),
        Availability::NoDriver(why) | Availability::NoDevice(why) | Availability::Unusable(why) => {
            Err(DeviceError::Unavailable(format!(
                "{what} needs a GPU; {why}; `mbperf doctor` says what is missing"
            ))
            .into())
        }
    }
}

/// True for the GPU. `auto` takes the CPU only when there is no driver or no device.
pub(super) fn choose_device(args: &Args) -> anyhow::Result<bool> {
    if args.mbperf.device == DeviceChoice::Cpu {
        return Ok(false);
    }
    commands::folder_of_environment(args.mbperf.cuda_path.as_deref())?;
    let auto = args.mbperf.device == DeviceChoice::Auto;
    match probe() {
        Availability::Ready(_) => Ok(true),
        Availability::NoDriver(why) | Availability::NoDevice(why) if auto => {
            commands::say(&format!(
                "{why}: running on the CPU, in small; times mean nothing there (`mbperf doctor` tells more)"
            ));
            Ok(false)
        }
        Availability::NoDriver(why) | Availability::NoDevice(why) => Err(DeviceError::Unavailable(format!(
            "{why}; `mbperf doctor` says where it was looked for; --device cpu runs without"
        ))
        .into()),
        Availability::Unusable(why) => Err(DeviceError::Unavailable(why).into()),
    }
}

/// `--spin_percent` lengthens the graph arm's steps by a kernel, which the CPU has none of.
pub(super) fn check_spin(args: &Args, on_gpu: bool) -> anyhow::Result<()> {
    match args.mbperf.spin_percent {
        Some(percent) if percent != 0.0 && !on_gpu => Err(usage(&format!(
            "--spin_percent {percent}: the CPU cannot spin; leave it out, or run on a GPU (--device cuda)"
        ))),
        _ => Ok(()),
    }
}

pub(super) fn faults(args: &Args) -> anyhow::Result<Option<Inject>> {
    let parse = |text: &String| {
        let failed = |e: String| usage(&format!("--inject: {}", short_words(&e)));
        text.parse::<Inject>().map_err(failed)
    };
    let all = args.mbperf.inject.iter().map(parse).collect::<anyhow::Result<Vec<_>>>()?;
    // As with every option, the last one wins; the others are still read.
    Ok(all.into_iter().last())
}

/// What the command line says of how the GPU is opened: the same for a run and for its ops alone.
pub(super) fn cuda_options(args: &Args) -> CudaOptions {
    let own = &args.mbperf;
    CudaOptions {
        cache_dir: own.kernel_cache.clone(),
        cuda_path: own.cuda_path.clone(),
        attention: AttentionChoice {
            backend: match own.attention_backend {
                AttentionKernels::Auto => AttentionBackend::Auto,
                AttentionKernels::Cudnn => AttentionBackend::Cudnn,
                AttentionKernels::Own => AttentionBackend::Own,
            },
            deterministic: own.attention_deterministic,
        },
        ..Default::default()
    }
}

pub(super) fn open_device(
    plan: &RunPlan,
    args: &Args,
    on_gpu: bool,
    inject: Option<Inject>,
    beat: Beat,
) -> Result<Guarded, DeviceError> {
    let (disturbing, failing) = match inject {
        Some(fault) if fault.kind.disturbs() => (Some(fault), None),
        other => (None, other),
    };
    // Rank 0 has the other ranks do what its own device does.
    let led = |device: Box<dyn Executor>| -> Box<dyn Executor> {
        match control::team().map(|t| t.share) {
            Some(Share::Lead(lead)) => Box::new(Leading::new(device, lead)),
            _ => device,
        }
    };
    Guarded::open(beat, disturbing, || {
        if !on_gpu {
            return Ok(led(Box::new(CpuExecutor::new(plan.clone(), failing, None)?)));
        }
        let options = CudaOptions { inject: failing, team: control::team(), ..cuda_options(args) };
        Ok(led(Box::new(CudaExecutor::new(plan, options)?)))
    })
}
