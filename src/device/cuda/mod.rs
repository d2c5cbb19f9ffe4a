//! The CUDA device: everything that calls the driver or a CUDA library.

mod arm;
mod busy;
mod capture;
pub mod context;
mod cost;
pub mod cudnn;
pub mod disk;
pub mod executor;
mod graph;
mod health;
pub mod kernels;
mod lanes;
mod launch;
pub mod libraries;
pub mod matmul;
mod memory;
pub mod nccl;
pub mod nvrtc;
mod nvtx;
pub mod per_expert;
mod plan;
pub mod prep;
mod session;
pub mod signature;
mod symbols;
mod tuner;
pub mod work;
