//! Finding the CUDA libraries: names and folders tried, opening by absolute path, versions.
//!
//! cudarc opens libraries by bare name and panics when one is missing, so every library passes `ensure`
//! before its first call. A library in a folder that the loader does not know (a Python environment, a
//! toolkit without `ldconfig`) is opened here first by its absolute path; the loader then finds it by its
//! SONAME when cudarc asks.

pub use super::probe::{Availability, probe};
use crate::device::DeviceError;
use libloading::os::unix::{Library as Dl, RTLD_GLOBAL, RTLD_NOW};
use std::env;
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

/// Oldest driver that has every call this program makes (`cuEventElapsedTime_v2` came with CUDA 12.8), as
/// `cuDriverGetVersion` counts: 1000 * major + 10 * minor.
pub const OLDEST_DRIVER: c_int = 12_080;

/// Variable that names a folder to look in first; the same as `--cuda_path`.
pub const PATH_VARIABLE: &str = "MBPERF_CUDA_PATH";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Library {
    Driver,
    Nvrtc,
    CublasLt,
    Cudnn,
    Nccl,
    Cupti,
    Nvml,
}

impl Library {
    pub const ALL: [Library; 7] = [
        Library::Driver,
        Library::Nvrtc,
        Library::CublasLt,
        Library::Cudnn,
        Library::Nccl,
        Library::Cupti,
        Library::Nvml,
    ];

    /// What people call it.
    pub fn title(self) -> &'static str {
        match self {
            Library::Driver => "CUDA driver",
            Library::Nvrtc => "NVRTC",
            Library::CublasLt => "cuBLASLt",
            Library::Cudnn => "cuDNN",
            Library::Nccl => "NCCL",
            Library::Cupti => "CUPTI",
            Library::Nvml => "NVML",
        }
    }

    /// What does not work without it.
    pub fn needed_by(self) -> &'static str {
        match self {
            Library::Driver => "every run on a GPU",
            Library::Nvrtc => "every run on a GPU (compiles the kernels)",
            Library::CublasLt => "every run on a GPU (matrix products)",
            Library::Cudnn => "faster attention (without it mbperf's own kernels run)",
            Library::Nccl => "runs on several GPUs",
            Library::Cupti => "the column device_busy_ms and --profile",
            Library::Nvml => "clock, power and throttle columns",
        }
    }

    /// File names tried, newest first. The SONAMEs are those of CUDA 13 and 12.
    pub fn names(self) -> &'static [&'static str] {
        match self {
            Library::Driver => &["libcuda.so.1", "libcuda.so"],
            Library::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
            Library::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
            Library::Cudnn => &["libcudnn.so.9", "libcudnn.so"],
            Library::Nccl => &["libnccl.so.2", "libnccl.so"],
            Library::Cupti => &["libcupti.so.13", "libcupti.so.12", "libcupti.so"],
            Library::Nvml => &["libnvidia-ml.so.1", "libnvidia-ml.so"],
        }
    }

    /// A function that tells the version, and that is used to find the file that was loaded.
    fn version_symbol(self) -> &'static str {
        match self {
            Library::Driver => "cuDriverGetVersion",
            Library::Nvrtc => "nvrtcVersion",
            Library::CublasLt => "cublasLtGetVersion",
            Library::Cudnn => "cudnnGetVersion",
            Library::Nccl => "ncclGetVersion",
            Library::Cupti => "cuptiGetVersion",
            Library::Nvml => "nvmlInit_v2",
        }
    }

    /// Whether the search covers more than the loader's own folders. The driver and NVML belong to the
    /// machine: a copy in a toolkit folder is a stub.
    fn searched(self) -> bool {
        !matches!(self, Library::Driver | Library::Nvml)
    }
}

/// A library that was opened, and stays open.
#[derive(Debug, Clone)]
pub struct Found {
    /// The name or path it was opened by.
    pub opened_as: String,
    /// The file, when the loader tells.
    pub path: Option<PathBuf>,
    /// E.g. `13.0`; `None` when the library does not say.
    pub version: Option<String>,
}

