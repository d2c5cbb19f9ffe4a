//! Both ends of the model: embedding; final norm, output product, cross-entropy.

use super::share::RankShare;
use super::weights::Spec;
use super::{Stack, WorkloadError};
use crate::config::RunConfig;
use crate::ops::collective::{Exchange, Kind};
use crate::ops::cross_entropy::{CrossEntropy, LossSum, STATS, VocabCrossEntropy, VocabStats};
use crate::ops::embedding::{EmbeddingBwd, EmbeddingFwd};
use crate::program::{BufId, DType, Part, Pass};

pub(super) fn embedding_weight(cfg: &RunConfig, share: &RankShare) -> Spec {
    // Tensor rank 0 holds the first rows.
    Spec::normal("embedding.weight".into(), share.vocab, cfg.model.hidden_size, cfg.model.init_method_std)
}

pub(super) fn head_weights(cfg: &RunConfig, share: &RankShare) -> Vec<Spec> {
    let m = &cfg.model;
    let mut out = vec![Spec::ones("final_norm.weight".into(), m.hidden_size)];
    out.extend(super::hyper::weights(cfg, "hyper_head", true));
    match (m.tied_embeddings, share.has_embedding) {
        (false, _) => {
            out.push(Spec::normal("head.weight".into(), share.vocab, m.hidden_size, m.init_method_std))
        }
        // The last stage's copy of the first stage's table.
        (true, false) => out.push(embedding_weight(cfg, share)),
        (true, true) => {}
    }
    out
}

