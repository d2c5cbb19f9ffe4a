//! The pictures of a job: what each arm took, where the time and the memory went, at which clocks.

use super::canvas::{BLUE, Fill, GREEN, GREY, INK, Look, PURPLE, Shape, VERMILLION};
use super::data::{Group, Run, Titles, label, number};
use super::figure::Figure;
use super::html::{Cell, Table, shown};
use super::rows::{Kind, Line, Row, RowPlot};
use crate::report::compare::read::Record;

const NOT_MEASURED: &str = "not measured";

fn line(name: impl Into<String>, look: Look, value: Option<f64>) -> Line {
    let text = value.map_or(NOT_MEASURED.to_owned(), shown);
    Line { name: name.into(), look, value, interval: None, added: 0.0, text }
}

fn interval(row: &crate::report::compare::read::Record, low: &str, high: &str) -> Option<(f64, f64)> {
    number(row, low).zip(number(row, high))
}

fn svg(plot: &RowPlot) -> Option<[String; 2]> {
    (!plot.is_empty()).then(|| plot.svg())
}

/// Hollow without an interval.
fn mark(name: impl Into<String>, look: Look, value: Option<f64>, interval: Option<(f64, f64)>) -> Line {
    let look = if interval.is_some() { look } else { look.hollow() };
    Line { interval, ..line(name, look, value) }
}

const HOLLOW: &str = "A hollow mark has no interval: too few blocks of steps were timed to know one.";

/// Speedup of every run of the page, against no change and the margin; `None` where no run can have one.
pub fn gain(groups: &[Group]) -> Option<Figure> {
    const BARE: Look = Look::new(INK, Shape::Circle);
    const MODELLED: Look = Look::new(PURPLE, Shape::Square);
    let mut rows = Vec::new();
    let mut table = Table::new(
        "gain",
        &["run", "verdict", "speedup", "low", "high", "pairs", "modelled", "low", "high", "host model"],
    );
    let mut margins: Vec<f64> = Vec::new();
    let titles = Titles::of(groups);
    for group in groups {
        let mut heading = (groups.len() > 1).then(|| Row { label: group.title.clone(), lines: vec![] });
        for run in group.runs.iter().filter(|r| r.is_ok() && r.sides.len() > 1 && r.cell("device") != "cpu") {
            let name = label(run, &group.runs);
            let of = |n: &str| run.figure(n);
            let interval = |name: &str| of(&format!("{name}_ci95_low")).zip(of(&format!("{name}_ci95_high")));
            let mut lines = vec![mark("bare", BARE, of("speedup"), interval("speedup"))];
            if of("speedup_modelled").is_some() {
                lines.push(mark("modelled", MODELLED, of("speedup_modelled"), interval("speedup_modelled")));
            }
            if lines.len() == 1 {
                lines[0].name = String::new();
            }
            margins.extend(of("margin"));
            let text = |column: &str| Cell::text(run.cell(column));
            let figure = |column: &str| Cell::of(run.cell(column));
            table.rows.push(vec![
                Cell::text(titles.row(group, &name)),
                text("verdict"),
                figure("speedup"),
                figure("speedup_ci95_low"),
                figure("speedup_ci95_high"),
                figure("pairs"),
                figure("speedup_modelled"),
                figure("speedup_modelled_ci95_low"),
                figure("speedup_modelled_ci95_high"),
                text("host_model"),
            ]);
            rows.extend(heading.take());
            rows.push(Row { label: name, lines });
        }
    }
    if rows.is_empty() {
        return None;
    }
    margins.dedup();
    let margin = if let [one] = margins[..] { one } else { 0.0 };
    let modelled = rows.iter().any(|r| r.lines.len() > 1);
    let hollow = rows.iter().flat_map(|r| &r.lines).any(|l| l.value.is_some() && !l.look.filled);
    let drawn = || groups.iter().flat_map(|g| &g.runs).filter(|r| r.is_ok() && r.sides.len() > 1);
    let itself = |run: &Run| !run.cell("aa").is_empty();
    let all_itself = drawn().all(itself);
    let plot = RowPlot {
        kind: Kind::Marks,
        axis: if all_itself { "side a over side b, one arm" } else { "speedup: eager over graph" }.into(),
        no_change: Some((1.0, margin)),
        rows,
    };
    let mut notes = vec![format!(
        "Right of the dashed line {} is faster{}.",
        if all_itself { "side b" } else { "the graph" },
        if margin > 0.0 {
            format!(
                "; the grey band is the margin of {} %, inside which a difference counts as none",
                shown(margin * 100.0)
            )
        } else {
            String::new()
        }
    )];
    if hollow {
        notes.push(HOLLOW.into());
    }
    if groups.len() > 1 {
        notes.extend(titles.shared);
    }
    let mut legend = vec![(BARE, "speedup, with its 95 % interval".to_owned())];
    if modelled {
        legend.push((MODELLED, "under the host model".into()));
    }
    Some(Figure {
        title: if all_itself { "An arm against itself, every run" } else { "Gain of every run" }.into(),
        what: match (all_itself, drawn().any(itself)) {
            (true, _) => "Both sides are one arm: what lies off 1 is no gain, but what this machine mistakes for one.",
            (false, true) => {
                "Step time of the eager arm over that of the graph arm; of an arm against itself, where both are one, side a over b."
            }
            _ => "Step time of the eager arm over that of the graph arm.",
        }
        .into(),
        svg: svg(&plot),
        legend,
        notes,
        table,
    })
}

