//! Scripted records: a device that runs the calls of a plan in order, with times, gaps and disorder as told.

use super::trace::{self, TRACE_START};
use super::*;
use crate::capture::plan;
use crate::config::{GraphImpl, Scope};
use crate::device::fake::FakeExecutor;
use crate::device::record::{COPY, Call, Kind, Record, Unit};
use crate::device::{Executor, record};
use crate::measure::{Hooks, Options, Silent, StepRecord, StepSink};
use crate::workloads::testing::{dense, program, with_graphs};
use proptest::prelude::*;
use std::sync::atomic::AtomicBool;

/// A graph arm of two layers: eager launches and graphs of two passes.
fn graph_arm(scope: &[Scope]) -> ArmPlan {
    let implementation =
        if scope.contains(&Scope::FullIteration) { GraphImpl::Local } else { GraphImpl::TransformerEngine };
    let cfg = with_graphs(dense(), implementation, scope);
    plan(program(&cfg), &cfg.graph, 1).unwrap().graph.unwrap()
}

fn eager_arm() -> ArmPlan {
    let cfg = with_graphs(dense(), GraphImpl::TransformerEngine, &[Scope::Attn]);
    plan(program(&cfg), &cfg.graph, 1).unwrap().eager
}

/// Each launch is one kernel of its op's name; products are two of one name, as a library's split product is, and
/// copies are copies.
fn units(plan: &ArmPlan) -> Vec<Option<Vec<Unit>>> {
    let unit = |kind, name: &str, grid| Unit { kind, name: name.into(), grid: [grid, 1, 1], block: [1; 3] };
    let of = |(at, l): (usize, &crate::program::Launch)| match l.op.name() {
        "copy" => vec![unit(Kind::Copy, COPY, 0)],
        "gemm" => vec![unit(Kind::Kernel, "gemm", 4), unit(Kind::Kernel, "reduce", at as u32 % 3)],
        name => vec![unit(Kind::Kernel, name, 1)],
    };
    plan.program.launches.iter().enumerate().map(|l| Some(of(l))).collect()
}

/// How the scripted device runs.
#[derive(Debug, Clone, Copy)]
struct Way {
    /// The recorder numbers calls.
    numbered: bool,
    /// Nodes of graphs have numbers.
    nodes: bool,
    /// Kernels take 100 ns and this much more by turns; between calls lie gaps of as much.
    ns: u64,
}

/// What a device would record of one step.
fn run(plan: &ArmPlan, way: Way) -> Recorded {
    let expected = units(plan);
    let mut recorded = Recorded { expected: expected.clone(), recorder: "a script", ..Recorded::default() };
    let mut clock = 1_000_000;
    let mut node = 0;
    for (s, segment) in plan.segments.iter().enumerate() {
        let calls: Vec<(Call, Vec<usize>)> = match segment.graph {
            Some(_) => vec![(Call::Replay(s), segment.launches.clone().collect())],
            None => segment.launches.clone().map(|l| (Call::Launch(l), vec![l])).collect(),
        };
        for (call, launches) in calls {
            let number = recorded.calls.len();
            recorded.calls.push(call);
            clock += way.ns;
            let in_graph = matches!(call, Call::Replay(_));
            for unit in launches.iter().flat_map(|l| expected[*l].as_ref().unwrap()) {
                node += 1;
                let ns = 100 + way.ns * (node % 3);
                recorded.records.push(Record {
                    unit: unit.clone(),
                    start_ns: clock,
                    end_ns: clock + ns,
                    stream: 7,
                    // A replay is one call of the driver, a launch as many as it has kernels.
                    correlation: (1000 * number) as u32 + if in_graph { 0 } else { node as u32 % 1000 },
                    call: way.numbered.then_some(number),
                    node: if in_graph && way.nodes { (1 << 33) + node } else { 0 },
                });
                clock += ns;
            }
        }
    }
    recorded
}

