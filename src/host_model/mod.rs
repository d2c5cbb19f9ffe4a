//! Host models: how long a framework's host needs for the parts of a layer, from a JSON file, and what that
//! makes of one program. `pytorch` is compiled in; `docs/host_model.md` says where its figures come from and what
//! they are not, `benches/calibrate_host_model.py` measures them anew.

mod file;
mod once;
#[cfg(test)]
mod tests;

pub use file::HostModelError;

use crate::capture::{ArmPlan, RunPlan, Segment};
use crate::device::host::{ArmCosts, HostCosts, Pace};
use crate::program::{Part, Pass, Program};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Parts of a layer by the names that files use.
const PARTS: [(&str, Part); 6] = [
    ("attn", Part::Attn),
    ("mlp", Part::Mlp),
    ("moe_router", Part::MoeRouter),
    ("moe_preprocess", Part::MoePreprocess),
    ("moe_experts", Part::MoeExperts),
    ("mamba", Part::Mamba),
];

/// Layer kinds of a file, and the parts that each can have.
const KINDS: [(&str, &[&str]); 3] = [
    ("dense", &["attn", "mlp"]),
    ("moe", &["attn", "moe_router", "moe_preprocess", "moe_experts"]),
    ("mamba", &["mamba"]),
];

/// Host time of one kind of layer at one size.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Point {
    /// `dense`, `moe` or `mamba`.
    layer: String,
    /// Tokens of a micro-batch on a rank.
    tokens: usize,
    /// Milliseconds of the forward pass by part.
    #[serde(deserialize_with = "once::once")]
    forward_ms: BTreeMap<String, f64>,
    #[serde(deserialize_with = "once::once")]
    backward_ms: BTreeMap<String, f64>,
}

/// Host time of replaying the graphs of one kind of layer.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Replay {
    /// `dense`, `moe` or `mamba`.
    layer: String,
    /// Parts of the layer that one graph holds. None: format 1's figure, for any.
    parts: BTreeSet<String>,
    /// Milliseconds of one replay of the forward pass's graph.
    forward_ms: f64,
    backward_ms: f64,
}

/// Host times of a framework, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct HostModel {
    /// For the row: `pytorch`, or what a file calls itself and a digest of it.
    pub name: String,
    /// Framework, machine and date.
    pub source: String,
    layers: Vec<Point>,
    /// Host times of replaying the graph of a layer's pass.
    replays: Vec<Replay>,
    /// Host time of replaying one graph that holds several layers.
    iteration_replay_ms: f64,
    /// Host time of a launch outside the parts above.
    other_launch_ms: f64,
}

/// What the costs of a program rest on, besides the table.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Coverage {
    /// Launches a step of the eager arm that have `other_launch_ms` each.
    pub other_launches: usize,
    /// All launches a step of the eager arm.
    pub launches: usize,
    /// Kinds of layers that the program has and the table has nothing of.
    pub unknown_kinds: BTreeSet<&'static str>,
    /// Of the other kinds: parts that the program has in a pass and no entry of the table has a time of.
    unknown_parts: BTreeMap<(&'static str, &'static str), Vec<Pass>>,
}

impl Coverage {
    pub fn other_fraction(&self) -> f64 {
        self.other_launches as f64 / self.launches.max(1) as f64
    }

    /// What the fraction alone would leave to be guessed: that a whole kind of layer, or a part of it, is not in the model.
    pub fn notice(&self, model: &str) -> Option<String> {
        let kinds = self.unknown_kinds.iter().map(|kind| format!("{kind} layers"));
        let parts = self.unknown_parts.iter().map(|((kind, part), passes)| match passes.as_slice() {
            [pass] => format!("{} of {part} in {kind} layers", pass.name()),
            _ => format!("{part} in {kind} layers"),
        });
        let lacking: Vec<String> = kinds.chain(parts).collect();
        (!lacking.is_empty()).then(|| {
            format!(
                "The host model {model} has no {}: each of their launches takes other_launch_ms, as {:.0} % of this \
                 step's launches do, so that what is modelled rests on that one figure there.",
                lacking.join(" and no "),
                self.other_fraction() * 100.0
            )
        })
    }
}

