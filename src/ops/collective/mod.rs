//! Collectives. Stand-ins of one process: device copies of the bytes that this rank would send; and counts to the host.
//! Between processes: [`Exchange`], [`ExchangeRows`].

mod exchange;
pub mod held;
mod rows;

pub use exchange::{Exchange, Kind};
pub use rows::{ExchangeRows, RowPlan};

use super::support::{addresses, sample_of};
use super::{ArgSpec, CpuArgs, Op, Real, Sample};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use serde::Serialize;

/// Most scratch of a stand-in that only sends: larger messages pass through it piece by piece, as they pass
/// through a communicator's own buffers. Five times the L2 cache of an H200 (50 MiB), so that pieces go to memory.
const MAX_SCRATCH_BYTES: usize = 256 << 20;

const SOURCE: KernelSource = KernelSource { name: "collective/kernel.cu", text: include_str!("kernel.cu") };
/// Threads of a block of `stand_in_copy`, bytes of a vector, and vectors that a block copies.
const THREADS: u32 = 256;
const VECTOR: usize = 16;
const VECTORS_PER_BLOCK: usize = 1024;
/// Copies of one launch (blocks in y), at most: CUDA's limit of that dimension.
const MAX_COPIES: usize = 65_535;

/// Which exchange between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Collective {
    AllGather,
    ReduceScatter,
    AllReduce,
    AllToAll,
    /// A reduce-scatter or an all-gather whose result lies where its input does (gradient and weight buckets).
    InPlace,
    /// To the next pipeline stage, or back to the one before.
    Send,
    /// From the pipeline stage before, or back from the next one.
    Receive,
}

/// Copies the bytes that this rank would send to `ranks - 1` others; the result is what the exchange would give
/// if all ranks held this rank's data, but nothing is summed.
///
/// - AllGather: x `[rows, cols]` -> out `[ranks*rows, cols]`, x in every slot.
/// - ReduceScatter: x `[ranks*rows, cols]` -> out `[rows, cols]`, chunk 0 of x; the others go to scratch.
/// - AllReduce: x `[rows, cols]` (updated, unchanged); (ranks-1)/ranks of its bytes go to scratch twice, the
///   traffic of a ring.
/// - AllToAll: x `[rows, cols]` -> out `[rows, cols]`, a copy.
/// - Send, Receive: x `[rows, cols]` -> out `[rows, cols]`, a copy; out or x is what the other stage holds.
/// - InPlace: x `[rows, cols]` (updated, unchanged); (ranks-1)/ranks of its bytes go to scratch once.
#[derive(Debug, Clone, PartialEq)]
pub struct StandIn {
    pub kind: Collective,
    /// Rows of the local piece.
    pub rows: usize,
    pub cols: usize,
    pub ranks: usize,
    pub dtype: DType,
}

impl StandIn {
    /// Bytes of `[rows, cols]`.
    fn local_bytes(&self) -> usize {
        self.rows * self.cols * self.dtype.size()
    }
    /// Bytes that one pass sends to scratch: chunks of the other ranks.
    fn sent_bytes(&self) -> usize {
        let others = self.ranks.saturating_sub(1);
        match self.kind {
            Collective::ReduceScatter => others * self.local_bytes(),
            // Chunks of whole elements; ranks may not divide the length.
            Collective::AllReduce | Collective::InPlace => {
                let len = self.rows * self.cols;
                (len - len.div_ceil(self.ranks.max(1))) * self.dtype.size()
            }
            Collective::AllGather | Collective::AllToAll | Collective::Send | Collective::Receive => 0,
        }
    }

    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        if matches!(self.kind, Collective::AllReduce | Collective::InPlace) {
            return Ok(());
        }
        if self.dtype.is_float() {
            self.copy(args.input(0)?, args.output(1)?);
        } else {
            self.copy(args.ints(0)?, args.ints_out(1)?);
        }
        Ok(())
    }
    fn copy<E: Copy>(&self, x: &[E], out: &mut [E]) {
        let len = self.rows * self.cols;
        if len > 0 {
            out.chunks_mut(len).for_each(|slot| slot.copy_from_slice(&x[..len]));
        }
    }
}

