//! Several processes: where a rank's weights lie in the whole model's, whose gradients are summed over tensor ranks, and
//! the end of a step with real data-parallel groups.

use super::optimizer::{BUCKET_ELEMENTS, NORM_PARTIALS};
use super::share::RankShare;
use super::weights::{Flat, FlatKind, Spec, WEIGHT_ALIGNMENT};
use super::{Stack, WorkloadError};
use crate::ops::collective::{Exchange, Kind};
use crate::ops::optimizer::{Adam, GradNormFinish, GradNormPartial};
use crate::ops::step::Zero;
use crate::program::{BufId, DType, Init, Lifetime, Part, Pass, Shard};
use crate::ranks::groups::Group;

/// Ends of the names of weights that tensor ranks share out, by rows where the layer file names no blocks.
const SHARDED: &[&str] = &[
    "embedding.weight",
    "head.weight",
    "attn.qkv.weight",
    "attn.qkv.bias",
    "attn.proj.weight",
    "attn.sinks",
    "mlp.fc1.weight",
    "mlp.fc1.bias",
    "mlp.fc2.weight",
    "moe.shared.fc1.weight",
    "moe.shared.fc1.bias",
    "moe.shared.fc2.weight",
    "mamba.in_proj.weight",
    "mamba.conv.weight",
    "mamba.conv.bias",
    "mamba.a_log",
    "mamba.d",
    "mamba.dt_bias",
    "mamba.gated_norm.weight",
    "mamba.out_proj.weight",
];
/// Those that every tensor rank has whole and uses on its share of the tokens, where sequence parallelism splits them,
/// or on all tokens alike.
const ON_TOKENS: &[&str] = &[
    "norm.weight",
    "proj.bias",
    "fc2.bias",
    "router.weight",
    "router.bias",
    "shared.gate.weight",
    "latent_down.weight",
    "latent_up.weight",
];
/// Those that every tensor rank has whole and uses on its own heads.
const ON_HEADS: &[&str] = &["q_norm.weight", "k_norm.weight"];

fn ends(name: &str, list: &[&str]) -> bool {
    list.iter()
        .any(|end| name.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with(['.', '_'])))
}

/// The weight as this rank holds it, and whose gradients it is summed with.
///
/// # Errors
/// A weight of a layer that real tensor parallelism is not built for.
pub(super) fn placed(
    mut spec: Spec,
    share: &RankShare,
    split: bool,
) -> Result<(Spec, FlatKind), WorkloadError> {
    let place = &share.place;
    if spec.expert {
        // Experts lie one after another.
        spec.shard.row_blocks = vec![(place.ep * spec.rows, spec.rows)];
        return Ok((spec, FlatKind::Experts));
    }
    if place.tensor.is_none() {
        return Ok((spec, FlatKind::Dense));
    }
    // Before the ends that they share with others.
    if ends(&spec.name, ON_HEADS) {
        return Ok((spec, FlatKind::Summed));
    }
    if ends(&spec.name, SHARDED) {
        let shard = &mut spec.shard;
        if let Some((first, _)) = &mut shard.cols {
            *first += place.tp * spec.cols;
        } else if shard.row_blocks.is_empty() && spec.cols > 0 && spec.rows > 1 {
            shard.row_blocks = vec![(place.tp * spec.rows, spec.rows)];
        } else {
            shard.row_blocks.iter_mut().for_each(|(first, rows)| *first += place.tp * *rows);
        }
        return Ok((spec, FlatKind::Dense));
    }
    if ends(&spec.name, ON_TOKENS) {
        return Ok((spec, if split { FlatKind::Summed } else { FlatKind::Same }));
    }
    Err(WorkloadError::Unsupported(format!(
        "tensor parallelism over several processes is not built for {}: give -tp 1, or run one process",
        spec.name
    )))
}

/// A piece of a flat pair of buffers that this rank reduces and updates.
struct Piece {
    flat: Flat,
    /// The message that it is part of: first element and length.
    bucket: (usize, usize),
    /// First element, and length.
    first: usize,
    len: usize,
}

