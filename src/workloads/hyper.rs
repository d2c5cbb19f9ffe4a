//! Hyper-connections around the sublayers: n residual streams, `[split_tokens, n*H]`, between all layers and stages. A
//! sublayer reads one stream that its own weights make of them, and its output is spread over them again, in the
//! sublayer's part. Before the last norm a head makes one stream.
//!
//! Without hyper-connections all this is nothing: sublayers add the residual themselves.

use super::weights::{Spec, Weight};
use super::{Stack, Sublayer, WorkloadError};
use crate::config::{GraphImpl, RunConfig, Scope};
use crate::ops::hyper_connection::{
    HyperExpand, HyperPostBwd, HyperPostFwd, HyperPreBwd, HyperPreFwd, HyperShape, HyperSum, SCALES,
};
use crate::ops::rmsnorm::partials;
use crate::program::{BufId, DType, Part, Pass};

/// The scales begin at this value, so that maps depend little on the token at first (Megatron-Core
/// `mhc_init_gating_factor`).
const INITIAL_SCALE: f64 = 0.01;

/// Streams, 1 without hyper-connections.
pub(super) fn streams(cfg: &RunConfig) -> usize {
    cfg.model.hyper_connections.as_ref().map_or(1, |h| h.num_residual_streams)
}

fn shape(cfg: &RunConfig, tokens: usize, head: bool) -> HyperShape {
    let of = cfg.model.hyper_connections.as_ref();
    HyperShape {
        tokens,
        hidden: cfg.model.hidden_size,
        streams: streams(cfg),
        iterations: of.map_or(1, |h| h.sinkhorn_iterations),
        eps: cfg.model.layernorm_epsilon,
        head,
    }
}

/// Weights of one place, named `{prefix}.proj.weight` and so on; none without hyper-connections.
pub(super) fn weights(cfg: &RunConfig, prefix: &str, head: bool) -> Vec<Spec> {
    if cfg.model.hyper_connections.is_none() {
        return Vec::new();
    }
    let (s, std) = (shape(cfg, 0, head), cfg.model.init_method_std);
    let name = |what: &str| format!("{prefix}.{what}.weight");
    vec![
        Spec::normal(name("proj"), s.rows(), s.width(), std),
        Spec::constant(name("scale"), SCALES, INITIAL_SCALE),
        Spec::bias(name("base"), s.rows(), std),
    ]
}

/// What a sublayer's weights, activations and part are called.
fn place(sublayer: Sublayer) -> (&'static str, Part, Part) {
    match sublayer {
        Sublayer::Attention | Sublayer::DeltaNet => ("attn", Part::Attn, Part::Attn),
        Sublayer::Mlp => ("mlp", Part::Mlp, Part::Mlp),
        Sublayer::Moe => ("moe", Part::MoeRouter, Part::MoeExperts),
        Sublayer::Mamba => ("mamba", Part::Mamba, Part::Mamba),
    }
}

/// Weights of a sublayer's place in layer `index`.
pub(super) fn sublayer_weights(cfg: &RunConfig, sublayer: Sublayer, index: usize) -> Vec<Spec> {
    weights(cfg, &format!("layer{index}.{}.hyper", place(sublayer).0), false)
}

/// Buffers of one place.
struct Site {
    shape: HyperShape,
    weights: [Weight; 3],
    proj: BufId,
    maps: BufId,
    rstd: BufId,
}

