//! The plans of one session, their memory, and calls bound to addresses.

use super::descriptor::{Descriptor, Kind, Name};
use super::engine::{Engine, Handle, Target, choose};
use super::error::{CudnnError, trace};
use super::graph::ALIGNMENT_BYTES;
use super::sdpa::SdpaSpec;
use crate::device::DeviceError;
use crate::device::cuda::context::{Context, DeviceMemory, Stream};
use crate::device::cuda::libraries;
use crate::device::cuda::prep::DevPtr;
use crate::device::cuda::work::{Work, captured_alone};
use cudarc::cudnn::sys;
use std::cell::OnceCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::rc::Rc;

/// Pieces of a plan's memory start at multiples of this, bytes.
const PIECE_BYTES: usize = 256;

/// Device memory left free beside a plan's workspace, for graphs and the context's own needs: 1 GiB is several
/// times what the graphs of a large step were seen to take.
const RESERVE_BYTES: usize = 1 << 30;

/// Why there is no call.
#[derive(Debug)]
pub enum Failure {
    /// cuDNN is missing or refuses; other kernels will do.
    Refused(CudnnError),
    /// The device itself failed: nothing will do.
    Device(DeviceError),
}

impl From<CudnnError> for Failure {
    fn from(e: CudnnError) -> Self {
        Failure::Refused(e)
    }
}

impl From<DeviceError> for Failure {
    fn from(e: DeviceError) -> Self {
        Failure::Device(e)
    }
}

/// All attention plans of one session.
#[derive(Debug, Default)]
pub struct Sdpas {
    /// `None`: no device.
    context: Option<Rc<Context>>,
    /// Opened at the first plan, so that runs without attention need not load a large library.
    library: Option<Result<Rc<Library>, CudnnError>>,
    plans: HashMap<SdpaSpec, Result<Rc<Plan>, CudnnError>>,
}

#[derive(Debug)]
struct Library {
    handle: Handle,
    /// As `cudnnGetVersion` counts: 91400 is 9.14.0.
    version: usize,
}

/// One engine with its memory.
#[derive(Debug)]
struct Plan {
    engine: Engine,
    /// The engine's workspace, then the graph's scratch tensors. One launch at a time may use it: attention
    /// stays on one lane.
    memory: Option<DeviceMemory>,
    workspace: DevPtr,
    scratch: Vec<(i64, DevPtr)>,
    /// Nodes of one call captured alone.
    work: OnceCell<Vec<Work>>,
    library: Rc<Library>,
}

impl Sdpas {
    pub fn online(context: &Rc<Context>) -> Self {
        Self { context: Some(context.clone()), ..Self::default() }
    }

    /// For no device: [`Self::call`] refuses.
    pub fn offline() -> Self {
        Self::default()
    }

    pub fn is_online(&self) -> bool {
        self.context.is_some()
    }

    /// E.g. `9.14.0`, once the library was opened.
    pub fn version(&self) -> Option<String> {
        let v = self.library.as_ref()?.as_ref().ok()?.version;
        Some(format!("{}.{}.{}", v / 10_000, v % 10_000 / 100, v % 100))
    }

    /// A call of `spec` on these addresses, in the order of the op's arguments: q, k, v, o, lse, and backward do,
    /// dq, dk, dv. A plan made new is run once, so that the library loads its kernels now and not in a capture.
    pub fn call(&mut self, spec: &SdpaSpec, args: &[DevPtr]) -> Result<SdpaCall, Failure> {
        let Some(context) = self.context.clone() else {
            return Err(CudnnError::own("attention", "there is no device").into());
        };
        let uids = spec.arguments();
        if args.len() != uids.len() {
            return Err(CudnnError::own(
                "attention",
                format!("{} addresses are not {}", args.len(), uids.len()),
            )
            .into());
        }
        if let Some(odd) = args.iter().find(|p| !p.0.is_multiple_of(ALIGNMENT_BYTES)) {
            return Err(
                CudnnError::own("attention", format!("address {:#x} is not 16-byte aligned", odd.0)).into()
            );
        }
        if let Some(known) = self.plans.get(spec) {
            return Ok(SdpaCall::bind(&known.clone()?, spec, args)?);
        }
        let made = self.open().map_err(Failure::from).and_then(|l| Plan::new(&l, &context, spec));
        let made = made.and_then(|plan| {
            let plan = Rc::new(plan);
            let call = SdpaCall::bind(&plan, spec, args)?;
            call.first_run(&context)?;
            Ok((plan, call))
        });
        match made {
            Ok((plan, call)) => {
                self.plans.insert(spec.clone(), Ok(plan));
                Ok(call)
            }
            Err(Failure::Refused(e)) => {
                self.plans.insert(spec.clone(), Err(e.clone()));
                Err(Failure::Refused(e))
            }
            Err(broken) => Err(broken),
        }
    }

    fn open(&mut self) -> Result<Rc<Library>, CudnnError> {
        self.library.get_or_insert_with(Library::open).clone()
    }
}

impl Library {
    fn open() -> Result<Rc<Self>, CudnnError> {
        libraries::ensure_cudnn().map_err(|e| CudnnError::own("to load", e.to_string()))?;
        // SAFETY: the function exists and takes nothing.
        let version = unsafe { sys::cudnnGetVersion() };
        Ok(Rc::new(Self { handle: Handle::new()?, version }))
    }
}

