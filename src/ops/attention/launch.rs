//! CUDA side: checks, tile sizes, grids and kernel parameters.

use super::{AttnShape, hopper, window};
use crate::device::DeviceError;
use crate::device::cuda::cudnn::{Pass, SdpaSpec};
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};

const FORWARD: KernelSource = KernelSource {
    name: "attention/forward.cu",
    text: concat!(include_str!("tile.cuh"), include_str!("forward.cu")),
};
const BACKWARD: KernelSource = KernelSource {
    name: "attention/backward.cu",
    text: concat!(include_str!("tile.cuh"), include_str!("backward.cu")),
};

/// Widest head whose accumulators fit the registers of these kernels.
const BLOCK_HEAD_DIM: usize = 256;
/// Widest head: two blocks share its columns.
const MAX_HEAD_DIM: usize = 512;
/// Up to these widths the plain tiles do.
const PLAIN_HEAD_DIM: usize = 128;
/// Width of a query and key head up to which dk and dv of one key fit registers together, beside values of
/// [`PLAIN_HEAD_DIM`]: multi-latent attention's 128 + 64.
const LATENT_HEAD_DIM: usize = 192;
/// Rows of one tensor-core fragment (mma m16n8k16).
const FRAGMENT_ROWS: usize = 16;
/// Elements of one 16-byte load.
const PIECE: usize = 8;
/// Most blocks in the x dimension of a grid.
const MAX_GRID: usize = i32::MAX as usize;
/// The dk/dv kernel splits the query heads of a group over blocks until it has this many: about four rounds
/// over the 132 multiprocessors of an H200, so that the causal imbalance of key tiles evens out.
const DKV_BLOCKS_WANTED: usize = 512;
/// Keys a block in that count: 8 warps of 16 (the workspace must not depend on the device).
const DKV_SPLIT_ROWS: usize = 128;
/// Alignment of the pieces of the workspace.
const PIECE_BYTES: usize = 256;

/// Tile sizes, chosen so that registers suffice and a multiprocessor's shared memory holds the resident blocks.
struct Tiles {
    /// Warps, 16-row fragments a warp, keys a tile, resident blocks a multiprocessor.
    fwd: (usize, usize, usize, usize),
    dq: (usize, usize, usize, usize),
    /// Warps (16 keys each), queries a tile, resident blocks.
    dkv: (usize, usize, usize),
    /// dk and dv come from two launches: together they do not fit registers.
    dkv_apart: bool,
}

/// Blocks that share the columns of a head, each with all of its scores.
fn wide(s: &AttnShape) -> usize {
    blocks_a_head(s.head_dim, s.value_dim())
}

fn blocks_a_head(d: usize, dv: usize) -> usize {
    d.max(dv).div_ceil(BLOCK_HEAD_DIM)
}

/// There are kernels for heads with keys of width `d` and values of width `dv`.
pub fn has_kernels(d: usize, dv: usize) -> bool {
    let blocks = blocks_a_head(d, dv);
    let whole = |width: usize| width > 0 && width.is_multiple_of(FRAGMENT_ROWS * blocks);
    // Tiles of keys and values are padded alike.
    let legal = (whole(d) && whole(dv)) || (blocks == 1 && d == dv && d.is_multiple_of(PIECE));
    legal && d <= MAX_HEAD_DIM && dv <= d
}

