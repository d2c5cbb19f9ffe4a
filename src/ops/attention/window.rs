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
/// Warps of a dk/dv block and strips of keys each takes: the largest block with which there are enough.
const DKV_BLOCKS: [(usize, usize); 5] = [(8, 2), (8, 1), (4, 1), (2, 1), (1, 1)];
/// Enough blocks: they leave few of an H200's 132 multiprocessors idle. gpt_oss at 4096 tokens has 8 key heads and 32 tiles of 128 rows:
/// forward and dq blocks, of which a multiprocessor holds two, and dk/dv blocks of 256 keys, of which it holds one, are one round.
const BLOCKS_WANTED: usize = 128;
const BLOCKS_PER_SM: usize = 2;
/// Most blocks in the y and z dimensions of a grid.
const MAX_GRID_YZ: usize = 65_535;

/// Whether these kernels take the shape. A block needs up to 132 KiB of shared memory, from compute
/// capability 9.0 on 198 (see `Tiles::of` for who has it).
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

fn tiles(s: &AttnShape, strips: usize) -> usize {
    s.kv_len.div_ceil(strips * STRIP)
}

/// Strips before its own of which a strip of queries sees keys.
fn back(s: &AttnShape) -> usize {
    (s.window().unwrap_or(1) - 1).div_ceil(STRIP)
}

/// Query heads that a forward or dq block takes in turn: the group, or the largest part of it with which there are enough blocks.
pub(super) fn heads(s: &AttnShape) -> usize {
    let blocks = tiles(s, WARPS) * s.batch() * s.q_heads;
    let enough = |h: &usize| group(s).is_multiple_of(*h) && blocks / h >= BLOCKS_WANTED * BLOCKS_PER_SM;
    (1..=group(s)).rev().find(enough).unwrap_or(1)
}

/// Warps of a dk/dv block, and strips of keys a warp.
pub(super) fn dkv_block(s: &AttnShape, cc: u32) -> (usize, usize) {
    // Two strips need the shared memory, and the registers that masks of a window which ends within a strip would take.
    let whole = s.window().is_some_and(|w| w.is_multiple_of(STRIP));
    let fits = |&(_, strips): &(usize, usize)| strips == 1 || (cc >= 90 && whole);
    let enough =
        |(warps, strips): &(usize, usize)| tiles(s, warps * strips) * s.batch() * s.kv_heads >= BLOCKS_WANTED;
    DKV_BLOCKS.into_iter().filter(fits).find(enough).unwrap_or((1, 1))
}

fn defines(s: &AttnShape, cc: u32) -> Vec<(&'static str, String)> {
    let (warps, strips) = dkv_block(s, cc);
    let all = [
        ("WINDOW", s.window().unwrap_or(1)),
        ("SINKS", usize::from(s.sinks)),
        ("DKV_WARPS", warps),
        ("DKV_M", strips),
    ];
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

fn params(s: &AttnShape, pointers: impl IntoIterator<Item = DevPtr>, heads: usize) -> Vec<Param> {
    let int = |x: usize| Param::I32(x as i32);
    let mut params: Vec<Param> = pointers.into_iter().map(Param::Ptr).collect();
    params.extend([s.kv_len, s.q_heads, s.kv_heads, heads].map(int));
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
    let kernel = cuda.kernel(FORWARD, entry, &defines(s, cuda.cc), shared as u32)?;
    let pointers = [q, k, v].into_iter().chain(sinks).chain([o, lse]);
    let config = config(s, tiles(s, WARPS), s.q_heads / heads, WARPS, shared);
    cuda.launch(&kernel, config, &params(s, pointers, heads))
}

/// `sinks`: with their gradients. Launches: dq, which writes delta into the workspace, then dk and dv, and the sinks' gradients.
pub(super) fn backward(
    s: &AttnShape,
    cuda: &mut CudaPrep,
    [q, k, v, o, lse, d_o]: [DevPtr; 6],
    sinks: Option<(DevPtr, DevPtr)>,
    delta: DevPtr,
    [dq, dk, dv]: [DevPtr; 3],
) -> Result<Issue, DeviceError> {
    let (shared, heads, defines) = (resident(s, 3), heads(s), defines(s, cuda.cc));
    let kernel = cuda.kernel(BACKWARD, "attention_dq_window", &defines, shared as u32)?;
    let grid = config(s, tiles(s, WARPS), s.q_heads / heads, WARPS, shared);
    let mut issues =
        vec![cuda.launch(&kernel, grid, &params(s, [q, k, v, o, lse, d_o, delta, dq], heads))?];

    let (warps, strips) = dkv_block(s, cuda.cc);
    let queries = (warps * strips + back(s)) * STRIP;
    // Two stages of q and do rows, lse and delta.
    let shared = 2 * 2 * queries * (LINE + 4);
    let kernel = cuda.kernel(BACKWARD, "attention_dkv_window", &defines, shared as u32)?;
    let grid = config(s, tiles(s, warps * strips), s.kv_heads, warps, shared);
    issues.push(cuda.launch(&kernel, grid, &params(s, [q, k, v, lse, d_o, delta, dk, dv], group(s)))?);

    if let Some((sinks, dsinks)) = sinks {
        let kernel = cuda.kernel(BACKWARD, "attention_dsinks_window", &defines, 0)?;
        let mut params: Vec<Param> = [lse, delta, sinks, dsinks].map(Param::Ptr).into();
        params.extend([s.kv_len, s.q_heads].map(|x| Param::I32(x as i32)));
        let grid = Config::linear(s.batch() * s.q_heads, (WARPS * 32) as u32);
        issues.push(cuda.launch(&kernel, grid, &params)?);
    }
    Ok(Issue::Many(issues))
}
