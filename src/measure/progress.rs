//! What a measurement tells while it runs, and where its steps go.

use super::outcome::StepRecord;
use crate::ranks::control::RankStep;
use std::sync::atomic::AtomicBool;

/// State of the timed part after a pair of blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    pub elapsed_s: f64,
    /// 0 when the number of steps is fixed (`-ms`).
    pub max_time_s: f64,
    pub pairs: usize,
    /// Half-width of the 95 % interval of the log-ratio; `None` until it can be given.
    pub half_width: Option<f64>,
    pub speedup: Option<f64>,
}

/// Hears how a measurement goes on. Called between blocks, never inside one.
pub trait Progress {
    /// A new part begins, e.g. `capture`.
    fn stage(&mut self, what: &str);
    fn update(&mut self, update: &Update);
}

/// Takes finished steps, block by block. An error ends the measurement.
pub trait StepSink {
    fn steps(&mut self, steps: &[StepRecord]) -> std::io::Result<()>;

    /// The same steps as every rank saw them, rank 0 first; of runs of several processes alone.
    fn rank_steps(&mut self, _steps: &[StepRecord], _of_ranks: &[Vec<RankStep>]) -> std::io::Result<()> {
        Ok(())
    }
}

/// Tells nothing, keeps nothing.
#[derive(Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn stage(&mut self, _: &str) {}
    fn update(&mut self, _: &Update) {}
}

impl StepSink for Silent {
    fn steps(&mut self, _: &[StepRecord]) -> std::io::Result<()> {
        Ok(())
    }
}

/// The measurement's connections to the outside.
pub struct Hooks<'a> {
    /// Set by a signal handler; looked at between steps.
    pub interrupt: &'a AtomicBool,
    pub progress: &'a mut dyn Progress,
    pub sink: &'a mut dyn StepSink,
}
