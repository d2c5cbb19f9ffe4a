//! Host models: how long a framework's host needs for the parts of a layer, from a JSON file, and what that
//! makes of one program. `pytorch` is compiled in; `docs/host_model.md` says where its figures come from and what
//! they are not, `benches/calibrate_host_model.py` measures them anew.

#[cfg(test)]
mod tests;

use crate::capture::{ArmPlan, RunPlan, Segment};
use crate::device::host::{ArmCosts, HostCosts, Pace};
use crate::program::{Part, Pass, Program};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The model compiled in.
const PYTORCH: &str = include_str!("../../host_models/pytorch.json");
/// Version of the file's form.
const FORMAT: u64 = 1;
/// A part that takes longer than this on the host is a mistake of units: a second is a thousand times the truth.
const LONGEST_MS: f64 = 1000.0;

/// Parts of a layer by the names that files use.
const PARTS: [(&str, Part); 6] = [
    ("attn", Part::Attn),
    ("mlp", Part::Mlp),
    ("moe_router", Part::MoeRouter),
    ("moe_preprocess", Part::MoePreprocess),
    ("moe_experts", Part::MoeExperts),
    ("mamba", Part::Mamba),
];

/// Layer kinds of a file: what a layer is told by.
const KINDS: [&str; 3] = ["dense", "moe", "mamba"];

/// Why a host model cannot be used: exit 2.
#[derive(Debug, thiserror::Error)]
pub enum HostModelError {
    #[error(
        "--host_model {path}: {reason}; `bare` and `pytorch` are built in, \
         benches/calibrate_host_model.py writes a file for your machine"
    )]
    Read { path: String, reason: String },
    #[error("--host_model {path}: {reason}")]
    Form { path: String, reason: String },
}

/// Host time of one kind of layer at one size.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Point {
    /// `dense`, `moe` or `mamba`.
    layer: String,
    /// Tokens of a micro-batch on a rank.
    tokens: usize,
    /// Milliseconds of the forward pass by part.
    forward_ms: BTreeMap<String, f64>,
    backward_ms: BTreeMap<String, f64>,
}

/// A host model as its file holds it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostModel {
    format: u64,
    /// For the row: `pytorch`, or what a file calls itself.
    pub name: String,
    /// Framework, machine and date.
    pub source: String,
    layers: Vec<Point>,
    /// Host time of replaying the graph of a layer's pass.
    module_replay_ms: f64,
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
}

impl HostModel {
    /// `bare` (none), `pytorch`, or a file.
    ///
    /// # Errors
    /// A file that cannot be read or does not have the form.
    pub fn load(name: &str) -> Result<Option<Self>, HostModelError> {
        match name {
            "bare" => Ok(None),
            "pytorch" => Self::parse("pytorch", PYTORCH).map(Some),
            file => {
                let failed = |reason: String| HostModelError::Read { path: file.into(), reason };
                let found = std::fs::metadata(Path::new(file)).map_err(|e| failed(e.to_string()))?;
                // A pipe that nobody writes to would be waited for, a device read without end.
                if !found.is_file() {
                    return Err(failed("it is no plain file".into()));
                }
                let text = std::fs::read_to_string(Path::new(file)).map_err(|e| failed(e.to_string()))?;
                Self::parse(file, &text).map(Some)
            }
        }
    }

    fn parse(path: &str, text: &str) -> Result<Self, HostModelError> {
        let form = |reason: String| HostModelError::Form { path: path.into(), reason };
        let model: Self = serde_json::from_str(text).map_err(|e| form(e.to_string()))?;
        model.check().map_err(form)?;
        Ok(model)
    }

    fn check(&self) -> Result<(), String> {
        if self.format != FORMAT {
            return Err(format!("format {} is not {FORMAT}, the one this version reads", self.format));
        }
        let time = |what: &str, ms: f64| {
            if ms.is_finite() && (0.0..=LONGEST_MS).contains(&ms) {
                return Ok(());
            }
            Err(format!("{what} is {ms} ms: a time between 0 and {LONGEST_MS} ms is needed"))
        };
        time("module_replay_ms", self.module_replay_ms)?;
        time("iteration_replay_ms", self.iteration_replay_ms)?;
        time("other_launch_ms", self.other_launch_ms)?;
        if self.layers.is_empty() {
            return Err("layers is empty: there is nothing to model".into());
        }
        for (i, point) in self.layers.iter().enumerate() {
            if !KINDS.contains(&point.layer.as_str()) {
                return Err(format!(
                    "layers[{i}]: layer {:?} is not one of {}",
                    point.layer,
                    KINDS.join(", ")
                ));
            }
            if point.tokens == 0 {
                return Err(format!("layers[{i}]: tokens is 0"));
            }
            for (part, ms) in point.forward_ms.iter().chain(&point.backward_ms) {
                if !PARTS.iter().any(|(name, _)| name == part) {
                    let names = PARTS.map(|(name, _)| name).join(", ");
                    return Err(format!("layers[{i}]: part {part:?} is not one of {names}"));
                }
                time(&format!("layers[{i}]: {part}"), *ms)?;
            }
        }
        Ok(())
    }

    /// Milliseconds of a part in a layer of `kind`: linear in the logarithm of the tokens between the points of
    /// the file, and that of the nearest point outside them. `None`: the file has no figure.
    fn part_ms(&self, kind: &str, part: Part, pass: Pass, tokens: usize) -> Option<f64> {
        let name = PARTS.iter().find(|(_, p)| *p == part)?.0;
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
        let coverage = Coverage { other_launches, launches: plan.eager.program.launches.len() };
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
                    self.module_replay_ms
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

/// Whether a graph holds more than one pass of one layer.
fn several_layers(program: &Program, segment: &Segment) -> bool {
    let mut seen = program.launches[segment.launches.clone()].iter().map(|l| (l.layer, l.pass));
    let first = seen.next();
    seen.any(|other| Some(other) != first)
}
