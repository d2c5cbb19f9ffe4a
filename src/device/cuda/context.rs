//! The driver's objects, each owned by one Rust value: context, streams, events, memory.
//!
//! The raw driver interface is used, not cudarc's safe one: that one tracks events per buffer and allocates per
//! launch, which would make eager look slower than it is.

use super::libraries::{self, Availability};
use super::prep::DevPtr;
use crate::device::{DeviceError, Phase};
use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::rc::Rc;

pub(super) const MIB: f64 = 1024.0 * 1024.0;

/// Turns a driver's return code into an error that names the call. The executor adds the phase.
pub(super) fn check(call: &'static str, code: sys::CUresult) -> Result<(), DeviceError> {
    match code {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(driver_error(call, other)),
    }
}

#[cold]
fn driver_error(call: &'static str, code: sys::CUresult) -> DeviceError {
    DeviceError::Driver { call, code: format!("{code:?}"), phase: Phase::Prepare, at: String::new() }
}

/// The same error, told of the phase it happened in and of what was being done.
pub(super) fn in_phase(error: DeviceError, now: Phase, place: &str) -> DeviceError {
    let mut error = error;
    match &mut error {
        DeviceError::Driver { phase, at, .. } => {
            *phase = now;
            if at.is_empty() && !place.is_empty() {
                *at = format!(" ({place})");
            }
        }
        DeviceError::OutOfMemory { phase, .. } => *phase = now,
        _ => {}
    }
    error
}

/// The primary context of one device, current on the thread that opened it.
#[derive(Debug)]
pub struct Context {
    device: sys::CUdevice,
    pub name: String,
    /// As NVML spells it: `GPU-` and the bytes in hex groups.
    pub uuid: String,
    /// Compute capability as major * 10 + minor.
    pub cc: u32,
    pub sm_count: usize,
    /// Shared memory of one block, at most.
    pub shared_bytes: usize,
    /// Second-level cache.
    pub l2_bytes: usize,
    pub total_bytes: usize,
    /// The CUDA version that the driver supports, as 1000 * major + 10 * minor.
    pub driver_cuda: c_int,
}

