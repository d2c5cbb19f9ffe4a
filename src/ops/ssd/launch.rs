//! CUDA side: checks, splits, grids and kernel parameters.

use super::SsdShape;
use crate::device::DeviceError;
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue, KernelSource};
use crate::ops::chunked::{Call, cut, fits_indices, needs_tensor_cores, tile, total};
use crate::ops::support::{addresses, aligned};

const FORWARD: KernelSource = KernelSource {
    name: "ssd/forward.cu",
    text: concat!(include_str!("../tiles.cuh"), include_str!("tile.cuh"), include_str!("forward.cu")),
};
const BACKWARD: KernelSource = KernelSource {
    name: "ssd/backward.cu",
    text: concat!(include_str!("../tiles.cuh"), include_str!("tile.cuh"), include_str!("backward.cu")),
};

/// Blocks that work is split into if it can be: two for each of the 132 multiprocessors of an H200. A constant, as
/// workspaces must not depend on the device.
const BLOCKS_WANTED: usize = 264;
/// Longest chunk, head and state whose tiles fit registers and shared memory (227 KiB a block on 9.0 and 10.x).
const MAX_CHUNK: usize = 128;
const MAX_HEAD_DIM: usize = 64;
const MAX_STATE: usize = 256;
/// Columns of the state that one block of `ssd_cross` holds in registers.
const MAX_CROSS: usize = 128;
/// Columns below which a block of it would mostly load tokens.
const LEAST_CROSS: usize = 32;
/// Heads of a thread of `ssd_dt`: 16 bytes of dt.
const HEADS_PER_THREAD: usize = 8;
/// Heads of a thread of `ssd_ddt`: `DDT_HEADS` of backward.cu.
const DDT_HEADS: usize = 2;
const _: () = assert!(HEADS_PER_THREAD.is_multiple_of(DDT_HEADS));

/// What the kernels cannot run.
fn check(s: &SsdShape, cuda: &CudaPrep) -> Result<(), DeviceError> {
    let wrong = |what: String| Err(DeviceError::Invalid(format!("ssd: {what}; use --device cpu")));
    needs_tensor_cores("ssd", cuda)?;
    let fits = |n: usize, of: usize, max: usize| n > 0 && n.is_multiple_of(of) && n <= max;
    if !fits(s.chunk, 32, MAX_CHUNK) {
        return wrong(format!(
            "chunks of {} tokens; kernels take multiples of 32 up to {MAX_CHUNK}",
            s.chunk
        ));
    }
    if !fits(s.head_dim, 16, MAX_HEAD_DIM) {
        return wrong(format!(
            "heads of width {}; kernels take multiples of 16 up to {MAX_HEAD_DIM}",
            s.head_dim
        ));
    }
    if !fits(s.state, if s.state > MAX_CROSS { 32 } else { 16 }, MAX_STATE) {
        return wrong(format!(
            "a state of width {}; kernels take multiples of 16 up to {MAX_CROSS} and of 32 up to {MAX_STATE}",
            s.state
        ));
    }
    if s.groups == 0 || !s.heads.is_multiple_of(s.groups) || !fits(s.heads, HEADS_PER_THREAD, usize::MAX) {
        return wrong(format!(
            "{} heads in {} groups; kernels take multiples of {HEADS_PER_THREAD} heads that the groups divide",
            s.heads, s.groups
        ));
    }
    fits_indices("ssd", s.batch, s.seq, s.tokens(), s.projected_width())
}

/// Columns of a block of the state pass: the widest that fills the device.
fn slice(s: &SsdShape) -> usize {
    let enough = |w: &usize| s.state.is_multiple_of(*w) && s.batch * s.heads * (s.state / w) >= BLOCKS_WANTED;
    [64, 32].into_iter().find(enough).unwrap_or(if s.state.is_multiple_of(32) { 32 } else { 16 })
}

/// Parts that a group's heads are split into: the fewest that fill the device.
fn parts(s: &SsdShape) -> usize {
    let group = s.heads / s.groups.max(1);
    let blocks = s.batch * s.chunks() * s.groups;
    let enough = |n: &usize| group.is_multiple_of(*n) && blocks * n >= BLOCKS_WANTED;
    (1..=group).find(enough).unwrap_or(group.max(1))
}

/// Parts that the state's columns are split into for `ssd_cross`: the fewest that registers hold and that fill the device.
fn cross_parts(s: &SsdShape) -> usize {
    // B and C apart.
    let blocks = s.batch * s.chunks() * s.groups * 2;
    let legal = |n: &usize| {
        let fits = s.state.is_multiple_of(16 * n) && s.state / n <= MAX_CROSS;
        fits && (*n == 1 || s.state > MAX_CROSS || s.state / n >= LEAST_CROSS)
    };
    let all = [1, 2, 4].into_iter().filter(legal);
    all.clone().find(|n| blocks * n >= BLOCKS_WANTED).or(all.max()).unwrap_or(1)
}

