//! The dropless all-to-all: rows to the ranks that hold their experts, as many as the counts on the host say, and back.
//!
//! Megatron-Core gathers every rank's counts (`moe_alltoall token_dispatcher`), copies them to the host, and sizes its
//! messages there. So do we: an all-gather of the offsets, [`RowPlan`] on the device, a copy to the host, and
//! [`ExchangeRows`] for each buffer.

use super::super::support::sample_of;
use super::super::{ArgSpec, CpuArgs, Op, Real, Sample};
use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cpu::tcp::{Wire, exchange};
use crate::device::cuda::nccl::{Call, Element, RowCall};
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::program::DType;
use crate::ranks::groups::Group;

const SOURCE: KernelSource = KernelSource { name: "collective/rows.cu", text: include_str!("rows.cu") };
/// Threads of the one block of `row_plan`; experts are looked at in turn.
const THREADS: u32 = 512;

/// Which rows go where. Args: `all` R I32 `[ranks * (E+1)]` (every rank's offsets of rows sorted by global expert), `plan`
/// W I32 `[2 * (E+1)]`, `fault` U I32 `[1]`.
///
/// The plan's first half is this rank's own offsets, the second those of what it receives: bin `r * local + l` holds
/// what rank r sends to local expert l. When any rank would receive more than `rows` nobody sends: the plan is zero
/// and `fault` 1, on every rank alike, so that no message waits for another size.
#[derive(Debug, Clone, PartialEq)]
pub struct RowPlan {
    pub ranks: usize,
    pub own: usize,
    /// Experts of a rank; E = ranks * local.
    pub local: usize,
    /// Rows that buffers of received rows hold.
    pub rows: usize,
}

impl RowPlan {
    fn experts(&self) -> usize {
        self.ranks * self.local
    }

    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (all, plan, fault) = (args.ints(0)?, args.ints_out(1)?, args.ints_out(2)?);
        let n = self.experts() + 1;
        let of = |rank: usize, e: usize| all[rank * n + e + 1] - all[rank * n + e];
        let received = |rank: usize| -> i64 {
            let own = rank * self.local..(rank + 1) * self.local;
            (0..self.ranks).flat_map(|r| own.clone().map(move |e| i64::from(of(r, e)))).sum()
        };
        plan.fill(0);
        if (0..self.ranks).any(|rank| received(rank) > self.rows as i64) {
            fault[0] = 1;
            return Ok(());
        }
        plan[..n].copy_from_slice(&all[self.own * n..][..n]);
        let mut end = 0;
        for b in 0..self.experts() {
            end += of(b / self.local, self.own * self.local + b % self.local);
            plan[n + b + 1] = end;
        }
        Ok(())
    }
}

impl Op for RowPlan {
    fn name(&self) -> &'static str {
        "row_plan"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let n = self.experts() + 1;
        vec![
            ArgSpec::read("all", DType::I32, &[self.ranks * n]).sample(Sample::Custom),
            ArgSpec::write("plan", DType::I32, &[2 * n]),
            ArgSpec::update("fault", DType::I32, &[1]).sample(Sample::Below(1)),
        ]
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        0.0
    }
    /// Offsets of random counts that fit, by seed; every third seed overflows.
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        let most = self.rows / self.experts().max(1);
        let counts = |r: usize| {
            (0..self.experts()).map(move |e| {
                (seed as usize + 7 * r + 3 * e) % (most + 1) + most * usize::from(seed % 3 == 2)
            })
        };
        let offsets = |r: usize| {
            let mut end = 0.0;
            std::iter::once(0.0)
                .chain(counts(r).map(move |c| {
                    end += c as f64;
                    end
                }))
                .collect::<Vec<_>>()
        };
        Some(vec![(0..self.ranks).flat_map(offsets).collect(), vec![], vec![0.0]])
    }
    cpu_reference!();

    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        let defines = [
            ("RANKS", self.ranks.to_string()),
            ("OWN", self.own.to_string()),
            ("LOCAL", self.local.to_string()),
        ];
        let kernel = cuda.kernel(SOURCE, "row_plan", &defines, 0)?;
        let mut params: Vec<Param> = args.iter().map(|&p| Param::Ptr(p)).collect();
        params.push(Param::I32(super::super::int_param(self.name(), "rows", self.rows)?));
        cuda.launch(&kernel, Config::linear(1, THREADS), &params)
    }
}

/// Rows to and from the ranks of a group, by a [`RowPlan`] on the host. Args: `x` R `[rows, cols]`, `plan` R I32
/// `[2 * (E+1)]` (lifetime `Host`), `out` W `[rows, cols]`. Rows beyond those received are left as they are: nothing
/// reads them.
#[derive(Debug, Clone, PartialEq)]
pub struct ExchangeRows {
    pub group: Group,
    pub local: usize,
    pub rows: usize,
    pub cols: usize,
    pub dtype: DType,
    /// Back to where the rows came from.
    pub back: bool,
}