impl Tiles {
    fn of(s: &AttnShape, cc: u32) -> Self {
        // Shared memory a multiprocessor (CUDA C++ Programming Guide, table of compute capabilities): 228 KiB
        // on 9.0 and 10.x, 164 on 8.0 and 8.7, 100 on 8.6, 8.9 and 12.x. At head width 128 the tiles below
        // take 102, 102 and 137 KiB a block, 68, 68 and 137, and 68 each.
        // Heads of 192 and 128 take 92, 84 and 127 KiB; 67, 84 and 127; 67, 84 and 85. Heads of 256 take 99, 198
        // and 199; 99, 132 and 133; 66, 66 and 67.
        let (d, dv) = (s.head_dim, s.value_dim());
        let mut tiles = if d <= PLAIN_HEAD_DIM {
            match cc {
                90..=119 => Self { fwd: (4, 2, 64, 2), dq: (4, 2, 32, 2), dkv: (8, 64, 1), dkv_apart: false },
                80 | 87 => Self { fwd: (4, 2, 32, 2), dq: (4, 1, 32, 2), dkv: (8, 64, 1), dkv_apart: false },
                _ => Self { fwd: (4, 2, 32, 1), dq: (4, 1, 32, 1), dkv: (4, 32, 1), dkv_apart: false },
            }
        } else if d <= LATENT_HEAD_DIM && dv <= PLAIN_HEAD_DIM {
            match cc {
                90..=119 => Self { fwd: (4, 2, 32, 2), dq: (4, 1, 32, 2), dkv: (8, 32, 1), dkv_apart: false },
                80 | 87 => Self { fwd: (4, 1, 32, 2), dq: (4, 1, 32, 1), dkv: (8, 32, 1), dkv_apart: false },
                _ => Self { fwd: (4, 1, 32, 1), dq: (4, 1, 32, 1), dkv: (4, 32, 1), dkv_apart: false },
            }
        } else if wide(s) > 1 {
            // Heads of 512: 179, 195 and 195 KiB; 114, 130 and 130.
            match cc {
                90..=119 => Self { fwd: (8, 1, 16, 1), dq: (4, 1, 16, 1), dkv: (4, 16, 1), dkv_apart: true },
                _ => Self { fwd: (4, 1, 16, 1), dq: (2, 1, 16, 1), dkv: (2, 16, 1), dkv_apart: true },
            }
        } else {
            match cc {
                90..=119 => Self { fwd: (4, 1, 32, 2), dq: (8, 1, 32, 1), dkv: (8, 32, 1), dkv_apart: true },
                80 | 87 => Self { fwd: (4, 1, 32, 1), dq: (4, 1, 32, 1), dkv: (4, 32, 1), dkv_apart: true },
                _ => Self { fwd: (4, 1, 16, 1), dq: (2, 1, 16, 1), dkv: (2, 16, 1), dkv_apart: true },
            }
        };
        if s.dropout.is_some() {
            // Redrawing the mask takes registers: fewer rows then.
            tiles.fwd.1 = 1;
            tiles.dq.1 = 1;
            tiles.dkv.1 = if d <= PLAIN_HEAD_DIM { 32 } else { 16 };
        }
        tiles
    }
    /// What each launch of the dk/dv kernel computes: `[dk, dv]`.
    fn dkv_parts(&self) -> &'static [[bool; 2]] {
        if self.dkv_apart { &[[true, false], [false, true]] } else { &[[true, true]] }
    }
    /// `[dk, dv]`: which of the two the dk/dv kernel computes.
    fn defines(&self, s: &AttnShape, [dk, dv]: [bool; 2]) -> Vec<(&'static str, String)> {
        let all = [
            ("HEAD_DIM", tile_width(s.head_dim)),
            ("HEAD_DIM_V", tile_width(s.value_dim())),
            ("DROPOUT", usize::from(s.dropout.is_some())),
            ("WINDOW", s.window().unwrap_or(0)),
            ("SINKS", usize::from(s.sinks)),
            ("FWD_WARPS", self.fwd.0),
            ("FWD_M", self.fwd.1),
            ("FWD_KV", self.fwd.2),
            ("FWD_BLOCKS_PER_SM", self.fwd.3),
            ("DQ_WARPS", self.dq.0),
            ("DQ_M", self.dq.1),
            ("DQ_KV", self.dq.2),
            ("DQ_BLOCKS_PER_SM", self.dq.3),
            ("DKV_WARPS", self.dkv.0),
            ("DKV_Q", self.dkv.1),
            ("DKV_BLOCKS_PER_SM", self.dkv.2),
            ("DKV_DK", usize::from(dk)),
            ("DKV_DV", usize::from(dv)),
        ];
        let padding = tile_width(s.head_dim) - s.head_dim;
        let padding = (padding > 0).then_some(("PADDING", padding));
        let wide = (wide(s) > 1).then(|| ("WIDE", wide(s)));
        all.into_iter().chain(padding).chain(wide).map(|(name, value)| (name, value.to_string())).collect()
    }
}

