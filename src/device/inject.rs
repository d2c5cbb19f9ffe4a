//! Faults on demand (`--inject phase:kind[:n]`), so that the paths of failure are tested on every device.

use super::named::named;
use super::{Arm, DeviceError, Finished, Phase};
use crate::program::{BufId, Lifetime, Program};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

named! {
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Kind {
        /// The driver refuses the call.
        DriverError = "driver_error",
        OutOfMemory = "out_of_memory",
        /// The step and all later ones of its arm compute something else, or a launch is missing from a graph.
        WrongResult = "wrong_result",
        /// The loss is not a number.
        NotFinite = "not_finite",
        /// More rows than the bound.
        RowOverflow = "row_overflow",
        /// A step takes far longer than the others.
        SlowStep = "slow_step",
        /// A reading of the card says that its clocks were held back.
        ThrottledClock = "throttled_clock",
        /// A device call does not come back.
        Hang = "hang",
    }
}

impl Kind {
    /// Disturbs a run without an error: [`super::guard::Guarded`] provokes it on any device.
    pub fn disturbs(self) -> bool {
        matches!(self, Kind::SlowStep | Kind::ThrottledClock | Kind::Hang)
    }

    /// What a device returns for it in `phase`; `None` for a kind that shows in the results of a step.
    pub fn error(self, phase: Phase) -> Option<DeviceError> {
        match self {
            Kind::DriverError if phase.makes_graphs() => {
                Some(DeviceError::Capture { phase, message: "an injected driver error".to_owned() })
            }
            Kind::DriverError => Some(DeviceError::Driver {
                call: "an injected call",
                code: "CUDA_ERROR_UNKNOWN".to_owned(),
                phase,
                at: String::new(),
            }),
            Kind::OutOfMemory => Some(DeviceError::OutOfMemory {
                phase,
                what: "an injected fault".to_owned(),
                need_mib: 1.0,
                free_mib: 0.0,
                remedy: "leave out --inject".to_owned(),
            }),
            Kind::WrongResult | Kind::NotFinite | Kind::RowOverflow => None,
            // No device is given one of these: it would pass in silence.
            Kind::SlowStep | Kind::ThrottledClock | Kind::Hang => {
                Some(DeviceError::internal(format!("{self:?} was injected as an error, which it is not")))
            }
        }
    }

    /// Puts the fault into what a step left; a wrong result is the device's to make.
    pub fn mar(self, finished: &mut Finished) {
        match self {
            Kind::NotFinite => finished.loss = Some(f32::NAN),
            Kind::RowOverflow => finished.fault = Some("an injected overflow of the row bound"),
            Kind::WrongResult | Kind::DriverError | Kind::OutOfMemory => {}
            Kind::SlowStep | Kind::ThrottledClock | Kind::Hang => {}
        }
    }

    /// Whether it can show in `phase`: results are those of steps, and of a capture that lacks a launch.
    pub fn shows_in(self, phase: Phase) -> bool {
        match self {
            Kind::DriverError | Kind::OutOfMemory => true,
            Kind::SlowStep | Kind::ThrottledClock | Kind::Hang => true,
            Kind::WrongResult => phase.has_steps() || phase == Phase::Capture,
            Kind::NotFinite | Kind::RowOverflow => phase.has_steps(),
        }
    }
}

/// The hashed buffer that a wrong result goes into: one that lasts, for steps write gradients anew.
pub fn lasting(program: &Program) -> Option<BufId> {
    let lasts = |id: &&BufId| program.buffer(**id).lifetime != Lifetime::MainGrad;
    program.digest.iter().find(lasts).or(program.digest.first()).copied()
}

/// One fault: of `kind`, at the `nth` time (from 1) that `phase` does something.
#[derive(Debug, Clone)]
pub struct Inject {
    pub phase: Phase,
    pub kind: Kind,
    pub nth: usize,
    seen: usize,
    /// The arm that has gone wrong: it stays so.
    wrong: Option<Arm>,
    /// Shared by its clones: the one that a device was given tells the one that was kept.
    happened: Arc<AtomicBool>,
}

