//! `mbperf compare`: result files of a baseline against new ones. Reads, pairs by configuration, judges, reports.
//!
//! The CSV files alone are needed. What cannot be compared is said and fails; it is never left out in silence.

pub mod judge;
pub mod keys;
mod metric;
mod near;
pub mod pair;
pub mod print;
pub mod read;
pub mod roles;
mod warn;
pub mod workload;

pub use judge::Verdict;
pub use keys::Unlike;
pub use metric::Metric;
pub use read::Source;

use crate::measure::stats::Interval;
use crate::report::SCHEMA_VERSION;
use judge::Scatter;
use pair::{Pair, Runs};
use read::Record;
use serde::Serialize;
use std::collections::{HashMap, HashSet};

/// Exit codes that `compare` alone has.
pub const EXIT_REGRESSION: u8 = 10;
pub const EXIT_UNDECIDED: u8 = 11;
pub const EXIT_CANNOT_COMPARE: u8 = 12;

/// What is gated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Gate {
    /// The speedup within each run: machines that are fast or slow today do not move it.
    Ratio,
    /// Step times of both arms.
    Time,
    /// Ratio and time.
    Both,
    /// Peak memory with the graphs' own.
    Memory,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Options {
    pub gates: Vec<Gate>,
    /// Relative changes that fail.
    pub timing_threshold: f64,
    pub ratio_threshold: f64,
    pub memory_threshold: f64,
    /// Fields (of [`keys::fields`]) that may differ.
    pub allow_unlike: Vec<String>,
    pub allow_missing: bool,
    pub allow_unsteady: bool,
    /// An undecided row does not fail.
    pub allow_undecided: bool,
}

impl Default for Options {
    fn default() -> Self {
        use crate::args::compare::DEFAULT_THRESHOLD;
        Self {
            gates: vec![Gate::Ratio],
            timing_threshold: DEFAULT_THRESHOLD,
            ratio_threshold: DEFAULT_THRESHOLD,
            memory_threshold: DEFAULT_THRESHOLD,
            allow_unlike: vec![],
            allow_missing: false,
            allow_unsteady: false,
            allow_undecided: false,
        }
    }
}

/// One figure of one configuration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The configuration in a few words, and its key in full.
    pub label: String,
    pub configuration: serde_json::Map<String, serde_json::Value>,
    pub metric: Metric,
    pub verdict: Verdict,
    /// Geometric means over the runs, of which the change is the ratio; `None` when the row cannot be compared.
    pub base: Option<f64>,
    pub new: Option<f64>,
    /// Relative change of the figure itself, with its 99 % interval.
    pub change: Option<f64>,
    pub change_ci99_low: Option<f64>,
    pub change_ci99_high: Option<f64>,
    pub threshold: f64,
    pub base_runs: usize,
    pub new_runs: usize,
    pub notes: Vec<String>,
}

/// A configuration that a side lacks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Missing {
    /// `base` or `new`.
    pub side: &'static str,
    pub label: String,
    /// Rows of it failed there, or what the nearest configuration has instead.
    pub reason: String,
    /// Whether `--allow-missing` excuses it: not a run that failed and did not in the baseline.
    pub excusable: bool,
}

/// The whole comparison; what is printed in every form.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// `within_threshold`, `improvement`, `regression`, `undecided` or `cannot_compare`.
    pub verdict: Verdict,
    pub exit_code: u8,
    pub base: Vec<String>,
    pub new: Vec<String>,
    pub options: Options,
    /// Why it cannot be compared.
    pub reasons: Vec<String>,
    /// Fields that differ; those allowed to.
    pub unlike: Vec<Unlike>,
    pub unlike_allowed: Vec<Unlike>,
    pub missing: Vec<Missing>,
    pub warnings: Vec<String>,
    pub rows: Vec<Row>,
}

