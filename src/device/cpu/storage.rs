//! Memory of the CPU device, and the call of one launch on it.

use crate::device::DeviceError;
use crate::device::digest::digest_bits;
use crate::ops::Access;
use crate::ops::cpu_args::{CpuArgs, Slot};
use crate::ops::rng::{normal_of, philox};
use crate::program::{BufId, DType, Init, Launch, Program, Shard};
use half::bf16;

/// One root buffer. Floats are kept as f32 (bf16 ones hold bf16 values), everything else as 32-bit words.
#[derive(Debug)]
enum Data {
    Float(Vec<f32>),
    Int(Vec<i32>),
}

#[derive(Debug)]
pub struct Storage {
    /// By buffer id; views have none.
    data: Vec<Option<Data>>,
    seed: u64,
}

/// FNV-1a, 64 bit: keys a buffer's random values by its name.
pub fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ b as u64).wrapping_mul(0x100_0000_01b3))
}

/// Global element index of local element `i` of a tensor whose last dimension is `cols`.
pub fn global_index(shard: &Shard, cols: usize, i: usize) -> u64 {
    let (mut row, col) = (i / cols, i % cols);
    let mut first = 0;
    for &(start, rows) in &shard.row_blocks {
        if row < rows {
            first = start;
            break;
        }
        row -= rows;
    }
    let (first_col, width) = shard.cols.unwrap_or((0, cols));
    ((first + row) * width + first_col + col) as u64
}

/// Normal(0, 1) of (seed, name, global index), exact on every device.
pub fn weight_normal(seed: u64, name: &str, index: u64) -> f32 {
    let key = seed ^ name_hash(name);
    normal_of(philox([index as u32, (index >> 32) as u32, 0, 0], [key as u32, (key >> 32) as u32]))
}

impl Storage {
    /// # Errors
    /// The bytes of a buffer that there is no memory for.
    pub fn new(program: &Program, seed: u64) -> Result<Self, u64> {
        fn filled<T: Clone>(len: usize, value: T) -> Result<Vec<T>, u64> {
            let mut all = Vec::new();
            all.try_reserve_exact(len).map_err(|_| (len as u64).saturating_mul(size_of::<T>() as u64))?;
            all.resize(len, value);
            Ok(all)
        }
        let data = program.buffers.iter().map(|b| {
            Ok(match b.view_of {
                Some(_) => None,
                None if b.dtype.is_float() => Some(Data::Float(filled(b.len(), f32::NAN)?)),
                None => Some(Data::Int(filled(b.len(), -1)?)),
            })
        });
        Ok(Self { data: data.collect::<Result<_, u64>>()?, seed })
    }

    /// Bytes of the largest buffer.
    pub fn largest(program: &Program) -> u64 {
        program.buffers.iter().map(|b| (b.len() as u64).saturating_mul(4)).max().unwrap_or(0)
    }

    /// A wrong result on demand: another first element.
    pub fn spoil(&mut self, program: &Program, id: BufId) {
        let (root, offset) = program.root(id);
        match self.data[root.0 as usize].as_mut() {
            Some(Data::Float(all)) => all.iter_mut().skip(offset).take(1).for_each(|v| *v += 1.0),
            Some(Data::Int(all)) => all.iter_mut().skip(offset).take(1).for_each(|v| *v ^= 1),
            None => {}
        }
    }

    /// Host memory of [`Storage::new`]; at most `u64::MAX`.
    pub fn bytes(program: &Program) -> u64 {
        let roots = program.buffers.iter().filter(|b| b.view_of.is_none());
        roots.fold(0, |sum, b| sum.saturating_add((b.len() as u64).saturating_mul(4)))
    }

    /// Every buffer as its `Init` says, in the order of ids; activations are poisoned.
    pub fn reset(&mut self, program: &Program) -> Result<(), DeviceError> {
        for (i, b) in program.buffers.iter().enumerate() {
            if b.init == Init::Inherit {
                continue;
            }
            let (root, offset) = program.root(BufId(i as u32));
            let copied = match &b.init {
                Init::CopyOf { source, offset } => {
                    Some(self.read(program, *source)[*offset..*offset + b.len()].to_vec())
                }
                _ => None,
            };
            let Some(data) = self.data[root.0 as usize].as_mut() else { continue };
            match data {
                Data::Float(all) => {
                    let part = &mut all[offset..offset + b.len()];
                    let round = |x: f32| if b.dtype == DType::Bf16 { bf16::from_f32(x).to_f32() } else { x };
                    match &b.init {
                        Init::Normal { std } => {
                            let cols = b.shape.last().copied().unwrap_or(1).max(1);
                            for (j, x) in part.iter_mut().enumerate() {
                                *x = round(
                                    weight_normal(self.seed, &b.name, global_index(&b.shard, cols, j))
                                        * *std as f32,
                                );
                            }
                        }
                        Init::Const { value } => part.fill(round(*value as f32)),
                        Init::Values { values } => {
                            part.iter_mut().zip(values).for_each(|(x, v)| *x = round(*v as f32));
                        }
                        Init::Poison | Init::Inherit => part.fill(f32::NAN),
                        Init::CopyOf { .. } => part.copy_from_slice(&copied.unwrap_or_default()),
                        Init::Words { .. } => {
                            return Err(DeviceError::internal(format!("{} holds floats, not words", b.name)));
                        }
                    }
                }
                Data::Int(all) => {
                    let part = &mut all[offset..offset + b.len()];
                    match &b.init {
                        Init::Words { words } => {
                            for (x, w) in part.iter_mut().zip(words) {
                                *x = *w as i32;
                            }
                        }
                        Init::Const { value } => part.fill(*value as i32),
                        _ => part.fill(-1),
                    }
                }
            }
        }
        Ok(())
    }

