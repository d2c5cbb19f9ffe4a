//! The CUDA executor: both arms on one GPU, issued by the same calls.
//!
//! Over 500 lines: the state of a step that is underway (ring, events, results) is private to these calls, which keep
//! its order together; what has a seam stands in arm, capture, cost, lanes, memory, busy and session.

use super::arm::{self, Arm as Ready, PreparedCache};
use super::busy;
use super::capture::{self, Setting};
use super::context::{DeviceMemory, Event, MIB, PinnedMemory, copy_to_device, copy_to_host, in_phase};
pub use super::cost::launch_cost;
use super::counters::Counters;
use super::cudnn::AttentionUse;
use super::drain::Drain;
use super::graph::Instance;
use super::health::Monitor;
use super::kernels::KernelLaunch;
use super::lanes::Lanes;
use super::libraries::{self, Library};
use super::memory::{Memory, UTILITY, walk};
use super::nccl::Comms;
use super::nvtx::{self, Nvtx};
use super::prep::{Config, CudaPrep, DevPtr, Param};
pub use super::session::CudaOptions;
use super::session::Session;
use crate::capture::RunPlan;
use crate::device::guard::Beat;
use crate::device::host::{HostCosts, Pacer, Watch};
use crate::device::inject::{Inject, Kind, lasting};
use crate::device::record::Recorded;
use crate::device::{Arm, DeviceError, DeviceInfo, Executor, Finished, GraphCost, Health, Phase, Submitted};
use crate::program::{BufId, DType, Program};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Steps that may be in flight: measuring runs one ahead; the rest is room.
const RING: usize = 8;

/// Events of one step in flight.
#[derive(Debug)]
struct Slot {
    /// Before the step's first launch and after its last.
    start: Event,
    end: Event,
    /// After the results lie in host memory.
    done: Event,
    /// Ticket and arm of the step that uses the slot.
    busy: Option<(u64, Arm)>,
}

/// Where a step's results come from: addresses on the device, one launch a slot that gathers them.
#[derive(Debug)]
struct Results {
    gather: Vec<KernelLaunch>,
    _addresses: DeviceMemory,
}

/// One arm with its results.
#[derive(Debug)]
struct Side {
    ready: Ready,
    /// `None`: the program reports nothing.
    results: Option<Results>,
    /// Of the ranges that an attached profiler is told; `None`: there is none.
    names: Option<nvtx::Names>,
}

/// Runs a [`RunPlan`] on one GPU. Fields are dropped in order: graphs before what they use, the device last.
#[derive(Debug)]
pub struct CudaExecutor {
    graphs: Vec<Instance>,
    eager: Side,
    graph: Option<Side>,
    /// Of a run of several processes; after all that was captured and prepared with it.
    comms: Option<Comms>,
    slots: Vec<Slot>,
    /// Results of the steps in flight, `words` a slot.
    results: PinnedMemory,
    words: usize,
    lanes: Lanes,
    memory: Memory,
    /// Kept for the products that count in them.
    _counters: Counters,
    digest_words: DeviceMemory,
    monitor: Monitor,
    attention_use: AttentionUse,
    /// Of the GEMM plans of both arms.
    gemm_plan_digest: Option<String>,
    inject: Option<Inject>,
    /// Step whose results hold an injected fault.
    marred: Option<(u64, Kind)>,
    host: Option<HostCosts>,
    /// Whether the device is waited for in the middle of a step.
    drained: bool,
    /// A profiler that takes ranges.
    nvtx: Option<Nvtx>,
    /// Issued at the end of each step, and its length in milliseconds.
    spin: Option<(KernelLaunch, f64)>,
    /// Free device memory before anything of ours but the context was there.
    free_at_open: usize,
    omit_launch: Option<usize>,
    /// Is told which phase a capture has come to.
    beat: Beat,
    phase: Phase,
    tickets: u64,
    clock: Instant,
    session: Rc<Session>,
}

