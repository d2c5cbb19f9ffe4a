//! `mbperf report` through the binary: the page's figures are the files', whatever the files hold.
//!
//! Over 500 lines: every kind of file a page can be asked for, with the readers they share.

use crate::common::binary::{self, fails, names, run, text};
use crate::common::pages::{Label, Page, page, pictures, steps_file};
use crate::common::results::Results;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tempfile::tempdir;

const H200: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/results/h200");

/// A row by column name: committed files keep the columns of their time.
type Named = BTreeMap<String, String>;

fn rows(path: &Path) -> Vec<Named> {
    let mut rows = binary::records(&fs::read(path).unwrap());
    let header = rows.remove(0);
    let named =
        |row: csv::StringRecord| header.iter().map(String::from).zip(row.iter().map(String::from)).collect();
    rows.into_iter().map(named).collect()
}

/// Cells of these columns in every row of the files, sorted.
fn cells(files: &[&Path], columns: &[&str], wanted: impl Fn(&Named) -> bool) -> Vec<Vec<String>> {
    let all = files.iter().flat_map(|f| rows(f));
    let mut cells: Vec<Vec<String>> =
        all.filter(wanted).map(|row| columns.iter().map(|c| row[*c].clone()).collect()).collect();
    cells.sort();
    cells
}

#[test]
fn the_pages_figures_are_the_files() {
    let dir = tempdir().unwrap();
    let paths = ["llama3_8b.csv", "qwen3_30b_a3b.csv"].map(|f| Path::new(H200).join(f));
    let files = [paths[0].as_path(), paths[1].as_path()];
    let page = page(dir.path(), &format!("{} {}", files[0].display(), files[1].display()));
    page.needs_nothing();
    let is_ok = |row: &Named| row["status"] == "ok";
    for (table, skip, columns) in [
        (
            "step_time",
            1,
            vec![
                "arm",
                "step_time_ms_median",
                "step_time_ms_ci95_low",
                "step_time_ms_ci95_high",
                "step_time_ms_p05",
                "step_time_ms_p95",
                "steps_steady",
                "step_time_ms_sync_median",
            ],
        ),
        (
            "host_device",
            1,
            vec![
                "arm",
                "host_submit_ms_median",
                "host_wait_ms_median",
                "device_span_ms_median",
                "device_busy_ms",
                "launch_bound_fraction",
                "launches_per_step",
                "host_submit_ms_sync_median",
            ],
        ),
        (
            "memory",
            1,
            vec![
                "arm",
                "peak_memory_mib",
                "graph_memory_mib",
                "memory_used_mib",
                "gpu_memory_mib",
                "memory_source",
            ],
        ),
        (
            "clocks",
            1,
            vec!["arm", "sm_clock_mhz_median", "temperature_c_max", "power_w_median", "power_limit_w"],
        ),
    ] {
        assert_eq!(page.cells(table, skip, columns.len()), cells(&files, &columns, is_ok), "{table}");
    }
    let graphs = |row: &Named| row["arm"] == "graph";
    let gain = ["verdict", "speedup", "speedup_ci95_low", "speedup_ci95_high", "pairs", "speedup_modelled"];
    assert_eq!(page.cells("gain", 1, gain.len()), cells(&files, &gain, graphs));
    let of_runs = ["run_id"];
    assert_eq!(page.cells("runs", 1, 1), cells(&files, &of_runs, graphs));
    // Every verdict is told at the top.
    let (top, _) = page.html.split_once("</section>").unwrap();
    let undecided = cells(&files, &["verdict"], graphs).iter().filter(|v| v[0] == "undecided").count();
    assert_eq!(top.matches("not decided").count(), undecided);
    for missing in ["stand-ins", "lower bound"] {
        assert!(top.contains(missing), "{missing}");
    }
    // What the rows say of themselves: names joined with `+`.
    for row in cells(&files, &["approximations", "throttle_reasons"], is_ok).concat() {
        for missing in row.split('+') {
            assert!(top.contains(missing), "{missing}");
        }
    }
}

