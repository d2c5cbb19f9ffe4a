//! The expert bias: each layer's own, for the choice of experts; moved at the end of a step by the step's counts
//! (Megatron-Core `_update_router_expert_bias`). A bare stack keeps it at zero.

use super::Stack;
use crate::ops::collective::{Collective, Exchange, Kind, StandIn};
use crate::ops::router::{CountAdd, ExpertBiasUpdate};
use crate::program::{BufId, DType, Init, Lifetime, Part, Pass, Shard};

impl Stack<'_> {
    fn biased_experts(&self) -> Option<usize> {
        self.cfg.model.moe.as_ref().filter(|m| m.expert_bias).map(|m| m.num_experts)
    }

    /// Experts of a layer whose bias moves.
    fn moving_experts(&self) -> Option<usize> {
        let moves = self.cfg.model.moe.as_ref().is_some_and(|m| m.bias_update_rate != 0.0);
        self.biased_experts().filter(|_| moves && !self.cfg.stack_only)
    }

    /// One row a local layer, those without experts too.
    fn of_all_layers(&mut self, name: &str, dtype: DType, experts: usize) -> BufId {
        let shape = [self.share.layers.len(), experts];
        self.b.buffer(name, dtype, &shape, Lifetime::StepState, Init::Const { value: 0.0 })
    }

    fn of_layer(&mut self, l: usize, all: BufId, name: &str, experts: usize) -> BufId {
        let name = format!("layer{}.{name}", self.share.layers[l].index);
        match self.b.find(&name) {
            Some(id) => id,
            None => self.b.view(&name, all, l * experts, &[experts], Init::Inherit, Shard::default()),
        }
    }

    /// The bias of layer `l`, f32 `[experts]`.
    pub(super) fn expert_bias(&mut self, l: usize) -> BufId {
        let experts = self.biased_experts().unwrap_or(0);
        let all = self.of_all_layers("moe.expert_bias", DType::F32, experts);
        self.of_layer(l, all, "moe.expert_bias", experts)
    }

    /// Adds a micro-batch's counts to the step's. In the backward pass, which recompute does not repeat.
    pub(super) fn count_tokens(&mut self, l: usize) {
        let Some(experts) = self.moving_experts().filter(|_| !self.hashed(l)) else { return };
        let all = self.of_all_layers("moe.tokens_per_expert", DType::I32, experts);
        let total = self.of_layer(l, all, "moe.tokens_per_expert", experts);
        let counts = self.act_as(l, "moe.counts", DType::I32, &[experts]);
        self.b.launch(CountAdd { experts }, &[counts, total]);
    }

    /// Sums the counts over the ranks that share the routers (a stand-in), and moves every bias.
    pub(super) fn move_expert_bias(&mut self) {
        let Some(experts) = self.moving_experts() else { return };
        if self.b.find("moe.tokens_per_expert").is_none() {
            return;
        }
        self.b.at(None, Part::GradReduce, Pass::Other);
        let total = self.of_all_layers("moe.tokens_per_expert", DType::I32, experts);
        let bias = self.of_all_layers("moe.expert_bias", DType::F32, experts);
        let (p, layers) = (&self.cfg.parallel, self.share.layers.len());
        let ranks = p.tp * p.dp * p.cp;
        if let Some(group) = self.share.place.world.clone().filter(|g| g.len() == ranks) {
            let (kind, rows) = (Kind::AllReduce, layers);
            self.b.launch(Exchange { kind, group, rows, cols: experts, dtype: DType::I32 }, &[total]);
        } else if ranks > 1 {
            let op = StandIn {
                kind: Collective::AllReduce,
                rows: layers,
                cols: experts,
                ranks,
                dtype: DType::I32,
            };
            self.b.launch(op, &[total]);
        }
        let rate = self.cfg.model.moe.as_ref().map_or(0.0, |m| m.bias_update_rate);
        self.b.launch(ExpertBiasUpdate { layers, experts, rate }, &[total, bias]);
        self.b.program.digest.push(bias);
    }
}
