//! Mixture of experts: norm, shared expert, router, permutation, experts, combination with the residual.
//!
//! One process stands for one rank of the expert-parallel group: it routes its own tokens over all experts and
//! receives as many rows as it sends, expert `e` taken as local expert `e mod local`.
//!
//! - *alltoall*: rows are sorted by expert in `moe_preprocess`, sent (a copy), sorted by local expert, computed,
//!   and brought back the same way.
//! - *flex*: the dispatch sorts straight to local experts and sits in `moe_experts`; only the routing map is
//!   made in `moe_preprocess`.
//!
//! The stages of a layer, each with its backward beside it: `shared`, `router`, `latent`,
//! `dispatch`, `experts`.

mod dispatch;
mod experts;
mod latent;
mod router;
mod shared;

pub use dispatch::TALLY;

use super::attention::output_std;
use super::mlp::{fc1_rows, gated};
use super::share::RankShare;
use super::weights::{Spec, Weight};
use super::{Stack, WorkloadError};
use crate::config::{Dispatcher, Moe, RunConfig};
use crate::ops::moe_permute::Capacity;
use crate::program::{BufId, DType, Part, Pass};

pub(super) fn weights(cfg: &RunConfig, share: &RankShare, index: usize) -> Result<Vec<Spec>, WorkloadError> {
    let m = &cfg.model;
    let moe =
        m.moe.as_ref().ok_or_else(|| WorkloadError::Internal("an expert layer without experts".into()))?;
    let (local, f) = (share.experts, share.expert_ffn);
    let name = |what: &str| format!("layer{index}.moe.{what}.weight");
    let mut out = vec![
        Spec::ones(name("norm"), m.hidden_size),
        Spec::normal(name("router"), moe.num_experts, m.hidden_size, m.init_method_std),
    ];
    if let Some(width) = moe.shared_expert_intermediate_size {
        out.extend(gated(
            cfg,
            &format!("layer{index}.moe.shared"),
            share.shared_expert_ffn.unwrap_or(0),
            width,
        ));
        if moe.shared_expert_gate {
            out.push(Spec::normal(name("shared.gate"), 1, m.hidden_size, m.init_method_std));
        }
    }
    let width = moe.latent_size.unwrap_or(m.hidden_size);
    if moe.latent_size.is_some() {
        out.push(Spec::normal(name("latent_down"), width, m.hidden_size, m.init_method_std));
        out.push(Spec::normal(name("latent_up"), m.hidden_size, width, output_std(cfg)));
    }
    // Experts lie one after another; expert-parallel rank 0 holds the first ones.
    out.push(Spec::normal(name("experts.fc1"), local * fc1_rows(cfg) * f, width, m.init_method_std).expert());
    out.push(Spec::normal(name("experts.fc2"), local * width, f, output_std(cfg)).expert());
    if m.add_bias_linear {
        let bias = |what: &str, len: usize| {
            Spec::bias(format!("layer{index}.moe.{what}.bias"), len, m.init_method_std)
        };
        out.push(bias("router", moe.num_experts));
        out.push(bias("experts.fc1", local * fc1_rows(cfg) * f).expert());
        out.push(bias("experts.fc2", local * width).expert());
    }
    Ok(out)
}

/// Sizes and switches of one rank's expert layer.
struct Dims {
    /// Rows that enter the router.
    t: usize,
    h: usize,
    /// Width of a dispatched row: hidden, or the latent size.
    w: usize,
    latent: bool,
    /// Width of an expert, and of its first product.
    f: usize,
    wide: usize,
    experts: usize,
    local: usize,
    topk: usize,
    /// Rows that buffers of dispatched rows are sized for.
    rows: usize,
    /// Rows an expert may get, if tokens may be dropped.
    capacity: Option<Capacity>,
    /// Rows of every bin are static (drop and pad).
    padded: bool,
    /// Bins of the first sort: all experts (alltoall over several ranks) or the local ones.
    bins: usize,
    /// A transfer and a second sort follow the first (alltoall over several ranks).
    two_sorts: bool,
    flex: bool,
    host_counts: bool,
}

/// Whether a transfer and a second sort follow the first: alltoall over several ranks, and every dispatcher where they
/// are processes of this run (NCCL moves the rows of the flex dispatcher too).
fn two_sorts(cfg: &RunConfig, share: &RankShare, moe: &Moe) -> bool {
    let alltoall = moe.dispatcher == Dispatcher::Alltoall && cfg.parallel.ep > 1 && !cfg.stack_only;
    alltoall || share.place.expert.is_some()
}

/// Bins of the first sort, and what each keeps of the choices of `tokens`.
fn bins(cfg: &RunConfig, share: &RankShare, moe: &Moe, tokens: usize) -> (usize, Option<Capacity>) {
    let bins = if two_sorts(cfg, share, moe) { moe.num_experts } else { share.experts };
    // Megatron-Core `get_capacity`: ceil(tokens * topk / experts * factor), here of the bins that are sorted into.
    let capacity = moe.capacity_factor.map(|factor| Capacity {
        rows: ((tokens * moe.router_topk) as f64 / bins as f64 * factor).ceil() as usize,
        padded: moe.pad_to_capacity,
        by_position: moe.drop_by_position,
    });
    (bins, capacity)
}

