//! One compilation: CUDA C in, machine code or PTX and a log out.
//!
//! It is called by its own table of functions: several versions may be installed, and the one that `libraries` chose
//! must answer, not the first that the loader finds by a bare name, as the bindings would.

use super::libraries::{self, Library};
use super::target::Code;
use crate::device::DeviceError;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

/// A compiled program for one target.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// Machine code, or PTX with its final zero.
    pub image: Vec<u8>,
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

/// `nvrtcProgram`.
type Raw = *mut c_void;
/// What the log, the machine code and the PTX are asked for with: first the size, then the bytes.
type Size = unsafe extern "C" fn(Raw, *mut usize) -> c_int;
type Bytes = unsafe extern "C" fn(Raw, *mut c_char) -> c_int;

/// Declares the table: every function by its name in the library, looked up once.
macro_rules! functions {
    ($($field:ident = $name:literal: $signature:ty,)*) => {
        struct Functions { $($field: $signature,)* }

        impl Functions {
            fn load(library: &libloading::os::unix::Library) -> Result<Self, String> {
                // SAFETY: the signatures are those of nvrtc.h (CUDA 12 and 13 alike); the library stays open for the rest of
                // the process.
                Ok(Self { $($field: *unsafe { library.get::<$signature>($name.as_bytes()) }
                    .map_err(|_| $name.to_owned())?,)* })
            }
        }
    };
}

functions! {
    version = "nvrtcVersion": unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    count_archs = "nvrtcGetNumSupportedArchs": unsafe extern "C" fn(*mut c_int) -> c_int,
    archs = "nvrtcGetSupportedArchs": unsafe extern "C" fn(*mut c_int) -> c_int,
    create = "nvrtcCreateProgram": unsafe extern "C" fn(
        *mut Raw, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int,
    destroy = "nvrtcDestroyProgram": unsafe extern "C" fn(*mut Raw) -> c_int,
    compile = "nvrtcCompileProgram": unsafe extern "C" fn(Raw, c_int, *const *const c_char) -> c_int,
    log_size = "nvrtcGetProgramLogSize": Size,
    log = "nvrtcGetProgramLog": Bytes,
    cubin_size = "nvrtcGetCUBINSize": Size,
    cubin = "nvrtcGetCUBIN": Bytes,
    ptx_size = "nvrtcGetPTXSize": Size,
    ptx = "nvrtcGetPTX": Bytes,
}

/// The library that was chosen, opened; the first answer is kept.
fn functions() -> Result<&'static Functions, DeviceError> {
    static ONCE: OnceLock<Result<Functions, String>> = OnceLock::new();
    let open = || {
        let library = libraries::open(Library::Nvrtc)?;
        let functions =
            Functions::load(&library).map_err(|absent| libraries::lacks(Library::Nvrtc, &absent))?;
        // Its functions are called as long as the process lives.
        std::mem::forget(library);
        Ok(functions)
    };
    ONCE.get_or_init(open).as_ref().map_err(|e| DeviceError::Unavailable(e.clone()))
}

/// Version of the library, e.g. `(13, 0)`.
pub fn version() -> Result<(i32, i32), DeviceError> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes the two integers.
    check("nvrtcVersion", unsafe { (functions()?.version)(&mut major, &mut minor) })?;
    Ok((major, minor))
}

/// Compute capabilities that it compiles for, as major * 10 + minor.
pub fn supported() -> Result<Vec<u32>, DeviceError> {
    let functions = functions()?;
    let mut count = 0;
    // SAFETY: writes the integer.
    check("nvrtcGetNumSupportedArchs", unsafe { (functions.count_archs)(&mut count) })?;
    let mut archs = vec![0; usize::try_from(count).unwrap_or(0)];
    if !archs.is_empty() {
        // SAFETY: `archs` has as many integers as it said that it has architectures.
        check("nvrtcGetSupportedArchs", unsafe { (functions.archs)(archs.as_mut_ptr()) })?;
    }
    Ok(archs.into_iter().filter_map(|a| u32::try_from(a).ok()).collect())
}

