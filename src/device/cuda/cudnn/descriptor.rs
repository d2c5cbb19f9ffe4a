//! cuDNN's backend descriptors: created, given attributes, finalized, and destroyed on drop.

use super::error::{CudnnError, check, trace};
use cudarc::cudnn::sys;
use std::ffi::c_void;
use sys::cudnnBackendAttributeType_t as Type;

pub(super) use sys::cudnnBackendAttributeName_t as Name;
pub(super) use sys::cudnnBackendDescriptorType_t as Kind;

/// A Rust type that is laid out as an attribute type of the library.
///
/// # Safety
/// A value must have exactly the size and meaning that the library documents for [`Element::TYPE`].
pub(super) unsafe trait Element: Copy {
    const TYPE: Type;
}

// SAFETY: the C types behind the attribute types: int64_t, float, bool (one byte), char, void*, a handle, and
// 32-bit enumerations that the bindings declare.
unsafe impl Element for i64 {
    const TYPE: Type = Type::CUDNN_TYPE_INT64;
}
// SAFETY: see above.
unsafe impl Element for f32 {
    const TYPE: Type = Type::CUDNN_TYPE_FLOAT;
}
// SAFETY: see above.
unsafe impl Element for bool {
    const TYPE: Type = Type::CUDNN_TYPE_BOOLEAN;
}
// SAFETY: see above.
unsafe impl Element for u8 {
    const TYPE: Type = Type::CUDNN_TYPE_CHAR;
}
// SAFETY: see above.
unsafe impl Element for *mut c_void {
    const TYPE: Type = Type::CUDNN_TYPE_VOID_PTR;
}
// SAFETY: see above.
unsafe impl Element for sys::cudnnHandle_t {
    const TYPE: Type = Type::CUDNN_TYPE_HANDLE;
}
// SAFETY: see above.
unsafe impl Element for sys::cudnnDataType_t {
    const TYPE: Type = Type::CUDNN_TYPE_DATA_TYPE;
}
// SAFETY: see above.
unsafe impl Element for sys::cudnnPointwiseMode_t {
    const TYPE: Type = Type::CUDNN_TYPE_POINTWISE_MODE;
}
// SAFETY: see above.
unsafe impl Element for sys::cudnnReduceTensorOp_t {
    const TYPE: Type = Type::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE;
}
// SAFETY: see above.
unsafe impl Element for sys::cudnnBackendHeurMode_t {
    const TYPE: Type = Type::CUDNN_TYPE_HEUR_MODE;
}

/// One descriptor. `label` tells it apart in messages.
#[derive(Debug)]
pub(super) struct Descriptor {
    raw: sys::cudnnBackendDescriptor_t,
    pub label: String,
}

impl Descriptor {
    pub fn new(kind: Kind, label: impl Into<String>) -> Result<Self, CudnnError> {
        let label = label.into();
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes the handle; `Drop` destroys it.
        let status = unsafe { sys::cudnnBackendCreateDescriptor(kind, &mut raw) };
        check(|| format!("a descriptor for {label}"), status)?;
        Ok(Self { raw, label })
    }

    /// The library's handle, valid while `self` lives.
    pub fn raw(&self) -> sys::cudnnBackendDescriptor_t {
        self.raw
    }

    pub fn set<T: Element>(&self, name: Name, values: &[T]) -> Result<(), CudnnError> {
        // SAFETY: the handle is valid; the array has as many elements as told, of the type told (Element).
        let status = unsafe {
            sys::cudnnBackendSetAttribute(
                self.raw,
                name,
                T::TYPE,
                values.len() as i64,
                values.as_ptr().cast(),
            )
        };
        check(|| format!("{name:?} of {}", self.label), status)
    }

    /// Attributes that are descriptors. The library keeps what it needs of them; ours live on in the plan.
    pub fn set_descriptors(&self, name: Name, values: &[&Descriptor]) -> Result<(), CudnnError> {
        let raw: Vec<sys::cudnnBackendDescriptor_t> = values.iter().map(|d| d.raw).collect();
        // SAFETY: the handles are valid, the array has as many as told.
        let status = unsafe {
            sys::cudnnBackendSetAttribute(
                self.raw,
                name,
                Type::CUDNN_TYPE_BACKEND_DESCRIPTOR,
                raw.len() as i64,
                raw.as_ptr().cast(),
            )
        };
        check(|| format!("{name:?} of {}", self.label), status)
    }

    pub fn set_descriptor(&self, name: Name, value: &Descriptor) -> Result<(), CudnnError> {
        self.set_descriptors(name, &[value])
    }

    pub fn finalize(&self) -> Result<(), CudnnError> {
        // SAFETY: the handle is valid.
        let status = unsafe { sys::cudnnBackendFinalize(self.raw) };
        check(|| format!("finalize of {}", self.label), status)?;
        trace(|| format!("made {}", self.label));
        Ok(())
    }

    pub fn get_i64(&self, name: Name) -> Result<i64, CudnnError> {
        let (mut value, mut count) = (0i64, 0i64);
        // SAFETY: room for the one integer asked for.
        let status = unsafe {
            sys::cudnnBackendGetAttribute(
                self.raw,
                name,
                Type::CUDNN_TYPE_INT64,
                1,
                &mut count,
                (&raw mut value).cast(),
            )
        };
        check(|| format!("reading {name:?} of {}", self.label), status)?;
        Ok(value)
    }

    /// How many values an attribute of descriptors has.
    pub fn count_descriptors(&self, name: Name) -> Result<usize, CudnnError> {
        let mut count = 0i64;
        // SAFETY: no elements are asked for, only their number.
        let status = unsafe {
            sys::cudnnBackendGetAttribute(
                self.raw,
                name,
                Type::CUDNN_TYPE_BACKEND_DESCRIPTOR,
                0,
                &mut count,
                std::ptr::null_mut(),
            )
        };
        check(|| format!("counting {name:?} of {}", self.label), status)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Fills fresh descriptors with the attribute's values; gives how many were filled.
    pub fn fill_descriptors(&self, name: Name, into: &[Descriptor]) -> Result<usize, CudnnError> {
        let mut raw: Vec<sys::cudnnBackendDescriptor_t> = into.iter().map(|d| d.raw).collect();
        let mut count = 0i64;
        // SAFETY: the handles are valid and of the attribute's type; the array has as many as told.
        let status = unsafe {
            sys::cudnnBackendGetAttribute(
                self.raw,
                name,
                Type::CUDNN_TYPE_BACKEND_DESCRIPTOR,
                raw.len() as i64,
                &mut count,
                raw.as_mut_ptr().cast(),
            )
        };
        check(|| format!("reading {name:?} of {}", self.label), status)?;
        Ok(usize::try_from(count).unwrap_or(0).min(into.len()))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once. A failure can only leak.
        unsafe { sys::cudnnBackendDestroyDescriptor(self.raw) };
    }
}
