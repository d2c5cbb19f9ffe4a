//! workloads

pub mod share;
