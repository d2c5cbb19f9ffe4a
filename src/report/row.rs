//! One row of results: the facts of a run and the figures of one arm.

use crate::measure::{ArmResult, Outcome};

/// What is known about a run beside its measurement: filled by `main` from configuration, device and program.
/// `None` means not known or not measured, and leaves the cell empty.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunFacts {
    /// See [`super::run_id::new`].
    pub run_id: String,
    /// UTC, ISO 8601.
    pub started_at: String,
    pub host_name: Option<String>,

    pub device: String,
    pub gpu_name: Option<String>,
    pub gpu_uuid: Option<String>,
    pub gpu_memory_mib: Option<f64>,
    pub driver_version: Option<String>,
    pub cuda_version: Option<String>,
    /// `-g`.
    pub gpu_target: String,

    pub model_family: String,
    pub model_recipe: String,
    pub task: String,
    pub variant: Option<String>,
    pub recipe_dtype: String,
    pub compute_dtype: String,

    /// GPUs of the modelled job, and processes that ran.
    pub num_gpus: usize,
    pub world_size: usize,
    /// `stand_in`, `nccl`, `tcp`, the latter two with `+stand_in` where some groups are stood in for, or `none`.
    pub comm: String,
    /// Groups whose ranks are all among the processes, joined with `+`; `None`: one process.
    pub real_groups: Option<String>,
    /// `--comm_model`, where there are stand-ins.
    pub comm_model: Option<String>,
    pub tp: usize,
    pub pp: usize,
    pub cp: usize,
    pub ep: usize,
    pub pp_rank: usize,
    pub micro_batch_size: usize,
    pub num_microbatches: usize,
    pub num_microbatches_recipe: usize,
    pub seq_length: usize,
    /// Layers of the local share.
    pub num_layers: usize,
    pub stack_only: bool,
    pub overlap_wgrad: bool,
    pub seed: u64,

    /// `none`, `local`, `transformer_engine`.
    pub cuda_graph_impl: String,
    pub cuda_graph_scope: Vec<String>,
    pub te_rng_tracker: bool,
    /// What graphs hold, in layers.
    pub captured_layers: String,
    /// Where experts were chosen: `balanced`, `skewed`, `router`; `None` without experts.
    pub moe_routing: Option<&'static str>,
    pub approximations: Vec<String>,

    /// Tokens of one step on this rank.
    pub tokens_per_step: Option<u64>,
    /// Model FLOPs of one step on this rank.
    pub model_flops_per_step: Option<f64>,
    /// Routed rows of one step: kept, added as padding, dropped.
    pub tokens_routed: Option<u64>,
    pub tokens_padded: Option<u64>,
    pub tokens_dropped: Option<u64>,

    /// `bare`, or the name that the host model gives itself.
    pub host_model: String,
    /// Share of the launches that the host model has no part for.
    pub host_model_other_fraction: Option<f64>,
    /// What the host model has nothing of, in words.
    pub host_model_notice: Option<String>,
    /// Which of `--repeat`'s measurements, from 1 on.
    pub repetition: usize,
    /// `--extrapolate`.
    pub extrapolation: Option<crate::extrapolate::Extrapolation>,

    /// Share of the eager arm's launches that lie in graphs.
    pub captured_fraction: Option<f64>,

    pub attention_backend: Option<String>,
    pub gemm_plan_digest: Option<String>,
    pub mbperf_version: String,
    pub git_commit: Option<String>,
    pub git_dirty: Option<bool>,
    /// The command line, as a shell would take it.
    pub command: String,
}

/// One arm of one run, or the reason why there is none.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    pub facts: &'a RunFacts,
    pub outcome: Option<&'a Outcome>,
    /// Figures; `None` when the run failed: every measured cell is empty.
    pub arm: Option<&'a ArmResult>,
    /// `eager` or `graph`.
    pub arm_name: &'static str,
    /// `a` or `b` with `--aa`.
    pub aa: Option<&'static str>,
    pub status: &'static str,
    pub status_reason: &'a str,
}

/// Name of an arm in a cell.
fn arm_name(arm: crate::device::Arm) -> &'static str {
    match arm {
        crate::device::Arm::Eager => "eager",
        crate::device::Arm::Graph => "graph",
    }
}

impl<'a> Row<'a> {
    /// Rows of a finished measurement: `ok` with figures, or `failed` with `reason`, the error's text, and
    /// no figures. None for an interrupted one.
    pub fn of_outcome(facts: &'a RunFacts, outcome: &'a Outcome, reason: &'a str) -> Vec<Row<'a>> {
        use crate::measure::Status;
        let ok = match outcome.status {
            Status::Ok => true,
            Status::Failed(_) => false,
            Status::Interrupted => return Vec::new(),
        };
        let aa = outcome.arms.len() == 2 && outcome.arms[0].arm == outcome.arms[1].arm;
        outcome
            .arms
            .iter()
            .map(|arm| Row {
                facts,
                outcome: Some(outcome),
                arm: ok.then_some(arm),
                arm_name: arm_name(arm.arm),
                aa: aa.then_some(if arm.side == 0 { "a" } else { "b" }),
                status: if ok { "ok" } else { "failed" },
                status_reason: if ok { "" } else { reason },
            })
            .collect()
    }

    /// Rows of a run that was measured, one for each arm that `options` ask for. `reason`: [`crate::measure::Status::reason`].
    pub fn of_run(
        facts: &'a RunFacts,
        options: &crate::measure::Options,
        outcome: &'a Outcome,
        reason: &'a str,
    ) -> Vec<Row<'a>> {
        use crate::measure::Status;
        match outcome.status {
            // Timed in turn, and it failed before the second arm.
            Status::Failed(_) if outcome.in_turn && outcome.arms.len() < options.sides().len() => {
                Self::without_outcome(facts, options, "failed", reason)
            }
            _ => Self::of_outcome(facts, outcome, reason),
        }
    }

    /// Rows of a run that never came to measuring; `status` is `failed` or `skipped`.
    pub fn without_outcome(
        facts: &'a RunFacts,
        options: &crate::measure::Options,
        status: &'static str,
        reason: &'a str,
    ) -> Vec<Row<'a>> {
        let sides = options.sides();
        (0..sides.len())
            .map(|side| Row {
                facts,
                outcome: None,
                arm: None,
                arm_name: arm_name(sides[side]),
                aa: options.aa.map(|_| if side == 0 { "a" } else { "b" }),
                status,
                status_reason: reason,
            })
            .collect()
    }

    /// The outcome of a row that is `ok`.
    pub fn measured(&self) -> Option<&'a Outcome> {
        self.outcome.filter(|_| self.arm.is_some())
    }
    /// The same on the graph arm's row: what only graphs have.
    pub fn graph(&self) -> Option<&'a Outcome> {
        self.measured().filter(|_| self.arm_name == "graph")
    }
    /// The same when the ratio of the arms is a result: a CPU's "graph" is a list replayed, and unequal arms have none.
    pub fn compared(&self) -> Option<&'a Outcome> {
        self.measured().filter(|o| self.facts.device != "cpu" && o.unequal.is_none())
    }
}
