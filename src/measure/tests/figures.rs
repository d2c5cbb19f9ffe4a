//! What a row says of scripted step times.

use super::*;

#[test]
fn scripted_times_give_exact_statistics() {
    let script = FakeExecutor::script().eager(Times::new(10.0)).graph(Times::new(8.0)).busy_ms(6.0);
    let outcome = measure_script(script, &Options { max_time_s: 6.0, ..quick() });
    assert_eq!(outcome.status.exit_code(), 0);
    let [eager, graph] = &outcome.arms[..] else { panic!("two arms") };
    let near = |value: Option<f64>, expected: f64| (value.unwrap() - expected).abs() < 1e-9;
    assert!(near(eager.step_time_ms, 10.0) && near(graph.step_time_ms, 8.0));
    assert!(near(eager.device_span_ms, 10.0) && near(eager.host_submit_ms, 0.1));
    assert!(near(eager.step_time_ms_sync, 10.0) && near(graph.step_time_ms_sync, 8.0));
    assert!(near(outcome.speedup, 1.25) && near(outcome.speedup_sync, 1.25));
    assert_eq!(outcome.verdict, Some(Verdict::Faster));
    assert_eq!(outcome.stopped, Some(Stopped::Precision));
    assert!(near(eager.device_busy_ms, 6.0));
    // Capture 12, instantiate 7, upload 1; 2 ms saved a step.
    assert_eq!(outcome.break_even_steps, Some(10.0));
    assert!(near(outcome.first_replay_ms, 40.0));
    assert_eq!(eager.steady.reached, Some(true));
    assert!(outcome.equality.is_some() && outcome.notices.is_empty());
}

#[test]
fn a_host_bound_arm_is_timed_by_its_host() {
    // 10 ms of submission for 2 ms of device work: the draining step is seen done at once and must not count.
    let script = FakeExecutor::script().eager(Times::new(2.0).submit_ms(10.0)).graph(Times::new(2.0));
    let outcome = measure_script(script, &quick());
    assert!((outcome.arms[0].step_time_ms.unwrap() - 10.0).abs() < 1e-9);
    assert!((outcome.arms[1].step_time_ms.unwrap() - 2.0).abs() < 1e-9);
    assert!((outcome.speedup.unwrap() - 5.0).abs() < 1e-9);
}

#[test]
fn what_issuing_costs_is_told_from_a_full_queue() {
    // Short steps, and steps of which one is all that fits.
    for (step_ms, queue_ms, steps) in [(10.0, 5.0, 5), (2000.0, 500.0, 1)] {
        let script =
            FakeExecutor::script().eager(Times::new(step_ms)).graph(Times::new(step_ms)).queue_ms(queue_ms);
        let outcome = measure_script(script, &quick());
        for arm in &outcome.arms {
            assert!((arm.host_submit_ms.unwrap() - 0.1 - queue_ms).abs() < 1e-9);
            assert!((arm.host_issue_ms.unwrap() - 0.1).abs() < 1e-9);
            assert!((arm.step_time_ms.unwrap() - step_ms).abs() < 1e-6, "{arm:?}");
            let drained = outcome.steps.iter().filter(|s| s.side == arm.side && s.pacing == Pacing::Drained);
            assert_eq!(drained.count(), steps);
        }
    }
    // A device that runs what it is given at once has no queue.
    let outcome = measure_script(FakeExecutor::script(), &quick());
    assert!(outcome.arms.iter().all(|a| a.host_issue_ms.is_none()));
}

#[test]
fn a_host_that_sees_ends_late_does_not_change_the_step_time() {
    // While the host issues a step, for 8 of 10 ms or for most of a second, it does not see that the one before ended;
    // between arms that are issued in unlike times, and in the first steps of a block, that is not the same each time.
    for (eager_ms, submit_ms, graph_ms) in
        [(10.0, 8.0, 8.0), (4.0, 3.0, 4.0), (10.0, 9.7, 8.0), (600.0, 590.0, 560.0), (600.0, 450.0, 600.0)]
    {
        let script = FakeExecutor::script()
            .eager(Times::new(eager_ms).submit_ms(submit_ms))
            .graph(Times::new(graph_ms))
            .queue_ms(0.1 * graph_ms);
        let outcome = measure_script(script, &Options::default());
        let steady =
            outcome.steps.iter().filter(|s| s.phase == Phase::Steady && s.pacing == Pacing::RunAhead);
        for step in steady {
            let own_ms = if step.side == 0 { eager_ms.max(submit_ms + 0.1 * graph_ms) } else { graph_ms };
            assert!((step.wall_ms - own_ms).abs() < 1e-6, "{eager_ms} {submit_ms} {graph_ms}: {step:?}");
        }
        assert!(outcome.notices.iter().all(|n| n.contains("in place of 20")), "{:?}", outcome.notices);
    }
}

