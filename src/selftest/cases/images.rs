//! Shapes of what image towers and diffusion transformers have beside the others.

use super::{Add, RNG};
use crate::ops::attention::{AttnBwd, AttnFwd, AttnShape};
use crate::ops::dropout::Dropout;
use crate::ops::flow::{FlowLoss, FlowSample};
use crate::ops::gelu::{Curve, CurveBwd, CurveFwd};
use crate::ops::image_rows::{ImageRowsBwd, ImageRowsFwd, ImageShape};
use crate::ops::layer_norm::gate::{GatedResidualBwd, GatedResidualFwd, ModulationGrad, ToBf16};
use crate::ops::layer_norm::{LayerNormBwd, LayerNormFwd, Modulation};
use crate::ops::patch_position::{PatchPositionBwd, PatchPositionFwd};
use crate::ops::rng::Rng;
use crate::ops::rope::{Axes, Positions, QkvRopeBwd, QkvRopeFwd};
use crate::ops::wide_norm::{Parts, WideNormBwd, WideNormFwd, WideShape};
use crate::program::DType;
use std::sync::Arc;

pub(super) fn add(add: &mut Add) {
    attention(add);
    rotary(add);
    norms(add);
    rows(add);
    gates(add);
    video(add);
}

/// As many keys as queries, fewer and more; heads of no whole fragment (the tower's 72), groups, a rank's rows.
fn attention(add: &mut Add) {
    let chunks = Positions { batch: 1, seq: 192, chunks: [(96, 96), (288, 96)] };
    for (positions, kv_len) in [
        (Positions::whole(1, 1), 1),
        (Positions::whole(2, 77), 77),
        (Positions::whole(2, 65), 130),
        (Positions::whole(1, 257), 33),
        (chunks, 384),
    ] {
        for (q_heads, kv_heads, head_dim, p) in
            [(2, 2, 72, 0.0), (3, 3, 128, 0.0), (4, 2, 64, 0.0), (2, 1, 40, 0.0), (2, 1, 64, 0.1)]
        {
            let shape = AttnShape {
                positions,
                kv_len,
                q_heads,
                kv_heads,
                head_dim,
                bidirectional: true,
                dropout: (p > 0.0).then_some(Dropout { p, rng: RNG }),
                ..AttnShape::default()
            };
            add(Arc::new(AttnFwd { shape: shape.clone() }));
            add(Arc::new(AttnBwd { shape }));
        }
    }
}

fn rotary(add: &mut Add) {
    let text = |start, side, section| Some(Axes::Text { start, side, section });
    let chunks = Positions { batch: 1, seq: 130, chunks: [(65, 65), (4031, 65)] };
    for (positions, heads, head_dim, rotary_dim, axes, qk_norm) in [
        (Positions::whole(2, 100), [8, 1], 128, 128, text(4, 8, [24, 20, 20]), Some(1e-6)),
        (chunks, [4, 2], 256, 64, text(60, 8, [11, 11, 10]), Some(1e-6)),
        (Positions::whole(2, 36), [3, 3], 72, 72, Some(Axes::Patches { side: 6 }), None),
    ] {
        let fwd = QkvRopeFwd {
            positions,
            q_heads: heads[0],
            kv_heads: heads[1],
            head_dim,
            rotary_dim,
            base: 1e4,
            qk_norm,
            scaling: None,
            axes,
            zero_centered: false,
            gated: false,
            bias: qk_norm.is_none(),
        };
        add(Arc::new(QkvRopeBwd::of(&fwd)));
        add(Arc::new(fwd));
    }
}

fn norms(add: &mut Add) {
    let modulated = |sequences| Some(Modulation { sequences, slots: 3, time_slots: 6, time_first: 3 });
    for (rows, hidden, modulation) in [
        (1, 8, None),
        (77, 1152, None),
        (12, 264, modulated(2)),
        (515, 264, None),
        (33, 9216, None),
        (130, 2048, modulated(2)),
        (33, 5120, modulated(1)),
    ] {
        add(Arc::new(LayerNormFwd { rows, hidden, eps: 1e-6, modulation }));
        for residual in [false, true] {
            add(Arc::new(LayerNormBwd { rows, hidden, modulation, residual }));
        }
    }
    for (rows, cols) in [(1, 8), (77, 264), (130, 4304)] {
        for (curve, bias) in [(Curve::Gelu, true), (Curve::Gelu, false), (Curve::Silu, false)] {
            add(Arc::new(CurveFwd { rows, cols, curve, bias }));
            add(Arc::new(CurveBwd { rows, cols, curve, bias }));
        }
    }
}

