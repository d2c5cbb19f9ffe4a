//! Kernels without a GPU: every op prepared offline, so that each kernel is compiled as it would be run and its
//! launch is checked against its signature.

use crate::device::DeviceError;
use crate::device::cuda::libraries::set_path;
use crate::device::cuda::prep::OfflinePrep;
use crate::selftest::cases;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;

/// Prints the ops and what they are.
pub fn list(only: Option<&str>, out: &mut dyn Write) -> anyhow::Result<()> {
    let names: BTreeSet<&str> = cases::odd().iter().map(|op| op.name()).collect();
    for name in names.into_iter().filter(|n| only.is_none_or(|o| n.contains(o))) {
        writeln!(out, "{name}")?;
    }
    Ok(())
}

/// Prepares every op for each architecture, e.g. `sm_90a`; lists registers and spills. True if all compiled.
///
/// # Errors
/// NVRTC is missing, or the output cannot be written.
pub fn run(archs: &[String], cuda_path: Option<&Path>, out: &mut dyn Write) -> anyhow::Result<bool> {
    if let Some(path) = cuda_path {
        set_path(path);
    }
    let mut good = true;
    for arch in archs {
        let mut offline = OfflinePrep::new(arch)?;
        if !offline.compiles() {
            return Err(DeviceError::Unavailable(
                "NVRTC was not found: no kernel was compiled; give its folder by --cuda_path".into(),
            )
            .into());
        }
        for op in cases::odd() {
            if let Err(e) = offline.prepare(&*op) {
                good = false;
                writeln!(out, "FAILED {arch} {op:?}: {e}")?;
            }
        }
        for (what, k) in offline.usage() {
            writeln!(
                out,
                "{arch:<8} {:<36} {:>3} registers {:>5} B spilled {:>6} B shared  {what}",
                k.kernel, k.registers, k.spill_store_bytes, k.shared_bytes
            )?;
        }
    }
    Ok(good)
}
