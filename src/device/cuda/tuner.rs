//! Choosing among cuBLASLt's algorithms by time, once per product shape, on random data of the real size, as a step runs
//! them: one behind the other in a graph, weights out of the cache, and for the last few at the power that the card draws
//! under them alone. Among equally fast ones, that with the fewest launches: a product split over k takes one more, which
//! adds up its partial sums, and a scheduler on the device a memset before each product.

use super::context::{Context, DeviceMemory, Event, Stream, copy_to_device};
use super::graph::{Capture, Instance};
use super::matmul::{Layout, MatmulSpec, Matmuls};
use super::plan::{Operands, Plan};
use super::prep::DevPtr;
use super::work::captured_alone;
use crate::device::DeviceError;
use crate::ops::rng::{normal_of, philox};
use cudarc::cublaslt::sys;
use std::rc::Rc;

/// Distinct random values; larger operands repeat them. Power draw, and so clock and time, depend on the data:
/// zeros would be measured too fast.
const PATTERN_VALUES: usize = 1 << 20;

/// Replays of one candidate's graph, after one that is not timed. The shortest counts.
const RUNS: usize = 3;
/// A graph holds so much of a product, in time, and at most so many: events tick in 0.5 us, and a product timed alone
/// between two of them looked 2 to 9 us longer than in a row (H200, 10 to 70 us), some algorithms more than others.
const GRAPH_MS: f64 = 0.5;
const MOST_IN_A_GRAPH: usize = 16;

/// Candidates that are timed in any case, and the device time of one product (its replays summed) after which no
/// further ones are: products of a few tokens get the library's whole list, those of milliseconds its first guesses, so
/// that tuning a model takes some seconds.
const FIRST_GUESSES: usize = 8;
const BUDGET_MS: f64 = 100.0;

/// Bytes, in sizes of the second-level cache, over which the operand rotates that a step finds in memory (a weight) or puts
/// there (its gradient). The other ones lie in the cache in a step too.
const CACHES_ROTATED: usize = 3;

/// Candidates this close to the fastest run on, at most so many, each alone for so long, the second half of which counts:
/// at the card's power cap the clock follows what an algorithm draws, within some 50 ms. On an H200 the order changed for
/// a third of llama3_8b's products at 8192 tokens, by up to 4 % (2.9 to 2.8 ms, 128x160 to 128x256 tiles).
const NEAR: f64 = 0.05;
const FINALISTS: usize = 3;
const SUSTAINED_MS: f64 = 120.0;
/// What one with fewer launches may be slower by then: differences between two such runs of one algorithm.
const NOISE: f64 = 0.003;
/// Part of the key of kept choices: changes when the rule of choosing does.
pub(super) const RULE: &str = "sustained, fewest launches among the fastest, 2";

/// Where a product runs that is timed.
#[derive(Debug, Clone, Copy)]
struct Call {
    operands: Operands,
    /// How often the rotating operand is there, and the distance.
    sets: usize,
    stride: usize,
    layout: Layout,
}

impl Call {
    /// Operands of the `i`th product in a row.
    fn operands(&self, i: usize) -> Operands {
        let by = (i % self.sets) * self.stride;
        match self.layout {
            Layout::Tn => {
                let d = self.operands.d.offset(by);
                Operands { c: d, d, ..self.operands }
            }
            Layout::Nt | Layout::Nn => Operands { b: self.operands.b.offset(by), ..self.operands },
        }
    }
}

/// What timing tells of a candidate.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Candidate {
    /// Place in the library's list.
    at: usize,
    ms: f64,
    /// Nodes of the product captured alone.
    launches: usize,
}

/// The fastest candidates, fastest first.
fn finalists(mut all: Vec<Candidate>) -> Vec<Candidate> {
    all.retain(|c| c.ms.is_finite());
    all.sort_by(|a, b| a.ms.total_cmp(&b.ms));
    let limit = all.first().map_or(0.0, |c| c.ms * (1.0 + NEAR));
    all.retain(|c| c.ms <= limit);
    all.truncate(FINALISTS);
    all
}

