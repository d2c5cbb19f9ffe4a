//! One op at a time: on the device, against the f64 reference on the same inputs.

use crate::capture::{ArmPlan, RunPlan, Segment};
use crate::device::cuda::executor::{CudaExecutor, CudaOptions};
use crate::device::{Arm, DeviceError, Executor};
use crate::ops::collective::CountsToHost;
use crate::ops::cpu_args::{CpuArgs, Slot};
use crate::ops::rng::philox;
use crate::ops::{Access, ArgSpec, Op, Sample};
use crate::program::builder::Builder;
use crate::program::{BufId, DType, Init, Lifetime, memory};
use half::bf16;
use rayon::prelude::*;
use std::sync::Arc;

/// Outcome of one output of one op.
#[derive(Debug, Clone)]
pub struct Checked {
    pub op: String,
    pub output: &'static str,
    pub error: f64,
    pub tolerance: f64,
    pub problem: Option<String>,
}

impl Checked {
    pub fn passed(&self) -> bool {
        self.problem.is_none() && self.error <= self.tolerance
    }
}

/// A value as its buffer would hold it.
fn stored(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::Bf16 => bf16::from_f64(x).to_f64(),
        DType::F32 => x as f32 as f64,
        _ => x,
    }
}

/// Inputs for every argument, in f64; outputs get NaN.
pub fn inputs(op: &dyn Op, specs: &[ArgSpec], seed: u64) -> Vec<Vec<f64>> {
    let custom = op.sample(seed);
    let draw = |arg: usize, i: usize| philox([i as u32, arg as u32, 0, 0], [seed as u32, 0xC0FFEE]);
    specs
        .iter()
        .enumerate()
        .map(|(arg, spec)| {
            if spec.access == Access::Write {
                return vec![f64::NAN; spec.len()];
            }
            if let Some(values) = custom.as_ref().and_then(|c| c.get(arg)).filter(|v| v.len() == spec.len()) {
                return values.iter().map(|&x| stored(spec.dtype, x)).collect();
            }
            (0..spec.len())
                .into_par_iter()
                .map(|i| {
                    let w = draw(arg, i);
                    stored(
                        spec.dtype,
                        match spec.sample {
                            Sample::Normal(scale) => crate::ops::rng::normal_of(w) as f64 * scale,
                            Sample::Uniform(low, high) => {
                                low + (high - low) * crate::ops::rng::unit(w[0]) as f64
                            }
                            Sample::Below(n) => (w[0] % n.max(1)) as f64,
                            Sample::Custom => 0.0,
                        },
                    )
                })
                .collect()
        })
        .collect()
}

