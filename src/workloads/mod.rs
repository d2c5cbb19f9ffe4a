//! RunConfig -> Program: one rank's step as a list of launches. Knows ops by shape, no device.
//!
//! There is no autograd: each layer file emits its forward and its backward launches itself.

mod attention;
mod delta_net;
mod dit;
mod expert_bias;
#[cfg(test)]
mod gradients;
mod head;
mod hyper;
#[cfg(test)]
mod launches;
mod linear;
mod linear_biased;
mod mamba;
mod mla;
mod mlp;
mod moe;
mod mtp;
mod optimizer;
mod place;
mod recompute;
pub mod rng;
pub mod schedule;
pub mod share;
mod shared_kv;
pub mod shrink;
mod step;
#[cfg(test)]
pub mod testing;
mod vision;
mod weights;

pub use moe::{TALLY, capacity};
pub use step::build;

use crate::config::{LayerKind, RunConfig};
use crate::ops::dropout::Dropout;
use crate::ops::gemm::Accumulate;
use crate::ops::rng::Rng;
use crate::ops::rope::Positions;
use crate::program::builder::Builder;
use crate::program::{BufId, DType};
use rng::{State, Tracker};
use share::RankShare;
use weights::Weights;

/// Why a configuration has no program.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    #[error("{0}")]
    Unsupported(String),
    #[error("internal error while building the step: {0}; please report it")]
    Internal(String),
}

/// The pieces a layer is made of, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sublayer {
    Attention,
    Mlp,
    Moe,
    Mamba,
    DeltaNet,
}

fn sublayers(kind: LayerKind) -> Result<&'static [Sublayer], WorkloadError> {
    match kind {
        LayerKind::Dense => Ok(&[Sublayer::Attention, Sublayer::Mlp]),
        LayerKind::Moe => Ok(&[Sublayer::Attention, Sublayer::Moe]),
        LayerKind::AttnOnly => Ok(&[Sublayer::Attention]),
        LayerKind::MlpOnly => Ok(&[Sublayer::Mlp]),
        LayerKind::MoeOnly => Ok(&[Sublayer::Moe]),
        LayerKind::Mamba => Ok(&[Sublayer::Mamba]),
        LayerKind::DeltaDense => Ok(&[Sublayer::DeltaNet, Sublayer::Mlp]),
        LayerKind::DeltaMoe => Ok(&[Sublayer::DeltaNet, Sublayer::Moe]),
    }
}

/// What the layer files share while they emit launches.
struct Stack<'a> {
    b: Builder,
    cfg: &'a RunConfig,
    share: &'a RankShare,
    weights: Weights,
    /// Rows of a micro-batch on this rank outside sequence-parallel regions.
    tokens: usize,
    /// Rows where sequence parallelism splits them over tensor ranks (norms, residual stream).
    split_tokens: usize,
    positions: Positions,
    /// RNG tracker words.
    words: BufId,
    /// How weight gradients enter the main gradients: added up, or written once (`--stack_only`).
    accumulate: Accumulate,
    /// Token ids of the micro-batch at hand, where layers choose experts by them.
    ids: Option<BufId>,
    /// The micro-batch whose draws come next, as the launches so far leave it in the step words.
    drawing: usize,
    /// Buckets (flat gradients, first element) whose reduction runs beside the backward pass, with its launch.
    reduced: Vec<(BufId, usize, usize)>,
    /// Forward launches that the backward pass repeats.
    regions: Vec<recompute::Region>,
}

impl Stack<'_> {
    fn grad_dtype(&self) -> DType {
        if self.cfg.optimizer.grad_dtype == "fp32" { DType::F32 } else { DType::Bf16 }
    }
    /// Place of layer `l` in its model chunk: what its activations are called by, so that a slot serves every chunk in
    /// turn. A bare stack holds all chunks at once.
    fn place(&self, l: usize) -> usize {
        let chunk = self.share.chunks.iter().find(|c| !self.cfg.stack_only && c.contains(&l));
        chunk.map_or(l, |c| l - c.start)
    }
    /// bf16 activation of layer `l`.
    fn act(&mut self, l: usize, what: &str, shape: &[usize]) -> BufId {
        self.act_as(l, what, DType::Bf16, shape)
    }
    /// Activation of layer `l` of another dtype.
    fn act_as(&mut self, l: usize, what: &str, dtype: DType, shape: &[usize]) -> BufId {
        self.b.activation(&format!("l{}.{what}", self.place(l)), dtype, shape)
    }
    /// The draws at `site` from a named state of this rank.
    fn rng(&mut self, site: &str, state: State) -> Rng {
        let tracker = Tracker::of(&self.cfg.parallel, &self.share.place);
        self.b.rng(site, tracker.seed_offset(state))
    }
    /// For a sum that drops nothing.
    fn no_dropout(&mut self) -> Dropout {
        Dropout { p: 0.0, rng: self.rng("none", State::DataParallel) }
    }
}
