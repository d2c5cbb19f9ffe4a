//! Device memory of a run: buffers that survive a step, the arena that both arms share, pinned host buffers, and
//! the first values of all of them.

use super::context::{Context, DeviceMemory, PinnedMemory, Stream, check, copy_to_device, copy_to_host};
use super::kernels::KernelCache;
use super::prep::{Config, DevPtr, KernelSource, Param};
use crate::capture::{ArmPlan, RunPlan};
use crate::device::DeviceError;
use crate::device::cpu::name_hash;
use crate::program::memory::Place;
use crate::program::{BufId, Buffer, DType, Init, Program};
use cudarc::driver::sys;
use half::bf16;
use std::collections::HashMap;
use std::rc::Rc;

/// Kernels of the executor itself.
pub(super) const UTILITY: KernelSource =
    KernelSource { name: "cuda/utility.cu", text: include_str!("utility.cu") };

/// Byte that poisons: floats of it are NaN, integers -1.
const POISON: u8 = 0xFF;

/// Threads of a block, and most blocks, of the utility kernels: they loop, so the grid only has to fill the card.
const THREADS: u32 = 256;
const MAX_BLOCKS: usize = 4096;

/// A grid that walks `elements`.
pub(super) fn walk(elements: usize) -> Config {
    Config::linear(elements.div_ceil(THREADS as usize).min(MAX_BLOCKS), THREADS)
}

#[derive(Debug)]
pub(super) struct Memory {
    /// The program with the most buffers: the arms agree on all that both have.
    program: std::sync::Arc<Program>,
    persistent: HashMap<BufId, DeviceMemory>,
    host: HashMap<BufId, PinnedMemory>,
    arena: DeviceMemory,
    seed: u64,
}

impl Memory {
    /// Allocates everything. Errors: [`DeviceError::OutOfMemory`] that names what did not fit.
    pub fn new(context: &Rc<Context>, plan: &RunPlan) -> Result<Self, DeviceError> {
        let arms = || [Some(&plan.eager), plan.graph.as_ref()].into_iter().flatten();
        let arena_bytes = arms().map(|a| a.memory.arena_bytes).max().unwrap_or(0);
        let persistent_bytes = arms().map(|a| a.memory.persistent_bytes).max().unwrap_or(0);
        let (free, _) = context.memory()?;
        let (mut persistent, mut host) = (HashMap::new(), HashMap::new());
        for arm in arms() {
            if arm.memory.places.len() != arm.program.buffers.len() {
                return Err(DeviceError::internal("the memory plan is not of this program"));
            }
            for (i, (place, buffer)) in arm.memory.places.iter().zip(&arm.program.buffers).enumerate() {
                let id = BufId(i as u32);
                match place {
                    Place::Persistent if !persistent.contains_key(&id) => {
                        let memory = context.alloc(buffer.bytes(), &buffer.name);
                        let whole = "weights, gradients and optimizer state";
                        persistent
                            .insert(id, memory.map_err(|e| told_whole(e, whole, persistent_bytes, free))?);
                    }
                    Place::Host if !host.contains_key(&id) => {
                        host.insert(id, context.alloc_host(buffer.bytes())?);
                    }
                    _ => {}
                }
            }
        }
        let (left, _) = context.memory()?;
        let arena = context.alloc(arena_bytes, "activations and workspaces");
        let arena = arena.map_err(|e| told_whole(e, "activations and workspaces", arena_bytes, left))?;
        let widest = arms().max_by_key(|a| a.program.buffers.len()).map(|a| a.program.clone());
        let program = widest.unwrap_or_default();
        Ok(Self { program, persistent, host, arena, seed: plan.seed })
    }

