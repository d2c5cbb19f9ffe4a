//! The image tower of Qwen's vision-language models, and where its features meet the decoder's tokens: patches by a product,
//! learned and rotary positions, blocks of bidirectional attention and a GELU MLP, 2 x 2 patches merged to a token of the
//! decoder's width, whose rows replace the embedding's; DeepStack adds features of earlier blocks after the first layers.
//! (Bai et al., "Qwen3-VL Technical Report", 2025; sizes: transformers' `Qwen3VLMoeVisionConfig`.)
//!
//! Every rank of the first stage runs the whole tower on the images of its sequences. The merger's GELU has the tanh form,
//! as the blocks'.

use super::linear_biased::{Product, layer_norm, linear};
use super::rng::INPUTS;
use super::weights::Spec;
use super::{Stack, WorkloadError};
use crate::config::{RunConfig, Vision};
use crate::ops::attention::{AttnBwd, AttnFwd, AttnShape};
use crate::ops::gelu::Curve;
use crate::ops::image_rows::{ImageRowsBwd, ImageRowsFwd, ImageShape};
use crate::ops::patch_position::{PatchPositionBwd, PatchPositionFwd};
use crate::ops::rope::axes::MERGE;
use crate::ops::rope::{Axes, Positions, QkvRopeBwd, QkvRopeFwd};
use crate::ops::step::RandomFill;
use crate::program::{BufId, DType, Init, Lifetime, Part, Pass};
use std::ops::Range;

/// Of the tower's norms, whatever the decoder's is (the models' code has it fixed).
const EPSILON: f64 = 1e-6;
/// Base of the tower's rotary frequencies (the same).
const ROTARY_BASE: f64 = 10_000.0;
/// Patches merged into a token.
const MERGED: usize = MERGE * MERGE;

/// Name of a DeepStack merger.
fn deepstack(level: usize) -> String {
    format!("vision.deepstack{level}")
}

/// Weights of the tower.
pub(super) fn weights(cfg: &RunConfig) -> Vec<Spec> {
    let Some(v) = &cfg.model.vision else { return Vec::new() };
    let (std, h) = (cfg.model.init_method_std, v.hidden_size);
    let mut out = Vec::from(linear("vision.patch", h, v.patch_values, std));
    out.push(Spec::normal("vision.position.weight".into(), v.table_side * v.table_side, h, std));
    for i in 0..v.depth {
        let name = |what: &str| format!("vision.block{i}.{what}");
        out.extend(layer_norm(&name("norm1"), h, std));
        out.extend(linear(&name("qkv"), 3 * h, h, std));
        out.extend(linear(&name("proj"), h, h, std));
        out.extend(layer_norm(&name("norm2"), h, std));
        out.extend(linear(&name("fc1"), v.ffn_hidden_size, h, std));
        out.extend(linear(&name("fc2"), h, v.ffn_hidden_size, std));
    }
    let mut merger = |name: &str, normed: usize| {
        out.extend(layer_norm(&format!("{name}.norm"), normed, std));
        out.extend(linear(&format!("{name}.fc1"), MERGED * h, MERGED * h, std));
        out.extend(linear(&format!("{name}.fc2"), cfg.model.hidden_size, MERGED * h, std));
    };
    merger("vision.merger", h);
    // These are normed after four patches have become one row.
    (0..v.deepstack.len()).for_each(|n| merger(&deepstack(n), MERGED * h));
    out
}

/// Shapes of a rank's tower.
#[derive(Debug, Clone)]
struct Tower {
    v: Vision,
    images: usize,
    /// Rows of all images, before and after merging.
    patches: usize,
    tokens: usize,
    /// Width of a token of the decoder.
    width: usize,
}

impl Tower {
    fn rope(&self) -> QkvRopeFwd {
        let d = self.v.hidden_size / self.v.num_heads;
        QkvRopeFwd {
            positions: Positions::whole(self.images, self.v.patches()),
            q_heads: self.v.num_heads,
            kv_heads: self.v.num_heads,
            head_dim: d,
            rotary_dim: d,
            base: ROTARY_BASE,
            qk_norm: None,
            scaling: None,
            axes: Some(Axes::Patches { side: self.v.side }),
            zero_centered: false,
            gated: false,
            bias: true,
        }
    }
    fn attention(&self) -> AttnShape {
        AttnShape {
            positions: Positions::whole(self.images, self.v.patches()),
            kv_len: self.v.patches(),
            q_heads: self.v.num_heads,
            kv_heads: self.v.num_heads,
            head_dim: self.v.hidden_size / self.v.num_heads,
            bidirectional: true,
            ..AttnShape::default()
        }
    }
    fn patch<'a>(&self) -> Product<'a> {
        Product { name: "vision.patch", rows: self.patches, k: self.v.patch_values, n: self.v.hidden_size }
    }
    fn in_block<'a>(&self, name: &'a str, k: usize, n: usize) -> Product<'a> {
        Product { name, rows: self.patches, k, n }
    }
}

