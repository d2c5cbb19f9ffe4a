//! Kernels: compiled by NVRTC, cached, looked up once, launched with checked parameters.

use super::disk::{self, DiskCache};
pub use super::launch::{Kernel, KernelLaunch};
use super::launch::{KernelInner, MAX_PARAMS};
use super::module::{Module, allow_shared, parameter_sizes, unfit};
use super::nvrtc::{self, Usage};
use super::prep::KernelSource;
use super::signature;
use super::target::{Code, Parties, Target};
use crate::device::DeviceError;
use cudarc::driver::sys;
use rayon::prelude::*;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Stands before every source; see the file.
const PRELUDE: &str = include_str!("prelude.cuh");

/// Dynamic shared memory that a kernel may use without asking (CUDA programming guide, all architectures).
const FREE_SHARED_BYTES: u32 = 48 * 1024;

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Compiled and loaded on the current device.
    Online,
    /// Compiled if NVRTC is there, signatures checked, never launched.
    Offline,
    /// Only noted, so that all can be compiled at once; signatures checked.
    Collect,
}

/// Source, text and defines of one compilation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    name: &'static str,
    /// Address of the text: two sources of one name stay apart.
    text: usize,
    defines: String,
}

impl Key {
    fn of(source: KernelSource, defines: &[(&str, String)]) -> Self {
        let defines = defines.iter().map(|(k, v)| format!("-D{k}={v}\n")).collect();
        Self { name: source.name, text: source.text.as_ptr() as usize, defines }
    }
    fn title(&self) -> String {
        format!("{} {}", self.name, self.defines.trim_end().replace('\n', " "))
    }
}

/// All kernels of one run.
#[derive(Debug)]
pub struct KernelCache {
    mode: Mode,
    target: Target,
    nvrtc: Option<(i32, i32)>,
    /// Who chose the target, for what the driver refuses. `None` without a device.
    parties: Option<Parties>,
    disk: Option<DiskCache>,
    /// Requests in order of their first mention.
    wanted: Vec<(KernelSource, Key)>,
    images: HashMap<Key, Arc<Vec<u8>>>,
    modules: HashMap<Key, Arc<Module>>,
    kernels: HashMap<(Key, String), Kernel>,
    usage: Vec<(String, Usage)>,
}

impl KernelCache {
    /// For the current device. `folder`: where images are kept between runs, `None` keeps none.
    pub fn online(target: &Target, parties: Parties, folder: Option<PathBuf>) -> Self {
        Self {
            nvrtc: Some(parties.nvrtc),
            parties: Some(parties),
            disk: folder.map(DiskCache::new),
            ..Self::new(Mode::Online, target)
        }
    }

    /// For no device: compiles for `target` where NVRTC is found.
    pub fn offline(target: &Target) -> Self {
        Self { nvrtc: nvrtc::version().ok(), ..Self::new(Mode::Offline, target) }
    }

    /// Puts what it compiles into a folder as [`KernelCache::online`] keeps it, for machines with a GPU to find.
    pub fn keeping(self, folder: PathBuf) -> Self {
        Self { disk: Some(DiskCache::new(folder)), ..self }
    }

    /// Notes what would be compiled, for [`KernelCache::warm`].
    pub fn collecting(target: &Target) -> Self {
        Self::new(Mode::Collect, target)
    }

    fn new(mode: Mode, target: &Target) -> Self {
        Self {
            mode,
            target: target.clone(),
            nvrtc: None,
            parties: None,
            disk: None,
            wanted: Vec::new(),
            images: HashMap::new(),
            modules: HashMap::new(),
            kernels: HashMap::new(),
            usage: Vec::new(),
        }
    }

    /// Whether kernels were compiled, not only checked.
    pub fn compiles(&self) -> bool {
        self.nvrtc.is_some()
    }

    /// Whether kernels are loaded on a device, to be launched.
    pub fn launches(&self) -> bool {
        self.mode == Mode::Online
    }

    /// Registers, spills and shared memory of every kernel compiled (not of those read from the disk cache),
    /// each with its source and defines.
    pub fn usage(&self) -> &[(String, Usage)] {
        &self.usage
    }

