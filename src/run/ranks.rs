//! Runs of several processes: what they may be asked for, rank 0's start of the others, and the other ranks' part.

use super::interrupt::INTERRUPTED;
use super::{open_device, plan, usage};
use crate::args::{Args, defaults};
use crate::capture::RunPlan;
use crate::commands::complain;
use crate::config::{Dispatcher, Model, RunConfig, World};
use crate::device::cpu::{name_hash, tcp};
use crate::device::{DeviceError, Phase, guard};
use crate::host_model::HostModel;
use crate::measure::Options;
use crate::ranks::control::{self, Answer, Follow, Lead, Share, Team};
use crate::ranks::groups::{Kind, Place};
use crate::ranks::launch::{self, Children, Start};
use crate::ranks::{follow, rendezvous};
use crate::report::{Row, RunFacts, Target, Writer};
use crate::workloads::share::RankShare;
use std::net::TcpListener;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SECONDS_A_MINUTE: f64 = 60.0;
/// A year: longer than any allocation, and clocks still hold it.
const LONGEST_TIMEOUT_S: f64 = 365.0 * 86_400.0;
/// A rank's own watchdog speaks before rank 0's, which hangs with it.
const RANK_0_WAITS: Duration = Duration::from_secs(5);

/// The watchdog's limit, and by how much rank 0's is longer.
///
/// # Errors
/// A negative time (exit 2).
pub(super) fn watchdog_limit(args: &Args, several: bool) -> anyhow::Result<(Duration, Duration)> {
    let limit = super::beside::limit(args)?;
    let minutes = args.training.distributed_timeout_minutes.filter(|_| several);
    let plain = args.mbperf.watchdog == defaults::WATCHDOG_S;
    let given =
        minutes.filter(|_| plain).and_then(|m| Duration::try_from_secs_f64(m as f64 * SECONDS_A_MINUTE).ok());
    Ok((given.unwrap_or(limit), if several { RANK_0_WAITS } else { Duration::ZERO }))
}

/// What a hang of several ranks is told with beside [`guard::hang_message`].
pub(super) fn hang_message(rank: usize, phase: Phase, limit: Duration) -> String {
    format!(
        "rank {rank}: {}; ranks wait for each other in every collective: the first one that hangs stops all",
        guard::hang_message(phase, limit)
    )
}

/// Whether this process is one of several, and which.
pub(super) fn start(args: &Args) -> anyhow::Result<Option<Start>> {
    let start = launch::start(args.mbperf.nproc_per_node, &|name| std::env::var(name).ok());
    start.map_err(|e| usage(&e))
}

fn timeout(args: &Args) -> anyhow::Result<Duration> {
    let minutes = args.training.distributed_timeout_minutes;
    let harness = minutes.map(|m| m as f64 * SECONDS_A_MINUTE);
    let own = args.mbperf.rendezvous_timeout;
    let fits = |s: f64| s > 0.0 && s <= LONGEST_TIMEOUT_S;
    if let Some(s) = own.filter(|s| !fits(*s)) {
        return Err(usage(&format!(
            "--rendezvous_timeout {s}: give seconds above 0, at most {LONGEST_TIMEOUT_S} (a year)"
        )));
    }
    if let Some(m) = minutes.filter(|_| harness.is_some_and(|s| !fits(s))) {
        let most = LONGEST_TIMEOUT_S / SECONDS_A_MINUTE;
        return Err(usage(&format!("--distributed_timeout_minutes {m}: give 1 to {most} (a year)")));
    }
    let seconds = own.or(harness).unwrap_or(defaults::RENDEZVOUS_TIMEOUT_S);
    Duration::try_from_secs_f64(seconds).map_err(|e| usage(&format!("--rendezvous_timeout {seconds}: {e}")))
}

/// The times that ranks wait, whether there are several or not.
pub(super) fn check_timeout(args: &Args) -> anyhow::Result<()> {
    timeout(args).map(drop)
}

/// What no run of several processes can give, before anything is touched.
pub(super) fn check_options(args: &Args) -> anyhow::Result<()> {
    let own = &args.mbperf;
    for (given, option, why) in [
        (own.sweep, "--sweep", "run one scope at a time"),
        (own.extrapolate, "--extrapolate", "give --max_microbatches"),
        (own.resume, "--resume", "run one repetition at a time"),
        (own.stack_only, "--stack_only", "a bare stack has no collectives"),
        (
            own.overlap_wgrad,
            "--overlap_wgrad",
            "the reduction of gradients runs beside the main stream already",
        ),
        (own.dump.is_some(), "--dump", "its tensors are those of one process"),
        (own.spin_percent.is_some(), "--spin_percent", "run one process"),
    ] {
        if given {
            return Err(usage(&format!("{option} is not built for several processes: {why}")));
        }
    }
    Ok(())
}

