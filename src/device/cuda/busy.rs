//! Device-busy time: the union of kernel, copy and memset intervals of one step, recorded by CUPTI.
//!
//! Recording slows launches down, so it is a pass of its own, made last in a process.

use super::libraries;
use cudarc::cupti::sys;
use std::alloc::{Layout, alloc, dealloc};
use std::sync::Mutex;

/// Bytes of one record buffer: CUPTI's own samples use 8 MiB.
const BUFFER_BYTES: usize = 8 << 20;
/// Alignment that CUPTI asks of buffers (`ACTIVITY_RECORD_ALIGNMENT`).
const BUFFER_ALIGN: usize = 8;

/// (start, end) in nanoseconds of everything recorded since the last [`record`] began.
static INTERVALS: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

const KINDS: [sys::CUpti_ActivityKind; 3] = [
    sys::CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
    sys::CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_MEMCPY,
    sys::CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_MEMSET,
];

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
    let mut found = Vec::new();
    let mut record: *mut sys::CUpti_Activity = std::ptr::null_mut();
    // SAFETY: CUPTI gives back a buffer of ours with `valid` bytes of records, and walks it itself. Every record
    // begins with its kind, and the three kinds enabled all hold start and end (u64 each) from byte 16 on, in
    // every version of their structs since CUDA 5 (checked against the bindings in the test below). The memory
    // came from `requested` with this layout.
    unsafe {
        while valid > 0
            && sys::cuptiActivityGetNextRecord(buffer, valid, &mut record) == sys::CUptiResult::CUPTI_SUCCESS
        {
            let kind = record.cast::<u32>().read();
            if KINDS.iter().any(|k| *k as u32 == kind) {
                let times = record.cast::<u8>().add(START_OFFSET).cast::<u64>();
                found.push((times.read_unaligned(), times.add(1).read_unaligned()));
            }
        }
        if let Some(layout) = layout() {
            dealloc(buffer, layout);
        }
    }
    if let Ok(mut all) = INTERVALS.lock() {
        all.extend(found);
    }
}

/// Offset of `start` in the records; `end` follows.
const START_OFFSET: usize = 16;

/// Runs `step`, which must wait for the device at its end, and gives the milliseconds in which the device was
/// busy, and how many records that rests on.
pub(super) fn record(step: impl FnOnce() -> Result<(), String>) -> Result<(f64, usize), String> {
    libraries::ensure_cupti().map_err(|e| e.to_string())?;
    let clear = || INTERVALS.lock().map(|mut all| std::mem::take(&mut *all)).map_err(|e| e.to_string());
    // SAFETY: the functions exist (above) and the callbacks are of the types asked for, valid for the whole process.
    unsafe {
        check(
            "cuptiActivityRegisterCallbacks",
            sys::cuptiActivityRegisterCallbacks(Some(requested), Some(completed)),
        )?;
    }
    clear()?;
    let outcome = enabled(step);
    // SAFETY: as above; flag 1 forces out buffers that are not full.
    let flushed = unsafe { check("cuptiActivityFlushAll", sys::cuptiActivityFlushAll(1)) };
    outcome?;
    flushed?;
    let intervals = clear()?;
    if intervals.is_empty() {
        return Err("CUPTI recorded no kernel; profiling may not be allowed here".to_owned());
    }
    let count = intervals.len();
    Ok((union_ns(intervals) as f64 / 1e6, count))
}

fn enabled(step: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    let mut result = Ok(());
    for kind in KINDS {
        // SAFETY: the function exists (see `record`).
        result =
            result.and_then(|()| unsafe { check("cuptiActivityEnable", sys::cuptiActivityEnable(kind)) });
    }
    let result = result.and_then(|()| step());
    for kind in KINDS {
        // SAFETY: as above. Kinds that were never enabled may be disabled.
        unsafe { sys::cuptiActivityDisable(kind) };
    }
    result
}

/// Length of the union of intervals.
fn union_ns(mut intervals: Vec<(u64, u64)>) -> u64 {
    intervals.sort_unstable();
    let (mut total, mut reached) = (0, 0);
    for (start, end) in intervals {
        let start = start.max(reached);
        if end > start {
            total += end - start;
            reached = end;
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::mem::offset_of;

    #[test]
    fn records_hold_their_times_where_they_are_read() {
        assert_eq!(offset_of!(sys::CUpti_ActivityKernel9, start), START_OFFSET);
        assert_eq!(offset_of!(sys::CUpti_ActivityKernel10, start), START_OFFSET);
        assert_eq!(offset_of!(sys::CUpti_ActivityKernel10, end), START_OFFSET + 8);
    }

    #[test]
    fn overlaps_count_once() {
        assert_eq!(union_ns(vec![]), 0);
        assert_eq!(union_ns(vec![(10, 20), (15, 30), (40, 41), (12, 13)]), 21);
    }

    proptest! {
        #[test]
        fn the_union_is_what_a_bitmap_counts(list in prop::collection::vec((0u64..200, 0u64..40), 0..30)) {
            let list: Vec<(u64, u64)> = list.into_iter().map(|(s, n)| (s, s + n)).collect();
            let covered = (0..300u64).filter(|t| list.iter().any(|(s, e)| s <= t && t < e)).count();
            prop_assert_eq!(union_ns(list) as usize, covered);
        }
    }
}
