//! A device of scripted step times, losses, digests and faults on a virtual clock: measuring and reporting
//! are tested on it, in microseconds and without a GPU.

mod inject;
mod times;

pub use inject::Injected;
pub use times::{Noise, Times};

use crate::device::host::HostCosts;
use crate::device::record::Recorded;
use crate::device::{Arm, DeviceError, DeviceInfo, Executor, Finished, GraphCost, Health, Phase, Submitted};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// A call that the executor received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Phase(Phase),
    Reset,
    /// `replay`: the graph arm after capture.
    Submit {
        arm: Arm,
        replay: bool,
    },
    Wait,
    Capture,
    Destroy,
    Digest,
    Busy(Arm),
    Profile(Arm),
}

/// The calls so far; can be kept when the executor is gone.
pub type Calls = Arc<Mutex<Vec<Call>>>;

type LossOf = Box<dyn Fn(Arm, usize) -> Option<f32>>;
type DigestOf = Box<dyn Fn(Arm) -> Vec<(String, u64)>>;
/// A device's memory, and what lies in it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct FakeMemory {
    size_mib: f64,
    held_mib: f64,
    graphs_mib: f64,
}

type ProfileOf = Box<dyn Fn(Arm) -> Result<Recorded, String>>;

/// Builder of a [`FakeExecutor`].
pub struct Script {
    eager: Times,
    graph: Times,
    noise: Noise,
    loss: LossOf,
    digest: DigestOf,
    health: Health,
    graph_health: Option<Health>,
    busy_ms: Option<f64>,
    /// Host time that a full launch queue adds to a step; `None`: no queue.
    queue_ms: Option<f64>,
    profile: Option<ProfileOf>,
    memory: Option<FakeMemory>,
    log: bool,
    unordered: bool,
}

impl Script {
    pub fn eager(mut self, times: Times) -> Self {
        self.eager = times;
        self
    }
    pub fn graph(mut self, times: Times) -> Self {
        self.graph = times;
        self
    }
    /// Kernels that may add in any order.
    pub fn unordered(mut self) -> Self {
        self.unordered = true;
        self
    }
    /// Noise of the machine, common to both arms.
    pub fn noise(mut self, noise: Noise) -> Self {
        self.noise = noise;
        self
    }
    /// Loss of step `n` since the last reset.
    pub fn loss(mut self, loss: impl Fn(Arm, usize) -> Option<f32> + 'static) -> Self {
        self.loss = Box::new(loss);
        self
    }
    /// Digest after steps of `arm`.
    pub fn digest(mut self, digest: impl Fn(Arm) -> Vec<(String, u64)> + 'static) -> Self {
        self.digest = Box::new(digest);
        self
    }
    /// Of the card while steps of the graph arm run, where it is not that of the eager arm.
    pub fn graph_health(mut self, health: Health) -> Self {
        self.graph_health = Some(health);
        self
    }

    pub fn health(mut self, health: Health) -> Self {
        self.health = health;
        self
    }
    pub fn busy_ms(mut self, busy_ms: f64) -> Self {
        self.busy_ms = Some(busy_ms);
        self
    }
    /// Host time that a full launch queue adds to each step.
    pub fn queue_ms(mut self, queue_ms: f64) -> Self {
        self.queue_ms = Some(queue_ms);
        self
    }
    /// What the profiling pass records.
    pub fn profile(mut self, profile: impl Fn(Arm) -> Result<Recorded, String> + 'static) -> Self {
        self.profile = Some(Box::new(profile));
        self
    }
    /// A memory of `size_mib` in which the arms hold `held_mib`; graphs take `graphs_mib` more.
    pub fn memory(mut self, size_mib: f64, held_mib: f64, graphs_mib: f64) -> Self {
        self.memory = Some(FakeMemory { size_mib, held_mib, graphs_mib });
        self
    }
    /// Keeps no log of calls, for long simulations.
    pub fn without_log(mut self) -> Self {
        self.log = false;
        self
    }
    pub fn build(self) -> FakeExecutor {
        FakeExecutor {
            script: self,
            calls: Calls::default(),
            clock_ms: 0.0,
            device_free_ms: 0.0,
            in_flight: VecDeque::new(),
            captured: false,
            first_replay: false,
            steps_since_reset: 0,
            tickets: 0,
            last_arm: Arm::Eager,
            host: None,
            spin_ms: 0.0,
            drained: false,
        }
    }
}

