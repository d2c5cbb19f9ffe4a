//! Products of all experts in one launch; the rows of each are read from offsets on the device.

mod hopper;
mod per_expert;
#[cfg(test)]
mod tests;

pub use per_expert::PerExpertGemm;

use crate::cpu_reference;
use crate::device::DeviceError;
use crate::device::cuda::matmul::Layout;
use crate::device::cuda::prep::{Config, CudaPrep, DevPtr, Issue, KernelSource, Param};
use crate::ops::rng::{normal_of, philox};
use crate::ops::{Access, ArgSpec, CpuArgs, Op, Real, Sample, tolerance};
use crate::program::DType;

const SOURCE: KernelSource = KernelSource { name: "grouped_gemm/kernel.cu", text: include_str!("kernel.cu") };

/// Rows of an output tile.
const TILE_M: usize = 128;
/// Columns of an output tile: narrow, or wide where shared memory allows (half the traffic of A).
const TILE_N: [usize; 2] = [128, 256];
/// Depth of one stage; the kernel has the same number.
const TILE_K: usize = 64;
/// Stages of the shared-memory ring: two in flight, one being multiplied.
const STAGES: usize = 3;
/// Slots start where the swizzle repeats; dynamic shared memory need not.
const RING_ALIGN: usize = 1024;
const THREADS: u32 = 256;
/// Rows start on 16-byte boundaries: eight bf16.
const ALIGN: usize = 8;

/// One product an expert e over its rows `offsets[e]..offsets[e+1]`. Args: `offsets` R I32 `[experts+1]`, `a` R
/// bf16, `b` R bf16, `d` W (U if `accumulate`) `out`.
///
/// | layout | a | b | d | |
/// | --- | --- | --- | --- | --- |
/// | `Nt` | `[rows,k]` | `[experts,n,k]` | `[rows,n]` | forward: d = a b_e^T |
/// | `Nn` | `[rows,k]` | `[experts,k,n]` | `[rows,n]` | data gradient: d = a b_e |
/// | `Tn` | `[rows,n]` | `[rows,k]` | `[experts,n,k]` | weight gradient: d_e (+)= a_e^T b_e |
///
/// `Nt` and `Nn` write zeros to rows from `offsets[experts]` on and do not accumulate. `Tn`: an expert without
/// rows leaves its d as it is when accumulating, and zero otherwise. fp32 accumulation, the old d included;
/// one rounding. n and k are multiples of 8.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupedGemm {
    pub experts: usize,
    /// Rows that buffers are sized for.
    pub rows: usize,
    /// Of these, rows that experts get on average: what FLOPs are counted of. The rest is padding.
    pub filled: usize,
    pub n: usize,
    pub k: usize,
    pub layout: Layout,
    pub out: DType,
    pub accumulate: bool,
}

/// Shared memory of the ring of stages.
fn ring_bytes(tile_n: usize) -> usize {
    (TILE_M + tile_n) * TILE_K * DType::Bf16.size() * STAGES + RING_ALIGN
}

/// Shared memory that one block can have, by compute capability (CUDA programming guide, technical
/// specifications per compute capability).
fn shared_limit(cc: u32) -> usize {
    match cc {
        80 | 87 => 163 << 10,
        90 | 100 | 103 | 110 => 227 << 10,
        _ => 99 << 10,
    }
}