/// Step time of each arm with its interval.
pub fn step_time(group: &Group) -> Figure {
    let mut table = Table::new(
        "step_time",
        &[
            "run",
            "arm",
            "median ms",
            "low",
            "high",
            "5th percentile",
            "95th percentile",
            "steps",
            "each waited for, ms",
        ],
    );
    let mut rows = Vec::new();
    for run in group.runs.iter() {
        let name = label(run, &group.runs);
        let mut lines = Vec::new();
        for (side, row) in run.sides.iter().enumerate() {
            let figure = |column: &str| Cell::of(row.cell(column));
            let interval = interval(row, "step_time_ms_ci95_low", "step_time_ms_ci95_high");
            lines.push(mark(
                run.side_name(side),
                Look::side(side),
                number(row, "step_time_ms_median"),
                interval,
            ));
            table.rows.push(vec![
                Cell::text(&name),
                Cell::text(run.side_name(side)),
                figure("step_time_ms_median"),
                figure("step_time_ms_ci95_low"),
                figure("step_time_ms_ci95_high"),
                figure("step_time_ms_p05"),
                figure("step_time_ms_p95"),
                figure("steps_steady"),
                figure("step_time_ms_sync_median"),
            ]);
        }
        rows.push(Row { label: name, lines });
    }
    let hollow = rows.iter().flat_map(|r| &r.lines).any(|l| l.value.is_some() && !l.look.filled);
    let plot = RowPlot {
        kind: Kind::Marks,
        axis: "ms a step (the axis need not begin at 0)".into(),
        no_change: None,
        rows,
    };
    Figure {
        title: "Step time by arm".into(),
        what: "Median wall time of a step with one step of run-ahead, and its 95 % interval.".into(),
        svg: svg(&plot),
        legend: arms(),
        notes: if hollow { vec![HOLLOW.into()] } else { vec![] },
        table,
    }
}

fn arms() -> Vec<(Look, String)> {
    vec![(Look::side(0), "eager (or side a)".into()), (Look::side(1), "graph (or side b)".into())]
}

/// Host time of issuing. Files from before it was measured hold only what a full queue counts in.
const ISSUE: &str = "host_issue_ms_median";
const SUBMIT: &str = "host_submit_ms_median";

