//! The kernels of narrow windows: heads of 64 elements, whole sequences without dropout, with sinks or without.
//!
//! Query rows and keys are taken in strips of 16 (a tensor-core fragment), so (window + 16) / window of the visible pairs are
//! computed where tiles of 128 rows and 64 keys compute 2.5 times as many; query heads that share a key head share what is loaded.

use super::AttnShape;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};

const FORWARD: KernelSource = KernelSource {
    name: "attention/window_forward.cu",
    text: concat!(include_str!("window.cuh"), include_str!("window_forward.cu")),
};
const BACKWARD: KernelSource = KernelSource {
    name: "attention/window_backward.cu",
    text: concat!(include_str!("window.cuh"), include_str!("window_backward.cu")),
};

/// Widest window: a row strip's scores, 16 x 144, take 72 registers of the forward kernel's 128.
const MAX_WINDOW: usize = 128;
/// As in window.cuh: width of a head, rows of a strip, bytes of a row, warps of a forward or dq block.
const HEAD_DIM: usize = 64;
const STRIP: usize = 16;
const LINE: usize = HEAD_DIM * 2;
const WARPS: usize = 8;
/// Warps of a dk/dv block, a strip of keys each: the largest with which there are enough blocks.
const DKV_WARPS: [usize; 4] = [8, 4, 2, 1];
/// Enough blocks: not much less than two on each of an H200's 132 multiprocessors. 32 tiles of 128 rows and 8 key heads (gpt_oss at
/// 4096 tokens) are one round of forward and dq blocks, and two of dk/dv blocks, of which one fills a multiprocessor.
const BLOCKS_WANTED: usize = 256;
/// Most blocks in the y and z dimensions of a grid.
const MAX_GRID_YZ: usize = 65_535;

/// Whether these kernels take the shape. A block needs up to 132 KiB of shared memory (see `Tiles::of` for who has it).
pub(super) fn takes(s: &AttnShape, cc: u32) -> bool {
    matches!(cc, 80 | 87 | 90..=119)
        && (s.head_dim, s.value_dim()) == (HEAD_DIM, HEAD_DIM)
        && s.window().is_some_and(|w| w <= MAX_WINDOW)
        && s.dropout.is_none()
        && s.q_len() == s.kv_len
        && s.positions.chunks[0] == (0, s.kv_len)
        && s.q_heads.max(s.batch()) <= MAX_GRID_YZ
}

fn group(s: &AttnShape) -> usize {
    s.q_heads / s.kv_heads.max(1)
}

fn tiles(s: &AttnShape, warps: usize) -> usize {
    s.kv_len.div_ceil(warps * STRIP)
}

/// Strips before its own of which a strip of queries sees keys.
fn back(s: &AttnShape) -> usize {
    (s.window().unwrap_or(1) - 1).div_ceil(STRIP)
}

/// EXPERIMENT, to be taken out once measured: a choice by an environment variable.
fn forced(variable: &str) -> Option<usize> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Query heads that a forward or dq block takes in turn: the group, or the largest part of it with which there are enough blocks.
pub(super) fn heads(s: &AttnShape) -> usize {
    if let Some(heads) = forced("MBPERF_WINDOW_HEADS") {
        return heads.min(group(s));
    }
    let blocks = tiles(s, WARPS) * s.batch() * s.q_heads;
    let enough = |h: &usize| group(s).is_multiple_of(*h) && blocks / h >= BLOCKS_WANTED;
    (1..=group(s)).rev().find(enough).unwrap_or(1)
}

/// Warps of a dk/dv block.
pub(super) fn dkv_warps(s: &AttnShape) -> usize {
    if let Some(warps) = forced("MBPERF_WINDOW_DKV_WARPS") {
        return warps;
    }
    let enough = |w: &usize| tiles(s, *w) * s.batch() * s.kv_heads >= BLOCKS_WANTED;
    DKV_WARPS.into_iter().find(enough).unwrap_or(1)
}