/// See the module's page.
pub struct FakeExecutor {
    script: Script,
    calls: Calls,
    /// Virtual host clock.
    clock_ms: f64,
    /// When the device has done what was submitted.
    device_free_ms: f64,
    /// (ticket, result) in order of submission.
    in_flight: VecDeque<(u64, Finished)>,
    captured: bool,
    /// The next replay is the first.
    first_replay: bool,
    steps_since_reset: usize,
    tickets: u64,
    last_arm: Arm,
    host: Option<HostCosts>,
    spin_ms: f64,
    drained: bool,
}

/// One-off costs of the fake's two graphs.
const COST_MS: (f64, f64, f64) = (12.0, 7.0, 1.0);
/// The first replay is this many times as long as the others.
const FIRST_REPLAY: f64 = 5.0;

impl FakeExecutor {
    /// Eager steps of 10 ms, graph steps of 8 ms, no noise, equal losses and digests.
    pub fn script() -> Script {
        Script {
            eager: Times::new(10.0),
            graph: Times::new(8.0),
            noise: Noise::none(),
            loss: Box::new(|_, step| Some(4.0 - step as f32 * 1e-4)),
            digest: Box::new(|_| vec![("weight".into(), 1), ("grad".into(), 2)]),
            health: Health::default(),
            graph_health: None,
            busy_ms: None,
            queue_ms: None,
            profile: None,
            memory: None,
            log: true,
            unordered: false,
        }
    }

    pub fn calls(&self) -> Calls {
        self.calls.clone()
    }

    fn log(&self, call: Call) {
        if !self.script.log {
            return;
        }
        if let Ok(mut calls) = self.calls.lock() {
            calls.push(call);
        }
    }
}