#[test]
fn every_step_is_counted_and_those_left_out_are_said_to_be() {
    let dir = tempdir().unwrap();
    let page = page(dir.path(), &format!("{H200}/qwen3_30b_a3b.csv"));
    let file = fs::File::open(format!("{H200}/qwen3_30b_a3b.steps.csv.gz")).unwrap();
    let mut reader = csv::Reader::from_reader(flate2::read::GzDecoder::new(file));
    let steps: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    let number = |cell: &str| cell.parse::<f64>().unwrap();
    let counted: f64 = page.table("steps").iter().filter(|r| !r[3].is_empty()).map(|r| number(&r[3])).sum();
    assert_eq!(counted as usize, steps.len());
    // Of every run and arm: steady steps, their number, lowest and highest.
    let of_page = |wanted: &str| -> Vec<[f64; 3]> {
        let rows = page.table("steps").into_iter().filter(|r| r[7] == wanted && !r[3].is_empty());
        rows.map(|r| [number(&r[3]), number(&r[4]), number(&r[6])]).collect()
    };
    // By pacing, as each has a statistic of its own, both arms of a run together.
    let mut of_file: Vec<[f64; 3]> = Vec::new();
    for arms in rows(Path::new(&format!("{H200}/qwen3_30b_a3b.csv"))).chunks_exact(2) {
        for pacing in ["run_ahead", "sync", "drained"] {
            for row in arms {
                let own = |s: &&csv::StringRecord| {
                    s[0] == row["run_id"] && s[3] == row["arm"] && &s[5] == "steady" && &s[6] == pacing
                };
                let walls: Vec<f64> = steps.iter().filter(own).map(|s| number(&s[11])).collect();
                if pacing == "run_ahead" {
                    assert_eq!(walls.len(), number(&row["steps_steady"]) as usize);
                }
                if !walls.is_empty() {
                    let least = walls.iter().copied().fold(f64::INFINITY, f64::min);
                    of_file.push([walls.len() as f64, least, walls.iter().copied().fold(0.0, f64::max)]);
                }
            }
        }
    }
    assert_eq!(of_page("yes"), of_file);
    assert_eq!(
        of_page("yes").len() + of_page("no").len(),
        page.table("steps").iter().filter(|r| !r[3].is_empty()).count()
    );
    // The one-off cost of the graphs stands among the steps that do not count.
    let one_off: Vec<f64> =
        page.table("steps").iter().filter(|r| r[1].starts_with("capture")).map(|r| number(&r[5])).collect();
    let graph = rows(Path::new(&format!("{H200}/qwen3_30b_a3b.csv")));
    let costs: Vec<f64> = graph
        .iter()
        .filter(|r| r["arm"] == "graph")
        .map(|r| ["capture_ms", "instantiate_ms", "upload_ms"].map(|c| number(&r[c])).iter().sum())
        .collect();
    assert_eq!((one_off.len(), costs.is_empty()), (costs.len(), false));
    assert!(one_off.iter().zip(&costs).all(|(a, b)| (a / b - 1.0).abs() < 1e-6), "{one_off:?} {costs:?}");
    // Each step is a dot, in both sizes: no panel here is thinned.
    let dots = |class: &str| -> usize {
        let pictures =
            page.html.match_indices("Every step: ").filter(|(at, _)| page.html[at - 4..*at] == *"<h3>");
        pictures
            .map(|(from, _)| {
                let from = from + page.html[from..].find(&format!("<div class={class}>")).unwrap();
                let svg = &page.html[from..from + page.html[from..].find("</svg>").unwrap()];
                // Hollow diamonds are polylines of five points and a width that lines of the grid have not.
                svg.matches("<circle").count() + svg.matches("<polygon").count() + hollow_diamonds(svg)
            })
            .sum()
    };
    assert_eq!((dots("wide"), dots("narrow")), (steps.len(), steps.len()));
}

fn hollow_diamonds(svg: &str) -> usize {
    let points = |line: &str| {
        line.split("points=\"").nth(1).map(|p| p.split('"').next().unwrap().split_whitespace().count())
    };
    svg.lines().filter(|l| l.contains("<polyline") && points(l) == Some(5)).count()
}

#[test]
fn failed_rows_one_arm_and_a_cpu_make_pages_too() {
    let dir = tempdir().unwrap();
    let reason = "capture failed: <b>out & about</b>\nnext line";
    let failed = Results::one()
        .with("status", "failed")
        .with("status_reason", reason)
        .with("step_time_ms_median", "")
        .with("speedup", "")
        .with("speedup_ci95_low", "")
        .with("speedup_ci95_high", "");
    failed.save(dir.path(), "failed.csv");
    let page_of = |files: &str| page(dir.path(), files);
    let html = page_of("failed.csv").html;
    assert!(html.contains("capture failed: &lt;b&gt;out &amp; about&lt;/b&gt; next line"), "{html}");
    assert!(html.contains("1 of 1 runs failed or were skipped"));

    let mut one_arm = Results::one().with("cuda_graph_impl", "none").with("speedup", "");
    one_arm.rows.truncate(1);
    one_arm.save(dir.path(), "one.csv");
    let page = page_of("one.csv");
    assert!(page.html.contains("There is nothing to compare; a step took 100 ms"));
    assert!(page.table("gain").is_empty());
    assert_eq!(page.table("step_time").len(), 1);

    Results::one().with("device", "cpu").with("gpu_name", "").save(dir.path(), "cpu.csv");
    assert!(page_of("cpu.csv").html.contains("times say nothing about a GPU"));
    // All of them, and a failed run between two that are well.
    let mixed = Results::one()
        .and(failed.with("run_id", "second"))
        .and(Results::default().run("third", 90.0, 1.3, 0.01));
    mixed.save(dir.path(), "mixed.csv");
    let page = page_of("failed.csv one.csv cpu.csv mixed.csv");
    page.needs_nothing();
    assert_eq!(page.table("runs").len(), 6);
    assert!(!page.html.contains("NaN") && !page.html.contains("inf "));
}

