//! Faults on demand, on any executor: `--inject phase:kind`.

use crate::device::{Arm, DeviceError, DeviceInfo, Executor, Finished, GraphCost, Health, Phase, Submitted};
use std::str::FromStr;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// A driver call returns an error.
    Driver,
    OutOfMemory,
    /// The graph arm leaves other bits than it should.
    WrongResult,
    /// The loss is not a number.
    NotFinite,
    /// More rows than the bound.
    RowOverflow,
}

/// One fault: `kind` at the `nth` call (from 0) made in `phase`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    pub phase: Phase,
    pub kind: FaultKind,
    pub nth: usize,
}

const PHASES: [Phase; 8] = [
    Phase::Equality,
    Phase::Warmup,
    Phase::Capture,
    Phase::Instantiate,
    Phase::Upload,
    Phase::FirstReplay,
    Phase::Switch,
    Phase::Steady,
];
const KINDS: [(&str, FaultKind); 5] = [
    ("driver", FaultKind::Driver),
    ("oom", FaultKind::OutOfMemory),
    ("wrong", FaultKind::WrongResult),
    ("nan", FaultKind::NotFinite),
    ("overflow", FaultKind::RowOverflow),
];

impl FromStr for Fault {
    type Err = String;

    /// `phase:kind` or `phase:kind:n`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(':');
        let phase = parts.next().and_then(|p| PHASES.into_iter().find(|phase| phase.to_string() == p));
        let kind = parts.next().and_then(|k| KINDS.into_iter().find(|(name, _)| *name == k));
        let nth = parts.next().map_or(Some(0), |n| n.parse().ok());
        match (phase, kind, nth, parts.next()) {
            (Some(phase), Some((_, kind)), Some(nth), None) => Ok(Self { phase, kind, nth }),
            _ => Err(format!(
                "'{text}' is not phase:kind[:n]; phases: {}; kinds: {}",
                PHASES.map(|p| p.to_string()).join(", "),
                KINDS.map(|(name, _)| name).join(", ")
            )),
        }
    }
}

/// An executor that fails as told and is itself otherwise.
pub struct Injected<E> {
    pub inner: E,
    fault: Fault,
    phase: Phase,
    /// Calls made in the fault's phase.
    seen: usize,
    /// A wrong result has been left: the next digest differs.
    spoilt: bool,
}

impl<E: Executor> Injected<E> {
    pub fn new(inner: E, fault: Fault) -> Self {
        Self { inner, fault, phase: Phase::Prepare, seen: 0, spoilt: false }
    }

    /// Whether this call, made in `phase`, is the one.
    fn due(&mut self, phase: Phase) -> bool {
        if phase != self.fault.phase {
            return false;
        }
        self.seen += 1;
        self.seen == self.fault.nth + 1
    }

    /// The error of a fault that shows at a call; `None`: it shows in results.
    fn error(&self) -> Option<DeviceError> {
        let phase = self.fault.phase;
        let capturing = matches!(phase, Phase::Capture | Phase::Instantiate | Phase::Upload);
        match self.fault.kind {
            FaultKind::Driver if capturing => {
                Some(DeviceError::Capture { phase, message: "injected fault (--inject)".into() })
            }
            FaultKind::Driver => Some(DeviceError::Driver {
                call: "injected fault",
                code: "an error".into(),
                phase,
                at: " (--inject)".into(),
            }),
            FaultKind::OutOfMemory => Some(DeviceError::OutOfMemory {
                phase,
                what: "an injected fault (--inject)".into(),
                need_mib: 1024.0,
                free_mib: 0.0,
                remedy: "leave out --inject".into(),
            }),
            _ => None,
        }
    }
}

impl<E: Executor> Executor for Injected<E> {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
        self.inner.set_phase(phase);
    }

    fn reset(&mut self) -> Result<(), DeviceError> {
        self.spoilt = false;
        self.inner.reset()
    }

    fn submit(&mut self, arm: Arm) -> Result<Submitted, DeviceError> {
        // Faults of results show when the step is waited for.
        if let Some(error) = self.error()
            && self.due(self.phase)
        {
            return Err(error);
        }
        self.inner.submit(arm)
    }

    fn wait(&mut self, step: Submitted) -> Result<Finished, DeviceError> {
        let mut finished = self.inner.wait(step)?;
        if self.error().is_none() && self.due(self.phase) {
            match self.fault.kind {
                FaultKind::NotFinite => finished.loss = Some(f32::NAN),
                FaultKind::RowOverflow => finished.fault = Some("injected fault: rows overflowed (--inject)"),
                _ => self.spoilt = true,
            }
        }
        Ok(finished)
    }

    fn capture(&mut self) -> Result<GraphCost, DeviceError> {
        for phase in [Phase::Capture, Phase::Instantiate, Phase::Upload] {
            if self.due(phase) {
                match self.error() {
                    Some(error) => return Err(error),
                    // A graph that computes something else.
                    None => self.spoilt = true,
                }
            }
        }
        self.inner.capture()
    }

    fn destroy_graphs(&mut self) -> Result<(), DeviceError> {
        self.inner.destroy_graphs()
    }

    fn digest(&mut self) -> Result<Vec<(String, u64)>, DeviceError> {
        let mut digest = self.inner.digest()?;
        if let Some((_, hash)) = digest.first_mut().filter(|_| self.spoilt) {
            *hash ^= 1;
        }
        Ok(digest)
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
        self.inner.health()
    }

    fn busy_ms(&mut self, arm: Arm) -> Result<f64, String> {
        self.inner.busy_ms(arm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_parsed_strictly() {
        let fault: Fault = "steady:driver:3".parse().unwrap();
        assert_eq!(fault, Fault { phase: Phase::Steady, kind: FaultKind::Driver, nth: 3 });
        assert_eq!("capture:oom".parse::<Fault>().unwrap().nth, 0);
        for bad in
            ["", "capture", "capture:", "capture:boom", "never:oom", "capture:oom:x", "capture:oom:1:2"]
        {
            assert!(bad.parse::<Fault>().unwrap_err().contains("first_replay"), "{bad}");
        }
    }
}
