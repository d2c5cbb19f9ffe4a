//! Whole steps of small models on the GPU: arms, random numbers, many replays, capture without growth, and the
//! host cost of a launch.

use super::Log;
use crate::args;
use crate::capture::{self, RunPlan};
use crate::config::RunConfig;
use crate::device::cuda::executor::{CudaExecutor, CudaOptions, launch_cost};
use crate::device::{Arm, DeviceError, Executor};
use crate::ops::rng::WORD_STEP;
use crate::overrides;
use crate::program::{BufId, Program};
use crate::recipe::Catalogue;
use crate::workloads::{self, TALLY, share::RankShare, shrink};

/// Growth of used memory over the capture rounds that counts as none (MiB): the driver hands out memory in
/// 2 MiB blocks, and a neighbour's context may come or go by one.
const GROWTH_ALLOWED_MIB: f64 = 4.0;
const ROUNDS: usize = 50;
const REPLAYS: usize = 1000;
/// Steps of the graph arm before its capture, and as many after it.
const STEPS: usize = 3;
/// The same three with [`small_run`].
const SMALL_ROUNDS: usize = 3;
const SMALL_REPLAYS: usize = 10;
const SMALL_STEPS: usize = 1;
/// Own kernels may cost this much more host time than the bare driver call (issue MAIN).
const LAUNCH_COST_ALLOWED: f64 = 1.25;

const DROPOUT: &str = "model.attention_dropout=0.1 model.hidden_dropout=0.1";
const LLAMA: &str = "-m llama -mr llama3_8b -g h100";
const QWEN: &str = "-m qwen -mr qwen3_30b_a3b -g h100";
const NANO: &str = "-m nemotronh -mr nemotron_3_nano -g h100";
const HYBRID: &str = "-m nemotronh -mr nemotronh_56b -g h100 --run_dtype bf16 -c fp8_cs";
const PADDED: &str = "model.moe_token_dispatcher_type=alltoall --use_tokendrop true";

/// One check: what was found, or what is wrong.
type Check = fn(&CudaOptions) -> Result<String, String>;

/// All checks, at their full length.
pub fn run(log: &mut Log, options: &CudaOptions) {
    equal_in_every_scope(log, options, STEPS);
    fresh_numbers(log, options);
    let checks: [(&str, Check); 3] = [
        ("replays: a thousand", |o| many_replays(o, REPLAYS)),
        ("capture and destroy", |o| no_growth(o, ROUNDS)),
        ("launch cost", host_cost),
    ];
    list(log, options, &checks);
}

/// The same checks in little: what an emulated GPU, whose times mean nothing, can do.
pub fn small_run(log: &mut Log, options: &CudaOptions) {
    equal_in_every_scope(log, options, SMALL_STEPS);
    fresh_numbers(log, options);
    let checks: [(&str, Check); 2] = [
        ("replays: a few", |o| many_replays(o, SMALL_REPLAYS)),
        ("capture and destroy", |o| no_growth(o, SMALL_ROUNDS)),
    ];
    list(log, options, &checks);
}

fn list(log: &mut Log, options: &CudaOptions, checks: &[(&str, Check)]) {
    for (name, check) in checks {
        if log.wants(name) {
            log.record(name, check(options));
        }
    }
}

