//! Arms of a sweep that do not fit in memory together: each alone on the device, one after the other.

use super::open_device;
use crate::args::Args;
use crate::capture::RunPlan;
use crate::device::guard::Beat;
use crate::device::{DeviceError, DeviceInfo, Executor};
use crate::measure::outcome::Failure;
use crate::measure::{self, Hooks, Options, Outcome, Status};

/// Whether `error` may go away when each arm has the memory to itself.
pub(super) fn worth_a_try(args: &Args, plan: &RunPlan, error: &DeviceError) -> bool {
    args.mbperf.in_turn && matches!(error, DeviceError::OutOfMemory { .. }) && plan.gains_alone()
}

/// [`worth_a_try`], of a measurement.
pub(super) fn failed_so(args: &Args, plan: &RunPlan, outcome: &Outcome) -> bool {
    match &outcome.status {
        Status::Failed(Failure::Device(error)) => worth_a_try(args, plan, error),
        _ => false,
    }
}

/// Measures both arms in turn, and says on what; `None`: the graph arm does not fit alone either.
pub(super) fn measure(
    args: &Args,
    plan: &RunPlan,
    on_gpu: bool,
    beat: &Beat,
    options: &Options,
    hooks: Hooks,
) -> Option<(Outcome, DeviceInfo)> {
    let mut info = None;
    let mut open = |arm| -> Result<Box<dyn Executor>, DeviceError> {
        let alone = plan.alone(arm).ok_or_else(|| DeviceError::internal("this run has no graph arm"))?;
        let executor = open_device(&alone, args, on_gpu, None, beat.clone())?;
        info = Some(executor.info());
        Ok(Box::new(executor))
    };
    let outcome = measure::in_turn(&mut open, options, hooks)?;
    Some((outcome, info?))
}