/// What was asked for; not how far it has come.
impl PartialEq for Inject {
    fn eq(&self, other: &Self) -> bool {
        (self.phase, self.kind, self.nth) == (other.phase, other.kind, other.nth)
    }
}

impl Eq for Inject {}

/// As it is typed.
impl fmt::Display for Inject {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}:{}:{}", self.phase, self.kind.name(), self.nth)
    }
}

impl Inject {
    pub fn new(phase: Phase, kind: Kind, nth: usize) -> Self {
        Self { phase, kind, nth, seen: 0, wrong: None, happened: Arc::default() }
    }

    /// Whether the fault has happened, here or in a clone.
    pub fn happened(&self) -> bool {
        self.happened.load(Ordering::SeqCst)
    }

    /// Call it wherever `phase` does something. `Some`: the fault happens now.
    pub fn fire(&mut self, phase: Phase) -> Option<Kind> {
        if phase != self.phase {
            return None;
        }
        self.seen += 1;
        let now = self.seen == self.nth;
        if now {
            self.happened.store(true, Ordering::SeqCst);
        }
        now.then_some(self.kind)
    }

    /// Call it wherever a device is reset. A measurement begins with a reset in the phase `equality`: arms that went
    /// wrong in the one before are sound again, as the memory that was spoilt is written anew.
    pub fn reset(fault: &mut Option<Self>, phase: Phase) {
        if let Some(fault) = fault.as_mut().filter(|_| phase == Phase::Equality) {
            fault.wrong = None;
        }
    }

    /// As [`Inject::fire`], with the kinds that are errors returned as such.
    pub fn at(fault: &mut Option<Self>, phase: Phase) -> Result<Option<Kind>, DeviceError> {
        match fault.as_mut().and_then(|f| f.fire(phase)) {
            None => Ok(None),
            Some(kind) => kind.error(phase).map_or(Ok(Some(kind)), Err),
        }
    }

    /// As [`Inject::at`] for a step of `arm`. An arm that has given a wrong result gives nothing else from then on,
    /// as a graph would whose memory was overwritten.
    pub fn at_step(fault: &mut Option<Self>, phase: Phase, arm: Arm) -> Result<Option<Kind>, DeviceError> {
        let found = Self::at(fault, phase)?;
        let Some(fault) = fault else { return Ok(None) };
        if found == Some(Kind::WrongResult) {
            fault.wrong = Some(arm);
        }
        Ok(found.or((fault.wrong == Some(arm)).then_some(Kind::WrongResult)))
    }
}

