//! The figures that are gated: which columns they rest on, and what a change of them is.

use super::judge::{Sample, Scatter};
use super::keys::Key;
use super::pair::Runs;
use super::read::Record;
use super::{Gate, Options};
use crate::measure::stats::Interval;
use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Eager over graph within a run; its cost is graph over eager.
    Speedup,
    StepTimeMs,
    /// `peak_memory_mib`, and `graph_memory_mib` where it was measured.
    MemoryMib,
}

/// Metrics of the gates, each once.
pub fn of_gates(gates: &[Gate]) -> Vec<Metric> {
    let mut metrics = Vec::new();
    for gate in gates {
        let of = match gate {
            Gate::Ratio => vec![Metric::Speedup],
            Gate::Time => vec![Metric::StepTimeMs],
            Gate::Both => vec![Metric::Speedup, Metric::StepTimeMs],
            Gate::Memory => vec![Metric::MemoryMib],
        };
        metrics.extend(of.into_iter().filter(|m| !metrics.contains(m)).collect::<Vec<_>>());
    }
    metrics
}

impl Metric {
    pub fn name(self) -> &'static str {
        match self {
            Metric::Speedup => "speedup",
            Metric::StepTimeMs => "step_time_ms",
            Metric::MemoryMib => "memory_mib",
        }
    }

    /// A run's speedup stands in both of its rows: it is taken from the graph's (of A/A runs from side b).
    pub fn applies(self, key: &Key) -> bool {
        match self {
            Metric::Speedup => match key.get("aa") {
                "" => key.get("arm") == "graph",
                side => side == "b",
            },
            Metric::StepTimeMs | Metric::MemoryMib => true,
        }
    }

    pub fn threshold(self, options: &Options) -> f64 {
        match self {
            Metric::Speedup => options.ratio_threshold,
            Metric::StepTimeMs => options.timing_threshold,
            Metric::MemoryMib => options.memory_threshold,
        }
    }

    pub fn scatter(self) -> Scatter {
        match self {
            Metric::Speedup | Metric::StepTimeMs => Scatter::TIMING,
            Metric::MemoryMib => Scatter::MEMORY,
        }
    }

    /// Figure of a cost and cost of a figure.
    pub fn figure(self, cost: f64) -> f64 {
        if self == Metric::Speedup { 1.0 / cost } else { cost }
    }

    /// Relative change of the figure for a change of its cost's logarithm.
    pub fn relative_value(self, log: f64) -> f64 {
        // No change has no sign: -0.0 would be printed with one.
        0.0 + if self == Metric::Speedup { (-log).exp_m1() } else { log.exp_m1() }
    }

    /// The same of an interval's ends, low end first.
    pub fn relative(self, log: Interval) -> (f64, f64) {
        let (a, b) = (self.relative_value(log.low), self.relative_value(log.high));
        (a.min(b), a.max(b))
    }

    /// One sample a run, and every cell that is wrong.
    pub fn samples(self, side: &Runs) -> (Vec<Sample>, Vec<String>) {
        let (mut samples, mut wrong) = (Vec::new(), Vec::new());
        for rows in side.by_run() {
            let of_rows: Vec<Result<Sample, String>> = rows.iter().map(|r| self.sample(r)).collect();
            wrong.extend(of_rows.iter().filter_map(|s| s.as_ref().err().cloned()));
            samples.extend(one(&of_rows.into_iter().flatten().collect::<Vec<_>>()));
        }
        (samples, wrong)
    }

    fn sample(self, row: &Record) -> Result<Sample, String> {
        same_work(row)?;
        known_steady(row)?;
        match self {
            Metric::Speedup => {
                if row.cell("device") == "cpu" && row.cell("speedup").is_empty() {
                    return Err(row.wrong(
                        "speedup",
                        "empty: a CPU gives no speedup (--gate time compares step times)",
                    ));
                }
                if row.cell("speedup").is_empty() {
                    let text = match row.cell("pairs") {
                        "" => "empty: it was not measured (--gate time compares step times)".to_owned(),
                        pairs => {
                            let more =
                                if row.cell("stopped_by") == "max_steps" { "-ms" } else { "--max_time" };
                            format!(
                                "empty: too few pairs of blocks ({pairs}); measure longer ({more}), or compare step times \
                                 (--gate time)"
                            )
                        }
                    };
                    return Err(row.wrong("speedup", &text));
                }
                let (figure, ci95) =
                    with_interval(row, "speedup", ["speedup_ci95_low", "speedup_ci95_high"])?;
                Ok(Sample { cost: 1.0 / figure, ci95: ci95.map(|(low, high)| (1.0 / high, 1.0 / low)) })
            }
            Metric::StepTimeMs => {
                let interval = ["step_time_ms_ci95_low", "step_time_ms_ci95_high"];
                let (cost, ci95) = with_interval(row, "step_time_ms_median", interval)?;
                Ok(Sample { cost, ci95 })
            }
            Metric::MemoryMib => {
                let peak = row.positive("peak_memory_mib")?;
                let graphs = graph_memory_mib(row)?;
                // Memory is read once; it has no scatter within a run.
                Ok(Sample { cost: peak + graphs, ci95: Some((peak + graphs, peak + graphs)) })
            }
        }
    }
}

