//! Capture plan: implementation and scope cut a program's launches into segments, each eager or one graph.
//!
//! - `none`: one eager segment.
//! - `local` + `full_iteration`: everything from the first to the last launch of a layer, embedding, head or
//!   gradient reduction is one graph; token generation before it and the optimizer after it are eager.
//! - `transformer_engine`: per layer and pass, the run of launches whose part is in scope is one graph
//!   (rules file, section 5). An empty scope is the whole layer. Micro-batches share the graph; with pipeline stages
//!   each has its own (section 6).

#[cfg(test)]
mod image_tests;
#[cfg(test)]
mod pipeline_tests;
mod staging;
#[cfg(test)]
mod tests;

use crate::config::{Graph, GraphImpl, Scope};
use crate::device::Arm;
use crate::program::lanes;
use crate::program::memory::{self, MemoryPlan};
use crate::program::{Part, Pass, Program};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// A run of launches that is issued launch by launch, or captured and replayed as one graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Indices into `Program::launches`, in order.
    pub launches: Range<usize>,
    /// `None`: eager. Segments with equal launches and buffers share one graph and carry the same id, in a pipeline
    /// those of one micro-batch.
    pub graph: Option<usize>,
    /// What to call it in messages: `layer 3 forward`, `iteration`.
    pub label: String,
}

/// One arm, ready for an executor. Buffers that survive a step have the same ids in both arms.
#[derive(Debug, Clone)]
pub struct ArmPlan {
    pub program: Arc<Program>,
    /// Cover all launches, in order.
    pub segments: Vec<Segment>,
    pub memory: MemoryPlan,
}

impl ArmPlan {
    /// Distinct graphs.
    pub fn graphs(&self) -> usize {
        self.segments.iter().filter_map(|s| s.graph).max().map_or(0, |g| g + 1)
    }
    /// Graph replays a step.
    pub fn replays(&self) -> usize {
        self.segments.iter().filter(|s| s.graph.is_some()).count()
    }
}

/// Both arms of a run. Without graphs (`none`) there is only the eager one.
#[derive(Debug, Clone)]
pub struct RunPlan {
    pub eager: ArmPlan,
    pub graph: Option<ArmPlan>,
    /// Base of every random value.
    pub seed: u64,
}

impl RunPlan {
    /// One arm alone on a device: nothing of the other's activations is allocated. The graph arm is then its own eager
    /// arm too. `None`: there is no such arm.
    pub fn alone(&self, arm: Arm) -> Option<Self> {
        let Self { eager, graph, seed } = self;
        match arm {
            Arm::Eager => Some(Self { eager: eager.clone(), graph: None, seed: *seed }),
            Arm::Graph => {
                let graph = graph.clone()?;
                let launches = 0..graph.program.launches.len();
                let segments = vec![Segment { launches, graph: None, label: "step".into() }];
                let eager = ArmPlan { segments, ..graph.clone() };
                Some(Self { eager, graph: Some(graph), seed: *seed })
            }
        }
    }

    /// Whether the graph arm needs less memory alone than beside the eager one. The arms share weights and state, and
    /// the larger need of activations.
    pub fn gains_alone(&self) -> bool {
        self.graph.as_ref().is_some_and(|g| g.memory.arena_bytes < self.eager.memory.arena_bytes)
    }
}

/// A program that cannot be cut as asked. Rules refuse such configurations earlier.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    #[error(
        "internal error: layer {layer} {pass:?} has two runs of captured launches (at {first} and {second}); please report it"
    )]
    SplitRun { layer: usize, pass: Pass, first: usize, second: usize },
    #[error("internal error: {op} waits for the host inside a graph ({label}); please report it")]
    HostSync { op: &'static str, label: String },
    #[error(
        "no launch of this rank lies in the scope {scope}; `mbperf rules` lists what each scope holds, --pp_rank chooses \
         the pipeline stage"
    )]
    Nothing { scope: String },
}

/// Parts that a scope name captures in a layer.
pub fn parts(scope: Scope) -> &'static [Part] {
    match scope {
        Scope::Attn => &[Part::Attn],
        Scope::Mlp => &[Part::Mlp],
        Scope::MoeRouter => &[Part::MoeRouter],
        Scope::MoePreprocess => &[Part::MoePreprocess],
        Scope::Moe => &[Part::MoeRouter, Part::MoePreprocess, Part::MoeExperts],
        Scope::Mamba => &[Part::Mamba],
        Scope::FullIteration => &[],
    }
}