    /// Compiles everything that `collected` noted, on all cores.
    pub fn warm(&mut self, collected: &KernelCache) -> Result<(), DeviceError> {
        let missing: Vec<&(KernelSource, Key)> =
            collected.wanted.iter().filter(|(_, key)| !self.images.contains_key(key)).collect();
        let built: Vec<(Key, Built)> = missing
            .par_iter()
            .map(|(source, key)| Ok((key.clone(), self.build(*source, key)?)))
            .collect::<Result<_, DeviceError>>()?;
        for (key, built) in built {
            self.keep(key, built);
        }
        Ok(())
    }

    /// The kernel `entry` of `source` compiled with `defines`. `shared_bytes`: the most dynamic shared memory
    /// that its launches will ask for.
    pub fn get(
        &mut self,
        source: KernelSource,
        entry: &str,
        defines: &[(&str, String)],
        shared_bytes: u32,
    ) -> Result<Kernel, DeviceError> {
        let key = Key::of(source, defines);
        let id = (key.clone(), entry.to_owned());
        if let Some(kernel) = self.kernels.get(&id).filter(|k| k.0.shared_bytes >= shared_bytes) {
            return Ok(kernel.clone());
        }
        let declared = signature::find(source.text, entry).ok_or_else(|| {
            DeviceError::internal(format!(
                "{} declares no `extern \"C\" __global__` kernel `{entry}`",
                source.name
            ))
        })?;
        // One parameter too many asked for is an error to a checker of the driver's calls (`parameter_sizes`).
        if declared.windows(2).any(|d| d[0].len() != d[1].len()) {
            return Err(DeviceError::internal(format!(
                "{} declares `{entry}` with unlike numbers of parameters: each needs a name of its own",
                source.name
            )));
        }
        if !self.wanted.iter().any(|(_, k)| *k == key) {
            self.wanted.push((source, key.clone()));
        }
        if self.compiles() && !self.images.contains_key(&key) {
            let built = self.build(source, &key)?;
            self.keep(key.clone(), built);
        }
        let mut inner = KernelInner {
            name: entry.into(),
            source: key.title(),
            declared,
            sizes: None,
            shared_bytes: shared_bytes.max(FREE_SHARED_BYTES),
            function: std::ptr::null_mut(),
            _module: None,
        };
        if self.mode == Mode::Online {
            let module = self.module(&key)?;
            inner.function = module.function(entry)?;
            let most = inner.declared.iter().map(Vec::len).max().unwrap_or(0).min(MAX_PARAMS);
            inner.sizes = Some(parameter_sizes(inner.function, most)?);
            inner._module = Some(module);
            // Also for few bytes: what a kernel declares itself counts against the free 48 KiB.
            allow_shared(inner.function, inner.shared_bytes, &inner)?;
        }
        let kernel = Kernel(Arc::new(inner));
        self.kernels.insert(id, kernel.clone());
        Ok(kernel)
    }

    fn module(&mut self, key: &Key) -> Result<Arc<Module>, DeviceError> {
        if let Some(module) = self.modules.get(key) {
            return Ok(module.clone());
        }
        let image = self.images.get(key).cloned();
        let image = image.ok_or_else(|| DeviceError::internal(format!("no image of {}", key.title())))?;
        let module = Arc::new(Module::load(&image).map_err(|code| self.refused(code, key))?);
        self.modules.insert(key.clone(), module.clone());
        Ok(module)
    }

    /// Compiles one source, or reads it from the disk. Takes `&self`: runs on several threads.
    fn build(&self, source: KernelSource, key: &Key) -> Result<Built, DeviceError> {
        let mut options: Vec<String> =
            ["--std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v"].map(String::from).into();
        options.push(format!("--gpu-architecture={}", self.target.name));
        options.extend(key.defines.lines().map(String::from));
        let text = format!("{PRELUDE}\n#line 1 \"{}\"\n{}", source.name, source.text);
        let version = format!("{:?}", self.nvrtc);
        let kind = match self.target.code {
            Code::Cubin => "cubin",
            Code::Ptx => "ptx",
        };
        // The target is among the options.
        let file = format!("{}.{kind}", disk::key(&[&text, &options.join("\n"), &version]));
        // Without a device all is compiled, for what the compiler says of it.
        let kept = self.disk.as_ref().filter(|_| self.mode == Mode::Online);
        if let Some(image) = kept.and_then(|d| d.get(&file)) {
            return Ok(Built { image, usage: Vec::new() });
        }
        let compiled = nvrtc::compile(source.name, &text, &options, self.target.code).map_err(|e| {
            if e.to_string().contains("gpu-architecture") {
                let (major, minor) = self.nvrtc.unwrap_or_default();
                return DeviceError::Unavailable(format!(
                    "NVRTC {major}.{minor} cannot compile for {}: install a newer one, or name its folder with --cuda_path",
                    self.target.name
                ));
            }
            e
        })?;
        if let Some(disk) = &self.disk {
            // A cache that cannot be written costs the next run some seconds, not this one its result.
            let _ = disk.put(&file, &compiled.image);
        }
        Ok(Built { image: compiled.image, usage: nvrtc::usage(&compiled.log) })
    }