/// Compares files with files. Never fails: what is wrong is in the report, and in its exit code.
pub fn compare(base: &[Source], new: &[Source], options: &Options) -> Report {
    let names = |side: &[Source]| side.iter().map(|s| s.name.clone()).collect();
    let mut report = Report {
        verdict: Verdict::CannotCompare,
        exit_code: EXIT_CANNOT_COMPARE,
        base: names(base),
        new: names(new),
        options: options.clone(),
        reasons: vec![],
        unlike: vec![],
        unlike_allowed: vec![],
        missing: vec![],
        warnings: vec![],
        rows: vec![],
    };
    let mut records = |side: &[Source]| {
        let mut all = Vec::new();
        for source in side {
            let read = read::read(source).and_then(|all| {
                all.iter().try_for_each(|r| read::typed(r).and_then(|()| read::worded(r))).map(|()| all)
            });
            match read {
                Ok(records) => all.extend(records),
                Err(reason) => report.reasons.push(reason),
            }
        }
        all
    };
    let (base, new) = (records(base), records(new));
    if report.reasons.is_empty() {
        let pairs = pair::pair(&base, &new, options, &mut report);
        rows(&pairs, options, &mut report);
    }
    conclude(&mut report);
    report
}

/// Judges every pair; appends rows, and what is wrong.
fn rows(pairs: &[Pair], options: &Options, report: &mut Report) {
    let telling = pair::telling(pairs);
    report.warnings.extend(warn::warnings(pairs, &telling));
    let mut reasoned: HashSet<String> = report.reasons.iter().cloned().collect();
    // A ratio rests on both rows of a run.
    let mut of_run: HashMap<_, Vec<&Record>> = HashMap::new();
    for pair in pairs {
        let rows = of_run.entry(pair.key.of_run()).or_default();
        rows.extend(pair.base.records().into_iter().chain(pair.new.records()));
    }
    for pair in pairs {
        let label = pair.key.label(&telling);
        let unlike = alike(pair, options, report);
        for metric in metric::of_gates(&options.gates).into_iter().filter(|m| m.applies(&pair.key)) {
            let beside = match metric {
                Metric::Speedup => of_run[&pair.key.of_run()].clone(),
                _ => pair.base.records().into_iter().chain(pair.new.records()).collect(),
            };
            let row = row(pair, &label, metric, &unlike, &beside, options);
            match row {
                Ok(row) => report.rows.push(row),
                Err(reasons) => {
                    for reason in &reasons {
                        if reasoned.insert(reason.clone()) {
                            report.reasons.push(reason.clone());
                        }
                    }
                    report.rows.push(blank(pair, &label, metric, options, reasons));
                }
            }
        }
    }
    if pairs.is_empty() {
        report.reasons.push("no configuration is in both sides".into());
        return;
    }
    // A gate that judges nothing would pass whatever comes.
    for metric in metric::of_gates(&options.gates) {
        if !pairs.iter().any(|pair| metric.applies(&pair.key)) {
            let name = metric.name();
            report.reasons.push(format!(
                "no paired row has the figure that is gated, {name}: rows without graphs have no speedup \
                 (measure with --cuda_graph_scope, or --gate time compares step times)"
            ));
        }
    }
}

/// Fields of a pair that differ, or are not told, without leave; all such fields are put into the report.
fn alike(pair: &Pair, options: &Options, report: &mut Report) -> Vec<String> {
    let (base, new) = (pair.base.records(), pair.new.records());
    let mut names: Vec<String> = pair.untold.iter().map(|name| (*name).to_owned()).collect();
    for field in &keys::ALIKE {
        let cell = |row| field.cell(row).map(str::to_owned).map_err(str::to_owned);
        let Some(unlike) = field.unlike(&base, &new, &cell) else { continue };
        let allowed = options.allow_unlike.iter().any(|f| f == field.name);
        let list = if allowed { &mut report.unlike_allowed } else { &mut report.unlike };
        if !list.contains(&unlike) {
            list.push(unlike);
        }
        if !allowed {
            names.push(field.name.to_owned());
        }
    }
    let known = SCHEMA_VERSION.to_string();
    if let Some(row) = base.iter().chain(&new).find(|r| r.cell("schema_version") != known) {
        let unlike = Unlike {
            field: "schema_version".into(),
            base: row.wrong("schema_version", row.cell("schema_version")),
            new: format!("this mbperf reads version {known}"),
        };
        let allowed = options.allow_unlike.iter().any(|f| f == "schema_version");
        let list = if allowed { &mut report.unlike_allowed } else { &mut report.unlike };
        if !list.iter().any(|u| u.field == unlike.field) {
            list.push(unlike);
        }
        if !allowed && !names.iter().any(|n| n == "schema_version") {
            names.push("schema_version".into());
        }
    }
    names
}

