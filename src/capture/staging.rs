//! Staging copies of TE graphs.
//!
//! A replay of Transformer Engine's graphed callables copies every input whose address is not the static
//! one, and the incoming gradient, into buffers that the graph owns (transformer_engine/pytorch/graph.py,
//! the replay's argument copy). The same copies here make the graph arm pay what a user pays; they stand just
//! before their graph, outside it, and `--graph_staging none` leaves them out.

use crate::ops::Access;
use crate::ops::step::Copy;
use crate::program::{BufId, Buffer, Init, Launch, Lifetime, Pass, Program};
use std::collections::HashMap;
use std::sync::Arc;

/// The graph arm's program, and the marks of its launches.
pub fn stage(program: &Program, marks: Vec<Option<String>>) -> (Program, Vec<Option<String>>) {
    let mut out = Program { launches: Vec::new(), ..program.clone() };
    let mut out_marks = Vec::new();
    // By (layer, micro-batch): what a forward graph's inputs are called inside its backward graph.
    let mut saved: HashMap<(Option<usize>, usize), HashMap<BufId, BufId>> = HashMap::new();
    // Pass, and the label of the graph, in which each root buffer was last written.
    let mut writer: HashMap<BufId, (Pass, Option<String>)> = HashMap::new();
    // Static buffers by name: a scan of all buffers for each would grow with the square of the layers.
    let mut copies: HashMap<String, BufId> = HashMap::new();
    // Where each launch has come to lie.
    let mut moved: Vec<usize> = Vec::with_capacity(marks.len());
    let mut start = 0;
    while start < marks.len() {
        let first = &program.launches[start];
        let mut end = start + 1;
        while end < marks.len()
            && marks[end] == marks[start]
            && program.launches[end].micro_batch == first.micro_batch
        {
            end += 1;
        }
        let run = &program.launches[start..end];
        let mut rename: HashMap<BufId, BufId> = HashMap::new();
        if let Some(label) = &marks[start] {
            let key = (first.layer, first.micro_batch);
            if first.pass == Pass::Backward {
                rename.extend(saved.get(&key).cloned().unwrap_or_default());
            }
            for id in inputs(program, run) {
                let from_outside = writer
                    .get(&program.root(id).0)
                    .is_some_and(|(pass, by)| *pass == first.pass && by.as_ref() != Some(label));
                if rename.contains_key(&id) || !from_outside {
                    continue;
                }
                let fixed = static_copy(&mut out, &mut copies, id, label);
                let b = out.buffer(id);
                let copy = Launch {
                    op: Arc::new(Copy { dtype: b.dtype, len: b.len() }),
                    args: vec![id, fixed],
                    staging: true,
                    after: Vec::new(),
                    ..first.clone()
                };
                out.launches.push(copy);
                out_marks.push(None);
                rename.insert(id, fixed);
            }
            if first.pass == Pass::Forward {
                saved.entry(key).or_default().extend(rename.iter());
            }
        }
        for (launch, mark) in run.iter().zip(&marks[start..end]) {
            for (spec, &id) in launch.op.args().iter().zip(&launch.args) {
                if spec.access != Access::Read {
                    writer.insert(program.root(id).0, (launch.pass, mark.clone()));
                }
            }
            let args = launch.args.iter().map(|id| rename.get(id).copied().unwrap_or(*id)).collect();
            let after = launch.after.iter().filter_map(|i| moved.get(*i).copied()).collect();
            moved.push(out.launches.len());
            out.launches.push(Launch { args, after, ..launch.clone() });
            out_marks.push(mark.clone());
        }
        start = end;
    }
    (out, out_marks)
}

/// Activations that a run reads before it writes them, and never updates in place.
fn inputs(program: &Program, run: &[Launch]) -> Vec<BufId> {
    let mut written = Vec::new();
    let mut read: Vec<BufId> = Vec::new();
    for launch in run {
        for (spec, &id) in launch.op.args().iter().zip(&launch.args) {
            let b = program.buffer(id);
            let plain = b.lifetime == Lifetime::Activation && b.view_of.is_none();
            if spec.access == Access::Read && plain && !written.contains(&id) && !read.contains(&id) {
                read.push(id);
            }
            if spec.access != Access::Read {
                written.push(id);
            }
        }
    }
    read.retain(|id| !written.contains(id));
    read
}

fn static_copy(out: &mut Program, known: &mut HashMap<String, BufId>, id: BufId, label: &str) -> BufId {
    let name = format!("static.{label}.{}", out.buffer(id).name);
    if let Some(&known) = known.get(&name) {
        return known;
    }
    let fixed_id = BufId(out.buffers.len() as u32);
    known.insert(name.clone(), fixed_id);
    let b = out.buffer(id);
    let fixed = Buffer { name, init: Init::Poison, ..b.clone() };
    out.buffers.push(fixed);
    fixed_id
}
