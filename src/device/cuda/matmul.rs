//! cuBLASLt products as plans: descriptors, layouts and algorithm fixed once, so that eager and graph run the
//! same kernels and a launch looks nothing up.

use super::context::Context;
use super::prep::DevPtr;
use super::work::Work;
use crate::device::{DeviceError, Phase};
use crate::program::DType;
use cudarc::cublaslt::sys;
use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::rc::Rc;

use super::disk::DiskCache;
use super::tuner::Tuner;

/// Which operand is transposed; everything row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub enum Layout {
    /// D[m,n] = A[m,k] B[n,k]^T: a forward product with a weight `[out, in]`.
    Nt,
    /// D[m,n] = A[m,k] B[k,n]: a data gradient.
    Nn,
    /// D[m,n] = A[k,m]^T B[k,n]: a weight gradient.
    Tn,
}

/// One product, bf16 operands, fp32 accumulation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MatmulSpec {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub layout: Layout,
    /// Products at tight strides (1: one product).
    pub batch: usize,
    /// Dtype of C and D.
    pub out: DType,
    /// Adds C (beta = 1).
    pub accumulate: bool,
}

/// Algorithms asked of the library's heuristic, best guess first.
const CANDIDATES: usize = 8;

/// Largest alignment that cuBLASLt's heuristic knows (its default for every operand), bytes.
const FULL_ALIGNMENT: u64 = 256;

/// Split-K partial sums may only be kept in fp32 in the workspace and reduced in fixed order. The in-place scheme
/// is left out, and so is the one that rounds partial sums to the output dtype.
const REDUCTION_SCHEMES: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;

/// `cublasOperation_t`: the Lt bindings leave it out.
const OP_NONE: i32 = 0;
const OP_TRANSPOSE: i32 = 1;

pub(super) fn check(call: &'static str, code: sys::cublasStatus_t) -> Result<(), DeviceError> {
    match code {
        sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        other => Err(DeviceError::Driver {
            call,
            code: format!("{other:?}"),
            phase: Phase::Prepare,
            at: String::new(),
        }),
    }
}

/// All plans of one run.
#[derive(Debug)]
pub struct Matmuls {
    /// `None`: no device, plans are placeholders that cannot be issued.
    online: Option<Online>,
    plans: HashMap<PlanKey, Rc<Plan>>,
}

/// What decides an algorithm.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PlanKey {
    spec: MatmulSpec,
    /// Alignment of A, B, C and D in bytes, at most [`FULL_ALIGNMENT`].
    alignment: [u32; 4],
}

#[derive(Debug)]
struct Online {
    tuner: Option<Tuner>,
    disk: Option<DiskCache>,
    /// Device, library version: part of the disk key.
    machine: String,
    context: Rc<Context>,
    handle: Rc<Handle>,
}

#[derive(Debug)]
struct Handle(sys::cublasLtHandle_t);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; every plan holds an Rc of it.
        unsafe { sys::cublasLtDestroy(self.0) };
    }
}

impl Matmuls {
    /// Scratch that every plan may use.
    pub const WORKSPACE_BYTES: usize = 32 << 20;

    /// For the current device. `tune`: time the candidates and keep the fastest, else take the library's first.
    /// `folder`: where choices are kept between runs. Errors: [`DeviceError::Unavailable`] without cuBLASLt.
    pub fn online(context: &Rc<Context>, tune: bool, folder: Option<PathBuf>) -> Result<Self, DeviceError> {
        super::libraries::ensure_cublaslt()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the function exists (above); writes the handle.
        check("cublasLtCreate", unsafe { sys::cublasLtCreate(&mut handle) })?;
        let handle = Rc::new(Handle(handle));
        // SAFETY: the function exists and takes nothing.
        let version = unsafe { sys::cublasLtGetVersion() };
        let machine = format!("{} sms {} cublaslt {version}", context.name, context.sm_count);
        let disk = folder.filter(|_| tune).map(DiskCache::new);
        let tuner = tune.then(|| Tuner::new(context)).transpose()?;
        Ok(Self {
            online: Some(Online { tuner, disk, machine, context: context.clone(), handle }),
            plans: HashMap::new(),
        })
    }

