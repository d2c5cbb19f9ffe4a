//! Shapes that `selftest` runs every op at: odd ones, where tails and masks can go wrong.
//!
//! Over 500 lines: one table of shapes, a function an op family, read side by side with the ops' own folders.

mod images;

use crate::config::ScoreFunction;
use crate::device::cuda::matmul::Layout;
use crate::ops::Op;
use crate::ops::attention::{AttnBwd, AttnFwd, AttnShape};
use crate::ops::bias::{BiasAdd, BiasGrad, BiasProbGrad};
use crate::ops::clamped_glu::{ClampedGluBwd, ClampedGluFwd, GluShape, QUICK_GELU, SILU};
use crate::ops::collective::held::HeldStandIn;
use crate::ops::collective::{Collective, CountsToHost, RowPlan, StandIn};
use crate::ops::columns::{JoinColumns, SplitColumns};
use crate::ops::cross_entropy::{CrossEntropy, LossSum, VocabCrossEntropy, VocabStats};
use crate::ops::delta_net::{CHUNK, DeltaBwd, DeltaFwd, DeltaShape};
use crate::ops::dropout::{Dropout, DropoutAddFwd, DropoutBwd};
use crate::ops::embedding::{EmbeddingBwd, EmbeddingFwd};
use crate::ops::gated_norm::after::{NormGateBwd, NormGateFwd};
use crate::ops::gated_norm::{GatedNormBwd, GatedNormFwd};
use crate::ops::gemm::{Accumulate, BlockGemm, Gemm, SeparateGemms};
use crate::ops::grouped_gemm::{GroupedGemm, PerExpertGemm};
use crate::ops::hyper_connection::{
    HyperExpand, HyperPostBwd, HyperPostFwd, HyperPreBwd, HyperPreFwd, HyperShape, HyperSum,
};
use crate::ops::mamba_conv::{ConvShape, MambaConvBwd, MambaConvFwd};
use crate::ops::mla_rope::{MlaRopeBwd, MlaRopeFwd, MlaShape};
use crate::ops::moe_permute::{Capacity, ChunkMap, CombineRows, GatherRows, MoeSort, Tally};
use crate::ops::optimizer::{Adam, GradNormFinish, GradNormPartial};
use crate::ops::output_gate::{GateShape, OutputGateBwd, OutputGateFwd};
use crate::ops::rmsnorm::{ColumnSum, Partial, RmsNormBwd, RmsNormFwd, WeightGrad, partials};
use crate::ops::rng::Rng;
use crate::ops::rope::scaling::Yarn;
use crate::ops::rope::{Positions, QkvRopeBwd, QkvRopeFwd, RopeScaling};
use crate::ops::router::{CountAdd, ExpertBiasUpdate, Groups, Hash, RouterBwd, RouterFwd};
use crate::ops::shared_kv::{SharedKvBwd, SharedKvFwd, SharedKvShape, TurnHeads};
use crate::ops::squared_relu::{SquaredReluBwd, SquaredReluFwd};
use crate::ops::ssd::{SsdBwd, SsdFwd, SsdShape};
use crate::ops::step::{Copy, MicroBatchSet, RandomFill, StepBegin, StepEnd, TokenGen, Zero};
use crate::ops::swiglu::{SwigluBwd, SwigluFwd};
use crate::ops::token_gate::{TokenGateBwd, TokenGateFwd};
use crate::program::DType;
use std::sync::Arc;

const RNG: Rng = Rng { seed_offset: 2718, draw: 5 };

/// Every op family at odd shapes.
pub fn odd() -> Vec<Arc<dyn Op>> {
    let mut out: Vec<Arc<dyn Op>> = Vec::new();
    let mut add = |op: Arc<dyn Op>| out.push(op);
    gemm(&mut add);
    norm_and_rope(&mut add);
    attention(&mut add);
    wgmma_attention(&mut add);
    windows_and_sinks(&mut add);
    narrow_windows(&mut add);
    biases(&mut add);
    elementwise(&mut add);
    ends(&mut add);
    moe(&mut add);
    mamba(&mut add);
    delta_net(&mut add);
    images::add(&mut add);
    deepseek_v4(&mut add);
    out
}