fn equal_in_every_scope(log: &mut Log, options: &CudaOptions, count: usize) {
    let arms = [
        ("llama attn", format!("{LLAMA} --cuda_graph_scope attn {DROPOUT}")),
        ("llama attn,mlp", format!("{LLAMA} --cuda_graph_scope attn,mlp {DROPOUT}")),
        ("llama whole layer", format!("{LLAMA} --cuda_graph_impl transformer_engine {DROPOUT}")),
        ("llama full_iteration", format!("{LLAMA} --cuda_graph_scope full_iteration {DROPOUT}")),
        ("qwen recipe scope", format!("{QWEN} {DROPOUT}")),
        ("qwen attn,moe_router", format!("{QWEN} --cuda_graph_scope attn,moe_router {DROPOUT}")),
        (
            "qwen alltoall attn,moe_router,moe_preprocess",
            format!(
                "{QWEN} model.moe_token_dispatcher_type=alltoall --cuda_graph_scope attn,moe_router,moe_preprocess {DROPOUT}"
            ),
        ),
        (
            "qwen padded moe",
            format!("{QWEN} {PADDED} --cuda_graph_impl transformer_engine --cuda_graph_scope moe {DROPOUT}"),
        ),
        (
            "qwen padded full_iteration",
            format!("{QWEN} {PADDED} --cuda_graph_impl local --cuda_graph_scope full_iteration {DROPOUT}"),
        ),
        ("hybrid recipe scope", format!("{NANO} {DROPOUT}")),
        ("hybrid mamba", format!("{NANO} --cuda_graph_scope mamba {DROPOUT}")),
        (
            "hybrid attn,moe_router,moe_preprocess,mamba, alltoall",
            format!(
                "{NANO} --recompute_modules moe_act,layernorm model.moe_token_dispatcher_type=alltoall --cuda_graph_scope attn,moe_router,moe_preprocess,mamba"
            ),
        ),
        ("hybrid with tensor parallelism", format!("{HYBRID} --cuda_graph_scope attn,mamba")),
        // Without a scope on the command line the recipe's would stay (R10).
        (
            "hybrid whole layer",
            format!("{HYBRID} --cuda_graph_impl transformer_engine model.cuda_graph_scope=[]"),
        ),
        (
            "hybrid whole layer, padded experts",
            format!("{NANO} {PADDED} --cuda_graph_impl transformer_engine model.cuda_graph_scope=[]"),
        ),
        (
            "pipeline, first of four stages",
            format!("{LLAMA} -pp 4 -cp 1 --max_microbatches 5 --cuda_graph_scope attn,mlp {DROPOUT}"),
        ),
        (
            "pipeline, two chunks of the last stage",
            format!(
                "{LLAMA} -pp 2 -vp 2 -cp 1 --pp_rank 1 --max_microbatches 3 --cuda_graph_scope full_iteration {DROPOUT}"
            ),
        ),
        (
            "pipeline of experts between two stages",
            format!("{QWEN} -pp 4 -ep 4 --pp_rank 1 --max_microbatches 3 {DROPOUT}"),
        ),
        ("llama fp32 gradients", format!("{LLAMA} --cuda_graph_scope attn --grad_dtype fp32")),
        ("llama bare stack", format!("{LLAMA} -cp 1 --stack_only --cuda_graph_scope full_iteration")),
    ];
    for (name, line) in &arms {
        let name = format!("arms equal: {name}");
        if log.wants(&name) {
            log.record(&name, equal_arms(line, options, count).map_err(|e| e.to_string()));
        }
    }
}

fn config(line: &str) -> Result<RunConfig, String> {
    let argv = std::iter::once("mbperf").chain(line.split_whitespace());
    let args::Command::Run(args) = args::parse(argv).map_err(|e| e.to_string())? else {
        return Err(format!("'{line}' is no run"));
    };
    let catalogue = Catalogue::load(None).map_err(|e| e.to_string())?;
    Ok(overrides::resolve(&args, &catalogue, &|_| None).map_err(|e| e.to_string())?.config)
}

/// A step of a command line, in full size.
pub fn whole(line: &str) -> Result<Program, String> {
    let cfg = config(line)?;
    let share = RankShare::of(&cfg).map_err(|e| e.to_string())?;
    workloads::build(&cfg, &share).map_err(|e| e.to_string())
}

/// The small model of a command line.
pub fn small(line: &str) -> Result<RunPlan, String> {
    let mut cfg = config(line)?;
    shrink::shrink(&mut cfg, shrink::Given::default());
    // One more layer a stage, so that graphs hand over to graphs.
    let chunks = cfg.parallel.pp * cfg.parallel.vp;
    let first = cfg.model.layers[0];
    let chunk = cfg.model.layers.len() / chunks;
    cfg.model.layers = [&cfg.model.layers[..chunk], &[first]].concat().repeat(chunks);
    let share = RankShare::of(&cfg).map_err(|e| e.to_string())?;
    let program = workloads::build(&cfg, &share).map_err(|e| e.to_string())?;
    capture::plan(program, &cfg.graph, cfg.seed).map_err(|e| e.to_string())
}

