//! `mbperf ops [NAME] <run's options>`: each op of that run's step alone, at its shapes: time, rates and shares of
//! ceilings that are measured in the same process (a large copy, a large product).

use crate::args::Args;
use crate::capture::{ArmPlan, RunPlan, Segment};
use crate::commands::Usage;
use crate::device::cuda::executor::{CudaExecutor, CudaOptions};
use crate::device::cuda::matmul::Layout;
use crate::device::{Arm, DeviceError, Executor};
use crate::measure::stats;
use crate::ops::gemm::{Accumulate, Gemm};
use crate::ops::rng::philox;
use crate::ops::step::Copy;
use crate::ops::{Access, ArgSpec, Op, Sample};
use crate::program::builder::Builder;
use crate::program::{BufId, DType, Init, Lifetime, Program, memory};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::Arc;

/// Bytes that one round of launches touches at least, so that the L2 cache (50 MiB on an H200) cannot hold them.
const PAST_L2: usize = 256 << 20;
/// Most sets of buffers that are rotated among.
const MAX_SETS: usize = 16;
/// Launches of a graph, and replays that are timed; the median over replays counts.
const LAUNCHES: usize = 24;
const REPLAYS: usize = 9;

/// An op and its launches in the step.
type Counted = (Arc<dyn Op>, usize);

/// One op's figures.
#[derive(Debug, Clone)]
pub struct Figure {
    pub name: &'static str,
    pub what: String,
    /// Launches of it in the step.
    pub count: usize,
    pub time_us: f64,
    pub tflops: f64,
    pub gb_per_s: f64,
}

/// What the chip gives here and now.
#[derive(Debug, Clone, Copy)]
pub struct Ceilings {
    pub tflops: f64,
    pub gb_per_s: f64,
}

impl Figure {
    /// The larger of the shares of the two ceilings.
    pub fn share(&self, c: &Ceilings) -> f64 {
        (self.tflops / c.tflops).max(self.gb_per_s / c.gb_per_s)
    }
}

/// Times every distinct op of `program` whose name holds `only`.
///
/// # Errors
/// No op of that name in the step (exit 2); a device failure; an output that cannot be written.
pub fn run(
    args: &Args,
    program: &Program,
    only: Option<&str>,
    options: &CudaOptions,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let mut distinct: BTreeMap<(&str, String), Counted> = BTreeMap::new();
    for l in
        program.launches.iter().filter(|l| !l.host_sync() && only.is_none_or(|o| l.op.name().contains(o)))
    {
        distinct.entry((l.op.name(), format!("{:?}", l.op))).or_insert((l.op.clone(), 0)).1 += 1;
    }
    if distinct.is_empty() {
        let names: BTreeSet<&str> = program.launches.iter().map(|l| l.op.name()).collect();
        let names = names.into_iter().collect::<Vec<_>>().join(", ");
        return Err(Usage(format!(
            "ops: this run's step has no op whose name holds `{}`. It has: {names}",
            only.unwrap_or_default()
        ))
        .into());
    }
    let copy = time(Arc::new(Copy { dtype: DType::Bf16, len: 1 << 29 }), options)?;
    let square = 8192;
    let product = Gemm {
        m: square,
        n: square,
        k: square,
        layout: Layout::Nt,
        batch: 1,
        out: DType::Bf16,
        accumulate: Accumulate::No,
    };
    let flops = product.flops();
    let product = time(Arc::new(product), options)?;
    let ceilings = Ceilings { tflops: flops / product / 1e6, gb_per_s: (4u64 << 29) as f64 / copy / 1e3 };
    let csv = matches!(args.mbperf.format, crate::args::Format::Csv);
    if csv {
        writeln!(
            out,
            "op,launches_per_step,time_us,tflops,gb_per_s,share_of_ceiling,ceiling_tflops,ceiling_gb_per_s,shape"
        )?;
    } else {
        writeln!(
            out,
            "ceilings here: copy {:.0} GB/s (read + written), product 8192^3 {:.0} TFLOP/s\n",
            ceilings.gb_per_s, ceilings.tflops
        )?;
        writeln!(
            out,
            "{:<24}{:>9}{:>11}{:>10}{:>9}{:>7}  shape",
            "op", "launches", "us", "TFLOP/s", "GB/s", "share"
        )?;
    }
    for ((name, what), (op, count)) in distinct {
        let time_us = match time(op.clone(), options) {
            Ok(t) => t,
            Err(DeviceError::OutOfMemory { .. }) => {
                writeln!(out, "{name}: its buffers do not fit the device ({what})")?;
                continue;
            }
            Err(e) => return Err(e.into()),
        };
        let f = Figure {
            name,
            what,
            count,
            time_us,
            tflops: op.flops() / time_us / 1e6,
            gb_per_s: op.bytes() / time_us / 1e3,
        };
        if csv {
            let shape = f.what.replace('"', "\"\"");
            writeln!(
                out,
                "{name},{count},{:.3},{:.2},{:.1},{:.4},{:.1},{:.1},\"{shape}\"",
                f.time_us,
                f.tflops,
                f.gb_per_s,
                f.share(&ceilings),
                ceilings.tflops,
                ceilings.gb_per_s
            )?;
        } else {
            writeln!(
                out,
                "{name:<24}{count:>9}{:>11.2}{:>10.1}{:>9.0}{:>7.2}  {}",
                f.time_us,
                f.tflops,
                f.gb_per_s,
                f.share(&ceilings),
                f.what
            )?;
        }
        out.flush()?;
    }
    Ok(())
}

