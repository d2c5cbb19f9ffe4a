//! The profile for a person, and as JSON.

use super::{Profile, Sum, UNATTRIBUTED};
use serde_json::{Value, json};

/// Kernels that are told one by one; the profile file holds all.
const MOST_KERNELS: usize = 12;
/// Characters of a kernel's name in the table: a library's are hundreds long.
const NAME_CHARS: usize = 56;
/// Sums by part that differ from the busy time by more than this are told.
pub const CLOSE: f64 = 0.03;

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

fn share(ns: u64, of: u64) -> String {
    match of {
        0 => "-".into(),
        of => format!("{:.1} %", ns as f64 / of as f64 * 100.0),
    }
}

/// A table of one arm.
pub fn text(profile: &Profile) -> String {
    let Profile { arm, busy_ns, span_ns, gaps, recorded, .. } = profile;
    let mut out = format!(
        "Profile of one {arm} step, recorded by {}: the device was busy {:.3} of {:.3} ms.\n",
        recorded.recorder,
        ms(*busy_ns),
        ms(*span_ns)
    );
    let line = |name: &str, sum: Sum| {
        format!(
            "  {name:<16}{:>10}{:>14.3}{:>10}{:>16.3}\n",
            sum.launches,
            ms(sum.device_ns),
            share(sum.device_ns, *busy_ns),
            ms(sum.gap_ns)
        )
    };
    out += &format!(
        "  {:<16}{:>10}{:>14}{:>10}{:>16}\n",
        "part", "launches", "device ms", "of busy", "idle before ms"
    );
    for (part, sum) in profile.parts() {
        out += &line(part, sum);
    }
    let (of_parts, rest) = profile.attributed();
    out += &line("all parts", of_parts);
    let all = of_parts.device_ns + rest.device_ns;
    let apart = (of_parts.device_ns as f64 - *busy_ns as f64) / (*busy_ns).max(1) as f64;
    if apart.abs() > CLOSE {
        out += &format!(
            "  The parts' sum is {:.1} % off the busy time: {:.3} ms overlap (kernels beside each other count each), \
             {:.3} ms are {UNATTRIBUTED}.\n",
            apart * 100.0,
            ms(all.saturating_sub(*busy_ns)),
            ms(rest.device_ns)
        );
    }
    if gaps.count > 0 {
        let before = gaps.longest_before.map_or(String::new(), |at| {
            let part = profile.launch(at).map_or(UNATTRIBUTED, |(_, l)| l.part.name());
            format!(", before {} ({part})", cut(&recorded.records[at].unit.name))
        });
        out += &format!(
            "  Between kernels: {} gaps, {:.3} ms; median {:.1} us, longest {:.1} us{before}.\n",
            gaps.count,
            ms(gaps.total_ns),
            gaps.median_ns as f64 / 1e3,
            gaps.longest_ns as f64 / 1e3
        );
    }
    let kernels: usize = recorded.records.len();
    out += &match &profile.matched.difference {
        None => format!("  All {kernels} recorded names are the launch list's.\n"),
        Some(difference) => format!("  Not the launch list's: {difference}.\n"),
    };
    out += &format!("  {:<58}{:<16}{:>9}{:>12}\n", "kernel", "part", "launches", "device ms");
    for l in profile.lines.iter().take(MOST_KERNELS) {
        let name = cut(&l.kernel);
        out += &format!("  {name:<58}{:<16}{:>9}{:>12.3}\n", l.part, l.launches, ms(l.device_ns));
    }
    if let Some(more) = profile.lines.len().checked_sub(MOST_KERNELS).filter(|n| *n > 0) {
        let ns: u64 = profile.lines[MOST_KERNELS..].iter().map(|l| l.device_ns).sum();
        out += &format!("  {:<74}{:>21.3}\n", format!("{more} more"), ms(ns));
    }
    out
}

fn cut(name: &str) -> String {
    match name.chars().count() > NAME_CHARS {
        false => name.to_owned(),
        true => name.chars().take(NAME_CHARS - 2).chain("..".chars()).collect(),
    }
}

/// The same figures for a program, every kernel among them.
pub fn json(profile: &Profile) -> Value {
    let sum = |s: &Sum| json!({ "launches": s.launches, "device_ms": ms(s.device_ns), "idle_before_ms": ms(s.gap_ns) });
    let parts: serde_json::Map<String, Value> =
        profile.parts().iter().map(|(part, s)| ((*part).to_owned(), sum(s))).collect();
    let kernels: Vec<Value> = profile
        .lines
        .iter()
        .map(|l| {
            json!({
                "part": l.part, "kernel": &*l.kernel, "launches": l.launches,
                "device_ms": ms(l.device_ns), "idle_before_ms": ms(l.gap_ns),
            })
        })
        .collect();
    json!({
        "arm": profile.arm.to_string(),
        "recorder": profile.recorded.recorder,
        "device_busy_ms": ms(profile.busy_ns),
        "device_span_ms": ms(profile.span_ns),
        "parts": parts,
        "kernels": kernels,
        "gaps": {
            "count": profile.gaps.count, "total_ms": ms(profile.gaps.total_ns),
            "median_ms": ms(profile.gaps.median_ns), "longest_ms": ms(profile.gaps.longest_ns),
        },
        "names_equal_launch_list": profile.matched.difference.is_none(),
        "difference": profile.matched.difference,
    })
}
