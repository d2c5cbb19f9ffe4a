//! Rows that the routers sent, dropped and padded in the last step that ran, over the rank's layers and all micro-batches:
//! as the device counted them, see [`crate::ops::moe_permute::Tally`].

use crate::device::Executor;
use crate::ops::moe_permute::Tally;
use crate::program::{BufId, Program};
use crate::workloads::TALLY;

/// Sums of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tallied {
    pub routed: u64,
    pub dropped: u64,
    pub padded: u64,
}

/// `None`: a program without routers, or a device that cannot be read.
pub fn read(program: &Program, executor: &mut dyn Executor) -> Option<Tallied> {
    let at = program.buffers.iter().position(|b| b.name == TALLY)?;
    let cells = executor.read(BufId(at as u32)).ok()?;
    let mut sums = Tallied::default();
    for line in cells.chunks_exact(Tally::COLUMNS) {
        sums.routed += line[0] as u64;
        sums.dropped += line[1] as u64;
        sums.padded += line[2] as u64;
    }
    Some(sums)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::plan;
    use crate::config::{Dispatcher, RunConfig};
    use crate::device::{Arm, cpu::CpuExecutor};
    use crate::workloads::{capacity, share::RankShare, testing};

    /// After one eager step, and the layers' buffers of it.
    fn tallied(cfg: &RunConfig) -> Tallied {
        let share = RankShare::of(cfg).unwrap();
        let program = crate::workloads::build(cfg, &share).unwrap();
        let plan = plan(program, &cfg.graph, cfg.seed).unwrap();
        let mut executor = CpuExecutor::new(plan.clone(), None, None).unwrap();
        executor.reset().unwrap();
        let step = executor.submit(Arm::Eager).unwrap();
        executor.wait(step).unwrap();
        read(&plan.eager.program, &mut executor).unwrap()
    }

    /// All choices are kept, dropped or made up for: kept + dropped = choices, kept + padded = capacity.
    #[test]
    fn rows_of_all_micro_batches_add_up() {
        for micro_batches in [1, 3] {
            let mut cfg = testing::padded();
            cfg.batch.num_microbatches = micro_batches;
            let share = RankShare::of(&cfg).unwrap();
            let (bins, capacity) = capacity(&cfg, &share).unwrap();
            let topk = cfg.model.moe.as_ref().unwrap().router_topk;
            let passes = (share.layers.len() * micro_batches) as u64;
            let found = tallied(&cfg);
            assert_eq!(found.routed, passes * (share.tokens * topk) as u64);
            assert!(found.dropped > 0);
            let kept = found.routed - found.dropped;
            assert_eq!(kept + found.padded, passes * (bins * capacity.rows) as u64);
        }
    }

    #[test]
    fn dropless_drops_and_pads_nothing() {
        let found = tallied(&testing::moe(Dispatcher::Alltoall));
        assert!(found.routed > 0);
        assert_eq!((found.dropped, found.padded), (0, 0));
    }
}
