//! Devices: the `Executor` that measuring drives, and its three kinds (cpu, cuda, fake).

pub mod cpu;
pub mod cuda;
pub mod digest;
pub mod fake;
pub mod guard;
pub mod host;
pub mod inject;
mod named;
pub mod record;

use crate::ranks::control::RankStep;
use serde::{Deserialize, Serialize};
use std::fmt;

named::named! {
    /// What a device was doing when it failed, and what a step belongs to; in the order of a run.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Phase {
        /// Before step 0: kernels, plans, memory.
        Prepare = "prepare",
        /// K steps of each arm from the seed; never timed.
        Equality = "equality",
        Warmup = "warmup",
        Capture = "capture",
        Instantiate = "instantiate",
        Upload = "upload",
        FirstReplay = "first_replay",
        /// First steps after a change of arm.
        Switch = "switch",
        /// The only phase that enters a statistic.
        Steady = "steady",
        /// A few steps of each arm from the seed once more, after timing.
        FinalCheck = "final_check",
    }
}

impl Phase {
    /// What one call of [`Executor::capture`] goes through.
    pub const OF_CAPTURE: [Phase; 3] = [Phase::Capture, Phase::Instantiate, Phase::Upload];

    pub fn makes_graphs(self) -> bool {
        Self::OF_CAPTURE.contains(&self)
    }

    /// Whether steps are run in it.
    pub fn has_steps(self) -> bool {
        self != Phase::Prepare && !self.makes_graphs()
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Failures below the command line. The kind decides the exit code.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Exit 3: no driver, no device, a library is missing.
    #[error("{0}")]
    Unavailable(String),
    /// Exit 5.
    #[error(
        "out of memory in phase {phase}: {what} needs {need_mib:.0} MiB, {free_mib:.0} MiB are free; {remedy}"
    )]
    OutOfMemory { phase: Phase, what: String, need_mib: f64, free_mib: f64, remedy: String },
    /// Exit 4: a capture, instantiation or upload failed.
    #[error("{phase} failed: {message}")]
    Capture { phase: Phase, message: String },
    /// Exit 1: a driver or library call failed. `call` is the function's name, `code` the error's.
    #[error("{call} failed with {code} in phase {phase}{at}")]
    Driver { call: &'static str, code: String, phase: Phase, at: String },
    /// Exit 1: a result that must not be used (loss not finite, rows overflowed).
    #[error("{0}")]
    Invalid(String),
    /// Exit 6: the graph arm did not do the eager arm's work.
    #[error("{0}")]
    Unequal(String),
    /// Another rank's failure, with its own exit code.
    #[error("rank {rank}: {message}")]
    Rank { rank: usize, code: u8, message: String },
    /// Exit 1: a defect of mbperf.
    #[error("internal error: {0}; please report it")]
    Internal(String),
}

impl DeviceError {
    pub fn internal(message: impl Into<String>) -> Self {
        Self::Internal(message.into())
    }
}

/// The two ways to run the same step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arm {
    Eager,
    Graph,
}

impl fmt::Display for Arm {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Arm::Eager => "eager",
            Arm::Graph => "graph",
        })
    }
}

/// Host times of issuing one step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Submitted {
    /// First call to last return, less `wait_ms` and `modelled_ms`.
    pub submit_ms: f64,
    /// Spent inside `host_sync` launches.
    pub wait_ms: f64,
    /// Spun for the host model; in neither of the two above.
    pub modelled_ms: f64,
    /// Identifies the step for [`Executor::wait`].
    pub ticket: u64,
}

/// What is known once a step has finished.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Finished {
    /// Reading of [`Executor::now_ms`]'s clock when the step was seen to be done.
    pub done_at_ms: f64,
    /// Device time from the end of the step submitted before to the end of this one: a host that is held up by a full
    /// launch queue sees ends late. `None`: not measured, and a step is seen when it is done.
    pub after_previous_ms: Option<f64>,
    /// Device time from the step's first to its last event, both outside graphs; `None` if not measured.
    pub device_span_ms: Option<f64>,
    /// Mean loss of the step; `None` for a share without a loss.
    pub loss: Option<f32>,
    /// Norm of the gradients before clipping; `None` without an optimizer.
    pub grad_norm: Option<f32>,
    /// A fault word was set (e.g. more rows than the bound): which.
    pub fault: Option<&'static str>,
}

