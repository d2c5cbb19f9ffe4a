//! Host time of another framework, added while a step is issued: what a host model makes of one program.
//!
//! A group of launches (one part of one layer in one pass) takes at least the model's time on the issuing
//! thread: after each launch the thread spins until its share of the group's time has passed, so launches
//! are spread over the group as a framework spreads them. Time that the group needs anyway (our own launches,
//! waiting for counts) lies inside the model's figure and is not added to it.

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

/// Spins while one step is issued. Without costs every call returns at once.
#[derive(Debug)]
pub struct Pacer<'a> {
    costs: Option<&'a ArmCosts>,
    group: Instant,
    spun: Duration,
}

impl<'a> Pacer<'a> {
    pub fn new(costs: Option<&'a ArmCosts>) -> Self {
        Self { costs, group: Instant::now(), spun: Duration::ZERO }
    }

    /// Adds nothing.
    pub fn off() -> Self {
        Self::new(None)
    }

    /// Before launch `i` is issued.
    pub fn before(&mut self, i: usize) {
        if self.costs.and_then(|c| c.launches.get(i)).is_some_and(|p| p.begins) {
            self.group = Instant::now();
        }
    }

    /// After launch `i` was issued.
    pub fn after(&mut self, i: usize) {
        if let Some(pace) = self.costs.and_then(|c| c.launches.get(i)).filter(|p| p.until_ms > 0.0) {
            self.spin(pace.until_ms);
        }
    }

    /// Before the replay of a segment.
    pub fn before_replay(&mut self) {
        if self.costs.is_some() {
            self.group = Instant::now();
        }
    }

    /// After the replay of segment `s` was issued.
    pub fn after_replay(&mut self, s: usize) {
        if let Some(ms) = self.costs.and_then(|c| c.replay_ms.get(s)).copied().filter(|ms| *ms > 0.0) {
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
        pacer.before_replay();
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
            pacer.before_replay();
            pacer.after_replay(i);
        }
        assert_eq!(pacer.spun(), Duration::ZERO);
    }
}
