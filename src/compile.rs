//! Kernels without a GPU: every op prepared offline, so that each kernel is compiled as it would be run and its
//! launch is checked against its signature.

use crate::device::DeviceError;
use crate::device::cuda::prep::{DevPtr, OfflinePrep};
use crate::selftest::cases;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;

/// Prints the ops and what they are.
pub fn list(out: &mut dyn Write) -> anyhow::Result<()> {
    let names: BTreeSet<&str> = cases::odd().iter().map(|op| op.name()).collect();
    for name in names {
        writeln!(out, "{name}")?;
    }
    Ok(())
}

/// Prepares every op for each architecture, e.g. `sm_90a`; lists registers and spills. True if all compiled.
///
/// # Errors
/// NVRTC is missing, or the output cannot be written.
pub fn run(archs: &[String], cuda_path: Option<&Path>, out: &mut dyn Write) -> anyhow::Result<bool> {
    let mut good = true;
    for arch in archs {
        let mut offline = OfflinePrep::new(arch, cuda_path)?;
        if !offline.compiles() {
            return Err(DeviceError::Unavailable("NVRTC was not found: no kernel was compiled; give its folder by --cuda_path".into()).into());
        }
        for op in cases::odd() {
            // Any distinct, aligned addresses do: nothing is launched.
            let args: Vec<DevPtr> = (1..=op.args().len() as u64).map(|i| DevPtr(i << 32)).collect();
            if let Err(e) = op.prepare(&mut offline.prep(), &args, DevPtr(1 << 48)) {
                good = false;
                writeln!(out, "FAILED {arch} {op:?}: {e}")?;
            }
        }
        for k in offline.compiled() {
            writeln!(out, "{arch:<8} {:<36} {:>3} registers {:>5} B stack {:>5} B spilled {:>6} B shared  {}", k.entry, k.registers, k.stack_bytes, k.spill_bytes, k.shared_bytes, k.defines)?;
        }
    }
    Ok(good)
}
