//! The top of the page: what the files say in plain words, and what they do not say.

use super::data::{Group, Run, label, number};
use super::html::{escape, prose, shown};
use crate::measure::options::DEFAULT_MARGIN;
use std::fmt::Write;

/// Runs that are told one by one; the tables hold the rest.
const MOST_TOLD: usize = 80;
/// Arms whose clocks differ by more than this are not alike; 2 % is the step of an H200's clocks, and twice the margin.
const CLOCKS_ALIKE: f64 = 0.02;
/// The columns' own limit of what a neighbour may have lengthened.
const DISTURBED: f64 = 0.05;

/// Both lists.
pub fn html(groups: &[Group]) -> String {
    let mut text = String::from("<section class=verdict>\n<h2>What was found</h2>\n");
    let (mut told, mut summed) = (0, 0);
    for group in groups {
        let _ = writeln!(text, "<p><b>{}</b></p>\n<ul>", escape(&group.title));
        let (summary, left) = themselves(group);
        for (word, sentence) in summary {
            let _ = writeln!(text, "<li><span class=word>{word}</span> {}</li>", prose(&sentence));
        }
        summed += group.runs.len() - left.len();
        for run in left.into_iter().take(MOST_TOLD.saturating_sub(told)) {
            let (word, sentence) = sentence(run);
            let _ = writeln!(
                text,
                "<li>{}: <span class=word>{word}</span> {}</li>",
                escape(&label(run, &group.runs)),
                prose(&sentence)
            );
            told += 1;
        }
        for said in super::sweep::recommended(group) {
            let _ = writeln!(text, "<li><b>{}</b></li>", prose(&said));
        }
        text += "</ul>\n";
    }
    let all: usize = groups.iter().map(|g| g.runs.len()).sum();
    let told = told + summed;
    if all > told {
        let _ = writeln!(text, "<p>{} more runs are in the tables.</p>", all - told);
    }
    text += "<h2>What is not known</h2>\n<ul>\n";
    let runs: Vec<&Run> = groups.iter().flat_map(|g| &g.runs).collect();
    let unknown = unknown(&runs);
    for (what, of) in &unknown {
        let which = if *of == runs.len() {
            if runs.len() == 1 { String::new() } else { " (all runs)".into() }
        } else {
            format!(" ({of} of {} runs)", runs.len())
        };
        let _ = writeln!(text, "<li>{}{which}</li>", prose(what));
    }
    if unknown.is_empty() {
        text += "<li>Nothing that these files would show.</li>\n";
    }
    text + "</ul>\n</section>\n"
}

/// Runs of an arm against itself that are told one by one: more are summed up, and the table has each.
const MOST_ALIKE: usize = 5;

/// Many runs of an arm against itself by their word, and the runs that are told one by one.
fn themselves<'a>(group: &'a Group<'a>) -> (Vec<(&'static str, String)>, Vec<&'a Run<'a>>) {
    let alike = |run: &&Run| run.is_ok() && !run.cell("aa").is_empty() && run.figure("speedup").is_some();
    let (themselves, left): (Vec<&Run>, Vec<&Run>) = group.runs.iter().partition(|r| alike(r));
    if themselves.len() <= MOST_ALIKE {
        return (Vec::new(), group.runs.iter().collect());
    }
    let mut words: Vec<(&str, Vec<f64>)> = Vec::new();
    for run in &themselves {
        let (word, _) = sentence(run);
        match words.iter_mut().find(|(w, _)| *w == word) {
            Some((_, found)) => found.extend(run.figure("speedup")),
            None => words.push((word, run.figure("speedup").into_iter().collect())),
        }
    }
    let of = |(word, found): (&'static str, Vec<f64>)| {
        let (low, high) =
            found.iter().fold((f64::INFINITY, 0.0f64), |(low, high), x| (low.min(*x), high.max(*x)));
        let sentence = format!(
            "{} of {} runs of an arm against itself: ratios {} to {}; the table has each.",
            found.len(),
            themselves.len(),
            shown(low),
            shown(high)
        );
        (word, sentence)
    };
    (words.into_iter().map(of).collect(), left)
}

