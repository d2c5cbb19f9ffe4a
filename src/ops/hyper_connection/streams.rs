//! One stream to n and back: the stack's entry, and a depth of multi-token prediction.

use super::{HyperShape, launch};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue};
use crate::ops::{ArgSpec, CpuArgs, Op, Real, tolerance};
use crate::program::DType;

/// Every stream the same x, plus its own `add`. Args: x R bf16 `[T,H]`, (add R bf16 `[T, n*H]`), out W bf16 `[T, n*H]`.
#[derive(Debug, Clone, PartialEq)]
pub struct HyperExpand {
    pub shape: HyperShape,
    pub add: bool,
}

/// Sum of the streams: the gradient of [`HyperExpand`]'s x. Args: x R bf16 `[T, n*H]`, out W bf16 `[T,H]`.
#[derive(Debug, Clone, PartialEq)]
pub struct HyperSum {
    pub shape: HyperShape,
}

impl Op for HyperExpand {
    fn name(&self) -> &'static str {
        if self.add { "hyper_expand_add" } else { "hyper_expand" }
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let mut args = vec![ArgSpec::read("x", DType::Bf16, &s.one_shape())];
        if self.add {
            args.push(ArgSpec::read("add", DType::Bf16, &s.streams_shape()));
        }
        args.push(ArgSpec::write("out", DType::Bf16, &s.streams_shape()));
        args
    }
    fn flops(&self) -> f64 {
        if self.add { self.shape.floats(self.shape.width()) } else { 0.0 }
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 2, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        launch::by_token(&self.shape, cuda, self.name(), args)
    }
}

impl Op for HyperSum {
    fn name(&self) -> &'static str {
        "hyper_sum"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        vec![
            ArgSpec::read("x", DType::Bf16, &s.streams_shape()),
            ArgSpec::write("out", DType::Bf16, &s.one_shape()),
        ]
    }
    fn flops(&self) -> f64 {
        self.shape.floats(self.shape.width())
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, self.shape.streams, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        launch::by_token(&self.shape, cuda, self.name(), args)
    }
}

impl HyperExpand {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (s, h) = (&self.shape, self.shape.hidden.max(1));
        let x = args.input(0)?;
        let add = if self.add { Some(args.input(1)?) } else { None };
        let out = args.output(1 + usize::from(self.add))?;
        for (i, out) in out.iter_mut().enumerate() {
            let one = x[i / s.width().max(1) * h + i % h];
            *out = add.map_or(one, |add| (one + add[i]).bf16());
        }
        Ok(())
    }
}

impl HyperSum {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (s, h) = (&self.shape, self.shape.hidden.max(1));
        let (x, out) = (args.input(0)?, args.output(1)?);
        for (i, out) in out.iter_mut().enumerate() {
            let of = |j: usize| x[i / h * s.width() + j * h + i % h];
            *out = (0..s.streams).map(of).sum::<T>().bf16();
        }
        Ok(())
    }
}
