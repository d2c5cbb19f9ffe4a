//! The recommendation of a sweep: the narrowest scope whose gain no wider one beats beyond the margin.
//!
//! Over 500 lines: a third are its tests, a situation each, read beside the sentences that they expect.

use super::columns::{self, Value};
use serde_json::json;

/// Eager over graph time, with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gain {
    pub speedup: f64,
    /// Without an interval (under eight pairs) nothing is known: 0 to infinity.
    pub low: f64,
    pub high: f64,
}

/// One scope set that was run.
#[derive(Debug, Clone, PartialEq)]
pub struct Tried {
    pub scope: String,
    /// `cuda` or `cpu`.
    pub device: String,
    /// Share of a step's launches that lie in graphs; `None`: a file that does not say.
    pub captured: Option<f64>,
    pub status: String,
    pub reason: String,
    pub verdict: String,
    /// What ended timing, in the column's words: says what could be raised.
    pub stopped_by: String,
    /// The arms did not fit in memory together.
    pub in_turn: bool,
    /// The arms left different bits, where the order of attention was left open: their times are not of equal work.
    pub unequal: bool,
    /// Of a row that is `ok` and of equal work alone, whatever else its cells hold.
    pub gain: Option<Gain>,
    /// Under the host model.
    pub modelled: Option<Gain>,
    /// Device memory that the graph arm holds beyond the eager one, its graphs with it, MiB.
    pub more_memory_mib: Option<f64>,
}

/// What to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Advice {
    /// Index of a scope.
    Scope(usize),
    /// No scope helps by more than the margin.
    Eager,
    /// Nothing can be said, and why.
    Unknown(String),
}

/// Chooses among `gains`, in order from the narrowest to the widest scope; `None`: not measured, or failed.
///
/// A scope helps when its whole interval lies above the margin. A wider scope that helps too beats it when its speedup is
/// larger by more than the margin and their intervals lie apart: nobody widens for what may be noise.
pub fn recommend(gains: &[Option<Gain>], margin: f64) -> Advice {
    let known: Vec<(usize, Gain)> = gains.iter().enumerate().filter_map(|(i, g)| Some((i, (*g)?))).collect();
    if known.is_empty() {
        return Advice::Unknown("no scope was measured".into());
    }
    let helps: Vec<(usize, Gain)> = known.iter().copied().filter(|(_, g)| g.low > 1.0 + margin).collect();
    let beaten = |at: usize| {
        let own = helps[at].1;
        helps[at + 1..].iter().any(|(_, wider)| gains_more(wider, &own, margin) && wider.low > own.high)
    };
    if let Some(at) = (0..helps.len()).find(|&at| !beaten(at)) {
        return Advice::Scope(helps[at].0);
    }
    let open = known.iter().filter(|(_, g)| g.high > 1.0 + margin).count();
    match open {
        0 => Advice::Eager,
        _ => Advice::Unknown(format!("{open} of {} scopes may help and are undecided", known.len())),
    }
}

fn gains_more(wider: &Gain, own: &Gain, margin: f64) -> bool {
    wider.speedup > own.speedup * (1.0 + margin)
}

/// Scopes wider than the one that [`recommend`] chose that may gain more by more than the margin: the ratio of both gains has an
/// interval of its own, and that reaches over it. Runs are independent: half-widths add by their squares.
fn may_gain_more(gains: &[Option<Gain>], chosen: usize, margin: f64) -> Vec<usize> {
    let Some(own) = gains.get(chosen).copied().flatten() else { return Vec::new() };
    let more = |at: &usize| {
        gains[*at].is_some_and(|wider| {
            let apart = (wider.high / wider.speedup).ln().hypot((own.speedup / own.low).ln());
            (wider.speedup / own.speedup).ln() + apart > (1.0 + margin).ln()
        })
    };
    (chosen + 1..gains.len()).filter(more).collect()
}

