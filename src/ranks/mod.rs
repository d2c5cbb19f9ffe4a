//! Several processes, one a GPU.
//!
//! - [`launch`]: who starts them, by which variables.
//! - [`rendezvous`]: how they find each other, and who is missing.
//! - [`groups`]: which ranks share what, as Megatron lays them out; which groups are real.
//! - [`control`]: commands, answers, signs of life, the end.
//! - [`lead`], [`follow`]: rank 0's executor, and the others'.
//!
//! The collectives themselves are ops (`ops/collective`), over TCP on the CPU (`device/cpu/tcp.rs`) and NCCL on GPUs
//! (`device/cuda/nccl.rs`); what a rank holds and sums is decided in `workloads/place.rs`.

pub mod control;
pub mod follow;
pub mod groups;
pub mod launch;
pub mod lead;
pub mod rendezvous;
#[cfg(test)]
mod tests;