static EXTRA: Mutex<Option<PathBuf>> = Mutex::new(None);

/// `--cuda_path`: a folder to look in before all others. Call it before the first [`find`].
pub fn set_path(path: &Path) {
    if let Ok(mut extra) = EXTRA.lock() {
        *extra = Some(path.to_path_buf());
    }
}

/// What [`PATH_VARIABLE`] names; an empty one is none.
pub fn folder_of_variable() -> Option<PathBuf> {
    env::var_os(PATH_VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from)
}

/// The folders searched beside the loader's own, in order. Only those that exist.
pub fn folders() -> Vec<PathBuf> {
    let mut out = asked_folders();
    let environments: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH"]
        .iter()
        .filter_map(env::var_os)
        .map(PathBuf::from)
        .chain(python_prefixes())
        .collect();
    for prefix in &environments {
        out.push(prefix.join("lib64"));
        for site in site_packages(prefix) {
            out.extend(glob_dirs(&site.join("nvidia"), "lib"));
        }
        out.push(prefix.join("lib"));
    }
    let toolkits = children(Path::new("/usr/local"), |name| name.starts_with("cuda"));
    for toolkit in toolkits.into_iter().rev() {
        out.extend([toolkit.join("lib64"), toolkit.join("extras/CUPTI/lib64")]);
    }
    let mut seen = std::collections::HashSet::new();
    out.retain(|p| p.is_dir() && seen.insert(p.clone()));
    out
}

/// Those of them that lie below what the user named.
fn asked_folders() -> Vec<PathBuf> {
    let asked = EXTRA.lock().ok().and_then(|e| e.clone());
    let mut out = Vec::new();
    for root in asked.into_iter().chain(folder_of_variable()) {
        out.extend([root.join("lib64"), root.join("lib"), root.join("targets/x86_64-linux/lib")]);
        out.extend(glob_dirs(&root.join("nvidia"), "lib"));
        out.push(root);
    }
    out
}

/// Prefixes of the Python installations: each folder of PATH with a `python3`, and the user's own.
fn python_prefixes() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).filter(|d| d.join("python3").exists());
    let mut out: Vec<PathBuf> = on_path.filter_map(|d| d.parent().map(Path::to_path_buf)).collect();
    if let Some(home) = env::var_os("HOME") {
        out.push(Path::new(&home).join(".local"));
    }
    out
}

fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let pythons = children(&prefix.join("lib"), |name| name.starts_with("python3"));
    pythons.iter().flat_map(|p| [p.join("site-packages"), p.join("dist-packages")]).collect()
}

/// `parent/*/leaf`, sorted.
fn glob_dirs(parent: &Path, leaf: &str) -> Vec<PathBuf> {
    children(parent, |_| true).into_iter().map(|p| p.join(leaf)).collect()
}

fn children(parent: &Path, keep: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let mut out: Vec<PathBuf> =
        entries.filter(|e| keep(&e.file_name().to_string_lossy())).map(|e| e.path()).collect();
    out.sort();
    out
}

/// Opens `library` for the rest of the process, or says what was tried. The first answer is kept.
pub fn find(library: Library) -> Result<Found, String> {
    static ANSWERS: Mutex<Vec<(Library, Result<Found, String>)>> = Mutex::new(Vec::new());
    // Before the lock, which asking for the driver takes too.
    let driver = if library == Library::Nvrtc { driver_major() } else { None };
    let Ok(mut answers) = ANSWERS.lock() else {
        return Err("the list of libraries is unusable after a panic".to_owned());
    };
    if let Some((_, answer)) = answers.iter().find(|(l, _)| *l == library) {
        return answer.clone();
    }
    let folders = if library.searched() { folders() } else { Vec::new() };
    let answer = search(library, &folders, &asked_folders(), driver);
    answers.push((library, answer.clone()));
    answer
}