/// The launch of every record as the script made them.
fn truth(plan: &ArmPlan) -> Vec<Option<usize>> {
    let units = units(plan);
    plan.segments
        .iter()
        .flat_map(|s| s.launches.clone())
        .flat_map(|l| vec![Some(l); units[l].as_ref().unwrap().len()])
        .collect()
}

const WAY: Way = Way { numbered: true, nodes: true, ns: 50 };

fn arms() -> Vec<(Arm, ArmPlan)> {
    vec![
        (Arm::Eager, eager_arm()),
        (Arm::Graph, graph_arm(&[Scope::Attn])),
        (Arm::Graph, graph_arm(&[])),
        (Arm::Graph, graph_arm(&[Scope::FullIteration])),
    ]
}

#[test]
fn every_kernel_finds_its_launch_whatever_the_recorder_tells() {
    for (arm, plan) in arms() {
        for (numbered, nodes) in [(true, true), (true, false), (false, true), (false, false)] {
            let profile = Profile::new(arm, &plan, run(&plan, Way { numbered, nodes, ..WAY }));
            assert_eq!(profile.matched.difference, None, "{arm} {numbered} {nodes}");
            assert_eq!(profile.matched.launches, truth(&plan), "{arm} {numbered} {nodes}");
        }
    }
}

#[test]
fn nodes_tell_more_than_times_where_lanes_overlap() {
    let plan = graph_arm(&[Scope::FullIteration]);
    let mut recorded = run(&plan, WAY);
    let inside: Vec<usize> = (0..recorded.records.len()).filter(|r| recorded.records[*r].node > 0).collect();
    // Two different neighbours begin in the other order.
    let at =
        inside.windows(2).find(|w| recorded.records[w[0]].unit != recorded.records[w[1]].unit).unwrap()[0];
    let (a, b) = (recorded.records[at].start_ns, recorded.records[at + 1].start_ns);
    (recorded.records[at].start_ns, recorded.records[at + 1].start_ns) = (b, a);
    assert_eq!(matched(&plan, &recorded), Matched { launches: truth(&plan), difference: None });
    // Without nodes, by name.
    recorded.records.iter_mut().for_each(|r| r.node = 0);
    assert_eq!(matched(&plan, &recorded).difference, None);
}

#[test]
fn products_sized_by_the_step_are_told_by_their_number() {
    let plan = eager_arm();
    let gemm = plan.program.launches.iter().position(|l| l.op.name() == "gemm").unwrap();
    let mut recorded = run(&plan, WAY);
    recorded.expected[gemm] = None;
    // One kernel more than usual.
    let at = truth(&plan).iter().position(|l| *l == Some(gemm)).unwrap();
    let mut more = recorded.records[at].clone();
    more.correlation += 1;
    recorded.records.insert(at + 1, more);
    let found = matched(&plan, &recorded);
    assert_eq!((found.difference, found.launches[at + 1]), (None, Some(gemm)));
    recorded.records.iter_mut().for_each(|r| r.call = None);
    assert!(matched(&plan, &recorded).difference.unwrap().contains("sized by the step"));
}

#[test]
fn a_kernel_that_is_missing_foreign_or_too_many_is_told() {
    for (arm, plan) in arms() {
        let good = run(&plan, WAY);
        let at = good.records.len() / 2;
        let mut missing = good.clone();
        missing.records.remove(at);
        let mut foreign = good.clone();
        foreign.records[at].unit.name = "another".into();
        let mut twice = good.clone();
        let again = twice.records[at].clone();
        twice.records.insert(at, again);
        for (what, recorded) in [("missing", missing), ("foreign", foreign), ("twice", twice)] {
            for numbered in [true, false] {
                let mut recorded = recorded.clone();
                if !numbered {
                    recorded.records.iter_mut().for_each(|r| r.call = None);
                    // A launch's kernel that comes twice shares the driver's call: not to be seen without numbers.
                    if what == "twice" {
                        recorded.records[at].correlation += 500;
                    }
                }
                let profile = Profile::new(arm, &plan, recorded);
                let told = profile.matched.difference.clone();
                assert!(told.is_some(), "{arm} {what} {numbered}");
                assert!(text(&profile).contains("Not the launch list's"), "{}", text(&profile));
            }
        }
    }
}

