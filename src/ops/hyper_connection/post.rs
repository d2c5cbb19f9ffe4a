//! The sublayer's output back into the streams: x'_j = sum_i res_ij x_i + post_j out.

use super::reference::add_scaled;
use super::{HyperShape, launch};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue};
use crate::ops::{ArgSpec, CpuArgs, Op, Real, Sample, tolerance};
use crate::program::DType;
use rayon::prelude::*;

/// Args: x R bf16 `[T, n*H]`, out R bf16 `[T,H]`, maps R f32 `[T, maps]`, next W bf16 `[T, n*H]`.
#[derive(Debug, Clone, PartialEq)]
pub struct HyperPostFwd {
    pub shape: HyperShape,
}

/// Args: x R, out R, maps R (as in [`HyperPostFwd`]), dnext R bf16 `[T, n*H]`, dout W bf16 `[T,H]`, dmaps W f32 `[T, maps - n]` (of
/// post, then of res). The gradient of x is made by [`super::HyperPreBwd`].
#[derive(Debug, Clone, PartialEq)]
pub struct HyperPostBwd {
    pub shape: HyperShape,
}

fn specs(s: &HyperShape) -> Vec<ArgSpec> {
    vec![
        ArgSpec::read("x", DType::Bf16, &s.streams_shape()),
        ArgSpec::read("out", DType::Bf16, &s.one_shape()),
        // Any maps do: the formula holds for given ones.
        ArgSpec::read("maps", DType::F32, &[s.tokens, s.maps()]).sample(Sample::Uniform(0.1, 0.9)),
    ]
}

impl Op for HyperPostFwd {
    fn name(&self) -> &'static str {
        "hyper_post_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let mut args = specs(&self.shape);
        args.push(ArgSpec::write("next", DType::Bf16, &self.shape.streams_shape()));
        args
    }
    /// A multiplication and an addition for each of res and of post.
    fn flops(&self) -> f64 {
        let s = &self.shape;
        s.floats(2 * (s.streams + 1) * s.width())
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, self.shape.streams + 1, 0)
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

impl Op for HyperPostBwd {
    fn name(&self) -> &'static str {
        "hyper_post_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let s = &self.shape;
        let mut args = specs(s);
        args.push(ArgSpec::read("dnext", DType::Bf16, &s.streams_shape()));
        args.push(ArgSpec::write("dout", DType::Bf16, &s.one_shape()));
        args.push(ArgSpec::write("dmaps", DType::F32, &[s.tokens, s.later_maps()]));
        args
    }
    /// Dots of every stream and of out with every gradient, and dout.
    fn flops(&self) -> f64 {
        let s = &self.shape;
        s.floats(2 * (s.streams + 2) * s.width())
    }
    fn tolerance(&self, arg: usize) -> f64 {
        let s = &self.shape;
        if arg == 4 { tolerance(DType::Bf16, s.streams, 0) } else { tolerance(DType::F32, s.hidden, 0) }
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

impl HyperPostFwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let s = &self.shape;
        let (x, out, maps, next) = (args.input(0)?, args.input(1)?, args.input(2)?, args.output(3)?);
        let (n, h, width) = (s.streams, s.hidden.max(1), s.width().max(1));
        next.par_chunks_mut(width).enumerate().for_each(|(token, next)| {
            let (x, out) = (&x[token * width..], &out[token * h..]);
            let maps = &maps[token * s.maps()..];
            next.fill(T::of(0.0));
            for (j, next) in next.chunks_mut(h).enumerate() {
                add_scaled(next, maps[n + j], out);
                (0..n).for_each(|i| add_scaled(next, maps[(2 + i) * n + j], &x[i * h..]));
                next.iter_mut().for_each(|v| *v = v.bf16());
            }
        });
        Ok(())
    }
}

impl HyperPostBwd {
    /// Dots in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let s = &self.shape;
        let (x, out, maps, dnext) = (args.input(0)?, args.input(1)?, args.input(2)?, args.input(3)?);
        let (dout, dmaps) = (args.output(4)?, args.output(5)?);
        let (n, h, width) = (s.streams, s.hidden.max(1), s.width().max(1));
        let rows = dout.par_chunks_mut(h).zip(dmaps.par_chunks_mut(s.later_maps().max(1))).enumerate();
        rows.for_each(|(token, (dout, dmaps))| {
            let (x, out) = (&x[token * width..], &out[token * h..][..h]);
            let (maps, dnext) = (&maps[token * s.maps()..], &dnext[token * width..]);
            let dot = |a: &[T], b: &[T]| T::of(a.iter().zip(b).map(|(a, b)| (*a * *b).f64()).sum()).f32();
            dout.fill(T::of(0.0));
            for (j, d) in dnext.chunks(h).take(n).enumerate() {
                add_scaled(dout, maps[n + j], d);
                dmaps[j] = dot(d, out);
                for (i, x) in x.chunks(h).take(n).enumerate() {
                    dmaps[n + i * n + j] = dot(d, x);
                }
            }
            dout.iter_mut().for_each(|d| *d = d.bf16());
        });
        Ok(())
    }
}