#[test]
fn one_step_and_a_hundred_thousand() {
    let dir = tempdir().unwrap();
    Results::one().save(dir.path(), "x.csv");
    fs::write(dir.path().join("x.steps.csv"), steps_file("base-1", 1)).unwrap();
    let few = page(dir.path(), "x.csv");
    // One steady step of 5 ms: one line, counted, its least, median and most the file's.
    let line = &few.table("steps")[0];
    assert_eq!(few.table("steps").len(), 1);
    assert_eq!([&line[3], &line[4], &line[5], &line[6], &line[7]], ["1", "5", "5", "5", "yes"]);
    assert!(!few.html.contains("too many to draw"));
    // Each pacing is told behind its phase.
    for (pacing, said) in [
        ("run_ahead", "steady: one step runs ahead"),
        ("sync", "steady: each step waited for"),
        ("drained", "steady, issued to a queue that never fills"),
        ("modelled", "steady: under the host model"),
    ] {
        fs::write(dir.path().join("x.steps.csv"), steps_file("base-1", 1).replace("run_ahead", pacing))
            .unwrap();
        assert_eq!(page(dir.path(), "x.csv").table("steps")[0][1], said);
    }
    fs::write(dir.path().join("x.steps.csv"), steps_file("base-1", 100_000)).unwrap();
    let begun = Instant::now();
    let many = page(dir.path(), "x.csv");
    // A quarter of a second; a machine that is busy takes longer, work that grows with the square takes minutes.
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(many.html.contains("100000 steps are too many to draw each"));
    let counted: f64 = many.table("steps").iter().filter_map(|r| r[3].parse::<f64>().ok()).sum();
    assert_eq!(counted, 100_000.0);
    // Bounded by the width of the picture, not by the steps.
    assert!(many.html.len() < 1_000_000, "{} bytes", many.html.len());
    let more = {
        fs::write(dir.path().join("x.steps.csv"), steps_file("base-1", 30_000)).unwrap();
        page(dir.path(), "x.csv").html.len()
    };
    assert!(many.html.len() < more * 5 / 4, "{} and {more} bytes", many.html.len());
}

#[test]
fn a_sweep_has_a_frontier_and_files_stand_side_by_side() {
    let dir = tempdir().unwrap();
    let scope = |id: &str, scope: &str, speedup: f64, mib: &str| {
        let mut run = Results::default().run(id, 100.0, speedup, 0.002);
        let (peak, name) = (run.at("peak_memory_mib"), run.at("cuda_graph_scope"));
        run.rows[1][peak] = mib.into();
        run.rows.iter_mut().for_each(|r| r[name] = scope.into());
        run
    };
    let sweep = scope("a", "attn", 1.05, "40100")
        .and(scope("b", "attn+mlp", 1.10, "40400"))
        .and(scope("c", "mlp", 1.02, "40300"));
    sweep.save(dir.path(), "sweep.csv");
    sweep.with("run_id", "other").save(dir.path(), "later.csv");
    let one = page(dir.path(), "sweep.csv");
    let frontier = one.table("frontier");
    let of = |name: &str| frontier.iter().find(|r| r[1].ends_with(name)).unwrap();
    assert_eq!(of(" attn")[2..4], ["200", "5"]);
    assert_eq!([&of(" attn")[6], &of("attn+mlp")[6], &of(" mlp")[6]], ["yes", "yes", "no"]);
    Results::default().run("z", 80.0, 1.2, 0.003).save(dir.path(), "later.csv");
    let both = page(dir.path(), "sweep.csv later.csv");
    assert_eq!(both.table("step_time").len(), 8);
    assert!(both.table("gain").iter().any(|r| r[0].ends_with(", later")));
    assert!(both.table("gain").iter().any(|r| r[0].ends_with(", sweep")));
}

