//! `mbperf ops [NAME] <run's options>`: each op of that run's step alone, at its shapes: time, rates and shares of
//! ceilings that are measured in the same process (a large copy, a large product), and of the best of cuBLASLt's list.

mod bench;
pub(crate) mod options;
mod products;

use crate::args::Args;
use crate::commands::Usage;
use crate::device::DeviceError;
use crate::device::cuda::context::Context;
use crate::device::cuda::executor::CudaOptions;
use crate::device::cuda::matmul::Layout;
use crate::ops::Op;
use crate::ops::gemm::{Accumulate, Gemm};
use crate::ops::step::Copy;
use crate::program::{DType, Program};
use bench::{Bench, LAUNCHES};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::Arc;

/// Elements of the copy that is the ceiling of bytes: 1 GiB is read and 1 GiB written, past any second-level cache (50 MiB
/// on an H200).
const COPIED: usize = 1 << 29;
/// Rows, columns and depth of the product that is the ceiling of FLOP/s: large enough for the library's best kernels.
const SQUARE: usize = 8192;

/// Columns of the CSV form. What `cut -d, -f1-8` of a script takes stays in front; the shape, which holds commas, is last.
const COLUMNS: [&str; 13] = [
    "op",
    "launches_per_step",
    "time_us",
    "tflops",
    "gb_per_s",
    "share_of_ceiling",
    "ceiling_tflops",
    "ceiling_gb_per_s",
    "bytes",
    "list_best_us",
    "share_of_list_best",
    "attention_backend",
    "shape",
];

/// An op and its launches in the step.
pub type Counted = (Arc<dyn Op>, usize);

/// One op's figures.
#[derive(Debug, Clone, Default)]
pub struct Figure {
    pub name: &'static str,
    pub what: String,
    /// Launches of it in the step.
    pub count: usize,
    pub time_us: f64,
    pub tflops: f64,
    pub gb_per_s: f64,
    /// Bytes that one launch must move.
    pub bytes: f64,
    /// Of a product: the fastest algorithm of cuBLASLt's list.
    pub list_best_us: Option<f64>,
    /// Of attention: the kernels that ran.
    pub attention: Option<String>,
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

    /// Time of the list's best over this one's: under 1 another algorithm is faster.
    pub fn share_of_list_best(&self) -> Option<f64> {
        Some(self.list_best_us? / self.time_us)
    }

    /// A line of the CSV form.
    fn csv(&self, c: &Ceilings) -> String {
        let text = |figure: Option<f64>, digits| figure.map_or(String::new(), |x| format!("{x:.digits$}"));
        let cells = [
            self.name.to_owned(),
            self.count.to_string(),
            format!("{:.3}", self.time_us),
            format!("{:.2}", self.tflops),
            format!("{:.1}", self.gb_per_s),
            format!("{:.4}", self.share(c)),
            format!("{:.1}", c.tflops),
            format!("{:.1}", c.gb_per_s),
            format!("{:.0}", self.bytes),
            text(self.list_best_us, 3),
            text(self.share_of_list_best(), 4),
            self.attention.clone().unwrap_or_default(),
            format!("\"{}\"", self.what.replace('"', "\"\"")),
        ];
        cells.join(",")
    }

    /// A line of the table.
    fn line(&self, c: &Ceilings) -> String {
        let text = |figure: Option<f64>| figure.map_or("-".to_owned(), |x| format!("{x:.2}"));
        let ran = self.attention.as_ref().map_or(String::new(), |a| format!("{a}: "));
        format!(
            "{:<24}{:>9}{:>11.2}{:>10.1}{:>9.0}{:>7.2}{:>11}{:>8}  {ran}{}",
            self.name,
            self.count,
            self.time_us,
            self.tflops,
            self.gb_per_s,
            self.share(c),
            text(self.list_best_us),
            text(self.share_of_list_best()),
            self.what
        )
    }
}

