//! Building an operation graph: tensors in a list, operations that name them.

use super::descriptor::{Descriptor, Kind, Name};
use super::error::CudnnError;
use cudarc::cudnn::sys;

pub(super) use sys::cudnnDataType_t as Data;
pub(super) use sys::cudnnPointwiseMode_t as Mode;
pub(super) use sys::cudnnReduceTensorOp_t as Reduce;

/// Batch, head, row, column.
pub(super) type Dims = [i64; 4];

/// Alignment that every tensor promises, bytes: the fused engines load 16 bytes at a time.
pub(super) const ALIGNMENT_BYTES: u64 = 16;

/// Unique ids of tensors that the caller does not name start here.
const FIRST_INNER_UID: i64 = 1000;

/// A tensor of a [`GraphBuilder`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tensor(usize);

/// Lengths that bound a product's extents (`[batch]` integers on the device): for sequences that do not fill
/// the kernel's tiles.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Bounds {
    pub m: Option<Tensor>,
    pub n: Option<Tensor>,
    pub k: Option<Tensor>,
}

/// Row-major strides.
pub(super) fn packed(dims: Dims) -> Dims {
    [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1]
}

/// Rows and columns exchanged.
pub(super) fn transposed([b, h, r, c]: Dims) -> Dims {
    [b, h, c, r]
}

#[derive(Debug)]
struct Known {
    descriptor: Descriptor,
    dims: Dims,
    strides: Dims,
}

/// An operation graph under construction.
#[derive(Debug)]
pub(super) struct GraphBuilder {
    title: &'static str,
    tensors: Vec<Known>,
    operations: Vec<Descriptor>,
    /// Matmul, pointwise and reduction descriptors that operations refer to.
    parts: Vec<Descriptor>,
    /// Numbers handed over at each launch, by unique id.
    scalars: Vec<(i64, f32)>,
}

/// A finalized graph and all that it refers to.
#[derive(Debug)]
pub(super) struct OperationGraph {
    pub descriptor: Descriptor,
    pub scalars: Vec<(i64, f32)>,
    _held: Vec<Descriptor>,
}

impl GraphBuilder {
    pub fn new(title: &'static str) -> Self {
        Self { title, tensors: Vec::new(), operations: Vec::new(), parts: Vec::new(), scalars: Vec::new() }
    }

