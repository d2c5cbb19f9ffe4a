//! Kernels without a GPU: every op prepared offline, so that each kernel is compiled as it would be run and its
//! launch is checked against its signature.

use crate::commands::Usage;
use crate::device::DeviceError;
use crate::device::cuda::libraries::set_path;
use crate::device::cuda::prep::OfflinePrep;
use crate::selftest::cases;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;

fn names() -> BTreeSet<&'static str> {
    cases::odd().iter().map(|op| op.name()).collect()
}

/// That some op's name holds `only`.
///
/// # Errors
/// None does (exit 2), with the names that there are.
pub fn known(only: Option<&str>) -> anyhow::Result<()> {
    let Some(only) = only else { return Ok(()) };
    let names = names();
    if names.iter().any(|n| n.contains(only)) {
        return Ok(());
    }
    let hint = crate::args::nearest(only, names.iter().copied())
        .map_or(String::new(), |n| format!(" Did you mean `{n}`?"));
    let names = names.into_iter().collect::<Vec<_>>().join(", ");
    let only = crate::keys::short(only);
    Err(Usage(format!("ops: no op's name holds `{only}`.{hint} Ops: {names}")).into())
}

/// Prints the names of the ops.
///
/// # Errors
/// No name holds `only` (exit 2); an output that cannot be written.
pub fn list(only: Option<&str>, out: &mut dyn Write) -> anyhow::Result<()> {
    known(only)?;
    let names = names();
    for name in names.into_iter().filter(|n| only.is_none_or(|o| n.contains(o))) {
        writeln!(out, "{name}")?;
    }
    Ok(())
}

/// A kernel may spill a few values round its loops: most that do spill 4 to 12 bytes, the delta net's backward pass 28 at
/// a key width of 64, which no model here has. More means that a change cost a kernel its registers, which is a failure
/// like one of the compiler.
const MOST_SPILLED_BYTES: usize = 32;

/// Prepares every op for each architecture, e.g. `sm_90a`; lists registers and spills. True if all compiled and
/// none spills more than `MOST_SPILLED_BYTES`.
///
/// # Errors
/// NVRTC is missing, or the output cannot be written.
pub fn run(
    archs: &[String],
    cuda_path: Option<&Path>,
    cache: Option<&Path>,
    out: &mut dyn Write,
) -> anyhow::Result<bool> {
    if let Some(path) = cuda_path {
        set_path(path);
    }
    let mut good = true;
    // One after the other: NVRTC lets one thread of a process compile at a time (`.ci/run` starts a process each).
    for arch in archs {
        let (compiled, list) = one(arch, cache)?;
        good &= compiled;
        out.write_all(list.as_bytes())?;
    }
    Ok(good)
}

/// All ops for one architecture: whether they are as they should be, and the list of kernels.
fn one(arch: &str, cache: Option<&Path>) -> anyhow::Result<(bool, String)> {
    let mut offline = OfflinePrep::new(arch)?;
    if let Some(folder) = cache {
        offline = offline.keeping(folder.to_owned());
    }
    if !offline.compiles() {
        return Err(DeviceError::Unavailable(
            "NVRTC was not found: no kernel was compiled; give its folder by --cuda_path".into(),
        )
        .into());
    }
    let (mut good, mut list) = (true, String::new());
    for op in cases::odd() {
        if let Err(e) = offline.prepare(&*op) {
            good = false;
            writeln!(list, "FAILED {arch} {op:?}: {e}")?;
        }
    }
    for (what, k) in offline.usage() {
        let spilled = k.spill_store_bytes;
        writeln!(
            list,
            "{arch:<8} {:<36} {:>3} registers {spilled:>5} B spilled {:>6} B shared  {what}",
            k.kernel, k.registers, k.shared_bytes
        )?;
        if spilled as usize > MOST_SPILLED_BYTES {
            good = false;
            writeln!(
                list,
                "FAILED {arch} {}: {spilled} bytes spilled, {MOST_SPILLED_BYTES} are allowed",
                k.kernel
            )?;
        }
    }
    Ok((good, list))
}
