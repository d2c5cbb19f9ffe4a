//! What the device did in one step: every kernel, copy and memset with its times, recorded by CUPTI. Device-busy time
//! is the union of their intervals.
//!
//! Recording slows launches down, so it is a pass of its own, made last in a process.

use super::libraries;
use super::work::Work;
use crate::device::host::Watch;
use crate::device::record::{COPY, Call, Kind, Record, SET, Unit};
use cudarc::cupti::sys;
use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::mem::offset_of;
use std::sync::{Arc, Mutex};

/// Bytes of one record buffer: CUPTI's own samples use 8 MiB.
const BUFFER_BYTES: usize = 8 << 20;
/// Alignment that CUPTI asks of buffers (`ACTIVITY_RECORD_ALIGNMENT`).
const BUFFER_ALIGN: usize = 8;

/// What CUPTI has delivered.
#[derive(Debug, Default)]
struct Delivered {
    records: Vec<Record>,
    /// Our own number of the call that a driver's call was made in, by the driver's.
    calls: HashMap<u32, u64>,
}

/// Everything delivered since the last [`record`] began.
static DELIVERED: Mutex<Option<Delivered>> = Mutex::new(None);

const KERNEL: sys::CUpti_ActivityKind = sys::CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
const MEMCPY: sys::CUpti_ActivityKind = sys::CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_MEMCPY;
const MEMSET: sys::CUpti_ActivityKind = sys::CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_MEMSET;
const EXTERNAL: sys::CUpti_ActivityKind = sys::CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION;

/// What takes device time.
const KINDS: [sys::CUpti_ActivityKind; 3] = [KERNEL, MEMCPY, MEMSET];
/// What tells calls apart: our own numbers come with records of the driver's and the runtime's calls, and the libraries
/// launch by either.
const CALLS: [sys::CUpti_ActivityKind; 3] = [
    sys::CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_DRIVER,
    sys::CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_RUNTIME,
    EXTERNAL,
];
/// Ours among the numbers that programs may give.
const OURS: sys::CUpti_ExternalCorrelationKind =
    sys::CUpti_ExternalCorrelationKind::CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0;

fn check(call: &str, code: sys::CUptiResult) -> Result<(), String> {
    match code {
        sys::CUptiResult::CUPTI_SUCCESS => Ok(()),
        other => Err(format!("{call} failed with {other:?}")),
    }
}

fn layout() -> Option<Layout> {
    Layout::from_size_align(BUFFER_BYTES, BUFFER_ALIGN).ok()
}

unsafe extern "C" fn requested(buffer: *mut *mut u8, size: *mut usize, max_records: *mut usize) {
    // SAFETY: CUPTI passes three places to write to. The layout has a size; a null buffer makes CUPTI drop
    // records. The memory goes back in `completed`.
    unsafe {
        *buffer = layout().map_or(std::ptr::null_mut(), |l| alloc(l));
        *size = if (*buffer).is_null() { 0 } else { BUFFER_BYTES };
        *max_records = 0;
    }
}

unsafe extern "C" fn completed(
    _context: cudarc::driver::sys::CUcontext,
    _stream: u32,
    buffer: *mut u8,
    _size: usize,
    valid: usize,
) {
    if buffer.is_null() {
        return;
    }
    let mut found = Delivered::default();
    let mut names = HashMap::new();
    let mut record: *mut sys::CUpti_Activity = std::ptr::null_mut();
    // SAFETY: CUPTI gives back a buffer of ours with `valid` bytes of records, and walks it itself; each record is
    // one of the library's own, valid until the buffer goes. The memory came from `requested` with this layout.
    unsafe {
        while valid > 0
            && sys::cuptiActivityGetNextRecord(buffer, valid, &mut record) == sys::CUptiResult::CUPTI_SUCCESS
        {
            take(record.cast(), &mut found, &mut names);
        }
        if let Some(layout) = layout() {
            dealloc(buffer, layout);
        }
    }
    if let Ok(mut all) = DELIVERED.lock() {
        let all = all.get_or_insert_default();
        all.records.extend(found.records);
        all.calls.extend(found.calls);
    }
}

