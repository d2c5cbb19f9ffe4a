//! NCCL: one communicator a real group, made when the device is opened, used once before any capture, and destroyed
//! after the graphs.
//!
//! Functions are looked up in the library that [`libraries::find`] opened: cudarc's own loader does not know the name
//! `libnccl.so.2`, under which Python packages and NVIDIA's installers put it. Variables (`NCCL_*`) are NCCL's and the
//! operator's: none is set or changed here.

use super::context::{Context, Stream};
use super::libraries::{self, Library};
use super::prep::{CudaPrep, DevPtr, Issue};
use super::work::{Work, captured_alone};
use crate::device::{DeviceError, Phase};
use crate::ops::collective::ExchangeRows;
use crate::program::DType;
use crate::ranks::control::Share;
use crate::ranks::groups::{Group, Place};
use cudarc::driver::sys;
use libloading::os::unix::{Library as Dl, RTLD_GLOBAL, RTLD_NOW};
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::rc::Rc;

/// `ncclUniqueId`: 128 bytes since NCCL 2.0.
const ID_BYTES: usize = 128;
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([c_char; ID_BYTES]);

/// `ncclSum` of `ncclRedOp_t`.
const SUM: c_int = 0;
/// `ncclSuccess`, and `ncclInProgress`, which blocking communicators do not give.
const SUCCESS: c_int = 0;

type Comm = *mut c_void;
type Reduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, sys::CUstream) -> c_int;

/// Functions by their C names, with the signatures of `nccl.h`; an enum travels as an int, `CUstream` is `cudaStream_t`.
struct Api {
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int,
    destroy: unsafe extern "C" fn(Comm) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Comm) -> *const c_char,
    async_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, sys::CUstream) -> c_int,
    reduce_scatter: Reduce,
    all_reduce: Reduce,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Comm, sys::CUstream) -> c_int,
    recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Comm, sys::CUstream) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
}

impl Api {
    fn load() -> Result<Self, DeviceError> {
        let missing = |reason: String| {
            DeviceError::Unavailable(format!(
                "{} is needed by {} and was not found: {reason}; install it (for Python: nvidia-nccl-cu13), or name its \
                 folder with --cuda_path (see `mbperf doctor`)",
                Library::Nccl.title(),
                Library::Nccl.needed_by()
            ))
        };
        let found = libraries::find(Library::Nccl).map_err(missing)?;
        // SAFETY: the library is open already; this only counts another user of it.
        let library = unsafe { Dl::open(Some(&found.opened_as), RTLD_NOW | RTLD_GLOBAL) };
        let library = library.map_err(|e| missing(e.to_string()))?;
        /// The function of that name. The caller names its type.
        fn get<F: Copy>(library: &Dl, name: &str) -> Result<F, DeviceError> {
            // SAFETY: only looked up here; `F` is the signature that nccl.h has for the name.
            unsafe { library.get::<F>(name.as_bytes()) }.map(|f| *f).map_err(|_| {
                DeviceError::Unavailable(format!("NCCL lacks {name}: update it (2.18 or newer)"))
            })
        }
        let api = Self {
            get_unique_id: get(&library, "ncclGetUniqueId")?,
            init_rank: get(&library, "ncclCommInitRank")?,
            destroy: get(&library, "ncclCommDestroy")?,
            error_string: get(&library, "ncclGetErrorString")?,
            last_error: get(&library, "ncclGetLastError")?,
            async_error: get(&library, "ncclCommGetAsyncError")?,
            all_gather: get(&library, "ncclAllGather")?,
            reduce_scatter: get(&library, "ncclReduceScatter")?,
            all_reduce: get(&library, "ncclAllReduce")?,
            send: get(&library, "ncclSend")?,
            recv: get(&library, "ncclRecv")?,
            group_start: get(&library, "ncclGroupStart")?,
            group_end: get(&library, "ncclGroupEnd")?,
        };
        // The functions live as long as the process.
        std::mem::forget(library);
        Ok(api)
    }