impl Finished {
    /// Wall time of the step. With run-ahead (`ahead`) by the device's events: from the end of the step before if that
    /// was in flight when this one was submitted (`behind`), from its own start otherwise. Without, or without such
    /// times, from `since_ms` on the host's clock to when it was seen to be done.
    pub fn wall_ms(&self, ahead: bool, behind: bool, since_ms: f64) -> f64 {
        let by_device = if behind { self.after_previous_ms } else { self.device_span_ms };
        by_device.filter(|_| ahead).unwrap_or(self.done_at_ms - since_ms)
    }
}

/// One-off cost of the graph arm's graphs.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct GraphCost {
    pub capture_ms: f64,
    pub instantiate_ms: f64,
    pub upload_ms: f64,
    /// Distinct graphs.
    pub graphs: usize,
    /// Nodes over all distinct graphs.
    pub nodes: usize,
    /// `cuGraphLaunch` calls a step.
    pub launches_per_step: usize,
    /// Device memory taken by capture, instantiation and upload, if the driver's figures could be trusted.
    pub memory_mib: Option<f64>,
    /// Why `memory_mib` is empty, or how it was taken.
    pub memory_note: String,
}

/// Who computes.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct DeviceInfo {
    /// `cuda`, `cpu` or `fake`.
    pub device: String,
    pub gpu_name: Option<String>,
    pub gpu_uuid: Option<String>,
    pub driver_version: Option<String>,
    pub cuda_version: Option<String>,
    pub total_memory_mib: Option<f64>,
    pub attention_backend: Option<String>,
    /// A kernel of it may add in any order: two runs of equal work may leave other bits.
    pub unordered: bool,
    /// Hash of the GEMM plans in force: shapes and algorithms.
    pub gemm_plan_digest: Option<String>,
    /// What kernels are compiled for, as NVRTC names it; for the run file.
    pub kernel_target: Option<String>,
    /// Library versions for the run file, by name.
    pub libraries: Vec<(String, String)>,
    /// What the device does otherwise than asked or expected, in sentences.
    pub notices: Vec<String>,
}

/// State of the card during a block. `None`: could not be read.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Health {
    pub sm_clock_mhz: Option<f64>,
    pub temperature_c: Option<f64>,
    pub power_w: Option<f64>,
    pub power_limit_w: Option<f64>,
    /// NVML's reasons, joined with `+`; empty: none.
    pub throttle_reasons: Option<String>,
    /// Other processes that compute on this GPU.
    pub other_processes: Option<usize>,
}

/// Runs the two arms of one program. Measuring knows only this.
///
/// The eager arm issues launch by launch. The graph arm does the same until [`Executor::capture`] has
/// been called, then replays its graphs in the same places.
pub trait Executor {
    fn info(&self) -> DeviceInfo;

    /// A watchdog that wants to know which phase a call of several has come to.
    fn watched_by(&mut self, _beat: &guard::Beat) {}

    /// Processes that run in step.
    fn ranks(&self) -> usize {
        1
    }

    /// `count` steps of `arm` follow: the other ranks run them too, and are left behind in them by a run that ends among
    /// them. `ahead`: each is submitted before the one before it is waited for; `drain`: the last is waited for too.
    fn begin_steps(
        &mut self,
        _arm: Arm,
        _count: usize,
        _ahead: bool,
        _drain: bool,
    ) -> Result<(), DeviceError> {
        Ok(())
    }

    /// How the other ranks saw the steps that were waited for since the last call, by rank; none of one process.
    fn of_other_ranks(&mut self) -> Result<Vec<Vec<RankStep>>, DeviceError> {
        Ok(Vec::new())
    }

