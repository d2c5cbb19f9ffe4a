//! Which steps are run, in which order, for how long, and which of them count.

use super::*;

/// Run-ahead steps that belong to blocks.
fn in_blocks(outcome: &Outcome) -> Vec<&StepRecord> {
    let timed = |s: &&StepRecord| {
        s.pacing == Pacing::RunAhead && matches!(s.phase, Phase::Switch | Phase::Steady) && s.block.is_some()
    };
    outcome.steps.iter().filter(timed).collect()
}

#[test]
fn blocks_run_abba_and_every_block_drops_its_edges() {
    // An arm that the host limits is not interleaved.
    let script = FakeExecutor::script().eager(Times::new(10.0).submit_ms(6.0));
    let outcome = measure_script(script, &quick());
    let order = run_ahead_blocks(&outcome);
    assert!(order.len() >= 40);
    for (i, quad) in order.chunks_exact(4).enumerate() {
        assert_eq!(quad, [0, 1, 1, 0], "round {i}");
    }
    for block in in_blocks(&outcome).chunk_by(|a, b| a.block == b.block) {
        assert_eq!(block[0].phase, Phase::Switch);
        assert_eq!(block[block.len() - 1].phase, Phase::Switch);
        let steady = &block[1..block.len() - 1];
        assert!(!steady.is_empty() && steady.iter().all(|s| s.phase == Phase::Steady));
        assert!(steady.iter().map(|s| s.wall_ms).sum::<f64>() >= 50.0 - 1e-6);
    }
}

#[test]
fn blocks_of_arms_that_the_device_limits_are_interleaved() {
    let outcome = measure_script(FakeExecutor::script(), &quick());
    for (i, quad) in run_ahead_blocks(&outcome).chunks_exact(4).enumerate() {
        assert_eq!(quad, [0, 1, 1, 0], "round {i}");
    }
    // 50 ms of 8 ms are 7 steps; half of them.
    assert!(outcome.blocks.iter().filter(|b| b.pacing == Pacing::RunAhead).all(|b| b.steady_steps == 4));
    let steps = in_blocks(&outcome);
    let own_ms = |side| if side == 0 { 10.0 } else { 8.0 };
    for (i, pair) in steps.chunk_by(|a, b| a.block.unwrap() / 2 == b.block.unwrap() / 2).enumerate() {
        let letters: String = pair
            .iter()
            .map(|s| match (s.side, s.phase) {
                (0, Phase::Steady) => 'A',
                (1, Phase::Steady) => 'B',
                (0, _) => 'a',
                _ => 'b',
            })
            .collect();
        let expected = ["aAbBBaAAbBBaAa", "bBaAAbBBaAAbBb"][i % 2];
        assert_eq!(letters, expected, "pair {i}");
        assert!(pair.iter().all(|s| (s.wall_ms - own_ms(s.side)).abs() < 1e-6), "pair {i}: {pair:?}");
    }
}

#[test]
fn short_steps_come_in_tens() {
    let blocks = |step_ms, submit_ms| {
        let times = || Times::new(step_ms).submit_ms(submit_ms);
        let outcome = measure_script(FakeExecutor::script().eager(times()).graph(times()), &quick());
        let steps = outcome.blocks.iter().filter(|b| b.pacing == Pacing::RunAhead).map(|b| b.steady_steps);
        let steps: std::collections::BTreeSet<usize> = steps.collect();
        steps.into_iter().collect::<Vec<_>>()
    };
    // 50 ms of 4.9 ms are 11 timed steps; of 7 ms, 8 (no minimum of ten there); half of them where interleaved.
    assert_eq!((blocks(4.9, 3.0), blocks(4.9, 0.1)), (vec![11], vec![6]));
    assert_eq!((blocks(7.0, 4.0), blocks(7.0, 0.1)), (vec![8], vec![4]));
}