    fn check(&self, call: &'static str, comm: Comm, code: c_int) -> Result<(), DeviceError> {
        if code == SUCCESS {
            return Ok(());
        }
        let text = |p: *const c_char| {
            // SAFETY: NCCL gives zero-terminated strings of its own, or null.
            if p.is_null() {
                String::new()
            } else {
                unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned()
            }
        };
        // SAFETY: both take any code and a communicator or null.
        let (name, last) = unsafe { ((self.error_string)(code), (self.last_error)(comm)) };
        let (name, last) = (text(name), text(last));
        let code = if last.is_empty() { name } else { format!("{name}: {last}") };
        Err(DeviceError::Driver { call, code, phase: Phase::Prepare, at: String::new() })
    }
}

/// An element type, as `ncclDataType_t` numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Element {
    code: c_int,
    bytes: usize,
}

impl Element {
    pub fn of(dtype: DType) -> Result<Self, DeviceError> {
        let code = match dtype {
            DType::U8 => 1,
            DType::I32 => 2,
            DType::U32 => 3,
            DType::F32 => 7,
            DType::Bf16 => 9,
        };
        Ok(Self { code, bytes: dtype.size() })
    }
}

/// A collective on device addresses; `count` elements a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Call {
    AllGather { x: DevPtr, out: DevPtr, count: usize, element: Element },
    ReduceScatter { x: DevPtr, out: DevPtr, count: usize, element: Element },
    AllReduce { x: DevPtr, count: usize, element: Element },
    AllToAll { x: DevPtr, out: DevPtr, count: usize, element: Element },
    Rows(RowCall),
}

/// Rows sized by a plan in pinned host memory when the call is issued ([`ExchangeRows`]).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowCall {
    pub x: DevPtr,
    pub plan: DevPtr,
    pub out: DevPtr,
    pub local: usize,
    pub rows: usize,
    pub cols: usize,
    pub element: Element,
    pub back: bool,
}

/// One group's communicator.
struct Communicator {
    group: Group,
    raw: Comm,
    api: Rc<Api>,
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: made by ncclCommInitRank and destroyed once, after the graphs and streams that used it (the order of
        // fields in the executor and its session).
        unsafe { (self.api.destroy)(self.raw) };
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Communicator({}, {:?})", self.group.kind, self.group.ranks)
    }
}

/// A collective ready to be issued.
#[derive(Debug)]
pub struct NcclCall {
    /// `None`: prepared without a device.
    comm: Option<Rc<Communicator>>,
    call: Call,
    work: Vec<Work>,
}

thread_local! {
    /// Whether this thread's device has communicators: their captures may hold nodes that order NCCL's own streams.
    static COMMUNICATES: Cell<bool> = const { Cell::new(false) };
}

/// Whether graphs of this thread may hold nodes that NCCL adds beside its kernels: event records and waits, by which
/// calls inside and outside of graphs follow each other, and host calls that wake its network proxy.
pub(super) fn communicates() -> bool {
    COMMUNICATES.get()
}

/// The communicators of a run.
#[derive(Debug)]
pub struct Comms {
    all: Vec<Rc<Communicator>>,
    stream: Stream,
}

