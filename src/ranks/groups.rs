//! Process groups, laid out as Megatron-Core lays them out (`parallel_state.py`, order tp-cp-ep-dp-pp): a rank's number
//! counts tensor ranks fastest, then context, data and pipeline ranks; for the experts expert-tensor ranks fastest,
//! then expert, expert-data and pipeline ranks.
//!
//! The processes of a run are ranks 0.. of the modelled job. A group is *real* when all its ranks are among them: its
//! collectives then go over the wire. Any other group stays a stand-in, as in a run of one process.

use crate::config::Parallel;
use std::fmt;

/// What a group shares or splits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Parts of every layer (tp).
    Tensor,
    /// Experts (ep).
    Expert,
    /// Batches, with the same dense weights (dp x cp).
    Data,
    /// Batches, with the same experts.
    ExpertData,
    /// All processes.
    World,
}

impl Kind {
    /// Its name in rows and messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Tensor => "tp",
            Kind::Expert => "ep",
            Kind::Data => "dp",
            Kind::ExpertData => "edp",
            Kind::World => "world",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A real group of two ranks or more.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Group {
    pub kind: Kind,
    /// Ranks in the order of their places in the group.
    pub ranks: Vec<usize>,
    /// This process's place.
    pub own: usize,
}

impl Group {
    pub fn len(&self) -> usize {
        self.ranks.len()
    }
    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }
}

/// Coordinates of a process, and its real groups. The default: one process, everything else stood in for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    pub rank: usize,
    /// Coordinates in real groups, 0 in others.
    pub tp: usize,
    pub ep: usize,
    /// Place among the job's data-parallel ranks, and how many micro-batches of the job lie between two of this rank.
    /// (0, 1) for one process, which takes the first micro-batches.
    pub dp: (usize, usize),
    pub tensor: Option<Group>,
    pub expert: Option<Group>,
    pub data: Option<Group>,
    pub expert_data: Option<Group>,
    pub world: Option<Group>,
}

/// Ranks that differ from `rank` along axis `axis` alone, `rank` among them. `sizes`: of the axes, fastest first.
fn along(sizes: &[usize], axis: usize, rank: usize) -> (Vec<usize>, usize) {
    let stride: usize = sizes[..axis].iter().product();
    let own = rank / stride % sizes[axis];
    let first = rank - own * stride;
    ((0..sizes[axis]).map(|i| first + i * stride).collect(), own)
}

impl Place {
    /// The place of this process in the layout.
    pub fn of(p: &Parallel) -> Self {
        let (world, rank) = (p.world.size, p.world.rank);
        if p.world.is_one() {
            return Self { dp: (0, 1), ..Self::default() };
        }
        let job = p.tp * p.cp * p.dp * p.pp;
        let expert_data = (p.tp * p.cp * p.dp / (p.ep * p.etp).max(1)).max(1);
        let dense = [p.tp, p.cp, p.dp, p.pp];
        let experts = [p.etp, p.ep, expert_data, p.pp];
        // Of every process, or none: ranks that were stood in for some and not for others could not agree on weights.
        let real = |kind: Kind, sizes: &[usize], axis: usize| {
            let stride: usize = sizes[..axis].iter().product();
            // The last rank of a group has the highest number.
            let inside = |r: usize| r + (sizes[axis] - 1 - r / stride % sizes[axis]) * stride < world;
            let (ranks, own) = along(sizes, axis, rank);
            (ranks.len() > 1 && (0..world).all(inside)).then_some(Group { kind, ranks, own })
        };
        let tensor = real(Kind::Tensor, &dense, 0);
        let expert = real(Kind::Expert, &experts, 1);
        let data = real(Kind::Data, &dense, 2);
        let expert_data = real(Kind::ExpertData, &experts, 2).filter(|_| job == world);
        let own = |g: &Option<Group>| g.as_ref().map_or(0, |g| g.own);
        Self {
            rank,
            tp: own(&tensor),
            ep: own(&expert),
            dp: (along(&dense, 2, rank).1, p.dp),
            tensor,
            expert,
            data,
            expert_data,
            world: Some(Group { kind: Kind::World, ranks: (0..world).collect(), own: rank }),
        }
    }