impl Plan {
    fn new(library: &Rc<Library>, context: &Rc<Context>, spec: &SdpaSpec) -> Result<Self, Failure> {
        let target = Target::Device(&library.handle);
        let engine = choose(spec.graph(library.version)?.finish(target.handle())?, &target)?;
        let pieces = spec.scratch(library.version);
        let round = |bytes: usize| bytes.next_multiple_of(PIECE_BYTES);
        let total = round(engine.workspace_bytes) + pieces.iter().map(|p| round(p.bytes)).sum::<usize>();
        let free = context.memory()?.0;
        if total.saturating_add(RESERVE_BYTES) > free {
            let (need, free) = (total >> 20, free >> 20);
            let why = format!("the engine wants {need} MiB of workspace, {free} MiB are free");
            return Err(CudnnError::own(engine.plan.label.as_str(), why).into());
        }
        let memory =
            match (total > 0).then(|| context.alloc(total, "cuDNN's attention workspace")).transpose() {
                Err(e @ DeviceError::OutOfMemory { .. }) => {
                    return Err(CudnnError::own(engine.plan.label.as_str(), e.to_string()).into());
                }
                other => other?,
            };
        let workspace = memory.as_ref().map(|m| m.ptr).unwrap_or_default();
        let mut at = round(engine.workspace_bytes);
        let mut scratch = Vec::new();
        for piece in pieces {
            if let (Some(word), Some(memory)) = (piece.fill, &memory) {
                let words: Vec<u8> = (0..piece.bytes / 4).flat_map(|_| word.to_le_bytes()).collect();
                memory.write(at, &words)?;
            }
            scratch.push((piece.uid, workspace.offset(at)));
            at += round(piece.bytes);
        }
        Ok(Self { engine, memory, workspace, scratch, work: OnceCell::new(), library: library.clone() })
    }
}

/// A plan with its addresses: one library call puts it on a stream.
#[derive(Debug)]
pub struct SdpaCall {
    pack: Descriptor,
    /// Read by the library at each call through the pack: the box must not move.
    _numbers: Box<[f32]>,
    plan: Rc<Plan>,
}

impl SdpaCall {
    fn bind(plan: &Rc<Plan>, spec: &SdpaSpec, args: &[DevPtr]) -> Result<Self, CudnnError> {
        let scalars = &plan.engine.graph.scalars;
        let mut numbers: Box<[f32]> = scalars.iter().map(|s| s.1).collect();
        let mut uids: Vec<i64> = spec.arguments().to_vec();
        let mut pointers: Vec<*mut c_void> = args.iter().map(|p| p.0 as *mut c_void).collect();
        for (uid, ptr) in &plan.scratch {
            uids.push(*uid);
            pointers.push(ptr.0 as *mut c_void);
        }
        for (scalar, number) in scalars.iter().zip(numbers.iter_mut()) {
            uids.push(scalar.0);
            pointers.push(std::ptr::from_mut(number).cast());
        }
        let label = format!("addresses of {}", plan.engine.plan.label);
        let pack = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, label)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[plan.workspace.0 as *mut c_void])?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &pointers)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &uids)?;
        pack.finalize()?;
        Ok(Self { pack, _numbers: numbers, plan: plan.clone() })
    }

    /// Runs once for real and learns what the driver records of it.
    fn first_run(&self, context: &Rc<Context>) -> Result<(), Failure> {
        let stream = context.stream()?;
        let ran = self.execute(&stream).map_err(Failure::from).and_then(|()| Ok(stream.synchronize()?));
        let work = ran.and_then(|()| match captured_alone(&stream, |s| self.issue(s)) {
            Ok(work) => Ok(work),
            Err(e) => {
                // A plan that cannot be captured is no use; a device that fails now is broken.
                context.synchronize()?;
                Err(CudnnError::own(self.pack.label.as_str(), format!("capture failed: {e}")).into())
            }
        });
        // The stream ends here; the handle must not think that it still has it.
        self.plan.library.handle.forget_stream();
        let work = work?;
        trace(|| {
            work.iter()
                .map(|w| format!("{}: {w}", self.plan.engine.plan.label))
                .collect::<Vec<_>>()
                .join("\n")
        });
        self.plan.work.get_or_init(|| work);
        Ok(())
    }

    /// Device memory of the plan.
    pub(super) fn plan_bytes(&self) -> usize {
        self.plan.memory.as_ref().map_or(0, |m| m.bytes)
    }

    fn execute(&self, stream: &Stream) -> Result<(), CudnnError> {
        self.plan.library.handle.execute(&self.plan.engine.plan, &self.pack, stream.raw.cast())
    }

    pub(in crate::device::cuda) fn issue(&self, stream: &Stream) -> Result<(), DeviceError> {
        self.execute(stream).map_err(|e| DeviceError::Driver {
            call: "cudnnBackendExecute",
            code: e.to_string(),
            phase: crate::device::Phase::Prepare,
            at: String::new(),
        })
    }

    /// The nodes that the driver recorded when the plan was captured alone.
    pub(in crate::device::cuda) fn work(&self) -> &[Work] {
        self.plan.work.get().map_or(&[], Vec::as_slice)
    }
}
