//! The expert bias of balancing without an auxiliary loss (Wang et al., arXiv:2408.15664): after a step the bias of an
//! expert that had fewer tokens than the mean rises by a fixed rate, that of one with more falls.

use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::ops::support::addresses;
use crate::ops::{ArgSpec, CpuArgs, Op, Real, Sample, int_param, tolerance};
use crate::program::DType;

/// Counts of a micro-batch onto those of the step. Args: counts R I32 `[E]`, total U I32 `[E]`.
#[derive(Debug, Clone, PartialEq)]
pub struct CountAdd {
    pub experts: usize,
}

/// bias += rate * sign(mean of total - total), by layer; then total = 0. Args: total U I32 `[L,E]`, bias U f32 `[L,E]`.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertBiasUpdate {
    pub layers: usize,
    pub experts: usize,
    pub rate: f64,
}

const SOURCE: KernelSource = KernelSource { name: "router/bias.cu", text: include_str!("bias.cu") };
/// Threads of a block, as in bias.cu.
const THREADS: usize = 256;
/// Counts that `selftest` draws.
const SAMPLE_TOKENS: u32 = 100;

impl CountAdd {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (counts, total) = (args.ints(0)?, args.ints_out(1)?);
        total.iter_mut().zip(counts).for_each(|(t, c)| *t += *c);
        Ok(())
    }
}

impl ExpertBiasUpdate {
    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (total, bias) = (args.ints_out(0)?, args.output(1)?);
        let experts = self.experts.max(1);
        for (total, bias) in total.chunks_mut(experts).zip(bias.chunks_mut(experts)) {
            let sum: i64 = total.iter().map(|&n| i64::from(n)).sum();
            for (n, b) in total.iter_mut().zip(bias) {
                // Against the sum of all: no division.
                let under = (sum - i64::from(*n) * experts as i64).signum();
                *b = (*b + T::of(self.rate as f32 as f64 * under as f64)).f32();
                *n = 0;
            }
        }
        Ok(())
    }
}

impl Op for CountAdd {
    fn name(&self) -> &'static str {
        "count_add"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let counts = Sample::Below(SAMPLE_TOKENS);
        vec![
            ArgSpec::read("counts", DType::I32, &[self.experts]).sample(counts),
            ArgSpec::update("total", DType::I32, &[self.experts]).sample(counts),
        ]
    }
    /// Exact.
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [counts, total] = addresses(self.name(), args)?;
        let experts = int_param(self.name(), "experts", self.experts)?;
        let kernel = cuda.kernel(SOURCE, "count_add", &[], 0)?;
        let params = [Param::Ptr(counts), Param::Ptr(total), Param::I32(experts)];
        cuda.launch(&kernel, Config::linear(self.experts.div_ceil(THREADS), THREADS as u32), &params)
    }
}

impl Op for ExpertBiasUpdate {
    fn name(&self) -> &'static str {
        "expert_bias_update"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let shape = [self.layers, self.experts];
        vec![
            ArgSpec::update("total", DType::I32, &shape).sample(Sample::Below(SAMPLE_TOKENS)),
            ArgSpec::update("bias", DType::F32, &shape).sample(Sample::Normal(0.1)),
        ]
    }
    fn flops(&self) -> f64 {
        2.0 * (self.layers * self.experts) as f64
    }
    fn tolerance(&self, arg: usize) -> f64 {
        if arg == 0 { 0.0 } else { tolerance(DType::F32, 1, 0) }
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let [total, bias] = addresses(self.name(), args)?;
        let experts = int_param(self.name(), "experts", self.experts)?;
        if self.layers == 0 {
            return Ok(Issue::Nothing);
        }
        let kernel = cuda.kernel(SOURCE, "expert_bias_update", &[], 0)?;
        let params = [Param::Ptr(total), Param::Ptr(bias), Param::I32(experts), Param::F32(self.rate as f32)];
        cuda.launch(&kernel, Config::linear(self.layers, THREADS as u32), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{run_f32, run_f64};

    #[test]
    fn idle_experts_rise_and_busy_ones_fall() {
        let op = ExpertBiasUpdate { layers: 2, experts: 3, rate: 0.5 };
        // Means 5 and 10/3: at the mean nothing moves.
        let totals = vec![5.0, 1.0, 9.0, 3.0, 3.0, 4.0];
        for after in [
            run_f64(&op, &[totals.clone(), vec![0.0, 0.0, 0.0, 1.0, 2.0, 3.0]]),
            run_f32(&op, &[totals, vec![0.0, 0.0, 0.0, 1.0, 2.0, 3.0]]),
        ] {
            assert_eq!(after[0], [0.0; 6]);
            assert_eq!(after[1], [0.0, 0.5, -0.5, 1.5, 2.5, 2.5]);
        }
        let add = CountAdd { experts: 3 };
        assert_eq!(run_f64(&add, &[vec![1.0, 2.0, 3.0], vec![4.0, 0.0, 1.0]])[1], [5.0, 2.0, 4.0]);
    }
}
