//! Ranks as threads over TCP: the losses of several are those of one.

use crate::capture::plan;
use crate::config::{Dispatcher, GraphImpl, RunConfig, Scope, World};
use crate::device::cpu::{CpuExecutor, tcp};
use crate::device::{Arm, Executor};
use crate::workloads::testing::{dense, gpt_oss, hybrid, moe, padded, program, with_graphs};

/// Steps: weights have moved twice when the last one's loss is seen.
const STEPS: usize = 3;

/// Losses and gradient norms of every step, of both arms; those of the graph arm follow.
type Trace = Vec<(f32, f32)>;

fn trace(cfg: &RunConfig) -> Trace {
    let plan = plan(program(cfg), &cfg.graph, cfg.seed).unwrap();
    let arms = if plan.graph.is_some() { vec![Arm::Eager, Arm::Graph] } else { vec![Arm::Eager] };
    let mut executor = CpuExecutor::new(plan, None, None).unwrap();
    let mut out = Vec::new();
    let mut digests = Vec::new();
    for arm in arms {
        executor.reset().unwrap();
        for step in 0..STEPS {
            if arm == Arm::Graph && step == 1 {
                executor.capture().unwrap();
            }
            let submitted = executor.submit(arm).unwrap();
            let done = executor.wait(submitted).unwrap();
            out.push((done.loss.unwrap(), done.grad_norm.unwrap()));
        }
        digests.push(executor.digest().unwrap());
    }
    digests.dedup();
    assert_eq!(digests.len(), 1, "the arms differ");
    out
}

/// The same of every rank of `cfg`, each on a thread of its own.
fn ranks(cfg: &RunConfig) -> Vec<Trace> {
    let size = cfg.identity.num_gpus;
    let threads: Vec<_> = tcp::meshes(size)
        .into_iter()
        .enumerate()
        .map(|(rank, mesh)| {
            let mut cfg = cfg.clone();
            cfg.parallel.world = World { size, rank };
            std::thread::spawn(move || {
                mesh.install();
                trace(&cfg)
            })
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

/// `cfg` of one process, which takes all micro-batches of a step itself.
fn alone(cfg: &RunConfig) -> RunConfig {
    let mut one = cfg.clone();
    let p = &mut one.parallel;
    (p.tp, p.ep, p.sequence_parallel) = (1, 1, false);
    one.batch.num_microbatches *= p.dp;
    one.batch.num_microbatches_recipe = one.batch.num_microbatches;
    p.dp = 1;
    one.identity.num_gpus = 1;
    one
}

fn split(mut cfg: RunConfig, tp: usize, dp: usize, ep: usize) -> RunConfig {
    let p = &mut cfg.parallel;
    (p.tp, p.dp, p.ep, p.sequence_parallel) = (tp, dp, ep, tp > 1);
    cfg.identity.num_gpus = tp * dp;
    (cfg.batch.num_microbatches, cfg.batch.num_microbatches_recipe) = (1, 1);
    cfg.batch.global_batch_size = dp;
    cfg.optimizer.grad_dtype = "fp32".into();
    cfg
}

/// Bounds relative to the one rank's values, of the first step's loss and of the later ones and the norms.
fn compare(what: &str, cfg: &RunConfig, first: f32, later: f32) {
    let one = trace(&alone(cfg));
    let all = ranks(cfg);
    for (rank, own) in all.iter().enumerate() {
        for (step, (a, b)) in own.iter().zip(&one).enumerate() {
            let far = |a: f32, b: f32| ((a - b) / b).abs();
            let bound = if step % STEPS == 0 { first } else { later };
            println!("{what} rank {rank} step {step}: {a:?} {b:?} {:e} {:e}", far(a.0, b.0), far(a.1, b.1));
            assert!(far(a.0, b.0) <= bound, "{what}: rank {rank}, step {step}: loss {} of {}", a.0, b.0);
            assert!(far(a.1, b.1) <= 20.0 * later, "{what}: rank {rank}, step {step}: norm {} of {}", a.1, b.1);
        }
    }
}

/// Data-parallel ranks sum in the order in which one rank would add its micro-batches: the first loss is the same to
/// the bit; gradients are summed after they were rounded.
#[test]
fn data_parallel_ranks_have_the_loss_of_one() {
    compare("dp 2", &split(dense(), 1, 2, 1), 0.0, 1e-5);
    compare("dp 2 ep 2", &split(moe(Dispatcher::Alltoall), 1, 2, 2), 0.0, 1e-5);
    compare("dp 2 ep 2 flex", &split(moe(Dispatcher::Flex), 1, 2, 2), 0.0, 1e-5);
    compare("dp 4 ep 2", &split(moe(Dispatcher::Alltoall), 1, 4, 2), 1e-6, 1e-5);
    compare("padded", &split(with_graphs(padded(), GraphImpl::Local, &[Scope::FullIteration]), 1, 2, 2), 0.0, 1e-5);
    compare("gpt_oss", &split(gpt_oss(), 1, 2, 2), 0.0, 1e-5);
}

/// Tensor ranks round partial products to bf16 before they are summed.
#[test]
fn tensor_parallel_ranks_have_the_loss_of_one() {
    compare("tp 2", &split(with_graphs(dense(), GraphImpl::TransformerEngine, &[Scope::Attn]), 2, 1, 1), 1e-4, 1e-4);
    let mut all = split(dense(), 2, 1, 1);
    all.parallel.sequence_parallel = false;
    compare("tp 2, no sequence parallelism", &all, 1e-4, 1e-4);
    compare("tp 2 dp 2 ep 2", &split(moe(Dispatcher::Alltoall), 2, 2, 2), 1e-4, 1e-4);
    compare("hybrid tp 2", &split(hybrid(), 2, 1, 1), 1e-4, 1e-4);
    compare("gpt_oss tp 2 ep 2", &split(gpt_oss(), 2, 1, 2), 1e-4, 1e-4);
}