/// Makes the configuration that of this rank.
///
/// # Errors
/// A layout that several processes cannot run, with what to change.
pub(super) fn enter(cfg: &mut RunConfig, start: &Start) -> anyhow::Result<()> {
    let (n, job) = (start.size, cfg.identity.num_gpus);
    // First: a place is looked for among all processes.
    if job < n || !job.is_multiple_of(n) {
        return Err(usage(&format!(
            "{n} processes: the job has {job} GPUs (-ng): its ranks cannot be {n} processes; give -ng a multiple of {n}"
        )));
    }
    cfg.parallel.world = World { size: n, rank: start.rank };
    let p = &cfg.parallel;
    let place = Place::of(p);
    let shared = p.tp > 1 && place.tensor.is_some();
    let refused = if p.pp > 1 {
        Some(format!("pp {}: pipeline stages between processes are not built; give -pp 1", p.pp))
    } else if p.cp > 1 {
        Some(format!("cp {}: context parallelism between processes is not built; give -cp 1", p.cp))
    } else if p.etp > 1 && cfg.model.moe.is_some() {
        Some(format!(
            "etp {}: experts split over tensor ranks are not built between processes; give -et 1",
            p.etp
        ))
    } else if shared && cfg.model.mla.is_none() && cfg.model.num_query_groups < p.tp {
        Some(format!(
            "tp {} with {} key and value heads: heads that ranks share are not built between processes; lower -tp",
            p.tp, cfg.model.num_query_groups
        ))
    } else if shared && cfg.model.moe.is_some() && !p.sequence_parallel {
        Some("experts with tensor parallelism need model.sequence_parallel=true between processes".into())
    } else if let Some(what) = unproved(&cfg.model, shared, place.expert.is_some()) {
        Some(format!("{what} between processes: not built; run one process"))
    } else if place.data.is_some() && !p.use_distributed_optimizer {
        Some("data parallelism between processes needs ddp.use_distributed_optimizer=true".into())
    } else if place.groups().count() < 2 {
        Some(format!(
            "none of tp {}, ep {}, dp {} lies within {n} processes, so that they would have nothing to say to each other: \
             change -ng, -tp or -ep",
            p.tp, p.ep, p.dp
        ))
    } else {
        None
    };
    if place.expert.is_some() && cfg.model.moe.as_ref().is_some_and(|m| m.dispatcher == Dispatcher::Flex) {
        cfg.approximations.push("flex_by_nccl".into());
    }
    match refused {
        Some(why) => Err(usage(&format!("{n} processes: {why}"))),
        None => Ok(()),
    }
}

/// Layers whose losses were never held against those of one process.
fn unproved(model: &Model, tensor: bool, expert: bool) -> Option<&'static str> {
    let rank_capacity = model.moe.as_ref().is_some_and(|m| m.rank_capacity_factor.is_some());
    [
        (model.vision.is_some(), "an image tower"),
        (model.diffusion.is_some(), "a diffusion transformer"),
        (model.hyper_connections.is_some(), "hyper-connections"),
        (tensor && model.mtp_num_layers > 0, "multi-token prediction over tensor ranks"),
        (expert && rank_capacity, "a rank capacity factor over expert ranks"),
    ]
    .into_iter()
    .find_map(|(has, what)| has.then_some(what))
}

/// Names of the real groups, joined with `+`.
pub(super) fn real_groups(place: &Place, experts: bool) -> String {
    let said =
        |kind: Kind| kind != Kind::World && (experts || !matches!(kind, Kind::Expert | Kind::ExpertData));
    let names: Vec<&str> = place.groups().map(|g| g.kind).filter(|k| said(*k)).map(Kind::name).collect();
    names.join("+")
}

/// What all ranks must have alike.
fn fingerprint(cfg: &RunConfig, on_gpu: bool) -> u64 {
    let mut cfg = cfg.clone();
    cfg.parallel.world.rank = 0;
    name_hash(&format!("{on_gpu} {}", serde_json::to_string(&cfg).unwrap_or_default()))
}

