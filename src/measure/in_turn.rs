//! Arms that do not fit in memory together: each alone on the device, one after the other.
//!
//! Blocks cannot alternate, so that drift and neighbours do not cancel: the step times stand side by side, but their
//! ratio is no speedup, and the verdict is `undecided`. Equality is proved as ever: both arms run the same steps from
//! the same seed.

use super::equality::{check_in_turn, steps_of};
use super::options::MIN_BLOCK_STEPS;
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
    let mut unordered = false;
    let mut alone = |arm, equality_steps: Option<usize>, first| -> Result<_, DeviceError> {
        // A short -ms must leave the second arm as many steps for equality as the first took.
        let least = equality_steps.unwrap_or(0) + MIN_BLOCK_STEPS;
        let max_steps = options.max_steps.map(|n| n.max(least));
        let own =
            Options { alone: Some(arm), equality_steps, max_steps, host_costs: None, ..options.clone() };
        let mut executor = open(arm)?;
        unordered |= executor.info().unordered;
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
        match eager_left.zip(left).map(|(eager, graph)| check_in_turn(&eager, &graph, unordered)) {
            Some(Ok(proof)) => (both.equality, both.unequal) = proof,
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
    let ok = matches!(eager.status, Status::Ok) && eager.unequal.is_none();
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

#[cfg(test)]
mod tests {
    use super::super::{Silent, run};
    use super::*;
    use crate::capture::plan;
    use crate::config::{GraphImpl, Scope};
    use crate::device::cpu::CpuExecutor;
    use crate::device::fake::{FakeExecutor, Injected, Script};
    use crate::device::inject::{Inject, Kind};
    use crate::device::{Arm, Phase};
    use crate::report::recommend::{Tried, render};
    use crate::report::{Row, RunFacts, columns};
    use crate::workloads::testing::{dense, program, with_graphs};
    use std::sync::atomic::AtomicBool;

    #[derive(Default)]
    struct Kept(Vec<StepRecord>);
    impl StepSink for Kept {
        fn steps(&mut self, steps: &[StepRecord]) -> io::Result<()> {
            self.0.extend_from_slice(steps);
            Ok(())
        }
    }

    fn options() -> Options {
        Options { max_time_s: 4.0, ..Options::default() }
    }

    /// Of 10 MiB both arms hold 9, the graph arm alone 7 and the eager one 6; graphs take 2.
    fn script(held_mib: f64) -> Script {
        FakeExecutor::script().memory(10.0, held_mib, 2.0)
    }

    type Open<'a> = &'a mut dyn FnMut(Arm) -> Result<Box<dyn Executor>, DeviceError>;

    fn turn(open: Open, options: &Options) -> (Option<Outcome>, Vec<StepRecord>) {
        let (interrupt, mut sink) = (AtomicBool::new(false), Kept::default());
        let hooks = Hooks { interrupt: &interrupt, progress: &mut Silent, sink: &mut sink };
        (in_turn(open, options, hooks), sink.0)
    }

    fn fits_alone(arm: Arm) -> Script {
        script(if arm == Arm::Graph { 7.0 } else { 6.0 })
    }

    #[test]
    fn arms_that_do_not_fit_together_are_timed_alone_and_say_so() {
        let (interrupt, mut sink) = (AtomicBool::new(false), Kept::default());
        let hooks = Hooks { interrupt: &interrupt, progress: &mut Silent, sink: &mut sink };
        let together = run(&mut script(9.0).build(), &options(), hooks);
        assert_eq!(together.status.exit_code(), 5);
        let mut order = Vec::new();
        let (outcome, seen) = turn(
            &mut |arm| {
                order.push(arm);
                Ok(Box::new(fits_alone(arm).build()))
            },
            &options(),
        );
        let outcome = outcome.unwrap();
        assert_eq!((outcome.status.exit_code(), order), (0, vec![Arm::Graph, Arm::Eager]));
        let arms: Vec<_> = outcome.arms.iter().map(|a| (a.side, a.arm, a.step_time_ms.unwrap())).collect();
        assert_eq!(arms, [(0, Arm::Eager, 10.0), (1, Arm::Graph, 8.0)]);
        // No ratio is made of times that were not taken side by side.
        assert_eq!((outcome.speedup, outcome.speedup_ci95, outcome.break_even_steps), (None, None, None));
        assert_eq!((outcome.verdict, outcome.in_turn), (Some(Verdict::Undecided), true));
        assert!(outcome.notices[0].contains("do not fit in memory together"), "{:?}", outcome.notices);
        // Equal work is proved as ever, over as many steps of each.
        assert_eq!(outcome.equality.as_ref().map(|e| (e.steps, e.buffers)), Some((7, 2)));
        assert!(outcome.graph_cost.is_some() && outcome.first_replay_ms.is_some());
        // Steps come in their order, each with its side.
        assert_eq!(seen, outcome.steps);
        assert!(seen.iter().enumerate().all(|(at, s)| s.index == at));
        assert!(seen.iter().all(|s| s.side == usize::from(s.arm == Arm::Graph)));
        assert!(outcome.blocks.iter().any(|b| b.side == 0) && outcome.blocks.iter().any(|b| b.side == 1));

        // Flagged in the rows, and not recommended.
        let facts = RunFacts { device: "cuda".into(), ..RunFacts::default() };
        let rows = Row::of_outcome(&facts, &outcome, "");
        let cell = |row: &Row, name: &str| {
            columns::COLUMNS.iter().find(|c| c.name == name).map(|c| (c.value)(row).cell()).unwrap()
        };
        for row in &rows {
            assert_eq!((cell(row, "status").as_str(), cell(row, "arms_in_turn").as_str()), ("ok", "true"));
            assert_eq!((cell(row, "verdict").as_str(), cell(row, "speedup").as_str()), ("undecided", ""));
            assert_eq!(cell(row, "digest_match"), "true");
        }
        let values: Vec<_> = rows.iter().map(columns::values).collect();
        let said = render(&[Tried::of_run(&values).unwrap()], 0.01);
        assert!(said.contains("undecided, arms in turn"), "{said}");
        assert!(said.contains("Recommended: nothing: no scope was measured"), "{said}");
    }

    #[test]
    fn a_graph_arm_that_does_not_fit_alone_costs_no_timing() {
        let (outcome, seen) = turn(
            &mut |arm| {
                assert_eq!(arm, Arm::Graph);
                Ok(Box::new(script(9.0).build()))
            },
            &options(),
        );
        assert!(outcome.is_none());
        // The warm-up before capture is all that ran.
        assert!(seen.iter().all(|s| s.phase == Phase::Warmup), "{:?}", seen.last());
        let none = |_| Err(DeviceError::Unavailable("gone".into()));
        assert!(turn(&mut { none }, &options()).0.is_none());
    }

    #[test]
    fn unequal_arms_and_failures_keep_their_codes() {
        let unlike = |arm: Arm| -> Result<Box<dyn Executor>, DeviceError> {
            let digest = move |_| vec![("weight".to_owned(), u64::from(arm == Arm::Graph))];
            Ok(Box::new(fits_alone(arm).digest(digest).build()))
        };
        let outcome = turn(&mut { unlike }, &options()).0.unwrap();
        assert_eq!((outcome.status.exit_code(), outcome.verdict), (6, None));
        for (broken, phase, code) in [(Arm::Graph, Phase::Steady, 1), (Arm::Eager, Phase::Steady, 1)] {
            let open = |arm: Arm| -> Result<Box<dyn Executor>, DeviceError> {
                let inner = fits_alone(arm).build();
                if arm != broken {
                    return Ok(Box::new(inner));
                }
                Ok(Box::new(Injected::new(inner, Inject::new(phase, Kind::DriverError, 1))))
            };
            let outcome = turn(&mut { open }, &options()).0.unwrap();
            assert_eq!((outcome.status.exit_code(), outcome.verdict), (code, None), "{broken}");
        }
    }

    /// On a device with memory of its own for each arm: the same bits as together.
    #[test]
    fn arms_alone_do_what_they_do_together() {
        let cfg = with_graphs(dense(), GraphImpl::TransformerEngine, &[Scope::Attn]);
        let plan = plan(program(&cfg), &cfg.graph, cfg.seed).unwrap();
        let options = Options { max_steps: Some(8), busy: false, ..Options::default() };
        let mut open = |arm: Arm| -> Result<Box<dyn Executor>, DeviceError> {
            Ok(Box::new(CpuExecutor::new(plan.alone(arm).unwrap(), None, None)?))
        };
        let outcome = turn(&mut open, &options).0.unwrap();
        assert_eq!(outcome.status.exit_code(), 0, "{:?}", outcome.status);
        let (interrupt, mut sink) = (AtomicBool::new(false), Kept::default());
        let hooks = Hooks { interrupt: &interrupt, progress: &mut Silent, sink: &mut sink };
        let together = run(&mut CpuExecutor::new(plan.clone(), None, None).unwrap(), &options, hooks);
        assert_eq!(outcome.equality.unwrap().digest, together.equality.unwrap().digest);
    }
}
