//! Several processes, one a GPU (DESIGN 8).
//!
//! - [`groups`]: which ranks share what, as Megatron lays them out.

pub mod groups;
pub mod control;

#[cfg(test)]
mod tests;
