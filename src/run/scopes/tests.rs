//! What a sweep recommends, from measurements on the fake device: its times are scripted, everything after them is the
//! sweep's own (measured, made rows, written, and said from them). One table row a situation.

use super::*;
use crate::device::fake::{FakeExecutor, Injected, Noise, Script, Times};
use crate::device::host::{ArmCosts, HostCosts};
use crate::device::inject::{Inject, Kind};
use crate::device::{Arm, DeviceError, Executor, Phase};
use crate::measure::options::DEFAULT_MARGIN;
use crate::measure::outcome::Failure;
use crate::measure::{self, Hooks, Options, Silent, Status};
use crate::report::page::{self, data::Input};
use crate::report::{Row, RunFacts, Target, Writer};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// What the device does in one scope; times in ms a step, eager and graph.
#[derive(Debug, Clone, Copy)]
enum Does {
    Steps(f64, f64),
    /// The graph's steps scatter by this share.
    Noisy(f64, f64, f64),
    /// Issuing takes these times under a host model, eager and graph.
    Hosted((f64, f64), (f64, f64)),
    Fails(Phase, Kind),
    /// The graphs do not fit, nor does the graph arm alone.
    TooLarge,
    /// The arms do not fit together, and each alone does.
    InTurn,
    /// The same, and the graph arm fails alone.
    InTurnFails,
    /// The graph arm leaves other bits.
    OtherBits,
    /// The same where the order of additions was left open.
    OtherOrder,
}
use Does::{Fails, Hosted, InTurn, InTurnFails, Noisy, OtherBits, OtherOrder, Steps, TooLarge};

impl Does {
    fn script(self) -> Script {
        let of = |(eager, graph)| FakeExecutor::script().eager(Times::new(eager)).graph(Times::new(graph));
        let other = |arm| vec![("weight".to_owned(), u64::from(arm == Arm::Graph))];
        match self {
            Steps(eager, graph) => of((eager, graph)),
            Hosted(times, _) => of(times),
            Noisy(eager, graph, share) => {
                let noise = Noise::seeded(graph.to_bits()).white(share);
                of((eager, graph)).graph(Times::new(graph).noise(noise))
            }
            // Far faster: that alone would recommend them.
            Fails(..) | TooLarge | InTurn | InTurnFails => of((10.0, 5.0)),
            OtherBits => of((10.0, 5.0)).digest(other),
            OtherOrder => of((10.0, 5.0)).digest(other).unordered(),
        }
    }

    /// Both arms, or one alone, in a memory of 1000 MiB of which graphs take `mib`.
    fn device(self, alone: Option<Arm>, mib: f64) -> Box<dyn Executor> {
        let free = match (self, alone) {
            (TooLarge, _) | (InTurn | InTurnFails, None) => 0.0,
            _ => mib,
        };
        let fake = self.script().memory(1000.0, 1000.0 - free, mib).build();
        match (self, alone) {
            (Fails(phase, kind), None) => Box::new(Injected::new(fake, Inject::new(phase, kind, 1))),
            (InTurnFails, Some(Arm::Graph)) => {
                Box::new(Injected::new(fake, Inject::new(Phase::Steady, Kind::DriverError, 1)))
            }
            _ => Box::new(fake),
        }
    }

    fn host_costs(self) -> Option<HostCosts> {
        let arm = |step_ms| ArmCosts { step_ms, ..ArmCosts::default() };
        match self {
            Hosted(_, (eager, graph)) => Some(HostCosts { eager: arm(eager), graph: Some(arm(graph)) }),
            _ => None,
        }
    }
}

struct Case {
    situation: &'static str,
    /// Narrowest first; the graphs of the first take 100 MiB, of each further one 100 more.
    scopes: &'static [(&'static str, Does)],
    /// What follows `Recommended: `.
    bare: &'static str,
    /// What follows `With the modelled host time: `; empty: there is no such line.
    modelled: &'static str,
    /// What else is said.
    says: &'static [&'static str],
    code: u8,
}

const NARROW: Case = Case {
    situation: "the narrowest gains most",
    scopes: &[("mlp", Steps(10.0, 8.0)), ("attn", Steps(10.0, 9.0))],
    bare: "mlp, the narrowest scope that helps and that no wider one is known to beat by more than 1 %; it takes 101 MiB more than eager",
    modelled: "",
    says: &[
        "mlp    20 %      1.250 (1.250 to 1.250)  faster   101",
        "attn   40 %      1.111 (1.111 to 1.111)  faster   201",
    ],
    code: 0,
};

