//! What outlives one executor: the context, loaded kernels and product plans. `selftest` makes hundreds of
//! executors; opening the device for each would take minutes.

use super::context::Context;
use super::cudnn::{AttentionChoice, Sdpas};
use super::disk;
use super::kernels::KernelCache;
use super::libraries::{self, Availability};
use super::matmul::Matmuls;
use super::target::{self, Target};
use crate::device::DeviceError;
use crate::device::inject::Inject;
use crate::ranks::control::Team;
use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;

/// How to open the device.
#[derive(Debug, Clone)]
pub struct CudaOptions {
    /// Which GPU, as the driver numbers those it shows.
    pub ordinal: usize,
    /// `--kernel_cache`: folder for compiled kernels and chosen algorithms; `None`: the default one.
    pub cache_dir: Option<PathBuf>,
    /// `--cuda_path`: folder that libraries are looked for in first.
    pub cuda_path: Option<PathBuf>,
    /// `--attention_backend`.
    pub attention: AttentionChoice,
    /// Times cuBLASLt's candidates; otherwise its own first guess is taken.
    pub tune: bool,
    /// Every product takes this one of its candidates, as the library lists them, whatever `tune` says; past the end of
    /// a list [`DeviceError::Invalid`]. To hold the chosen one against the others (`mbperf ops`).
    pub gemm_candidate: Option<usize>,
    /// `--inject`.
    pub inject: Option<Inject>,
    /// Of a run of several processes: its communicators, and which GPU is this one's.
    pub team: Option<Team>,
    /// Leaves this launch (index in the graph arm's program) out of the graphs: for tests of the proof.
    pub omit_launch: Option<usize>,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            ordinal: 0,
            cache_dir: None,
            cuda_path: None,
            attention: AttentionChoice::default(),
            tune: true,
            gemm_candidate: None,
            inject: None,
            team: None,
            omit_launch: None,
        }
    }
}

/// One opened device. Fields are dropped in order: the context last.
#[derive(Debug)]
pub(super) struct Session {
    pub matmuls: RefCell<Matmuls>,
    pub sdpas: RefCell<Sdpas>,
    pub kernels: RefCell<KernelCache>,
    /// What kernels are compiled for, and ops chosen for.
    pub target: Target,
    /// That it is not the device's own architecture.
    pub notice: Option<String>,
    pub context: Rc<Context>,
}

impl Session {
    /// The thread's session for these options, opened on first use.
    pub fn open(options: &CudaOptions) -> Result<Rc<Self>, DeviceError> {
        type Key = (usize, Option<PathBuf>, bool);
        thread_local! {
            static OPEN: RefCell<Vec<(Key, Rc<Session>)>> = const { RefCell::new(Vec::new()) };
        }
        if let Some(path) = &options.cuda_path {
            libraries::set_path(path);
        }
        let folder = options.cache_dir.clone().or_else(disk::default_folder);
        let ordinal = options.team.as_ref().map_or(options.ordinal, gpu_of);
        let key = (ordinal, folder.clone(), options.tune);
        OPEN.with_borrow_mut(|open| {
            if let Some((_, session)) = open.iter().find(|(k, _)| *k == key) {
                return Ok(session.clone());
            }
            let context = Context::open(ordinal)?;
            let (target, parties) = target::of(&context)?;
            let session = Rc::new(Self {
                notice: target::notice(&target, &parties),
                kernels: RefCell::new(KernelCache::online(&target, parties, folder.clone())),
                sdpas: RefCell::new(Sdpas::online(&context)),
                matmuls: RefCell::new(Matmuls::online(&context, options.tune, folder)?),
                target,
                context,
            });
            open.push((key, session.clone()));
            Ok(session)
        })
    }
}

/// The GPU of a rank: by its place on the machine, unless its launcher shows it one alone.
fn gpu_of(team: &Team) -> usize {
    match libraries::probe() {
        Availability::Ready(1) => 0,
        _ => team.local_rank,
    }
}
