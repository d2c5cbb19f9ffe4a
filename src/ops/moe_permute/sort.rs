//! Stable sort of (token, choice) pairs by expert, dropless or with a capacity.

use super::MAX_BINS;
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::ops::rng::{WORD_MICRO_BATCH, WORDS, philox};
use crate::ops::{ArgSpec, CpuArgs, Op, Real, Sample};
use crate::program::DType;

const SOURCE: KernelSource = KernelSource { name: "moe_permute/sort.cu", text: include_str!("sort.cu") };

/// Pairs of one block, one a thread: the unit of the per-block histograms.
const BLOCK_PAIRS: usize = 1024;

/// Where every pair goes. Args: `index` R I32 `[T,K]`, `probs` R f32 `[T,K]`, `words` R U32, `offsets` W I32 `[bins+1]`,
/// `dest` W I32 `[T*K]` (row of the pair, -1 dropped), `src` W I32 `[R]` (pair of the row, -1 none), `fault` U
/// I32 `[1]` (set on overflow and never cleared: a later micro-batch must not hide an earlier one's), `tally` U I32
/// `[micro-batches, 3]`: the micro-batch's line becomes its pairs, those dropped, and the rows that pad.
///
/// Bin = expert, or expert modulo `experts` (one process plays all ranks). Pairs of experts outside the bins
/// are dropped. Bins follow one another without gaps and pairs keep their order; rows beyond R are dropped, offsets
/// end at R, and `fault` becomes 1. With `capacity` a bin keeps that many pairs, see [`Capacity`], in the order of pairs.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeSort {
    pub tokens: usize,
    pub topk: usize,
    /// Bins.
    pub experts: usize,
    pub modulo: bool,
    pub capacity: Option<Capacity>,
    /// R: rows that buffers are sized for.
    pub rows: usize,
    pub tally: Tally,
}

/// Which line of `tally` a launch writes: the micro-batch's by the step words, so that one graph serves them all and a
/// recomputed launch writes the same again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tally {
    /// Micro-batches of a step: lines.
    pub micro_batches: usize,
    /// Between the numbers of neighbouring micro-batches of this rank (data-parallel ranks take them in turn).
    pub stride: usize,
}

impl Tally {
    /// Pairs, dropped pairs, rows that pad.
    pub const COLUMNS: usize = 3;

    fn line(self, words: &[i32]) -> usize {
        words[WORD_MICRO_BATCH] as u32 as usize / self.stride % self.micro_batches
    }
}

/// Most pairs of a bin (Megatron-Core `moe_expert_capacity_factor`, `moe_token_drop_policy`,
/// `moe_pad_expert_input_to_capacity`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    pub rows: usize,
    /// Bin b owns rows b*rows..(b+1)*rows, whatever it gets; otherwise bins follow one another without gaps.
    pub padded: bool,
    /// The first pairs are kept, otherwise those of highest probability (lower pair first among equals).
    pub by_position: bool,
}

