//! What a measurement may cost and how it judges. Every default stands here.

use crate::device::Arm;
use crate::device::host::HostCosts;

/// When the card is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Samplers {
    /// At the end of each block, or pair of interleaved blocks.
    EveryBlock,
    /// `--alternate_samplers`: not after every second pair, to see what reading costs the steps that follow.
    EverySecondPair,
    /// `--no_samplers`.
    Off,
}

/// Settings of one measurement of one program.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Time for the timed part (settling, blocks, `_sync` blocks, the final check), seconds. `--max_time`.
    pub max_time_s: f64,
    /// What that time may grow to where it holds too few pairs for an interval and this holds enough; `None`: not
    /// at all, as with a `--max_time` that was given.
    pub longest_time_s: Option<f64>,
    /// Relative difference below which the arms count as equivalent. `--margin`.
    pub margin: f64,
    /// Steps of each arm in the equality check, raised to what capture needs. `None`: warm-up and four replays, two
    /// where steps are long. `--equality_steps`.
    pub equality_steps: Option<usize>,
    /// Uncaptured steps of the graph arm before capture. `--cuda_graph_warmup_steps`.
    pub warmup_steps: usize,
    /// `-ms N`: N steps of each arm in all, warm-up, capture and the equality check counted; replaces
    /// the stop rule and leaves out the `_sync` blocks.
    pub max_steps: Option<usize>,
    /// False (implementation `none`): the eager arm alone.
    pub graph: bool,
    /// `--aa`: an arm against itself.
    pub aa: Option<Arm>,
    /// One arm of two, where they do not fit in memory together ([`super::in_turn`]).
    pub alone: Option<Arm>,
    /// Take device-busy times in a profiling pass at the end; only the last measurement of a process may.
    pub busy: bool,
    /// Record one step of each arm kernel by kernel in that pass, [`Outcome::profiles`](super::Outcome::profiles).
    pub profile: bool,
    /// `--host_model`: host times for blocks of their own after the bare ones.
    pub host_costs: Option<HostCosts>,
    /// When clocks, power and neighbours are read.
    pub samplers: Samplers,
    /// Timed steps of a block, in place of the rule by time: to see that it does not matter (`--block_steps`).
    pub block_steps: Option<usize>,
    /// Share of its step time by which side 1 is made longer on the device, to see that it is found; 0: none
    /// (`--spin_percent`).
    pub device_spin: f64,
}

/// Enough for the eight pairs that an interval needs, up to steps of a second or so.
pub const DEFAULT_MAX_TIME_S: f64 = 20.0;
/// Eight pairs of steps of 2.4 s (of 1.7 s where the host is the limit) fit into a minute. Longer steps stay at the
/// default time, undecided: a user would not wait for so little. It also bounds a whole run, which a
/// run of 48 layers keeps: its steps of half a second need no more than the default.
pub const LONGEST_MAX_TIME_S: f64 = 60.0;
/// The CPU device proves that the flow works; its times are no result.
pub const DEFAULT_MAX_TIME_CPU_S: f64 = 3.0;
/// Differences under 1 % are below what clocks and neighbours do to a GPU.
pub const DEFAULT_MARGIN: f64 = 0.01;
/// Megatron's default of warm-up steps before capture.
pub const DEFAULT_WARMUP_STEPS: usize = 3;
/// Replays that equality needs at least: the first, and one from each state it leaves behind.
const MIN_REPLAYS: usize = 2;
/// Replays of the equality check by default, and where steps are long.
const EQUALITY_REPLAYS: usize = 4;
const EQUALITY_REPLAYS_OF_LONG_STEPS: usize = MIN_REPLAYS;
/// Steps from here on are long: a pair of plain blocks takes 1.5 s, so that 20 s hold 12 pairs or fewer.
pub(super) const LONG_STEP_MS: f64 = 250.0;
/// Steps of each arm in the final check: the second starts from what the first left behind.
const FINAL_STEPS: usize = 2;
/// Share of the time, or of `-ms`, that the final check may take at most.
pub(super) const FINAL_SHARE: f64 = 0.1;
/// Fewest steps of each arm after the equality check.
const MIN_TIMED_STEPS: usize = 1;
/// Shortest block: one that fills the pipe, one that is timed, one that drains it. A `-ms` that leaves fewer
/// steps has them waited for one by one.
pub(super) const MIN_BLOCK_STEPS: usize = 3;