    fn tensor(
        &mut self,
        uid: i64,
        name: &str,
        data: Data,
        dims: Dims,
        strides: Dims,
        flag: Option<Name>,
    ) -> Result<Tensor, CudnnError> {
        let label = format!("{} tensor {name} {dims:?} strides {strides:?} {data:?}", self.title);
        let d = Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR, label)?;
        d.set(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, &[data])?;
        d.set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, &dims)?;
        d.set(Name::CUDNN_ATTR_TENSOR_STRIDES, &strides)?;
        d.set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[uid])?;
        d.set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[ALIGNMENT_BYTES as i64])?;
        if let Some(flag) = flag {
            d.set(flag, &[true])?;
        }
        d.finalize()?;
        self.tensors.push(Known { descriptor: d, dims, strides });
        Ok(Tensor(self.tensors.len() - 1))
    }

    fn next_uid(&self) -> i64 {
        FIRST_INNER_UID + self.tensors.len() as i64
    }

    /// A tensor in device memory, whose address a launch gives under `uid`.
    pub fn outer(
        &mut self,
        uid: i64,
        name: &str,
        data: Data,
        dims: Dims,
        strides: Dims,
    ) -> Result<Tensor, CudnnError> {
        self.tensor(uid, name, data, dims, strides, None)
    }

    /// A tensor that never leaves the kernel.
    pub fn inner(&mut self, name: &str, data: Data, dims: Dims, strides: Dims) -> Result<Tensor, CudnnError> {
        self.tensor(self.next_uid(), name, data, dims, strides, Some(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL))
    }

    /// A number that is read on the host at each launch.
    pub fn scalar(&mut self, name: &str, value: f32) -> Result<Tensor, CudnnError> {
        let uid = self.next_uid();
        self.scalars.push((uid, value));
        let flag = Some(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE);
        self.tensor(uid, name, Data::CUDNN_DATA_FLOAT, [1; 4], [1; 4], flag)
    }

    pub fn dims(&self, t: Tensor) -> Dims {
        self.tensors[t.0].dims
    }

    fn of(&self, t: Tensor) -> &Descriptor {
        &self.tensors[t.0].descriptor
    }

    /// out = a b, fp32 accumulation. Heads of b may divide those of a.
    pub fn matmul(&mut self, a: Tensor, b: Tensor, out: Tensor, bounds: Bounds) -> Result<(), CudnnError> {
        let label = format!("{} matmul {}", self.title, self.operations.len());
        let part = Descriptor::new(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR, label.clone())?;
        part.set(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, &[Data::CUDNN_DATA_FLOAT])?;
        part.finalize()?;
        let op =
            Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, format!("{label} operation"))?;
        op.set_descriptor(Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, self.of(a))?;
        op.set_descriptor(Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, self.of(b))?;
        op.set_descriptor(Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, self.of(out))?;
        op.set_descriptor(Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, &part)?;
        for (name, bound) in [
            (Name::CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, bounds.m),
            (Name::CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, bounds.n),
            (Name::CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, bounds.k),
        ] {
            if let Some(bound) = bound {
                op.set_descriptor(name, self.of(bound))?;
            }
        }
        op.finalize()?;
        self.parts.push(part);
        self.operations.push(op);
        Ok(())
    }

    /// out = mode(x, b, select). `math` is the type computed in; `axis` belongs to index generation.
    fn pointwise(
        &mut self,
        mode: Mode,
        math: Data,
        axis: Option<i64>,
        inputs: &[Tensor],
        out: Tensor,
    ) -> Result<(), CudnnError> {
        let label = format!("{} {mode:?} {}", self.title, self.operations.len());
        let part = Descriptor::new(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR, label.clone())?;
        part.set(Name::CUDNN_ATTR_POINTWISE_MODE, &[mode])?;
        part.set(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, &[math])?;
        if let Some(axis) = axis {
            part.set(Name::CUDNN_ATTR_POINTWISE_AXIS, &[axis])?;
        }
        part.finalize()?;
        let op = Descriptor::new(
            Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
            format!("{label} operation"),
        )?;
        op.set_descriptor(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &part)?;
        let ports = [
            Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
        ];
        for (port, input) in ports.into_iter().zip(inputs) {
            op.set_descriptor(port, self.of(*input))?;
        }
        op.set_descriptor(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, self.of(out))?;
        op.set(Name::CUDNN_ATTR_OPERATION_POINTWISE_ALPHA1, &[1f32])?;
        op.set(Name::CUDNN_ATTR_OPERATION_POINTWISE_ALPHA2, &[1f32])?;
        op.finalize()?;
        self.parts.push(part);
        self.operations.push(op);
        Ok(())
    }

    /// A new fp32 tensor of the first input's shape: `mode` of one or two tensors.
    pub fn map(&mut self, name: &str, mode: Mode, inputs: &[Tensor]) -> Result<Tensor, CudnnError> {
        let dims = inputs.first().map_or([1; 4], |t| self.dims(*t));
        let out = self.inner(name, Data::CUDNN_DATA_FLOAT, dims, packed(dims))?;
        self.map_into(mode, inputs, out)?;
        Ok(out)
    }

    /// As [`Self::map`], into a given tensor.
    pub fn map_into(&mut self, mode: Mode, inputs: &[Tensor], out: Tensor) -> Result<(), CudnnError> {
        self.pointwise(mode, Data::CUDNN_DATA_FLOAT, None, inputs, out)
    }

    /// Integers: the place along `axis` of every element of `like`.
    pub fn index(&mut self, name: &str, math: Data, like: Tensor, axis: i64) -> Result<Tensor, CudnnError> {
        let dims = self.dims(like);
        let out = self.inner(name, Data::CUDNN_DATA_INT32, dims, packed(dims))?;
        self.pointwise(Mode::CUDNN_POINTWISE_GEN_INDEX, math, Some(axis), &[like], out)?;
        Ok(out)
    }

    /// Truth values of a comparison or of logic, of the first input's shape.
    pub fn test(&mut self, name: &str, mode: Mode, a: Tensor, b: Tensor) -> Result<Tensor, CudnnError> {
        let dims = self.dims(a);
        let out = self.inner(name, Data::CUDNN_DATA_BOOLEAN, dims, packed(dims))?;
        self.pointwise(mode, Data::CUDNN_DATA_BOOLEAN, None, &[a, b], out)?;
        Ok(out)
    }

    /// `yes` where `truth` holds, else `no`.
    pub fn select(
        &mut self,
        name: &str,
        yes: Tensor,
        no: Tensor,
        truth: Tensor,
    ) -> Result<Tensor, CudnnError> {
        self.map(name, Mode::CUDNN_POINTWISE_BINARY_SELECT, &[yes, no, truth])
    }

    /// Reduces the extents that are smaller in `out`.
    pub fn reduce(&mut self, operator: Reduce, x: Tensor, out: Tensor) -> Result<(), CudnnError> {
        let label = format!("{} {operator:?} {}", self.title, self.operations.len());
        let part = Descriptor::new(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR, label.clone())?;
        part.set(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, &[Data::CUDNN_DATA_FLOAT])?;
        part.set(Name::CUDNN_ATTR_REDUCTION_OPERATOR, &[operator])?;
        part.finalize()?;
        let op = Descriptor::new(
            Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
            format!("{label} operation"),
        )?;
        op.set_descriptor(Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, &part)?;
        op.set_descriptor(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, self.of(x))?;
        op.set_descriptor(Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, self.of(out))?;
        op.finalize()?;
        self.parts.push(part);
        self.operations.push(op);
        Ok(())
    }

    /// The transposed view of `x`, as `data` (rounded when narrower).
    pub fn transpose(&mut self, name: &str, data: Data, x: Tensor) -> Result<Tensor, CudnnError> {
        let strides = transposed(self.tensors[x.0].strides);
        let out = self.inner(name, data, transposed(self.dims(x)), strides)?;
        let label = format!("{} reshape {}", self.title, self.operations.len());
        let op = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, label)?;
        op.set_descriptor(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, self.of(x))?;
        op.set_descriptor(Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, self.of(out))?;
        op.finalize()?;
        self.operations.push(op);
        Ok(out)
    }

    /// Finalizes the graph. `handle`: for a device; `None` to plan without one.
    pub fn finish(self, handle: Option<sys::cudnnHandle_t>) -> Result<OperationGraph, CudnnError> {
        let label = format!("{} operation graph of {} operations", self.title, self.operations.len());
        let d = Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, label)?;
        let all: Vec<&Descriptor> = self.operations.iter().collect();
        d.set_descriptors(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &all)?;
        if let Some(handle) = handle {
            d.set(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, &[handle])?;
        }
        d.finalize()?;
        let mut held = self.operations;
        held.extend(self.parts);
        held.extend(self.tensors.into_iter().map(|t| t.descriptor));
        Ok(OperationGraph { descriptor: d, scalars: self.scalars, _held: held })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_of_a_packed_tensor() {
        assert_eq!(packed([2, 3, 5, 7]), [105, 35, 7, 1]);
        assert_eq!(transposed([2, 3, 5, 7]), [2, 3, 7, 5]);
    }
}