const CASES: &[Case] = &[
    NARROW,
    Case {
        situation: "each wider one gains more, beyond the margin",
        scopes: &[("mlp", Steps(10.0, 9.5)), ("attn", Steps(10.0, 9.0)), ("attn,mlp", Steps(10.0, 8.0))],
        bare: "attn,mlp, the narrowest scope that helps and that no wider one is known to beat by more than 1 %; it takes 301 MiB more than eager",
        says: &[],
        ..NARROW
    },
    Case {
        situation: "two widths tie",
        scopes: &[("attn", Steps(10.0, 9.0)), ("attn,mlp", Steps(10.0, 9.0))],
        bare: "attn, ",
        says: &[],
        ..NARROW
    },
    Case {
        situation: "the wider one gains half a per cent more",
        scopes: &[("attn", Steps(10.0, 9.0)), ("attn,mlp", Steps(10.0, 8.95))],
        bare: "attn, ",
        says: &[],
        ..NARROW
    },
    Case {
        situation: "the wider one seems to gain more, within both intervals",
        scopes: &[("attn", Noisy(10.0, 9.5, 0.07)), ("attn,mlp", Noisy(10.0, 9.3, 0.07))],
        bare: "attn, ",
        says: &["; wider ones that may gain over 1 % more: attn,mlp (raise --max_time)"],
        ..NARROW
    },
    Case {
        situation: "the narrow one slows down, the wider one helps",
        scopes: &[("mlp", Steps(10.0, 11.0)), ("attn,mlp", Steps(10.0, 9.0))],
        bare: "attn,mlp, ",
        says: &["slower"],
        ..NARROW
    },
    Case {
        situation: "none helps: all within the margin, with noise",
        scopes: &[("mlp", Noisy(10.0, 10.0, 0.003)), ("attn,mlp", Noisy(10.0, 9.97, 0.003))],
        bare: "none: no scope is faster than eager by more than 1 %",
        says: &["equivalent"],
        ..NARROW
    },
    Case {
        situation: "none helps: all are slower",
        scopes: &[("mlp", Steps(10.0, 10.5)), ("attn,mlp", Steps(10.0, 12.0))],
        bare: "none: no scope is faster than eager by more than 1 %",
        says: &["slower"],
        ..NARROW
    },
    Case {
        situation: "nobody knows: the intervals reach over the margin",
        scopes: &[("mlp", Noisy(10.0, 9.8, 0.06)), ("attn,mlp", Noisy(10.0, 9.85, 0.06))],
        bare: "nothing: 2 of 2 scopes may help and are undecided (raise --max_time)",
        says: &["undecided"],
        ..NARROW
    },
    Case {
        situation: "the only legal scope helps",
        scopes: &[("mamba", Steps(10.0, 9.0))],
        bare: "mamba, ",
        says: &[],
        ..NARROW
    },
    Case {
        situation: "the narrow one cannot be captured, the wider one helps",
        scopes: &[("mlp", Fails(Phase::Capture, Kind::DriverError)), ("attn", Steps(10.0, 9.0))],
        bare: "attn, ",
        says: &["mlp: ", "an injected driver error", "failed"],
        code: 4,
        ..NARROW
    },
    Case {
        situation: "a fault in the middle takes its row alone",
        scopes: &[
            ("mlp", Steps(10.0, 9.5)),
            ("attn", Fails(Phase::Instantiate, Kind::DriverError)),
            ("attn,mlp", Steps(10.0, 9.0)),
        ],
        bare: "attn,mlp, ",
        says: &["attn: ", "mlp       20 %      1.053", "attn      40 %      -", "attn,mlp  60 %      1.111"],
        code: 4,
        ..NARROW
    },
    Case {
        situation: "the widest does not fit",
        scopes: &[("mlp", Steps(10.0, 9.5)), ("attn", Steps(10.0, 9.0)), ("full_iteration", TooLarge)],
        bare: "attn, ",
        says: &[
            "full_iteration: out of memory in phase instantiate: the graphs needs 300 MiB, 0 MiB are free",
        ],
        code: 5,
        ..NARROW
    },
    Case {
        situation: "the eager arm fails beside one scope",
        scopes: &[("mlp", Fails(Phase::Equality, Kind::DriverError)), ("attn", Steps(10.0, 9.0))],
        bare: "attn, ",
        says: &["mlp: ", "failed"],
        code: 1,
        ..NARROW
    },
    Case {
        situation: "the eager arm fails beside all",
        scopes: &[
            ("mlp", Fails(Phase::Equality, Kind::NotFinite)),
            ("attn", Fails(Phase::Equality, Kind::DriverError)),
        ],
        bare: "nothing: no scope was measured",
        says: &["loss is NaN"],
        code: 1,
        ..NARROW
    },
    Case {
        situation: "a fault while timing leaves no figure that could be recommended",
        scopes: &[("mlp", Steps(10.0, 9.0)), ("attn", Fails(Phase::Steady, Kind::DriverError))],
        bare: "mlp, ",
        says: &["attn   40 %      -"],
        code: 1,
        ..NARROW
    },
    Case {
        situation: "unequal arms are never recommended, however fast",
        scopes: &[("mlp", Steps(10.0, 9.5)), ("attn", OtherBits)],
        bare: "mlp, ",
        says: &["attn   40 %      -                       failed", "buffers differ"],
        code: 6,
        ..NARROW
    },
    Case {
        situation: "nor are they where the order of additions was left open",
        scopes: &[("mlp", Steps(10.0, 9.5)), ("attn", OtherOrder)],
        bare: "mlp, ",
        says: &["attn   40 %      -                       bits differ"],
        ..NARROW
    },
    Case {
        situation: "all of them left other bits",
        scopes: &[("mlp", OtherOrder), ("attn", OtherOrder)],
        bare: "nothing: the arms of every scope left different bits",
        says: &["--attention_deterministic"],
        ..NARROW
    },
    Case {
        situation: "arms that do not fit together are flagged, and decide nothing",
        scopes: &[("mlp", Steps(10.0, 9.5)), ("attn", InTurn), ("attn,mlp", Steps(10.0, 9.0))],
        bare: "attn,mlp, ",
        says: &["attn      40 %      -                       undecided, arms in turn  201"],
        ..NARROW
    },
    Case {
        situation: "arms in turn of which one fails leave two failed rows",
        scopes: &[("mlp", InTurnFails), ("attn", Steps(10.0, 9.0))],
        bare: "attn, ",
        says: &["mlp    20 %      -                       failed ", "mlp: "],
        code: 1,
        ..NARROW
    },
    Case {
        situation: "no arms fit together",
        scopes: &[("mlp", InTurn), ("attn", InTurn)],
        bare: "nothing: no scope was measured beside the eager arm",
        says: &["arms in turn"],
        ..NARROW
    },
    Case {
        situation: "the modelled ratio helps, the bare one does not",
        scopes: &[
            ("attn", Hosted((10.0, 10.0), (24.0, 16.0))),
            ("attn,mlp", Hosted((10.0, 10.0), (24.0, 2.0))),
        ],
        bare: "none: no scope is faster than eager by more than 1 %",
        modelled: "attn,mlp, the narrowest scope that helps and that no wider one is known to beat by more than 1 %; it takes 201 MiB more than eager",
        says: &["1.500 (1.500 to 1.500)", "2.400 (2.400 to 2.400)"],
        ..NARROW
    },
    Case {
        situation: "both ratios help, in other scopes",
        scopes: &[
            ("attn", Hosted((10.0, 8.0), (24.0, 16.0))),
            ("attn,mlp", Hosted((10.0, 8.0), (24.0, 2.0))),
        ],
        bare: "attn, ",
        modelled: "attn,mlp, ",
        says: &["3.000 (3.000 to 3.000)"],
        ..NARROW
    },
];

