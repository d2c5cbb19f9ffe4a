//! CUDA side: checks, splits, grids and kernel parameters.

use super::{CHUNK, DeltaShape, NORM_EPS, hopper};
use crate::device::DeviceError;
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue, KernelSource};
use crate::ops::chunked::{Call, cut, fits_indices, needs_tensor_cores, tile, total};
use crate::ops::support::{addresses, aligned};

const FORWARD: KernelSource = KernelSource {
    name: "delta_net/forward.cu",
    text: concat!(
        include_str!("../tiles.cuh"),
        include_str!("shape.cuh"),
        include_str!("tile.cuh"),
        include_str!("forward.cu")
    ),
};
const BACKWARD: KernelSource = KernelSource {
    name: "delta_net/backward.cu",
    text: concat!(
        include_str!("../tiles.cuh"),
        include_str!("shape.cuh"),
        include_str!("tile.cuh"),
        include_str!("backward.cu")
    ),
};

/// Widest head whose tiles fit registers and shared memory (163 KiB a block on 8.0).
const MAX_DIM: usize = 128;
/// Two halves of a head's columns, each of whole 16x16 blocks.
const DIM_STEP: usize = 32;
/// Blocks that the pass is split into if it can be: one for each of the 132 multiprocessors of an H200, nearly. A wider
/// slice moves fewer bytes from the cache, a block more hides more latency.
const BLOCKS_WANTED: usize = 128;
const PREPARE_THREADS: usize = 256;
/// Value heads of a block of `delta_prepare`.
const PREPARE_HEADS: usize = 2;
const GRADIENT_THREADS: usize = 256;

/// What the kernels cannot run.
fn check(s: &DeltaShape, cuda: &CudaPrep) -> Result<(), DeviceError> {
    let wrong = |what: String| Err(DeviceError::Invalid(format!("delta net: {what}; use --device cpu")));
    needs_tensor_cores("delta net", cuda)?;
    for (what, dim) in [("q and k heads", s.key_dim), ("v heads", s.value_dim)] {
        if dim == 0 || !dim.is_multiple_of(DIM_STEP) || dim > MAX_DIM {
            return wrong(format!(
                "{what} of width {dim}; kernels take multiples of {DIM_STEP} up to {MAX_DIM}"
            ));
        }
    }
    if s.key_heads == 0 || !s.value_heads.is_multiple_of(s.key_heads) {
        return wrong(format!(
            "{} value heads for {} key heads; kernels take a multiple",
            s.value_heads, s.key_heads
        ));
    }
    fits_indices("delta net", s.batch, s.seq, s.tokens(), s.projected_width())
}

/// Columns of V of a block of the passes: the widest that fills the device.
fn slice(s: &DeltaShape) -> usize {
    let enough = |w: &usize| {
        s.value_dim.is_multiple_of(*w) && s.batch * s.value_heads * (s.value_dim / w) >= BLOCKS_WANTED
    };
    [64, DIM_STEP].into_iter().find(enough).unwrap_or(DIM_STEP)
}

/// Pieces of the workspace in order: c, beta, rq, rk, T, the masked q k^T, and of the backward the states' gradients.
fn pieces(s: &DeltaShape, backward: bool) -> [usize; 7] {
    let series = |heads: usize| s.batch * heads * s.chunks() * CHUNK * 4;
    let square = s.batch * s.chunks() * s.value_heads * CHUNK * CHUNK * 2;
    let states = if backward { s.states_shape().iter().product::<usize>() * 2 } else { 0 };
    let (own, keyed) = (series(s.value_heads), series(s.key_heads));
    [own, own, keyed, keyed, square, square, states]
}

pub(super) fn forward_workspace(s: &DeltaShape) -> usize {
    total(pieces(s, false))
}

pub(super) fn backward_workspace(s: &DeltaShape) -> usize {
    total(pieces(s, true))
}

/// k and q, and in their place the triangles of two heads, each in two parts; the heads' masked q k^T.
fn prepare_shared(s: &DeltaShape) -> usize {
    let square = tile(CHUNK, CHUNK);
    (2 * tile(CHUNK, s.key_dim)).max(2 * PREPARE_HEADS * square) + PREPARE_HEADS * square
}
/// Two stages of k, q, T, the masked q k^T, v or dO, and the numbers a token.
fn pass_shared(s: &DeltaShape) -> usize {
    2 * (2 * tile(CHUNK, s.key_dim) + 2 * tile(CHUNK, CHUNK) + tile(CHUNK, slice(s)) + 4 * CHUNK * 4)
}
/// k, q; v, dO, dV; the state; two squares.
fn gradients_shared(s: &DeltaShape) -> usize {
    2 * tile(CHUNK, s.key_dim)
        + 3 * tile(CHUNK, s.value_dim)
        + tile(s.value_dim, s.key_dim)
        + 2 * tile(CHUNK, CHUNK)
}

/// What all kernels are compiled for.
pub(super) fn defines(s: &DeltaShape) -> Vec<(&'static str, String)> {
    let mut out: Vec<_> = [("CHUNK", CHUNK), ("KEY_DIM", s.key_dim), ("VALUE_DIM", s.value_dim)]
        .map(|(name, value)| (name, value.to_string()))
        .into();
    out.push(("NORM_EPS", format!("{NORM_EPS:e}f")));
    out
}

/// And those with tiles of padded rows besides.
fn sliced(s: &DeltaShape) -> Vec<(&'static str, String)> {
    let mut out = defines(s);
    out.insert(3, ("SLICE", slice(s).to_string()));
    out
}

