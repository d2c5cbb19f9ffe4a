//! Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): depth k predicts the token k places further on.
//! The hidden states and the embedding of the token that they did not see, each normed, are projected from 2h to h, pass
//! a layer of their own kind, a norm and the shared head; the mean of the depths' losses, weighted, joins the main one
//! (Megatron-Core `multi_token_prediction.py`). The layers are graphed as decoder layers are; what stands between
//! them is part `mtp`.
//!
//! With hyper-connections a depth takes the decoder's residual streams as they are before their head: each is normed and
//! projected alone, the embedding's projection is added to all, and the depth has a head of its own (DeepSeek-V4; the
//! two projections are the halves of the one above).
//!
//! Upstream has no token beyond a sequence's end and leaves the last k places out of the loss; synthetic sequences go on.

use super::rng::INPUTS;
use super::share::{LocalLayer, RankShare};
use super::step::Tokens;
use super::weights::{Spec, Weight};
use super::{Stack, WorkloadError};
use crate::config::RunConfig;
use crate::ops::collective::{Collective, StandIn};
use crate::ops::columns::{JoinColumns, SplitColumns};
use crate::ops::dropout::DropoutAddFwd;
use crate::ops::rmsnorm::RmsNormFwd;
use crate::ops::step::{TokenGen, Zero};
use crate::program::{BufId, DType, Init, Lifetime, Part, Pass, Shard};
use std::ops::Range;

/// What a depth's forward pass leaves for its backward pass.
pub(super) struct Passed {
    /// Its hidden states before the depth's last norm, and the inputs of its layers' parts.
    out: BufId,
    inputs: Vec<BufId>,
    /// Inputs of the two norms.
    embedding: BufId,
    hidden: BufId,
}

/// Depths that this rank runs: all, where it has the loss.
///
/// # Errors
/// A pipeline layout that has them in another stage than the loss.
fn depths(cfg: &RunConfig, share: &RankShare) -> Result<usize, WorkloadError> {
    if share.mtp_layers == 0 || cfg.stack_only {
        return Ok(0);
    }
    if !share.has_loss {
        return Err(WorkloadError::Unsupported(
            "multi-token prediction in another pipeline stage than the loss is not built; move `m` before `L` in \
             --pipeline_model_parallel_layout, or set model.mtp_num_layers=0"
                .into(),
        ));
    }
    Ok(cfg.model.mtp_num_layers)
}

/// The rank's share with the layers of every depth behind the decoder's. They belong to no model chunk.
///
/// # Errors
/// What [`depths`] reports.
pub(super) fn with_layers(cfg: &RunConfig, share: &RankShare) -> Result<RankShare, WorkloadError> {
    let (mut out, m) = (share.clone(), &cfg.model);
    for k in 0..depths(cfg, share)? {
        let first = m.layers.len() + if m.mtp_repeated { 0 } else { k * m.mtp_layers.len() };
        out.layers
            .extend(m.mtp_layers.iter().enumerate().map(|(i, &kind)| LocalLayer { index: first + i, kind }));
    }
    Ok(out)
}

/// Weights beside those of the layers.
pub(super) fn weights(cfg: &RunConfig, share: &RankShare) -> Result<Vec<Spec>, WorkloadError> {
    let (m, h) = (&cfg.model, cfg.model.hidden_size);
    let held = match depths(cfg, share)? {
        n if m.mtp_repeated => n.min(1),
        n => n,
    };
    let of = |k: usize| {
        let name = |what: &str| format!("mtp{k}.{what}.weight");
        // Tensor rank 0 holds the first columns of the output.
        let rows = h / cfg.parallel.tp;
        let normal = |what: &str, cols: usize| {
            Spec::normal(name(what), rows, cols, m.init_method_std).row_blocks(&[(0, rows)])
        };
        let mut out = vec![Spec::ones(name("embedding_norm"), h), Spec::ones(name("hidden_norm"), h)];
        match m.hyper_connections {
            Some(_) => out.extend([normal("embedding_proj", h), normal("hidden_proj", h)]),
            None => out.push(normal("proj", 2 * h)),
        }
        out.push(Spec::ones(name("final_norm"), h));
        out.extend(super::hyper::weights(cfg, &format!("mtp{k}.hyper_head"), true));
        out
    };
    Ok((0..held).flat_map(of).collect())
}