/// Most work of a case of [`small`]: what an emulated GPU does in about a second.
const SMALL_FLOPS: f64 = 3e7;
const SMALL_BYTES: f64 = 1e6;

/// The cases of [`odd`] that are small, and the smallest of each op that has none.
pub fn small() -> Vec<Arc<dyn Op>> {
    let is_small = |op: &Arc<dyn Op>| op.flops() <= SMALL_FLOPS && op.bytes() <= SMALL_BYTES;
    let (mut kept, large): (Vec<_>, Vec<_>) = odd().into_iter().partition(is_small);
    for op in large {
        match kept.iter().position(|k| k.name() == op.name()) {
            Some(at) if !is_small(&kept[at]) && op.bytes() < kept[at].bytes() => kept[at] = op,
            Some(_) => {}
            None => kept.push(op),
        }
    }
    kept
}

type Add<'a> = dyn FnMut(Arc<dyn Op>) + 'a;

fn gemm(add: &mut Add) {
    for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
        for (m, n, k) in [(8, 16, 24), (136, 264, 520), (1000, 128, 72)] {
            for (out, accumulate) in [
                (DType::Bf16, Accumulate::No),
                (DType::Bf16, Accumulate::InPlace),
                (DType::Bf16, Accumulate::Residual),
                (DType::F32, Accumulate::No),
                (DType::F32, Accumulate::InPlace),
            ] {
                add(Arc::new(Gemm { m, n, k, layout, batch: 1, out, accumulate }));
            }
        }
        let all = Gemm {
            m: 72,
            n: 136,
            k: 40,
            layout,
            batch: 3,
            out: DType::Bf16,
            accumulate: Accumulate::InPlace,
        };
        add(Arc::new(SeparateGemms { all: all.clone() }));
        add(Arc::new(all));
    }
    // A micro-batch may have any number of tokens.
    add(Arc::new(Gemm {
        m: 77,
        n: 128,
        k: 256,
        layout: Layout::Nt,
        batch: 1,
        out: DType::Bf16,
        accumulate: Accumulate::No,
    }));
    add(Arc::new(Gemm {
        m: 128,
        n: 256,
        k: 77,
        layout: Layout::Tn,
        batch: 1,
        out: DType::Bf16,
        accumulate: Accumulate::InPlace,
    }));
}