fn hello(cfg: &RunConfig, start: &Start, on_gpu: bool, data: &TcpListener) -> rendezvous::Hello {
    rendezvous::Hello {
        version: env!("CARGO_PKG_VERSION").into(),
        rank: start.rank,
        size: start.size,
        config: fingerprint(cfg, on_gpu),
        data_port: data.local_addr().map_or(0, |a| a.port()),
    }
}

/// Where this rank listens for the others' data, on the CPU.
fn data_listener(start: &Start) -> Result<TcpListener, DeviceError> {
    let host = if start.port.is_some() && start.master != "127.0.0.1" { "0.0.0.0" } else { "127.0.0.1" };
    TcpListener::bind((host, 0)).map_err(|e| DeviceError::Invalid(format!("no port to listen at: {e}")))
}

fn connect_data(
    data: &TcpListener,
    peers: &[String],
    rank: usize,
    on_gpu: bool,
    timeout: Duration,
) -> Result<(), DeviceError> {
    if !on_gpu {
        let mesh = rendezvous::mesh(data, peers, rank, timeout)?;
        let mesh = tcp::Mesh::new(mesh).map_err(|e| DeviceError::Invalid(format!("rank {rank}: {e}")))?;
        mesh.install();
    }
    Ok(())
}

/// Rank 0 and its others; the processes that it started end with it.
pub(super) struct Leader {
    pub lead: Rc<Lead>,
    _children: Children,
}

impl Drop for Leader {
    fn drop(&mut self) {
        // Nothing new to ranks that have been told already; the others must not be waited for in vain.
        self.lead.give_up(1);
    }
}

/// Writes failed rows and ends the process: another rank has failed, and this one hangs in what it waits for.
pub(super) fn abandon(
    args: &Args,
    facts: Arc<Mutex<RunFacts>>,
    options: Options,
    target: Target,
) -> impl FnOnce(u8, String) + Send + 'static {
    let dialect = args.mbperf.csv_dialect;
    move |code, reason| {
        if let Ok(facts) = facts.lock() {
            let rows = Row::without_outcome(&facts, &options, "failed", &reason);
            if let Err(e) = Writer::open_in(&target, dialect).and_then(|mut writer| writer.rows(&rows)) {
                complain(&e.to_string());
            }
        }
        complain(&reason);
        super::last::say(code);
        signal_hook::low_level::exit(i32::from(code));
    }
}

/// Starts the others where that is this process's part, and waits for them.
///
/// # Errors
/// Ranks that do not come, by number.
pub(super) fn gather(
    args: &Args,
    cfg: &RunConfig,
    start: &Start,
    on_gpu: bool,
    interrupt: &AtomicBool,
    abandon: impl FnOnce(u8, String) + Send + 'static,
) -> Result<Leader, DeviceError> {
    let timeout = timeout(args).map_err(|e| DeviceError::internal(e.to_string()))?;
    let listener = rendezvous::listen(start)?;
    let data = data_listener(start)?;
    let port = listener.local_addr().map_or(0, |a| a.port());
    let children =
        if start.port.is_none() { Children::start(start.size, port) } else { Ok(Children::default()) };
    let mut children =
        children.map_err(|e| DeviceError::Invalid(format!("the other ranks cannot be started: {e}")))?;
    let own = hello(cfg, start, on_gpu, &data);
    let (streams, peers) = rendezvous::gather(&listener, &own, start, timeout, &mut children, interrupt)?;
    connect_data(&data, &peers, 0, on_gpu, timeout)?;
    let lead = Rc::new(Lead::new(streams, abandon)?);
    control::install(Team {
        share: Share::Lead(lead.clone()),
        place: Place::of(&cfg.parallel),
        local_rank: start.local_rank,
    });
    Ok(Leader { lead, _children: children })
}

