//! Rows, files and the summary, from measurements on the fake device.

use super::*;
use crate::device::fake::{FakeExecutor, Script};
use crate::device::{Arm, DeviceError};
use crate::measure::{self, Hooks, Options, Outcome, Silent, Status, StepSink};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

fn facts() -> RunFacts {
    RunFacts {
        run_id: run_id::new(),
        started_at: run_id::utc_now(),
        device: "cuda".into(),
        gpu_name: Some("NVIDIA \"H\", 200".into()),
        model_recipe: "llama3_8b".into(),
        cuda_graph_impl: "transformer_engine".into(),
        cuda_graph_scope: vec!["attn".into(), "mlp".into()],
        comm: "stand_in".into(),
        host_model: "bare".into(),
        num_microbatches: 2,
        num_microbatches_recipe: 16,
        tokens_per_step: Some(8192),
        approximations: vec!["a".into(), "b".into()],
        command: "mbperf -mr llama3_8b --x='a\nb'".into(),
        ..RunFacts::default()
    }
}

fn measured(script: Script, sink: &mut dyn StepSink) -> Outcome {
    let options = Options { max_time_s: 4.0, ..Options::default() };
    let interrupt = AtomicBool::new(false);
    measure::run(&mut script.build(), &options, Hooks { interrupt: &interrupt, progress: &mut Silent, sink })
}

fn read(path: &Path) -> Vec<BTreeMap<String, String>> {
    let mut reader = csv::ReaderBuilder::new().flexible(false).from_path(path).unwrap();
    let header = reader.headers().unwrap().clone();
    let record =
        |r: csv::StringRecord| header.iter().zip(r.iter()).map(|(k, v)| (k.into(), v.into())).collect();
    reader.records().map(|r| record(r.unwrap())).collect()
}

fn target(folder: &Path) -> Target {
    Target::File(folder.join("out.csv"))
}

#[test]
fn the_columns_page_is_current() {
    const BEGIN: &str = "<!-- columns, written by `MBPERF_BLESS=1 cargo test the_columns_page` -->\n\n";
    const END: &str = "\n<!-- end of columns -->";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/README.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let from = page.find(BEGIN).unwrap() + BEGIN.len();
    let to = page.find(END).unwrap();
    if std::env::var_os("MBPERF_BLESS").is_some() {
        let page = format!("{}{}{}", &page[..from], columns::markdown(), &page[to..]);
        std::fs::write(&path, page).unwrap();
        return;
    }
    assert_eq!(&page[from..to], columns::markdown(), "run MBPERF_BLESS=1 cargo test the_columns_page");
}

#[test]
fn the_disturbed_share_is_told_as_it_is_counted() {
    use crate::measure::outcome::{FAR_LONGER, MAX_DISTURBED};
    let column = columns::COLUMNS.iter().find(|c| c.name == "disturbed_fraction").unwrap();
    let far = format!("over {:.0} % longer", (FAR_LONGER - 1.0) * 100.0);
    assert!(column.meaning.contains(&far) && column.meaning.contains(&format!("above {MAX_DISTURBED}")));
    assert!(include_str!("../../docs/measuring.md").contains(&far.replace("over ", "")));
}

#[test]
fn promised_columns_come_first_and_in_order() {
    let promised = "schema_version, run_id, status, status_reason, device, gpu_name, driver_version, cuda_version, \
        gpu_target, model_family, model_recipe, task, recipe_dtype, compute_dtype, num_gpus, world_size, comm, tp, \
        pp, cp, ep, micro_batch_size, num_microbatches, num_microbatches_recipe, seq_length, num_layers, arm, \
        cuda_graph_impl, cuda_graph_scope, te_rng_tracker, approximations, steps_steady, step_time_ms_median, \
        step_time_ms_ci95_low, step_time_ms_ci95_high, host_submit_ms_median, host_wait_ms_median, \
        device_span_ms_median, device_busy_ms, launch_bound_fraction, launches_per_step, graphs, graph_nodes, \
        graph_launches_per_step, capture_ms, instantiate_ms, upload_ms, first_replay_ms, peak_memory_mib, \
        graph_memory_mib, memory_source, tokens_per_s, model_tflops_per_gpu, speedup, speedup_ci95_low, \
        speedup_ci95_high, verdict, speedup_modelled, host_model, break_even_steps, digest_match, loss_last, \
        attention_backend, sm_clock_mhz_median, throttle_reasons, steady_reached, git_commit, command";
    let promised: Vec<&str> = promised.split(", ").collect();
    assert_eq!(columns::header()[..promised.len()], promised[..]);
    let distinct: std::collections::BTreeSet<&str> = columns::header().into_iter().collect();
    assert_eq!(distinct.len(), COLUMNS.len());
}