fn norm_and_rope(add: &mut Add) {
    for (tokens, hidden) in [(1, 8), (7, 264), (130, 2048), (515, 4096), (33, 7168)] {
        for zero_centered in [false, true] {
            add(Arc::new(RmsNormFwd { tokens, hidden, eps: 1e-5, zero_centered }));
        }
        for (residual, zero_centered) in [(false, false), (true, false), (true, true)] {
            for grad in [
                WeightGrad::Partial,
                WeightGrad::Whole { out: DType::Bf16, accumulate: true },
                WeightGrad::Whole { out: DType::F32, accumulate: !residual },
            ] {
                add(Arc::new(RmsNormBwd { tokens, hidden, residual, zero_centered, grad }));
            }
        }
    }
    for matrices in [
        vec![(1, vec![8])],
        vec![(partials(515), vec![4096])],
        vec![(partials(130), vec![128, 128])],
        vec![(partials(515), vec![10, 50, 20])],
        vec![(partials(130), vec![36]), (3, vec![128, 20])],
        vec![(partials(515), vec![4096]), (1, vec![10, 50, 20]), (33, vec![4, 40])],
    ] {
        let partials = matrices.into_iter().map(|(rows, cols)| Partial { rows, cols }).collect::<Vec<_>>();
        for (out, accumulate) in [(DType::Bf16, true), (DType::F32, true), (DType::Bf16, false)] {
            add(Arc::new(ColumnSum { partials: partials.clone(), out, accumulate }));
        }
    }
    for positions in [
        Positions::whole(1, 1),
        Positions::whole(2, 65),
        Positions { batch: 1, seq: 130, chunks: [(65, 65), (4031, 65)] },
    ] {
        for (q_heads, kv_heads, head_dim, rotary_dim, qk_norm, gated) in [
            (4, 2, 64, 64, None, false),
            (8, 1, 128, 128, Some(1e-6), false),
            (4, 4, 64, 32, Some(1e-5), false),
            // Zero-centred norms and an output gate.
            (4, 2, 256, 64, Some(1e-6), true),
            (3, 1, 64, 64, None, true),
        ] {
            let fwd = QkvRopeFwd {
                positions,
                q_heads,
                kv_heads,
                head_dim,
                rotary_dim,
                base: 5e5,
                qk_norm,
                scaling: None,
                axes: None,
                zero_centered: gated,
                gated,
                bias: false,
            };
            add(Arc::new(QkvRopeBwd::of(&fwd)));
            if qk_norm.is_none() && !gated {
                add(Arc::new(QkvRopeFwd { bias: true, ..fwd.clone() }));
            }
            add(Arc::new(fwd));
        }
        let yarn = RopeScaling::Yarn(Yarn {
            factor: 40.0,
            original_max_position: 4096.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: 1.0,
            mscale_all_dim: 0.0,
            rounded: true,
        });
        let fwd = QkvRopeFwd {
            positions,
            q_heads: 4,
            kv_heads: 2,
            head_dim: 64,
            rotary_dim: 64,
            base: 150_000.0,
            qk_norm: Some(1e-5),
            scaling: Some(yarn),
            axes: None,
            zero_centered: false,
            gated: false,
            bias: false,
        };
        add(Arc::new(QkvRopeBwd::of(&fwd)));
        add(Arc::new(fwd));
        for (heads, nope, rotary, value, scaling) in [
            (1, 8, 8, 8, None),
            (5, 128, 64, 128, Some(yarn)),
            (16, 192, 64, 256, None),
            (3, 32, 16, 32, None),
        ] {
            let shape = MlaShape { positions, heads, nope, rotary, value, base: 1e4, scaling };
            add(Arc::new(MlaRopeFwd { shape }));
            add(Arc::new(MlaRopeBwd { shape }));
        }
        let rows = positions.rows();
        for (first, second) in [(8, 8), (512, 64), (264, 24)] {
            add(Arc::new(SplitColumns { rows, first, second }));
            add(Arc::new(JoinColumns { rows, first, second }));
        }
    }
}

fn attention(add: &mut Add) {
    let whole = |batch, seq| (Positions::whole(batch, seq), seq);
    // Multi-latent attention: keys wider than values, DeepSeek's and GLM's widths, a scale of its own.
    for (positions, kv_len) in [whole(1, 1), whole(2, 77), whole(1, 257)] {
        for (heads, head_dim, head_dim_v) in [(3, 192, 128), (2, 256, 256), (2, 48, 32)] {
            for p in [0.0, 0.1] {
                let shape = AttnShape {
                    positions,
                    kv_len,
                    q_heads: heads,
                    kv_heads: heads,
                    head_dim,
                    head_dim_v: Some(head_dim_v),
                    scale: Some(0.1),
                    dropout: (p > 0.0).then_some(Dropout { p, rng: RNG }),
                    ..AttnShape::default()
                };
                add(Arc::new(AttnFwd { shape: shape.clone() }));
                add(Arc::new(AttnBwd { shape }));
            }
        }
    }
    let chunks = (Positions { batch: 1, seq: 192, chunks: [(96, 96), (192, 96)] }, 384);
    let shapes = [whole(1, 1), whole(2, 7), whole(1, 129), whole(1, 513), whole(2, 256), chunks];
    for (positions, kv_len) in shapes {
        for (q_heads, kv_heads, head_dim) in [(4, 1, 128), (4, 2, 64), (2, 2, 128)] {
            for p in [0.0, 0.1] {
                let dropout = (p > 0.0).then_some(Dropout { p, rng: RNG });
                let shape = AttnShape {
                    positions,
                    kv_len,
                    q_heads,
                    kv_heads,
                    head_dim,
                    dropout,
                    ..AttnShape::default()
                };
                add(Arc::new(AttnFwd { shape: shape.clone() }));
                add(Arc::new(AttnBwd { shape }));
            }
        }
    }
}