    /// Where buffer `id` of `arm` lies. Errors for one that no launch of the arm uses.
    pub fn address(&self, arm: &ArmPlan, id: BufId) -> Result<DevPtr, DeviceError> {
        let (root, elements) = arm.program.root(id);
        let buffer = arm.program.buffer(id);
        let base = match arm.memory.places.get(root.0 as usize) {
            Some(Place::Arena(offset)) => {
                if offset + arm.program.buffer(root).bytes() > self.arena.bytes {
                    return Err(DeviceError::internal(format!("{} lies outside the arena", buffer.name)));
                }
                Some(self.arena.ptr.offset(*offset))
            }
            Some(Place::Host) => self.host.get(&root).map(PinnedMemory::address),
            _ => self.persistent.get(&root).map(|m| m.ptr),
        };
        let end = elements + buffer.len();
        match base {
            Some(base) if end <= arm.program.buffer(root).len() => {
                Ok(base.offset(elements * buffer.dtype.size()))
            }
            Some(_) => Err(DeviceError::internal(format!("{} passes the end of its parent", buffer.name))),
            None => Err(DeviceError::internal(format!("{} has no memory in this arm", buffer.name))),
        }
    }

    /// Scratch of a launch.
    pub fn workspace(&self, arm: &ArmPlan, launch: usize) -> DevPtr {
        self.arena.ptr.offset(arm.memory.workspaces.get(launch).copied().unwrap_or(0))
    }

    /// Every surviving buffer as its `Init` says, in the order of ids; all else poisoned. Waits.
    pub fn reset(&mut self, stream: &Stream, kernels: &mut KernelCache) -> Result<(), DeviceError> {
        stream.fill(self.arena.ptr, POISON, self.arena.bytes)?;
        self.host.values_mut().for_each(|h| h.fill(POISON));
        for i in 0..self.program.buffers.len() {
            let buffer = &self.program.buffers[i];
            if let Some(at) = self.lasting(BufId(i as u32)) {
                self.first_values(buffer, at, stream, kernels)?;
            }
        }
        stream.synchronize()
    }

    /// Address of a buffer that survives a step.
    fn lasting(&self, id: BufId) -> Option<DevPtr> {
        let (root, elements) = self.program.root(id);
        let offset = elements * self.program.buffer(id).dtype.size();
        self.persistent.get(&root).map(|m| m.ptr.offset(offset))
    }

    fn first_values(
        &self,
        buffer: &Buffer,
        at: DevPtr,
        stream: &Stream,
        kernels: &mut KernelCache,
    ) -> Result<(), DeviceError> {
        let refuse = |what: &str| Err(DeviceError::internal(format!("{}: {what}", buffer.name)));
        match &buffer.init {
            Init::Inherit => Ok(()),
            Init::Poison => stream.fill(at, POISON, buffer.bytes()),
            Init::Const { value } => constant(stream, at, buffer, *value),
            Init::Values { values } => {
                if values.len() != buffer.len() || !buffer.dtype.is_float() {
                    return refuse("its values do not fit");
                }
                copy_to_device(at, &encode(buffer.dtype, values))
            }
            Init::Words { words } => {
                if words.len() * 4 > buffer.bytes() || buffer.dtype.size() != 4 {
                    return refuse("its first words do not fit");
                }
                let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                stream.fill(at, POISON, buffer.bytes())?;
                copy_to_device(at, &bytes)
            }
            Init::CopyOf { source, offset } => {
                let from = self.program.buffer(*source);
                let Some(base) = self.lasting(*source).filter(|_| offset + buffer.len() <= from.len()) else {
                    return refuse("the buffer it copies is too short or does not last");
                };
                let base = base.offset(offset * from.dtype.size());
                match (from.dtype, buffer.dtype) {
                    (a, b) if a == b => stream.copy(at, base, buffer.bytes()),
                    (DType::Bf16, DType::F32) => {
                        let params = [base.into(), at.into(), Param::I64(buffer.len() as i64)];
                        launch(kernels, "widen", buffer.len(), &params, stream)
                    }
                    _ => refuse("no copy from this dtype"),
                }
            }
            Init::Normal { std } => {
                let entry = match buffer.dtype {
                    DType::Bf16 => "normals_bf16",
                    DType::F32 => "normals_f32",
                    _ => return refuse("random values are for floats"),
                };
                let key = self.seed ^ name_hash(&buffer.name);
                for piece in pieces(buffer) {
                    let params = [
                        at.offset(piece.start * buffer.dtype.size()).into(),
                        Param::I64(piece.elements as i64),
                        Param::I64(piece.row_len as i64),
                        Param::U64(piece.first),
                        Param::U64(piece.global_row_len),
                        Param::U64(key),
                        Param::F32(*std as f32),
                    ];
                    launch(kernels, entry, piece.elements, &params, stream)?;
                }
                Ok(())
            }
        }
    }