impl MoeSort {
    fn pairs(&self) -> usize {
        self.tokens * self.topk
    }
    fn blocks(&self) -> usize {
        self.pairs().div_ceil(BLOCK_PAIRS).max(1)
    }
    fn check(&self) -> Result<(), DeviceError> {
        if self.experts == 0 || self.experts > MAX_BINS {
            return Err(DeviceError::Invalid(format!(
                "moe_sort: {} experts, the kernel takes 1 to {MAX_BINS}; raise the expert parallelism",
                self.experts
            )));
        }
        if self.pairs() > i32::MAX as usize / 2 || self.rows > i32::MAX as usize / 2 {
            return Err(DeviceError::Invalid(format!(
                "moe_sort: {} token choices and {} rows, at most 2^30 are indexed; lower the micro-batch",
                self.pairs(),
                self.rows
            )));
        }
        let Tally { micro_batches, stride } = self.tally;
        if [micro_batches, stride].iter().any(|n| *n == 0 || u32::try_from(*n).is_err()) {
            return Err(DeviceError::internal(format!(
                "moe_sort: {micro_batches} micro-batches, stride {stride}"
            )));
        }
        match self.capacity {
            Some(c) if self.most_rows(c) > self.rows => Err(DeviceError::Invalid(format!(
                "moe_sort: {} experts of capacity {} need {} rows, there are {}; raise the row bound",
                self.experts,
                c.rows,
                self.most_rows(c),
                self.rows
            ))),
            _ => Ok(()),
        }
    }
    /// Rows that bins of a capacity can need.
    fn most_rows(&self, c: Capacity) -> usize {
        let all = c.rows.saturating_mul(self.experts);
        if c.padded { all } else { all.min(self.pairs()) }
    }
    fn bin(&self, expert: i32) -> Option<usize> {
        let expert = usize::try_from(expert).ok()?;
        if self.modulo { Some(expert % self.experts) } else { Some(expert).filter(|&e| e < self.experts) }
    }

    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        self.check()?;
        let (index, probs, words) = (args.ints(0)?, args.input(1)?, args.ints(2)?);
        let (offsets, dest) = (args.ints_out(3)?, args.ints_out(4)?);
        let (src, fault, tally) = (args.ints_out(5)?, args.ints_out(6)?, args.ints_out(7)?);
        let mut bins: Vec<Vec<usize>> = vec![Vec::new(); self.experts];
        for (pair, &expert) in index.iter().enumerate() {
            if let Some(b) = self.bin(expert) {
                bins[b].push(pair);
            }
        }
        let routed: usize = bins.iter().map(Vec::len).sum();
        dest.fill(-1);
        src.fill(-1);
        offsets[0] = 0;
        let mut end = 0;
        for (b, pairs) in bins.iter_mut().enumerate() {
            let first = end;
            match self.capacity {
                Some(c) => {
                    if !c.by_position {
                        // Stable: the lower pair stays first among equal probabilities.
                        pairs.sort_by(|&i, &j| probs[j].f64().total_cmp(&probs[i].f64()));
                    }
                    pairs.truncate(c.rows);
                    pairs.sort_unstable();
                    end += if c.padded { c.rows } else { pairs.len() };
                }
                None => end += pairs.len(),
            }
            // Rows beyond R are dropped.
            for (row, &pair) in (first..self.rows).zip(pairs.iter()) {
                dest[pair] = row as i32;
                src[row] = pair as i32;
            }
            offsets[b + 1] = end.min(self.rows) as i32;
        }
        fault[0] |= (end > self.rows) as i32;
        let kept = src.iter().filter(|pair| **pair >= 0).count();
        let padded = self.capacity.filter(|c| c.padded).map_or(0, |c| c.rows * self.experts - kept);
        let first = Tally::COLUMNS * self.tally.line(words);
        for (cell, count) in tally[first..].iter_mut().zip([routed, routed - kept, padded]) {
            *cell = count as i32;
        }
        Ok(())
    }
}

