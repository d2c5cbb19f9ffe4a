//! Capturing the graph arm, and the proof that each graph does what the eager arm does in its place.

use super::arm::Arm;
use super::context::{Context, MIB, in_phase};
use super::graph::{self, Capture, Graph, Instance};
use super::lanes::Lanes;
use super::work::{Work, difference};
use crate::capture::Segment;
use crate::device::guard::Beat;
use crate::device::host::Pacer;
use crate::device::inject::Inject;
use crate::device::{DeviceError, GraphCost, Phase};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// What capture needs besides the arms.
pub(super) struct Setting<'a> {
    pub context: &'a Rc<Context>,
    pub lanes: &'a Lanes,
    pub inject: &'a mut Option<Inject>,
    /// Is told which of the three phases the call has come to.
    pub beat: &'a Beat,
    /// Launch of the graph arm that is left out, for tests of the proof.
    pub omit: Option<usize>,
}

/// Captures, proves, instantiates and uploads every graph of `arm`.
pub(super) fn capture_all(
    setting: &mut Setting,
    arm: &Arm,
    eager: &Arm,
) -> Result<(Vec<Instance>, GraphCost), DeviceError> {
    let mut cost = GraphCost { graphs: arm.plan.graphs(), ..Default::default() };
    let eager_place = eager_places(arm, eager)?;
    // First segment of each graph.
    let mut first: Vec<Option<&Segment>> = vec![None; cost.graphs];
    for segment in &arm.plan.segments {
        if let Some(g) = segment.graph {
            cost.launches_per_step += 1;
            first[g].get_or_insert(segment);
        }
    }
    let mut instances = Vec::with_capacity(cost.graphs);
    for segment in first.into_iter().flatten() {
        let context = setting.context.clone();
        let fail = |phase: Phase| {
            let free = || context.memory().map_or(0, |m| m.0);
            move |e: DeviceError| told(e, phase, &segment.label, free)
        };
        setting.beat.enter(Phase::Capture);
        let mut omit = setting.omit;
        if Inject::at(setting.inject, Phase::Capture)?.is_some() {
            omit = Some(segment.launches.start);
        }
        let start = Instant::now();
        let graph = record(setting.lanes, arm, segment, omit).map_err(fail(Phase::Capture))?;
        cost.capture_ms += ms(start);
        let proved = prove(&graph, arm, eager, segment, &eager_place, omit);
        cost.nodes += proved.map_err(fail(Phase::Capture))?;

        setting.beat.enter(Phase::Instantiate);
        Inject::at(setting.inject, Phase::Instantiate)?;
        let start = Instant::now();
        let instance = Instance::new(&graph).map_err(fail(Phase::Instantiate))?;
        cost.instantiate_ms += ms(start);

        setting.beat.enter(Phase::Upload);
        Inject::at(setting.inject, Phase::Upload)?;
        let main = setting.lanes.main();
        let start = Instant::now();
        instance.upload(main).and_then(|()| main.synchronize()).map_err(fail(Phase::Upload))?;
        cost.upload_ms += ms(start);
        instances.push(instance);
    }
    prove_shared(arm)?;
    Ok((instances, cost))
}

