//! mbperf: is a CUDA graph faster than eager for this model recipe, by how much, and is the answer to be trusted?

pub mod args;
pub mod bench_ops;
pub mod capture;
pub mod commands;
pub mod compare;
pub mod compile;
pub mod config;
pub mod device;
pub mod doctor;
pub mod dryrun;
pub mod dump;
pub mod extrapolate;
pub mod features;
pub mod host_model;
pub mod keys;
pub mod measure;
pub mod ops;
pub mod overrides;
pub mod program;
pub mod recipe;
pub mod report;
pub mod rules;
pub mod run;
pub mod selftest;
pub mod sweep;
pub mod workloads;
