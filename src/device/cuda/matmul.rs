//! cuBLASLt products as plans: descriptors, layouts and algorithm fixed once, so that eager and graph run the
//! same kernels and a launch looks nothing up.

use super::context::Context;
use super::counters::Counters;
use super::direct::Direct;
use super::plan::{Handle, Operands, Plan};
use super::prep::DevPtr;
use super::work::Work;
use crate::device::DeviceError;
use crate::program::DType;
use crate::ranks::control::Share;
use cudarc::cublaslt::sys;
use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;

use super::disk::DiskCache;
use super::tuner::Tuner;

/// Which operand is transposed; everything row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub enum Layout {
    /// D`[m,n]` = A`[m,k]` B`[n,k]`^T: a forward product with a weight `[out, in]`.
    Nt,
    /// D`[m,n]` = A`[m,k]` B`[k,n]`: a data gradient.
    Nn,
    /// D`[m,n]` = A`[k,m]`^T B`[k,n]`: a weight gradient.
    Tn,
}

/// One product, bf16 operands, fp32 accumulation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MatmulSpec {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub layout: Layout,
    /// Products (1: one), at tight strides, or side by side.
    pub batch: usize,
    /// The products' rows lie side by side in rows of `batch` times the width: those of A, of D unless `Tn`, and of B if
    /// `Tn`. What is left is at tight strides (a weight, its gradient).
    pub side_by_side: bool,
    /// Dtype of C and D.
    pub out: DType,
    /// Adds C (beta = 1).
    pub accumulate: bool,
}

/// Most algorithms that are asked of the library for one product.
pub const MOST_CANDIDATES: usize = super::plan::CANDIDATES;

/// Largest alignment that cuBLASLt's heuristic knows (its default for every operand), bytes.
const FULL_ALIGNMENT: u64 = 256;

/// All plans of one run.
#[derive(Debug)]
pub struct Matmuls {
    /// `None`: no device, plans are checked but cannot be issued.
    online: Option<Online>,
    plans: HashMap<PlanKey, Rc<Plan>>,
    /// Plans whose rows change from call to call: never shared with those above, whose layouts stay.
    varying: HashMap<PlanKey, Rc<Plan>>,
    /// Distinct products since [`Matmuls::begin_run`], in the order they were asked for.
    in_force: Vec<(PlanKey, Rc<Plan>)>,
}

/// What decides an algorithm.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct PlanKey {
    pub spec: MatmulSpec,
    /// Alignment of A, B, C and D in bytes, at most [`FULL_ALIGNMENT`].
    pub alignment: [u32; 4],
}

#[derive(Debug)]
struct Online {
    tuner: Option<Tuner>,
    disk: Option<DiskCache>,
    /// Device, library version: part of the disk key.
    machine: String,
    context: Rc<Context>,
    handle: Rc<Handle>,
    /// Of a run of several processes: rank 0's choices are all ranks'.
    share: Option<Share>,
    /// [`super::session::CudaOptions::gemm_candidate`].
    candidate: Option<usize>,
}

impl Matmuls {
    /// Scratch that every plan may use.
    pub const WORKSPACE_BYTES: usize = 32 << 20;

    /// For the current device. `tune`: time the candidates and keep the best, else take the library's first.
    /// `folder`: where choices are kept between runs. Errors: [`DeviceError::Unavailable`] without cuBLASLt.
    pub fn online(context: &Rc<Context>, tune: bool, folder: Option<PathBuf>) -> Result<Self, DeviceError> {
        let handle = Rc::new(Handle::new()?);
        // SAFETY: the function exists and takes nothing.
        let version = unsafe { sys::cublasLtGetVersion() };
        let machine = format!("{} sms {} cublaslt {version}", context.name, context.sm_count);
        let disk = folder.filter(|_| tune).map(DiskCache::new);
        let tuner = tune.then(|| Tuner::new(context)).transpose()?;
        Ok(Self {
            online: Some(Online {
                tuner,
                disk,
                machine,
                context: context.clone(),
                handle,
                share: None,
                candidate: None,
            }),
            plans: HashMap::new(),
            varying: HashMap::new(),
            in_force: Vec::new(),
        })
    }