impl HostModel {
    /// Milliseconds of replaying a graph that holds `parts` of one pass of a layer of `kind`: the figure of just these
    /// parts, else the mean of the kind's figures, else the mean of all.
    fn replay_ms(&self, kind: Option<&str>, parts: &BTreeSet<&str>, pass: Pass) -> f64 {
        let of_kind: Vec<&Replay> = self.replays.iter().filter(|r| Some(r.layer.as_str()) == kind).collect();
        let exact = of_kind.iter().find(|r| r.parts.iter().map(String::as_str).eq(parts.iter().copied()));
        let chosen: Vec<&Replay> = match exact {
            Some(replay) => vec![*replay],
            None if of_kind.is_empty() => self.replays.iter().collect(),
            None => of_kind,
        };
        let ms = |r: &&Replay| if pass == Pass::Forward { r.forward_ms } else { r.backward_ms };
        chosen.iter().map(ms).sum::<f64>() / chosen.len() as f64
    }

    /// Milliseconds of a part in a layer of `kind`: linear in the logarithm of the tokens between the points of
    /// the file, and that of the nearest point outside them. `None`: the file has no figure.
    fn part_ms(&self, kind: &str, part: Part, pass: Pass, tokens: usize) -> Option<f64> {
        let name = part_name(part)?;
        let mut points: Vec<(f64, f64)> = self
            .layers
            .iter()
            .filter(|p| p.layer == kind)
            .filter_map(|p| {
                let table = match pass {
                    Pass::Forward => &p.forward_ms,
                    Pass::Backward => &p.backward_ms,
                    Pass::Other => return None,
                };
                Some(((p.tokens as f64).ln(), *table.get(name)?))
            })
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let at = (tokens.max(1) as f64).ln();
        let above = points.iter().position(|p| p.0 >= at);
        match above {
            None => points.last().map(|p| p.1),
            Some(0) => Some(points[0].1),
            Some(i) => {
                let ((x0, y0), (x1, y1)) = (points[i - 1], points[i]);
                Some(y0 + (y1 - y0) * (at - x0) / (x1 - x0))
            }
        }
    }

    /// Host times of both arms of a run whose micro-batches have `tokens` tokens on this rank.
    pub fn costs(&self, plan: &RunPlan, tokens: usize) -> (HostCosts, Coverage) {
        let (eager, other_launches) = self.arm(&plan.eager, tokens);
        let graph = plan.graph.as_ref().map(|arm| self.arm(arm, tokens).0);
        let program = &plan.eager.program;
        let kinds = layer_kinds(program);
        let mut unknown_kinds: BTreeSet<&str> = kinds.values().copied().collect();
        unknown_kinds.retain(|kind| !self.layers.iter().any(|p| p.layer == *kind));
        let mut unknown_parts: BTreeMap<_, Vec<Pass>> = BTreeMap::new();
        for i in (0..program.launches.len()).filter(|i| !program.launches[*i].staging) {
            let (layer, part, pass, _) = key(program, i);
            let Some(kind) = layer.and_then(|layer| kinds.get(&layer)).copied() else { continue };
            let Some(name) = part_name(part).filter(|_| !unknown_kinds.contains(kind)) else { continue };
            if self.part_ms(kind, part, pass, tokens).is_none() {
                let passes = unknown_parts.entry((kind, name)).or_default();
                if !passes.contains(&pass) {
                    passes.push(pass);
                }
            }
        }
        let coverage =
            Coverage { other_launches, launches: program.launches.len(), unknown_kinds, unknown_parts };
        (HostCosts { eager, graph }, coverage)
    }