impl CudaExecutor {
    /// Opens the device, allocates both arms' memory and prepares every launch. Nothing is computed but what
    /// tuning needs; call [`Executor::reset`] before the first step.
    ///
    /// Errors: [`DeviceError::Unavailable`], [`DeviceError::OutOfMemory`], or a defect found in preparation.
    pub fn new(plan: &RunPlan, options: CudaOptions) -> Result<Self, DeviceError> {
        let mut inject = options.inject.clone();
        Inject::at(&mut inject, Phase::Prepare)?;
        let session = Session::open(&options)?;
        let context = &session.context;
        let free_at_open = context.memory()?.0;
        let arms = || [Some(&plan.eager), plan.graph.as_ref()].into_iter().flatten();
        let memory = Memory::new(context, plan)?;
        let lanes = Lanes::new(context, arms().map(|a| a.program.lanes()).max().unwrap_or(1))?;
        let words = arms().map(|a| reported(&a.program).len()).max().unwrap_or(0);
        let results = context.alloc_host(RING * words.max(1) * 4)?;
        let comms = match &options.team {
            Some(team) => {
                session.matmuls.borrow_mut().share_plans(team.share.clone());
                Some(Comms::new(context, &team.place, &team.share)?)
            }
            None => None,
        };
        arm::warm((&session.target, context.sm_count), &mut session.kernels.borrow_mut(), arms())?;
        let mut cache = PreparedCache::new();
        let mut counters = Counters::new(context)?;
        let mut attention_use = AttentionUse::default();
        session.matmuls.borrow_mut().begin_run(options.gemm_candidate);
        let mut side = |arm| -> Result<Side, DeviceError> {
            let mut kernels = session.kernels.borrow_mut();
            let mut matmuls = session.matmuls.borrow_mut();
            let mut sdpas = session.sdpas.borrow_mut();
            let mut prep = CudaPrep {
                kernels: &mut kernels,
                matmuls: &mut matmuls,
                sdpas: &mut sdpas,
                attention: options.attention,
                attention_use: &mut attention_use,
                comms: comms.as_ref(),
                sm_count: context.sm_count,
                cc: session.target.cc,
            };
            let ready = Ready::prepare(context, &mut prep, &memory, arm, &mut cache, &mut counters)?;
            let results = gather(&session, &mut prep, &memory, &ready, results.address(), words)?;
            Ok(Side { ready, results, names: None })
        };
        let mut eager = side(&plan.eager)?;
        let mut graph = plan.graph.as_ref().map(&mut side).transpose()?;
        let nvtx = nvtx::attached();
        if nvtx.is_some() {
            eager.names = Some(nvtx::Names::new(Arm::Eager, &eager.ready.plan));
            if let Some(graph) = &mut graph {
                graph.names = Some(nvtx::Names::new(Arm::Graph, &graph.ready.plan));
            }
        }
        session.matmuls.borrow_mut().end_tuning();
        let gemm_plan_digest = session.matmuls.borrow().digest();
        let slot = || -> Result<Slot, DeviceError> {
            Ok(Slot {
                start: context.event(true)?,
                end: context.event(true)?,
                done: context.event(false)?,
                busy: None,
            })
        };
        let digests = plan.eager.program.digest.len().max(1);
        Ok(Self {
            graphs: Vec::new(),
            eager,
            graph,
            comms,
            slots: (0..RING).map(|_| slot()).collect::<Result<_, _>>()?,
            results,
            words,
            lanes,
            memory,
            _counters: counters,
            digest_words: context.alloc(digests * 8, "digests")?,
            monitor: Monitor::new(&context.uuid),
            attention_use,
            gemm_plan_digest,
            inject,
            marred: None,
            host: None,
            drained: false,
            nvtx,
            spin: None,
            free_at_open,
            omit_launch: options.omit_launch,
            beat: Beat::default(),
            phase: Phase::Prepare,
            tickets: 0,
            clock: Instant::now(),
            session,
        })
    }

    fn side(&self, arm: Arm) -> Result<&Side, DeviceError> {
        match arm {
            Arm::Eager => Ok(&self.eager),
            Arm::Graph => {
                self.graph.as_ref().ok_or_else(|| DeviceError::internal("this run has no graph arm"))
            }
        }
    }

    /// Values of a buffer of the eager arm's program: floats exactly, integers as signed ones. Waits.
    pub fn read_f64(&mut self, buffer: BufId) -> Result<Vec<f64>, DeviceError> {
        let read = self.memory.read(&self.session.context, &self.eager.ready.plan, buffer);
        read.map_err(|e| in_phase(e, self.phase, "reading a buffer"))
    }