/// Ops by name and what they are of.
pub type Chosen = BTreeMap<(&'static str, String), Counted>;

/// Distinct ops of the step whose name holds `only`. What waits for the host has no device time of its own.
///
/// # Errors
/// There is none of that name (exit 2).
pub fn chosen(program: &Program, only: Option<&str>) -> Result<Chosen, Usage> {
    let mut all = Chosen::new();
    for l in
        program.launches.iter().filter(|l| !l.host_sync() && only.is_none_or(|o| l.op.name().contains(o)))
    {
        all.entry((l.op.name(), format!("{:?}", l.op))).or_insert((l.op.clone(), 0)).1 += 1;
    }
    if all.is_empty() {
        let names: BTreeSet<&str> = program.launches.iter().map(|l| l.op.name()).collect();
        let names = names.into_iter().collect::<Vec<_>>().join(", ");
        return Err(Usage(format!(
            "ops: this run's step has no op whose name holds `{}`. It has: {names}",
            only.unwrap_or_default()
        )));
    }
    Ok(all)
}

/// Times every one of `ops`.
///
/// # Errors
/// A device failure; an output that cannot be written.
pub fn run(args: &Args, ops: Chosen, options: &CudaOptions, out: &mut dyn Write) -> anyhow::Result<()> {
    // Between two ops nothing else holds the context: it would be made anew, and the libraries' kernels loaded, for each.
    let _held = Context::open(options.ordinal);
    let ceilings = ceilings(options)?;
    let csv = matches!(args.mbperf.format, crate::args::Format::Csv);
    if csv {
        writeln!(out, "{}", COLUMNS.join(","))?;
    } else {
        writeln!(
            out,
            "ceilings here: copy {:.0} GB/s (1 GiB past the L2, read + written), product {SQUARE}^3 {:.0} TFLOP/s; list \
             best: the fastest of cuBLASLt's list\n",
            ceilings.gb_per_s, ceilings.tflops
        )?;
        writeln!(
            out,
            "{:<24}{:>9}{:>11}{:>10}{:>9}{:>7}{:>11}{:>8}  shape",
            "op", "launches", "us", "TFLOP/s", "GB/s", "share", "list best", "of it"
        )?;
    }
    for ((name, what), (op, count)) in ops {
        let timed = Bench::open(&op, options, LAUNCHES).and_then(|bench| {
            let attention = bench.attention();
            Ok((products::time(&op, bench, options)?, attention))
        });
        let (times, attention) = match timed {
            Ok(timed) => timed,
            Err(DeviceError::OutOfMemory { .. }) => {
                let why = format!("{name}: its buffers do not fit the device ({what})");
                // A line of words is no record.
                if csv {
                    crate::commands::say(&why)
                } else {
                    writeln!(out, "{why}")?
                }
                continue;
            }
            Err(e) => return Err(e.into()),
        };
        let f = Figure {
            name,
            what,
            count,
            time_us: times.chosen_us,
            tflops: op.flops() / times.chosen_us / 1e6,
            gb_per_s: op.bytes() / times.chosen_us / 1e3,
            bytes: op.bytes(),
            list_best_us: times.list_best_us,
            attention,
        };
        writeln!(out, "{}", if csv { f.csv(&ceilings) } else { f.line(&ceilings) })?;
        out.flush()?;
    }
    Ok(())
}

/// Copy bandwidth past the L2, and the rate of a large product.
fn ceilings(options: &CudaOptions) -> Result<Ceilings, DeviceError> {
    let time = |op: Arc<dyn Op>| Bench::open(&op, options, LAUNCHES)?.time();
    let product = Gemm {
        m: SQUARE,
        n: SQUARE,
        k: SQUARE,
        layout: Layout::Nt,
        batch: 1,
        out: DType::Bf16,
        accumulate: Accumulate::No,
    };
    let copy = Copy { dtype: DType::Bf16, len: COPIED };
    let (bytes, flops) = (copy.bytes(), product.flops());
    Ok(Ceilings {
        gb_per_s: bytes / time(Arc::new(copy))? / 1e3,
        tflops: flops / time(Arc::new(product))? / 1e6,
    })
}

#[cfg(test)]
mod tests;
