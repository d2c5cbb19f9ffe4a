//! Memory plan of one arm: where in the activation arena each buffer lies, and for how long.

use serde::Serialize;

/// Every piece of the arena starts on a multiple of this: what 16-byte vector access and cuBLASLt's
/// best kernels ask for, with room (bytes).
pub const ALIGNMENT: usize = 512;

/// Where a root buffer lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Place {
    /// Memory of its own for the whole run, shared by both arms (weights, state, gradients, constants).
    Persistent,
    /// Bytes from the start of the activation arena.
    Arena(usize),
    /// Pinned host memory.
    Host,
    /// A view: lies in another buffer.
    View,
}

/// One arm's plan. The arms share one arena of the larger need, since no activation outlives a step.
#[derive(Debug, Clone, Default, Serialize)]
pub struct MemoryPlan {
    /// By buffer id.
    pub places: Vec<Place>,
    /// Arena offset of each launch's workspace, by launch index (0 when it needs none).
    pub workspaces: Vec<usize>,
    pub arena_bytes: usize,
    /// Bytes of all `Persistent` buffers.
    pub persistent_bytes: usize,
}