    /// The driver does not load what NVRTC made.
    fn refused(&self, code: sys::CUresult, key: &Key) -> DeviceError {
        match &self.parties {
            Some(parties) if unfit(code) => DeviceError::Unavailable(format!(
                "the driver refuses kernels compiled for {} (cuModuleLoadData: {code:?}, {}): {}: {}",
                self.target.name,
                key.title(),
                parties.versions(),
                parties.remedy()
            )),
            _ => DeviceError::Driver {
                call: "cuModuleLoadData",
                code: format!("{code:?}"),
                phase: crate::device::Phase::Prepare,
                at: format!(" ({})", key.title()),
            },
        }
    }

    fn keep(&mut self, key: Key, built: Built) {
        self.usage.extend(built.usage.into_iter().map(|u| (key.title(), u)));
        self.images.insert(key, Arc::new(built.image));
    }
}

struct Built {
    image: Vec<u8>,
    usage: Vec<Usage>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::prep::{Config, DevPtr, Param};

    const SOURCE: KernelSource = KernelSource {
        name: "test/kernel.cu",
        text: "extern \"C\" __global__ void scale(bf16* x, int n, float by) {\n\
               int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] = to_bf16(to_f32(x[i]) * by * TIMES); }",
    };

    fn target(name: &str) -> Target {
        let code = if name.starts_with("sm_") { Code::Cubin } else { Code::Ptx };
        Target { name: name.into(), cc: 90, code }
    }

    fn parties(nvrtc: (i32, i32)) -> Parties {
        Parties { device: 90, shared_bytes: 227 << 10, supported: vec![90], nvrtc, driver: (12, 8) }
    }

