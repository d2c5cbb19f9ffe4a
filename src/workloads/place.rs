//! Several processes: where a rank's weights lie in the whole model's, whose gradients are summed over tensor ranks, and
//! the end of a step with real data-parallel groups.

use super::optimizer::{BUCKET_ELEMENTS, NORM_PARTIALS};
use super::share::RankShare;
use super::step::KEPT_OF_A_SUBLAYER;
use super::weights::{Flat, FlatKind, Spec, WEIGHT_ALIGNMENT};
use super::{Stack, WorkloadError, sublayers};
use crate::ops::collective::{Exchange, Kind};
use crate::ops::optimizer::{Adam, GradNormFinish, GradNormPartial};
use crate::ops::step::Zero;
use crate::program::{BufId, DType, Init, Lifetime, Part, Pass, Shard};
use crate::ranks::groups::Group;
use std::ops::Range;

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

/// Lane of reductions that run beside the backward pass.
const REDUCTION_LANE: usize = 1;

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
        let bucket = self.cfg.parallel.ddp.bucket_size.unwrap_or(BUCKET_ELEMENTS);
        let most = (bucket / (WEIGHT_ALIGNMENT * flat.ranks)).max(1) * WEIGHT_ALIGNMENT * flat.ranks;
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

    /// Whether buckets are reduced beside this backward pass: each as soon as its last gradient is there. What recompute
    /// repeats is put in later, so that places of launches are not known yet.
    pub(super) fn overlaps_reduction(&self, last_micro_batch: bool) -> bool {
        let p = &self.cfg.parallel;
        let real = self.share.place.data.is_some() || self.share.place.expert_data.is_some();
        last_micro_batch && real && p.ddp.overlap_grad_reduce && self.cfg.recompute.granularity.is_none()
    }

    /// [`Self::backward`], with the reduction of what each layer completes beside the next one.
    pub(super) fn backward_and_reduce(
        &mut self,
        layers: Range<usize>,
        mut dx: BufId,
        mut inputs: Vec<BufId>,
    ) -> Result<BufId, WorkloadError> {
        for l in layers.rev() {
            let of_layer = KEPT_OF_A_SUBLAYER * sublayers(self.share.layers[l].kind)?.len();
            let kept = inputs.len().saturating_sub(of_layer);
            dx = self.backward(l..l + 1, dx, inputs.split_off(kept))?;
            self.reduce_complete(l);
        }
        Ok(dx)
    }

    /// Reduces, on a lane of its own, the buckets that begin with layer `l` or later.
    fn reduce_complete(&mut self, l: usize) {
        let prefix = format!("layer{}.", self.share.layers[l].index);
        for flat in self.weights.flats.clone() {
            let Some(group) = self.reduced_over(&flat).filter(|_| flat.kind != FlatKind::Summed) else {
                continue;
            };
            let Some(first) = self.weights.first_of(&self.b.program, flat.values, &prefix) else { continue };
            for Piece { bucket: (at, len), .. } in self.pieces(flat) {
                let done = self.reduced.iter().any(|(grads, from, _)| (*grads, *from) == (flat.grads, at));
                let last = self.b.program.launches.len().checked_sub(1);
                if let (true, false, Some(last)) = (at >= first, done, last) {
                    self.b.at(None, Part::GradReduce, Pass::Other);
                    self.in_place(Kind::ReduceScatterInPlace, group.clone(), flat.grads, at, len);
                    let own = self.b.program.launches.len() - 1;
                    let after = self.main_before(last);
                    let launch = &mut self.b.program.launches[own];
                    (launch.lane, launch.after) = (REDUCTION_LANE, vec![after]);
                    self.reduced.push((flat.grads, at, own));
                }
            }
        }
    }

    /// The last launch on the main lane up to `at`.
    fn main_before(&self, at: usize) -> usize {
        (0..=at).rev().find(|i| self.b.program.launches[*i].lane == 0).unwrap_or(0)
    }

    /// The launch that reduces what lies at `first`, where it runs beside the main lane.
    fn reduction_of(&self, piece: &Piece) -> Option<usize> {
        let found = self.reduced.iter().find(|(g, at, _)| (*g, *at) == (piece.flat.grads, piece.bucket.0));
        found.map(|(_, _, launch)| *launch)
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
                    for piece in self.pieces(flat) {
                        let (at, len) = piece.bucket;
                        if self.reduction_of(&piece).is_none() {
                            self.in_place(Kind::ReduceScatterInPlace, group.clone(), flat.grads, at, len);
                        }
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
            let reduction = self.reduction_of(piece);
            if let Some(launch) = self.b.program.launches.last_mut() {
                launch.after.extend(reduction);
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