/// Measures one scope as a sweep's run does, and writes its rows.
fn measured(
    at: usize,
    (scope, does): (&str, Does),
    file: &Path,
    book: &Arc<Mutex<Book>>,
) -> anyhow::Result<u8> {
    let mut writer = Writer::open(&Target::File(file.to_owned()))?;
    writer.keep(book.clone());
    let mut facts = RunFacts {
        run_id: format!("run-{at}"),
        device: "cuda".into(),
        model_recipe: "llama3_8b".into(),
        cuda_graph_impl: "transformer_engine".into(),
        cuda_graph_scope: scope.split(',').map(String::from).collect(),
        captured_fraction: Some(0.2 * (at + 1) as f64),
        host_model: if does.host_costs().is_some() { "pytorch" } else { "bare" }.into(),
        ..RunFacts::default()
    };
    let host_costs = does.host_costs();
    // Modelled blocks come after the bare ones, and their steps are longer.
    let seconds = if host_costs.is_some() { 20.0 } else { 4.0 };
    let (max_time_s, longest_time_s) = Options::times(Some(seconds), true);
    let options = Options { max_time_s, longest_time_s, busy: false, host_costs, ..Options::default() };
    let mib = 100.0 * (at + 1) as f64;
    let interrupt = AtomicBool::new(false);
    writer.begin_run(&facts.run_id, &serde_json::json!({}))?;
    let hooks = Hooks { interrupt: &interrupt, progress: &mut Silent, sink: &mut writer };
    let mut outcome = measure::run(&mut *does.device(None, mib), &options, hooks);
    if matches!(outcome.status, Status::Failed(Failure::Device(DeviceError::OutOfMemory { .. }))) {
        facts.run_id += "-alone";
        writer.begin_run(&facts.run_id, &serde_json::json!({}))?;
        let hooks = Hooks { interrupt: &interrupt, progress: &mut Silent, sink: &mut writer };
        let alone = measure::in_turn(&mut |arm| Ok(does.device(Some(arm), mib)), &options, hooks);
        outcome = alone.unwrap_or(outcome);
    }
    let reason = outcome.status.reason();
    writer.rows(&Row::of_run(&facts, &options, &outcome, &reason))?;
    Ok(outcome.status.exit_code())
}

