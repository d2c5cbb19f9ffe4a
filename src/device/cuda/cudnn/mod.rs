//! Attention by cuDNN's backend graph API: a graph of plain operations that the library's fused attention engines
//! recognise, planned once, executed by one library call a launch.
//!
//! Layers, from below: `error`, `descriptor` (one object of the library), `graph` (tensors and operations),
//! `sdpa` (attention as such a graph), `engine` (heuristics and plans), `plans` (one session's plans, their
//! memory, bound calls), `choice` (cuDNN or our own kernels). All but the last may fail: there are other kernels.

mod choice;
mod descriptor;
mod engine;
mod error;
mod graph;
mod plans;
mod sdpa;
#[cfg(test)]
mod tests;

pub use choice::{AttentionBackend, AttentionChoice};
pub(super) use choice::{AttentionUse, choose};
pub use error::{CudnnError, DEBUG_VARIABLE};
pub use plans::{Failure, SdpaCall, Sdpas};
pub use sdpa::{Pass, SdpaSpec};