impl Stack<'_> {
    /// Ranks whose gradients of `flat` are summed, if they are here.
    fn reduced_over(&self, flat: &Flat) -> Option<Group> {
        let place = &self.share.place;
        let group = if flat.kind == FlatKind::Experts { &place.expert_data } else { &place.data };
        group.clone().filter(|g| g.len() == flat.ranks)
    }

    /// This rank's pieces: one a bucket where the group is real, the first of a stood-in group's otherwise.
    fn pieces(&self, flat: Flat) -> Vec<Piece> {
        let Some(group) = self.reduced_over(&flat) else {
            let len = flat.len / flat.ranks;
            return vec![Piece { flat, bucket: (0, flat.len), first: 0, len }];
        };
        let most = (BUCKET_ELEMENTS / (WEIGHT_ALIGNMENT * flat.ranks)).max(1) * WEIGHT_ALIGNMENT * flat.ranks;
        (0..flat.len)
            .step_by(most)
            .map(|at| {
                let bucket = most.min(flat.len - at);
                let len = bucket / flat.ranks;
                Piece { flat, bucket: (at, bucket), first: at + group.own * len, len }
            })
            .collect()
    }

    /// Elements `first..` of `whole`, called after their place.
    fn part_of(&mut self, whole: BufId, what: &str, first: usize, len: usize) -> BufId {
        let name = format!("{}.{what}{first}", self.b.program.buffer(whole).name);
        let found = self.b.find(&name);
        found.unwrap_or_else(|| self.b.view(&name, whole, first, &[len], Init::Inherit, Shard::default()))
    }

    /// A collective over part of a flat buffer, in place.
    fn in_place(&mut self, kind: Kind, group: Group, whole: BufId, first: usize, len: usize) {
        let part = self.part_of(whole, "bucket", first, len);
        let dtype = self.b.program.buffer(whole).dtype;
        let cols = if kind == Kind::AllReduce { len } else { len / group.len() };
        self.b.launch(Exchange { kind, group, rows: 1, cols, dtype }, &[part]);
    }

    /// Sums of the gradients: over tensor ranks of what they hold alike, over data-parallel ranks by buckets.
    pub(super) fn reduce_over_ranks(&mut self) {
        self.b.at(None, Part::GradReduce, Pass::Other);
        for flat in self.weights.flats.clone() {
            if let Some(tensor) = self.share.place.tensor.clone().filter(|_| flat.kind == FlatKind::Summed) {
                self.in_place(Kind::AllReduce, tensor, flat.grads, 0, flat.len);
            }
            match self.reduced_over(&flat) {
                Some(group) => {
                    for Piece { bucket: (at, len), .. } in self.pieces(flat) {
                        self.in_place(Kind::ReduceScatterInPlace, group.clone(), flat.grads, at, len);
                    }
                }
                None => self.in_place_buckets(flat.grads, flat.len, flat.ranks),
            }
        }
        let own: Vec<Piece> = self.weights.flats.clone().into_iter().flat_map(|f| self.pieces(f)).collect();
        for Piece { flat, first, len, .. } in own {
            let grads = self.part_of(flat.grads, "shard", first, len);
            self.b.program.digest.push(grads);
        }
    }

    /// The mean loss over data-parallel ranks.
    pub(super) fn share_loss(&mut self, loss: BufId) {
        if let Some(group) = self.share.place.data.clone() {
            self.b.at(None, Part::Optimizer, Pass::Other);
            let op = Exchange { kind: Kind::AllReduce, group, rows: 1, cols: 1, dtype: DType::F32 };
            self.b.launch(op, &[loss]);
        }
    }

    /// Norm over all ranks, clip, Adam on this rank's pieces, and the gather of the new weights.
    pub(super) fn optimize_over_ranks(&mut self) {
        let o = self.cfg.optimizer.clone();
        let pieces: Vec<Piece> =
            self.weights.flats.clone().into_iter().flat_map(|f| self.pieces(f)).collect();
        self.b.at(None, Part::Optimizer, Pass::Other);
        let partials = NORM_PARTIALS * pieces.len();
        let partial = self.b.activation("optimizer.norm_partial", DType::F32, &[partials]);
        for (i, piece) in pieces.iter().enumerate() {
            let grads = self.part_of(piece.flat.grads, "shard", piece.first, piece.len);
            let sums = self.part_of(partial, "of", i * NORM_PARTIALS, NORM_PARTIALS);
            // What tensor ranks hold alike counts once.
            let alike = matches!(piece.flat.kind, FlatKind::Summed | FlatKind::Same);
            if alike && self.share.place.tp > 0 {
                self.b.launch(Zero { dtype: DType::F32, len: NORM_PARTIALS }, &[sums]);
            } else {
                let op =
                    GradNormPartial { len: piece.len, dtype: self.grad_dtype(), partials: NORM_PARTIALS };
                self.b.launch(op, &[grads, sums]);
            }
        }
        if let Some(group) = self.share.place.world.clone() {
            let op = Exchange { kind: Kind::AllReduce, group, rows: 1, cols: partials, dtype: DType::F32 };
            self.b.launch(op, &[partial]);
        }
        let zero = Init::Const { value: 0.0 };
        let norm = self.b.buffer("grad_norm", DType::F32, &[1], Lifetime::StepState, zero.clone());
        let scale = self.b.activation("optimizer.clip_scale", DType::F32, &[1]);
        self.b.launch(GradNormFinish { partials, clip: o.clip_grad }, &[partial, norm, scale]);
        self.b.program.grad_norm = Some(norm);
        for Piece { flat, bucket, first, len } in pieces {
            let name = format!("{}.shard{first}", self.b.program.buffer(flat.values).name);
            let state = |s: &mut Self, what: &str, init: Init| {
                s.b.buffer(&format!("{name}.{what}"), DType::F32, &[len], Lifetime::OptimizerState, init)
            };
            let master = state(self, "master", Init::CopyOf { source: flat.values, offset: first });
            let m = state(self, "exp_avg", zero.clone());
            let v = state(self, "exp_avg_sq", zero.clone());
            let grads = self.part_of(flat.grads, "shard", first, len);
            let own = self.part_of(flat.values, "shard", first, len);
            let op = Adam {
                len,
                grad: self.grad_dtype(),
                beta1: o.beta1,
                beta2: o.beta2,
                eps: o.eps,
                weight_decay: o.weight_decay,
            };
            self.b.launch(op, &[grads, scale, self.words, master, m, v, own]);
            match self.reduced_over(&flat) {
                Some(group) => self.in_place(Kind::AllGatherInPlace, group, flat.values, bucket.0, bucket.1),
                None => self.in_place_buckets(flat.values, flat.len, flat.ranks),
            }
            self.b.program.digest.extend([master, m, v]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::World;
    use crate::workloads::testing::{dense, hybrid, program};

    /// Local weights of all tensor ranks cover the model's once, and what is not shared out is the same everywhere.
    #[test]
    fn ranks_hold_the_whole_model_between_them() {
        for cfg in [dense(), hybrid()] {
            let whole = program(&cfg);
            let mut cfg = cfg;
            cfg.parallel.tp = 2;
            cfg.parallel.sequence_parallel = true;
            cfg.identity.num_gpus *= 2;
            let of = |rank: usize| {
                let mut cfg = cfg.clone();
                cfg.parallel.world = World { size: cfg.identity.num_gpus, rank };
                program(&cfg)
            };
            let parts = [of(0), of(1)];
            for b in whole.buffers.iter().filter(|b| b.lifetime == Lifetime::Weight && b.view_of.is_some()) {
                let held: Vec<&crate::program::Buffer> =
                    parts.iter().filter_map(|p| p.buffers.iter().find(|x| x.name == b.name)).collect();
                assert_eq!(held.len(), 2, "{}", b.name);
                let index = |b: &crate::program::Buffer| {
                    let cols = b.shape[1];
                    (0..b.len())
                        .map(|i| crate::device::cpu::global_index(&b.shard, cols, i))
                        .collect::<Vec<_>>()
                };
                let mut all: Vec<u64> = held.iter().flat_map(|b| index(b)).collect();
                all.sort_unstable();
                let mut want = index(b);
                let alike = held[0].len() == b.len() || held[0].init != b.init;
                if alike || b.name.contains("experts") || b.shape[0] == 1 {
                    continue;
                }
                want.sort_unstable();
                assert_eq!(all, want, "{}", b.name);
            }
        }
    }
}