    /// Values of a buffer of `arm` as f64: bf16 and f32 exactly, integers as signed ones. Waits.
    pub fn read(&self, context: &Context, arm: &ArmPlan, id: BufId) -> Result<Vec<f64>, DeviceError> {
        let buffer = arm.program.buffer(id);
        let (root, elements) = arm.program.root(id);
        context.synchronize()?;
        let mut bytes = vec![0u8; buffer.bytes()];
        match self.host.get(&root) {
            Some(host) => bytes = host.read(elements * buffer.dtype.size(), buffer.bytes()),
            None => copy_to_host(&mut bytes, self.address(arm, id)?)?,
        }
        let word = |c: &[u8]| u32::from_le_bytes([c[0], c[1], c[2], c[3]]);
        Ok(match buffer.dtype {
            DType::Bf16 => {
                bytes.chunks_exact(2).map(|c| bf16::from_le_bytes([c[0], c[1]]).to_f64()).collect()
            }
            DType::F32 => bytes.chunks_exact(4).map(|c| f32::from_bits(word(c)) as f64).collect(),
            DType::I32 | DType::U32 => bytes.chunks_exact(4).map(|c| word(c) as i32 as f64).collect(),
            DType::U8 => bytes.iter().map(|b| *b as f64).collect(),
        })
    }

    /// Sets a buffer of `arm`, rounding to its dtype. Waits.
    pub fn write(
        &mut self,
        context: &Context,
        arm: &ArmPlan,
        id: BufId,
        values: &[f64],
    ) -> Result<(), DeviceError> {
        let buffer = arm.program.buffer(id);
        if values.len() != buffer.len() {
            return Err(DeviceError::internal(format!(
                "{} has {} elements, {} were given",
                buffer.name,
                buffer.len(),
                values.len()
            )));
        }
        if self.host.contains_key(&arm.program.root(id).0) {
            return Err(DeviceError::internal(format!("{} lies on the host, and is only read", buffer.name)));
        }
        context.synchronize()?;
        copy_to_device(self.address(arm, id)?, &encode(buffer.dtype, values))
    }
}

/// Bytes of values in a dtype. NaN becomes -1 in an integer, as a poisoned one reads.
fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let whole = |v: &f64| if v.is_nan() { -1 } else { *v as i64 as i32 };
    match dtype {
        DType::Bf16 => values.iter().flat_map(|v| bf16::from_f64(*v).to_le_bytes()).collect(),
        DType::F32 => values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect(),
        DType::I32 | DType::U32 => values.iter().flat_map(|v| whole(v).to_le_bytes()).collect(),
        DType::U8 => values.iter().map(|v| whole(v) as u8).collect(),
    }
}

/// An allocation failure told of the whole need, not of the one piece that broke it.
fn told_whole(error: DeviceError, whole: &str, bytes: usize, free: usize) -> DeviceError {
    match error {
        DeviceError::OutOfMemory { phase, what, remedy, .. } => DeviceError::OutOfMemory {
            phase,
            what: if what == whole { what } else { format!("{whole} (at {what})") },
            need_mib: bytes as f64 / super::context::MIB,
            free_mib: free as f64 / super::context::MIB,
            remedy,
        },
        other => other,
    }
}