/// Runs the f64 reference; returns every argument afterwards.
pub fn reference(op: &dyn Op, specs: &[ArgSpec], values: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, DeviceError> {
    enum Held {
        F(Vec<f64>),
        I(Vec<i32>),
    }
    let mut held: Vec<Held> = specs
        .iter()
        .zip(values)
        .map(|(s, v)| {
            if s.dtype.is_float() {
                Held::F(v.clone())
            } else {
                Held::I(v.iter().map(|x| if x.is_nan() { -1 } else { *x as i64 as i32 }).collect())
            }
        })
        .collect();
    let slots = held
        .iter_mut()
        .zip(specs)
        .map(|(h, s)| match (h, s.access) {
            (Held::F(v), Access::Read) => Slot::In(&v[..]),
            (Held::F(v), _) => Slot::Out(&mut v[..]),
            (Held::I(v), Access::Read) => Slot::IntIn(&v[..]),
            (Held::I(v), _) => Slot::IntOut(&mut v[..]),
        })
        .collect();
    op.cpu_f64(&mut CpuArgs::new(op.name(), slots))?;
    Ok(held
        .into_iter()
        .map(|h| match h {
            Held::F(v) => v,
            Held::I(v) => v.into_iter().map(f64::from).collect(),
        })
        .collect())
}

/// Runs an op once on the device; returns every argument afterwards.
pub fn on_device(
    op: Arc<dyn Op>,
    specs: &[ArgSpec],
    values: &[Vec<f64>],
    options: &CudaOptions,
) -> Result<Vec<Vec<f64>>, DeviceError> {
    let mut b = Builder::default();
    let mut host_copies = Vec::new();
    let ids: Vec<BufId> = specs
        .iter()
        .enumerate()
        .map(|(i, s)| {
            let lifetime =
                if op.host_sync() && i + 1 == specs.len() { Lifetime::Host } else { Lifetime::StepState };
            if op.host_inputs().contains(&i) {
                // Its values come from a device buffer, as in a step.
                let host = format!("host{i}.{}", s.name);
                let host = b.buffer(&host, s.dtype, &s.shape, Lifetime::Host, Init::Poison);
                host_copies.push((i, host, s.len()));
            }
            b.buffer(&format!("arg{i}.{}", s.name), s.dtype, &s.shape, lifetime, Init::Poison)
        })
        .collect();
    let mut args = ids.clone();
    for (i, host, len) in host_copies {
        b.launch(CountsToHost { len }, &[ids[i], host]);
        args[i] = host;
    }
    b.launch_shared(op, &args);
    let program = b.finish().map_err(DeviceError::internal)?;
    let launches = program.launches.len();
    let plan = memory::plan(&program, &vec![false; launches]);
    let segments = vec![Segment { launches: 0..launches, graph: None, label: "op".into() }];
    let run = RunPlan {
        eager: ArmPlan { program: Arc::new(program), segments, memory: plan },
        graph: None,
        seed: 1,
    };
    let mut device = CudaExecutor::new(&run, options.clone())?;
    device.reset()?;
    for ((&id, spec), v) in ids.iter().zip(specs).zip(values) {
        if spec.access != Access::Write {
            device.write_buffer(id, v)?;
        }
    }
    let step = device.submit(Arm::Eager)?;
    device.wait(step)?;
    ids.iter().map(|&id| device.read_f64(id)).collect()
}

/// Relative norm error; infinite when a value is not finite where the reference's is.
pub fn norm_error(got: &[f64], want: &[f64]) -> f64 {
    let (mut diff, mut norm) = (0.0, 0.0);
    for (g, w) in got.iter().zip(want) {
        if !g.is_finite() && w.is_finite() {
            return f64::INFINITY;
        }
        if w.is_finite() {
            diff += (g - w) * (g - w);
            norm += w * w;
        }
    }
    if norm == 0.0 { diff.sqrt() } else { (diff / norm).sqrt() }
}

/// Checks every output of one op; integers must be equal. A second run must give the same bits.
pub fn check(op: Arc<dyn Op>, seed: u64, options: &CudaOptions) -> Vec<Checked> {
    let specs = op.args();
    let name = format!("{op:?}");
    let fail = |problem: String| {
        vec![Checked {
            op: name.clone(),
            output: "-",
            error: f64::NAN,
            tolerance: 0.0,
            problem: Some(problem),
        }]
    };
    let values = inputs(&*op, &specs, seed);
    let run = || on_device(op.clone(), &specs, &values, options);
    let (got, again) = match (run(), run()) {
        (Ok(a), Ok(b)) => (a, b),
        (Err(e), _) | (_, Err(e)) => return fail(e.to_string()),
    };
    let want = match reference(&*op, &specs, &values) {
        Ok(w) => w,
        Err(e) => return fail(format!("reference: {e}")),
    };
    let outputs = specs.iter().enumerate().filter(|(_, s)| s.access != Access::Read && !s.is_empty());
    outputs
        .map(|(i, s)| {
            let same = got[i].iter().zip(&again[i]).all(|(a, b)| a.to_bits() == b.to_bits());
            let (error, tolerance) = if s.dtype.is_float() {
                (norm_error(&got[i], &want[i]), op.tolerance(i))
            } else {
                (got[i].iter().zip(&want[i]).filter(|(a, b)| a != b).count() as f64, 0.0)
            };
            let problem = (!same).then(|| "two runs gave different bits".to_string());
            Checked { op: name.clone(), output: s.name, error, tolerance, problem }
        })
        .collect()
}
