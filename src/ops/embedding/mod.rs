//! Token embedding: a gather of table rows, and the deterministic scatter-add of its gradient.

use super::support::{self, Draws, addresses, aligned};
use super::{ArgSpec, CpuArgs, Op, Real, Sample, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;
use std::collections::BTreeMap;

const SOURCE: KernelSource = KernelSource { name: "embedding/kernel.cu", text: include_str!("kernel.cu") };
/// Threads of a forward block; each moves eight elements.
const FWD_THREADS: u32 = 256;
/// Blocks beyond which the forward kernel strides: 16 a multiprocessor of 132 keep every one full.
const FWD_BLOCKS: usize = 2112;
/// Most threads of a backward block: the hardware's limit.
const BWD_MAX_THREADS: usize = 1024;

/// out`[t]` = table[ids`[t]` - vocab_start], zeros for ids that lie on another rank.
///
/// Arguments: ids `[tokens]`, table `[vocab, hidden]`, out `[tokens, hidden]`. `vocab` counts the local rows.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddingFwd {
    pub tokens: usize,
    /// Rows of the local table.
    pub vocab: usize,
    /// Id of its first row.
    pub vocab_start: usize,
    /// Multiple of 8.
    pub hidden: usize,
}

/// dtable[id - vocab_start] += sum over the tokens with that id of dout, in token order, rounded once.
///
/// Arguments: ids `[tokens]`, dout `[tokens, hidden]`, dtable `[vocab, hidden]` (updated).
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddingBwd {
    pub tokens: usize,
    pub vocab: usize,
    pub vocab_start: usize,
    /// Multiple of 8.
    pub hidden: usize,
    /// Bf16 or F32.
    pub grad: DType,
}

/// Local row of `id`, if it is one of `vocab` rows from `start` on.
fn local_row(id: i32, start: usize, vocab: usize) -> Option<usize> {
    let row = usize::try_from(id).ok()?.checked_sub(start)?;
    (row < vocab).then_some(row)
}

/// Ids for `selftest`: one in four is the same id (long lists in the backward), one in eight lies outside.
fn sample_ids(seed: u64, tokens: usize, vocab: usize, start: usize) -> Vec<f64> {
    let draws = Draws { seed, stream: 0 };
    (0..tokens)
        .map(|t| match t % 8 {
            1 | 6 => (start + vocab / 2) as f64,
            3 if start > 0 => (start - 1) as f64,
            3 => (start + vocab) as f64,
            _ => (start + draws.below(t, vocab)) as f64,
        })
        .collect()
}

fn check(op: &str, tokens: usize, vocab: usize, start: usize, hidden: usize) -> Result<(), DeviceError> {
    check_multiple(op, "hidden", hidden, support::VECTOR)?;
    int_param(op, "tokens", tokens)?;
    int_param(op, "vocab_start + vocab", start + vocab)?;
    Ok(())
}

impl EmbeddingFwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (ids, table, out) = (args.ints(0)?, args.input(1)?, args.output(2)?);
        if self.hidden == 0 {
            return Ok(());
        }
        out.par_chunks_mut(self.hidden).zip(ids).for_each(|(out, &id)| {
            match local_row(id, self.vocab_start, self.vocab) {
                Some(row) => out.copy_from_slice(&table[row * self.hidden..][..self.hidden]),
                None => out.fill(T::default()),
            }
        });
        Ok(())
    }
}

