//! The CPU device: the same program, run by the ops' references with bf16 rounding at the contract's points.
//!
//! Its "graph" is the recorded list of a segment's launches, replayed: the flow and the proofs are those of
//! the GPU, the speed-up means nothing and stays empty.

mod memory;
mod storage;
pub mod tcp;

pub use storage::{Storage, global_index, name_hash, weight_normal};

use super::host::{HostCosts, Pacer};
use super::inject::{Inject, Kind, lasting};
use super::record::{self, Call, Record, Recorded, Unit};
use super::{Arm, DeviceError, DeviceInfo, Executor, Finished, GraphCost, Health, Phase, Submitted};
use crate::capture::{ArmPlan, RunPlan};
use crate::program::{BufId, Launch, Lifetime};
use std::collections::VecDeque;
use std::time::Instant;

const MIB: f64 = (1u64 << 20) as f64;

fn too_large(need: u64, free: Option<u64>) -> DeviceError {
    DeviceError::OutOfMemory {
        phase: Phase::Prepare,
        what: "the model on the CPU (four bytes an element)".into(),
        need_mib: need as f64 / MIB,
        free_mib: free.unwrap_or(0) as f64 / MIB,
        remedy:
            "leave --full_size out, lower --num_layers, -sl, --vocab_size or --hidden_size, or raise this \
                 process's limit (`ulimit -v`)"
                .into(),
    }
}

/// What a launch counts as in a profile.
fn unit(launch: &Launch) -> Unit {
    Unit { kind: record::Kind::Kernel, name: launch.op.name().into(), grid: [0; 3], block: [0; 3] }
}

/// Runs a [`RunPlan`] on the host.
pub struct CpuExecutor {
    plan: RunPlan,
    storage: Storage,
    /// Launch indices by graph id, once captured.
    graphs: Vec<Vec<usize>>,
    captured: bool,
    phase: Phase,
    inject: Option<Inject>,
    host: Option<HostCosts>,
    /// Leaves this launch (index in the graph arm's program) out of the graphs: for tests of the proof.
    omit_launch: Option<usize>,
    finished: VecDeque<Result<Finished, DeviceError>>,
    tickets: u64,
    start: Instant,
}

impl CpuExecutor {
    pub fn new(
        plan: RunPlan,
        mut inject: Option<Inject>,
        omit_launch: Option<usize>,
    ) -> Result<Self, DeviceError> {
        Inject::at(&mut inject, Phase::Prepare)?;
        // The arms' buffers agree up to the graph arm's own static ones, so one storage serves both.
        let widest = plan.graph.as_ref().unwrap_or(&plan.eager).program.clone();
        let need = Storage::bytes(&widest);
        if let Some(free) = memory::free(Storage::largest(&widest)).filter(|free| need > *free) {
            return Err(too_large(need, Some(free)));
        }
        let storage = Storage::new(&widest, plan.seed).map_err(|need| too_large(need, memory::free(0)))?;
        Ok(Self {
            plan,
            storage,
            graphs: Vec::new(),
            captured: false,
            phase: Phase::Prepare,
            inject,
            host: None,
            omit_launch,
            finished: VecDeque::new(),
            tickets: 0,
            start: Instant::now(),
        })
    }

    fn arm(&self, arm: Arm) -> Result<&ArmPlan, DeviceError> {
        match arm {
            Arm::Eager => Ok(&self.plan.eager),
            Arm::Graph => {
                self.plan.graph.as_ref().ok_or_else(|| DeviceError::internal("this run has no graph arm"))
            }
        }
    }

