//! Equality first: both arms from the same state must leave the same bits, or no time is worth a look. And last:
//! the same again, shortly, as a graph can go wrong while it is timed.

use super::options::{FINAL_SHARE, LONG_STEP_MS, Options};
use super::outcome::{Equality, FinalCheck};
use super::session::{Session, Stop};
use crate::device::{Arm, DeviceError, GraphCost, Phase};

/// Why bits are not asked for once more.
pub(super) const UNORDERED: &str = "attention may add in any order (--attention_deterministic false)";

/// What the check leaves for the timed part.
pub(super) struct Proof {
    pub equality: Option<Equality>,
    /// [`super::Outcome::unequal`].
    pub unequal: Option<String>,
    pub first_replay_ms: Option<f64>,
    /// Wall time of the last step of each side, every step synchronised: sizes the first blocks.
    pub step_ms: Vec<f64>,
    /// What the eager steps left, and what a trace of each arm costs: for the final check.
    pub eager: Trace,
    edges_ms: f64,
    both_steps_ms: f64,
}

/// Bits that K steps of one arm left.
#[derive(Debug, Clone)]
pub(super) struct Trace {
    losses: Vec<Option<u32>>,
    grad_norms: Vec<Option<u32>>,
    digest: Vec<(String, u64)>,
    last_step_ms: f64,
    /// Time of the reset before and the digest after.
    edges_ms: f64,
}

/// Reset, K eager steps; reset, K steps of the other arm: warm-up, capture, replays. The graph arm's graphs
/// are left for timing.
pub(super) fn check(
    session: &mut Session,
    options: &Options,
    cost: &mut Option<GraphCost>,
) -> Result<Proof, Stop> {
    let wanted = Wanted { steps: options.equality_steps(), if_long: options.equality_steps_if_long() };
    if options.alone == Some(Arm::Graph) {
        session.hooks.progress.stage("equality check: graph arm");
        let mut first_replay_ms = None;
        let mut capture =
            Capture { warmup: options.warmup_steps, cost, first_replay_ms: &mut first_replay_ms };
        let own = trace(session, 0, Arm::Graph, wanted, Phase::Equality, Some(&mut capture))?;
        let step_ms = vec![own.last_step_ms];
        let (edges_ms, both_steps_ms) = (0.0, 0.0);
        return Ok(Proof {
            equality: None,
            unequal: None,
            first_replay_ms,
            step_ms,
            eager: own,
            edges_ms,
            both_steps_ms,
        });
    }
    session.hooks.progress.stage("equality check: eager arm");
    let eager = trace(session, 0, Arm::Eager, wanted, Phase::Equality, None)?;
    if options.sides().len() == 1 {
        let step_ms = vec![eager.last_step_ms];
        let (edges_ms, both_steps_ms) = (0.0, 0.0);
        return Ok(Proof {
            equality: None,
            unequal: None,
            first_replay_ms: None,
            step_ms,
            eager,
            edges_ms,
            both_steps_ms,
        });
    }
    // As many of the other arm, however long they take.
    let steps = eager.losses.len();
    let wanted = Wanted { steps, if_long: steps };
    let mut first_replay_ms = None;
    let (other, arm) = if options.captures() {
        session.hooks.progress.stage("equality check: graph arm");
        let mut capture =
            Capture { warmup: options.warmup_steps, cost, first_replay_ms: &mut first_replay_ms };
        (trace(session, 1, Arm::Graph, wanted, Phase::Equality, Some(&mut capture))?, Arm::Graph)
    } else {
        session.hooks.progress.stage("equality check: eager arm again");
        (trace(session, 1, Arm::Eager, wanted, Phase::Equality, None)?, Arm::Eager)
    };
    let (equality, unequal) = proven(&eager, &other, arm, session.executor.info().unordered)?;
    let step_ms = match options.aa {
        Some(Arm::Graph) => vec![other.last_step_ms; 2],
        Some(Arm::Eager) => vec![eager.last_step_ms; 2],
        None => vec![eager.last_step_ms, other.last_step_ms],
    };
    // The first reset compiled the kernels that fill memory.
    let edges_ms = 2.0 * other.edges_ms;
    let both_steps_ms = eager.last_step_ms + other.last_step_ms;
    Ok(Proof { equality, unequal, first_replay_ms, step_ms, eager, edges_ms, both_steps_ms })
}