#[test]
fn calls_come_in_the_documented_order() {
    let mut executor = FakeExecutor::script().busy_ms(1.0).build();
    let calls = executor.calls();
    measure_on(&mut executor, &quick());
    let calls = calls.lock().unwrap().clone();
    let at = |call: Call| calls.iter().position(|c| *c == call).unwrap();
    let count = |call: Call| calls.iter().filter(|c| **c == call).count();
    assert_eq!(
        (count(Call::Reset), count(Call::Capture), count(Call::Destroy), count(Call::Digest)),
        // Twice at first, and twice after timing.
        (4, 1, 1, 4)
    );
    assert_eq!(calls[calls.len() - 1], Call::Destroy);
    assert!(at(Call::Busy(Arm::Eager)) > calls.len() - 5);
    // Eager steps, digest, then the graph arm: three uncaptured steps before capture.
    assert!(at(Call::Digest) < at(Call::Submit { arm: Arm::Graph, replay: false }));
    let uncaptured = count(Call::Submit { arm: Arm::Graph, replay: false });
    assert_eq!(uncaptured, 3);
    assert!(at(Call::Capture) < at(Call::Submit { arm: Arm::Graph, replay: true }));
    let order = [
        Phase::Equality,
        Phase::Warmup,
        Phase::Capture,
        Phase::FirstReplay,
        Phase::Switch,
        Phase::Steady,
        Phase::FinalCheck,
    ];
    assert!(order.windows(2).all(|w| at(Call::Phase(w[0])) < at(Call::Phase(w[1]))));
}

#[test]
fn max_steps_counts_every_step_of_an_arm() {
    for n in [5, 6, 7, 8, 9, 20, 50, 333] {
        let options = Options { max_steps: Some(n), ..Options::default() };
        let outcome = measure_script(FakeExecutor::script(), &options);
        for side in 0..2 {
            assert_eq!(outcome.steps.iter().filter(|s| s.side == side).count(), n, "-ms {n}");
        }
        assert!(outcome.arms.iter().all(|a| a.steps_steady > 0 && a.step_time_ms.is_some()), "-ms {n}");
        assert_eq!(outcome.stopped, Some(Stopped::MaxSteps));
        assert_eq!(outcome.speedup_ci95.is_some(), n >= 50, "-ms {n}: {} pairs", outcome.pairs);
        assert_eq!(outcome.verdict == Some(Verdict::Undecided), n < 50);
    }
    let outcome =
        measure_script(FakeExecutor::script(), &Options { max_steps: Some(4), ..Options::default() });
    assert_eq!(outcome.status.exit_code(), 1);
}

#[test]
fn the_shortest_run_has_one_steady_step() {
    let outcome =
        measure_script(FakeExecutor::script(), &Options { max_steps: Some(5), ..Options::default() });
    let phases = |side| outcome.steps.iter().filter(|s| s.side == side).map(|s| s.phase).collect::<Vec<_>>();
    let warmup = [Phase::Warmup; 3];
    assert_eq!(phases(1), [&warmup[..], &[Phase::FirstReplay, Phase::Steady]].concat());
    assert_eq!((outcome.speedup_ci95, outcome.verdict), (None, Some(Verdict::Undecided)));
    assert!(outcome.notices.iter().any(|n| n.contains("waited for")), "{:?}", outcome.notices);
}

#[test]
fn the_shortest_run_under_a_host_model_has_one_modelled_step_too() {
    let script = FakeExecutor::script().eager(Times::new(10.0)).graph(Times::new(8.0));
    let options =
        Options { max_steps: Some(5), host_costs: Some(host_costs(24.0, 2.0)), ..Options::default() };
    let outcome = measure_script(script, &options);
    assert_eq!(outcome.status.exit_code(), 0, "{:?}", outcome.status);
    assert_eq!(
        outcome.arms.iter().map(|a| (a.steps_steady, a.steps_modelled)).collect::<Vec<_>>(),
        [(1, 1); 2]
    );
    for (arm, [bare, modelled]) in outcome.arms.iter().zip([[10.0, 24.0], [8.0, 8.0]]) {
        assert!((arm.step_time_ms.unwrap() - bare).abs() < 1e-9, "{:?}", arm.step_time_ms);
        assert!(
            (arm.step_time_ms_modelled.unwrap() - modelled).abs() < 1e-9,
            "{:?}",
            arm.step_time_ms_modelled
        );
    }
}

