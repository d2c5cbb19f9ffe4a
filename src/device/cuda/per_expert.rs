//! One cuBLASLt product an expert, sized on the host when it is issued.
//!
//! The algorithm must not depend on more than the counts, or the two arms would differ in bits: plans are made for
//! row numbers that are powers of two, and an expert's rows take the next larger one's.

use super::context::Stream;
use super::matmul::{Layout, MatmulSpec, Matmuls};
use super::plan::{Operands, Plan};
use super::prep::DevPtr;
use super::work::Work;
use crate::device::DeviceError;
use crate::program::DType;
use std::rc::Rc;

/// Rows of the smallest plan; fewer rows take it too.
const FEWEST_ROWS: usize = 16;

/// Rows start on these boundaries: eight bf16 values.
const ALIGNMENT: u32 = 16;

/// Shapes of [`crate::ops::grouped_gemm::PerExpertGemm`].
#[derive(Debug, Clone, PartialEq)]
pub struct PerExpertSpec {
    pub experts: usize,
    /// A multiple of `experts`: bin `r * experts + e` holds what rank r sent to expert e.
    pub bins: usize,
    /// Most rows of all experts.
    pub rows: usize,
    pub n: usize,
    pub k: usize,
    pub layout: Layout,
    pub out: DType,
    pub accumulate: bool,
}

/// Rows of local expert `e`, given the offsets of all bins.
pub fn rows_of(offsets: &[i32], experts: usize, e: usize) -> usize {
    let bins = offsets.len().saturating_sub(1);
    (e..bins).step_by(experts.max(1)).map(|b| (offsets[b + 1] - offsets[b]).max(0) as usize).sum()
}

/// Products ready to be issued.
#[derive(Debug)]
pub struct PerExpertCall {
    spec: PerExpertSpec,
    /// `[bins + 1]` in pinned host memory of the executor.
    offsets: DevPtr,
    /// a of the first row, b and d.
    operands: Operands,
    /// For `FEWEST_ROWS << i` rows, the last for all of them.
    plans: Vec<Rc<Plan>>,
}

impl Matmuls {
    /// See [`super::prep::CudaPrep::per_expert`].
    pub fn per_expert(
        &mut self,
        spec: PerExpertSpec,
        offsets: DevPtr,
        [a, b, d]: [DevPtr; 3],
        workspace: DevPtr,
    ) -> Result<PerExpertCall, DeviceError> {
        let workspace_bytes = Self::WORKSPACE_BYTES;
        let operands = Operands { a, b, c: d, d, workspace, workspace_bytes };
        let PerExpertSpec { n, k, layout, out, accumulate, .. } = spec;
        let doubled = std::iter::successors(Some(FEWEST_ROWS), |rows| rows.checked_mul(2));
        let fewer = doubled.take_while(|rows| *rows < spec.rows);
        let all = (spec.rows > 0).then_some(spec.rows);
        let mut plans = Vec::new();
        for rows in fewer.chain(all) {
            let (m, n, k) = if layout == Layout::Tn { (n, k, rows) } else { (rows, n, k) };
            let product = MatmulSpec { m, n, k, layout, batch: 1, side_by_side: false, out, accumulate };
            plans.push(self.varying(&product, operands, ALIGNMENT)?);
        }
        Ok(PerExpertCall { spec, offsets, operands, plans })
    }
}

impl PerExpertCall {
    fn plan(&self, rows: usize) -> Option<&Rc<Plan>> {
        let at = rows.div_ceil(FEWEST_ROWS).next_power_of_two().trailing_zeros() as usize;
        self.plans.get(at.min(self.plans.len().saturating_sub(1)))
    }

    pub(super) fn issue(&self, stream: &Stream) -> Result<(), DeviceError> {
        let PerExpertSpec { experts, bins, n, k, layout, out, accumulate, .. } = self.spec;
        // SAFETY: pinned memory of the executor, `bins + 1` integers as the op's argument says; the launch that fills
        // it waited for the device before this one is issued, and no other thread writes it.
        let offsets = unsafe { std::slice::from_raw_parts(self.offsets.0 as *const i32, bins + 1) };
        let (a_width, d_width) = if layout == Layout::Tn { (n, k) } else { (k, n) };
        let mut first = 0;
        for e in 0..experts {
            // More rows than the buffers hold fail the step by the sort's fault word; none is touched here.
            let rows = rows_of(offsets, experts, e).min(self.spec.rows - first);
            let mut call = self.operands;
            call.a = call.a.offset(first * a_width * DType::Bf16.size());
            match layout {
                Layout::Tn => {
                    call.b = call.b.offset(first * d_width * DType::Bf16.size());
                    call.d = call.d.offset(e * n * k * out.size());
                }
                Layout::Nt | Layout::Nn => {
                    call.b = call.b.offset(e * n * k * DType::Bf16.size());
                    call.d = call.d.offset(first * d_width * out.size());
                }
            }
            call.c = call.d;
            first += rows;
            match (rows, self.plan(rows)) {
                (0, _) if layout == Layout::Tn && !accumulate => {
                    stream.fill(call.d, 0, n * k * out.size())?
                }
                (0, _) | (_, None) => {}
                (rows, Some(plan)) => plan.run_rows(rows, layout, &call, stream.raw)?,
            }
        }
        let left = (self.spec.rows - first) * d_width * out.size();
        if layout != Layout::Tn && left > 0 {
            stream.fill(self.operands.d.offset(first * d_width * out.size()), 0, left)?;
        }
        Ok(())
    }

    /// What a step with rows for every expert issues. Never part of a graph, so that no list is compared with it.
    pub(super) fn work(&self) -> Vec<Work> {
        let balanced = self.plan(self.spec.rows / self.spec.experts.max(1));
        let of_one = balanced.map_or(&[][..], |p| &p.work);
        of_one.iter().cloned().cycle().take(of_one.len() * self.spec.experts).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_of_all_ranks_are_an_experts_rows() {
        // Two ranks, three experts: 1, 2, 3 and 4, 5, 6 rows.
        let offsets = [0, 1, 3, 6, 10, 15, 21];
        assert_eq!([0, 1, 2].map(|e| rows_of(&offsets, 3, e)), [5, 7, 9]);
        assert_eq!(rows_of(&[], 3, 0), 0);
    }

    #[test]
    fn every_row_number_has_a_plan_that_holds_it() {
        for rows in [1, 15, 16, 17, 100, 128, 1000] {
            let spec = PerExpertSpec {
                experts: 2,
                bins: 2,
                rows,
                n: 8,
                k: 8,
                layout: Layout::Nt,
                out: DType::Bf16,
                accumulate: false,
            };
            let p = DevPtr(512);
            let call = Matmuls::offline().per_expert(spec, p, [p; 3], p).unwrap();
            let sizes: Vec<usize> = (0..call.plans.len()).map(|i| (FEWEST_ROWS << i).min(rows)).collect();
            assert_eq!(*sizes.last().unwrap(), rows);
            for r in 1..=rows {
                let plan = call.plan(r).unwrap();
                let at = call.plans.iter().position(|p| Rc::ptr_eq(p, plan)).unwrap();
                assert!(sizes[at] >= r && (at == 0 || sizes[at - 1] < r), "{r} of {rows}");
            }
            assert_eq!(call.work().len(), 2);
        }
    }
}