/// The CUDA version that the driver supports, its first number. `None` without a driver, or where it does not say.
fn driver_major() -> Option<u32> {
    find(Library::Driver).ok()?.version?.split('.').next()?.parse().ok()
}

/// Where `library` may lie, the likeliest first: what the user named, the loader's own, the other folders. Files of the
/// driver's own CUDA version go before all others of these two kinds: a driver may refuse what a newer NVRTC makes.
fn candidates(library: Library, folders: &[PathBuf], asked: &[PathBuf], driver: Option<u32>) -> Vec<PathBuf> {
    let names = library.names();
    let within = |folder: &PathBuf| -> Vec<PathBuf> { names.iter().map(|n| folder.join(n)).collect() };
    let (named, others): (Vec<&PathBuf>, Vec<&PathBuf>) = folders.iter().partition(|f| asked.contains(f));
    let own = |path: &PathBuf| {
        let of = |major: u32| path.to_string_lossy().ends_with(&format!(".so.{major}"));
        !driver.is_some_and(of)
    };
    let mut first: Vec<PathBuf> = named.into_iter().flat_map(within).filter(|p| p.exists()).collect();
    let mut rest: Vec<PathBuf> = names.iter().map(PathBuf::from).collect();
    if bound(library) {
        // The bindings ask the loader for the plain name, the last one, before the others.
        rest.rotate_right(1);
    }
    rest.extend(others.into_iter().flat_map(within).filter(|p| p.exists()));
    first.sort_by_key(own);
    rest.sort_by_key(own);
    first.into_iter().chain(rest).collect()
}

fn search(
    library: Library,
    folders: &[PathBuf],
    asked: &[PathBuf],
    driver: Option<u32>,
) -> Result<Found, String> {
    let mut broken = Vec::new();
    for candidate in candidates(library, folders, asked, driver) {
        // SAFETY: opening runs the library's initialisers; these are NVIDIA's own libraries, found by name.
        match unsafe { Dl::open(Some(&candidate), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(handle) => {
                let found = describe(library, &handle, &candidate);
                // Kept open: cudarc's handle must find it again, and function pointers into it live on.
                std::mem::forget(handle);
                if library == Library::Nvrtc {
                    open_builtins(found.path.as_deref());
                }
                return Ok(found);
            }
            // What the user named is not passed over for another one.
            Err(e) if candidate.parent().is_some_and(|folder| asked.iter().any(|a| a == folder)) => {
                return Err(format!("{} cannot be used: {e}", candidate.display()));
            }
            Err(e) if candidate.is_absolute() => broken.push(format!("{}: {e}", candidate.display())),
            Err(_) => {}
        }
    }
    let mut message = format!("no {} by the loader", library.names().join(", "));
    if library.searched() {
        let list: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
        message += &format!(
            ", nor in {}",
            if list.is_empty() { "any toolkit or Python environment".to_owned() } else { list.join(", ") }
        );
    }
    if !broken.is_empty() {
        message += &format!("; not usable: {}", broken.join("; "));
    }
    Err(message)
}

/// NVRTC opens its builtins by bare name, which the loader does not find in a Python environment: those that lie
/// beside it are opened first. Where there are none, NVRTC's own error tells.
fn open_builtins(nvrtc: Option<&Path>) {
    let Some(folder) = nvrtc.and_then(Path::parent) else { return };
    for builtins in children(folder, |name| name.starts_with("libnvrtc-builtins.so")) {
        // SAFETY: NVIDIA's own library of data, found by name beside NVRTC; kept open like it.
        if let Ok(handle) = unsafe { Dl::open(Some(&builtins), RTLD_NOW | RTLD_GLOBAL) } {
            std::mem::forget(handle);
        }
    }
}

fn describe(library: Library, handle: &Dl, candidate: &Path) -> Found {
    let name = library.version_symbol();
    // SAFETY: the symbol is only used as an address here, and called below with its true signature.
    let address = unsafe { handle.get::<*const c_void>(name.as_bytes()) }.ok().map(|s| s.into_raw() as usize);
    Found {
        opened_as: candidate.display().to_string(),
        path: address.and_then(mapped_file),
        version: address.and_then(|a| version(library, a)),
    }
}

/// The file that an address of this process is mapped from.
fn mapped_file(address: usize) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let (low, high) = line.split_whitespace().next()?.split_once('-')?;
        let inside =
            (usize::from_str_radix(low, 16).ok()?..usize::from_str_radix(high, 16).ok()?).contains(&address);
        let path = line.find('/').map(|at| PathBuf::from(&line[at..]))?;
        inside.then_some(path)
    })
}

