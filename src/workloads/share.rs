//! One rank's share of the job: local layers, heads, experts, vocabulary rows, sequence chunks.

use crate::config::{LayerKind, RunConfig};
use crate::layout;

/// What rank 0 of every group holds, at pipeline rank `pp_rank`.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RankShare {
    /// (index in the whole model, kind), in order.
    pub layers: Vec<(usize, LayerKind)>,
    pub has_embedding: bool,
    pub has_loss: bool,
    pub q_heads: usize,
    /// At least one: with fewer groups than tensor ranks, ranks hold copies.
    pub kv_heads: usize,
    /// Width of the dense MLP.
    pub ffn: usize,
    /// Local experts, 0 for a dense model.
    pub experts: usize,
    /// Width of one expert.
    pub expert_ffn: usize,
    /// Width of the shared expert, 0 without one.
    pub shared_ffn: usize,
    /// Vocabulary rows.
    pub vocab: usize,
    /// Tokens of one sequence.
    pub seq_local: usize,
    /// (start, length) in the whole sequence: chunks 0 and 2cp-1, which balance causal attention.
    pub chunks: [(usize, usize); 2],
}

/// A size that does not divide.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ShareError(pub String);

impl RankShare {
    /// # Errors
    /// What does not divide, with the numbers and the flag to change.
    pub fn of(cfg: &RunConfig) -> Result<Self, ShareError> {
        let (p, m) = (&cfg.parallel, &cfg.model);
        let divide = |what: &str, n: usize, by: usize, flag: &str| {
            if by == 0 || !n.is_multiple_of(by) {
                return Err(ShareError(format!("{what} {n} does not divide by {by}; choose another {flag}")));
            }
            Ok(n / by)
        };
        let stages = layout::stages(p, m.layers.len(), m.mtp_num_layers).map_err(ShareError)?;
        let stage = stages.get(p.pp_rank).ok_or_else(|| {
            ShareError(format!("--pp_rank {} is outside the {} pipeline ranks", p.pp_rank, stages.len()))
        })?;
        let layer = |&i: &usize| m.layers.get(i).map(|k| (i, *k));
        let layers: Vec<_> = stage.layers.iter().filter_map(layer).collect();
        let kv_heads = if m.num_query_groups >= p.tp { divide("the number of query groups", m.num_query_groups, p.tp, "-tp")? } else { 1 };
        let half = divide("the sequence length", cfg.batch.seq_length, 2 * p.cp, "-cp or -sl");
        let (seq_local, chunks) = if p.cp == 1 {
            (cfg.batch.seq_length, [(0, cfg.batch.seq_length), (0, 0)])
        } else {
            let c = half?;
            (2 * c, [(0, c), ((2 * p.cp - 1) * c, c)])
        };
        let tokens = seq_local * cfg.batch.micro_batch_size;
        if p.sequence_parallel && p.tp > 1 {
            divide("the number of tokens of a micro-batch", tokens, p.tp, "-tp or -sl")?;
        }
        let moe = m.moe.as_ref();
        Ok(Self {
            layers,
            has_embedding: stage.embedding,
            has_loss: stage.loss,
            q_heads: divide("the number of attention heads", m.num_attention_heads, p.tp, "-tp")?,
            kv_heads,
            ffn: divide("the MLP width", m.ffn_hidden_size, p.tp, "-tp")?,
            experts: moe.map_or(Ok(0), |e| divide("the number of experts", e.num_experts, p.ep, "-ep"))?,
            expert_ffn: moe.map_or(Ok(0), |e| divide("the expert width", e.ffn_hidden_size, p.etp, "-et"))?,
            shared_ffn: moe.and_then(|e| e.shared_expert_intermediate_size).map_or(Ok(0), |w| divide("the shared expert's width", w, p.tp, "-tp"))?,
            vocab: divide("the vocabulary", m.vocab_size, p.tp, "-tp or --vocab_size")?,
            seq_local,
            chunks,
        })
    }
}
