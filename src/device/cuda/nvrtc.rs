//! One compilation: CUDA C in, cubin and log out.

use super::libraries;
use crate::device::DeviceError;
use cudarc::nvrtc::sys;
use std::ffi::{CString, c_char};

/// A compiled program for one architecture.
#[derive(Debug, Clone)]
pub struct Compiled {
    pub cubin: Vec<u8>,
    /// Warnings and, by kernel, registers, spills and shared memory.
    pub log: String,
}

/// Registers, spills and static shared memory of one kernel, from the compiler's log.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Usage {
    pub kernel: String,
    pub registers: u32,
    pub spill_store_bytes: u32,
    pub shared_bytes: u32,
}

/// Version of the library, e.g. `(13, 0)`.
pub fn version() -> Result<(i32, i32), DeviceError> {
    libraries::ensure_nvrtc()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the function exists (above); it writes the two integers.
    check("nvrtcVersion", unsafe { sys::nvrtcVersion(&mut major, &mut minor) })?;
    Ok((major, minor))
}

fn check(call: &'static str, code: sys::nvrtcResult) -> Result<(), DeviceError> {
    match code {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        other => Err(DeviceError::Driver {
            call,
            code: format!("{other:?}"),
            phase: crate::device::Phase::Prepare,
            at: String::new(),
        }),
    }
}

/// Destroys the program on every path.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

/// Compiles `source` (named `name` in messages) to a cubin. `options` must name a real architecture (`sm_90a`).
/// Errors carry the compiler's log. Safe to call from several threads.
pub fn compile(name: &str, source: &str, options: &[String]) -> Result<Compiled, DeviceError> {
    libraries::ensure_nvrtc()?;
    let no_zero = |_| DeviceError::internal(format!("a zero byte in the source or options of {name}"));
    let source = CString::new(source).map_err(no_zero)?;
    let title = CString::new(name).map_err(no_zero)?;
    let options: Vec<CString> =
        options.iter().map(|o| CString::new(o.as_str())).collect::<Result<_, _>>().map_err(no_zero)?;
    let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    let mut raw = std::ptr::null_mut();
    // SAFETY: both strings live until the program is destroyed at the end of this function; no headers.
    check("nvrtcCreateProgram", unsafe {
        sys::nvrtcCreateProgram(
            &mut raw,
            source.as_ptr(),
            title.as_ptr(),
            0,
            std::ptr::null(),
            std::ptr::null(),
        )
    })?;
    let program = Program(raw);
    // SAFETY: the program is valid; `pointers` has as many strings as said.
    let code = unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr()) };
    let log = log(&program)?;
    if code != sys::nvrtcResult::NVRTC_SUCCESS {
        return Err(DeviceError::internal(format!(
            "NVRTC refused {name} with {code:?}:\n{}",
            log.trim_end()
        )));
    }
    let mut size = 0;
    // SAFETY: compiled (above); writes the size.
    check("nvrtcGetCUBINSize", unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size) })?;
    let mut cubin = vec![0u8; size];
    // SAFETY: `cubin` has the size that was asked for.
    check("nvrtcGetCUBIN", unsafe { sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()) })?;
    if cubin.is_empty() {
        return Err(DeviceError::internal(format!("NVRTC gave no cubin for {name}")));
    }
    Ok(Compiled { cubin, log })
}

fn log(program: &Program) -> Result<String, DeviceError> {
    let mut size = 0;
    // SAFETY: the program is valid; writes the size.
    check("nvrtcGetProgramLogSize", unsafe { sys::nvrtcGetProgramLogSize(program.0, &mut size) })?;
    let mut text = vec![0u8; size];
    if size > 0 {
        // SAFETY: `text` has the size that was asked for, the final zero included.
        check("nvrtcGetProgramLog", unsafe { sys::nvrtcGetProgramLog(program.0, text.as_mut_ptr().cast()) })?;
    }
    text.retain(|b| *b != 0);
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Reads the lines that `--ptxas-options=-v` puts into the log.
pub fn usage(log: &str) -> Vec<Usage> {
    let number_before = |line: &str, unit: &str| -> Option<u32> {
        line[..line.find(unit)?].trim_end().rsplit([' ', ',']).next()?.parse().ok()
    };
    let mut out: Vec<Usage> = Vec::new();
    let (mut kernel, mut spill) = (None::<String>, 0);
    for line in log.lines() {
        if let Some(at) = line.find("Compiling entry function '") {
            kernel = line[at..].split('\'').nth(1).map(str::to_owned);
            spill = 0;
        } else if let Some(bytes) = number_before(line, "bytes spill stores") {
            spill = bytes;
        } else if let (Some(at), Some(name)) = (line.find("Used "), &kernel) {
            let Some(registers) = number_before(&line[at..], "registers") else { continue };
            out.push(Usage {
                kernel: name.clone(),
                registers,
                spill_store_bytes: spill,
                shared_bytes: number_before(line, "bytes smem").unwrap_or(0),
            });
            kernel = None;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_gives_registers_and_spills() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'a' for 'sm_90a'\n\
            ptxas info    : Function properties for a\n    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n\
            ptxas info    : Used 32 registers, used 1 barriers, 16 bytes stack frame, 4096 bytes smem\n\
            ptxas info    : Compiling entry function 'b' for 'sm_90a'\n\
            ptxas info    : Function properties for b\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 8 registers, used 0 barriers\n";
        let of = |kernel: &str, registers, spill_store_bytes, shared_bytes| Usage {
            kernel: kernel.into(),
            registers,
            spill_store_bytes,
            shared_bytes,
        };
        assert_eq!(usage(log), [of("a", 32, 12, 4096), of("b", 8, 0, 0)]);
    }

    #[test]
    fn without_the_library_the_error_says_how_to_get_it() {
        match version() {
            Ok((major, _)) => assert!(major >= 12),
            Err(e) => {
                let text = e.to_string();
                assert!(text.contains("NVRTC") && text.contains("--cuda_path"), "{text}");
            }
        }
    }
}
