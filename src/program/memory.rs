//! Memory plan of one arm: where in the activation arena each buffer lies, and for how long.
//!
//! A buffer is live from a launch that writes it whole to the last launch that reads that value; a buffer
//! that every micro-batch writes anew has one such interval each. Two buffers may share bytes when no
//! intervals of theirs overlap. Placement is first fit, largest first, which packs a transformer's step
//! to within a few per cent of its peak of live bytes.

mod first_fit;

use super::lanes::LAG;
use super::{BufId, Lifetime, Program};
use crate::ops::Access;
use first_fit::{Placed, Taken};
use serde::Serialize;

/// Every piece of the arena starts on a multiple of this: what 16-byte vector access and cuBLASLt's
/// best kernels ask for, with room (bytes).
pub const ALIGNMENT: usize = 512;

/// Where a root buffer lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Place {
    /// Memory of its own for the whole run, shared by both arms (weights, state, gradients, constants).
    Persistent,
    /// Bytes from the start of the activation arena.
    Arena(usize),
    /// Pinned host memory.
    Host,
    /// A view: lies in another buffer.
    View,
    /// No launch of this arm touches it.
    Unused,
}

/// One arm's plan. The arms share one arena of the larger need, since no activation outlives a step.
#[derive(Debug, Clone, Default, Serialize)]
pub struct MemoryPlan {
    /// By buffer id.
    pub places: Vec<Place>,
    /// Arena offset of each launch's workspace, by launch index (0 when it needs none).
    pub workspaces: Vec<usize>,
    pub arena_bytes: usize,
    /// Bytes of all `Persistent` buffers.
    pub persistent_bytes: usize,
    /// Most bytes of activations that are live at one launch: the least any plan needs.
    pub live_peak_bytes: usize,
}

fn align(bytes: usize) -> usize {
    bytes.div_ceil(ALIGNMENT) * ALIGNMENT
}

/// Launch intervals (inclusive) in which each root activation holds a value.
pub(crate) fn lifetimes(program: &Program) -> Vec<Vec<(usize, usize)>> {
    let mut live: Vec<Vec<(usize, usize)>> = vec![Vec::new(); program.buffers.len()];
    for (i, launch) in program.launches.iter().enumerate() {
        for (spec, &id) in launch.op.args().iter().zip(&launch.args) {
            let (root, _) = program.root(id);
            if program.buffer(root).lifetime != Lifetime::Activation {
                continue;
            }
            let ranges = &mut live[root.0 as usize];
            let whole = program.buffer(id).len() == program.buffer(root).len();
            match ranges.last_mut() {
                // A whole write starts a new value; a launch that also reads the old one keeps it alive.
                Some(last) if !(spec.access == Access::Write && whole && last.1 < i) => last.1 = i,
                _ => ranges.push((i, i)),
            }
        }
    }
    keep_for_lanes(program, &mut live);
    live
}

/// What a side lane touches is kept until the main lane waits for it, or until it is written anew: no sooner use of the
/// bytes would have to wait.
fn keep_for_lanes(program: &Program, live: &mut [Vec<(usize, usize)>]) {
    let end = program.launches.len().saturating_sub(1);
    for (i, launch) in program.launches.iter().enumerate().filter(|(_, l)| l.lane > 0) {
        for &id in &launch.args {
            let ranges = &mut live[program.root(id).0.0 as usize];
            let Some(at) = ranges.iter().position(|r| r.0 <= i && i <= r.1) else { continue };
            let most = ranges.get(at + 1).map_or(end, |next| next.0 - 1);
            ranges[at].1 = ranges[at].1.max((i + LAG).min(most));
        }
    }
}

/// Plans one arm. `captured[i]`: launch i lies in a graph. Buffers that captured launches touch form a
/// region of their own, which no eager launch's private buffers share.
pub fn plan(program: &Program, captured: &[bool]) -> MemoryPlan {
    let live = lifetimes(program);
    let mut touched_by_graph = vec![false; program.buffers.len()];
    for (launch, _) in program.launches.iter().zip(captured).filter(|(_, c)| **c) {
        for &id in &launch.args {
            touched_by_graph[program.root(id).0.0 as usize] = true;
        }
    }
    let mut out = MemoryPlan { places: Vec::with_capacity(program.buffers.len()), ..Default::default() };
    for (i, b) in program.buffers.iter().enumerate() {
        out.places.push(match (b.view_of, b.lifetime) {
            (Some(_), _) => Place::View,
            (_, Lifetime::Host) => Place::Host,
            (_, Lifetime::Activation) if live[i].is_empty() => Place::Unused,
            (_, Lifetime::Activation) => Place::Arena(0),
            _ => {
                out.persistent_bytes += align(b.bytes());
                Place::Persistent
            }
        });
    }
    out.live_peak_bytes = live_peak(program, &live);
    out.workspaces = vec![0; program.launches.len()];
    let lanes = program.lanes();
    for region in [true, false] {
        let mut base = out.arena_bytes;
        // One workspace a lane: launches of one lane follow each other.
        for lane in 0..lanes {
            let mut most = 0;
            for (i, launch) in program.launches.iter().enumerate() {
                if captured[i] == region && launch.lane == lane {
                    out.workspaces[i] = base;
                    most = most.max(launch.op.workspace());
                }
            }
            base += align(most);
        }
        let members: Vec<usize> = (0..program.buffers.len())
            .filter(|&i| matches!(out.places[i], Place::Arena(_)) && touched_by_graph[i] == region)
            .collect();
        out.arena_bytes = base + pack(program, &live, members, base, &mut out.places);
    }
    out
}

/// First fit, largest first; returns the bytes used.
fn pack(
    program: &Program,
    live: &[Vec<(usize, usize)>],
    mut members: Vec<usize>,
    base: usize,
    places: &mut [Place],
) -> usize {
    let size = |i: usize| align(program.buffers[i].bytes());
    members.sort_by_cached_key(|&i| (std::cmp::Reverse(size(i)), live[i][0].0, i));
    let mut placed = Placed::default();
    let mut used = 0;
    for i in members {
        let bytes = size(i);
        let offset = placed.first_fit(bytes, &live[i]);
        placed.insert(Taken { offset, end: offset + bytes, live: &live[i] });
        places[i] = Place::Arena(base + offset);
        used = used.max(offset + bytes);
    }
    used
}

fn live_peak(program: &Program, live: &[Vec<(usize, usize)>]) -> usize {
    let mut change = vec![0i64; program.launches.len() + 1];
    for (b, ranges) in program.buffers.iter().zip(live) {
        for r in ranges {
            change[r.0] += align(b.bytes()) as i64;
            change[r.1 + 1] -= align(b.bytes()) as i64;
        }
    }
    let mut now = 0;
    change
        .iter()
        .map(|c| {
            now += c;
            now
        })
        .max()
        .unwrap_or(0) as usize
}

impl MemoryPlan {
    /// Arena offset of a buffer (bytes), through its views; `None` for buffers outside the arena.
    pub fn arena_offset(&self, program: &Program, id: BufId) -> Option<usize> {
        let (root, offset) = program.root(id);
        match self.places[root.0 as usize] {
            Place::Arena(at) => Some(at + offset * program.buffer(root).dtype.size()),
            _ => None,
        }
    }
}
