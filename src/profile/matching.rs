//! Which launch a record belongs to.
//!
//! Outside graphs the recorder numbers the calls; where it cannot, the driver's own count of calls puts the records in
//! the order of the launch list. Inside a graph all records come from one call: its nodes are the launches of the
//! segment in order, by the nodes' numbers, or by time where a graph is a chain. An order is taken only when it is the
//! launch list's, name by name and grid by grid; if none is, equal kernels are paired first to first.

use crate::capture::ArmPlan;
use crate::device::record::{Call, Recorded, Unit};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;

/// Launches by record, and what does not agree.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Matched {
    /// By record: index of its launch in the arm's program.
    pub launches: Vec<Option<usize>>,
    /// The first launch whose kernels are not those that were recorded, in words; `None`: every name is the launch
    /// list's.
    pub difference: Option<String>,
}

/// Matches every record of a step.
pub fn matched(plan: &ArmPlan, recorded: &Recorded) -> Matched {
    let mut found = Matched { launches: vec![None; recorded.records.len()], difference: None };
    let by_call = match by_number(recorded) {
        Some(by_call) => by_call,
        None => match by_order(plan, recorded) {
            Ok(by_call) => by_call,
            Err(difference) => {
                found.difference = Some(difference);
                numbered_alone(recorded)
            }
        },
    };
    for (call, records) in recorded.calls.iter().zip(&by_call) {
        let names = |of: &[usize]| of.iter().map(|r| recorded.records[*r].unit.clone()).collect::<Vec<_>>();
        match call {
            Call::Launch(launch) => {
                records.iter().for_each(|r| found.launches[*r] = Some(*launch));
                if let Some(Some(expected)) = recorded.expected.get(*launch) {
                    note(&mut found.difference, plan, *launch, expected, &names(records));
                }
            }
            Call::Replay(segment) => {
                let Some(segment) = plan.segments.get(*segment) else { continue };
                let expected = expected(recorded, segment.launches.clone());
                let launches = in_graph(recorded, records, &expected);
                let mut of: HashMap<usize, Vec<usize>> = HashMap::new();
                for (record, launch) in records.iter().zip(launches) {
                    found.launches[*record] = launch;
                    if let Some(launch) = launch {
                        of.entry(launch).or_default().push(*record);
                    }
                }
                for launch in segment.launches.clone() {
                    if let Some(Some(expected)) = recorded.expected.get(launch) {
                        let own = of.get(&launch).map_or(&[][..], Vec::as_slice);
                        note(&mut found.difference, plan, launch, expected, &names(own));
                    }
                }
            }
        }
    }
    let lost = found.launches.iter().filter(|l| l.is_none()).count();
    if lost > 0 && found.difference.is_none() {
        found.difference = Some(format!("{lost} records belong to no launch"));
    }
    found
}

/// Keeps the first difference between a launch's kernels and the recorded ones; their order is not compared.
fn note(kept: &mut Option<String>, plan: &ArmPlan, launch: usize, expected: &[Unit], recorded: &[Unit]) {
    let sorted = |units: &[Unit]| {
        let mut names: Vec<String> = units.iter().map(|u| u.name.to_string()).collect();
        names.sort();
        names
    };
    let (expected, recorded) = (sorted(expected), sorted(recorded));
    if kept.is_none() && expected != recorded {
        let say = |names: &[String]| match names {
            [] => "nothing".to_owned(),
            names => names.join(" + "),
        };
        let op = plan.program.launches.get(launch).map_or("?", |l| l.op.name());
        *kept = Some(format!("launch {launch}, {op}: {} recorded for {}", say(&recorded), say(&expected)));
    }
}

/// Records by call where the recorder numbered all of them, in the order in which they began.
fn by_number(recorded: &Recorded) -> Option<Vec<Vec<usize>>> {
    let mut by_call = vec![Vec::new(); recorded.calls.len()];
    for at in in_time(recorded) {
        by_call.get_mut(recorded.records[at].call?)?.push(at);
    }
    Some(by_call)
}

