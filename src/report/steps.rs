//! The steps file: every step of every run, in the order they were run.

use super::columns::number;
use crate::measure::StepRecord;

/// Column names.
pub const HEADER: [&str; 14] = [
    "run_id",
    "step",
    "side",
    "arm",
    "block",
    "phase",
    "pacing",
    "submit_ms",
    "wait_ms",
    "modelled_ms",
    "device_span_ms",
    "wall_ms",
    "loss",
    "grad_norm",
];

/// Cells of a step in the order of [`HEADER`].
pub fn cells(run_id: &str, step: &StepRecord) -> [String; 14] {
    let optional = |x: Option<f64>| x.map_or(String::new(), number);
    // Nine digits hold every bit of an f32.
    [
        run_id.to_string(),
        step.index.to_string(),
        if step.side == 0 { "a" } else { "b" }.into(),
        step.arm.to_string(),
        step.block.map_or(String::new(), |b| b.to_string()),
        step.phase.to_string(),
        step.pacing.name().into(),
        number(step.submit_ms),
        number(step.wait_ms),
        number(step.modelled_ms),
        optional(step.device_span_ms),
        number(step.wall_ms),
        optional(step.loss.map(f64::from)),
        optional(step.grad_norm.map(f64::from)),
    ]
}