/// What one launch of `stand_in_copy` does.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Copies {
    x: DevPtr,
    out: DevPtr,
    slot_vectors: usize,
    slots: usize,
    sent: DevPtr,
    scratch: DevPtr,
    sent_vectors: usize,
    piece_vectors: usize,
    /// Of one pass over what is sent.
    pieces: usize,
    passes: usize,
}

impl Copies {
    fn count(&self) -> usize {
        self.slots + self.passes * self.pieces
    }
    fn config(&self) -> Config {
        let slot = if self.slots > 0 { self.slot_vectors } else { 0 };
        let piece = if self.pieces > 0 { self.piece_vectors.min(self.sent_vectors) } else { 0 };
        let blocks = slot.max(piece).div_ceil(VECTORS_PER_BLOCK);
        Config { grid: [blocks as u32, self.count() as u32, 1], block: [THREADS, 1, 1], shared_bytes: 0 }
    }
    fn params(&self) -> [Param; 9] {
        let long = |n: usize| Param::I64(n as i64);
        let int = |n: usize| Param::I32(n as i32);
        [
            self.x.into(),
            self.out.into(),
            long(self.slot_vectors),
            int(self.slots),
            self.sent.into(),
            self.scratch.into(),
            long(self.sent_vectors),
            long(self.piece_vectors),
            int(self.pieces.max(1)),
        ]
    }
}

impl StandIn {
    /// The copies as one launch of 16-byte vectors: a kernel moves half as much again as copy nodes of the driver
    /// (`results/h200/notes.md`). `None`: nothing to copy, or pieces that are no whole vectors.
    fn by_kernel(&self, args: &[DevPtr], scratch: DevPtr) -> Result<Option<Copies>, DeviceError> {
        let in_place = matches!(self.kind, Collective::AllReduce | Collective::InPlace);
        let (x, out) = if in_place {
            let [x] = addresses(self.name(), args)?;
            (x, x)
        } else {
            let [x, out] = addresses(self.name(), args)?;
            (x, out)
        };
        let local = self.local_bytes();
        let (slots, passes) = match self.kind {
            Collective::AllGather => (self.ranks, 0),
            Collective::AllToAll | Collective::Send | Collective::Receive => (1, 0),
            Collective::ReduceScatter => (1, 1),
            Collective::AllReduce => (0, 2),
            Collective::InPlace => (0, 1),
        };
        let sent = if in_place { x } else { x.offset(local) };
        // What is sent may end within a vector: the rest of that one is x's too.
        let sent_vectors = self.sent_bytes().div_ceil(VECTOR);
        let piece_vectors = self.workspace() / VECTOR;
        let pieces = if piece_vectors > 0 { sent_vectors.div_ceil(piece_vectors) } else { 0 };
        let copies = Copies {
            x,
            out,
            slot_vectors: local / VECTOR,
            slots,
            sent,
            scratch,
            sent_vectors,
            piece_vectors,
            pieces,
            passes: if pieces > 0 { passes } else { 0 },
        };
        let whole = [x.0, out.0, local as u64].iter().all(|n| n % VECTOR as u64 == 0)
            && (pieces == 0 || scratch.0.is_multiple_of(VECTOR as u64));
        let any = local > 0 && (1..=MAX_COPIES).contains(&copies.count());
        Ok((whole && any).then_some(copies))
    }
}

/// Copies `bytes` from `src` to one scratch of `scratch_bytes`, piece after piece.
fn send(pieces: &mut Vec<Issue>, scratch: DevPtr, src: DevPtr, bytes: usize, scratch_bytes: usize) {
    let mut done = 0;
    while done < bytes {
        let piece = (bytes - done).min(scratch_bytes);
        pieces.push(Issue::Copy { dst: scratch, src: src.offset(done), bytes: piece });
        done += piece;
    }
}

