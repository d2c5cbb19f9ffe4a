//! Activation recompute: forward launches that the backward pass repeats, so that what they wrote need not be kept.
//!
//! A layer file marks where a module begins and ends ([`Stack::here`], [`Stack::recomputable`]); the step marks whole
//! layers ([`Stack::recomputed_layer`]). When the step is complete, [`insert`] repeats each marked region just before
//! the first backward launch that reads something of it. The repeated launches write the same buffers: for the memory
//! planner each holds two values with a gap between, and others lie there in the gap. They are the same ops, so they
//! draw the same random numbers (a draw id and the micro-batch word), and they keep the part of their originals, so
//! that no launch crosses the edge of a graph.
//!
//! What a module is follows Megatron-Core: `core_attn`, `mlp`, `moe` and `shared_experts` run again as a whole, their
//! last product included; `layernorm` (where the norm is a module of its own, not fused with a product: before
//! experts and latent attention), `moe_act`, `mla_up_proj` drop their output alone. The residual add is in none of them.

use super::Stack;
use super::share::RankShare;
use crate::config::{Dispatcher, GraphImpl, Moe, RunConfig, Scope};
use crate::ops::{Access, ArgSpec};
use crate::program::{BufId, Launch, Lifetime, Pass, Program};
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

#[cfg(test)]
mod tests;

/// Forward launches that run again in the backward pass. Regions are nested or apart.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Region {
    /// Indices into the program as it was built.
    launches: Range<usize>,
    /// What it hands on, which stays in memory.
    kept: Vec<BufId>,
}

/// Layers of full recompute, as groups that keep one input each. `block`: the first layers of every virtual stage,
/// one by one; `uniform`: all of them, so many at a time (Megatron-Core `checkpointed_forward`).
pub(super) fn groups(cfg: &RunConfig, share: &RankShare) -> Vec<Range<usize>> {
    let r = &cfg.recompute;
    if r.granularity.as_deref() != Some("full") {
        return Vec::new();
    }
    let n = r.num_layers.unwrap_or(0);
    let (size, most) = if r.method.as_deref() == Some("uniform") { (n, usize::MAX) } else { (1, n) };
    let size = size.max(1);
    let of_chunk = |chunk: &Range<usize>| {
        let (end, last) = (chunk.end, chunk.start.saturating_add(most).min(chunk.end));
        (chunk.start..last).step_by(size).map(|a| a..(a + size).min(end)).collect::<Vec<_>>()
    };
    // Upstream repeats every depth of multi-token prediction; their layers lie behind the chunks.
    let decoder = share.chunks.iter().map(|c| c.end).max().unwrap_or(0);
    let depth = cfg.model.mtp_layers.len().max(1);
    let ahead = (decoder..share.layers.len()).step_by(depth).map(|a| a..a + depth);
    share.chunks.iter().flat_map(of_chunk).chain(ahead).collect()
}