    /// The real groups.
    pub fn groups(&self) -> impl Iterator<Item = &Group> {
        [&self.tensor, &self.expert, &self.data, &self.expert_data, &self.world].into_iter().flatten()
    }

    /// Number among the job's micro-batches of a step of this rank's `m`-th: data-parallel ranks take them in turn.
    pub fn micro_batch(&self, m: usize) -> usize {
        m * self.dp.1.max(1) + self.dp.0
    }

    /// Ranks whose gradients are summed: the job's data-parallel ranks where that group is real, this one otherwise.
    pub fn summed(&self) -> usize {
        self.data.as_ref().map_or(1, Group::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::World;
    use crate::workloads::testing::dense;

    fn place(tp: usize, ep: usize, dp: usize, world: usize, rank: usize) -> Place {
        let mut p = dense().parallel;
        (p.tp, p.ep, p.dp, p.world) = (tp, ep, dp, World { size: world, rank });
        Place::of(&p)
    }
    fn ranks(g: &Option<Group>) -> Option<(Vec<usize>, usize)> {
        g.as_ref().map(|g| (g.ranks.clone(), g.own))
    }

    /// Megatron's own example in `parallel_state.py`'s order: 8 ranks, tp 2, dp 4; experts over pairs of neighbours.
    #[test]
    fn groups_lie_as_megatron_lays_them() {
        let p = place(2, 2, 4, 8, 5);
        assert_eq!(ranks(&p.tensor), Some((vec![4, 5], 1)));
        assert_eq!(ranks(&p.data), Some((vec![1, 3, 5, 7], 2)));
        assert_eq!(ranks(&p.expert), Some((vec![4, 5], 1)));
        assert_eq!(ranks(&p.expert_data), Some((vec![1, 3, 5, 7], 2)));
        assert_eq!((p.tp, p.ep, p.dp, p.summed()), (1, 1, (2, 4), 4));
        assert_eq!([0, 1, 2].map(|m| p.micro_batch(m)), [2, 6, 10]);
        // Experts over four neighbours, of both tensor ranks of two data ranks.
        let p = place(2, 4, 4, 8, 6);
        assert_eq!(ranks(&p.expert), Some((vec![4, 5, 6, 7], 2)));
        assert_eq!(ranks(&p.expert_data), Some((vec![2, 6], 1)));
    }

    #[test]
    fn a_group_with_ranks_elsewhere_is_stood_in_for() {
        // Two of the sixteen ranks of tp 2, dp 8: the tensor group alone is here.
        let p = place(2, 1, 8, 2, 1);
        assert_eq!((ranks(&p.tensor), p.data.is_none(), p.summed()), (Some((vec![0, 1], 1)), true, 1));
        // Three processes hold one whole pair: none is real.
        assert!(place(2, 1, 8, 3, 0).tensor.is_none());
        // Expert pairs of data ranks 0 and 1.
        let p = place(1, 2, 16, 2, 1);
        assert_eq!((ranks(&p.expert), p.ep, p.dp), (Some((vec![0, 1], 1)), 1, (1, 16)));
        assert!(p.expert_data.is_none());
    }

    /// Every rank's group walked rank by rank would be 2^40 steps.
    #[test]
    fn the_largest_job_has_its_groups_at_once() {
        let most = 1 << 20;
        let p = place(1, 1, most, most, 3);
        assert_eq!((p.data.map(|g| (g.len(), g.own)), p.tensor), (Some((most, 3)), None));
        assert!(place(1, 1, most, most / 2, 3).data.is_none());
    }

    #[test]
    fn one_process_is_rank_0_of_everything() {
        let p = place(2, 2, 4, 1, 0);
        assert_eq!(p.groups().count(), 0);
        assert_eq!((p.tp, p.ep, p.micro_batch(3)), (0, 0, 3));
    }
}