/// The arms of the row's run were shown to do the same work.
fn same_work(row: &Record) -> Result<(), String> {
    let column = "digest_match";
    match row.get(column) {
        Some("true") => Ok(()),
        Some("false") => Err(row.wrong(column, "false: the arms did not do the same work")),
        // A run of one arm has no other to be equal to.
        Some("") if row.cell("cuda_graph_impl") == "none" => Ok(()),
        Some("") => Err(row.wrong(column, "empty: that the arms did the same work was not shown")),
        Some(other) => Err(row.wrong(column, &format!("{other:?} is neither true nor false"))),
        None => {
            Err(row
                .wrong(column, "the file has no such column: nothing says that the arms did the same work"))
        }
    }
}

/// The row says whether its step times had settled, or had too few blocks to tell.
pub fn known_steady(row: &Record) -> Result<(), String> {
    let column = "steady_reached";
    match row.get(column) {
        Some("true" | "false") => Ok(()),
        // Under six blocks there is no interval of the step time either.
        Some("") if row.cell("step_time_ms_ci95_low").is_empty() => Ok(()),
        Some("") => Err(row.wrong(column, "empty, though there were blocks enough to tell")),
        Some(other) => Err(row.wrong(column, &format!("{other:?} is neither true nor false"))),
        None => {
            Err(row.wrong(column, "the file has no such column: nothing says that step times had settled"))
        }
    }
}

/// Memory of the row's graphs. Measured, it may be 0: graphs that fit what the driver held already cost nothing more.
/// Empty, it was not measured, and is no 0.
fn graph_memory_mib(row: &Record) -> Result<f64, String> {
    let column = "graph_memory_mib";
    match row.get(column) {
        // The eager arm has no graphs, and a CPU's are lists on the host.
        Some("") if row.cell("arm") == "eager" || row.cell("device") == "cpu" => Ok(0.0),
        Some("") => Err(row.wrong(
            column,
            &match row.cell("memory_source") {
                "" => "empty: it was not measured".to_owned(),
                source => format!("empty: it was not measured ({source})"),
            },
        )),
        Some(cell) => match cell.parse::<f64>() {
            Ok(mib) if mib.is_finite() && mib >= 0.0 => Ok(mib),
            _ => Err(row.wrong(column, &format!("{cell:?} is not a finite number from 0 on"))),
        },
        None => Err(row.wrong(column, "the file has no such column")),
    }
}

/// A figure and its interval; the interval's cells are both empty when there were too few blocks for one.
fn with_interval(row: &Record, column: &str, ends: [&str; 2]) -> Result<(f64, Option<(f64, f64)>), String> {
    let figure = row.positive(column)?;
    let interval = match (row.number(ends[0])?, row.number(ends[1])?) {
        (Some(low), Some(high)) if low <= figure && figure <= high => Some((low, high)),
        (Some(low), Some(high)) => {
            let text = format!("{figure} lies outside its interval, {low} to {high}");
            return Err(row.wrong(column, &text));
        }
        (None, None) => None,
        (None, Some(_)) => return Err(row.wrong(ends[0], "empty, and the other end is not")),
        (Some(_), None) => return Err(row.wrong(ends[1], "empty, and the other end is not")),
    };
    Ok((figure, interval))
}

/// Repeats within a process are one run: their geometric mean, with the mean of their intervals in logarithms.
/// What one process shares does not average out, so the interval is not narrowed.
fn one(samples: &[Sample]) -> Option<Sample> {
    let n = samples.len() as f64;
    let mean = |pick: &dyn Fn(&Sample) -> f64| (samples.iter().map(|s| pick(s).ln()).sum::<f64>() / n).exp();
    if samples.len() <= 1 {
        return samples.first().copied();
    }
    let ends: Option<Vec<(f64, f64)>> = samples.iter().map(|s| s.ci95).collect();
    let middle = |pick: fn(&(f64, f64)) -> f64, ends: &[(f64, f64)]| {
        (ends.iter().map(|e| pick(e).ln()).sum::<f64>() / n).exp()
    };
    Some(Sample {
        cost: mean(&|s| s.cost),
        ci95: ends.map(|ends| (middle(|e| e.0, &ends), middle(|e| e.1, &ends))),
    })
}
