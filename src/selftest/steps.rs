//! Whole steps of small models on the GPU: arms, random numbers, many replays, capture without growth, and the
//! host cost of a launch.

use super::Log;
use crate::args;
use crate::capture::{self, RunPlan};
use crate::config::RunConfig;
use crate::device::cuda::executor::{CudaExecutor, CudaOptions, launch_cost};
use crate::device::{Arm, DeviceError, Executor};
use crate::overrides;
use crate::program::Program;
use crate::recipe::Catalogue;
use crate::workloads::{self, share::RankShare, shrink};

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
    let checks: [(&str, Check); 4] = [
        ("fresh random numbers", fresh_numbers),
        ("replays: a thousand", |o| many_replays(o, REPLAYS)),
        ("capture and destroy", |o| no_growth(o, ROUNDS)),
        ("launch cost", host_cost),
    ];
    list(log, options, &checks);
}

/// The same checks in little: what an emulated GPU, whose times mean nothing, can do.
pub fn small_run(log: &mut Log, options: &CudaOptions) {
    equal_in_every_scope(log, options, SMALL_STEPS);
    let checks: [(&str, Check); 3] = [
        ("fresh random numbers", fresh_numbers),
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
        ("hybrid whole layer", format!("{HYBRID} --cuda_graph_impl transformer_engine")),
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

struct Trace {
    losses: Vec<u32>,
    digest: Vec<(String, u64)>,
}

fn steps(device: &mut CudaExecutor, arm: Arm, count: usize) -> Result<Trace, DeviceError> {
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

/// With dropout as the only source of change (learning rate 0, gradients unused), two replays must differ.
fn fresh_numbers(options: &CudaOptions) -> Result<String, String> {
    let plan = small(&format!("{LLAMA} --cuda_graph_scope full_iteration {DROPOUT} --optimizer none"))?;
    let run = || -> Result<Vec<Vec<(String, u64)>>, DeviceError> {
        let mut device = CudaExecutor::new(&plan, options.clone())?;
        device.reset()?;
        device.capture()?;
        (0..2).map(|_| Ok(steps(&mut device, Arm::Graph, 1)?.digest)).collect()
    };
    let digests = run().map_err(|e| e.to_string())?;
    if digests[0] == digests[1] {
        Err("two replays gave the same gradients".into())
    } else {
        Ok("two replays differ".into())
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
