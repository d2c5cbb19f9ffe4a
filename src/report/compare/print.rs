//! The report as a table for a terminal, Markdown for a pull request, and JSON.

use super::{Report, Row, Verdict};
use crate::report::columns::number;
use std::fmt::Write;

/// What the reports in files begin with: a file that begins otherwise is none.
pub const JSON_START: &str = "{\n  \"verdict\": ";
pub const MARKDOWN_START: &str = "### mbperf compare: ";

/// The report as JSON, with a line end.
///
/// # Errors
/// None that plain data has.
pub fn json(report: &Report) -> serde_json::Result<String> {
    Ok(serde_json::to_string_pretty(report)? + "\n")
}

/// The answer in one line.
pub fn headline(report: &Report) -> String {
    let count = |verdict| report.rows.iter().filter(|r| r.verdict == verdict).count();
    let of = format!("of {} figures", report.rows.len());
    match report.verdict {
        Verdict::Regression => format!("REGRESSION in {} {of}", count(Verdict::Regression)),
        Verdict::Undecided => format!(
            "UNDECIDED in {} {of}: measure more runs a side, or a longer time (--max_time)",
            count(Verdict::Undecided)
        ),
        Verdict::CannotCompare => {
            let unlike = report.unlike.first().map(|u| format!("unlike in {}", u.field));
            let missing = report.missing.first().map(|m| format!("{} lacks {}", m.side, m.label));
            let first = unlike.or_else(|| report.reasons.first().cloned()).or(missing);
            format!("CANNOT COMPARE: {}", plain(&first.unwrap_or_default()))
        }
        Verdict::Improvement => {
            format!("fine: no regression, improvement in {} {of}", count(Verdict::Improvement))
        }
        Verdict::WithinThreshold => format!("fine: no regression in {} figures", report.rows.len()),
    }
}

fn verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Regression => "REGRESSION",
        Verdict::Improvement => "improvement",
        Verdict::WithinThreshold => "fine",
        Verdict::Undecided => "UNDECIDED",
        Verdict::CannotCompare => "CANNOT COMPARE",
    }
}

/// A figure in four decimals, fewer when it is large.
fn figure(x: Option<f64>) -> String {
    x.map_or(
        "-".into(),
        |x| if x.abs() < 1000.0 { number((x * 1e4).round() / 1e4) } else { format!("{x:.1}") },
    )
}

/// A part of one in percent, with its sign; what rounds to nothing has none.
fn percent(part: f64) -> String {
    match format!("{:+.1}", part * 100.0).as_str() {
        "+0.0" | "-0.0" => "0.0".into(),
        text => text.to_owned(),
    }
}

/// `-4.8 % [-7.6, -1.9]`: the change and its interval.
fn change(row: &Row) -> String {
    match (row.change, row.change_ci99_low, row.change_ci99_high) {
        (Some(change), Some(low), Some(high)) => {
            format!("{} % [{}, {}]", percent(change), percent(low), percent(high))
        }
        _ => "-".into(),
    }
}

const HEADER: [&str; 7] = ["configuration", "figure", "base", "new", "change [99 %]", "runs", "verdict"];

fn cells(row: &Row) -> [String; 7] {
    [
        row.label.clone(),
        row.metric.name().into(),
        figure(row.base),
        figure(row.new),
        change(row),
        format!("{}/{}", row.base_runs, row.new_runs),
        format!("{} (at {} %)", verdict(row.verdict), number(row.threshold * 100.0)),
    ]
}

/// Everything beside the figures, one item a line, under a title.
fn lists(report: &Report) -> Vec<(&'static str, Vec<String>)> {
    let unlike = |list: &[super::Unlike]| {
        list.iter().map(|u| format!("{}: base {}; new {}", u.field, u.base, u.new)).collect::<Vec<_>>()
    };
    let missing = report.missing.iter().map(|m| {
        let excused = if m.excusable && report.options.allow_missing { " (allowed)" } else { "" };
        format!("{} lacks {}: {}{excused}", m.side, m.label, m.reason)
    });
    let mut notes: Vec<String> = Vec::new();
    for note in report.rows.iter().filter(|r| r.verdict != Verdict::CannotCompare).flat_map(|r| &r.notes) {
        if !notes.contains(note) {
            notes.push(note.clone());
        }
    }
    let all = vec![
        ("Cannot compare", report.reasons.clone()),
        ("Unlike (--allow-unlike FIELD compares all the same)", unlike(&report.unlike)),
        ("Unlike, allowed by --allow-unlike", unlike(&report.unlike_allowed)),
        ("Rows without a partner (--allow-missing lets them pass)", missing.collect()),
        ("Notes", notes),
        ("Warnings", report.warnings.clone()),
    ];
    all.into_iter().filter(|(_, items)| !items.is_empty()).collect()
}

/// One line, whatever a cell of a file held.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// For a terminal.
pub fn table(report: &Report) -> String {
    let mut text = format!("{} (exit {})\n", headline(report), report.exit_code);
    let rows: Vec<[String; 7]> = report.rows.iter().map(cells).collect();
    let width = |column: usize| {
        let widest = rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0);
        widest.max(HEADER[column].len())
    };
    let widths: Vec<usize> = (0..HEADER.len()).map(width).collect();
    let mut line = |cells: &[String]| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{:<width$}", plain(cell)));
        let _ = writeln!(text, "{}", padded.collect::<Vec<_>>().join("  ").trim_end());
    };
    if !rows.is_empty() {
        line(&HEADER.map(String::from));
        rows.iter().for_each(|r| line(r));
    }
    for (title, items) in lists(report) {
        let _ = writeln!(text, "\n{title}:");
        for item in items {
            let _ = writeln!(text, "  {}", plain(&item));
        }
    }
    text
}

/// For a pull request.
pub fn markdown(report: &Report) -> String {
    // A cell of a file must not become markup.
    let escape = |text: &str| {
        let mut out = String::new();
        for c in plain(text).chars() {
            match c {
                '<' => out.push_str("&lt;"),
                '&' => out.push_str("&amp;"),
                '|' | '\\' | '`' | '*' | '_' | '[' | ']' | '#' | '@' | '~' => out.extend(['\\', c]),
                _ => out.push(c),
            }
        }
        out
    };
    let mut text = format!("{MARKDOWN_START}{}\n", escape(&headline(report)));
    if !report.rows.is_empty() {
        let _ = writeln!(text, "\n| {} |\n|{}", HEADER.join(" | "), " --- |".repeat(HEADER.len()));
        for row in &report.rows {
            let cells: Vec<String> = cells(row).iter().map(|c| escape(c)).collect();
            let _ = writeln!(text, "| {} |", cells.join(" | "));
        }
    }
    for (title, items) in lists(report) {
        let _ = writeln!(text, "\n**{title}**\n");
        for item in items {
            let _ = writeln!(text, "- {}", escape(&item));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::percent;

    #[test]
    fn nothing_has_no_sign() {
        for (part, text) in [
            (0.0, "0.0"),
            (-0.0, "0.0"),
            (-0.0004, "0.0"),
            (0.0004, "0.0"),
            (-0.0006, "-0.1"),
            (0.0006, "+0.1"),
            (-0.05, "-5.0"),
            (0.1, "+10.0"),
        ] {
            assert_eq!(percent(part), text, "{part}");
        }
    }
}
