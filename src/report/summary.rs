//! The terminal's view of a run: both arms, the verdict with its interval, and what it does not tell.

use super::columns::number;
use super::row::{Row, RunFacts};
use crate::measure::outcome::{FinalCheck, Stopped};
use crate::measure::{Outcome, Verdict};

/// Lines are broken before this column.
const WIDTH: usize = 88;

/// Text for a person, from the rows of one run (as [`Row::of_outcome`] makes them).
pub fn render(rows: &[Row]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let facts = first.facts;
    let mut lines = vec![title(facts)];
    let Some(outcome) = first.measured() else {
        wrap(&mut lines, &format!("{}: {}", first.status, first.status_reason), "  ");
        return lines.join("\n") + "\n";
    };
    lines.push(String::new());
    lines.extend(table(rows));
    lines.push(String::new());
    verdict(&mut lines, facts, outcome);
    for note in caveats(facts, outcome) {
        wrap(&mut lines, &note, "  - ");
    }
    lines.join("\n") + "\n"
}

fn title(facts: &RunFacts) -> String {
    let scope = match facts.cuda_graph_scope.join("+") {
        scope if scope.is_empty() => String::new(),
        scope => format!(" {scope}"),
    };
    let on = facts.gpu_name.as_deref().unwrap_or(&facts.device);
    format!(
        "{} ({}) on {on}, graphs: {}{scope}",
        facts.model_recipe, facts.compute_dtype, facts.cuda_graph_impl
    )
}

/// Figures shown for each arm: label, column of the table.
const SHOWN: [(&str, &str); 17] = [
    ("step time, median [ms]", "step_time_ms_median"),
    ("  95 % interval, low", "step_time_ms_ci95_low"),
    ("  95 % interval, high", "step_time_ms_ci95_high"),
    ("  every step waited for [ms]", "step_time_ms_sync_median"),
    ("under the host model [ms]", "step_time_ms_modelled_median"),
    ("  host, modelled [ms]", "host_ms_modelled_median"),
    ("host submit [ms]", "host_submit_ms_median"),
    ("  never held up by a full queue", "host_issue_ms_median"),
    ("host wait [ms]", "host_wait_ms_median"),
    ("device span [ms]", "device_span_ms_median"),
    ("device busy [ms]", "device_busy_ms"),
    ("kernels and copies", "launches_per_step"),
    ("memory [MiB]", "peak_memory_mib"),
    ("tokens/s", "tokens_per_s"),
    ("model TFLOP/s", "model_tflops_per_gpu"),
    ("steady steps", "steps_steady"),
    ("loss of its own last step", "loss_last"),
];

/// A cell for a person: six significant digits of a fraction, where the file has nine.
fn shown(cell: &str) -> String {
    match cell.parse::<f64>() {
        Ok(x) if cell.contains('.') && x != 0.0 => {
            let decimals = (5 - x.abs().log10().floor() as i32).clamp(0, 9) as usize;
            number(format!("{x:.decimals$}").parse().unwrap_or(x))
        }
        _ => cell.to_owned(),
    }
}

/// One line a figure, one column an arm; figures that no arm has are left out.
fn table(rows: &[Row]) -> Vec<String> {
    let cell = |row: &Row, name: &str| {
        let column = super::COLUMNS.iter().find(|c| c.name == name);
        column.map_or(String::new(), |c| shown(&(c.value)(row).cell()))
    };
    let label = |row: &Row| row.aa.map_or(row.arm_name.to_string(), |aa| format!("{} {aa}", row.arm_name));
    let mut lines =
        vec![format!("  {:<30}{}", "", rows.iter().map(|r| format!("{:>16}", label(r))).collect::<String>())];
    for (text, name) in SHOWN {
        let cells: Vec<String> = rows.iter().map(|r| cell(r, name)).collect();
        if cells.iter().any(|c| !c.is_empty()) {
            let cells: String =
                cells.iter().map(|c| format!("{:>16}", if c.is_empty() { "-" } else { c })).collect();
            lines.push(format!("  {text:<30}{cells}"));
        }
    }
    lines
}