fn defines(s: &AttnShape) -> Vec<(&'static str, String)> {
    let all =
        [("WINDOW", s.window().unwrap_or(1)), ("SINKS", usize::from(s.sinks)), ("DKV_WARPS", dkv_warps(s))];
    all.map(|(name, value)| (name, value.to_string())).into()
}

/// Shared memory of a block whose rows see, or whose keys are seen by, `back` strips more than its own: two tiles of those, and
/// `strips` strips a warp.
fn resident(s: &AttnShape, strips: usize) -> usize {
    (2 * (WARPS + back(s)) + strips * WARPS) * STRIP * LINE
}

fn config(s: &AttnShape, x: usize, y: usize, warps: usize, shared_bytes: usize) -> Config {
    let grid = Config::linear(x, (warps * 32) as u32);
    Config { grid: [grid.grid[0], y as u32, s.batch() as u32], shared_bytes: shared_bytes as u32, ..grid }
}

fn params(s: &AttnShape, pointers: impl IntoIterator<Item = DevPtr>, heads: Option<usize>) -> Vec<Param> {
    let int = |x: usize| Param::I32(x as i32);
    let mut params: Vec<Param> = pointers.into_iter().map(Param::Ptr).collect();
    params.extend([s.kv_len, s.q_heads, s.kv_heads].map(int));
    params.extend(heads.map(int));
    params.push(Param::F32(s.scale() as f32));
    params
}

/// One launch.
pub(super) fn forward(
    s: &AttnShape,
    cuda: &mut CudaPrep,
    [q, k, v]: [DevPtr; 3],
    sinks: Option<DevPtr>,
    [o, lse]: [DevPtr; 2],
) -> Result<Issue, DeviceError> {
    let entry = if s.sinks { "attention_fwd_window_sinks" } else { "attention_fwd_window" };
    let (shared, heads) = (resident(s, 2), heads(s));
    let kernel = cuda.kernel(FORWARD, entry, &defines(s), shared as u32)?;
    let pointers = [q, k, v].into_iter().chain(sinks).chain([o, lse]);
    let config = config(s, tiles(s, WARPS), s.q_heads / heads, WARPS, shared);
    cuda.launch(&kernel, config, &params(s, pointers, Some(heads)))
}

/// `inputs`: q, k, v, o, lse, do. Two launches: dq, which writes delta into the workspace, then dk and dv with the sinks' gradients.
pub(super) fn backward(
    s: &AttnShape,
    cuda: &mut CudaPrep,
    [q, k, v, o, lse, d_o]: [DevPtr; 6],
    sinks: Option<(DevPtr, DevPtr)>,
    delta: DevPtr,
    [dq, dk, dv]: [DevPtr; 3],
) -> Result<Issue, DeviceError> {
    let (shared, heads, defines) = (resident(s, 3), heads(s), defines(s));
    let kernel = cuda.kernel(BACKWARD, "attention_dq_window", &defines, shared as u32)?;
    let grid = config(s, tiles(s, WARPS), s.q_heads / heads, WARPS, shared);
    let of_dq = cuda.launch(&kernel, grid, &params(s, [q, k, v, o, lse, d_o, delta, dq], Some(heads)))?;

    let warps = dkv_warps(s);
    let queries = (warps + back(s)) * STRIP;
    // Two stages of q and do rows, lse and delta.
    let shared = 2 * 2 * queries * (LINE + 4);
    let entry = if s.sinks { "attention_dkv_window_sinks" } else { "attention_dkv_window" };
    let kernel = cuda.kernel(BACKWARD, entry, &defines, shared as u32)?;
    let (sinks, dsinks) = sinks.unzip();
    let pointers = [q, k, v, lse, d_o, delta].into_iter().chain(sinks).chain([dk, dv]).chain(dsinks);
    let grid = config(s, tiles(s, warps), s.kv_heads, warps, shared);
    let of_keys = cuda.launch(&kernel, grid, &params(s, pointers, None))?;
    Ok(Issue::Many(vec![of_dq, of_keys]))
}