/// Labels neither meet nor leave their picture, in pictures of every kind.
#[test]
fn no_label_of_a_picture_meets_another() {
    let dir = tempdir().unwrap();
    // Scopes that lie close together, as many as a sweep has, with the host model's ratio.
    let near = |at: usize| {
        let names =
            ["attn", "mlp", "moe_router", "attn+mlp", "attn+moe_router", "attn+moe_router+moe_preprocess"];
        let speedup = 1.1 + at as f64 * 1e-4;
        let run = Results::default().run(&format!("r{at}"), 100.0, speedup, 0.002);
        let run =
            run.with("cuda_graph_scope", &format!("{}{}", names[at % 6], ["", "+moe", "+mamba"][at / 6]));
        run.with("speedup_modelled", &format!("{}", 1.4 + at as f64 * 1e-3)).with("host_model", "pytorch")
    };
    let sweep = (1..16).fold(near(0), |all, at| all.and(near(at)));
    sweep.save(dir.path(), "near.csv");
    let files = ["llama3_8b.csv", "qwen3_30b_a3b.csv", "samplers.csv", "models_first.csv"];
    let files = files.map(|f| format!("{H200}/{f}")).into_iter().chain(["near.csv".to_owned()]);
    let apart = |a: &Label, b: &Label| {
        // Letters are lower than their font.
        a.right <= b.left || b.right <= a.left || (a.y - b.y).abs() >= a.height.min(b.height) * 0.7
    };
    for file in files {
        let pictures = pictures(&page(dir.path(), &file).html);
        assert!(pictures.iter().filter(|(.., labels)| labels.len() > 3).count() > 8, "{file}");
        for (width, height, labels) in &pictures {
            for (at, a) in labels.iter().enumerate() {
                let inside = a.left >= -a.height && a.right <= width + a.height && a.y > 0.0 && a.y < *height;
                assert!(inside, "{file}: `{}` leaves its picture of {width}: {a:?}", a.text);
                if let Some(b) = labels[at + 1..].iter().find(|b| !apart(a, b)) {
                    panic!("{file}, a picture of {width}: `{}` meets `{}`: {a:?} {b:?}", a.text, b.text);
                }
            }
        }
    }
}

#[test]
fn a_sweep_with_a_host_model_has_two_frontiers_and_scopes_far_from_eager_an_axis_of_their_own() {
    let dir = tempdir().unwrap();
    let modelled = [
        ("speedup_modelled", "1.5"),
        ("speedup_modelled_ci95_low", "1.49"),
        ("speedup_modelled_ci95_high", "1.51"),
    ];
    let results = modelled.into_iter().fold(swept(), |r, (column, cell)| r.with(column, cell));
    results.save(dir.path(), "x.csv");
    let spread = page(dir.path(), "x.csv");
    assert_eq!(spread.cells("frontier_modelled", 3, 3), vec![["50", "49", "51"].map(String::from); 3]);
    assert_eq!(spread.table("frontier").len(), 3);
    assert!(spread.html.contains("0 is eager") && !spread.html.contains("lies left of the picture"));
    results.with("graph_memory_mib", "300").save(dir.path(), "x.csv");
    let close = page(dir.path(), "x.csv");
    assert!(close.html.contains("lies left of the picture") && !close.html.contains("0 is eager"));
    assert!(page(dir.path(), &format!("{H200}/llama3_8b.csv")).table("frontier_modelled").is_empty());
}

#[test]
fn a_page_of_a_cpu_has_no_empty_pictures() {
    let dir = tempdir().unwrap();
    let of_gpu = ["speedup", "sm_clock_mhz_median", "throttle_reasons", "device_busy_ms", "power_limit_w"];
    let of_gpu = of_gpu.into_iter().chain(["gpu_name", "speedup_ci95_low", "speedup_ci95_high"]);
    let results = of_gpu.fold(swept().with("device", "cpu"), |r, column| r.with(column, ""));
    results.save(dir.path(), "cpu.csv");
    let page = page(dir.path(), "cpu.csv");
    for missing in ["<h3>Clocks", "Sweep: gain over memory", "runs are not drawn", "\nnot measured\n"] {
        assert!(!page.html.contains(missing), "{missing}");
    }
    assert!(page.html.contains("Clocks: none was read.") && page.html.contains("Not measured: "));
    assert_eq!(page.table("sweep_scopes").len(), 3);
}