pub(super) struct Trace {
    losses: Vec<u32>,
    digest: Vec<(String, u64)>,
}

pub(super) fn steps(device: &mut CudaExecutor, arm: Arm, count: usize) -> Result<Trace, DeviceError> {
    let mut losses = Vec::new();
    for _ in 0..count {
        let step = device.submit(arm)?;
        let done = device.wait(step)?;
        if done.loss.is_some_and(|l| !l.is_finite()) || done.grad_norm.is_some_and(|n| !n.is_finite()) {
            return Err(DeviceError::Invalid(format!(
                "loss {:?}, gradient norm {:?}",
                done.loss, done.grad_norm
            )));
        }
        losses.extend(done.loss.map(f32::to_bits));
    }
    Ok(Trace { losses, digest: device.digest()? })
}

fn equal_arms(line: &str, options: &CudaOptions, count: usize) -> Result<String, DeviceError> {
    let plan = small(line).map_err(DeviceError::Invalid)?;
    let mut device = CudaExecutor::new(&plan, options.clone())?;
    device.reset()?;
    let eager = steps(&mut device, Arm::Eager, 2 * count)?;
    device.reset()?;
    let before = steps(&mut device, Arm::Graph, count)?;
    let cost = device.capture()?;
    let after = steps(&mut device, Arm::Graph, count)?;
    let losses = [before.losses, after.losses].concat();
    let first = Trace { losses, digest: after.digest };
    same("graph", &eager, &first)?;
    // The other way round: what replays left behind must not reach an eager step, nor the reverse.
    for arm in [Arm::Eager, Arm::Graph] {
        device.reset()?;
        same("the same steps once more", &eager, &steps(&mut device, arm, 2 * count)?)?;
    }
    device.destroy_graphs()?;
    let losses = first.losses;
    Ok(format!(
        "{} graphs, {} nodes, {} losses and {} buffers the same bit for bit",
        cost.graphs,
        cost.nodes,
        losses.len(),
        eager.digest.len()
    ))
}

/// Whether `other` is what the eager steps gave.
fn same(what: &str, eager: &Trace, other: &Trace) -> Result<(), DeviceError> {
    if other.losses != eager.losses {
        return Err(DeviceError::Unequal(format!(
            "losses differ: eager {:?}, {what} {:?}",
            floats(&eager.losses),
            floats(&other.losses)
        )));
    }
    match eager.digest.iter().zip(&other.digest).find(|(a, b)| a != b) {
        Some((a, _)) => Err(DeviceError::Unequal(format!("{} differs ({what})", a.0))),
        None => Ok(()),
    }
}

fn floats(bits: &[u32]) -> Vec<f32> {
    bits.iter().map(|b| f32::from_bits(*b)).collect()
}

/// What draws in a graph, each alone, so that the others do not hide one that is frozen: name, model and settings.
const DRAWS: [(&str, &str, &str); 3] = [
    ("attention dropout", LLAMA, "model.attention_dropout=0.1"),
    ("hidden dropout", LLAMA, "model.hidden_dropout=0.1"),
    (
        "forced routing",
        QWEN,
        "--moe_routing balanced model.moe_token_dispatcher_type=alltoall --use_tokendrop true",
    ),
];

/// The bare stack, all of it in one graph: its inputs are given and nothing in it moves the random state.
fn one_draw(model: &str, setting: &str) -> String {
    format!("{model} -cp 1 --stack_only --cuda_graph_impl local --cuda_graph_scope full_iteration {setting}")
}

/// Replays draw by the random state and by nothing else, and every step has a state of its own.
fn fresh_numbers(log: &mut Log, options: &CudaOptions) {
    for (name, model, setting) in DRAWS {
        let name = format!("fresh random numbers: {name}");
        if log.wants(&name) {
            log.record(&name, draws_follow_the_state(&one_draw(model, setting), options));
        }
    }
    let name = "fresh random numbers: a state for each replay";
    if log.wants(name) {
        log.record(name, every_replay_moves_the_state(options));
    }
}