impl Stack<'_> {
    /// Index of the next launch: where a module begins.
    pub(super) fn here(&self) -> usize {
        self.b.program.launches.len()
    }

    /// The launches from `start` to here are the forward of `module` (a name of `model.recompute_modules`) and are
    /// repeated if that is recomputed. `kept`: outputs that stay in memory; none for a module whose output is dropped.
    pub(super) fn recomputable(&mut self, module: &str, start: usize, kept: &[BufId]) {
        let r = &self.cfg.recompute;
        let asked = r.granularity.as_deref() == Some("selective") && r.modules.iter().any(|m| m == module);
        if !asked {
            return;
        }
        // Upstream adds the residual after the checkpointed module, not in it.
        let launches = &self.b.program.launches;
        let adds = launches[start..].iter().rev().take_while(|l| l.op.name() == "dropout_add_fwd").count();
        let launches = start..launches.len() - adds;
        if !launches.is_empty() {
            self.regions.push(Region { launches, kept: kept.to_vec() });
        }
    }

    /// Layer `l` of the forward pass has been emitted, with output `out`: if it ends a group of full recompute, the
    /// group's launches are repeated.
    pub(super) fn recomputed_layer(&mut self, l: usize, out: BufId) {
        let Some(group) = groups(self.cfg, self.share).into_iter().find(|g| g.end == l + 1) else { return };
        let micro_batch = self.b.micro_batch;
        let launches = &self.b.program.launches;
        let mine = |x: &&Launch| {
            x.pass == Pass::Forward
                && x.micro_batch == micro_batch
                && x.layer.is_some_and(|l| group.contains(&l))
        };
        let start = launches.len() - launches.iter().rev().take_while(mine).count();
        self.regions.push(Region { launches: start..launches.len(), kept: vec![out] });
    }

    /// A depth of multi-token prediction has been emitted from `start` on, with output `out` before its last norm. Full
    /// recompute repeats it by `uniform` alone (Megatron-Core `multi_token_prediction.py`, which skips `block`).
    pub(super) fn recomputed_depth(&mut self, start: usize, out: BufId) {
        let r = &self.cfg.recompute;
        if r.granularity.as_deref() == Some("full") && r.method.as_deref() == Some("uniform") {
            self.regions.push(Region { launches: start..self.here(), kept: vec![out] });
        }
    }

    /// Upstream drops the norm before experts only if no captured router hands it on: rule R64.
    pub(super) fn norm_before_experts_recomputes(&self) -> bool {
        let (g, moe) = (&self.cfg.graph, self.cfg.model.moe.as_ref());
        let captured = |s: Scope| g.implementation == GraphImpl::TransformerEngine && g.scope.contains(&s);
        let consumed = |m: &Moe| m.dispatcher == Dispatcher::Alltoall || m.latent_size.is_some();
        let local = moe.is_some_and(|m| consumed(m) && !m.shared_expert_overlap);
        !captured(Scope::MoeRouter) || (captured(Scope::MoePreprocess) && local)
    }
}

/// Repeats each region before the first backward launch that reads what it drops.
///
/// # Errors
/// Regions that overlap, or a launch that would read another value than without recompute: mistakes of a layer file.
pub(super) fn insert(program: Program, regions: &[Region]) -> Result<Program, String> {
    if regions.is_empty() {
        return Ok(program);
    }
    let mut chains: Vec<Vec<usize>> = vec![Vec::new(); program.launches.len()];
    let mut outer_first: Vec<usize> = (0..regions.len()).collect();
    outer_first.sort_by_key(|&r| std::cmp::Reverse(regions[r].launches.len()));
    for r in outer_first {
        let range = regions[r].launches.clone();
        let same = range.clone().all(|i| chains[i] == chains[range.start]);
        if !same {
            return Err(format!("recomputed launches {range:?} overlap others"));
        }
        range.for_each(|i| chains[i].push(r));
    }
    let values = Values::of(&program);
    let launches = program.launches.len();
    let mut walk = Walk {
        program: &program,
        regions,
        chains,
        values,
        now: HashMap::new(),
        dropped: HashMap::new(),
        moved: Vec::with_capacity(launches),
        out: Vec::with_capacity(launches),
    };
    for i in 0..launches {
        walk.original(i)?;
    }
    let out = walk.out;
    Ok(Program { launches: out, ..program })
}

/// Which value each argument of each launch sees: a hash of the micro-batch, the op and the activations it reads, so
/// that a value computed twice is one value. What outlives a step (weights, random words) counts as given.
struct Values {
    /// By launch and argument: the value read, and the value written (0: not an activation, or none).
    read: Vec<Vec<u64>>,
    written: Vec<Vec<u64>>,
}

impl Values {
    fn of(program: &Program) -> Self {
        let mut out = Self { read: Vec::new(), written: Vec::new() };
        let mut now: HashMap<BufId, u64> = HashMap::new();
        for launch in &program.launches {
            let roots: Vec<BufId> = launch.args.iter().map(|&id| program.root(id).0).collect();
            let specs = launch.op.args();
            let seen = |(spec, root): (&ArgSpec, &BufId)| match spec.access {
                Access::Write => 0,
                _ => now.get(root).copied().unwrap_or(0),
            };
            let read: Vec<u64> = specs.iter().zip(&roots).map(seen).collect();
            let mut hash = DefaultHasher::new();
            (launch.micro_batch, format!("{:?}", launch.op), &read).hash(&mut hash);
            let mut written = vec![0; roots.len()];
            for (a, &root) in roots.iter().enumerate() {
                if specs[a].access != Access::Read && program.buffer(root).lifetime == Lifetime::Activation {
                    let mut hash = hash.clone();
                    a.hash(&mut hash);
                    written[a] = hash.finish();
                    now.insert(root, written[a]);
                }
            }
            out.read.push(read);
            out.written.push(written);
        }
        out
    }
}