    /// [`Self::read_f64`] in f32.
    pub fn read_f32(&mut self, buffer: BufId) -> Result<Vec<f32>, DeviceError> {
        Ok(self.read_f64(buffer)?.into_iter().map(|v| v as f32).collect())
    }

    /// Sets a buffer of the eager arm's program, rounding to its dtype. Waits.
    pub fn write_buffer(&mut self, buffer: BufId, values: &[f64]) -> Result<(), DeviceError> {
        let written = self.memory.write(&self.session.context, &self.eager.ready.plan, buffer, values);
        written.map_err(|e| in_phase(e, self.phase, "writing a buffer"))
    }

    /// Free device memory, all processes together (MiB).
    pub fn free_memory_mib(&self) -> Result<f64, DeviceError> {
        self.session.context.synchronize()?;
        Ok(self.session.context.memory()?.0 as f64 / MIB)
    }

    /// Issues a step into ring slot `at`. Gives the host's time for the launches, and the parts of it spent waiting
    /// and spinning for the host model.
    fn issue(&self, arm: Arm, at: usize, spoil: bool) -> Result<[Duration; 3], DeviceError> {
        let side = self.side(arm)?;
        let slot = &self.slots[at];
        let graphs: &[Instance] = if arm == Arm::Graph { &self.graphs } else { &[] };
        let costs = self.host.as_ref().map(|h| h.arm(arm)).transpose()?;
        let mut nvtx = self.nvtx;
        let sink = nvtx.as_mut().zip(side.names.as_ref());
        let mut ranges = sink.map(|(sink, names)| nvtx::Ranges::new(names, sink));
        let mut drain = None;
        let watch: Option<&mut dyn Watch> = match &mut ranges {
            ranges if self.drained => {
                let then = ranges.as_mut().map(|r| r as &mut dyn Watch);
                Some(drain.insert(Drain::new(&self.session.context, &side.ready, then)))
            }
            Some(ranges) => Some(ranges),
            None => None,
        };
        let mut pacer = Pacer::new(costs).watched(watch);
        let mut waited = Duration::ZERO;
        let main = self.lanes.main();
        let start = Instant::now();
        slot.start.record(main)?;
        side.ready.step(&self.lanes, graphs, &mut waited, &mut pacer)?;
        let issued = start.elapsed();
        let spun = pacer.spun();
        if let Some(drain) = drain {
            waited += drain.waited()?;
        }
        if let Some((spin, _)) = &self.spin {
            spin.issue(main.raw)?;
        }
        slot.end.record(main)?;
        if spoil {
            self.spoil()?;
        }
        if let Some(results) = &side.results {
            results.gather[at].issue(main.raw)?;
        }
        slot.done.record(main)?;
        Ok([issued, waited, spun])
    }

    /// A step, waited for, without the gathering of results, which is ours and not the step's.
    fn lone_step(&self, arm: Arm, watch: Option<&mut dyn Watch>) -> Result<(), DeviceError> {
        let side = self.side(arm)?;
        let graphs: &[Instance] = if arm == Arm::Graph { &self.graphs } else { &[] };
        let mut pacer = Pacer::off().watched(watch);
        side.ready.step(&self.lanes, graphs, &mut Duration::default(), &mut pacer)?;
        self.session.context.synchronize()
    }

    /// A wrong result on demand: other bits in a buffer that the equality check hashes.
    fn spoil(&self) -> Result<(), DeviceError> {
        const OTHER_BITS: u8 = 0x3A;
        let plan = &self.eager.ready.plan;
        match lasting(&plan.program) {
            Some(id) => {
                let bytes = plan.program.buffer(id).bytes().min(64);
                self.lanes.main().fill(self.memory.address(plan, id)?, OTHER_BITS, bytes)
            }
            None => Err(DeviceError::internal("this program has no buffer to spoil")),
        }
    }