/// Bins that the rows of an expert layer are sorted into (expert modulo bins) and what each keeps, where tokens may be
/// dropped.
pub fn capacity(cfg: &RunConfig, share: &RankShare) -> Option<(usize, Capacity)> {
    let (bins, capacity) = bins(cfg, share, cfg.model.moe.as_ref()?, share.tokens_sequence_parallel);
    Some((bins, capacity?))
}

fn dims(s: &Stack, moe: &Moe) -> Dims {
    let two_sorts = two_sorts(s.cfg, s.share, moe);
    let (t, local, topk) = (s.split_tokens, s.share.experts, moe.router_topk);
    let (bins, capacity) = bins(s.cfg, s.share, moe, t);
    let padded = capacity.is_some_and(|c| c.padded);
    // Megatron-Core's budget of received rows: a factor of what a balanced rank gets. Rows beyond the received ones are
    // padding, which products pass over by the offsets on the device; more of them fail the row.
    let rank_rows = moe.rank_capacity_factor.map(|factor| ((t * topk) as f64 * factor).ceil() as usize);
    // One process receives exactly the rows it sends, so a bound above 1 reserves nothing more here.
    let most = t * topk * s.share.place.expert.as_ref().map_or(1, |g| g.len());
    // Of several, a rank must hold what it sends, and what comes by the bound.
    let bound = (((t * topk) as f64 * moe.row_bound).ceil() as usize).max(t * topk).min(most);
    let rows = match capacity {
        Some(c) if c.padded => c.rows * bins,
        Some(c) => bound.min(c.rows * bins),
        None => rank_rows.unwrap_or(bound),
    };
    let static_rows = padded || rank_rows.is_some();
    Dims {
        t,
        h: s.cfg.model.hidden_size,
        w: moe.latent_size.unwrap_or(s.cfg.model.hidden_size),
        latent: moe.latent_size.is_some(),
        f: s.share.expert_ffn,
        wide: fc1_rows(s.cfg) * s.share.expert_ffn,
        experts: moe.num_experts,
        local,
        topk,
        rows,
        capacity,
        padded,
        bins,
        two_sorts,
        flex: moe.dispatcher == Dispatcher::Flex,
        // Messages between processes are sized on the host unless every bin is padded.
        host_counts: !static_rows || (s.share.place.expert.is_some() && !padded),
    }
}

impl Stack<'_> {
    fn moe(&self) -> Result<&'_ Moe, WorkloadError> {
        self.cfg
            .model
            .moe
            .as_ref()
            .ok_or_else(|| WorkloadError::Internal("an expert layer without experts".into()))
    }

    fn moe_weight(&self, l: usize, what: &str) -> Result<Weight, WorkloadError> {
        self.weights.get(&format!("layer{}.moe.{what}.weight", self.share.layers[l].index))
    }

    /// `x -> x + experts(norm(x))`, `[split_tokens, hidden]`.
    pub(super) fn moe_forward(&mut self, l: usize, x: BufId) -> Result<BufId, WorkloadError> {
        let moe = self.moe()?.clone();
        let d = dims(self, &moe);
        self.b.at(Some(l), Part::MoeRouter, Pass::Forward);
        let norm_w = self.moe_weight(l, "norm")?;
        let norm = self.here();
        let (y, _) = self.norm(l, "moe.norm", x, norm_w);
        if self.norm_before_experts_recomputes() {
            self.recomputable("layernorm", norm, &[]);
        }
        let start = self.here();
        let shared = self.shared_forward(l, &moe, y)?;
        let routes = self.route(l, &d, y)?;
        let rows = self.dispatch(l, &d, y, routes)?;
        let out_rows = self.experts_forward(l, &d, rows)?;
        let out = self.combine(l, &d, out_rows, x, shared)?;
        self.recomputable("moe", start, &[out]);
        Ok(out)
    }

    pub(super) fn moe_backward(&mut self, l: usize, x: BufId, dout: BufId) -> Result<BufId, WorkloadError> {
        let moe = self.moe()?.clone();
        let d = dims(self, &moe);
        self.b.at(Some(l), Part::MoeExperts, Pass::Backward);
        let dsum = self.dropout_gradient(l, "moe", dout);
        let dexperts = self.latent_up_backward(l, &d, dsum)?;
        let drows = self.combine_backward(l, &d, dexperts);
        let (dx_rows, drow_probs) = self.experts_backward(l, &d, drows)?;
        let (dlatent, dprobs) = self.dispatch_backward(l, &d, dx_rows, drow_probs);
        let y = self.act(l, "moe.norm.out", &[d.t, d.h]);
        let dy_experts = self.latent_down_backward(l, &d, y, dlatent)?;

        self.b.at(Some(l), Part::MoeRouter, Pass::Backward);
        self.count_tokens(l);
        let dy_router = self.route_backward(l, &moe, &d, y, dprobs, dy_experts)?;
        let dy = self.shared_backward(l, &moe, y, dsum, dy_router)?;
        let norm_w = self.moe_weight(l, "norm")?;
        let rstd = self.act_as(l, "moe.norm.rstd", DType::F32, &[d.t]);
        let residual = (!self.hyper()).then_some(dout);
        Ok(self.norm_backward(l, "moe.norm", x, rstd, norm_w, dy, residual))
    }
}