/// Width of a head in a tile: whole fragments.
fn tile_width(width: usize) -> usize {
    width.next_multiple_of(FRAGMENT_ROWS)
}

/// Bytes in shared memory of tiles of `qk` query or key rows and `v` value rows: `row_bytes` of tile.cuh.
fn tile_bytes(s: &AttnShape, qk: usize, v: usize) -> usize {
    let row = |width: usize| tile_width(width) * 2 + 16;
    qk * row(s.head_dim) + v * row(s.value_dim())
}

/// What no device can run.
pub(super) fn check(s: &AttnShape) -> Result<(), DeviceError> {
    let [(_, len0), (_, len1)] = s.positions.chunks;
    let wrong = |what: String| Err(DeviceError::Invalid(format!("attention: {what}")));
    if s.batch() == 0
        || s.q_len() == 0
        || s.kv_len == 0
        || s.kv_heads == 0
        || s.head_dim.min(s.value_dim()) == 0
    {
        return wrong(format!("an extent is 0 in {s:?}; every one must be at least 1"));
    }
    if s.q_heads == 0 || !s.q_heads.is_multiple_of(s.kv_heads) {
        return wrong(format!(
            "{} query heads cannot share {} key heads; the first must be a multiple of the second",
            s.q_heads, s.kv_heads
        ));
    }
    if len0 + len1 != s.q_len() {
        return wrong(format!("chunks of {len0} and {len1} rows do not make {} query rows", s.q_len()));
    }
    if s.bidirectional && s.window.is_some() {
        return wrong("a window in bidirectional attention; give one of the two".to_owned());
    }
    let last = |(start, len): (usize, usize)| if len == 0 { 0 } else { start + len - 1 };
    let highest = s.positions.chunks.map(last).into_iter().fold(0, usize::max);
    if s.window == Some(0) || (s.window.is_some() && highest >= s.kv_len) {
        return wrong(format!(
            "a window of {:?} keys with rows up to position {highest} of {} keys leaves rows that see none; \
             change model.window_size",
            s.window, s.kv_len
        ));
    }
    s.dropout.as_ref().map_or(Ok(()), |d| d.check("attention"))
}

/// What the kernels cannot run.
fn check_cuda(s: &AttnShape, cuda: &CudaPrep) -> Result<(), DeviceError> {
    check(s)?;
    if cuda.cc < 80 {
        return Err(DeviceError::Unavailable(format!(
            "attention needs bf16 tensor cores (compute capability 8.0); this device has {}.{}; use --device cpu",
            cuda.cc / 10,
            cuda.cc % 10
        )));
    }
    if wide(s) > 1 && !matches!(cuda.cc, 80 | 87 | 90..=119) {
        return Err(DeviceError::Unavailable(format!(
            "attention heads of {} elements need 130 KiB of shared memory a block (compute capability 8.0, 9.0 or 10.x); \
             use --device cpu",
            s.head_dim
        )));
    }
    let (d, dv) = (s.head_dim, s.value_dim());
    if !has_kernels(d, dv) {
        return Err(DeviceError::Invalid(format!(
            "attention has kernels for head widths that are multiples of {FRAGMENT_ROWS} up to {MAX_HEAD_DIM} (of {} above \
             {BLOCK_HEAD_DIM}, of {PIECE} where keys are as wide as values), values no wider than keys; this model has {} and \
             {}; use --device cpu",
            2 * FRAGMENT_ROWS,
            s.head_dim,
            s.value_dim()
        )));
    }
    let rows = s.batch().saturating_mul(s.kv_len.max(s.q_len()));
    if rows.saturating_mul(s.q_heads * wide(s)) > MAX_GRID {
        return Err(DeviceError::Invalid(format!(
            "attention over {rows} rows and {} heads exceeds 2^31 - 1 row-heads; use a smaller micro-batch",
            s.q_heads
        )));
    }
    Ok(())
}

