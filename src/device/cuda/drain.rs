//! Issuing a step while the launch queue never fills: the device is waited for every so many launches, and the waits are
//! told apart. What is left is what issuing costs the host, which a full queue hides: there a launch returns when an
//! earlier one has run.

use super::arm::Arm;
use super::context::Context;
use crate::device::DeviceError;
use crate::device::host::Watch;
use crate::device::record::Call;
use std::time::{Duration, Instant};

/// Launches between two waits. Issuing 2,267 launches to an idle H200 took 50 ms of a step of 110 (driver 580,
/// `host_submit_ms_sync_median` in results/h200/llama3_8b.csv), as if some thousand find room.
const LAUNCHES_BETWEEN_WAITS: usize = 256;

/// Waits in the middle of a step.
#[derive(Debug)]
pub(super) struct Drain<'a> {
    context: &'a Context,
    /// What each call of the arm launches: kernels, copies, memsets.
    arm: &'a Arm,
    launches: usize,
    waited: Duration,
    /// The first wait that failed.
    failed: Option<DeviceError>,
    /// Is told of the calls too.
    then: Option<&'a mut dyn Watch>,
}

impl<'a> Drain<'a> {
    pub fn new(context: &'a Context, arm: &'a Arm, then: Option<&'a mut dyn Watch>) -> Self {
        Self { context, arm, launches: 0, waited: Duration::ZERO, failed: None, then }
    }

    /// Time spent waiting.
    ///
    /// # Errors
    /// A wait failed.
    pub fn waited(self) -> Result<Duration, DeviceError> {
        self.failed.map_or(Ok(self.waited), Err)
    }
}

impl Watch for Drain<'_> {
    fn begin(&mut self, call: Call) {
        if let Some(then) = &mut self.then {
            then.begin(call);
        }
    }

    fn end(&mut self, call: Call) {
        if let Some(then) = &mut self.then {
            then.end(call);
        }
        // A graph holds any number of launches.
        self.launches += match call {
            Call::Launch(i) => self.arm.launches[i].work.len().max(1),
            Call::Replay(_) => LAUNCHES_BETWEEN_WAITS,
        };
        let due = self.launches >= LAUNCHES_BETWEEN_WAITS;
        if due && self.failed.is_none() {
            let begun = Instant::now();
            self.failed = self.context.synchronize().err();
            self.waited += begun.elapsed();
            self.launches = 0;
        }
    }
}
