//! Measuring on the fake device: order, phases, exact statistics, faults, and rates on simulated noise.

mod card;
mod faults;
mod figures;
mod rates;
mod schedules;

use super::outcome::FinalCheck;
use super::*;
use crate::device::Health;
use crate::device::fake::{Call, FakeExecutor, Injected, Noise, Script, Times};
use crate::device::host::{ArmCosts, HostCosts};
use crate::device::inject::{Inject, Kind as Fault};
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};

/// Keeps what a sink gets; may set the interrupt flag or fail at a given number of steps.
#[derive(Default)]
struct Kept<'a> {
    steps: Vec<StepRecord>,
    interrupt_at: Option<(usize, &'a AtomicBool)>,
    fail_at: Option<usize>,
}

impl StepSink for Kept<'_> {
    fn steps(&mut self, steps: &[StepRecord]) -> std::io::Result<()> {
        self.steps.extend_from_slice(steps);
        if let Some((at, flag)) = self.interrupt_at
            && self.steps.len() >= at
        {
            flag.store(true, Ordering::Relaxed);
        }
        match self.fail_at {
            Some(at) if self.steps.len() >= at => Err(std::io::Error::other("no space left")),
            _ => Ok(()),
        }
    }
}

fn measure_on(executor: &mut dyn Executor, options: &Options) -> Outcome {
    let interrupt = AtomicBool::new(false);
    let (mut progress, mut sink) = (Silent, Kept::default());
    let outcome =
        run(executor, options, Hooks { interrupt: &interrupt, progress: &mut progress, sink: &mut sink });
    // The sink has seen every step once, in order.
    let indices = |steps: &[StepRecord]| steps.iter().map(|s| s.index).collect::<Vec<_>>();
    assert_eq!(indices(&sink.steps), (0..outcome.steps.len()).collect::<Vec<_>>());
    assert_eq!(indices(&outcome.steps), indices(&sink.steps));
    // A block is found by its number, whatever was run between.
    for block in &outcome.blocks {
        let own = |s: &&StepRecord| s.block == Some(block.number) && s.phase == Phase::Steady;
        let walls: Vec<f64> = outcome.steps.iter().filter(own).map(|s| s.wall_ms).collect();
        assert_eq!((walls.len(), stats::median(&walls)), (block.steady_steps, Some(block.wall_ms_median)));
    }
    outcome
}

fn measure_script(script: Script, options: &Options) -> Outcome {
    measure_on(&mut script.build(), options)
}

fn quick() -> Options {
    Options { max_time_s: 4.0, ..Options::default() }
}

fn run_ahead_blocks(outcome: &Outcome) -> Vec<usize> {
    outcome.blocks.iter().filter(|b| b.pacing == Pacing::RunAhead).map(|b| b.side).collect()
}

/// Host costs by arm, for the fake device, which asks for no more than a step's sum.
fn host_costs(eager_ms: f64, graph_ms: f64) -> HostCosts {
    let arm = |step_ms| ArmCosts { step_ms, ..ArmCosts::default() };
    HostCosts { eager: arm(eager_ms), graph: Some(arm(graph_ms)) }
}