    /// Results of slot `at`, in the order of [`reported`].
    fn finished(
        &self,
        arm: Arm,
        at: usize,
        span_ms: f64,
        after_previous_ms: Option<f64>,
    ) -> Result<Finished, DeviceError> {
        let program = &self.side(arm)?.ready.plan.program;
        let mut words = (0..self.words).map(|i| self.results.word(at * self.words + i));
        let mut scalar = |id: Option<BufId>| id.and_then(|_| words.next()).map(f32::from_bits);
        let (loss, grad_norm) = (scalar(program.loss), scalar(program.grad_norm));
        if let Some((_, (_, meaning))) = words.zip(&program.faults).find(|(word, _)| *word != 0) {
            return Err(DeviceError::Invalid(meaning.clone()));
        }
        Ok(Finished {
            done_at_ms: self.now_ms(),
            after_previous_ms,
            device_span_ms: Some(span_ms),
            loss,
            grad_norm,
            fault: None,
        })
    }

    fn record_graphs(&mut self) -> Result<GraphCost, DeviceError> {
        let graph = self.graph.as_ref().ok_or_else(|| DeviceError::internal("this run has no graph arm"))?;
        let context = &self.session.context;
        let free = || {
            let free = context.synchronize().and_then(|()| context.memory());
            free.map(|f| f.0).map_err(|e| in_phase(e, Phase::Capture, "memory in use"))
        };
        let before = self.monitor.read().other_processes;
        let free_before = free()?;
        let mut setting = Setting {
            context,
            lanes: &self.lanes,
            inject: &mut self.inject,
            beat: &self.beat,
            omit: self.omit_launch,
        };
        let (instances, mut cost) = capture::capture_all(&mut setting, &graph.ready, &self.eager.ready)?;
        let free_after = free()?;
        let after = self.monitor.read().other_processes;
        capture::memory_cost(&mut cost, free_before, free_after, [before, after]);
        self.graphs = instances;
        Ok(cost)
    }

    fn hash(&mut self) -> Result<Vec<(String, u64)>, DeviceError> {
        let context = &self.session.context;
        context.synchronize()?;
        let plan = &self.eager.ready.plan;
        let main = self.lanes.main();
        let ids = &plan.program.digest;
        main.fill(self.digest_words.ptr, 0, self.digest_words.bytes)?;
        for (i, id) in ids.iter().enumerate() {
            let buffer = plan.program.buffer(*id);
            let entry = match buffer.dtype {
                DType::U8 => "digest8",
                DType::Bf16 => "digest16",
                DType::F32 | DType::I32 | DType::U32 => "digest32",
            };
            let params = [
                self.memory.address(plan, *id)?.into(),
                Param::I64(buffer.len() as i64),
                self.digest_words.ptr.offset(i * 8).into(),
            ];
            let kernel = self.session.kernels.borrow_mut().get(UTILITY, entry, &[], 0)?;
            kernel.bind(walk(buffer.len()), &params)?.issue(main.raw)?;
        }
        main.synchronize()?;
        let mut bytes = vec![0u8; ids.len() * 8];
        copy_to_host(&mut bytes, self.digest_words.ptr)?;
        let sums = bytes.chunks_exact(8).map(|c| c.iter().rev().fold(0, |n, b| n << 8 | *b as u64));
        Ok(ids.iter().map(|id| plan.program.buffer(*id).name.clone()).zip(sums).collect())
    }
}

/// Scalars of a step that are brought to the host: loss, gradient norm, fault words.
fn reported(program: &Program) -> Vec<BufId> {
    let scalars = program.loss.into_iter().chain(program.grad_norm);
    scalars.chain(program.faults.iter().map(|(id, _)| *id)).collect()
}

/// One launch a ring slot that writes the step's scalars to `target`, in pinned host memory.
fn gather(
    session: &Session,
    prep: &mut CudaPrep,
    memory: &Memory,
    arm: &Ready,
    target: DevPtr,
    words: usize,
) -> Result<Option<Results>, DeviceError> {
    let ids = reported(&arm.plan.program);
    if ids.is_empty() {
        return Ok(None);
    }
    let mut addresses = Vec::with_capacity(ids.len() * 8);
    for id in &ids {
        let buffer = arm.plan.program.buffer(*id);
        if buffer.dtype.size() != 4 {
            return Err(DeviceError::internal(format!("{} is reported but has no 32 bits", buffer.name)));
        }
        addresses.extend(memory.address(&arm.plan, *id)?.0.to_le_bytes());
    }
    let list = session.context.alloc(addresses.len(), "the list of results")?;
    copy_to_device(list.ptr, &addresses)?;
    let kernel = prep.kernel(UTILITY, "gather_words", &[], 0)?;
    let one = |at: usize| {
        let out = target.offset(at * words * 4);
        let params = [list.ptr.into(), out.into(), Param::I32(ids.len() as i32)];
        kernel.bind(Config::linear(1, 64), &params)
    };
    let gather = (0..RING).map(one).collect::<Result<_, _>>()?;
    Ok(Some(Results { gather, _addresses: list }))
}

