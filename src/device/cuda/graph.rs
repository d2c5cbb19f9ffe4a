//! Graphs: capture that always ends, nodes read back, instances that are destroyed.

use super::context::{Stream, check};
use super::work::Work;
use crate::device::DeviceError;
use cudarc::driver::sys;
use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::Arc;

/// A stream in capture mode. Dropped without [`Capture::end`], it ends the capture and discards the graph, so
/// that no error path leaves the stream unusable.
pub(super) struct Capture<'a> {
    stream: &'a Stream,
    open: bool,
}

impl<'a> Capture<'a> {
    /// Thread-local mode: other threads of this process may allocate meanwhile.
    pub fn begin(stream: &'a Stream) -> Result<Self, DeviceError> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is valid and not the default one.
        check("cuStreamBeginCapture_v2", unsafe { sys::cuStreamBeginCapture_v2(stream.raw, mode) })?;
        Ok(Self { stream, open: true })
    }

    pub fn end(mut self) -> Result<Graph, DeviceError> {
        self.open = false;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the capture was begun on this stream by this thread.
        check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(self.stream.raw, &mut raw) })?;
        if raw.is_null() {
            return Err(DeviceError::internal("the driver ended a capture without a graph"));
        }
        Ok(Graph { raw })
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.open {
            let mut raw = std::ptr::null_mut();
            // SAFETY: as in `end`; a graph that comes back is destroyed. The error that led here is reported by
            // the caller.
            unsafe {
                sys::cuStreamEndCapture(self.stream.raw, &mut raw);
                if !raw.is_null() {
                    sys::cuGraphDestroy(raw);
                }
            }
        }
    }
}

/// A captured graph.
#[derive(Debug)]
pub(super) struct Graph {
    raw: sys::CUgraph,
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: destroyed once; instances made from it stay valid.
        unsafe { sys::cuGraphDestroy(self.raw) };
    }
}

/// An executable graph. It holds no memory or code alive: the executor drops it first, after waiting.
#[derive(Debug)]
pub(super) struct Instance {
    raw: sys::CUgraphExec,
}

impl Instance {
    pub fn new(graph: &Graph) -> Result<Self, DeviceError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph is valid; flags 0 are allowed.
        check("cuGraphInstantiateWithFlags", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut raw, graph.raw, 0)
        })?;
        Ok(Self { raw })
    }
    pub fn upload(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both handles are valid.
        check("cuGraphUpload", unsafe { sys::cuGraphUpload(self.raw, stream.raw) })
    }
    pub fn launch(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both handles are valid; the executor keeps all memory and code that the nodes use.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.raw, stream.raw) })
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // SAFETY: destroyed once, after the device was waited for.
        unsafe { sys::cuGraphExecDestroy(self.raw) };
    }
}

fn nodes(graph: &Graph) -> Result<Vec<sys::CUgraphNode>, DeviceError> {
    let mut count = 0;
    // SAFETY: with a null list only the number is written.
    check("cuGraphGetNodes", unsafe { sys::cuGraphGetNodes(graph.raw, std::ptr::null_mut(), &mut count) })?;
    let mut list = vec![std::ptr::null_mut(); count];
    if count > 0 {
        // SAFETY: the list has room for `count` nodes.
        check("cuGraphGetNodes", unsafe { sys::cuGraphGetNodes(graph.raw, list.as_mut_ptr(), &mut count) })?;
    }
    list.truncate(count);
    Ok(list)
}

/// Edges as pairs of places in `nodes`.
fn edges(graph: &Graph, nodes: &[sys::CUgraphNode]) -> Result<Vec<(usize, usize)>, DeviceError> {
    let mut count = 0;
    use std::ptr::null_mut;
    // SAFETY: with null lists only the number is written.
    check("cuGraphGetEdges_v2", unsafe {
        sys::cuGraphGetEdges_v2(graph.raw, null_mut(), null_mut(), null_mut(), &mut count)
    })?;
    let mut from: Vec<sys::CUgraphNode> = vec![null_mut(); count];
    let mut to = from.clone();
    let blank = sys::CUgraphEdgeData_st { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] };
    let mut data = vec![blank; count];
    if count > 0 {
        // SAFETY: the three lists have room for `count` entries.
        check("cuGraphGetEdges_v2", unsafe {
            sys::cuGraphGetEdges_v2(
                graph.raw,
                from.as_mut_ptr(),
                to.as_mut_ptr(),
                data.as_mut_ptr(),
                &mut count,
            )
        })?;
    }
    let place: HashMap<usize, usize> = nodes.iter().enumerate().map(|(i, n)| (*n as usize, i)).collect();
    let known = |n: &sys::CUgraphNode| place.get(&(*n as usize)).copied();
    Ok(from.iter().zip(&to).take(count).filter_map(|(a, b)| Some((known(a)?, known(b)?))).collect())
}