#[test]
fn without_graphs_there_is_one_arm_and_no_speedup() {
    let mut executor = FakeExecutor::script().build();
    let calls = executor.calls();
    let outcome = measure_on(&mut executor, &Options { graph: false, ..quick() });
    assert_eq!((outcome.arms.len(), outcome.status.exit_code()), (1, 0));
    assert_eq!((outcome.speedup, outcome.verdict, outcome.equality), (None, None, None));
    assert!(!calls.lock().unwrap().iter().any(|c| matches!(c, Call::Capture | Call::Destroy)));
}

#[test]
fn an_arm_against_itself() {
    for (arm, time) in [(Arm::Eager, 10.0), (Arm::Graph, 8.0)] {
        let outcome = measure_script(FakeExecutor::script(), &Options { aa: Some(arm), ..quick() });
        assert!(outcome.arms.iter().all(|a| a.arm == arm && (a.step_time_ms.unwrap() - time).abs() < 1e-9));
        assert_eq!((outcome.verdict, outcome.break_even_steps), (Some(Verdict::Equivalent), None));
        assert!(outcome.equality.is_some());
    }
}

#[test]
fn the_host_model_has_blocks_of_its_own_and_leaves_the_bare_figures_alone() {
    let script = || FakeExecutor::script().eager(Times::new(10.0)).graph(Times::new(8.0));
    let bare = measure_script(script(), &quick());
    let options = Options { host_costs: Some(host_costs(24.0, 2.0)), ..Options::default() };
    let mut executor = script().build();
    let outcome = measure_on(&mut executor, &options);
    let [eager, graph] = &outcome.arms[..] else { panic!("two arms") };
    let near = |value: Option<f64>, expected: f64| (value.unwrap() - expected).abs() < 1e-9;
    // The host takes 24 ms for 10 ms of device work: it is the limit. 2 ms hide behind 8.
    assert!(near(eager.step_time_ms_modelled, 24.0) && near(graph.step_time_ms_modelled, 8.0));
    assert!(near(eager.host_ms_modelled, 24.0) && near(graph.host_ms_modelled, 2.0));
    assert!(near(outcome.speedup_modelled, 3.0));
    let (low, high) = outcome.speedup_modelled_ci95.unwrap();
    assert!(low <= 3.0 + 1e-9 && 3.0 <= high + 1e-9 && outcome.pairs_modelled >= 20);
    // Neither the bare figures nor their verdict know of it.
    assert!(near(outcome.speedup, bare.speedup.unwrap()) && near(eager.step_time_ms, 10.0));
    assert_eq!(outcome.verdict, bare.verdict);
    assert_eq!((bare.speedup_modelled, bare.pairs_modelled), (None, 0));
    let submit: Vec<f64> =
        outcome.steps.iter().filter(|s| s.pacing == Pacing::Modelled).map(|s| s.submit_ms).collect();
    assert!(submit.iter().all(|ms| (ms - 0.1).abs() < 1e-9), "what was spun is no host submit");
    let order: Vec<usize> =
        outcome.blocks.iter().filter(|b| b.pacing == Pacing::Modelled).map(|b| b.side).collect();
    assert!(order.chunks_exact(4).all(|quad| quad == [0, 1, 1, 0]));
    // Afterwards the executor is bare again.
    assert!(measure_on(&mut executor, &quick()).steps.iter().all(|s| s.modelled_ms == 0.0));
    // -ms: as many steps again.
    let options = Options { max_steps: Some(50), ..options };
    let outcome = measure_script(script(), &options);
    assert!(near(outcome.speedup_modelled, 3.0) && outcome.speedup_modelled_ci95.is_some());
}
