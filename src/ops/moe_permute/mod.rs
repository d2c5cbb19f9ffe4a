//! Token permutation for experts: the stable sort by expert and the row copies that follow it.
//!
//! A pair (t, k) is token t's k-th choice, index t*K+k. Rows are the pairs sorted by bin (expert). Everything
//! stays on the device: offsets are read there by the products that follow.

mod chunks;
mod rows;
mod sort;
#[cfg(test)]
mod tests;

pub use chunks::ChunkMap;
pub use rows::{CombineRows, GatherRows};
pub use sort::{Capacity, MoeSort, Tally};

/// Counters of all bins lie in shared memory, 32 warps of them in the sort.
pub const MAX_BINS: usize = 512;
