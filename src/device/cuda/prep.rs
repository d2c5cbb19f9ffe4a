//! What ops see of CUDA: addresses, kernels by source, issues that only launch.

use super::cudnn::{AttentionBackend, AttentionChoice, AttentionUse, Pass, SdpaCall, SdpaSpec, Sdpas};
use super::kernels::{Kernel, KernelCache};
use super::matmul::{MatmulPlan, MatmulSpec};
use super::target::{Code, Target};
use crate::device::DeviceError;

/// A device address (or, for buffers of lifetime `Host`, one in pinned host memory). Offsets are bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct DevPtr(pub u64);

impl DevPtr {
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// The CUDA source of one op folder. `text` follows the prelude; entry points are `extern "C" __global__`.
#[derive(Debug, Clone, Copy)]
pub struct KernelSource {
    /// File name for messages and the cache, e.g. `rmsnorm/kernel.cu`.
    pub name: &'static str,
    pub text: &'static str,
}

/// One kernel parameter, in the order of the kernel's signature.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Param {
    /// Any `T*` or `const T*`.
    Ptr(DevPtr),
    /// `int`
    I32(i32),
    /// `unsigned` or `unsigned int`
    U32(u32),
    /// `long long`
    I64(i64),
    /// `unsigned long long`
    U64(u64),
    /// `float`
    F32(f32),
    /// `TensorMap`, from [`CudaPrep::tensor_map`]
    TensorMap([u64; super::tensor_map::WORDS]),
}

impl From<DevPtr> for Param {
    fn from(v: DevPtr) -> Self {
        Param::Ptr(v)
    }
}
impl From<i32> for Param {
    fn from(v: i32) -> Self {
        Param::I32(v)
    }
}
impl From<u32> for Param {
    fn from(v: u32) -> Self {
        Param::U32(v)
    }
}
impl From<i64> for Param {
    fn from(v: i64) -> Self {
        Param::I64(v)
    }
}
impl From<u64> for Param {
    fn from(v: u64) -> Self {
        Param::U64(v)
    }
}
impl From<f32> for Param {
    fn from(v: f32) -> Self {
        Param::F32(v)
    }
}

/// Grid, block and dynamic shared memory of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
}

impl Config {
    /// One-dimensional grid of `blocks` blocks of `threads` threads, no dynamic shared memory.
    pub fn linear(blocks: usize, threads: u32) -> Self {
        Self {
            grid: [blocks.clamp(1, i32::MAX as usize) as u32, 1, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
        }
    }
}

/// Work that is ready to be put on a stream. Issuing allocates, formats and looks up nothing.
#[derive(Debug)]
pub enum Issue {
    /// Nothing to do (an empty shape).
    Nothing,
    Kernel(super::kernels::KernelLaunch),
    Matmul(MatmulPlan),
    /// A product an expert, its rows known on the host when it is issued.
    PerExpert(super::per_expert::PerExpertCall),
    /// Attention by cuDNN.
    Sdpa(SdpaCall),
    /// A collective with other processes.
    Nccl(super::nccl::NcclCall),
    /// Device-to-device copy.
    Copy {
        dst: DevPtr,
        src: DevPtr,
        bytes: usize,
    },
    /// Sets bytes to 0.
    Zero {
        dst: DevPtr,
        bytes: usize,
    },
    /// Copies to pinned host memory and waits for the stream on the host (`host_sync`).
    CopyToHostAndWait {
        dst: DevPtr,
        src: DevPtr,
        bytes: usize,
    },
    Many(Vec<Issue>),
}

/// Handed to [`crate::ops::Op::prepare`]. Either online (a device, kernels are loaded) or offline (no device:
/// kernels are compiled for a named architecture when NVRTC is there, and only checked otherwise).
pub struct CudaPrep<'a> {
    pub(super) kernels: &'a mut KernelCache,
    pub(super) matmuls: &'a mut super::matmul::Matmuls,
    pub(super) sdpas: &'a mut Sdpas,
    pub(super) attention: AttentionChoice,
    pub(super) attention_use: &'a mut AttentionUse,
    /// Of a run of several processes.
    pub(super) comms: Option<&'a super::nccl::Comms>,
    /// Streaming multiprocessors (132 on an H200; offline: 132).
    pub sm_count: usize,
    /// Compute capability that kernels are compiled for, as major * 10 + minor (90 on an H200; a device newer than NVRTC has
    /// an older target).
    pub cc: u32,
}

