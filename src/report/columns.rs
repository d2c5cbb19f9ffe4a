//! The one table of result columns: it drives CSV, JSON, the terminal and `results/README.md`.
//!
//! A column is one line: name (with its unit), kind, meaning, and how a row fills it.

use super::row::Row;
use crate::measure::ArmResult;

/// Changes when a column changes its name or meaning, or goes; a file of another version is not appended to.
pub const SCHEMA_VERSION: u64 = 1;

/// One cell.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Not measured, not known, or it does not apply.
    Empty,
    Text(String),
    Int(u64),
    Float(f64),
    Bool(bool),
}

/// What a column holds when it is not empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Text,
    Int,
    Float,
    Bool,
}

impl Kind {
    /// For a reader of the columns' table.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Text => "text",
            Kind::Int => "integer",
            Kind::Float => "number",
            Kind::Bool => "true/false",
        }
    }
}

pub struct Column {
    pub name: &'static str,
    pub kind: Kind,
    /// One sentence for `results/README.md`.
    pub meaning: &'static str,
    pub value: fn(&Row) -> Value,
}

/// Digits that a cell keeps: beyond what any clock here resolves, short enough to read.
const SIGNIFICANT_DIGITS: i32 = 9;

impl Value {
    /// Plain notation: no exponent, no grouping, a dot, whatever the locale. Values that are not finite
    /// are empty.
    pub fn cell(&self) -> String {
        match self {
            Value::Empty => String::new(),
            Value::Text(text) => text.clone(),
            Value::Int(n) => n.to_string(),
            Value::Float(x) => number(*x),
            Value::Bool(b) => b.to_string(),
        }
    }

    /// The value that a plain cell stands for; `None` when it is none of this kind.
    pub fn parse(cell: &str, kind: Kind) -> Option<Self> {
        if cell.is_empty() {
            return Some(Value::Empty);
        }
        match kind {
            Kind::Text => Some(Value::Text(cell.to_owned())),
            Kind::Int => cell.parse().ok().map(Value::Int),
            Kind::Float => cell.parse().ok().filter(|x: &f64| x.is_finite()).map(Value::Float),
            Kind::Bool => cell.parse().ok().map(Value::Bool),
        }
    }

    pub fn json(&self) -> serde_json::Value {
        match self {
            Value::Empty => serde_json::Value::Null,
            Value::Text(text) => text.as_str().into(),
            Value::Int(n) => (*n).into(),
            // From the cell's text, so that CSV and JSON agree to the last digit.
            Value::Float(x) => number(*x).parse::<f64>().map_or(serde_json::Value::Null, Into::into),
            Value::Bool(b) => (*b).into(),
        }
    }
}

/// A week: no step, block or capture comes near it.
const LONGEST_MS: f64 = 7.0 * 24.0 * 3600.0 * 1e3;
/// A nanosecond: what the difference of two readings of a clock may be under zero.
const CLOCK_MS: f64 = 1e-6;
/// A pebibyte, a thousand times the memory of a machine.
const MOST_MIB: f64 = (1u64 << 30) as f64;
/// Losses and norms are `f32`; nothing else that is measured comes near its end.
const LARGEST: f64 = f32::MAX as f64;

/// That a number may stand in a column of this name: what nobody can have measured is no result.
///
/// # Errors
/// The range.
pub fn possible(column: &str, x: f64) -> Result<(), String> {
    let (range, unit) = if column.ends_with("_fraction") {
        // Busy time is of a pass of its own and may exceed the span of the others.
        (if column == "launch_bound_fraction" { -1.0..=1.0 } else { 0.0..=1.0 }, "")
    } else if column.ends_with("_ms") || column.contains("_ms_") {
        (-CLOCK_MS..=LONGEST_MS, " ms (a week)")
    } else if column.ends_with("_mib") {
        (-MOST_MIB..=MOST_MIB, " MiB")
    } else {
        (-LARGEST..=LARGEST, "")
    };
    if range.contains(&x) {
        return Ok(());
    }
    // A time a nanosecond under zero is one of zero.
    let low = if *range.start() == -CLOCK_MS { 0.0 } else { *range.start() };
    let ends =
        [low, *range.end()].map(|end| if end.abs() < LARGEST { end.to_string() } else { format!("{end:e}") });
    Err(format!("{x:e} is not between {} and {}{unit}", ends[0], ends[1]))
}