/// Median microseconds of one launch, from a graph of many over rotating buffers.
fn time(op: Arc<dyn Op>, options: &CudaOptions) -> Result<f64, DeviceError> {
    let specs = op.args();
    let bytes: usize = specs.iter().map(|s| s.bytes()).sum();
    let sets = PAST_L2.div_ceil(bytes.max(1)).clamp(1, MAX_SETS);
    let launches = LAUNCHES.max(sets);
    let mut b = Builder::default();
    let buffers: Vec<Vec<BufId>> = (0..sets)
        .map(|set| {
            let one = |(i, s): (usize, &ArgSpec)| {
                let init = if s.dtype.is_float() && s.access != Access::Write {
                    Init::Normal { std: 1.0 }
                } else {
                    Init::Const { value: 0.0 }
                };
                b.buffer(&format!("set{set}.arg{i}"), s.dtype, &s.shape, Lifetime::StepState, init)
            };
            specs.iter().enumerate().map(one).collect()
        })
        .collect();
    for i in 0..launches {
        b.launch_shared(op.clone(), &buffers[i % sets]);
    }
    let program = Arc::new(b.finish().map_err(DeviceError::internal)?);
    let arm = |graph: Option<usize>| {
        let segments = vec![Segment { launches: 0..launches, graph, label: op.name().into() }];
        ArmPlan {
            program: program.clone(),
            segments,
            memory: memory::plan(&program, &vec![graph.is_some(); launches]),
        }
    };
    let plan = RunPlan { eager: arm(None), graph: Some(arm(Some(0))), seed: 1 };
    let mut device = CudaExecutor::new(&plan, options.clone())?;
    device.reset()?;
    // Floats come from the device; indices and offsets need the op's own structure.
    for (i, s) in specs.iter().enumerate().filter(|(_, s)| !s.dtype.is_float() && s.access != Access::Write) {
        let values = integers(&*op, i, s);
        for set in &buffers {
            device.write_buffer(set[i], &values)?;
        }
    }
    let step = device.submit(Arm::Eager)?;
    device.wait(step)?;
    device.capture()?;
    let mut spans = Vec::new();
    for _ in 0..REPLAYS + 2 {
        let step = device.submit(Arm::Graph)?;
        spans.extend(device.wait(step)?.device_span_ms);
    }
    device.destroy_graphs()?;
    let median = stats::median(spans.get(2..).unwrap_or_default())
        .ok_or_else(|| DeviceError::internal("no replay was timed"))?;
    Ok(median * 1e3 / launches as f64)
}

/// Values of an integer input. Rows are shared evenly among experts, so that no row is padding.
fn integers(op: &dyn Op, arg: usize, spec: &ArgSpec) -> Vec<f64> {
    if spec.name == "offsets" {
        let rows = op.args().iter().find(|a| a.dtype == DType::Bf16).map_or(0, |a| a.shape[0]);
        let experts = spec.len() - 1;
        return (0..=experts).map(|e| (e * rows / experts.max(1)) as f64).collect();
    }
    if let Sample::Below(n) = spec.sample {
        let word = |i: usize| philox([i as u32, arg as u32, 0, 0], [11, 0])[0];
        return (0..spec.len()).map(|i| (word(i) % n.max(1)) as f64).collect();
    }
    let custom = op.sample(11).and_then(|mut all| (arg < all.len()).then(|| all.swap_remove(arg)));
    custom.filter(|v| v.len() == spec.len()).unwrap_or_else(|| vec![0.0; spec.len()])
}