fn step_words(plan: &RunPlan) -> Result<BufId, String> {
    let at = plan.eager.program.buffers.iter().position(|b| b.name == "step_words");
    at.map(|i| BufId(i as u32)).ok_or_else(|| "the program has no step words".into())
}

fn draws_follow_the_state(line: &str, options: &CudaOptions) -> Result<String, String> {
    let plan = small(line)?;
    let words = step_words(&plan)?;
    let mut device = CudaExecutor::new(&plan, options.clone()).map_err(|e| e.to_string())?;
    let mut start = || -> Result<Vec<f64>, DeviceError> {
        device.reset()?;
        device.capture()?;
        device.read_f64(words)
    };
    let first = start().map_err(|e| e.to_string())?;
    follows_the_state(&mut |step| {
        let mut moved = first.clone();
        moved[WORD_STEP] = f64::from(step);
        device.write_buffer(words, &moved)?;
        Ok(steps(&mut device, Arm::Graph, 1)?.digest)
    })
}

/// `replay` runs the same inputs with the random state of a step, and gives the hashes of what comes out: the same state
/// gives the same bits, another one other bits in every buffer, and the first one once more those of the first time. A mask
/// that was frozen when the graph was captured would pass for neither.
fn follows_the_state(
    replay: &mut dyn FnMut(u32) -> Result<Vec<(String, u64)>, DeviceError>,
) -> Result<String, String> {
    let mut run = |step| replay(step).map_err(|e| e.to_string());
    let first = run(0)?;
    for (what, again) in [("once more", run(0)?), ("put back", run(1).and_then(|_| run(0))?)] {
        if let Some((name, _)) = first.iter().zip(&again).find(|(a, b)| a != b).map(|(a, _)| a) {
            return Err(format!("{name}: other bits with the random state {what}"));
        }
    }
    let other = run(1)?;
    // Counts of choices: other choices may well give the same sums.
    let drawn: Vec<_> = first.iter().zip(&other).filter(|((name, _), _)| name != TALLY).collect();
    match drawn.iter().find(|((_, a), (_, b))| a == b) {
        Some(((name, _), _)) => {
            Err(format!("{name}: the same bits with another random state: a frozen mask"))
        }
        None if drawn.is_empty() => Err("nothing was hashed".into()),
        None => {
            Ok(format!("{} buffers are other with another state, and the same with the old one", drawn.len()))
        }
    }
}

/// Steps of a training run, replayed: each begins with another step number in the random state.
fn every_replay_moves_the_state(options: &CudaOptions) -> Result<String, String> {
    let plan = small(&format!("{LLAMA} --cuda_graph_scope full_iteration {DROPOUT} --optimizer none"))?;
    let words = step_words(&plan)?;
    let run = || -> Result<Vec<f64>, DeviceError> {
        let mut device = CudaExecutor::new(&plan, options.clone())?;
        device.reset()?;
        device.capture()?;
        let mut seen = vec![device.read_f64(words)?[WORD_STEP]];
        for _ in 0..3 {
            steps(&mut device, Arm::Graph, 1)?;
            seen.push(device.read_f64(words)?[WORD_STEP]);
        }
        Ok(seen)
    };
    let seen = run().map_err(|e| e.to_string())?;
    match seen.windows(2).all(|w| w[1] == w[0] + 1.0) {
        true => Ok(format!("step numbers {seen:?}")),
        false => Err(format!("step numbers before and after replays: {seen:?}")),
    }
}

fn many_replays(options: &CudaOptions, replays: usize) -> Result<String, String> {
    let plan = small(&format!("{QWEN} --cuda_graph_scope attn,moe_router {DROPOUT}"))?;
    let run = || -> Result<bool, DeviceError> {
        let mut device = CudaExecutor::new(&plan, options.clone())?;
        device.reset()?;
        let eager = steps(&mut device, Arm::Eager, replays)?;
        device.reset()?;
        device.capture()?;
        let graph = steps(&mut device, Arm::Graph, replays)?;
        Ok(eager.losses == graph.losses && eager.digest == graph.digest)
    };
    match run() {
        Ok(true) => Ok(format!("{replays} steps of each arm end with the same bits")),
        Ok(false) => Err("the arms drifted apart".into()),
        Err(e) => Err(e.to_string()),
    }
}