impl Default for Options {
    fn default() -> Self {
        Self {
            max_time_s: DEFAULT_MAX_TIME_S,
            longest_time_s: Some(LONGEST_MAX_TIME_S),
            margin: DEFAULT_MARGIN,
            equality_steps: None,
            warmup_steps: DEFAULT_WARMUP_STEPS,
            max_steps: None,
            graph: true,
            aa: None,
            alone: None,
            busy: true,
            profile: false,
            host_costs: None,
            samplers: Samplers::EveryBlock,
            block_steps: None,
            device_spin: 0.0,
        }
    }
}

impl Options {
    /// `max_time_s` and `longest_time_s` for a `--max_time`, or for none: a time that was given is kept to the letter.
    pub fn times(given_s: Option<f64>, on_gpu: bool) -> (f64, Option<f64>) {
        match given_s {
            Some(s) => (s, None),
            None if on_gpu => (DEFAULT_MAX_TIME_S, Some(LONGEST_MAX_TIME_S)),
            None => (DEFAULT_MAX_TIME_CPU_S, None),
        }
    }

    /// The time that timing may take at most, in ms.
    pub(super) fn longest_ms(&self) -> f64 {
        self.longest_time_s.unwrap_or(0.0).max(self.max_time_s) * 1e3
    }

    /// The arm on each side of the comparison; one side when there is nothing to compare.
    pub fn sides(&self) -> Vec<Arm> {
        match self.aa {
            _ if self.alone.is_some() => self.alone.into_iter().collect(),
            Some(arm) => vec![arm, arm],
            None if self.graph => vec![Arm::Eager, Arm::Graph],
            None => vec![Arm::Eager],
        }
    }

    /// Whether graphs are captured.
    pub fn captures(&self) -> bool {
        self.graph && self.aa != Some(Arm::Eager) && self.alone != Some(Arm::Eager)
    }

    /// Steps that equality needs if there is room for them.
    fn wanted_equality_steps(&self) -> usize {
        if self.captures() { self.warmup_steps + MIN_REPLAYS } else { 1 }
    }

    /// Fewest `-ms`: warm-up, capture with the first replay, and one steady step, as the harness counts them.
    fn fewest_max_steps(&self) -> usize {
        if self.captures() { self.warmup_steps + 1 + MIN_TIMED_STEPS } else { 1 + MIN_TIMED_STEPS }
    }

    /// Steps of each arm in the equality check: warm-up and four replays, fewer when `-ms` is short.
    pub fn equality_steps(&self) -> usize {
        let warmup = if self.captures() { self.warmup_steps } else { DEFAULT_WARMUP_STEPS };
        let wanted = match self.equality_steps {
            Some(given) => given.max(self.wanted_equality_steps()),
            None => warmup + EQUALITY_REPLAYS,
        };
        match self.max_steps {
            Some(n) => wanted
                .min(n.saturating_sub(MIN_BLOCK_STEPS))
                .max(self.wanted_equality_steps().min(n.saturating_sub(MIN_TIMED_STEPS))),
            None => wanted,
        }
    }

    /// The same where steps are long, which is known after the second. A number that was given is kept, and so is
    /// `-ms`, which counts them.
    pub(super) fn equality_steps_if_long(&self) -> usize {
        let whole = self.equality_steps();
        if self.equality_steps.is_some() || self.max_steps.is_some() {
            return whole;
        }
        whole - EQUALITY_REPLAYS + EQUALITY_REPLAYS_OF_LONG_STEPS
    }

    /// Steps of each arm in the final check; 0: nothing to compare, or a `-ms` too short to give them.
    pub(super) fn final_steps(&self) -> usize {
        let room = self.max_steps.is_none_or(|n| FINAL_STEPS as f64 <= FINAL_SHARE * n as f64);
        if self.sides().len() == 2 && room { FINAL_STEPS } else { 0 }
    }