struct Walk<'a> {
    program: &'a Program,
    regions: &'a [Region],
    /// By launch: the regions it lies in, outermost first.
    chains: Vec<Vec<usize>>,
    values: Values,
    /// Value that each root buffer holds.
    now: HashMap<BufId, u64>,
    /// Root buffers whose value is not kept, and the region that brings it back.
    dropped: HashMap<BufId, usize>,
    /// Where each original launch went.
    moved: Vec<usize>,
    out: Vec<Launch>,
}

impl Walk<'_> {
    /// A launch of the program as it was built.
    fn original(&mut self, i: usize) -> Result<(), String> {
        if self.program.launches[i].pass == Pass::Backward {
            self.bring_back(i, &HashSet::new())?;
        }
        self.moved.push(self.out.len());
        let launch = self.program.launches[i].clone();
        let after = launch.after.iter().map(|&j| self.moved[j]).collect();
        self.emit(i, 0, Launch { after, ..launch })
    }

    /// Repeats the regions that drop what launch `i` reads, except `fresh` buffers.
    fn bring_back(&mut self, i: usize, fresh: &HashSet<BufId>) -> Result<(), String> {
        let launch = &self.program.launches[i];
        for (spec, &id) in launch.op.args().iter().zip(&launch.args) {
            let root = self.program.root(id).0;
            if spec.access == Access::Write || fresh.contains(&root) {
                continue;
            }
            if let Some(&region) = self.dropped.get(&root) {
                self.repeat(region)?;
            }
        }
        Ok(())
    }

    fn repeat(&mut self, region: usize) -> Result<(), String> {
        let mut fresh = HashSet::new();
        let mut repeated: HashMap<usize, usize> = HashMap::new();
        for i in self.regions[region].launches.clone() {
            self.bring_back(i, &fresh)?;
            let launch = self.program.launches[i].clone();
            for (spec, &id) in launch.op.args().iter().zip(&launch.args) {
                if spec.access != Access::Read {
                    fresh.insert(self.program.root(id).0);
                }
            }
            let after =
                launch.after.iter().map(|j| repeated.get(j).copied().unwrap_or(self.moved[*j])).collect();
            repeated.insert(i, self.out.len());
            let depth = self.chains[i].iter().position(|&r| r == region).map_or(0, |d| d + 1);
            self.emit(i, depth, Launch { after, pass: Pass::Backward, recompute: true, ..launch })?;
        }
        Ok(())
    }

    /// Appends launch `i`. What it writes is dropped again by the region at `depth` of its chain, if there is one.
    fn emit(&mut self, i: usize, depth: usize, launch: Launch) -> Result<(), String> {
        let specs = launch.op.args();
        for (a, (spec, &id)) in specs.iter().zip(&launch.args).enumerate() {
            let root = self.program.root(id).0;
            let value = self.now.get(&root).copied().unwrap_or(0);
            if spec.access != Access::Write && value != self.values.read[i][a] {
                return Err(format!(
                    "recompute changes what {} reads from {} (layer {:?}, {:?} {:?})",
                    launch.op.name(),
                    self.program.buffer(root).name,
                    launch.layer,
                    launch.part,
                    launch.pass
                ));
            }
        }
        for (a, (spec, &id)) in specs.iter().zip(&launch.args).enumerate() {
            if spec.access == Access::Read {
                continue;
            }
            let root = self.program.root(id).0;
            // What outlives the step (a fault word) is never dropped.
            let lifetime = self.program.buffer(root).lifetime;
            if lifetime == Lifetime::StepState {
                continue;
            }
            if lifetime == Lifetime::Activation {
                self.now.insert(root, self.values.written[i][a]);
            }
            match self.chains[i].get(depth) {
                Some(&region) if !self.regions[region].kept.contains(&id) => {
                    self.dropped.insert(root, region)
                }
                _ => self.dropped.remove(&root),
            };
        }
        self.out.push(launch);
        Ok(())
    }
}