/// What a graph consists of.
#[derive(Debug)]
pub(super) struct Nodes {
    /// Kernels, copies and memsets: in the order of execution where the graph is one chain, otherwise sorted.
    pub work: Vec<Work>,
    pub ordered: bool,
    /// Nodes of every kind.
    pub count: usize,
}

/// Reads a graph back. Errors: [`DeviceError::Unequal`] for a node that allocates or frees memory, or calls the
/// host.
pub(super) fn read(graph: &Graph) -> Result<Nodes, DeviceError> {
    let nodes = nodes(graph)?;
    let order = chain(nodes.len(), &edges(graph, &nodes)?);
    let ordered = order.is_some();
    let mut work = Vec::with_capacity(nodes.len());
    for i in order.unwrap_or_else(|| (0..nodes.len()).collect()) {
        work.extend(work_of_node(nodes[i])?);
    }
    if !ordered {
        work.sort();
    }
    Ok(Nodes { work, ordered, count: nodes.len() })
}

/// The nodes of a graph that is one chain, in order.
pub(super) fn in_order(graph: &Graph) -> Result<Option<Vec<sys::CUgraphNode>>, DeviceError> {
    let nodes = nodes(graph)?;
    let order = chain(nodes.len(), &edges(graph, &nodes)?);
    Ok(order.map(|order| order.into_iter().map(|i| nodes[i]).collect()))
}

/// The order of a graph whose nodes form one chain; `None` for any other shape.
fn chain(nodes: usize, edges: &[(usize, usize)]) -> Option<Vec<usize>> {
    let mut next = vec![None; nodes];
    let mut first = vec![true; nodes];
    for (a, b) in edges {
        if next[*a].replace(*b).is_some() || !first[*b] {
            return None;
        }
        first[*b] = false;
    }
    let mut order = Vec::with_capacity(nodes);
    let mut at = first.iter().position(|f| *f);
    while let Some(i) = at {
        order.push(i);
        at = next[i];
    }
    (order.len() == nodes).then_some(order)
}

use sys::CUgraphNodeType_enum as Type;

fn kind_of(node: sys::CUgraphNode) -> Result<Type, DeviceError> {
    let mut kind = Type::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: the node belongs to a live graph; writes the type.
    check("cuGraphNodeGetType", unsafe { sys::cuGraphNodeGetType(node, &mut kind) })?;
    Ok(kind)
}

fn work_of_node(node: sys::CUgraphNode) -> Result<Option<Work>, DeviceError> {
    match kind_of(node)? {
        Type::CU_GRAPH_NODE_TYPE_KERNEL => kernel(node)?.map(|p| kernel_work(&p)).transpose(),
        Type::CU_GRAPH_NODE_TYPE_MEMCPY => {
            let mut p = std::mem::MaybeUninit::<sys::CUDA_MEMCPY3D>::zeroed();
            // SAFETY: the node is a copy; the call fills the struct.
            let code = unsafe { sys::cuGraphMemcpyNodeGetParams(node, p.as_mut_ptr()) };
            check("cuGraphMemcpyNodeGetParams", code)?;
            let p = p.as_ptr();
            // SAFETY: the three extents are integers, initialised whatever the call wrote. The struct is not
            // taken as a whole: its memory types are Rust enums without a value for 0.
            let (width, height, depth) = unsafe { ((*p).WidthInBytes, (*p).Height, (*p).Depth) };
            Ok(Some(Work::Copy { bytes: width * height.max(1) * depth.max(1) }))
        }
        Type::CU_GRAPH_NODE_TYPE_MEMSET => {
            Ok(memset(node)?.map(|p| Work::Set { bytes: p.width * p.elementSize as usize * p.height.max(1) }))
        }
        // Joins of lanes.
        Type::CU_GRAPH_NODE_TYPE_EMPTY => Ok(None),
        Type::CU_GRAPH_NODE_TYPE_WAIT_EVENT
        | Type::CU_GRAPH_NODE_TYPE_EVENT_RECORD
        | Type::CU_GRAPH_NODE_TYPE_HOST
            if super::nccl::communicates() =>
        {
            Ok(None)
        }
        other => Err(DeviceError::Unequal(format!(
            "a captured graph has a node of kind {other:?}: only kernels, copies and memsets may be captured"
        ))),
    }
}

/// What a memset node sets; `None` for a node of another kind.
pub(super) fn memset(node: sys::CUgraphNode) -> Result<Option<sys::CUDA_MEMSET_NODE_PARAMS>, DeviceError> {
    if kind_of(node)? != Type::CU_GRAPH_NODE_TYPE_MEMSET {
        return Ok(None);
    }
    let mut p =
        sys::CUDA_MEMSET_NODE_PARAMS { dst: 0, pitch: 0, value: 0, elementSize: 0, width: 0, height: 0 };
    // SAFETY: the node is a memset; the call fills the struct.
    check("cuGraphMemsetNodeGetParams", unsafe { sys::cuGraphMemsetNodeGetParams(node, &mut p) })?;
    Ok(Some(p))
}

