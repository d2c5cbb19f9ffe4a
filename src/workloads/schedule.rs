//! The order in which one pipeline stage runs its micro-batches: one forward, one backward (1F1B), plain or
//! interleaved over virtual stages (Narayanan et al., "Efficient large-scale language model training on GPU
//! clusters using Megatron-LM", SC'21, section 2.2). Warm-up counts and the order of interleaved passes are those
//! of Megatron-Core's `pipeline_parallel/schedules.py`.

use crate::config::RunConfig;
use crate::program::Pass;

/// One pass of one micro-batch through one model chunk (virtual stage) of this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// [`Pass::Forward`] or [`Pass::Backward`].
    pub pass: Pass,
    pub micro_batch: usize,
    /// 0 is the rank's first chunk; its stage in the whole model is `chunk * pp + pp_rank`.
    pub chunk: usize,
}

/// What the order depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pipeline {
    pub pp: usize,
    pub pp_rank: usize,
    /// Model chunks of a rank; 1 is plain 1F1B.
    pub vp: usize,
    pub micro_batches: usize,
    /// Micro-batches that pass a chunk one after the other before the next chunk's turn
    /// (`microbatch_group_size_per_vp_stage`); has no effect with one chunk.
    pub group: usize,
}

impl Pipeline {
    /// The pipeline of a run that has `micro_batches` a step.
    ///
    /// A group larger than that is cut to it. Megatron refuses such a job; here it is what a run of fewer
    /// micro-batches than the job has (`--max_microbatches`) leaves of each group.
    pub fn of(cfg: &RunConfig, micro_batches: usize) -> Self {
        let p = &cfg.parallel;
        let group = p.microbatch_group_size.unwrap_or(p.pp).min(micro_batches);
        Self { pp: p.pp, pp_rank: p.pp_rank, vp: p.vp, micro_batches, group }
    }

    fn chunks(&self) -> usize {
        self.vp.max(1)
    }

    /// Without a pipeline a micro-batch passes all chunks at once.
    fn group(&self) -> usize {
        if self.pp <= 1 { 1 } else { self.group.max(1) }
    }

    /// Forward passes before the first backward pass.
    pub fn warm_up(&self) -> usize {
        let after = self.pp.saturating_sub(self.pp_rank).saturating_sub(1);
        let passes = match self.chunks() {
            1 => after,
            // The stages after this one pass a group on and hand its gradients back: two passes each.
            chunks => after.saturating_mul(2).saturating_add((chunks - 1).saturating_mul(self.group())),
        };
        passes.min(self.micro_batches.saturating_mul(self.chunks()))
    }

    /// Most (micro-batch, chunk) pairs whose forward pass is done and whose backward pass is not.
    pub fn in_flight(&self) -> usize {
        let all = self.micro_batches.saturating_mul(self.chunks());
        self.warm_up().saturating_add(1).min(all)
    }

    /// (micro-batch, chunk) in the order of the forward passes: group by group, in each the chunks in order.
    fn forward(&self) -> Vec<(usize, usize)> {
        let group = self.group();
        (0..self.micro_batches)
            .step_by(group)
            .flat_map(|first| {
                let end = first.saturating_add(group).min(self.micro_batches);
                (0..self.chunks()).flat_map(move |chunk| (first..end).map(move |mb| (mb, chunk)))
            })
            .collect()
    }

    /// All passes of a step: warm-up, one forward and one backward in turn, drain.
    pub fn order(&self) -> Vec<Turn> {
        let table = self.forward();
        let forward =
            |&(micro_batch, chunk): &(usize, usize)| Turn { pass: Pass::Forward, micro_batch, chunk };
        // Backward passes follow the same table with the chunks in reverse.
        let last = self.chunks() - 1;
        let backward = |&(micro_batch, chunk): &(usize, usize)| Turn {
            pass: Pass::Backward,
            micro_batch,
            chunk: last - chunk,
        };
        let warm_up = self.warm_up().min(table.len());
        let steady = table.len() - warm_up;
        let mut turns: Vec<Turn> = table[..warm_up].iter().map(forward).collect();
        for (f, b) in table[warm_up..].iter().zip(&table) {
            turns.extend([forward(f), backward(b)]);
        }
        turns.extend(table[steady..].iter().map(backward));
        turns
    }
}

