//! The order of a step: tokens; every micro-batch forward and backward in the order of the pipeline; gradient
//! reduction; optimizer.
//!
//! With pipeline stages each pass begins with what arrives from another stage and ends with what goes to one. One
//! process has no other stage: what arrives is drawn from (seed, step, micro-batch) and copied, as many bytes as the
//! transfer has; what goes out is copied to a buffer that stands for the other side and is part of the digest.

use super::rng::INPUTS;
use super::schedule::{Pipeline, Turn, slots};
use super::share::RankShare;
use super::weights::Weights;
use super::{Stack, Sublayer, WorkloadError, recompute, sublayers};
use crate::config::RunConfig;
use crate::ops::collective::{Collective, StandIn};
use crate::ops::gemm::Accumulate;
use crate::ops::rng::{WORD_LR, WORD_SEED_HI, WORD_SEED_LO, WORDS};
use crate::ops::rope::Positions;
use crate::ops::step::{Copy, MicroBatchSet, RandomFill, StepBegin, StepEnd, TokenGen, Zero};
use crate::program::builder::Builder;
use crate::program::{BufId, DType, Init, Lifetime, Part, Pass, Program, lanes};
use std::collections::HashMap;
use std::ops::Range;

/// Standard deviation of given activations and gradients: about what a normed stack sees.
const GIVEN_INPUT_STD: f64 = 1.0;
/// Given output gradients are of the size that a mean loss would hand down: small, but far from bf16's
/// underflow.
const GIVEN_GRADIENT_STD: f64 = 1e-3;

/// Builds one rank's step.
///
/// # Errors
/// A model part without code, or an internal disagreement of shapes.
pub fn build(cfg: &RunConfig, share: &RankShare) -> Result<Program, WorkloadError> {
    build_in_order(cfg, share, &Pipeline::of(cfg, cfg.batch.num_microbatches).order())
}

/// [`build`] with the passes in an order of the caller's.
pub(super) fn build_in_order(
    cfg: &RunConfig,
    share: &RankShare,
    turns: &[Turn],
) -> Result<Program, WorkloadError> {
    if share.layers.is_empty() && !share.has_embedding && !share.has_loss {
        return Err(WorkloadError::Unsupported(format!(
            "pipeline rank {} has no layers, embedding or loss in this layout: nothing to run; choose another --pp_rank",
            cfg.parallel.pp_rank
        )));
    }
    let mut b = Builder::default();
    let mut words = vec![0u32; WORDS];
    words[WORD_SEED_LO] = cfg.seed as u32;
    words[WORD_SEED_HI] = (cfg.seed >> 32) as u32;
    words[WORD_LR] = step_end(cfg).learning_rate(0).to_bits();
    let words = b.buffer("step_words", DType::U32, &[WORDS], Lifetime::StepState, Init::Words { words });
    let p = &cfg.parallel;
    let batch = cfg.batch.micro_batch_size;
    let positions = if p.cp > 1 && !cfg.stack_only {
        Positions { batch, seq: share.seq, chunks: share.seq_chunks }
    } else {
        Positions::whole(batch, share.seq)
    };
    let tokens = batch * share.seq;
    let split_tokens =
        if p.tp > 1 && p.sequence_parallel && !cfg.stack_only { tokens / p.tp } else { tokens };
    let accumulate = if cfg.stack_only { Accumulate::No } else { Accumulate::InPlace };
    let grad_dtype = if cfg.optimizer.grad_dtype == "fp32" { DType::F32 } else { DType::Bf16 };
    let share = &super::mtp::with_layers(cfg, share)?;
    let weights = Weights::declare(&mut b, cfg, share, grad_dtype)?;
    let mut s = Stack {
        b,
        cfg,
        share,
        weights,
        tokens,
        split_tokens,
        positions,
        words,
        accumulate,
        ids: None,
        drawing: 0,
        reduced: Vec::new(),
        regions: Vec::new(),
    };
    if cfg.stack_only {
        s.bare_stack()?
    } else {
        s.full_step(turns)?
    }
    let Stack { mut b, regions, .. } = s;
    b.program.graph_per_micro_batch = cfg.parallel.pp > 1;
    let mut program = b
        .finish()
        .and_then(|program| recompute::insert(program, &regions))
        .map_err(WorkloadError::Internal)?;
    if cfg.overlap_wgrad {
        lanes::spread_weight_gradients(&mut program);
    }
    Ok(program)
}