impl Executor for CudaExecutor {
    fn info(&self) -> DeviceInfo {
        let context = &self.session.context;
        let cudnn = self.attention_use.ran_cudnn().then_some(Library::Cudnn);
        let nccl = self.comms.is_some().then_some(Library::Nccl);
        let libraries = [Library::Nvrtc, Library::CublasLt].into_iter().chain(cudnn).chain(nccl);
        let version = |l: Library| Some((l.title().to_owned(), libraries::find(l).ok()?.version?));
        DeviceInfo {
            device: "cuda".to_owned(),
            gpu_name: Some(context.name.clone()),
            gpu_uuid: Some(context.uuid.clone()),
            driver_version: self.monitor.driver_version(),
            cuda_version: Some(format!("{}.{}", context.driver_cuda / 1000, context.driver_cuda % 1000 / 10)),
            total_memory_mib: Some(context.total_bytes as f64 / MIB),
            attention_backend: self.attention_use.title(),
            unordered: self.attention_use.unordered,
            gemm_plan_digest: self.gemm_plan_digest.clone(),
            kernel_target: Some(self.session.target.name.clone()),
            libraries: libraries.into_iter().filter_map(version).collect(),
            notices: self.session.notice.iter().chain(&self.attention_use.refusals).cloned().collect(),
        }
    }

