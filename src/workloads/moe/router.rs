//! The router: gate product, scores, choice of experts, and back.

use super::super::rng::State;
use super::super::{Stack, WorkloadError};
use super::Dims;
use crate::config::{Moe, Routing};
use crate::ops::collective::{Exchange, Kind};
use crate::ops::router::{Groups, Hash, RouterBwd, RouterFwd};
use crate::ops::step::Copy;
use crate::program::{BufId, DType};

/// What the router hands on, of one layer.
#[derive(Clone, Copy)]
pub(super) struct Routes {
    /// f32 `[tokens, experts]`.
    pub scores: BufId,
    /// f32 `[tokens, topk]`.
    pub probs: BufId,
    /// i32 `[tokens, topk]`.
    pub index: BufId,
    /// Tokens per expert, i32 `[experts]`.
    pub counts: BufId,
}

impl Stack<'_> {
    /// Whether layer `l` chooses experts by the tokens' ids.
    pub(in super::super) fn hashed(&self, l: usize) -> bool {
        self.cfg.model.moe.as_ref().is_some_and(|m| self.share.layers[l].index < m.hash_layers)
    }

    fn router(&mut self, l: usize) -> Result<RouterFwd, WorkloadError> {
        let moe = self.moe()?.clone();
        let forced = match moe.routing {
            Routing::Recipe => moe.force_load_balancing,
            Routing::Balanced | Routing::Skewed => true,
        };
        let hash = self.hashed(l).then_some(Hash { salt: self.share.layers[l].index as u32 });
        let site = format!("layer{}.router", self.share.layers[l].index);
        let rng = forced.then(|| self.rng(&site, State::DataParallel));
        Ok(RouterFwd {
            tokens: self.split_tokens,
            experts: moe.num_experts,
            topk: moe.router_topk,
            score: moe.score_function,
            pre_softmax: moe.pre_softmax,
            scaling: moe.topk_scaling_factor,
            forced: rng,
            skew: moe.routing == Routing::Skewed,
            expert_bias: moe.expert_bias && hash.is_none(),
            hash,
            first_token: if self.split() { self.share.place.tp * self.split_tokens } else { 0 },
            groups: (moe.num_groups > 1).then_some(Groups { count: moe.num_groups, chosen: moe.group_topk }),
        })
    }

    /// The routing buffers of layer `l`.
    pub(super) fn routes(&mut self, l: usize, d: &Dims) -> Routes {
        Routes {
            scores: self.act_as(l, "moe.scores", DType::F32, &[d.t, d.experts]),
            probs: self.act_as(l, "moe.probs", DType::F32, &[d.t, d.topk]),
            index: self.act_as(l, "moe.index", DType::I32, &[d.t, d.topk]),
            counts: self.act_as(l, "moe.counts", DType::I32, &[d.experts]),
        }
    }

    /// Chooses the experts of `y [split_tokens, hidden]`.
    pub(super) fn route(&mut self, l: usize, d: &Dims, y: BufId) -> Result<Routes, WorkloadError> {
        let router_w = self.moe_weight(l, "router")?;
        let logits = self.act_as(l, "moe.logits", DType::F32, &[d.t, d.experts]);
        self.forward_product(logits, y, router_w.value, d.t, d.experts, d.h, None);
        self.add_bias(logits, self.bias(l, "moe.router"), d.t, d.experts);
        let r = self.routes(l, d);
        let router = self.router(l)?;
        let mut args = vec![logits];
        args.extend(router.forced.map(|_| self.words));
        if router.expert_bias {
            args.push(self.expert_bias(l));
        }
        if router.hash.is_some() {
            let none = || WorkloadError::Internal("a layer that routes by token ids has none".into());
            args.push(self.ids.ok_or_else(none)?);
        }
        args.extend([r.scores, r.probs, r.index, r.counts]);
        self.b.launch(router, &args);
        Ok(r)
    }

    /// Counts that the auxiliary loss rests on, and the ranks that they are of: those of the whole micro-batch where
    /// tensor ranks share its tokens (Megatron-Core `moe_utils.py`, `switch_load_balancing_loss_func`).
    fn counts_of_tensor_ranks(&mut self, l: usize, d: &Dims, counts: BufId, wanted: bool) -> (BufId, usize) {
        let group = self.share.place.tensor.clone().filter(|_| wanted && self.split());
        let Some(group) = group else { return (counts, 1) };
        let (ranks, dtype) = (group.len(), DType::I32);
        let all = self.act_as(l, "moe.counts_of_ranks", dtype, &[d.experts]);
        self.b.launch(Copy { dtype, len: d.experts }, &[counts, all]);
        self.b.launch(Exchange { kind: Kind::AllReduce, group, rows: 1, cols: d.experts, dtype }, &[all]);
        (all, ranks)
    }

    /// Gradient of `y` through the router, plus `dy_experts`.
    pub(super) fn route_backward(
        &mut self,
        l: usize,
        moe: &Moe,
        d: &Dims,
        y: BufId,
        dprobs: BufId,
        dy_experts: BufId,
    ) -> Result<BufId, WorkloadError> {
        let r = self.routes(l, d);
        let dlogits = self.act(l, "moe.dlogits", &[d.t, d.experts]);
        let router = self.router(l)?;
        let aux = matches!(moe.load_balancing_type.as_str(), "aux_loss" | "seq_aux_loss" | "global_aux_loss");
        // The auxiliary loss is scaled like the main one: by the micro-batches of a step.
        let aux_scale = 1.0 / (self.cfg.batch.num_microbatches * self.share.place.summed()) as f32;
        let aux_coeff = if aux && !self.cfg.stack_only { moe.aux_loss_coeff } else { 0.0 };
        let (counts, ranks) = self.counts_of_tensor_ranks(l, d, r.counts, aux_coeff != 0.0);
        let op = RouterBwd {
            tokens: d.t,
            experts: d.experts,
            topk: d.topk,
            score: router.score,
            pre_softmax: router.pre_softmax,
            scaling: router.scaling,
            aux_coeff: aux_coeff / (ranks * ranks) as f64,
            aux_scale,
        };
        self.b.launch(op, &[r.scores, r.probs, r.index, dprobs, counts, dlogits]);
        let router_w = self.moe_weight(l, "router")?;
        self.weight_gradient(router_w.grad, dlogits, y, d.t, d.experts, d.h);
        self.bias_gradient(dlogits, self.bias(l, "moe.router"), d.t, d.experts);
        let dy_router = self.act(l, "moe.dy_router", &[d.t, d.h]);
        self.data_gradient(dy_router, dlogits, router_w.value, d.t, d.experts, d.h, Some(dy_experts));
        Ok(dy_router)
    }
}