/// Activation slot of each turn: a forward pass takes the lowest free slot of its chunk, its backward pass gives it
/// back. A slot is the set of activation buffers of one (micro-batch, chunk) in flight.
pub fn slots(turns: &[Turn]) -> Vec<usize> {
    // By chunk: the micro-batch that holds each slot.
    let mut held: Vec<Vec<Option<usize>>> = Vec::new();
    let mut take = |turn: &Turn| {
        if held.len() <= turn.chunk {
            held.resize(turn.chunk + 1, Vec::new());
        }
        let slots = &mut held[turn.chunk];
        let (wanted, left) = match turn.pass {
            Pass::Backward => (Some(turn.micro_batch), None),
            _ => (None, Some(turn.micro_batch)),
        };
        let slot = slots.iter().position(|s| *s == wanted).unwrap_or(slots.len());
        if slot == slots.len() {
            slots.push(None);
        }
        slots[slot] = left;
        slot
    };
    turns.iter().map(&mut take).collect()
}

/// The order in Megatron's notation: `2` a forward pass of the second chunk, `-2` its backward pass.
pub fn notation(turns: &[Turn]) -> String {
    let word = |t: &Turn| format!("{}{}", if t.pass == Pass::Backward { "-" } else { "" }, t.chunk + 1);
    turns.iter().map(word).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn pipeline(pp: usize, vp: usize, pp_rank: usize, micro_batches: usize, group: usize) -> Pipeline {
        Pipeline { pp, pp_rank, vp, micro_batches, group }
    }

    fn micro_batches(turns: &[Turn]) -> String {
        let word = |t: &Turn| format!("{}{}", if t.pass == Pass::Forward { 'F' } else { 'B' }, t.micro_batch);
        turns.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    /// The example of the rules file, section 6: pp 2, vp 2, rank 0, group 2, 4 micro-batches.
    #[test]
    fn interleaved_example_of_the_rules_file() {
        let p = pipeline(2, 2, 0, 4, 2);
        assert_eq!(p.warm_up(), 4);
        assert_eq!(notation(&p.order()), "1 1 2 2 1 -2 1 -2 2 -1 2 -1 -2 -2 -1 -1");
        assert_eq!(micro_batches(&p.order()), "F0 F1 F0 F1 F2 B0 F3 B1 F2 B0 F3 B1 B2 B3 B2 B3");
    }

    /// The other rank of the same pipeline, by hand: it answers at once.
    #[test]
    fn interleaved_last_rank() {
        let p = pipeline(2, 2, 1, 4, 2);
        assert_eq!((p.warm_up(), p.in_flight()), (2, 3));
        assert_eq!(notation(&p.order()), "1 1 2 -2 2 -2 1 -1 1 -1 2 -2 2 -2 -1 -1");
        assert_eq!(micro_batches(&p.order()), "F0 F1 F0 B0 F1 B1 F2 B0 F3 B1 F2 B2 F3 B3 B2 B3");
    }

    /// Groups that do not divide the micro-batches: 5 in groups of 3, 5 passes of warm-up.
    #[test]
    fn a_last_group_may_be_smaller() {
        let p = pipeline(2, 2, 0, 5, 3);
        assert_eq!(p.warm_up(), 5);
        assert_eq!(notation(&p.order()), "1 1 1 2 2 2 -2 1 -2 1 -2 2 -1 2 -1 -1 -2 -2 -1 -1");
    }

    #[test]
    fn one_forward_one_backward() {
        let order = |rank| micro_batches(&pipeline(4, 1, rank, 6, 4).order());
        assert_eq!(order(0), "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5");
        assert_eq!(order(1), "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5");
        assert_eq!(order(2), "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5");
        assert_eq!(order(3), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5");
    }

    #[test]
    fn fewer_micro_batches_than_stages_are_all_warm_up() {
        assert_eq!(micro_batches(&pipeline(8, 1, 0, 2, 8).order()), "F0 F1 B0 B1");
        assert_eq!(micro_batches(&pipeline(8, 1, 6, 2, 8).order()), "F0 F1 B0 B1");
        assert_eq!(micro_batches(&pipeline(8, 1, 7, 2, 8).order()), "F0 B0 F1 B1");
        assert_eq!(notation(&pipeline(8, 2, 7, 2, 2).order()), "1 1 2 -2 2 -2 -1 -1");
    }

    #[test]
    fn one_stage_runs_each_micro_batch_there_and_back() {
        assert_eq!(micro_batches(&pipeline(1, 1, 0, 3, 1).order()), "F0 B0 F1 B1 F2 B2");
        assert_eq!(pipeline(1, 1, 0, 3, 1).in_flight(), 1);
    }

    #[test]
    fn slots_are_taken_and_given_back() {
        let of = |p: Pipeline| slots(&p.order());
        assert_eq!(
            of(pipeline(2, 1, 0, 4, 2)),
            [0, 1, 0, 0, 1, 1, 0, 1],
            "F0 F1 B0 F2 B1 F3 B2 B3 in two slots"
        );
        assert_eq!(of(pipeline(2, 1, 1, 2, 2)), [0, 0, 0, 0]);
        // 1 1 2 -2 2 -2 1 -1 1 -1 2 -2 2 -2 -1 -1: the first chunk has up to 3 in flight, the second 1.
        assert_eq!(of(pipeline(2, 2, 1, 4, 2)), [0, 1, 0, 0, 0, 0, 2, 0, 0, 1, 0, 0, 0, 0, 2, 0]);
    }

    fn any() -> impl Strategy<Value = Pipeline> {
        (0usize..9, 0usize..9, 0usize..10, 0usize..24, 0usize..12)
            .prop_map(|(pp, vp, rank, n, group)| pipeline(pp, vp, rank, n, group))
    }

    proptest! {
        /// For any numbers, those that no job has among them.
        #[test]
        fn every_pass_comes_once_and_backward_after_forward(p in any()) {
            let turns = p.order();
            prop_assert_eq!(turns.len(), 2 * p.micro_batches * p.vp.max(1));
            let mut forward = HashSet::new();
            let mut backward = HashSet::new();
            let mut most = 0;
            for t in &turns {
                let key = (t.micro_batch, t.chunk);
                prop_assert!(t.micro_batch < p.micro_batches && t.chunk < p.vp.max(1));
                if t.pass == Pass::Forward {
                    prop_assert!(forward.insert(key));
                } else {
                    prop_assert!(forward.contains(&key), "{:?} has no forward pass before it", t);
                    prop_assert!(backward.insert(key));
                }
                most = most.max(forward.len() - backward.len());
            }
            prop_assert_eq!(forward.len(), backward.len());
            prop_assert_eq!(most, p.in_flight());
            if p.vp <= 1 && p.pp_rank < p.pp {
                prop_assert_eq!(most, (p.pp - p.pp_rank).min(p.micro_batches));
            }
        }

        /// Each weight's gradients are added in the order of the micro-batches: any schedule gives the same bits.
        #[test]
        fn a_chunk_meets_its_micro_batches_in_order(p in any()) {
            for pass in [Pass::Forward, Pass::Backward] {
                for chunk in 0..p.vp.max(1) {
                    let met: Vec<usize> = p
                        .order()
                        .iter()
                        .filter(|t| t.pass == pass && t.chunk == chunk)
                        .map(|t| t.micro_batch)
                        .collect();
                    prop_assert_eq!(met, (0..p.micro_batches).collect::<Vec<_>>());
                }
            }
        }

        #[test]
        fn a_slot_has_one_holder(p in any()) {
            let turns = p.order();
            let slots = slots(&turns);
            let mut held: HashSet<(usize, usize)> = HashSet::new();
            for (t, slot) in turns.iter().zip(&slots) {
                let key = (t.chunk, *slot);
                let changed = if t.pass == Pass::Forward { held.insert(key) } else { held.remove(&key) };
                prop_assert!(changed, "{:?} in slot {}", t, slot);
            }
            prop_assert!(held.is_empty());
            for chunk in 0..p.vp.max(1) {
                let mine = turns.iter().zip(&slots).filter(|(t, _)| t.chunk == chunk);
                let (mut now, mut most) = (0usize, 0);
                for (t, _) in mine.clone() {
                    now = if t.pass == Pass::Forward { now + 1 } else { now - 1 };
                    most = most.max(now);
                }
                prop_assert_eq!(mine.map(|(_, s)| s + 1).max().unwrap_or(0), most, "no slot more than are in flight");
            }
        }

        /// Sizes from a command line do not overflow.
        #[test]
        fn counts_of_any_size_do_not_panic(pp: usize, vp: usize, rank: usize, n: usize, group: usize) {
            let p = pipeline(pp, vp, rank, n, group);
            prop_assert!(p.warm_up() <= p.in_flight());
        }
    }
}