#[test]
fn the_time_is_kept_even_with_long_steps() {
    let script = FakeExecutor::script().eager(Times::new(300.0)).graph(Times::new(280.0));
    let outcome = measure_script(script, &Options::default());
    let timed: f64 = outcome.steps.iter().filter(|s| s.block.is_some()).map(|s| s.wall_ms).sum();
    assert!(timed < 20_000.0, "{timed}");
    assert!(outcome.pairs >= MIN_PAIRS, "{}", outcome.pairs);
    assert_eq!(outcome.verdict, Some(Verdict::Faster));
    // One pair is always run, and the verdict is honest about it.
    let script = FakeExecutor::script().eager(Times::new(30_000.0)).graph(Times::new(28_000.0));
    let outcome = measure_script(script, &Options::default());
    assert_eq!((outcome.pairs, outcome.verdict), (1, Some(Verdict::Undecided)));
    assert!(outcome.speedup_ci95.is_none() && outcome.notices[0].contains("too little"));
}

/// Time of the steps in blocks and in the final check.
fn timed_s(outcome: &Outcome) -> f64 {
    let timed = |s: &&StepRecord| s.block.is_some() || s.phase == Phase::FinalCheck;
    outcome.steps.iter().filter(timed).map(|s| s.wall_ms).sum::<f64>() / 1e3
}

#[test]
fn long_steps_get_their_pairs() {
    // (eager, graph, submit of eager) in ms, pairs at least, seconds at most: more than 20 for no more than eight
    // pairs. Those that are submitted in 600 ms or more are limited by their host.
    for (eager_ms, graph_ms, submit_ms, least, most_s) in [
        (300.0, 300.0, 30.0, 19, 20.0),
        (600.0, 600.0, 30.0, 9, 20.0),
        (700.0, 700.0, 30.0, 8, 21.0),
        (800.0, 800.0, 30.0, 8, 24.0),
        (1500.0, 1450.0, 30.0, 8, 45.0),
        (2000.0, 2000.0, 30.0, 8, 60.0),
        (600.0, 560.0, 600.0, 8, 23.0),
        (1500.0, 1500.0, 1500.0, 8, 60.0),
        (700.0, 120.0, 30.0, 8, 20.0),
        (700.0, 40.0, 30.0, 8, 26.0),
    ] {
        let script = FakeExecutor::script()
            .eager(Times::new(if submit_ms < eager_ms { eager_ms } else { 300.0 }).submit_ms(submit_ms))
            .graph(Times::new(graph_ms));
        let outcome = measure_script(script, &Options::default());
        let timed_s = timed_s(&outcome);
        println!("{eager_ms} {graph_ms} {submit_ms}: {} pairs in {timed_s:.1} s", outcome.pairs);
        let extended = outcome.notices.iter().any(|n| n.contains("in place of 20"));
        assert_eq!((outcome.notices.len(), extended), (usize::from(extended), timed_s > 20.0));
        assert!(timed_s <= most_s, "{eager_ms} {graph_ms} {submit_ms}: {timed_s}");
        assert!(outcome.pairs >= least, "{eager_ms} {graph_ms} {submit_ms}: {} pairs", outcome.pairs);
        assert!(outcome.pairs == MIN_PAIRS || !extended, "{} pairs", outcome.pairs);
        // Four steps of 1.5 s are a tenth of a minute.
        let checked = outcome.final_check == Some(FinalCheck::Equal { steps: 2 });
        assert_eq!(checked, eager_ms <= 1500.0, "{:?}", outcome.final_check);
        // Warm-up and two replays.
        assert_eq!(outcome.equality.as_ref().unwrap().steps, 5);
        assert!((outcome.speedup.unwrap() - eager_ms / graph_ms).abs() < 1e-9);
        assert_ne!(outcome.verdict, Some(Verdict::Undecided));
        let order = run_ahead_blocks(&outcome);
        assert!(order.chunks_exact(4).all(|quad| quad == [0, 1, 1, 0]), "{order:?}");
        // A step after a change of arm is never counted.
        let timed: Vec<_> = outcome.steps.iter().filter(|s| s.block.is_some()).collect();
        for two in timed.windows(2).filter(|w| w[0].side != w[1].side) {
            assert_eq!(two[1].phase, Phase::Switch);
        }
    }
}

