//! Rank 0's executor: does what it is told on its own device, and has every other rank do the same.

use super::control::{Answer, Command, Lead, RankStep, Steps};
use crate::device::guard::Beat;
use crate::device::host::HostCosts;
use crate::device::record::Recorded;
use crate::device::{Arm, DeviceError, DeviceInfo, Executor, Finished, GraphCost, Health, Phase, Submitted};
use crate::program::BufId;
use std::rc::Rc;

/// See the module's page.
pub struct Leading {
    inner: Box<dyn Executor>,
    lead: Rc<Lead>,
    phase: Phase,
    /// Steps commands whose answers are still to come.
    owed: usize,
}

impl Leading {
    pub fn new(inner: Box<dyn Executor>, lead: Rc<Lead>) -> Self {
        Self { inner, lead, phase: Phase::Prepare, owed: 0 }
    }

    /// All ranks do `command`; this one by `own`.
    fn all<T>(
        &mut self,
        command: Command,
        own: impl FnOnce(&mut dyn Executor) -> Result<T, DeviceError>,
    ) -> Result<(T, Vec<Answer>), DeviceError> {
        self.lead.tell(&command)?;
        let mine = own(&mut *self.inner).map_err(|e| self.explain(e))?;
        Ok((mine, self.lead.answers()?))
    }

    /// Another rank's failure where that is the cause.
    fn explain(&self, error: DeviceError) -> DeviceError {
        match error {
            // This rank's own result, whatever the others do.
            DeviceError::Unequal(_) | DeviceError::OutOfMemory { .. } | DeviceError::Capture { .. } => error,
            other => self.lead.explain(other),
        }
    }
}

impl Executor for Leading {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }
    fn watched_by(&mut self, beat: &Beat) {
        self.inner.watched_by(beat);
    }
    fn ranks(&self) -> usize {
        self.lead.ranks()
    }
    fn begin_steps(&mut self, arm: Arm, count: usize, ahead: bool, drain: bool) -> Result<(), DeviceError> {
        self.owed += 1;
        self.lead.tell(&Command::Steps(Steps { arm, count, ahead, drain, phase: self.phase }))
    }
    fn of_other_ranks(&mut self) -> Result<Vec<Vec<RankStep>>, DeviceError> {
        let mut all = vec![Vec::new(); self.ranks() - 1];
        for _ in 0..std::mem::take(&mut self.owed) {
            for (all, answer) in all.iter_mut().zip(self.lead.answers()?) {
                match answer {
                    Answer::Steps(steps) => all.extend(steps),
                    other => {
                        return Err(DeviceError::internal(format!("a rank answered {other:?} to steps")));
                    }
                }
            }
        }
        Ok(all)
    }
    fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
        self.inner.set_phase(phase);
    }
    fn reset(&mut self) -> Result<(), DeviceError> {
        self.all(Command::Reset, |e| e.reset()).map(|_| ())
    }
    fn submit(&mut self, arm: Arm) -> Result<Submitted, DeviceError> {
        self.inner.submit(arm).map_err(|e| self.explain(e))
    }
    fn wait(&mut self, step: Submitted) -> Result<Finished, DeviceError> {
        self.inner.wait(step).map_err(|e| self.explain(e))
    }
    fn capture(&mut self) -> Result<GraphCost, DeviceError> {
        self.all(Command::Capture, |e| e.capture()).map(|(cost, _)| cost)
    }
    fn destroy_graphs(&mut self) -> Result<(), DeviceError> {
        if self.owed > 0 {
            // The run ends among steps: the others wait in them for this rank and hear nothing but the end.
            return self.inner.destroy_graphs();
        }
        // Also where another rank has gone: this one's graphs go in any case, before its communicators.
        let told = self.lead.tell(&Command::DestroyGraphs);
        let own = self.inner.destroy_graphs();
        told.and_then(|()| self.lead.answers().map(|_| ())).and(own)
    }
    /// Of all ranks: equality is theirs together.
    fn digest(&mut self) -> Result<Vec<(String, u64)>, DeviceError> {
        let (mut all, others) = self.all(Command::Digest, |e| e.digest())?;
        for (i, answer) in others.into_iter().enumerate() {
            match answer {
                Answer::Digest(list) => {
                    all.extend(
                        list.into_iter().map(|(name, hash)| (format!("rank {}: {name}", i + 1), hash)),
                    );
                }
                other => return Err(DeviceError::internal(format!("a rank answered {other:?} to a digest"))),
            }
        }
        Ok(all)
    }
    fn launches_per_step(&self, arm: Arm) -> usize {
        self.inner.launches_per_step(arm)
    }
    fn planned_bytes(&self, arm: Arm) -> u64 {
        self.inner.planned_bytes(arm)
    }
    fn now_ms(&self) -> f64 {
        self.inner.now_ms()
    }
    fn health(&mut self) -> Health {
        self.inner.health()
    }
    fn set_drained(&mut self, on: bool) -> bool {
        self.inner.set_drained(on)
    }
    fn set_host_costs(&mut self, costs: Option<HostCosts>) -> Result<(), DeviceError> {
        self.all(Command::HostModel(costs.is_some()), |e| e.set_host_costs(costs)).map(|_| ())
    }
    fn memory_used_mib(&mut self) -> Option<f64> {
        self.inner.memory_used_mib()
    }
    fn stall(&mut self, ms: f64) {
        self.inner.stall(ms);
    }
    fn read(&mut self, buffer: BufId) -> Result<Vec<f32>, DeviceError> {
        self.inner.read(buffer)
    }
    fn busy_ms(&mut self, arm: Arm) -> Result<f64, String> {
        let mut found = Err(String::new());
        let all = self.all(Command::Busy(arm), |e| {
            found = e.busy_ms(arm);
            Ok(())
        });
        all.map_err(|e| e.to_string()).and(found)
    }
    fn profile(&mut self, arm: Arm) -> Result<Recorded, String> {
        let mut found = Err(String::new());
        let all = self.all(Command::Profile(arm), |e| {
            found = e.profile(arm);
            Ok(())
        });
        all.map_err(|e| e.to_string()).and(found)
    }
}