/// A number in plain decimal notation, rounded to nine significant digits; empty if not finite.
pub fn number(x: f64) -> String {
    if !x.is_finite() {
        return String::new();
    }
    if x == 0.0 {
        return "0".into();
    }
    let magnitude = x.abs().log10().floor() as i32;
    let decimals = (SIGNIFICANT_DIGITS - 1 - magnitude).max(0) as usize;
    let text = format!("{x:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_string() } else { text }
}

/// What fills a cell; `None` leaves it empty.
trait IntoValue {
    fn into_value(self) -> Value;
}
impl IntoValue for &str {
    fn into_value(self) -> Value {
        if self.is_empty() { Value::Empty } else { Value::Text(self.to_string()) }
    }
}
impl IntoValue for String {
    fn into_value(self) -> Value {
        self.as_str().into_value()
    }
}
impl IntoValue for usize {
    fn into_value(self) -> Value {
        Value::Int(self as u64)
    }
}
impl IntoValue for u64 {
    fn into_value(self) -> Value {
        Value::Int(self)
    }
}
impl IntoValue for f64 {
    fn into_value(self) -> Value {
        if self.is_finite() { Value::Float(self) } else { Value::Empty }
    }
}
impl IntoValue for bool {
    fn into_value(self) -> Value {
        Value::Bool(self)
    }
}
impl<T: IntoValue> IntoValue for Option<T> {
    fn into_value(self) -> Value {
        self.map_or(Value::Empty, T::into_value)
    }
}

/// `Column` from one line.
macro_rules! columns {
    ($($name:ident $kind:ident $row:ident => $value:expr, $meaning:literal;)*) => {
        /// All columns in file order: those that other tools may count on first, then the rest.
        pub const COLUMNS: &[Column] = &[
            $(Column {
                name: stringify!($name),
                kind: Kind::$kind,
                meaning: $meaning,
                value: |$row: &Row| IntoValue::into_value($value),
            }),*
        ];
    };
}

const MIB: f64 = 1_048_576.0;

fn peak_mib(row: &Row) -> Option<f64> {
    Some(row.arm?.planned_bytes as f64 / MIB)
}

fn memory_source(row: &Row) -> Option<String> {
    row.arm?;
    let cost = row.graph().and_then(|o| o.graph_cost.as_ref()).map(|c| match c.memory_mib {
        Some(_) => "graphs: driver".to_string(),
        None => format!("graphs: not measured, {}", c.memory_note),
    });
    Some(std::iter::once("peak: plan".to_string()).chain(cost).collect::<Vec<_>>().join("; "))
}

fn extrapolated(row: &Row) -> Option<crate::extrapolate::Extrapolated> {
    row.facts.extrapolation.as_ref()?.arms[row.arm?.side.min(1)]
}

fn extrapolated_speedup(row: &Row) -> Option<(f64, f64)> {
    row.compared()?;
    row.facts.extrapolation.as_ref()?.speedup()
}

fn launch_bound(row: &Row) -> Option<f64> {
    let arm = row.arm.filter(|_| row.arm_name == "eager")?;
    Some(1.0 - arm.device_busy_ms? / arm.device_span_ms?)
}

/// `per_step` over the median step time, in units a second.
fn rate(row: &Row, per_step: Option<f64>) -> Option<f64> {
    Some(per_step? / (row.arm?.step_time_ms? / 1e3))
}

fn graph_cost<T>(row: &Row, pick: fn(&crate::device::GraphCost) -> T) -> Option<T> {
    row.graph().and_then(|o| o.graph_cost.as_ref()).map(pick)
}

fn arm<T>(row: &Row, pick: fn(&ArmResult) -> Option<T>) -> Option<T> {
    row.arm.and_then(pick)
}

/// Equality was shown, or was refuted.
fn digest_match(row: &Row) -> Option<bool> {
    use crate::device::DeviceError;
    use crate::measure::{Status, outcome::Failure};
    let outcome = row.outcome?;
    match &outcome.status {
        Status::Failed(Failure::Device(DeviceError::Unequal(_))) => Some(false),
        _ if outcome.unequal.is_some() => Some(false),
        _ => outcome.equality.as_ref().map(|_| true),
    }
}

columns! {
    schema_version Int _r => SCHEMA_VERSION, "Version of these columns; a file holds one version.";
    run_id Text r => r.facts.run_id.as_str(), "Joins the rows of one run with its steps and its line in the runs file.";
    status Text r => r.status, "`ok`, `failed` or `skipped`; figures are filled for `ok` alone.";
    status_reason Text r => r.status_reason, "Why a row is not `ok`.";
    device Text r => r.facts.device.as_str(), "`cuda` or `cpu`; a CPU row proves the flow, its times say nothing about a GPU.";
    gpu_name Text r => r.facts.gpu_name.clone(), "Name of the GPU as the driver gives it.";
    driver_version Text r => r.facts.driver_version.clone(), "Version of the NVIDIA driver.";
    cuda_version Text r => r.facts.cuda_version.clone(), "CUDA version that the driver supports.";
    gpu_target Text r => r.facts.gpu_target.as_str(), "GPU that the recipe was written for (`-g`).";
    model_family Text r => r.facts.model_family.as_str(), "Model family (`-m`).";
    model_recipe Text r => r.facts.model_recipe.as_str(), "Model recipe (`-mr`).";
    task Text r => r.facts.task.as_str(), "`pretrain`, `sft` or `peft`.";
    recipe_dtype Text r => r.facts.recipe_dtype.as_str(), "Dtype of the recipe (`-c`).";
    compute_dtype Text r => r.facts.compute_dtype.as_str(), "Dtype that the kernels ran in.";
    num_gpus Int r => r.facts.num_gpus, "GPUs of the modelled job (`-ng`).";
    world_size Int r => r.facts.world_size, "Processes that ran.";
    comm Text r => r.facts.comm.as_str(), "Collectives: `stand_in` (device copies of this rank's bytes), `nccl`, `tcp` (the CPU's), `nccl+stand_in` or `tcp+stand_in` where some groups are real, or `none`.";
    tp Int r => r.facts.tp, "Tensor-parallel size.";
    pp Int r => r.facts.pp, "Pipeline-parallel size.";
    cp Int r => r.facts.cp, "Context-parallel size.";
    ep Int r => r.facts.ep, "Expert-parallel size.";
    micro_batch_size Int r => r.facts.micro_batch_size, "Sequences of a micro-batch.";
    num_microbatches Int r => r.facts.num_microbatches, "Micro-batches that a step ran.";
    num_microbatches_recipe Int r => r.facts.num_microbatches_recipe, "Micro-batches of a step of the whole job.";
    seq_length Int r => r.facts.seq_length, "Tokens of a sequence.";
    num_layers Int r => r.facts.num_layers, "Layers of this rank.";
    arm Text r => r.arm_name, "`eager` or `graph`.";
    cuda_graph_impl Text r => r.facts.cuda_graph_impl.as_str(), "`none`, `local` or `transformer_engine`; the eager row names the run's too.";
    cuda_graph_scope Text r => r.facts.cuda_graph_scope.join("+"), "Scope names joined with `+`; empty with `transformer_engine`: each whole layer.";
    te_rng_tracker Bool r => r.facts.te_rng_tracker, "Whether the RNG tracker was on.";
    approximations Text r => r.facts.approximations.join("+"), "Recipe features that ran in simpler form, joined with `+`. Another type than the recipe's (--run_dtype) is in recipe_dtype and compute_dtype.";
    steps_steady Int r => arm(r, |a| Some(a.steps_steady)), "Steps behind the figures.";
    step_time_ms_median Float r => arm(r, |a| a.step_time_ms), "Median wall time of a step with one step of run-ahead.";
    step_time_ms_ci95_low Float r => arm(r, |a| a.step_time_ms_ci95.map(|c| c.0)), "Low end of the median's 95 % interval, from block medians (order statistics).";
    step_time_ms_ci95_high Float r => arm(r, |a| a.step_time_ms_ci95.map(|c| c.1)), "High end of it.";
    host_submit_ms_median Float r => arm(r, |a| a.host_submit_ms), "Host time of issuing a step, waits left out; a full launch queue counts in, so that it comes near the step time where the device is the limit (compare `host_issue_ms_median`).";
    host_wait_ms_median Float r => arm(r, |a| a.host_wait_ms), "Host time waiting for the device inside a step (counts copied to the host).";
    device_span_ms_median Float r => arm(r, |a| a.device_span_ms), "Device time from a step's first event to its last, both outside graphs.";
    device_busy_ms Float r => arm(r, |a| a.device_busy_ms), "Union of the kernel intervals of a step, from a profiling pass made last.";
    launch_bound_fraction Float r => launch_bound(r), "1 - device_busy_ms / device_span_ms_median of the eager arm: share of the span without a kernel.";
    launches_per_step Int r => arm(r, |a| Some(a.launches_per_step)), "Kernels, copies and memsets of a step, those inside graphs counted one by one; in the graph arm also copies into graphs' static buffers.";
    graphs Int r => graph_cost(r, |c| c.graphs), "Distinct graphs.";
    graph_nodes Int r => graph_cost(r, |c| c.nodes), "Nodes of all distinct graphs.";
    graph_launches_per_step Int r => graph_cost(r, |c| c.launches_per_step), "Replays of a step.";
    capture_ms Float r => graph_cost(r, |c| c.capture_ms), "One-off: capturing all graphs.";
    instantiate_ms Float r => graph_cost(r, |c| c.instantiate_ms), "One-off: instantiating them.";
    upload_ms Float r => graph_cost(r, |c| c.upload_ms), "One-off: uploading them.";
    first_replay_ms Float r => r.graph().and_then(|o| o.first_replay_ms), "Wall time of the first replayed step; in no statistic.";
    peak_memory_mib Float r => peak_mib(r), "Device memory of the arm as planned: weights, state, activations, workspaces; the arms share it. `memory_used_mib` is what the driver saw.";
    graph_memory_mib Float r => r.graph().and_then(|o| o.graph_cost.as_ref()?.memory_mib), "Device memory that capture, instantiation and upload took.";
    memory_source Text r => memory_source(r), "Where the two memory figures come from, or why one is empty.";
    tokens_per_s Float r => rate(r, r.facts.tokens_per_step.map(|t| t as f64)), "Tokens of this rank a second, at the median step time.";
    model_tflops_per_gpu Float r => rate(r, r.facts.model_flops_per_step.map(|f| f / 1e12)), "Model TFLOP/s of this rank (recomputation not counted; what a capacity factor without padding drops is counted), at the median step time.";
    speedup Float r => r.compared().and_then(|o| o.speedup), "Step time eager over graph: above 1 the graph is faster. A lower bound for frameworks with a slower host; empty on a CPU.";
    speedup_ci95_low Float r => r.compared().and_then(|o| o.speedup_ci95.map(|c| c.0)), "Low end of the 95 % interval of the paired log-ratio; empty under eight pairs.";
    speedup_ci95_high Float r => r.compared().and_then(|o| o.speedup_ci95.map(|c| c.1)), "High end of it.";
    verdict Text r => r.compared().and_then(|o| o.verdict).map(|v| v.to_string()), "`faster`, `slower`, `equivalent` (interval inside the margin) or `undecided`.";
    speedup_modelled Float r => r.compared().and_then(|o| o.speedup_modelled), "Speedup when issuing takes the host model's time, from blocks of their own; never in place of `speedup`.";
    host_model Text r => r.facts.host_model.as_str(), "`bare` (this program's own host time), `pytorch`, or what the file calls itself with a digest of it (`calibrated:1a2b3c4d`).";
    break_even_steps Float r => r.compared().and_then(|o| o.break_even_steps), "Steps after which capture, instantiation and upload are earned back; empty unless the graph is faster.";
    digest_match Bool r => digest_match(r), "Whether losses and the bits of weights, moments and gradients were equal in both arms; `false` in a row that is `ok`: attention was let add in any order (`--attention_deterministic false`), and there is no speedup.";
    loss_last Float r => arm(r, |a| a.loss_last.map(f64::from)), "Loss of the arm's own last step; arms are timed over unlike numbers of steps, so that it may differ (the equality check compares equal steps). Empty for a share without a loss.";
    attention_backend Text r => r.facts.attention_backend.clone(), "Kernels that computed attention: `cudnn` and its version, `own`, both joined with `+`, or `reference` (CPU).";
    sm_clock_mhz_median Float r => arm(r, |a| a.health.sm_clock_mhz_median), "Median SM clock over the arm's blocks.";
    throttle_reasons Text r => arm(r, |a| a.health.throttle_reasons.as_ref().map(|t| if t.is_empty() { "none".to_string() } else { t.clone() })), "Reasons for which clocks were held back, joined with `+`; `none`: read, and there were none.";
    steady_reached Bool r => arm(r, |a| a.steady.reached), "Whether step times had no trend, across blocks and within them; empty under six blocks.";
    git_commit Text r => r.facts.git_commit.clone(), "Commit that mbperf was built from.";
    command Text r => r.facts.command.as_str(), "Command line of the run.";

    aa Text r => r.aa, "`a` or `b` when an arm was timed against itself (`--aa`).";
    started_at Text r => r.facts.started_at.as_str(), "Start of the run, UTC.";
    host_name Text r => r.facts.host_name.clone(), "Name of the machine.";
    gpu_uuid Text r => r.facts.gpu_uuid.clone(), "Identity of the GPU.";
    gpu_memory_mib Float r => r.facts.gpu_memory_mib, "Memory of the GPU, or of the MIG slice, as the driver gives it.";
    gemm_plan_digest Text r => r.facts.gemm_plan_digest.clone(), "Hash of the cuBLASLt plans in force, shapes and algorithms; empty on a CPU. `compare` warns when it differs.";
    mbperf_version Text r => r.facts.mbperf_version.as_str(), "Version of mbperf.";
    git_dirty Bool r => r.facts.git_dirty, "Whether the sources differed from the commit.";
    variant Text r => r.facts.variant.clone(), "Variant of the recipe.";
    seed Int r => r.facts.seed, "Seed of weights, tokens, routing and dropout.";
    pp_rank Int r => r.facts.pp_rank, "Pipeline rank that was run.";
    stack_only Bool r => r.facts.stack_only, "Whether the layer stack alone was run.";
    overlap_wgrad Bool r => r.facts.overlap_wgrad, "Whether weight gradients ran on a stream of their own.";
    tokens_routed Int r => r.facts.tokens_routed, "Token choices that the routers sent to this rank's experts in the last step that ran, over its layers and micro-batches; the arms are compared on it.";
    tokens_padded Int r => r.facts.tokens_padded, "Rows of that step that a capacity factor added as padding; the arms are compared on it.";
    tokens_dropped Int r => r.facts.tokens_dropped, "Choices of that step that a capacity factor dropped; the arms are compared on it.";
    step_time_ms_p05 Float r => arm(r, |a| a.step_time_ms_p05), "5th percentile of the step time.";
    step_time_ms_p95 Float r => arm(r, |a| a.step_time_ms_p95), "95th percentile of it.";
    blocks Int r => arm(r, |a| Some(a.blocks)), "Blocks of the arm with run-ahead.";
    steps_sync Int r => arm(r, |a| Some(a.steps_sync)), "Steps behind the `_sync` columns.";
    step_time_ms_sync_median Float r => arm(r, |a| a.step_time_ms_sync), "Median wall time of a step when every step is waited for.";
    host_submit_ms_sync_median Float r => arm(r, |a| a.host_submit_ms_sync), "Host time of issuing a step to an idle device; a step of more launches than the queue holds is still held up.";
    host_issue_ms_median Float r => arm(r, |a| a.host_issue_ms), "Host time of issuing a step that the launch queue never holds up (a few steps, the device waited for every 256 launches, the waits left out): what issuing costs. Far below the step time: a faster host would win nothing.";
    device_span_ms_sync_median Float r => arm(r, |a| a.device_span_ms_sync), "Device span of a step issued to an idle device.";
    speedup_sync Float r => r.compared().and_then(|o| o.speedup_sync), "Speedup when every step is waited for.";
    speedup_cycles Float r => r.compared().and_then(|o| o.speedup_cycles), "Speedup in SM cycles: times the ratio of the arms' clocks. Empty where steps of both arms were timed in turns: a reading of the clock is then of both.";
    pairs Int r => r.measured().filter(|o| o.arms.len() == 2).map(|o| o.pairs), "Pairs of neighbouring blocks behind `speedup`.";
    margin Float r => r.measured().map(|o| o.margin), "Relative difference that counts as none.";
    stopped_by Text r => r.measured().and_then(|o| o.stopped).map(stopped_by), "`precision`, `max_time` or `max_steps`.";
    steady_reason Text r => arm(r, |a| a.steady.reason.clone()), "The trend that was found, or why none was looked for.";
    device_busy_note Text r => arm(r, |a| a.busy_note.clone()), "Why `device_busy_ms` is empty.";
    equality_steps Int r => r.outcome.and_then(|o| o.equality.as_ref()).map(|e| e.steps), "Steps of each arm in the equality check.";
    final_check Text r => r.measured().and_then(|o| o.final_check.as_ref()).map(final_check), "`equal`: after timing both arms left the same bits from the seed once more; else `skipped` and why.";
    digest Text r => r.outcome.and_then(|o| o.equality.as_ref()).map(|e| format!("{:016x}", e.digest)), "Hash over the bits of all buffers compared: repeats with seed, configuration and `equality_steps`.";
    grad_norm_last Float r => arm(r, |a| a.grad_norm_last.map(f64::from)), "Gradient norm of the last step, before clipping.";
    speedup_modelled_ci95_low Float r => r.compared().and_then(|o| o.speedup_modelled_ci95.map(|c| c.0)), "Low end of the 95 % interval of `speedup_modelled`; empty under eight pairs.";
    speedup_modelled_ci95_high Float r => r.compared().and_then(|o| o.speedup_modelled_ci95.map(|c| c.1)), "High end of it.";
    pairs_modelled Int r => r.measured().filter(|_| r.facts.host_model != "bare").map(|o| o.pairs_modelled), "Pairs of blocks behind `speedup_modelled`.";
    step_time_ms_modelled_median Float r => arm(r, |a| a.step_time_ms_modelled), "Median wall time of a step under the host model.";
    host_ms_modelled_median Float r => arm(r, |a| a.host_ms_modelled), "Host time of issuing a step under the host model: launches, waits and what was spun.";
    host_model_other_fraction Float r => r.facts.host_model_other_fraction, "Share of the eager launches that the host model has no part for and charges by launch.";
    memory_used_mib Float r => r.measured().and_then(|o| o.memory_used_mib), "Device memory that the process took when timing ended, both arms, kernels and graphs, by the driver; empty beside other processes.";
    disturbed_fraction Float r => arm(r, |a| a.disturbed_fraction), "Share of the steady steps over 25 % longer than the arm's 5th percentile: above 0.05 something else used the GPU.";
    repetition Int r => Some(r.facts.repetition).filter(|n| *n > 0), "Which of the measurements of one process (`--repeat`).";
    microbatches_extrapolated Int r => r.facts.extrapolation.as_ref().map(|e| e.to), "Micro-batches that the extrapolated columns are for (`--extrapolate`).";
    extrapolated_from Text r => r.facts.extrapolation.as_ref().map(|e| e.from.iter().map(usize::to_string).collect::<Vec<_>>().join("+")), "Micro-batches of the steps that were timed for it.";
    step_time_ms_extrapolated Float r => extrapolated(r).map(|e| e.step_time_ms), "Step time at that number, by a straight line.";
    step_time_ms_extrapolated_error Float r => extrapolated(r).map(|e| e.error_ms), "Its 95 % error: of the points, and of their distance from the line.";
    extrapolation_misfit Float r => extrapolated(r).map(|e| e.misfit), "Largest distance of a timed point from the line, relative to its time.";
    speedup_extrapolated Float r => extrapolated_speedup(r).map(|s| s.0), "Extrapolated step time eager over graph.";
    speedup_extrapolated_error Float r => extrapolated_speedup(r).map(|s| s.1), "Its 95 % error.";
    captured_fraction Float r => r.facts.captured_fraction, "Share of the program's launches (a library call is one) that lie in the graph arm's graphs.";
    arms_in_turn Bool r => r.measured().filter(|o| o.arms.len() == 2).map(|o| o.in_turn), "Whether the arms did not fit in memory together and each was timed alone: their ratio is then no speedup.";
    temperature_c_max Float r => arm(r, |a| a.health.temperature_c_max), "Highest GPU temperature over the blocks.";
    power_w_median Float r => arm(r, |a| a.health.power_w_median), "Median power over the blocks.";
    power_limit_w Float r => arm(r, |a| a.health.power_limit_w), "Power limit in force.";
    other_processes_max Int r => arm(r, |a| a.health.other_processes_max), "Most other processes seen computing on the GPU.";
    real_groups Text r => r.facts.real_groups.clone(), "Groups whose ranks are all among the processes and whose collectives go over the wire, joined with `+`; empty for one process.";
    comm_model Text r => r.facts.comm_model.clone(), "How long stood-in collectives take (`--comm_model`): `copy`, or the wire and its 10^9 bytes a second; empty where none is stood in for.";
    rank_step_time_ms_min Float r => arm(r, |a| a.rank_step_time_ms.map(|t| t.0)), "Several processes: the fastest rank's own median step time. `step_time_ms_median` is of the slowest rank of each step.";
    rank_step_time_ms_max Float r => arm(r, |a| a.rank_step_time_ms.map(|t| t.1)), "The slowest rank's own median step time.";
    rank_skew_ms Float r => arm(r, |a| a.rank_skew_ms), "Median over steps of what the slowest rank took longer than the fastest.";
    captured_layers Text r => r.facts.captured_layers.clone(), "Layers of this rank that the scope captures, by scope (`attn 48, moe_router 48`); `whole_layer` or `full_iteration` with all of them; `none` without graphs.";
    moe_routing Text r => r.facts.moe_routing, "Who chose the experts: `balanced` (forced random, as the recipe or `--moe_routing` asks), `skewed`, or the `router`; empty without experts.";
}

fn stopped_by(stopped: crate::measure::outcome::Stopped) -> &'static str {
    use crate::measure::outcome::Stopped;
    match stopped {
        Stopped::Precision => "precision",
        Stopped::MaxTime => "max_time",
        Stopped::MaxSteps => "max_steps",
    }
}