/// What would tell more of these scopes, by what ended their timing.
fn more_of(tried: &[Tried], scopes: impl IntoIterator<Item = usize>) -> &'static str {
    let ended: Vec<&str> =
        scopes.into_iter().filter_map(|at| Some(tried.get(at)?.stopped_by.as_str())).collect();
    let all = |word: &str| !ended.is_empty() && ended.iter().all(|by| *by == word);
    if all("max_steps") {
        "raise -ms"
    } else if all("precision") {
        // More time changes nothing: it was not used up.
        "timing ended at its precision: run them once more"
    } else {
        "raise --max_time"
    }
}

/// Scopes narrower than the chosen one that may help, and are undecided.
fn may_help(gains: &[Option<Gain>], chosen: usize, margin: f64) -> Vec<usize> {
    let open = |at: &usize| gains[*at].is_some_and(|g| g.low <= 1.0 + margin && g.high > 1.0 + margin);
    (0..chosen).filter(open).collect()
}

impl Tried {
    /// From the cells by column of a run's graph row and of its eager one, where there is one: of the rows themselves, or of a file's.
    pub fn of_cells(cell: &dyn Fn(&str) -> String, eager: &dyn Fn(&str) -> String) -> Self {
        let float = |name: &str| cell(name).parse::<f64>().ok();
        let more_memory_mib = || {
            let beside = eager("peak_memory_mib").parse::<f64>().ok()?;
            Some(float("peak_memory_mib")? + float("graph_memory_mib")? - beside)
        };
        let gain = |name: &str| {
            let end = |which: &str| float(&format!("{name}_ci95_{which}"));
            let (low, high) = (end("low").unwrap_or(0.0), end("high").unwrap_or(f64::INFINITY));
            Some(Gain { speedup: float(name)?, low, high })
        };
        let scope = cell("cuda_graph_scope").replace('+', ",");
        // Spreadsheets write it in capitals.
        let is = |value: String, word: &str| value.eq_ignore_ascii_case(word);
        let unequal = is(cell("digest_match"), "false") || is(eager("digest_match"), "false");
        let in_turn = is(cell("arms_in_turn"), "true");
        // A gain is over an eager arm of the same run, timed beside it.
        let counts = cell("status") == "ok" && eager("status") == "ok" && !unequal && !in_turn;
        Self {
            scope: if scope.is_empty() { "whole layer".into() } else { scope },
            device: cell("device"),
            captured: float("captured_fraction"),
            status: cell("status"),
            reason: cell("status_reason"),
            verdict: cell("verdict"),
            stopped_by: cell("stopped_by"),
            in_turn,
            unequal,
            gain: gain("speedup").filter(|_| counts),
            modelled: gain("speedup_modelled").filter(|_| counts),
            more_memory_mib: more_memory_mib(),
        }
    }

    /// From the rows of one run, the eager one first where it has both, the graph's last; `None`: it left none.
    pub fn of_run(rows: &[Vec<Value>]) -> Option<Self> {
        fn cell(row: &[Value], name: &str) -> String {
            let value = columns::COLUMNS.iter().zip(row).find(|(c, _)| c.name == name).map(|(_, v)| v);
            value.map(Value::cell).unwrap_or_default()
        }
        let (graph, others) = rows.split_last()?;
        Some(Self::of_cells(&|name| cell(graph, name), &|name| {
            others.last().map_or(String::new(), |eager| cell(eager, name))
        }))
    }
}

fn shown(gain: &Option<Gain>) -> String {
    match gain {
        None => "-".into(),
        Some(g) if g.high.is_infinite() => format!("{:.3} (no interval)", g.speedup),
        Some(g) => format!("{:.3} ({:.3} to {:.3})", g.speedup, g.low, g.high),
    }
}

