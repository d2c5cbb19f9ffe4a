//! Rows that a capacity factor dropped, and rows that it padded: counted on the host after a run, from the router's counts
//! of the last micro-batch that ran. Nothing is added to the step.

use crate::config::RunConfig;
use crate::device::Executor;
use crate::program::{BufId, Lifetime, Program};
use crate::workloads::{capacity, share::RankShare};

/// Tokens per expert that the router of a layer leaves.
const COUNTS: &str = ".moe.counts";

/// Whether there is something to count: tokens may be dropped, and one activation slot holds each layer's counts.
fn counted(cfg: &RunConfig) -> bool {
    let capacity = cfg.model.moe.as_ref().is_some_and(|m| m.capacity_factor.is_some());
    capacity && cfg.parallel.pp == 1 && !cfg.stack_only
}

/// Lets the counts outlive the step.
pub fn keep(cfg: &RunConfig, program: &mut Program) {
    if counted(cfg) {
        for b in program.buffers.iter_mut().filter(|b| b.name.ends_with(COUNTS)) {
            b.lifetime = Lifetime::StepState;
        }
    }
}

/// (dropped, padded) rows of the last micro-batch, over the rank's layers; `None`: nothing to count, or the device
/// cannot be read.
pub fn count(cfg: &RunConfig, program: &Program, executor: &mut dyn Executor) -> Option<(u64, u64)> {
    if !counted(cfg) {
        return None;
    }
    let (bins, capacity) = capacity(cfg, &RankShare::of(cfg).ok()?)?;
    let (mut dropped, mut padded) = (0, 0);
    for i in (0..program.buffers.len()).filter(|i| program.buffers[*i].name.ends_with(COUNTS)) {
        let counts = executor.read(BufId(i as u32)).ok()?;
        let (over, under) = beyond(&counts, bins, capacity.rows);
        dropped += over;
        padded += if capacity.padded { under } else { 0 };
    }
    Some((dropped, padded))
}

/// Rows over the capacity of the bins, and rows that they are short of it. Expert e is in bin e modulo `bins`.
fn beyond(counts: &[f32], bins: usize, capacity: usize) -> (u64, u64) {
    let mut of_bin = vec![0u64; bins];
    counts.iter().enumerate().for_each(|(e, n)| of_bin[e % bins] += *n as u64);
    let capacity = capacity as u64;
    let sum = |rows: fn(u64, u64) -> u64| -> u64 { of_bin.iter().map(|n| rows(*n, capacity)).sum() };
    (sum(|n, c| n.saturating_sub(c)), sum(|n, c| c.saturating_sub(n)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::plan;
    use crate::device::{Arm, cpu::CpuExecutor};
    use crate::workloads::testing::padded;

    #[test]
    fn bins_are_compared_with_the_capacity() {
        assert_eq!(beyond(&[5.0, 1.0, 3.0, 0.0], 4, 3), (2, 5));
        assert_eq!(beyond(&[5.0, 1.0, 3.0, 0.0], 2, 3), (5, 2));
    }

    /// All choices are kept, dropped or made up for: kept + dropped = choices, kept + padded = capacity.
    #[test]
    fn rows_of_a_run_add_up() {
        let cfg = padded();
        let share = RankShare::of(&cfg).unwrap();
        let mut program = crate::workloads::build(&cfg, &share).unwrap();
        keep(&cfg, &mut program);
        let plan = plan(program, &cfg.graph, cfg.seed).unwrap();
        let mut executor = CpuExecutor::new(plan.clone(), None, None).unwrap();
        executor.reset().unwrap();
        let step = executor.submit(Arm::Eager).unwrap();
        executor.wait(step).unwrap();
        let (dropped, padded) = count(&cfg, &plan.eager.program, &mut executor).unwrap();
        let (bins, capacity) = capacity(&cfg, &share).unwrap();
        let (layers, topk) = (share.layers.len(), cfg.model.moe.as_ref().unwrap().router_topk);
        let choices = (layers * share.tokens * topk) as u64;
        assert!(dropped > 0);
        assert_eq!(choices - dropped, (layers * bins * capacity.rows) as u64 - padded);
    }
}