    /// For no device: plans can be made and not issued.
    pub fn offline() -> Self {
        Self { online: None, plans: HashMap::new() }
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
        let call = Operands { a, b, c, d, workspace };
        let plan = match (self.plans.get(&key), &mut self.online) {
            (Some(plan), _) => plan.clone(),
            (None, None) => Rc::new(Plan::placeholder(spec)),
            (None, Some(online)) => Rc::new(online.make(&key, call)?),
        };
        self.plans.insert(key, plan.clone());
        Ok(MatmulPlan { plan, call })
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
    fn make(&mut self, key: &PlanKey, call: Operands) -> Result<Plan, DeviceError> {
        let mut plan = Plan::describe(&self.handle, &key.spec)?;
        let file = format!("{}.algo", super::disk::key(&[&format!("{key:?}"), &self.machine]));
        if let Some(algo) = self.disk.as_ref().and_then(|d| d.get(&file)).and_then(|b| algo_of(&b))
            && plan.accepts(&algo)
        {
            plan.algo = Some(algo);
        } else {
            let candidates = plan.candidates(key)?;
            let chosen = match &mut self.tuner {
                Some(tuner) if candidates.len() > 1 => tuner.fastest(&key.spec, &plan, &candidates),
                _ => None,
            };
            // A choice is kept only when it was measured.
            if let (Some(at), Some(disk)) = (chosen, &self.disk) {
                let _ = disk.put(&file, &bytes_of(&candidates[at]));
            }
            plan.algo = candidates.get(chosen.unwrap_or(0)).copied();
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

fn bytes_of(algo: &sys::cublasLtMatmulAlgo_t) -> Vec<u8> {
    algo.data.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn algo_of(bytes: &[u8]) -> Option<sys::cublasLtMatmulAlgo_t> {
    let words: Vec<u64> =
        bytes.chunks_exact(8).filter_map(|c| c.try_into().ok().map(u64::from_le_bytes)).collect();
    words.try_into().ok().map(|data| sys::cublasLtMatmulAlgo_t { data })
}

/// Addresses of one launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operands {
    pub a: DevPtr,
    pub b: DevPtr,
    pub c: DevPtr,
    pub d: DevPtr,
    pub workspace: DevPtr,
}

/// Descriptors and algorithm of one spec. Handles are null without a device.
#[derive(Debug)]
pub(super) struct Plan {
    handle: Option<Rc<Handle>>,
    desc: sys::cublasLtMatmulDesc_t,
    /// Column-major views, in the library's order: its A is our B, its B our A, then C and D.
    layouts: [sys::cublasLtMatrixLayout_t; 4],
    algo: Option<sys::cublasLtMatmulAlgo_t>,
    beta: f32,
    work: Vec<Work>,
}

/// The library is column-major, so it computes D^T = op(B)^T op(A)^T: our B first. A row-major `[r, c]` matrix is
/// a column-major c x r one with leading dimension c. Gives (transposed, rows, columns) of both operands.
fn column_major(spec: &MatmulSpec) -> [(bool, usize, usize); 2] {
    let &MatmulSpec { m, n, k, .. } = spec;
    match spec.layout {
        Layout::Nt => [(true, k, n), (false, k, m)],
        Layout::Nn => [(false, n, k), (false, k, m)],
        Layout::Tn => [(false, n, k), (true, m, k)],
    }
}

impl Plan {
    fn placeholder(spec: &MatmulSpec) -> Self {
        use std::ptr::null_mut;
        let work = vec![Work::Kernel {
            name: format!("matmul {spec:?}").into(),
            grid: [1; 3],
            block: [1; 3],
            shared_bytes: 0,
        }];
        Self { handle: None, desc: null_mut(), layouts: [null_mut(); 4], algo: None, beta: 0.0, work }
    }

    fn describe(handle: &Rc<Handle>, spec: &MatmulSpec) -> Result<Self, DeviceError> {
        let mut plan = Self::placeholder(spec);
        plan.handle = Some(handle.clone());
        plan.beta = if spec.accumulate { 1.0 } else { 0.0 };
        plan.work.clear();
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        // SAFETY: writes the handle; `Drop` destroys it.
        check("cublasLtMatmulDescCreate", unsafe {
            sys::cublasLtMatmulDescCreate(&mut plan.desc, compute, sys::cudaDataType_t::CUDA_R_32F)
        })?;
        let views = column_major(spec);
        use sys::cublasLtMatmulDescAttributes_t as Desc;
        for (attribute, view) in
            [Desc::CUBLASLT_MATMUL_DESC_TRANSA, Desc::CUBLASLT_MATMUL_DESC_TRANSB].into_iter().zip(views)
        {
            let op = if view.0 { OP_TRANSPOSE } else { OP_NONE };
            // SAFETY: the attribute is a 32-bit integer.
            check("cublasLtMatmulDescSetAttribute", unsafe {
                sys::cublasLtMatmulDescSetAttribute(plan.desc, attribute, (&raw const op).cast(), 4)
            })?;
        }
        let out = match spec.out {
            DType::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
            _ => sys::cudaDataType_t::CUDA_R_32F,
        };
        let input = sys::cudaDataType_t::CUDA_R_16BF;
        let shapes = [
            (input, views[0].1, views[0].2),
            (input, views[1].1, views[1].2),
            (out, spec.n, spec.m),
            (out, spec.n, spec.m),
        ];
        for (layout, (dtype, rows, cols)) in plan.layouts.iter_mut().zip(shapes) {
            // SAFETY: writes the handle; `Drop` destroys it.
            check("cublasLtMatrixLayoutCreate", unsafe {
                sys::cublasLtMatrixLayoutCreate(layout, dtype, rows as u64, cols as u64, rows as i64)
            })?;
            if spec.batch > 1 {
                use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
                let (count, stride) = (spec.batch as i32, (rows * cols) as i64);
                // SAFETY: the batch count is a 32-bit integer, the stride a 64-bit one, in elements.
                unsafe {
                    check(
                        "cublasLtMatrixLayoutSetAttribute",
                        sys::cublasLtMatrixLayoutSetAttribute(
                            *layout,
                            Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                            (&raw const count).cast(),
                            4,
                        ),
                    )?;
                    check(
                        "cublasLtMatrixLayoutSetAttribute",
                        sys::cublasLtMatrixLayoutSetAttribute(
                            *layout,
                            Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                            (&raw const stride).cast(),
                            8,
                        ),
                    )?;
                }
            }
        }
        Ok(plan)
    }

    fn raw_handle(&self) -> Result<sys::cublasLtHandle_t, DeviceError> {
        let none = || DeviceError::internal("a matrix product that was planned without a device was used");
        self.handle.as_ref().map(|h| h.0).ok_or_else(none)
    }

    /// The heuristic's algorithms that are legal here, best guess first.
    fn candidates(&self, key: &PlanKey) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, DeviceError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let handle = self.raw_handle()?;
        let preference = PreferenceHandle::new()?;
        preference
            .set_u64(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, Matmuls::WORKSPACE_BYTES as u64)?;
        preference.set_u32(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, REDUCTION_SCHEMES)?;
        // The library's A is our B.
        let [a, b, c, d] = key.alignment;
        preference.set_u32(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b)?;
        preference.set_u32(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a)?;
        preference.set_u32(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c)?;
        preference.set_u32(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d)?;
        let mut results = [blank_result(); CANDIDATES];
        let mut count = 0;
        let [la, lb, lc, ld] = self.layouts;
        // SAFETY: all handles are valid; the array has room for the number asked.
        let code = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.desc,
                la,
                lb,
                lc,
                ld,
                preference.0,
                CANDIDATES as i32,
                results.as_mut_ptr(),
                &mut count,
            )
        };
        let legal: Vec<_> = results
            .iter()
            .take(count.max(0) as usize)
            .filter(|r| {
                r.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
                    && r.workspaceSize <= Matmuls::WORKSPACE_BYTES
            })
            .map(|r| r.algo)
            .collect();
        if code == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED
            || (code == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && legal.is_empty())
        {
            return Err(DeviceError::internal(format!(
                "cuBLASLt has no deterministic algorithm for {:?} at alignments {:?} bytes",
                key.spec, key.alignment
            )));
        }
        check("cublasLtMatmulAlgoGetHeuristic", code)?;
        Ok(legal)
    }

    /// Whether a stored algorithm still runs this product.
    fn accepts(&self, algo: &sys::cublasLtMatmulAlgo_t) -> bool {
        let Ok(handle) = self.raw_handle() else { return false };
        let mut result = blank_result();
        let [la, lb, lc, ld] = self.layouts;
        // SAFETY: all handles are valid; writes the result.
        let code =
            unsafe { sys::cublasLtMatmulAlgoCheck(handle, self.desc, la, lb, lc, ld, algo, &mut result) };
        code == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && result.workspaceSize <= Matmuls::WORKSPACE_BYTES
    }

    fn run(&self, call: &Operands, stream: cudarc::driver::sys::CUstream) -> Result<(), DeviceError> {
        match &self.algo {
            Some(algo) => self.run_with(algo, call, stream),
            None => Err(DeviceError::internal("a matrix product without an algorithm was issued")),
        }
    }

    /// Puts the product on a stream by a given algorithm.
    pub(super) fn run_with(
        &self,
        algo: &sys::cublasLtMatmulAlgo_t,
        call: &Operands,
        stream: cudarc::driver::sys::CUstream,
    ) -> Result<(), DeviceError> {
        let handle = self.raw_handle()?;
        let alpha = 1f32;
        let pointer = |p: DevPtr| p.0 as *const c_void;
        let [la, lb, lc, ld] = self.layouts;
        // SAFETY: handles are valid; the operands have the shapes of the layouts (the op's arguments do); the
        // workspace has WORKSPACE_BYTES; alpha and beta are read before the call returns (host pointer mode).
        check("cublasLtMatmul", unsafe {
            sys::cublasLtMatmul(
                handle,
                self.desc,
                (&raw const alpha).cast(),
                pointer(call.b),
                la,
                pointer(call.a),
                lb,
                (&raw const self.beta).cast(),
                pointer(call.c),
                lc,
                call.d.0 as *mut c_void,
                ld,
                algo,
                call.workspace.0 as *mut c_void,
                Matmuls::WORKSPACE_BYTES,
                stream.cast(),
            )
        })
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: each handle was created once (null: never) and is destroyed once.
        unsafe {
            for layout in self.layouts.into_iter().filter(|l| !l.is_null()) {
                sys::cublasLtMatrixLayoutDestroy(layout);
            }
            if !self.desc.is_null() {
                sys::cublasLtMatmulDescDestroy(self.desc);
            }
        }
    }
}

fn blank_result() -> sys::cublasLtMatmulHeuristicResult_t {
    sys::cublasLtMatmulHeuristicResult_t {
        algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        workspaceSize: 0,
        state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
        wavesCount: 0.0,
        reserved: [0; 4],
    }
}

struct PreferenceHandle(sys::cublasLtMatmulPreference_t);

impl PreferenceHandle {
    fn new() -> Result<Self, DeviceError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes the handle.
        check("cublasLtMatmulPreferenceCreate", unsafe { sys::cublasLtMatmulPreferenceCreate(&mut raw) })?;
        Ok(Self(raw))
    }
    fn set_u32(
        &self,
        which: sys::cublasLtMatmulPreferenceAttributes_t,
        value: u32,
    ) -> Result<(), DeviceError> {
        self.set(which, (&raw const value).cast(), 4)
    }
    fn set_u64(
        &self,
        which: sys::cublasLtMatmulPreferenceAttributes_t,
        value: u64,
    ) -> Result<(), DeviceError> {
        self.set(which, (&raw const value).cast(), 8)
    }
    fn set(
        &self,
        which: sys::cublasLtMatmulPreferenceAttributes_t,
        value: *const c_void,
        size: usize,
    ) -> Result<(), DeviceError> {
        // SAFETY: the handle is valid; `value` points to `size` readable bytes, the attribute's size.
        check("cublasLtMatmulPreferenceSetAttribute", unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(self.0, which, value, size)
        })
    }
}

