//! One op on the device, ready to be replayed: a graph of many launches over rotating buffers.

use crate::capture::{ArmPlan, RunPlan, Segment};
use crate::device::cuda::executor::{CudaExecutor, CudaOptions};
use crate::device::{Arm, DeviceError, Executor};
use crate::measure::stats;
use crate::ops::rng::philox;
use crate::ops::{Access, ArgSpec, Op, Sample};
use crate::program::builder::Builder;
use crate::program::{BufId, Init, Lifetime, memory};
use std::sync::Arc;

/// Bytes that one round of launches touches at least, so that the L2 cache (50 MiB on an H200) cannot hold them.
const PAST_L2: usize = 256 << 20;
/// Most sets of buffers that are rotated among.
const MAX_SETS: usize = 16;
/// Launches of a graph, unless there are more sets.
pub(super) const LAUNCHES: usize = 24;
/// Launches of a graph of long ones, and from how many FLOPs a launch is long: 2e11 take 0.3 ms at the 700 TFLOP/s that an H200
/// gives, and six of them are far above the clock's tick. A product's whole list is then a second's work.
const LONG_LAUNCHES: usize = 6;
const LONG_FLOPS: f64 = 2e11;
/// Replays that are not timed: the first uploads the graph.
const WARM: usize = 2;
/// Device time of replays before those that are timed, ms: until then the clock of an idle card falls to what the op's own draw leaves.
/// Without it one kernel took 35.7 and 41.6 us in two runs on an H200 (llama3_8b 512, attention backward), by what ran before.
const HEAT_MS: f64 = 200.0;
/// Replays of that at most, of ops so short that their graphs draw little.
const MOST_HEATING: usize = 200;
/// Rounds of replays that are timed, the median counts. An even number: every second round goes backwards, so that a
/// clock that drifts steadily moves every median of [`in_turns`] alike.
const ROUNDS: usize = 10;

/// A captured op.
#[derive(Debug)]
pub(super) struct Bench {
    device: CudaExecutor,
    launches: usize,
}

impl Bench {
    /// Allocates, fills, captures. `launches`: of one replay, raised to the number of buffer sets.
    pub fn open(op: &Arc<dyn Op>, options: &CudaOptions, launches: usize) -> Result<Self, DeviceError> {
        let specs = op.args();
        let bytes: usize = specs.iter().map(|s| s.bytes()).sum();
        let sets = PAST_L2.div_ceil(bytes.max(1)).clamp(1, MAX_SETS);
        let launches = if op.flops() < LONG_FLOPS { launches } else { launches.min(LONG_LAUNCHES) };
        let launches = launches.max(sets);
        let mut b = Builder::default();
        let buffers: Vec<Vec<BufId>> = (0..sets)
            .map(|set| {
                let one = |(i, s): (usize, &ArgSpec)| {
                    let init = if s.dtype.is_float() && s.access != Access::Write {
                        Init::Normal { std: 1.0 }
                    } else {
                        Init::Const { value: 0.0 }
                    };
                    b.buffer(&format!("set{set}.arg{i}"), s.dtype, &s.shape, Lifetime::StepState, init)
                };
                specs.iter().enumerate().map(one).collect()
            })
            .collect();
        for i in 0..launches {
            b.launch_shared(op.clone(), &buffers[i % sets]);
        }
        let program = Arc::new(b.finish().map_err(DeviceError::internal)?);
        let arm = |graph: Option<usize>| {
            let segments = vec![Segment { launches: 0..launches, graph, label: op.name().into() }];
            ArmPlan {
                program: program.clone(),
                segments,
                memory: memory::plan(&program, &vec![graph.is_some(); launches]),
            }
        };
        let plan = RunPlan { eager: arm(None), graph: Some(arm(Some(0))), seed: 1 };
        let mut device = CudaExecutor::new(&plan, options.clone())?;
        device.reset()?;
        // Floats come from the device; indices and offsets need the op's own structure.
        for (i, s) in
            specs.iter().enumerate().filter(|(_, s)| !s.dtype.is_float() && s.access != Access::Write)
        {
            let values = integers(&**op, i, s);
            for set in &buffers {
                device.write_buffer(set[i], &values)?;
            }
        }
        let step = device.submit(Arm::Eager)?;
        device.wait(step)?;
        device.capture()?;
        Ok(Self { device, launches })
    }

