//! `--profile`: where the device's time goes, by part of the step and by kernel, and where it had nothing to do.
//!
//! Plain functions over what a device recorded ([`crate::device::record`]); they know the program's launches and no
//! device.

mod matching;
mod table;
#[cfg(test)]
mod tests;
pub mod trace;

pub use matching::{Matched, matched};
pub use table::{CLOSE, json, text};

use crate::capture::ArmPlan;
use crate::device::Arm;
use crate::device::record::Recorded;
use crate::program::Launch;
use std::collections::HashMap;
use std::sync::Arc;

/// What belongs to no launch.
pub const UNATTRIBUTED: &str = "unattributed";

/// One arm's step.
#[derive(Debug, Clone)]
pub struct Profile {
    pub arm: Arm,
    pub recorded: Recorded,
    /// The arm's plan: launches by index.
    pub plan: ArmPlan,
    pub matched: Matched,
    /// By part and kernel, the longest first.
    pub lines: Vec<Line>,
    pub gaps: Gaps,
    /// From the first kernel's start to the last one's end.
    pub span_ns: u64,
    pub busy_ns: u64,
}

/// One kernel in one part of the step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub part: &'static str,
    pub kernel: Arc<str>,
    pub launches: usize,
    /// Sum of their times; kernels that overlap count each.
    pub device_ns: u64,
    /// Time just before them in which the device had nothing to do.
    pub gap_ns: u64,
}

/// Time between kernels in which the device had nothing to do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gaps {
    pub count: usize,
    pub total_ns: u64,
    pub median_ns: u64,
    pub longest_ns: u64,
    /// Index of the record that ended the longest.
    pub longest_before: Option<usize>,
}

/// Lines added up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sum {
    pub launches: usize,
    pub device_ns: u64,
    pub gap_ns: u64,
}

impl Profile {
    /// Matches and adds up what was recorded of a step of `plan`.
    pub fn new(arm: Arm, plan: &ArmPlan, recorded: Recorded) -> Self {
        let matched = matched(plan, &recorded);
        let (before, gaps) = gaps(&recorded);
        let part = |at: usize| match matched.launches[at].and_then(|l| plan.program.launches.get(l)) {
            Some(launch) => launch.part.name(),
            None => UNATTRIBUTED,
        };
        let mut sums: HashMap<(&'static str, Arc<str>), Sum> = HashMap::new();
        for (at, record) in recorded.records.iter().enumerate() {
            let sum = sums.entry((part(at), record.unit.name.clone())).or_default();
            sum.add(Sum { launches: 1, device_ns: record.ns(), gap_ns: before[at] });
        }
        let mut lines: Vec<Line> = sums
            .into_iter()
            .map(|((part, kernel), Sum { launches, device_ns, gap_ns })| Line {
                part,
                kernel,
                launches,
                device_ns,
                gap_ns,
            })
            .collect();
        lines.sort_by(|a, b| {
            b.device_ns.cmp(&a.device_ns).then_with(|| (a.part, &a.kernel).cmp(&(b.part, &b.kernel)))
        });
        let first = recorded.records.iter().map(|r| r.start_ns).min().unwrap_or(0);
        let last = recorded.records.iter().map(|r| r.end_ns).max().unwrap_or(0);
        let busy_ns = recorded.busy_ns();
        Self {
            arm,
            plan: plan.clone(),
            matched,
            lines,
            gaps,
            span_ns: last.saturating_sub(first),
            busy_ns,
            recorded,
        }
    }

    /// The launch that a record belongs to, with its index.
    pub fn launch(&self, record: usize) -> Option<(usize, &Launch)> {
        let index = (*self.matched.launches.get(record)?)?;
        Some((index, self.plan.program.launches.get(index)?))
    }

    /// Sums by part, the longest first; what belongs to no launch comes last and only if there is any.
    pub fn parts(&self) -> Vec<(&'static str, Sum)> {
        let mut parts: Vec<(&'static str, Sum)> = Vec::new();
        for line in &self.lines {
            let own = Sum { launches: line.launches, device_ns: line.device_ns, gap_ns: line.gap_ns };
            match parts.iter_mut().find(|(part, _)| *part == line.part) {
                Some((_, sum)) => sum.add(own),
                None => parts.push((line.part, own)),
            }
        }
        parts.sort_by_key(|(part, sum)| (*part == UNATTRIBUTED, std::cmp::Reverse(sum.device_ns)));
        parts
    }

    /// All parts together, without what belongs to no launch; and that.
    pub fn attributed(&self) -> (Sum, Sum) {
        let (mut of_parts, mut rest) = (Sum::default(), Sum::default());
        for (part, sum) in self.parts() {
            if part == UNATTRIBUTED { rest.add(sum) } else { of_parts.add(sum) }
        }
        (of_parts, rest)
    }
}

impl Sum {
    fn add(&mut self, other: Sum) {
        self.launches += other.launches;
        self.device_ns += other.device_ns;
        self.gap_ns += other.gap_ns;
    }
}

/// Idle nanoseconds just before each record, and all gaps together. A gap belongs to the record that ends it.
fn gaps(recorded: &Recorded) -> (Vec<u64>, Gaps) {
    let records = &recorded.records;
    let mut before = vec![0; records.len()];
    let mut order: Vec<usize> = (0..records.len()).collect();
    order.sort_by_key(|&at| (records[at].start_ns, records[at].end_ns));
    let mut reached = order.first().map_or(0, |&at| records[at].start_ns);
    let mut found = Vec::new();
    for at in order {
        let gap = records[at].start_ns.saturating_sub(reached);
        if gap > 0 {
            before[at] = gap;
            found.push((gap, at));
        }
        reached = reached.max(records[at].end_ns);
    }
    found.sort_unstable();
    let gaps = Gaps {
        count: found.len(),
        total_ns: found.iter().map(|(gap, _)| gap).sum(),
        median_ns: found.get(found.len() / 2).map_or(0, |(gap, _)| *gap),
        longest_ns: found.last().map_or(0, |(gap, _)| *gap),
        longest_before: found.last().map(|(_, at)| *at),
    };
    (before, gaps)
}
