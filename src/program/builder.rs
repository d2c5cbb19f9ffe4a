//! Builds a [`Program`]: named buffers, launches checked against their op's argument list.
//!
//! The first mistake is kept and reported by [`Builder::finish`], so that a workload reads as the list of
//! its launches.

use super::{BufId, Buffer, DType, Init, Launch, Lifetime, Part, Pass, Program, Shard};
use crate::ops::{Op, rng::Rng};
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Debug)]
pub struct Builder {
    pub program: Program,
    by_name: HashMap<String, BufId>,
    draws: HashMap<String, u32>,
    /// Where the next launches belong.
    pub layer: Option<usize>,
    pub part: Part,
    pub pass: Pass,
    pub micro_batch: usize,
    /// Activation slot: names of activations carry it, so that each slot has buffers of its own and the micro-batches
    /// of one slot share them.
    pub slot: usize,
    error: Option<String>,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            program: Program::default(),
            by_name: HashMap::new(),
            draws: HashMap::new(),
            layer: None,
            part: Part::Step,
            pass: Pass::Other,
            micro_batch: 0,
            slot: 0,
            error: None,
        }
    }
}

impl Builder {
    fn fail(&mut self, message: String) {
        self.error.get_or_insert(message);
    }

    /// A new buffer. A name that exists already must mean the same tensor, which is then returned: the
    /// micro-batches of one activation slot share their buffers this way.
    pub fn buffer(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        lifetime: Lifetime,
        init: Init,
    ) -> BufId {
        if let Some(&id) = self.by_name.get(name) {
            let old = self.program.buffer(id);
            if old.dtype != dtype || old.shape != shape || old.lifetime != lifetime {
                self.fail(format!(
                    "buffer {name} is asked for as {dtype:?}{shape:?} and as {:?}{:?}",
                    old.dtype, old.shape
                ));
            }
            return id;
        }
        self.push(Buffer {
            name: name.into(),
            shape: shape.into(),
            dtype,
            lifetime,
            init,
            view_of: None,
            shard: Shard::default(),
        })
    }

    /// Written and last read within a step, in the buffers of the current slot.
    pub fn activation(&mut self, name: &str, dtype: DType, shape: &[usize]) -> BufId {
        let name = self.in_slot(name);
        self.transient(&name, dtype, shape)
    }

    /// The name of a buffer that each slot has one of.
    pub fn in_slot(&self, name: &str) -> String {
        match self.slot {
            0 => name.into(),
            slot => format!("{name}.slot{slot}"),
        }
    }

    /// Written and last read within a step, the same for all slots.
    pub fn transient(&mut self, name: &str, dtype: DType, shape: &[usize]) -> BufId {
        self.buffer(name, dtype, shape, Lifetime::Activation, Init::Poison)
    }

    /// Elements `offset..` of `parent` under a name and shape of their own.
    pub fn view(
        &mut self,
        name: &str,
        parent: BufId,
        offset: usize,
        shape: &[usize],
        init: Init,
        shard: Shard,
    ) -> BufId {
        let (dtype, lifetime, room) = {
            let p = self.program.buffer(parent);
            (p.dtype, p.lifetime, p.len())
        };
        let len: usize = shape.iter().product();
        if offset + len > room {
            self.fail(format!("view {name} ends at element {} of {room}", offset + len));
        }
        self.push(Buffer {
            name: name.into(),
            shape: shape.into(),
            dtype,
            lifetime,
            init,
            view_of: Some((parent, offset)),
            shard,
        })
    }

    fn push(&mut self, buffer: Buffer) -> BufId {
        let id = BufId(self.program.buffers.len() as u32);
        self.by_name.insert(buffer.name.clone(), id);
        self.program.buffers.push(buffer);
        id
    }

    pub fn find(&self, name: &str) -> Option<BufId> {
        self.by_name.get(name).copied()
    }

    /// The draw id of a place in the model: the same for all micro-batches, which differ by a counter word.
    pub fn rng(&mut self, site: &str, seed_offset: u32) -> Rng {
        let next = self.draws.len() as u32;
        Rng { seed_offset, draw: *self.draws.entry(site.into()).or_insert(next) }
    }

    /// Where the next launches belong.
    pub fn at(&mut self, layer: Option<usize>, part: Part, pass: Pass) {
        (self.layer, self.part, self.pass) = (layer, part, pass);
    }

    pub fn launch(&mut self, op: impl Op + 'static, args: &[BufId]) {
        self.launch_shared(Arc::new(op), args);
    }

    /// [`Self::launch`] of an op that is shared already.
    pub fn launch_shared(&mut self, op: Arc<dyn Op>, args: &[BufId]) {
        let specs = op.args();
        if specs.len() != args.len() {
            let names: Vec<_> = specs.iter().map(|s| s.name).collect();
            self.fail(format!(
                "{} takes {} arguments ({names:?}), {} were given",
                op.name(),
                specs.len(),
                args.len()
            ));
        }
        for (spec, &id) in specs.iter().zip(args) {
            let b = self.program.buffer(id);
            if b.dtype != spec.dtype || b.len() != spec.len() {
                let message = format!(
                    "{} wants {} as {:?}{:?}, buffer {} is {:?}{:?} (layer {:?}, {:?} {:?})",
                    op.name(),
                    spec.name,
                    spec.dtype,
                    spec.shape,
                    b.name,
                    b.dtype,
                    b.shape,
                    self.layer,
                    self.part,
                    self.pass
                );
                self.fail(message);
            }
        }
        self.program.launches.push(Launch {
            op,
            args: args.to_vec(),
            layer: self.layer,
            part: self.part,
            pass: self.pass,
            micro_batch: self.micro_batch,
            lane: 0,
            after: Vec::new(),
            staging: false,
            recompute: false,
        });
    }

    /// The program, or the first mistake.
    pub fn finish(self) -> Result<Program, String> {
        match self.error {
            Some(message) => Err(message),
            None => Ok(self.program),
        }
    }
}