/// Adds a record to `found` if it is of a kind that is wanted.
///
/// # Safety
/// `record` must point to a whole record of CUPTI of any version since 12.0.
unsafe fn take(record: *const u8, found: &mut Delivered, names: &mut HashMap<usize, Arc<str>>) {
    macro_rules! field {
        ($of:ident, $field:ident, $kind:ty) => {
            // SAFETY: the record is of this kind (its first word, checked below) and every version since CUDA 12.0
            // has the field there (they are only added to; the test below compares those the bindings know). It is
            // an integer or a pointer, for which any bits are a value.
            unsafe { record.add(offset_of!(sys::$of, $field)).cast::<$kind>().read_unaligned() }
        };
    }
    // SAFETY: every record begins with its kind.
    let kind = unsafe { record.cast::<u32>().read_unaligned() };
    let mut add = |unit, start_ns, end_ns, stream, correlation, node| {
        found.records.push(Record { unit, start_ns, end_ns, stream, correlation, call: None, node });
    };
    let plain = |kind, name: &str| Unit { kind, name: name.into(), grid: [0; 3], block: [0; 3] };
    if kind == KERNEL as u32 {
        macro_rules! sizes {
            ($($field:ident),*) => { [$(field!(CUpti_ActivityKernel9, $field, i32) as u32),*] };
        }
        let pointer = field!(CUpti_ActivityKernel9, name, *const c_char);
        let name = names.entry(pointer as usize).or_insert_with(|| match pointer.is_null() {
            true => "?".into(),
            // SAFETY: a zero-terminated string that the library keeps.
            false => unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into(),
        });
        let unit = Unit {
            kind: Kind::Kernel,
            name: name.clone(),
            grid: sizes!(gridX, gridY, gridZ),
            block: sizes!(blockX, blockY, blockZ),
        };
        add(
            unit,
            field!(CUpti_ActivityKernel9, start, u64),
            field!(CUpti_ActivityKernel9, end, u64),
            field!(CUpti_ActivityKernel9, streamId, u32),
            field!(CUpti_ActivityKernel9, correlationId, u32),
            field!(CUpti_ActivityKernel9, graphNodeId, u64),
        );
    } else if kind == MEMCPY as u32 {
        add(
            plain(Kind::Copy, COPY),
            field!(CUpti_ActivityMemcpy5, start, u64),
            field!(CUpti_ActivityMemcpy5, end, u64),
            field!(CUpti_ActivityMemcpy5, streamId, u32),
            field!(CUpti_ActivityMemcpy5, correlationId, u32),
            field!(CUpti_ActivityMemcpy5, graphNodeId, u64),
        );
    } else if kind == MEMSET as u32 {
        add(
            plain(Kind::Set, SET),
            field!(CUpti_ActivityMemset4, start, u64),
            field!(CUpti_ActivityMemset4, end, u64),
            field!(CUpti_ActivityMemset4, streamId, u32),
            field!(CUpti_ActivityMemset4, correlationId, u32),
            field!(CUpti_ActivityMemset4, graphNodeId, u64),
        );
    } else if kind == EXTERNAL as u32
        && field!(CUpti_ActivityExternalCorrelation, externalKind, u32) == OURS as u32
    {
        let correlation = field!(CUpti_ActivityExternalCorrelation, correlationId, u32);
        found.calls.insert(correlation, field!(CUpti_ActivityExternalCorrelation, externalId, u64));
    }
}

/// Numbers the calls of a step, so that what a library launches in one is told from the next call's.
#[derive(Debug, Default)]
pub(super) struct Numbered {
    pub calls: Vec<Call>,
}

impl Watch for Numbered {
    fn begin(&mut self, call: Call) {
        // SAFETY: only called inside `record`, which made sure that the function exists. Should it fail, the order of
        // calls tells instead.
        unsafe { sys::cuptiActivityPushExternalCorrelationId(OURS, self.calls.len() as u64) };
        self.calls.push(call);
    }

