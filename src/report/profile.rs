//! The profile file: device time of every kernel in every part of one step, of each arm that was profiled.

use super::columns::{Kind, number};
use crate::profile::Profile;

/// Names and kinds of the columns.
pub const COLUMNS: [(&str, Kind); 7] = [
    ("run_id", Kind::Text),
    ("arm", Kind::Text),
    ("part", Kind::Text),
    ("kernel", Kind::Text),
    ("launches", Kind::Int),
    ("device_ms", Kind::Float),
    ("idle_before_ms", Kind::Float),
];

/// Lines in the order of [`COLUMNS`], the longest kernel first.
pub fn cells(run_id: &str, profile: &Profile) -> Vec<[String; 7]> {
    let ms = |ns: u64| number(ns as f64 / 1e6);
    let line = |l: &crate::profile::Line| {
        [
            run_id.to_owned(),
            profile.arm.to_string(),
            l.part.to_owned(),
            l.kernel.to_string(),
            l.launches.to_string(),
            ms(l.device_ns),
            ms(l.gap_ns),
        ]
    };
    profile.lines.iter().map(line).collect()
}
