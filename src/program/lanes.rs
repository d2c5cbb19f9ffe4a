//! Lanes: launches that run beside the main stream, and what must wait for what.
//!
//! Nothing in a backward pass reads a weight's gradient, so the products that make them can run beside the products that
//! the next layer waits for. At few tokens neither fills the GPU alone.

use super::memory::{MemoryPlan, Place};
use super::{BufId, Launch, Lifetime, Part, Pass, Program};
use crate::ops::Access;

/// Launches that a side lane may lag behind the main one. What it reads is kept so long, so more would cost memory; a
/// layer's backward has 20 to 40 launches, and one that lags by a layer has long begun to share the GPU.
pub const LAG: usize = 24;

/// Puts the weight gradients on a lane of their own.
pub fn spread_weight_gradients(program: &mut Program) {
    let lane = program.lanes();
    for i in 0..program.launches.len() {
        if is_weight_gradient(program, &program.launches[i]) {
            program.launches[i].lane = lane;
        }
    }
}

/// A backward launch that writes main gradients and nothing else.
fn is_weight_gradient(program: &Program, launch: &Launch) -> bool {
    let mut written = launch.op.args().into_iter().zip(&launch.args).filter(|(spec, _)| writes(spec.access));
    let gradient = |id: BufId| program.buffer(program.root(id).0).lifetime == Lifetime::MainGrad;
    launch.pass == Pass::Backward
        && launch.part != Part::GradReduce
        && !launch.host_sync()
        && written.next().is_some_and(|(_, id)| gradient(*id))
        && written.all(|(_, id)| gradient(*id))
}

fn writes(access: Access) -> bool {
    access != Access::Read
}

/// Bytes that a launch reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Touch {
    /// Memory that the bytes are counted in: the arena, or a buffer of its own.
    space: Option<BufId>,
    from: usize,
    to: usize,
    write: bool,
}

impl Touch {
    fn conflicts(&self, other: &Touch) -> bool {
        (self.write || other.write)
            && self.space == other.space
            && self.from < other.to
            && other.from < self.to
    }
}

/// What launch `i` touches, its workspace included.
fn touches(program: &Program, memory: &MemoryPlan, i: usize) -> Vec<Touch> {
    let launch = &program.launches[i];
    let mut out: Vec<Touch> = Vec::with_capacity(launch.args.len() + 1);
    for (spec, &id) in launch.op.args().iter().zip(&launch.args) {
        let (root, offset) = program.root(id);
        let buffer = program.buffer(id);
        let begin = offset * buffer.dtype.size();
        let (space, base) = match memory.places.get(root.0 as usize) {
            Some(Place::Arena(at)) => (None, *at),
            _ => (Some(root), 0),
        };
        out.push(Touch {
            space,
            from: base + begin,
            to: base + begin + buffer.bytes(),
            write: writes(spec.access),
        });
    }
    let workspace = launch.op.workspace();
    if workspace > 0 {
        let from = memory.workspaces.get(i).copied().unwrap_or(0);
        out.push(Touch { space: None, from, to: from + workspace, write: true });
    }
    out
}

/// Fills `after`: for each launch the latest on every other lane that touches what it touches, one of the two writing, by
/// the addresses of `memory`; and for the main lane the weight gradients that lag by [`LAG`]. What is known to be done by an earlier wait is
/// left out. A lane alone keeps its order; all lanes begin and end a step together.
pub fn order(program: &mut Program, memory: &MemoryPlan) {
    let lanes = program.lanes();
    if lanes == 1 {
        return;
    }
    let all: Vec<Vec<Touch>> = (0..program.launches.len()).map(|i| touches(program, memory, i)).collect();
    let gradient: Vec<bool> = program.launches.iter().map(|l| is_weight_gradient(program, l)).collect();
    // By lane: its launches so far; by lane and other lane: launches of the other known to be done, as their number.
    let mut issued: Vec<Vec<usize>> = vec![Vec::new(); lanes];
    let mut known = vec![vec![0; lanes]; lanes];
    // By launch: what its lane knew when it was issued.
    let mut knew: Vec<Vec<usize>> = Vec::with_capacity(all.len());
    for i in 0..all.len() {
        let lane = program.launches[i].lane;
        for other in (0..lanes).filter(|o| *o != lane) {
            let open = known[lane][other]..issued[other].len();
            let wanted = open.rev().find(|&n| {
                let j = issued[other][n];
                let lags = lane == 0 && j + LAG <= i && gradient[j];
                lags || program.launches[i].after.contains(&j)
                    || all[i].iter().any(|a| all[j].iter().any(|b| a.conflicts(b)))
            });
            let Some(n) = wanted else { continue };
            let j = issued[other][n];
            if !program.launches[i].after.contains(&j) {
                program.launches[i].after.push(j);
            }
            known[lane][other] = n + 1;
            for third in 0..lanes {
                let theirs = knew[j][third];
                let mine = &mut known[lane][third];
                *mine = (*mine).max(theirs);
            }
        }
        issued[lane].push(i);
        known[lane][lane] = issued[lane].len();
        knew.push(known[lane].clone());
    }
}

#[cfg(test)]
mod tests;