/// The word of a run, and the sentence that goes with it.
fn sentence(run: &Run) -> (&'static str, String) {
    if let Some(row) = run.sides.iter().find(|r| r.cell("status") != "ok") {
        let word = if row.cell("status") == "skipped" { "skipped." } else { "failed." };
        return (word, one_line(row.cell("status_reason")));
    }
    let time = |at: usize| {
        run.sides.get(at).and_then(|r| number(r, "step_time_ms_median")).map_or("?".into(), shown)
    };
    if run.sides.len() < 2 {
        return ("one arm.", format!("There is nothing to compare; a step took {} ms.", time(0)));
    }
    if run.cell("device") == "cpu" {
        return (
            "no verdict.",
            "It ran on the CPU, which shows that the flow works; its times say nothing about a GPU.".into(),
        );
    }
    let interval = run.figure("speedup_ci95_low").zip(run.figure("speedup_ci95_high"));
    let speedup = run.figure("speedup");
    let pairs = run.cell("pairs");
    let figures = match (speedup, interval) {
        (Some(s), Some((low, high))) => {
            format!("Speedup {}, 95 % interval {} to {}", shown(s), shown(low), shown(high))
        }
        (Some(s), None) => format!("Speedup {}, without an interval", shown(s)),
        _ => format!("Steps took {} and {} ms", time(0), time(1)),
    };
    let margin = run.figure("margin").map_or(String::new(), |m| format!("{} %", shown(m * 100.0)));
    let itself = !run.cell("aa").is_empty();
    let (word, more) = match run.cell("verdict") {
        "faster" | "slower" if itself => {
            ("unlike itself.", "; an arm was timed against itself: do not trust this machine now".into())
        }
        "equivalent" if itself => {
            ("like itself.", "; an arm was timed against itself, as a check of the machine".into())
        }
        "faster" => ("the graph is faster.", modelled(run)),
        "slower" => ("the graph is slower.", modelled(run)),
        "equivalent" => (
            "no difference",
            format!(
                "that matters: the interval is inside the margin of {margin}. {figures}{}",
                modelled(run)
            ),
        ),
        _ => {
            let why = match (speedup, interval) {
                (_, Some(interval)) => {
                    let open = match open(run, interval) {
                        (true, true) => "a gain, a loss or neither",
                        (true, false) => "a gain or none that matters, and no loss",
                        (false, _) => "a loss or none that matters, and no gain",
                    };
                    format!("; the interval reaches over the margin of {margin}, so it may be {open}")
                }
                (Some(_), None) if pairs == "1" => "; one pair of blocks is too little to know one".into(),
                (Some(_), None) => format!("; {pairs} pairs of blocks are too few to know one"),
                _ => "; too few blocks were timed for a ratio".into(),
            };
            let more = match run.cell("stopped_by") {
                "max_steps" => "More steps (-ms) would tell",
                // More time changes nothing: it was not used up.
                "precision" => "Timing ended at its precision; another run would tell",
                _ => "More time (--max_time) would tell",
            };
            ("not decided.", format!("{why}. {more}{}", modelled(run)))
        }
    };
    let text = if more.starts_with("that") { more } else { format!("{figures}{more}") };
    (word, format!("{text}."))
}

/// Of an interval, whether it may be a gain and whether it may be a loss beyond the margin; as the verdict has them.
fn open(run: &Run, (low, high): (f64, f64)) -> (bool, bool) {
    let upper = 1.0 + run.figure("margin").unwrap_or(DEFAULT_MARGIN);
    (high > upper, low < 1.0 / upper)
}