impl ExchangeRows {
    /// First row of each rank's piece in what is sent and in what is received, and their ends.
    pub fn pieces(plan: &[i32], local: usize, ranks: usize, back: bool) -> [Vec<usize>; 2] {
        let n = ranks * local + 1;
        let of = |half: &[i32]| (0..=ranks).map(|r| half[r * local].max(0) as usize).collect::<Vec<_>>();
        let (own, received) = (of(&plan[..n]), of(&plan[n..]));
        if back { [received, own] } else { [own, received] }
    }

    fn go<E: Wire>(&self, x: &[E], plan: &[i32], out: &mut [E]) -> Result<(), DeviceError> {
        let [from, to] = Self::pieces(plan, self.local, self.group.len(), self.back);
        let sent: Vec<&[E]> = from.windows(2).map(|w| &x[w[0] * self.cols..w[1] * self.cols]).collect();
        let expected: Vec<usize> = to.windows(2).map(|w| (w[1] - w[0]) * self.cols).collect();
        let parts = exchange(&self.group, &sent, &expected)?;
        for (part, first) in parts.iter().zip(&to) {
            out[first * self.cols..][..part.len()].copy_from_slice(part);
        }
        Ok(())
    }

    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let plan = args.ints(1)?;
        if self.dtype.is_float() {
            self.go(args.input(0)?, plan, args.output(2)?)
        } else {
            self.go(args.ints(0)?, plan, args.ints_out(2)?)
        }
    }
}

impl Op for ExchangeRows {
    fn name(&self) -> &'static str {
        "all_to_all_rows"
    }
    fn args(&self) -> Vec<ArgSpec> {
        let shape = [self.rows, self.cols];
        vec![
            ArgSpec::read("x", self.dtype, &shape).sample(sample_of(self.dtype)),
            ArgSpec::read("plan", DType::I32, &[2 * (self.group.len() * self.local + 1)])
                .sample(Sample::Custom),
            ArgSpec::write("out", self.dtype, &shape),
        ]
    }
    /// With balanced routing.
    fn bytes(&self) -> f64 {
        2.0 * (self.rows * self.cols * self.dtype.size()) as f64
    }
    fn host_inputs(&self) -> &'static [usize] {
        &[1]
    }
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
        if self.rows * self.cols == 0 {
            return Ok(Issue::Nothing);
        }
        let call = RowCall {
            x: args[0],
            plan: args[1],
            out: args[2],
            local: self.local,
            rows: self.rows,
            cols: self.cols,
            element: Element::of(self.dtype)?,
            back: self.back,
        };
        cuda.nccl(&self.group, Call::Rows(call))
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{inputs, run_f64};
    use super::*;
    use crate::device::cuda::prep::OfflinePrep;

    /// Two ranks of two experts: rank 0 sends 1, 2 | 3, 4 rows, rank 1 sends 5, 6 | 7, 8.
    #[test]
    fn received_bins_lie_by_rank_and_local_expert() {
        let all: Vec<f64> = vec![0., 1., 3., 6., 10., 0., 5., 11., 18., 26.];
        let of = |own: usize, rows: usize| {
            let op = RowPlan { ranks: 2, own, local: 2, rows };
            let after = run_f64(&op, &[all.clone(), vec![], vec![0.0]]);
            (after[1].clone(), after[2][0])
        };
        assert_eq!(of(0, 22), (vec![0., 1., 3., 6., 10., 0., 1., 3., 8., 14.], 0.0));
        assert_eq!(of(1, 22), (vec![0., 5., 11., 18., 26., 0., 3., 7., 14., 22.], 0.0));
        // Rank 1 would receive 22: both know, and nobody sends.
        for own in [0, 1] {
            assert_eq!(of(own, 21), (vec![0.0; 10], 1.0));
        }
        let plan = of(1, 22).0.iter().map(|v| *v as i32).collect::<Vec<_>>();
        assert_eq!(ExchangeRows::pieces(&plan, 2, 2, false), [vec![0, 11, 26], vec![0, 7, 22]]);
        assert_eq!(ExchangeRows::pieces(&plan, 2, 2, true), [vec![0, 7, 22], vec![0, 11, 26]]);
    }

    #[test]
    fn kernels_prepare() {
        let mut offline = OfflinePrep::new("sm_90a").unwrap();
        for (ranks, local) in [(1, 1), (2, 64), (8, 16)] {
            let op = RowPlan { ranks, own: ranks - 1, local, rows: 100 };
            offline.prepare(&op).unwrap();
            assert_eq!(inputs(&op, 2)[0].len(), ranks * (ranks * local + 1));
        }
    }
}
