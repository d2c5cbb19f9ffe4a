//! The kernels of compute capability 9.0 (wgmma): heads of 128 elements, whole causal sequences without dropout, windows or sinks.

use super::AttnShape;
use crate::device::DeviceError;
use crate::device::cuda::cudnn::Pass;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};

const FORWARD: KernelSource = KernelSource {
    name: "attention/hopper_forward.cu",
    text: concat!(include_str!("hopper.cuh"), include_str!("hopper_forward.cu")),
};
const BACKWARD: KernelSource = KernelSource {
    name: "attention/hopper_backward.cu",
    text: concat!(include_str!("hopper.cuh"), include_str!("hopper_backward.cu")),
};

/// Compute capability of the one architecture that has wgmma (sm_90a).
const WGMMA_CC: u32 = 90;
/// Width of a head.
const HEAD_DIM: usize = 128;
/// Rows of a tile, threads of a block (one warpgroup), bytes of a tile: as in hopper.cuh.
const ROWS: usize = 64;
const THREADS: u32 = 128;
const TILE: usize = ROWS * HEAD_DIM * 2;
/// Tiles in shared memory. Forward: q, two stages of k and v. Backward: two owned, two stages of two, and o where blocks form delta;
/// then two stages of lse and delta rows. 113 KiB: two blocks fill a multiprocessor's 228, of which each takes one for itself.
const FORWARD_TILES: usize = 5;
const BACKWARD_TILES: usize = 6;
const ROW_VALUES: usize = 2 * 2 * ROWS * 4;
/// Blocks of a cluster: the portable sizes (CUDA C++ Programming Guide, thread block clusters) that divide a tile's rows.
const CLUSTERS: [usize; 4] = [8, 4, 2, 1];

/// Whether these kernels take the shape.
pub(super) fn takes(s: &AttnShape, cc: u32) -> bool {
    cc == WGMMA_CC
        && (s.head_dim, s.value_dim()) == (HEAD_DIM, HEAD_DIM)
        && !s.bidirectional
        && !s.sinks
        && s.window().is_none()
        && s.dropout.is_none()
        && s.q_len() == s.kv_len
        && s.positions.chunks[0] == (0, s.kv_len)
}

/// Up to here blocks form delta = do . o themselves. Beyond, a launch before this one is cheaper than reading o for every tile of
/// keys: 32 heads on an H200 take 32.0 us with and 32.2 without at 512 tokens, 56.7 and 53.5 at 768.
const DELTA_TOKENS: usize = 512;

/// Up to here `--attention_backend auto` takes these kernels though cuDNN is there. One H200, 32 query and 8 key heads, launches of a
/// graph over buffers larger than the L2, these kernels against cuDNN's (deterministic, by PyTorch 2.11), in us:
/// tokens      128          512          1024         2048         4096
/// forward     5.1 : 8.2    12.9 : 14.1  27.9 : 31.7  87.0 : 82.5  309 : 267
/// backward    10.0 : 28.4  32.0 : 50.9  81.3 : 114   252 : 283    969 : 798
const FASTER_FORWARD_TOKENS: usize = 1024;
const FASTER_BACKWARD_TOKENS: usize = 2048;
/// Query heads times sequences of that measurement. With more, cuDNN gains: 64 heads at 2048 tokens take it 485 us backward, and
/// these kernels 496; 128 (a batch of 4) at 512 tokens 33.1 us forward, and these 34.8.
const FASTER_HEADS: usize = 32;

/// Whether these kernels were measured to be faster than cuDNN's at such a shape.
pub(super) fn faster_than_cudnn(s: &AttnShape, cc: u32, pass: Pass) -> bool {
    let tokens = match pass {
        Pass::Forward => FASTER_FORWARD_TOKENS,
        Pass::Backward => FASTER_BACKWARD_TOKENS,
    };
    takes(s, cc) && s.kv_len <= tokens && s.batch() * s.q_heads <= FASTER_HEADS
}

fn tiles(s: &AttnShape) -> usize {
    s.kv_len.div_ceil(ROWS)
}

fn config(blocks: usize, shared_bytes: usize) -> Config {
    Config { shared_bytes: shared_bytes as u32, ..Config::linear(blocks, THREADS) }
}

fn shape_params(s: &AttnShape) -> impl Iterator<Item = Param> {
    let sizes = [s.batch(), s.kv_len, s.q_heads, s.kv_heads].map(|x| Param::I32(x as i32));
    sizes.into_iter().chain([Param::F32(s.scale() as f32)])
}

/// `pointers`: q, k, v, o, lse.
pub(super) fn forward(
    s: &AttnShape,
    cuda: &mut CudaPrep,
    pointers: [DevPtr; 5],
) -> Result<Issue, DeviceError> {
    let shared = FORWARD_TILES * TILE;
    let kernel = cuda.kernel(FORWARD, "attention_fwd_wgmma", &[], shared as u32)?;
    let params: Vec<Param> = pointers.map(Param::Ptr).into_iter().chain(shape_params(s)).collect();
    cuda.launch(&kernel, config(tiles(s) * s.batch() * s.q_heads, shared), &params)
}

/// Whether [`backward`] needs no delta from a launch before it.
pub(super) fn forms_delta(s: &AttnShape) -> bool {
    s.kv_len <= DELTA_TOKENS
}

/// Up to here clusters have up to eight blocks, beyond up to four: the fewer start as soon as there is room, while eight are needed
/// for short sequences to fill the device. 32 query and 4 key heads of 4096 tokens on an H200 take 880 us in fours, 1034 in eights.
const WIDE_CLUSTER_TOKENS: usize = 2048;
const LONG_CLUSTER: usize = 4;

/// Query heads of a group that a cluster of blocks takes side by side; the others of the group each takes in turn.
pub(super) fn cluster(s: &AttnShape) -> usize {
    let group = s.q_heads / s.kv_heads.max(1);
    let fits =
        |c: &usize| group.is_multiple_of(*c) && (*c <= LONG_CLUSTER || s.kv_len <= WIDE_CLUSTER_TOKENS);
    CLUSTERS.into_iter().find(fits).unwrap_or(1)
}

/// `pointers`: q, k, v, o, do, lse, delta, dq, dk, dv. One launch.
pub(super) fn backward(
    s: &AttnShape,
    cuda: &mut CudaPrep,
    pointers: [DevPtr; 10],
) -> Result<Issue, DeviceError> {
    let (cluster, delta) = (cluster(s), usize::from(forms_delta(s)));
    let defines = [("CLUSTER", cluster.to_string()), ("DELTA", delta.to_string())];
    let shared = (BACKWARD_TILES + delta) * TILE + ROW_VALUES;
    let kernel = cuda.kernel(BACKWARD, "attention_bwd_wgmma", &defines, shared as u32)?;
    let params: Vec<Param> = pointers.map(Param::Ptr).into_iter().chain(shape_params(s)).collect();
    let blocks = tiles(s) * s.batch() * (s.kv_heads * cluster + s.q_heads);
    cuda.launch(&kernel, config(blocks, shared), &params)
}