fn version(library: Library, address: usize) -> Option<String> {
    type OneInt = unsafe extern "C" fn(*mut c_int) -> c_int;
    type OneU32 = unsafe extern "C" fn(*mut u32) -> c_int;
    type TwoInts = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    type Plain = unsafe extern "C" fn() -> usize;
    let (mut a, mut b, mut u) = (0, 0, 0);
    // SAFETY: each address is the function of that name in the library just opened, whose C signature is
    // the one named here; all of them only write the integers passed.
    unsafe {
        match library {
            Library::Driver => {
                let code = std::mem::transmute::<usize, OneInt>(address)(&mut a);
                (code == 0).then(|| format!("{}.{}", a / 1000, a % 1000 / 10))
            }
            Library::Nvrtc => {
                let code = std::mem::transmute::<usize, TwoInts>(address)(&mut a, &mut b);
                (code == 0).then(|| format!("{a}.{b}"))
            }
            Library::Nccl => {
                let code = std::mem::transmute::<usize, OneInt>(address)(&mut a);
                (code == 0).then(|| format!("{}.{}.{}", a / 10_000, a % 10_000 / 100, a % 100))
            }
            Library::Cupti => {
                let code = std::mem::transmute::<usize, OneU32>(address)(&mut u);
                (code == 0).then(|| format!("API {u}"))
            }
            Library::CublasLt | Library::Cudnn => {
                let v = std::mem::transmute::<usize, Plain>(address)();
                // 130100 is 13.1.0; before CUDA 13 as well: 120803 is 12.8.3. cuDNN: 91400 is 9.14.0.
                Some(format!("{}.{}.{}", v / 10_000, v % 10_000 / 100, v % 100))
            }
            Library::Nvml => None,
        }
    }
}

/// Opens `library` and makes sure that cudarc will find it with every function in `symbols`, so that no later
/// call can panic.
pub(super) fn ensure(library: Library, symbols: &[&str]) -> Result<(), DeviceError> {
    use cudarc::{cublaslt, cudnn, cupti, driver};
    let missing = |reason: String| DeviceError::Unavailable(missing(library, &reason));
    let found = find(library).map_err(missing)?;
    // SAFETY: only opens the library.
    let present = unsafe {
        match library {
            Library::Driver => driver::sys::is_culib_present(),
            Library::CublasLt => cublaslt::sys::is_culib_present(),
            Library::Cupti => cupti::sys::is_culib_present(),
            Library::Cudnn => cudnn::sys::is_culib_present(),
            Library::Nvrtc | Library::Nccl | Library::Nvml => true,
        }
    };
    if !present {
        return Err(missing("its file name is not one that the bindings look for".to_owned()));
    }
    // The bindings ask the loader for the plain name first: with a library's development files installed that may be
    // another file than the one that the user named, and their parts must not be mixed.
    let version = address(library, library.version_symbol());
    if let (Some(ours), Some(theirs)) = (&found.path, version.and_then(mapped_file))
        && *ours != theirs
    {
        return Err(DeviceError::Unavailable(another(library, ours, &theirs)));
    }
    let absent: Vec<&str> =
        symbols.iter().copied().filter(|name| bound(library) && address(library, name).is_none()).collect();
    if absent.is_empty() {
        return Ok(());
    }
    Err(DeviceError::Unavailable(lacks(library, &absent.join(", "))))
}

