//! Choosing among cuBLASLt's algorithms by time, once per product shape, on random data of the real size. Among equally
//! fast ones, that with the fewest launches: a product split over k takes one more, which adds up its partial sums.

use super::context::{Context, DeviceMemory, Event, Stream, copy_to_device};
use super::direct::{COUNTER_BYTES, Direct};
use super::matmul::{MatmulSpec, Matmuls};
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

/// Timed runs of one candidate, after one that is not timed. The shortest counts.
const RUNS: usize = 3;

/// Candidates that are timed in any case, and the device time of one product (its timed runs summed) after which no
/// further ones are: products of a few tokens get the library's whole list, those of milliseconds its first guesses, so
/// that tuning a model takes about a second.
const FIRST_GUESSES: usize = 8;
const BUDGET_MS: f64 = 50.0;

/// Bytes overwritten before each run, in sizes of the second-level cache: a step finds its weights and saved
/// activations in memory, not in the cache where the run before left them.
const CACHES_OVERWRITTEN: usize = 2;

/// A candidate with fewer launches than the fastest gets a second comparison when its time is within this: the clock of
/// events ticks in 0.5 us (CUDA's documentation of `cuEventElapsedTime`), 1.3 to 2 % of the 26 to 40 us of llama3_8b's
/// smallest products at 512 tokens, and of the larger ones clocks under a power cap change by as much.
const NOISE: f64 = 0.015;
/// Runs of either in that comparison, in turns, so that both see the same clocks.
const FINAL_RUNS: usize = 10;
/// What the candidate with fewer launches may be slower by then: a tick, or for long products a third of the noise.
const TICK_MS: f64 = 0.0005;
const FINAL_NOISE: f64 = 0.005;
/// Part of the key of kept choices: changes when the rule of choosing does.
pub(super) const RULE: &str = "fewest launches among the fastest, counters zeroed apart, 2";

/// Where a product runs that is timed.
#[derive(Debug, Clone, Copy)]
struct Call {
    operands: Operands,
    a_bytes: usize,
    /// What is overwritten before each run.
    cold: (DevPtr, usize),
}

/// A candidate as a step launches it.
struct Ready<'a> {
    algo: &'a sys::cublasLtMatmulAlgo_t,
    /// Without the memset of its counter.
    direct: Option<Direct>,
    /// Nodes of the product captured alone.
    launches: usize,
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

/// The fastest candidate, and the one of the fewest launches among those within [`NOISE`] if that has fewer. (The
/// attributes of an algorithm tell its split over k, but not whether a launch comes of it.)
fn finalists(all: &[Candidate]) -> Option<(Candidate, Option<Candidate>)> {
    let fastest = *all.iter().min_by(|a, b| a.ms.total_cmp(&b.ms))?;
    let rivals = all.iter().filter(|c| c.launches < fastest.launches && c.ms <= fastest.ms * (1.0 + NOISE));
    let rival = rivals.min_by(|a, b| a.launches.cmp(&b.launches).then(a.ms.total_cmp(&b.ms)));
    Some((fastest, rival.copied()))
}

/// Whether the one with fewer launches is as fast, from the times of the second comparison.
fn as_fast(rival_ms: f64, fastest_ms: f64) -> bool {
    rival_ms <= fastest_ms + (FINAL_NOISE * fastest_ms).max(TICK_MS)
}

