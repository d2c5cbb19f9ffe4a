//! Choosing among cuBLASLt's algorithms by time, once per product shape, on random data of the real size.

use super::context::{Context, DeviceMemory, Event, Stream, copy_to_device};
use super::matmul::{MatmulSpec, Matmuls};
use super::plan::{Operands, Plan};
use super::prep::DevPtr;
use crate::device::DeviceError;
use crate::ops::rng::{normal_of, philox};
use cudarc::cublaslt::sys;
use std::rc::Rc;

/// Distinct random values; larger operands repeat them. Power draw, and so clock and time, depend on the data:
/// zeros would be measured too fast.
const PATTERN_VALUES: usize = 1 << 20;

/// Timed runs of one candidate, after one that is not timed. The shortest counts.
const RUNS: usize = 3;

/// Scratch memory and clocks for timing candidates.
#[derive(Debug)]
pub(super) struct Tuner {
    context: Rc<Context>,
    stream: Stream,
    start: Event,
    end: Event,
    pattern: DeviceMemory,
    /// A, B, D and the workspace; grown as needed.
    scratch: Option<DeviceMemory>,
}

impl Tuner {
    pub fn new(context: &Rc<Context>) -> Result<Self, DeviceError> {
        let values: Vec<u8> = (0..PATTERN_VALUES as u32)
            .flat_map(|i| {
                half::bf16::from_f32(normal_of(philox([i, 0, 0, 0], [0x7475, 0x6e65]))).to_le_bytes()
            })
            .collect();
        let pattern = context.alloc(values.len(), "the pattern for tuning matrix products")?;
        copy_to_device(pattern.ptr, &values)?;
        Ok(Self {
            stream: context.stream()?,
            start: context.event(true)?,
            end: context.event(true)?,
            pattern,
            scratch: None,
            context: context.clone(),
        })
    }

    /// Place of the fastest candidate; `None` when it could not be measured (e.g. no room for scratch), and the
    /// library's first is as good a guess as any.
    pub fn fastest(
        &mut self,
        spec: &MatmulSpec,
        plan: &Plan,
        candidates: &[sys::cublasLtMatmulAlgo_t],
    ) -> Option<usize> {
        let call = self.operands(spec).ok()?;
        let times = candidates.iter().enumerate();
        let measured = times.filter_map(|(i, algo)| Some((i, self.time(plan, algo, &call).ok()?)));
        measured.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(i, _)| i)
    }

    /// Frees the scratch memory.
    pub fn release(&mut self) {
        self.scratch = None;
    }

    fn operands(&mut self, spec: &MatmulSpec) -> Result<Operands, DeviceError> {
        let round = |bytes: usize| bytes.next_multiple_of(512);
        let a = round(spec.batch * spec.m * spec.k * 2);
        let b = round(spec.batch * spec.k * spec.n * 2);
        let d = round(spec.batch * spec.m * spec.n * spec.out.size());
        let need = a + b + d + Matmuls::WORKSPACE_BYTES;
        if self.scratch.as_ref().is_none_or(|s| s.bytes < need) {
            self.scratch = None;
            self.scratch = Some(self.context.alloc(need, "tuning of matrix products")?);
        }
        let base = self.scratch.as_ref().map(|s| s.ptr).unwrap_or_default();
        self.fill(base, a + b)?;
        self.stream.fill(base.offset(a + b), 0, d)?;
        let d_ptr = base.offset(a + b);
        Ok(Operands { a: base, b: base.offset(a), c: d_ptr, d: d_ptr, workspace: base.offset(a + b + d) })
    }

    fn fill(&self, dst: DevPtr, bytes: usize) -> Result<(), DeviceError> {
        for at in (0..bytes).step_by(self.pattern.bytes) {
            self.stream.copy(dst.offset(at), self.pattern.ptr, self.pattern.bytes.min(bytes - at))?;
        }
        Ok(())
    }

    fn time(
        &self,
        plan: &Plan,
        algo: &sys::cublasLtMatmulAlgo_t,
        call: &Operands,
    ) -> Result<f64, DeviceError> {
        plan.run_with(algo, call, self.stream.raw)?;
        let mut best = f64::INFINITY;
        for _ in 0..RUNS {
            self.start.record(&self.stream)?;
            plan.run_with(algo, call, self.stream.raw)?;
            self.end.record(&self.stream)?;
            self.end.synchronize()?;
            best = best.min(self.end.since_ms(&self.start)?);
        }
        Ok(best)
    }
}