/// Whether cudarc calls the library by its own handle.
fn bound(library: Library) -> bool {
    matches!(library, Library::Driver | Library::CublasLt | Library::Cupti | Library::Cudnn)
}

/// A function in the library that cudarc has opened. Call it when that is there.
fn address(library: Library, name: &str) -> Option<usize> {
    use cudarc::{cublaslt, cudnn, cupti, driver};
    type Any = unsafe extern "C" fn();
    // SAFETY: the library is there, so culib() does not panic; the symbols are looked up, not called.
    let found = unsafe {
        match library {
            Library::Driver => driver::sys::culib().get::<Any>(name.as_bytes()),
            Library::CublasLt => cublaslt::sys::culib().get::<Any>(name.as_bytes()),
            Library::Cupti => cupti::sys::culib().get::<Any>(name.as_bytes()),
            Library::Cudnn => cudnn::sys::culib().get::<Any>(name.as_bytes()),
            Library::Nvrtc | Library::Nccl | Library::Nvml => return None,
        }
    };
    found.ok().map(|function| *function as usize)
}

/// That two files of one library would be used beside each other.
fn another(library: Library, ours: &Path, theirs: &Path) -> String {
    let plain = library.names().last().copied().unwrap_or_default();
    format!(
        "{} was found at {}, but the loader gives {} for {plain}: name no other folder with --cuda_path, or start mbperf with \
         LD_LIBRARY_PATH set to a folder where {plain} is a link to the one you want, and to that one's own folder",
        library.title(),
        ours.display(),
        theirs.display()
    )
}

fn missing(library: Library, reason: &str) -> String {
    format!(
        "{} is needed by {} and was not found: {reason}; install it, or name its folder with --cuda_path (see `mbperf doctor`)",
        library.title(),
        library.needed_by()
    )
}

/// That a library which was found has not these functions.
pub(super) fn lacks(library: Library, absent: &str) -> String {
    format!(
        "{} lacks {absent}: it is too old or not NVIDIA's; update it (see `mbperf doctor`)",
        library.title()
    )
}

/// The library that [`find`] has opened, once more: for functions that are looked up in it and in no other.
pub(super) fn open(library: Library) -> Result<Dl, String> {
    let found = find(library).map_err(|reason| missing(library, &reason))?;
    // The file itself: by its bare name the loader could choose another one.
    let path = found.path.unwrap_or_else(|| PathBuf::from(&found.opened_as));
    // SAFETY: open already, so that no initialiser runs.
    unsafe { Dl::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) }.map_err(|e| missing(library, &e.to_string()))
}

/// Whether cuBLASLt can be called.
pub fn ensure_cublaslt() -> Result<(), DeviceError> {
    static ONCE: OnceLock<Result<(), String>> = OnceLock::new();
    keep(&ONCE, || ensure(Library::CublasLt, super::symbols::CUBLASLT))
}

/// Whether CUPTI can be called.
pub fn ensure_cupti() -> Result<(), DeviceError> {
    static ONCE: OnceLock<Result<(), String>> = OnceLock::new();
    keep(&ONCE, || ensure(Library::Cupti, super::symbols::CUPTI))
}

/// Whether cuDNN can be called.
pub fn ensure_cudnn() -> Result<(), DeviceError> {
    static ONCE: OnceLock<Result<(), String>> = OnceLock::new();
    keep(&ONCE, || ensure(Library::Cudnn, super::symbols::CUDNN))
}

fn keep(
    once: &OnceLock<Result<(), String>>,
    ask: impl FnOnce() -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    once.get_or_init(|| ask().map_err(|e| e.to_string())).clone().map_err(DeviceError::Unavailable)
}

#[cfg(test)]
mod tests;
