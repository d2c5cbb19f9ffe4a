//! The order of a step: tokens; every micro-batch forward and backward; gradient reduction; optimizer.

use super::share::{LocalLayer, RankShare};
use super::weights::Weights;
use super::{Stack, Sublayer, WorkloadError, sublayers};
use crate::config::RunConfig;
use crate::ops::gemm::Accumulate;
use crate::ops::rng::{WORD_LR, WORD_SEED_HI, WORD_SEED_LO, WORDS};
use crate::ops::rope::Positions;
use crate::ops::step::{MicroBatchAdvance, RandomFill, StepBegin, StepEnd, TokenGen, Zero};
use crate::program::builder::Builder;
use crate::program::{BufId, DType, Init, Lifetime, Part, Pass, Program};

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
    let weights = Weights::declare(&mut b, cfg, share, grad_dtype)?;
    let mut s = Stack { b, cfg, share, weights, tokens, split_tokens, positions, words, accumulate };
    if cfg.stack_only {
        s.bare_stack()?
    } else {
        s.full_step()?
    }
    s.b.finish().map_err(WorkloadError::Internal)
}

fn step_end(cfg: &RunConfig) -> StepEnd {
    let o = &cfg.optimizer;
    StepEnd { lr: o.lr, min_lr: o.min_lr, warmup_iters: o.warmup_iters, decay_iters: o.decay_iters }
}