#[test]
fn only_the_default_time_grows_and_only_where_that_helps() {
    let script = |ms| FakeExecutor::script().eager(Times::new(ms)).graph(Times::new(ms));
    for given in [8.0, 20.0, 40.0] {
        let options = Options { max_time_s: given, longest_time_s: None, ..Options::default() };
        let outcome = measure_script(script(1500.0), &options);
        assert!(timed_s(&outcome) <= given && outcome.pairs >= 1, "{given}: {}", timed_s(&outcome));
        assert_eq!(outcome.verdict == Some(Verdict::Undecided), outcome.pairs < MIN_PAIRS);
    }
    // A minute does not hold eight pairs of such steps: none of it is spent on them.
    let outcome = measure_script(script(3000.0), &Options::default());
    assert!(timed_s(&outcome) <= 20.0 && outcome.pairs < MIN_PAIRS, "{}", timed_s(&outcome));
    assert!(outcome.notices.iter().any(|n| n.contains("raise --max_time")), "{:?}", outcome.notices);
}

#[test]
fn long_steps_under_a_host_model_get_their_pairs_twice() {
    let script = FakeExecutor::script().eager(Times::new(500.0)).graph(Times::new(500.0));
    let options = Options { host_costs: Some(host_costs(700.0, 60.0)), ..Options::default() };
    let outcome = measure_script(script, &options);
    assert!(timed_s(&outcome) <= 60.0, "{}", timed_s(&outcome));
    assert!(outcome.pairs >= MIN_PAIRS && outcome.pairs_modelled >= MIN_PAIRS, "{}", outcome.pairs_modelled);
    assert!((outcome.speedup_modelled.unwrap() - 1.4).abs() < 1e-9);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever the schedule, a statistic holds steady steps alone: here every other step is far longer.
    #[test]
    fn no_other_phase_enters_a_statistic(
        warmup_steps in 0usize..12,
        max_steps in prop::option::of(24usize..200),
        eager_ms in 0.2f64..400.0,
        graph_ms in 0.2f64..400.0,
        submit_ms in 0.01f64..30.0,
        max_time_s in 0.05f64..6.0,
        host in prop::option::of(0.1f64..500.0),
    ) {
        let host_costs = host.map(|ms| host_costs(ms, ms / 2.0));
        let options = Options { warmup_steps, max_steps, max_time_s, host_costs, ..Options::default() };
        let script = FakeExecutor::script()
            .eager(Times::new(eager_ms).submit_ms(submit_ms))
            .graph(Times::new(graph_ms))
            .without_log();
        let outcome = measure_script(script, &options);
        prop_assert_eq!(outcome.status.exit_code(), 0);
        for (arm, expected) in outcome.arms.iter().zip([eager_ms.max(submit_ms), graph_ms.max(0.1)]) {
            // Capture, first replay and edges would all move these.
            let (low, high) = (arm.step_time_ms_p05.unwrap(), arm.step_time_ms_p95.unwrap());
            let told = outcome.notices.iter().any(|n| n.contains("launch queue"));
            prop_assert!(high < expected * (1.0 + 1e-6), "{high} for {expected}");
            prop_assert!(low > expected * (1.0 - 1e-6) || told && low > expected / 2.0, "{low} for {expected}");
            let steady = outcome.steps.iter().filter(|s| s.side == arm.side && s.phase == Phase::Steady);
            prop_assert_eq!(steady.count(), arm.steps_steady + arm.steps_sync + arm.steps_modelled);
        }
        let first = outcome.steps.iter().filter(|s| s.phase == Phase::FirstReplay).count();
        prop_assert_eq!(first, 1);
    }
}