/// The ratio under the host model, if there is one.
fn modelled(run: &Run) -> String {
    run.figure("speedup_modelled").map_or(String::new(), |s| {
        format!("; with the host time of {} (modelled): {}", run.cell("host_model"), shown(s))
    })
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What the figures do not tell or what disturbed them, with the number of runs that it holds for.
fn unknown(runs: &[&Run]) -> Vec<(String, usize)> {
    let mut found: Vec<(String, usize)> = Vec::new();
    for run in runs {
        for what in of_run(run) {
            match found.iter_mut().find(|(w, _)| *w == what) {
                Some((_, n)) => *n += 1,
                None => found.push((what, 1)),
            }
        }
    }
    // What most runs share comes first.
    found.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
    found
}

fn of_run(run: &Run) -> Vec<String> {
    let mut notes: Vec<String> = Vec::new();
    let mut add = |text: String| {
        if !notes.contains(&text) {
            notes.push(text);
        }
    };
    if !run.is_ok() {
        add("A run failed or was skipped: it has no figures.".into());
        return notes;
    }
    let on_gpu = run.cell("device") != "cpu";
    let two = run.sides.len() > 1;
    if !on_gpu {
        add("How long a GPU would take: the runs were made on a CPU, in small.".into());
    }
    if two && on_gpu && run.cell("verdict") == "undecided" {
        let what =
            match run.figure("speedup_ci95_low").zip(run.figure("speedup_ci95_high")).map(|i| open(run, i)) {
                Some((true, false)) => "Whether the graph is faster by more than the margin",
                Some((false, true)) => "Whether the graph is slower by more than the margin",
                _ => "Whether the graph is faster",
            };
        let given = if run.cell("stopped_by") == "max_steps" { "steps" } else { "time" };
        add(format!("{what}: the {given} given did not decide it."));
    }
    if two && on_gpu && run.cell("host_model") == "bare" {
        add("What a Python framework gains: issuing a launch from mbperf costs a few microseconds, from a framework many times that; this gain is a lower bound for it. --host_model pytorch estimates it.".into());
    }
    if run.cell("comm") == "stand_in" {
        let place = if on_gpu { "on this GPU" } else { "in memory" };
        add(format!(
            "What the network costs: collectives were stand-ins, copies {place}; for the whole job the gain is an upper bound."
        ));
    }
    let approximations = run.cell("approximations");
    if !approximations.is_empty() {
        add(format!(
            "What the step would take with {} as the recipe has it: a simpler form was run.",
            approximations.replace('+', ", ")
        ));
    }
    if run.cell("recipe_dtype") != run.cell("compute_dtype") {
        add(format!(
            "What the recipe's {} would take: it ran in {}.",
            run.cell("recipe_dtype"),
            run.cell("compute_dtype")
        ));
    }
    if let (Some(ran), Some(all)) = (run.figure("num_microbatches"), run.figure("num_microbatches_recipe"))
        && ran < all
    {
        add(format!(
            "The whole step of the job: {ran} of its {all} micro-batches were run, so that what happens once a step weighs more here."
        ));
    }
    if run.cell("stack_only") == "true" {
        add("The whole step: the layer stack alone was run.".into());
    }
    if two && run.cell("digest_match") != "true" {
        add("Whether both arms did the same work: it was not shown.".into());
    }
    if run.sides.iter().any(|r| r.cell("steady_reached") == "false") {
        add("The steady step time: times still had a trend when timing ended.".into());
    }
    if run.sides.iter().any(|r| number(r, "disturbed_fraction").is_some_and(|x| x > DISTURBED)) {
        add("The undisturbed step time: over 5 % of the steps were far longer than the shortest, so something else used the GPU.".into());
    }
    if run.sides.iter().any(|r| number(r, "other_processes_max").is_some_and(|n| n > 0.0)) {
        add("The step time on an idle machine: other processes computed on the GPU.".into());
    }
    for row in &run.sides {
        let reasons = row.cell("throttle_reasons");
        if !["", "none"].contains(&reasons) {
            add(format!(
                "The step time at full clocks: they were held back ({}).",
                reasons.replace('+', ", ")
            ));
        }
    }
    if let [a, b] = run.sides[..]
        && let (Some(a), Some(b)) = (number(a, "sm_clock_mhz_median"), number(b, "sm_clock_mhz_median"))
        && (a / b - 1.0).abs() > CLOCKS_ALIKE
    {
        add("How much of the difference is the clock's: the arms' median clocks differ by over 2 %.".into());
    }
    if on_gpu && run.sides.iter().any(|r| r.cell("device_busy_ms").is_empty()) {
        add("How long the device was busy: it was not measured.".into());
    }
    if run.steps().is_empty() {
        add("How single steps went: there is no steps file with this run beside its rows.".into());
    }
    notes
}