/// Edges of the kernels for heads of 128 on compute capability 9.0: one row, tiles of 64 and one row more, both ways to delta (512
/// tokens), groups of every cluster size, and groups that a cluster takes in turns.
fn wgmma_attention(add: &mut Add) {
    for (batch, seq, q_heads, kv_heads) in [
        (1, 2, 8, 1),
        (2, 63, 4, 1),
        (1, 64, 4, 2),
        (2, 65, 8, 1),
        (1, 128, 4, 1),
        (1, 128, 8, 1),
        (1, 192, 2, 2),
        (1, 200, 16, 1),
        (1, 130, 6, 1),
        (1, 129, 5, 1),
        (1, 512, 8, 1),
        (1, 512, 2, 2),
        (2, 577, 4, 1),
        (1, 640, 8, 1),
    ] {
        let shape = AttnShape {
            positions: Positions::whole(batch, seq),
            kv_len: seq,
            q_heads,
            kv_heads,
            head_dim: 128,
            ..AttnShape::default()
        };
        add(Arc::new(AttnFwd { shape: shape.clone() }));
        add(Arc::new(AttnBwd { shape }));
    }
}

/// Windows narrower and wider than a tile, chunks of a context-parallel rank, one key, the whole sequence; sinks with and
/// without them.
fn windows_and_sinks(add: &mut Add) {
    let whole = |batch, seq| (Positions::whole(batch, seq), seq);
    let chunks = (Positions { batch: 1, seq: 192, chunks: [(96, 96), (288, 96)] }, 384);
    for ((positions, kv_len), window) in [
        (whole(1, 1), None),
        (whole(2, 77), Some(1)),
        (whole(2, 77), Some(24)),
        (whole(1, 257), Some(128)),
        (whole(1, 513), Some(128)),
        (chunks, Some(100)),
        (chunks, None),
        (whole(1, 129), Some(129)),
    ] {
        for (q_heads, kv_heads, head_dim, p, sinks) in
            [(8, 1, 64, 0.0, true), (4, 2, 128, 0.0, false), (4, 2, 64, 0.1, true), (2, 2, 256, 0.0, true)]
        {
            let dropout = (p > 0.0).then_some(Dropout { p, rng: RNG });
            let shape = AttnShape {
                positions,
                kv_len,
                q_heads,
                kv_heads,
                head_dim,
                window,
                sinks,
                dropout,
                ..AttnShape::default()
            };
            add(Arc::new(AttnFwd { shape: shape.clone() }));
            add(Arc::new(AttnBwd { shape }));
        }
    }
}

/// Edges of the kernels for narrow windows of heads of 64: strips of 16 rows and one row more or less, windows of a whole number of
/// strips and not, groups of one and of eight heads; then enough sequences for each size of a block (2, 4, 8 warps, two strips a warp) and for blocks that
/// take several heads.
fn narrow_windows(add: &mut Add) {
    for (batch, seq, q_heads, kv_heads, window) in [
        (1, 2, 8, 1, 1),
        (1, 16, 3, 3, 15),
        (2, 17, 8, 1, 16),
        (1, 33, 2, 2, 17),
        (1, 100, 8, 1, 18),
        (1, 129, 2, 1, 100),
        (1, 131, 1, 1, 127),
        (1, 145, 2, 1, 128),
        (1, 300, 8, 1, 113),
        (2, 40, 32, 32, 20),
        (2, 97, 32, 32, 20),
        (3, 257, 32, 16, 31),
        (16, 130, 32, 16, 32),
    ] {
        for sinks in [false, true] {
            let shape = AttnShape {
                positions: Positions::whole(batch, seq),
                kv_len: seq,
                q_heads,
                kv_heads,
                head_dim: 64,
                window: Some(window),
                sinks,
                ..AttnShape::default()
            };
            add(Arc::new(AttnFwd { shape: shape.clone() }));
            add(Arc::new(AttnBwd { shape }));
        }
    }
}