    fn watched_by(&mut self, beat: &Beat) {
        self.beat = beat.clone();
    }
    fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
    }

    fn reset(&mut self) -> Result<(), DeviceError> {
        let phase = self.phase;
        Inject::reset(&mut self.inject, phase);
        self.marred = None;
        let session = self.session.clone();
        session
            .context
            .synchronize()
            .and_then(|()| self.memory.reset(self.lanes.main(), &mut session.kernels.borrow_mut()))
            .map_err(|e| in_phase(e, phase, "reset"))?;
        self.slots.iter_mut().for_each(|s| s.busy = None);
        Ok(())
    }

    fn submit(&mut self, arm: Arm) -> Result<Submitted, DeviceError> {
        let fault = Inject::at_step(&mut self.inject, self.phase, arm)?;
        let ticket = self.tickets + 1;
        let at = (ticket % RING as u64) as usize;
        if self.slots[at].busy.is_some() {
            return Err(DeviceError::internal(format!("more than {RING} steps in flight")));
        }
        let [issued, waited, spun] = self
            .issue(arm, at, fault == Some(Kind::WrongResult))
            .map_err(|e| in_phase(e, self.phase, "issuing a step"))?;
        self.slots[at].busy = Some((ticket, arm));
        self.marred = fault.map(|kind| (ticket, kind)).or(self.marred);
        self.tickets = ticket;
        let [issued_ms, wait_ms, modelled_ms] = [issued, waited, spun].map(|d| d.as_secs_f64() * 1e3);
        Ok(Submitted { submit_ms: issued_ms - wait_ms - modelled_ms, wait_ms, modelled_ms, ticket })
    }

    fn wait(&mut self, step: Submitted) -> Result<Finished, DeviceError> {
        let at = (step.ticket % RING as u64) as usize;
        let arm = match self.slots[at].busy.take() {
            Some((ticket, arm)) if ticket == step.ticket => arm,
            _ => return Err(DeviceError::internal("waited for a step that is not in flight")),
        };
        let slot = &self.slots[at];
        // Its slot is taken again a ring later only.
        let before = (step.ticket > 1).then(|| &self.slots[(step.ticket - 1) as usize % RING].end);
        let span = slot.done.synchronize().and_then(|()| {
            let after_previous_ms = before.map(|end| slot.end.since_ms(end)).transpose()?;
            Ok((slot.end.since_ms(&slot.start)?, after_previous_ms))
        });
        if let (Err(_), Some(comms)) = (&span, &self.comms) {
            // What NCCL knows of it says more than the driver's code.
            comms.check().map_err(|e| in_phase(e, self.phase, "waiting for a step"))?;
        }
        let (span_ms, after_ms) = span.map_err(|e| in_phase(e, self.phase, "waiting for a step"))?;
        let mut finished = self.finished(arm, at, span_ms, after_ms)?;
        if let Some((_, kind)) = self.marred.take_if(|(ticket, _)| *ticket == step.ticket) {
            kind.mar(&mut finished);
        }
        Ok(finished)
    }

    fn capture(&mut self) -> Result<GraphCost, DeviceError> {
        self.destroy_graphs()?;
        self.record_graphs()
    }

    fn destroy_graphs(&mut self) -> Result<(), DeviceError> {
        let waited = self.session.context.synchronize();
        self.graphs.clear();
        waited.map_err(|e| in_phase(e, self.phase, "destroying graphs"))
    }

    fn digest(&mut self) -> Result<Vec<(String, u64)>, DeviceError> {
        self.hash().map_err(|e| in_phase(e, self.phase, "digest"))
    }

    fn launches_per_step(&self, arm: Arm) -> usize {
        self.side(arm).map_or(0, |s| s.ready.work_per_step())
    }

    fn planned_bytes(&self, arm: Arm) -> u64 {
        self.side(arm).map_or(0, |s| {
            let plan = &s.ready.plan.memory;
            (plan.persistent_bytes + plan.arena_bytes + self.attention_use.bytes) as u64
        })
    }

    fn now_ms(&self) -> f64 {
        self.clock.elapsed().as_secs_f64() * 1e3
    }

    fn health(&mut self) -> Health {
        self.monitor.read()
    }

    fn set_host_costs(&mut self, costs: Option<HostCosts>) -> Result<(), DeviceError> {
        if let Some(costs) = &costs {
            costs.eager.check(&self.eager.ready.plan)?;
            if let Some(graph) = &self.graph {
                costs.arm(Arm::Graph)?.check(&graph.ready.plan)?;
            }
        }
        self.host = costs;
        Ok(())
    }

    fn set_drained(&mut self, on: bool) -> bool {
        self.drained = on;
        true
    }

    fn set_device_spin_ms(&mut self, ms: f64) -> Result<(), DeviceError> {
        if ms <= 0.0 {
            self.spin = None;
        } else if self.spin.as_ref().is_none_or(|(_, now)| *now != ms) {
            let kernel = self.session.kernels.borrow_mut().get(UTILITY, "spin", &[], 0)?;
            let launch = kernel.bind(Config::linear(1, 1), &[Param::I64((ms * 1e6) as i64)])?;
            self.spin = Some((launch, ms));
        }
        Ok(())
    }

    fn memory_used_mib(&mut self) -> Option<f64> {
        let alone = self.monitor.read().other_processes.is_none_or(|n| n == 0);
        let free = self.session.context.memory().ok()?.0;
        let used = self.free_at_open.checked_sub(free)?;
        alone.then_some(used as f64 / MIB)
    }

    fn read(&mut self, buffer: BufId) -> Result<Vec<f32>, DeviceError> {
        self.read_f32(buffer)
    }

    fn busy_ms(&mut self, arm: Arm) -> Result<f64, String> {
        let records = busy::record(false, || self.lone_step(arm, None).map_err(|e| e.to_string()))?;
        Ok(Recorded { records, ..Recorded::default() }.busy_ns() as f64 / 1e6)
    }

    fn profile(&mut self, arm: Arm) -> Result<Recorded, String> {
        // The first step under a profiler that has just come is slow in places.
        busy::record(true, || self.lone_step(arm, None).map_err(|e| e.to_string()))?;
        let mut numbered = busy::Numbered::default();
        let step = || self.lone_step(arm, Some(&mut numbered)).map_err(|e| e.to_string());
        let records = busy::record(true, step)?;
        let expected = self.side(arm).map_err(|e| e.to_string())?.ready.expected();
        Ok(Recorded { calls: numbered.calls, expected, records, recorder: "CUPTI" })
    }
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        // Graphs and memory must not go while the device uses them. An error here was seen before, or will be
        // by the next executor.
        let _ = self.session.context.synchronize();
        self.graphs.clear();
    }
}