#[test]
fn what_jobs_share_is_said_once() {
    let dir = tempdir().unwrap();
    let page = page(dir.path(), &format!("{H200}/llama3_8b.csv {H200}/qwen3_30b_a3b.csv"));
    assert!(page.html.contains("All runs: ") && page.html.contains("on NVIDIA H200"));
    for table in ["gain", "runs"] {
        let rows = page.table(table);
        assert!(!rows.is_empty() && rows.iter().all(|r| !r[0].contains("NVIDIA")), "{table}");
        assert!(rows.iter().any(|r| r[0].starts_with("llama3_8b ")), "{table}");
    }
}

#[test]
fn a_sweep_of_different_margins_says_by_which_it_is_judged() {
    let dir = tempdir().unwrap();
    let said = "all are judged by the latest one's, 30 %";
    for (results, differ) in
        [(swept(), false), (swept().with_row(4, "margin", "0.3").with_row(5, "margin", "0.3"), true)]
    {
        results.save(dir.path(), "x.csv");
        let page = page(dir.path(), "x.csv");
        assert_eq!(page.html.contains(said), differ);
        assert_eq!(page.html.contains("none: no scope is faster than eager by more than 30 %"), differ);
    }
}

/// A file of three scopes as a sweep leaves them, the narrowest last.
fn swept() -> Results {
    let of = |id: &str, scope: &str, captured: &str, speedup: f64, memory: &str| {
        let rows = Results::default().run(id, 100.0, speedup, 0.002);
        let rows = rows.with("cuda_graph_scope", scope).with("captured_fraction", captured);
        rows.with("graph_memory_mib", memory).with("verdict", "faster").with("margin", "0.01")
    };
    of("r3", "attn+mlp", "0.8", 1.105, "300")
        .and(of("r2", "attn", "0.4", 1.1, "120"))
        .and(of("r1", "mlp", "0.3", 1.02, "80"))
}

#[test]
fn a_sweeps_recommendation_stands_on_the_page_in_the_sweeps_words() {
    use mbperf::report::recommend::{Tried, render};
    let dir = tempdir().unwrap();
    let modelled = |results: Results| {
        let at = [
            ("speedup_modelled", "1.5"),
            ("speedup_modelled_ci95_low", "1.49"),
            ("speedup_modelled_ci95_high", "1.51"),
        ];
        // The widest gains more where the host is slow.
        at.into_iter()
            .fold(results, |r, (column, cell)| r.with_row(0, column, cell).with_row(1, column, cell))
    };
    let failed = swept().with_row(4, "status", "failed").with_row(5, "status", "failed");
    let failed = failed.with_row(5, "status_reason", "out of memory: 3 MiB").with_row(5, "speedup", "");
    for (results, wanted) in [
        (
            swept(),
            "Recommended: attn, the narrowest scope that helps and that no wider one is known to beat by more than 1 %; it takes 120 MiB more than eager",
        ),
        (modelled(swept()), "With the modelled host time: attn,mlp, the narrowest scope"),
        (failed, "Recommended: attn, "),
    ] {
        let path = results.save(dir.path(), "x.csv");
        let page = page(dir.path(), "x.csv");
        page.needs_nothing();
        // The terminal's text, made from the same file's rows, an eager and a graph one each, narrowest first.
        let rows = rows(&path);
        let of = |pair: &[Named]| {
            let [eager, graph]: &[Named; 2] = pair.try_into().unwrap();
            Tried::of_cells(&|c: &str| graph[c].clone(), &|c: &str| eager[c].clone())
        };
        let tried: Vec<Tried> = rows.chunks(2).rev().map(of).collect();
        let said = render(&tried, 0.01);
        assert!(said.contains(wanted), "{said}");
        for line in
            said.lines().filter(|l| l.starts_with("Recommended") || l.starts_with("With the modelled"))
        {
            assert_eq!(
                page.html.matches(&format!("<b>{line}</b>")).count(),
                2,
                "{line}: at the top and with its table"
            );
        }
        let table = page.table("sweep_scopes");
        let words = |line: &str| {
            line.split("  ").map(|c| c.trim().to_owned()).filter(|c| !c.is_empty()).collect::<Vec<_>>()
        };
        let lines: Vec<Vec<String>> = said.lines().skip(1).take(3).map(words).collect();
        assert_eq!(table, lines);
        for failure in said.lines().filter(|l| l.contains("out of memory")) {
            assert!(page.html.contains(failure), "{failure}");
        }
    }
    // One scope is no sweep.
    Results::one().save(dir.path(), "one.csv");
    assert!(!page(dir.path(), "one.csv").html.contains("Recommended"));
}

