use super::*;
use crate::capture::{ArmPlan, plan};
use crate::config::{Dispatcher, GraphImpl, RunConfig, Scope};
use crate::device::cpu::CpuExecutor;
use crate::device::{Arm, Executor};
use crate::workloads::testing::{deepseek, delta_net, dense, hybrid, moe, padded, program, with_graphs};
use std::ops::Range;

/// One process reduces nothing beside the main lane: the first free lane is theirs.
const SIDE: usize = 1;

fn overlapping(mut cfg: RunConfig) -> RunConfig {
    cfg.overlap_wgrad = true;
    cfg
}

#[test]
fn weight_gradients_alone_leave_the_main_lane() {
    assert_eq!(program(&dense()).lanes(), 1);
    let program = program(&overlapping(dense()));
    for layer in 0..2 {
        let of = |lane: usize, pass: Pass| -> Vec<&str> {
            let launches = program.launches.iter().filter(|l| l.layer == Some(layer) && l.micro_batch == 0);
            launches.filter(|l| l.lane == lane && l.pass == pass).map(|l| l.op.name()).collect()
        };
        // Down, gate and up, projection, QKV; norms' gradients come with the norms at so few tokens.
        assert_eq!(of(SIDE, Pass::Backward), ["gemm"; 4]);
        assert_eq!(of(0, Pass::Backward).iter().filter(|n| **n == "gemm").count(), 4);
        assert!(of(SIDE, Pass::Forward).is_empty());
    }
    // The optimizer, the reduction and the zeroing of gradients write them too, and are no backward pass.
    assert!(program.launches.iter().all(|l| l.lane == 0 || l.pass == Pass::Backward));
}

/// How many launches of each lane are done before each launch of `range`, by lane order and `after` alone, when nothing
/// outside `range` orders them.
fn done_before(program: &Program, range: Range<usize>) -> Vec<Vec<usize>> {
    let lanes = program.lanes();
    let mut last = vec![vec![0; lanes]; lanes];
    let mut counts = vec![0; lanes];
    let mut out: Vec<Vec<usize>> = Vec::new();
    for i in range.clone() {
        let launch = &program.launches[i];
        let mut done = last[launch.lane].clone();
        for &j in launch.after.iter().filter(|j| range.contains(j)) {
            let theirs: &Vec<usize> = &out[j - range.start];
            done.iter_mut().zip(theirs).for_each(|(a, b)| *a = (*a).max(*b));
            let place =
                (range.start..=j).filter(|k| program.launches[*k].lane == program.launches[j].lane).count();
            let of = &mut done[program.launches[j].lane];
            *of = (*of).max(place);
        }
        out.push(done.clone());
        counts[launch.lane] += 1;
        done[launch.lane] = counts[launch.lane];
        last[launch.lane] = done;
    }
    out
}

/// Every two launches of the range that touch the same bytes, one of them writing, have an order. Gives the number of
/// such pairs on different lanes.
fn ordered(arm: &ArmPlan, range: Range<usize>) -> Result<usize, String> {
    let program = &arm.program;
    let done = done_before(program, range.clone());
    let touched: Vec<Vec<Touch>> = range.clone().map(|i| touches(program, &arm.memory, i)).collect();
    let mut pairs = 0;
    for j in range.clone() {
        let lane = program.launches[j].lane;
        for i in (range.start..j).filter(|i| program.launches[*i].lane != lane) {
            let [a, b] = [i, j].map(|k| &touched[k - range.start]);
            if a.iter().any(|a| b.iter().any(|b| a.conflicts(b))) {
                let other = program.launches[i].lane;
                let place = (range.start..=i).filter(|k| program.launches[*k].lane == other).count();
                let name = |k: usize| program.launches[k].op.name();
                if done[j - range.start][other] < place {
                    return Err(format!("{i} {} before {j} {}", name(i), name(j)));
                }
                pairs += 1;
            }
        }
    }
    Ok(pairs)
}