impl GroupedGemm {
    fn check(&self) -> Result<(), DeviceError> {
        if self.n == 0 || self.k == 0 || !self.n.is_multiple_of(ALIGN) || !self.k.is_multiple_of(ALIGN) {
            return Err(DeviceError::Invalid(format!(
                "grouped_gemm: n = {} and k = {} must be multiples of {ALIGN}; choose hidden and expert widths that are",
                self.n, self.k
            )));
        }
        if !self.out.is_float() {
            return Err(DeviceError::internal(format!("grouped_gemm: output dtype {:?}", self.out)));
        }
        if self.accumulate && self.layout != Layout::Tn {
            return Err(DeviceError::internal("grouped_gemm: only weight gradients accumulate"));
        }
        if self.experts == 0 || self.rows.max(self.n).max(self.k) > i32::MAX as usize / 2 {
            return Err(DeviceError::Invalid(format!(
                "grouped_gemm: {} experts, {} rows, n = {}, k = {}: at least one expert and at most 2^30 rows",
                self.experts, self.rows, self.n, self.k
            )));
        }
        Ok(())
    }
    /// Rows and columns of the output matrix that tiles cut: of all rows, or of one expert.
    fn columns(&self) -> usize {
        if self.layout == Layout::Tn { self.k } else { self.n }
    }
    /// `LAYOUT` of the kernels.
    fn layout_number(&self) -> u32 {
        match self.layout {
            Layout::Nt => 0,
            Layout::Nn => 1,
            Layout::Tn => 2,
        }
    }
    /// `OUT` of the kernels.
    fn out_name(&self) -> &'static str {
        if self.out == DType::Bf16 { "bf16" } else { "float" }
    }

    fn run<T: Real>(&self, args: &mut CpuArgs<T>) -> Result<(), DeviceError> {
        let (offsets, a, b, d) = (args.ints(0)?, args.input(1)?, args.input(2)?, args.output(3)?);
        self.products(offsets, a, b, d)
    }

    /// Products in T by expert; f32 sums in the order of `matrixmultiply`.
    fn products<T: Real>(&self, offsets: &[i32], a: &[T], b: &[T], d: &mut [T]) -> Result<(), DeviceError> {
        self.check()?;
        let (n, k, rows) = (self.n, self.k, self.rows);
        let store = |x: T| if self.out == DType::Bf16 { x.bf16() } else { x.f32() };
        let at = |e: usize| (offsets[e].max(0) as usize).min(rows);
        let zero = T::of(0.0);
        for e in 0..self.experts {
            let (first, len) = (at(e), at(e + 1).saturating_sub(at(e)));
            match self.layout {
                Layout::Nt => {
                    let d = &mut d[first * n..(first + len) * n];
                    T::gemm(len, k, n, &a[first * k..], (k, 1), &b[e * n * k..], (1, k), zero, d, (n, 1));
                }
                Layout::Nn => {
                    let d = &mut d[first * n..(first + len) * n];
                    T::gemm(len, k, n, &a[first * k..], (k, 1), &b[e * n * k..], (n, 1), zero, d, (n, 1));
                }
                Layout::Tn => {
                    let d = &mut d[e * n * k..(e + 1) * n * k];
                    let beta = if self.accumulate { T::of(1.0) } else { zero };
                    if len > 0 {
                        T::gemm(n, len, k, &a[first * n..], (1, n), &b[first * k..], (k, 1), beta, d, (k, 1));
                    } else if !self.accumulate {
                        d.fill(zero);
                    }
                }
            }
        }
        if self.layout != Layout::Tn {
            d[at(self.experts) * n..].fill(zero);
        }
        d.iter_mut().for_each(|x| *x = store(*x));
        Ok(())
    }
}