/// Records by call as far as they are numbered.
fn numbered_alone(recorded: &Recorded) -> Vec<Vec<usize>> {
    let mut by_call = vec![Vec::new(); recorded.calls.len()];
    for at in in_time(recorded) {
        if let Some(call) = recorded.records[at].call.and_then(|call| by_call.get_mut(call)) {
            call.push(at);
        }
    }
    by_call
}

fn in_time(recorded: &Recorded) -> Vec<usize> {
    let mut order: Vec<usize> = (0..recorded.records.len()).collect();
    order.sort_by_key(|&at| {
        let record = &recorded.records[at];
        (record.start_ns, record.correlation, record.end_ns, at)
    });
    order
}

/// Records by call from the driver's count of its calls: each launch takes as many of them as it has kernels, each
/// replay one. The error says where the counts part.
fn by_order(plan: &ArmPlan, recorded: &Recorded) -> Result<Vec<Vec<usize>>, String> {
    let mut by_correlation: HashMap<u32, Vec<usize>> = HashMap::new();
    for at in in_time(recorded) {
        by_correlation.entry(recorded.records[at].correlation).or_default().push(at);
    }
    let mut groups: Vec<(u32, Vec<usize>)> = by_correlation.into_iter().collect();
    groups.sort_unstable_by_key(|(correlation, _)| *correlation);
    let mut groups = groups.into_iter().map(|(_, records)| records);
    let mut by_call = Vec::with_capacity(recorded.calls.len());
    for call in &recorded.calls {
        let (groups_of_call, what) = match call {
            Call::Launch(launch) => match recorded.expected.get(*launch).and_then(Option::as_ref) {
                Some(units) => (units.len(), format!("launch {launch}")),
                None => {
                    return Err(format!(
                        "launch {launch} is sized by the step, and its calls are not numbered"
                    ));
                }
            },
            Call::Replay(segment) => {
                let range = plan.segments.get(*segment).map_or(0..0, |s| s.launches.clone());
                (usize::from(!expected(recorded, range).is_empty()), format!("graph of segment {segment}"))
            }
        };
        let mut records = Vec::new();
        for _ in 0..groups_of_call {
            records.extend(groups.next().ok_or_else(|| format!("nothing was recorded from {what} on"))?);
        }
        by_call.push(records);
    }
    match groups.count() {
        0 => Ok(by_call),
        more => Err(format!("{more} driver calls more were recorded than the step makes")),
    }
}

/// Launch and unit of everything that a range of launches puts on the device, in order.
fn expected(recorded: &Recorded, range: Range<usize>) -> Vec<(usize, &Unit)> {
    let units = |launch: usize| recorded.expected.get(launch).and_then(Option::as_ref);
    range.flat_map(|launch| units(launch).into_iter().flatten().map(move |unit| (launch, unit))).collect()
}

/// Launches of a replay's records, given in the order in which they began.
fn in_graph(recorded: &Recorded, records: &[usize], expected: &[(usize, &Unit)]) -> Vec<Option<usize>> {
    let record = |at: usize| &recorded.records[records[at]];
    let mut by_node: Vec<usize> = (0..records.len()).collect();
    by_node.sort_by_key(|&at| record(at).node);
    let by_time: Vec<usize> = (0..records.len()).collect();
    for order in [by_node, by_time] {
        let agrees = order.len() == expected.len()
            && order.iter().zip(expected).all(|(&at, (_, unit))| record(at).unit == **unit);
        if agrees {
            let mut launches = vec![None; records.len()];
            for (at, (launch, _)) in order.into_iter().zip(expected) {
                launches[at] = Some(*launch);
            }
            return launches;
        }
    }
    let mut waiting: HashMap<&Unit, VecDeque<usize>> = HashMap::new();
    for (launch, unit) in expected {
        waiting.entry(unit).or_default().push_back(*launch);
    }
    (0..records.len()).map(|at| waiting.get_mut(&record(at).unit).and_then(VecDeque::pop_front)).collect()
}