impl FromStr for Inject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (phases, kinds) = (Phase::names(), Kind::names());
        let mut parts = text.split(':');
        let (Some(phase), Some(kind)) = (parts.next(), parts.next()) else {
            return Err(format!("{text:?} is not phase:kind[:n]; phases: {phases}; kinds: {kinds}"));
        };
        let phase = Phase::named(phase).ok_or_else(|| format!("no phase {phase:?}; there are {phases}"))?;
        let kind = Kind::named(kind).ok_or_else(|| format!("no kind {kind:?}; there are {kinds}"))?;
        if !kind.shows_in(phase) {
            return Err(format!(
                "{text:?}: a result has no place in the phase {phase}; use driver_error there"
            ));
        }
        let nth = match parts.next() {
            None => 1,
            Some(n) => {
                n.parse().ok().filter(|n| *n > 0).ok_or_else(|| format!("{n:?} is no count from 1 on"))?
            }
        };
        if let Some(more) = parts.next() {
            return Err(format!("{more:?} is one part too many in {text:?}"));
        }
        Ok(Self::new(phase, kind, nth))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn faults_are_read_and_fire_once() {
        let mut fault: Inject = "capture:out_of_memory:2".parse().unwrap();
        assert_eq!(fault.fire(Phase::Capture), None);
        assert_eq!(fault.fire(Phase::Steady), None);
        assert_eq!(fault.fire(Phase::Capture), Some(Kind::OutOfMemory));
        assert_eq!(fault.fire(Phase::Capture), None);
        assert!(fault.clone().happened() && !Inject::new(Phase::Steady, Kind::Hang, 1).happened());
        assert_eq!(fault.to_string(), "capture:out_of_memory:2");
        assert_eq!("steady:wrong_result".parse(), Ok(Inject::new(Phase::Steady, Kind::WrongResult, 1)));
    }

    #[test]
    fn a_wrong_arm_stays_wrong_and_the_other_right() {
        let mut fault = Some("steady:wrong_result:2".parse().unwrap());
        let mut at = |phase, arm| Inject::at_step(&mut fault, phase, arm).unwrap();
        assert_eq!(at(Phase::Steady, Arm::Graph), None);
        assert_eq!(at(Phase::Steady, Arm::Graph), Some(Kind::WrongResult));
        assert_eq!(at(Phase::Steady, Arm::Eager), None);
        assert_eq!(at(Phase::FinalCheck, Arm::Eager), None);
        assert_eq!(at(Phase::FinalCheck, Arm::Graph), Some(Kind::WrongResult));
    }

    #[test]
    fn a_wrong_arm_is_sound_again_in_the_next_measurement_only() {
        let mut fault = Some("steady:wrong_result".parse().unwrap());
        assert_eq!(Inject::at_step(&mut fault, Phase::Steady, Arm::Eager).unwrap(), Some(Kind::WrongResult));
        Inject::reset(&mut fault, Phase::FinalCheck);
        let found = Inject::at_step(&mut fault, Phase::FinalCheck, Arm::Eager).unwrap();
        assert_eq!(found, Some(Kind::WrongResult));
        Inject::reset(&mut fault, Phase::Equality);
        assert_eq!(Inject::at_step(&mut fault, Phase::Equality, Arm::Eager).unwrap(), None);
    }

    #[test]
    fn mistakes_are_told() {
        for (text, part) in [
            ("capture", "phase:kind"),
            ("nowhere:driver_error", "nowhere"),
            ("capture:fire", "driver_error"),
            ("capture:driver_error:0", "count"),
            ("capture:driver_error:1:2", "too many"),
            ("capture:not_finite", "no place"),
            ("upload:wrong_result", "no place"),
        ] {
            let error = text.parse::<Inject>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn errors_carry_the_exit_code_of_their_phase() {
        let error = |kind: Kind, phase| kind.error(phase).unwrap();
        assert!(matches!(error(Kind::DriverError, Phase::Capture), DeviceError::Capture { .. }));
        assert!(matches!(error(Kind::DriverError, Phase::Steady), DeviceError::Driver { .. }));
        assert!(matches!(error(Kind::OutOfMemory, Phase::Upload), DeviceError::OutOfMemory { .. }));
        assert!(Kind::NotFinite.error(Phase::Steady).is_none());
    }

    #[test]
    fn a_disturbance_has_its_place_in_every_phase_and_is_no_devices_to_make() {
        for kind in Kind::ALL.iter().copied().filter(|k| k.disturbs()) {
            for phase in Phase::ALL.iter().copied() {
                let fault = format!("{phase}:{}", kind.name());
                assert_eq!(fault.parse(), Ok(Inject::new(phase, kind, 1)));
                assert!(matches!(kind.error(phase), Some(DeviceError::Internal(_))), "{fault}");
            }
        }
    }

    /// Whoever tries a fault takes its name from the page.
    #[test]
    fn the_docs_list_every_phase_and_kind() {
        let page = include_str!("../../docs/ci.md");
        for kind in Kind::ALL {
            let row =
                page.lines().find(|l| l.starts_with("| `") && l.contains(&format!("`{}`", kind.name())));
            assert!(row.is_some(), "docs/ci.md has no row of {}", kind.name());
        }
        let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
        let steps: Vec<&str> = Phase::ALL.iter().filter(|p| p.has_steps()).map(|p| p.name()).collect();
        let (last, others) = steps.split_last().unwrap();
        let told =
            format!("Phases: {}; those of steps are {} and {last}.", Phase::names(), others.join(", "));
        assert!(page.contains(&told), "docs/ci.md does not say: {told}");
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(text in ".{0,40}") {
            let _ = text.parse::<Inject>();
        }
    }
}
