//! Synthetic tokens.

use super::{SOURCE, THREADS};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, Param};
use crate::ops::rng::{Rng, WORDS};
use crate::ops::rope::Positions;
use crate::ops::support::{addresses, sample_words};
use crate::ops::{ArgSpec, CpuArgs, Op, Real, Sample, int_param};
use crate::program::DType;

/// Bits of the position in a token's index: sequences of up to 16 Mi tokens.
const POSITION_BITS: usize = 24;
/// Index / 4 must fit the 32 bits of the Philox counter, so 34 - 24 bits are left for the sequence.
const MAX_BATCH: usize = 1 << (34 - POSITION_BITS);

/// Uniform random tokens and their successors, as labels.
///
/// The token at global position `pos` of sequence `b` of the micro-batch is the high word of w * vocab, w being
/// word number b * 2^24 + pos of the draw; the label is the token at `pos + 1`. Nothing depends on the row that a
/// position has on this rank, so context-parallel ranks hold parts of the same sequences.
///
/// Arguments: words `[WORDS]`, ids `[tokens]`, labels `[tokens]`; tokens = batch * seq of `positions`.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenGen {
    pub positions: Positions,
    /// Size of the whole vocabulary.
    pub vocab: usize,
    pub rng: Rng,
}

impl TokenGen {
    fn tokens(&self) -> usize {
        self.positions.rows()
    }

    fn check(&self) -> Result<(), DeviceError> {
        let last = self.positions.chunks.iter().map(|(start, len)| start + len).max().unwrap_or(0);
        // The label of the last position has a position of its own.
        if last >= 1 << POSITION_BITS || self.positions.batch > MAX_BATCH {
            return Err(DeviceError::Invalid(format!(
                "token_gen: sequences of {last} tokens in a micro-batch of {}; tokens are drawn for fewer than \
                 {} and up to {MAX_BATCH}: shorten the sequence or the micro-batch",
                self.positions.batch,
                1 << POSITION_BITS
            )));
        }
        if self.vocab == 0 {
            return Err(DeviceError::Invalid("token_gen: vocab is 0; there is no token to draw".into()));
        }
        int_param(self.name(), "tokens", self.tokens())?;
        int_param(self.name(), "vocab", self.vocab)?;
        Ok(())
    }

    fn token(&self, words: &[i32], b: usize, pos: usize) -> i32 {
        let word = self.rng.word(words, (b << POSITION_BITS) + pos);
        ((word as u64 * self.vocab as u64) >> 32) as i32
    }

    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        self.check()?;
        let (words, ids, labels) = (args.ints(0)?, args.ints_out(1)?, args.ints_out(2)?);
        for (row, (id, label)) in ids.iter_mut().zip(labels).enumerate() {
            let (b, pos) = (row / self.positions.seq, self.positions.position(row));
            *id = self.token(words, b, pos);
            *label = self.token(words, b, pos + 1);
        }
        Ok(())
    }
}

impl Op for TokenGen {
    fn name(&self) -> &'static str {
        "token_gen"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("words", DType::U32, &[WORDS]).sample(Sample::Custom),
            ArgSpec::write("ids", DType::I32, &[self.tokens()]),
            ArgSpec::write("labels", DType::I32, &[self.tokens()]),
        ]
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        Some(vec![sample_words(seed, 0.0), vec![], vec![]])
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [words, ids, labels] = addresses(self.name(), args)?;
        self.check()?;
        let tokens = self.tokens();
        if tokens == 0 {
            return Ok(Issue::Nothing);
        }
        let kernel = cuda.kernel(SOURCE, "token_gen", &[], 0)?;
        // `check` has seen that all of these fit.
        let [(start0, len0), (start1, _)] = self.positions.chunks;
        let params = [
            Param::Ptr(words),
            Param::Ptr(ids),
            Param::Ptr(labels),
            Param::I32(tokens as i32),
            Param::I32(self.positions.seq as i32),
            Param::I32(start0 as i32),
            Param::I32(len0 as i32),
            Param::I32(start1 as i32),
            Param::U32(self.vocab as u32),
            Param::U32(self.rng.seed_offset),
            Param::U32(self.rng.draw),
        ];
        cuda.launch(&kernel, Config::linear(tokens.div_ceil(THREADS as usize), THREADS), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::prep::OfflinePrep;
    use crate::ops::rng::{WORD_MICRO_BATCH, WORD_STEP};
    use crate::ops::testing::run_f64;

    const VOCAB: usize = 50_257;

    fn generate(positions: Positions, words: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let op = TokenGen { positions, vocab: VOCAB, rng: Rng { seed_offset: 0, draw: 9 } };
        let mut after = run_f64(&op, &[words.to_vec(), vec![], vec![]]);
        let labels = after.remove(2);
        (after.remove(1), labels)
    }

    #[test]
    fn context_parallel_ranks_hold_parts_of_the_same_sequences() {
        let words = sample_words(4, 0.0);
        let (ids, labels) = generate(Positions { batch: 3, seq: 64, chunks: [(0, 64), (0, 0)] }, &words);
        // cp = 2: rank r holds chunks r and 3 - r of 16 tokens.
        for chunks in [[(0, 16), (48, 16)], [(16, 16), (32, 16)]] {
            let part = Positions { batch: 3, seq: 32, chunks };
            let (part_ids, part_labels) = generate(part, &words);
            for row in 0..96 {
                let whole = row / 32 * 64 + part.position(row);
                assert_eq!((part_ids[row], part_labels[row]), (ids[whole], labels[whole]), "row {row}");
            }
        }
    }

    #[test]
    fn labels_are_the_next_tokens_and_steps_differ() {
        let positions = Positions { batch: 2, seq: 7, chunks: [(0, 7), (0, 0)] };
        let mut words = sample_words(4, 0.0);
        let (ids, labels) = generate(positions, &words);
        assert_eq!(ids[1..7], labels[..6]);
        assert_eq!(ids[8..], labels[7..13]);
        assert_ne!(ids[..7], ids[7..]);
        assert!(ids.iter().chain(&labels).all(|i| (0.0..VOCAB as f64).contains(i)));
        for word in [WORD_STEP, WORD_MICRO_BATCH] {
            words[word] += 1.0;
            assert_ne!(generate(positions, &words).0, ids);
        }
    }

    #[test]
    fn tokens_cover_the_vocabulary_evenly() {
        let (ids, _) =
            generate(Positions { batch: 1, seq: 4096, chunks: [(0, 4096), (0, 0)] }, &sample_words(8, 0.0));
        let mean = ids.iter().sum::<f64>() / 4096.0 / VOCAB as f64;
        // Standard deviation of the mean of 4096 uniform values: 1 / sqrt(12 * 4096) = 0.0045.
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }

    #[test]
    fn what_the_index_cannot_hold_is_refused() {
        let positions = Positions { batch: 1, seq: 8, chunks: [((1 << 24) - 8, 8), (0, 0)] };
        let op = TokenGen { positions, vocab: 8, rng: Rng { seed_offset: 0, draw: 0 } };
        let e = op.check().unwrap_err().to_string();
        assert!(e.contains("16777216"), "{e}");
    }

    /// Kernels exist, take these parameters, and compile where NVRTC is there.
    #[test]
    fn kernels_prepare() {
        let mut offline = OfflinePrep::new("sm_90a").unwrap();
        let rng = Rng { seed_offset: 0, draw: 9 };
        offline.prepare(&TokenGen { positions: Positions::whole(3, 77), vocab: VOCAB, rng }).unwrap();
    }
}
