//! Code that NVRTC made, loaded into the driver, and the kernels in it.

use super::context::check;
use super::launch::KernelInner;
use crate::device::DeviceError;
use cudarc::driver::sys;
use std::ffi::CString;

/// An image loaded into the current context.
#[derive(Debug)]
pub(super) struct Module {
    raw: sys::CUmodule,
}

// SAFETY: a module handle is a plain identifier; the driver allows its use from every thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    pub fn load(image: &[u8]) -> Result<Self, sys::CUresult> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `image` is whole machine code or PTX with its final zero, from NVRTC (`nvrtc::compile`) or from the disk
        // cache, whose checksum it passed; the driver copies it.
        match unsafe { sys::cuModuleLoadData(&mut raw, image.as_ptr().cast()) } {
            sys::CUresult::CUDA_SUCCESS => Ok(Self { raw }),
            other => Err(other),
        }
    }

    pub fn function(&self, entry: &str) -> Result<sys::CUfunction, DeviceError> {
        let name =
            CString::new(entry).map_err(|_| DeviceError::internal("a zero byte in a kernel's name"))?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded and the name zero-terminated.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&mut function, self.raw, name.as_ptr())
        })?;
        // Now, not at the first launch, which may lie in a capture.
        // SAFETY: the function was found just now.
        check("cuFuncLoad", unsafe { sys::cuFuncLoad(function) })?;
        Ok(function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once; kernels hold an Arc of it.
        unsafe { sys::cuModuleUnload(self.raw) };
    }
}

/// Sizes of the first `most` parameters. No further one is asked for: that question is an error to a checker.
pub(super) fn parameter_sizes(function: sys::CUfunction, most: usize) -> Result<Vec<usize>, DeviceError> {
    let mut sizes = Vec::new();
    for index in 0..most {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is loaded; writes the two integers.
        match unsafe { sys::cuFuncGetParamInfo(function, index, &mut offset, &mut size) } {
            sys::CUresult::CUDA_SUCCESS => sizes.push(size),
            // A variant with fewer.
            sys::CUresult::CUDA_ERROR_INVALID_VALUE => break,
            other => check("cuFuncGetParamInfo", other)?,
        }
    }
    Ok(sizes)
}

pub(super) fn allow_shared(
    function: sys::CUfunction,
    bytes: u32,
    kernel: &KernelInner,
) -> Result<(), DeviceError> {
    let which = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: the function is loaded.
    let code = unsafe { sys::cuFuncSetAttribute(function, which, bytes as i32) };
    check("cuFuncSetAttribute", code).map_err(|_| {
        DeviceError::Invalid(format!(
            "kernel `{}` of {} wants {bytes} bytes of shared memory, more than this GPU gives a block (an A100 166912, \
             an H100 or B200 232448): choose a smaller width of the layer's state or head, or another GPU",
            kernel.name, kernel.source
        ))
    })
}

/// What the driver says of code that it cannot run: made by another version, or for another GPU.
pub(super) fn unfit(code: sys::CUresult) -> bool {
    use sys::CUresult::{
        CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_PTX, CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
        CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    };
    matches!(
        code,
        CUDA_ERROR_INVALID_IMAGE
            | CUDA_ERROR_INVALID_PTX
            | CUDA_ERROR_JIT_COMPILER_NOT_FOUND
            | CUDA_ERROR_NO_BINARY_FOR_GPU
            | CUDA_ERROR_UNSUPPORTED_PTX_VERSION
    )
}
