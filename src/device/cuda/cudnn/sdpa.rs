//! Attention, causal or not, as operation graphs, forward and backward, in the shape that cuDNN's fused attention engines
//! recognise (documented with the "fused flash attention" engines of the graph API; needed below cuDNN 9.21,
//! which has one node for it).
//!
//! All tensors are `[batch, heads, rows, columns]` views of the buffers of [`crate::ops::attention`], which lie
//! batch, row, head, column.

use super::error::CudnnError;
use super::graph::{Bounds, Data, Dims, GraphBuilder, Mode, Reduce, Tensor, packed, transposed};

/// Which of the two graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    Forward,
    Backward,
}

/// One attention over whole sequences, bf16 with fp32 accumulation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SdpaSpec {
    pub pass: Pass,
    pub batch: usize,
    pub q_heads: usize,
    /// Divides `q_heads`.
    pub kv_heads: usize,
    /// Query rows of a sequence.
    pub seq: usize,
    /// Keys of a sequence; as many as rows if causal.
    pub kv_seq: usize,
    /// A row sees the keys up to its own alone.
    pub causal: bool,
    /// Width of a query and key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub head_dim_v: usize,
    /// Factor of the scores, as the bits of an f32.
    pub scale_bits: u32,
    /// Backward: sums in a fixed order (slower).
    pub deterministic: bool,
}

/// Unique ids of the caller's tensors, in the order of its arguments.
pub(super) mod uid {
    pub const Q: i64 = 1;
    pub const K: i64 = 2;
    pub const V: i64 = 3;
    pub const O: i64 = 4;
    pub const LSE: i64 = 5;
    pub const D_O: i64 = 6;
    pub const DQ: i64 = 7;
    pub const DK: i64 = 8;
    pub const DV: i64 = 9;
    /// Forward arguments, then all of the backward ones.
    pub const FORWARD: [i64; 5] = [Q, K, V, O, LSE];
    pub const BACKWARD: [i64; 9] = [Q, K, V, O, LSE, D_O, DQ, DK, DV];
    /// Scratch.
    pub const DELTA: i64 = 20;
    pub const DQ_SUM: i64 = 21;
    pub const Q_LENGTHS: i64 = 22;
    pub const KV_LENGTHS: i64 = 23;
}

/// Device memory that a graph needs beside its arguments and the engine's workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scratch {
    pub uid: i64,
    pub bytes: usize,
    /// Every 32-bit word is set to this once, when the plan is made; `None`: written by the graph itself.
    pub fill: Option<u32>,
}

/// Up to this version the backward engines need the sequence lengths spelled out when the keys do not fill
/// tiles of [`BACKWARD_TILE`] (they read past the end otherwise; cuDNN 9.15.0 as `cudnnGetVersion` counts).
const LAST_WITHOUT_TAILS: usize = 91_500;
const BACKWARD_TILE: usize = 128;

/// Head widths of the fused engines are multiples of this: 16 bytes of bf16, one load.
const HEAD_MULTIPLE: usize = 8;

impl SdpaSpec {
    /// Factor of the scores.
    pub fn scale(&self) -> f32 {
        f32::from_bits(self.scale_bits)
    }

    /// Whether two runs may differ in bits.
    pub fn unordered(&self) -> bool {
        self.pass == Pass::Backward && !self.deterministic
    }

    fn extents(&self) -> [i64; 6] {
        [self.batch, self.q_heads, self.kv_heads, self.seq, self.kv_seq, self.head_dim].map(|x| x as i64)
    }

