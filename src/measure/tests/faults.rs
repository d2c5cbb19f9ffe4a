//! What goes wrong: unequal arms, faults, panics, interrupts, a full disk.

use super::*;

#[test]
fn unequal_arms_get_no_speedup() {
    let digests = |arm| vec![("w".into(), 7), ("g".into(), u64::from(arm == Arm::Graph))];
    let outcome = measure_script(FakeExecutor::script().digest(digests), &quick());
    assert_eq!((outcome.status.exit_code(), outcome.speedup, outcome.verdict), (6, None, None));
    let Status::Failed(failure) = &outcome.status else { panic!("failed") };
    assert!(failure.to_string().contains("1 of 2 buffers differ after 7 steps (g)"), "{failure}");

    let losses = |arm, step| Some(if arm == Arm::Graph && step == 5 { 2.0 } else { 1.0 });
    let outcome = measure_script(FakeExecutor::script().loss(losses), &quick());
    let Status::Failed(failure) = &outcome.status else { panic!("failed") };
    assert!(failure.to_string().contains("loss of step 5 is 1 and 2"), "{failure}");
    // The last bit counts.
    let losses = |arm, _| Some(if arm == Arm::Graph { 1.0 + f32::EPSILON } else { 1.0 });
    assert_eq!(measure_script(FakeExecutor::script().loss(losses), &quick()).status.exit_code(), 6);
    // Nothing hashed proves nothing.
    assert_eq!(measure_script(FakeExecutor::script().digest(|_| vec![]), &quick()).status.exit_code(), 1);
}

/// Kernels that add in any order leave other bits of equal work: times, and nothing that would rest on equal work.
#[test]
fn unequal_arms_of_an_unordered_device_have_times_alone() {
    let digests = |arm| vec![("w".into(), 7), ("g".into(), u64::from(arm == Arm::Graph))];
    let outcome = measure_script(FakeExecutor::script().unordered().digest(digests), &quick());
    assert_eq!((outcome.status.exit_code(), outcome.speedup, outcome.verdict), (0, None, None));
    assert_eq!((&outcome.equality, outcome.speedup_sync, outcome.break_even_steps), (&None, None, None));
    assert!(outcome.unequal.as_ref().unwrap().contains("1 of 2 buffers differ"), "{:?}", outcome.unequal);
    assert!(outcome.arms.iter().all(|a| a.step_time_ms.is_some()));
    assert!(outcome.disturbances().iter().any(|d| d.contains("equal work is not shown")));
    // Bits that are asked for once are not asked for again: they need not come.
    let outcome = measure_script(FakeExecutor::script().unordered(), &quick());
    assert!(outcome.unequal.is_none() && outcome.equality.is_some() && outcome.speedup.is_some());
    assert!(matches!(outcome.final_check, Some(FinalCheck::Skipped(why)) if why.contains("any order")));
}

#[test]
fn a_graph_that_went_wrong_while_it_was_timed_is_found() {
    let outcome = measure_script(FakeExecutor::script(), &quick());
    assert_eq!(outcome.final_check, Some(FinalCheck::Equal { steps: 2 }));
    let again: Vec<_> = outcome.steps.iter().filter(|s| s.phase == Phase::FinalCheck).collect();
    assert_eq!(again.iter().map(|s| s.side).collect::<Vec<_>>(), [0, 0, 1, 1]);
    // They are no last steps of the timed run.
    let last = outcome.steps.iter().rfind(|s| s.phase != Phase::FinalCheck).unwrap();
    assert_eq!(outcome.arms[last.side].loss_last, last.loss);
    // Buffers of the graph arm that differ from the third digest on.
    let digests = std::cell::Cell::new(0);
    let script = FakeExecutor::script().digest(move |_| {
        digests.set(digests.get() + 1);
        vec![("w".into(), 7), ("g".into(), u64::from(digests.get() == 4))]
    });
    let outcome = measure_script(script, &quick());
    assert_eq!((outcome.status.exit_code(), outcome.speedup, outcome.verdict), (6, None, None));
    let Status::Failed(failure) = &outcome.status else { panic!("failed") };
    assert!(failure.to_string().contains("after timing") && failure.to_string().contains("(g)"), "{failure}");
    // Both arms give what they did not give before.
    let steps = std::cell::Cell::new(0);
    let script = FakeExecutor::script().loss(move |_, step| {
        steps.set(steps.get() + 1);
        Some(if steps.get() > 100 && step < 2 { 5.0 } else { 4.0 })
    });
    let Status::Failed(failure) = measure_script(script, &quick()).status else { panic!("failed") };
    assert!(failure.to_string().contains("in both arms"), "{failure}");
}

#[test]
fn the_final_check_keeps_to_its_share_of_the_time() {
    let script = || FakeExecutor::script().eager(Times::new(100.0)).graph(Times::new(100.0));
    // Four steps of 100 ms are a tenth of 4 s.
    for (max_time_s, checked) in [(4.1, true), (3.9, false)] {
        let options = Options { max_time_s, longest_time_s: None, ..Options::default() };
        let outcome = measure_script(script(), &options);
        let told = outcome.final_check.unwrap();
        assert_eq!(told == FinalCheck::Equal { steps: 2 }, checked, "{told:?}");
        let used = |s: &&StepRecord| s.block.is_some() || s.phase == Phase::FinalCheck;
        let used_ms: f64 = outcome.steps.iter().filter(used).map(|s| s.wall_ms).sum();
        assert!(used_ms <= max_time_s * 1e3, "{used_ms}");
        if let FinalCheck::Skipped(why) = told {
            assert!(why.contains("0.4 s") && why.contains("--max_time"), "{why}");
        }
    }
    let outcome = measure_script(script(), &Options { max_steps: Some(10), ..Options::default() });
    assert_eq!(outcome.final_check, Some(FinalCheck::Skipped("-ms 10 leaves no steps for it".into())));
}

