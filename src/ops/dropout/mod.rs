//! Dropout fused with the residual add, and its backward.
//!
//! The mask is never stored: it is drawn again from the step words by (element index, draw id, step,
//! micro-batch), so forward, backward, eager and replay see the same one.

use super::rng::{Rng, WORDS, unit};
use super::{ArgSpec, CpuArgs, Op, Real, check_multiple, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

/// Inverted dropout: an element is kept iff `unit(word) >= p`, and scaled by 1 / (1 - p).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Probability of dropping, in [0, 1).
    pub p: f64,
    pub rng: Rng,
}

impl Dropout {
    /// Whether the element with this random word is kept. `unit` is exact, so every device agrees.
    pub fn keeps(&self, word: u32) -> bool {
        unit(word) >= self.p as f32
    }
    /// What kept elements are multiplied with.
    pub fn scale(&self) -> f64 {
        1.0 / (1.0 - self.p)
    }
    /// An error unless 0 <= p < 1.
    pub fn check(&self, op: &str) -> Result<(), DeviceError> {
        if (0.0..1.0).contains(&self.p) {
            return Ok(());
        }
        Err(DeviceError::Invalid(format!(
            "{op}: the dropout probability is {}, it must lie in [0, 1)",
            self.p
        )))
    }
    /// 0 or `scale` for elements `4*quad..4*quad+4`; `words` are the step words.
    pub fn factors4<T: Real>(&self, words: &[i32], quad: usize) -> [T; 4] {
        let kept = T::of(self.scale());
        self.rng.draw4(words, quad as u32).map(|w| if self.keeps(w) { kept } else { T::of(0.0) })
    }
}

/// out = residual + drop(x). Args: x R bf16 `[len]`, residual R bf16 `[len]`, words R U32, out W bf16 `[len]`.
/// The element index of the draws is the index in `x`.
#[derive(Debug, Clone, PartialEq)]
pub struct DropoutAddFwd {
    pub len: usize,
    pub dropout: Dropout,
}

/// dx = drop(dout) with the forward's mask. Args: dout R bf16 `[len]`, words R U32, dx W bf16 `[len]`.
#[derive(Debug, Clone, PartialEq)]
pub struct DropoutBwd {
    pub len: usize,
    pub dropout: Dropout,
}

/// out = factor * x (+ residual), by quads of elements that share one draw.
fn apply<T: Real>(dropout: &Dropout, words: &[i32], x: &[T], residual: Option<&[T]>, out: &mut [T]) {
    out.par_chunks_mut(4).enumerate().for_each(|(quad, out)| {
        let factors: [T; 4] = dropout.factors4(words, quad);
        for (i, (out, factor)) in out.iter_mut().zip(factors).enumerate() {
            let at = 4 * quad + i;
            let residual = residual.map_or(T::of(0.0), |r| r[at]);
            *out = (residual + x[at] * factor).bf16();
        }
    });
}

impl DropoutAddFwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (x, residual, words, out) = (args.input(0)?, args.input(1)?, args.ints(2)?, args.output(3)?);
        apply(&self.dropout, words, x, Some(residual), out);
        Ok(())
    }
}

impl DropoutBwd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (dout, words, dx) = (args.input(0)?, args.ints(1)?, args.output(2)?);
        apply(&self.dropout, words, dout, None, dx);
        Ok(())
    }
}

const SOURCE: KernelSource = KernelSource { name: "dropout/kernel.cu", text: include_str!("kernel.cu") };
const THREADS: u32 = 256;
/// Elements a thread handles: 16 bytes of bf16, two draws.
const ELEMENTS_PER_THREAD: usize = 8;