    /// Gives the time in `host_sync` launches and the time spun for the host model, in milliseconds.
    fn run_step(&mut self, arm: Arm, mut record: Option<&mut Recorded>) -> Result<(f64, f64), DeviceError> {
        let plan = self.arm(arm)?.clone();
        let replay = arm == Arm::Graph && self.captured;
        let mut wait_ms = 0.0;
        let costs = self.host.as_ref().map(|h| h.arm(arm)).transpose()?;
        let mut pacer = Pacer::new(costs);
        for (s, segment) in plan.segments.iter().enumerate() {
            let replayed = replay && segment.graph.is_some();
            if replayed {
                pacer.before_replay(s);
            }
            let list: Vec<usize> = match segment.graph {
                Some(g) if replay => {
                    // A shared graph was recorded at its first segment; its launches are equal in op and buffers.
                    self.graphs[g].clone()
                }
                _ => segment.launches.clone().collect(),
            };
            if let Some(record) = record.as_mut().filter(|_| replayed) {
                record.calls.push(Call::Replay(s));
            }
            for i in list {
                let launch = &plan.program.launches[i];
                if !replayed {
                    pacer.before(i);
                }
                let t = Instant::now();
                self.storage.run(&plan.program, launch)?;
                if let Some(record) = &mut record {
                    if !replayed {
                        record.calls.push(Call::Launch(i));
                    }
                    record.records.push(self.recorded(launch, [t, Instant::now()], record.calls.len() - 1));
                }
                if launch.host_sync() {
                    wait_ms += t.elapsed().as_secs_f64() * 1e3;
                }
                if !replayed {
                    pacer.after(i);
                }
            }
            if replayed {
                pacer.after_replay(s);
            }
        }
        Ok((wait_ms, pacer.spun().as_secs_f64() * 1e3))
    }

    /// A launch as a profiler's record: one reference is one "kernel" of the op's name.
    fn recorded(&self, launch: &Launch, [from, to]: [Instant; 2], call: usize) -> Record {
        let ns = |t: Instant| u64::try_from(t.duration_since(self.start).as_nanos()).unwrap_or(u64::MAX);
        Record {
            unit: unit(launch),
            start_ns: ns(from),
            end_ns: ns(to),
            stream: u32::try_from(launch.lane).unwrap_or(u32::MAX),
            correlation: u32::try_from(call).unwrap_or(u32::MAX),
            call: Some(call),
            node: 0,
        }
    }

    fn result(&self, arm: Arm) -> Result<Finished, DeviceError> {
        let program = &self.arm(arm)?.program;
        let scalar = |id: Option<BufId>| id.and_then(|id| self.storage.read(program, id).first().copied());
        let fault =
            program.faults.iter().find(|(id, _)| self.storage.read(program, *id).iter().any(|v| *v != 0.0));
        if let Some((_, meaning)) = fault {
            return Err(DeviceError::Invalid(meaning.clone()));
        }
        Ok(Finished {
            done_at_ms: self.now_ms(),
            after_previous_ms: None,
            device_span_ms: None,
            loss: scalar(program.loss),
            grad_norm: scalar(program.grad_norm),
            fault: None,
        })
    }
}

