//! Frequencies of the rotary embedding, and their scaling for contexts longer than the model was first trained on.

use serde::{Deserialize, Serialize};

/// `rope_scaling` of a model's published configuration.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RopeScaling {
    Llama3(Llama3),
    Yarn(Yarn),
}

/// Llama 3.1 and later: waves longer than the original context are slowed by `factor`, short ones are kept, and
/// those between are blended.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Llama3 {
    pub factor: f64,
    pub low_freq_factor: f64,
    pub high_freq_factor: f64,
    /// Context length of the original training, in tokens.
    pub original_max_position: f64,
}

/// YaRN (Peng et al., arXiv:2309.00071, section 3.2): pairs that turn more than `beta_fast` times within the original
/// context keep their frequency, those that turn less than `beta_slow` times are slowed by `factor`, with a linear
/// ramp over the pairs between.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Yarn {
    pub factor: f64,
    /// Context length of the original training, in tokens.
    pub original_max_position: f64,
    pub beta_fast: f64,
    pub beta_slow: f64,
    /// Weights of the two temperatures: of the rotated elements, and of all elements of a query and key.
    pub mscale: f64,
    pub mscale_all_dim: f64,
    /// The ramp's ends are whole pairs.
    pub rounded: bool,
}

impl Llama3 {
    /// The scaled frequency, in radians per token.
    fn apply(&self, freq: f64) -> f64 {
        let waves = self.original_max_position * freq / std::f64::consts::TAU;
        if waves > self.high_freq_factor {
            return freq;
        }
        if waves < self.low_freq_factor {
            return freq / self.factor;
        }
        let kept = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
        (1.0 - kept) * freq / self.factor + kept * freq
    }
}

impl Yarn {
    /// Temperature 0.1 m ln(factor) + 1 (the paper's section 3.4; 1 for a factor of at most 1).
    fn temperature(&self, m: f64) -> f64 {
        if self.factor > 1.0 { 0.1 * m * self.factor.ln() + 1.0 } else { 1.0 }
    }

    /// Factor of the attention scores, beside 1 / sqrt(d).
    pub fn score_factor(&self) -> f64 {
        self.temperature(self.mscale_all_dim).powi(2)
    }

    /// Share of pair `i` that keeps its frequency, 0 to 1.
    fn kept(&self, i: usize, rotary_dim: usize, base: f64) -> f64 {
        // The pair that turns `turns` times within the original context.
        let pair = |turns: f64| {
            rotary_dim as f64 * (self.original_max_position / (turns * std::f64::consts::TAU)).ln()
                / (2.0 * base.ln())
        };
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.rounded {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(rotary_dim as f64 - 1.0));
        // A ramp without length would divide by zero; the authors' code makes it a thousandth of a pair.
        let length = if high == low { 1e-3 } else { high - low };
        1.0 - ((i as f64 - low) / length).clamp(0.0, 1.0)
    }
}

/// Radians per token of pair i, for i < rotary_dim / 2: base^(-2i / rotary_dim), scaled.
pub fn frequencies(rotary_dim: usize, base: f64, scaling: Option<RopeScaling>) -> Vec<f64> {
    (0..rotary_dim / 2)
        .map(|i| {
            let freq = base.powf(-2.0 * i as f64 / rotary_dim as f64);
            match scaling {
                None => freq,
                Some(RopeScaling::Llama3(s)) => s.apply(freq),
                Some(RopeScaling::Yarn(s)) => {
                    let kept = s.kept(i, rotary_dim, base);
                    (1.0 - kept) * freq / s.factor + kept * freq
                }
            }
        })
        .collect()
}

/// Factor of the rotated elements.
pub fn amplitude(scaling: Option<RopeScaling>) -> f64 {
    match scaling {
        Some(RopeScaling::Yarn(s)) => s.temperature(s.mscale) / s.temperature(s.mscale_all_dim),
        _ => 1.0,
    }
}

/// Frequencies as a kernel's table: the shortest digits that read back as the same f64.
pub fn table(frequencies: &[f64]) -> String {
    let digits: Vec<String> = frequencies.iter().map(|f| format!("{f:e}")).collect();
    if digits.is_empty() { "0.0".into() } else { digits.join(",") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEEPSEEK: Yarn = Yarn {
        factor: 40.0,
        original_max_position: 4096.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 1.0,
        rounded: true,
    };

    /// Llama 3.1: base 500000, factor 8, low 1, high 4, original context 8192, head 128.
    #[test]
    fn llama3_keeps_short_waves_and_slows_long_ones() {
        let plain = frequencies(128, 5e5, None);
        let scaling = Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192.0,
        };
        let scaled = frequencies(128, 5e5, Some(RopeScaling::Llama3(scaling)));
        let mut kinds = [0; 3];
        for (p, s) in plain.iter().zip(&scaled) {
            let wavelength = std::f64::consts::TAU / p;
            if wavelength < 8192.0 / 4.0 {
                assert_eq!(s, p);
                kinds[0] += 1;
            } else if wavelength > 8192.0 {
                assert_eq!(*s, p / 8.0);
                kinds[1] += 1;
            } else {
                let smooth = (8192.0 / wavelength - 1.0) / 3.0;
                assert!((s - ((1.0 - smooth) * p / 8.0 + smooth * p)).abs() < 1e-15);
                kinds[2] += 1;
            }
        }
        assert!(kinds.iter().all(|n| *n > 0), "{kinds:?}");
    }

    /// DeepSeek-V3: 64 rotated elements, base 10000, 4096 tokens times 40. The pair that turns 32 times within 4096
    /// tokens is 64 ln(4096 / 64 pi) / (2 ln 10000) = 10.47, the one that turns once 22.51.
    #[test]
    fn yarn_ramps_between_fast_and_slow_pairs() {
        let plain = frequencies(64, 1e4, None);
        let scaled = frequencies(64, 1e4, Some(RopeScaling::Yarn(DEEPSEEK)));
        for (i, (p, s)) in plain.iter().zip(&scaled).enumerate() {
            let slowed = ((i as f64 - 10.0) / 13.0).clamp(0.0, 1.0);
            let want = p * (1.0 - slowed) + p / 40.0 * slowed;
            assert!((s - want).abs() < 1e-15 * p, "pair {i}: {s}, not {want}");
        }
        assert_eq!(scaled[10], plain[10]);
        assert!((scaled[23] - plain[23] / 40.0).abs() < 1e-18);
        let unrounded = Yarn { rounded: false, ..DEEPSEEK };
        let at = frequencies(64, 1e4, Some(RopeScaling::Yarn(unrounded)))[16] / plain[16];
        let slowed = (16.0 - 10.4716) / (22.5127 - 10.4716);
        assert!((at - (1.0 - slowed + slowed / 40.0)).abs() < 1e-4, "{at}");
    }

    /// Equal weights cancel in the rotated elements and are left in the scores: (0.1 ln 40 + 1)^2 = 1.8738.
    #[test]
    fn yarn_temperatures() {
        assert_eq!(amplitude(Some(RopeScaling::Yarn(DEEPSEEK))), 1.0);
        assert!((DEEPSEEK.score_factor() - 1.3688879f64.powi(2)).abs() < 1e-6);
        // Without weights of its own the rotated elements carry it all (gpt-oss).
        let plain = Yarn { factor: 32.0, mscale_all_dim: 0.0, ..DEEPSEEK };
        assert!((amplitude(Some(RopeScaling::Yarn(plain))) - 1.3465736).abs() < 1e-6);
        assert_eq!(plain.score_factor(), 1.0);
        assert_eq!(amplitude(None), 1.0);
    }
}