fn final_check(check: &crate::measure::outcome::FinalCheck) -> String {
    use crate::measure::outcome::FinalCheck;
    match check {
        FinalCheck::Equal { .. } => "equal".into(),
        FinalCheck::Skipped(why) => format!("skipped: {why}"),
    }
}

/// Header names in file order.
pub fn header() -> Vec<&'static str> {
    COLUMNS.iter().map(|c| c.name).collect()
}

/// Names and kinds in file order.
pub fn kinds() -> Vec<(&'static str, Kind)> {
    COLUMNS.iter().map(|c| (c.name, c.kind)).collect()
}

/// Values of a row in file order.
pub fn values(row: &Row) -> Vec<Value> {
    COLUMNS.iter().map(|c| (c.value)(row)).collect()
}

/// Cells of a row in file order.
pub fn cells(row: &Row) -> Vec<String> {
    COLUMNS.iter().map(|c| (c.value)(row).cell()).collect()
}

/// A row as a JSON object, `null` where the cell is empty.
pub fn json(row: &Row) -> serde_json::Value {
    COLUMNS
        .iter()
        .map(|c| (c.name.to_string(), (c.value)(row).json()))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// The columns as a Markdown table, for `results/README.md`.
pub fn markdown() -> String {
    let mut text = String::from("| column | type | meaning |\n| --- | --- | --- |\n");
    for column in COLUMNS {
        text.push_str(&format!("| `{}` | {} | {} |\n", column.name, column.kind.name(), column.meaning));
    }
    text
}
