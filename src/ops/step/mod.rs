//! What frames a step: its words (step, micro-batch, learning rate), synthetic tokens, given inputs, memory
//! set and copied.

mod memory;
mod tokens;
mod words;

pub use memory::{Copy, RandomFill, Zero};
pub use tokens::TokenGen;
pub use words::{MicroBatchSet, StepBegin, StepEnd};

use crate::device::cuda::prep::KernelSource;

const SOURCE: KernelSource = KernelSource { name: "step/kernel.cu", text: include_str!("kernel.cu") };
/// Threads of an elementwise block.
const THREADS: u32 = 256;