/// An arm whose one graph waits for room in the queue: a launch that costs more than all of the eager arm's, or nobody knows.
fn fills_queue(run: &Run, row: &Record) -> bool {
    let of = |row: &Record| number(row, ISSUE).or(number(row, SUBMIT));
    let eager = run.sides.iter().find(|r| r.cell("arm") == "eager").and_then(|r| of(r));
    row.cell("arm") == "graph"
        && row.cell("cuda_graph_scope") == "full_iteration"
        && of(row).is_some_and(|own| eager.is_none_or(|eager| own > eager))
}

/// Host against device.
pub fn host_and_device(group: &Group) -> Figure {
    const SHOWN: [(&str, &str, Look, &str); 4] = [
        (
            "issue",
            ISSUE,
            Look::new(PURPLE, Shape::Square).bar(Fill::Solid),
            "host: issuing the step, never held up by a full queue",
        ),
        (
            "wait",
            "host_wait_ms_median",
            Look::new(PURPLE, Shape::Square).bar(Fill::Hollow),
            "host: waiting inside the step",
        ),
        (
            "span",
            "device_span_ms_median",
            Look::new(GREEN, Shape::Square).bar(Fill::Hollow),
            "device: first event to last",
        ),
        ("busy", "device_busy_ms", Look::new(GREEN, Shape::Square).bar(Fill::Solid), "device: a kernel runs"),
    ];
    let mut table = Table::new(
        "host_device",
        &[
            "run",
            "arm",
            "submit ms",
            "wait ms",
            "span ms",
            "busy ms",
            "span without a kernel",
            "kernels and copies a step",
            "submit to an idle device, ms",
            "issue ms",
        ],
    );
    // What no run has is said once, in place of a line in each.
    let has =
        |column: &str| group.runs.iter().flat_map(|r| &r.sides).any(|row| number(row, column).is_some());
    let is_shown = |column: &str| has(column) || column == ISSUE && has(SUBMIT);
    let missing: Vec<&str> =
        SHOWN.iter().filter(|(_, column, ..)| !is_shown(column)).map(|(name, ..)| *name).collect();
    let (mut held_up, mut one_graph) = (false, false);
    let mut rows = Vec::new();
    for run in group.runs.iter() {
        let name = label(run, &group.runs);
        for (side, row) in run.sides.iter().enumerate() {
            let fills = fills_queue(run, row);
            one_graph |= fills;
            let issue = number(row, ISSUE);
            held_up |= issue.is_none() && has(SUBMIT);
            let lines = SHOWN
                .iter()
                .filter(|(_, column, ..)| is_shown(column))
                .map(|(n, column, look, _)| match *column {
                    ISSUE if fills => Line { text: "one graph, not drawn".into(), ..line(*n, *look, None) },
                    ISSUE if issue.is_none() => line("submit", *look, number(row, SUBMIT)),
                    column => line(*n, *look, number(row, column)),
                })
                .collect();
            rows.push(Row { label: format!("{name}: {}", run.side_name(side)), lines });
            let mut cells = vec![Cell::text(&name), Cell::text(run.side_name(side))];
            let columns = [SUBMIT].into_iter().chain(SHOWN[1..].iter().map(|s| s.1)).chain([
                "launch_bound_fraction",
                "launches_per_step",
                "host_submit_ms_sync_median",
                ISSUE,
            ]);
            cells.extend(columns.map(|c| Cell::of(row.cell(c))));
            table.rows.push(cells);
        }
    }
    let plot = RowPlot { kind: Kind::Bars, axis: "ms a step".into(), no_change: None, rows };
    let mut notes = Vec::new();
    if held_up {
        notes.push(
            "Lines called \"submit\" count in what a full launch queue holds up, which is not the host's own time: it \
             was not measured apart there."
                .to_owned(),
        );
    }
    if one_graph {
        notes.push(
            "One graph holds the whole step there and fills the launch queue by itself: what its launch took is no cost of \
             issuing. It is in the table and not drawn."
                .to_owned(),
        );
    }
    if !missing.is_empty() {
        notes.push(format!("Not measured: {}.", missing.join(", ")));
    }
    Figure {
        title: "Host against device".into(),
        what: "Where the device is busy for nearly all of its span, a graph has little to win.".into(),
        svg: svg(&plot),
        legend: SHOWN
            .iter()
            .filter(|(_, column, ..)| is_shown(column))
            .map(|(_, _, look, text)| (*look, (*text).to_owned()))
            .collect(),
        notes,
        table,
    }
}