    /// Names the phase for messages and fault injection.
    fn set_phase(&mut self, phase: Phase);

    /// Weights, moments, gradients and step words as the seed gives them, step 0; everything else is
    /// poisoned. Captured graphs stay valid.
    fn reset(&mut self) -> Result<(), DeviceError>;

    /// Issues one step. Does not wait, but for `host_sync` launches.
    fn submit(&mut self, arm: Arm) -> Result<Submitted, DeviceError>;

    /// Waits for a step that was submitted. Steps are waited for in the order of submission.
    fn wait(&mut self, step: Submitted) -> Result<Finished, DeviceError>;

    /// Captures, instantiates and uploads the graph arm's graphs, proving for each that its nodes are the
    /// launches that the eager arm issues. Computes nothing.
    fn capture(&mut self) -> Result<GraphCost, DeviceError>;

    /// Destroys the graphs, after waiting for the device. The graph arm is uncaptured again.
    fn destroy_graphs(&mut self) -> Result<(), DeviceError>;

    /// Hash of the raw bits of the program's digest buffers, by buffer name. Waits for the device.
    fn digest(&mut self) -> Result<Vec<(String, u64)>, DeviceError>;

    /// Kernel, copy and memset launches that one eager step issues (a library call counts its kernels).
    fn launches_per_step(&self, arm: Arm) -> usize;

    /// Planned bytes of the arm: weights, state, activations, workspaces.
    fn planned_bytes(&self, arm: Arm) -> u64;

    /// The executor's clock in milliseconds: host monotonic, or virtual for the fake one.
    fn now_ms(&self) -> f64;

    /// State of the card now.
    fn health(&mut self) -> Health;

    /// From the next step on, issuing takes at least the host model's time ([`host`]); `None`: our own alone.
    ///
    /// # Errors
    /// [`DeviceError::Internal`] from a device without a host model, or for costs of another program.
    fn set_host_costs(&mut self, costs: Option<host::HostCosts>) -> Result<(), DeviceError> {
        match costs {
            None => Ok(()),
            Some(_) => Err(DeviceError::internal("this device cannot spin for a host model")),
        }
    }

    /// From the next step on, whether the launch queue is kept from filling: the device is waited for in the middle of
    /// a step, and `wait_ms` holds the waits. False: this device has no queue, and nothing changes. No default:
    /// a wrapper that does not pass it on would say so for any device.
    fn set_drained(&mut self, on: bool) -> bool;

    /// Device memory that this executor holds beyond what was free when it opened the device, in MiB: both arms,
    /// kernels, graphs. `None`: not known, or not ours alone.
    fn memory_used_mib(&mut self) -> Option<f64> {
        None
    }

    /// From the next step on, the device spins so long at a step's end, inside its span.
    ///
    /// # Errors
    /// [`DeviceError::Internal`] from a device that cannot.
    fn set_device_spin_ms(&mut self, ms: f64) -> Result<(), DeviceError> {
        if ms > 0.0 { Err(DeviceError::internal("this device cannot spin")) } else { Ok(()) }
    }

    /// Lets the host do nothing for a while: fault injection.
    fn stall(&mut self, ms: f64) {
        std::thread::sleep(std::time::Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default());
    }

    /// Values of a buffer of the eager arm's program, as f32; integers converted. Waits for the device.
    fn read(&mut self, buffer: crate::program::BufId) -> Result<Vec<f32>, DeviceError> {
        Err(DeviceError::internal(format!("this device cannot read buffer {}", buffer.0)))
    }

    /// Union of kernel intervals of one step from a profiling pass, or why there is none. Last in a process.
    fn busy_ms(&mut self, arm: Arm) -> Result<f64, String>;

    /// Every kernel, copy and memset of one step with its times, or why there is none. Last in a process, as
    /// [`Executor::busy_ms`].
    fn profile(&mut self, arm: Arm) -> Result<record::Recorded, String> {
        Err(format!("this device records no {arm} step"))
    }
}
