//! What the CUDA sides of ops that work in chunks of tokens share (`ssd`, `delta_net`): tiles.cuh's counterpart.

use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};

/// Alignment of the pieces of a workspace: that of an allocation, so that every vector access is aligned.
const PIECE_BYTES: usize = 256;

/// Kernels on tensor cores need compute capability 8.0.
pub fn needs_tensor_cores(op: &str, cuda: &CudaPrep) -> Result<(), DeviceError> {
    if cuda.cc >= 80 {
        return Ok(());
    }
    Err(DeviceError::Unavailable(format!(
        "{op} needs bf16 tensor cores (compute capability 8.0); this device has {}.{}; use --device cpu",
        cuda.cc / 10,
        cuda.cc % 10
    )))
}

/// Indices of kernels are 32 bits wide: of tokens, and of 16-byte vectors of a tensor `[tokens, width]`.
pub fn fits_indices(
    op: &str,
    batch: usize,
    seq: usize,
    tokens: usize,
    width: usize,
) -> Result<(), DeviceError> {
    if tokens.saturating_mul(width) <= i32::MAX as usize * 16 && seq <= i32::MAX as usize / 2 {
        return Ok(());
    }
    Err(DeviceError::Invalid(format!(
        "{op}: {batch} sequences of {seq} tokens are too many; use a smaller --micro_batch_size or --seq_length"
    )))
}

/// Bytes of tiles with padded rows, as tiles.cuh lays them out.
pub fn tile(rows: usize, cols: usize) -> usize {
    rows * (cols / 8 + 1) * 16
}

/// Bytes of a workspace of such pieces.
pub fn total<const N: usize>(pieces: [usize; N]) -> usize {
    pieces.map(|bytes| bytes.next_multiple_of(PIECE_BYTES)).iter().sum()
}

/// Addresses of the pieces of a workspace, in order.
pub fn cut<const N: usize>(pieces: [usize; N], workspace: DevPtr) -> [DevPtr; N] {
    let mut at = 0;
    pieces.map(|bytes| {
        let piece = workspace.offset(at);
        at += bytes.next_multiple_of(PIECE_BYTES);
        piece
    })
}

/// One launch of `entry`. Its parameters: the pointers, the integers, then the four of the shape.
pub struct Call<'a> {
    pub source: KernelSource,
    pub entry: &'static str,
    pub grid: [usize; 3],
    pub threads: usize,
    /// Bytes of dynamic shared memory.
    pub shared: usize,
    pub pointers: &'a [DevPtr],
    /// Before the shape.
    pub ints: &'a [usize],
}

impl Call<'_> {
    pub fn issue(
        &self,
        defines: &[(&'static str, String)],
        shape: [usize; 4],
        cuda: &mut CudaPrep,
    ) -> Result<Issue, DeviceError> {
        let kernel = cuda.kernel(self.source, self.entry, defines, self.shared as u32)?;
        let config = Config {
            grid: self.grid.map(|n| n as u32),
            block: [self.threads as u32, 1, 1],
            shared_bytes: self.shared as u32,
        };
        let pointers = self.pointers.iter().copied().map(Param::Ptr);
        let ints = self.ints.iter().chain(&shape).map(|&n| Param::I32(n as i32));
        cuda.launch(&kernel, config, &pointers.chain(ints).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_aligned_apart_and_fill_the_workspace() {
        let pieces = [1, 0, 257, 512];
        let at = cut(pieces, DevPtr(1 << 20)).map(|p| p.0 - (1 << 20));
        assert_eq!((at, total(pieces)), ([0, 256, 256, 768], 1280));
    }

    #[test]
    fn sizes_beyond_32_bits_are_refused_with_the_options_that_help() {
        fits_indices("ssd", 1, 1 << 20, 1 << 20, 1 << 14).unwrap();
        let e = fits_indices("ssd", 4, 1 << 20, 1 << 22, 1 << 14).unwrap_err().to_string();
        assert!(e.contains("4 sequences of 1048576 tokens") && e.contains("--seq_length"), "{e}");
        fits_indices("ssd", 1, usize::MAX, usize::MAX, 8).unwrap_err();
    }
}