fn rows(add: &mut Add) {
    let part = Positions { batch: 2, seq: 40, chunks: [(0, 20), (60, 20)] };
    for (positions, rows, hidden) in [(Positions::whole(2, 77), 154, 264), (part, 80, 2048), (part, 40, 64)] {
        for replace in [false, true] {
            let shape = ImageShape { positions, rows, hidden, start: 4, len: 36, replace };
            add(Arc::new(ImageRowsFwd { shape: shape.clone() }));
            add(Arc::new(ImageRowsBwd { shape }));
        }
    }
    for (images, side, table_side, hidden) in [(2, 16, 48, 64), (1, 6, 4, 264), (3, 2, 1, 8)] {
        add(Arc::new(PatchPositionFwd { images, side, table_side, hidden }));
        for (out, accumulate) in [(DType::Bf16, true), (DType::F32, false)] {
            add(Arc::new(PatchPositionBwd { images, side, table_side, hidden, out, accumulate }));
        }
    }
}

fn gates(add: &mut Add) {
    for (rows, hidden, sequences) in [(4, 8, 2), (77, 264, 1), (600, 2048, 2), (33, 5120, 1)] {
        let of_block = Modulation { sequences, slots: 3, time_slots: 6, time_first: 3 };
        let of_head = Modulation { sequences, slots: 2, time_slots: 1, time_first: 0 };
        add(Arc::new(GatedResidualFwd { rows, hidden, modulation: of_block }));
        add(Arc::new(GatedResidualBwd { rows, hidden, modulation: of_block }));
        for (modulation, gate_parts, out, accumulate) in [
            (of_block, Some(rows.min(264)), DType::Bf16, true),
            (of_block, Some(3), DType::F32, false),
            (of_head, None, DType::F32, true),
        ] {
            let norm_parts = rows.min(17);
            add(Arc::new(ModulationGrad { hidden, modulation, norm_parts, gate_parts, out, accumulate }));
        }
        for with in [false, true] {
            add(Arc::new(ToBf16 { len: hidden * sequences, add: with }));
        }
    }
}

fn video(add: &mut Add) {
    let chunks = Positions { batch: 1, seq: 40, chunks: [(20, 20), (100, 20)] };
    let axes = Some((Axes::Video { height: 4, width: 5 }, 1e4));
    for (parts, positions, heads, head_dim, rotary) in [
        (Parts::Qkv, Positions::whole(2, 60), 5, 64, axes),
        (Parts::Qkv, Positions { batch: 2, seq: 6, chunks: [(3, 3), (45, 3)] }, 3, 16, axes),
        (Parts::Kv, Positions::whole(1, 9), 3, 24, None),
        (Parts::Qkv, chunks, 20, 128, axes),
        (Parts::Qkv, Positions::whole(1, 300), 1, 16, axes),
        (Parts::Q, Positions::whole(1, 77), 40, 128, None),
        (Parts::Kv, Positions::whole(1, 33), 3, 40, None),
    ] {
        let shape = WideShape { parts, positions, width: heads * head_dim, head_dim, rotary, eps: 1e-6 };
        add(Arc::new(WideNormFwd { shape: shape.clone() }));
        add(Arc::new(WideNormBwd { shape }));
    }
    let rng = |draw| Rng { draw, ..RNG };
    for (positions, length, values, frequencies) in
        [(Positions::whole(5, 12), 12, 8, 16), (chunks, 120, 64, 256)]
    {
        let [sample, noise, time] = [11, 12, 13].map(rng);
        add(Arc::new(FlowSample { positions, length, values, frequencies, sample, noise, time }));
    }
    for (tokens, values) in [(1, 8), (77, 64), (130, 264)] {
        add(Arc::new(FlowLoss { tokens, values, grad_scale: 0.5 }));
    }
}
