//! Products of all experts, one library call an expert, sized by counts on the host: how Transformer Engine's grouped
//! linear layer issues them. As many launches as experts that got rows.

use super::GroupedGemm;
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::matmul::Matmuls;
use crate::device::cuda::per_expert::{self, PerExpertSpec};
use crate::device::cuda::prep::{CudaPrep, DevPtr, Issue};
use crate::ops::{ArgSpec, CpuArgs, Op, Real};

/// [`GroupedGemm`] by host counts. Args: `offsets` R I32 `[bins+1]` (lifetime `Host`, filled by a launch that waited),
/// then a, b and d as there.
///
/// `bins` is the number of local experts, or a multiple of it: bin `r * experts + e` then holds what rank r sent to
/// local expert e, and the rows lie sorted by (e, r).
#[derive(Debug, Clone, PartialEq)]
pub struct PerExpertGemm {
    pub grouped: GroupedGemm,
    pub bins: usize,
}

impl PerExpertGemm {
    fn check(&self) -> Result<(), DeviceError> {
        self.grouped.check()?;
        if self.bins == 0 || !self.bins.is_multiple_of(self.grouped.experts) {
            return Err(DeviceError::internal(format!(
                "per_expert_gemm: {} bins for {} experts",
                self.bins, self.grouped.experts
            )));
        }
        Ok(())
    }

    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        self.check()?;
        let (offsets, a, b, d) = (args.ints(0)?, args.input(1)?, args.input(2)?, args.output(3)?);
        let mut local = vec![0i32];
        local.extend((0..self.grouped.experts).scan(0, |end, e| {
            *end += per_expert::rows_of(offsets, self.grouped.experts, e) as i32;
            Some(*end)
        }));
        self.grouped.products(&local, a, b, d)
    }
}

impl Op for PerExpertGemm {
    fn name(&self) -> &'static str {
        "per_expert_gemm"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let mut args = self.grouped.args();
        args[0].shape = vec![self.bins + 1];
        args
    }
    fn flops(&self) -> f64 {
        self.grouped.flops()
    }
    fn workspace(&self) -> usize {
        Matmuls::WORKSPACE_BYTES
    }
    fn host_inputs(&self) -> &'static [usize] {
        &[0]
    }
    fn tolerance(&self, arg: usize) -> f64 {
        self.grouped.tolerance(arg)
    }
    /// Each expert's rows, split unevenly over the ranks that sent them.
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        let mut values = self.grouped.sample(seed)?;
        let experts = self.grouped.experts;
        let ranks = self.bins / experts.max(1);
        let rows: Vec<f64> = values[0].windows(2).map(|w| w[1] - w[0]).collect();
        let mut offsets = vec![0.0];
        for rank in 0..ranks {
            for rows in &rows {
                // The last rank sends what is left of rows that do not divide.
                let share = (rows / ranks as f64).floor();
                let sent = if rank + 1 == ranks { rows - share * rank as f64 } else { share };
                offsets.push(offsets[offsets.len() - 1] + sent);
            }
        }
        values[0] = offsets;
        Some(values)
    }
    cpu_reference!();

    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], workspace: DevPtr) -> Result<Issue, DeviceError> {
        self.check()?;
        let g = &self.grouped;
        let spec = PerExpertSpec {
            experts: g.experts,
            bins: self.bins,
            rows: g.rows,
            n: g.n,
            k: g.k,
            layout: g.layout,
            out: g.out,
            accumulate: g.accumulate,
        };
        let [offsets, a, b, d] = super::super::support::addresses(self.name(), args)?;
        cuda.per_expert(spec, offsets, [a, b, d], workspace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::matmul::Layout;
    use crate::ops::testing::{inputs, run_f64};
    use crate::program::DType;

    /// The same products as the grouped kernel's, given each expert's rows of all ranks.
    #[test]
    fn bins_of_several_ranks_are_the_local_experts_rows() {
        for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
            for ranks in [1, 3] {
                let accumulate = layout == Layout::Tn;
                let grouped = GroupedGemm {
                    experts: 4,
                    rows: 61,
                    filled: 61,
                    n: 16,
                    k: 24,
                    layout,
                    out: DType::F32,
                    accumulate,
                };
                let op = PerExpertGemm { bins: 4 * ranks, grouped: grouped.clone() };
                let values = inputs(&op, 5);
                let mut of_grouped = values.clone();
                of_grouped[0] = inputs(&grouped, 5)[0].clone();
                assert_eq!(values[0].len(), 4 * ranks + 1);
                assert_eq!(run_f64(&op, &values)[3], run_f64(&grouped, &of_grouped)[3], "{layout:?} {ranks}");
            }
        }
    }
}
