//! What a measurement may cost and how it judges. Every default stands here.

use crate::device::Arm;
use crate::device::host::HostCosts;

/// Settings of one measurement of one program.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Time for the timed part (settling, blocks, `_sync` blocks), seconds. `--max_time`.
    pub max_time_s: f64,
    /// Relative difference below which the arms count as equivalent. `--margin`.
    pub margin: f64,
    /// Steps of each arm in the equality check; raised to what capture needs.
    pub equality_steps: usize,
    /// Uncaptured steps of the graph arm before capture. `--cuda_graph_warmup_steps`.
    pub warmup_steps: usize,
    /// `-ms N`: N steps of each arm in all, warm-up, capture and the equality check counted; replaces
    /// the stop rule and leaves out the `_sync` blocks.
    pub max_steps: Option<usize>,
    /// False (implementation `none`): the eager arm alone.
    pub graph: bool,
    /// `--aa`: an arm against itself.
    pub aa: Option<Arm>,
    /// Take device-busy times in a profiling pass at the end; only the last measurement of a process may.
    pub busy: bool,
    /// `--host_model`: host times for blocks of their own after the bare ones.
    pub host_costs: Option<HostCosts>,
    /// Reads clocks, power and neighbours once a block. Off to see what that costs (`--no_samplers`).
    pub samplers: bool,
    /// Timed steps of a block, in place of the rule by time: to see that it does not matter (`--block_steps`).
    pub block_steps: Option<usize>,
    /// Share of its step time by which side 1 is made longer on the device, to see that it is found; 0: none
    /// (`--spin_percent`).
    pub device_spin: f64,
}

/// DESIGN 5.
pub const DEFAULT_MAX_TIME_S: f64 = 20.0;
/// The CPU device proves that the flow works; its times are no result.
pub const DEFAULT_MAX_TIME_CPU_S: f64 = 3.0;
/// Differences under 1 % are below what clocks and neighbours do to a GPU.
pub const DEFAULT_MARGIN: f64 = 0.01;
/// Megatron's default of warm-up steps before capture.
pub const DEFAULT_WARMUP_STEPS: usize = 3;
/// Replays that equality needs at least: the first, and one from each state it leaves behind.
const MIN_REPLAYS: usize = 2;
/// Replays of the equality check by default.
const EQUALITY_REPLAYS: usize = 4;
/// Fewest steps of each arm after the equality check.
const MIN_TIMED_STEPS: usize = 1;
/// Shortest block: one that fills the pipe, one that is timed, one that drains it. A `-ms` that leaves fewer
/// steps has them waited for one by one.
pub(super) const MIN_BLOCK_STEPS: usize = 3;

impl Default for Options {
    fn default() -> Self {
        Self {
            max_time_s: DEFAULT_MAX_TIME_S,
            margin: DEFAULT_MARGIN,
            equality_steps: DEFAULT_WARMUP_STEPS + EQUALITY_REPLAYS,
            warmup_steps: DEFAULT_WARMUP_STEPS,
            max_steps: None,
            graph: true,
            aa: None,
            busy: true,
            host_costs: None,
            samplers: true,
            block_steps: None,
            device_spin: 0.0,
        }
    }
}

impl Options {
    /// The arm on each side of the comparison; one side when there is nothing to compare.
    pub fn sides(&self) -> Vec<Arm> {
        match self.aa {
            Some(arm) => vec![arm, arm],
            None if self.graph => vec![Arm::Eager, Arm::Graph],
            None => vec![Arm::Eager],
        }
    }

    /// Whether graphs are captured.
    pub fn captures(&self) -> bool {
        self.graph && self.aa != Some(Arm::Eager)
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
        let replays = if self.captures() { self.warmup_steps + EQUALITY_REPLAYS } else { 1 };
        let wanted = self.equality_steps.max(replays);
        match self.max_steps {
            Some(n) => wanted
                .min(n.saturating_sub(MIN_BLOCK_STEPS))
                .max(self.wanted_equality_steps().min(n.saturating_sub(MIN_TIMED_STEPS))),
            None => wanted,
        }
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
        assert_eq!(options.equality_steps(), 34);
    }

    #[test]
    fn nonsense_is_refused() {
        let with = |max_time_s, margin| Options { max_time_s, margin, ..Options::default() }.check();
        assert!(with(f64::NAN, 0.01).is_err() && with(0.0, 0.01).is_err() && with(-1.0, 0.01).is_err());
        assert!(with(1.0, 0.0).is_err() && with(1.0, f64::NAN).is_err() && with(1.0, 1.0).is_err());
        assert!(Options { aa: Some(Arm::Graph), graph: false, ..Options::default() }.check().is_err());
    }
}