impl Stack<'_> {
    fn embedding_op(&self) -> EmbeddingFwd {
        EmbeddingFwd {
            tokens: self.tokens,
            vocab: self.share.vocab,
            vocab_start: self.share.place.tp * self.share.vocab,
            hidden: self.cfg.model.hidden_size,
        }
    }

    /// Token ids `[tokens]` to `[split_tokens, hidden]`; the activation is called `name`.
    pub(super) fn embed_as(&mut self, name: &str, ids: BufId) -> Result<BufId, WorkloadError> {
        self.b.at(None, Part::Embedding, Pass::Forward);
        let h = self.cfg.model.hidden_size;
        let table = self.weights.get("embedding.weight")?;
        let out = self.b.activation(&format!("{name}.out"), DType::Bf16, &[self.tokens, h]);
        self.b.launch(self.embedding_op(), &[ids, table.value, out]);
        Ok(self.reduce_tokens(0, name, out, h))
    }

    pub(super) fn embed_backward(&mut self, ids: BufId, dx: BufId) -> Result<(), WorkloadError> {
        self.b.at(None, Part::Embedding, Pass::Backward);
        let h = self.cfg.model.hidden_size;
        let table = self.weights.get("embedding.weight")?;
        let dx = self.gather_tokens(0, "embedding.dx", dx, h);
        let op = EmbeddingBwd {
            tokens: self.tokens,
            vocab: self.share.vocab,
            vocab_start: self.share.place.tp * self.share.vocab,
            hidden: h,
            grad: self.grad_dtype(),
        };
        self.b.launch(op, &[ids, dx, table.grad]);
        Ok(())
    }

    fn head_weight(&self) -> Result<super::weights::Weight, WorkloadError> {
        self.weights.get(if self.cfg.model.tied_embeddings { "embedding.weight" } else { "head.weight" })
    }

    /// The norm after the last layer, `[split_tokens, hidden]`.
    pub(super) fn final_norm(&mut self, x: BufId) -> Result<BufId, WorkloadError> {
        let (l, norm_w) = (self.share.layers.len(), self.weights.get("final_norm.weight")?);
        self.b.at(None, Part::Head, Pass::Forward);
        let x = self.hyper_head(l, "head", "", x)?;
        Ok(self.norm(l, "head.norm", x, norm_w).0)
    }

    /// Logits of the normed output and the loss: the mean over the step's tokens of this rank.
    pub(super) fn head_and_loss(
        &mut self,
        y: BufId,
        labels: BufId,
        loss: BufId,
    ) -> Result<(), WorkloadError> {
        let l = self.share.layers.len();
        self.logits_and_loss(l, "head", "head.norm", y, labels, loss, 1.0)
    }

    /// Logits of a normed state `y`, and the mean loss of the step's tokens, which counts `weight` times in the
    /// gradient that is left in the logits' place. `name` and `norm` call the activations of "layer" `l`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn logits_and_loss(
        &mut self,
        l: usize,
        name: &str,
        norm: &str,
        y: BufId,
        labels: BufId,
        loss: BufId,
        weight: f64,
    ) -> Result<(), WorkloadError> {
        let (t, h, v) = (self.tokens, self.cfg.model.hidden_size, self.share.vocab);
        let head_w = self.head_weight()?;
        self.b.at(None, Part::Head, Pass::Forward);
        let y = self.gather_tokens(l, norm, y, h);
        let logits = self.act(l, &format!("{name}.logits"), &[t, v]);
        self.forward_product(logits, y, head_w.value, t, v, h, None);

        self.b.at(None, Part::Loss, Pass::Forward);
        let scale = 1.0 / (t * self.cfg.batch.num_microbatches * self.share.place.summed()) as f32;
        let per_token = self.b.activation("loss.per_token", DType::F32, &[t]);
        let grad_scale = scale * weight as f32;
        match self.share.place.tensor.clone() {
            None => {
                self.b.launch(CrossEntropy { tokens: t, vocab: v, grad_scale }, &[logits, labels, per_token])
            }
            Some(group) => {
                let (ranks, vocab_start) = (group.len(), group.own * v);
                let own = self.b.activation("loss.stats", DType::F32, &[t, STATS]);
                let all = self.b.activation("loss.all_stats", DType::F32, &[ranks, t, STATS]);
                self.b.launch(VocabStats { tokens: t, vocab: v, vocab_start }, &[logits, labels, own]);
                let kind = Kind::AllGather;
                self.b.launch(Exchange { kind, group, rows: t, cols: STATS, dtype: DType::F32 }, &[own, all]);
                let op = VocabCrossEntropy { tokens: t, vocab: v, vocab_start, ranks, grad_scale };
                self.b.launch(op, &[logits, labels, all, per_token]);
            }
        }
        self.b.launch(LossSum { tokens: t, scale }, &[per_token, loss]);
        Ok(())
    }

    /// From the logits' gradient to that of the normed state, `[split_tokens, hidden]`.
    pub(super) fn logits_gradient(
        &mut self,
        l: usize,
        name: &str,
        norm: &str,
    ) -> Result<BufId, WorkloadError> {
        let (t, h, v) = (self.tokens, self.cfg.model.hidden_size, self.share.vocab);
        let head_w = self.head_weight()?;
        self.b.at(None, Part::Head, Pass::Backward);
        let logits = self.act(l, &format!("{name}.logits"), &[t, v]);
        let kept = if self.split() { "gathered" } else { "out" };
        let y = self.act(l, &format!("{norm}.{kept}"), &[t, h]);
        self.weight_gradient(head_w.grad, logits, y, t, v, h);
        let dy = self.act(l, &format!("{name}.dy"), &[t, h]);
        self.data_gradient(dy, logits, head_w.value, t, v, h, None);
        Ok(self.reduce_tokens(l, &format!("{name}.dy"), dy, h))
    }

    /// From the logits' gradient to that of the stack's output `x`. `add`: another gradient of the normed output, or with
    /// hyper-connections of `x`.
    pub(super) fn head_backward(&mut self, x: BufId, add: Option<BufId>) -> Result<BufId, WorkloadError> {
        let (l, norm_w) = (self.share.layers.len(), self.weights.get("final_norm.weight")?);
        let mut dy = self.logits_gradient(l, "head", "head.norm")?;
        if let Some(add) = add.filter(|_| !self.hyper()) {
            dy = self.sum(l, "head.dy", dy, add);
        }
        let rstd = self.act_as(l, "head.norm.rstd", DType::F32, &[self.split_tokens]);
        let one = self.hyper_head_out(l, "head", x);
        let dx = self.norm_backward(l, "head.norm", one, rstd, norm_w, dy, None);
        self.hyper_head_backward(l, "head", "", x, dx, add)
    }
}