#[test]
fn a_pair_is_written_read_back_and_appended_to() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.csv");
    let mut ids = Vec::new();
    for _ in 0..2 {
        let facts = facts();
        let mut writer = Writer::open(&target(folder.path())).unwrap();
        writer.begin_run(&facts.run_id, &serde_json::json!({"config": {"seed": 1}})).unwrap();
        let outcome = measured(FakeExecutor::script(), &mut writer);
        writer.rows(&Row::of_outcome(&facts, &outcome, "")).unwrap();
        ids.push((facts.run_id.clone(), outcome.steps.len()));
    }
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.ends_with("\r\n") && text.matches("schema_version").count() == 1);
    let rows = read(&path);
    assert_eq!(rows.len(), 4);
    let (eager, graph) = (&rows[0], &rows[1]);
    assert_eq!((eager["arm"].as_str(), graph["arm"].as_str()), ("eager", "graph"));
    assert_eq!(eager["gpu_name"], "NVIDIA \"H\", 200");
    assert_eq!(eager["command"], "mbperf -mr llama3_8b --x='a\nb'");
    assert_eq!((eager["cuda_graph_scope"].as_str(), eager["status"].as_str()), ("attn+mlp", "ok"));
    assert_eq!((eager["step_time_ms_median"].as_str(), graph["step_time_ms_median"].as_str()), ("10", "8"));
    assert_eq!((graph["speedup"].as_str(), graph["verdict"].as_str()), ("1.25", "faster"));
    assert_eq!((graph["tokens_per_s"].as_str(), graph["digest_match"].as_str()), ("1024000", "true"));
    // Not measured is empty, never 0; graph costs stand in the graph's row.
    for empty in
        ["device_busy_ms", "launch_bound_fraction", "model_tflops_per_gpu", "capture_ms", "driver_version"]
    {
        assert_eq!(eager[empty], "", "{empty}");
    }
    assert_eq!(graph["capture_ms"], "12");
    let steps = read(&folder.path().join("out.steps.csv"));
    assert_eq!(steps.len(), ids.iter().map(|(_, n)| n).sum::<usize>());
    assert!(steps.iter().filter(|s| s["run_id"] == ids[1].0).count() == ids[1].1);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
    let runs = std::fs::read_to_string(folder.path().join("out.runs.jsonl")).unwrap();
    let first: serde_json::Value = serde_json::from_str(runs.lines().next().unwrap()).unwrap();
    assert_eq!((first["run_id"].as_str(), &first["config"]["seed"]), (Some(ids[0].0.as_str()), &1.into()));
}

#[test]
fn the_summary_can_be_recomputed_from_the_steps() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::open(&target(folder.path())).unwrap();
    let outcome = measured(FakeExecutor::script(), &mut writer);
    drop(writer);
    let steps = read(&folder.path().join("out.steps.csv"));
    let walls: Vec<f64> = steps
        .iter()
        .filter(|s| s["arm"] == "graph" && s["phase"] == "steady" && s["pacing"] == "run_ahead")
        .map(|s| s["wall_ms"].parse().unwrap())
        .collect();
    assert_eq!(walls.len(), outcome.arms[1].steps_steady);
    assert!((measure::stats::median(&walls).unwrap() - outcome.arms[1].step_time_ms.unwrap()).abs() < 1e-6);
}