/// The part of a rank that is not 0: it runs what rank 0 says, and writes nothing; its own failure is rank 0's to say.
/// `alone`: until rank 0 has it.
///
/// # Errors
/// As a run's.
pub(super) fn serve(
    cfg: &RunConfig,
    args: &Args,
    start: &Start,
    on_gpu: bool,
    alone: &AtomicBool,
) -> anyhow::Result<u8> {
    let rank = start.rank;
    let plan = plan(cfg, false, args.mbperf.comm_model)?;
    let costs = match HostModel::load(&args.mbperf.host_model)? {
        Some(model) => Some(model.costs(&plan, RankShare::of(cfg)?.tokens).0),
        None => None,
    };
    if !on_gpu {
        super::threads::check()?;
    }
    let data = data_listener(start)?;
    let timeout = timeout(args)?;
    let (stream, peers) = rendezvous::join(start, &hello(cfg, start, on_gpu, &data), timeout)?;
    alone.store(false, Ordering::SeqCst);
    let leave = move |told: Option<u8>| {
        if told.is_none() {
            complain(&format!("rank {rank}: rank 0 has gone, and what was under way did not come back"));
        }
        signal_hook::low_level::exit(told.map_or(1, i32::from));
    };
    let follow = Rc::new(Follow::new(rank, stream, leave)?);
    let ran = connect_data(&data, &peers, rank, on_gpu, timeout)
        .and_then(|()| run(cfg, args, start, &plan, on_gpu, &follow, costs));
    let whole = match ran {
        Ok(whole) => whole,
        // Rank 0's failure, and that of another, are told there.
        Err(_) if follow.given_up() => false,
        Err(error) => {
            let code = crate::measure::exit_code(&error);
            let failed = Answer::Failed { code, message: error.to_string() };
            if follow.answer(&failed).is_err() {
                complain(&format!("rank {rank}: {error}"));
            }
            // Without clean-up, which would wait for the other ranks.
            signal_hook::low_level::exit(i32::from(code));
        }
    };
    follow.over();
    if !whole {
        signal_hook::low_level::exit(1);
    }
    Ok(0)
}

fn run(
    cfg: &RunConfig,
    args: &Args,
    start: &Start,
    plan: &RunPlan,
    on_gpu: bool,
    follow: &Rc<Follow>,
    costs: Option<crate::device::host::HostCosts>,
) -> Result<bool, DeviceError> {
    control::install(Team {
        share: Share::Follow(follow.clone()),
        place: Place::of(&cfg.parallel),
        local_rank: start.local_rank,
    });
    let beat = guard::Beat::default();
    let (limit, _) = watchdog_limit(args, true).map_err(|e| DeviceError::internal(e.to_string()))?;
    if !limit.is_zero() {
        let (rank, teller) = (start.rank, follow.teller());
        let expired = move |phase| {
            let message = guard::hang_message(phase, limit);
            if teller(Answer::Failed { code: 1, message }).is_err() {
                complain(&hang_message(rank, phase, limit));
            }
            signal_hook::low_level::exit(1);
        };
        guard::watch(beat.clone(), limit, expired)
            .map_err(|e| DeviceError::Invalid(format!("the watchdog cannot be started: {e}")))?;
    }
    let faults = super::faults(args).map_err(|e| DeviceError::internal(e.to_string()))?;
    let mut executor = open_device(plan, args, on_gpu, faults.filter(|_| struck(start.rank)), beat)?;
    let served = follow::serve(&mut executor, follow, costs);
    if !matches!(served, Ok(true)) {
        // Its communicators would wait for ranks that are gone.
        std::mem::forget(executor);
    }
    served
}

/// Rank that `--inject` strikes: 0, or the one in this variable (for tests).
const INJECT_RANK: &str = "MBPERF_INJECT_RANK";

pub(super) fn struck(rank: usize) -> bool {
    let chosen = std::env::var(INJECT_RANK).ok().and_then(|r| r.parse().ok());
    rank == chosen.unwrap_or(0)
}

/// Another rank leaves signals to rank 0, which ends all, but as long as the flag is set: it has not come there yet.
pub(super) fn leave_signals() -> anyhow::Result<Arc<AtomicBool>> {
    launch::end_with_rank_0();
    let alone = Arc::new(AtomicBool::new(true));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, INTERRUPTED, alone.clone())?;
    }
    Ok(alone)
}

/// What rank 0 says of the others, once they are there.
pub(super) fn said(start: &Start, cfg: &RunConfig, on_gpu: bool) -> String {
    format!(
        "{} processes over {}; real: {}{}",
        start.size,
        if on_gpu { "NCCL" } else { "TCP" },
        real_groups(&Place::of(&cfg.parallel), cfg.model.moe.is_some()),
        match cfg.identity.num_gpus / start.size {
            1 => String::new(),
            times => format!("; the job has {times} times as many GPUs, whose part is stood in for"),
        }
    )
}