/// seq, key heads, value heads, chunks: the end of every kernel's list.
pub(super) fn shape(s: &DeltaShape) -> [usize; 4] {
    [s.seq, s.key_heads, s.value_heads, s.chunks()]
}

/// Launch of `delta_prepare`, whose copy is in both sources.
fn prepare(
    s: &DeltaShape,
    cuda: &mut CudaPrep,
    source: KernelSource,
    inputs: [DevPtr; 4],
    [c, beta, rq, rk, tri, att]: [DevPtr; 6],
) -> Result<Issue, DeviceError> {
    let blocks_a_key_head = (s.value_heads / s.key_heads).div_ceil(PREPARE_HEADS);
    Call {
        source,
        entry: "delta_prepare",
        grid: [s.batch * s.chunks() * s.key_heads * blocks_a_key_head, 1, 1],
        threads: PREPARE_THREADS,
        shared: prepare_shared(s),
        pointers: &[&inputs[..], &[c, beta, rq, rk, tri, att]].concat(),
        ints: &[s.projected_width()],
    }
    .issue(&sliced(s), shape(s), cuda)
}

fn pass_blocks(s: &DeltaShape) -> usize {
    s.batch * s.value_heads * (s.value_dim / slice(s))
}

/// `args` as [`super::DeltaFwd`] lists them.
pub(super) fn forward(
    s: &DeltaShape,
    cuda: &mut CudaPrep,
    args: &[DevPtr],
    workspace: DevPtr,
) -> Result<Issue, DeviceError> {
    check(s, cuda)?;
    if s.tokens() == 0 {
        return Ok(Issue::Nothing);
    }
    aligned("delta_net_fwd", args)?;
    let [qkv, proj, a_log, dt_bias, o, states] = addresses("delta_net_fwd", args)?;
    let [c, beta, rq, rk, tri, att, _] = cut(pieces(s, false), workspace);
    let mut issues =
        vec![prepare(s, cuda, FORWARD, [qkv, proj, a_log, dt_bias], [c, beta, rq, rk, tri, att])?];
    let pointers = &[qkv, c, beta, rq, rk, tri, att, o, states];
    issues.push(if hopper::takes(s, cuda.cc) {
        hopper::forward(s, cuda, pointers)?
    } else {
        Call {
            source: FORWARD,
            entry: "delta_pass",
            grid: [pass_blocks(s), 1, 1],
            threads: 2 * slice(s),
            shared: pass_shared(s),
            pointers,
            ints: &[],
        }
        .issue(&sliced(s), shape(s), cuda)?
    });
    Ok(Issue::Many(issues))
}

/// `args` as [`super::DeltaBwd`] lists them.
pub(super) fn backward(
    s: &DeltaShape,
    cuda: &mut CudaPrep,
    args: &[DevPtr],
    workspace: DevPtr,
) -> Result<Issue, DeviceError> {
    check(s, cuda)?;
    if s.tokens() == 0 {
        return Ok(Issue::Nothing);
    }
    aligned("delta_net_bwd", args)?;
    let [qkv, proj, a_log, dt_bias, states, d_o, dqkv, dba, partial] = addresses("delta_net_bwd", args)?;
    let [c, beta, rq, rk, tri, att, dstates] = cut(pieces(s, true), workspace);
    let mut issues =
        vec![prepare(s, cuda, BACKWARD, [qkv, proj, a_log, dt_bias], [c, beta, rq, rk, tri, att])?];
    let of_pass = &[qkv, c, beta, rq, rk, tri, att, d_o, dstates, dqkv];
    let of_gradients =
        &[qkv, proj, a_log, dt_bias, states, d_o, c, beta, rq, rk, tri, dstates, dqkv, dba, partial];
    if hopper::takes(s, cuda.cc) {
        issues.push(hopper::back(s, cuda, of_pass)?);
        issues.push(hopper::gradients(s, cuda, of_gradients)?);
        return Ok(Issue::Many(issues));
    }
    issues.push(
        Call {
            source: BACKWARD,
            entry: "delta_pass_back",
            grid: [pass_blocks(s), 1, 1],
            threads: 2 * slice(s),
            shared: pass_shared(s),
            pointers: of_pass,
            ints: &[],
        }
        .issue(&sliced(s), shape(s), cuda)?,
    );
    issues.push(
        Call {
            source: BACKWARD,
            entry: "delta_gradients",
            grid: [s.batch * s.chunks() * s.key_heads, 1, 1],
            threads: GRADIENT_THREADS,
            shared: gradients_shared(s),
            pointers: of_gradients,
            ints: &[s.projected_width()],
        }
        .issue(&sliced(s), shape(s), cuda)?,
    );
    Ok(Issue::Many(issues))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The widest heads on the smallest shared memory: compute capability 8.0 gives a block 163 KiB.
    #[test]
    fn tiles_fit_an_ampere_block() {
        const MAX_SHARED: usize = 163 * 1024;
        // Series, dots and sums that delta_gradients declares beside its tiles.
        const STATIC: usize = 4096;
        for value_heads in [32, 128] {
            let s =
                DeltaShape { batch: 1, seq: 4096, key_heads: 16, value_heads, key_dim: 128, value_dim: 128 };
            for bytes in [prepare_shared(&s), pass_shared(&s), gradients_shared(&s) + STATIC] {
                assert!(bytes <= MAX_SHARED, "{s:?} takes {bytes} bytes");
            }
        }
    }
}
