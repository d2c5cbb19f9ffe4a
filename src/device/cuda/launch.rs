//! A kernel that was found, and its launches with checked parameters.

use super::context::check;
use super::module::Module;
use super::prep::{Config, Param};
use super::signature::{self, Declared};
use super::work::Work;
use crate::device::DeviceError;
use cudarc::driver::sys;
use std::sync::Arc;

/// Most parameters of one kernel: the pointer array of a launch lies on the stack.
pub(super) const MAX_PARAMS: usize = 48;

/// Largest second and third dimension of a grid, most threads of a block, and most of them in its third dimension
/// (CUDA programming guide, table of compute capabilities).
const MAX_GRID_YZ: u32 = 65_535;
const MAX_BLOCK_THREADS: u64 = 1024;
const MAX_BLOCK_Z: u32 = 64;

#[derive(Debug)]
pub(super) struct KernelInner {
    pub name: Arc<str>,
    pub source: String,
    /// Parameter lists as declared; one of them must fit.
    pub declared: Vec<Vec<Declared>>,
    /// Parameter sizes of the loaded function.
    pub sizes: Option<Vec<usize>>,
    /// Most dynamic shared memory a launch may ask for.
    pub shared_bytes: u32,
    /// Null without a device.
    pub function: sys::CUfunction,
    /// Keeps the code loaded.
    pub _module: Option<Arc<Module>>,
}

// SAFETY: a function handle is a plain identifier that the driver allows on every thread.
unsafe impl Send for KernelInner {}
// SAFETY: as above.
unsafe impl Sync for KernelInner {}

/// A kernel that was found; cheap to clone.
#[derive(Debug, Clone)]
pub struct Kernel(pub(super) Arc<KernelInner>);

impl Kernel {
    /// A launch with everything fixed. Errors: [`DeviceError::Internal`] naming the parameter that does not fit,
    /// or a configuration that no GPU takes.
    pub fn bind(&self, config: Config, params: &[Param]) -> Result<KernelLaunch, DeviceError> {
        let wrong = |what: String| {
            Err(DeviceError::internal(format!("kernel `{}` of {}: {what}", self.0.name, self.0.source)))
        };
        let threads = config.block.iter().map(|d| *d as u64).product::<u64>();
        let grid_ok = config.grid.iter().all(|d| *d > 0)
            && config.grid[0] <= i32::MAX as u32
            && config.grid[1..].iter().all(|d| *d <= MAX_GRID_YZ);
        if !grid_ok || threads == 0 || threads > MAX_BLOCK_THREADS || config.block[2] > MAX_BLOCK_Z {
            return wrong(format!("grid {:?} with block {:?} is no legal launch", config.grid, config.block));
        }
        if config.shared_bytes > self.0.shared_bytes {
            return wrong(format!(
                "a launch asks for {} bytes of shared memory, {} were declared",
                config.shared_bytes, self.0.shared_bytes
            ));
        }
        if params.len() > MAX_PARAMS {
            return wrong(format!("{} parameters, at most {MAX_PARAMS} can be passed", params.len()));
        }
        let mut complaint = String::new();
        let fits = self.0.declared.iter().any(|d| match signature::check(d, params) {
            Ok(()) => true,
            Err(e) => {
                complaint = e;
                false
            }
        });
        if !fits {
            return wrong(complaint);
        }
        if let Some(sizes) = &self.0.sizes {
            let given: Vec<usize> = params.iter().filter_map(|p| signature::Kind::of(p).size()).collect();
            if *sizes != given {
                return wrong(format!("takes parameters of {sizes:?} bytes, {given:?} were passed"));
            }
        }
        let (mut values, mut starts) = (Vec::new(), Vec::new());
        for param in params {
            starts.push(values.len());
            put(&mut values, *param);
        }
        Ok(KernelLaunch { kernel: self.clone(), config, values: values.into(), starts: starts.into() })
    }
}

/// Appends the bits of a parameter, in the low bytes of a word if it is shorter (CUDA hosts are little-endian).
fn put(values: &mut Vec<u64>, param: Param) {
    values.push(match param {
        Param::Ptr(p) => p.0,
        Param::I32(v) => v as u32 as u64,
        Param::U32(v) => v as u64,
        Param::I64(v) => v as u64,
        Param::U64(v) => v,
        Param::F32(v) => v.to_bits() as u64,
        Param::TensorMap(words) => return values.extend(words),
    });
}

/// A kernel with its configuration and arguments: one driver call puts it on a stream.
#[derive(Debug)]
pub struct KernelLaunch {
    kernel: Kernel,
    config: Config,
    /// The parameters, each from a word of its own on.
    values: Box<[u64]>,
    /// First word of each.
    starts: Box<[usize]>,
}

impl KernelLaunch {
    /// Launches on `stream`. Allocates nothing.
    pub(super) fn issue(&self, stream: sys::CUstream) -> Result<(), DeviceError> {
        let function = self.kernel.0.function;
        if function.is_null() {
            return Err(DeviceError::internal("a kernel that was prepared without a device was launched"));
        }
        let mut pointers = [std::ptr::null_mut(); MAX_PARAMS];
        for (pointer, start) in pointers.iter_mut().zip(&self.starts) {
            *pointer = std::ptr::from_ref(&self.values[*start]).cast_mut().cast();
        }
        let Config { grid, block, shared_bytes } = self.config;
        // SAFETY: the function is loaded (its module is held); every parameter has as many words as
        // its size asks for (checked in `bind`); the driver reads the values before it returns.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                function,
                grid[0],
                grid[1],
                grid[2],
                block[0],
                block[1],
                block[2],
                shared_bytes,
                stream,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }

    /// What a graph node of this launch looks like.
    pub(super) fn work(&self) -> Work {
        let Config { grid, block, shared_bytes } = self.config;
        Work::Kernel { name: self.kernel.0.name.clone(), grid, block, shared_bytes }
    }

    /// Function handle, configuration and values, to launch the same by hand (cost check of `selftest`, whose kernel
    /// takes parameters of one word).
    pub(super) fn parts(&self) -> (sys::CUfunction, Config, &[u64]) {
        (self.kernel.0.function, self.config, &self.values)
    }
}