/// Scratch memory and clocks for timing candidates.
#[derive(Debug)]
pub(super) struct Tuner {
    context: Rc<Context>,
    stream: Stream,
    start: Event,
    end: Event,
    pattern: DeviceMemory,
    /// A, B, D, the workspace, and what is overwritten to empty the cache; grown as needed.
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
        let measure = |at: usize| -> Result<Candidate, DeviceError> {
            let ready = self.ready(plan, &candidates[at], &call)?;
            Ok(Candidate { at, ms: self.time(plan, &ready, &call)?, launches: ready.launches })
        };
        let (mut all, mut spent_ms) = (Vec::new(), 0.0);
        for at in 0..candidates.len() {
            if at >= FIRST_GUESSES && spent_ms > BUDGET_MS {
                break;
            }
            if let Ok(candidate) = measure(at) {
                spent_ms += candidate.ms * RUNS as f64;
                all.push(candidate);
            }
        }
        let (fastest, rival) = finalists(&all)?;
        let Some(rival) = rival else { return Some(fastest.at) };
        let mut ms = [f64::INFINITY; 2];
        let both = [fastest, rival].map(|of| self.ready(plan, &candidates[of.at], &call));
        for _ in 0..FINAL_RUNS {
            for (ms, of) in ms.iter_mut().zip(&both) {
                *ms = self.run_ms(plan, of.as_ref().ok()?, &call).ok()?.min(*ms);
            }
        }
        Some(if as_fast(ms[1], ms[0]) { rival.at } else { fastest.at })
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
        let (need, cold) = (a + b + d + Matmuls::WORKSPACE_BYTES, CACHES_OVERWRITTEN * self.context.l2_bytes);
        if self.scratch.as_ref().is_none_or(|s| s.bytes < need + cold) {
            self.scratch = None;
            let what = "tuning of matrix products";
            // Where memory is short, in a warm cache.
            let scratch =
                self.context.alloc(need + cold, what).or_else(|_| self.context.alloc(need, what))?;
            self.scratch = Some(scratch);
        }
        let (base, bytes) = self.scratch.as_ref().map(|s| (s.ptr, s.bytes)).unwrap_or_default();
        self.fill(base, a + b)?;
        self.stream.fill(base.offset(a + b), 0, d)?;
        let d_ptr = base.offset(a + b);
        let workspace = base.offset(a + b + d);
        Ok(Call {
            operands: Operands {
                a: base,
                b: base.offset(a),
                c: d_ptr,
                d: d_ptr,
                workspace,
                workspace_bytes: Matmuls::WORKSPACE_BYTES,
            },
            a_bytes: a,
            cold: (base.offset(need), cold.min(bytes - need)),
        })
    }

    fn fill(&self, dst: DevPtr, bytes: usize) -> Result<(), DeviceError> {
        for at in (0..bytes).step_by(self.pattern.bytes) {
            self.stream.copy(dst.offset(at), self.pattern.ptr, self.pattern.bytes.min(bytes - at))?;
        }
        Ok(())
    }

    fn ready<'a>(
        &self,
        plan: &Plan,
        algo: &'a sys::cublasLtMatmulAlgo_t,
        call: &Call,
    ) -> Result<Ready<'a>, DeviceError> {
        // The library loads the code.
        plan.run_with(algo, &call.operands, self.stream.raw)?;
        let direct = plan.direct(algo, &call.operands, call.operands.workspace, &self.stream)?;
        let launches = match &direct {
            Some(_) => 1,
            None => captured_alone(&self.stream, |s| plan.run_with(algo, &call.operands, s.raw))?.len(),
        };
        Ok(Ready { algo, direct, launches })
    }

    fn time(&self, plan: &Plan, ready: &Ready, call: &Call) -> Result<f64, DeviceError> {
        let mut best = f64::INFINITY;
        for _ in 0..RUNS {
            best = best.min(self.run_ms(plan, ready, call)?);
        }
        Ok(best)
    }

    fn run_ms(&self, plan: &Plan, ready: &Ready, call: &Call) -> Result<f64, DeviceError> {
        let (cold, bytes) = call.cold;
        self.stream.fill(cold, 0, bytes)?;
        // A is what the launches before have made, and lies in the cache in a step too.
        self.fill(call.operands.a, call.a_bytes)?;
        if ready.direct.is_some() {
            self.stream.fill(call.operands.workspace, 0, COUNTER_BYTES)?;
        }
        self.start.record(&self.stream)?;
        match &ready.direct {
            Some(direct) => direct.issue(self.stream.raw)?,
            None => plan.run_with(ready.algo, &call.operands, self.stream.raw)?,
        }
        self.end.record(&self.stream)?;
        self.end.synchronize()?;
        self.end.since_ms(&self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (ms, launches) of the candidates, and the places of the finalists.
    #[test]
    fn fewer_launches_are_a_rival_within_the_noise() {
        for (all, want) in [
            (&[][..], None),
            (&[(1.0, 1)], Some((0, None))),
            // No rival: more launches, as many, or too slow.
            (&[(1.0, 1), (1.001, 2)], Some((0, None))),
            (&[(1.001, 2), (1.0, 2)], Some((1, None))),
            (&[(1.0, 2), (1.016, 1)], Some((0, None))),
            (&[(1.0, 2), (1.014, 1)], Some((0, Some(1)))),
            // The fewest launches first, then the time.
            (&[(1.0, 3), (1.001, 2), (1.012, 1), (1.011, 1)], Some((0, Some(3)))),
            (&[(f64::NAN, 1), (2.0, 2)], Some((1, None))),
        ] {
            let all: Vec<Candidate> =
                all.iter().enumerate().map(|(at, &(ms, launches))| Candidate { at, ms, launches }).collect();
            let got = finalists(&all).map(|(fastest, rival)| (fastest.at, rival.map(|r| r.at)));
            assert_eq!(got, want, "{all:?}");
        }
    }

    #[test]
    fn a_rival_may_be_slower_by_a_tick_or_half_a_per_cent() {
        for (rival, fastest, want) in [
            (0.0304, 0.030, true),
            (0.0306, 0.030, false),
            (1.004, 1.0, true),
            (1.006, 1.0, false),
            (0.9, 1.0, true),
        ] {
            assert_eq!(as_fast(rival, fastest), want, "{rival} {fastest}");
        }
    }
}