/// The case as cuDNN's plan takes it, or why there is none.
pub(super) fn sdpa(s: &AttnShape, pass: Pass) -> Result<SdpaSpec, String> {
    if s.sinks {
        return Err("a learned sink in the softmax".to_owned());
    }
    if let Some(window) = s.window() {
        return Err(format!("a sliding window of {window} keys"));
    }
    if s.dropout.is_some() {
        return Err("dropout draws from mbperf's own generator".to_owned());
    }
    if !s.bidirectional && (s.positions.chunks[0] != (0, s.kv_len) || s.q_len() != s.kv_len) {
        return Err("the rank holds parts of the sequence (context parallelism)".to_owned());
    }
    if s.kv_len < 2 || s.q_len() < 2 {
        return Err("a sequence of one token".to_owned());
    }
    Ok(SdpaSpec {
        pass,
        batch: s.batch(),
        q_heads: s.q_heads,
        kv_heads: s.kv_heads,
        seq: s.q_len(),
        kv_seq: s.kv_len,
        causal: !s.bidirectional,
        head_dim: s.head_dim,
        head_dim_v: s.value_dim(),
        scale_bits: (s.scale() as f32).to_bits(),
        deterministic: true,
    })
}

/// Parameters that end every attention kernel's list: shapes, positions, scale, dropout.
fn shape_params(s: &AttnShape) -> Vec<Param> {
    let [(start0, len0), (start1, _)] = match s.bidirectional {
        false => s.positions.chunks,
        // The same kernels: rows that lie behind all keys see every one.
        true => [(s.kv_len, s.q_len()), (s.kv_len, 0)],
    };
    let int = |x: usize| Param::I32(x as i32);
    let mut params = vec![
        int(s.batch()),
        int(s.q_len()),
        int(s.kv_len),
        int(s.q_heads),
        int(s.kv_heads),
        int(start0),
        int(len0),
        int(start1),
        Param::F32(s.scale() as f32),
    ];
    params.extend(match &s.dropout {
        None => [Param::U32(0), Param::U32(0), Param::U32(0), Param::F32(1.0)],
        Some(d) => [
            Param::U32(d.rng.seed_offset),
            Param::U32(d.rng.draw),
            // `Dropout::keeps` as an integer test of the word's top 24 bits.
            Param::U32((f64::from(d.p as f32) * 16_777_216.0).ceil() as u32),
            Param::F32(d.scale() as f32),
        ],
    });
    params
}

/// The arguments as the first `N`, the sinks and the step words where the shape has them, and the last `M`; `None` where
/// their number is another one. Words that are not there are null.
#[allow(clippy::type_complexity)]
fn split<'a, const N: usize, const M: usize>(
    s: &AttnShape,
    args: &'a [DevPtr],
) -> Option<(&'a [DevPtr; N], Option<DevPtr>, DevPtr, &'a [DevPtr; M])> {
    let (first, rest) = args.split_first_chunk::<N>()?;
    let (last, middle) = (rest.last_chunk::<M>()?, rest.len() - M);
    let given = |i: usize| rest[..middle].get(i).copied();
    let sinks = if s.sinks { Some(given(0)?) } else { None };
    let at = usize::from(s.sinks);
    let words = if s.dropout.is_some() { given(at)? } else { DevPtr::default() };
    (middle == at + usize::from(s.dropout.is_some())).then_some((first, sinks, words, last))
}

fn config(blocks: usize, threads: usize, shared_bytes: usize) -> Config {
    Config { shared_bytes: shared_bytes as u32, ..Config::linear(blocks, threads as u32) }
}