#[test]
fn foreign_files_are_refused_and_untouched() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.csv");
    let other_version = columns::header().join(",").replacen("run_id", "run", 1);
    let half = format!("{}\r\n1,20", columns::header().join(","));
    for content in ["a,b\n1,2\n", "not a table", "\0\u{ff}", &other_version, &half] {
        std::fs::write(&path, content).unwrap();
        let error = Writer::open(&target(folder.path())).err().unwrap();
        assert_eq!(error.exit_code(), 2);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no side files");
    }
    for bad in [folder.path().to_path_buf(), folder.path().join("no/such/folder.csv")] {
        let error = Writer::open(&Target::File(bad)).err().unwrap();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("-o"), "{error}");
    }
    // A foreign steps file: the rows' file is not left behind.
    let steps = folder.path().join("new.steps.csv");
    std::fs::write(&steps, "mine").unwrap();
    assert!(Writer::open(&Target::File(folder.path().join("new.csv"))).is_err());
    assert!(!folder.path().join("new.csv").exists());
    assert_eq!(std::fs::read_to_string(&steps).unwrap(), "mine");
}

#[test]
fn a_run_that_writes_nothing_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    drop(Writer::open(&target(folder.path())).unwrap());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn line_ends_of_a_converted_file_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.csv");
    std::fs::write(&path, columns::header().join(",") + "\n").unwrap();
    let facts = facts();
    let rows = Row::without_outcome(&facts, &Options::default(), "failed", "out, of \"memory\"\nhere");
    Writer::open(&target(folder.path())).unwrap().rows(&rows).unwrap();
    assert!(!std::fs::read_to_string(&path).unwrap().contains('\r'));
    let rows = read(&path);
    assert_eq!((rows.len(), rows[0]["status_reason"].as_str()), (2, "out, of \"memory\"\nhere"));
    assert!(rows.iter().all(|r| r["step_time_ms_median"].is_empty() && r["verdict"].is_empty()));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error() {
    let facts = facts();
    let mut writer = Writer::open(&Target::File("/dev/full".into())).unwrap();
    let rows = Row::without_outcome(&facts, &Options::default(), "skipped", "x");
    let error = writer.rows(&rows).err().unwrap();
    assert_eq!(error.exit_code(), 1);
    assert!(error.to_string().contains("/dev/full"), "{error}");
    assert!(!Path::new("/dev/full.steps.csv").exists());
}

#[test]
fn writers_side_by_side_lose_and_mix_nothing() {
    let folder = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let facts = facts();
                    let rows = Row::without_outcome(&facts, &Options::default(), "skipped", "x");
                    // One that leaves nothing behind must not take away the file that others fill.
                    drop(Writer::open(&target(folder.path())).unwrap());
                    Writer::open(&target(folder.path())).unwrap().rows(&rows).unwrap();
                }
            });
        }
    });
    let rows = read(&folder.path().join("out.csv"));
    assert_eq!(rows.len(), 400);
    assert!(rows.chunks_exact(2).all(|p| p[0]["run_id"] == p[1]["run_id"] && p[0]["arm"] != p[1]["arm"]));
}

#[test]
fn failed_and_interrupted_runs_show_no_figures() {
    let facts = facts();
    let digest = |arm| vec![("w".to_string(), u64::from(arm == Arm::Graph))];
    let outcome = measured(FakeExecutor::script().digest(digest), &mut Silent);
    let rows = Row::of_outcome(&facts, &outcome, "arms differ");
    let graph = columns::json(&rows[1]);
    assert_eq!((&graph["status"], &graph["digest_match"]), (&"failed".into(), &false.into()));
    for name in ["speedup", "verdict", "step_time_ms_median", "graphs", "peak_memory_mib", "steps_steady"] {
        assert!(graph[name].is_null(), "{name}");
    }
    assert!(summary::render(&rows).contains("failed: arms differ"));
    let interrupted =
        Outcome { status: Status::Interrupted, ..measured(FakeExecutor::script(), &mut Silent) };
    assert!(Row::of_outcome(&facts, &interrupted, "").is_empty());
    let oom = Status::Failed(DeviceError::Invalid("x".into()).into());
    let failed = Outcome { status: oom, ..measured(FakeExecutor::script(), &mut Silent) };
    assert_eq!(
        columns::json(&Row::of_outcome(&facts, &failed, "x")[0])["step_time_ms_median"],
        serde_json::Value::Null
    );
}

#[test]
fn a_cpu_gets_no_speedup() {
    let facts = RunFacts { device: "cpu".into(), ..facts() };
    let outcome = measured(FakeExecutor::script(), &mut Silent);
    let rows = Row::of_outcome(&facts, &outcome, "");
    for name in ["speedup", "speedup_ci95_low", "verdict", "break_even_steps", "speedup_sync"] {
        assert!(columns::json(&rows[1])[name].is_null(), "{name}");
    }
    assert_eq!(columns::json(&rows[1])["digest_match"], true);
    assert!(summary::render(&rows).contains("No speedup is given"));
}