#[test]
fn parts_add_up_to_the_busy_time_and_gaps_to_the_rest() {
    for (arm, plan) in arms() {
        let profile = Profile::new(arm, &plan, run(&plan, WAY));
        let (parts, rest) = profile.attributed();
        assert_eq!((parts.device_ns, rest), (profile.busy_ns, Sum::default()), "{arm}");
        assert_eq!(profile.gaps.total_ns, profile.span_ns - profile.busy_ns);
        assert_eq!(parts.gap_ns, profile.gaps.total_ns);
        assert_eq!(parts.launches, profile.recorded.records.len());
        // A gap before every call but the first, each of the script's length.
        assert_eq!(profile.gaps.count, profile.recorded.calls.len() - 1);
        assert_eq!((profile.gaps.median_ns, profile.gaps.longest_ns), (50, 50));
        let of = |part: &str| profile.parts().iter().find(|(p, _)| *p == part).map(|(_, s)| *s).unwrap();
        let by_hand: u64 = profile
            .recorded
            .records
            .iter()
            .zip(truth(&plan))
            .filter(|(_, l)| plan.program.launches[l.unwrap()].part.name() == "attn")
            .map(|(r, _)| r.ns())
            .sum();
        assert_eq!(of("attn").device_ns, by_hand);
        let said = text(&profile);
        assert!(said.contains("attn") && said.contains("recorded names are the launch list's"), "{said}");
        assert!(!said.contains(UNATTRIBUTED) && !said.contains("off the busy time"), "{said}");
    }
}

#[test]
fn what_belongs_to_no_launch_is_a_line_of_its_own() {
    let plan = eager_arm();
    let mut recorded = run(&plan, WAY);
    let end = recorded.records.last().unwrap().end_ns;
    let mut stranger = recorded.records[0].clone();
    (stranger.start_ns, stranger.end_ns) = (end + 100, end + 100 + recorded.busy_ns() / 10);
    (stranger.call, stranger.correlation) = (None, u32::MAX);
    recorded.records.push(stranger);
    let profile = Profile::new(Arm::Eager, &plan, recorded);
    let (parts, rest) = profile.attributed();
    assert_eq!((rest.launches, parts.device_ns + rest.device_ns), (1, profile.busy_ns));
    assert_eq!(profile.parts().last().unwrap().0, UNATTRIBUTED);
    let said = text(&profile);
    assert!(said.contains("are unattributed"), "{said}");
}

fn events(text: &str) -> Vec<serde_json::Value> {
    let json: serde_json::Value = serde_json::from_str(text).unwrap();
    assert_eq!(json["otherData"]["producer"], "mbperf");
    json["traceEvents"].as_array().unwrap().clone()
}