/// Bytes of one f32 a padded token and head.
fn series_bytes(s: &SsdShape) -> usize {
    s.batch * s.heads * s.chunks() * s.chunk * 4
}

/// Pieces of the backward's workspace in order: dt, cum, row sums, column sums, skips; ends and begins (one for each
/// part of the state); dots; gradients of the states; parts of dB and dC.
fn backward_pieces(s: &SsdShape) -> [usize; 11] {
    let series = series_bytes(s);
    let states: usize = s.states_shape().iter().product();
    let dots = s.batch * s.chunks() * s.heads * (s.state / slice(s)) * 4;
    let mats = parts(s) * s.tokens() * s.groups * s.state * 4;
    let cross = cross_parts(s) * series;
    [series, series, series, series, series, cross, cross, dots, 2 * states, mats, mats]
}

pub(super) fn forward_workspace(s: &SsdShape) -> usize {
    total([series_bytes(s); 2])
}

pub(super) fn backward_workspace(s: &SsdShape) -> usize {
    total(backward_pieces(s))
}

fn defines(s: &SsdShape) -> Vec<(&'static str, String)> {
    let cross = s.state / cross_parts(s);
    [
        ("CHUNK", s.chunk),
        ("HEAD_DIM", s.head_dim),
        ("STATE", s.state),
        ("SLICE", slice(s)),
        ("CROSS_COLS", cross),
    ]
    .map(|(name, value)| (name, value.to_string()))
    .into()
}

/// seq, heads, groups, chunks: the end of every kernel's list.
fn shape(s: &SsdShape) -> [usize; 4] {
    [s.seq, s.heads, s.groups, s.chunks()]
}

fn dt_grid(s: &SsdShape) -> [usize; 3] {
    [s.batch * s.chunks(), s.heads / HEADS_PER_THREAD, 1]
}

/// Launch of `ssd_dt`, whose copy is in both sources.
fn series(
    s: &SsdShape,
    cuda: &mut CudaPrep,
    source: KernelSource,
    pointers: [DevPtr; 5],
) -> Result<Issue, DeviceError> {
    let w = s.projected_width();
    Call {
        source,
        entry: "ssd_dt",
        grid: dt_grid(s),
        threads: s.chunk,
        shared: 0,
        pointers: &pointers,
        ints: &[w, w - s.heads],
    }
    .issue(&defines(s), shape(s), cuda)
}

/// Shared memory of the state pass: two stages.
fn states_shared(s: &SsdShape) -> usize {
    2 * (tile(s.chunk, s.head_dim) + tile(s.chunk, slice(s)) + s.chunk * 8)
}

/// `args` as [`super::SsdFwd`] lists them.
pub(super) fn forward(
    s: &SsdShape,
    cuda: &mut CudaPrep,
    args: &[DevPtr],
    workspace: DevPtr,
) -> Result<Issue, DeviceError> {
    check(s, cuda)?;
    if s.tokens() == 0 {
        return Ok(Issue::Nothing);
    }
    aligned("ssd_fwd", args)?;
    let [xbc, zxbcdt, a_log, d, dt_bias, y, states] = addresses("ssd_fwd", args)?;
    let [dt, cum] = cut([series_bytes(s); 2], workspace);
    let parts = parts(s);
    let stage = tile(s.chunk, s.head_dim) + tile(s.head_dim, s.state) + s.chunk * 8;
    Ok(Issue::Many(vec![
        series(s, cuda, FORWARD, [zxbcdt, a_log, dt_bias, dt, cum])?,
        Call {
            source: FORWARD,
            entry: "ssd_states",
            grid: [s.batch * s.heads * (s.state / slice(s)), 1, 1],
            threads: 2 * s.head_dim,
            shared: states_shared(s),
            pointers: &[xbc, dt, cum, states],
            ints: &[],
        }
        .issue(&defines(s), shape(s), cuda)?,
        Call {
            source: FORWARD,
            entry: "ssd_out",
            grid: [s.batch * s.chunks() * s.groups * parts, 1, 1],
            threads: 2 * s.chunk,
            shared: tile(s.chunk, s.state) + tile(s.chunk, s.state).max(2 * stage),
            pointers: &[xbc, d, dt, cum, states, y],
            ints: &[s.heads / s.groups / parts],
        }
        .issue(&defines(s), shape(s), cuda)?,
    ]))
}

