//! An executor under watch: a watchdog that ends a run whose device call does not come back, and the faults that
//! disturb a run without failing it (`--inject PHASE:slow_step|throttled_clock|hang`), on any device.

use super::host::HostCosts;
use super::inject::{Inject, Kind};
use super::record::Recorded;
use super::{Arm, DeviceError, DeviceInfo, Executor, Finished, GraphCost, Health, Phase, Submitted};
use crate::program::BufId;
use crate::ranks::control::RankStep;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A slow step takes this much longer: far more than a hiccup, short enough for a test.
const SLOW_STEP_MS: f64 = 250.0;
/// What a throttled reading says.
pub const THROTTLED: &str = "injected";
/// A throttled clock's share of the true one.
const THROTTLED_CLOCK: f64 = 0.5;
/// How often the watchdog looks, at most.
const LOOK: Duration = Duration::from_millis(200);

/// The device call that is under way, and its phase.
#[derive(Debug, Clone, Default)]
pub struct Beat(Arc<Mutex<Option<(Phase, Instant)>>>);

impl Beat {
    fn set(&self, call: Option<(Phase, Instant)>) {
        if let Ok(mut now) = self.0.lock() {
            *now = call;
        }
    }

    /// Runs a call of `phase` under watch.
    pub fn during<T>(&self, phase: Phase, call: impl FnOnce() -> T) -> T {
        self.set(Some((phase, Instant::now())));
        let result = call();
        self.set(None);
        result
    }

    /// The call that is under way has come to `phase`.
    pub fn enter(&self, phase: Phase) {
        if let Ok(mut now) = self.0.lock()
            && let Some(call) = now.as_mut()
        {
            call.0 = phase;
        }
    }

    fn overdue(&self, limit: Duration) -> Option<Phase> {
        let call = self.0.lock().ok().and_then(|now| *now)?;
        (call.1.elapsed() >= limit).then_some(call.0)
    }
}

/// Starts a thread that calls `expired` once, when one device call has taken longer than `limit`. The thread
/// ends with the last clone of `beat` but its own.
///
/// # Errors
/// The thread cannot be started.
pub fn watch(
    beat: Beat,
    limit: Duration,
    expired: impl FnOnce(Phase) + Send + 'static,
) -> std::io::Result<()> {
    let body = move || {
        while Arc::strong_count(&beat.0) > 1 {
            if let Some(phase) = beat.overdue(limit) {
                return expired(phase);
            }
            std::thread::sleep(LOOK.min(limit / 4));
        }
    };
    std::thread::Builder::new().name("watchdog".into()).spawn(body).map(|_| ())
}

/// What the watchdog says.
pub fn hang_message(phase: Phase, limit: Duration) -> String {
    format!(
        "a device call in phase {phase} did not come back within {} s (--watchdog): the run was ended; if the \
         device is only slow, raise --watchdog, or 0 for none",
        limit.as_secs_f64()
    )
}

/// See the module's page.
pub struct Guarded {
    inner: Box<dyn Executor>,
    beat: Beat,
    phase: Phase,
    /// Of a kind that disturbs; others are the device's own.
    fault: Option<Inject>,
    throttled: bool,
}

impl Guarded {
    /// Opens a device under watch.
    ///
    /// # Errors
    /// Those of `open`.
    pub fn open(
        beat: Beat,
        mut fault: Option<Inject>,
        open: impl FnOnce() -> Result<Box<dyn Executor>, DeviceError>,
    ) -> Result<Self, DeviceError> {
        let due = fault.as_mut().and_then(|f| f.fire(Phase::Prepare));
        let mut inner = beat.during(Phase::Prepare, || {
            if due == Some(Kind::Hang) {
                hang();
            }
            open()
        })?;
        if due == Some(Kind::SlowStep) {
            inner.stall(SLOW_STEP_MS);
        }
        let throttled = due == Some(Kind::ThrottledClock);
        inner.watched_by(&beat);
        Ok(Self { inner, beat, phase: Phase::Prepare, fault, throttled })
    }

    /// Provokes the fault if it is due in `phase`. Call it inside [`Beat::during`].
    fn provoke(&mut self, phase: Phase) {
        match self.fault.as_mut().and_then(|f| f.fire(phase)) {
            Some(Kind::SlowStep) => self.inner.stall(SLOW_STEP_MS),
            Some(Kind::ThrottledClock) => self.throttled = true,
            Some(Kind::Hang) => hang(),
            _ => {}
        }
    }