impl Stack<'_> {
    fn forward(&mut self, mut x: BufId) -> Result<(BufId, Vec<BufId>), WorkloadError> {
        let mut inputs = Vec::new();
        for (l, &LocalLayer { kind, .. }) in self.share.layers.iter().enumerate() {
            for sublayer in sublayers(kind)? {
                inputs.push(x);
                x = match sublayer {
                    Sublayer::Attention => self.attention_forward(l, x)?,
                    Sublayer::Mlp => self.mlp_forward(l, x)?,
                    Sublayer::Moe => self.moe_forward(l, x)?,
                    Sublayer::Mamba => self.mamba_forward(l, x)?,
                    Sublayer::DeltaNet => self.delta_net_forward(l, x)?,
                };
            }
        }
        Ok((x, inputs))
    }

    fn backward(&mut self, mut dx: BufId, mut inputs: Vec<BufId>) -> Result<BufId, WorkloadError> {
        for (l, &LocalLayer { kind, .. }) in self.share.layers.iter().enumerate().rev() {
            for sublayer in sublayers(kind)?.iter().rev() {
                let x = inputs
                    .pop()
                    .ok_or_else(|| WorkloadError::Internal("more backward than forward parts".into()))?;
                dx = match sublayer {
                    Sublayer::Attention => self.attention_backward(l, x, dx)?,
                    Sublayer::Mlp => self.mlp_backward(l, x, dx)?,
                    Sublayer::Moe => self.moe_backward(l, x, dx)?,
                    Sublayer::Mamba => self.mamba_backward(l, x, dx)?,
                    Sublayer::DeltaNet => self.delta_net_backward(l, x, dx)?,
                };
            }
        }
        Ok(dx)
    }

    /// `--stack_only`: the layers alone, inputs and output gradients given, gradients written once.
    fn bare_stack(&mut self) -> Result<(), WorkloadError> {
        let shape = [self.split_tokens, self.cfg.model.hidden_size];
        let given = |s: &mut Self, name: &str, std: f64| {
            s.b.buffer(name, DType::Bf16, &shape, Lifetime::Constant, Init::Normal { std })
        };
        let x = given(self, "stack.input", GIVEN_INPUT_STD);
        let dout = given(self, "stack.output_grad", GIVEN_GRADIENT_STD);
        let (out, inputs) = self.forward(x)?;
        let dx = self.backward(dout, inputs)?;
        // Both ends of the stack outlive the step, so that the arms can be compared on them.
        for id in [out, dx] {
            self.b.program.buffers[id.0 as usize].lifetime = Lifetime::StepState;
            self.b.program.digest.push(id);
        }
        self.b.program.digest.extend(self.weights.flats.iter().map(|f| f.grads));
        Ok(())
    }

    fn full_step(&mut self) -> Result<(), WorkloadError> {
        let (cfg, tokens) = (self.cfg, self.tokens);
        let loss = self.b.buffer("loss", DType::F32, &[1], Lifetime::StepState, Init::Const { value: 0.0 });
        let count = cfg.batch.num_microbatches;
        // All micro-batches' tokens first: a full-iteration graph reads them from static buffers.
        self.b.at(None, Part::Step, Pass::Other);
        self.b.launch(StepBegin {}, &[self.words, loss]);
        let mut given = Vec::new();
        for mb in 0..count {
            self.b.micro_batch = mb;
            given.push(self.given(mb, tokens));
            self.b.launch(MicroBatchAdvance {}, &[self.words]);
        }
        self.b.micro_batch = 0;
        self.b.launch(StepBegin {}, &[self.words, loss]);
        for flat in self.weights.flats.clone() {
            self.b.launch(Zero { dtype: self.grad_dtype(), len: flat.len }, &[flat.grads]);
        }
        for (mb, g) in given.into_iter().enumerate() {
            self.b.micro_batch = mb;
            self.micro_batch(g, loss)?;
            self.b.at(None, Part::Loss, Pass::Backward);
            self.b.launch(MicroBatchAdvance {}, &[self.words]);
        }
        self.b.micro_batch = 0;
        self.reduce_gradients();
        self.b.program.digest.extend(self.weights.flats.iter().map(|f| f.grads));
        if cfg.optimizer.kind != "none" {
            self.optimizer();
        }
        self.b.at(None, Part::Optimizer, Pass::Other);
        self.b.launch(step_end(cfg), &[self.words]);
        self.b.program.loss = self.share.has_loss.then_some(loss);
        Ok(())
    }

    fn given(&mut self, mb: usize, tokens: usize) -> Given {
        let random = |s: &mut Self, what: &str, std: f64| {
            let shape = [s.split_tokens, s.cfg.model.hidden_size];
            let out = s.b.activation(&format!("{what}.mb{mb}"), DType::Bf16, &shape);
            let rng = s.b.rng(&format!("given.{what}"), 0);
            s.b.launch(
                RandomFill { len: shape[0] * shape[1], std, rng, dtype: DType::Bf16 },
                &[s.words, out],
            );
            out
        };
        let mut given = Given { ids: None, labels: None, input: None, gradient: None };
        if self.share.has_embedding || self.share.has_loss {
            // They outlive the step, small as they are: static inputs of a full-iteration graph, read by --dump.
            let [ids, labels] = ["ids", "labels"].map(|n| {
                self.b.buffer(
                    &format!("{n}.mb{mb}"),
                    DType::I32,
                    &[tokens],
                    Lifetime::StepState,
                    Init::Const { value: 0.0 },
                )
            });
            let rng = self.b.rng("tokens", 0);
            // Ids of the whole vocabulary's local part: a stand-in rank scores its own rows only.
            self.b.launch(
                TokenGen { positions: self.positions, vocab: self.share.vocab, rng },
                &[self.words, ids, labels],
            );
            (given.ids, given.labels) = (Some(ids), Some(labels));
        }
        if !self.share.has_embedding {
            given.input = Some(random(self, "stage.input", GIVEN_INPUT_STD));
        }
        if !self.share.has_loss {
            given.gradient = Some(random(self, "stage.output_grad", GIVEN_GRADIENT_STD));
        }
        given
    }

    fn micro_batch(&mut self, given: Given, loss: BufId) -> Result<(), WorkloadError> {
        let missing = || WorkloadError::Internal("a stage without its inputs".into());
        let x = match (given.input, given.ids) {
            (Some(x), _) => x,
            (None, Some(ids)) => self.embed(ids)?,
            _ => return Err(missing()),
        };
        let (out, inputs) = self.forward(x)?;
        let dout = match (given.gradient, given.labels) {
            (Some(d), _) => d,
            (None, Some(labels)) => self.head_and_loss(out, labels, loss)?,
            _ => return Err(missing()),
        };
        let dx = self.backward(dout, inputs)?;
        if self.share.has_embedding {
            self.embed_backward(given.ids.ok_or_else(missing)?, dx)?;
        }
        Ok(())
    }
}

/// What a micro-batch starts from.
struct Given {
    ids: Option<BufId>,
    labels: Option<BufId>,
    /// Output of the stage before, when this one has no embedding.
    input: Option<BufId>,
    /// Gradient from the stage after, when this one has no loss.
    gradient: Option<BufId>,
}
