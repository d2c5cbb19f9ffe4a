//! Weights and their main gradients, each kind in one flat buffer, so that the gradient norm, the optimizer
//! and the data-parallel reduction are single launches over memory that lies in a row.

use super::share::{LocalLayer, RankShare};
use super::{
    Sublayer, WorkloadError, attention, delta_net, dit, head, hyper, mamba, mlp, moe, mtp, place, sublayers,
    vision,
};
use crate::config::RunConfig;
use crate::program::builder::Builder;
use crate::program::{BufId, DType, Init, Lifetime, Program, Shard};
use std::collections::{HashMap, HashSet};

/// Elements that every weight starts on a multiple of: 256 bytes of bf16, what vector access and
/// cuBLASLt's alignment classes ask for.
pub(super) const WEIGHT_ALIGNMENT: usize = 128;

/// One weight of the rank, `[rows, cols]`.
pub struct Spec {
    pub name: String,
    pub rows: usize,
    pub cols: usize,
    pub init: Init,
    pub shard: Shard,
    /// Lies with the experts, which are reduced over another group of ranks.
    pub expert: bool,
    /// The scale of a norm, which a model may store less one.
    pub scale: bool,
}

impl Spec {
    /// Random with `std`, all rows and columns local.
    pub fn normal(name: String, rows: usize, cols: usize, std: f64) -> Self {
        Self {
            name,
            rows,
            cols,
            init: Init::Normal { std },
            shard: Shard::default(),
            expert: false,
            scale: false,
        }
    }
    /// The scale of a norm: ones, stored as the model's norms are.
    pub fn ones(name: String, len: usize) -> Self {
        Self { scale: true, ..Self::constant(name, len, 1.0) }
    }
    /// A vector of one value.
    pub fn constant(name: String, len: usize, value: f64) -> Self {
        Self {
            name,
            rows: 1,
            cols: len,
            init: Init::Const { value },
            shard: Shard::default(),
            expert: false,
            scale: false,
        }
    }
    /// A bias of `len` values. Upstream's begin at zero; these are random like weights, so that one that a product left out
    /// would show.
    pub fn bias(name: String, len: usize, std: f64) -> Self {
        Self::normal(name, len, 1, std)
    }
    /// Local row blocks (first global row, rows).
    pub fn row_blocks(mut self, blocks: &[(usize, usize)]) -> Self {
        self.shard.row_blocks = blocks.to_vec();
        self
    }
    /// First global column and width of the whole tensor.
    pub fn col_block(mut self, first: usize, width: usize) -> Self {
        self.shard.cols = Some((first, width));
        self
    }
    pub fn expert(mut self) -> Self {
        self.expert = true;
        self
    }
}

/// A weight and its main gradient.
#[derive(Debug, Clone, Copy)]
pub struct Weight {
    pub value: BufId,
    pub grad: BufId,
}

/// One flat pair of buffers.
#[derive(Debug, Clone, Copy)]
pub struct Flat {
    pub values: BufId,
    pub grads: BufId,
    pub len: usize,
    /// Ranks that the optimizer state is sharded over.
    pub ranks: usize,
    pub kind: FlatKind,
}

/// What the weights of a flat pair have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlatKind {
    /// Of this tensor rank alone; of one process all but the experts.
    Dense,
    /// Held alike by tensor ranks, gradients summed over them.
    Summed,
    /// Held alike by tensor ranks, with the same gradients.
    Same,
    Experts,
}

impl FlatKind {
    const ALL: [(FlatKind, &str); 4] = [
        (FlatKind::Dense, "dense"),
        (FlatKind::Summed, "summed"),
        (FlatKind::Same, "same"),
        (FlatKind::Experts, "experts"),
    ];

    /// Of one process.
    fn of(spec: &Spec) -> Self {
        if spec.expert { FlatKind::Experts } else { FlatKind::Dense }
    }
}

pub struct Weights {
    by_name: HashMap<String, Weight>,
    /// Dense weights, then expert weights; only those that exist.
    pub flats: Vec<Flat>,
}

