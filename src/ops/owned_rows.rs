//! What ops share whose rows are tokens, or copies of tokens sorted by the expert that owns them: activations and biases.
//! Rows past the last expert's are padding.

use super::rng::{normal_of, philox};
use super::support::VECTOR;
use super::{ArgSpec, Real, check_multiple, int_param};
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

const MAX_THREADS: usize = 256;

/// `[rows, ffn]` of an activation.
#[derive(Debug, Clone, Copy)]
pub struct OwnedRows {
    pub rows: usize,
    /// Columns of the result, a multiple of 8.
    pub ffn: usize,
    /// Local experts; `None`: rows are tokens.
    pub experts: Option<usize>,
}

impl OwnedRows {
    /// Adds probs R f32 `[rows]` and offsets R I32 `[experts + 1]` where experts own the rows.
    pub fn specs(&self, args: &mut Vec<ArgSpec>) {
        if let Some(experts) = self.experts {
            args.push(ArgSpec::read("probs", DType::F32, &[self.rows]));
            args.push(ArgSpec::read("offsets", DType::I32, &[experts + 1]));
        }
    }

    /// Launches the kernel of plain rows or that of owned ones: its parameters are `args`, `experts` if owned, ffn, column blocks.
    pub fn forward(
        &self,
        cuda: &mut CudaPrep,
        op: &str,
        source: KernelSource,
        [plain, owned]: [&'static str; 2],
        args: &[DevPtr],
    ) -> Result<Issue, DeviceError> {
        let entry = if self.experts.is_some() { owned } else { plain };
        self.launch(cuda, op, source, entry, args, Some(row_blocks(self.ffn).1))
    }

    /// The same; of owned rows a block takes a whole one, since it sums the probability's gradient over it, and there is no
    /// parameter for column blocks.
    pub fn backward(
        &self,
        cuda: &mut CudaPrep,
        op: &str,
        source: KernelSource,
        [plain, owned]: [&'static str; 2],
        args: &[DevPtr],
    ) -> Result<Issue, DeviceError> {
        match self.experts {
            Some(_) => self.launch(cuda, op, source, owned, args, None),
            None => self.launch(cuda, op, source, plain, args, Some(row_blocks(self.ffn).1)),
        }
    }

    /// `column_blocks`: blocks side by side in a row, told to the kernel; `None`: a block a row.
    fn launch(
        &self,
        cuda: &mut CudaPrep,
        op: &str,
        source: KernelSource,
        entry: &'static str,
        args: &[DevPtr],
        column_blocks: Option<usize>,
    ) -> Result<Issue, DeviceError> {
        if self.rows == 0 {
            return Ok(Issue::Nothing);
        }
        check_multiple(op, "ffn", self.ffn, VECTOR)?;
        let blocks = self.rows * column_blocks.unwrap_or(1);
        int_param(op, "rows * column blocks", blocks)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        if let Some(experts) = self.experts {
            params.push(int_param(op, "experts", experts)?.into());
        }
        params.push(int_param(op, "ffn", self.ffn)?.into());
        if let Some(n) = column_blocks {
            params.push(int_param(op, "column blocks", n)?.into());
        }
        let kernel = cuda.kernel(source, entry, &[], 0)?;
        cuda.launch(&kernel, Config::linear(blocks, row_blocks(self.ffn).0 as u32), &params)
    }
}

/// Every row's gradient, `width` columns of `dx` each; what `row_gradient` returns goes to `dprobs`.
pub fn row_gradients<T: Real>(
    dx: &mut [T],
    width: usize,
    dprobs: Option<&mut [T]>,
    row_gradient: impl Fn(usize, &mut [T]) -> T + Sync,
) {
    let rows = dx.par_chunks_mut(width).enumerate();
    match dprobs {
        Some(dprobs) => rows.zip(dprobs).for_each(|((row, out), dprob)| *dprob = row_gradient(row, out)),
        None => rows.for_each(|(row, out)| {
            row_gradient(row, out);
        }),
    }
}

/// Rows before the padding: `offsets[experts]`, never more than there are.
pub fn used_rows(offsets: &[i32], experts: usize, rows: usize) -> usize {
    usize::try_from(offsets[experts]).unwrap_or(0).min(rows)
}

/// (threads of a block, blocks side by side in a row) that waste the fewest threads.
pub fn row_blocks(ffn: usize) -> (usize, usize) {
    let vectors = ffn / VECTOR;
    let blocks = vectors.div_ceil(MAX_THREADS);
    (vectors.div_ceil(blocks).next_multiple_of(32), blocks)
}

/// Structured inputs: three quarters of the rows belong to experts, in uneven shares.
pub fn sample_routed(seed: u64, rows: usize, experts: usize) -> (Vec<f64>, Vec<f64>) {
    let used = rows - rows / 4;
    let word = |i: usize, key: u32| philox([i as u32, key, 0, 0], [seed as u32, (seed >> 32) as u32])[0];
    let probs = (0..rows).map(|i| ((word(i, 1) >> 8) as f32 / 16_777_216.0) as f64).collect();
    let mut inner: Vec<usize> = (1..experts).map(|e| word(e, 2) as usize % (used + 1)).collect();
    inner.sort_unstable();
    let mut offsets = vec![0.0];
    offsets.extend(inner.into_iter().map(|o| o as f64));
    if experts > 0 {
        offsets.push(used as f64);
    }
    (probs, offsets)
}

/// Normal(0, 1) values of a bf16 buffer.
pub fn sample_bf16(seed: u64, key: u32, n: usize) -> Vec<f64> {
    let draw = |i: usize| normal_of(philox([i as u32, key, 0, 0], [seed as u32, (seed >> 32) as u32]));
    (0..n).map(|i| draw(i).bf16() as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_every_row_length() {
        for ffn in (8..40_000).step_by(8) {
            let (threads, blocks) = row_blocks(ffn);
            assert!(threads <= MAX_THREADS && threads % 32 == 0 && threads * blocks * VECTOR >= ffn);
        }
    }
}