impl Op for MoeSort {
    fn name(&self) -> &'static str {
        "moe_sort"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let shape = [self.tokens, self.topk];
        vec![
            ArgSpec::read("index", DType::I32, &shape).sample(Sample::Custom),
            ArgSpec::read("probs", DType::F32, &shape).sample(Sample::Custom),
            ArgSpec::read("words", DType::U32, &[WORDS]).sample(Sample::Custom),
            ArgSpec::write("offsets", DType::I32, &[self.experts + 1]),
            ArgSpec::write("dest", DType::I32, &[self.pairs()]),
            ArgSpec::write("src", DType::I32, &[self.rows]),
            ArgSpec::update("fault", DType::I32, &[1]).sample(Sample::Custom),
            ArgSpec::update("tally", DType::I32, &[self.tally.micro_batches, Tally::COLUMNS])
                .sample(Sample::Custom),
        ]
    }
    /// Histograms of each block; with a capacity also the pairs sorted by bin and the bins' bounds.
    fn workspace(&self) -> usize {
        let histograms = self.blocks() * self.experts;
        let sorted = if self.capacity.is_some() { self.pairs() + self.experts + 1 } else { 0 };
        (histograms + sorted) * DType::I32.size()
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    /// A token's choices are consecutive experts, hence distinct; one token in three begins at expert 0, so
    /// that its bin is long. Experts span three times the bins with `modulo`. Probabilities repeat, so that
    /// ties are met.
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        let experts = if self.modulo { self.experts * 3 } else { self.experts };
        let (mut index, mut probs) = (Vec::new(), Vec::new());
        for t in 0..self.tokens {
            for k in 0..self.topk {
                let draw =
                    |at: usize| philox([t as u32, at as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
                let token = draw(0);
                let first = if token[0].is_multiple_of(3) { 0 } else { token[1] as usize % experts };
                index.push(((first + k) % experts) as f64);
                probs.push((draw(1 + k)[0] % 64) as f64 / 64.0);
            }
        }
        let mut words = vec![0.0; WORDS];
        words[WORD_MICRO_BATCH] = ((self.tally.micro_batches - 1) * self.tally.stride) as f64;
        // Lines of other micro-batches stay as they are.
        let tally = vec![7.0; self.tally.micro_batches * Tally::COLUMNS];
        Some(vec![index, probs, words, vec![], vec![], vec![], vec![0.0], tally])
    }
    cpu_reference!();
    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], workspace: DevPtr) -> Result<Issue, DeviceError> {
        self.check()?;
        let flag = |on: Option<bool>| (on.unwrap_or(false) as u32).to_string();
        let defines = [
            ("BINS", self.experts.to_string()),
            ("PADDED", flag(self.capacity.map(|c| c.padded))),
            ("BY_POSITION", flag(self.capacity.map(|c| c.by_position))),
        ];
        let histogram = cuda.kernel(SOURCE, "moe_histogram", &defines, 0)?;
        let scatter = cuda.kernel(SOURCE, "moe_scatter", &defines, 0)?;
        let select = cuda.kernel(SOURCE, "moe_select", &defines, 0)?;

        let word = DType::I32.size();
        let blocks = self.blocks();
        let counts = workspace;
        let bounds = counts.offset(blocks * self.experts * word);
        let sorted = bounds.offset((self.experts + 1) * word);
        let (index, probs, words, offsets) = (args[0], args[1], args[2], args[3]);
        let (dest, src, fault, tally) = (args[4], args[5], args[6], args[7]);
        let (pairs, rows) = (Param::I32(self.pairs() as i32), Param::I32(self.rows as i32));
        let modulo = Param::I32(self.modulo as i32);
        let config = Config::linear(blocks, BLOCK_PAIRS as u32);

        let histogram =
            cuda.launch(&histogram, config, &[index.into(), counts.into(), src.into(), pairs, rows, modulo])?;
        // With a capacity the first sort goes to the workspace, without a limit on rows.
        let (to_offsets, to_src, limit) = match self.capacity {
            None => (offsets, src, rows),
            Some(_) => (bounds, sorted, pairs),
        };
        let scatter = cuda.launch(
            &scatter,
            config,
            &[
                index.into(),
                counts.into(),
                words.into(),
                to_offsets.into(),
                dest.into(),
                to_src.into(),
                fault.into(),
                tally.into(),
                pairs,
                limit,
                modulo,
                Param::I32(self.capacity.map_or(-1, |c| c.rows as i32)),
                Param::U32(self.tally.stride as u32),
                Param::U32(self.tally.micro_batches as u32),
            ],
        )?;
        let mut sequence = vec![histogram, scatter];
        if let Some(capacity) = self.capacity {
            sequence.push(cuda.launch(
                &select,
                Config::linear(self.experts, BLOCK_PAIRS as u32),
                &[
                    probs.into(),
                    bounds.into(),
                    sorted.into(),
                    offsets.into(),
                    dest.into(),
                    src.into(),
                    Param::I32(capacity.rows as i32),
                ],
            )?);
        }
        Ok(Issue::Many(sequence))
    }
}