    /// A buffer's values as f32.
    pub fn read(&self, program: &Program, id: BufId) -> Vec<f32> {
        let (root, offset) = program.root(id);
        let len = program.buffer(id).len();
        match &self.data[root.0 as usize] {
            Some(Data::Float(v)) => v[offset..offset + len].to_vec(),
            Some(Data::Int(v)) => v[offset..offset + len].iter().map(|&x| x as f32).collect(),
            None => Vec::new(),
        }
    }

    /// Hash of the raw bits, equal to the CUDA device's for equal bits.
    pub fn digest(&self, program: &Program, id: BufId) -> u64 {
        let (root, offset) = program.root(id);
        let b = program.buffer(id);
        let range = offset..offset + b.len();
        match (&self.data[root.0 as usize], b.dtype) {
            (Some(Data::Float(v)), DType::Bf16) => {
                digest_bits(v[range].iter().map(|x| bf16::from_f32(*x).to_bits() as u32))
            }
            (Some(Data::Float(v)), _) => digest_bits(v[range].iter().map(|x| x.to_bits())),
            (Some(Data::Int(v)), _) => digest_bits(v[range].iter().map(|x| *x as u32)),
            (None, _) => 0,
        }
    }

    /// Runs one launch.
    pub fn run(&mut self, program: &Program, launch: &Launch) -> Result<(), DeviceError> {
        let specs = launch.op.args();
        let mut slots: Vec<Slot<f32>> = (0..specs.len()).map(|_| Slot::Taken).collect();
        // (root, offset, length, argument, writes)
        let mut wanted: Vec<(u32, usize, usize, usize, bool)> = launch
            .args
            .iter()
            .zip(&specs)
            .enumerate()
            .map(|(i, (&id, spec))| {
                let (root, offset) = program.root(id);
                (root.0, offset, program.buffer(id).len(), i, spec.access != Access::Read)
            })
            .collect();
        wanted.sort_unstable();
        for (root, data) in self.data.iter_mut().enumerate() {
            let mine: Vec<_> = wanted.iter().filter(|w| w.0 as usize == root).collect();
            if mine.is_empty() {
                continue;
            }
            match data {
                None => {
                    return Err(DeviceError::internal(format!(
                        "{}: buffer {root} has no memory",
                        launch.op.name()
                    )));
                }
                Some(Data::Float(v)) => carve(v, &mine, &mut slots, Slot::In, Slot::Out, launch.op.name())?,
                Some(Data::Int(v)) => {
                    carve(v, &mine, &mut slots, Slot::IntIn, Slot::IntOut, launch.op.name())?
                }
            }
        }
        launch.op.cpu_f32(&mut CpuArgs::new(launch.op.name(), slots))
    }
}

/// Cuts one root buffer into its arguments: shared slices if none writes, disjoint ones otherwise.
fn carve<'a, E, S>(
    whole: &'a mut [E],
    wanted: &[&(u32, usize, usize, usize, bool)],
    slots: &mut [S],
    read: fn(&'a [E]) -> S,
    write: fn(&'a mut [E]) -> S,
    op: &str,
) -> Result<(), DeviceError> {
    if wanted.iter().all(|w| !w.4) {
        let whole: &'a [E] = whole;
        for w in wanted {
            slots[w.3] = read(&whole[w.1..w.1 + w.2]);
        }
        return Ok(());
    }
    let mut rest = whole;
    let mut at = 0;
    for w in wanted {
        if w.1 < at {
            return Err(DeviceError::internal(format!(
                "{op}: argument {} overlaps one that is written",
                w.3
            )));
        }
        let (_, tail) = rest.split_at_mut(w.1 - at);
        let (mine, tail) = tail.split_at_mut(w.2);
        slots[w.3] = if w.4 { write(mine) } else { read(mine) };
        (rest, at) = (tail, w.1 + w.2);
    }
    Ok(())
}