    /// What is wrong with the settings, with the remedy: exit 2.
    pub fn check(&self) -> Result<(), String> {
        if !(self.max_time_s.is_finite() && self.max_time_s > 0.0) {
            return Err(format!("--max_time {} is not a time: give seconds above 0", self.max_time_s));
        }
        if !(self.margin > 0.0 && self.margin < 1.0) {
            return Err(format!("--margin {} must lie between 0 and 1, e.g. 0.01 for 1 %", self.margin));
        }
        if self.aa == Some(Arm::Graph) && !self.graph {
            return Err("--aa graph needs graphs: give --cuda_graph_impl, or use --aa eager".into());
        }
        if !(0.0..=10.0).contains(&self.device_spin) {
            return Err(format!("--spin_percent {}: give 0 to 1000", self.device_spin * 100.0));
        }
        let least = self.fewest_max_steps();
        if let Some(n) = self.max_steps.filter(|n| *n < least) {
            let before = if self.captures() {
                format!("{} warm-up steps and the first replay", self.warmup_steps)
            } else {
                "the first step".to_owned()
            };
            return Err(format!(
                "-ms {n} leaves no steady step: {before} come before it; give -ms {least} or more (50 is the \
                 harness's default), or leave it out"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_runs_give_up_replays_before_steady_steps() {
        let ms = |n| Options { max_steps: Some(n), ..Options::default() };
        assert_eq!(Options::default().equality_steps(), 7);
        assert_eq!(ms(50).equality_steps(), 7);
        assert_eq!(ms(9).equality_steps(), 6);
        for (n, equality) in [(8, 5), (7, 5), (6, 5), (5, 4)] {
            assert_eq!(ms(n).equality_steps(), equality, "-ms {n}");
            assert!(ms(n).check().is_ok(), "-ms {n}");
        }
        assert!(ms(4).check().unwrap_err().contains("-ms 5"));
        assert!(ms(0).check().is_err());
        let eager = |n| Options { max_steps: Some(n), graph: false, ..Options::default() };
        assert!(eager(2).check().is_ok() && eager(4).check().is_ok());
        assert!(eager(1).check().unwrap_err().contains("-ms 2"));
    }

    #[test]
    fn warmup_raises_the_equality_steps() {
        let options = Options { warmup_steps: 30, ..Options::default() };
        assert_eq!((options.equality_steps(), options.equality_steps_if_long()), (34, 32));
    }

    #[test]
    fn long_steps_are_compared_over_fewer_replays_unless_told() {
        assert_eq!(Options::default().equality_steps_if_long(), 5);
        assert_eq!(Options { aa: Some(Arm::Eager), ..Options::default() }.equality_steps_if_long(), 5);
        let given = |n| Options { equality_steps: Some(n), ..Options::default() };
        for (asked, got) in [(2, 5), (5, 5), (6, 6), (20, 20)] {
            assert_eq!((given(asked).equality_steps(), given(asked).equality_steps_if_long()), (got, got));
        }
        assert_eq!(Options { max_steps: Some(50), ..Options::default() }.equality_steps_if_long(), 7);
    }

    #[test]
    fn a_time_that_is_given_never_grows() {
        assert_eq!(Options::times(Some(5.0), true), (5.0, None));
        assert_eq!(Options::times(None, true), (20.0, Some(60.0)));
        assert_eq!(Options::times(None, false), (3.0, None));
        let given = Options { max_time_s: 90.0, longest_time_s: None, ..Options::default() };
        assert_eq!((given.longest_ms(), Options::default().longest_ms()), (90e3, 60e3));
    }

    #[test]
    fn a_short_ms_gives_no_steps_to_the_final_check() {
        let ms = |n| Options { max_steps: Some(n), ..Options::default() }.final_steps();
        assert_eq!((ms(8), ms(19), ms(20), ms(50)), (0, 0, 2, 2));
        assert_eq!(Options::default().final_steps(), 2);
        assert_eq!(Options { graph: false, ..Options::default() }.final_steps(), 0);
    }

    #[test]
    fn nonsense_is_refused() {
        let with = |max_time_s, margin| Options { max_time_s, margin, ..Options::default() }.check();
        assert!(with(f64::NAN, 0.01).is_err() && with(0.0, 0.01).is_err() && with(-1.0, 0.01).is_err());
        assert!(with(1.0, 0.0).is_err() && with(1.0, f64::NAN).is_err() && with(1.0, 1.0).is_err());
        assert!(Options { aa: Some(Arm::Graph), graph: false, ..Options::default() }.check().is_err());
    }
}