impl Stack<'_> {
    fn tower(&self) -> Option<Tower> {
        let v = self.cfg.model.vision.clone()?;
        if !self.share.has_embedding || self.cfg.stack_only {
            return None;
        }
        let images = self.cfg.batch.micro_batch_size;
        let (patches, tokens) = (images * v.patches(), images * v.tokens());
        Some(Tower { v, images, patches, tokens, width: self.cfg.model.hidden_size })
    }

    /// What a tower of a user's recipe may not have; sizes were judged when the file was loaded (`keys::ranges`).
    fn check_tower(&self, t: &Tower) -> Result<(), WorkloadError> {
        let v = &t.v;
        let wrong = |what: String| Err(WorkloadError::Unsupported(format!("model.vision: {what}")));
        if v.deepstack.windows(2).any(|w| w[0] >= w[1]) || v.deepstack.last().is_some_and(|b| *b >= v.depth) {
            return wrong(format!(
                "deepstack_visual_indexes {:?} must rise and stay below depth {}",
                v.deepstack, v.depth
            ));
        }
        if !v.deepstack.is_empty() && self.share.chunks.first().is_none_or(|c| c.is_empty()) {
            return wrong(
                "DeepStack adds to decoder layers of the first model chunk, which has none: give it one"
                    .into(),
            );
        }
        Ok(())
    }

    /// Rotary coordinates of text with an image in it.
    pub(super) fn text_axes(&self) -> Option<Axes> {
        let (v, section) = (self.cfg.model.vision.as_ref()?, self.cfg.model.mrope_section?);
        Some(Axes::Text { start: v.start, side: v.token_side(), section })
    }

    /// Patches of the images of one micro-batch, drawn like its tokens; static, as those are.
    pub(super) fn pixels(&mut self, mb: usize) -> Option<BufId> {
        let t = self.tower()?;
        let shape = [t.patches, t.v.patch_values];
        let zero = Init::Const { value: 0.0 };
        let out = self.b.buffer(&format!("pixels.mb{mb}"), DType::Bf16, &shape, Lifetime::StepState, zero);
        let rng = self.b.rng("pixels", INPUTS);
        // Pixels of a normed image.
        let op = RandomFill { len: shape[0] * shape[1], std: 1.0, rng, dtype: DType::Bf16 };
        self.b.launch(op, &[self.words, out]);
        Some(out)
    }

    fn image_shape(&self, t: &Tower, replace: bool) -> Result<ImageShape, WorkloadError> {
        let seq = self.cfg.batch.seq_length;
        if t.v.start + t.v.tokens() > seq {
            return Err(WorkloadError::Unsupported(format!(
                "a sequence of {seq} tokens does not hold the {} tokens of its image and the {} before it; give a larger \
                 --seq_length",
                t.v.tokens(),
                t.v.start
            )));
        }
        Ok(self.rows_of_image(t, replace))
    }

    fn rows_of_image(&self, t: &Tower, replace: bool) -> ImageShape {
        ImageShape {
            positions: self.positions,
            rows: self.split_tokens,
            hidden: t.width,
            start: t.v.start,
            len: t.v.tokens(),
            replace,
        }
    }

    /// The tower, and the embedding `x` with the image's tokens in place of what it had there.
    pub(super) fn vision_forward(&mut self, pixels: Option<BufId>, x: BufId) -> Result<BufId, WorkloadError> {
        let (Some(t), Some(pixels)) = (self.tower(), pixels) else { return Ok(x) };
        self.check_tower(&t)?;
        let shape = self.image_shape(&t, true)?;
        self.b.at(None, Part::Vision, Pass::Forward);
        let h = t.v.hidden_size;
        let patches = self.product(t.patch(), pixels, None)?;
        let bias = self.weights.get("vision.patch.bias")?;
        let table = self.weights.get("vision.position.weight")?;
        let mut y = self.named("vision.in", &[t.patches, h]);
        let op = PatchPositionFwd { images: t.images, side: t.v.side, table_side: t.v.table_side, hidden: h };
        self.b.launch(op, &[patches, bias.value, table.value, y]);
        for i in 0..t.v.depth {
            y = self.vision_block(&t, i, y)?;
            if let Some(level) = t.v.deepstack.iter().position(|b| *b == i) {
                self.merger(&t, &deepstack(level), y, [t.tokens, MERGED * h])?;
            }
        }
        let image = self.merger(&t, "vision.merger", y, [t.patches, h])?;
        let out = self.named("vision.embedding", &[self.split_tokens, t.width]);
        self.b.launch(ImageRowsFwd { shape }, &[x, image, out]);
        Ok(out)
    }

    /// Gradients of the tower; returns that of the embedding, zero in the image's rows.
    pub(super) fn vision_backward(
        &mut self,
        pixels: Option<BufId>,
        dout: BufId,
    ) -> Result<BufId, WorkloadError> {
        let (Some(t), Some(pixels)) = (self.tower(), pixels) else { return Ok(dout) };
        let shape = self.image_shape(&t, true)?;
        self.b.at(None, Part::Vision, Pass::Backward);
        let h = t.v.hidden_size;
        let dx = self.named("vision.dembedding", &[self.split_tokens, t.width]);
        let dimage = self.named("vision.dimage", &[t.tokens, t.width]);
        self.b.launch(ImageRowsBwd { shape }, &[dout, dx, dimage]);
        let out_of = |s: &mut Self, i: usize| match i {
            0 => s.named("vision.in", &[t.patches, h]),
            i => s.named(&format!("vision.block{}.fc2.out", i - 1), &[t.patches, h]),
        };
        let last = out_of(self, t.v.depth);
        let mut dy = self.merger_backward(&t, "vision.merger", last, [t.patches, h], dimage, None)?;
        for i in (0..t.v.depth).rev() {
            let (x, y) = (out_of(self, i), out_of(self, i + 1));
            if let Some(level) = t.v.deepstack.iter().position(|b| *b == i) {
                let dimage = self.named(&format!("{}.dimage", deepstack(level)), &[t.tokens, t.width]);
                let rows = [t.tokens, MERGED * h];
                dy = self.merger_backward(&t, &deepstack(level), y, rows, dimage, Some(dy))?;
            }
            dy = self.vision_block_backward(&t, i, x, dy)?;
        }
        self.product_gradients(t.patch(), pixels, dy)?;
        let table = self.weights.get("vision.position.weight")?;
        let op = PatchPositionBwd {
            images: t.images,
            side: t.v.side,
            table_side: t.v.table_side,
            hidden: h,
            out: self.grad_dtype(),
            accumulate: true,
        };
        self.b.launch(op, &[dy, table.grad]);
        Ok(dx)
    }

    /// `x + attention(norm(x))`, then `x + mlp(norm(x))`.
    fn vision_block(&mut self, t: &Tower, i: usize, x: BufId) -> Result<BufId, WorkloadError> {
        let (h, f, rows) = (t.v.hidden_size, t.v.ffn_hidden_size, t.patches);
        let n = |what: &str| format!("vision.block{i}.{what}");
        let y = self.layer_norm(&n("norm1"), x, [rows, h], EPSILON)?;
        let qkv = self.product(t.in_block(&n("qkv"), h, 3 * h), y, None)?;
        let bias = self.weights.get(&n("qkv.bias"))?;
        let [q, k, v, o] = ["q", "k", "v", "o"].map(|what| self.named(&n(what), &[rows, h]));
        self.b.launch(t.rope(), &[qkv, bias.value, q, k, v]);
        let lse = self.vision_lse(t, i);
        self.b.launch(AttnFwd { shape: t.attention() }, &[q, k, v, o, lse]);
        let x = self.biased_product(t.in_block(&n("proj"), h, h), o, Some(x))?;
        let y = self.layer_norm(&n("norm2"), x, [rows, h], EPSILON)?;
        let act = self.curved_product(t.in_block(&n("fc1"), h, f), Curve::Gelu, y)?;
        self.biased_product(t.in_block(&n("fc2"), f, h), act, Some(x))
    }

    fn vision_block_backward(
        &mut self,
        t: &Tower,
        i: usize,
        x: BufId,
        dout: BufId,
    ) -> Result<BufId, WorkloadError> {
        let (h, f, rows) = (t.v.hidden_size, t.v.ffn_hidden_size, t.patches);
        let n = |what: &str| format!("vision.block{i}.{what}");
        let act = self.named(&n("fc1.act"), &[rows, f]);
        let dact = self.product_backward(t.in_block(&n("fc2"), f, h), act, dout, None)?;
        let fc1 = n("fc1");
        let fc1 = t.in_block(&fc1, h, f);
        let dh = self.curve_backward(fc1, Curve::Gelu, dact)?;
        let y = self.named(&n("norm2.out"), &[rows, h]);
        let dy = self.product_backward(fc1, y, dh, None)?;
        let middle = self.named(&n("proj.out"), &[rows, h]);
        let dmiddle = self.layer_norm_backward(&n("norm2"), middle, [rows, h], dy, Some(dout))?;
        let [q, k, v, o] = ["q", "k", "v", "o"].map(|what| self.named(&n(what), &[rows, h]));
        let d_o = self.product_backward(t.in_block(&n("proj"), h, h), o, dmiddle, None)?;
        let [dq, dk, dv] = ["dq", "dk", "dv"].map(|what| self.named(&n(what), &[rows, h]));
        let lse = self.vision_lse(t, i);
        self.b.launch(AttnBwd { shape: t.attention() }, &[q, k, v, o, lse, d_o, dq, dk, dv]);
        let dqkv = self.named(&n("dqkv"), &[rows, 3 * h]);
        self.b.launch(QkvRopeBwd::of(&t.rope()), &[dq, dk, dv, dqkv]);
        let y = self.named(&n("norm1.out"), &[rows, h]);
        let dy = self.product_backward(t.in_block(&n("qkv"), h, 3 * h), y, dqkv, None)?;
        self.layer_norm_backward(&n("norm1"), x, [rows, h], dy, Some(dmiddle))
    }

    fn vision_lse(&mut self, t: &Tower, i: usize) -> BufId {
        let shape = [t.images, t.v.num_heads, t.v.patches()];
        self.b.activation(&format!("vision.block{i}.lse"), DType::F32, &shape)
    }

    /// Norm of `[rows, width]`, then as rows of four patches two products: `[tokens, decoder's width]`.
    fn merger(
        &mut self,
        t: &Tower,
        name: &str,
        x: BufId,
        normed: [usize; 2],
    ) -> Result<BufId, WorkloadError> {
        let (rows, wide) = (t.tokens, MERGED * t.v.hidden_size);
        let n = |what: &str| format!("{name}.{what}");
        let y = self.layer_norm(&n("norm"), x, normed, EPSILON)?;
        let fc1 = n("fc1");
        let act = self.curved_product(Product { name: &fc1, rows, k: wide, n: wide }, Curve::Gelu, y)?;
        self.biased_product(Product { name: &n("fc2"), rows, k: wide, n: t.width }, act, None)
    }

    /// From the gradient of the merged tokens to that of `x` (`+ dres`).
    fn merger_backward(
        &mut self,
        t: &Tower,
        name: &str,
        x: BufId,
        normed: [usize; 2],
        dout: BufId,
        dres: Option<BufId>,
    ) -> Result<BufId, WorkloadError> {
        let (rows, wide) = (t.tokens, MERGED * t.v.hidden_size);
        let n = |what: &str| format!("{name}.{what}");
        let act = self.named(&n("fc1.act"), &[rows, wide]);
        let dact =
            self.product_backward(Product { name: &n("fc2"), rows, k: wide, n: t.width }, act, dout, None)?;
        let fc1 = n("fc1");
        let fc1 = Product { name: &fc1, rows, k: wide, n: wide };
        let dh = self.curve_backward(fc1, Curve::Gelu, dact)?;
        let y = self.named(&n("norm.out"), &normed);
        let dy = self.product_backward(fc1, y, dh, None)?;
        self.layer_norm_backward(&n("norm"), x, normed, dy, dres)
    }

    /// Levels of DeepStack that are added after local layer `l`: level n after layer n of the first chunk, and those for
    /// which it has no layer after its last one (upstream asks for as many layers there).
    fn deepstack_levels(&self, l: usize) -> Range<usize> {
        let (Some(t), Some(chunk)) = (self.tower(), self.share.chunks.first()) else { return 0..0 };
        let levels = t.v.deepstack.len();
        match l.checked_sub(chunk.start).filter(|_| chunk.contains(&l)) {
            Some(at) if l + 1 == chunk.end => at.min(levels)..levels,
            Some(at) => at.min(levels)..(at + 1).min(levels),
            None => 0..0,
        }
    }

    /// `x` with the features of these levels added in the image's rows.
    pub(super) fn deepstack_forward(&mut self, l: usize, mut x: BufId) -> BufId {
        let Some(t) = self.tower() else { return x };
        for level in self.deepstack_levels(l) {
            self.b.at(Some(l), Part::Vision, Pass::Forward);
            let shape = self.rows_of_image(&t, false);
            let name = deepstack(level);
            let image = self.named(&format!("{name}.fc2.out"), &[t.tokens, t.width]);
            let out = self.named(&format!("{name}.sum"), &[self.split_tokens, t.width]);
            self.b.launch(ImageRowsFwd { shape }, &[x, image, out]);
            x = out;
        }
        x
    }

    /// Gradients of those features; that of the hidden state passes.
    pub(super) fn deepstack_backward(&mut self, l: usize, dx: BufId) {
        let Some(t) = self.tower() else { return };
        for level in self.deepstack_levels(l) {
            self.b.at(Some(l), Part::Vision, Pass::Backward);
            let shape = self.rows_of_image(&t, false);
            let dimage = self.named(&format!("{}.dimage", deepstack(level)), &[t.tokens, t.width]);
            self.b.launch(ImageRowsBwd { shape }, &[dx, dimage]);
        }
    }
}