/// `args` as [`super::AttnFwd`] lists them.
pub(super) fn forward(s: &AttnShape, cuda: &mut CudaPrep, args: &[DevPtr]) -> Result<Issue, DeviceError> {
    check_cuda(s, cuda)?;
    let Some((&[q, k, v], sinks, words, &[o, lse])) = split(s, args) else {
        return Err(DeviceError::internal("attention_fwd: wrong number of arguments"));
    };
    let faster = hopper::faster_than_cudnn(s, cuda.cc, Pass::Forward);
    if let Some(issue) = cuda.sdpa(sdpa(s, Pass::Forward), args, faster)? {
        return Ok(issue);
    }
    if hopper::takes(s, cuda.cc) {
        return hopper::forward(s, cuda, [q, k, v, o, lse]);
    }
    if window::takes(s, cuda.cc) {
        return window::forward(s, cuda, [q, k, v], sinks, [o, lse]);
    }
    let tiles = Tiles::of(s, cuda.cc);
    let (warps, fragments, keys, _) = tiles.fwd;
    let rows = warps * fragments * FRAGMENT_ROWS;
    let shared =
        tile_bytes(s, rows + 2 * keys, 0) + 2 * keys * (tile_width(s.value_dim()) / wide(s) * 2 + 16);
    // A name each: the parameters of an entry are looked up by it.
    let entry = if s.sinks { "attention_fwd_sinks" } else { "attention_fwd" };
    let kernel = cuda.kernel(FORWARD, entry, &tiles.defines(s, [true; 2]), shared as u32)?;
    let mut params: Vec<Param> = [q, k, v].map(Param::Ptr).into();
    params.extend(sinks.map(Param::Ptr));
    params.extend([words, o, lse].map(Param::Ptr));
    params.extend(shape_params(s));
    let blocks = s.q_len().div_ceil(rows) * s.batch() * s.q_heads * wide(s);
    cuda.launch(&kernel, config(blocks, warps * 32, shared), &params)
}

/// Parts that the query heads of a group are split into for dk and dv: a divisor of the group.
pub(super) fn dkv_splits(s: &AttnShape) -> usize {
    let group = s.q_heads / s.kv_heads.max(1);
    let blocks = s.kv_len.div_ceil(DKV_SPLIT_ROWS) * s.batch() * s.kv_heads;
    let enough = |n: &usize| group.is_multiple_of(*n) && blocks * n >= DKV_BLOCKS_WANTED;
    (1..=group).find(enough).unwrap_or(group.max(1))
}

fn delta_bytes(s: &AttnShape) -> usize {
    (s.batch() * s.q_heads * s.q_len() * 4).next_multiple_of(PIECE_BYTES)
}

/// Delta rows, then with more than one split the fp32 parts of dk and dv (which the kernels of [`hopper`] and [`window`] do not use:
/// the workspace must not depend on the device).
pub(super) fn backward_workspace(s: &AttnShape) -> usize {
    let splits = dkv_splits(s);
    let parts = if splits == 1 { 0 } else { splits };
    let elements: usize = [s.k_shape(), s.v_shape()].iter().map(|s| s[0] * s[1]).sum();
    delta_bytes(s) + parts * elements * 4
}

/// delta = do . o of every row and head.
fn delta_rows(
    s: &AttnShape,
    cuda: &mut CudaPrep,
    [o, d_o, delta]: [DevPtr; 3],
) -> Result<Issue, DeviceError> {
    const ROWS_PER_BLOCK: usize = 8;
    let tiles = Tiles::of(s, cuda.cc);
    let kernel = cuda.kernel(BACKWARD, "attention_delta", &tiles.defines(s, tiles.dkv_parts()[0]), 0)?;
    let mut params = [o, d_o, delta].map(Param::Ptr).to_vec();
    params.extend([s.batch(), s.q_len(), s.q_heads].map(|x| Param::I32(x as i32)));
    let blocks = (s.batch() * s.q_len() * s.q_heads).div_ceil(ROWS_PER_BLOCK);
    cuda.launch(&kernel, Config::linear(blocks, 256), &params)
}