/// A row with figures, or why there are none. `beside`: the rows whose times must have settled for it.
fn row(
    pair: &Pair,
    label: &str,
    metric: Metric,
    unlike: &[String],
    beside: &[&Record],
    options: &Options,
) -> Result<Row, Vec<String>> {
    let mut reasons: Vec<String> = beside.iter().filter_map(|r| metric::known_steady(r).err()).collect();
    if !unlike.is_empty() {
        reasons.push(format!("{label}: unlike in {}", unlike.join(", ")));
    }
    let mut samples = |side: &Runs| {
        let (samples, wrong) = metric.samples(side);
        reasons.extend(wrong);
        samples
    };
    let (base, new) = (samples(&pair.base), samples(&pair.new));
    if !reasons.is_empty() {
        return Err(reasons);
    }
    let Some(change) = judge::change(&base, &new, metric.scatter()) else {
        return Err(vec![format!("{label}: no run to compare")]);
    };
    let threshold = metric.threshold(options);
    let mut row = blank(pair, label, metric, options, vec![]);
    row.verdict = judge::judge(change.log, change.least, threshold);
    let (low, high) = metric.relative(change.log);
    (row.base, row.new) =
        (judge::middle(&base).map(|c| metric.figure(c)), judge::middle(&new).map(|c| metric.figure(c)));
    (row.change, row.change_ci99_low, row.change_ci99_high) =
        (Some(metric.relative_value(change.log.value)), Some(low), Some(high));
    if change.basis == judge::Basis::OneRun {
        let Scatter { one_run_half_width, one_run_least, .. } = metric.scatter();
        let (down, up) = metric.relative(Interval { value: 0.0, low: -one_run_least, high: one_run_least });
        row.notes.push(format!(
            "one run a side: the spread between runs is not known, the interval is widened by +-{:.1} % and no change \
             between {:.1} and {:+.1} % is called one; both are wider where the runs' own intervals are wide",
            one_run_half_width * 100.0,
            down * 100.0,
            up * 100.0
        ));
    } else if base.len() == 1 || new.len() == 1 {
        row.notes.push("one run on one side: the other side's spread is used for both".into());
    }
    if change.interval_assumed {
        let few = if metric == Metric::Speedup { "eight pairs of blocks" } else { "six blocks of the arm" };
        row.notes.push(format!("a run has no interval of its own (under {few}): a wide one is assumed"));
    }
    if let Some(unsteady) = beside.iter().find(|r| r.cell("steady_reached") == "false") {
        row.notes.push(format!(
            "steady state was not reached by the {} arm ({}): --allow-unsteady judges all the same",
            unsteady.cell("arm"),
            unsteady.place()
        ));
        if !options.allow_unsteady {
            row.verdict = Verdict::Undecided;
        }
    }
    Ok(row)
}

fn blank(pair: &Pair, label: &str, metric: Metric, options: &Options, notes: Vec<String>) -> Row {
    Row {
        label: label.into(),
        configuration: pair.key.cells().map(|(k, v)| (k.to_owned(), v.into())).collect(),
        metric,
        verdict: Verdict::CannotCompare,
        base: None,
        new: None,
        change: None,
        change_ci99_low: None,
        change_ci99_high: None,
        threshold: metric.threshold(options),
        base_runs: pair.base.len(),
        new_runs: pair.new.len(),
        notes,
    }
}

/// Verdict and exit code of the whole: what cannot be compared outweighs a regression, that an undecided row.
fn conclude(report: &mut Report) {
    let any = |verdict| report.rows.iter().any(|r| r.verdict == verdict);
    let missing = report.missing.iter().any(|m| !(m.excusable && report.options.allow_missing));
    let broken = !report.reasons.is_empty() || !report.unlike.is_empty() || missing;
    let (verdict, code) = if broken || any(Verdict::CannotCompare) {
        (Verdict::CannotCompare, EXIT_CANNOT_COMPARE)
    } else if any(Verdict::Regression) {
        (Verdict::Regression, EXIT_REGRESSION)
    } else if any(Verdict::Undecided) {
        (Verdict::Undecided, if report.options.allow_undecided { 0 } else { EXIT_UNDECIDED })
    } else if any(Verdict::Improvement) {
        (Verdict::Improvement, 0)
    } else {
        (Verdict::WithinThreshold, 0)
    };
    (report.verdict, report.exit_code) = (verdict, code);
}
