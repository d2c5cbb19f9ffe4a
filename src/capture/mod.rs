//! Capture plan: implementation and scope cut a program's launches into segments, each eager or one graph.

use crate::program::Program;
use crate::program::memory::MemoryPlan;
use std::ops::Range;
use std::sync::Arc;

/// A run of launches that is issued launch by launch, or captured and replayed as one graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Indices into `Program::launches`, in order.
    pub launches: Range<usize>,
    /// `None`: eager. Segments with equal launches and buffers share one graph and carry the same id.
    pub graph: Option<usize>,
    /// What to call it in messages: `layer 3 forward attn+mlp`, `iteration`.
    pub label: String,
}

/// One arm, ready for an executor. Buffers that survive a step have the same ids in both arms.
#[derive(Debug, Clone)]
pub struct ArmPlan {
    pub program: Arc<Program>,
    /// Cover all launches, in order.
    pub segments: Vec<Segment>,
    pub memory: MemoryPlan,
}

impl ArmPlan {
    /// Distinct graphs.
    pub fn graphs(&self) -> usize {
        self.segments.iter().filter_map(|s| s.graph).max().map_or(0, |g| g + 1)
    }
}

/// Both arms of a run. Without graphs (`none`) there is only the eager one.
#[derive(Debug, Clone)]
pub struct RunPlan {
    pub eager: ArmPlan,
    pub graph: Option<ArmPlan>,
    /// Base of every random value.
    pub seed: u64,
}