/// Names of `nvrtcResult` (nvrtc.h of CUDA 13.0); CUDA 12 has the first twelve alike.
const RESULTS: [&str; 12] = [
    "NVRTC_SUCCESS",
    "NVRTC_ERROR_OUT_OF_MEMORY",
    "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
    "NVRTC_ERROR_INVALID_INPUT",
    "NVRTC_ERROR_INVALID_PROGRAM",
    "NVRTC_ERROR_INVALID_OPTION",
    "NVRTC_ERROR_COMPILATION",
    "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
    "NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
    "NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
    "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
    "NVRTC_ERROR_INTERNAL_ERROR",
];

fn named(code: c_int) -> String {
    let name = usize::try_from(code).ok().and_then(|i| RESULTS.get(i));
    name.map_or_else(|| format!("nvrtcResult {code}"), |n| (*n).to_owned())
}

fn check(call: &'static str, code: c_int) -> Result<(), DeviceError> {
    match code {
        0 => Ok(()),
        other => Err(DeviceError::Driver {
            call,
            code: named(other),
            phase: crate::device::Phase::Prepare,
            at: String::new(),
        }),
    }
}

/// Destroys the program on every path.
struct Program {
    raw: Raw,
    functions: &'static Functions,
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once. A failure could only leak what the process's end frees.
        unsafe { (self.functions.destroy)(&mut self.raw) };
    }
}

impl Program {
    /// What two functions give: the size, then so many bytes.
    fn bytes(
        &self,
        size: (&'static str, Size),
        bytes: (&'static str, Bytes),
    ) -> Result<Vec<u8>, DeviceError> {
        let mut count = 0;
        // SAFETY: the program is valid; writes the size.
        check(size.0, unsafe { (size.1)(self.raw, &mut count) })?;
        let mut out = vec![0u8; count];
        if count > 0 {
            // SAFETY: `out` has the size that was asked for.
            check(bytes.0, unsafe { (bytes.1)(self.raw, out.as_mut_ptr().cast()) })?;
        }
        Ok(out)
    }
}

/// Compiles `source` (named `name` in messages). `options` must name an architecture that has `code` (`sm_90a` machine
/// code, `compute_80` PTX). Errors carry the compiler's log. Safe to call from several threads.
pub fn compile(name: &str, source: &str, options: &[String], code: Code) -> Result<Compiled, DeviceError> {
    let functions = functions()?;
    let no_zero = |_| DeviceError::internal(format!("a zero byte in the source or options of {name}"));
    let source = CString::new(source).map_err(no_zero)?;
    let title = CString::new(name).map_err(no_zero)?;
    let options: Vec<CString> =
        options.iter().map(|o| CString::new(o.as_str())).collect::<Result<_, _>>().map_err(no_zero)?;
    let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    let mut raw = std::ptr::null_mut();
    // SAFETY: both strings live until the program is destroyed at the end of this function; no headers.
    check("nvrtcCreateProgram", unsafe {
        (functions.create)(&mut raw, source.as_ptr(), title.as_ptr(), 0, std::ptr::null(), std::ptr::null())
    })?;
    let program = Program { raw, functions };
    // SAFETY: the program is valid; `pointers` has as many strings as said.
    let result = unsafe { (functions.compile)(program.raw, pointers.len() as c_int, pointers.as_ptr()) };
    let mut log = program
        .bytes(("nvrtcGetProgramLogSize", functions.log_size), ("nvrtcGetProgramLog", functions.log))?;
    log.retain(|b| *b != 0);
    let log = String::from_utf8_lossy(&log).into_owned();
    if result != 0 {
        return Err(DeviceError::internal(format!(
            "NVRTC refused {name} with {}:\n{}",
            named(result),
            log.trim_end()
        )));
    }
    let image = match code {
        Code::Cubin => {
            program.bytes(("nvrtcGetCUBINSize", functions.cubin_size), ("nvrtcGetCUBIN", functions.cubin))?
        }
        Code::Ptx => {
            program.bytes(("nvrtcGetPTXSize", functions.ptx_size), ("nvrtcGetPTX", functions.ptx))?
        }
    };
    // The driver reads PTX up to its final zero, which NVRTC counts in.
    if image.is_empty() || (code == Code::Ptx && image.last() != Some(&0)) {
        return Err(DeviceError::internal(format!("NVRTC gave no {code:?} for {name}")));
    }
    Ok(Compiled { image, log })
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