/// Time that the final check will take, or why it is left out.
pub(super) fn final_ms(options: &Options, proof: &Proof) -> Result<f64, String> {
    let ms = proof.edges_ms + options.final_steps() as f64 * proof.both_steps_ms;
    match options.max_steps {
        Some(n) if options.final_steps() == 0 => Err(format!("-ms {n} leaves no steps for it")),
        // `-ms` sets no time.
        Some(_) => Ok(0.0),
        None if ms > FINAL_SHARE * options.longest_ms() => {
            Err(format!("it takes about {:.1} s, over a tenth of --max_time", ms / 1e3))
        }
        None => Ok(ms),
    }
}

/// After timing: a few steps of each arm from the seed once more. They must leave the same bits, and the losses of
/// the first time. Timed steps are not compared: the arms took different numbers of them.
pub(super) fn check_again(
    session: &mut Session,
    options: &Options,
    proof: &Proof,
) -> Result<FinalCheck, Stop> {
    session.hooks.progress.stage("final check");
    let steps = options.final_steps().min(proof.eager.losses.len());
    let wanted = Wanted { steps, if_long: steps };
    let eager = trace(session, 0, Arm::Eager, wanted, Phase::FinalCheck, None)?;
    let arm = if options.captures() { Arm::Graph } else { Arm::Eager };
    let other = trace(session, 1, arm, wanted, Phase::FinalCheck, None)?;
    if let Some(found) = difference(&eager, &other)? {
        return Err(unequal(arm, "after timing, ", &found).into());
    }
    let first = |t: &Trace| (t.losses[..steps].to_vec(), t.grad_norms[..steps].to_vec());
    if first(&eager) != first(&proof.eager) {
        return Err(DeviceError::Unequal(format!(
            "after timing, {steps} steps from the seed leave another loss or gradient norm than before it, in both \
             arms: device memory or a kernel was changed; no speedup is given. Please report it with --dryrun's output"
        ))
        .into());
    }
    Ok(FinalCheck::Equal { steps })
}

/// Steps of a trace, and where they turn out to be long.
#[derive(Clone, Copy)]
struct Wanted {
    steps: usize,
    if_long: usize,
}

struct Capture<'a> {
    warmup: usize,
    cost: &'a mut Option<GraphCost>,
    first_replay_ms: &'a mut Option<f64>,
}

fn trace(
    session: &mut Session,
    side: usize,
    arm: Arm,
    wanted: Wanted,
    usual: Phase,
    mut capture: Option<&mut Capture>,
) -> Result<Trace, Stop> {
    session.enter(usual);
    let begun = session.executor.now_ms();
    session.executor.reset()?;
    let mut trace = Trace {
        losses: Vec::new(),
        grad_norms: Vec::new(),
        digest: Vec::new(),
        last_step_ms: f64::NAN,
        edges_ms: session.executor.now_ms() - begun,
    };
    let mut steps = wanted.steps;
    let mut step = 0;
    while step < steps {
        let phase = match &mut capture {
            None => usual,
            Some(capture) if step < capture.warmup => Phase::Warmup,
            Some(capture) if step == capture.warmup => {
                session.check_interrupt()?;
                session.hooks.progress.stage("capture");
                session.enter(Phase::Capture);
                // Set first: a capture that fails half-way may leave graphs behind.
                session.graphs = true;
                *capture.cost = Some(session.executor.capture()?);
                Phase::FirstReplay
            }
            Some(_) => usual,
        };
        let done = session.single(side, arm, phase)?;
        let wall_ms = session.steps.last().map_or(f64::NAN, |s| s.wall_ms);
        if let (Some(capture), Phase::FirstReplay) = (&mut capture, phase) {
            *capture.first_replay_ms = Some(wall_ms);
        }
        trace.last_step_ms = wall_ms;
        trace.losses.push(done.loss.map(f32::to_bits));
        trace.grad_norms.push(done.grad_norm.map(f32::to_bits));
        // The first step loads kernels; the second tells.
        if step == 1 && wall_ms >= LONG_STEP_MS {
            steps = wanted.if_long;
        }
        step += 1;
    }
    let done = session.executor.now_ms();
    trace.digest = session.executor.digest()?;
    trace.edges_ms += session.executor.now_ms() - done;
    session.flush()?;
    Ok(trace)
}

