//! `mbperf doctor`: what of the machine mbperf found, where it looked, and what needs it. Works with nothing there.

use crate::device::cuda::context::Context;
use crate::device::cuda::libraries::{self, Availability, Library};
use crate::device::cuda::target;
use std::io::{self, Write};

/// Prints the report. True when a run on a GPU has all it needs.
pub fn report(out: &mut impl Write) -> io::Result<bool> {
    writeln!(out, "Libraries")?;
    let mut complete = true;
    for library in Library::ALL {
        complete &= describe(library, out)?;
    }
    writeln!(
        out,
        "\nFolders searched beside the loader's own (set --cuda_path or {} to add one)",
        libraries::PATH_VARIABLE
    )?;
    let folders = libraries::folders();
    for folder in &folders {
        writeln!(out, "  {}", folder.display())?;
    }
    if folders.is_empty() {
        writeln!(out, "  none exists")?;
    }
    writeln!(out, "\nDevices")?;
    let ready = devices(out)?;
    let answer = match (ready, complete) {
        (true, true) => "A run on the GPU has all it needs.",
        (true, false) => "There is a GPU, but a library that every run needs is missing (see above).",
        (false, _) => "There is no usable GPU; `--device cpu` works.",
    };
    writeln!(out, "\n{answer}")?;
    Ok(ready && complete)
}

/// One library. False when it is missing and every GPU run needs it.
fn describe(library: Library, out: &mut impl Write) -> io::Result<bool> {
    let needed = matches!(library, Library::Driver | Library::Nvrtc | Library::CublasLt);
    match libraries::find(library) {
        Ok(found) => {
            let version = found.version.as_deref().unwrap_or("version not told");
            let path = found.path.map_or(found.opened_as, |p| p.display().to_string());
            writeln!(out, "  {:12} {version:18} {path}", library.title())?;
        }
        Err(reason) => {
            writeln!(out, "  {:12} not found", library.title())?;
            writeln!(out, "  {:12}   tried: {reason}", "")?;
        }
    }
    writeln!(out, "  {:12}   for: {}", "", library.needed_by())?;
    Ok(!needed || libraries::find(library).is_ok())
}

fn devices(out: &mut impl Write) -> io::Result<bool> {
    match libraries::probe() {
        Availability::NoDriver(m) | Availability::NoDevice(m) | Availability::Unusable(m) => {
            writeln!(out, "  {m}")?;
            Ok(false)
        }
        Availability::Ready(count) => {
            let mut usable = false;
            for ordinal in 0..count {
                match Context::open(ordinal) {
                    Ok(c) => {
                        let free = c.memory().map_or(0, |m| m.0);
                        writeln!(
                            out,
                            "  {ordinal}: {}, compute capability {}.{}, {} multiprocessors, {} MiB ({} free), driver for CUDA {}.{}, {}",
                            c.name,
                            c.cc / 10,
                            c.cc % 10,
                            c.sm_count,
                            c.total_bytes >> 20,
                            free >> 20,
                            c.driver_cuda / 1000,
                            c.driver_cuda % 1000 / 10,
                            c.uuid
                        )?;
                        usable |= kernels(&c, out)?;
                    }
                    Err(e) => writeln!(out, "  {ordinal}: {e}")?,
                }
            }
            Ok(usable)
        }
    }
}

/// What kernels would be compiled for. False where device, NVRTC and driver do not go together.
fn kernels(context: &Context, out: &mut impl Write) -> io::Result<bool> {
    if libraries::find(Library::Nvrtc).is_err() {
        // Said above.
        return Ok(true);
    }
    match target::of(context) {
        Ok((target, parties)) => {
            writeln!(out, "     kernels are compiled for {}", target.name)?;
            if let Some(notice) = target::notice(&target, &parties) {
                writeln!(out, "     {notice}")?;
            }
            Ok(true)
        }
        Err(e) => {
            writeln!(out, "     no kernels: {e}")?;
            Ok(false)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_library_is_reported_with_its_use() {
        let mut text = Vec::new();
        report(&mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        for library in Library::ALL {
            assert!(text.contains(library.title()) && text.contains(library.needed_by()), "{text}");
        }
        assert!(text.contains("Devices"));
    }
}