impl Op for StandIn {
    fn name(&self) -> &'static str {
        match self.kind {
            Collective::AllGather => "stand_in_all_gather",
            Collective::ReduceScatter => "stand_in_reduce_scatter",
            Collective::AllReduce => "stand_in_all_reduce",
            Collective::AllToAll => "stand_in_all_to_all",
            Collective::InPlace => "stand_in_in_place",
            Collective::Send => "stand_in_send",
            Collective::Receive => "stand_in_receive",
        }
    }
    fn args(&self) -> Vec<ArgSpec> {
        let x = |rows| ArgSpec::read("x", self.dtype, &[rows, self.cols]).sample(sample_of(self.dtype));
        let out = |rows| ArgSpec::write("out", self.dtype, &[rows, self.cols]);
        match self.kind {
            Collective::AllGather => vec![x(self.rows), out(self.ranks * self.rows)],
            Collective::ReduceScatter => vec![x(self.ranks * self.rows), out(self.rows)],
            Collective::AllReduce | Collective::InPlace => {
                vec![ArgSpec::update("x", self.dtype, &[self.rows, self.cols]).sample(sample_of(self.dtype))]
            }
            Collective::AllToAll | Collective::Send | Collective::Receive => {
                vec![x(self.rows), out(self.rows)]
            }
        }
    }
    /// Every copy reads and writes.
    fn bytes(&self) -> f64 {
        let copied = match self.kind {
            Collective::AllGather => self.ranks * self.local_bytes(),
            Collective::ReduceScatter => self.local_bytes() + self.sent_bytes(),
            Collective::AllReduce => 2 * self.sent_bytes(),
            Collective::AllToAll | Collective::Send | Collective::Receive => self.local_bytes(),
            Collective::InPlace => self.sent_bytes(),
        };
        2.0 * copied as f64
    }
    /// Scratch for the bytes that leave this rank, whole vectors.
    fn workspace(&self) -> usize {
        self.sent_bytes().next_multiple_of(VECTOR).min(MAX_SCRATCH_BYTES)
    }
    fn stand_in(&self) -> bool {
        true
    }
    fn as_stand_in(&self) -> Option<&StandIn> {
        Some(self)
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    cpu_reference!();

    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], workspace: DevPtr) -> Result<Issue, DeviceError> {
        if let Some(copies) = self.by_kernel(args, workspace)? {
            let kernel = cuda.kernel(SOURCE, "stand_in_copy", &[], 0)?;
            return cuda.launch(&kernel, copies.config(), &copies.params());
        }
        let bytes = self.local_bytes();
        let mut pieces = Vec::new();
        let passes = match self.kind {
            Collective::AllReduce => 2,
            Collective::InPlace => 1,
            _ => 0,
        };
        if passes > 0 {
            let [x] = addresses(self.name(), args)?;
            for _ in 0..passes {
                send(&mut pieces, workspace, x, self.sent_bytes(), self.workspace());
            }
        } else {
            let [x, out] = addresses(self.name(), args)?;
            let slots = if self.kind == Collective::AllGather { self.ranks } else { 1 };
            if bytes > 0 {
                let to_slot = |s| Issue::Copy { dst: out.offset(s * bytes), src: x, bytes };
                pieces.extend((0..slots).map(to_slot));
            }
            send(&mut pieces, workspace, x.offset(bytes), self.sent_bytes(), self.workspace());
        }
        Ok(match pieces.len() {
            0 => Issue::Nothing,
            1 => pieces.remove(0),
            _ => Issue::Many(pieces),
        })
    }
}

/// Copies counts to pinned host memory and waits for them: the host then knows how many rows to exchange.
///
/// Arguments: counts `[len]`, host `[len]` (lifetime `Host`).
#[derive(Debug, Clone, PartialEq)]
pub struct CountsToHost {
    pub len: usize,
}