#[test]
fn the_traces_names_are_the_launch_list_and_its_times_the_records() {
    let profiles: Vec<Profile> =
        arms()[..2].iter().map(|(arm, plan)| Profile::new(*arm, plan, run(plan, WAY))).collect();
    let text = trace::render(&profiles, &[("command", "mbperf \"quoted\"".into())]);
    assert!(text.starts_with(TRACE_START));
    let events = events(&text);
    for (pid, profile) in (1..).zip(&profiles) {
        let of: Vec<_> = events.iter().filter(|e| e["pid"] == pid).collect();
        let title = of.iter().find(|e| e["name"] == "process_name").unwrap();
        assert_eq!(title["args"]["name"], format!("{} step", profile.arm));
        let slices: Vec<_> = of.iter().filter(|e| e["ph"] == "X").collect();
        let names: Vec<&str> = slices.iter().map(|e| e["name"].as_str().unwrap()).collect();
        // In order of time, which is the list's.
        let units = units(&profile.plan);
        let list: Vec<String> =
            units.iter().flat_map(|u| u.as_ref().unwrap()).map(|u| u.name.to_string()).collect();
        assert_eq!(names, list);
        let first = profile.recorded.records[0].start_ns;
        for (slice, (record, launch)) in
            slices.iter().zip(profile.recorded.records.iter().zip(truth(&profile.plan)))
        {
            let launch_at = launch.unwrap();
            let launch = &profile.plan.program.launches[launch_at];
            assert!((slice["ts"].as_f64().unwrap() * 1e3 - (record.start_ns - first) as f64).abs() < 1e-6);
            assert!((slice["dur"].as_f64().unwrap() * 1e3 - record.ns() as f64).abs() < 1e-6);
            assert_eq!(slice["args"]["op"], launch.op.name());
            assert_eq!(slice["args"]["part"], launch.part.name());
            assert_eq!(slice["args"]["pass"], launch.pass.name());
            assert_eq!(slice["args"]["launch"], launch_at);
            assert_eq!(slice["args"]["layer"], serde_json::to_value(launch.layer).unwrap());
        }
    }
}

#[test]
fn part_names_are_those_of_the_program_as_data() {
    for (_, plan) in arms() {
        for launch in &plan.program.launches {
            assert_eq!(serde_json::to_value(launch.part).unwrap(), launch.part.name());
            assert_eq!(serde_json::to_value(launch.pass).unwrap(), launch.pass.name());
        }
    }
}

#[test]
fn json_holds_what_the_table_says() {
    let (arm, plan) = arms().remove(1);
    let profile = Profile::new(arm, &plan, run(&plan, WAY));
    let json = json(&profile);
    let sum: f64 =
        json["parts"].as_object().unwrap().values().map(|p| p["device_ms"].as_f64().unwrap()).sum();
    assert!((sum - json["device_busy_ms"].as_f64().unwrap()).abs() < 1e-9);
    assert_eq!(json["names_equal_launch_list"], true);
    assert_eq!(json["kernels"].as_array().unwrap().len(), profile.lines.len());
}

/// Measuring hands over what a device recorded, after everything else.
#[test]
fn a_measurement_ends_with_the_profile_of_each_arm() {
    impl StepSink for Nothing {
        fn steps(&mut self, _: &[StepRecord]) -> std::io::Result<()> {
            Ok(())
        }
    }
    struct Nothing;
    let recorded = |arm| match arm {
        Arm::Eager => Ok(run(&eager_arm(), WAY)),
        Arm::Graph => Err("no permission".to_owned()),
    };
    let measure = |options: &Options| {
        let mut executor = FakeExecutor::script().profile(recorded).build();
        let calls = executor.calls();
        let interrupt = AtomicBool::new(false);
        let hooks = Hooks { interrupt: &interrupt, progress: &mut Silent, sink: &mut Nothing };
        let outcome = crate::measure::run(&mut executor as &mut dyn Executor, options, hooks);
        (outcome, calls)
    };
    let (outcome, calls) = measure(&Options { profile: true, ..Options::default() });
    assert_eq!(outcome.status.exit_code(), 0);
    let [(Arm::Eager, Ok(eager)), (Arm::Graph, Err(why))] = &outcome.profiles[..] else {
        panic!("{:?}", outcome.profiles);
    };
    assert_eq!((eager, why.as_str()), (&run(&eager_arm(), WAY), "no permission"));
    use crate::device::fake::Call;
    let calls = calls.lock().unwrap();
    let last_step = calls.iter().rposition(|c| matches!(c, Call::Submit { .. })).unwrap();
    assert!(calls[..last_step].iter().all(|c| !matches!(c, Call::Profile(_))));
    let (unasked, _) = measure(&Options::default());
    assert!(unasked.profiles.is_empty());
    // An arm against itself is recorded once.
    let aa = Options { profile: true, aa: Some(Arm::Eager), ..Options::default() };
    assert_eq!(measure(&aa).0.profiles.len(), 1);
}