/// Hyper-connections, heads of shared keys and values, wide heads, block-diagonal products, routers by hash.
fn deepseek_v4(add: &mut Add) {
    for (tokens, hidden, streams, iterations) in
        [(1, 8, 4, 20), (77, 264, 4, 20), (33, 256, 2, 3), (300, 4096, 4, 20)]
    {
        let shape = HyperShape { tokens, hidden, streams, iterations, eps: 1e-6, head: false };
        add(Arc::new(HyperPreFwd { shape }));
        add(Arc::new(HyperPreBwd { shape, carried: false }));
        add(Arc::new(HyperPostFwd { shape }));
        add(Arc::new(HyperPostBwd { shape }));
        for also in [false, true] {
            add(Arc::new(HyperExpand { shape, add: also }));
        }
        add(Arc::new(HyperSum { shape }));
        let shape = HyperShape { head: true, ..shape };
        add(Arc::new(HyperPreFwd { shape }));
        for carried in [false, true] {
            add(Arc::new(HyperPreBwd { shape, carried }));
        }
    }
    for (positions, heads, head_dim, rotary) in [
        (Positions::whole(1, 1), 1, 64, 16),
        (Positions::whole(2, 77), 3, 512, 64),
        (Positions { batch: 1, seq: 96, chunks: [(48, 48), (144, 48)] }, 8, 264, 8),
    ] {
        let shape = SharedKvShape { positions, heads, head_dim, rotary, eps: 1e-6, base: 1e4, scaling: None };
        add(Arc::new(SharedKvFwd { shape }));
        add(Arc::new(SharedKvBwd { shape }));
        for forth in [true, false] {
            add(Arc::new(TurnHeads { shape, forth }));
        }
    }
    for (batch, seq, q_heads, head_dim, head_dim_v, window) in [
        (1, 17, 2, 512, None, None),
        (2, 77, 4, 512, None, Some(24)),
        (1, 257, 8, 512, None, Some(128)),
        (1, 130, 2, 384, Some(320), None),
    ] {
        let shape = AttnShape {
            positions: Positions::whole(batch, seq),
            kv_len: seq,
            q_heads,
            kv_heads: 1,
            head_dim,
            head_dim_v,
            window,
            sinks: true,
            ..AttnShape::default()
        };
        add(Arc::new(AttnFwd { shape: shape.clone() }));
        add(Arc::new(AttnBwd { shape }));
    }
    for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
        for (m, n, k, batch) in [(72, 136, 40, 3), (77, 64, 128, 2)] {
            if layout == Layout::Tn {
                for (out, accumulate) in [(DType::Bf16, Accumulate::InPlace), (DType::F32, Accumulate::No)] {
                    add(Arc::new(BlockGemm {
                        all: Gemm { m: n, n: k, k: m, layout, batch, out, accumulate },
                    }));
                }
            } else {
                let (out, accumulate) = (DType::Bf16, Accumulate::No);
                add(Arc::new(BlockGemm { all: Gemm { m, n, k, layout, batch, out, accumulate } }));
            }
        }
    }
    for (tokens, experts, topk, hash) in [(77, 256, 6, None), (130, 384, 6, Some(2)), (33, 8, 8, Some(0))] {
        let score = ScoreFunction::SqrtSoftplus;
        add(Arc::new(RouterFwd {
            tokens,
            experts,
            topk,
            score,
            pre_softmax: false,
            scaling: Some(1.5),
            forced: None,
            skew: false,
            expert_bias: hash.is_none(),
            groups: None,
            hash: hash.map(|salt| Hash { salt }),
            first_token: 0,
        }));
        add(Arc::new(RouterBwd {
            tokens,
            experts,
            topk,
            score,
            pre_softmax: false,
            scaling: Some(1.5),
            aux_coeff: 0.01,
            aux_scale: 0.5,
        }));
    }
}

fn biases(add: &mut Add) {
    for (rows, cols) in [(1, 8), (77, 264), (515, 2880), (300, 5760)] {
        for (experts, weighted) in [(0, false), (1, true), (5, false), (32, true)] {
            for dtype in [DType::Bf16, DType::F32] {
                add(Arc::new(BiasAdd { rows, cols, experts, weighted, dtype }));
                let accumulate = dtype == DType::Bf16 || experts == 5;
                add(Arc::new(BiasGrad { rows, cols, experts, weighted, out: dtype, accumulate }));
            }
            if weighted {
                add(Arc::new(BiasProbGrad { rows, cols, experts }));
            }
        }
    }
    for (rows, ffn) in [(1, 8), (77, 264), (130, 2880)] {
        for experts in [0, 5, 32] {
            for (bias, limit, alpha) in [
                (true, Some(7.0), QUICK_GELU),
                (true, Some(0.5), QUICK_GELU),
                (false, None, QUICK_GELU),
                (false, Some(0.5), SILU),
            ] {
                let shift = if alpha == SILU { 0.0 } else { 1.0 };
                let shape = GluShape { rows, ffn, experts, bias, limit, shift, alpha };
                add(Arc::new(ClampedGluFwd { shape: shape.clone() }));
                add(Arc::new(ClampedGluBwd { shape }));
            }
        }
    }
}