    /// Costs of one arm, and the number of launches that the table does not know.
    fn arm(&self, arm: &ArmPlan, tokens: usize) -> (ArmCosts, usize) {
        let program = &arm.program;
        let kinds = layer_kinds(program);
        let mut costs = ArmCosts {
            launches: vec![Pace::default(); program.launches.len()],
            replay_ms: vec![0.0; arm.segments.len()],
            step_ms: 0.0,
        };
        let mut other = 0;
        // Launches of each part, layer, pass and micro-batch: its time is spread over them evenly, wherever they
        // stand. A repeated launch costs what it cost in the forward pass, on top.
        let mut sizes: HashMap<Key, usize> = HashMap::new();
        let timed = |i: &usize| !program.launches[*i].staging;
        for i in (0..program.launches.len()).filter(|i| timed(i) && !program.launches[*i].recompute) {
            *sizes.entry(key(program, i)).or_default() += 1;
        }
        for (s, segment) in arm.segments.iter().enumerate() {
            if segment.graph.is_some() {
                costs.replay_ms[s] = if several_layers(program, segment) {
                    self.iteration_replay_ms
                } else {
                    let launch = &program.launches[segment.launches.start];
                    let kind = launch.layer.and_then(|layer| kinds.get(&layer)).copied();
                    self.replay_ms(kind, &parts_of(program, segment), launch.pass)
                };
                costs.step_ms += costs.replay_ms[s];
                continue;
            }
            let mut group: Option<(Key, f64)> = None;
            // Copies into static buffers belong to the replay's own figure.
            for i in segment.launches.clone().filter(timed) {
                let key = key(program, i);
                let kind = key.0.and_then(|layer| kinds.get(&layer)).copied();
                let known = kind.and_then(|kind| self.part_ms(kind, key.1, key.2, tokens));
                let ms = match known {
                    Some(ms) => ms / sizes[&key] as f64,
                    None => {
                        other += 1;
                        self.other_launch_ms
                    }
                };
                let begins = known.is_none() || group.is_none_or(|(k, _)| k != key);
                let until_ms = ms + group.filter(|_| !begins).map_or(0.0, |(_, until)| until);
                costs.launches[i] = Pace { begins, until_ms };
                costs.step_ms += ms;
                group = known.map(|_| (key, until_ms));
            }
        }
        (costs, other)
    }
}

/// What files call a part; `None`: they have no figure for it.
fn part_name(part: Part) -> Option<&'static str> {
    PARTS.iter().find(|(_, p)| *p == part).map(|(name, _)| *name)
}

/// What shares one figure: layer, part, pass, micro-batch.
type Key = (Option<usize>, Part, Pass, usize);

fn key(program: &Program, i: usize) -> Key {
    let l = &program.launches[i];
    (l.layer, l.part, if l.recompute { Pass::Forward } else { l.pass }, l.micro_batch)
}

/// Kind of each layer, by the parts it has.
fn layer_kinds(program: &Program) -> HashMap<usize, &'static str> {
    let mut kinds = HashMap::new();
    for launch in &program.launches {
        let Some(layer) = launch.layer else { continue };
        match launch.part {
            Part::MoeRouter | Part::MoePreprocess | Part::MoeExperts => kinds.insert(layer, "moe"),
            Part::Mamba => kinds.insert(layer, "mamba"),
            _ => {
                kinds.entry(layer).or_insert("dense");
                None
            }
        };
    }
    kinds
}

/// Names of the parts that a graph holds.
fn parts_of(program: &Program, segment: &Segment) -> BTreeSet<&'static str> {
    let launches = &program.launches[segment.launches.clone()];
    launches.iter().filter_map(|l| part_name(l.part)).collect()
}

/// Whether a graph holds more than one pass of one layer.
fn several_layers(program: &Program, segment: &Segment) -> bool {
    let mut seen = program.launches[segment.launches.clone()].iter().map(|l| (l.layer, l.pass));
    let first = seen.next();
    seen.any(|other| Some(other) != first)
}