impl Drop for PreferenceHandle {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

/// A product with its algorithm and addresses: one library call puts it on a stream.
#[derive(Debug)]
pub struct MatmulPlan {
    plan: Rc<Plan>,
    call: Operands,
}

impl MatmulPlan {
    pub(super) fn issue(&self, stream: cudarc::driver::sys::CUstream) -> Result<(), DeviceError> {
        self.plan.run(&self.call, stream)
    }
    /// The nodes that the driver recorded when the plan was captured alone.
    pub(super) fn work(&self) -> &[Work] {
        &self.plan.work
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The column-major product that the plan describes, by hand, against the row-major definition.
    #[test]
    fn views_describe_the_row_major_product() {
        let (m, n, k) = (2, 3, 4);
        let a: Vec<i64> = (0..(m * k) as i64).map(|i| i * 7 % 5 - 2).collect();
        let b: Vec<i64> = (0..(k * n) as i64).map(|i| i * 3 % 7 - 3).collect();
        for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
            let spec = MatmulSpec { m, n, k, layout, batch: 1, out: DType::F32, accumulate: false };
            let [(ta, ra, ca), (tb, rb, cb)] = column_major(&spec);
            assert_eq!((ra * ca, rb * cb), (n * k, m * k));
            // Element (i, j) of a column-major view, transposed or not.
            let at = |x: &[i64], t: bool, rows: usize, i: usize, j: usize| {
                if t { x[i * rows + j] } else { x[j * rows + i] }
            };
            for i in 0..m {
                for j in 0..n {
                    let row_major = |l: usize| {
                        let left = if layout == Layout::Tn { a[l * m + i] } else { a[i * k + l] };
                        let right = if layout == Layout::Nt { b[j * k + l] } else { b[l * n + j] };
                        left * right
                    };
                    let expected: i64 = (0..k).map(row_major).sum();
                    // D^T is n x m: element (j, i) = sum over l of opA(j, l) * opB(l, i).
                    let got: i64 = (0..k).map(|l| at(&b, ta, ra, j, l) * at(&a, tb, rb, l, i)).sum();
                    assert_eq!(got, expected, "{layout:?} at {i},{j}");
                }
            }
        }
    }

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
    fn a_plan_without_a_device_cannot_run() {
        let spec = MatmulSpec {
            m: 8,
            n: 8,
            k: 8,
            layout: Layout::Nt,
            batch: 1,
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
