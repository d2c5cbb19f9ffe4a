//! The kernels of compute capability 9.0 (wgmma): heads of 128, one block a multiprocessor. `delta_prepare` is that of every chip.

use super::launch::{defines, shape};
use super::{CHUNK, DeltaShape};
use crate::device::DeviceError;
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue, KernelSource};
use crate::ops::chunked::Call;

macro_rules! source {
    ($file:literal) => {
        KernelSource {
            name: concat!("delta_net/", $file),
            text: concat!(include_str!("shape.cuh"), include_str!("wgmma.cuh"), include_str!($file)),
        }
    };
}
const FORWARD: KernelSource = source!("hopper_forward.cu");
const BACK: KernelSource = source!("hopper_back.cu");
const GRADIENTS: KernelSource = source!("hopper_gradients.cu");

/// Compute capability of the one architecture that has wgmma (sm_90a).
const WGMMA_CC: u32 = 90;
/// Width of a q, k and v head.
const HEAD_DIM: usize = 128;
/// Blocks of the passes that share a value head, each with 64 columns of V: the rows of a warpgroup's product.
const PASS_SLICES: usize = HEAD_DIM / 64;
const FORWARD_THREADS: usize = 256;
const BACK_THREADS: usize = 256;
const GRADIENT_THREADS: usize = 256;
/// Dynamic shared memory, as the kernels' own sums of their tiles (PASS_SHARED, BACK_SHARED, GRADIENTS_SHARED).
const FORWARD_SHARED: usize = 223_264;
const BACK_SHARED: usize = 219_184;
const GRADIENT_SHARED: usize = 227_136;
/// Blocks of the gradients' launch at least, where key heads allow it: nearly one for each of the 132 multiprocessors of an H200. With
/// fewer, longer ones the first loads of a block are paid for less often.
const GRADIENT_BLOCKS: usize = 128;
/// Key heads that a block of that launch takes in turn at most.
const HEAD_RUNS: [usize; 4] = [8, 4, 2, 1];

/// Whether these kernels take the shape.
pub(super) fn takes(s: &DeltaShape, cc: u32) -> bool {
    cc == WGMMA_CC && (s.key_dim, s.value_dim, CHUNK) == (HEAD_DIM, HEAD_DIM, 64)
}

fn issue(
    s: &DeltaShape,
    cuda: &mut CudaPrep,
    call: Call,
    more: &[(&'static str, String)],
) -> Result<Issue, DeviceError> {
    call.issue(&[&defines(s)[..], more].concat(), shape(s), cuda)
}

/// One of the passes, from the first chunk to the last or back.
fn pass(
    s: &DeltaShape,
    cuda: &mut CudaPrep,
    (source, entry): (KernelSource, &'static str),
    (threads, shared): (usize, usize),
    pointers: &[DevPtr],
) -> Result<Issue, DeviceError> {
    let grid = [s.batch * s.value_heads * PASS_SLICES, 1, 1];
    issue(s, cuda, Call { source, entry, grid, threads, shared, pointers, ints: &[] }, &[])
}

/// `pointers`: qkv, c, beta, rq, rk, T, the masked q k^T, o, states.
pub(super) fn forward(
    s: &DeltaShape,
    cuda: &mut CudaPrep,
    pointers: &[DevPtr],
) -> Result<Issue, DeviceError> {
    pass(s, cuda, (FORWARD, "delta_pass_wgmma"), (FORWARD_THREADS, FORWARD_SHARED), pointers)
}

/// `pointers`: qkv, c, beta, rq, rk, T, the masked q k^T, do, the states' gradients, dqkv.
pub(super) fn back(s: &DeltaShape, cuda: &mut CudaPrep, pointers: &[DevPtr]) -> Result<Issue, DeviceError> {
    pass(s, cuda, (BACK, "delta_pass_back_wgmma"), (BACK_THREADS, BACK_SHARED), pointers)
}

/// Key heads that a block of the gradients takes in turn.
fn head_run(s: &DeltaShape) -> usize {
    let enough = |run: &usize| s.batch * s.chunks() * s.key_heads.div_ceil(*run) >= GRADIENT_BLOCKS;
    HEAD_RUNS.into_iter().find(enough).unwrap_or(1)
}

/// `pointers`: those of `delta_gradients`.
pub(super) fn gradients(
    s: &DeltaShape,
    cuda: &mut CudaPrep,
    pointers: &[DevPtr],
) -> Result<Issue, DeviceError> {
    let run = head_run(s);
    let call = Call {
        source: GRADIENTS,
        entry: "delta_gradients_wgmma",
        grid: [s.batch * s.chunks() * s.key_heads.div_ceil(run), 1, 1],
        threads: GRADIENT_THREADS,
        shared: GRADIENT_SHARED,
        pointers,
        ints: &[s.projected_width()],
    };
    issue(s, cuda, call, &[("HEAD_RUN", run.to_string())])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What each kernel says of its own shared memory is compiled (`static_assert`s there); here, that a block of 9.0 has it.
    #[test]
    fn tiles_fit_a_hopper_block() {
        const MAX_SHARED: usize = 227 * 1024;
        for bytes in [FORWARD_SHARED, BACK_SHARED, GRADIENT_SHARED] {
            assert!(bytes <= MAX_SHARED, "{bytes}");
        }
    }

    #[test]
    fn a_block_takes_as_many_key_heads_as_leave_enough_blocks() {
        let of = |batch, seq, key_heads| {
            head_run(&DeltaShape {
                batch,
                seq,
                key_heads,
                value_heads: 2 * key_heads,
                key_dim: 128,
                value_dim: 128,
            })
        };
        assert_eq!((of(1, 4096, 16), of(2, 4096, 16), of(1, 4096, 2), of(1, 2048, 16)), (8, 8, 1, 4));
    }
}