impl Comms {
    /// One for each real group, in the same order on every rank. `share` brings rank 0's ids to all.
    ///
    /// # Errors
    /// NCCL is missing or refuses.
    pub fn new(context: &Rc<Context>, place: &Place, share: &Share) -> Result<Self, DeviceError> {
        let api = Rc::new(Api::load()?);
        COMMUNICATES.set(true);
        let stream = context.stream()?;
        let mut all = Vec::new();
        // Groups of one kind are disjoint: each has an id of its own, listed by the group's first rank.
        let world = place.world.as_ref().map_or(1, Group::len);
        for group in place.groups() {
            let ids = share.from_rank_0(&format!("NCCL ids of {}", group.kind), || {
                let mut bytes = Vec::with_capacity(world * ID_BYTES);
                for _ in 0..world {
                    let mut id = UniqueId([0; ID_BYTES]);
                    // SAFETY: writes the 128 bytes.
                    let code = unsafe { (api.get_unique_id)(&mut id) };
                    api.check("ncclGetUniqueId", std::ptr::null_mut(), code)?;
                    bytes.extend(id.0.map(|c| c as u8));
                }
                Ok(bytes)
            })?;
            let first = group.ranks.first().copied().unwrap_or(0);
            let own = ids.get(first * ID_BYTES..(first + 1) * ID_BYTES);
            let own = own.ok_or_else(|| DeviceError::internal("too few NCCL ids came from rank 0"))?;
            let mut id = UniqueId([0; ID_BYTES]);
            id.0.iter_mut().zip(own).for_each(|(to, from)| *to = *from as c_char);
            let mut raw = std::ptr::null_mut();
            let (ranks, place) = (group.len() as c_int, group.own as c_int);
            // SAFETY: the context is current on this thread; writes the handle. All ranks of the group make this call.
            let code = unsafe { (api.init_rank)(&mut raw, ranks, id, place) };
            api.check("ncclCommInitRank", std::ptr::null_mut(), code)?;
            all.push(Rc::new(Communicator { group: group.clone(), raw, api: api.clone() }));
        }
        Ok(Self { all, stream })
    }

    fn of(&self, group: &Group) -> Result<Rc<Communicator>, DeviceError> {
        self.all.iter().find(|c| c.group == *group).cloned().ok_or_else(|| {
            DeviceError::internal(format!("no communicator of {} {:?}", group.kind, group.ranks))
        })
    }

    /// Makes `call` ready: run once, which opens the connections that it needs (a capture must not), and captured alone
    /// to learn its nodes. Its buffers hold nothing yet. Every rank of the group comes here in the same order.
    fn ready(&self, group: &Group, call: Call) -> Result<NcclCall, DeviceError> {
        let mut ready = NcclCall { comm: Some(self.of(group)?), call, work: Vec::new() };
        let first = match call {
            // The plan is not there yet: a small exchange with every rank opens the same connections.
            Call::Rows(r) => {
                let count = (r.rows * r.cols / group.len().max(1)).min(1);
                NcclCall {
                    comm: ready.comm.clone(),
                    call: Call::AllToAll { x: r.x, out: r.out, count, element: r.element },
                    work: Vec::new(),
                }
                .issue(&self.stream)
            }
            _ => ready.issue(&self.stream),
        };
        first.and_then(|()| self.stream.synchronize())?;
        ready.work = match call {
            // Never part of a graph; counted as one launch.
            Call::Rows(_) => vec![Work::Kernel {
                name: "ncclDevKernel_SendRecv".into(),
                grid: [1; 3],
                block: [1; 3],
                shared_bytes: 0,
            }],
            _ => captured_alone(&self.stream, |stream| ready.issue(stream))?,
        };
        Ok(ready)
    }

    /// An error that a communicator met behind a call's back, e.g. a rank that has gone.
    pub fn check(&self) -> Result<(), DeviceError> {
        for comm in &self.all {
            let mut found = SUCCESS;
            // SAFETY: the communicator is valid; writes the code.
            let code = unsafe { (comm.api.async_error)(comm.raw, &mut found) };
            comm.api.check("ncclCommGetAsyncError", comm.raw, code)?;
            comm.api.check("a collective", comm.raw, found)?;
        }
        Ok(())
    }
}

impl CudaPrep<'_> {
    /// A collective of `group`.
    pub fn nccl(&mut self, group: &Group, call: Call) -> Result<Issue, DeviceError> {
        let call = match self.comms {
            Some(comms) => comms.ready(group, call)?,
            None => NcclCall { comm: None, call, work: Vec::new() },
        };
        Ok(Issue::Nccl(call))
    }
}

impl NcclCall {
    pub(super) fn work(&self) -> &[Work] {
        &self.work
    }

    pub(super) fn varies(&self) -> bool {
        matches!(self.call, Call::Rows(_))
    }