fn prepare(
    cuda: &mut CudaPrep,
    entry: &'static str,
    len: usize,
    dropout: &Dropout,
    args: &[DevPtr],
) -> Result<Issue, DeviceError> {
    if len == 0 {
        return Ok(Issue::Nothing);
    }
    dropout.check(entry)?;
    check_multiple(entry, "len", len, ELEMENTS_PER_THREAD)?;
    let kernel = cuda.kernel(SOURCE, entry, &[], 0)?;
    let blocks = (len / ELEMENTS_PER_THREAD).div_ceil(THREADS as usize);
    let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
    params.extend([
        Param::I64(len as i64),
        dropout.rng.seed_offset.into(),
        dropout.rng.draw.into(),
        (dropout.p as f32).into(),
        (dropout.scale() as f32).into(),
    ]);
    cuda.launch(&kernel, Config::linear(blocks, THREADS), &params)
}

impl Op for DropoutAddFwd {
    fn name(&self) -> &'static str {
        "dropout_add_fwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("x", DType::Bf16, &[self.len]),
            ArgSpec::read("residual", DType::Bf16, &[self.len]),
            ArgSpec::read("words", DType::U32, &[WORDS]),
            ArgSpec::write("out", DType::Bf16, &[self.len]),
        ]
    }
    fn flops(&self) -> f64 {
        2.0 * self.len as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 1, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        prepare(cuda, "dropout_add_fwd", self.len, &self.dropout, args)
    }
}

impl Op for DropoutBwd {
    fn name(&self) -> &'static str {
        "dropout_bwd"
    }
    fn args(&self) -> Vec<ArgSpec> {
        vec![
            ArgSpec::read("dout", DType::Bf16, &[self.len]),
            ArgSpec::read("words", DType::U32, &[WORDS]),
            ArgSpec::write("dx", DType::Bf16, &[self.len]),
        ]
    }
    fn flops(&self) -> f64 {
        self.len as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 1, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        prepare(cuda, "dropout_bwd", self.len, &self.dropout, args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    const DROPOUT: Dropout = Dropout { p: 0.25, rng: Rng { seed_offset: 2718, draw: 5 } };

    #[test]
    fn backward_is_the_forwards_gradient() {
        let (fwd, bwd) =
            (DropoutAddFwd { len: 120, dropout: DROPOUT }, DropoutBwd { len: 120, dropout: DROPOUT });
        let values = inputs(&fwd, 3);
        check_f32_against_f64(&fwd, &values);
        let dout = to_bf16(&normals(120, 8, 1.0));
        let bwd_values = vec![dout.clone(), values[2].clone(), vec![]];
        check_f32_against_f64(&bwd, &bwd_values);
        let dx = &run_f64(&bwd, &bwd_values)[2];
        check_op_gradient(&fwd, &values, &[(3, &dout)], 0, dx);
    }

    #[test]
    fn drops_the_asked_share_and_keeps_the_mean() {
        let len = 40_000;
        let bwd = DropoutBwd { len, dropout: DROPOUT };
        let out = &run_f64(&bwd, &[vec![1.0; len], words(5), vec![]])[2];
        let dropped = out.iter().filter(|v| **v == 0.0).count() as f64 / len as f64;
        assert!((dropped - 0.25).abs() < 0.01, "dropped {dropped}");
        assert!(out.iter().all(|v| *v == 0.0 || (v - 4.0 / 3.0).abs() < 1e-12));
    }

    #[test]
    fn the_next_micro_batch_draws_another_mask() {
        let bwd = DropoutBwd { len: 256, dropout: DROPOUT };
        let mask = |micro_batch: f64| {
            let mut w = words(5);
            w[crate::ops::rng::WORD_MICRO_BATCH] = micro_batch;
            run_f64(&bwd, &[vec![1.0; 256], w, vec![]])[2].clone()
        };
        assert_eq!(mask(1.0), mask(1.0));
        assert_ne!(mask(1.0), mask(2.0));
    }

    #[test]
    fn a_probability_of_one_is_refused() {
        assert!(Dropout { p: 1.0, ..DROPOUT }.check("dropout_bwd").is_err());
        assert!(Dropout { p: 0.0, ..DROPOUT }.check("dropout_bwd").is_ok());
    }
}