/// Memory of both arms.
pub fn memory(group: &Group) -> Figure {
    const USED: Look = Look::new(GREY, Shape::Square).bar(Fill::Hollow);
    let bar =
        |side: usize| Look::new(if side == 0 { BLUE } else { VERMILLION }, Shape::Square).bar(Fill::Solid);
    let mut table = Table::new(
        "memory",
        &[
            "run",
            "arm",
            "planned MiB",
            "graphs MiB",
            "used by the process, both arms, MiB",
            "of the GPU's MiB",
            "source",
        ],
    );
    let mut rows = Vec::new();
    for run in group.runs.iter() {
        let name = label(run, &group.runs);
        let mut lines = Vec::new();
        for (side, row) in run.sides.iter().enumerate() {
            let (peak, graphs) = (number(row, "peak_memory_mib"), number(row, "graph_memory_mib"));
            let mut one = line(run.side_name(side), bar(side), peak);
            if let (Some(peak), Some(graphs)) = (peak, graphs) {
                one.added = graphs;
                one.text = format!("{} + {}", shown(peak), shown(graphs));
            }
            lines.push(one);
            table.rows.push(vec![
                Cell::text(&name),
                Cell::text(run.side_name(side)),
                Cell::of(row.cell("peak_memory_mib")),
                Cell::of(row.cell("graph_memory_mib")),
                Cell::of(row.cell("memory_used_mib")),
                Cell::of(row.cell("gpu_memory_mib")),
                Cell::text(row.cell("memory_source")),
            ]);
        }
        if let Some(used) = run.figure("memory_used_mib") {
            lines.push(line("used", USED, Some(used)));
        }
        rows.push(Row { label: name, lines });
    }
    let plot = RowPlot { kind: Kind::Bars, axis: "MiB".into(), no_change: None, rows };
    Figure {
        title: "Memory of both arms".into(),
        what: "Planned need of each arm, and behind it (hatched, after the +) what making the graphs took by the driver's figures."
            .into(),
        svg: svg(&plot),
        legend: vec![
            (bar(0), "eager (or side a), planned".into()),
            (bar(1), "graph (or side b), planned".into()),
            (Look::new(VERMILLION, Shape::Square).bar(Fill::Hatched), "graphs".into()),
            (USED, "the whole process, by the driver: both arms share most of it".into()),
        ],
        notes: vec![],
        table,
    }
}

