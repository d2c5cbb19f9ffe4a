//! Equality first: both arms from the same state must leave the same bits, or no time is worth a look.

use super::options::Options;
use super::outcome::Equality;
use super::session::{Session, Stop};
use crate::device::{Arm, DeviceError, GraphCost, Phase};

/// What the check leaves for the timed part.
pub(super) struct Proof {
    pub equality: Option<Equality>,
    pub first_replay_ms: Option<f64>,
    /// Wall time of the last step of each side, every step synchronised: sizes the first blocks.
    pub step_ms: Vec<f64>,
}

/// Bits that K steps of one arm left.
struct Trace {
    losses: Vec<Option<u32>>,
    grad_norms: Vec<Option<u32>>,
    digest: Vec<(String, u64)>,
    last_step_ms: f64,
}

/// Reset, K eager steps; reset, K steps of the other arm: warm-up, capture, replays. The graph arm's graphs
/// are left for timing.
pub(super) fn check(
    session: &mut Session,
    options: &Options,
    cost: &mut Option<GraphCost>,
) -> Result<Proof, Stop> {
    let steps = options.equality_steps();
    session.hooks.progress.stage("equality check: eager arm");
    let eager = trace(session, 0, Arm::Eager, steps, None)?;
    if options.sides().len() == 1 {
        return Ok(Proof { equality: None, first_replay_ms: None, step_ms: vec![eager.last_step_ms] });
    }
    let mut first_replay_ms = None;
    let (other, arm) = if options.captures() {
        session.hooks.progress.stage("equality check: graph arm");
        let mut capture =
            Capture { warmup: options.warmup_steps, cost, first_replay_ms: &mut first_replay_ms };
        (trace(session, 1, Arm::Graph, steps, Some(&mut capture))?, Arm::Graph)
    } else {
        session.hooks.progress.stage("equality check: eager arm again");
        (trace(session, 1, Arm::Eager, steps, None)?, Arm::Eager)
    };
    compare(&eager, &other, arm)?;
    let step_ms = match options.aa {
        Some(Arm::Graph) => vec![other.last_step_ms; 2],
        Some(Arm::Eager) => vec![eager.last_step_ms; 2],
        None => vec![eager.last_step_ms, other.last_step_ms],
    };
    let equality =
        Some(Equality { steps, buffers: eager.digest.len(), digest: combined_digest(&eager.digest) });
    Ok(Proof { equality, first_replay_ms, step_ms })
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
    steps: usize,
    mut capture: Option<&mut Capture>,
) -> Result<Trace, Stop> {
    session.enter(Phase::Equality);
    session.executor.reset()?;
    let mut trace =
        Trace { losses: Vec::new(), grad_norms: Vec::new(), digest: Vec::new(), last_step_ms: f64::NAN };
    for step in 0..steps {
        let phase = match &mut capture {
            None => Phase::Equality,
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
            Some(_) => Phase::Equality,
        };
        let done = session.single(side, arm, phase)?;
        let wall_ms = session.steps.last().map_or(f64::NAN, |s| s.wall_ms);
        if let (Some(capture), Phase::FirstReplay) = (&mut capture, phase) {
            *capture.first_replay_ms = Some(wall_ms);
        }
        trace.last_step_ms = wall_ms;
        trace.losses.push(done.loss.map(f32::to_bits));
        trace.grad_norms.push(done.grad_norm.map(f32::to_bits));
    }
    trace.digest = session.executor.digest()?;
    session.flush()?;
    Ok(trace)
}

/// Names the first step and the buffers that differ.
fn compare(eager: &Trace, other: &Trace, arm: Arm) -> Result<(), DeviceError> {
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
    if found.is_empty() {
        return Ok(());
    }
    let whose = if arm == Arm::Graph {
        "the graph arm did not do the eager arm's work"
    } else {
        "the eager arm does not repeat itself"
    };
    Err(DeviceError::Unequal(format!(
        "{whose}: {}; no speedup is given. Please report it with --dryrun's output",
        found.join("; ")
    )))
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