impl Weights {
    /// Declares every weight of the rank.
    pub fn declare(
        b: &mut Builder,
        cfg: &RunConfig,
        share: &RankShare,
        grad_dtype: DType,
    ) -> Result<Self, WorkloadError> {
        let mut specs = Vec::new();
        let ends = !cfg.stack_only && cfg.model.diffusion.is_none();
        if let Some(d) = cfg.model.diffusion.as_ref().filter(|_| !cfg.stack_only) {
            specs.extend(dit::weights(cfg, d));
        }
        // Multi-token prediction embeds tokens at the other end of the model.
        if (share.has_embedding || share.mtp_layers > 0) && ends {
            specs.push(head::embedding_weight(cfg, share));
        }
        if share.has_embedding && ends {
            specs.extend(vision::weights(cfg));
        }
        for &LocalLayer { index, kind } in &share.layers {
            for sublayer in sublayers(kind)? {
                specs.extend(hyper::sublayer_weights(cfg, *sublayer, index));
                specs.extend(match sublayer {
                    Sublayer::Attention => attention::weights(cfg, share, index),
                    Sublayer::Mlp => mlp::weights(cfg, share, index),
                    Sublayer::Moe => moe::weights(cfg, share, index)?,
                    Sublayer::Mamba => mamba::weights(cfg, share, index)?,
                    Sublayer::DeltaNet => delta_net::weights(cfg, share, index)?,
                });
            }
        }
        if share.has_loss && ends {
            specs.extend(head::head_weights(cfg, share));
        }
        specs.extend(mtp::weights(cfg, share)?);
        // Depths of multi-token prediction may share one layer.
        let mut seen = HashSet::new();
        specs.retain(|s| seen.insert(s.name.clone()));
        if cfg.model.zero_centered_norms {
            for spec in specs.iter_mut().filter(|s| s.scale) {
                spec.init = Init::Const { value: 0.0 };
            }
        }
        let p = &cfg.parallel;
        let one = p.world.is_one();
        let specs: Vec<(Spec, FlatKind)> = specs
            .into_iter()
            .map(|s| {
                let kind = FlatKind::of(&s);
                if one { Ok((s, kind)) } else { place::placed(s, share, p.sequence_parallel) }
            })
            .collect::<Result<_, _>>()?;
        let dense_ranks = p.dp * p.cp;
        let expert_ranks = (p.dp * p.cp * p.tp / (p.ep * p.etp)).max(1);
        let mut out = Self { by_name: HashMap::new(), flats: Vec::new() };
        for (kind, label) in FlatKind::ALL {
            let ranks = if kind == FlatKind::Experts { expert_ranks } else { dense_ranks };
            let ranks = if p.use_distributed_optimizer && !cfg.stack_only { ranks } else { 1 };
            let mine: Vec<&Spec> = specs.iter().filter(|s| s.1 == kind).map(|s| &s.0).collect();
            if mine.is_empty() {
                continue;
            }
            let padded = |s: &Spec| (s.rows * s.cols).next_multiple_of(WEIGHT_ALIGNMENT);
            let len =
                mine.iter().map(|s| padded(s)).sum::<usize>().next_multiple_of(WEIGHT_ALIGNMENT * ranks);
            let zero = Init::Const { value: 0.0 };
            let values =
                b.buffer(&format!("{label}.weights"), DType::Bf16, &[len], Lifetime::Weight, zero.clone());
            let grads = b.buffer(
                &format!("{label}.main_grads"),
                grad_dtype,
                &[len],
                Lifetime::MainGrad,
                zero.clone(),
            );
            let mut at = 0;
            for s in mine {
                let shape = [s.rows, s.cols];
                let value = b.view(&s.name, values, at, &shape, s.init.clone(), s.shard.clone());
                let grad =
                    b.view(&format!("{}.grad", s.name), grads, at, &shape, Init::Inherit, Shard::default());
                out.by_name.insert(s.name.clone(), Weight { value, grad });
                at += padded(s);
            }
            out.flats.push(Flat { values, grads, len, ranks, kind });
        }
        Ok(out)
    }

    /// First element of the weights in `flat` whose names begin so.
    pub fn first_of(&self, program: &Program, flat: BufId, prefix: &str) -> Option<usize> {
        let mine = self.by_name.iter().filter(|(name, _)| name.starts_with(prefix));
        let places = mine.map(|(_, weight)| program.root(weight.value));
        places.filter(|(root, _)| *root == flat).map(|(_, offset)| offset).min()
    }

    /// The weight of that name, if the model has it.
    pub fn find(&self, name: &str) -> Option<Weight> {
        self.by_name.get(name).copied()
    }

    pub fn get(&self, name: &str) -> Result<Weight, WorkloadError> {
        self.by_name
            .get(name)
            .copied()
            .ok_or_else(|| WorkloadError::Internal(format!("no weight is called {name}")))
    }
}
