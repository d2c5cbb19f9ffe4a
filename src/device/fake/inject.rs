//! Faults on demand on the fake executor; the devices have theirs built in.

use crate::device::host::HostCosts;
use crate::device::inject::{Inject, Kind};
use crate::device::record::Recorded;
use crate::device::{Arm, DeviceError, DeviceInfo, Executor, Finished, GraphCost, Health, Phase, Submitted};
use std::collections::VecDeque;

/// An executor that fails as told and is itself otherwise.
pub struct Injected<E> {
    pub inner: E,
    fault: Inject,
    phase: Phase,
    /// A wrong result has been left: the next digest differs.
    spoilt: bool,
    /// Arms of the steps in flight, and the arm that has gone wrong.
    in_flight: VecDeque<Arm>,
    wrong: Option<Arm>,
}

impl<E: Executor> Injected<E> {
    pub fn new(inner: E, fault: Inject) -> Self {
        Self { inner, fault, phase: Phase::Prepare, spoilt: false, in_flight: VecDeque::new(), wrong: None }
    }

    /// The error of a fault that shows at a call; `None`: it shows in results.
    fn error(&self) -> Option<DeviceError> {
        self.fault.kind.error(self.fault.phase)
    }
}

impl<E: Executor> Executor for Injected<E> {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
        self.inner.set_phase(phase);
    }

    fn reset(&mut self) -> Result<(), DeviceError> {
        self.spoilt = false;
        self.inner.reset()
    }

    fn submit(&mut self, arm: Arm) -> Result<Submitted, DeviceError> {
        // Faults of results show when the step is waited for.
        if let Some(error) = self.error()
            && self.fault.fire(self.phase).is_some()
        {
            return Err(error);
        }
        let submitted = self.inner.submit(arm)?;
        self.in_flight.push_back(arm);
        Ok(submitted)
    }

    fn wait(&mut self, step: Submitted) -> Result<Finished, DeviceError> {
        let mut finished = self.inner.wait(step)?;
        let arm = self.in_flight.pop_front();
        if self.error().is_none()
            && let Some(kind) = self.fault.fire(self.phase)
        {
            kind.mar(&mut finished);
            if kind == Kind::WrongResult {
                self.wrong = arm;
            }
        }
        self.spoilt |= arm.is_some() && arm == self.wrong;
        Ok(finished)
    }

    fn capture(&mut self) -> Result<GraphCost, DeviceError> {
        for phase in Phase::OF_CAPTURE {
            if self.fault.fire(phase).is_some() {
                match self.error() {
                    Some(error) => return Err(error),
                    // A graph that computes something else.
                    None => self.spoilt = true,
                }
            }
        }
        self.inner.capture()
    }

    fn destroy_graphs(&mut self) -> Result<(), DeviceError> {
        self.in_flight.clear();
        // A graph that is gone is no longer wrong.
        self.wrong = None;
        self.inner.destroy_graphs()
    }

    fn digest(&mut self) -> Result<Vec<(String, u64)>, DeviceError> {
        let mut digest = self.inner.digest()?;
        if let Some((_, hash)) = digest.first_mut().filter(|_| self.spoilt) {
            *hash ^= 1;
        }
        Ok(digest)
    }

    fn launches_per_step(&self, arm: Arm) -> usize {
        self.inner.launches_per_step(arm)
    }

    fn planned_bytes(&self, arm: Arm) -> u64 {
        self.inner.planned_bytes(arm)
    }

    fn set_host_costs(&mut self, costs: Option<HostCosts>) -> Result<(), DeviceError> {
        self.inner.set_host_costs(costs)
    }

    fn set_device_spin_ms(&mut self, ms: f64) -> Result<(), DeviceError> {
        self.inner.set_device_spin_ms(ms)
    }

    fn stall(&mut self, ms: f64) {
        self.inner.stall(ms);
    }

    fn memory_used_mib(&mut self) -> Option<f64> {
        self.inner.memory_used_mib()
    }

    fn set_drained(&mut self, on: bool) -> bool {
        self.inner.set_drained(on)
    }

    fn now_ms(&self) -> f64 {
        self.inner.now_ms()
    }

    fn health(&mut self) -> Health {
        self.inner.health()
    }

    fn busy_ms(&mut self, arm: Arm) -> Result<f64, String> {
        self.inner.busy_ms(arm)
    }

    fn profile(&mut self, arm: Arm) -> Result<Recorded, String> {
        self.inner.profile(arm)
    }
}