/// The one with the fewest launches of those that are as fast as the fastest.
fn chosen(all: &[Candidate]) -> Option<Candidate> {
    let fastest = all.iter().map(|c| c.ms).min_by(f64::total_cmp)?;
    let as_fast = all.iter().filter(|c| c.ms <= fastest * (1.0 + NOISE));
    as_fast.min_by(|a, b| a.launches.cmp(&b.launches).then(a.ms.total_cmp(&b.ms))).copied()
}

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

    /// Place of the best candidate; `None` when none could be measured (e.g. no room for scratch), and the library's
    /// first is as good a guess as any.
    pub fn best(
        &mut self,
        spec: &MatmulSpec,
        plan: &Plan,
        candidates: &[sys::cublasLtMatmulAlgo_t],
    ) -> Option<usize> {
        let call = self.operands(spec).ok()?;
        let (mut all, mut spent_ms) = (Vec::new(), 0.0);
        for (at, algo) in candidates.iter().enumerate() {
            if at >= FIRST_GUESSES && spent_ms > BUDGET_MS {
                break;
            }
            if let Ok((candidate, ms)) = self.screen(at, plan, algo, &call) {
                spent_ms += ms;
                all.push(candidate);
            }
        }
        let mut last = finalists(all);
        if last.len() > 1 {
            for candidate in &mut last {
                let algo = &candidates[candidate.at];
                candidate.ms = self.sustained_ms(plan, algo, &call, candidate.ms).unwrap_or(f64::NAN);
            }
            last.retain(|c| c.ms.is_finite());
        }
        chosen(&last).map(|c| c.at)
    }

    /// Frees the scratch memory.
    pub fn release(&mut self) {
        self.scratch = None;
    }

    fn operands(&mut self, spec: &MatmulSpec) -> Result<Call, DeviceError> {
        let round = |bytes: usize| bytes.next_multiple_of(512);
        let a = round(spec.batch * spec.m * spec.k * 2);
        let b = round(spec.batch * spec.k * spec.n * 2);
        let d = round(spec.batch * spec.m * spec.n * spec.out.size());
        let rotating = if spec.layout == Layout::Tn { d } else { b };
        let wanted = (CACHES_ROTATED * self.context.l2_bytes).div_ceil(rotating.max(1)).max(1);
        let fixed = a + b + d - rotating + Matmuls::WORKSPACE_BYTES;
        let need = |sets: usize| fixed + sets * rotating;
        if self.scratch.as_ref().is_none_or(|s| s.bytes < need(wanted)) {
            self.scratch = None;
            let what = "tuning of matrix products";
            // Where memory is short, in a warm cache.
            let scratch =
                self.context.alloc(need(wanted), what).or_else(|_| self.context.alloc(need(1), what))?;
            self.scratch = Some(scratch);
        }
        let (base, bytes) = self.scratch.as_ref().map(|s| (s.ptr, s.bytes)).unwrap_or_default();
        let sets = if bytes >= need(wanted) { wanted } else { 1 };
        let (b_all, d_all) = if spec.layout == Layout::Tn { (b, d * sets) } else { (b * sets, d) };
        self.fill(base, a + b_all)?;
        self.stream.fill(base.offset(a + b_all), 0, d_all)?;
        let d_ptr = base.offset(a + b_all);
        let workspace = base.offset(a + b_all + d_all);
        let operands = Operands { a: base, b: base.offset(a), c: d_ptr, d: d_ptr, workspace };
        Ok(Call { operands, sets, stride: rotating, layout: spec.layout })
    }

    fn fill(&self, dst: DevPtr, bytes: usize) -> Result<(), DeviceError> {
        for at in (0..bytes).step_by(self.pattern.bytes) {
            self.stream.copy(dst.offset(at), self.pattern.ptr, self.pattern.bytes.min(bytes - at))?;
        }
        Ok(())
    }

    /// A candidate's time in a row of its own, and the device time that finding it took.
    fn screen(
        &self,
        at: usize,
        plan: &Plan,
        algo: &sys::cublasLtMatmulAlgo_t,
        call: &Call,
    ) -> Result<(Candidate, f64), DeviceError> {
        // Once for real: the library loads its kernel.
        plan.run_with(algo, &call.operands(0), self.stream.raw)?;
        let alone_ms = self.between_events(|| plan.run_with(algo, &call.operands(0), self.stream.raw))?;
        let (row, in_a_row) = self.row(plan, algo, call, alone_ms)?;
        let (mut best_ms, mut spent_ms) = (f64::INFINITY, alone_ms);
        for run in 0..=RUNS {
            let ms = self.between_events(|| row.launch(&self.stream))?;
            spent_ms += ms;
            if run > 0 {
                best_ms = best_ms.min(ms / in_a_row as f64);
            }
        }
        let work = captured_alone(&self.stream, |s| plan.run_with(algo, &call.operands(0), s.raw))?;
        Ok((Candidate { at, ms: best_ms, launches: work.len() }, spent_ms))
    }

    /// A candidate's time in the second half of [`SUSTAINED_MS`].
    fn sustained_ms(
        &self,
        plan: &Plan,
        algo: &sys::cublasLtMatmulAlgo_t,
        call: &Call,
        one_ms: f64,
    ) -> Result<f64, DeviceError> {
        let (row, in_a_row) = self.row(plan, algo, call, one_ms)?;
        let replays = (SUSTAINED_MS / 2.0 / (one_ms * in_a_row as f64)).ceil().max(1.0) as usize;
        let half = || (0..replays).try_for_each(|_| row.launch(&self.stream));
        half()?;
        Ok(self.between_events(half)? / (replays * in_a_row) as f64)
    }

    /// A graph of one product behind the other, and how many; `one_ms`: about what one takes.
    fn row(
        &self,
        plan: &Plan,
        algo: &sys::cublasLtMatmulAlgo_t,
        call: &Call,
        one_ms: f64,
    ) -> Result<(Instance, usize), DeviceError> {
        let count = ((GRAPH_MS / one_ms.max(1e-3)).ceil() as usize).clamp(1, MOST_IN_A_GRAPH);
        let capture = Capture::begin(&self.stream)?;
        for i in 0..count {
            plan.run_with(algo, &call.operands(i), self.stream.raw)?;
        }
        Ok((Instance::new(&capture.end()?)?, count))
    }

    fn between_events(&self, work: impl FnOnce() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
        self.start.record(&self.stream)?;
        work()?;
        self.end.record(&self.stream)?;
        self.end.synchronize()?;
        self.end.since_ms(&self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(of: &[(f64, usize)]) -> Vec<Candidate> {
        of.iter().enumerate().map(|(at, &(ms, launches))| Candidate { at, ms, launches }).collect()
    }

    #[test]
    fn the_last_few_are_near_the_fastest() {
        for (of, want) in [
            (&[][..], &[][..]),
            (&[(1.0, 1)], &[0]),
            (&[(1.04, 1), (1.0, 2), (1.06, 1)], &[1, 0]),
            (&[(f64::NAN, 1), (2.0, 2)], &[1]),
            (&[(1.03, 1), (1.02, 1), (1.01, 1), (1.0, 1)], &[3, 2, 1]),
        ] {
            assert_eq!(finalists(all(of)).iter().map(|c| c.at).collect::<Vec<_>>(), want, "{of:?}");
        }
    }

    #[test]
    fn fewer_launches_win_within_the_noise_only() {
        for (of, want) in [
            (&[][..], None),
            (&[(1.0, 2), (1.002, 1)], Some(1)),
            (&[(1.0, 2), (1.004, 1)], Some(0)),
            (&[(1.001, 2), (1.0, 2)], Some(1)),
            // The fewest launches first, then the time.
            (&[(1.0, 3), (1.001, 2), (1.002, 1), (1.0015, 1)], Some(3)),
        ] {
            assert_eq!(chosen(&all(of)).map(|c| c.at), want, "{of:?}");
        }
    }

    #[test]
    fn weights_rotate_and_so_do_their_gradients() {
        let at = |n: u64| DevPtr(n << 20);
        let operands = Operands { a: at(1), b: at(2), c: at(3), d: at(3), workspace: at(4) };
        let of = |layout, i| Call { operands, sets: 3, stride: 512, layout }.operands(i);
        let forward = of(Layout::Nt, 4);
        assert_eq!((forward.a, forward.b, forward.d), (at(1), at(2).offset(512), at(3)));
        let gradient = of(Layout::Tn, 5);
        let d = at(3).offset(1024);
        assert_eq!((gradient.b, gradient.c, gradient.d), (at(2), d, d));
    }
}
