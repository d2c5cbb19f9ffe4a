//! `mbperf report`: one page that needs nothing else, from result files and what lies beside them. Every picture has
//! a table of the same figures under it; no script, no network.

mod beside;
mod canvas;
pub mod data;
mod figure;
mod html;
mod pictures;
mod rows;
mod scatter;
mod steps;
mod sweep;
mod verdict;

use data::{Group, Input, Titles, label};
use html::{Cell, STYLE, Table, escape};
use std::fmt::Write;

/// What a page begins with.
pub const PAGE_START: &str = "<!DOCTYPE html>";
/// Runs whose steps are drawn, each: more would make a page that no browser opens quickly.
const MOST_DRAWN: usize = 24;
/// Runs that are drawn with a dot for every pixel; more share a page's dots.
const FINE: usize = 6;

/// The page.
pub fn render(input: &Input) -> String {
    let groups = input.groups();
    let runs: usize = groups.iter().map(|g| g.runs.len()).sum();
    let names: Vec<&str> = input.files.iter().map(|f| f.name.as_str()).collect();
    let title = format!("mbperf: {}", names.join(", "));
    // Nothing is fetched, whatever a file holds.
    let mut page = format!(
        "{PAGE_START}\n<html lang=en>\n<head>\n<meta charset=utf-8>\n\
         <meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <meta name=viewport content=\"width=device-width, initial-scale=1\">\n\
         <meta name=generator content=\"mbperf {}\">\n<title>{}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n",
        env!("CARGO_PKG_VERSION"),
        escape(&title)
    );
    let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let _ = write!(
        page,
        "<h1>{}</h1>\n<p class=what>Is a CUDA graph faster than eager? {} of {} in {}.</p>\n",
        escape(&title),
        count(runs, "run"),
        count(groups.len(), "job"),
        count(input.files.len(), "file"),
    );
    page += &verdict::html(&groups);
    if let Some(gain) = pictures::gain(&groups) {
        page += &gain.html();
    }
    let mut drawn = 0;
    for group in &groups {
        page += &section(group, &mut drawn, runs);
    }
    page += &about(input, &groups);
    page + "</body>\n</html>\n"
}

/// All pictures of one job.
fn section(group: &Group, drawn: &mut usize, all_runs: usize) -> String {
    let mut text = format!("<h2>{}</h2>\n", escape(&group.title));
    let measured = Group {
        title: group.title.clone(),
        runs: group.runs.iter().filter(|r| r.is_ok()).cloned().collect(),
    };
    let failed = group.runs.len() - measured.runs.len();
    if failed > 0 {
        let _ = writeln!(
            text,
            "<p class=note>{failed} of {} runs failed or were skipped: they have no figures, and are not in the pictures. The reasons are at the top.</p>",
            group.runs.len()
        );
    }
    text += &sweep::html(group);
    if !measured.runs.is_empty() {
        text += &pictures::step_time(&measured).html();
        scatter::frontiers(&measured).iter().for_each(|f| text += &f.html());
        text += &pictures::host_and_device(&measured).html();
        text += &pictures::memory(&measured).html();
        match pictures::clocks(&measured) {
            Some(clocks) => text += &clocks.html(),
            None => text += "<p class=note>Clocks: none was read.</p>\n",
        }
    }
    let spread = all_runs.min(MOST_DRAWN).div_ceil(FINE) as f64;
    let mut unprofiled = 0;
    for run in &group.runs {
        let name = label(run, &group.runs);
        match pictures::parts(run, format!("Where the step goes: {name}")) {
            Some(figure) => text += &figure.html(),
            None => unprofiled += 1,
        }
        if *drawn < MOST_DRAWN {
            if let Some(figure) = steps::figure(run, format!("Every step: {name}"), spread) {
                text += &figure.html();
                *drawn += 1;
            }
            if let Some(figure) = scatter::clocks_over_blocks(run, format!("Clock over blocks: {name}")) {
                text += &figure.html();
            }
        }
    }
    if unprofiled > 0 {
        let _ = writeln!(
            text,
            "<p class=note>Where the step goes by part: {} not profiled (--profile).</p>",
            if unprofiled == group.runs.len() {
                "these runs were".into()
            } else {
                format!("{unprofiled} of the runs were")
            }
        );
    }
    if *drawn >= MOST_DRAWN && all_runs > MOST_DRAWN {
        let _ = writeln!(
            text,
            "<p class=note>The steps of the first {MOST_DRAWN} runs of the page are drawn.</p>"
        );
    }
    text
}

/// Which runs these are, with their commands.
fn about(input: &Input, groups: &[Group]) -> String {
    let mut text = String::from("<h2>The runs</h2>\n");
    let titles = Titles::of(groups);
    if let Some(shared) = &titles.shared {
        let _ = writeln!(text, "<p class=\"note before\">{}</p>", escape(shared));
    }
    let mut table = Table::new(
        "runs",
        &[
            "run",
            "run_id",
            "file",
            "started",
            "status",
            "GPU",
            "driver",
            "attention",
            "mbperf",
            "losses and bits equal",
            "command",
        ],
    );
    for (group, run) in groups.iter().flat_map(|g| g.runs.iter().map(move |r| (g, r))) {
        let text = |column: &str| Cell::text(run.cell(column));
        let version = [run.cell("mbperf_version"), run.cell("git_commit").get(..7).unwrap_or_default()];
        table.rows.push(vec![
            Cell::text(titles.row(group, &label(run, &group.runs))),
            text("run_id"),
            Cell::text(&run.file.name),
            text("started_at"),
            text("status"),
            Cell::text(if run.cell("gpu_name").is_empty() {
                run.cell("device")
            } else {
                run.cell("gpu_name")
            }),
            text("driver_version"),
            text("attention_backend"),
            Cell::text(version.join(" ").trim()),
            text("digest_match"),
            text("command"),
        ]);
    }
    text += &table.html();
    let missing: Vec<&str> =
        input.files.iter().filter(|f| f.steps.is_none()).map(|f| f.name.as_str()).collect();
    if !missing.is_empty() {
        let _ = writeln!(
            text,
            "<p class=note>No steps file lies beside {}: its steps are not drawn.</p>",
            escape(&missing.join(", "))
        );
    }
    text + "<p class=note>Figures are shown in five digits; the tables hold them as the files do (<code>value</code> of each cell). An empty cell was not measured.</p>\n"
}
