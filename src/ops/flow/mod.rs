//! Flow matching (Lipman et al., 2023; rectified form): between a sample x and noise e lies (1 - s) x + s e; the model is told
//! 1000 s and learns the velocity e - x, by the mean of squared errors.

use super::rng::{Rng, WORDS, normal_of, unit};
use super::rope::Positions;
use super::support::{VECTOR, sample_words};
use super::{ArgSpec, CpuArgs, Op, Real, Sample, check_multiple, int_param, tolerance};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use rayon::prelude::*;

/// Samples, noise and times of a micro-batch: functions of the step words, the sequence and the global position.
///
/// Element c of position p of sequence b is number (b * length + p) * C + c of two draws of normals, sample and noise; s of
/// a sequence is uniform in [0, 1). Args: words R u32 `[WORDS]`, noisy W bf16 `[T,C]`, target W bf16 `[T,C]`, time W bf16 `[batch,F]`
/// (cosines, then sines, of 1000 s * 10000^(-2i/F)).
#[derive(Debug, Clone, PartialEq)]
pub struct FlowSample {
    pub positions: Positions,
    /// Tokens of a whole sequence.
    pub length: usize,
    /// C: numbers of a token, a multiple of 8.
    pub values: usize,
    /// F, a multiple of 16.
    pub frequencies: usize,
    pub sample: Rng,
    pub noise: Rng,
    pub time: Rng,
}

/// Mean over the columns of (prediction - target)^2, and its gradient times `grad_scale` in the prediction's place.
///
/// Args: prediction U bf16 `[T,C]`, target R bf16 `[T,C]`, loss W f32 `[T]`.
#[derive(Debug, Clone, PartialEq)]
pub struct FlowLoss {
    pub tokens: usize,
    /// C, a multiple of 8.
    pub values: usize,
    pub grad_scale: f32,
}

const SOURCE: KernelSource = KernelSource { name: "flow/kernel.cu", text: include_str!("kernel.cu") };
const THREADS: u32 = 256;
/// What the model is told of s is s times this, the number of steps of the noise's schedule.
const TIME_SCALE: f64 = 1000.0;
/// Longest period of the time embedding.
const PERIOD: f64 = 10_000.0;

impl FlowSample {
    fn elements(&self) -> usize {
        self.positions.rows() * self.values
    }
    fn s(&self, words: &[i32], b: usize) -> f32 {
        unit(self.time.word(words, b))
    }
    fn check(&self) -> Result<(), DeviceError> {
        check_multiple(self.name(), "values of a token", self.values, VECTOR)?;
        check_multiple(self.name(), "frequencies", self.frequencies, 2 * VECTOR)?;
        let draws = self.positions.batch.saturating_mul(self.length).saturating_mul(self.values);
        if draws > u32::MAX as usize {
            return Err(DeviceError::Invalid(format!(
                "{}: {draws} numbers of a micro-batch, one draw has {}; use a smaller --micro_batch_size or --seq_length",
                self.name(),
                u32::MAX
            )));
        }
        int_param(self.name(), "elements", self.elements())?;
        Ok(())
    }
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        self.check()?;
        let words = args.ints(0)?;
        let (noisy, target, time) = (args.output(1)?, args.output(2)?, args.output(3)?);
        let (c, seq) = (self.values, self.positions.seq.max(1));
        noisy.par_chunks_mut(c).zip(target.par_chunks_mut(c)).enumerate().for_each(
            |(row, (noisy, target))| {
                let b = row / seq;
                let first = (b * self.length + self.positions.position(row)) * c;
                let s = self.s(words, b);
                for i in 0..c {
                    let number = (first + i) as u32;
                    let x = normal_of(self.sample.draw4(words, number));
                    let e = normal_of(self.noise.draw4(words, number));
                    noisy[i] = T::of(((1.0 - s) * x + s * e) as f64).bf16();
                    target[i] = T::of((e - x) as f64).bf16();
                }
            },
        );
        let half = self.frequencies / 2;
        for (b, time) in time.chunks_mut(2 * half).enumerate() {
            let t = self.s(words, b) as f64 * TIME_SCALE;
            for i in 0..half {
                let angle = t * PERIOD.powf(-(i as f64) / half as f64);
                time[i] = T::of(angle.cos()).bf16();
                time[half + i] = T::of(angle.sin()).bf16();
            }
        }
        Ok(())
    }
}

impl FlowLoss {
    /// Sums in f64.
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (prediction, target, loss) = (args.output(0)?, args.input(1)?, args.output(2)?);
        let c = self.values;
        let factor = T::of(2.0 * self.grad_scale as f64 / c as f64);
        for ((p, target), loss) in prediction.chunks_mut(c).zip(target.chunks(c)).zip(loss) {
            let mut sum = 0.0;
            for (p, t) in p.iter_mut().zip(target) {
                let d = *p - *t;
                sum += (d * d).f64();
                *p = (d * factor).bf16();
            }
            *loss = T::of(sum / c as f64).f32();
        }
        Ok(())
    }
}