/// Plans both arms.
pub fn plan(program: Program, graph: &Graph, seed: u64) -> Result<RunPlan, CaptureError> {
    let all = 0..program.launches.len();
    let eager_segments = vec![Segment { launches: all.clone(), graph: None, label: "step".into() }];
    let memory = memory::plan(&program, &vec![false; all.len()]);
    let unordered = (program.lanes() > 1).then(|| program.clone());
    let mut program = program;
    lanes::order(&mut program, &memory);
    let program = Arc::new(program);
    let eager = ArmPlan { program: program.clone(), segments: eager_segments, memory };
    let marks: Vec<Option<String>> = match graph.implementation {
        GraphImpl::None => return Ok(RunPlan { eager, graph: None, seed }),
        GraphImpl::Local => mark_iteration(&program),
        GraphImpl::TransformerEngine => mark_layers(&program, &graph.scope)?,
    };
    if marks.iter().all(Option::is_none) {
        let scope = graph.scope.iter().map(|s| format!("{s:?}")).collect::<Vec<_>>().join(",");
        return Err(CaptureError::Nothing { scope });
    }
    // The order of lanes follows from addresses, which the arms do not share.
    let plain = unordered.unwrap_or_else(|| (*program).clone());
    let (mut staged, marks) = match graph.implementation {
        GraphImpl::TransformerEngine if graph.staging => staging::stage(&plain, marks),
        _ => (plain, marks),
    };
    let segments = cut(&staged, &marks)?;
    let captured: Vec<bool> = marks.iter().map(Option::is_some).collect();
    let memory = memory::plan(&staged, &captured);
    lanes::order(&mut staged, &memory);
    Ok(RunPlan { eager, graph: Some(ArmPlan { program: Arc::new(staged), segments, memory }), seed })
}

/// Label of the graph that each launch lies in, if any.
fn mark_iteration(program: &Program) -> Vec<Option<String>> {
    let inside = |p: Part| !matches!(p, Part::Step | Part::Optimizer);
    let first = program.launches.iter().position(|l| inside(l.part));
    let last = program.launches.iter().rposition(|l| inside(l.part));
    (0..program.launches.len())
        .map(|i| match (first, last) {
            (Some(a), Some(b)) if (a..=b).contains(&i) => Some("iteration".to_string()),
            _ => None,
        })
        .collect()
}

fn mark_layers(program: &Program, scope: &[Scope]) -> Result<Vec<Option<String>>, CaptureError> {
    let wanted: Vec<Part> = scope.iter().flat_map(|s| parts(*s)).copied().collect();
    let mut marks = Vec::with_capacity(program.launches.len());
    // Last captured launch of each (layer, pass, micro-batch): a gap means two runs.
    let mut last: HashMap<(usize, Pass, usize), usize> = HashMap::new();
    for (i, l) in program.launches.iter().enumerate() {
        // An image's features are added between the layers, outside their graphs.
        let captured =
            l.layer.filter(|_| wanted.contains(&l.part) || (scope.is_empty() && l.part != Part::Vision));
        marks.push(captured.map(|layer| {
            format!("layer {layer} {}", if l.pass == Pass::Forward { "forward" } else { "backward" })
        }));
        if let Some(layer) = captured
            && let Some(first) = last.insert((layer, l.pass, l.micro_batch), i).filter(|&p| p + 1 != i)
        {
            return Err(CaptureError::SplitRun { layer, pass: l.pass, first, second: i });
        }
    }
    Ok(marks)
}

/// Consecutive launches of one mark become one segment; equal graph segments share an id.
fn cut(program: &Program, marks: &[Option<String>]) -> Result<Vec<Segment>, CaptureError> {
    let mut segments: Vec<Segment> = Vec::new();
    let mut ids: HashMap<String, usize> = HashMap::new();
    let mut start = 0;
    while start < marks.len() {
        let here = |i: usize| (&marks[i], program.launches[i].micro_batch);
        let iteration = marks[start].as_deref() == Some("iteration");
        let mut end = start + 1;
        while end < marks.len()
            && marks[end] == marks[start]
            && (marks[start].is_none() || iteration || here(end) == here(start))
        {
            end += 1;
        }
        let launches = start..end;
        let graph = match &marks[start] {
            None => None,
            Some(label) => {
                if let Some(i) = launches.clone().find(|&i| program.launches[i].host_sync()) {
                    return Err(CaptureError::HostSync {
                        op: program.launches[i].op.name(),
                        label: label.clone(),
                    });
                }
                let mut key: String = launches
                    .clone()
                    .map(|i| format!("{:?}{:?};", program.launches[i].op, program.launches[i].args))
                    .collect();
                // With pipeline stages upstream has a graph of its own for every micro-batch, though the buffers of
                // one that is done serve a later one.
                if program.graph_per_micro_batch && !iteration {
                    key.push_str(&program.launches[start].micro_batch.to_string());
                }
                let next = ids.len();
                Some(*ids.entry(key).or_insert(next))
            }
        };
        segments.push(Segment {
            launches,
            graph,
            label: marks[start].clone().unwrap_or_else(|| "eager".into()),
        });
        start = end;
    }
    Ok(segments)
}
