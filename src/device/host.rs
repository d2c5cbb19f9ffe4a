//! Host time of another framework, added while a step is issued: what a host model makes of one program.
//!
//! A group of launches (one part of one layer in one pass) takes at least the model's time on the issuing
//! thread: after each launch the thread spins until its share of the group's time has passed, so launches
//! are spread over the group as a framework spreads them. Time that the group needs anyway (our own launches,
//! waiting for counts) lies inside the model's figure and is not added to it.

use super::record::Call;
use super::{Arm, DeviceError};
use crate::capture::ArmPlan;
use std::time::{Duration, Instant};

/// When a launch's turn ends, counted from the beginning of its group.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pace {
    /// The first launch of a group.
    pub begins: bool,
    /// Milliseconds from the group's beginning until the next launch may be issued; 0: none is added.
    pub until_ms: f64,
}

/// Host times of one arm of a program.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ArmCosts {
    /// By launch of the arm's program; launches inside graphs have no pace.
    pub launches: Vec<Pace>,
    /// By segment: least host time of its replay, in milliseconds; 0 for eager segments.
    pub replay_ms: Vec<f64>,
    /// Sum over a step, in milliseconds.
    pub step_ms: f64,
}

/// Host times of both arms.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HostCosts {
    pub eager: ArmCosts,
    /// `None`: the run has no graph arm.
    pub graph: Option<ArmCosts>,
}

impl HostCosts {
    /// # Errors
    /// [`DeviceError::Internal`] when there is no such arm.
    pub fn arm(&self, arm: Arm) -> Result<&ArmCosts, DeviceError> {
        match arm {
            Arm::Eager => Ok(&self.eager),
            Arm::Graph => {
                self.graph.as_ref().ok_or_else(|| DeviceError::internal("the host model has no graph arm"))
            }
        }
    }
}

impl ArmCosts {
    /// # Errors
    /// [`DeviceError::Internal`] unless the costs were made for this plan.
    pub fn check(&self, plan: &ArmPlan) -> Result<(), DeviceError> {
        let (launches, segments) = (plan.program.launches.len(), plan.segments.len());
        if self.launches.len() == launches && self.replay_ms.len() == segments {
            return Ok(());
        }
        Err(DeviceError::internal(format!(
            "the host model knows {} launches and {} segments, the program has {launches} and {segments}",
            self.launches.len(),
            self.replay_ms.len()
        )))
    }
}

/// Is told of every call of a step, in order: a profiler's ranges and marks.
pub trait Watch: std::fmt::Debug {
    fn begin(&mut self, call: Call);
    fn end(&mut self, call: Call);
}

/// Spins while one step is issued, and tells a watcher. Without costs and watcher every call is one branch.
#[derive(Debug)]
pub struct Pacer<'a> {
    /// Whether there is anything to do: the one thing that a launch looks at otherwise.
    active: bool,
    costs: Option<&'a ArmCosts>,
    watch: Option<&'a mut dyn Watch>,
    group: Instant,
    spun: Duration,
}

impl<'a> Pacer<'a> {
    pub fn new(costs: Option<&'a ArmCosts>) -> Self {
        Self { active: costs.is_some(), costs, watch: None, group: Instant::now(), spun: Duration::ZERO }
    }

    /// Adds nothing.
    pub fn off() -> Self {
        Self::new(None)
    }

    /// Tells `watch` too.
    pub fn watched(mut self, watch: Option<&'a mut dyn Watch>) -> Self {
        self.active |= watch.is_some();
        self.watch = watch;
        self
    }

    /// Before launch `i` is issued.
    #[inline]
    pub fn before(&mut self, i: usize) {
        if self.active {
            self.begin(Call::Launch(i));
        }
    }

    /// After launch `i` was issued.
    #[inline]
    pub fn after(&mut self, i: usize) {
        if self.active {
            self.end(Call::Launch(i));
        }
    }

    /// Before the replay of segment `s`.
    #[inline]
    pub fn before_replay(&mut self, s: usize) {
        if self.active {
            self.begin(Call::Replay(s));
        }
    }

