//! The RNG tracker's named states: which ranks draw the same numbers and which draw their own.
//!
//! A launch that draws carries the seed offset of one state, which [`crate::ops::rng`] adds to the seed in the step words;
//! the seed therefore stays a device word, and a graph draws what the eager arm draws.
//!
//! | drawn | state |
//! |---|---|
//! | hidden dropout of rows that all tensor ranks hold | data-parallel: their copies must stay alike |
//! | hidden dropout of rows split by sequence parallelism | model-parallel: every tensor rank has rows of its own |
//! | attention-core dropout | model-parallel: every tensor rank has heads of its own |
//! | forced routing | data-parallel: tensor ranks must route a token alike, however many they are |
//! | in the experts | expert-parallel: nothing draws there, nor does upstream in a step, only when it initialises weights |
//!
//! Upstream forces routing with a generator apart from the tracker's, seeded by global rank; here the token's index in
//! the whole micro-batch is part of the counter in place of the rank.
//!
//! Data-parallel ranks have the same seeds, as upstream; here the job's number of the micro-batch is part of the counter, so
//! they draw apart all the same. Initial weights are drawn from no state: they depend on seed, name and global index alone
//! ([`crate::program::Init::Normal`]), so that every layout of ranks cuts its parts out of the same tensors and can be
//! checked against one rank. Seeds by rank, as upstream has them, would give each layout another model.

use crate::config::Parallel;
use crate::ranks::groups::Place;
use serde::Serialize;

// Seeds as of Megatron-Core: `tensor_parallel/random.py`, `model_parallel_cuda_manual_seed`, and the training loop's
// `_set_random_seed` for the pipeline rank.

/// Model-parallel state of tensor rank 0; rank r has r more.
const MODEL_PARALLEL: u32 = 2718;
/// Expert-parallel state of expert rank 0 and expert-tensor rank 0; expert-tensor rank r has r more.
const EXPERT_PARALLEL: u32 = 1024;
/// Expert-parallel state, for each expert rank.
const EACH_EXPERT_RANK: u32 = 100;
/// All states, for each pipeline rank.
const EACH_PIPELINE_RANK: u32 = 100;

/// Offset of what stands for a data set or for another stage: tokens, images, videos, received activations. No state: every
/// stage and every rank must see the same batch.
pub const INPUTS: u32 = 0;

/// A named state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Upstream's default generator: alike on all tensor and expert ranks of a stage.
    DataParallel,
    /// Of each tensor rank.
    ModelParallel,
    /// Of each expert rank and expert-tensor rank.
    ExpertParallel,
}

impl State {
    pub const ALL: [State; 3] = [State::DataParallel, State::ModelParallel, State::ExpertParallel];

    /// Its name for a person.
    pub fn name(self) -> &'static str {
        match self {
            State::DataParallel => "data-parallel",
            State::ModelParallel => "model-parallel",
            State::ExpertParallel => "expert-parallel",
        }
    }
}

/// The states of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tracker {
    pub tp_rank: usize,
    pub pp_rank: usize,
    pub ep_rank: usize,
    /// Place among the ranks that share an expert.
    pub etp_rank: usize,
}

impl Tracker {
    /// Of the rank at `place`. Expert-tensor rank 0: processes do not share experts (`docs/ranks.md`), and one process is rank
    /// 0 of its groups.
    pub fn of(p: &Parallel, place: &Place) -> Self {
        Self { tp_rank: place.tp, pp_rank: p.pp_rank, ep_rank: place.ep, etp_rank: 0 }
    }