impl Op for GroupedGemm {
    fn name(&self) -> &'static str {
        match self.layout {
            Layout::Nt => "grouped_gemm_nt",
            Layout::Nn => "grouped_gemm_nn",
            Layout::Tn => "grouped_gemm_tn",
        }
    }
    fn args(&self) -> Vec<ArgSpec> {
        let (e, r, n, k) = (self.experts, self.rows, self.n, self.k);
        let (a, b, d): ([usize; 2], Vec<usize>, Vec<usize>) = match self.layout {
            Layout::Nt => ([r, k], vec![e, n, k], vec![r, n]),
            Layout::Nn => ([r, k], vec![e, k, n], vec![r, n]),
            Layout::Tn => ([r, n], vec![r, k], vec![e, n, k]),
        };
        vec![
            ArgSpec::read("offsets", DType::I32, &[e + 1]).sample(Sample::Custom),
            ArgSpec::read("a", DType::Bf16, &a),
            ArgSpec::read("b", DType::Bf16, &b),
            if self.accumulate {
                ArgSpec::update("d", self.out, &d)
            } else {
                ArgSpec::write("d", self.out, &d)
            },
        ]
    }
    /// Of the rows that are filled on average: how many offsets cover is known on the device alone.
    fn flops(&self) -> f64 {
        2.0 * self.filled as f64 * self.n as f64 * self.k as f64
    }
    fn tolerance(&self, _arg: usize) -> f64 {
        let terms = if self.layout == Layout::Tn { self.rows } else { self.k };
        tolerance(self.out, terms, 0)
    }
    /// Experts without rows, with one row, and of uneven size; the last rows belong to none.
    fn sample(&self, seed: u64) -> Option<Vec<Vec<f64>>> {
        let key = [seed as u32, (seed >> 32) as u32];
        let share = (self.rows / self.experts).max(1);
        let mut offsets = vec![0usize];
        for e in 0..self.experts {
            let w = philox([e as u32, 1, 0, 0], key);
            let len = match w[0] % 5 {
                0 => 0,
                1 => 1,
                _ => share / 2 + w[1] as usize % share,
            };
            offsets.push((offsets[e] + len).min(self.rows));
        }
        let normals = |a: u32, spec: &ArgSpec| -> Vec<f64> {
            let value = |i: usize| normal_of(philox([i as u32, 2 + a, 0, 0], key));
            let round = |x: f32| if spec.dtype == DType::Bf16 { x.bf16() } else { x };
            match spec.access {
                Access::Write => Vec::new(),
                _ => (0..spec.len()).map(|i| round(value(i)) as f64).collect(),
            }
        };
        let args = self.args();
        let mut values = vec![offsets.iter().map(|&o| o as f64).collect()];
        values.extend((1..4).map(|i| normals(i as u32, &args[i])));
        Some(values)
    }
    cpu_reference!();
    fn prepare(
        &self,
        cuda: &mut CudaPrep,
        args: &[DevPtr],
        _workspace: DevPtr,
    ) -> Result<Issue, DeviceError> {
        self.check()?;
        for (spec, p) in self.args().iter().zip(args).skip(1) {
            if !p.0.is_multiple_of(16) {
                return Err(DeviceError::internal(format!(
                    "grouped_gemm: `{}` lies at {:#x}, not on a 16-byte boundary",
                    spec.name, p.0
                )));
            }
        }
        if let (true, &[offsets, a, b, d]) = (hopper::fits(self, cuda.cc), args) {
            return hopper::prepare(self, cuda, [offsets, a, b, d]);
        }
        let columns = self.columns();
        let wide = columns > TILE_N[0] && ring_bytes(TILE_N[1]) <= shared_limit(cuda.cc);
        let tile_n = TILE_N[wide as usize];
        let shared = ring_bytes(tile_n);
        let defines = [
            ("LAYOUT", self.layout_number().to_string()),
            ("TILE_N", tile_n.to_string()),
            ("OUT", self.out_name().to_string()),
            ("ACCUMULATE", (self.accumulate as u32).to_string()),
        ];
        let kernel = cuda.kernel(SOURCE, "grouped_gemm", &defines, shared as u32)?;
        // Nt, Nn: at most one partly filled tile an expert and one where the padding begins.
        let row_tiles = match self.layout {
            Layout::Tn => self.experts * self.n.div_ceil(TILE_M),
            _ => self.rows.div_ceil(TILE_M) + self.experts + 1,
        };
        let config = Config {
            shared_bytes: shared as u32,
            ..Config::linear(row_tiles * columns.div_ceil(tile_n), THREADS)
        };
        let mut params: Vec<Param> = args.iter().map(|&p| Param::Ptr(p)).collect();
        params.extend([self.experts, self.rows, self.n, self.k].map(|v| Param::I32(v as i32)));
        cuda.launch(&kernel, config, &params)
    }
}