fn constant(stream: &Stream, at: DevPtr, buffer: &Buffer, value: f64) -> Result<(), DeviceError> {
    let n = buffer.len();
    if n == 0 {
        return Ok(());
    }
    let bytes = encode(buffer.dtype, &[value]);
    // SAFETY: `at` is the start of a buffer of `n` elements of this size in our own memory.
    unsafe {
        match bytes[..] {
            [a, b] => check(
                "cuMemsetD16Async",
                sys::cuMemsetD16Async(at.0, u16::from_le_bytes([a, b]), n, stream.raw),
            ),
            [a, b, c, d] => check(
                "cuMemsetD32Async",
                sys::cuMemsetD32Async(at.0, u32::from_le_bytes([a, b, c, d]), n, stream.raw),
            ),
            _ => stream.fill(at, bytes.first().copied().unwrap_or(0), n),
        }
    }
}

fn launch(
    kernels: &mut KernelCache,
    entry: &str,
    elements: usize,
    params: &[Param],
    stream: &Stream,
) -> Result<(), DeviceError> {
    if elements == 0 {
        return Ok(());
    }
    kernels.get(UTILITY, entry, &[], 0)?.bind(walk(elements), params)?.issue(stream.raw)
}

/// A run of local rows that is contiguous in the whole tensor too.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    /// First local element.
    start: usize,
    elements: usize,
    /// Local columns.
    row_len: usize,
    /// Global index of the first element.
    first: u64,
    /// Columns of the whole tensor.
    global_row_len: u64,
}

/// The pieces of a buffer, by its [`crate::program::Shard`].
fn pieces(buffer: &Buffer) -> Vec<Piece> {
    let row_len = buffer.shape.last().copied().unwrap_or(1).max(1);
    let rows = buffer.len() / row_len;
    let (first_col, width) = buffer.shard.cols.unwrap_or((0, row_len));
    let mut out = Vec::new();
    let mut row = 0;
    let mut add = |row: usize, global: usize, count: usize| {
        if count > 0 {
            out.push(Piece {
                start: row * row_len,
                elements: count * row_len,
                row_len,
                first: (global * width + first_col) as u64,
                global_row_len: width as u64,
            });
        }
    };
    for &(global, count) in &buffer.shard.row_blocks {
        let count = count.min(rows - row);
        add(row, global, count);
        row += count;
    }
    // Rows past the blocks count from 0, as on the CPU device.
    add(row, 0, rows - row);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::global_index;
    use crate::program::{Lifetime, Shard};

    #[test]
    fn pieces_cover_a_shard_as_the_cpu_device_counts() {
        let blocks = [vec![], vec![(4, 2), (20, 1)], vec![(7, 3)]];
        for (row_blocks, cols) in blocks.into_iter().flat_map(|b| [(b.clone(), None), (b, Some((5, 64)))]) {
            let buffer = Buffer {
                name: "w".into(),
                shape: vec![3, 8],
                dtype: DType::F32,
                lifetime: Lifetime::Weight,
                init: Init::Normal { std: 1.0 },
                view_of: None,
                shard: Shard { row_blocks, cols },
            };
            let mut seen = 0;
            for p in pieces(&buffer) {
                for i in 0..p.elements {
                    let (row, col) = (i / p.row_len, i % p.row_len);
                    let global = p.first + row as u64 * p.global_row_len + col as u64;
                    assert_eq!(global, global_index(&buffer.shard, 8, p.start + i), "{buffer:?}");
                    seen += 1;
                }
            }
            assert_eq!(seen, buffer.len());
        }
    }

    #[test]
    fn values_are_rounded_to_the_dtype() {
        assert_eq!(
            encode(DType::I32, &[3.0, f64::NAN, 4294967295.0]),
            [3, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255]
        );
        assert_eq!(encode(DType::Bf16, &[1.0]), 0x3F80u16.to_le_bytes());
        assert_eq!(encode(DType::F32, &[1.5]), 1.5f32.to_le_bytes());
    }
}