impl Stack<'_> {
    /// Whether there are streams.
    pub(super) fn hyper(&self) -> bool {
        self.cfg.model.hyper_connections.is_some()
    }

    /// Width of what passes between layers.
    pub(super) fn stream_width(&self) -> usize {
        streams(self.cfg) * self.cfg.model.hidden_size
    }

    fn hyper_shape(&self, head: bool) -> HyperShape {
        shape(self.cfg, self.split_tokens, head)
    }

    fn site(&mut self, l: usize, name: &str, prefix: &str, head: bool) -> Result<Site, WorkloadError> {
        let (s, t) = (self.hyper_shape(head), self.split_tokens);
        let weight = |what: &str| self.weights.get(&format!("{prefix}.{what}.weight"));
        let weights = [weight("proj")?, weight("scale")?, weight("base")?];
        Ok(Site {
            shape: s,
            weights,
            proj: self.act_as(l, &format!("{name}.proj"), DType::F32, &[t, s.rows()]),
            maps: self.act_as(l, &format!("{name}.maps"), DType::F32, &[t, s.maps()]),
            rstd: self.act_as(l, &format!("{name}.rstd"), DType::F32, &[t]),
        })
    }

    /// One stream of those of `x`: the activations are called `name`, the weights `prefix`.
    fn hyper_pre(
        &mut self,
        l: usize,
        name: &str,
        prefix: &str,
        x: BufId,
        head: bool,
    ) -> Result<BufId, WorkloadError> {
        let site = self.site(l, name, prefix, head)?;
        let (s, [proj_w, scale, base]) = (site.shape, site.weights);
        self.forward_product(site.proj, x, proj_w.value, s.tokens, s.rows(), s.width(), None);
        let y = self.act(l, &format!("{name}.y"), &[s.tokens, s.hidden]);
        let start = self.here();
        let args = [x, site.proj, scale.value, base.value, y, site.maps, site.rstd];
        self.b.launch(HyperPreFwd { shape: s }, &args);
        if !head {
            self.recomputable("mhc", start, &[site.maps, site.rstd]);
        }
        Ok(y)
    }

    /// Gradient of the streams x from that of the one made of them. `dmaps`, `dnext`: see [`HyperPreBwd`].
    #[allow(clippy::too_many_arguments)]
    fn hyper_pre_backward(
        &mut self,
        l: usize,
        name: &str,
        prefix: &str,
        x: BufId,
        dy: BufId,
        dmaps: Option<BufId>,
        dnext: Option<BufId>,
    ) -> Result<BufId, WorkloadError> {
        let head = dmaps.is_none();
        let site = self.site(l, name, prefix, head)?;
        let (s, [proj_w, scale, base]) = (site.shape, site.weights);
        let (t, parts) = (s.tokens, partials(s.tokens));
        let direct = self.act(l, &format!("{name}.dx_direct"), &[t, s.width()]);
        let dproj = self.act(l, &format!("{name}.dproj"), &[t, s.rows()]);
        let partial = self.act_as(l, &format!("{name}.partial"), DType::F32, &[parts, s.rows() + SCALES]);
        let mut args = vec![x, site.proj, scale.value, base.value, site.maps, site.rstd, dy];
        args.extend(dmaps);
        args.extend(dnext);
        args.extend([direct, dproj, partial]);
        self.b.launch(HyperPreBwd { shape: s, carried: head && dnext.is_some() }, &args);
        self.column_sum(parts, partial, &[(s.rows(), base.grad), (SCALES, scale.grad)]);
        self.weight_gradient(proj_w.grad, dproj, x, t, s.rows(), s.width());
        let dx = self.act(l, &format!("{name}.dx"), &[t, s.width()]);
        self.data_gradient(dx, dproj, proj_w.value, t, s.rows(), s.width(), Some(direct));
        Ok(dx)
    }

    fn place_of(&self, l: usize, sublayer: Sublayer) -> (String, String, [Part; 2]) {
        let (what, first, last) = place(sublayer);
        let index = self.share.layers[l].index;
        (format!("{what}.hyper"), format!("layer{index}.{what}.hyper"), [first, last])
    }

    /// What the sublayer reads, of the streams `x`.
    pub(super) fn hyper_enter(
        &mut self,
        l: usize,
        sublayer: Sublayer,
        x: BufId,
    ) -> Result<BufId, WorkloadError> {
        if !self.hyper() {
            return Ok(x);
        }
        let (name, prefix, [part, _]) = self.place_of(l, sublayer);
        self.b.at(Some(l), part, Pass::Forward);
        self.hyper_pre(l, &name, &prefix, x, false)
    }

    /// The streams after the sublayer, which left `out`.
    pub(super) fn hyper_leave(
        &mut self,
        l: usize,
        sublayer: Sublayer,
        x: BufId,
        out: BufId,
        kept: bool,
    ) -> Result<BufId, WorkloadError> {
        if !self.hyper() {
            return Ok(out);
        }
        let (name, prefix, [_, part]) = self.place_of(l, sublayer);
        self.b.at(Some(l), part, Pass::Forward);
        let site = self.site(l, &name, &prefix, false)?;
        let next = self.act(l, &format!("{name}.next"), &[site.shape.tokens, site.shape.width()]);
        let start = self.here();
        self.b.launch(HyperPostFwd { shape: site.shape }, &[x, out, site.maps, next]);
        if !kept {
            self.recomputable("mhc", start, &[]);
        }
        Ok(next)
    }

    /// Whether the streams after this sublayer stay in memory although `mhc` is recomputed: at the end of every block of
    /// layers, from where the next block is computed anew. Where graphs hold parts of layers, all do, and what a sublayer
    /// reads alone is dropped: else a graph would begin with launches of other parts.
    pub(super) fn hyper_kept(&self, l: usize, last: bool) -> bool {
        let parts_captured = self.cfg.graph.implementation == GraphImpl::TransformerEngine;
        let full = self.cfg.graph.scope.contains(&Scope::FullIteration);
        let size = self.cfg.recompute.mhc_layers.unwrap_or(usize::MAX);
        let chunk = self.share.chunks.iter().find(|c| c.contains(&l));
        let ends = chunk.is_none_or(|c| l + 1 == c.end || (l + 1 - c.start).is_multiple_of(size));
        (parts_captured && !full) || (last && ends)
    }

    /// Buffers that the forward pass left: what the sublayer read, and its output's gradient; and the gradient of the
    /// maps, for [`Self::hyper_enter_backward`].
    pub(super) fn hyper_leave_backward(
        &mut self,
        l: usize,
        sublayer: Sublayer,
        x: BufId,
        out: BufId,
        dnext: BufId,
    ) -> Result<BackThrough, WorkloadError> {
        if !self.hyper() {
            return Ok(BackThrough { inner: x, dout: dnext, dmaps: None });
        }
        let (name, prefix, [_, part]) = self.place_of(l, sublayer);
        self.b.at(Some(l), part, Pass::Backward);
        let site = self.site(l, &name, &prefix, false)?;
        let s = site.shape;
        let dout = self.act(l, &format!("{name}.dout"), &[s.tokens, s.hidden]);
        let later = s.maps() - s.streams;
        let dmaps = self.act_as(l, &format!("{name}.dmaps"), DType::F32, &[s.tokens, later]);
        self.b.launch(HyperPostBwd { shape: s }, &[x, out, site.maps, dnext, dout, dmaps]);
        let inner = self.act(l, &format!("{name}.y"), &[s.tokens, s.hidden]);
        Ok(BackThrough { inner, dout, dmaps: Some(dmaps) })
    }

    /// Gradient of the streams before the sublayer, from that of what it read.
    pub(super) fn hyper_enter_backward(
        &mut self,
        l: usize,
        sublayer: Sublayer,
        x: BufId,
        dy: BufId,
        dnext: BufId,
        through: &BackThrough,
    ) -> Result<BufId, WorkloadError> {
        if through.dmaps.is_none() {
            return Ok(dy);
        }
        let (name, prefix, [part, _]) = self.place_of(l, sublayer);
        self.b.at(Some(l), part, Pass::Backward);
        self.hyper_pre_backward(l, &name, &prefix, x, dy, through.dmaps, Some(dnext))
    }

    /// All streams the same `x [split_tokens, hidden]`, in the part at hand. `add`: plus a stream of its own each.
    pub(super) fn expand_streams(&mut self, l: usize, name: &str, x: BufId, add: Option<BufId>) -> BufId {
        if !self.hyper() {
            return x;
        }
        let shape = self.hyper_shape(false);
        let out = self.act(l, &format!("{name}.streams"), &[shape.tokens, shape.width()]);
        let mut args = vec![x];
        args.extend(add);
        args.push(out);
        self.b.launch(HyperExpand { shape, add: add.is_some() }, &args);
        out
    }

    /// Gradient of [`Self::expand_streams`]'s `x`.
    pub(super) fn sum_streams(&mut self, l: usize, name: &str, dx: BufId) -> BufId {
        if !self.hyper() {
            return dx;
        }
        let shape = self.hyper_shape(false);
        let out = self.act(l, &format!("{name}.stream_sum"), &[shape.tokens, shape.hidden]);
        self.b.launch(HyperSum { shape }, &[dx, out]);
        out
    }

    /// One stream before a last norm, in the part at hand.
    pub(super) fn hyper_head(
        &mut self,
        l: usize,
        name: &str,
        prefix: &str,
        x: BufId,
    ) -> Result<BufId, WorkloadError> {
        if !self.hyper() {
            return Ok(x);
        }
        self.hyper_pre(l, &format!("{name}.hyper_head"), &format!("{prefix}hyper_head"), x, true)
    }

    /// The one stream that [`Self::hyper_head`] made of `x`.
    pub(super) fn hyper_head_out(&mut self, l: usize, name: &str, x: BufId) -> BufId {
        if !self.hyper() {
            return x;
        }
        let shape = [self.split_tokens, self.cfg.model.hidden_size];
        self.act(l, &format!("{name}.hyper_head.y"), &shape)
    }

    /// Gradient of the streams `x` from that of the head's output; `carried`: another gradient of them.
    pub(super) fn hyper_head_backward(
        &mut self,
        l: usize,
        name: &str,
        prefix: &str,
        x: BufId,
        dy: BufId,
        carried: Option<BufId>,
    ) -> Result<BufId, WorkloadError> {
        if !self.hyper() {
            return Ok(dy);
        }
        let name = format!("{name}.hyper_head");
        self.hyper_pre_backward(l, &name, &format!("{prefix}hyper_head"), x, dy, None, carried)
    }
}

/// The way back through a sublayer's end.
pub(super) struct BackThrough {
    /// What the sublayer read.
    pub inner: BufId,
    /// Gradient of its output.
    pub dout: BufId,
    dmaps: Option<BufId>,
}