impl CountsToHost {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        args.ints_out(1)?.copy_from_slice(args.ints(0)?);
        Ok(())
    }
}

impl Op for CountsToHost {
    fn name(&self) -> &'static str {
        "counts_to_host"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("counts", DType::I32, &[self.len]).sample(Sample::Below(1 << 20)),
            ArgSpec::write("host", DType::I32, &[self.len]),
        ]
    }
    fn host_sync(&self) -> bool {
        true
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    cpu_reference!();

    fn prepare(
        &self,
        _cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [src, dst] = addresses(self.name(), args)?;
        let bytes = self.len * DType::I32.size();
        Ok(if bytes == 0 { Issue::Nothing } else { Issue::CopyToHostAndWait { dst, src, bytes } })
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{inputs, run_f64};
    use super::*;
    use crate::device::cuda::prep::OfflinePrep;

    fn stand_in(kind: Collective, ranks: usize, dtype: DType) -> StandIn {
        StandIn { kind, rows: 3, cols: 5, ranks, dtype }
    }

    #[test]
    fn results_are_copies_of_the_input() {
        for dtype in [DType::Bf16, DType::I32] {
            let op = stand_in(Collective::AllGather, 4, dtype);
            let values = inputs(&op, 1);
            assert_eq!(run_f64(&op, &values)[1], values[0].repeat(4));
            let op = stand_in(Collective::ReduceScatter, 4, dtype);
            let values = inputs(&op, 2);
            assert_eq!(run_f64(&op, &values)[1], values[0][..15]);
            for kind in [Collective::AllToAll, Collective::Send, Collective::Receive] {
                let op = stand_in(kind, 4, dtype);
                let values = inputs(&op, 3);
                assert_eq!(run_f64(&op, &values)[1], values[0]);
                assert_eq!((op.workspace(), op.bytes()), (0, 2.0 * 15.0 * dtype.size() as f64));
            }
            let op = stand_in(Collective::AllReduce, 4, dtype);
            let values = inputs(&op, 4);
            assert_eq!(run_f64(&op, &values)[0], values[0]);
        }
        let op = CountsToHost { len: 9 };
        let values = inputs(&op, 5);
        assert_eq!(run_f64(&op, &values)[1], values[0]);
    }

    #[test]
    fn scratch_holds_what_leaves_the_rank() {
        // 15 elements in 4 chunks: the own one has 4, 11 are sent.
        // In whole vectors of 16 bytes: 44 and 90.
        assert_eq!(stand_in(Collective::AllReduce, 4, DType::F32).workspace(), 48);
        assert_eq!(stand_in(Collective::ReduceScatter, 4, DType::Bf16).workspace(), 96);
        assert_eq!(stand_in(Collective::AllGather, 4, DType::Bf16).workspace(), 0);
        assert_eq!(stand_in(Collective::AllReduce, 1, DType::F32).workspace(), 0);
        assert_eq!(stand_in(Collective::ReduceScatter, 1, DType::F32).workspace(), 0);
        let large = StandIn { rows: 1 << 20, cols: 4096, ..stand_in(Collective::AllReduce, 8, DType::Bf16) };
        assert_eq!(large.workspace(), MAX_SCRATCH_BYTES);
    }

    /// Runs what `stand_in_copy` does, vector by vector, on byte addresses: (source, destination) of each.
    fn moves(c: &Copies) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        for y in 0..c.count() {
            let (from, to, vectors) = if y < c.slots {
                (c.x, c.out.offset(y * c.slot_vectors * VECTOR), c.slot_vectors)
            } else {
                let at = (y - c.slots) % c.pieces * c.piece_vectors;
                (c.sent.offset(at * VECTOR), c.scratch, (c.sent_vectors - at).min(c.piece_vectors))
            };
            let blocks = c.config().grid[0] as usize * VECTORS_PER_BLOCK;
            assert!(vectors <= blocks, "{vectors} vectors in {blocks}");
            all.extend((0..vectors).map(|i| (from.0 + 16 * i as u64, to.0 + 16 * i as u64)));
        }
        all
    }

    #[test]
    fn one_launch_copies_what_the_pieces_do() {
        let (x, out, scratch) = (DevPtr(1 << 20), DevPtr(1 << 24), DevPtr(1 << 28));
        // 3 rows of 8: 48 bytes in bf16.
        for (kind, ranks) in [
            (Collective::AllGather, 4),
            (Collective::ReduceScatter, 4),
            (Collective::AllReduce, 3),
            (Collective::AllToAll, 8),
            (Collective::InPlace, 2),
        ] {
            let op = StandIn { kind, rows: 3, cols: 8, ranks, dtype: DType::Bf16 };
            let in_place = matches!(kind, Collective::AllReduce | Collective::InPlace);
            let args = if in_place { vec![x] } else { vec![x, out] };
            let copies = op.by_kernel(&args, scratch).unwrap().unwrap();
            let moves = moves(&copies);
            // As many bytes as the op says it copies, whole vectors; never past a buffer.
            let vectors = (op.bytes() / 2.0 / 16.0).ceil() as usize;
            assert!(moves.len() >= vectors && moves.len() <= vectors + 1, "{kind:?}: {}", moves.len());
            let lengths: Vec<u64> = op.args().iter().map(|a| (a.len() * 2) as u64).collect();
            for (from, to) in moves {
                assert!(from >= x.0 && from + 16 <= x.0 + lengths[0], "{kind:?}");
                let in_scratch = to >= scratch.0 && to + 16 <= scratch.0 + op.workspace() as u64;
                let in_out = !in_place && to >= out.0 && to + 16 <= out.0 + lengths[1];
                assert!(in_scratch || in_out, "{kind:?}");
            }
        }
        // Odd sizes and addresses take the driver's copies.
        let odd = stand_in(Collective::AllToAll, 4, DType::Bf16);
        assert_eq!(odd.by_kernel(&[x, out], scratch).unwrap(), None);
        let even = StandIn { cols: 8, ..odd };
        assert!(even.by_kernel(&[x, out], scratch).unwrap().is_some());
        assert_eq!(even.by_kernel(&[DevPtr(x.0 + 2), out], scratch).unwrap(), None);
        // Messages beyond the scratch pass it piece by piece, in one launch.
        let large =
            StandIn { kind: Collective::AllReduce, rows: 1 << 20, cols: 4096, ranks: 8, dtype: DType::Bf16 };
        let copies = large.by_kernel(&[x], scratch).unwrap().unwrap();
        assert_eq!((copies.pieces, copies.count()), (28, 56));
        assert_eq!(copies.config().grid, [(MAX_SCRATCH_BYTES / 16 / 1024) as u32, 56, 1]);
    }

    /// The kernel exists, takes these parameters, and compiles where NVRTC is there.
    #[test]
    fn kernels_prepare() {
        let mut offline = OfflinePrep::new("sm_90a").unwrap();
        for kind in [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce] {
            let op = StandIn { kind, rows: 64, cols: 8, ranks: 4, dtype: DType::Bf16 };
            offline.prepare(&op).unwrap();
        }
    }

    /// Pieces follow each other through the source and never leave the scratch.
    #[test]
    fn large_messages_pass_in_pieces() {
        let mut pieces = Vec::new();
        send(&mut pieces, DevPtr(1 << 40), DevPtr(4096), 2500, 1000);
        let mut next = 4096;
        for piece in &pieces {
            let Issue::Copy { dst, src, bytes } = piece else { panic!("{piece:?}") };
            assert_eq!((dst.0, src.0), (1 << 40, next));
            assert!(*bytes <= 1000);
            next += *bytes as u64;
        }
        assert_eq!((pieces.len(), next), (3, 4096 + 2500));
    }
}
