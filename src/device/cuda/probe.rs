//! Whether there is something to run on: asks the driver, once, whatever is installed.

use super::libraries::{Library, OLDEST_DRIVER, ensure, find};
use std::env;
use std::sync::OnceLock;

/// Whether there is something to run on, for `--device auto`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Availability {
    /// No driver library: the CPU takes over.
    NoDriver(String),
    /// A driver, but no GPU that this process may see: the CPU takes over.
    NoDevice(String),
    /// Present, but too old or broken: exit 3.
    Unusable(String),
    /// So many devices.
    Ready(usize),
}

/// Asks the driver. Never panics, whatever is installed. The first answer is kept.
pub fn probe() -> Availability {
    static ONCE: OnceLock<Availability> = OnceLock::new();
    ONCE.get_or_init(ask_driver).clone()
}

fn ask_driver() -> Availability {
    use cudarc::driver::sys;
    if let Err(reason) = find(Library::Driver) {
        return Availability::NoDriver(format!("no NVIDIA driver: {reason}"));
    }
    // The version first: an old driver lacks some symbols, and should be told that it is old.
    if let Err(e) = ensure(Library::Driver, &["cuDriverGetVersion", "cuInit", "cuDeviceGetCount"]) {
        return Availability::Unusable(e.to_string());
    }
    let (mut version, mut count) = (0, 0);
    // SAFETY: the three functions exist (above); they write the integers passed.
    let code = unsafe { sys::cuDriverGetVersion(&mut version) };
    if code == sys::CUresult::CUDA_ERROR_STUB_LIBRARY {
        return Availability::NoDriver("libcuda is the toolkit's stub: no NVIDIA driver".to_owned());
    }
    if code != sys::CUresult::CUDA_SUCCESS {
        return Availability::Unusable(format!(
            "cuDriverGetVersion failed with {code:?}; reinstall the driver"
        ));
    }
    // SAFETY: as above.
    let code = unsafe { sys::cuInit(0) };
    let no_device = || {
        let hidden = match env::var("CUDA_VISIBLE_DEVICES") {
            Ok(v) => format!(" (CUDA_VISIBLE_DEVICES={v:?} may hide it)"),
            Err(_) => String::new(),
        };
        Availability::NoDevice(format!("the NVIDIA driver sees no device{hidden}"))
    };
    match code {
        sys::CUresult::CUDA_SUCCESS => {}
        sys::CUresult::CUDA_ERROR_NO_DEVICE => return no_device(),
        sys::CUresult::CUDA_ERROR_STUB_LIBRARY => {
            return Availability::NoDriver("libcuda is the toolkit's stub: no NVIDIA driver".to_owned());
        }
        other => {
            return Availability::Unusable(format!(
                "cuInit failed with {other:?}: the driver is present but cannot be used; `nvidia-smi` may say why, \
                 a reboot often helps after a driver update"
            ));
        }
    }
    if version < OLDEST_DRIVER {
        return Availability::Unusable(format!(
            "the NVIDIA driver supports CUDA {}.{}, mbperf needs {}.{} or newer: update the driver (570 or newer)",
            version / 1000,
            version % 1000 / 10,
            OLDEST_DRIVER / 1000,
            OLDEST_DRIVER % 1000 / 10
        ));
    }
    if let Err(e) = ensure(Library::Driver, super::symbols::DRIVER) {
        return Availability::Unusable(e.to_string());
    }
    // SAFETY: as above.
    let code = unsafe { sys::cuDeviceGetCount(&mut count) };
    match code {
        sys::CUresult::CUDA_SUCCESS if count > 0 => Availability::Ready(count as usize),
        sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NO_DEVICE => no_device(),
        other => Availability::Unusable(format!("cuDeviceGetCount failed with {other:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probing_gives_an_answer_on_any_machine() {
        // Whatever is installed here: a sentence or a count, no panic; and the same one twice.
        assert_eq!(probe(), probe());
    }
}
