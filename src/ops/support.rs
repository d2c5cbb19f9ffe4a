//! What several ops share: checks in `prepare`, and values for `sample`.

use super::rng::{
    WORD_LR, WORD_MICRO_BATCH, WORD_SEED_HI, WORD_SEED_LO, WORD_STEP, WORDS, normal_of, philox,
};
use super::{Real, Sample};
use crate::device::DeviceError;
use crate::device::cuda::prep::DevPtr;
use crate::program::DType;
use half::bf16;
use rayon::prelude::*;

/// Bytes of the widest access of a kernel (a `uint4`).
pub const VECTOR_BYTES: usize = 16;
/// Elements that a kernel moves at a time: 16 bytes of bf16.
pub const VECTOR: usize = 8;

/// The addresses of an op with `N` arguments.
pub fn addresses<const N: usize>(op: &str, args: &[DevPtr]) -> Result<[DevPtr; N], DeviceError> {
    args.try_into()
        .map_err(|_| DeviceError::internal(format!("{op}: {} arguments given, it takes {N}", args.len())))
}

/// Vector kernels need addresses that 16 divides.
pub fn aligned(op: &str, args: &[DevPtr]) -> Result<(), DeviceError> {
    match args.iter().position(|a| !a.0.is_multiple_of(VECTOR_BYTES as u64)) {
        None => Ok(()),
        Some(i) => Err(DeviceError::internal(format!(
            "{op}: argument {i} lies at {:#x}, kernels need a multiple of {VECTOR_BYTES} bytes",
            args[i].0
        ))),
    }
}

/// 1 / (1 + e^-x).
pub fn sigmoid<T: Real>(x: T) -> T {
    T::of(1.0) / (T::of(1.0) + (-x).exp())
}

/// The name of a float dtype in a kernel's source.
pub fn float_name(op: &str, dtype: DType) -> Result<String, DeviceError> {
    match dtype {
        DType::Bf16 => Ok("bf16".into()),
        DType::F32 => Ok("float".into()),
        _ => Err(DeviceError::internal(format!("{op}: no kernel for elements of type {dtype:?}"))),
    }
}

/// Values for a plain argument of `dtype`, integers within the dtype.
pub fn sample_of(dtype: DType) -> Sample {
    match dtype {
        DType::Bf16 | DType::F32 => Sample::Normal(1.0),
        DType::I32 | DType::U32 => Sample::Below(1 << 20),
        DType::U8 => Sample::Below(1 << 8),
    }
}

/// Draws for `Op::sample`: values depend on (seed, stream, index).
#[derive(Debug, Clone, Copy)]
pub struct Draws {
    pub seed: u64,
    /// Tells the arguments of one op apart.
    pub stream: u32,
}

impl Draws {
    fn words(&self, index: usize) -> [u32; 4] {
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        philox([index as u32, (index as u64 >> 32) as u32, self.stream, 0], key)
    }
    /// Integer in [0, n).
    pub fn below(&self, index: usize, n: usize) -> usize {
        ((self.words(index)[0] as u64 * n as u64) >> 32) as usize
    }
    /// `len` values of Normal(0, std).
    pub fn normals(&self, len: usize, std: f64) -> Vec<f64> {
        // A step's logits are a billion: on one core half a minute.
        (0..len).into_par_iter().map(|i| normal_of(self.words(i)) as f64 * std).collect()
    }
    /// `len` values of Normal(0, std) that bf16 represents.
    pub fn bf16_normals(&self, len: usize, std: f64) -> Vec<f64> {
        self.normals(len, std).into_par_iter().map(|x| bf16::from_f64(x).to_f64()).collect()
    }
    /// `len` values in [low, high).
    pub fn uniforms(&self, len: usize, low: f64, high: f64) -> Vec<f64> {
        (0..len)
            .into_par_iter()
            .map(|i| low + (high - low) * self.words(i)[0] as f64 / 4_294_967_296.0)
            .collect()
    }
}

/// Step words for `Op::sample`: a seed, a step and a micro-batch of small numbers, `lr` in the lr word. Every
/// word is below 2^31, so that it survives a signed conversion too.
pub fn sample_words(seed: u64, lr: f32) -> Vec<f64> {
    let draws = Draws { seed, stream: u32::MAX };
    let mut words = vec![0.0; WORDS];
    words[WORD_SEED_LO] = draws.below(0, 1 << 31) as f64;
    words[WORD_SEED_HI] = draws.below(1, 1 << 31) as f64;
    words[WORD_STEP] = (1 + draws.below(2, 40)) as f64;
    words[WORD_MICRO_BATCH] = draws.below(3, 4) as f64;
    words[WORD_LR] = lr.to_bits() as f64;
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_name_what_is_wrong() {
        let e = addresses::<3>("copy", &[DevPtr(0)]).unwrap_err().to_string();
        assert!(e.contains("1 arguments given, it takes 3"), "{e}");
        let e = aligned("adam", &[DevPtr(256), DevPtr(260)]).unwrap_err().to_string();
        assert!(e.contains("argument 1") && e.contains("0x104"), "{e}");
    }

    #[test]
    fn draws_stay_in_range() {
        let d = Draws { seed: 5, stream: 1 };
        assert!((0..1000).all(|i| d.below(i, 7) < 7));
        assert!(d.uniforms(1000, -2.0, 3.0).iter().all(|x| (-2.0..3.0).contains(x)));
        assert_eq!(sample_words(3, 0.5)[WORD_LR], 0.5f32.to_bits() as f64);
    }
}