    /// All ranks use rank 0's algorithms: every rank asks for the same products in the same order.
    pub(super) fn share_plans(&mut self, share: Share) {
        if let Some(online) = &mut self.online {
            online.share = Some(share);
        }
    }

    /// For no device: plans can be made and not issued.
    pub fn offline() -> Self {
        Self { online: None, plans: HashMap::new(), varying: HashMap::new(), in_force: Vec::new() }
    }

    /// A product on these addresses. `c` is read when `spec` accumulates, and may equal `d`. Errors: a shape that
    /// is 0 in one dimension, or one that cuBLASLt has no algorithm for.
    pub fn plan(
        &mut self,
        spec: &MatmulSpec,
        a: DevPtr,
        b: DevPtr,
        c: DevPtr,
        d: DevPtr,
        workspace: DevPtr,
    ) -> Result<MatmulPlan, DeviceError> {
        if spec.m == 0 || spec.n == 0 || spec.k == 0 || spec.batch == 0 || !spec.out.is_float() {
            return Err(DeviceError::internal(format!("{spec:?} is no matrix product")));
        }
        let c = if spec.accumulate { c } else { d };
        let key = PlanKey { spec: spec.clone(), alignment: [a, b, c, d].map(alignment) };
        let call = Operands { a, b, c, d, workspace, workspace_bytes: Self::WORKSPACE_BYTES };
        let plan = match (self.plans.get(&key), &mut self.online) {
            (Some(plan), _) => plan.clone(),
            (None, None) => Rc::new(Plan::offline(spec)),
            (None, Some(online)) => Rc::new(online.make(&key, call)?),
        };
        self.used(&key, &plan);
        self.plans.insert(key, plan.clone());
        Ok(MatmulPlan { plan, call, direct: None })
    }

    /// A plan for up to as many rows as `spec` has (`m`; `k` of a weight gradient), at operands whose addresses are
    /// multiples of `alignment` bytes only.
    pub(super) fn varying(
        &mut self,
        spec: &MatmulSpec,
        call: Operands,
        alignment: u32,
    ) -> Result<Rc<Plan>, DeviceError> {
        let key = PlanKey { spec: spec.clone(), alignment: [alignment; 4] };
        let plan = match (self.varying.get(&key), &mut self.online) {
            (Some(plan), _) => plan.clone(),
            (None, None) => Rc::new(Plan::offline(spec)),
            (None, Some(online)) => Rc::new(online.make(&key, call)?),
        };
        self.used(&key, &plan);
        self.varying.insert(key, plan.clone());
        Ok(plan)
    }

    /// A program's products are asked for from here on; plans of earlier ones stay, unless `candidate` is another one:
    /// plans that were chosen and plans that were forced have the same keys.
    pub(super) fn begin_run(&mut self, candidate: Option<usize>) {
        self.in_force.clear();
        if let Some(online) = &mut self.online
            && online.candidate != candidate
        {
            online.candidate = candidate;
            self.plans.clear();
            self.varying.clear();
        }
    }

    /// Hash of the products of this run in their order: shape, layout, dtype, alignment, and the bytes of the
    /// algorithm that was chosen. `None` without products.
    pub(super) fn digest(&self) -> Option<String> {
        let chosen = self
            .in_force
            .iter()
            .map(|(key, plan)| (format!("{key:?}"), plan.algo.as_ref().map(bytes_of).unwrap_or_default()));
        digest_of(chosen)
    }

    fn used(&mut self, key: &PlanKey, plan: &Rc<Plan>) {
        // A few dozen at most.
        if !self.in_force.iter().any(|(k, p)| k == key && Rc::ptr_eq(p, plan)) {
            self.in_force.push((key.clone(), plan.clone()));
        }
    }

    /// Frees the memory that tuning needed. Call it when all plans are made.
    pub fn end_tuning(&mut self) {
        if let Some(online) = &mut self.online
            && let Some(tuner) = &mut online.tuner
        {
            tuner.release();
        }
    }
}

fn alignment(ptr: DevPtr) -> u32 {
    (1u64 << ptr.0.trailing_zeros().min(62)).min(FULL_ALIGNMENT) as u32
}

