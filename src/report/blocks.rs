//! The blocks file: every block of timed steps with the card's state while its last step ran.

use super::columns::{Kind, number};
use crate::measure::outcome::BlockRecord;

/// Names and kinds of the columns; `block` is the steps file's.
pub const COLUMNS: [(&str, Kind); 11] = [
    ("run_id", Kind::Text),
    ("block", Kind::Int),
    ("side", Kind::Text),
    ("pacing", Kind::Text),
    ("steady_steps", Kind::Int),
    ("wall_ms_median", Kind::Float),
    ("sm_clock_mhz", Kind::Float),
    ("temperature_c", Kind::Float),
    ("power_w", Kind::Float),
    ("throttle_reasons", Kind::Text),
    ("other_processes", Kind::Int),
];

/// Cells of a block in the order of [`COLUMNS`].
pub fn cells(run_id: &str, block: &BlockRecord) -> [String; 11] {
    let optional = |x: Option<f64>| x.map_or(String::new(), number);
    let health = &block.health;
    let reasons = health.throttle_reasons.as_deref();
    [
        run_id.to_string(),
        block.number.to_string(),
        if block.side == 0 { "a" } else { "b" }.into(),
        block.pacing.name().into(),
        block.steady_steps.to_string(),
        number(block.wall_ms_median),
        optional(health.sm_clock_mhz),
        optional(health.temperature_c),
        optional(health.power_w),
        // As in the rows: read, and there were none.
        reasons.map_or(String::new(), |r| if r.is_empty() { "none" } else { r }.to_string()),
        health.other_processes.map_or(String::new(), |n| n.to_string()),
    ]
}
