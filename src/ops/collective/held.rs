//! `--comm_model nvlink|ib:GBPS`: a stand-in that takes as long as its bytes would on the wire, on as few
//! multiprocessors as a communicator takes.

use super::{Collective, StandIn};
use crate::device::DeviceError;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::keys::short;
use crate::ops::{ArgSpec, CpuArgs, Op};
use crate::program::Program;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

const SOURCE: KernelSource = KernelSource { name: "collective/held.cu", text: include_str!("held.cu") };
/// Blocks of a held stand-in: channels that NCCL opens over NVLink of the Hopper generation.
const BLOCKS: usize = 16;
const THREADS: u32 = 512;
/// NVLink 4, one direction: 18 links of 25 GB/s (NVIDIA's data sheets of H100 and H200). What a collective reaches is
/// less; give `nvlink:GBPS` where it was measured.
const NVLINK_GBPS: f64 = 450.0;

/// Bandwidths that a link can have, in 10^9 bytes a second: from a slow network to far more than memory has.
const GBPS: (f64, f64) = (1e-3, 1e5);

/// How long stand-ins take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CommModel {
    /// As long as the copies take.
    Copy,
    /// Bytes over this bandwidth in 10^9 bytes a second, at least. The name is that on the command line.
    Wire { name: &'static str, gbps: f64 },
}

impl FromStr for CommModel {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, rest) = text.split_once(':').map_or((text, None), |(n, r)| (n, Some(r)));
        let gbps = rest.map(|r| r.parse::<f64>().ok().filter(|g| (GBPS.0..=GBPS.1).contains(g)));
        match (name, gbps) {
            ("copy", None) => Ok(CommModel::Copy),
            ("nvlink", None) => Ok(CommModel::Wire { name: "nvlink", gbps: NVLINK_GBPS }),
            ("nvlink", Some(Some(gbps))) => Ok(CommModel::Wire { name: "nvlink", gbps }),
            ("ib", Some(Some(gbps))) => Ok(CommModel::Wire { name: "ib", gbps }),
            _ => Err(format!(
                "{:?} is none of copy, nvlink, nvlink:GBPS and ib:GBPS (10^9 bytes a second, {} to {}, e.g. ib:50)",
                short(text),
                GBPS.0,
                GBPS.1
            )),
        }
    }
}

impl fmt::Display for CommModel {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            CommModel::Copy => f.write_str("copy"),
            CommModel::Wire { name, gbps } => write!(f, "{name}:{gbps}"),
        }
    }
}

/// A stand-in that lasts `ns` at least.
#[derive(Debug, Clone, PartialEq)]
pub struct HeldStandIn {
    pub copies: StandIn,
    pub ns: u64,
}

/// Bytes that leave a rank, by a ring where there are several.
fn wire_bytes(s: &StandIn) -> f64 {
    let (local, n) = (s.local_bytes() as f64, s.ranks.max(1) as f64);
    match s.kind {
        Collective::AllGather | Collective::ReduceScatter => (n - 1.0) * local,
        Collective::AllReduce => 2.0 * (n - 1.0) / n * local,
        Collective::AllToAll | Collective::InPlace => (n - 1.0) / n * local,
        Collective::Send | Collective::Receive => local,
    }
}

/// Holds every stand-in of a program.
pub fn hold(program: &mut Program, model: CommModel) {
    let CommModel::Wire { gbps, .. } = model else { return };
    for launch in &mut program.launches {
        if let Some(copies) = launch.op.as_stand_in().cloned() {
            // Bytes over 10^9 bytes a second are nanoseconds.
            let ns = (wire_bytes(&copies) / gbps).ceil() as u64;
            launch.op = Arc::new(HeldStandIn { copies, ns });
        }
    }
}