impl Online {
    /// The algorithm of `plan`, as bytes; empty: the library knows none.
    fn chosen(&mut self, key: &PlanKey, plan: &mut Plan) -> Result<Vec<u8>, DeviceError> {
        self.choose(key, plan)?;
        Ok(plan.algo.as_ref().map(bytes_of).unwrap_or_default())
    }

    fn choose(&mut self, key: &PlanKey, plan: &mut Plan) -> Result<(), DeviceError> {
        // For a comparison alone: kept choices are neither asked nor changed.
        if let Some(n) = self.candidate {
            plan.algo = Some(nth(&plan.candidates(key)?, n)?);
            return Ok(());
        }
        let file =
            format!("{}.algo", super::disk::key(&[&format!("{key:?}"), &self.machine, super::tuner::RULE]));
        if let Some(algo) = self.disk.as_ref().and_then(|d| d.get(&file)).and_then(|b| algo_of(&b))
            && plan.accepts(&algo)
        {
            plan.algo = Some(algo);
        } else {
            let candidates = plan.candidates(key)?;
            let chosen = match &mut self.tuner {
                Some(tuner) if candidates.len() > 1 => tuner.best(&key.spec, plan, &candidates),
                _ => None,
            };
            // A choice is kept only when it was measured.
            if let (Some(at), Some(disk)) = (chosen, &self.disk) {
                let _ = disk.put(&file, &bytes_of(&candidates[at]));
            }
            plan.algo = candidates.get(chosen.unwrap_or(0)).copied();
        }
        Ok(())
    }

    fn make(&mut self, key: &PlanKey, call: Operands) -> Result<Plan, DeviceError> {
        let mut plan = Plan::describe(&self.handle, &key.spec)?;
        match self.share.clone() {
            None => self.choose(key, &mut plan)?,
            Some(share) => {
                let bytes = share.from_rank_0(&format!("{key:?}"), || self.chosen(key, &mut plan))?;
                plan.algo = algo_of(&bytes);
            }
        }
        let stream = self.context.stream()?;
        // Once for real: the library loads its kernels now, not in a capture or a timed step. What lies in D is
        // written again by `reset`.
        plan.run(&call, stream.raw)?;
        stream.synchronize()?;
        plan.work = super::work::captured_alone(&stream, |s| plan.run(&call, s.raw))?;
        Ok(plan)
    }
}

/// Number `n` of the library's list. Errors: [`DeviceError::Invalid`] past its end.
fn nth(listed: &[sys::cublasLtMatmulAlgo_t], n: usize) -> Result<sys::cublasLtMatmulAlgo_t, DeviceError> {
    let none = || {
        DeviceError::Invalid(format!("cuBLASLt lists {} algorithms, there is no number {n}", listed.len()))
    };
    listed.get(n).copied().ok_or_else(none)
}

/// FNV-1a over names and algorithms, as 16 hexadecimal digits.
fn digest_of(chosen: impl Iterator<Item = (String, Vec<u8>)>) -> Option<String> {
    const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let mut hash = None;
    for (name, algo) in chosen {
        let bytes = name.bytes().chain(algo);
        hash = Some(bytes.fold(hash.unwrap_or(OFFSET_BASIS), |h, b| (h ^ u64::from(b)).wrapping_mul(PRIME)));
    }
    hash.map(|h| format!("{h:016x}"))
}

