//! One cuBLASLt product: its descriptors, the algorithms that may run it, and the call.

use super::context::Stream;
use super::counters::SLOT_BYTES;
use super::direct::{COUNTER_BYTES, Direct};
use super::graph::Capture;
use super::matmul::{Layout, MatmulSpec, Matmuls, PlanKey};
use super::prep::DevPtr;
use super::work::Work;
use crate::device::{DeviceError, Phase};
use crate::program::DType;
use cudarc::cublaslt::sys;
use std::ffi::c_void;
use std::rc::Rc;

/// Algorithms asked of the library's heuristic, best guess first: more than it often has for one product. How many are
/// timed is the tuner's affair.
pub(super) const CANDIDATES: usize = 32;

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

/// The library's handle.
#[derive(Debug)]
pub(super) struct Handle(sys::cublasLtHandle_t);

impl Handle {
    pub fn new() -> Result<Self, DeviceError> {
        super::libraries::ensure_cublaslt()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the function exists (above); writes the handle.
        check("cublasLtCreate", unsafe { sys::cublasLtCreate(&mut handle) })?;
        Ok(Self(handle))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; every plan holds an Rc of it.
        unsafe { sys::cublasLtDestroy(self.0) };
    }
}

/// Addresses of one launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operands {
    pub a: DevPtr,
    pub b: DevPtr,
    pub c: DevPtr,
    pub d: DevPtr,
    pub workspace: DevPtr,
    pub workspace_bytes: usize,
}

/// Descriptors and algorithm of one spec. Handles are null without a device.
#[derive(Debug)]
pub(super) struct Plan {
    handle: Option<Rc<Handle>>,
    desc: sys::cublasLtMatmulDesc_t,
    /// Column-major views, in the library's order: its A is our B, its B our A, then C and D.
    layouts: [sys::cublasLtMatrixLayout_t; 4],
    pub algo: Option<sys::cublasLtMatmulAlgo_t>,
    beta: f32,
    /// Nodes of the product captured alone.
    pub work: Vec<Work>,
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
    pub fn offline(spec: &MatmulSpec) -> Self {
        use std::ptr::null_mut;
        let work = vec![Work::Kernel {
            name: format!("matmul {spec:?}").into(),
            grid: [1; 3],
            block: [1; 3],
            shared_bytes: 0,
        }];
        Self { handle: None, desc: null_mut(), layouts: [null_mut(); 4], algo: None, beta: 0.0, work }
    }

    pub fn describe(handle: &Rc<Handle>, spec: &MatmulSpec) -> Result<Self, DeviceError> {
        let mut plan = Self::offline(spec);
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
        let weight_gradient = spec.layout == Layout::Tn;
        // Our B, our A, C and D.
        let side_by_side = [weight_gradient, true, !weight_gradient, !weight_gradient];
        for ((layout, (dtype, rows, cols)), beside) in plan.layouts.iter_mut().zip(shapes).zip(side_by_side) {
            let beside = beside && spec.side_by_side;
            let lead = if beside { rows * spec.batch } else { rows };
            // SAFETY: writes the handle; `Drop` destroys it.
            check("cublasLtMatrixLayoutCreate", unsafe {
                sys::cublasLtMatrixLayoutCreate(layout, dtype, rows as u64, cols as u64, lead as i64)
            })?;
            if spec.batch > 1 {
                use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
                let stride = if beside { rows } else { rows * cols };
                let (count, stride) = (spec.batch as i32, stride as i64);
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
    pub fn candidates(&self, key: &PlanKey) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, DeviceError> {
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
    pub fn accepts(&self, algo: &sys::cublasLtMatmulAlgo_t) -> bool {
        self.workspace_of(algo).is_some_and(|bytes| bytes <= Matmuls::WORKSPACE_BYTES)
    }

    /// Bytes of workspace that an algorithm wants; `None` if it does not run this product.
    fn workspace_of(&self, algo: &sys::cublasLtMatmulAlgo_t) -> Option<usize> {
        let handle = self.raw_handle().ok()?;
        let mut result = blank_result();
        let [la, lb, lc, ld] = self.layouts;
        // SAFETY: all handles are valid; writes the result.
        let code =
            unsafe { sys::cublasLtMatmulAlgoCheck(handle, self.desc, la, lb, lc, ld, algo, &mut result) };
        (code == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS).then_some(result.workspaceSize)
    }

    /// The product as one launch of ours, with its counter at `counter` (of [`SLOT_BYTES`]); `None` if the library has
    /// more to it. `stream`: where it is captured. Run the product once before, so that its code is loaded.
    pub fn direct(
        &self,
        algo: &sys::cublasLtMatmulAlgo_t,
        call: &Operands,
        counter: DevPtr,
        stream: &Stream,
    ) -> Result<Option<Direct>, DeviceError> {
        if self.workspace_of(algo).is_none_or(|bytes| !(COUNTER_BYTES..=SLOT_BYTES).contains(&bytes)) {
            return Ok(None);
        }
        let call = Operands { workspace: counter, workspace_bytes: SLOT_BYTES, ..*call };
        let capture = Capture::begin(stream)?;
        self.run_with(algo, &call, stream.raw)?;
        Direct::of(capture.end()?, counter, stream)
    }

    pub fn run(&self, call: &Operands, stream: cudarc::driver::sys::CUstream) -> Result<(), DeviceError> {
        match &self.algo {
            Some(algo) => self.run_with(algo, call, stream),
            None => Err(DeviceError::internal("a matrix product without an algorithm was issued")),
        }
    }

    /// Puts a product of `rows` rows on a stream: of at most as many as the plan was made for. Changes the layouts
    /// of the plan, so it must not be one that [`Self::run`] uses.
    pub fn run_rows(
        &self,
        rows: usize,
        layout: Layout,
        call: &Operands,
        stream: cudarc::driver::sys::CUstream,
    ) -> Result<(), DeviceError> {
        self.raw_handle()?;
        use sys::cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_COLS as COLUMNS;
        let rows = rows as u64;
        // Row-major rows are the library's columns. All of A, C and D have them; of a weight gradient A and B.
        let of_rows = match layout {
            Layout::Nt | Layout::Nn => &self.layouts[1..],
            Layout::Tn => &self.layouts[..2],
        };
        for &of in of_rows {
            // SAFETY: the layout is alive; the attribute is a 64-bit integer.
            check("cublasLtMatrixLayoutSetAttribute", unsafe {
                sys::cublasLtMatrixLayoutSetAttribute(of, COLUMNS, (&raw const rows).cast(), 8)
            })?;
        }
        self.run(call, stream)
    }

    /// Puts the product on a stream by a given algorithm.
    pub fn run_with(
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
        // workspace has the bytes that it says; alpha and beta are read before the call returns (host pointer mode).
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
                call.workspace_bytes,
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
            let spec = MatmulSpec {
                m,
                n,
                k,
                layout,
                batch: 1,
                side_by_side: false,
                out: DType::F32,
                accumulate: false,
            };
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
}
