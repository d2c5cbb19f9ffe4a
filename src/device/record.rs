//! What a profiling pass brings home: the calls of one step, what each launch is known to put on the device, and the
//! device's own record of what ran. Matching one with the other is [`crate::profile`]'s.

use std::sync::Arc;

/// Something that takes device time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    Kernel,
    Copy,
    Set,
}

/// One unit of work as a launch list and a record name it alike.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Unit {
    pub kind: Kind,
    /// Of a kernel as the driver names it; of the others [`COPY`] or [`SET`].
    pub name: Arc<str>,
    /// All 0 for copies and memsets, and where there is none.
    pub grid: [u32; 3],
    pub block: [u32; 3],
}

/// Names of what is no kernel.
pub const COPY: &str = "memcpy";
pub const SET: &str = "memset";

/// One call of the host in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    /// A launch by its index in the arm's program, issued alone.
    Launch(usize),
    /// The graph of a segment by its index in the arm's plan.
    Replay(usize),
}

/// A kernel, copy or memset that ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub unit: Unit,
    /// Nanoseconds on the device's clock.
    pub start_ns: u64,
    pub end_ns: u64,
    pub stream: u32,
    /// Counts the driver's calls: kernels of one replay share it.
    pub correlation: u32,
    /// Place of the call in [`Recorded::calls`], where the recorder knows it.
    pub call: Option<usize>,
    /// The graph's node, unique in the process and rising in the order of nodes; 0 outside graphs.
    pub node: u64,
}

impl Record {
    pub fn ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }
}

/// One step as it was recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recorded {
    /// In the order in which the host made them.
    pub calls: Vec<Call>,
    /// By launch of the arm's program: what it puts on the device, in order. `None`: it depends on the step (products
    /// sized by host counts).
    pub expected: Vec<Option<Vec<Unit>>>,
    pub records: Vec<Record>,
    /// Who recorded, for a person: `CUPTI`, or the CPU's own clock.
    pub recorder: &'static str,
}

impl Recorded {
    /// Nanoseconds in which anything ran: overlaps count once.
    pub fn busy_ns(&self) -> u64 {
        union_ns(self.records.iter().map(|r| (r.start_ns, r.end_ns)).collect())
    }
}

/// Length of the union of intervals (start, end).
pub fn union_ns(mut intervals: Vec<(u64, u64)>) -> u64 {
    intervals.sort_unstable();
    let (mut total, mut reached) = (0, 0);
    for (start, end) in intervals {
        let start = start.max(reached);
        if end > start {
            total += end - start;
            reached = end;
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn overlaps_count_once() {
        assert_eq!(union_ns(vec![]), 0);
        assert_eq!(union_ns(vec![(10, 20), (15, 30), (40, 41), (12, 13)]), 21);
    }

    proptest! {
        #[test]
        fn the_union_is_what_a_bitmap_counts(list in prop::collection::vec((0u64..200, 0u64..40), 0..30)) {
            let list: Vec<(u64, u64)> = list.into_iter().map(|(s, n)| (s, s + n)).collect();
            let covered = (0..300u64).filter(|t| list.iter().any(|(s, e)| s <= t && t < e)).count();
            prop_assert_eq!(union_ns(list) as usize, covered);
        }
    }
}