fn elementwise(add: &mut Add) {
    for (rows, ffn) in [(1, 8), (77, 264), (300, 768)] {
        add(Arc::new(SwigluFwd { rows, ffn, routed: false, experts: 0 }));
        add(Arc::new(SwigluBwd { rows, ffn, routed: false, experts: 0 }));
        add(Arc::new(SwigluFwd { rows, ffn, routed: true, experts: 5 }));
        add(Arc::new(SwigluBwd { rows, ffn, routed: true, experts: 5 }));
        for (routed, experts) in [(false, 0), (true, 5)] {
            add(Arc::new(SquaredReluFwd { rows, ffn, routed, experts }));
            add(Arc::new(SquaredReluBwd { rows, ffn, routed, experts }));
        }
    }
    for len in [8, 1000, 77 * 264] {
        let dropout = Dropout { p: 0.1, rng: RNG };
        add(Arc::new(DropoutAddFwd { len, dropout }));
        add(Arc::new(DropoutBwd { len, dropout }));
        add(Arc::new(DropoutAddFwd { len, dropout: Dropout { p: 0.0, rng: RNG } }));
        for dtype in [DType::Bf16, DType::F32] {
            add(Arc::new(RandomFill { len, std: 0.5, rng: RNG, dtype }));
            add(Arc::new(Zero { dtype, len }));
            add(Arc::new(Copy { dtype, len }));
            add(Arc::new(GradNormPartial { len, dtype, partials: 64 }));
            add(Arc::new(Adam { len, grad: dtype, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }));
        }
    }
    add(Arc::new(GradNormFinish { partials: 2048, clip: 1.0 }));
    add(Arc::new(StepBegin {}));
    add(Arc::new(MicroBatchSet { micro_batch: 5 }));
    add(Arc::new(StepEnd { lr: 3e-4, min_lr: 3e-5, warmup_iters: 10, decay_iters: 50 }));
}

fn ends(add: &mut Add) {
    for (tokens, vocab, hidden) in [(1, 8, 8), (77, 1024, 264), (130, 50257, 128)] {
        add(Arc::new(EmbeddingFwd { tokens, vocab, vocab_start: 0, hidden }));
        for grad in [DType::Bf16, DType::F32] {
            add(Arc::new(EmbeddingBwd { tokens, vocab, vocab_start: 0, hidden, grad }));
        }
        add(Arc::new(CrossEntropy { tokens, vocab, grad_scale: 1.0 / tokens as f32 }));
        let (vocab_start, grad_scale) = (vocab, 1.0 / tokens as f32);
        add(Arc::new(VocabStats { tokens, vocab, vocab_start }));
        add(Arc::new(VocabCrossEntropy { tokens, vocab, vocab_start, ranks: 3, grad_scale }));
        add(Arc::new(LossSum { tokens, scale: 1.0 / tokens as f32 }));
        add(Arc::new(TokenGen { positions: Positions::whole(1, tokens), vocab, rng: RNG }));
    }
    for (kind, rows, cols, ranks) in [
        (Collective::AllGather, 3, 40, 4),
        (Collective::ReduceScatter, 3, 40, 4),
        (Collective::AllReduce, 3, 40, 4),
        (Collective::AllToAll, 12, 40, 4),
        (Collective::InPlace, 1, 4096, 8),
        (Collective::Send, 12, 40, 2),
        (Collective::Receive, 12, 40, 2),
    ] {
        let copies = StandIn { kind, rows, cols, ranks, dtype: DType::Bf16 };
        add(Arc::new(HeldStandIn { copies: copies.clone(), ns: 2000 }));
        add(Arc::new(copies));
    }
    add(Arc::new(CountsToHost { len: 129 }));
    for (ranks, own, local) in [(1, 0, 1), (2, 1, 64), (8, 3, 5)] {
        add(Arc::new(RowPlan { ranks, own, local, rows: 1000 }));
    }
}