/// The sweep as a table, its first line the head.
pub fn table(tried: &[Tried]) -> Vec<Vec<String>> {
    let modelled = tried.iter().any(|t| t.modelled.is_some());
    let mut head = vec!["scope", "captured", "speedup", "verdict", "MiB over eager"];
    if modelled {
        head.push("modelled speedup");
    }
    let mut lines = vec![head.into_iter().map(String::from).collect::<Vec<_>>()];
    for t in tried {
        let memory = t.more_memory_mib.map_or("-".into(), |m| format!("{m:.0}"));
        let mut verdict = if t.status == "ok" { t.verdict.clone() } else { t.status.clone() };
        if t.unequal && t.status == "ok" {
            verdict += "bits differ";
        }
        if t.in_turn {
            verdict += ", arms in turn";
        }
        let captured = t.captured.map_or("-".into(), |c| format!("{:.0} %", c * 100.0));
        let mut line = vec![t.scope.clone(), captured, shown(&t.gain), verdict, memory];
        if modelled {
            line.push(shown(&t.modelled));
        }
        lines.push(line);
    }
    lines
}

/// Which of both ratios.
type Ratio = fn(&Tried) -> Option<Gain>;
const BARE: Ratio = |t| t.gain;
const MODELLED: Ratio = |t| t.modelled;

/// What is recommended, on the bare ratio and on the modelled one where there is one.
pub fn sentences(tried: &[Tried], margin: f64) -> Vec<String> {
    let of = |ratio: Ratio| {
        let gains: Vec<Option<Gain>> = tried.iter().map(ratio).collect();
        let found = recommend(&gains, margin);
        let missing = unmeasured(tried, ratio);
        let mut said = advice(&found, tried, (&gains, margin), missing.is_empty());
        if let Advice::Scope(at) = found {
            let (narrower, wider) = (may_help(&gains, at, margin), may_gain_more(&gains, at, margin));
            // A gain over the chosen one hangs on its interval too.
            let of_wider = more_of(tried, wider.iter().copied().chain([at]));
            let percent = margin * 100.0;
            for (what, open, more) in [
                ("narrower ones that may help".into(), &narrower, more_of(tried, narrower.iter().copied())),
                (format!("wider ones that may gain over {percent} % more"), &wider, of_wider),
            ] {
                if !open.is_empty() {
                    let names: Vec<&str> = open.iter().map(|at| tried[*at].scope.as_str()).collect();
                    said += &format!("; {what}: {} ({more})", names.join("; "));
                }
            }
        }
        // Where nothing was, its own sentence says why.
        if !missing.is_empty() && missing.len() < tried.len() {
            let names: Vec<String> = missing.iter().map(|(scope, why)| format!("{scope} ({why})")).collect();
            said += &format!("; not measured: {}", names.join("; "));
        }
        said
    };
    let mut said = vec![format!("Recommended: {}", of(BARE))];
    if tried.iter().any(|t| t.modelled.is_some()) {
        said.push(format!("With the modelled host time: {}", of(MODELLED)));
    }
    said
}

/// Scopes that no recommendation can rest on, and why in a few words.
fn unmeasured(tried: &[Tried], ratio: Ratio) -> Vec<(&str, &'static str)> {
    let why = |t: &Tried| match t.status.as_str() {
        "skipped" => "skipped",
        "ok" if t.unequal => "bits differ",
        "ok" if t.in_turn => "arms in turn",
        "ok" if t.device == "cpu" => "on a CPU",
        "ok" => "no ratio",
        _ if t.reason.contains("out of memory") => "out of memory",
        _ => "failed",
    };
    tried.iter().filter(|t| ratio(t).is_none()).map(|t| (t.scope.as_str(), why(t))).collect()
}

/// Why scopes have no figures, a sentence each.
pub fn failures(tried: &[Tried]) -> Vec<String> {
    let failed = tried.iter().filter(|t| t.status != "ok" && !t.reason.is_empty());
    failed.map(|t| format!("{}: {}", t.scope, t.reason)).collect()
}

/// The sweep as a table, and its recommendation.
pub fn render(tried: &[Tried], margin: f64) -> String {
    let lines = table(tried);
    let columns = lines[0].len();
    let widths: Vec<usize> =
        (0..columns).map(|c| lines.iter().map(|l| l[c].chars().count()).max().unwrap_or(0)).collect();
    let mut out = String::new();
    for line in &lines {
        let cells: Vec<String> =
            line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        out += cells.join("  ").trim_end();
        out.push('\n');
    }
    for line in failures(tried).into_iter().chain(sentences(tried, margin)) {
        out += &line;
        out.push('\n');
    }
    out
}