    /// Which kernels compute attention, if the op is one.
    pub fn attention(&self) -> Option<String> {
        self.device.info().attention_backend
    }

    /// Microseconds of one launch, over one replay.
    pub fn replay(&mut self) -> Result<f64, DeviceError> {
        let step = self.device.submit(Arm::Graph)?;
        let ms = self.device.wait(step)?.device_span_ms;
        let ms = ms.ok_or_else(|| DeviceError::internal("a replay was not timed"))?;
        Ok(ms * 1e3 / self.launches as f64)
    }

    /// Median microseconds of one launch.
    pub fn time(&mut self) -> Result<f64, DeviceError> {
        self.heat()?;
        medians(1, |_| self.replay()).map(|m| m[0])
    }

    /// Replays until the card is as warm as the op makes it.
    pub fn heat(&mut self) -> Result<(), DeviceError> {
        let mut ms = 0.0;
        for _ in 0..MOST_HEATING {
            ms += self.replay()? * self.launches as f64 / 1e3;
            if ms >= HEAT_MS {
                break;
            }
        }
        Ok(())
    }

    /// The shortest of a few replays: to tell the slow from the fast.
    pub fn glance(&mut self) -> Result<f64, DeviceError> {
        (0..WARM).try_fold(f64::INFINITY, |best, _| Ok(self.replay()?.min(best)))
    }
}

/// Median microseconds of one launch of each, replayed in turns: a power cap moves the clock by percents within a tenth
/// of a second, which one after the other would be taken for a difference of the ops.
pub(super) fn in_turns(benches: &mut [Bench]) -> Result<Vec<f64>, DeviceError> {
    if let Some(first) = benches.first_mut() {
        first.heat()?;
    }
    medians(benches.len(), |i| benches[i].replay())
}

/// [`in_turns`] of `n`, whatever is replayed.
fn medians(
    n: usize,
    mut replay: impl FnMut(usize) -> Result<f64, DeviceError>,
) -> Result<Vec<f64>, DeviceError> {
    let mut all = vec![Vec::with_capacity(ROUNDS); n];
    for round in 0..WARM + ROUNDS {
        for at in 0..n {
            let i = if round % 2 == 0 { at } else { n - 1 - at };
            let us = replay(i)?;
            if round >= WARM {
                all[i].push(us);
            }
        }
    }
    let none = || DeviceError::internal("no replay was timed");
    all.iter().map(|us| stats::median(us).ok_or_else(none)).collect()
}

/// Values of an integer input. Rows are shared evenly among experts, so that no row is padding.
fn integers(op: &dyn Op, arg: usize, spec: &ArgSpec) -> Vec<f64> {
    if spec.name == "offsets" {
        let rows =
            op.args().iter().find(|a| a.dtype == crate::program::DType::Bf16).map_or(0, |a| a.shape[0]);
        let experts = spec.len() - 1;
        return (0..=experts).map(|e| (e * rows / experts.max(1)) as f64).collect();
    }
    if let Sample::Below(n) = spec.sample {
        let word = |i: usize| philox([i as u32, arg as u32, 0, 0], [11, 0])[0];
        return (0..spec.len()).map(|i| (word(i) % n.max(1)) as f64).collect();
    }
    let custom = op.sample(11).and_then(|mut all| (arg < all.len()).then(|| all.swap_remove(arg)));
    custom.filter(|v| v.len() == spec.len()).unwrap_or_else(|| vec![0.0; spec.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_drift_moves_every_median_alike() {
        let mut calls = 0.0;
        let found = medians(7, |_| {
            calls += 1.0;
            Ok(100.0 + calls)
        });
        let found = found.unwrap();
        assert!(found.iter().all(|us| *us == found[0]), "{found:?}");
        // One that is slower stays so by as much.
        let slower = medians(7, |i| {
            calls += 1.0;
            Ok(100.0 + calls + if i == 3 { 5.0 } else { 0.0 })
        });
        let slower = slower.unwrap();
        assert_eq!(slower[3] - slower[2], 5.0);
    }

    #[test]
    fn a_replay_that_fails_ends_it() {
        let failing = |i| if i == 1 { Err(DeviceError::internal("no")) } else { Ok(1.0) };
        assert!(medians(2, failing).is_err());
    }
}
