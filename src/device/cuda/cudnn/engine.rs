//! From an operation graph to an execution plan: the library's heuristics name engines, the first that builds is
//! taken.

use super::descriptor::{Descriptor, Kind, Name};
use super::error::{CudnnError, check, trace};
use super::graph::OperationGraph;
use cudarc::cudnn::sys;
use std::cell::Cell;
use sys::cudnnBackendHeurMode_t as Heuristic;

/// The library's handle, and the stream it was last told.
#[derive(Debug)]
pub(super) struct Handle {
    raw: sys::cudnnHandle_t,
    stream: Cell<Option<sys::cudaStream_t>>,
}

impl Handle {
    /// For the current context.
    pub fn new() -> Result<Self, CudnnError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the functions were found when the library was opened; writes the handle.
        let status = unsafe { sys::cudnnCreate(&mut raw) };
        check(|| "a handle".to_owned(), status)?;
        Ok(Self { raw, stream: Cell::new(None) })
    }

    /// Makes the next call tell its stream anew: an address may come back as another stream.
    pub fn forget_stream(&self) {
        self.stream.set(None);
    }

    /// Puts the plan's kernels on `stream`.
    pub fn execute(
        &self,
        plan: &Descriptor,
        pack: &Descriptor,
        stream: sys::cudaStream_t,
    ) -> Result<(), CudnnError> {
        if self.stream.get() != Some(stream) {
            // SAFETY: both handles are valid; the runtime's stream type is the driver's.
            let status = unsafe { sys::cudnnSetStream(self.raw, stream) };
            check(|| "a stream".to_owned(), status)?;
            self.stream.set(Some(stream));
        }
        // SAFETY: plan and pack are finalized and alive; the pack's addresses are the caller's buffers of the
        // sizes that the graph's tensors tell, and its host numbers live as long as the pack's owner.
        let status = unsafe { sys::cudnnBackendExecute(self.raw, plan.raw(), pack.raw()) };
        check(|| format!("execution of {}", plan.label), status)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; every plan holds an Rc of it.
        unsafe { sys::cudnnDestroy(self.raw) };
    }
}

/// What engines are chosen for.
#[derive(Debug)]
pub(super) enum Target<'a> {
    Device(&'a Handle),
    /// A device that is not here, by its properties.
    #[cfg_attr(not(test), allow(dead_code))]
    Described(&'a Descriptor),
}

impl Target<'_> {
    pub fn handle(&self) -> Option<sys::cudnnHandle_t> {
        match self {
            Target::Device(handle) => Some(handle.raw),
            Target::Described(_) => None,
        }
    }
}

/// A plan that can be executed.
#[derive(Debug)]
pub(super) struct Engine {
    pub plan: Descriptor,
    pub workspace_bytes: usize,
    pub graph: OperationGraph,
    _config: Descriptor,
}

/// The first engine that builds. Errors: the last engine's refusal, or that there is none.
pub(super) fn choose(graph: OperationGraph, target: &Target) -> Result<Engine, CudnnError> {
    let title = graph.descriptor.label.clone();
    let mut refusal = CudnnError::own(title.as_str(), "no engine for this graph");
    for mode in [Heuristic::CUDNN_HEUR_MODE_A, Heuristic::CUDNN_HEUR_MODE_FALLBACK] {
        let configs = match configurations(&graph, target, mode) {
            Ok(configs) => configs,
            Err(e) => {
                refusal = e;
                continue;
            }
        };
        trace(|| format!("{title}: {mode:?} names {} engines", configs.len()));
        for config in configs {
            match build(&config, &title) {
                Ok((plan, workspace_bytes)) => {
                    trace(|| format!("{}: workspace {workspace_bytes} bytes", plan.label));
                    return Ok(Engine { plan, workspace_bytes, graph, _config: config });
                }
                Err(e) => refusal = e,
            }
        }
    }
    Err(refusal)
}

fn configurations(
    graph: &OperationGraph,
    target: &Target,
    mode: Heuristic,
) -> Result<Vec<Descriptor>, CudnnError> {
    let title = &graph.descriptor.label;
    let d = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, format!("{mode:?} of {title}"))?;
    d.set_descriptor(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &graph.descriptor)?;
    d.set(Name::CUDNN_ATTR_ENGINEHEUR_MODE, &[mode])?;
    if let Target::Described(properties) = target {
        d.set_descriptor(Name::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, properties)?;
    }
    d.finalize()?;
    let count = d.count_descriptors(Name::CUDNN_ATTR_ENGINEHEUR_RESULTS)?;
    let fresh = |i: usize| {
        Descriptor::new(Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, format!("configuration {i} of {title}"))
    };
    let mut configs = (0..count).map(fresh).collect::<Result<Vec<_>, _>>()?;
    let filled = d.fill_descriptors(Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, &configs)?;
    configs.truncate(filled);
    Ok(configs)
}

fn build(config: &Descriptor, title: &str) -> Result<(Descriptor, usize), CudnnError> {
    let engine = engine_index(config).map_or("?".to_owned(), |i| i.to_string());
    let plan = Descriptor::new(
        Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
        format!("plan with engine {engine} of {title}"),
    )?;
    plan.set_descriptor(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config)?;
    plan.finalize()?;
    let bytes = plan.get_i64(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?;
    Ok((plan, usize::try_from(bytes).unwrap_or(0)))
}

/// The engine's number in the library, for messages.
fn engine_index(config: &Descriptor) -> Result<i64, CudnnError> {
    let engine = [Descriptor::new(Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR, "engine")?];
    config.fill_descriptors(Name::CUDNN_ATTR_ENGINECFG_ENGINE, &engine)?;
    engine[0].get_i64(Name::CUDNN_ATTR_ENGINE_GLOBAL_INDEX)
}