fn moe(add: &mut Add) {
    let softmax = ScoreFunction::Softmax;
    let routers = [
        (softmax, false, None, None, false),
        (softmax, true, Some(2.5), None, false),
        (ScoreFunction::Sigmoid, false, Some(2.5), None, true),
        (softmax, false, None, Some(RNG), false),
    ];
    for (score, pre_softmax, scaling, forced, expert_bias) in routers {
        for (tokens, experts, topk) in [(1, 8, 2), (77, 128, 8), (300, 60, 4), (130, 256, 8)] {
            let fwd = RouterFwd {
                tokens,
                experts,
                topk,
                score,
                pre_softmax,
                scaling,
                forced,
                skew: forced.is_some(),
                expert_bias,
                groups: None,
                hash: None,
                first_token: 0,
            };
            add(Arc::new(RouterBwd {
                tokens,
                experts,
                topk,
                score,
                pre_softmax,
                scaling,
                aux_coeff: 1e-3,
                aux_scale: 0.5,
            }));
            add(Arc::new(fwd));
        }
    }
    for (tokens, experts, topk, count, chosen) in
        [(1, 8, 2, 4, 2), (130, 256, 8, 8, 4), (77, 60, 4, 6, 2), (33, 384, 8, 32, 8)]
    {
        for (score, expert_bias) in
            [(softmax, false), (ScoreFunction::Sigmoid, false), (ScoreFunction::Sigmoid, true)]
        {
            add(Arc::new(RouterFwd {
                tokens,
                experts,
                topk,
                score,
                pre_softmax: false,
                scaling: Some(2.5),
                forced: None,
                skew: false,
                expert_bias,
                groups: Some(Groups { count, chosen }),
                hash: None,
                first_token: 0,
            }));
        }
    }
    for experts in [5, 256, 384] {
        add(Arc::new(CountAdd { experts }));
        add(Arc::new(ExpertBiasUpdate { layers: 3, experts, rate: 1e-3 }));
    }
    let tally = Tally { micro_batches: 3, stride: 2 };
    for (tokens, topk, experts, modulo, capacity) in [
        (1, 2, 8, true, None),
        (77, 8, 128, false, None),
        (300, 8, 8, true, None),
        (1030, 8, 8, true, Some(1030)),
        (130, 4, 16, false, Some(20)),
    ] {
        let Some(most) = capacity else {
            // As many rows as arrive; more, as a rank capacity factor has them; fewer, which is a fault.
            let pairs = tokens * topk;
            for rows in [pairs, pairs * 3 / 2, pairs * 9 / 10] {
                add(Arc::new(MoeSort { tokens, topk, experts, modulo, capacity: None, rows, tally }));
            }
            continue;
        };
        for (padded, by_position) in [(true, false), (true, true), (false, false), (false, true)] {
            let capacity = Some(Capacity { rows: most, padded, by_position });
            let rows = if padded { most * experts } else { tokens * topk };
            add(Arc::new(MoeSort { tokens, topk, experts, modulo, capacity, rows, tally }));
        }
    }
    for (rows, in_rows, hidden, div) in [(8, 4, 8, 2), (616, 77, 264, 8), (300, 300, 2048, 1)] {
        for probs in [false, true] {
            add(Arc::new(GatherRows { rows, in_rows, hidden, div, probs }));
        }
    }
    for (tokens, topk, rows, hidden) in [(1, 2, 2, 8), (77, 8, 616, 264), (130, 8, 1000, 2048)] {
        for (residual, shared, dprobs) in [(true, false, false), (true, true, false), (false, false, true)] {
            add(Arc::new(CombineRows { tokens, topk, rows, hidden, residual, shared, dprobs }));
        }
    }
    for (tokens, hidden) in [(1, 8), (77, 264), (515, 2048), (33, 7168)] {
        add(Arc::new(TokenGateFwd { tokens, hidden }));
        add(Arc::new(TokenGateBwd { tokens, hidden }));
    }
    add(Arc::new(ChunkMap { experts: 32, local: 8, rows: 500 }));
    for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
        for (experts, rows, n, k) in [
            (1, 1, 8, 8),
            (5, 333, 136, 264),
            (8, 1500, 768, 256),
            (8, 2000, 256, 1536),
            (40, 700, 72, 136),
            (3, 1700, 264, 520),
        ] {
            for (out, accumulate) in
                [(DType::Bf16, false), (DType::Bf16, true), (DType::F32, false), (DType::F32, true)]
            {
                if layout == Layout::Tn || !accumulate {
                    let grouped = GroupedGemm { experts, rows, filled: rows, n, k, layout, out, accumulate };
                    // What steps have: main gradients alone are fp32, and accumulate.
                    for ranks in [1, 4].into_iter().filter(|_| accumulate || out == DType::Bf16) {
                        let bins = experts * ranks;
                        add(Arc::new(PerExpertGemm { grouped: grouped.clone(), bins }));
                    }
                    add(Arc::new(grouped));
                }
            }
        }
    }
}