/// As spreadsheets and packers leave files, and files that do not belong together.
#[test]
fn forms_of_one_table_are_read_and_what_does_not_belong_is_said() {
    let dir = tempdir().unwrap();
    let rows =
        Results::default().run("base-1", 5.0, 1.0, 0.002).with("aa", "a").with("verdict", "equivalent");
    let more = (2..8).fold(rows, |r, n| {
        r.and(
            Results::default()
                .run(&format!("base-{n}"), 5.0, 1.0, 0.002)
                .with("aa", "a")
                .with("verdict", "equivalent"),
        )
    });
    let path = more.with("steps_steady", "7").save(dir.path(), "x.csv");
    fs::write(dir.path().join("x.steps.csv"), steps_file("base-1", 60)).unwrap();
    fs::create_dir(dir.path().join("copy")).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    let blank =
        format!("sep=,\r\n{text}{}\r\n", ",".repeat(text.lines().next().unwrap().matches(',').count()));
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut packed, blank.as_bytes()).unwrap();
    fs::write(dir.path().join("copy/x.csv.gz"), packed.finish().unwrap()).unwrap();
    let mut command = crate::common::binary::command(dir.path(), "report x.csv copy/x.csv.gz - -o -");
    let output = command.stdin(fs::File::open(dir.path().join("x.csv")).unwrap()).output().unwrap();
    let said = crate::common::binary::text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert_eq!(said.matches("14 of its 14 rows are in x.csv too: they count once").count(), 2, "{said}");
    assert!(said.contains("of run base-1 and its row counts 7: steps of this run are left out"), "{said}");
    let page = crate::common::binary::text(&output.stdout);
    assert!(page.contains("? 7 runs of 1 job") && !page.contains("Every step: "), "{said}");
    // Many of an arm against itself: a line, and no gain in the heading.
    assert!(page.contains("7 of 7 runs of an arm against itself: ratios 1 to 1"));
    assert!(page.contains("An arm against itself, every run") && !page.contains("Gain of every run"));
}

/// An interval over one end of the margin leaves one thing open, and what would tell is what ended timing.
#[test]
fn what_is_open_is_named_and_one_graphs_launch_is_no_cost_of_issuing() {
    let dir = tempdir().unwrap();
    let of = |id: &str, (low, high): (&str, &str), by: &str| {
        let rows =
            Results::default().run(id, 100.0, 1.0, 0.002).with("verdict", "undecided").with("margin", "0.01");
        let rows = rows.with("speedup_ci95_low", low).with("speedup_ci95_high", high).with("stopped_by", by);
        rows.with("cuda_graph_impl", "local").with("cuda_graph_scope", "full_iteration")
    };
    let rows = of("r1", ("1.0015", "1.0249"), "max_steps")
        .and(of("r2", ("0.97", "1.0006"), "max_time"))
        .and(of("r3", ("0.97", "1.0249"), "precision"));
    // Eager and graph of each: the second one's single graph waits for room in the queue.
    let issue = ["10", "1.5", "10", "216.7", "10", "1.5"];
    let rows = issue.iter().enumerate().fold(rows, |r, (at, ms)| r.with_row(at, "host_issue_ms_median", ms));
    rows.save(dir.path(), "x.csv");
    let page = page(dir.path(), "x.csv");
    for said in [
        "it may be a gain or none that matters, and no loss. More steps (<code>-ms</code>) would tell",
        "it may be a loss or none that matters, and no gain. More time (<code>--max_time</code>) would tell",
        "it may be a gain, a loss or neither. Timing ended at its precision",
        "Whether the graph is faster by more than the margin: the steps given did not decide it",
        "Whether the graph is slower by more than the margin: the time given did not decide it",
    ] {
        assert!(page.html.contains(said), "{said}");
    }
    // In both sizes of the picture, and whole in the table.
    assert_eq!(page.html.matches("one graph, not drawn").count(), 2);
    assert!(page.table("host_device").iter().any(|row| row.contains(&"216.7".to_owned())));
}

#[test]
fn steps_of_the_final_check_are_in_no_statistic() {
    let dir = tempdir().unwrap();
    Results::one().save(dir.path(), "x.csv");
    let steps = steps_file("base-1", 60) + "base-1,60,a,eager,,final_check,sync,1,0,0,4,5.5,,\r\n";
    fs::write(dir.path().join("x.steps.csv"), steps).unwrap();
    let table = page(dir.path(), "x.csv").table("steps");
    let line = table.iter().find(|l| l[1].starts_with("final check")).unwrap();
    assert_eq!((line[3].as_str(), line[7].as_str()), ("1", "no"));
}

