//! The CUDA device: everything that calls the driver or a CUDA library.

pub mod kernels;
pub mod matmul;
pub mod prep;