    fn defines() -> [(&'static str, String); 1] {
        [("TIMES", "2".to_owned())]
    }

    #[test]
    fn arguments_are_checked_against_the_source() {
        let mut cache = KernelCache::offline(&target("sm_90a"));
        let kernel = cache.get(SOURCE, "scale", &defines(), 0).unwrap();
        let config = Config::linear(4, 256);
        let good = [Param::Ptr(DevPtr(64)), Param::I32(3), Param::F32(1.0)];
        kernel.bind(config, &good).unwrap();
        let e = kernel.bind(config, &[good[0], good[2], good[1]]).unwrap_err().to_string();
        assert!(e.contains("`scale`") && e.contains("`n` is int"), "{e}");
        let e = kernel.bind(Config { block: [2048, 1, 1], ..config }, &good).unwrap_err().to_string();
        assert!(e.contains("no legal launch"), "{e}");
        let e = kernel.bind(Config { shared_bytes: 50_000, ..config }, &good).unwrap_err().to_string();
        assert!(e.contains("50000 bytes"), "{e}");
        let e = cache.get(SOURCE, "missing", &[], 0).unwrap_err().to_string();
        assert!(e.contains("`missing`"), "{e}");
    }

    #[test]
    fn a_launch_without_a_device_is_refused() {
        let kernel = KernelCache::collecting(&target("sm_90a")).get(SOURCE, "scale", &defines(), 0).unwrap();
        let launch = kernel
            .bind(Config::linear(1, 32), &[Param::Ptr(DevPtr(64)), Param::I32(3), Param::F32(1.0)])
            .unwrap();
        assert!(launch.issue(std::ptr::null_mut()).is_err());
    }

    #[test]
    fn each_source_with_its_defines_is_wanted_once() {
        let mut cache = KernelCache::collecting(&target("sm_90a"));
        for times in ["2", "3", "2"] {
            cache.get(SOURCE, "scale", &[("TIMES", times.to_owned())], 0).unwrap();
        }
        assert_eq!(cache.wanted.len(), 2);
    }

    /// Runs where NVRTC is; elsewhere it checks that the error is the one that says so.
    #[test]
    fn sources_are_compiled_and_kept_on_disk() {
        let folder = tempfile::tempdir().unwrap();
        let mut wanted = KernelCache::collecting(&target("sm_90a"));
        wanted.get(SOURCE, "scale", &defines(), 0).unwrap();
        let version = match nvrtc::version() {
            Ok(version) => version,
            Err(e) => {
                assert!(matches!(e, DeviceError::Unavailable(_)), "{e}");
                eprintln!("skipped: {e}");
                return;
            }
        };
        let open =
            || KernelCache::online(&target("sm_90a"), parties(version), Some(folder.path().to_path_buf()));
        let mut cache = open();
        cache.warm(&wanted).unwrap();
        assert_eq!(cache.usage()[0].1.kernel, "scale");
        let cubin = cache.images.values().next().unwrap().clone();
        // A second cache reads the file; after damage it compiles again.
        let mut second = open();
        second.warm(&wanted).unwrap();
        assert!(second.usage().is_empty(), "compiled although the file was there");
        assert_eq!(second.images.values().next().unwrap(), &cubin);
        let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        std::fs::write(&file, "damaged").unwrap();
        let mut third = open();
        third.warm(&wanted).unwrap();
        assert_eq!(third.usage().len(), 1);
        assert_eq!(third.images.values().next().unwrap(), &cubin);
    }

    /// What the driver cannot run is told with the three versions; another failure is the call's.
    #[test]
    fn a_refusal_names_the_versions_and_what_to_change() {
        let cache = KernelCache::online(&target("compute_89"), parties((13, 0)), None);
        let key = Key::of(SOURCE, &[]);
        for code in
            [sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION, sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU]
        {
            let e = cache.refused(code, &key);
            assert!(matches!(e, DeviceError::Unavailable(_)), "{e}");
            for part in [
                "compute_89",
                "capability 9.0",
                "NVRTC is 13.0",
                "CUDA 12.8",
                "update the driver to one for CUDA 13.0",
            ] {
                assert!(e.to_string().contains(part), "{e} lacks {part}");
            }
        }
        let e = cache.refused(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY, &key);
        assert!(matches!(e, DeviceError::Driver { .. }), "{e}");
    }

    /// PTX ends with the zero that the driver reads up to, and is kept apart from machine code.
    #[test]
    fn ptx_is_made_where_there_is_no_machine_code() {
        let Ok(version) = nvrtc::version() else {
            eprintln!("skipped: no NVRTC");
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        let mut wanted = KernelCache::collecting(&target("compute_80"));
        wanted.get(SOURCE, "scale", &defines(), 0).unwrap();
        let mut cache =
            KernelCache::online(&target("compute_80"), parties(version), Some(folder.path().to_path_buf()));
        cache.warm(&wanted).unwrap();
        let image = cache.images.values().next().unwrap();
        let text = std::ffi::CStr::from_bytes_with_nul(image).unwrap().to_str().unwrap();
        assert!(text.contains(".target sm_80") && text.contains(".entry scale"), "{text}");
        let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        assert_eq!(file.extension().unwrap(), "ptx");
    }

    #[test]
    fn a_compile_error_carries_the_log() {
        let bad = KernelSource {
            name: "test/bad.cu",
            text: "extern \"C\" __global__ void bad(int n) { undeclared = n; }",
        };
        let mut cache = KernelCache::offline(&target("sm_90a"));
        if !cache.compiles() {
            eprintln!("skipped: no NVRTC");
            return;
        }
        let e = cache.get(bad, "bad", &[], 0).unwrap_err().to_string();
        assert!(e.contains("test/bad.cu(1)") && e.contains("undeclared"), "{e}");
        let mut future = KernelCache::offline(&target("sm_999"));
        let e = future.get(SOURCE, "scale", &defines(), 0).unwrap_err();
        assert!(matches!(e, DeviceError::Unavailable(_)), "{e}");
    }
}
