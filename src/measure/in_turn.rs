//! Arms that do not fit in memory together: each alone on the device, one after the other.
//!
//! Blocks cannot alternate, so that drift and neighbours do not cancel: the step times stand side by side, but their
//! ratio is no speedup, and the verdict is `undecided`. Equality is proved as ever: both arms run the same steps from
//! the same seed.

use super::equality::{check_in_turn, steps_of};
use super::{Hooks, Options, Outcome, Status, StepRecord, StepSink, Verdict, outcome, traced};
use crate::device::{Arm, DeviceError, Executor};
use std::io;

/// Marks the graph's steps as the other side's, counted on from the eager ones.
struct Beside<'a> {
    sink: &'a mut dyn StepSink,
    side: usize,
    first: usize,
}

impl StepSink for Beside<'_> {
    fn steps(&mut self, steps: &[StepRecord]) -> io::Result<()> {
        let moved: Vec<StepRecord> = steps.iter().map(|s| moved(s, self.side, self.first)).collect();
        self.sink.steps(&moved)
    }
}

fn moved(step: &StepRecord, side: usize, first: usize) -> StepRecord {
    StepRecord { side, index: first + step.index, ..*step }
}

/// Measures the graph arm alone, then the eager arm alone. The graph comes first: where it does not fit even so, nothing
/// is timed. `open` makes a device that holds one arm; it is called when the one before is gone. `None`: the graph arm
/// does not fit alone either.
pub fn in_turn(
    open: &mut dyn FnMut(Arm) -> Result<Box<dyn Executor>, DeviceError>,
    options: &Options,
    hooks: Hooks,
) -> Option<Outcome> {
    let Hooks { interrupt, progress, sink } = hooks;
    let mut alone = |arm, equality_steps, first| -> Result<_, DeviceError> {
        let own = Options { alone: Some(arm), equality_steps, host_costs: None, ..options.clone() };
        let mut executor = open(arm)?;
        let side = usize::from(arm == Arm::Graph);
        let mut beside = Beside { sink: &mut *sink, side, first };
        let hooks = Hooks { interrupt, progress: &mut *progress, sink: &mut beside };
        Ok(traced(&mut *executor, &own, hooks))
    };
    let (mut graph, left) = alone(Arm::Graph, options.equality_steps, 0).ok()?;
    if let Status::Failed(outcome::Failure::Device(DeviceError::OutOfMemory { .. })) = graph.status {
        return None;
    }
    let steps = left.as_ref().map(steps_of);
    let first = graph.steps.len();
    let fail = |graph: &mut Outcome, error: DeviceError| graph.status = Status::Failed(error.into());
    let eager = match graph.status {
        Status::Ok => match alone(Arm::Eager, steps, first) {
            Ok(eager) => Some(eager),
            Err(error) => {
                fail(&mut graph, error);
                None
            }
        },
        _ => None,
    };
    let (mut both, eager_left) = match eager {
        Some((eager, left)) => (eager, left),
        None => return Some(joined(graph, None)),
    };
    if matches!(both.status, Status::Ok) {
        match eager_left.zip(left).map(|(eager, graph)| check_in_turn(&eager, &graph)) {
            Some(Ok(equality)) => both.equality = Some(equality),
            Some(Err(error)) => fail(&mut both, error),
            None => fail(&mut both, DeviceError::internal("an arm left no trace")),
        }
    }
    Some(joined(graph, Some(both)))
}

/// One outcome of both; without the eager arm the graph's own stands for the failure.
fn joined(mut graph: Outcome, eager: Option<Outcome>) -> Outcome {
    graph.arms.iter_mut().for_each(|a| a.side = 1);
    graph.blocks.iter_mut().for_each(|b| b.side = 1);
    graph.steps.iter_mut().for_each(|s| s.side = 1);
    graph.in_turn = true;
    let Some(mut eager) = eager else { return graph };
    let first = graph.steps.len();
    let ok = matches!(eager.status, Status::Ok);
    eager.arms.append(&mut graph.arms);
    let mut blocks = std::mem::take(&mut graph.blocks);
    blocks.append(&mut eager.blocks);
    let mut steps = std::mem::take(&mut graph.steps);
    steps.extend(eager.steps.iter().map(|s| moved(s, 0, first)));
    let mut profiles = eager.profiles;
    profiles.append(&mut graph.profiles);
    let mut notices = vec![
        "the arms do not fit in memory together: each was timed alone, one after the other (arms_in_turn); their \
         ratio is no speedup"
            .to_owned(),
    ];
    notices.append(&mut eager.notices);
    notices.append(&mut graph.notices);
    Outcome {
        verdict: ok.then_some(Verdict::Undecided),
        graph_cost: graph.graph_cost,
        first_replay_ms: graph.first_replay_ms,
        in_turn: true,
        blocks,
        steps,
        profiles,
        notices,
        ..eager
    }
}