    pub(super) fn issue(&self, stream: &Stream) -> Result<(), DeviceError> {
        let Some(comm) = &self.comm else {
            return Err(DeviceError::internal("a collective was prepared without its communicator"));
        };
        let (api, raw, s) = (&comm.api, comm.raw, stream.raw);
        let at = |p: DevPtr| p.0 as *mut c_void;
        match self.call {
            Call::AllGather { x, out, count, element } => {
                // SAFETY: x has `count` elements and out `count` for each rank, by the op's arguments; both stay until
                // the stream was waited for. So in the calls below.
                let code = unsafe { (api.all_gather)(at(x), at(out), count, element.code, raw, s) };
                api.check("ncclAllGather", raw, code)
            }
            Call::ReduceScatter { x, out, count, element } => {
                // SAFETY: as above; in place where out is this rank's piece of x.
                let code = unsafe { (api.reduce_scatter)(at(x), at(out), count, element.code, SUM, raw, s) };
                api.check("ncclReduceScatter", raw, code)
            }
            Call::AllReduce { x, count, element } => {
                // SAFETY: as above, in place.
                let code = unsafe { (api.all_reduce)(at(x), at(x), count, element.code, SUM, raw, s) };
                api.check("ncclAllReduce", raw, code)
            }
            Call::AllToAll { x, out, count, element } => {
                let pieces = |i: usize| (i * count, count);
                self.send_and_receive(comm, stream, [x, out], element, pieces, pieces)
            }
            Call::Rows(r) => {
                let ranks = comm.group.len();
                let words = 2 * (ranks * r.local + 1);
                // SAFETY: pinned memory of the executor, so many integers as the op's argument says; the launch that
                // fills it waited for the device before this one is issued, and no other thread writes it.
                let plan = unsafe { std::slice::from_raw_parts(r.plan.0 as *const i32, words) };
                let [from, to] = ExchangeRows::pieces(plan, r.local, ranks, r.back);
                let of = |ends: &[usize], i: usize| {
                    let (first, end) = (ends[i].min(r.rows), ends[i + 1].min(r.rows));
                    (first * r.cols, end.saturating_sub(first) * r.cols)
                };
                let (send, receive) = (|i: usize| of(&from, i), |i: usize| of(&to, i));
                self.send_and_receive(comm, stream, [r.x, r.out], r.element, send, receive)
            }
        }
    }

    /// One group of sends and receives; `send` and `receive` give a rank's first element and count.
    fn send_and_receive(
        &self,
        comm: &Communicator,
        stream: &Stream,
        [x, out]: [DevPtr; 2],
        element: Element,
        send: impl Fn(usize) -> (usize, usize),
        receive: impl Fn(usize) -> (usize, usize),
    ) -> Result<(), DeviceError> {
        let (api, raw, s) = (&comm.api, comm.raw, stream.raw);
        let own = comm.group.own;
        // Its own rows do not travel.
        let ((from, count), (to, _)) = (send(own), receive(own));
        stream.copy(out.offset(to * element.bytes), x.offset(from * element.bytes), count * element.bytes)?;
        // SAFETY: takes nothing.
        api.check("ncclGroupStart", raw, unsafe { (api.group_start)() })?;
        let mut result = Ok(());
        for i in (0..comm.group.len()).filter(|i| *i != own) {
            let ((from, sent), (to, received)) = (send(i), receive(i));
            let (from, to) = (x.offset(from * element.bytes), out.offset(to * element.bytes));
            // SAFETY: both ranges lie in their buffers: pieces of equal size, or cut to the buffers' rows above.
            let codes = unsafe {
                [
                    if sent > 0 {
                        (api.send)(from.0 as *const c_void, sent, element.code, i as c_int, raw, s)
                    } else {
                        0
                    },
                    if received > 0 {
                        (api.recv)(to.0 as *mut c_void, received, element.code, i as c_int, raw, s)
                    } else {
                        0
                    },
                ]
            };
            result = result
                .and_then(|()| api.check("ncclSend", raw, codes[0]))
                .and_then(|()| api.check("ncclRecv", raw, codes[1]));
        }
        // SAFETY: ends the group begun above, also after an error, so that none stays open.
        let end = api.check("ncclGroupEnd", raw, unsafe { (api.group_end)() });
        result.and(end)
    }
}
