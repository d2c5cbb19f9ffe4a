//! cuBLASLt products as plans.
use super::prep::DevPtr;
use crate::device::DeviceError;
use crate::program::DType;

/// Which operand is transposed; everything row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub enum Layout {
    /// D[m,n] = A[m,k] B[n,k]^T: a forward product with a weight `[out, in]`.
    Nt,
    /// D[m,n] = A[m,k] B[k,n]: a data gradient.
    Nn,
    /// D[m,n] = A[k,m]^T B[k,n]: a weight gradient.
    Tn,
}

/// One product, bf16 operands, fp32 accumulation.
#[derive(Debug, Clone, PartialEq)]
pub struct MatmulSpec {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub layout: Layout,
    /// Products at tight strides (1: one product).
    pub batch: usize,
    /// Dtype of C and D.
    pub out: DType,
    /// Adds C (beta = 1).
    pub accumulate: bool,
}

#[derive(Debug)]
pub struct Matmuls;
#[derive(Debug)]
pub struct MatmulPlan;

impl Matmuls {
    /// Scratch that every plan may use.
    pub const WORKSPACE_BYTES: usize = 32 << 20;
    pub fn plan(
        &mut self,
        _spec: &MatmulSpec,
        _a: DevPtr,
        _b: DevPtr,
        _c: DevPtr,
        _d: DevPtr,
        _workspace: DevPtr,
    ) -> Result<MatmulPlan, DeviceError> {
        Err(DeviceError::internal("not built"))
    }
}
