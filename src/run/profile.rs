//! `--profile`: what is looked at before the run, and what is made of the records after it.

use super::{say, usage};
use crate::args::{Args, DeviceChoice, Format};
use crate::capture::RunPlan;
use crate::commands::complain;
use crate::device::cuda::libraries::{Availability, ensure_cupti, probe};
use crate::device::record::Recorded;
use crate::device::{Arm, DeviceError};
use crate::measure::Outcome;
use crate::profile::{Profile, text, trace};
use crate::report::writer::beside;
use crate::report::{RunFacts, Writer, file};
use std::path::PathBuf;

/// No device or library.
const NO_LIBRARY: u8 = 3;

/// Before anything starts: whether there is somebody who records.
///
/// # Errors
/// A GPU without CUPTI (exit 3), or options that contradict (exit 2).
pub(super) fn check(args: &Args) -> anyhow::Result<()> {
    let own = &args.mbperf;
    if !own.profile {
        return Ok(());
    }
    if own.no_samplers {
        return Err(usage("--profile records what --no_samplers leaves out: give one of them"));
    }
    let on_gpu = own.device != DeviceChoice::Cpu && matches!(probe(), Availability::Ready(_));
    match ensure_cupti() {
        Err(e) if on_gpu => Err(DeviceError::Unavailable(format!("no profile: {e}")).into()),
        _ => Ok(()),
    }
}

/// Opens the files of a run that is profiled.
///
/// # Errors
/// Files that cannot be written (exit 2).
pub(super) fn prepare(args: &Args, writer: &mut Writer) -> anyhow::Result<()> {
    if !args.mbperf.profile || args.mbperf.no_profile {
        return Ok(());
    }
    writer.expect_profile()?;
    if let Some(path) = trace_file(writer) {
        file::check(&path, trace::TRACE_START.as_bytes(), "trace of --profile").map_err(|reason| {
            usage(&format!("--profile: cannot write {}: {reason}; choose another -o", path.display()))
        })?;
    }
    Ok(())
}

/// Beside the rows; `None` where these have no neighbours.
fn trace_file(writer: &Writer) -> Option<PathBuf> {
    writer.path().filter(|_| writer.has_neighbours()).map(|path| beside(path, "trace.json"))
}

/// The profiles of a run.
pub(super) fn profiles(plan: &RunPlan, outcome: &Outcome) -> Vec<Profile> {
    let of = |(arm, recorded): &(Arm, Result<Recorded, String>)| {
        let plan = match arm {
            Arm::Eager => Some(&plan.eager),
            Arm::Graph => plan.graph.as_ref(),
        };
        Some(Profile::new(*arm, plan?, recorded.as_ref().ok()?.clone()))
    };
    outcome.profiles.iter().filter_map(of).collect()
}

/// Writes the files, says the table. Returns the exit code: an arm that was not recorded is a failure.
///
/// # Errors
/// Files that cannot be written.
pub(super) fn conclude(
    args: &Args,
    profiles: &[Profile],
    outcome: &Outcome,
    facts: &RunFacts,
    writer: &mut Writer,
) -> anyhow::Result<u8> {
    if !profiles.is_empty() {
        writer.profiles(profiles)?;
    }
    if args.mbperf.format != Format::Json {
        profiles.iter().for_each(|p| say(args, &format!("\n{}", text(p).trim_end())));
    }
    if let Some(path) = trace_file(writer).filter(|_| !profiles.is_empty()) {
        let about = [
            ("run_id", facts.run_id.clone()),
            ("command", facts.command.clone()),
            ("gpu", facts.gpu_name.clone().unwrap_or_else(|| facts.device.clone())),
        ];
        file::replace(&path, trace::render(profiles, &about).as_bytes()).map_err(|e| {
            // With the cause in the same text: the cause alone is taken for standard output's.
            anyhow::anyhow!("cannot write the trace to {}: {e}; make room there", path.display())
        })?;
        say(args, &format!("trace: {} (open it in ui.perfetto.dev)", path.display()));
    }
    let mut code = 0;
    for (arm, recorded) in &outcome.profiles {
        if let Err(reason) = recorded {
            complain(&format!("no profile of the {arm} step: {reason}"));
            code = NO_LIBRARY;
        }
    }
    Ok(code)
}