impl Executor for CpuExecutor {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { device: "cpu".into(), attention_backend: Some("reference".into()), ..Default::default() }
    }
    fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
    }
    fn reset(&mut self) -> Result<(), DeviceError> {
        Inject::reset(&mut self.inject, self.phase);
        // As on a GPU: steps in flight are over, whether or not they were waited for.
        self.finished.clear();
        let program = self.plan.graph.as_ref().unwrap_or(&self.plan.eager).program.clone();
        self.storage.reset(&program)
    }
    fn submit(&mut self, arm: Arm) -> Result<Submitted, DeviceError> {
        let start = self.now_ms();
        let fault = Inject::at_step(&mut self.inject, self.phase, arm)?;
        let (wait_ms, modelled_ms) = self.run_step(arm, None)?;
        let program = &self.plan.eager.program;
        if let Some(id) = lasting(program).filter(|_| fault == Some(Kind::WrongResult)) {
            self.storage.spoil(program, id);
        }
        let mut result = self.result(arm);
        if let (Some(kind), Ok(finished)) = (fault, &mut result) {
            kind.mar(finished);
        }
        self.finished.push_back(result);
        self.tickets += 1;
        let submit_ms = self.now_ms() - start - wait_ms - modelled_ms;
        Ok(Submitted { submit_ms, wait_ms, modelled_ms, ticket: self.tickets })
    }
    fn wait(&mut self, _step: Submitted) -> Result<Finished, DeviceError> {
        self.finished
            .pop_front()
            .unwrap_or_else(|| Err(DeviceError::internal("waited for a step that was not submitted")))
    }
    fn capture(&mut self) -> Result<GraphCost, DeviceError> {
        let start = Instant::now();
        let mut wrong = Inject::at(&mut self.inject, Phase::Capture)?.is_some();
        // A list is made and there: nothing else can fail, unless it is asked to.
        Inject::at(&mut self.inject, Phase::Instantiate)?;
        Inject::at(&mut self.inject, Phase::Upload)?;
        let plan = self.arm(Arm::Graph)?.clone();
        self.graphs = vec![Vec::new(); plan.graphs()];
        for segment in &plan.segments {
            let Some(g) = segment.graph else { continue };
            if self.graphs[g].is_empty() {
                let omit =
                    if std::mem::take(&mut wrong) { Some(segment.launches.start) } else { self.omit_launch };
                self.graphs[g] = segment.launches.clone().filter(|i| Some(*i) != omit).collect();
            }
            // Equal work: what was recorded is what the eager arm issues for this segment, staging apart.
            let eager = segment.launches.clone().filter(|&i| !plan.program.launches[i].staging).count();
            let recorded = self.graphs[g].iter().filter(|&&i| !plan.program.launches[i].staging).count();
            if eager != recorded {
                return Err(DeviceError::Unequal(format!(
                    "graph {g} ({}) holds {recorded} launches, the eager arm issues {eager} there",
                    segment.label
                )));
            }
        }
        self.captured = true;
        let nodes = self.graphs.iter().map(Vec::len).sum();
        let launches_per_step = plan.segments.iter().filter(|s| s.graph.is_some()).count();
        Ok(GraphCost {
            capture_ms: start.elapsed().as_secs_f64() * 1e3,
            graphs: plan.graphs(),
            nodes,
            launches_per_step,
            memory_note: "a CPU graph is a list of launches and takes no device memory".into(),
            ..Default::default()
        })
    }
    fn destroy_graphs(&mut self) -> Result<(), DeviceError> {
        self.captured = false;
        self.graphs.clear();
        Ok(())
    }
    fn digest(&mut self) -> Result<Vec<(String, u64)>, DeviceError> {
        let program = &self.plan.eager.program;
        Ok(program
            .digest
            .iter()
            .map(|&id| (program.buffer(id).name.clone(), self.storage.digest(program, id)))
            .collect())
    }
    fn launches_per_step(&self, arm: Arm) -> usize {
        self.arm(arm).map_or(0, |p| p.program.launches.len())
    }
    fn planned_bytes(&self, arm: Arm) -> u64 {
        self.arm(arm).map_or(0, |p| {
            let host: usize =
                p.program.buffers.iter().filter(|b| b.lifetime == Lifetime::Host).map(|b| b.bytes()).sum();
            (p.memory.persistent_bytes + p.memory.arena_bytes + host) as u64
        })
    }
    fn set_drained(&mut self, _on: bool) -> bool {
        false
    }

    fn now_ms(&self) -> f64 {
        self.start.elapsed().as_secs_f64() * 1e3
    }
    fn health(&mut self) -> Health {
        Health::default()
    }
    fn set_host_costs(&mut self, costs: Option<HostCosts>) -> Result<(), DeviceError> {
        if let Some(costs) = &costs {
            costs.eager.check(&self.plan.eager)?;
            if let Some(graph) = &self.plan.graph {
                costs.arm(Arm::Graph)?.check(graph)?;
            }
        }
        self.host = costs;
        Ok(())
    }
    fn read(&mut self, buffer: BufId) -> Result<Vec<f32>, DeviceError> {
        Ok(self.storage.read(&self.plan.eager.program, buffer))
    }
    fn busy_ms(&mut self, _arm: Arm) -> Result<f64, String> {
        Err("the CPU device has no kernels to time".into())
    }
    fn profile(&mut self, arm: Arm) -> Result<Recorded, String> {
        let mut recorded = Recorded { recorder: "the CPU's clock", ..Recorded::default() };
        self.run_step(arm, Some(&mut recorded)).map_err(|e| e.to_string())?;
        let program = &self.arm(arm).map_err(|e| e.to_string())?.program;
        recorded.expected = program.launches.iter().map(|l| Some(vec![unit(l)])).collect();
        Ok(recorded)
    }
}