fn step_end(cfg: &RunConfig) -> StepEnd {
    let o = &cfg.optimizer;
    StepEnd { lr: o.lr, min_lr: o.min_lr, warmup_iters: o.warmup_iters, decay_iters: o.decay_iters }
}

/// What [`Stack::forward`] keeps of each sublayer for its backward: input and output.
pub(super) const KEPT_OF_A_SUBLAYER: usize = 2;

impl Stack<'_> {
    /// The layers of one chunk; returns its output, and every part's input and output.
    pub(super) fn forward(
        &mut self,
        layers: Range<usize>,
        mut x: BufId,
    ) -> Result<(BufId, Vec<BufId>), WorkloadError> {
        let mut inputs = Vec::new();
        for l in layers {
            let of_layer = sublayers(self.share.layers[l].kind)?;
            for (n, sublayer) in of_layer.iter().enumerate() {
                inputs.push(x);
                let inner = self.hyper_enter(l, *sublayer, x)?;
                let out = match sublayer {
                    Sublayer::Attention => self.attention_forward(l, inner)?,
                    Sublayer::Mlp => self.mlp_forward(l, inner)?,
                    Sublayer::Moe => self.moe_forward(l, inner)?,
                    Sublayer::Mamba => self.mamba_forward(l, inner)?,
                    Sublayer::DeltaNet => self.delta_net_forward(l, inner)?,
                };
                let kept = self.hyper_kept(l, n + 1 == of_layer.len());
                x = self.hyper_leave(l, *sublayer, x, out, kept)?;
                inputs.push(out);
            }
            x = self.deepstack_forward(l, x);
            self.recomputed_layer(l, x);
        }
        Ok((x, inputs))
    }

    pub(super) fn backward(
        &mut self,
        layers: Range<usize>,
        mut dx: BufId,
        mut inputs: Vec<BufId>,
    ) -> Result<BufId, WorkloadError> {
        for l in layers.rev() {
            self.deepstack_backward(l, dx);
            for sublayer in sublayers(self.share.layers[l].kind)?.iter().rev() {
                let (Some(out), Some(x)) = (inputs.pop(), inputs.pop()) else {
                    return Err(WorkloadError::Internal("more backward than forward parts".into()));
                };
                let through = self.hyper_leave_backward(l, *sublayer, x, out, dx)?;
                let (inner, dout) = (through.inner, through.dout);
                let dy = match sublayer {
                    Sublayer::Attention => self.attention_backward(l, inner, dout)?,
                    Sublayer::Mlp => self.mlp_backward(l, inner, dout)?,
                    Sublayer::Moe => self.moe_backward(l, inner, dout)?,
                    Sublayer::Mamba => self.mamba_backward(l, inner, dout)?,
                    Sublayer::DeltaNet => self.delta_net_backward(l, inner, dout)?,
                };
                dx = self.hyper_enter_backward(l, *sublayer, x, dy, dx, &through)?;
            }
        }
        Ok(dx)
    }

    /// `--stack_only`: the layers alone, inputs and output gradients given, gradients written once.
    fn bare_stack(&mut self) -> Result<(), WorkloadError> {
        let shape = [self.split_tokens, self.stream_width()];
        if self.hash_layers() {
            self.b.at(None, Part::Step, Pass::Other);
            self.ids = Some(self.tokens_of("stack").ids);
        }
        let given = |s: &mut Self, name: &str, std: f64| {
            s.b.buffer(name, DType::Bf16, &shape, Lifetime::Constant, Init::Normal { std })
        };
        let x = given(self, "stack.input", GIVEN_INPUT_STD);
        let dout = given(self, "stack.output_grad", GIVEN_GRADIENT_STD);
        let layers = 0..self.share.layers.len();
        let (out, inputs) = self.forward(layers.clone(), x)?;
        if let Some(d) = &self.cfg.model.diffusion {
            self.dit_begin_backward(d);
        }
        let dx = self.backward(layers, dout, inputs)?;
        // Both ends of the stack outlive the step, so that the arms can be compared on them.
        for id in [out, dx] {
            self.b.program.buffers[id.0 as usize].lifetime = Lifetime::StepState;
            self.b.program.digest.push(id);
        }
        self.b.program.digest.extend(self.weights.flats.iter().map(|f| f.grads));
        Ok(())
    }

    fn full_step(&mut self, turns: &[Turn]) -> Result<(), WorkloadError> {
        let cfg = self.cfg;
        let loss = self.b.buffer("loss", DType::F32, &[1], Lifetime::StepState, Init::Const { value: 0.0 });
        // All micro-batches' tokens first: a full-iteration graph reads them from static buffers.
        self.b.at(None, Part::Step, Pass::Other);
        self.b.launch(StepBegin {}, &[self.words, loss]);
        self.clear_mtp_losses()?;
        let tokens: Vec<Option<MicroBatch>> = (0..cfg.batch.num_microbatches)
            .map(|mb| self.micro_batch_tokens(mb))
            .collect::<Result<_, _>>()?;
        self.b.micro_batch = 0;
        for flat in self.weights.flats.clone() {
            self.b.launch(Zero { dtype: self.grad_dtype(), len: flat.len }, &[flat.grads]);
        }
        // Passes whose backward is still to come, by (micro-batch, chunk).
        let mut in_flight: HashMap<(usize, usize), InFlight> = HashMap::new();
        for (turn, slot) in turns.iter().zip(slots(turns)) {
            let (key, ids) = ((turn.micro_batch, turn.chunk), tokens[turn.micro_batch].as_ref());
            self.b.slot = slot;
            self.draw_for(turn.micro_batch)?;
            if turn.pass == Pass::Forward {
                let passed = self.forward_pass(turn.chunk, ids, loss)?;
                in_flight.insert(key, passed);
            } else {
                let passed = in_flight.remove(&key).ok_or_else(|| {
                    WorkloadError::Internal("a backward pass before its forward pass".into())
                })?;
                let last = turn.micro_batch + 1 == cfg.batch.num_microbatches;
                self.backward_pass(turn.chunk, ids, passed, last)?;
            }
        }
        (self.b.slot, self.b.micro_batch) = (0, 0);
        self.move_expert_bias();
        if cfg.parallel.world.is_one() {
            self.reduce_gradients();
            self.b.program.digest.extend(self.weights.flats.iter().map(|f| f.grads));
        } else {
            self.reduce_over_ranks();
            self.share_loss(loss);
        }
        if cfg.optimizer.kind != "none" {
            if cfg.parallel.world.is_one() { self.optimizer() } else { self.optimize_over_ranks() }
        }
        self.b.at(None, Part::Optimizer, Pass::Other);
        self.b.launch(step_end(cfg), &[self.words]);
        self.b.program.loss = self.share.has_loss.then_some(loss);
        Ok(())
    }

    /// The next launches belong to this micro-batch and draw its random numbers.
    fn draw_for(&mut self, micro_batch: usize) -> Result<(), WorkloadError> {
        self.b.micro_batch = micro_batch;
        let micro_batch = self.share.place.micro_batch(micro_batch);
        if self.drawing != micro_batch {
            self.drawing = micro_batch;
            let micro_batch = u32::try_from(micro_batch)
                .map_err(|_| WorkloadError::Unsupported(format!("{micro_batch} micro-batches a step")))?;
            self.b.at(None, Part::Step, Pass::Other);
            self.b.launch(MicroBatchSet { micro_batch }, &[self.words]);
        }
        Ok(())
    }

    /// Tokens of one micro-batch, where the rank has the embedding or the loss.
    fn micro_batch_tokens(&mut self, mb: usize) -> Result<Option<MicroBatch>, WorkloadError> {
        if !self.share.has_embedding && !self.share.has_loss && !self.hash_layers() {
            return Ok(None);
        }
        self.draw_for(mb)?;
        self.b.at(None, Part::Step, Pass::Other);
        if let Some(d) = &self.cfg.model.diffusion {
            return Ok(Some(MicroBatch::Video(self.video_sample(d, mb)?)));
        }
        let main = self.tokens_of(&format!("mb{mb}"));
        let mtp = self.mtp_tokens(mb)?;
        let pixels = self.pixels(mb);
        Ok(Some(MicroBatch::Text { main, mtp, pixels }))
    }

    /// Draws ids and labels `[tokens]`. They outlive the step, small as they are: static inputs of a full-iteration graph,
    /// read by --dump.
    fn tokens_of(&mut self, name: &str) -> Tokens {
        let [ids, labels] = ["ids", "labels"].map(|n| {
            self.b.buffer(
                &format!("{n}.{name}"),
                DType::I32,
                &[self.tokens],
                Lifetime::StepState,
                Init::Const { value: 0.0 },
            )
        });
        let rng = self.b.rng("tokens", INPUTS);
        // Ids of the whole vocabulary's local part: a stand-in rank scores its own rows only.
        let vocab = self.share.vocab * self.share.place.tensor.as_ref().map_or(1, |g| g.len());
        self.b.launch(TokenGen { positions: self.positions, vocab, rng }, &[self.words, ids, labels]);
        Tokens { ids, labels }
    }

    /// Whether a local layer chooses experts by token ids.
    fn hash_layers(&self) -> bool {
        (0..self.share.layers.len()).any(|l| self.hashed(l))
    }

    /// The micro-batch's ids in one place for all micro-batches, so that these share the graphs of the layers that read them.
    fn routing_ids(&mut self, layers: &Range<usize>, ids: BufId) -> Option<BufId> {
        if !layers.clone().any(|l| self.hashed(l)) {
            return None;
        }
        self.b.at(None, Part::Embedding, Pass::Forward);
        let here = self.b.activation("moe.ids", DType::I32, &[self.tokens]);
        self.b.launch(Copy { dtype: DType::I32, len: self.tokens }, &[ids, here]);
        Some(here)
    }

    /// The chunk's layers, and whether the model begins and ends with it.
    fn chunk(&self, chunk: usize) -> Result<(Range<usize>, bool, bool), WorkloadError> {
        let layers = self.share.chunks.get(chunk).cloned();
        let layers = layers.ok_or_else(|| WorkloadError::Internal(format!("no model chunk {chunk}")))?;
        let first = self.share.has_embedding && chunk == 0;
        let last = self.share.has_loss && chunk + 1 == self.share.chunks.len();
        Ok((layers, first, last))
    }

    fn forward_pass(
        &mut self,
        chunk: usize,
        tokens: Option<&MicroBatch>,
        loss: BufId,
    ) -> Result<InFlight, WorkloadError> {
        let (layers, first, last) = self.chunk(chunk)?;
        self.ids = match tokens {
            Some(MicroBatch::Text { main, .. }) => self.routing_ids(&layers, main.ids),
            _ => None,
        };
        let x = match tokens.filter(|_| first) {
            Some(MicroBatch::Text { main, pixels, .. }) => {
                let x = self.embed_as("embedding", main.ids)?;
                let x = self.vision_forward(*pixels, x)?;
                self.expand_streams(layers.start, "embedding", x, None)
            }
            Some(MicroBatch::Video(sample)) => match &self.cfg.model.diffusion {
                Some(d) => self.dit_begin(d, *sample)?,
                None => return Err(WorkloadError::Internal("a video without its transformer".into())),
            },
            None => self.receive(chunk, "input", GIVEN_INPUT_STD, Pass::Forward),
        };
        let (out, inputs) = self.forward(layers, x)?;
        let mut mtp = Vec::new();
        match tokens.filter(|_| last) {
            Some(MicroBatch::Text { main, mtp: ahead, .. }) => {
                let y = self.final_norm(out)?;
                mtp = self.mtp_forward(if self.hyper() { out } else { y }, ahead)?;
                self.head_and_loss(y, main.labels, loss)?;
                self.mtp_losses(ahead)?;
            }
            Some(MicroBatch::Video(sample)) => {
                if let Some(d) = &self.cfg.model.diffusion {
                    self.dit_head(d, out, *sample, loss)?;
                }
            }
            None => self.send("output", out, Pass::Forward),
        }
        Ok(InFlight { out, inputs, mtp })
    }

    fn backward_pass(
        &mut self,
        chunk: usize,
        tokens: Option<&MicroBatch>,
        passed: InFlight,
        last_micro_batch: bool,
    ) -> Result<(), WorkloadError> {
        let (layers, first, last) = self.chunk(chunk)?;
        let dout = match tokens.filter(|_| last) {
            Some(MicroBatch::Text { mtp, .. }) => {
                let of_mtp = self.mtp_backward(passed.mtp, mtp)?;
                self.head_backward(passed.out, of_mtp)?
            }
            Some(MicroBatch::Video(_)) => match &self.cfg.model.diffusion {
                Some(d) => {
                    self.dit_begin_backward(d);
                    self.dit_head_backward(d, passed.out)?
                }
                None => return Err(WorkloadError::Internal("a video without its transformer".into())),
            },
            None => self.receive(chunk, "output_grad", GIVEN_GRADIENT_STD, Pass::Backward),
        };
        let dx = match self.overlaps_reduction(last_micro_batch) {
            true => self.backward_and_reduce(layers, dout, passed.inputs)?,
            false => self.backward(layers, dout, passed.inputs)?,
        };
        match tokens.filter(|_| first) {
            Some(MicroBatch::Text { main, pixels, .. }) => {
                self.b.at(None, Part::Embedding, Pass::Backward);
                let dx = self.sum_streams(0, "embedding", dx);
                let dx = self.vision_backward(*pixels, dx)?;
                self.embed_backward(main.ids, dx)?
            }
            Some(MicroBatch::Video(sample)) => {
                if let Some(d) = &self.cfg.model.diffusion {
                    self.dit_end(d, *sample, dx)?;
                }
            }
            None => self.send("input_grad", dx, Pass::Backward),
        }
        Ok(())
    }

    /// What another stage sends, `[split_tokens, hidden]`: drawn where it would be computed, then copied.
    fn receive(&mut self, chunk: usize, what: &str, std: f64, pass: Pass) -> BufId {
        self.b.at(None, Part::Pipeline, pass);
        let shape = [self.split_tokens, self.stream_width()];
        let there = self.b.transient(&format!("peer.{what}"), DType::Bf16, &shape);
        let rng = self.b.rng(&format!("given.stage{chunk}.{what}"), INPUTS);
        self.b.launch(
            RandomFill { len: shape[0] * shape[1], std, rng, dtype: DType::Bf16 },
            &[self.words, there],
        );
        let here = self.b.activation(&format!("stage.{what}"), DType::Bf16, &shape);
        self.transfer(Collective::Receive, there, here);
        here
    }

    /// What goes to another stage. The last of each kind outlives the step, so that the arms can be compared on it.
    fn send(&mut self, what: &str, x: BufId, pass: Pass) {
        self.b.at(None, Part::Pipeline, pass);
        let shape = [self.split_tokens, self.stream_width()];
        let zero = Init::Const { value: 0.0 };
        let there = self.b.buffer(&format!("sent.{what}"), DType::Bf16, &shape, Lifetime::StepState, zero);
        self.transfer(Collective::Send, x, there);
        if !self.b.program.digest.contains(&there) {
            self.b.program.digest.push(there);
        }
    }

    fn transfer(&mut self, kind: Collective, from: BufId, to: BufId) {
        let (rows, cols) = (self.split_tokens, self.stream_width());
        self.b.launch(StandIn { kind, rows, cols, ranks: 2, dtype: DType::Bf16 }, &[from, to]);
    }
}

/// Static buffers of one micro-batch.
enum MicroBatch {
    Text {
        main: Tokens,
        /// Of every depth of multi-token prediction.
        mtp: Vec<Tokens>,
        /// Flattened patches of the images, where the rank has the tower.
        pixels: Option<BufId>,
    },
    Video(super::dit::VideoSample),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Tokens {
    pub ids: BufId,
    pub labels: BufId,
}

/// What a forward pass leaves for its backward pass.
struct InFlight {
    out: BufId,
    /// Inputs of the parts, in order.
    inputs: Vec<BufId>,
    mtp: Vec<super::mtp::Passed>,
}
