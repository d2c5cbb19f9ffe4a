//! Simulated step times: a base, drift, autocorrelated noise, two modes.

use std::f64::consts::TAU;
use std::sync::Arc;

/// A small deterministic source of random numbers (SplitMix64, Steele et al. 2014).
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// In (0, 1].
    fn unit(&mut self) -> f64 {
        ((self.word() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
    /// A step of one of the recordings, each step as likely; `None` where there are none.
    fn place(&mut self, recordings: &[Vec<f64>]) -> Option<(usize, usize)> {
        let steps: u64 = recordings.iter().map(|r| r.len() as u64).sum();
        let mut at = self.word().checked_rem(steps)? as usize;
        for (i, recording) in recordings.iter().enumerate() {
            match at.checked_sub(recording.len()) {
                Some(beyond) => at = beyond,
                None => return Some((i, at)),
            }
        }
        None
    }
    /// Standard normal (Box and Muller 1958).
    fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (TAU * self.unit()).cos()
    }
}

/// See [`Noise::resampled`].
#[derive(Debug, Clone)]
struct Resampled {
    recordings: Arc<[Vec<f64>]>,
    /// Chance to leave a stretch after a step.
    leave: f64,
    /// Recording and step; `None`: nothing is recorded.
    at: Option<(usize, usize)>,
}

impl Resampled {
    fn next(&mut self, random: &mut Random) -> f64 {
        let Some((recording, step)) = self.at else { return 1.0 };
        let ends = step + 1 == self.recordings[recording].len();
        let leaves = random.unit() < self.leave;
        self.at = if ends || leaves { random.place(&self.recordings) } else { Some((recording, step + 1)) };
        self.recordings[recording][step]
    }
}

/// Relative noise of a step time, about 1.
#[derive(Debug, Clone)]
pub struct Noise {
    random: Random,
    /// Standard deviation of the autocorrelated part, and its correlation from step to step.
    sigma: f64,
    rho: f64,
    state: f64,
    /// Independent from step to step.
    white: f64,
    /// Relative change a second.
    drift_per_s: f64,
    /// Cold at first: relative offset at time 0, and the time in which it falls to 1/e, in ms.
    cold: (f64, f64),
    /// Second mode: relative offset, and the chance a step to change modes.
    mode: (f64, f64),
    in_mode: bool,
    resampled: Option<Resampled>,
}

impl Noise {
    pub fn none() -> Self {
        Self::seeded(0)
    }
    pub fn seeded(seed: u64) -> Self {
        Self {
            random: Random(seed),
            sigma: 0.0,
            rho: 0.0,
            state: 0.0,
            white: 0.0,
            drift_per_s: 0.0,
            cold: (0.0, 1.0),
            mode: (0.0, 0.0),
            in_mode: false,
            resampled: None,
        }
    }
    /// First-order autoregression with stationary standard deviation `sigma`.
    pub fn autocorrelated(mut self, sigma: f64, rho: f64) -> Self {
        (self.sigma, self.rho) = (sigma, rho);
        self.state = sigma * self.random.normal();
        self
    }
    pub fn white(mut self, sigma: f64) -> Self {
        self.white = sigma;
        self
    }
    pub fn drift_per_s(mut self, drift: f64) -> Self {
        self.drift_per_s = drift;
        self
    }
    /// Steps are longer by `offset` at first, which fades with the time constant `fades_ms`.
    pub fn cold(mut self, offset: f64, fades_ms: f64) -> Self {
        self.cold = (offset, fades_ms);
        self
    }
    pub fn modes(mut self, offset: f64, change_probability: f64) -> Self {
        self.mode = (offset, change_probability);
        self
    }

    /// Factors of a real machine: stretches of `recordings`, each from a random place on and of `stretch` steps in the
    /// mean (the stationary bootstrap of Politis and Romano 1994). What is alike within a stretch stays so; runs of
    /// unlike seeds are independent of each other but for the recordings themselves.
    pub fn resampled(mut self, recordings: Arc<[Vec<f64>]>, stretch: f64) -> Self {
        let at = self.random.place(&recordings);
        self.resampled = Some(Resampled { recordings, leave: 1.0 / stretch, at });
        self
    }

    /// Factor for the next step, begun at `clock_ms`.
    pub fn next(&mut self, clock_ms: f64) -> f64 {
        if self.sigma > 0.0 {
            let innovation = self.sigma * (1.0 - self.rho * self.rho).sqrt();
            self.state = self.rho * self.state + innovation * self.random.normal();
        }
        let white = if self.white > 0.0 { self.white * self.random.normal() } else { 0.0 };
        if self.mode.1 > 0.0 && self.random.unit() < self.mode.1 {
            self.in_mode = !self.in_mode;
        }
        let offset = if self.in_mode { self.mode.0 } else { 0.0 };
        let drift = self.drift_per_s * clock_ms / 1e3 + self.cold.0 * (-clock_ms / self.cold.1).exp();
        let recorded = self.resampled.as_mut().map_or(1.0, |r| r.next(&mut self.random));
        recorded * (self.state + white + offset + drift).exp()
    }
}

/// Step times of one arm.
#[derive(Debug, Clone)]
pub struct Times {
    /// Device time without noise.
    pub base_ms: f64,
    /// Host time of issuing one step.
    pub submit_ms: f64,
    noise: Noise,
}

impl Times {
    pub fn new(base_ms: f64) -> Self {
        Self { base_ms, submit_ms: 0.1, noise: Noise::none() }
    }
    pub fn submit_ms(mut self, submit_ms: f64) -> Self {
        self.submit_ms = submit_ms;
        self
    }
    /// Noise of this arm alone.
    pub fn noise(mut self, noise: Noise) -> Self {
        self.noise = noise;
        self
    }
    /// Device time of the next step.
    pub fn next(&mut self, clock_ms: f64) -> f64 {
        self.base_ms * self.noise.next(clock_ms)
    }
}