fn mamba(add: &mut Add) {
    for (batch, seq, heads, head_dim, groups, state, chunk) in [
        (1, 1, 8, 64, 8, 128, 128),
        (2, 77, 8, 32, 2, 32, 32),
        (2, 333, 8, 64, 2, 128, 128),
        (1, 1000, 16, 64, 1, 128, 128),
        // One block a group's heads would not fill the device: parts of groups, and states in two halves.
        (1, 600, 32, 64, 1, 256, 128),
        (2, 130, 16, 16, 4, 48, 64),
        // Whole groups in a block.
        (1, 4100, 16, 64, 8, 128, 128),
    ] {
        let shape = SsdShape { batch, seq, heads, head_dim, groups, state, chunk };
        add(Arc::new(SsdFwd { shape }));
        add(Arc::new(SsdBwd { shape }));
        let conv = ConvShape {
            batch,
            seq,
            channels: shape.conv_width(),
            first: shape.inner(),
            tail: heads,
            bias: true,
        };
        add(Arc::new(MambaConvFwd { shape: conv }));
        add(Arc::new(MambaConvBwd { shape: conv }));
    }
    for (rows, groups, group, z_stride) in
        [(1, 1, 8, 8), (77, 8, 512, 10304), (600, 2, 2048, 4096), (515, 3, 264, 1000)]
    {
        add(Arc::new(GatedNormFwd { rows, groups, group, z_stride, eps: 1e-5 }));
        add(Arc::new(GatedNormBwd { rows, groups, group, z_stride }));
    }
}

fn delta_net(add: &mut Add) {
    for (batch, seq, key_heads, value_heads, key_dim, value_dim) in [
        (1, 1, 1, 1, 32, 32),
        (2, CHUNK + 1, 1, 2, 64, 32),
        (2, 77, 2, 6, 32, 96),
        (1, 2 * CHUNK, 2, 2, 128, 64),
        // A model's heads; four value heads a key head; enough heads for wide slices.
        (1, 333, 2, 4, 128, 128),
        (1, 200, 1, 4, 128, 128),
        (2, 130, 16, 32, 128, 128),
    ] {
        let shape = DeltaShape { batch, seq, key_heads, value_heads, key_dim, value_dim };
        add(Arc::new(DeltaFwd { shape }));
        add(Arc::new(DeltaBwd { shape }));
        let tail = (2 * value_heads).next_multiple_of(8);
        let (channels, first) = (shape.qkv_width(), shape.value_width());
        let conv = ConvShape { batch, seq, channels, first, tail, bias: false };
        add(Arc::new(MambaConvFwd { shape: conv }));
        add(Arc::new(MambaConvBwd { shape: conv }));
    }
    for (rows, groups, group, z_stride, zero_centered) in
        [(1, 1, 8, 8, false), (77, 32, 128, 12352, true), (515, 3, 264, 1000, false), (3, 2, 512, 2048, true)]
    {
        add(Arc::new(NormGateFwd { rows, groups, group, z_stride, eps: 1e-6, zero_centered }));
        add(Arc::new(NormGateBwd { rows, groups, group, z_stride, zero_centered }));
    }
    for (rows, width, stride, first) in [(1, 8, 8, 0), (77, 264, 800, 528), (130, 4096, 9216, 5120)] {
        let shape = GateShape { rows, width, stride, first };
        add(Arc::new(OutputGateFwd { shape }));
        add(Arc::new(OutputGateBwd { shape }));
    }
}