    /// Unique ids of the arguments.
    pub(super) fn arguments(&self) -> &'static [i64] {
        match self.pass {
            Pass::Forward => &uid::FORWARD,
            Pass::Backward => &uid::BACKWARD,
        }
    }

    fn spells_lengths(&self, version: usize) -> bool {
        self.pass == Pass::Backward
            && version <= LAST_WITHOUT_TAILS
            && !(self.seq.is_multiple_of(BACKWARD_TILE) && self.kv_seq.is_multiple_of(BACKWARD_TILE))
    }

    /// Memory beside the arguments.
    pub(super) fn scratch(&self, version: usize) -> Vec<Scratch> {
        let mut all = Vec::new();
        if self.pass == Pass::Backward {
            let rows = self.batch * self.q_heads * self.seq;
            all.push(Scratch { uid: uid::DELTA, bytes: rows * 4, fill: None });
            if !self.deterministic {
                all.push(Scratch { uid: uid::DQ_SUM, bytes: rows * self.head_dim * 4, fill: None });
            }
            if self.spells_lengths(version) {
                let lengths = [(uid::Q_LENGTHS, self.seq), (uid::KV_LENGTHS, self.kv_seq)];
                let filled = |(uid, n)| Scratch { uid, bytes: self.batch * 4, fill: Some(n as u32) };
                all.extend(lengths.map(filled));
            }
        }
        all
    }

    /// The graph, not yet finished. `version` as `cudnnGetVersion` counts.
    pub(super) fn graph(&self, version: usize) -> Result<GraphBuilder, CudnnError> {
        // The library divides by heads before it looks at them.
        if self.extents().contains(&0)
            || !self.q_heads.is_multiple_of(self.kv_heads)
            || [self.head_dim, self.head_dim_v].iter().any(|d| *d == 0 || !d.is_multiple_of(HEAD_MULTIPLE))
        {
            return Err(CudnnError::own("attention", format!("no legal extents: {self:?}")));
        }
        match self.pass {
            Pass::Forward => self.forward(),
            Pass::Backward => self.backward(version),
        }
    }

    fn q_dims(&self) -> Dims {
        let [b, h, _, s, _, d] = self.extents();
        [b, h, s, d]
    }
    fn o_dims(&self) -> Dims {
        let [b, h, _, s, ..] = self.extents();
        [b, h, s, self.head_dim_v as i64]
    }
    fn k_dims(&self) -> Dims {
        let [b, _, h, _, k, d] = self.extents();
        [b, h, k, d]
    }
    fn v_dims(&self) -> Dims {
        let [b, _, h, _, k, _] = self.extents();
        [b, h, k, self.head_dim_v as i64]
    }
    fn score_dims(&self) -> Dims {
        let [b, h, _, s, k, _] = self.extents();
        [b, h, s, k]
    }
    fn row_dims(&self) -> Dims {
        let [b, h, _, s, ..] = self.extents();
        [b, h, s, 1]
    }

    fn forward(&self) -> Result<GraphBuilder, CudnnError> {
        let mut g = GraphBuilder::new("forward");
        let (bf16, f32_) = (Data::CUDNN_DATA_BFLOAT16, Data::CUDNN_DATA_FLOAT);
        let (qd, kd, vd, od) = (self.q_dims(), self.k_dims(), self.v_dims(), self.o_dims());
        let q = g.outer(uid::Q, "q", bf16, qd, interleaved(qd))?;
        let kt = g.outer(uid::K, "k^T", bf16, transposed(kd), transposed(interleaved(kd)))?;
        let v = g.outer(uid::V, "v", bf16, vd, interleaved(vd))?;
        let o = g.outer(uid::O, "o", bf16, od, interleaved(od))?;
        let lse = g.outer(uid::LSE, "lse", f32_, self.row_dims(), packed(self.row_dims()))?;
        let scale = g.scalar("scale", self.scale())?;

        let raw = g.inner("scores", f32_, self.score_dims(), packed(self.score_dims()))?;
        g.matmul(q, kt, raw, Bounds::default())?;
        let scaled = g.map("scaled", Mode::CUDNN_POINTWISE_MUL, &[raw, scale])?;
        let s = if self.causal { causal(&mut g, scaled)? } else { scaled };
        // Softmax, and the logarithm of its denominator.
        let row = self.row_dims();
        let top = g.inner("max", f32_, row, packed(row))?;
        g.reduce(Reduce::CUDNN_REDUCE_TENSOR_MAX, s, top)?;
        let shifted = g.map("shifted", Mode::CUDNN_POINTWISE_SUB, &[s, top])?;
        let e = g.map("exp", Mode::CUDNN_POINTWISE_EXP, &[shifted])?;
        let sum = g.inner("sum", f32_, row, packed(row))?;
        g.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, e, sum)?;
        let log = g.map("log", Mode::CUDNN_POINTWISE_LOG, &[sum])?;
        g.map_into(Mode::CUDNN_POINTWISE_ADD, &[top, log], lse)?;
        // The second product takes operands of one type, so the probabilities are rounded.
        let p = g.inner("p", bf16, self.score_dims(), packed(self.score_dims()))?;
        g.map_into(Mode::CUDNN_POINTWISE_DIV, &[e, sum], p)?;
        g.matmul(p, v, o, Bounds::default())?;
        Ok(g)
    }

    fn backward(&self, version: usize) -> Result<GraphBuilder, CudnnError> {
        let mut g = GraphBuilder::new("backward");
        let (bf16, f32_) = (Data::CUDNN_DATA_BFLOAT16, Data::CUDNN_DATA_FLOAT);
        let (qd, kd, vd, od) = (self.q_dims(), self.k_dims(), self.v_dims(), self.o_dims());
        let row = self.row_dims();
        let q = g.outer(uid::Q, "q", bf16, qd, interleaved(qd))?;
        let kt = g.outer(uid::K, "k^T", bf16, transposed(kd), transposed(interleaved(kd)))?;
        let vt = g.outer(uid::V, "v^T", bf16, transposed(vd), transposed(interleaved(vd)))?;
        let o = g.outer(uid::O, "o", bf16, od, interleaved(od))?;
        let lse = g.outer(uid::LSE, "lse", f32_, row, packed(row))?;
        let d_o = g.outer(uid::D_O, "do", bf16, od, interleaved(od))?;
        let dq = g.outer(uid::DQ, "dq", bf16, qd, interleaved(qd))?;
        let dk = g.outer(uid::DK, "dk", bf16, kd, interleaved(kd))?;
        let dv = g.outer(uid::DV, "dv", bf16, vd, interleaved(vd))?;
        let scale = g.scalar("scale", self.scale())?;
        let one = g.scalar("one", 1.0)?;
        let lengths = if self.spells_lengths(version) {
            let dims = [self.batch as i64, 1, 1, 1];
            let int = Data::CUDNN_DATA_INT32;
            Some((
                g.outer(uid::Q_LENGTHS, "query lengths", int, dims, [1; 4])?,
                g.outer(uid::KV_LENGTHS, "key lengths", int, dims, [1; 4])?,
            ))
        } else {
            None
        };
        let (rows, keys) = (lengths.map(|l| l.0), lengths.map(|l| l.1));

        // delta = rowsum(do * o). The multiplication by one is where dropout's factor would stand; the engine
        // expects the node.
        let product = g.map("do * o", Mode::CUDNN_POINTWISE_MUL, &[d_o, o])?;
        let sums = g.inner("row sums", f32_, row, packed(row))?;
        g.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, product, sums)?;
        let delta = g.outer(uid::DELTA, "delta", f32_, row, packed(row))?;
        g.map_into(Mode::CUDNN_POINTWISE_MUL, &[sums, one], delta)?;

        // p = exp(scale q k^T - lse), masked.
        let raw = g.inner("scores", f32_, self.score_dims(), packed(self.score_dims()))?;
        g.matmul(q, kt, raw, Bounds { m: rows, n: keys, k: None })?;
        let mut s = g.map("scaled", Mode::CUDNN_POINTWISE_MUL, &[raw, scale])?;
        if let Some((rows, keys)) = lengths {
            s = padded(&mut g, s, rows, keys)?;
        }
        let shifted = g.map("shifted", Mode::CUDNN_POINTWISE_SUB, &[s, lse])?;
        let masked = if self.causal { causal(&mut g, shifted)? } else { shifted };
        let p = g.map("p", Mode::CUDNN_POINTWISE_EXP, &[masked])?;

        // dv = p^T do, summed over the query heads of a group.
        let pt = g.transpose("p^T", bf16, p)?;
        // Of every query head, before a group is added up.
        let [b, h, _, _, keys_of_all, _] = self.extents();
        let whole = |width: usize| [b, h, keys_of_all, width as i64];
        self.kv_gradient(
            &mut g,
            "dv",
            whole(self.head_dim_v),
            pt,
            d_o,
            dv,
            Bounds { m: keys, n: None, k: rows },
        )?;

        // ds = scale p (do v^T - delta); dk = ds^T q.
        let dp = g.inner("dp", f32_, self.score_dims(), packed(self.score_dims()))?;
        g.matmul(d_o, vt, dp, Bounds { m: rows, n: keys, k: None })?;
        let centred = g.map("dp - delta", Mode::CUDNN_POINTWISE_SUB, &[dp, delta])?;
        let weighted = g.map("weighted", Mode::CUDNN_POINTWISE_MUL, &[centred, p])?;
        let ds = g.map("ds", Mode::CUDNN_POINTWISE_MUL, &[weighted, scale])?;
        let dst = g.transpose("ds^T", bf16, ds)?;
        self.kv_gradient(
            &mut g,
            "dk",
            whole(self.head_dim),
            dst,
            q,
            dk,
            Bounds { m: keys, n: None, k: rows },
        )?;

        // dq = ds k. Written at once it is summed in a fixed order; through an fp32 buffer, in any.
        let k = g.transpose("k", bf16, kt)?;
        let bounds = Bounds { m: rows, n: None, k: keys };
        if self.deterministic {
            g.matmul(ds, k, dq, bounds)?;
        } else {
            let sum = g.outer(uid::DQ_SUM, "dq sums", f32_, qd, packed(qd))?;
            g.matmul(ds, k, sum, bounds)?;
            g.map_into(Mode::CUDNN_POINTWISE_IDENTITY, &[sum], dq)?;
        }
        Ok(g)
    }

    /// out = a b with the query heads of each group added up; `full`: extents of a b.
    #[allow(clippy::too_many_arguments)]
    fn kv_gradient(
        &self,
        g: &mut GraphBuilder,
        name: &str,
        full: Dims,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        bounds: Bounds,
    ) -> Result<(), CudnnError> {
        if self.q_heads == self.kv_heads {
            return g.matmul(a, b, out, bounds);
        }
        let all = format!("{name} of every query head");
        let all = g.inner(&all, Data::CUDNN_DATA_BFLOAT16, full, packed(full))?;
        g.matmul(a, b, all, bounds)?;
        g.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, all, out)
    }
}