    /// What `state` adds to the seed.
    pub fn seed_offset(self, state: State) -> u32 {
        let [tp, pp, ep, etp] =
            [self.tp_rank, self.pp_rank, self.ep_rank, self.etp_rank].map(|rank| rank as u32);
        EACH_PIPELINE_RANK * pp
            + match state {
                State::DataParallel => 0,
                State::ModelParallel => MODEL_PARALLEL + tp,
                State::ExpertParallel => EXPERT_PARALLEL + EACH_EXPERT_RANK * ep + etp,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Dispatcher, RunConfig, World};
    use crate::ops::rng::Rng;
    use crate::ops::testing::{inputs, run_f64};
    use crate::workloads::testing::{dense, moe, program, staged};
    use std::collections::HashSet;

    /// Data-, model-, expert-parallel.
    fn offsets(tp_rank: usize, pp_rank: usize, ep_rank: usize, etp_rank: usize) -> [u32; 3] {
        State::ALL.map(|s| Tracker { tp_rank, pp_rank, ep_rank, etp_rank }.seed_offset(s))
    }

    #[test]
    fn seeds_are_upstreams() {
        assert_eq!(offsets(0, 0, 0, 0), [0, 2718, 1024]);
        assert_eq!(offsets(1, 0, 0, 0), [0, 2719, 1024]);
        assert_eq!(offsets(0, 1, 0, 0), [100, 2818, 1124]);
        assert_eq!(offsets(3, 2, 5, 1), [200, 2921, 1725]);
        for rank in 0..256 {
            // 4 stages of 8 tensor ranks and of 32 expert ranks of 2 expert-tensor ranks.
            let states = offsets(rank % 8, rank / 64, rank / 2 % 32, rank % 2);
            assert_eq!(HashSet::from(states).len(), State::ALL.len(), "rank {rank}: {states:?}");
        }
    }

    #[test]
    fn a_rank_has_the_seeds_of_its_place() {
        let mut cfg = moe(Dispatcher::Alltoall);
        (cfg.parallel.tp, cfg.parallel.ep, cfg.parallel.dp) = (2, 2, 2);
        let of = |p: &Parallel| {
            let tracker = Tracker::of(p, &Place::of(p));
            State::ALL.map(|s| tracker.seed_offset(s))
        };
        // One process is rank 0 of all groups, whatever their size, but of the stage that is asked for.
        assert_eq!(of(&cfg.parallel), [0, 2718, 1024]);
        let stage = staged(cfg.clone(), 2, 1, 1, 2).parallel;
        assert_eq!(of(&stage), [100, 2818, 1124]);
        // tp-ep-dp order for tensor ranks, ep within the same four for experts.
        let expected = [[0, 2718, 1024], [0, 2719, 1124], [0, 2718, 1024], [0, 2719, 1124]];
        for (rank, expected) in expected.into_iter().enumerate() {
            cfg.parallel.world = World { size: 4, rank };
            assert_eq!(of(&cfg.parallel), expected, "rank {rank}");
        }
    }

    /// No op of a step draws from it; it serves one that would.
    #[test]
    fn the_expert_parallel_state_draws_by_expert_rank() {
        let words = [1234, 0, 3, 1, 0, 0, 0, 0];
        let of = |tp_rank, ep_rank, etp_rank| {
            let tracker = Tracker { tp_rank, pp_rank: 0, ep_rank, etp_rank };
            Rng { seed_offset: tracker.seed_offset(State::ExpertParallel), draw: 7 }.draw4(&words, 0)
        };
        assert_eq!(of(0, 1, 0), of(1, 1, 0));
        assert_ne!(of(0, 0, 0), of(0, 1, 0));
        assert_ne!(of(0, 1, 0), of(0, 1, 1));
    }

    /// Whether both tensor ranks make the same of the same inputs, at each of `places` places of the step that run `op`.
    fn alike(cfg: &RunConfig, op: &str, places: usize) -> Vec<bool> {
        let [first, second] = [0, 1].map(|rank| {
            let mut cfg = cfg.clone();
            cfg.parallel.world = World { size: 2, rank };
            let program = program(&cfg);
            let launches = program.launches.iter().filter(|l| l.op.name() == op);
            launches.map(|l| run_f64(&*l.op, &inputs(&*l.op, 5))).collect::<Vec<_>>()
        });
        assert_eq!((first.len(), second.len()), (places, places), "{op}");
        first.iter().zip(&second).map(|(a, b)| a == b).collect()
    }

    #[test]
    fn tensor_ranks_drop_alike_what_they_hold_alike() {
        for sequence_parallel in [false, true] {
            let mut cfg = dense();
            (cfg.parallel.tp, cfg.parallel.sequence_parallel) = (2, sequence_parallel);
            cfg.identity.num_gpus = 2;
            // Two layers of two parts, two micro-batches.
            let (hidden, attention) =
                (["dropout_add_fwd", "dropout_bwd"], ["attention_fwd", "attention_bwd"]);
            for op in attention {
                assert_eq!(alike(&cfg, op, 4), [true; 4], "{op} without dropout");
            }
            (cfg.model.hidden_dropout, cfg.model.attention_dropout) = (0.25, 0.25);
            for op in hidden {
                assert_eq!(alike(&cfg, op, 8), [!sequence_parallel; 8], "{op}");
            }
            for op in attention {
                assert_eq!(alike(&cfg, op, 4), [false; 4], "{op}");
            }
        }
    }
}