    fn watched<T>(&mut self, phases: &[Phase], call: impl FnOnce(&mut dyn Executor) -> T) -> T {
        let beat = self.beat.clone();
        beat.during(phases.first().copied().unwrap_or(self.phase), || {
            for phase in phases {
                beat.enter(*phase);
                self.provoke(*phase);
            }
            beat.enter(phases.first().copied().unwrap_or(self.phase));
            call(&mut *self.inner)
        })
    }
}

/// A call that never returns.
fn hang() {
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

impl Executor for Guarded {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }
    fn ranks(&self) -> usize {
        self.inner.ranks()
    }
    fn begin_steps(&mut self, arm: Arm, count: usize, ahead: bool, drain: bool) -> Result<(), DeviceError> {
        self.watched(&[], |e| e.begin_steps(arm, count, ahead, drain))
    }
    fn of_other_ranks(&mut self) -> Result<Vec<Vec<RankStep>>, DeviceError> {
        self.watched(&[], |e| e.of_other_ranks())
    }
    fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
        self.inner.set_phase(phase);
    }
    fn reset(&mut self) -> Result<(), DeviceError> {
        self.watched(&[], |e| e.reset())
    }
    fn submit(&mut self, arm: Arm) -> Result<Submitted, DeviceError> {
        self.watched(&[self.phase], |e| e.submit(arm))
    }
    fn wait(&mut self, step: Submitted) -> Result<Finished, DeviceError> {
        self.watched(&[], |e| e.wait(step))
    }
    fn capture(&mut self) -> Result<GraphCost, DeviceError> {
        self.watched(&Phase::OF_CAPTURE, |e| e.capture())
    }
    fn destroy_graphs(&mut self) -> Result<(), DeviceError> {
        self.watched(&[], |e| e.destroy_graphs())
    }
    fn digest(&mut self) -> Result<Vec<(String, u64)>, DeviceError> {
        self.watched(&[], |e| e.digest())
    }
    fn launches_per_step(&self, arm: Arm) -> usize {
        self.inner.launches_per_step(arm)
    }
    fn planned_bytes(&self, arm: Arm) -> u64 {
        self.inner.planned_bytes(arm)
    }
    fn now_ms(&self) -> f64 {
        self.inner.now_ms()
    }
    fn health(&mut self) -> Health {
        let throttled = std::mem::take(&mut self.throttled);
        let health = self.watched(&[], |e| e.health());
        if !throttled {
            return health;
        }
        Health {
            sm_clock_mhz: health.sm_clock_mhz.map(|mhz| mhz * THROTTLED_CLOCK),
            throttle_reasons: Some(THROTTLED.into()),
            ..health
        }
    }
    fn set_drained(&mut self, on: bool) -> bool {
        self.inner.set_drained(on)
    }
    fn set_host_costs(&mut self, costs: Option<HostCosts>) -> Result<(), DeviceError> {
        self.inner.set_host_costs(costs)
    }
    fn set_device_spin_ms(&mut self, ms: f64) -> Result<(), DeviceError> {
        self.inner.set_device_spin_ms(ms)
    }
    fn memory_used_mib(&mut self) -> Option<f64> {
        self.inner.memory_used_mib()
    }
    fn stall(&mut self, ms: f64) {
        self.inner.stall(ms);
    }
    fn read(&mut self, buffer: BufId) -> Result<Vec<f32>, DeviceError> {
        self.watched(&[], |e| e.read(buffer))
    }
    fn busy_ms(&mut self, arm: Arm) -> Result<f64, String> {
        self.watched(&[], |e| e.busy_ms(arm))
    }
    fn profile(&mut self, arm: Arm) -> Result<Recorded, String> {
        self.watched(&[], |e| e.profile(arm))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::fake::FakeExecutor;
    use crate::measure::{Hooks, Options, Outcome, Silent, Verdict, run};
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;

    struct NoSteps;
    impl crate::measure::StepSink for NoSteps {
        fn steps(&mut self, _: &[crate::measure::StepRecord]) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn measure(beat: Beat, fault: Option<Inject>) -> (Outcome, Outcome) {
        let mut guarded =
            Guarded::open(beat, fault, || Ok(Box::new(FakeExecutor::script().build()))).unwrap();
        let mut one = || {
            let interrupt = AtomicBool::new(false);
            let hooks = Hooks { interrupt: &interrupt, progress: &mut Silent, sink: &mut NoSteps };
            run(&mut guarded, &Options { max_time_s: 4.0, ..Options::default() }, hooks)
        };
        (one(), one())
    }

    #[test]
    fn a_slow_step_in_any_phase_decides_nothing() {
        for phase in Phase::ALL.iter().copied() {
            let (outcome, after) = measure(Beat::default(), Some(Inject::new(phase, Kind::SlowStep, 1)));
            assert_eq!(outcome.status.exit_code(), 0, "{phase}");
            assert_eq!(outcome.verdict, Some(Verdict::Faster), "{phase}");
            assert!((outcome.speedup.unwrap() - 1.25).abs() < 0.002, "{phase}: {:?}", outcome.speedup);
            assert!((outcome.arms[0].step_time_ms.unwrap() - 10.0).abs() < 1e-9, "{phase}");
            // One is a hiccup and no neighbour.
            assert!(outcome.disturbances().is_empty(), "{phase}: {:?}", outcome.disturbances());
            assert_eq!(after.verdict, Some(Verdict::Faster));
        }
    }

    #[test]
    fn a_throttled_clock_is_told_and_refused_by_strict() {
        for phase in Phase::ALL.iter().copied() {
            let (outcome, after) =
                measure(Beat::default(), Some(Inject::new(phase, Kind::ThrottledClock, 1)));
            assert_eq!(outcome.status.exit_code(), 0, "{phase}");
            // A reading is taken at the end of a block: it stays with the first one that counts, or, of a
            // settling block, with none.
            let told = outcome.disturbances().iter().any(|d| d.contains(THROTTLED));
            assert_eq!(told, phase == Phase::Steady || phase == Phase::Switch, "{phase}");
            assert_eq!(outcome.verdict, Some(Verdict::Faster));
            assert!(after.disturbances().is_empty(), "{phase}");
        }
    }

    #[test]
    fn a_hang_is_seen_and_its_phase_named() {
        for phase in Phase::ALL.iter().copied() {
            let beat = Beat::default();
            let (sender, receiver) = mpsc::channel();
            let limit = Duration::from_millis(300);
            watch(beat.clone(), limit, move |phase| sender.send(phase).unwrap()).unwrap();
            // This thread is left to hang; the test's process takes it along.
            std::thread::spawn(move || measure(beat, Some(Inject::new(phase, Kind::Hang, 1))));
            let seen = receiver.recv_timeout(Duration::from_secs(20)).unwrap();
            assert_eq!(seen, phase);
            assert!(
                hang_message(seen, limit).contains(&format!("phase {seen} did not come back within 0.3 s"))
            );
        }
    }

    #[test]
    fn what_the_guarded_device_can_do_is_asked_of_it() {
        let open = || -> Result<Box<dyn Executor>, DeviceError> {
            Ok(Box::new(FakeExecutor::script().queue_ms(5.0).build()))
        };
        let mut guarded = Guarded::open(Beat::default(), None, open).unwrap();
        let interrupt = AtomicBool::new(false);
        let hooks = Hooks { interrupt: &interrupt, progress: &mut Silent, sink: &mut NoSteps };
        let outcome = run(&mut guarded, &Options { max_time_s: 4.0, ..Options::default() }, hooks);
        assert!(outcome.arms.iter().all(|a| a.host_issue_ms.is_some()), "{:?}", outcome.arms);
    }

    #[test]
    fn a_healthy_run_is_left_alone() {
        let beat = Beat::default();
        let (sender, receiver) = mpsc::channel::<Phase>();
        watch(beat.clone(), Duration::from_secs(5), move |phase| {
            let _ = sender.send(phase);
        })
        .unwrap();
        let (outcome, _) = measure(beat, None);
        assert_eq!(outcome.status.exit_code(), 0);
        // The watchdog has gone with the executor.
        assert_eq!(receiver.recv_timeout(Duration::from_secs(2)), Err(mpsc::RecvTimeoutError::Disconnected));
    }
}
