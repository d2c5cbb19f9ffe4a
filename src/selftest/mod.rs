//! `mbperf selftest`: what can only be checked on a GPU. Prints one line a check; any failure is exit 1.
//!
//! Every CUDA op against its f64 reference on odd sizes, those of real steps on real ones too (products and attention row
//! by sampled row), attention with both backends; eager against graph bit for bit with dropout on; replays that draw by the random state; a thousand
//! replays; capture and destroy without growth; the host cost of a launch; profiles that add up and name the launch list.

mod attention;
pub mod cases;
mod large;
pub mod ops;
mod profile;
mod steps;

use crate::args::SelftestArgs;
use crate::device::cuda::context::Context;
use crate::device::cuda::cudnn::AttentionBackend;
use crate::device::cuda::executor::CudaOptions;
use crate::ops::Op;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

/// Counts and prints.
pub struct Log<'a> {
    out: &'a mut dyn Write,
    only: Option<String>,
    except: Option<String>,
    /// Names are printed, nothing is run.
    list: bool,
    passed: usize,
    failed: usize,
    /// End of the check before.
    since: Instant,
}

impl Log<'_> {
    /// Whether a check of this name is to be run. Every check asks, so that a list of them is what they ask.
    pub fn wants(&mut self, name: &str) -> bool {
        let asked_for = self.only.as_ref().is_none_or(|o| name.contains(o.as_str()))
            && self.except.as_ref().is_none_or(|e| !name.contains(e.as_str()));
        if self.list && asked_for {
            self.passed += 1;
            let _ = writeln!(self.out, "{name}");
        }
        asked_for && !self.list
    }
    fn record_all(&mut self, lines: Vec<Line>) {
        for (name, result) in lines {
            self.record(&name, result);
        }
    }
    pub fn record(&mut self, name: &str, result: Result<String, String>) {
        let (word, text) = match &result {
            Ok(text) => ("ok    ", text),
            Err(text) => ("FAILED", text),
        };
        if result.is_ok() {
            self.passed += 1
        } else {
            self.failed += 1
        }
        let seconds = self.since.elapsed().as_secs_f64();
        self.since = Instant::now();
        let _ = writeln!(self.out, "{word} {name}: {text} ({seconds:.1} s)");
        let _ = self.out.flush();
    }
}

/// Runs all checks; true if all passed.
pub fn run(args: &SelftestArgs, options: &CudaOptions, out: &mut dyn Write) -> bool {
    let (only, except) = (args.only.clone(), args.except.clone());
    let mut log = Log { out, only, except, list: args.list, passed: 0, failed: 0, since: Instant::now() };
    // Each check opens the device for itself; while this one is held, that does not build a context each time.
    let _held = (!args.list).then(|| Context::open(options.ordinal));
    let own = attention::with(options, AttentionBackend::Own);
    if args.small {
        odd_sizes(&mut log, cases::small(), &own);
        steps::small_run(&mut log, &own);
    } else {
        odd_sizes(&mut log, cases::odd(), &own);
        large::run(&mut log, &own);
        attention::run(&mut log, options);
        steps::run(&mut log, options);
    }
    profile::run(&mut log, &own);
    let (passed, failed) = (log.passed, log.failed);
    if !args.list {
        let _ = writeln!(log.out, "{passed} passed, {failed} failed");
    }
    if passed + failed == 0 {
        // Not where a script reads names.
        crate::commands::say("no check was chosen: `mbperf selftest` without --only and --except names all");
    }
    failed == 0 && passed > 0
}

/// One check: its name, and what was found or is wrong.
type Line = (String, Result<String, String>);

/// Every op at odd shapes; one line an op family, the worst case of each output named.
fn odd_sizes(log: &mut Log, cases: Vec<Arc<dyn Op>>, options: &CudaOptions) {
    let mut by_name: BTreeMap<&'static str, Vec<Arc<dyn Op>>> = BTreeMap::new();
    for op in cases {
        by_name.entry(op.name()).or_default().push(op);
    }
    for (name, list) in by_name {
        if log.wants(name) {
            log.record_all(family(name, &list, options));
        }
    }
}

/// Checks `list`, one line for all: the worst case of each output.
fn family(name: &str, list: &[Arc<dyn Op>], options: &CudaOptions) -> Vec<Line> {
    let count = list.len();
    let mut worst: BTreeMap<&'static str, ops::Checked> = BTreeMap::new();
    let mut bad = Vec::new();
    for op in list {
        for c in ops::check(op.clone(), 7, options) {
            if !c.passed() {
                bad.push(c.clone());
            }
            let ratio = |c: &ops::Checked| if c.tolerance > 0.0 { c.error / c.tolerance } else { c.error };
            if worst.get(c.output).is_none_or(|w| ratio(&c) > ratio(w)) {
                worst.insert(c.output, c);
            }
        }
    }
    let figures: Vec<String> =
        worst.values().map(|c| format!("{} {:.1e} of {:.1e}", c.output, c.error, c.tolerance)).collect();
    if bad.is_empty() {
        let text = format!("{count} shapes, largest error {}", figures.join(", "));
        return vec![(name.to_owned(), Ok(text))];
    }
    let line = |c: &ops::Checked| {
        let why = c.problem.clone().unwrap_or_else(|| {
            format!("{} is off by {:.2e}, {:.2e} allowed", c.output, c.error, c.tolerance)
        });
        (name.to_owned(), Err(format!("{} ({} failures in {count} shapes): {why}", c.op, bad.len())))
    };
    bad.iter().take(4).map(line).collect()
}