impl Op for FlowSample {
    fn name(&self) -> &'static str {
        "flow_sample"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let rows = [self.positions.rows(), self.values];
        vec![
            ArgSpec::read("words", DType::U32, &[WORDS]).sample(Sample::Custom),
            ArgSpec::write("noisy", DType::Bf16, &rows),
            ArgSpec::write("target", DType::Bf16, &rows),
            ArgSpec::write("time", DType::Bf16, &[self.positions.batch, self.frequencies]),
        ]
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        tolerance(DType::Bf16, 4, 0)
    }
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        Some(vec![sample_words(seed, 0.0), vec![], vec![], vec![]])
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        self.check()?;
        let kernel = cuda.kernel(SOURCE, "flow_sample", &[], 0)?;
        let [(start0, len0), (start1, _)] = self.positions.chunks;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        for (what, n) in [
            ("rows", self.positions.rows()),
            ("sequences", self.positions.batch),
            ("rows of a sequence", self.positions.seq),
            ("start of chunk 0", start0),
            ("length of chunk 0", len0),
            ("start of chunk 1", start1),
            ("length of a sequence", self.length),
            ("values", self.values),
            ("frequencies", self.frequencies),
        ] {
            params.push(int_param(self.name(), what, n)?.into());
        }
        for rng in [self.sample, self.noise, self.time] {
            params.extend([Param::U32(rng.seed_offset), Param::U32(rng.draw)]);
        }
        // Vectors of eight numbers of all rows, then the time embeddings' pairs.
        let items = self.elements() / VECTOR + self.positions.batch * self.frequencies / 2;
        cuda.launch(&kernel, Config::linear(items.div_ceil(THREADS as usize), THREADS), &params)
    }
}

impl Op for FlowLoss {
    fn name(&self) -> &'static str {
        "flow_loss"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let rows = [self.tokens, self.values];
        vec![
            ArgSpec::update("prediction", DType::Bf16, &rows),
            ArgSpec::read("target", DType::Bf16, &rows),
            ArgSpec::write("loss", DType::F32, &[self.tokens]),
        ]
    }
    fn flops(&self) -> f64 {
        4.0 * self.tokens as f64 * self.values as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        tolerance(if arg == 2 { DType::F32 } else { DType::Bf16 }, self.values, 0)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        if self.tokens == 0 {
            return Ok(Issue::Nothing);
        }
        check_multiple(self.name(), "values of a token", self.values, VECTOR)?;
        let kernel = cuda.kernel(SOURCE, "flow_loss", &[], 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| p.into()).collect();
        params.push(int_param(self.name(), "tokens", self.tokens)?.into());
        params.push(int_param(self.name(), "values", self.values)?.into());
        params.push(Param::F32(self.grad_scale));
        const ROWS_PER_BLOCK: usize = 8; // a warp each
        cuda.launch(&kernel, Config::linear(self.tokens.div_ceil(ROWS_PER_BLOCK), THREADS), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::rng::{WORD_MICRO_BATCH, WORD_STEP};
    use crate::ops::testing::*;

    fn sample(positions: Positions) -> FlowSample {
        let rng = |draw| Rng { seed_offset: 0, draw };
        FlowSample {
            positions,
            length: 24,
            values: 8,
            frequencies: 16,
            sample: rng(1),
            noise: rng(2),
            time: rng(3),
        }
    }

    #[test]
    fn the_gradient_of_the_loss() {
        let op = FlowLoss { tokens: 5, values: 8, grad_scale: 0.25 };
        let v = inputs(&op, 3);
        check_f32_against_f64(&op, &v);
        let grad = run_f64(&op, &v)[0].clone();
        check_op_gradient(&op, &v, &[(2, &[0.25; 5])], 0, &grad);
    }

    #[test]
    fn context_parallel_ranks_hold_parts_of_the_same_samples() {
        let words = sample_words(4, 0.0);
        let of = |positions| run_f64(&sample(positions), &[words.clone(), vec![], vec![], vec![]]);
        let whole = of(Positions::whole(2, 24));
        let part = Positions { batch: 2, seq: 12, chunks: [(6, 6), (12, 6)] };
        let some = of(part);
        assert_eq!(some[3], whole[3]);
        for row in 0..24 {
            let there = row / 12 * 24 + part.position(row);
            for out in [1, 2] {
                assert_eq!(some[out][row * 8..][..8], whole[out][there * 8..][..8], "row {row}");
            }
        }
        // noisy = x + s target: the same s for a whole sequence, another one for the other.
        let s = |row: usize| {
            let other = row + 1;
            assert_ne!(whole[2][row * 8], whole[2][other * 8]);
            whole[3][row / 24 * 16]
        };
        assert_ne!(s(0), s(24));
        for word in [WORD_STEP, WORD_MICRO_BATCH] {
            let mut next = words.clone();
            next[word] += 1.0;
            let other = run_f64(&sample(part), &[next, vec![], vec![], vec![]]);
            assert!((1..4).all(|i| other[i] != some[i]));
        }
    }

    #[test]
    fn both_references_agree() {
        let op = sample(Positions::whole(3, 24));
        check_f32_against_f64(&op, &inputs(&op, 3));
        let e = FlowSample { length: 1 << 30, ..op }.check().unwrap_err().to_string();
        assert!(e.contains("--seq_length"), "{e}");
    }
}