#[test]
fn every_cell_has_its_columns_kind() {
    let facts = facts();
    let outcome = measured(FakeExecutor::script(), &mut Silent);
    for row in Row::of_outcome(&facts, &outcome, "") {
        for column in COLUMNS {
            let fits = matches!(
                ((column.value)(&row), column.kind),
                (Value::Empty, _)
                    | (Value::Text(_), columns::Kind::Text)
                    | (Value::Int(_), columns::Kind::Int)
                    | (Value::Float(_), columns::Kind::Float)
                    | (Value::Bool(_), columns::Kind::Bool)
            );
            assert!(fits, "{}", column.name);
        }
    }
}

#[test]
fn the_summary_is_honest_and_narrow() {
    let facts = facts();
    let outcome = measured(FakeExecutor::script(), &mut Silent);
    let text = summary::render(&Row::of_outcome(&facts, &outcome, ""));
    for expected in [
        "The graph is FASTER: speedup 1.25",
        "95 % interval",
        "lower bound",
        "upper bound",
        "2 of the job's 16",
    ] {
        assert!(text.contains(expected), "{expected} in\n{text}");
    }
    assert!(text.lines().all(|l| l.chars().count() <= 100), "{text}");
}

proptest! {
    #[test]
    fn numbers_are_plain_and_exact_to_nine_digits(mantissa in 1.0f64..10.0, exponent in -30i32..30, sign in prop::bool::ANY) {
        let x = mantissa * 10f64.powi(exponent) * if sign { -1.0 } else { 1.0 };
        let text = columns::number(x);
        prop_assert!(text.chars().all(|c| c.is_ascii_digit() || c == '.' || c == '-'), "{}", text);
        let back: f64 = text.parse().unwrap();
        prop_assert!((back / x - 1.0).abs() <= 5.1e-9);
    }

    #[test]
    fn any_text_comes_back_as_it_was(reason in "\\PC*[\",;\r\n]*\\PC*") {
        let folder = tempfile::tempdir().unwrap();
        let facts = RunFacts { command: reason.clone(), ..facts() };
        let rows = Row::without_outcome(&facts, &Options::default(), "failed", &reason);
        Writer::open(&target(folder.path())).unwrap().rows(&rows).unwrap();
        let back = read(&folder.path().join("out.csv"));
        prop_assert_eq!(&back[0]["status_reason"], &reason);
        prop_assert_eq!(&back[1]["command"], &reason);
    }
}

#[test]
fn values_that_are_not_finite_are_empty() {
    for x in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(columns::number(x), "");
    }
    assert_eq!((columns::number(0.0).as_str(), columns::number(1e-7).as_str()), ("0", "0.0000001"));
    assert_eq!(columns::number(120000000000.0), "120000000000");
}

#[test]
fn numbers_that_nobody_can_have_measured() {
    use super::columns::{COLUMNS, Kind, possible};
    let floats = || COLUMNS.iter().filter(|c| c.kind == Kind::Float).map(|c| c.name);
    for name in floats() {
        for x in [0.0, 1e-30, 0.5, 1.0] {
            assert_eq!(possible(name, x), Ok(()), "{name}");
        }
        let said = possible(name, 1e300).unwrap_err();
        assert!(said.len() < 80, "{said}");
        assert!(possible(name, -1e300).is_err(), "{name}");
    }
    assert_eq!(possible("wall_ms", -5.0).unwrap_err(), "-5e0 is not between 0 and 604800000 ms (a week)");
    for (name, x, fine) in [
        ("step_time_ms_median", -1.0, false),
        ("submit_ms", -1e-12, true),
        ("disturbed_fraction", -0.1, false),
        // Measured so: busy time is of a pass of its own.
        ("launch_bound_fraction", -0.07, true),
        ("launch_bound_fraction", 1.5, false),
        ("peak_memory_mib", 1e6, true),
        ("graph_memory_mib", -2.0, true),
        ("loss_last", 3e38, true),
    ] {
        assert_eq!(possible(name, x).is_ok(), fine, "{name} {x}");
    }
}