fn verdict(lines: &mut Vec<String>, facts: &RunFacts, outcome: &Outcome) {
    let Some(verdict) = outcome.verdict else {
        if let Some(found) = &outcome.unequal {
            let why = "attention was let add in any order (--attention_deterministic false)";
            wrap(lines, &format!("Equal work is not shown, no speedup is given: {why}, and {found}."), "");
        } else if outcome.equality.is_none() {
            lines.push(
                "One arm was run: there is nothing to compare. For graphs give --cuda_graph_scope, or --sweep \
                 for every legal one."
                    .into(),
            );
        }
        return;
    };
    if let Some(equality) = &outcome.equality {
        lines.push(format!(
            "Equal work: losses and {} buffers are the same bits after {} steps of each arm.",
            equality.buffers, equality.steps
        ));
        if let Some(FinalCheck::Equal { steps }) = outcome.final_check {
            lines.push(format!("They were so again after timing, over {steps} steps."));
        }
    }
    if facts.device == "cpu" {
        lines.push("No speedup is given: a CPU's \"graph\" is the recorded list replayed.".into());
        return;
    }
    let speedup = outcome.speedup.map_or(String::new(), |s| format!(": speedup {}", number(round4(s))));
    let interval = outcome.speedup_ci95.map_or(", no interval".to_string(), |(low, high)| {
        format!(", 95 % interval {} to {}", number(round4(low)), number(round4(high)))
    });
    let same = outcome.arms.iter().all(|a| a.arm == outcome.arms[0].arm);
    let what = match verdict {
        Verdict::Faster if same => "FASTER (an arm against itself: do not trust this machine now)",
        Verdict::Slower if same => "SLOWER (an arm against itself: do not trust this machine now)",
        Verdict::Faster => "The graph is FASTER",
        Verdict::Slower => "The graph is SLOWER",
        Verdict::Equivalent => "EQUIVALENT within the margin",
        Verdict::Undecided => match outcome.stopped {
            Some(Stopped::MaxSteps) => "UNDECIDED (raise -ms)",
            Some(Stopped::MaxTime) => "UNDECIDED (raise --max_time)",
            _ => "UNDECIDED",
        },
    };
    wrap(
        lines,
        &format!(
            "{what}{speedup}{interval} ({}, margin {} %).",
            count(outcome.pairs, "pair"),
            number(outcome.margin * 100.0)
        ),
        "",
    );
    if let Some(modelled) = outcome.speedup_modelled {
        let interval = outcome.speedup_modelled_ci95.map_or("no interval".to_string(), |(low, high)| {
            format!("95 % interval {} to {}", number(round4(low)), number(round4(high)))
        });
        wrap(
            lines,
            &format!(
                "With the host time of {} (modelled): speedup {}, {interval} ({}).",
                facts.host_model,
                number(round4(modelled)),
                count(outcome.pairs_modelled, "pair")
            ),
            "",
        );
    }
    if let (Some(found), Some((speedup, error))) =
        (&facts.extrapolation, facts.extrapolation.as_ref().and_then(|e| e.speedup()))
    {
        wrap(
            lines,
            &format!(
                "At the job's {} micro-batches (a line through {:?}): speedup {} +- {}.",
                found.to,
                found.from,
                number(round4(speedup)),
                number(round4(error))
            ),
            "",
        );
    }
    if let Some(cost) = &outcome.graph_cost {
        let one_off = cost.capture_ms + cost.instantiate_ms + cost.upload_ms;
        let back =
            outcome.break_even_steps.map_or(String::new(), |n| format!("; earned back after {n} steps"));
        lines.push(format!(
            "{}, {}, {} a step; {one_off:.1} ms to make{back}.",
            count(cost.graphs, "graph"),
            count(cost.nodes, "node"),
            count(cost.launches_per_step, "replay")
        ));
    }
}

/// `1 pair`, `2 pairs`.
fn count(n: usize, what: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{n} {what}{s}")
}

/// The verdicts of `--repeat`'s measurements in one line.
pub fn repetitions(outcomes: &[Outcome]) -> String {
    use crate::measure::Status;
    let of = |wanted: fn(&Status) -> bool| outcomes.iter().filter(|o| wanted(&o.status)).count();
    let ended = of(|s| matches!(s, Status::Ok));
    let mut besides = String::new();
    for (n, how) in [
        (of(|s| matches!(s, Status::Failed(_))), "failed"),
        (of(|s| matches!(s, Status::Interrupted)), "interrupted"),
    ] {
        if n > 0 {
            besides += &format!("; {n} {how}");
        }
    }
    let measurements = if ended == 1 { "measurement" } else { "measurements" };
    if ended == 0 {
        return format!("no measurement was completed{besides}");
    }
    let count = |verdict| outcomes.iter().filter(|o| o.verdict == Some(verdict)).count();
    let named = [Verdict::Faster, Verdict::Slower, Verdict::Equivalent, Verdict::Undecided]
        .map(|v| format!("{} {v}", count(v)))
        .join(", ");
    let half_widths: Vec<f64> =
        outcomes.iter().filter_map(|o| o.speedup_ci95).map(|(low, high)| (high / low).ln() / 2.0).collect();
    let widest = half_widths.iter().copied().fold(0.0, f64::max);
    let intervals = match crate::measure::stats::median(&half_widths) {
        Some(median) => {
            format!(
                "; half-width of the interval: median {:.3} %, widest {:.3} %",
                median * 1e2,
                widest * 1e2
            )
        }
        None => String::new(),
    };
    format!("{ended} {measurements}: {named}{intervals}{besides}")
}

/// Four decimals: the interval is never narrower than that on real hardware.
fn round4(x: f64) -> f64 {
    (x * 1e4).round() / 1e4
}

/// What the figures do not tell, and what disturbed them.
fn caveats(facts: &RunFacts, outcome: &Outcome) -> Vec<String> {
    let mut notes = outcome.notices.clone();
    notes.extend(facts.host_model_notice.clone());
    if facts.device == "cpu" {
        notes.push("Times of the CPU device say nothing about a GPU; it shows that the run works.".into());
        return notes;
    }
    if outcome.verdict.is_some() && facts.host_model == "bare" {
        notes.push(
            "Driver-level lower bound: issuing a launch from this program costs a few microseconds, from a \
             Python framework many times that, so a framework gains more from graphs."
                .into(),
        );
    }
    if facts.comm == "stand_in" {
        notes.push(
            "comm=stand_in: collectives are copies on this device; real ones take time that graphs do not \
             save, so for the whole job this gain is an upper bound."
                .into(),
        );
    }
    if facts.num_microbatches < facts.num_microbatches_recipe {
        notes.push(format!(
            "{} of the job's {} micro-batches a step were run: what happens once a step weighs more here.",
            facts.num_microbatches, facts.num_microbatches_recipe
        ));
    }
    if !facts.approximations.is_empty() {
        notes.push(format!("In simpler form than in the recipe: {}.", facts.approximations.join(", ")));
    }
    notes
}

/// Breaks text at spaces; `first` begins the first line, blanks of its width the others.
fn wrap(lines: &mut Vec<String>, text: &str, first: &str) {
    let mut line = first.to_string();
    let mut empty = true;
    for word in text.split_whitespace() {
        if !empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            lines.push(std::mem::replace(&mut line, " ".repeat(first.chars().count())));
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line.push_str(word);
        empty = false;
    }
    lines.push(line);
}