impl Op for HeldStandIn {
    fn name(&self) -> &'static str {
        self.copies.name()
    }
    fn args(&self) -> Vec<ArgSpec> {
        self.copies.args()
    }
    fn bytes(&self) -> f64 {
        self.copies.bytes()
    }
    fn workspace(&self) -> usize {
        self.copies.workspace()
    }
    fn stand_in(&self) -> bool {
        true
    }
    fn tolerance(&self, arg: usize) -> f64 {
        self.copies.tolerance(arg)
    }
    fn cpu_f32(&self, args: &mut CpuArgs<f32>) -> Result<(), DeviceError> {
        self.copies.cpu_f32(args)
    }
    fn cpu_f64(&self, args: &mut CpuArgs<f64>) -> Result<(), DeviceError> {
        self.copies.cpu_f64(args)
    }

    fn prepare(&self, cuda: &mut CudaPrep, args: &[DevPtr], workspace: DevPtr) -> Result<Issue, DeviceError> {
        let ns = Param::I64(self.ns as i64);
        let Some(copies) = self.copies.by_kernel(args, workspace)? else {
            // Odd addresses take the driver's copies, and the wait follows them.
            let copied = self.copies.prepare(cuda, args, workspace)?;
            let kernel = cuda.kernel(SOURCE, "stand_in_wait", &[], 0)?;
            let wait = cuda.launch(&kernel, Config::linear(BLOCKS, THREADS), &[ns])?;
            return Ok(Issue::Many(vec![copied, wait]));
        };
        let kernel = cuda.kernel(SOURCE, "stand_in_held", &[], 0)?;
        let mut params = copies.params().to_vec();
        params.extend([Param::I32(copies.count() as i32), ns]);
        cuda.launch(&kernel, Config::linear(BLOCKS, THREADS), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::prep::OfflinePrep;
    use crate::program::DType;

    #[test]
    fn models_are_read_and_shown() {
        let of = |t: &str| t.parse::<CommModel>();
        assert_eq!(of("copy"), Ok(CommModel::Copy));
        assert_eq!(of("nvlink").unwrap().to_string(), "nvlink:450");
        assert_eq!(of("ib:50").unwrap().to_string(), "ib:50");
        for bad in ["", "ib", "ib:0", "ib:x", "copy:3", "nvlink:-1", "nvlink:1e300", "nvlink:1e-300", "rdma"]
        {
            assert!(of(bad).unwrap_err().contains("0.001 to 100000"), "{bad}");
        }
        assert!(of(&"x".repeat(3000)).unwrap_err().len() < 300);
    }

    /// 64 MB among 4 ranks at 50 GB/s: 0.96 ms each way of a ring.
    #[test]
    fn held_for_the_bytes_that_leave_a_rank() {
        let of = |kind| StandIn { kind, rows: 1 << 14, cols: 2000, ranks: 4, dtype: DType::Bf16 };
        let bytes = (1u64 << 14) as f64 * 4000.0;
        for (kind, share) in [
            (Collective::AllGather, 3.0),
            (Collective::ReduceScatter, 3.0),
            (Collective::AllReduce, 1.5),
            (Collective::AllToAll, 0.75),
            (Collective::InPlace, 0.75),
            (Collective::Send, 1.0),
        ] {
            assert_eq!(wire_bytes(&of(kind)), share * bytes, "{kind:?}");
        }
    }

    #[test]
    fn every_stand_in_of_a_program_is_held_and_nothing_else() {
        use crate::workloads::testing::{dense, program};
        let mut cfg = dense();
        (cfg.parallel.tp, cfg.parallel.sequence_parallel, cfg.identity.num_gpus) = (2, true, 2);
        let plain = program(&cfg);
        let mut held = program(&cfg);
        hold(&mut held, CommModel::Copy);
        let ops = |p: &Program| p.launches.iter().map(|l| format!("{:?}", l.op)).collect::<Vec<_>>();
        assert_eq!(ops(&held), ops(&plain));
        hold(&mut held, "ib:50".parse().unwrap());
        let held = held.launches.iter().zip(&plain.launches);
        let changed: Vec<_> = held.filter(|(a, b)| format!("{:?}", a.op) != format!("{:?}", b.op)).collect();
        assert_eq!(changed.len(), plain.launches.iter().filter(|l| l.op.stand_in()).count());
        assert!(
            changed
                .iter()
                .all(|(a, b)| a.op.stand_in() && a.op.name() == b.op.name() && a.op.args() == b.op.args())
        );
    }

    #[test]
    fn kernels_prepare() {
        let mut offline = OfflinePrep::new("sm_90a").unwrap();
        for (kind, cols) in
            [(Collective::AllGather, 8), (Collective::AllReduce, 8), (Collective::AllToAll, 5)]
        {
            let copies = StandIn { kind, rows: 3, cols, ranks: 4, dtype: DType::Bf16 };
            offline.prepare(&HeldStandIn { copies, ns: 1000 }).unwrap();
        }
    }
}