impl CudaPrep<'_> {
    /// Compiles (or takes from the cache) `source` with `defines` and returns its entry point `entry`.
    /// `shared_bytes` over 48 KiB is opted into here.
    pub fn kernel(
        &mut self,
        source: KernelSource,
        entry: &str,
        defines: &[(&str, String)],
        shared_bytes: u32,
    ) -> Result<Kernel, DeviceError> {
        self.kernels.get(source, entry, defines, shared_bytes)
    }

    /// A launch of `kernel`. Parameter types are checked against the signature in the source.
    pub fn launch(&self, kernel: &Kernel, config: Config, params: &[Param]) -> Result<Issue, DeviceError> {
        kernel.bind(config, params).map(Issue::Kernel)
    }

    /// A cuBLASLt product with its algorithm fixed. `c` is read when `spec` accumulates (may equal `d`).
    pub fn matmul(
        &mut self,
        spec: &MatmulSpec,
        a: DevPtr,
        b: DevPtr,
        c: DevPtr,
        d: DevPtr,
        workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        self.matmuls.plan(spec, a, b, c, d, workspace).map(Issue::Matmul)
    }

    /// Products of all experts by counts that lie at `offsets` in pinned host memory when they are issued.
    /// `operands`: a, b and d.
    pub fn per_expert(
        &mut self,
        spec: super::per_expert::PerExpertSpec,
        offsets: DevPtr,
        operands: [DevPtr; 3],
        workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        self.matmuls.per_expert(spec, offsets, operands, workspace).map(Issue::PerExpert)
    }

    /// Attention by cuDNN on `args` (in the op's order), or `None` when the op's own kernels are to run. `wanted`:
    /// the case, or why cuDNN has no plan for it; its `deterministic` is set here, from the run's choice. `own_is_faster`: our
    /// own kernels were measured to be the faster ones for this case.
    pub fn sdpa(
        &mut self,
        wanted: Result<SdpaSpec, String>,
        args: &[DevPtr],
        own_is_faster: bool,
    ) -> Result<Option<Issue>, DeviceError> {
        let free = !self.attention.deterministic;
        let wanted = wanted.map(|s| SdpaSpec { deterministic: s.pass == Pass::Forward || !free, ..s });
        if own_is_faster && self.attention.backend == AttentionBackend::Auto {
            self.attention_use.took_own();
            return Ok(None);
        }
        super::cudnn::choose(self.sdpas, self.attention, self.attention_use, wanted, args)
    }
}

/// Preparation without a device: `mbperf` and its tests use it to compile and check every kernel.
pub struct OfflinePrep {
    kernels: KernelCache,
    matmuls: super::matmul::Matmuls,
    sdpas: Sdpas,
    attention_use: AttentionUse,
    sm_count: usize,
    cc: u32,
}

/// Streaming multiprocessors that offline preparation assumes: an H200's.
const OFFLINE_SM_COUNT: usize = 132;

impl OfflinePrep {
    /// For an architecture as NVRTC names it, e.g. `sm_90a`. Compiles where NVRTC is found ([`Self::compiles`]),
    /// checks signatures in any case.
    pub fn new(arch: &str) -> Result<Self, DeviceError> {
        let digits = arch.strip_prefix("sm_").map(|a| a.trim_end_matches(|c: char| !c.is_ascii_digit()));
        let cc = digits.and_then(|d| d.parse().ok()).ok_or_else(|| {
            DeviceError::Unavailable(format!(
                "{arch:?} is no architecture; write e.g. sm_80, sm_90a or sm_100a"
            ))
        })?;
        Ok(Self {
            kernels: KernelCache::offline(&Target { name: arch.to_owned(), cc, code: Code::Cubin }),
            matmuls: super::matmul::Matmuls::offline(),
            sdpas: Sdpas::offline(),
            attention_use: AttentionUse::default(),
            sm_count: OFFLINE_SM_COUNT,
            cc,
        })
    }

    /// Keeps the compiled kernels in `folder`, under the names by which a run looks for them.
    pub fn keeping(self, folder: std::path::PathBuf) -> Self {
        Self { kernels: self.kernels.keeping(folder), ..self }
    }

    /// As [`Self::new`], but kernels are only noted: for [`KernelCache::warm`] of an online cache.
    pub(super) fn collecting(target: &Target, sm_count: usize) -> Self {
        Self {
            kernels: KernelCache::collecting(target),
            matmuls: super::matmul::Matmuls::offline(),
            sdpas: Sdpas::offline(),
            attention_use: AttentionUse::default(),
            sm_count,
            cc: target.cc,
        }
    }

    /// Whether NVRTC was found.
    pub fn compiles(&self) -> bool {
        self.kernels.compiles()
    }

    /// What ops prepare with.
    pub fn prep(&mut self) -> CudaPrep<'_> {
        CudaPrep {
            kernels: &mut self.kernels,
            matmuls: &mut self.matmuls,
            sdpas: &mut self.sdpas,
            attention: AttentionChoice::default(),
            attention_use: &mut self.attention_use,
            comms: None,
            sm_count: self.sm_count,
            cc: self.cc,
        }
    }

    /// Registers, spills and shared memory of what was compiled so far, with source and defines.
    pub fn usage(&self) -> &[(String, super::nvrtc::Usage)] {
        self.kernels.usage()
    }

    pub(super) fn kernels(&self) -> &KernelCache {
        &self.kernels
    }

    /// Prepares `op` on made-up addresses.
    pub fn prepare(&mut self, op: &dyn crate::ops::Op) -> Result<(), DeviceError> {
        self.launches(op).map(|_| ())
    }

    /// As [`Self::prepare`]; returns the kernels, copies and memsets that the op puts on a stream. A product counts as
    /// one, and attention is our own: what libraries launch is known on a device alone.
    pub fn launches(&mut self, op: &dyn crate::ops::Op) -> Result<usize, DeviceError> {
        // Distinct, aligned, never touched.
        let args: Vec<DevPtr> = (1..=op.args().len() as u64).map(|i| DevPtr(i << 40)).collect();
        let issue = op.prepare(&mut self.prep(), &args, DevPtr(1 << 50))?;
        let mut work = Vec::new();
        issue.list_work(&mut work);
        Ok(work.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_read() {
        for (arch, cc) in [("sm_80", 80), ("sm_90a", 90), ("sm_100a", 100)] {
            assert_eq!(OfflinePrep::new(arch).unwrap().prep().cc, cc);
        }
        for bad in ["", "sm_", "90", "sm_x"] {
            assert!(OfflinePrep::new(bad).is_err(), "{bad}");
        }
    }
}