impl Context {
    /// Opens device `ordinal`. Errors: [`DeviceError::Unavailable`] with what is missing.
    pub fn open(ordinal: usize) -> Result<Rc<Self>, DeviceError> {
        let count = match libraries::probe() {
            Availability::Ready(count) => count,
            Availability::NoDriver(m) | Availability::NoDevice(m) | Availability::Unusable(m) => {
                return Err(DeviceError::Unavailable(m));
            }
        };
        if ordinal >= count {
            return Err(DeviceError::Unavailable(format!(
                "there is no GPU {ordinal}: the driver shows {count}, numbered from 0"
            )));
        }
        let (mut device, mut driver_cuda, mut total_bytes) = (0, 0, 0usize);
        let mut name = [0 as c_char; 256];
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        let mut raw: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: `probe` found every function; each writes only what is passed, of the size passed.
        unsafe {
            check("cuDeviceGet", sys::cuDeviceGet(&mut device, ordinal as c_int))?;
            check("cuDriverGetVersion", sys::cuDriverGetVersion(&mut driver_cuda))?;
            check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), 255, device))?;
            check("cuDeviceGetUuid_v2", sys::cuDeviceGetUuid_v2(&mut uuid, device))?;
            check("cuDeviceTotalMem_v2", sys::cuDeviceTotalMem_v2(&mut total_bytes, device))?;
        }
        use sys::CUdevice_attribute_enum as Attribute;
        let major = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let sms = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let l2_bytes = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?;
        // SAFETY: the name is zero-terminated: 255 bytes at most were written into 256 zeros.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        if major < 8 {
            return Err(DeviceError::Unavailable(format!(
                "{name} has compute capability {major}.{minor}; mbperf's bf16 kernels need 8.0 (A100) or newer"
            )));
        }
        // SAFETY: `device` is valid; the context is released in Drop.
        unsafe {
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&mut raw, device))?;
        }
        let context = Self {
            device,
            name,
            uuid: uuid_text(&uuid),
            cc: (major * 10 + minor) as u32,
            sm_count: sms.max(1) as usize,
            shared_bytes: shared.max(0) as usize,
            l2_bytes: l2_bytes.max(0) as usize,
            total_bytes,
            driver_cuda,
        };
        // SAFETY: `raw` was retained just now.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(raw) })?;
        Ok(Rc::new(context))
    }

    /// Waits for everything on the device.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: a context is current while `self` lives.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Free and total bytes of device memory, all processes together.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes the two integers.
        check("cuMemGetInfo_v2", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// Device memory for `what`. Errors: [`DeviceError::OutOfMemory`] with both numbers.
    pub fn alloc(self: &Rc<Self>, bytes: usize, what: &str) -> Result<DeviceMemory, DeviceError> {
        let mut ptr = 0;
        // SAFETY: writes the pointer; 0 bytes are not allowed, so one is asked at least.
        let code = unsafe { sys::cuMemAlloc_v2(&mut ptr, bytes.max(1)) };
        if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let free = self.memory().map_or(0, |m| m.0);
            return Err(DeviceError::OutOfMemory {
                phase: Phase::Prepare,
                what: what.to_owned(),
                need_mib: bytes as f64 / MIB,
                free_mib: free as f64 / MIB,
                remedy:
                    "use --num_layers, --seq_length or --max_microbatches to shrink the run, or free the GPU"
                        .to_owned(),
            });
        }
        check("cuMemAlloc_v2", code)?;
        Ok(DeviceMemory { ptr: DevPtr(ptr), bytes, _context: self.clone() })
    }

    /// Page-locked host memory, readable by the device at the same address, zeroed.
    pub fn alloc_host(self: &Rc<Self>, bytes: usize) -> Result<PinnedMemory, DeviceError> {
        let mut ptr: *mut c_void = std::ptr::null_mut();
        // SAFETY: writes the pointer. Flags 0: cached, so reading on the host is fast.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut ptr, bytes.max(8), 0) })?;
        // SAFETY: the block has `bytes.max(8)` bytes.
        unsafe { std::ptr::write_bytes(ptr.cast::<u8>(), 0, bytes.max(8)) };
        Ok(PinnedMemory { ptr: ptr.cast(), bytes: bytes.max(8), _context: self.clone() })
    }

    pub fn stream(self: &Rc<Self>) -> Result<Stream, DeviceError> {
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes the handle.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Stream { raw, _context: self.clone() })
    }

    /// An event; `timed` ones can be subtracted, untimed ones are cheaper.
    pub fn event(self: &Rc<Self>, timed: bool) -> Result<Event, DeviceError> {
        let mut raw = std::ptr::null_mut();
        let flags = if timed {
            sys::CUevent_flags_enum::CU_EVENT_DEFAULT
        } else {
            sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING
        };
        // SAFETY: writes the handle.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags as u32) })?;
        Ok(Event { raw, _context: self.clone() })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`; everything made in it holds an Rc and is gone. A failure here
        // can only mean that the process is ending.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<c_int, DeviceError> {
    let mut value = 0;
    // SAFETY: writes the integer.
    check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) })?;
    Ok(value)
}

fn uuid_text(uuid: &sys::CUuuid) -> String {
    let hex: Vec<String> = uuid.bytes.iter().map(|b| format!("{:02x}", *b as u8)).collect();
    format!(
        "GPU-{}-{}-{}-{}-{}",
        hex[0..4].concat(),
        hex[4..6].concat(),
        hex[6..8].concat(),
        hex[8..10].concat(),
        hex[10..16].concat()
    )
}

/// A piece of device memory, freed on drop. Make sure that no work on it is pending.
#[derive(Debug)]
pub struct DeviceMemory {
    pub ptr: DevPtr,
    pub bytes: usize,
    _context: Rc<Context>,
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by cuMemAlloc, freed once. The driver waits for pending work itself.
        unsafe { sys::cuMemFree_v2(self.ptr.0) };
    }
}

impl DeviceMemory {
    /// Copies from the host and waits.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<(), DeviceError> {
        if offset + data.len() > self.bytes {
            return Err(DeviceError::internal("a copy to the device would pass the end of its buffer"));
        }
        copy_to_device(self.ptr.offset(offset), data)
    }
}

/// Copies `data` to the device, after all work given so far and before any later. The caller vouches for the room
/// at `dst`.
pub(super) fn copy_to_device(dst: DevPtr, data: &[u8]) -> Result<(), DeviceError> {
    if data.is_empty() {
        return Ok(());
    }
    // The copy runs on the default stream, which our streams do not wait for, and may return before the last
    // bytes have arrived: hence a wait on both sides.
    // SAFETY: a context is current; `data` is readable for its length; callers checked the destination's size.
    unsafe {
        check("cuCtxSynchronize", sys::cuCtxSynchronize())?;
        check("cuMemcpyHtoD_v2", sys::cuMemcpyHtoD_v2(dst.0, data.as_ptr().cast(), data.len()))?;
        check("cuCtxSynchronize", sys::cuCtxSynchronize())
    }
}

/// Copies from the device and waits. The caller vouches for the bytes at `src`.
pub(super) fn copy_to_host(data: &mut [u8], src: DevPtr) -> Result<(), DeviceError> {
    if data.is_empty() {
        return Ok(());
    }
    // SAFETY: `data` is writable for its length; callers checked the source's size.
    check("cuMemcpyDtoH_v2", unsafe { sys::cuMemcpyDtoH_v2(data.as_mut_ptr().cast(), src.0, data.len()) })
}

/// Page-locked host memory, freed on drop.
#[derive(Debug)]
pub struct PinnedMemory {
    ptr: *mut u8,
    pub bytes: usize,
    _context: Rc<Context>,
}

impl PinnedMemory {
    /// The address, for copies and for kernels that write here.
    pub fn address(&self) -> DevPtr {
        DevPtr(self.ptr as u64)
    }
    /// The 32-bit word at `index`. Call it only after the work that writes it is known to be done.
    pub fn word(&self, index: usize) -> u32 {
        if (index + 1) * 4 > self.bytes {
            return 0;
        }
        // SAFETY: inside the block; volatile because the device writes it behind the compiler's back.
        unsafe { self.ptr.cast::<u32>().add(index).read_volatile() }
    }
    /// A copy of `len` bytes from `offset`. Call it only after the work that writes them is known to be done.
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        let len = len.min(self.bytes.saturating_sub(offset));
        // SAFETY: inside the block by the line above, initialised by `alloc_host`.
        unsafe { std::slice::from_raw_parts(self.ptr.add(offset), len) }.to_vec()
    }
    pub fn fill(&mut self, byte: u8) {
        // SAFETY: the whole block is ours.
        unsafe { std::ptr::write_bytes(self.ptr, byte, self.bytes) };
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by cuMemHostAlloc, freed once.
        unsafe { sys::cuMemFreeHost(self.ptr.cast()) };
    }
}

/// A stream of our own: never the default one, which cannot be captured.
#[derive(Debug)]
pub struct Stream {
    pub(super) raw: sys::CUstream,
    _context: Rc<Context>,
}

impl Stream {
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the handle is valid.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }
    pub fn wait(&self, event: &Event) -> Result<(), DeviceError> {
        // SAFETY: both handles are valid.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }
    /// Sets `bytes` bytes to `value`.
    pub fn fill(&self, dst: DevPtr, value: u8, bytes: usize) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: callers pass a range inside one of their allocations.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(dst.0, value, bytes, self.raw) })
    }
    /// Copies inside the device.
    pub fn copy(&self, dst: DevPtr, src: DevPtr, bytes: usize) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: callers pass ranges inside their allocations.
        check("cuMemcpyDtoDAsync_v2", unsafe { sys::cuMemcpyDtoDAsync_v2(dst.0, src.0, bytes, self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; pending work is finished by the driver first.
        unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
    _context: Rc<Context>,
}

impl Event {
    pub fn record(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both handles are valid.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.raw) })
    }
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the handle is valid.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }
    /// Milliseconds from `start` to `self`; both must be timed and done.
    pub fn since_ms(&self, start: &Event) -> Result<f64, DeviceError> {
        let mut ms = 0f32;
        // SAFETY: both handles are valid; writes the float.
        check("cuEventElapsedTime_v2", unsafe { sys::cuEventElapsedTime_v2(&mut ms, start.raw, self.raw) })?;
        Ok(ms as f64)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_read_as_nvml_writes_them() {
        let bytes = std::array::from_fn(|i| (i * 17) as u8 as c_char);
        assert_eq!(uuid_text(&sys::CUuuid { bytes }), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn an_error_is_told_its_phase() {
        let e = check("cuLaunchKernel", sys::CUresult::CUDA_ERROR_INVALID_VALUE).unwrap_err();
        let text = in_phase(e, Phase::Steady, "rmsnorm_fwd").to_string();
        assert_eq!(text, "cuLaunchKernel failed with CUDA_ERROR_INVALID_VALUE in phase steady (rmsnorm_fwd)");
    }
}