/// `args` as [`super::SsdBwd`] lists them.
pub(super) fn backward(
    s: &SsdShape,
    cuda: &mut CudaPrep,
    args: &[DevPtr],
    workspace: DevPtr,
) -> Result<Issue, DeviceError> {
    check(s, cuda)?;
    if s.tokens() == 0 {
        return Ok(Issue::Nothing);
    }
    aligned("ssd_bwd", args)?;
    let [xbc, zxbcdt, a_log, d, dt_bias, states, dy, dxbc, ddt, partial] = addresses("ssd_bwd", args)?;
    let [dt, cum, rows, cols, skips, ends, begins, dots, dstates, part_b, part_c] =
        cut(backward_pieces(s), workspace);
    let (parts, slices, cross) = (parts(s), s.state / slice(s), cross_parts(s));
    let (x_tile, m_tile) = (tile(s.chunk, s.head_dim), tile(s.chunk, s.state));
    let dx_stage = 2 * x_tile + tile(s.head_dim, s.state) + s.chunk * 8;
    let dx_region = (2 * dx_stage).max(m_tile + tile(s.chunk, s.chunk));
    let cross_cols = s.state / cross;
    let cross_stage = x_tile + tile(s.head_dim, cross_cols) + s.chunk * 8;
    let w = s.projected_width();
    Ok(Issue::Many(vec![
        series(s, cuda, BACKWARD, [zxbcdt, a_log, dt_bias, dt, cum])?,
        Call {
            source: BACKWARD,
            entry: "ssd_dstates",
            grid: [s.batch * s.heads * slices, 1, 1],
            threads: 2 * s.head_dim,
            shared: states_shared(s),
            pointers: &[xbc, dy, dt, cum, states, dstates, dots],
            ints: &[],
        }
        .issue(&defines(s), shape(s), cuda)?,
        Call {
            source: BACKWARD,
            entry: "ssd_dx",
            grid: [s.batch * s.chunks() * s.groups * parts, 1, 1],
            threads: 2 * s.chunk,
            // Column sums of every warp lie at the end.
            shared: m_tile + dx_region + s.chunk / 16 * s.chunk * 4,
            pointers: &[xbc, dy, d, dt, cum, dstates, dxbc, rows, cols, skips, part_b, part_c],
            ints: &[s.heads / s.groups / parts, s.batch],
        }
        .issue(&defines(s), shape(s), cuda)?,
        Call {
            source: BACKWARD,
            entry: "ssd_cross",
            grid: [s.batch * s.chunks() * s.groups, 2, cross],
            threads: 2 * s.chunk,
            shared: tile(s.chunk, cross_cols) + 2 * cross_stage,
            pointers: &[xbc, dy, dt, cum, states, dstates, part_b, part_c, dxbc, ends, begins],
            ints: &[parts, s.batch],
        }
        .issue(&defines(s), shape(s), cuda)?,
        Call {
            source: BACKWARD,
            entry: "ssd_ddt",
            grid: [s.batch * s.chunks(), s.heads / DDT_HEADS, 1],
            threads: s.chunk,
            shared: 0,
            pointers: &[zxbcdt, a_log, dt_bias, dt, rows, cols, skips, ends, begins, dots, ddt, partial],
            ints: &[slices, cross, w, w - s.heads],
        }
        .issue(&defines(s), shape(s), cuda)?,
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Few tokens: the state's columns are split until blocks fill the device, many: as registers hold them.
    #[test]
    fn the_pass_across_chunks_fills_the_device() {
        for (seq, state, parts) in
            [(512, 128, 4), (2048, 128, 2), (8192, 128, 1), (512, 256, 4), (8192, 256, 2)]
        {
            let s = SsdShape { batch: 1, seq, heads: 64, head_dim: 64, groups: 8, state, chunk: 128 };
            assert_eq!(cross_parts(&s), parts, "{s:?}");
        }
        // Narrow states are not cut below what a block's loads are worth, and odd ones only where 16 divides the parts.
        for (state, parts) in [(16, 1), (32, 1), (64, 2), (96, 2), (160, 2)] {
            let s = SsdShape { batch: 1, seq: 128, heads: 8, head_dim: 64, groups: 1, state, chunk: 128 };
            assert_eq!(cross_parts(&s), parts, "{s:?}");
        }
    }

    #[test]
    fn tiles_fit_a_hopper_block() {
        const MAX_SHARED: usize = 227 * 1024;
        for (heads, state, seq) in [(64, 128, 8192), (64, 128, 512), (256, 256, 8192), (32, 256, 8192)] {
            let s = SsdShape { batch: 1, seq, heads, head_dim: 64, groups: 8, state, chunk: 128 };
            let (x, m, st) = (tile(128, 64), tile(128, state), tile(64, state));
            let dx = m + (2 * (2 * x + st + 1024)).max(m + tile(128, 128)) + 8 * 128 * 4;
            assert!(dx <= MAX_SHARED && states_shared(&s) <= MAX_SHARED, "{s:?} takes {dx} bytes");
        }
    }
}