/// Strides of `[batch, heads, rows, columns]` in memory that lies batch, row, head, column.
fn interleaved([_, heads, rows, columns]: Dims) -> Dims {
    [rows * heads * columns, columns, heads * columns, 1]
}

/// Minus infinity where the key lies behind the query.
fn causal(g: &mut GraphBuilder, s: Tensor) -> Result<Tensor, CudnnError> {
    let row = g.index("query index", Data::CUDNN_DATA_FLOAT, s, 2)?;
    let column = g.index("key index", Data::CUDNN_DATA_FLOAT, s, 3)?;
    let seen = g.test("seen", Mode::CUDNN_POINTWISE_CMP_GE, row, column)?;
    let nothing = g.scalar("minus infinity", f32::NEG_INFINITY)?;
    g.select("masked", s, nothing, seen)
}

/// Minus infinity beyond the lengths.
fn padded(g: &mut GraphBuilder, s: Tensor, rows: Tensor, keys: Tensor) -> Result<Tensor, CudnnError> {
    let int = Data::CUDNN_DATA_INT32;
    let row = g.index("query index of lengths", int, s, 2)?;
    let column = g.index("key index of lengths", int, s, 3)?;
    let a = g.test("query inside", Mode::CUDNN_POINTWISE_CMP_LT, row, rows)?;
    let b = g.test("key inside", Mode::CUDNN_POINTWISE_CMP_LT, column, keys)?;
    let inside = g.test("inside", Mode::CUDNN_POINTWISE_LOGICAL_AND, a, b)?;
    let nothing = g.scalar("minus infinity outside", f32::NEG_INFINITY)?;
    g.select("inside or nothing", s, nothing, inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(pass: Pass, seq: usize, deterministic: bool) -> SdpaSpec {
        SdpaSpec {
            pass,
            batch: 2,
            q_heads: 8,
            kv_heads: 2,
            seq,
            kv_seq: seq,
            causal: true,
            head_dim: 64,
            head_dim_v: 64,
            scale_bits: 0.125f32.to_bits(),
            deterministic,
        }
    }

    #[test]
    fn views_follow_the_buffers() {
        // Element (b, h, s, c) of a buffer [b*s, heads*c].
        let st = interleaved([2, 3, 5, 7]);
        let at = |b: i64, h: i64, s: i64, c: i64| b * st[0] + h * st[1] + s * st[2] + c * st[3];
        assert_eq!(at(1, 2, 4, 6), (5 + 4) * 21 + 2 * 7 + 6);
    }

    #[test]
    fn illegal_extents_never_reach_the_library() {
        for bad in [
            SdpaSpec { kv_heads: 0, ..spec(Pass::Forward, 77, true) },
            SdpaSpec { kv_heads: 3, ..spec(Pass::Backward, 77, true) },
            SdpaSpec { head_dim: 12, ..spec(Pass::Forward, 77, true) },
            spec(Pass::Forward, 0, true),
        ] {
            assert!(bad.graph(91_400).unwrap_err().to_string().contains("no legal extents"));
        }
    }

    #[test]
    fn scratch_follows_the_graph() {
        let of = |s: SdpaSpec, v| -> Vec<i64> { s.scratch(v).iter().map(|x| x.uid).collect() };
        assert!(of(spec(Pass::Forward, 77, true), 91_400).is_empty());
        assert_eq!(of(spec(Pass::Backward, 256, true), 91_400), [uid::DELTA]);
        assert_eq!(of(spec(Pass::Backward, 256, false), 91_400), [uid::DELTA, uid::DQ_SUM]);
        let tail = of(spec(Pass::Backward, 77, true), 91_400);
        assert_eq!(tail, [uid::DELTA, uid::Q_LENGTHS, uid::KV_LENGTHS]);
        assert_eq!(of(spec(Pass::Backward, 77, true), 91_900), [uid::DELTA]);
    }
}
