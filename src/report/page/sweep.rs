//! A sweep's table and recommendation, in the words of `--sweep` itself.

use super::data::{Group, Run};
use super::html::{Cell, Table, escape};
use crate::measure::options::DEFAULT_MARGIN;
use crate::report::recommend::{Tried, failures, sentences, table};
use std::fmt::Write;

/// Runs of one file and host model that captured different things: narrowest first.
struct Sweep<'a> {
    /// What tells it from another of the same job; empty when there is one.
    name: String,
    margin: f64,
    /// Some runs were made for another one.
    margins_differ: bool,
    tried: Vec<Tried>,
    runs: Vec<&'a Run<'a>>,
}

fn sweeps<'a>(group: &'a Group<'a>) -> Vec<Sweep<'a>> {
    let mut sweeps: Vec<Sweep> = Vec::new();
    for run in &group.runs {
        let with_graphs = run.sides.iter().any(|r| r.cell("arm") == "graph") && run.cell("aa").is_empty();
        if !with_graphs {
            continue;
        }
        let name = match run.cell("host_model") {
            "" | "bare" => run.file.name.clone(),
            model => format!("{}, host {model}", run.file.name),
        };
        let at = sweeps.iter().position(|s| s.name == name).unwrap_or(sweeps.len());
        if at == sweeps.len() {
            sweeps.push(Sweep {
                name,
                margin: DEFAULT_MARGIN,
                margins_differ: false,
                tried: vec![],
                runs: vec![],
            });
        }
        // A scope that was run again: the later run counts, but one that failed counts for nothing beside one that did not, as
        // `--resume` has it.
        let ok = |r: &Run| r.sides.iter().all(|s| s.cell("status") == "ok");
        if sweeps[at].runs.iter().any(|r| r.scope() == run.scope() && ok(r)) && !ok(run) {
            continue;
        }
        sweeps[at].runs.retain(|r| r.scope() != run.scope());
        sweeps[at].runs.push(run);
    }
    sweeps.retain(|s| s.runs.len() > 1);
    for sweep in &mut sweeps {
        let mut tried: Vec<Tried> = sweep.runs.iter().filter_map(|r| tried(r)).collect();
        // Where files do not say, in their order, which is a sweep's.
        tried.sort_by(|a, b| a.captured.partial_cmp(&b.captured).unwrap_or(std::cmp::Ordering::Equal));
        sweep.tried = tried;
        // The latest run's: what the command that ended the sweep was given.
        let margins = || sweep.runs.iter().filter_map(|r| r.figure("margin"));
        sweep.margin = margins().next_back().unwrap_or(DEFAULT_MARGIN);
        sweep.margins_differ = margins().any(|m| m != sweep.margin);
    }
    if sweeps.len() == 1 {
        sweeps[0].name.clear();
    }
    sweeps
}

fn tried(run: &Run) -> Option<Tried> {
    let of = |arm: &str| run.sides.iter().find(|r| r.cell("arm") == arm);
    let (graph, eager) = (of("graph")?, of("eager"));
    let cell = |column: &str| graph.cell(column).to_owned();
    Some(Tried::of_cells(&cell, &|column| eager.map_or(String::new(), |row| row.cell(column).to_owned())))
}

/// The sentences of a job's sweeps, for the top of the page.
pub fn recommended(group: &Group) -> Vec<String> {
    let of = |s: Sweep| {
        let named = if s.name.is_empty() { String::new() } else { format!("{}: ", s.name) };
        sentences(&s.tried, s.margin).into_iter().map(move |said| format!("{named}{said}"))
    };
    sweeps(group).into_iter().flat_map(of).collect()
}

/// Table, failures and recommendation of every sweep of a job; empty when there is none.
pub fn html(group: &Group) -> String {
    let mut text = String::new();
    for sweep in sweeps(group) {
        let named = if sweep.name.is_empty() { String::new() } else { format!(": {}", sweep.name) };
        let _ = writeln!(text, "<div class=\"keep before\">\n<h3>Which scope to take{}</h3>", escape(&named));
        for said in sentences(&sweep.tried, sweep.margin) {
            let _ = writeln!(text, "<p><b>{}</b></p>", escape(&said));
        }
        text += "</div>\n";
        let lines = table(&sweep.tried);
        let head: Vec<&str> = lines[0].iter().map(String::as_str).collect();
        let mut shown = Table::new("sweep_scopes", &head);
        shown.rows = lines[1..].iter().map(|l| l.iter().map(Cell::text).collect()).collect();
        text += &shown.html();
        if sweep.margins_differ {
            let _ = writeln!(
                text,
                "<p class=note>The runs were made for different margins: all are judged by the latest one's, {} %.</p>",
                sweep.margin * 100.0
            );
        }
        for failure in failures(&sweep.tried) {
            let _ = writeln!(text, "<p class=note>{}</p>", escape(&failure));
        }
    }
    text
}