    /// After the replay of segment `s` was issued.
    #[inline]
    pub fn after_replay(&mut self, s: usize) {
        if self.active {
            self.end(Call::Replay(s));
        }
    }

    #[cold]
    fn begin(&mut self, call: Call) {
        let begins = match (self.costs, call) {
            (None, _) => false,
            (Some(costs), Call::Launch(i)) => costs.launches.get(i).is_some_and(|p| p.begins),
            (Some(_), Call::Replay(_)) => true,
        };
        if begins {
            self.group = Instant::now();
        }
        if let Some(watch) = &mut self.watch {
            watch.begin(call);
        }
    }

    #[cold]
    fn end(&mut self, call: Call) {
        if let Some(watch) = &mut self.watch {
            watch.end(call);
        }
        let until_ms = self.costs.and_then(|costs| match call {
            Call::Launch(i) => costs.launches.get(i).map(|p| p.until_ms),
            Call::Replay(s) => costs.replay_ms.get(s).copied(),
        });
        if let Some(ms) = until_ms.filter(|ms| *ms > 0.0) {
            self.spin(ms);
        }
    }

    /// Busy, as an interpreter would be: sleeping would let the core's clock fall.
    fn spin(&mut self, until_ms: f64) {
        let from = self.group.elapsed();
        let until = Duration::try_from_secs_f64(until_ms / 1e3).unwrap_or_default();
        let mut now = from;
        while now < until {
            std::hint::spin_loop();
            now = self.group.elapsed();
        }
        self.spun += now - from;
    }

    /// Time spun so far.
    pub fn spun(&self) -> Duration {
        self.spun
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_takes_the_models_time_and_no_more() {
        let pace = |begins, until_ms| Pace { begins, until_ms };
        let costs = ArmCosts {
            launches: vec![pace(true, 2.0), pace(false, 4.0), pace(false, 0.0), pace(true, 3.0)],
            replay_ms: vec![0.0, 5.0],
            step_ms: 12.0,
        };
        let mut pacer = Pacer::new(Some(&costs));
        let start = Instant::now();
        pacer.before(0);
        pacer.after(0);
        let first = start.elapsed();
        // Time of the group itself lies inside: no spin is left for the second launch but up to 4 ms.
        pacer.before(1);
        std::thread::sleep(Duration::from_millis(3));
        pacer.after(1);
        pacer.before(2);
        pacer.after(2);
        pacer.before(3);
        pacer.after(3);
        pacer.before_replay(0);
        pacer.after_replay(0);
        pacer.after_replay(1);
        let took = start.elapsed().as_secs_f64() * 1e3;
        assert!(first >= Duration::from_millis(2));
        // 2 + 3 of the sleep (past 4 already) + 3 + 5; an upper limit would fail on a loaded machine.
        assert!(took >= 13.0, "{took}");
        let spun = pacer.spun().as_secs_f64() * 1e3;
        assert!(spun >= 9.8 && spun <= took - 3.0 + 1e-6, "{spun} of {took}");
    }

    #[test]
    fn without_costs_nothing_is_spun() {
        let mut pacer = Pacer::off();
        for i in 0..1000 {
            pacer.before(i);
            pacer.after(i);
            pacer.before_replay(i);
            pacer.after_replay(i);
        }
        assert_eq!(pacer.spun(), Duration::ZERO);
    }

    #[test]
    fn a_watcher_hears_every_call_in_order() {
        #[derive(Debug, Default)]
        struct Heard(Vec<(bool, Call)>);
        impl Watch for Heard {
            fn begin(&mut self, call: Call) {
                self.0.push((true, call));
            }
            fn end(&mut self, call: Call) {
                self.0.push((false, call));
            }
        }
        let mut heard = Heard::default();
        let mut pacer = Pacer::off().watched(Some(&mut heard));
        pacer.before(3);
        pacer.after(3);
        pacer.before_replay(1);
        pacer.after_replay(1);
        let (a, b) = (Call::Launch(3), Call::Replay(1));
        assert_eq!(heard.0, [(true, a), (false, a), (true, b), (false, b)]);
    }
}