impl Stack<'_> {
    pub(super) fn mtp_depths(&self) -> Result<usize, WorkloadError> {
        depths(self.cfg, self.share)
    }

    /// Local layers of depth `k`.
    fn mtp_layers(&self, k: usize, depths: usize) -> Range<usize> {
        let n = self.cfg.model.mtp_layers.len();
        let first = self.share.layers.len() - (depths - k) * n;
        first..first + n
    }

    fn mtp_weight(&self, k: usize, what: &str) -> Result<Weight, WorkloadError> {
        let k = if self.cfg.model.mtp_repeated { 0 } else { k };
        self.weights.get(&format!("mtp{k}.{what}.weight"))
    }

    /// Sums of the depths' losses, unweighted: what upstream logs beside the main loss.
    fn mtp_loss(&mut self, k: usize) -> BufId {
        let zero = Init::Const { value: 0.0 };
        self.b.buffer(&format!("mtp{k}.loss"), DType::F32, &[1], Lifetime::StepState, zero)
    }

    /// At the beginning of a step.
    pub(super) fn clear_mtp_losses(&mut self) -> Result<(), WorkloadError> {
        for k in 0..self.mtp_depths()? {
            let loss = self.mtp_loss(k);
            self.b.launch(Zero { dtype: DType::F32, len: 1 }, &[loss]);
            self.b.program.digest.push(loss);
        }
        Ok(())
    }

    /// Ids and labels of every depth: those of the micro-batch, k places further on.
    pub(super) fn mtp_tokens(&mut self, mb: usize) -> Result<Vec<Tokens>, WorkloadError> {
        let depths = self.mtp_depths()?;
        let of = |k: usize| {
            let [ids, labels] = ["ids", "labels"].map(|n| {
                let zero = Init::Const { value: 0.0 };
                let name = format!("{n}.mtp{k}.mb{mb}");
                self.b.buffer(&name, DType::I32, &[self.tokens], Lifetime::StepState, zero)
            });
            let mut positions = self.positions;
            positions.chunks.iter_mut().for_each(|(start, _)| *start += k + 1);
            let rng = self.b.rng("tokens", INPUTS);
            self.b.launch(TokenGen { positions, vocab: self.share.vocab, rng }, &[self.words, ids, labels]);
            Tokens { ids, labels }
        };
        Ok((0..depths).map(of).collect())
    }

    /// All depths, from the main model's normed output `[split_tokens, hidden]` on (with hyper-connections from its streams);
    /// each ends with its own norm.
    pub(super) fn mtp_forward(&mut self, y: BufId, tokens: &[Tokens]) -> Result<Vec<Passed>, WorkloadError> {
        let (h, t, depths) = (self.cfg.model.hidden_size, self.tokens, tokens.len());
        let mut hidden = y;
        let mut passed = Vec::new();
        for (k, tokens) in tokens.iter().enumerate() {
            let layers = self.mtp_layers(k, depths);
            let l = layers.start;
            let embedding = self.embed_as(&format!("mtp{k}.embedding"), tokens.ids)?;
            self.b.at(None, Part::Mtp, Pass::Forward);
            let start = self.here();
            if self.hyper() {
                let x = self.streams_ahead(k, l, embedding, hidden)?;
                let (out, inputs) = self.forward(layers, x)?;
                self.recomputed_depth(start, out);
                self.b.at(None, Part::Mtp, Pass::Forward);
                let one = self.hyper_head(l, "mtp", &self.mtp_prefix(k), out)?;
                let w = self.mtp_weight(k, "final_norm")?;
                self.norm(l, "mtp.final_norm", one, w);
                passed.push(Passed { out, inputs, embedding, hidden });
                hidden = out;
                continue;
            }
            let (w, v) = (self.mtp_weight(k, "embedding_norm")?, self.mtp_weight(k, "hidden_norm")?);
            let (e, _) = self.norm(l, "mtp.embedding_norm", embedding, w);
            let (s, _) = self.norm(l, "mtp.hidden_norm", hidden, v);
            let joined = self.act(l, "mtp.joined", &[self.split_tokens, 2 * h]);
            self.b.launch(JoinColumns { rows: self.split_tokens, first: h, second: h }, &[e, s, joined]);
            let joined = self.gather_tokens(l, "mtp.joined", joined, 2 * h);
            let w = self.mtp_weight(k, "proj")?;
            let rows = h / self.cfg.parallel.tp;
            let part = self.act(l, "mtp.proj", &[t, rows]);
            self.forward_product(part, joined, w.value, t, rows, 2 * h, None);
            let x = self.mtp_whole_rows(l, part, rows);
            let (out, inputs) = self.forward(layers, x)?;
            self.recomputed_depth(start, out);
            self.b.at(None, Part::Mtp, Pass::Forward);
            let w = self.mtp_weight(k, "final_norm")?;
            let (z, _) = self.norm(l, "mtp.final_norm", out, w);
            passed.push(Passed { out, inputs, embedding, hidden });
            hidden = z;
        }
        Ok(passed)
    }

    /// The projection's columns of all tensor ranks, and of these rows those that are this rank's.
    fn mtp_whole_rows(&mut self, l: usize, part: BufId, cols: usize) -> BufId {
        let (h, t, ranks) = (self.cfg.model.hidden_size, self.tokens, self.cfg.parallel.tp);
        if ranks == 1 {
            return part;
        }
        let all = self.act(l, "mtp.proj.gathered", &[t, h]);
        let op = StandIn { kind: Collective::AllGather, rows: t, cols, ranks, dtype: DType::Bf16 };
        self.b.launch(op, &[part, all]);
        if !self.split() {
            return all;
        }
        let name = format!("{}.own", self.b.program.buffer(all).name);
        let shape = [self.split_tokens, h];
        self.b
            .find(&name)
            .unwrap_or_else(|| self.b.view(&name, all, 0, &shape, Init::Inherit, Shard::default()))
    }

    /// Logits and loss of every depth. `weight`: of one depth's mean loss in the whole.
    pub(super) fn mtp_losses(&mut self, tokens: &[Tokens]) -> Result<(), WorkloadError> {
        let depths = tokens.len();
        for (k, tokens) in tokens.iter().enumerate() {
            let l = self.mtp_layers(k, depths).start;
            let z = self.act(l, "mtp.final_norm.out", &[self.split_tokens, self.cfg.model.hidden_size]);
            let loss = self.mtp_loss(k);
            let weight = self.cfg.model.mtp_loss_scaling_factor / depths as f64;
            self.logits_and_loss(l, "mtp", "mtp.final_norm", z, tokens.labels, loss, weight)?;
        }
        Ok(())
    }

    /// Back through all depths: gradient of the main model's normed output, and of the shared embedding.
    pub(super) fn mtp_backward(
        &mut self,
        passed: Vec<Passed>,
        tokens: &[Tokens],
    ) -> Result<Option<BufId>, WorkloadError> {
        let (h, t, depths) = (self.cfg.model.hidden_size, self.tokens, passed.len());
        let tp = self.cfg.parallel.tp;
        let mut carried: Option<BufId> = None;
        for (k, passed) in passed.into_iter().enumerate().rev() {
            let layers = self.mtp_layers(k, depths);
            let l = layers.start;
            let mut dz = self.logits_gradient(l, "mtp", "mtp.final_norm")?;
            self.b.at(None, Part::Mtp, Pass::Backward);
            if self.hyper() {
                let (w, r) = (
                    self.mtp_weight(k, "final_norm")?,
                    self.act_as(l, "mtp.final_norm.rstd", DType::F32, &[self.split_tokens]),
                );
                let one = self.hyper_head_out(l, "mtp", passed.out);
                let done = self.norm_backward(l, "mtp.final_norm", one, r, w, dz, None);
                let prefix = self.mtp_prefix(k);
                let dout = self.hyper_head_backward(l, "mtp", &prefix, passed.out, done, carried)?;
                let dx = self.backward(layers, dout, passed.inputs)?;
                self.b.at(None, Part::Mtp, Pass::Backward);
                let (dembedding, dhidden) =
                    self.streams_ahead_backward(k, l, passed.embedding, passed.hidden, dx)?;
                carried = Some(dhidden);
                self.embed_backward(tokens[k].ids, dembedding)?;
                continue;
            }
            if let Some(from_next) = carried {
                dz = self.sum(l, "mtp.dz", dz, from_next);
            }
            let rstd =
                |s: &mut Self, n: &str| s.act_as(l, &format!("mtp.{n}.rstd"), DType::F32, &[s.split_tokens]);
            let (w, r) = (self.mtp_weight(k, "final_norm")?, rstd(self, "final_norm"));
            let dout = self.norm_backward(l, "mtp.final_norm", passed.out, r, w, dz, None);
            let dx = self.backward(layers, dout, passed.inputs)?;

            self.b.at(None, Part::Mtp, Pass::Backward);
            let dx = self.gather_tokens(l, "mtp.dx", dx, h);
            let rows = h / tp;
            let mut part = dx;
            if tp > 1 {
                part = self.act(l, "mtp.dproj", &[t, rows]);
                let others = self.act(l, "mtp.dproj.others", &[t, h - rows]);
                self.b.launch(SplitColumns { rows: t, first: rows, second: h - rows }, &[dx, part, others]);
            }
            let w = self.mtp_weight(k, "proj")?;
            let joined = self.act(l, "mtp.joined", &[self.split_tokens, 2 * h]);
            let joined = self.gather_tokens(l, "mtp.joined", joined, 2 * h);
            self.weight_gradient(w.grad, part, joined, t, rows, 2 * h);
            let djoined = self.act(l, "mtp.djoined", &[t, 2 * h]);
            self.data_gradient(djoined, part, w.value, t, rows, 2 * h, None);
            let djoined = self.reduce_tokens(l, "mtp.djoined", djoined, 2 * h);
            let [de, ds] = ["de", "ds"].map(|n| self.act(l, &format!("mtp.{n}"), &[self.split_tokens, h]));
            self.b.launch(SplitColumns { rows: self.split_tokens, first: h, second: h }, &[djoined, de, ds]);
            let (w, r) = (self.mtp_weight(k, "embedding_norm")?, rstd(self, "embedding_norm"));
            let dembedding = self.norm_backward(l, "mtp.embedding_norm", passed.embedding, r, w, de, None);
            let (w, r) = (self.mtp_weight(k, "hidden_norm")?, rstd(self, "hidden_norm"));
            carried = Some(self.norm_backward(l, "mtp.hidden_norm", passed.hidden, r, w, ds, None));
            self.embed_backward(tokens[k].ids, dembedding)?;
        }
        Ok(carried)
    }

    fn mtp_prefix(&self, k: usize) -> String {
        format!("mtp{}.", if self.cfg.model.mtp_repeated { 0 } else { k })
    }

    /// Streams that depth `k` begins with: those of `hidden`, each normed and projected, plus the embedding's projection.
    fn streams_ahead(
        &mut self,
        k: usize,
        l: usize,
        embedding: BufId,
        hidden: BufId,
    ) -> Result<BufId, WorkloadError> {
        let (h, t, width) = (self.cfg.model.hidden_size, self.split_tokens, self.stream_width());
        let rows = t * width / h;
        let w = |s: &Self, what: &str| s.mtp_weight(k, what);
        let (e, _) = self.norm(l, "mtp.embedding_norm", embedding, w(self, "embedding_norm")?);
        // A norm of every stream of every token.
        let norm = w(self, "hidden_norm")?;
        let s = self.act(l, "mtp.hidden_norm.out", &[t, width]);
        let rstd = self.act_as(l, "mtp.hidden_norm.rstd", DType::F32, &[rows]);
        let (eps, zero_centered) = (self.cfg.model.layernorm_epsilon, self.cfg.model.zero_centered_norms);
        let op = RmsNormFwd { tokens: rows, hidden: h, eps, zero_centered };
        self.b.launch(op, &[hidden, norm.value, s, rstd]);
        let [pe, ps] = [("embedding", h), ("hidden", width)]
            .map(|(n, cols)| self.act(l, &format!("mtp.{n}_proj.out"), &[t, cols]));
        self.forward_product(pe, e, w(self, "embedding_proj")?.value, t, h, h, None);
        self.forward_product(ps, s, w(self, "hidden_proj")?.value, rows, h, h, None);
        Ok(self.expand_streams(l, "mtp", pe, Some(ps)))
    }

    /// Gradients of the embedding and of the hidden streams from that of the depth's first streams.
    fn streams_ahead_backward(
        &mut self,
        k: usize,
        l: usize,
        embedding: BufId,
        hidden: BufId,
        dx: BufId,
    ) -> Result<(BufId, BufId), WorkloadError> {
        let (h, t, width) = (self.cfg.model.hidden_size, self.split_tokens, self.stream_width());
        let rows = t * width / h;
        let dpe = self.sum_streams(l, "mtp", dx);
        let (pe, ps) = (self.mtp_weight(k, "embedding_proj")?, self.mtp_weight(k, "hidden_proj")?);
        let e = self.act(l, "mtp.embedding_norm.out", &[t, h]);
        let s = self.act(l, "mtp.hidden_norm.out", &[t, width]);
        self.weight_gradient(pe.grad, dpe, e, t, h, h);
        self.weight_gradient(ps.grad, dx, s, rows, h, h);
        let (de, ds) = (self.act(l, "mtp.de", &[t, h]), self.act(l, "mtp.ds", &[t, width]));
        self.data_gradient(de, dpe, pe.value, t, h, h, None);
        self.data_gradient(ds, dx, ps.value, rows, h, h, None);
        let (w, r) = (
            self.mtp_weight(k, "embedding_norm")?,
            self.act_as(l, "mtp.embedding_norm.rstd", DType::F32, &[t]),
        );
        let dembedding = self.norm_backward(l, "mtp.embedding_norm", embedding, r, w, de, None);
        let (w, r) =
            (self.mtp_weight(k, "hidden_norm")?, self.act_as(l, "mtp.hidden_norm.rstd", DType::F32, &[rows]));
        let inputs = vec![hidden, w.value, r, ds];
        let dhidden = self.rows_norm_backward(l, "mtp.hidden_norm", inputs, [rows, h], false, w.grad);
        Ok((dembedding, dhidden))
    }

    /// `a + b`, `[split_tokens, hidden]`.
    pub(super) fn sum(&mut self, l: usize, name: &str, a: BufId, b: BufId) -> BufId {
        let shape = [self.split_tokens, self.cfg.model.hidden_size];
        let out = self.act(l, &format!("{name}.sum"), &shape);
        let none = self.no_dropout();
        self.b.launch(DropoutAddFwd { len: shape[0] * shape[1], dropout: none }, &[a, b, self.words, out]);
        out
    }
}
