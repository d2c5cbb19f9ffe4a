//! What the card and its neighbours do, and what is told of it.

use super::*;

#[test]
fn drift_is_reported_and_does_not_decide() {
    // 1 % a second, over both arms: the ratio holds, the steady state does not.
    let noise = Noise::seeded(3).white(0.001).drift_per_s(0.01);
    let script = FakeExecutor::script().eager(Times::new(10.0)).graph(Times::new(10.0)).noise(noise);
    let outcome = measure_script(script, &Options { max_time_s: 20.0, ..Options::default() });
    assert_eq!(outcome.verdict, Some(Verdict::Equivalent));
    assert!((outcome.speedup.unwrap() - 1.0).abs() < 0.001);
    assert_eq!(outcome.arms[0].steady.reached, Some(false));
    assert!(!outcome.disturbances().is_empty());
}

#[test]
fn a_steady_state_that_was_not_looked_for_is_no_steady_state() {
    let alone = |options: Options| {
        let script = FakeExecutor::script().eager(Times::new(400.0));
        measure_script(script, &Options { graph: false, longest_time_s: None, ..options })
    };
    // One arm, whose verdict would say nothing of it.
    for (short, remedy, enough) in [
        (
            Options { max_time_s: 2.0, ..Options::default() },
            "raise --max_time",
            Options { max_time_s: 20.0, ..Options::default() },
        ),
        (
            Options { max_steps: Some(10), ..Options::default() },
            "raise -ms, or leave it out",
            Options { max_steps: Some(50), ..Options::default() },
        ),
    ] {
        let outcome = alone(short);
        assert_eq!((outcome.status.exit_code(), outcome.arms[0].steady.reached), (0, None));
        let found = outcome.disturbances();
        assert!(found.len() == 1 && found[0].contains("too few to see a trend in"), "{found:?}");
        assert!(found[0].ends_with(remedy), "{found:?}");
        assert_eq!(alone(enough).disturbances(), Vec::<String>::new());
    }
}

#[test]
fn neighbours_and_throttling_are_told() {
    let health = Health {
        sm_clock_mhz: Some(1500.0),
        throttle_reasons: Some("sw_power_cap".into()),
        other_processes: Some(1),
        ..Health::default()
    };
    let outcome = measure_script(FakeExecutor::script().health(health), &quick());
    assert_eq!(outcome.arms[0].health.sm_clock_mhz_median, Some(1500.0));
    assert_eq!(outcome.arms[0].health.throttle_reasons.as_deref(), Some("sw_power_cap"));
    assert!(outcome.notices.iter().any(|n| n.contains("sw_power_cap")));
    assert!(outcome.disturbances().iter().any(|n| n.contains("other process")));
}

#[test]
fn cycles_are_compared_where_readings_belong_to_one_arm() {
    let at = |mhz| Health { sm_clock_mhz: Some(mhz), ..Health::default() };
    let measured = |submit_ms| {
        let times = |ms| Times::new(ms).submit_ms(submit_ms);
        let script = FakeExecutor::script().eager(times(10.0)).graph(times(8.0));
        measure_script(script.health(at(1900.0)).graph_health(at(1520.0)), &quick())
    };
    // Block by block: 10 ms at 1900 MHz are 19 million cycles, 8 ms at 1520 MHz 12.2 million.
    let apart = measured(6.0);
    assert!((apart.speedup_cycles.unwrap() / (10.0 * 1900.0 / (8.0 * 1520.0)) - 1.0).abs() < 1e-9);
    assert!(apart.notices.iter().any(|n| n.contains("1900 and 1520 MHz")));
    // In turns a reading is of both arms.
    let in_turns = measured(0.1);
    assert!(in_turns.blocks.iter().any(|b| b.log_ratio.is_some()));
    assert_eq!(in_turns.speedup_cycles, None);
}

#[test]
fn a_neighbour_shows_in_the_times() {
    // Stretches of steps take half as long again, in both arms: the ratio holds, the machine is not ours.
    let noise = |seed| Noise::seeded(seed).white(0.001).modes(0.4, 0.2);
    let outcome = measure_script(FakeExecutor::script().noise(noise(4)), &quick());
    let share = outcome.arms[0].disturbed_fraction.unwrap();
    assert!(share > 0.05, "{share}");
    assert!(outcome.notices.iter().any(|n| n.contains("something else used this GPU")));
    assert!(outcome.disturbances().iter().any(|n| n.contains("something else used the GPU")));
    let quiet = measure_script(FakeExecutor::script().noise(Noise::seeded(4).white(0.005)), &quick());
    assert_eq!(quiet.arms[0].disturbed_fraction, Some(0.0));
}

#[test]
fn without_samplers_nothing_is_read() {
    let health = Health { sm_clock_mhz: Some(1500.0), ..Health::default() };
    let script = FakeExecutor::script().health(health);
    let outcome = measure_script(script, &Options { samplers: options::Samplers::Off, ..quick() });
    assert_eq!(outcome.arms[0].health.sm_clock_mhz_median, None);
}

#[test]
fn the_card_is_read_after_every_second_pair_if_so_asked() {
    let health = Health { sm_clock_mhz: Some(1500.0), ..Health::default() };
    let options = Options { samplers: options::Samplers::EverySecondPair, ..quick() };
    let outcome = measure_script(FakeExecutor::script().health(health), &options);
    let read: Vec<bool> = outcome
        .blocks
        .iter()
        .filter(|b| b.pacing == Pacing::RunAhead)
        .map(|b| b.health.sm_clock_mhz.is_some())
        .collect();
    assert!(read.len() >= 30 && read.chunks_exact(4).all(|c| c[0] == c[1] && c[2] == c[3] && c[0] != c[2]));
}