/// What is said otherwise than the case has it.
fn wrong(case: &Case) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.csv");
    let book: Arc<Mutex<Book>> = Arc::default();
    let jobs = case.scopes.iter().copied().enumerate();
    let (code, tried) = sweep::tried(jobs, &book, |(at, scope)| measured(at, scope, &file, &book));
    let said = told(&tried, case.scopes.len(), DEFAULT_MARGIN);
    let page = page::render(&Input::read(&[file], false).unwrap());
    let mut wrong = Vec::new();
    for (start, wanted) in [("Recommended: ", case.bare), ("With the modelled host time: ", case.modelled)] {
        let lines: Vec<&str> = said.lines().filter(|l| l.starts_with(start)).collect();
        if lines.len() != usize::from(!wanted.is_empty())
            || !lines.iter().all(|l| l.starts_with(&format!("{start}{wanted}")))
        {
            wrong.push(format!("{start}{wanted}"));
        }
        // The page of the file says the same; one scope is no sweep there.
        let lacks = |l: &&&str| case.scopes.len() > 1 && !page.contains(&format!("<b>{l}</b>"));
        wrong.extend(lines.iter().filter(lacks).map(|l| format!("on the page: {l}")));
    }
    wrong.extend(case.says.iter().filter(|words| !said.contains(**words)).map(|words| format!("{words:?}")));
    // Both rows of every scope, whatever became of the others.
    let rows = book.lock().unwrap().rows.len();
    if rows != 2 * case.scopes.len() {
        wrong.push(format!("{rows} rows"));
    }
    if code != case.code {
        wrong.push(format!("exit code {} in place of {code}", case.code));
    }
    if !wrong.is_empty() || said.contains("left no row") {
        wrong.push(said);
    }
    wrong
}

#[test]
fn a_recommendation_rests_on_what_was_measured() {
    let failed =
        CASES.iter().map(|case| (case.situation, wrong(case))).filter(|(_, wrong)| !wrong.is_empty());
    let told: Vec<String> =
        failed.map(|(of, wrong)| format!("{of}, wanted:\n{}", wrong.join("\n"))).collect();
    assert!(told.is_empty(), "{}", told.join("\n\n"));
}

/// What was interrupted, and what left no row, is told: the recommendation is among the others.
#[test]
fn a_sweep_that_was_cut_short_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.csv");
    let book = Arc::default();
    let scopes = [("mlp", Steps(10.0, 9.0)), ("attn", Steps(10.0, 8.0)), ("attn,mlp", Steps(10.0, 7.0))];
    let (code, tried) = sweep::tried(scopes.into_iter().enumerate(), &book, |(at, scope)| match at {
        0 => measured(at, scope, &file, &book),
        _ => Ok(130),
    });
    let said = told(&tried, scopes.len(), DEFAULT_MARGIN);
    assert_eq!((code, tried.len()), (130, 1));
    assert!(said.contains("Recommended: mlp, "), "{said}");
    assert!(said.ends_with("2 of the 3 scopes left no row: --resume runs what is lacking\n"), "{said}");
    // An end in the middle has the book alone to say it from.
    assert_eq!(so_far(&book.lock().unwrap()), tried);
}

/// A run that was found made counts with its row; it is on no sheet of the workbook.
#[test]
fn a_run_that_was_found_made_counts_with_its_row() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.csv");
    let earlier = Arc::default();
    measured(0, ("mlp", Steps(10.0, 8.0)), &file, &earlier).unwrap();
    let rows = std::mem::take(&mut earlier.lock().unwrap().rows);
    let book: Arc<Mutex<Book>> = Arc::default();
    let (_, tried) = sweep::tried([0, 1], &book, |at| {
        if at == 1 {
            return measured(1, ("attn", Steps(10.0, 9.0)), &file, &book);
        }
        let mut writer = Writer::open(&Target::File(file.clone()))?;
        writer.keep(book.clone());
        writer.found(rows.clone());
        Ok(0)
    });
    let said = told(&tried, 2, DEFAULT_MARGIN);
    assert!(said.contains("Recommended: mlp, ") && !said.contains("left no row"), "{said}");
    assert_eq!(so_far(&book.lock().unwrap()), tried);
    assert_eq!(book.lock().unwrap().rows.len(), 2);
}