fn no_growth(options: &CudaOptions, rounds: usize) -> Result<String, String> {
    let plan = small(&format!("{LLAMA} --cuda_graph_scope attn,mlp"))?;
    let run = || -> Result<f64, DeviceError> {
        let mut device = CudaExecutor::new(&plan, options.clone())?;
        device.reset()?;
        let mut first = 0.0;
        for round in 0..rounds {
            device.capture()?;
            steps(&mut device, Arm::Graph, 1)?;
            device.destroy_graphs()?;
            if round == 0 {
                first = device.free_memory_mib()?;
            }
        }
        Ok(first - device.free_memory_mib()?)
    };
    match run() {
        Ok(growth) if growth <= GROWTH_ALLOWED_MIB => {
            Ok(format!("{rounds} rounds, memory in use grew by {growth:.1} MiB after the first"))
        }
        Ok(growth) => Err(format!("{rounds} rounds took {growth:.1} MiB, {GROWTH_ALLOWED_MIB} allowed")),
        Err(e) => Err(e.to_string()),
    }
}

fn host_cost(options: &CudaOptions) -> Result<String, String> {
    let (own_us, bare_us) = launch_cost(options).map_err(|e| e.to_string())?;
    let ratio = own_us / bare_us;
    let text = format!(
        "{own_us:.2} us a launch of our own, {bare_us:.2} us bare, ratio {ratio:.3} ({LAUNCH_COST_ALLOWED} allowed)"
    );
    if ratio <= LAUNCH_COST_ALLOWED { Ok(text) } else { Err(text) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::CpuExecutor;
    use crate::program::Init;

    /// A replay on the CPU with its random state set before the start.
    fn replay(line: &str, step: u32) -> Result<Vec<(String, u64)>, DeviceError> {
        let mut plan = small(line).unwrap();
        let at = step_words(&plan).unwrap().0 as usize;
        for arm in std::iter::once(&mut plan.eager).chain(&mut plan.graph) {
            let Init::Words { words } = &mut std::sync::Arc::make_mut(&mut arm.program).buffers[at].init
            else {
                panic!("no words")
            };
            words[WORD_STEP] = step;
        }
        let mut device = CpuExecutor::new(plan, None, None)?;
        device.reset()?;
        device.capture()?;
        let submitted = device.submit(Arm::Graph)?;
        device.wait(submitted)?;
        device.digest()
    }

    #[test]
    fn what_draws_follows_the_state_on_the_cpu_too() {
        for (name, model, setting) in DRAWS {
            let line = one_draw(model, setting);
            let found = follows_the_state(&mut |step| replay(&line, step));
            assert!(found.is_ok(), "{name}: {found:?}");
        }
        // Nothing draws here: every buffer stays what it was, as with a frozen mask.
        let line = one_draw(LLAMA, "");
        let found = follows_the_state(&mut |step| replay(&line, step)).unwrap_err();
        assert!(found.contains("a frozen mask"), "{found}");
    }

    #[test]
    fn masks_that_are_wrong_in_one_buffer_are_found() {
        let hashes = |a: u64, b: u64| Ok(vec![("a".to_owned(), a), ("b".to_owned(), b)]);
        let found = |f: &mut dyn FnMut(u32) -> Result<Vec<(String, u64)>, DeviceError>| follows_the_state(f);
        assert!(found(&mut |step| hashes(step.into(), u64::from(step) + 7)).is_ok());
        let frozen = found(&mut |step| hashes(step.into(), 7)).unwrap_err();
        assert!(frozen.starts_with("b: the same bits"), "{frozen}");
        // Draws that go on by themselves, whatever the state says.
        let mut n = 0;
        let astray = found(&mut |_| {
            n += 1;
            hashes(n, n)
        });
        assert!(astray.unwrap_err().starts_with("a: other bits with the random state once more"));
        assert!(found(&mut |_| Ok(Vec::new())).is_err());
    }
}