impl Executor for FakeExecutor {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { device: "fake".into(), unordered: self.script.unordered, ..DeviceInfo::default() }
    }

    fn set_phase(&mut self, phase: Phase) {
        self.log(Call::Phase(phase));
    }

    fn reset(&mut self) -> Result<(), DeviceError> {
        self.log(Call::Reset);
        self.steps_since_reset = 0;
        Ok(())
    }

    fn submit(&mut self, arm: Arm) -> Result<Submitted, DeviceError> {
        let replay = arm == Arm::Graph && self.captured;
        self.log(Call::Submit { arm, replay });
        // Uncaptured, the graph arm issues what the eager arm does.
        let times = if replay { &mut self.script.graph } else { &mut self.script.eager };
        let machine = self.script.noise.next(self.clock_ms);
        let blocked_ms = self.script.queue_ms.unwrap_or(0.0);
        // Drained, the same time is spent waiting.
        let wait_ms = if self.drained { blocked_ms } else { 0.0 };
        let submit_ms = times.submit_ms + blocked_ms - wait_ms;
        let mut device_ms = times.next(self.clock_ms) * machine;
        if replay && std::mem::take(&mut self.first_replay) {
            device_ms *= FIRST_REPLAY;
        }
        // Issuing takes at least the host model's time.
        let modelled_ms = match &self.host {
            Some(costs) => (costs.arm(arm)?.step_ms - submit_ms).max(0.0),
            None => 0.0,
        };
        device_ms += self.spin_ms;
        let begun = self.clock_ms;
        self.clock_ms += submit_ms + wait_ms + modelled_ms;
        let device_start = self.device_free_ms.max(begun);
        let ended_before_ms = self.device_free_ms;
        self.device_free_ms = (device_start + device_ms).max(self.clock_ms);
        let loss = (self.script.loss)(arm, self.steps_since_reset);
        self.steps_since_reset += 1;
        self.last_arm = arm;
        self.tickets += 1;
        self.in_flight.push_back((
            self.tickets,
            Finished {
                done_at_ms: self.device_free_ms,
                after_previous_ms: Some(self.device_free_ms - ended_before_ms),
                device_span_ms: Some(self.device_free_ms - device_start),
                loss,
                grad_norm: Some(1.0),
                fault: None,
            },
        ));
        Ok(Submitted { submit_ms, wait_ms, modelled_ms, ticket: self.tickets })
    }

    fn set_drained(&mut self, on: bool) -> bool {
        self.drained = on && self.script.queue_ms.is_some();
        self.script.queue_ms.is_some()
    }

    fn wait(&mut self, step: Submitted) -> Result<Finished, DeviceError> {
        self.log(Call::Wait);
        match self.in_flight.pop_front() {
            Some((ticket, finished)) if ticket == step.ticket => {
                self.clock_ms = self.clock_ms.max(finished.done_at_ms);
                Ok(Finished { done_at_ms: self.clock_ms, ..finished })
            }
            _ => Err(DeviceError::internal(format!("step {} waited for out of order", step.ticket))),
        }
    }

    fn capture(&mut self) -> Result<GraphCost, DeviceError> {
        self.log(Call::Capture);
        if let Some(memory) = self.script.memory {
            let free_mib = memory.size_mib - memory.held_mib;
            if memory.graphs_mib > free_mib {
                return Err(DeviceError::OutOfMemory {
                    phase: Phase::Instantiate,
                    what: "the graphs".into(),
                    need_mib: memory.graphs_mib,
                    free_mib,
                    remedy: "capture less".into(),
                });
            }
        }
        self.captured = true;
        self.first_replay = true;
        self.clock_ms += COST_MS.0 + COST_MS.1 + COST_MS.2;
        Ok(GraphCost {
            capture_ms: COST_MS.0,
            instantiate_ms: COST_MS.1,
            upload_ms: COST_MS.2,
            graphs: 2,
            nodes: 200,
            launches_per_step: 4,
            memory_mib: self.script.memory.map(|m| m.graphs_mib),
            memory_note: match self.script.memory {
                Some(_) => String::new(),
                None => "the fake device has no memory".into(),
            },
        })
    }

    fn destroy_graphs(&mut self) -> Result<(), DeviceError> {
        self.log(Call::Destroy);
        self.in_flight.clear();
        self.clock_ms = self.clock_ms.max(self.device_free_ms);
        self.captured = false;
        Ok(())
    }

    fn digest(&mut self) -> Result<Vec<(String, u64)>, DeviceError> {
        self.log(Call::Digest);
        Ok((self.script.digest)(self.last_arm))
    }

    fn launches_per_step(&self, arm: Arm) -> usize {
        if arm == Arm::Graph { 120 } else { 300 }
    }

    fn planned_bytes(&self, arm: Arm) -> u64 {
        if arm == Arm::Graph { 3 << 20 } else { 2 << 20 }
    }

    fn now_ms(&self) -> f64 {
        self.clock_ms
    }

    fn health(&mut self) -> Health {
        let of_graphs = self.script.graph_health.as_ref().filter(|_| self.last_arm == Arm::Graph);
        of_graphs.unwrap_or(&self.script.health).clone()
    }

    fn set_host_costs(&mut self, costs: Option<HostCosts>) -> Result<(), DeviceError> {
        self.host = costs;
        Ok(())
    }

    fn set_device_spin_ms(&mut self, ms: f64) -> Result<(), DeviceError> {
        self.spin_ms = ms;
        Ok(())
    }

    fn stall(&mut self, ms: f64) {
        self.clock_ms += ms;
    }

    fn busy_ms(&mut self, arm: Arm) -> Result<f64, String> {
        self.log(Call::Busy(arm));
        self.script.busy_ms.ok_or_else(|| "the fake device has no profiler".into())
    }

    fn profile(&mut self, arm: Arm) -> Result<Recorded, String> {
        self.log(Call::Profile(arm));
        self.script
            .profile
            .as_ref()
            .map_or_else(|| Err("the fake device has no profiler".into()), |profile| profile(arm))
    }
}
