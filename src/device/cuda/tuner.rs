//! Choosing among cuBLASLt's algorithms by time, once per product shape, on random data of the real size. Among equally
//! fast ones, that with the fewest launches: a product split over k takes one more, which adds up its partial sums.

use super::context::{Context, DeviceMemory, Event, Stream, copy_to_device};
use super::counters::SLOT_BYTES;
use super::direct::Direct;
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

/// Candidates within this of the fastest are timed again, at most so many: three runs that share no clock tell 6 % apart, and
/// the clock of events ticks in 0.5 us (CUDA's documentation of `cuEventElapsedTime`), 2 to 4 % of the smallest products of
/// llama3_8b at 128 and 512 tokens.
const NEAR: f64 = 0.06;
const FINALISTS: usize = 6;
/// Rounds of the second timing that count, after some that warm up, all finalists in turns and every second round backwards:
/// under a power cap the clock moves by percents within a tenth of a second, and so moves all alike.
const ROUNDS: usize = 10;
const WARM: usize = 2;
/// From this time on a product is timed in rows: it runs at the clock that its own draw leaves, not at that of a rested chip.
/// On an H200 isolated runs chose products of 2.8 ms that were 2 to 3.5 % slower in rows.
const LONG_MS: f64 = 0.2;
/// Launches of a row, and milliseconds that it may take: the longest products are rows by themselves.
const ROW: usize = 4;
const ROW_MS: f64 = 12.0;
/// What a candidate with fewer launches may be slower: a tick, or half a per cent.
const TICK_MS: f64 = 0.0005;
const FINAL_NOISE: f64 = 0.005;
/// Part of the key of kept choices: changes when the rule of choosing does.
pub(super) const RULE: &str = "finalists in turns, long ones in rows, 3";

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
    /// Without the memset of its counter: one a launch of a row, each with a counter of its own. Empty: the library's call.
    direct: Vec<Direct>,
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

/// The fastest and what comes near it, fastest first.
fn finalists(mut all: Vec<Candidate>) -> Vec<Candidate> {
    all.retain(|c| c.ms.is_finite());
    all.sort_by(|a, b| a.ms.total_cmp(&b.ms));
    let limit = all.first().map_or(0.0, |c| c.ms * (1.0 + NEAR));
    all.into_iter().take_while(|c| c.ms <= limit).take(FINALISTS).collect()
}

/// The fastest, or the one of the fewest launches among those as fast. (The attributes of an algorithm tell its split over
/// k, but not whether a launch comes of it.)
fn choose(all: &[Candidate]) -> Option<usize> {
    let fastest = all.iter().min_by(|a, b| a.ms.total_cmp(&b.ms))?;
    let as_fast = |c: &&Candidate| c.ms <= fastest.ms + (FINAL_NOISE * fastest.ms).max(TICK_MS);
    let fewer = all.iter().filter(|c| c.launches < fastest.launches).filter(as_fast);
    let fewest = fewer.min_by(|a, b| a.launches.cmp(&b.launches).then(a.ms.total_cmp(&b.ms)));
    Some(fewest.unwrap_or(fastest).at)
}

