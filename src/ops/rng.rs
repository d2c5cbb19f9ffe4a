//! Random numbers by counter: the same draws on every device, eager and in a graph.
//!
//! Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11). Counter:
//! (element index / 4, draw id, step, micro-batch); key: the state's seed. Step and micro-batch are device
//! words that launches advance, so a replayed graph draws fresh numbers.

use serde::Serialize;

/// Indices into the step words (`U32 [WORDS]`, lifetime `StepState`); the prelude has the same numbers.
pub const WORD_SEED_LO: usize = 0;
pub const WORD_SEED_HI: usize = 1;
pub const WORD_STEP: usize = 2;
pub const WORD_MICRO_BATCH: usize = 3;
/// Bits of the f32 learning rate.
pub const WORD_LR: usize = 4;
/// Length of the buffer.
pub const WORDS: usize = 8;

/// One place in the program that draws.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Rng {
    /// Which stream of random numbers: added to the seed, so that ranks draw alike or each their own.
    pub seed_offset: u32,
    /// Unique within the program.
    pub draw: u32,
}

/// Philox4x32-10.
pub fn philox(mut c: [u32; 4], mut k: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let p0 = 0xD251_1F53u64 * c[0] as u64;
        let p1 = 0xCD9E_8D57u64 * c[2] as u64;
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

impl Rng {
    /// Four words for elements `4*quad..4*quad+4`; `words` are the step words' bits.
    pub fn draw4(&self, words: &[i32], quad: u32) -> [u32; 4] {
        let seed = (((words[WORD_SEED_HI] as u32 as u64) << 32) | words[WORD_SEED_LO] as u32 as u64)
            .wrapping_add(self.seed_offset as u64);
        philox(
            [quad, self.draw, words[WORD_STEP] as u32, words[WORD_MICRO_BATCH] as u32],
            [seed as u32, (seed >> 32) as u32],
        )
    }
    /// The word of one element.
    pub fn word(&self, words: &[i32], index: usize) -> u32 {
        self.draw4(words, (index / 4) as u32)[index % 4]
    }
}

/// A word as an exact value in [0, 1): the top 24 bits.
pub fn unit(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// Nearly normal with variance 1 from one draw, exact on every device: eight 16-bit halves summed
/// (Irwin-Hall; mean 262140, variance 8*(2^32-1)/12).
pub fn normal_of(w: [u32; 4]) -> f32 {
    let s: u32 = w.iter().map(|x| (x & 0xffff) + (x >> 16)).sum();
    (s as i32 - 262_140) as f32 * 1.868_812_4e-5
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the Random123 distribution (kat_vectors, philox4x32 10).
    #[test]
    fn philox_gives_the_published_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let n = 20_000u32;
        let x: Vec<f64> = (0..n).map(|i| normal_of(philox([i, 0, 0, 0], [7, 0])) as f64).collect();
        let mean = x.iter().sum::<f64>() / n as f64;
        let var = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.03 && (var - 1.0).abs() < 0.03, "mean {mean}, variance {var}");
    }
}