/// What a kernel node launches; `None` for a node of another kind. The arguments are the node's own.
pub(super) fn kernel(node: sys::CUgraphNode) -> Result<Option<sys::CUDA_KERNEL_NODE_PARAMS>, DeviceError> {
    use std::ptr::null_mut;
    if kind_of(node)? != Type::CU_GRAPH_NODE_TYPE_KERNEL {
        return Ok(None);
    }
    let mut p = sys::CUDA_KERNEL_NODE_PARAMS {
        func: null_mut(),
        gridDimX: 0,
        gridDimY: 0,
        gridDimZ: 0,
        blockDimX: 0,
        blockDimY: 0,
        blockDimZ: 0,
        sharedMemBytes: 0,
        kernelParams: null_mut(),
        extra: null_mut(),
        kern: null_mut(),
        ctx: null_mut(),
    };
    // SAFETY: the node is a kernel; the call fills the struct.
    check("cuGraphKernelNodeGetParams_v2", unsafe { sys::cuGraphKernelNodeGetParams_v2(node, &mut p) })?;
    Ok(Some(p))
}

/// An attribute of a kernel node, as bytes of its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Attribute {
    pub id: sys::CUlaunchAttributeID,
    pub bytes: [u8; ATTRIBUTE_BYTES],
}

/// Size of `CUlaunchAttributeValue` (cuda.h).
const ATTRIBUTE_BYTES: usize = 64;

impl Attribute {
    pub fn to_launch(&self) -> sys::CUlaunchAttribute {
        let pad = self.bytes.map(|b| b as std::ffi::c_char);
        sys::CUlaunchAttribute { id: self.id, pad: [0; 4], value: sys::CUlaunchAttributeValue { pad } }
    }
}

/// Attributes of a kernel node that decide how it runs. One that the driver does not know of nodes is left out.
pub(super) fn attributes(node: sys::CUgraphNode) -> Vec<Attribute> {
    use sys::CUlaunchAttributeID_enum as Id;
    let ids = [
        Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
        Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
        Id::CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION,
        Id::CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
    ];
    let one = |id| {
        let mut value = sys::CUlaunchAttributeValue { pad: [0; ATTRIBUTE_BYTES] };
        // SAFETY: the node is a kernel of a live graph; the call writes at most the union.
        let code = unsafe { sys::cuGraphKernelNodeGetAttribute(node, id, &mut value) };
        // SAFETY: all bytes were set above, or by the driver.
        let bytes = unsafe { value.pad }.map(|b| b as u8);
        (code == sys::CUresult::CUDA_SUCCESS).then_some(Attribute { id, bytes })
    };
    ids.into_iter().filter_map(one).collect()
}

/// [`Work`] of a kernel node.
pub(super) fn kernel_work(p: &sys::CUDA_KERNEL_NODE_PARAMS) -> Result<Work, DeviceError> {
    let mut name = std::ptr::null();
    // A library's kernel may be known as a context-independent one only.
    let code = if p.func.is_null() {
        // SAFETY: without a function the node has a kernel handle; writes a pointer to a static string.
        unsafe { sys::cuKernelGetName(&mut name, p.kern) }
    } else {
        // SAFETY: the function handle is valid; as above.
        unsafe { sys::cuFuncGetName(&mut name, p.func) }
    };
    check("cuFuncGetName", code)?;
    if name.is_null() {
        return Err(DeviceError::internal("the driver gave a kernel node no name"));
    }
    // SAFETY: the driver's zero-terminated string, valid while the module is loaded.
    let name: Arc<str> = unsafe { CStr::from_ptr(name) }.to_string_lossy().into();
    Ok(Work::Kernel {
        name,
        grid: [p.gridDimX, p.gridDimY, p.gridDimZ],
        block: [p.blockDimX, p.blockDimY, p.blockDimZ],
        shared_bytes: p.sharedMemBytes,
    })
}

#[cfg(test)]
mod tests {
    use super::chain;

    #[test]
    fn a_chain_gives_its_order_and_other_shapes_none() {
        assert_eq!(chain(0, &[]), Some(vec![]));
        assert_eq!(chain(3, &[(2, 0), (0, 1)]), Some(vec![2, 0, 1]));
        assert_eq!(chain(3, &[(0, 1), (0, 2)]), None);
        assert_eq!(chain(3, &[(0, 2), (1, 2)]), None);
        assert_eq!(chain(3, &[(0, 1)]), None);
        assert_eq!(chain(2, &[(0, 1), (1, 0)]), None);
    }
}
