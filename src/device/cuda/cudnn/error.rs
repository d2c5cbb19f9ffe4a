//! What cuDNN says when a call fails, and the trace of calls for debugging.

use cudarc::cudnn::sys;
use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

/// Set to anything: every descriptor, engine and plan is told on standard error as it is made.
pub const DEBUG_VARIABLE: &str = "MBPERF_CUDNN_DEBUG";

/// A call that cuDNN refused. In `auto` it means our own kernels.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cuDNN refused {what}: {status}{reason}")]
pub struct CudnnError {
    /// What was being made or done, e.g. `finalize of backward operation graph`.
    pub what: String,
    /// Name of the status code.
    pub status: String,
    /// The library's own words, after a colon; may be empty.
    pub reason: String,
}

impl CudnnError {
    /// A refusal of ours, before cuDNN was asked.
    pub fn own(what: impl Into<String>, status: impl Into<String>) -> Self {
        Self { what: what.into(), status: status.into(), reason: String::new() }
    }
}

/// Turns a status into an error with the library's last error string.
pub(super) fn check(what: impl FnOnce() -> String, status: sys::cudnnStatus_t) -> Result<(), CudnnError> {
    match status {
        sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS => Ok(()),
        other => {
            let reason = last_error();
            let reason = if reason.is_empty() { reason } else { format!(": {reason}") };
            let error = CudnnError { what: what(), status: format!("{other:?}"), reason };
            trace(|| error.to_string());
            Err(error)
        }
    }
}

/// The library's explanation of its last failure on this thread.
fn last_error() -> String {
    let mut text = [0 as c_char; 1024];
    // SAFETY: the function was found when the library was opened; it writes at most the length passed, with a
    // terminating zero, and one more zero lies behind.
    unsafe { sys::cudnnGetLastErrorString(text.as_mut_ptr(), text.len() - 1) };
    // SAFETY: the array ends in a zero that was not offered to the library.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().trim().to_owned()
}

/// Prints when [`DEBUG_VARIABLE`] is set.
pub(super) fn trace(text: impl FnOnce() -> String) {
    static ON: OnceLock<bool> = OnceLock::new();
    if *ON.get_or_init(|| std::env::var_os(DEBUG_VARIABLE).is_some()) {
        eprintln!("cudnn: {}", text());
    }
}