#[test]
fn launches_that_share_bytes_have_an_order() {
    let te = GraphImpl::TransformerEngine;
    for cfg in [
        with_graphs(dense(), te, &[]),
        with_graphs(dense(), GraphImpl::Local, &[Scope::FullIteration]),
        with_graphs(moe(Dispatcher::Alltoall), te, &[Scope::Attn, Scope::MoeRouter]),
        with_graphs(moe(Dispatcher::Flex), te, &[Scope::MoeRouter]),
        with_graphs(padded(), te, &[Scope::Moe]),
        with_graphs(padded(), GraphImpl::Local, &[Scope::FullIteration]),
        with_graphs(hybrid(), te, &[Scope::Mamba]),
        with_graphs(delta_net(), te, &[Scope::Attn]),
        with_graphs(deepseek(), te, &[Scope::Attn]),
    ] {
        let cfg = overlapping(cfg);
        let plan = plan(program(&cfg), &cfg.graph, cfg.seed).unwrap();
        assert!(ordered(&plan.eager, 0..plan.eager.program.launches.len()).unwrap() > 0);
        let graph = plan.graph.unwrap();
        // Before capture the graph arm is issued as the eager one is; then each graph stands alone between joins.
        ordered(&graph, 0..graph.program.launches.len()).unwrap();
        for segment in graph.segments.iter().filter(|s| s.graph.is_some()) {
            ordered(&graph, segment.launches.clone()).unwrap();
        }
    }
}

#[test]
fn an_order_that_lacks_one_wait_is_found() {
    let cfg = overlapping(with_graphs(dense(), GraphImpl::Local, &[Scope::FullIteration]));
    let plan = plan(program(&cfg), &cfg.graph, cfg.seed).unwrap();
    let all = 0..plan.eager.program.launches.len();
    let waiting: Vec<usize> =
        all.clone().filter(|i| !plan.eager.program.launches[*i].after.is_empty()).collect();
    let (mut found, mut lags) = (0, 0);
    for &i in &waiting {
        let mut arm = plan.eager.clone();
        let mut program = (*arm.program).clone();
        // What only keeps the side lane near is no order that is needed.
        lags += usize::from(program.launches[i].lane == 0);
        program.launches[i].after.clear();
        arm.program = program.into();
        found += usize::from(ordered(&arm, all.clone()).is_err());
    }
    assert!(found >= waiting.len() - lags && found > 0, "{found} of {} ({lags})", waiting.len());
}

#[test]
fn the_bits_are_those_of_one_lane() {
    for cfg in [dense(), padded(), hybrid()] {
        let digest = |cfg: RunConfig| {
            let plan = plan(program(&cfg), &cfg.graph, cfg.seed).unwrap();
            let mut executor = CpuExecutor::new(plan, None, None).unwrap();
            executor.reset().unwrap();
            let step = executor.submit(Arm::Eager).unwrap();
            executor.wait(step).unwrap();
            executor.digest().unwrap()
        };
        assert_eq!(digest(overlapping(cfg.clone())), digest(cfg));
    }
}

#[test]
fn the_side_lane_lags_by_no_more_than_is_kept_for_it() {
    let cfg = overlapping(with_graphs(dense(), GraphImpl::Local, &[Scope::FullIteration]));
    let plan = plan(program(&cfg), &cfg.graph, cfg.seed).unwrap();
    let program = &plan.eager.program;
    let done = done_before(program, 0..program.launches.len());
    let mut side = 0;
    let mut places: Vec<usize> = Vec::new();
    for (i, launch) in program.launches.iter().enumerate() {
        if launch.lane == 0 {
            let due = places.iter().filter(|p| **p + LAG <= i).count();
            assert!(done[i][SIDE] >= due, "launch {i}: {} of {side}", done[i][SIDE]);
        } else {
            side += 1;
            places.push(i);
        }
    }
    assert!(side > 0);
}