/// The same for a program: of `scopes` that were to be tried.
pub fn described(tried: &[Tried], scopes: usize, margin: f64) -> serde_json::Value {
    // An interval's end that is not known is null: JSON has no infinity.
    let gain =
        |g: &Option<Gain>| g.as_ref().map(|g| json!({ "speedup": g.speedup, "low": g.low, "high": g.high }));
    let chosen = |ratio: Ratio| {
        let gains: Vec<Option<Gain>> = tried.iter().map(ratio).collect();
        match recommend(&gains, margin) {
            Advice::Scope(at) => json!(tried[at].scope),
            Advice::Eager => json!("none"),
            Advice::Unknown(_) => serde_json::Value::Null,
        }
    };
    // Beside a recommendation, what it does not rest on: `none` is of the others alone.
    let missing = |ratio: Ratio| -> Vec<_> {
        unmeasured(tried, ratio).iter().map(|(scope, why)| json!({ "scope": scope, "why": why })).collect()
    };
    let lines: Vec<_> = tried
        .iter()
        .map(|t| {
            json!({
                "scope": t.scope, "captured_fraction": t.captured, "status": t.status, "status_reason": t.reason,
                "verdict": t.verdict, "stopped_by": t.stopped_by, "arms_in_turn": t.in_turn, "bare": gain(&t.gain), "modelled": gain(&t.modelled),
                "mib_over_eager": t.more_memory_mib,
            })
        })
        .collect();
    json!({
        "scopes": lines, "without_row": scopes - tried.len().min(scopes), "margin": margin,
        "recommended": chosen(BARE), "recommended_modelled": chosen(MODELLED), "not_measured": missing(BARE),
        "not_measured_modelled": missing(MODELLED), "said": sentences(tried, margin),
    })
}

/// Why there is no speedup at all.
fn without_figures(tried: &[Tried]) -> &'static str {
    let ok = || tried.iter().filter(|t| t.status == "ok");
    if ok().next().is_none() {
        "no scope was measured"
    } else if ok().all(|t| t.device == "cpu") {
        "the scopes ran on a CPU, which gives no speedup"
    } else if ok().all(|t| t.unequal) {
        "the arms of every scope left different bits, which are no equal work: leave out --attention_deterministic false"
    } else if ok().all(|t| t.in_turn) {
        "no scope was measured beside the eager arm: their arms were timed in turn, which gives no speedup"
    } else {
        "no row has a speedup"
    }
}

