//! Both ends of the model: embedding; final norm, output product, cross-entropy.

use super::share::RankShare;
use super::weights::Spec;
use super::{Stack, WorkloadError};
use crate::config::RunConfig;
use crate::ops::cross_entropy::{CrossEntropy, LossSum};
use crate::ops::embedding::{EmbeddingBwd, EmbeddingFwd};
use crate::program::{BufId, DType, Part, Pass};

pub(super) fn embedding_weight(cfg: &RunConfig, share: &RankShare) -> Spec {
    // Tensor rank 0 holds the first rows.
    Spec::normal("embedding.weight".into(), share.vocab, cfg.model.hidden_size, cfg.model.init_method_std)
}

pub(super) fn head_weights(cfg: &RunConfig, share: &RankShare) -> Vec<Spec> {
    let m = &cfg.model;
    let mut out = vec![Spec::ones("final_norm.weight".into(), m.hidden_size)];
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
            vocab_start: 0,
            hidden: self.cfg.model.hidden_size,
        }
    }

    /// Token ids `[tokens]` to `[split_tokens, hidden]`.
    pub(super) fn embed(&mut self, ids: BufId) -> Result<BufId, WorkloadError> {
        self.b.at(None, Part::Embedding, Pass::Forward);
        let h = self.cfg.model.hidden_size;
        let table = self.weights.get("embedding.weight")?;
        let out = self.b.activation("embedding.out", DType::Bf16, &[self.tokens, h]);
        self.b.launch(self.embedding_op(), &[ids, table.value, out]);
        Ok(self.reduce_tokens(0, "embedding", out, h))
    }

    pub(super) fn embed_backward(&mut self, ids: BufId, dx: BufId) -> Result<(), WorkloadError> {
        self.b.at(None, Part::Embedding, Pass::Backward);
        let h = self.cfg.model.hidden_size;
        let table = self.weights.get("embedding.weight")?;
        let dx = self.gather_tokens(0, "embedding.dx", dx, h);
        let op = EmbeddingBwd {
            tokens: self.tokens,
            vocab: self.share.vocab,
            vocab_start: 0,
            hidden: h,
            grad: self.grad_dtype(),
        };
        self.b.launch(op, &[ids, dx, table.grad]);
        Ok(())
    }

    fn head_weight(&self) -> Result<super::weights::Weight, WorkloadError> {
        self.weights.get(if self.cfg.model.tied_embeddings { "embedding.weight" } else { "head.weight" })
    }

    /// Final norm, logits, and the loss: the mean over the step's tokens of this rank. Leaves the logits' gradient in
    /// their place.
    pub(super) fn head_and_loss(
        &mut self,
        x: BufId,
        labels: BufId,
        loss: BufId,
    ) -> Result<(), WorkloadError> {
        let (t, h, v) = (self.tokens, self.cfg.model.hidden_size, self.share.vocab);
        let l = self.share.layers.len();
        let (norm_w, head_w) = (self.weights.get("final_norm.weight")?, self.head_weight()?);
        self.b.at(None, Part::Head, Pass::Forward);
        let (y, _) = self.norm(l, "head.norm", x, norm_w);
        let y = self.gather_tokens(l, "head.norm", y, h);
        let logits = self.b.activation("head.logits", DType::Bf16, &[t, v]);
        self.forward_product(logits, y, head_w.value, t, v, h, None);

        self.b.at(None, Part::Loss, Pass::Forward);
        let scale = 1.0 / (t * self.cfg.batch.num_microbatches) as f32;
        let per_token = self.b.activation("loss.per_token", DType::F32, &[t]);
        self.b.launch(CrossEntropy { tokens: t, vocab: v, grad_scale: scale }, &[logits, labels, per_token]);
        self.b.launch(LossSum { tokens: t, scale }, &[per_token, loss]);
        Ok(())
    }

    /// From the logits' gradient to that of the stack's output `x`.
    pub(super) fn head_backward(&mut self, x: BufId) -> Result<BufId, WorkloadError> {
        let (t, h, v) = (self.tokens, self.cfg.model.hidden_size, self.share.vocab);
        let l = self.share.layers.len();
        let (norm_w, head_w) = (self.weights.get("final_norm.weight")?, self.head_weight()?);
        self.b.at(None, Part::Head, Pass::Backward);
        let logits = self.b.activation("head.logits", DType::Bf16, &[t, v]);
        let y = self.act(l, if self.split() { "head.norm.gathered" } else { "head.norm.out" }, &[t, h]);
        self.weight_gradient(head_w.grad, logits, y, t, v, h);
        let dy = self.b.activation("head.dy", DType::Bf16, &[t, h]);
        self.data_gradient(dy, logits, head_w.value, t, v, h, None);
        let dy = self.reduce_tokens(l, "head.dy", dy, h);
        let rstd = self.act_as(l, "head.norm.rstd", DType::F32, &[self.split_tokens]);
        Ok(self.norm_backward(l, "head.norm", x, rstd, norm_w, dy, None))
    }
}
