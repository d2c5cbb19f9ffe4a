//! After the micro-batches: gradient reduction, norm and clip, Adam, parameter gather. Outside TE graphs; the
//! reduction lies in the `local` graph, the optimizer in none.

use super::Stack;
use crate::ops::collective::{Collective, StandIn};
use crate::ops::optimizer::{Adam, GradNormFinish, GradNormPartial};
use crate::program::{BufId, DType, Init, Lifetime, Part, Pass, Shard};

/// Elements of one message of the data-parallel reduction: the recipes' `ddp_bucket_size`
/// (facts: 134217728 in every recipe that sets it).
pub(super) const BUCKET_ELEMENTS: usize = 134_217_728;
/// Partial sums of the gradient norm of one flat buffer: enough blocks for any GPU, few enough that the
/// last sum is one block.
pub(super) const NORM_PARTIALS: usize = 1024;

impl Stack<'_> {
    /// Data-parallel reduce-scatter of the main gradients, bucket by bucket (stand-ins).
    pub(super) fn reduce_gradients(&mut self) {
        self.b.at(None, Part::GradReduce, Pass::Other);
        for flat in self.weights.flats.clone() {
            self.in_place_buckets(flat.grads, flat.len, flat.ranks);
        }
        self.reduce_tied_embedding();
    }

    /// Both copies of a tied embedding, on the first and the last stage, get the sum of their gradients
    /// (Megatron-Core `distributed/finalize_model_grads.py`).
    fn reduce_tied_embedding(&mut self) {
        let ends = self.share.has_embedding != self.share.has_loss;
        if !self.cfg.model.tied_embeddings || !ends {
            return;
        }
        if let Ok(table) = self.weights.get("embedding.weight") {
            let (rows, cols, dtype) = (self.share.vocab, self.cfg.model.hidden_size, self.grad_dtype());
            let op = StandIn { kind: Collective::AllReduce, rows, cols, ranks: 2, dtype };
            self.b.launch(op, &[table.grad]);
        }
    }

    pub(super) fn in_place_buckets(&mut self, whole: BufId, len: usize, ranks: usize) {
        if ranks <= 1 {
            return;
        }
        let name = self.b.program.buffer(whole).name.clone();
        let dtype = self.b.program.buffer(whole).dtype;
        let mut at = 0;
        while at < len {
            let n = BUCKET_ELEMENTS.min(len - at);
            let bucket_name = format!("{name}.bucket{at}");
            let bucket = self.b.find(&bucket_name).unwrap_or_else(|| {
                self.b.view(&bucket_name, whole, at, &[n], Init::Inherit, Shard::default())
            });
            self.b.launch(StandIn { kind: Collective::InPlace, rows: 1, cols: n, ranks, dtype }, &[bucket]);
            at += n;
        }
    }

    /// Gradient norm, clip and Adam on this rank's shard, then the gather of the new weights.
    pub(super) fn optimizer(&mut self) {
        let o = self.cfg.optimizer.clone();
        self.b.at(None, Part::Optimizer, Pass::Other);
        let flats = self.weights.flats.clone();
        let partial = self.b.activation("optimizer.norm_partial", DType::F32, &[NORM_PARTIALS * flats.len()]);
        let mut shards = Vec::new();
        for (i, flat) in flats.iter().enumerate() {
            let n = flat.len / flat.ranks;
            let name = self.b.program.buffer(flat.grads).name.clone();
            let grads =
                self.b.view(&format!("{name}.shard"), flat.grads, 0, &[n], Init::Inherit, Shard::default());
            let sums = self.b.view(
                &format!("{name}.norm_partial"),
                partial,
                i * NORM_PARTIALS,
                &[NORM_PARTIALS],
                Init::Inherit,
                Shard::default(),
            );
            self.b.launch(
                GradNormPartial { len: n, dtype: self.grad_dtype(), partials: NORM_PARTIALS },
                &[grads, sums],
            );
            shards.push((*flat, grads, n));
        }
        let norm =
            self.b.buffer("grad_norm", DType::F32, &[1], Lifetime::StepState, Init::Const { value: 0.0 });
        let scale = self.b.activation("optimizer.clip_scale", DType::F32, &[1]);
        self.b.launch(
            GradNormFinish { partials: NORM_PARTIALS * flats.len(), clip: o.clip_grad },
            &[partial, norm, scale],
        );
        self.b.program.grad_norm = Some(norm);
        for (flat, grads, n) in shards {
            let name = self.b.program.buffer(flat.values).name.clone();
            let state = |s: &mut Self, what: &str, init: Init| {
                s.b.buffer(&format!("{name}.{what}"), DType::F32, &[n], Lifetime::OptimizerState, init)
            };
            let master = state(self, "master", Init::CopyOf { source: flat.values, offset: 0 });
            let m = state(self, "exp_avg", Init::Const { value: 0.0 });
            let v = state(self, "exp_avg_sq", Init::Const { value: 0.0 });
            let own =
                self.b.view(&format!("{name}.shard"), flat.values, 0, &[n], Init::Inherit, Shard::default());
            let op = Adam {
                len: n,
                grad: self.grad_dtype(),
                beta1: o.beta1,
                beta2: o.beta2,
                eps: o.eps,
                weight_decay: o.weight_decay,
            };
            self.b.launch(op, &[grads, scale, self.words, master, m, v, own]);
            self.in_place_buckets(flat.values, flat.len, flat.ranks);
            self.b.program.digest.extend([master, m, v]);
        }
    }
}