impl Op for EmbeddingFwd {
    fn name(&self) -> &'static str {
        "embedding_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("ids", DType::I32, &[self.tokens]).sample(Sample::Custom),
            ArgSpec::read("table", DType::Bf16, &[self.vocab, self.hidden]),
            ArgSpec::write("out", DType::Bf16, &[self.tokens, self.hidden]),
        ]
    }
    /// Reads one row a token, not the whole table.
    fn bytes(&self) -> f64 {
        (self.tokens * (DType::I32.size() + 2 * self.hidden * DType::Bf16.size())) as f64
    }
    /// A copy is exact.
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        let table = Draws { seed, stream: 1 }.bf16_normals(self.vocab * self.hidden, 1.0);
        Some(vec![sample_ids(seed, self.tokens, self.vocab, self.vocab_start), table, vec![]])
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [ids, table, out] = addresses(self.name(), args)?;
        check(self.name(), self.tokens, self.vocab, self.vocab_start, self.hidden)?;
        let vectors = self.tokens * self.hidden / support::VECTOR;
        if vectors == 0 {
            return Ok(Issue::Nothing);
        }
        aligned(self.name(), args)?;
        let kernel = cuda.kernel(SOURCE, "embedding_fwd", &[], 0)?;
        let blocks = vectors.div_ceil(FWD_THREADS as usize).min(FWD_BLOCKS);
        let params = [
            Param::Ptr(ids),
            Param::Ptr(table),
            Param::Ptr(out),
            Param::U32(int_param(self.name(), "tokens * hidden / 8", vectors)? as u32),
            Param::I32(self.vocab as i32),
            Param::I32(self.vocab_start as i32),
            Param::I32(int_param(self.name(), "hidden", self.hidden)?),
        ];
        cuda.launch(&kernel, Config::linear(blocks, FWD_THREADS), &params)
    }
}

impl EmbeddingBwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (ids, dout, dtable) = (args.ints(0)?, args.input(1)?, args.output(2)?);
        let mut tokens_of: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (t, &id) in ids.iter().enumerate() {
            if let Some(row) = local_row(id, self.vocab_start, self.vocab) {
                tokens_of.entry(row).or_default().push(t);
            }
        }
        for (row, tokens) in tokens_of {
            for (c, d) in dtable[row * self.hidden..][..self.hidden].iter_mut().enumerate() {
                let sum: T = tokens.iter().map(|t| dout[t * self.hidden + c]).sum();
                let total = *d + sum;
                *d = if self.grad == DType::Bf16 { total.bf16() } else { total.f32() };
            }
        }
        Ok(())
    }
}