/// The mean of the shorter half: without the outliers, and finer than the tick.
fn typical(mut ms: Vec<f64>) -> f64 {
    ms.sort_by(f64::total_cmp);
    ms.truncate(ms.len().div_ceil(2));
    ms.iter().sum::<f64>() / ms.len().max(1) as f64
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
            let ready = self.ready(plan, &candidates[at], &call, 1)?;
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
        let near = finalists(all);
        match near.len() {
            0 | 1 => near.first().map(|c| c.at),
            _ => choose(&self.in_turns(plan, candidates, near, &call).ok()?),
        }
    }

    /// The finalists with times that can be compared.
    fn in_turns(
        &self,
        plan: &Plan,
        candidates: &[sys::cublasLtMatmulAlgo_t],
        mut near: Vec<Candidate>,
        call: &Call,
    ) -> Result<Vec<Candidate>, DeviceError> {
        let longest = near.iter().map(|c| c.ms).fold(0.0, f64::max);
        let long = longest >= LONG_MS;
        let row = if long { ((ROW_MS / longest) as usize).clamp(1, ROW) } else { 1 };
        let ready = near.iter().map(|c| self.ready(plan, &candidates[c.at], call, row));
        let ready = ready.collect::<Result<Vec<_>, _>>()?;
        let mut ms = vec![Vec::with_capacity(ROUNDS); near.len()];
        for round in 0..WARM + ROUNDS {
            for at in 0..near.len() {
                let i = if round % 2 == 0 { at } else { near.len() - 1 - at };
                let one = match long {
                    false => self.run_ms(plan, &ready[i], call)?,
                    true => self.row_ms(plan, &ready[i], call, row)? / row as f64,
                };
                if round >= WARM {
                    ms[i].push(one);
                }
            }
        }
        near.iter_mut().zip(ms).for_each(|(c, ms)| c.ms = typical(ms));
        Ok(near)
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
        row: usize,
    ) -> Result<Ready<'a>, DeviceError> {
        // The library loads the code.
        plan.run_with(algo, &call.operands, self.stream.raw)?;
        let counter = |i: usize| call.operands.workspace.offset(i * SLOT_BYTES);
        let one = |i| plan.direct(algo, &call.operands, counter(i), &self.stream).transpose();
        let direct: Vec<Direct> = (0..row).filter_map(one).collect::<Result<_, _>>()?;
        let launches = match direct.is_empty() {
            false => 1,
            true => captured_alone(&self.stream, |s| plan.run_with(algo, &call.operands, s.raw))?.len(),
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
        self.row_ms(plan, ready, call, 1)
    }

    /// Milliseconds of `row` launches, one behind the other.
    fn row_ms(&self, plan: &Plan, ready: &Ready, call: &Call, row: usize) -> Result<f64, DeviceError> {
        if !ready.direct.is_empty() {
            self.stream.fill(call.operands.workspace, 0, ready.direct.len() * SLOT_BYTES)?;
        }
        self.start.record(&self.stream)?;
        for i in 0..row {
            match ready.direct.get(i) {
                Some(direct) => direct.issue(self.stream.raw)?,
                None => plan.run_with(ready.algo, &call.operands, self.stream.raw)?,
            }
        }
        self.end.record(&self.stream)?;
        self.end.synchronize()?;
        self.end.since_ms(&self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(all: &[(f64, usize)]) -> Vec<Candidate> {
        all.iter().enumerate().map(|(at, &(ms, launches))| Candidate { at, ms, launches }).collect()
    }

    #[test]
    fn what_comes_near_the_fastest_is_timed_again() {
        let places = |all: &[(f64, usize)]| finalists(list(all)).iter().map(|c| c.at).collect::<Vec<_>>();
        assert_eq!(places(&[]), [0usize; 0]);
        assert_eq!(places(&[(f64::NAN, 1), (2.0, 1)]), [1]);
        assert_eq!(places(&[(1.05, 1), (1.0, 2), (1.07, 1), (1.01, 3)]), [1, 3, 0]);
        assert_eq!(places(&[(1.0, 1); 9]).len(), FINALISTS);
    }

    /// (ms, launches) of the finalists, and the place of the chosen one.
    #[test]
    fn fewer_launches_win_among_equally_fast_ones() {
        for (all, want) in [
            (&[][..], None),
            (&[(1.0, 1)], Some(0)),
            // More launches, as many, or too slow: the fastest.
            (&[(1.0, 1), (1.001, 2)], Some(0)),
            (&[(1.001, 2), (1.0, 2)], Some(1)),
            (&[(1.0, 2), (1.006, 1)], Some(0)),
            (&[(1.0, 2), (1.004, 1)], Some(1)),
            // The fewest launches first, then the time.
            (&[(1.0, 3), (1.001, 2), (1.004, 1), (1.003, 1)], Some(3)),
            // Of short ones a tick of the clock.
            (&[(0.030, 2), (0.0304, 1)], Some(1)),
            (&[(0.030, 2), (0.0306, 1)], Some(0)),
        ] {
            assert_eq!(choose(&list(all)), want, "{all:?}");
        }
    }

    #[test]
    fn a_typical_time_has_no_outliers_and_is_finer_than_the_tick() {
        assert_eq!(typical(vec![14.0, 30.0, 14.5, 14.0, 14.5, 15.0]), (14.0 + 14.0 + 14.5) / 3.0);
        assert_eq!(typical(vec![2.0]), 2.0);
    }
}