#[test]
fn a_profile_beside_the_rows_is_drawn() {
    let dir = tempdir().unwrap();
    Results::one().save(dir.path(), "x.csv");
    assert!(page(dir.path(), "x.csv").html.contains("these runs were not profiled"));
    let profile = "run_id,arm,part,kernel,launches,device_ms\r\n\
        base-1,eager,attn,k1,4,10.5\r\nbase-1,eager,attn,k2,2,1.5\r\nbase-1,eager,mlp,k1,4,28\r\n\
        base-1,graph,mlp,k1,4,27\r\nother,eager,mlp,k1,4,1000\r\n";
    fs::write(dir.path().join("x.profile.csv"), profile).unwrap();
    let page = page(dir.path(), "x.csv");
    assert!(!page.html.contains("not profiled"));
    let rows: Vec<Vec<String>> = page.table("parts").iter().map(|r| r.to_vec()).collect();
    assert_eq!(rows[0], ["mlp", "eager", "28", "0.7", "4"]);
    assert_eq!(rows[1][..3], ["mlp", "graph", "27"]);
    assert_eq!(rows[2], ["attn", "eager", "12", "0.3", "6"]);
    assert_eq!(rows[3], ["attn", "graph", "", "", ""]);
}

/// Numbers that are numbers, and far from anything measured, in every column.
#[test]
fn no_number_is_too_odd_to_be_drawn() {
    use mbperf::report::columns::{COLUMNS, Kind, possible};
    let dir = tempdir().unwrap();
    let plain = |x: f64| format!("{x}");
    for x in [5e-324, f64::MIN_POSITIVE, 1e-30, 1e30, f64::MAX, f64::MIN, -1.0, 0.0] {
        let mut results = swept();
        for column in COLUMNS.iter().filter(|c| c.kind == Kind::Float && possible(c.name, x).is_ok()) {
            results = results.with(column.name, &plain(x));
        }
        results.save(dir.path(), "x.csv");
        let run_id = &results.rows[0][results.at("run_id")];
        let wall = if possible("wall_ms", x).is_ok() { x } else { 5.0 };
        let steps = steps_file(run_id, 12).replace(",4,5,,", &format!(",4,{},,", plain(wall)));
        fs::write(dir.path().join("x.steps.csv"), steps).unwrap();
        let names: Vec<&str> = mbperf::report::blocks::COLUMNS.iter().map(|(name, _)| *name).collect();
        let mut blocks = names.join(",") + "\r\n";
        for at in 0..4 {
            let cell = |(name, kind): &(&str, Kind)| match (*name, kind) {
                ("run_id", _) => run_id.clone(),
                ("side", _) => ["a", "b"][at % 2].to_owned(),
                (name, Kind::Float) if possible(name, x).is_err() => "1".to_owned(),
                (_, Kind::Float) => plain(x),
                (_, Kind::Int) => at.to_string(),
                _ => String::new(),
            };
            let cells: Vec<String> = mbperf::report::blocks::COLUMNS.iter().map(cell).collect();
            blocks += &(cells.join(",") + "\r\n");
        }
        fs::write(dir.path().join("x.blocks.csv"), blocks).unwrap();
        let page = page(dir.path(), "x.csv");
        page.needs_nothing();
        assert!(!page.html.contains("NaN"), "{x}");
    }
    // What nobody can have measured is refused by name.
    for (column, cell) in
        [("step_time_ms_median", "1e300"), ("launch_bound_fraction", "1e300"), ("device_busy_ms", "-5")]
    {
        swept().with_row(1, column, cell).save(dir.path(), "bad.csv");
        let said = fails(dir.path(), "report bad.csv -o bad.html", 2);
        assert!(said.contains("row 2") && said.contains(&format!("column {column}")), "{said}");
    }
    swept().save(dir.path(), "bad.csv");
    fs::write(dir.path().join("bad.steps.csv"), steps_file("base-1", 3).replace(",4,5,,", ",4,-5,,"))
        .unwrap();
    let said = fails(dir.path(), "report bad.csv -o bad.html", 2);
    assert!(said.contains("bad.steps.csv, row 1, column wall_ms"), "{said}");
    // One column alone, beside others that are as usual.
    for column in
        ["sm_clock_mhz_median", "step_time_ms_median", "speedup", "graph_memory_mib", "device_busy_ms"]
    {
        swept().with_row(1, column, &plain(5e-324)).save(dir.path(), "one.csv");
        page(dir.path(), "one.csv").needs_nothing();
    }
}

#[test]
fn nothing_from_a_file_acts() {
    let dir = tempdir().unwrap();
    let evil = "<script>alert('x')</script><img src=http://e.example/x onerror=alert(1)>\"'&";
    let mut results = Results::one();
    for column in mbperf::report::COLUMNS {
        let kept = ["run_id", "status", "arm", "schema_version", "device"];
        if column.kind == mbperf::report::columns::Kind::Text && !kept.contains(&column.name) {
            results = results.with(column.name, evil);
        }
    }
    results.save(dir.path(), "<b>x.csv");
    let page = page(dir.path(), "<b>x.csv");
    page.needs_nothing();
    assert!(page.html.contains("&lt;script&gt;") && !page.html.contains("<b>x"));
}

