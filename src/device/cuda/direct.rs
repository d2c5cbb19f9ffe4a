//! A library's product launched without the library: the kernel and its arguments as the driver recorded them, without
//! the memset that the library puts before it.
//!
//! cuBLASLt's kernels that share out their tiles on the device count in four bytes of workspace and find them zero: the
//! library sets them before every product. Such a memset and the gaps around it take about 4 us, a hundred times a step
//! of a few layers: 5 % of a step of llama3_8b at 128 tokens, 2.5 % at 512 (`results/h200/notes.md`). Launched here, each
//! product has a word of its own, and one launch zeroes those of a whole layer (see [`super::counters`]).

use super::context::{Stream, check};
use super::graph::{self, Attribute, Capture, Graph};
use super::prep::DevPtr;
use super::work::Work;
use crate::device::DeviceError;
use cudarc::driver::sys;
use std::fmt;

/// Bytes of the word.
pub(super) const COUNTER_BYTES: usize = 4;

/// One kernel of a library with its arguments.
pub(super) struct Direct {
    function: sys::CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    /// The node's own array of pointers to argument values, or its own buffer of them (`extra`, which is how cuBLASLt
    /// launches); the other is null.
    params: *mut *mut std::ffi::c_void,
    extra: *mut *mut std::ffi::c_void,
    attributes: Vec<sys::CUlaunchAttribute>,
    work: Work,
    /// Owns what `params` or `extra` points to.
    _graph: Graph,
}

impl fmt::Debug for Direct {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Direct").field("work", &self.work).finish_non_exhaustive()
    }
}

impl Direct {
    /// The kernel of a product that was captured alone with its counter at `counter`. `None`: the product is not a
    /// memset of that word and one kernel, or launching the kernel by hand does not record the same node.
    pub fn of(graph: Graph, counter: DevPtr, stream: &Stream) -> Result<Option<Self>, DeviceError> {
        let Some([set, kernel]) = graph::in_order(&graph)?.and_then(|nodes| <[_; 2]>::try_from(nodes).ok())
        else {
            return Ok(None);
        };
        let zeroes = graph::memset(set)?.is_some_and(|p| {
            let bytes = p.width * p.elementSize as usize * p.height.max(1);
            (p.dst, p.value, bytes) == (counter.0, 0, COUNTER_BYTES)
        });
        let Some(p) = graph::kernel(kernel)?.filter(|_| zeroes) else { return Ok(None) };
        if p.kernelParams.is_null() == p.extra.is_null() {
            return Ok(None);
        }
        // What is zero throughout is not set; a cluster of no blocks would be refused.
        let attributes: Vec<Attribute> = graph::attributes(kernel);
        let set = attributes.iter().filter(|a| a.bytes.iter().any(|b| *b != 0));
        let direct = Self {
            // The driver takes either handle where it takes a function (`cuLaunchKernelEx`).
            function: if p.func.is_null() { p.kern.cast() } else { p.func },
            grid: [p.gridDimX, p.gridDimY, p.gridDimZ],
            block: [p.blockDimX, p.blockDimY, p.blockDimZ],
            shared_bytes: p.sharedMemBytes,
            params: p.kernelParams,
            extra: p.extra,
            attributes: set.map(Attribute::to_launch).collect(),
            work: graph::kernel_work(&p)?,
            _graph: graph,
        };
        Ok(direct.records_the_same(&attributes, stream).then_some(direct))
    }

    /// Whether the launch, captured, gives the library's node again. A launch that the driver refuses does not; if the
    /// device is broken, the next call says so.
    fn records_the_same(&self, attributes: &[Attribute], stream: &Stream) -> bool {
        let node = || -> Result<bool, DeviceError> {
            let capture = Capture::begin(stream)?;
            self.issue(stream.raw)?;
            let graph = capture.end()?;
            let Some([node]) = graph::in_order(&graph)?.and_then(|nodes| <[_; 1]>::try_from(nodes).ok())
            else {
                return Ok(false);
            };
            let work = graph::kernel(node)?.map(|p| graph::kernel_work(&p)).transpose()?;
            Ok(work.as_ref() == Some(&self.work) && graph::attributes(node) == attributes)
        };
        node().unwrap_or(false)
    }

    pub fn issue(&self, stream: sys::CUstream) -> Result<(), DeviceError> {
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: self.grid[2],
            blockDimX: self.block[0],
            blockDimY: self.block[1],
            blockDimZ: self.block[2],
            sharedMemBytes: self.shared_bytes,
            hStream: stream,
            attrs: self.attributes.as_ptr().cast_mut(),
            numAttrs: self.attributes.len() as u32,
        };
        // SAFETY: function, sizes and arguments are those of a node that the library recorded; the graph that owns the
        // arguments lives in `self`, the library (and so its code) as long as the plan that made it; the driver reads
        // arguments and attributes before it returns and changes neither.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(&config, self.function, self.params, self.extra)
        })
    }

    /// What a graph node of this launch looks like.
    pub fn work(&self) -> &Work {
        &self.work
    }
}