#[test]
fn a_loss_that_is_not_finite_ends_the_run_although_equal() {
    for bad in [f32::NAN, f32::INFINITY] {
        let script = FakeExecutor::script().loss(move |_, step| Some(if step == 4 { bad } else { 1.0 }));
        let outcome = measure_script(script, &quick());
        assert_eq!(outcome.status.exit_code(), 1);
        let Status::Failed(failure) = &outcome.status else { panic!("failed") };
        assert!(failure.to_string().contains("step 4"), "{failure}");
    }
    // A share without a loss is no failure.
    assert_eq!(measure_script(FakeExecutor::script().loss(|_, _| None), &quick()).status.exit_code(), 0);
}

#[test]
fn every_fault_has_its_exit_code_and_leaves_no_graph() {
    // What fails while a device is prepared leaves none to measure on.
    for phase in Phase::ALL.iter().copied().filter(|p| *p != Phase::Prepare) {
        for kind in Fault::ALL.iter().copied().filter(|k| k.shows_in(phase)) {
            let code = match kind {
                Fault::DriverError => {
                    if phase.makes_graphs() {
                        4
                    } else {
                        1
                    }
                }
                Fault::OutOfMemory => 5,
                Fault::NotFinite | Fault::RowOverflow => 1,
                Fault::WrongResult => 6,
                // Nothing fails: they are the guard's, and its tests'.
                Fault::SlowStep | Fault::ThrottledClock | Fault::Hang => continue,
            };
            let fake = FakeExecutor::script().build();
            let calls = fake.calls();
            let mut executor = Injected::new(fake, Inject::new(phase, kind, 1));
            let outcome = measure_on(&mut executor, &quick());
            assert_eq!(outcome.status.exit_code(), code, "{phase} {kind:?}");
            assert_eq!((outcome.speedup, outcome.verdict), (None, None), "{phase} {kind:?}");
            let calls = calls.lock().unwrap().clone();
            let captures = calls.iter().filter(|c| **c == Call::Capture).count();
            let destroys = calls.iter().filter(|c| **c == Call::Destroy).count();
            assert!(destroys >= captures, "{phase} {kind:?}: {captures} captures, {destroys} destroyed");
            // The same executor works afterwards.
            assert_eq!(measure_on(&mut executor, &quick()).status.exit_code(), 0, "{phase} {kind:?}");
        }
    }
}

#[test]
fn graphs_go_even_when_something_panics() {
    struct Panics;
    impl StepSink for Panics {
        fn steps(&mut self, steps: &[StepRecord]) -> std::io::Result<()> {
            assert!(
                steps[0].phase == Phase::Equality
                    || steps[0].phase == Phase::Warmup && steps[0].block.is_none()
            );
            Ok(())
        }
    }
    let mut executor = FakeExecutor::script().build();
    let calls = executor.calls();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let interrupt = AtomicBool::new(false);
        let hooks = Hooks { interrupt: &interrupt, progress: &mut Silent, sink: &mut Panics };
        run(&mut executor, &quick(), hooks)
    }));
    assert!(caught.is_err());
    assert_eq!(calls.lock().unwrap().last(), Some(&Call::Destroy));
}

#[test]
fn an_interrupt_finishes_what_is_in_flight_and_cleans_up() {
    // In the equality check, while settling, while timing.
    for at in [1, 7, 15, 60, 200] {
        let mut executor = FakeExecutor::script().build();
        let calls = executor.calls();
        let interrupt = AtomicBool::new(false);
        let mut sink = Kept { interrupt_at: Some((at, &interrupt)), ..Kept::default() };
        let hooks = Hooks { interrupt: &interrupt, progress: &mut Silent, sink: &mut sink };
        let outcome = run(&mut executor, &quick(), hooks);
        assert_eq!((outcome.status.exit_code(), outcome.verdict), (130, None));
        assert!(sink.steps == outcome.steps && sink.steps.len() < at + 20);
        let calls = calls.lock().unwrap().clone();
        let submits = calls.iter().filter(|c| matches!(c, Call::Submit { .. })).count();
        assert_eq!(submits, calls.iter().filter(|c| **c == Call::Wait).count());
        let captured = calls.contains(&Call::Capture);
        assert_eq!(captured, calls.contains(&Call::Destroy));
    }
}

#[test]
fn a_full_disk_ends_the_run() {
    let mut executor = FakeExecutor::script().build();
    let interrupt = AtomicBool::new(false);
    let mut sink = Kept { fail_at: Some(30), ..Kept::default() };
    let hooks = Hooks { interrupt: &interrupt, progress: &mut Silent, sink: &mut sink };
    let outcome = run(&mut executor, &quick(), hooks);
    assert_eq!(outcome.status.exit_code(), 1);
    assert!(matches!(outcome.status, Status::Failed(outcome::Failure::Output(_))));
}