fn ms(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// A driver error of capture, instantiation or upload, with the graph's name and the exit code it calls for.
fn told(error: DeviceError, phase: Phase, label: &str, free: impl FnOnce() -> usize) -> DeviceError {
    match error {
        DeviceError::Driver { code, .. } if code.contains("OUT_OF_MEMORY") => {
            // The driver does not say how much it wanted: more than there is.
            let free_mib = free() as f64 / MIB;
            DeviceError::OutOfMemory {
                phase,
                what: format!("the graph of {label} (at least)"),
                need_mib: free_mib,
                free_mib,
                remedy: "graphs take device memory of their own: capture a narrower --cuda_graph_scope, or shrink the \
                         run (--num_layers, --seq_length, --max_microbatches)"
                    .to_owned(),
            }
        }
        DeviceError::Driver { call, code, at, .. } => {
            DeviceError::Capture { phase, message: format!("{call} gave {code} for {label}{at}") }
        }
        other => in_phase(other, phase, label),
    }
}

/// Captures one segment on the main lane; the side lanes are drawn in by the fork and let go by the join.
fn record(lanes: &Lanes, arm: &Arm, segment: &Segment, omit: Option<usize>) -> Result<Graph, DeviceError> {
    let range = segment.launches.clone();
    if let Some(i) = range.clone().find(|i| arm.plan.program.launches[*i].host_sync()) {
        return Err(DeviceError::internal(format!("launch {i} waits on the host and lies in a graph")));
    }
    let capture = Capture::begin(lanes.main())?;
    lanes.fork()?;
    let mut waited = Duration::ZERO;
    arm.issue(range, lanes, true, omit, &mut waited, &mut Pacer::off())?;
    lanes.join()?;
    capture.end()
}

/// By launch of the graph arm: its place in the eager arm; staging has none.
fn eager_places(arm: &Arm, eager: &Arm) -> Result<Vec<Option<usize>>, DeviceError> {
    // An arm that is alone on the device is compared with itself, staging and all.
    let of_eager: Vec<usize> =
        (0..eager.launches.len()).filter(|i| !eager.plan.program.launches[*i].staging).collect();
    let mut next = 0;
    let places = arm.plan.program.launches.iter().map(|l| {
        (!l.staging).then(|| {
            next += 1;
            of_eager.get(next - 1).copied().unwrap_or(usize::MAX)
        })
    });
    let places: Vec<Option<usize>> = places.collect();
    if next != of_eager.len() {
        return Err(DeviceError::Unequal(format!(
            "the graph arm has {next} launches besides staging, the eager arm {}",
            of_eager.len()
        )));
    }
    Ok(places)
}

/// The graph's nodes against what was issued while capturing, and that against the eager arm. Gives the number of
/// nodes.
fn prove(
    graph: &Graph,
    arm: &Arm,
    eager: &Arm,
    segment: &Segment,
    eager_place: &[Option<usize>],
    omit: Option<usize>,
) -> Result<usize, DeviceError> {
    let unequal =
        |what: &str, text: String| DeviceError::Unequal(format!("{}: {what}: {text}", segment.label));
    let issued = || segment.launches.clone().filter(|i| Some(*i) != omit);
    let mut logged: Vec<Work> = issued().flat_map(|i| arm.launches[i].work.iter().cloned()).collect();
    let nodes = graph::read(graph)?;
    if !nodes.ordered {
        logged.sort();
    }
    if let Some(text) = difference(&logged, &nodes.work) {
        return Err(unequal("launched while capturing, against the graph's nodes", text));
    }
    let captured = issued().filter(|i| eager_place[*i].is_some());
    let captured: Vec<Work> = captured.flat_map(|i| arm.launches[i].work.iter().cloned()).collect();
    let places = segment.launches.clone().filter_map(|i| eager_place[i]);
    let expected: Vec<Work> = places.flat_map(|i| eager.launches[i].work.iter().cloned()).collect();
    if let Some(text) = difference(&expected, &captured) {
        return Err(unequal("the eager arm's launches, against the graph's", text));
    }
    Ok(nodes.count)
}

/// Segments that share a graph must be the same launches on the same addresses.
fn prove_shared(arm: &Arm) -> Result<(), DeviceError> {
    for (at, segment) in arm.plan.segments.iter().enumerate().filter(|(_, s)| s.graph.is_some()) {
        let Some(first) = arm.plan.segments[..at].iter().find(|s| s.graph == segment.graph) else { continue };
        let same = first.launches.len() == segment.launches.len()
            && first
                .launches
                .clone()
                .zip(segment.launches.clone())
                .all(|(a, b)| Rc::ptr_eq(&arm.launches[a], &arm.launches[b]));
        if !same {
            return Err(DeviceError::Unequal(format!(
                "{} and {} share a graph, but differ in launches or buffers",
                first.label, segment.label
            )));
        }
    }
    Ok(())
}

/// Device memory that the graphs took, from the driver's free bytes before and after. `neighbours`: other
/// processes on the GPU before and after, if known.
pub(super) fn memory_cost(
    cost: &mut GraphCost,
    free_before: usize,
    free_after: usize,
    neighbours: [Option<usize>; 2],
) {
    let busy = neighbours.iter().flatten().any(|n| *n > 0);
    if busy {
        cost.memory_note =
            "other processes use this GPU: the driver's free memory is not ours alone".to_owned();
    } else if free_after > free_before {
        cost.memory_note = "free memory grew during capture: something else was released".to_owned();
    } else {
        cost.memory_mib = Some((free_before - free_after) as f64 / MIB);
        cost.memory_note = "free memory by cuMemGetInfo before capture less that after upload".to_owned();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_capture_carry_their_exit_code() {
        let driver = |code: &str| DeviceError::Driver {
            call: "cuGraphInstantiateWithFlags",
            code: code.into(),
            phase: Phase::Prepare,
            at: String::new(),
        };
        let e = told(driver("CUDA_ERROR_OUT_OF_MEMORY"), Phase::Instantiate, "layer 3", || 0);
        assert!(matches!(e, DeviceError::OutOfMemory { phase: Phase::Instantiate, .. }));
        let e = told(driver("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"), Phase::Capture, "layer 3", || 0);
        assert_eq!(
            e.to_string(),
            "capture failed: cuGraphInstantiateWithFlags gave CUDA_ERROR_STREAM_CAPTURE_INVALIDATED for layer 3"
        );
    }

    #[test]
    fn memory_is_told_only_when_it_can_be_trusted() {
        let mib = 1 << 20;
        let of = |before: usize, after: usize, neighbours| {
            let mut cost = GraphCost::default();
            memory_cost(&mut cost, before * mib, after * mib, neighbours);
            cost.memory_mib
        };
        assert_eq!(of(10, 4, [Some(0), None]), Some(6.0));
        assert_eq!(of(4, 10, [None, None]), None);
        assert_eq!(of(10, 4, [Some(0), Some(1)]), None);
    }
}