/// Records at random times on a few streams; the first calls of an eager step.
fn scattered() -> impl Strategy<Value = Vec<(u64, u64, u32)>> {
    prop::collection::vec((0u64..500, 0u64..80, 0u32..3), 0..40)
}

fn of_scattered(list: &[(u64, u64, u32)]) -> Profile {
    let plan = eager_arm();
    let expected = units(&plan);
    let records = list.iter().enumerate().map(|(at, (start, ns, stream))| Record {
        unit: Unit { kind: Kind::Kernel, name: format!("k{}", at % 5).into(), grid: [1; 3], block: [1; 3] },
        start_ns: *start,
        end_ns: start + ns,
        stream: *stream,
        correlation: at as u32,
        call: (at % 4 > 0).then_some(at),
        node: 0,
    });
    let calls = (0..plan.program.launches.len()).map(Call::Launch).collect();
    let recorded = Recorded { calls, expected, records: records.collect(), recorder: "a script" };
    Profile::new(Arm::Eager, &plan, recorded)
}

proptest! {
    /// Whatever overlaps or belongs to nobody: nothing is lost and nothing counted twice.
    #[test]
    fn nothing_is_lost(list in scattered()) {
        let profile = of_scattered(&list);
        let (parts, rest) = profile.attributed();
        let all: u64 = list.iter().map(|(_, ns, _)| ns).sum();
        prop_assert_eq!(parts.device_ns + rest.device_ns, all);
        prop_assert_eq!(parts.launches + rest.launches, list.len());
        prop_assert_eq!(parts.gap_ns + rest.gap_ns, profile.gaps.total_ns);
        prop_assert_eq!(profile.busy_ns + profile.gaps.total_ns, profile.span_ns);
        prop_assert!(all >= profile.busy_ns);
        prop_assert_eq!(
            profile.busy_ns,
            record::union_ns(list.iter().map(|(start, ns, _)| (*start, start + ns)).collect())
        );
        let parsed = events(&trace::render(&[profile], &[]));
        prop_assert_eq!(parsed.iter().filter(|e| e["ph"] == "X").count(), list.len());
    }

    /// A track holds one thing at a time, and streams are not mixed.
    #[test]
    fn tracks_do_not_overlap(list in scattered()) {
        let profile = of_scattered(&list);
        let (titles, of) = trace::tracks(&profile);
        for a in 0..list.len() {
            let stream = format!("stream {}", list[a].2);
            prop_assert!(titles[of[a]].starts_with(&stream), "record {a} is not on {stream}");
            for b in 0..a {
                if of[a] == of[b] {
                    let ((sa, na, _), (sb, nb, _)) = (list[a], list[b]);
                    prop_assert!(sa + na <= sb || sb + nb <= sa, "{a} {b}");
                }
            }
        }
    }

    /// A shuffled list of records is matched as the one in order.
    #[test]
    fn the_order_of_delivery_does_not_matter(seed in 0u64..1000, numbered in any::<bool>()) {
        let plan = graph_arm(&[Scope::Attn]);
        let recorded = run(&plan, Way { numbered, nodes: seed % 2 == 0, ns: seed % 7 + 1 });
        let truth = truth(&plan);
        let mut order: Vec<usize> = (0..recorded.records.len()).collect();
        order.sort_by_key(|at| (*at as u64 + 1).wrapping_mul(2 * seed + 0x9e37_79b9_7f4a_7c15));
        let records = order.iter().map(|at| recorded.records[*at].clone()).collect();
        let found = matched(&plan, &Recorded { records, ..recorded.clone() });
        prop_assert_eq!(found.difference, None);
        prop_assert_eq!(found.launches, order.iter().map(|at| truth[*at]).collect::<Vec<_>>());
    }
}