/// Clocks of both arms: medians of the rows; `None` where nothing was read of the card, as on a CPU.
pub fn clocks(group: &Group) -> Option<Figure> {
    const READ: [&str; 4] =
        ["sm_clock_mhz_median", "temperature_c_max", "power_w_median", "throttle_reasons"];
    let read = |row: &&crate::report::compare::read::Record| READ.iter().any(|c| !row.cell(c).is_empty());
    if !group.runs.iter().flat_map(|r| &r.sides).any(read) {
        return None;
    }
    let mut table = Table::new(
        "clocks",
        &[
            "run",
            "arm",
            "SM clock, median MHz",
            "highest °C",
            "power, median W",
            "limit W",
            "clocks held back by",
            "other processes",
        ],
    );
    let mut rows = Vec::new();
    for run in group.runs.iter() {
        let name = label(run, &group.runs);
        let mut lines = Vec::new();
        for (side, row) in run.sides.iter().enumerate() {
            lines.push(line(run.side_name(side), Look::side(side), number(row, "sm_clock_mhz_median")));
            table.rows.push(vec![
                Cell::text(&name),
                Cell::text(run.side_name(side)),
                Cell::of(row.cell("sm_clock_mhz_median")),
                Cell::of(row.cell("temperature_c_max")),
                Cell::of(row.cell("power_w_median")),
                Cell::of(row.cell("power_limit_w")),
                Cell::text(row.cell("throttle_reasons").replace('+', ", ")),
                Cell::of(row.cell("other_processes_max")),
            ]);
        }
        rows.push(Row { label: name, lines });
    }
    let plot = RowPlot { kind: Kind::Marks, axis: "SM clock, MHz".into(), no_change: None, rows };
    let empty = plot.is_empty();
    Some(Figure {
        title: "Clocks".into(),
        what: "Median SM clock over the blocks of each arm: arms at different clocks are not alike.".into(),
        svg: svg(&plot),
        legend: arms(),
        notes: if empty { vec!["No clock was read.".into()] } else { vec![] },
        table,
    })
}

/// Where the device's time goes by part of the step, from the profile.
pub fn parts(run: &Run, title: String) -> Option<Figure> {
    let all = run.file.parts.as_ref()?;
    let of_run: Vec<_> = all.iter().filter(|p| p.run_id == run.id()).collect();
    if of_run.is_empty() {
        return None;
    }
    let mut names: Vec<&str> = Vec::new();
    for part in &of_run {
        if !names.contains(&part.part.as_str()) {
            names.push(&part.part);
        }
    }
    let mut table = Table::new("parts", &["part", "arm", "device ms", "share of the arm", "launches"]);
    let mut rows = Vec::new();
    let arms_of: Vec<&str> =
        ["eager", "graph"].into_iter().filter(|arm| of_run.iter().any(|p| p.arm == *arm)).collect();
    let sum = |arm: &str, part: Option<&str>| {
        let of = of_run.iter().filter(|p| p.arm == arm && part.is_none_or(|n| p.part == n));
        of.fold((0.0, 0.0, 0), |(ms, launches, n), p| (ms + p.device_ms, launches + p.launches, n + 1))
    };
    // The longest first, by the first arm that was profiled.
    let first = arms_of.first().copied().unwrap_or("eager");
    names.sort_by(|a, b| sum(first, Some(b)).0.total_cmp(&sum(first, Some(a)).0));
    for name in names {
        let mut lines = Vec::new();
        for arm in &arms_of {
            let (ms, launches, lines_of_file) = sum(arm, Some(name));
            let side = usize::from(*arm == "graph");
            let look = Look { color: Look::side(side).color, ..Look::side(side) }.bar(if side == 0 {
                Fill::Solid
            } else {
                Fill::Hollow
            });
            let there = lines_of_file > 0;
            lines.push(line(*arm, look, there.then_some(ms)));
            table.rows.push(vec![
                Cell::text(name),
                Cell::text(*arm),
                Cell::maybe(there.then_some(ms)),
                Cell::maybe(there.then(|| ms / sum(arm, None).0).filter(|x| x.is_finite())),
                Cell::maybe(there.then_some(launches)),
            ]);
        }
        rows.push(Row { label: name.to_owned(), lines });
    }
    let plot = RowPlot { kind: Kind::Bars, axis: "device ms a step".into(), no_change: None, rows };
    Some(Figure {
        title,
        what: "Device time of the kernels of each part, from the profiling pass.".into(),
        svg: svg(&plot),
        legend: arms_of
            .iter()
            .map(|arm| {
                let side = usize::from(*arm == "graph");
                (Look::side(side).bar(if side == 0 { Fill::Solid } else { Fill::Hollow }), (*arm).to_owned())
            })
            .collect(),
        notes: vec![
            "Kernels that overlap count each: the sum may exceed the time in which the device was busy."
                .into(),
        ],
        table,
    })
}
