//! Collectives between the processes of a run: NCCL on GPUs, TCP on the CPU. Sums are made in the order of the group's
//! ranks on the CPU, in NCCL's order on GPUs, which is the same in every step.

use super::super::support::sample_of;
use super::super::{ArgSpec, CpuArgs, Op, Real};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cpu::tcp::{Wire, exchange};
use crate::device::cuda::nccl::{Call, Element};
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue};
use crate::program::DType;
use crate::ranks::groups::Group;

/// What an exchange does with its pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// x `[rows, cols]` -> out `[ranks*rows, cols]`, every rank's piece in its place.
    AllGather,
    /// x `[ranks*rows, cols]` -> out `[rows, cols]`, the sum of all ranks' pieces of this rank's place.
    ReduceScatter,
    /// x `[rows, cols]` becomes the sum over the ranks.
    AllReduce,
    /// x `[ranks*rows, cols]` -> out `[ranks*rows, cols]`: piece i goes to rank i, and piece i comes from rank i.
    AllToAll,
    /// x `[ranks*rows, cols]`: the piece in this rank's place becomes the sum, the others mean nothing afterwards.
    ReduceScatterInPlace,
    /// x `[ranks*rows, cols]`: this rank's piece is given, the others are filled.
    AllGatherInPlace,
}

/// One collective of a real group. `rows`, `cols`: of one rank's piece.
#[derive(Debug, Clone, PartialEq)]
pub struct Exchange {
    pub kind: Kind,
    pub group: Group,
    pub rows: usize,
    pub cols: usize,
    pub dtype: DType,
}

impl Exchange {
    /// Elements of a piece.
    fn piece(&self) -> usize {
        self.rows * self.cols
    }

    fn sum<E: Wire>(&self, parts: &[Vec<E>], add: impl Fn(E, E) -> E, store: impl Fn(E) -> E, out: &mut [E]) {
        for (i, out) in out.iter_mut().enumerate() {
            let all = parts.iter().filter_map(|p| p.get(i).copied());
            if let Some(sum) = all.reduce(&add) {
                *out = store(sum);
            }
        }
    }

    fn go<E: Wire>(
        &self,
        input: Option<&[E]>,
        out: &mut [E],
        add: impl Fn(E, E) -> E,
        store: impl Fn(E) -> E,
    ) -> Result<(), DeviceError> {
        let (n, len, own) = (self.group.len(), self.piece(), self.group.own);
        if len == 0 {
            return Ok(());
        }
        // In place: what is sent is a copy of what will be written.
        let copy = if input.is_none() { out.to_vec() } else { Vec::new() };
        let x = input.unwrap_or(&copy);
        let same: Vec<&[E]> = vec![x; n];
        let pieces: Vec<&[E]> = x.chunks(len).collect();
        let mine = vec![len; n];
        match self.kind {
            Kind::AllReduce => {
                let parts = exchange(&self.group, &same, &mine)?;
                self.sum(&parts, add, store, out);
            }
            Kind::AllGather => {
                let parts = exchange(&self.group, &same, &mine)?;
                out.chunks_mut(len).zip(&parts).for_each(|(out, part)| out.copy_from_slice(part));
            }
            Kind::AllGatherInPlace => {
                let parts = exchange(&self.group, &vec![pieces[own]; n], &mine)?;
                out.chunks_mut(len).zip(&parts).for_each(|(out, part)| out.copy_from_slice(part));
            }
            Kind::ReduceScatter => {
                let parts = exchange(&self.group, &pieces, &mine)?;
                self.sum(&parts, add, store, out);
            }
            Kind::ReduceScatterInPlace => {
                let parts = exchange(&self.group, &pieces, &mine)?;
                self.sum(&parts, add, store, &mut out[own * len..][..len]);
            }
            Kind::AllToAll => {
                let parts = exchange(&self.group, &pieces, &mine)?;
                out.chunks_mut(len).zip(&parts).for_each(|(out, part)| out.copy_from_slice(part));
            }
        }
        Ok(())
    }

    fn in_place(&self) -> bool {
        matches!(self.kind, Kind::AllReduce | Kind::ReduceScatterInPlace | Kind::AllGatherInPlace)
    }

    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        if self.dtype.is_float() {
            let bf16 = self.dtype == DType::Bf16;
            let store = |x: T| if bf16 { x.bf16() } else { x.f32() };
            let x = if self.in_place() { None } else { Some(args.input(0)?) };
            let out = args.output(usize::from(x.is_some()))?;
            self.go(x, out, |a, b| a + b, store)
        } else {
            let x = if self.in_place() { None } else { Some(args.ints(0)?) };
            let out = args.ints_out(usize::from(x.is_some()))?;
            self.go(x, out, i32::wrapping_add, |x| x)
        }
    }
}

impl Op for Exchange {
    fn name(&self) -> &'static str {
        match self.kind {
            Kind::AllGather | Kind::AllGatherInPlace => "all_gather",
            Kind::ReduceScatter | Kind::ReduceScatterInPlace => "reduce_scatter",
            Kind::AllReduce => "all_reduce",
            Kind::AllToAll => "all_to_all",
        }
    }
    fn args(&self) -> Vec<ArgSpec> {
        let n = self.group.len();
        let shape = |pieces: usize| [pieces * self.rows, self.cols];
        let x = |pieces| ArgSpec::read("x", self.dtype, &shape(pieces)).sample(sample_of(self.dtype));
        let out = |pieces| ArgSpec::write("out", self.dtype, &shape(pieces));
        let both = |pieces| ArgSpec::update("x", self.dtype, &shape(pieces)).sample(sample_of(self.dtype));
        match self.kind {
            Kind::AllGather => vec![x(1), out(n)],
            Kind::ReduceScatter => vec![x(n), out(1)],
            Kind::AllToAll => vec![x(n), out(n)],
            Kind::AllReduce => vec![both(1)],
            Kind::ReduceScatterInPlace | Kind::AllGatherInPlace => vec![both(n)],
        }
    }
    /// Bytes that this rank sends and receives, by a ring.
    fn bytes(&self) -> f64 {
        let passes = if self.kind == Kind::AllReduce { 2.0 / self.group.len() as f64 } else { 1.0 };
        2.0 * passes * ((self.group.len() - 1) * self.piece() * self.dtype.size()) as f64
    }
    /// Sums round once for each rank.
    fn tolerance(&self, _arg: usize) -> f64 {
        super::super::tolerance(self.dtype, self.group.len(), self.group.len())
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        if self.piece() == 0 {
            return Ok(Issue::Nothing);
        }
        let (x, out) = (args[0], args.get(1).copied().unwrap_or(args[0]));
        let count = self.piece();
        let own = count * self.dtype.size() * self.group.own;
        let element = Element::of(self.dtype)?;
        cuda.nccl(
            &self.group,
            match self.kind {
                Kind::AllGather => Call::AllGather { x, out, count, element },
                Kind::AllGatherInPlace => Call::AllGather { x: x.offset(own), out: x, count, element },
                Kind::ReduceScatter => Call::ReduceScatter { x, out, count, element },
                Kind::ReduceScatterInPlace => Call::ReduceScatter { x, out: x.offset(own), count, element },
                Kind::AllReduce => Call::AllReduce { x, count, element },
                Kind::AllToAll => Call::AllToAll { x, out, count, element },
            },
        )
    }
}