/// `args` as [`super::AttnBwd`] lists them.
pub(super) fn backward(
    s: &AttnShape,
    cuda: &mut CudaPrep,
    args: &[DevPtr],
    workspace: DevPtr,
) -> Result<Issue, DeviceError> {
    check_cuda(s, cuda)?;
    let (gradients, dsinks) = args.split_at(args.len() - usize::from(s.sinks).min(args.len()));
    let Some((&[q, k, v, o, lse, d_o], sinks, words, &[dq, dk, dv])) = split(s, gradients) else {
        return Err(DeviceError::internal("attention_bwd: wrong number of arguments"));
    };
    let faster = hopper::faster_than_cudnn(s, cuda.cc, Pass::Backward);
    if let Some(issue) = cuda.sdpa(sdpa(s, Pass::Backward), args, faster)? {
        return Ok(issue);
    }
    if hopper::takes(s, cuda.cc) {
        let mut issues = Vec::new();
        if !hopper::forms_delta(s) {
            issues.push(delta_rows(s, cuda, [o, d_o, workspace])?);
        }
        issues.push(hopper::backward(s, cuda, [q, k, v, o, d_o, lse, workspace, dq, dk, dv])?);
        return Ok(Issue::Many(issues));
    }
    if window::takes(s, cuda.cc) {
        let sinks = sinks.zip(dsinks.first().copied());
        return window::backward(s, cuda, [q, k, v, o, lse, d_o], sinks, workspace, [dq, dk, dv]);
    }
    let (delta, partial) = (workspace, workspace.offset(delta_bytes(s)));
    let tiles = Tiles::of(s, cuda.cc);
    let parts = tiles.dkv_parts();
    let defines = tiles.defines(s, parts[0]);
    let pointers = |list: &[DevPtr]| -> Vec<Param> { list.iter().copied().map(Param::Ptr).collect() };

    let mut issues = vec![delta_rows(s, cuda, [o, d_o, delta])?];
    if let (Some(sinks), &[dsinks]) = (sinks, dsinks) {
        let kernel = cuda.kernel(BACKWARD, "attention_dsinks", &defines, 0)?;
        let mut params = pointers(&[lse, delta, sinks, dsinks]);
        params.extend([s.q_len(), s.q_heads].map(|x| Param::I32(x as i32)));
        issues.push(cuda.launch(&kernel, Config::linear(s.batch() * s.q_heads, 256), &params)?);
    }

    let (warps, queries, _) = tiles.dkv;
    let (rows, splits) = (warps * FRAGMENT_ROWS, dkv_splits(s));
    let shared = tile_bytes(s, rows + 2 * queries, rows + 2 * queries) + 4 * queries * 4;
    let mut params = pointers(&[q, k, v, d_o, lse, delta, words, dk, dv, partial]);
    params.push(Param::I32(splits as i32));
    params.extend(shape_params(s));
    let blocks = s.kv_len.div_ceil(rows) * s.batch() * s.kv_heads * splits * wide(s);
    for part in parts {
        let kernel = cuda.kernel(BACKWARD, "attention_dkv", &tiles.defines(s, *part), shared as u32)?;
        issues.push(cuda.launch(&kernel, config(blocks, warps * 32, shared), &params)?);
    }

    if splits > 1 {
        const VALUES_PER_BLOCK: usize = 256 * 8;
        let [of_dk, of_dv] = [s.k_shape(), s.v_shape()].map(|s| s[0] * s[1]);
        let kernel = cuda.kernel(BACKWARD, "attention_dkv_sum", &defines, 0)?;
        let mut params = pointers(&[partial, dk, dv]);
        params.extend([Param::I32(splits as i32), Param::I64(of_dk as i64), Param::I64(of_dv as i64)]);
        let grid = Config::linear(of_dk.max(of_dv).div_ceil(VALUES_PER_BLOCK), 256);
        issues.push(cuda.launch(&kernel, Config { grid: [grid.grid[0], 2, 1], ..grid }, &params)?);
    }

    let (warps, fragments, keys, _) = tiles.dq;
    let rows = warps * fragments * FRAGMENT_ROWS;
    let shared = tile_bytes(s, rows + 2 * keys, rows + 2 * keys);
    let kernel = cuda.kernel(BACKWARD, "attention_dq", &defines, shared as u32)?;
    let mut params = pointers(&[q, k, v, d_o, lse, delta, words, dq]);
    params.extend(shape_params(s));
    let blocks = s.q_len().div_ceil(rows) * s.batch() * s.q_heads * wide(s);
    issues.push(cuda.launch(&kernel, config(blocks, warps * 32, shared), &params)?);
    Ok(Issue::Many(issues))
}
