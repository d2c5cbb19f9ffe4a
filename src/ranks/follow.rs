//! Another rank: does what rank 0 says until that says `End`.

use super::control::{Answer, Command, Follow, RankStep, Steps};
use crate::device::host::HostCosts;
use crate::device::{DeviceError, Executor, Phase, Submitted};
use std::collections::VecDeque;

/// Serves rank 0. Gives true when the run was whole, false when rank 0 gave up or went.
///
/// # Errors
/// What fails on this rank.
pub fn serve(
    executor: &mut dyn Executor,
    follow: &Follow,
    costs: Option<HostCosts>,
) -> Result<bool, DeviceError> {
    let mut flying = Flying::default();
    while let Some(command) = follow.next() {
        let answer = match command {
            Command::Beat | Command::Abort(_) => continue,
            Command::End => return Ok(true),
            Command::Shared { what, .. } => {
                return Err(DeviceError::internal(format!("rank 0 shares {what}, which is not asked for")));
            }
            Command::Reset => executor.reset().map(|()| Answer::Done)?,
            Command::Steps(steps) => Answer::Steps(flying.run(executor, steps)?),
            Command::Capture => executor.capture().map(|_| Answer::Done)?,
            Command::DestroyGraphs => executor.destroy_graphs().map(|()| Answer::Done)?,
            Command::Digest => executor.digest().map(Answer::Digest)?,
            Command::HostModel(on) => {
                executor.set_host_costs(costs.clone().filter(|_| on)).map(|()| Answer::Done)?
            }
            // Rank 0 has the figures; what it cannot read is its own notice.
            Command::Busy(arm) => {
                let _ = executor.busy_ms(arm);
                Answer::Done
            }
            Command::Profile(arm) => {
                let _ = executor.profile(arm);
                Answer::Done
            }
        };
        follow.answer(&answer)?;
    }
    Ok(false)
}

/// A step in flight: whether it is of run-ahead, and whether the one before was in flight when it was submitted.
#[derive(Debug)]
struct Step {
    submitted: Submitted,
    ahead: bool,
    behind: bool,
}

/// Steps in flight between commands.
#[derive(Debug, Default)]
struct Flying {
    steps: VecDeque<Step>,
    /// When the wall time of the next step to finish began.
    since_ms: f64,
}

impl Flying {
    /// As rank 0 runs its own: a step of run-ahead or none, waited for in order.
    fn run(&mut self, executor: &mut dyn Executor, steps: Steps) -> Result<Vec<RankStep>, DeviceError> {
        let mut seen = Vec::with_capacity(steps.count + 1);
        executor.set_phase(steps.phase);
        let most = usize::from(steps.ahead);
        for i in 0..steps.count {
            // As in rank 0's blocks: after the first come those that count.
            if i == 1 && steps.phase == Phase::Switch {
                executor.set_phase(Phase::Steady);
            }
            let behind = steps.ahead && !self.steps.is_empty();
            if !behind {
                self.since_ms = executor.now_ms();
            }
            let submitted = executor.submit(steps.arm)?;
            self.steps.push_back(Step { submitted, ahead: steps.ahead, behind });
            while self.steps.len() > most {
                seen.extend(self.finish(executor)?);
            }
        }
        while steps.drain && !self.steps.is_empty() {
            seen.extend(self.finish(executor)?);
        }
        Ok(seen)
    }

    fn finish(&mut self, executor: &mut dyn Executor) -> Result<Option<RankStep>, DeviceError> {
        let Some(Step { submitted, ahead, behind }) = self.steps.pop_front() else { return Ok(None) };
        let done = executor.wait(submitted)?;
        if let Some(fault) = done.fault {
            return Err(DeviceError::Invalid(fault.into()));
        }
        let wall_ms = done.wall_ms(ahead, behind, self.since_ms);
        self.since_ms = done.done_at_ms;
        Ok(Some(RankStep {
            submit_ms: submitted.submit_ms,
            wait_ms: submitted.wait_ms,
            device_span_ms: done.device_span_ms,
            wall_ms,
            loss: done.loss,
            grad_norm: done.grad_norm,
        }))
    }
}