fn bytes_of(algo: &sys::cublasLtMatmulAlgo_t) -> Vec<u8> {
    algo.data.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn algo_of(bytes: &[u8]) -> Option<sys::cublasLtMatmulAlgo_t> {
    let words: Vec<u64> =
        bytes.chunks_exact(8).filter_map(|c| c.try_into().ok().map(u64::from_le_bytes)).collect();
    words.try_into().ok().map(|data| sys::cublasLtMatmulAlgo_t { data })
}

/// A product with its algorithm and addresses: one call puts it on a stream.
#[derive(Debug)]
pub struct MatmulPlan {
    plan: Rc<Plan>,
    call: Operands,
    /// Instead of the library's call.
    direct: Option<Direct>,
}

impl MatmulPlan {
    pub(super) fn issue(&self, stream: cudarc::driver::sys::CUstream) -> Result<(), DeviceError> {
        match &self.direct {
            Some(direct) => direct.issue(stream),
            None => self.plan.run(&self.call, stream),
        }
    }

    /// From here on the kernel is launched by ourselves, where it can be. Gives the word that is to be zero whenever
    /// it starts: who calls this sees to it.
    pub(super) fn launch_directly(&mut self, counters: &mut Counters) -> Result<Option<DevPtr>, DeviceError> {
        let Some(algo) = &self.plan.algo else { return Ok(None) };
        let Some(word) = counters.next() else { return Ok(None) };
        self.direct = self.plan.direct(algo, &self.call, word, &counters.stream)?;
        Ok(self.direct.as_ref().map(|_| {
            counters.keep();
            word
        }))
    }

    /// The nodes that the driver recorded when the plan was captured alone.
    pub(super) fn work(&self) -> &[Work] {
        match &self.direct {
            Some(direct) => std::slice::from_ref(direct.work()),
            None => &self.plan.work,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignments_are_powers_of_two_up_to_256() {
        let of = |p: u64| alignment(DevPtr(p));
        assert_eq!([of(512), of(256), of(16), of(6), of(0)], [256, 256, 16, 2, 256]);
    }

    #[test]
    fn algorithms_survive_the_disk() {
        let algo = sys::cublasLtMatmulAlgo_t { data: [1, 2, 3, 4, 5, 6, 7, u64::MAX] };
        assert_eq!(algo_of(&bytes_of(&algo)).unwrap(), algo);
        assert!(algo_of(&[0; 63]).is_none() && algo_of(&[0; 72]).is_none());
    }

    #[test]
    fn a_list_has_an_end() {
        let algo = |word| sys::cublasLtMatmulAlgo_t { data: [word; 8] };
        let listed = [algo(1), algo(2)];
        assert_eq!(nth(&listed, 1).unwrap(), algo(2));
        assert!(matches!(nth(&listed, 2), Err(DeviceError::Invalid(_))));
    }

    #[test]
    fn a_digest_tells_products_algorithms_and_their_order_apart() {
        let of = |chosen: &[(&str, u8)]| {
            digest_of(chosen.iter().map(|(name, algo)| ((*name).to_owned(), vec![*algo; 64])))
        };
        assert_eq!(of(&[]), None);
        let plain = of(&[("a", 1), ("b", 2)]);
        assert_eq!(plain, of(&[("a", 1), ("b", 2)]));
        assert_eq!(plain.as_ref().map(String::len), Some(16));
        for other in [&[("a", 1), ("b", 3)][..], &[("b", 2), ("a", 1)], &[("a", 1)], &[("c", 1), ("b", 2)]] {
            assert_ne!(of(other), plain, "{other:?}");
        }
    }

    #[test]
    fn a_digest_is_of_this_runs_products() {
        let spec = |m| MatmulSpec {
            m,
            n: 8,
            k: 8,
            layout: Layout::Nt,
            batch: 1,
            side_by_side: false,
            out: DType::Bf16,
            accumulate: false,
        };
        let p = DevPtr(512);
        let mut matmuls = Matmuls::offline();
        let mut run = |sizes: &[usize]| {
            matmuls.begin_run(None);
            sizes.iter().for_each(|m| drop(matmuls.plan(&spec(*m), p, p, p, p, p).unwrap()));
            matmuls.digest()
        };
        assert_eq!(run(&[]), None);
        let first = run(&[8, 16]);
        // Repeats say nothing new, and plans of an earlier run are none of this one.
        assert_eq!(run(&[8, 16, 8]), first);
        assert_ne!(run(&[8]), first);
        assert_eq!(run(&[8, 16]), first);
    }

    #[test]
    fn a_plan_without_a_device_cannot_run() {
        let spec = MatmulSpec {
            m: 8,
            n: 8,
            k: 8,
            layout: Layout::Nt,
            batch: 1,
            side_by_side: false,
            out: DType::Bf16,
            accumulate: false,
        };
        let p = DevPtr(512);
        let plan = Matmuls::offline().plan(&spec, p, p, p, p, p).unwrap();
        assert!(plan.issue(std::ptr::null_mut()).is_err());
        assert_eq!(plan.work().len(), 1);
        assert!(Matmuls::offline().plan(&MatmulSpec { m: 0, ..spec }, p, p, p, p, p).is_err());
    }
}
