//! Arms of a sweep that do not fit in memory together: each alone on the device, one after the other.

use super::open_device;
use crate::args::Args;
use crate::capture::RunPlan;
use crate::device::guard::Beat;
use crate::device::{DeviceError, DeviceInfo, Executor};
use crate::measure::outcome::Failure;
use crate::measure::{self, Hooks, Options, Outcome, Status};

/// Whether `error` may go away when each arm has the memory to itself.
pub(super) fn worth_a_try(args: &Args, plan: &RunPlan, error: &DeviceError) -> bool {
    args.mbperf.in_turn && matches!(error, DeviceError::OutOfMemory { .. }) && plan.gains_alone()
}

/// [`worth_a_try`], of a measurement.
pub(super) fn failed_so(args: &Args, plan: &RunPlan, outcome: &Outcome) -> bool {
    match &outcome.status {
        Status::Failed(Failure::Device(error)) => worth_a_try(args, plan, error),
        _ => false,
    }
}

/// Measures both arms in turn, and says on what; `None`: the graph arm does not fit alone either.
pub(super) fn measure(
    args: &Args,
    plan: &RunPlan,
    on_gpu: bool,
    beat: &Beat,
    options: &Options,
    hooks: Hooks,
) -> Option<(Outcome, DeviceInfo)> {
    let mut info = None;
    let mut open = |arm| -> Result<Box<dyn Executor>, DeviceError> {
        let alone = plan.alone(arm).ok_or_else(|| DeviceError::internal("this run has no graph arm"))?;
        let executor = open_device(&alone, args, on_gpu, None, beat.clone())?;
        info = Some(executor.info());
        Ok(Box::new(executor))
    };
    let outcome = measure::in_turn(&mut open, options, hooks)?;
    Some((outcome, info?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Command, parse};
    use crate::capture;
    use crate::config::{GraphImpl, Scope};
    use crate::device::inject::Kind;
    use crate::device::{Arm, Phase};
    use crate::measure::{Silent, StepRecord, StepSink};
    use crate::workloads::testing::{dense, program, with_graphs};
    use std::sync::atomic::AtomicBool;

    fn args(in_turn: bool) -> Args {
        let words = "mbperf -m llama -mr llama3_8b -g h100 --device cpu";
        let Ok(Command::Run(mut args)) = parse(words.split_whitespace()) else { panic!("{words}") };
        args.mbperf.in_turn = in_turn;
        *args
    }

    fn plan() -> RunPlan {
        let cfg = with_graphs(dense(), GraphImpl::TransformerEngine, &[Scope::Attn]);
        capture::plan(program(&cfg), &cfg.graph, cfg.seed).unwrap()
    }

    /// A plan whose graph arm needs so many bytes less than the eager one, or more.
    fn plan_of(less: isize) -> RunPlan {
        let mut plan = plan();
        plan.graph.as_mut().unwrap().memory.arena_bytes =
            plan.eager.memory.arena_bytes.strict_add_signed(-less);
        plan
    }

    #[test]
    fn arms_are_tried_alone_where_that_can_help() {
        let of = |kind: Kind| kind.error(Phase::Instantiate).unwrap();
        for (sweep, kind, less, tried) in [
            (true, Kind::OutOfMemory, 1, true),
            // A plain run ends with its exit code, another fault is none of memory, and nothing is won.
            (false, Kind::OutOfMemory, 1, false),
            (true, Kind::DriverError, 1, false),
            (true, Kind::OutOfMemory, 0, false),
            (true, Kind::OutOfMemory, -1, false),
        ] {
            let found = worth_a_try(&args(sweep), &plan_of(less), &of(kind));
            assert_eq!(found, tried, "{sweep} {kind:?} {less}");
        }
    }

    /// On the device that a run opens, one arm at a time.
    #[test]
    fn each_arm_is_opened_alone() {
        struct Nothing;
        impl StepSink for Nothing {
            fn steps(&mut self, _: &[StepRecord]) -> std::io::Result<()> {
                Ok(())
            }
        }
        let interrupt = AtomicBool::new(false);
        let hooks = Hooks { interrupt: &interrupt, progress: &mut Silent, sink: &mut Nothing };
        let options = Options { max_steps: Some(8), busy: false, ..Options::default() };
        let (outcome, info) =
            measure(&args(true), &plan(), false, &Beat::default(), &options, hooks).unwrap();
        assert_eq!((info.device.as_str(), outcome.in_turn, outcome.status.exit_code()), ("cpu", true, 0));
        let arms: Vec<Arm> = outcome.arms.iter().map(|a| a.arm).collect();
        assert_eq!((arms, outcome.speedup), (vec![Arm::Eager, Arm::Graph], None));
        assert!(outcome.equality.is_some() && outcome.graph_cost.is_some());
    }
}