    fn end(&mut self, _call: Call) {
        let mut last = 0;
        // SAFETY: as above; writes the number that was pushed.
        unsafe { sys::cuptiActivityPopExternalCorrelationId(OURS, &mut last) };
    }
}

impl Work {
    /// As records name it.
    pub(super) fn unit(&self) -> Unit {
        let plain = |kind, name: &str| Unit { kind, name: name.into(), grid: [0; 3], block: [0; 3] };
        match self {
            Work::Kernel { name, grid, block, .. } => {
                Unit { kind: Kind::Kernel, name: name.clone(), grid: *grid, block: *block }
            }
            Work::Copy { .. } => plain(Kind::Copy, COPY),
            Work::Set { .. } => plain(Kind::Set, SET),
        }
    }
}

/// Runs `step`, which must wait for the device at its end, and gives all that the device did. `numbered`: the step
/// numbers its calls ([`Numbered`]), which costs host time at every call.
pub(super) fn record(
    numbered: bool,
    step: impl FnOnce() -> Result<(), String>,
) -> Result<Vec<Record>, String> {
    libraries::ensure_cupti().map_err(|e| e.to_string())?;
    let clear = || DELIVERED.lock().map(|mut all| all.take().unwrap_or_default()).map_err(|e| e.to_string());
    // SAFETY: the functions exist (above) and the callbacks are of the types asked for, valid for the whole process.
    unsafe {
        check(
            "cuptiActivityRegisterCallbacks",
            sys::cuptiActivityRegisterCallbacks(Some(requested), Some(completed)),
        )?;
    }
    clear()?;
    let outcome = enabled(if numbered { &CALLS } else { &[] }, step);
    // SAFETY: as above; flag 1 forces out buffers that are not full.
    let flushed = unsafe { check("cuptiActivityFlushAll", sys::cuptiActivityFlushAll(1)) };
    outcome?;
    flushed?;
    let mut dropped = 0;
    // SAFETY: as above; writes the number of records lost by the queue that all contexts share.
    unsafe {
        let lost = sys::cuptiActivityGetNumDroppedRecords(std::ptr::null_mut(), 0, &mut dropped);
        check("cuptiActivityGetNumDroppedRecords", lost)?;
    }
    if dropped > 0 {
        return Err(format!("CUPTI lost {dropped} records for want of memory: shrink the run"));
    }
    let Delivered { mut records, calls } = clear()?;
    if records.is_empty() {
        return Err("CUPTI recorded no kernel; profiling may not be allowed here".to_owned());
    }
    for record in &mut records {
        record.call = calls.get(&record.correlation).and_then(|call| usize::try_from(*call).ok());
    }
    Ok(records)
}