/// `all`: every scope was measured.
fn advice(advice: &Advice, tried: &[Tried], (gains, margin): (&[Option<Gain>], f64), all: bool) -> String {
    let percent = margin * 100.0;
    match advice {
        Advice::Scope(at) => {
            let chosen = tried.get(*at);
            let memory = chosen.and_then(|t| t.more_memory_mib);
            format!(
                "{}, the narrowest scope that helps and that no wider one is known to beat by more than {percent} %{}",
                chosen.map_or("?", |t| &t.scope),
                memory.map_or(String::new(), |m| format!("; it takes {m:.0} MiB more than eager"))
            )
        }
        Advice::Eager => {
            let which = if all { "no scope" } else { "of the scopes measured none" };
            format!("none: {which} is faster than eager by more than {percent} %")
        }
        Advice::Unknown(_) if tried.iter().all(|t| t.gain.is_none() && t.modelled.is_none()) => {
            format!("nothing: {}", without_figures(tried))
        }
        Advice::Unknown(why) => {
            let open = may_help(gains, gains.len(), margin);
            format!("nothing: {why} ({})", more_of(tried, open))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARGIN: f64 = 0.01;

    fn gain(speedup: f64, half: f64) -> Option<Gain> {
        Some(Gain { speedup, low: speedup - half, high: speedup + half })
    }
    fn sure(speedups: &[f64]) -> Vec<Option<Gain>> {
        speedups.iter().map(|s| gain(*s, 0.002)).collect()
    }
    fn unknown(gains: &[Option<Gain>]) -> bool {
        matches!(recommend(gains, MARGIN), Advice::Unknown(_))
    }

    #[test]
    fn the_narrowest_scope_that_is_not_beaten() {
        let of = |speedups: &[f64]| recommend(&sure(speedups), MARGIN);
        assert_eq!(of(&[1.05]), Advice::Scope(0));
        assert_eq!(of(&[1.05, 1.10, 1.20]), Advice::Scope(2), "the widest gains most");
        assert_eq!(of(&[1.05, 1.10, 1.105]), Advice::Scope(1), "half a per cent more is no reason to widen");
        assert_eq!(of(&[1.10, 1.10, 1.10]), Advice::Scope(0), "ties go to the narrowest");
        assert_eq!(of(&[1.20, 1.10, 1.05]), Advice::Scope(0), "wider is worse");
        assert_eq!(of(&[1.0, 0.97, 1.10]), Advice::Scope(2), "the narrow ones do not help");
        // Each step within the margin, the sum beyond it: the first that no later one beats.
        assert_eq!(of(&[1.100, 1.108, 1.116]), Advice::Scope(1));
        assert_eq!(of(&[1.0, 1.004, 0.99]), Advice::Eager);
        assert_eq!(of(&[0.8, 0.9]), Advice::Eager, "graphs that slow down");
    }

    #[test]
    fn failed_and_undecided_scopes_are_not_recommended() {
        assert_eq!(recommend(&[None, gain(1.05, 0.002), None], MARGIN), Advice::Scope(1));
        // A wider one that may help is no reason against one that does.
        assert_eq!(recommend(&[gain(1.05, 0.002), gain(1.2, 0.5)], MARGIN), Advice::Scope(0));
        assert!(unknown(&[]) && unknown(&[None, None]));
        assert!(unknown(&[gain(1.02, 0.03)]), "the interval crosses the margin");
        let no_interval = Some(Gain { speedup: 1.3, low: 0.0, high: f64::INFINITY });
        assert!(unknown(&[no_interval, gain(1.0, 0.002)]));
        assert_eq!(recommend(&[no_interval, gain(1.05, 0.002)], MARGIN), Advice::Scope(1));
    }

    /// The larger speedup must be larger beyond both intervals.
    #[test]
    fn nobody_widens_for_what_may_be_noise() {
        let narrow = gain(1.05, 0.01);
        assert_eq!(recommend(&[narrow, gain(1.08, 0.015)], MARGIN), Advice::Scope(1));
        assert_eq!(recommend(&[narrow, gain(1.08, 0.025)], MARGIN), Advice::Scope(0));
        // A third that is surely better than the first beats it, and the second does not.
        assert_eq!(recommend(&[narrow, gain(1.08, 0.025), gain(1.09, 0.002)], MARGIN), Advice::Scope(1));
        assert_eq!(may_gain_more(&[narrow, gain(1.08, 0.025), gain(1.04, 0.2)], 0, MARGIN), [1, 2]);
        assert_eq!(may_gain_more(&[narrow, None, gain(1.045, 0.01)], 0, MARGIN), Vec::<usize>::new());
        // The chosen one's own interval is the wide one.
        let wide = Some(Gain { speedup: 1.10, low: 1.08, high: 1.12 });
        let gains = [wide, Some(Gain { speedup: 1.121, low: 1.119, high: 1.123 })];
        assert_eq!(recommend(&gains, MARGIN), Advice::Scope(0));
        assert_eq!(may_gain_more(&gains, 0, MARGIN), [1]);
        assert_eq!(may_help(&[gain(1.0, 0.2), gain(1.0, 0.001), None, narrow], 3, MARGIN), [0]);
    }

    #[test]
    fn only_rows_that_are_ok_and_of_equal_work_have_a_gain() {
        let of = |status: &str, digest_match: &str| {
            let cell = |column: &str| match column {
                "status" => status.into(),
                "digest_match" => digest_match.into(),
                "speedup" | "speedup_modelled" => "1.5".into(),
                _ => String::new(),
            };
            Tried::of_cells(&cell, &|column| if column == "status" { "ok".into() } else { String::new() })
        };
        for (status, digest_match, counts) in [
            ("ok", "true", true),
            // Rows of one arm and of old files do not say.
            ("ok", "", true),
            ("ok", "false", false),
            ("ok", "FALSE", false),
            ("failed", "true", false),
            ("skipped", "", false),
        ] {
            let found = of(status, digest_match);
            assert_eq!(
                (found.gain.is_some(), found.modelled.is_some()),
                (counts, counts),
                "{status} {digest_match}"
            );
        }
        let said = render(&[of("ok", "false"), of("ok", "FALSE")], MARGIN);
        assert!(
            said.contains("bits differ") && said.contains("nothing: the arms of every scope left different"),
            "{said}"
        );
    }

    #[test]
    fn a_larger_margin_asks_for_more() {
        let gains = sure(&[1.03, 1.05]);
        assert_eq!(recommend(&gains, 0.0), Advice::Scope(1));
        assert_eq!(recommend(&gains, 0.025), Advice::Scope(0));
        assert_eq!(recommend(&gains, 0.06), Advice::Eager);
    }

    #[test]
    fn the_table_names_failures_and_both_recommendations() {
        let tried = |scope: &str, status: &str, gain, modelled| Tried {
            scope: scope.into(),
            device: "cuda".into(),
            captured: Some(0.5),
            status: status.into(),
            reason: if status == "ok" { String::new() } else { "out of memory: 3 MiB".into() },
            verdict: "equivalent".into(),
            stopped_by: "max_time".into(),
            in_turn: false,
            unequal: false,
            gain,
            modelled,
            more_memory_mib: Some(12.0),
        };
        let rows = [
            tried("attn", "ok", gain(1.0, 0.002), gain(1.3, 0.01)),
            tried("attn,mlp", "failed", None, None),
            tried("full_iteration", "ok", gain(1.002, 0.002), gain(1.6, 0.01)),
        ];
        let text = render(&rows, MARGIN);
        assert!(text.contains("attn,mlp: out of memory: 3 MiB"), "{text}");
        let none = "none: of the scopes measured none is faster than eager by more than 1 %; not measured: attn,mlp (out of memory)\n";
        assert!(text.contains(&format!("Recommended: {none}")), "{text}");
        assert!(text.contains("With the modelled host time: full_iteration, the narrowest"), "{text}");
        assert!(
            text.contains("more than 1 %; it takes 12 MiB more than eager; not measured: attn,mlp"),
            "{text}"
        );
        let said = described(&rows, 3, MARGIN);
        assert_eq!(said["recommended"], "none");
        assert_eq!(said["not_measured"], json!([{ "scope": "attn,mlp", "why": "out of memory" }]));
        // What ended timing says what could be raised.
        for (by, more) in
            [("max_steps", "raise -ms"), ("max_time", "raise --max_time"), ("precision", "once more")]
        {
            let of = |scope, gain| Tried { stopped_by: by.into(), ..tried(scope, "ok", gain, None) };
            let open = gain(1.05, 0.05);
            for rows in [
                vec![of("attn", open)],
                vec![of("attn", gain(1.05, 0.01)), of("attn,mlp", open)],
                vec![of("attn", open), of("attn,mlp", gain(1.05, 0.01))],
            ] {
                let text = render(&rows, MARGIN);
                assert!(text.contains(&format!("{more})\n")), "{by}: {text}");
            }
        }
        let without = |device: &str, status: &str, in_turn| {
            let of = |scope| Tried { device: device.into(), in_turn, ..tried(scope, status, None, None) };
            render(&[of("attn"), of("mlp")], MARGIN)
        };
        for (text, why) in [
            (without("cpu", "ok", false), "nothing: the scopes ran on a CPU"),
            (without("cuda", "ok", true), "nothing: no scope was measured beside the eager arm"),
            (without("cuda", "failed", false), "nothing: no scope was measured"),
        ] {
            assert!(text.contains(why), "{text}");
        }
        let bare: Vec<Tried> = rows.into_iter().map(|t| Tried { modelled: None, ..t }).collect();
        assert!(!render(&bare, MARGIN).contains("modelled"));
    }
}
