//! Ranks as threads over TCP: several compute what one does, exactly in f64 and within stated bounds with rounding.

use crate::capture::plan;
use crate::config::{Dispatcher, GraphImpl, RunConfig, Scope, ScoreFunction, World};
use crate::device::cpu::{CpuExecutor, global_index, tcp, weight_normal};
use crate::device::{Arm, Executor};
use crate::ops::cpu_args::Slot;
use crate::ops::{Access, CpuArgs};
use crate::program::{BufId, Init, Launch, Pass, Program};
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

/// Losses and gradient norms of `steps` steps in f64, nothing rounded.
fn exact(cfg: &RunConfig, steps: usize) -> Vec<(f64, f64)> {
    let program = program(cfg);
    let mut memory = Memory::new(&program, cfg.seed);
    let mut out = Vec::new();
    for _ in 0..steps {
        program.launches.iter().for_each(|l| memory.run(l));
        out.push((memory.read(program.loss.unwrap())[0], memory.read(program.grad_norm.unwrap())[0]));
    }
    out
}

/// Runs `work` for every rank of `cfg`, each on a thread of its own.
fn of_ranks<T: Send + 'static>(
    cfg: &RunConfig,
    work: impl Fn(&RunConfig) -> T + Copy + Send + 'static,
) -> Vec<T> {
    let size = cfg.identity.num_gpus;
    let threads: Vec<_> = tcp::meshes(size)
        .into_iter()
        .enumerate()
        .map(|(rank, mesh)| {
            let mut cfg = cfg.clone();
            cfg.parallel.world = World { size, rank };
            std::thread::spawn(move || {
                mesh.install();
                work(&cfg)
            })
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

/// Relative difference that the order of f64 sums leaves over three steps; Adam divides by roots of second moments, which
/// makes more of it where gradients are small.
const EXACT: f64 = 1e-7;

/// Without rounding several ranks compute what one does: loss and gradient norm of three steps, weights updated twice.
fn compare_exactly(what: &str, cfg: &RunConfig) {
    let one = exact(&alone(cfg), STEPS);
    for (rank, own) in of_ranks(cfg, |c| exact(c, STEPS)).iter().enumerate() {
        for (step, (a, b)) in own.iter().zip(&one).enumerate() {
            let far = |a: f64, b: f64| ((a - b) / b).abs();
            println!("{what} rank {rank} step {step}: {:e} {:e}", far(a.0, b.0), far(a.1, b.1));
            assert!(far(a.0, b.0) <= EXACT, "{what}: rank {rank}, step {step}: loss {} of {}", a.0, b.0);
            assert!(far(a.1, b.1) <= EXACT, "{what}: rank {rank}, step {step}: norm {} of {}", a.1, b.1);
        }
    }
}

#[test]
fn several_ranks_compute_what_one_does() {
    let mut unsplit = split(dense(), 2, 1, 1);
    unsplit.parallel.sequence_parallel = false;
    let mut shared = split(moe(Dispatcher::Alltoall), 2, 2, 2);
    if let Some(moe) = &mut shared.model.moe {
        (moe.shared_expert_intermediate_size, moe.shared_expert_gate) = (Some(32), true);
        (moe.expert_bias, moe.bias_update_rate) = (true, 1e-3);
        moe.score_function = ScoreFunction::Sigmoid;
    }
    let mut tied = split(dense(), 2, 2, 1);
    tied.model.tied_embeddings = true;
    let mut beside = split(moe(Dispatcher::Alltoall), 1, 4, 2);
    beside.parallel.ddp.bucket_size = Some(4096);
    beside.batch.num_microbatches = 2;
    for (what, cfg) in [
        ("dp 4 ep 2, buckets beside the backward", beside),
        ("dp 2", split(dense(), 1, 2, 1)),
        ("tp 2", split(dense(), 2, 1, 1)),
        ("tp 2, rows not split", unsplit),
        ("tp 2 dp 2, tied", tied),
        ("ep 2", split(moe(Dispatcher::Alltoall), 1, 2, 2)),
        ("ep 2, flex", split(moe(Dispatcher::Flex), 1, 2, 2)),
        ("tp 2 ep 2", split(moe(Dispatcher::Alltoall), 2, 1, 2)),
        ("tp 2 dp 2 ep 2, shared expert", shared),
        ("hybrid, tp 2", split(hybrid(), 2, 1, 1)),
        ("gpt_oss, tp 2 ep 2", split(gpt_oss(), 2, 1, 2)),
    ] {
        compare_exactly(what, &cfg);
    }
}

/// Bounds relative to the one rank's values, of the first step's loss and of the later ones and the norms.
fn compare(what: &str, cfg: &RunConfig, first: f32, later: f32) {
    let one = trace(&alone(cfg));
    for (rank, own) in of_ranks(cfg, trace).iter().enumerate() {
        for (step, (a, b)) in own.iter().zip(&one).enumerate() {
            let far = |a: f32, b: f32| ((a - b) / b).abs();
            let bound = if step % STEPS == 0 { first } else { later };
            println!("{what} rank {rank} step {step}: {:e} {:e}", far(a.0, b.0), far(a.1, b.1));
            assert!(far(a.0, b.0) <= bound, "{what}: rank {rank}, step {step}: loss {} of {}", a.0, b.0);
            assert!(
                far(a.1, b.1) <= 10.0 * later,
                "{what}: rank {rank}, step {step}: norm {} of {}",
                a.1,
                b.1
            );
        }
    }
}

/// Buckets are reduced as soon as their last layer has its gradients, on a lane of their own; the norm waits for them. Copies
/// into static buffers move launches, and what waits for what with them.
#[test]
fn buckets_are_reduced_beside_the_backward() {
    let mut cfg = split(with_graphs(dense(), GraphImpl::TransformerEngine, &[Scope::Attn]), 1, 2, 1);
    cfg.parallel.ddp.bucket_size = Some(8192);
    cfg.parallel.world = World { size: 2, rank: 1 };
    let plan = plan(program(&cfg), &cfg.graph, cfg.seed).unwrap();
    for arm in [&plan.eager, plan.graph.as_ref().unwrap()] {
        let launches = &arm.program.launches;
        let last_backward = launches.iter().rposition(|l| l.pass == Pass::Backward).unwrap();
        let beside: Vec<usize> = (0..launches.len()).filter(|i| launches[*i].lane == 1).collect();
        assert!(beside.len() >= 3 && beside.iter().any(|i| *i < last_backward), "{beside:?}");
        for &i in &beside {
            assert_eq!(launches[i].op.name(), "reduce_scatter");
            let after = &launches[launches[i].after[0]];
            assert!(after.pass == Pass::Backward && after.lane == 0, "{after:?}");
            assert!(launches.iter().any(|l| l.op.name() == "grad_norm_partial" && l.after.contains(&i)));
        }
    }
    cfg.parallel.ddp.overlap_grad_reduce = false;
    assert!(program(&cfg).launches.iter().all(|l| l.lane == 0));
}

/// With rounding, in both arms. Data-parallel ranks sum in the order in which one rank would add its micro-batches: the
/// first loss is the same to the bit; gradients are summed after they were rounded. Tensor ranks round partial products
/// to bf16 before they are summed.
#[test]
fn rounding_stays_within_its_bounds() {
    let graphs = |cfg, implementation, scope: &[Scope]| with_graphs(cfg, implementation, scope);
    let te = GraphImpl::TransformerEngine;
    compare(
        "dp 2 ep 2",
        &split(graphs(moe(Dispatcher::Alltoall), te, &[Scope::Attn, Scope::MoeRouter]), 1, 2, 2),
        0.0,
        1e-5,
    );
    let whole = graphs(padded(), GraphImpl::Local, &[Scope::FullIteration]);
    compare("padded, dp 2 ep 2", &split(whole, 1, 2, 2), 0.0, 1e-5);
    compare("tp 2", &split(graphs(dense(), te, &[Scope::Attn]), 2, 1, 1), 1e-4, 1e-3);
}

/// A program's memory in f64. Views live in their root.
struct Memory<'a> {
    program: &'a Program,
    floats: Vec<Vec<f64>>,
    ints: Vec<Vec<i32>>,
}

impl<'a> Memory<'a> {
    fn new(program: &'a Program, seed: u64) -> Self {
        let mut m = Self { program, floats: Vec::new(), ints: Vec::new() };
        for b in &program.buffers {
            let room = if b.view_of.is_none() { b.len() } else { 0 };
            let (floats, ints) = if b.dtype.is_float() { (room, 0) } else { (0, room) };
            m.floats.push(vec![0.0; floats]);
            m.ints.push(vec![0; ints]);
        }
        for (i, b) in program.buffers.iter().enumerate() {
            let id = BufId(i as u32);
            let values: Vec<f64> = match &b.init {
                Init::Normal { std } => {
                    let cols = b.shape.last().copied().unwrap_or(1).max(1);
                    let of = |j| f64::from(weight_normal(seed, &b.name, global_index(&b.shard, cols, j)));
                    (0..b.len()).map(|j| of(j) * std).collect()
                }
                Init::Const { value } => vec![*value; b.len()],
                Init::Values { values } => values.clone(),
                Init::Words { words } => words.iter().map(|w| f64::from(*w as i32)).collect(),
                Init::CopyOf { source, offset } => m.read(*source)[*offset..*offset + b.len()].to_vec(),
                Init::Inherit | Init::Poison => continue,
            };
            let (root, range) = m.range(id);
            if b.dtype.is_float() {
                m.floats[root][range].copy_from_slice(&values);
            } else {
                m.ints[root][range].iter_mut().zip(&values).for_each(|(i, v)| *i = *v as i32);
            }
        }
        m
    }

    fn range(&self, id: BufId) -> (usize, std::ops::Range<usize>) {
        let (root, offset) = self.program.root(id);
        (root.0 as usize, offset..offset + self.program.buffer(id).len())
    }
    fn read(&self, id: BufId) -> Vec<f64> {
        let (root, range) = self.range(id);
        self.floats[root][range].to_vec()
    }

    fn run(&mut self, launch: &Launch) {
        let specs = launch.op.args();
        let (mut floats, mut ints) = (Vec::new(), Vec::new());
        for (spec, id) in specs.iter().zip(&launch.args) {
            let (root, range) = self.range(*id);
            let float = spec.dtype.is_float();
            floats.push(if float { self.floats[root][range.clone()].to_vec() } else { Vec::new() });
            ints.push(if float { Vec::new() } else { self.ints[root][range].to_vec() });
        }
        let slots = specs.iter().zip(floats.iter_mut().zip(&mut ints)).map(|(spec, (f, i))| {
            match (spec.dtype.is_float(), spec.access) {
                (true, Access::Read) => Slot::In(f),
                (true, _) => Slot::Out(f),
                (false, Access::Read) => Slot::IntIn(i),
                (false, _) => Slot::IntOut(i),
            }
        });
        launch.op.cpu_f64(&mut CpuArgs::new(launch.op.name(), slots.collect())).unwrap();
        for (i, (spec, id)) in
            specs.iter().zip(&launch.args).enumerate().filter(|(_, (s, _))| s.access != Access::Read)
        {
            let (root, range) = self.range(*id);
            if spec.dtype.is_float() {
                self.floats[root][range].copy_from_slice(&floats[i]);
            } else {
                self.ints[root][range].copy_from_slice(&ints[i]);
            }
        }
    }
}