/// The proof for arms that were run one after the other, each from the seed.
pub(super) fn check_in_turn(
    eager: &Trace,
    graph: &Trace,
    unordered: bool,
) -> Result<(Option<Equality>, Option<String>), DeviceError> {
    if eager.losses.len() != graph.losses.len() {
        let (a, b) = (eager.losses.len(), graph.losses.len());
        return Err(DeviceError::internal(format!("the arms ran {a} and {b} steps before timing")));
    }
    proven(eager, graph, Arm::Graph, unordered)
}

/// Equality, or in words how the arms differ where the device is allowed to: its kernels may add in any order, and
/// then other bits tell neither of equal work nor of unequal.
fn proven(
    eager: &Trace,
    other: &Trace,
    arm: Arm,
    unordered: bool,
) -> Result<(Option<Equality>, Option<String>), DeviceError> {
    match difference(eager, other)? {
        Some(found) if unordered => Ok((None, Some(found))),
        Some(found) => Err(unequal(arm, "", &found)),
        None => {
            let (steps, digest) = (eager.losses.len(), combined_digest(&eager.digest));
            Ok((Some(Equality { steps, buffers: eager.digest.len(), digest }), None))
        }
    }
}

/// Steps of a trace.
pub(super) fn steps_of(trace: &Trace) -> usize {
    trace.losses.len()
}

/// Names the first step and the buffers that differ; `None`: nothing does.
fn difference(eager: &Trace, other: &Trace) -> Result<Option<String>, DeviceError> {
    let names = |t: &Trace| t.digest.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    if eager.digest.is_empty() || names(eager) != names(other) {
        return Err(DeviceError::internal(format!(
            "the arms hash different buffers ({} and {}), so that equality cannot be shown",
            eager.digest.len(),
            other.digest.len()
        )));
    }
    let mut found = Vec::new();
    for (what, a, b) in
        [("loss", &eager.losses, &other.losses), ("gradient norm", &eager.grad_norms, &other.grad_norms)]
    {
        if let Some(step) = a.iter().zip(b).position(|(a, b)| a != b) {
            let show = |bits: Option<u32>| bits.map_or("none".into(), |b| f32::from_bits(b).to_string());
            found.push(format!("{what} of step {step} is {} and {}", show(a[step]), show(b[step])));
        }
    }
    let unlike: Vec<&str> = eager
        .digest
        .iter()
        .zip(&other.digest)
        .filter(|((_, a), (_, b))| a != b)
        .map(|((name, _), _)| name.as_str())
        .collect();
    if !unlike.is_empty() {
        const SHOWN: usize = 5;
        let more = if unlike.len() > SHOWN { ", ..." } else { "" };
        found.push(format!(
            "{} of {} buffers differ after {} steps ({}{more})",
            unlike.len(),
            eager.digest.len(),
            eager.losses.len(),
            unlike[..unlike.len().min(SHOWN)].join(", ")
        ));
    }
    Ok((!found.is_empty()).then(|| found.join("; ")))
}

fn unequal(arm: Arm, when: &str, found: &str) -> DeviceError {
    let whose = if arm == Arm::Graph {
        "the graph arm did not do the eager arm's work"
    } else {
        "the eager arm does not repeat itself"
    };
    DeviceError::Unequal(format!(
        "{when}{whose}: {found}; no speedup is given. Please report it with --dryrun's output"
    ))
}

/// FNV-1a over names and hashes: one word for the row. Offset basis and prime as published by its authors.
fn combined_digest(digest: &[(String, u64)]) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for (name, value) in digest {
        for byte in name.bytes().chain(value.to_le_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    hash
}