impl Op for EmbeddingBwd {
    fn name(&self) -> &'static str {
        "embedding_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("ids", DType::I32, &[self.tokens]).sample(Sample::Custom),
            ArgSpec::read("dout", DType::Bf16, &[self.tokens, self.hidden]),
            ArgSpec::update("dtable", self.grad, &[self.vocab, self.hidden]),
        ]
    }
    fn flops(&self) -> f64 {
        (self.tokens * self.hidden) as f64
    }
    /// At most one gradient row is read and written a token (fewer when ids repeat).
    fn bytes(&self) -> f64 {
        let rows = self.tokens.min(self.vocab);
        (self.tokens * (DType::I32.size() + self.hidden * DType::Bf16.size())
            + 2 * rows * self.hidden * self.grad.size()) as f64
    }
    /// The longest sum has every token.
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(self.grad, self.tokens + 1, 0)
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        Some(vec![
            sample_ids(seed, self.tokens, self.vocab, self.vocab_start),
            Draws { seed, stream: 1 }.bf16_normals(self.tokens * self.hidden, 1.0),
            Draws { seed, stream: 2 }.bf16_normals(self.vocab * self.hidden, 1.0),
        ])
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [ids, dout, dtable] = addresses(self.name(), args)?;
        check(self.name(), self.tokens, self.vocab, self.vocab_start, self.hidden)?;
        let grad = support::float_name(self.name(), self.grad)?;
        if self.tokens == 0 || self.hidden == 0 {
            return Ok(Issue::Nothing);
        }
        aligned(self.name(), args)?;
        // One thread for each eight columns, so that one block scans the ids once for a whole row.
        let threads = (self.hidden / support::VECTOR).next_multiple_of(32).min(BWD_MAX_THREADS);
        let defines = [("THREADS", threads.to_string()), ("GRAD", grad)];
        let kernel = cuda.kernel(SOURCE, "embedding_bwd", &defines, 0)?;
        let column_blocks = self.hidden.div_ceil(threads * support::VECTOR);
        let config = Config {
            grid: [self.tokens as u32, column_blocks as u32, 1],
            block: [threads as u32, 1, 1],
            shared_bytes: 0,
        };
        let params = [
            Param::Ptr(ids),
            Param::Ptr(dout),
            Param::Ptr(dtable),
            Param::I32(self.tokens as i32),
            Param::I32(self.vocab as i32),
            Param::I32(self.vocab_start as i32),
            Param::I32(int_param(self.name(), "hidden", self.hidden)?),
        ];
        cuda.launch(&kernel, config, &params)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check_f32_against_f64, check_op_gradient, inputs, normals, run_f64};
    use super::*;
    use crate::device::cuda::prep::OfflinePrep;

    #[test]
    fn rows_outside_the_rank_are_zero() {
        let op = EmbeddingFwd { tokens: 4, vocab: 3, vocab_start: 10, hidden: 8 };
        let table: Vec<f64> = (0..24).map(f64::from).collect();
        let out = &run_f64(&op, &[vec![12.0, 9.0, 13.0, -1.0], table.clone(), vec![]])[2];
        assert_eq!(out[..8], table[16..]);
        assert!(out[8..].iter().all(|x| *x == 0.0));
    }

    #[test]
    fn backward_agrees_with_finite_differences() {
        for (tokens, vocab, vocab_start) in [(1, 1, 0), (7, 5, 3), (33, 11, 0)] {
            let forward = EmbeddingFwd { tokens, vocab, vocab_start, hidden: 8 };
            let grad = DType::F32;
            let backward = EmbeddingBwd { tokens, vocab, vocab_start, hidden: 8, grad };
            let values = inputs(&forward, 1);
            let dout = normals(tokens * 8, 2, 1.0);
            let zeros = vec![0.0; vocab * 8];
            let dtable = &run_f64(&backward, &[values[0].clone(), dout.clone(), zeros])[2];
            check_op_gradient(&forward, &values, &[(2, &dout)], 1, dtable);
        }
    }

    /// Every token has the same id: one row sums them all on top of what was there.
    #[test]
    fn repeated_ids_accumulate() {
        let op = EmbeddingBwd { tokens: 9, vocab: 2, vocab_start: 0, hidden: 8, grad: DType::F32 };
        let dout: Vec<f64> = (0..72).map(|i| (i / 8) as f64).collect();
        let dtable = &run_f64(&op, &[vec![1.0; 9], dout, vec![0.5; 16]])[2];
        assert_eq!(dtable[..8], [0.5; 8]);
        assert_eq!(dtable[8..], [36.5; 8]);
    }

    #[test]
    fn rounding_is_within_tolerance() {
        for grad in [DType::Bf16, DType::F32] {
            for (tokens, vocab, vocab_start) in [(1, 3, 0), (7, 4, 4), (130, 17, 5)] {
                let forward = EmbeddingFwd { tokens, vocab, vocab_start, hidden: 24 };
                check_f32_against_f64(&forward, &inputs(&forward, 3));
                let backward = EmbeddingBwd { tokens, vocab, vocab_start, hidden: 24, grad };
                check_f32_against_f64(&backward, &inputs(&backward, 4));
            }
        }
    }

    /// Kernels exist, take these parameters, and compile where NVRTC is there.
    #[test]
    fn kernels_prepare() {
        let mut offline = OfflinePrep::new("sm_90a").unwrap();
        for (tokens, hidden, grad) in
            [(1, 8, DType::Bf16), (7, 2048, DType::F32), (8191, 16_384, DType::Bf16)]
        {
            let (vocab, vocab_start) = (50_257, 3);
            offline.prepare(&EmbeddingFwd { tokens, vocab, vocab_start, hidden }).unwrap();
            offline.prepare(&EmbeddingBwd { tokens, vocab, vocab_start, hidden, grad }).unwrap();
        }
        let odd = EmbeddingFwd { tokens: 1, vocab: 1, vocab_start: 0, hidden: 12 };
        let e = offline.prepare(&odd).unwrap_err().to_string();
        assert!(e.contains("hidden is 12"), "{e}");
    }
}
