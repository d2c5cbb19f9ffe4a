//! Tensor maps: how the tensor memory accelerator (compute capability 9.0 upward) finds boxes of a tensor.

use super::context::check;
use super::prep::{CudaPrep, DevPtr, Param};
use crate::device::DeviceError;
use cudarc::driver::sys;

/// Words of a tensor map, opaque to all but the driver (`CUtensorMap`, cuda.h).
pub const WORDS: usize = 16;

/// What `cuTensorMapEncodeTiled` asks for (CUDA driver API): alignment of the address, multiple of strides in bytes,
/// most elements of a dimension, most elements of a box's side, bytes of the swizzle's line.
const ALIGN: u64 = 16;
const STRIDE_MULTIPLE: usize = 16;
const MOST_ELEMENTS: u64 = 1 << 32;
const MOST_BOX: u32 = 256;
const SWIZZLE_BYTES: u32 = 128;
/// Bytes of a bf16.
const ELEMENT: usize = 2;

/// Matrices of bf16 without gaps, and the box that one copy takes of one of them. A box lies in shared memory with
/// the 128-byte swizzle; elements past the end of a dimension are zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Boxes {
    pub matrices: usize,
    pub rows: usize,
    pub columns: usize,
    pub box_rows: u32,
    pub box_columns: u32,
}

impl Boxes {
    /// Whether the driver takes it at `address`.
    fn check(&self, address: DevPtr) -> Result<(), DeviceError> {
        let sizes = [self.matrices, self.rows, self.columns];
        let sides = [self.box_rows, self.box_columns];
        let good = address.0.is_multiple_of(ALIGN)
            && (self.columns * ELEMENT).is_multiple_of(STRIDE_MULTIPLE)
            && sizes.iter().all(|&s| s > 0 && s as u64 <= MOST_ELEMENTS)
            && sides.iter().all(|&s| s > 0 && s <= MOST_BOX)
            && self.box_columns * ELEMENT as u32 <= SWIZZLE_BYTES;
        if good {
            return Ok(());
        }
        Err(DeviceError::internal(format!("no tensor map can be made of {self:?} at {:#x}", address.0)))
    }

    fn encode(&self, address: DevPtr) -> Result<[u64; WORDS], DeviceError> {
        // Innermost first; strides of all but the innermost.
        let sizes = [self.columns, self.rows, self.matrices].map(|s| s as u64);
        let strides = [self.columns, self.rows * self.columns].map(|s| (s * ELEMENT) as u64);
        let sides = [self.box_columns, self.box_rows, 1];
        let every_element = [1u32; 3];
        let mut map = sys::CUtensorMap { opaque: [0; WORDS] };
        // SAFETY: all arrays hold as many numbers as the rank says (strides one less), and the driver reads them before it
        // returns; the address is a number to it.
        check("cuTensorMapEncodeTiled", unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                sizes.len() as u32,
                address.0 as *mut _,
                sizes.as_ptr(),
                strides.as_ptr(),
                sides.as_ptr(),
                every_element.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        })?;
        Ok(map.opaque)
    }
}

impl CudaPrep<'_> {
    /// A tensor map as a kernel's parameter (`const __grid_constant__ TensorMap`). Without a device it is checked and
    /// left empty.
    pub fn tensor_map(&self, boxes: &Boxes, address: DevPtr) -> Result<Param, DeviceError> {
        boxes.check(address)?;
        let words = if self.kernels.launches() { boxes.encode(address)? } else { [0; WORDS] };
        Ok(Param::TensorMap(words))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::prep::OfflinePrep;

    #[test]
    fn what_the_driver_would_refuse_is_named() {
        let mut offline = OfflinePrep::new("sm_90a").unwrap();
        let cuda = offline.prep();
        let good = Boxes { matrices: 3, rows: 5, columns: 8, box_rows: 64, box_columns: 64 };
        let at = DevPtr(1 << 20);
        assert_eq!(cuda.tensor_map(&good, at).unwrap(), Param::TensorMap([0; WORDS]));
        for bad in [
            Boxes { columns: 12, ..good },
            Boxes { rows: 0, ..good },
            Boxes { box_rows: 257, ..good },
            Boxes { box_columns: 72, ..good },
        ] {
            let e = cuda.tensor_map(&bad, at).unwrap_err().to_string();
            assert!(e.contains("no tensor map"), "{bad:?}: {e}");
        }
        assert!(cuda.tensor_map(&good, DevPtr(8)).is_err());
    }
}
