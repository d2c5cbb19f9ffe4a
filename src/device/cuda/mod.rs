//! The CUDA device: everything that calls the driver or a CUDA library.

pub mod context;
pub mod disk;
mod graph;
pub mod kernels;
pub mod libraries;
pub mod matmul;
pub mod nvrtc;
pub mod prep;
pub mod signature;
mod symbols;
mod tuner;
pub mod work;
