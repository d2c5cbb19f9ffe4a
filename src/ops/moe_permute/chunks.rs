//! The second permutation of the all-to-all dispatcher: received chunks from rank order to expert order.

use super::MAX_BINS;
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::ops::rng::philox;
use crate::ops::{ArgSpec, CpuArgs, Op, Real, Sample};
use crate::program::DType;

const SOURCE: KernelSource = KernelSource { name: "moe_permute/chunks.cu", text: include_str!("chunks.cu") };

/// One thread a chunk in the scan.
const THREADS: usize = 512;
/// Rows a thread maps; more and few blocks would be left, fewer and the scan would weigh.
const ROWS_PER_THREAD: usize = 4;

/// Row maps of the second permutation. Args: `offsets` R I32 `[E+1]` (received rows, by global expert
/// e = rank*local + l), `local_offsets` W I32 `[local+1]` (sorted rows, by local expert l), `src` W I32
/// `[rows]` (sorted row -> received row, -1 none), `dest` W I32 `[rows]` (received row -> sorted row, -1 none).
///
/// Sorted rows are ordered by (l, rank); a chunk keeps its order.
#[derive(Debug, Clone, PartialEq)]
pub struct ChunkMap {
    /// E: ranks * local.
    pub experts: usize,
    pub local: usize,
    pub rows: usize,
}

impl ChunkMap {
    fn check(&self) -> Result<(), DeviceError> {
        if self.experts == 0
            || self.experts > MAX_BINS
            || self.local == 0
            || !self.experts.is_multiple_of(self.local)
        {
            return Err(DeviceError::Invalid(format!(
                "chunk_map: {} experts, {} of them local: the kernel takes 1 to {MAX_BINS}, a multiple of the local ones",
                self.experts, self.local
            )));
        }
        if self.rows > i32::MAX as usize / 2 {
            return Err(DeviceError::Invalid(format!(
                "chunk_map: {} rows, at most 2^30 are indexed; lower the row bound",
                self.rows
            )));
        }
        Ok(())
    }
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        self.check()?;
        let (offsets, local_offsets) = (args.ints(0)?, args.ints_out(1)?);
        let (src, dest) = (args.ints_out(2)?, args.ints_out(3)?);
        src.fill(-1);
        dest.fill(-1);
        let row = |e: usize| (offsets[e].max(0) as usize).min(self.rows);
        let mut sorted = 0;
        for (l, start) in local_offsets.iter_mut().take(self.local).enumerate() {
            *start = sorted as i32;
            for e in (l..self.experts).step_by(self.local) {
                let first = row(e);
                for (i, dest) in dest[first..row(e + 1).max(first)].iter_mut().enumerate() {
                    src[sorted] = (first + i) as i32;
                    *dest = sorted as i32;
                    sorted += 1;
                }
            }
        }
        local_offsets[self.local] = sorted as i32;
        Ok(())
    }
}

impl Op for ChunkMap {
    fn name(&self) -> &'static str {
        "chunk_map"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("offsets", DType::I32, &[self.experts + 1]).sample(Sample::Custom),
            ArgSpec::write("local_offsets", DType::I32, &[self.local + 1]),
            ArgSpec::write("src", DType::I32, &[self.rows]),
            ArgSpec::write("dest", DType::I32, &[self.rows]),
        ]
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    /// Chunks of random length, about one in four empty, that end before the last row.
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        let most = self.rows / self.experts;
        let mut offsets = vec![0.0];
        for e in 0..self.experts {
            let w = philox([e as u32, 9, 0, 0], [seed as u32, (seed >> 32) as u32]);
            let len = if w[0].is_multiple_of(4) { 0 } else { w[1] as usize % (most + 1) };
            offsets.push(offsets[e] + len as f64);
        }
        Some(vec![offsets, vec![], vec![], vec![]])
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        self.check()?;
        let defines = [("EXPERTS", self.experts.to_string()), ("LOCAL", self.local.to_string())];
        let kernel = cuda.kernel(SOURCE, "chunk_map", &defines, 0)?;
        let config = Config::linear(self.rows.div_ceil(THREADS * ROWS_PER_THREAD), THREADS as u32);
        let mut params: Vec<Param> = args.iter().map(|&p| Param::Ptr(p)).collect();
        params.push(Param::I32(self.rows as i32));
        cuda.launch(&kernel, config, &params)
    }
}