#[test]
fn files_that_cannot_be_read_or_written_are_told() {
    let dir = tempdir().unwrap();
    let folder = dir.path();
    let write = |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).unwrap();
    let good = Results::one();
    good.save(folder, "good.csv");
    let bytes = good.bytes();
    write("empty.csv", b"");
    write("foreign.csv", b"a,b\r\n1,2\r\n");
    write("header.csv", &bytes[..bytes.iter().position(|b| *b == b'\n').unwrap() + 1]);
    write("half.csv", &bytes[..bytes.len() - 40]);
    write("binary.csv", &[0xff, 0xfe, 0, 1, 2, b'\n', 0xff]);
    good.clone().with("step_time_ms_median", "fast").save(folder, "text.csv");
    good.clone().with("step_time_ms_median", "NaN").save(folder, "nan.csv");
    good.clone().with("digest_match", "maybe").save(folder, "bool.csv");
    good.clone().with("schema_version", "2").save(folder, "later.csv");
    for (name, steps) in [
        ("steps", "x,y\r\n"),
        ("phase", &steps_file("base-1", 3).replace("steady", "steadily")),
        ("wall", &steps_file("base-1", 3).replace(",5,", ",?,")),
        ("cut", steps_file("base-1", 3).trim_end()),
    ] {
        good.save(folder, &format!("{name}.csv"));
        write(&format!("{name}.steps.csv"), steps.as_bytes());
    }
    fs::create_dir(folder.join("dir.csv")).unwrap();
    let before = names(folder);
    for (files, said) in [
        ("none.csv", "none.csv"),
        ("empty.csv", "is empty"),
        ("foreign.csv", "no column schema_version"),
        ("header.csv", "holds no row"),
        ("half.csv", "half.csv"),
        ("binary.csv", "binary.csv"),
        ("text.csv", "step_time_ms_median"),
        ("nan.csv", "step_time_ms_median"),
        ("bool.csv", "digest_match"),
        ("later.csv", "version 2"),
        ("dir.csv", "dir.csv"),
        ("steps.csv", "steps.steps.csv"),
        ("phase.csv", "column phase"),
        ("wall.csv", "column wall_ms"),
        ("cut.csv", "cut.steps.csv: its last line is cut off"),
        ("good.csv half.csv", "half.csv"),
        ("phase.steps.csv", "give phase.csv"),
    ] {
        let message = fails(folder, &format!("report {files} -o page.html --xlsx book.xlsx"), 2);
        assert!(message.contains(said), "{files}: {message}");
        assert_eq!(names(folder), before, "{files}");
    }
    for (outputs, said) in [
        ("-o good.csv", "good.csv is there and is no page"),
        ("--xlsx good.csv", "is no workbook"),
        ("-o dir.csv", "directory"),
        ("-o no/page.html", "the folder no does not exist"),
        ("-o x --xlsx x", "two files"),
        ("", "--output"),
    ] {
        let message = fails(folder, &format!("report good.csv {outputs}"), 2);
        assert!(message.contains(said), "{outputs}: {message}");
        assert_eq!(
            (names(folder), fs::read(folder.join("good.csv")).unwrap()),
            (before.clone(), bytes.clone())
        );
    }
    if Path::new("/dev/full").exists() {
        for outputs in ["-o /dev/full", "--xlsx /dev/full"] {
            assert!(fails(folder, &format!("report good.csv {outputs}"), 1).contains("No space left"));
        }
    }
    // A pipe is read once.
    let mut child =
        binary::command(folder, "report /dev/stdin -o piped.html").stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&bytes).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    // A table of something else beside results is left out, as of a folder's *.csv, and that is said.
    let output = run(folder, "report good.csv foreign.csv -o other.html");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("foreign.csv holds no results of mbperf: it is left out"));
    // Files beside it come with the others of a folder's *.csv; a page is replaced.
    write("good.steps.csv", steps_file("base-1", 3).as_bytes());
    for _ in 0..2 {
        let output = run(folder, "report good.csv good.steps.csv -o page.html");
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
    let page = Page { html: fs::read_to_string(folder.join("page.html")).unwrap() };
    assert_eq!(page.table("runs").len(), 1);
    let output = run(folder, "report good.csv -o -");
    assert!(text(&output.stdout).starts_with("<!DOCTYPE html>") && output.stderr.is_empty());
}
