//! The steps file: every step of every run, in the order they were run.

use super::columns::{Kind, Value};
use crate::measure::StepRecord;

/// Names and kinds of the columns.
pub const COLUMNS: [(&str, Kind); 14] = [
    ("run_id", Kind::Text),
    ("step", Kind::Int),
    ("side", Kind::Text),
    ("arm", Kind::Text),
    ("block", Kind::Int),
    ("phase", Kind::Text),
    ("pacing", Kind::Text),
    ("submit_ms", Kind::Float),
    ("wait_ms", Kind::Float),
    ("modelled_ms", Kind::Float),
    ("device_span_ms", Kind::Float),
    ("wall_ms", Kind::Float),
    ("loss", Kind::Float),
    ("grad_norm", Kind::Float),
];

/// A step in the order of [`COLUMNS`].
pub fn values(run_id: &str, step: &StepRecord) -> [Value; 14] {
    let float = |x: Option<f64>| x.map_or(Value::Empty, Value::Float);
    let text = |t: &str| Value::Text(t.to_owned());
    // Nine digits hold every bit of an f32.
    [
        text(run_id),
        Value::Int(step.index as u64),
        text(if step.side == 0 { "a" } else { "b" }),
        Value::Text(step.arm.to_string()),
        step.block.map_or(Value::Empty, |b| Value::Int(b as u64)),
        Value::Text(step.phase.to_string()),
        text(step.pacing.name()),
        Value::Float(step.submit_ms),
        Value::Float(step.wait_ms),
        Value::Float(step.modelled_ms),
        float(step.device_span_ms),
        Value::Float(step.wall_ms),
        float(step.loss.map(f64::from)),
        float(step.grad_norm.map(f64::from)),
    ]
}

/// One sentence a column, for the workbook.
pub const MEANINGS: [&str; 14] = [
    "Joins a step with the rows of its run.",
    "Counts all steps of the measurement, in the order they were run.",
    "`a` or `b`: which side of the comparison; with `--aa` both are one arm.",
    "`eager` or `graph`.",
    "Block of timed steps; empty in the equality check.",
    "`equality`, `warmup`, `first_replay`, `switch`, `steady` or `final_check`; statistics rest on `steady` alone.",
    "`run_ahead`: submitted while the step before runs; `sync`: waited for; `modelled`: with the host model's time; `drained`: the device waited for inside the step.",
    "Host time of issuing the step, waits left out.",
    "Host time waiting for the device inside the step.",
    "Host time spun for the host model.",
    "Device time from the step's first event to its last.",
    "Since the step before was seen to be done, or since submission when none was in flight.",
    "Loss of the step; empty for a share without one.",
    "Gradient norm of the step, before clipping.",
];