fn enabled(
    beside: &[sys::CUpti_ActivityKind],
    step: impl FnOnce() -> Result<(), String>,
) -> Result<(), String> {
    let mut result = Ok(());
    for kind in KINDS {
        // SAFETY: the function exists (see `record`).
        result =
            result.and_then(|()| unsafe { check("cuptiActivityEnable", sys::cuptiActivityEnable(kind)) });
    }
    for kind in beside {
        // SAFETY: as above. Where it fails the records come without it.
        unsafe { sys::cuptiActivityEnable(*kind) };
    }
    let result = result.and_then(|()| step());
    for kind in KINDS.iter().chain(beside) {
        // SAFETY: as above. Kinds that were never enabled may be disabled.
        unsafe { sys::cuptiActivityDisable(*kind) };
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_version_of_a_record_has_its_fields_where_they_are_read() {
        macro_rules! same {
            ($a:ident, $b:ident: $($field:ident),*) => {
                $(assert_eq!(
                    offset_of!(sys::$a, $field),
                    offset_of!(sys::$b, $field),
                    "{} of {}",
                    stringify!($field),
                    stringify!($b)
                );)*
            };
        }
        same!(CUpti_ActivityKernel9, CUpti_ActivityKernel10:
            start, end, streamId, gridX, gridY, gridZ, blockX, blockY, blockZ, correlationId, name, graphNodeId);
        same!(CUpti_ActivityMemcpy5, CUpti_ActivityMemcpy6: start, end, streamId, correlationId, graphNodeId);
        same!(CUpti_ActivityMemset4, CUpti_ActivityMemset3: start, end, streamId, correlationId, graphNodeId);
        for kind in [
            offset_of!(sys::CUpti_ActivityKernel9, kind),
            offset_of!(sys::CUpti_ActivityMemcpy5, kind),
            offset_of!(sys::CUpti_ActivityMemset4, kind),
            offset_of!(sys::CUpti_ActivityExternalCorrelation, kind),
        ] {
            assert_eq!(kind, 0);
        }
    }

    #[test]
    fn records_are_taken_as_they_lie_in_memory() {
        let name = c"_Z4gemmv";
        // SAFETY: integers, enums with a value for 0, and pointers.
        let mut kernel: sys::CUpti_ActivityKernel10 = unsafe { std::mem::zeroed() };
        kernel.kind = KERNEL;
        (kernel.start, kernel.end, kernel.streamId, kernel.correlationId) = (5, 9, 7, 11);
        (kernel.gridX, kernel.gridY, kernel.gridZ) = (1, 2, 3);
        (kernel.blockX, kernel.blockY, kernel.blockZ) = (128, 1, 1);
        kernel.name = name.as_ptr();
        kernel.graphNodeId = 1 << 40;
        // SAFETY: as above.
        let mut copy: sys::CUpti_ActivityMemcpy6 = unsafe { std::mem::zeroed() };
        copy.kind = MEMCPY;
        (copy.start, copy.end, copy.streamId, copy.correlationId, copy.graphNodeId) = (10, 12, 7, 12, 0);
        // SAFETY: as above.
        let mut set: sys::CUpti_ActivityMemset4 = unsafe { std::mem::zeroed() };
        set.kind = MEMSET;
        (set.start, set.end, set.streamId, set.correlationId, set.graphNodeId) = (13, 14, 8, 13, 6);
        let external = |of, correlation| sys::CUpti_ActivityExternalCorrelation {
            kind: EXTERNAL,
            externalKind: of,
            externalId: 3,
            correlationId: correlation,
            reserved: 0,
        };
        let ours = external(OURS, 11);
        let others =
            external(sys::CUpti_ExternalCorrelationKind::CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM1, 12);
        // What is switched on for the numbers' sake alone takes no device time.
        // SAFETY: as above.
        let mut call: sys::CUpti_ActivityAPI = unsafe { std::mem::zeroed() };
        call.kind = sys::CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_DRIVER;
        let mut found = Delivered::default();
        let mut names = HashMap::new();
        // SAFETY: whole records.
        unsafe {
            take((&raw const kernel).cast(), &mut found, &mut names);
            take((&raw const ours).cast(), &mut found, &mut names);
            take((&raw const others).cast(), &mut found, &mut names);
            take((&raw const call).cast(), &mut found, &mut names);
            take((&raw const copy).cast(), &mut found, &mut names);
            take((&raw const set).cast(), &mut found, &mut names);
        }
        assert_eq!(found.calls, HashMap::from([(11, 3)]));
        let unit = Unit { kind: Kind::Kernel, name: "_Z4gemmv".into(), grid: [1, 2, 3], block: [128, 1, 1] };
        let plain = |kind, name: &str| Unit { kind, name: name.into(), grid: [0; 3], block: [0; 3] };
        let record = |unit, (start_ns, end_ns), stream, correlation, node| Record {
            unit,
            start_ns,
            end_ns,
            stream,
            correlation,
            call: None,
            node,
        };
        assert_eq!(
            found.records,
            [
                record(unit, (5, 9), 7, 11, 1 << 40),
                record(plain(Kind::Copy, COPY), (10, 12), 7, 12, 0),
                record(plain(Kind::Set, SET), (13, 14), 8, 13, 6),
            ]
        );
    }
}
