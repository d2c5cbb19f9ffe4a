//! Pipeline stages: order of the segments, graph counts, gradients, memory, against what was counted by hand.

use super::tests::{both_arms, three_steps};
use super::*;
use crate::config::{Dispatcher, ExpertGemm, RunConfig, Scope::*};
use crate::device::Arm;
use crate::device::cpu::CpuExecutor;
use crate::program::BufId;
use crate::workloads::schedule::Turn;
use crate::workloads::testing::{dense, hybrid, moe, padded, program, program_in_order, staged, with_graphs};

/// One dense layer a chunk.
fn single() -> RunConfig {
    let mut cfg = dense();
    cfg.model.layers.truncate(1);
    cfg
}

fn te(cfg: RunConfig, scope: &[crate::config::Scope]) -> RunConfig {
    with_graphs(cfg, GraphImpl::TransformerEngine, scope)
}

fn graph_arm(cfg: &RunConfig) -> ArmPlan {
    plan(program(cfg), &cfg.graph, cfg.seed).unwrap().graph.unwrap()
}

/// Layer, pass and micro-batch of each replay.
fn replays(arm: &ArmPlan) -> String {
    let word = |s: &Segment| {
        let l = &arm.program.launches[s.launches.start];
        let pass = if l.pass == Pass::Forward { 'F' } else { 'B' };
        format!("{pass}{}.{}", l.micro_batch, l.layer.unwrap())
    };
    arm.segments.iter().filter(|s| s.graph.is_some()).map(word).collect::<Vec<_>>().join(" ")
}

#[test]
fn graphs_replay_in_the_order_of_the_schedule() {
    let of = |rank| replays(&graph_arm(&te(staged(single(), 2, 1, rank, 3), &[Attn, Mlp])));
    assert_eq!(of(0), "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0");
    assert_eq!(of(1), "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0");
    // Rules file, section 6: 1 1 2 2 1 -2 1 -2 2 -1 2 -1 -2 -2 -1 -1, chunk 2 being local layer 1.
    let interleaved = te(staged(single(), 2, 2, 0, 4), &[]);
    assert_eq!(
        replays(&graph_arm(&interleaved)),
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0"
    );
}

/// Upstream: 2 x (graphable layers of all chunks) x micro-batches, one micro-batch without a pipeline.
#[test]
fn graphs_are_counted_as_upstream_counts_them() {
    let counts = |cfg: &RunConfig| {
        let arm = graph_arm(cfg);
        (arm.graphs(), arm.replays())
    };
    assert_eq!(
        counts(&te(staged(dense(), 1, 1, 0, 4), &[Attn])),
        (4, 16),
        "2 layers, shared by 4 micro-batches"
    );
    for rank in [0, 1] {
        assert_eq!(counts(&te(staged(dense(), 2, 1, rank, 4), &[Attn])), (16, 16), "2 x 2 layers x 4");
        assert_eq!(counts(&te(staged(dense(), 2, 1, rank, 4), &[Attn, Mlp])), (16, 16), "one graph a layer");
        assert_eq!(counts(&te(staged(dense(), 2, 2, rank, 4), &[])), (32, 32), "2 x 4 layers x 4");
    }
    assert_eq!(counts(&te(staged(dense(), 4, 1, 3, 2), &[Attn])), (8, 8), "2 x 2 layers x 2");
    let alltoall = staged(moe(Dispatcher::Alltoall), 2, 1, 1, 3);
    assert_eq!(counts(&te(alltoall, &[Attn, MoeRouter, MoePreprocess])), (12, 12), "2 x 2 layers x 3");
    assert_eq!(counts(&te(staged(hybrid(), 2, 1, 0, 2), &[Mamba])), (4, 4), "2 x 1 Mamba layer x 2");
    assert_eq!(counts(&te(staged(hybrid(), 2, 2, 1, 2), &[Attn, Mamba])), (16, 16), "2 x 4 layers x 2");
    for vp in [1, 2] {
        let local = with_graphs(staged(dense(), 2, vp, 0, 3), GraphImpl::Local, &[FullIteration]);
        assert_eq!(counts(&local), (1, 1));
    }
}

/// Transfers lie in the iteration's graph, and outside the graphs of layers.
#[test]
fn transfers_are_outside_layers_and_inside_the_iteration() {
    let where_ = |cfg: &RunConfig| {
        let arm = graph_arm(cfg);
        let of = |captured: bool| {
            let segments = arm.segments.iter().filter(move |s| s.graph.is_some() == captured);
            let launches = segments.flat_map(|s| s.launches.clone()).map(|i| &arm.program.launches[i]);
            launches.filter(|l| l.part == Part::Pipeline).map(|l| l.op.name()).collect::<Vec<_>>()
        };
        (of(true), of(false))
    };
    let count = |names: &[&str], name: &str| names.iter().filter(|n| **n == name).count();
    let between = staged(dense(), 3, 1, 1, 2);
    let (inside, outside) = where_(&te(between.clone(), &[]));
    assert!(inside.is_empty());
    // Two micro-batches, each received and sent on both ways.
    assert_eq!((count(&outside, "stand_in_receive"), count(&outside, "stand_in_send")), (4, 4));
    let (inside, outside) = where_(&with_graphs(between, GraphImpl::Local, &[FullIteration]));
    assert_eq!((count(&inside, "stand_in_receive"), count(&inside, "stand_in_send")), (4, 4));
    assert!(outside.is_empty());
    // The first stage receives gradients alone, the last sends gradients alone.
    let (_, first) = where_(&te(staged(dense(), 3, 1, 0, 2), &[]));
    assert_eq!((count(&first, "stand_in_receive"), count(&first, "stand_in_send")), (2, 2));
    let (_, last) = where_(&te(staged(dense(), 3, 1, 2, 2), &[]));
    assert_eq!((count(&last, "stand_in_receive"), count(&last, "stand_in_send")), (2, 2));
    // Two chunks on the first of two stages: both send an activation, one receives it; and the reverse for gradients.
    let (_, chunks) = where_(&te(staged(dense(), 2, 2, 0, 2), &[]));
    assert_eq!((count(&chunks, "stand_in_receive"), count(&chunks, "stand_in_send")), (6, 6));
}

#[test]
fn arms_of_every_stage_are_equal() {
    for (pp, vp, ranks) in
        [(2, 1, vec![0, 1]), (4, 1, vec![0, 1, 2, 3]), (2, 2, vec![0, 1]), (4, 2, vec![0, 2, 3])]
    {
        for rank in ranks {
            let mut cfg = te(staged(single(), pp, vp, rank, 5), &[Attn]);
            (cfg.model.attention_dropout, cfg.model.hidden_dropout) = (0.1, 0.1);
            if vp > 1 {
                cfg.batch.num_microbatches = pp + 1;
            }
            both_arms(&cfg);
            cfg.graph.scope.clear();
            both_arms(&cfg);
            cfg.graph = with_graphs(single(), GraphImpl::Local, &[FullIteration]).graph;
            both_arms(&cfg);
        }
    }
    both_arms(&te(staged(moe(Dispatcher::Alltoall), 2, 2, 1, 3), &[Attn, MoeRouter, MoePreprocess]));
    both_arms(&te(staged(moe(Dispatcher::Flex), 3, 1, 1, 3), &[MoeRouter]));
    both_arms(&te(staged(hybrid(), 2, 1, 0, 3), &[Mamba]));
    both_arms(&with_graphs(staged(padded(), 2, 2, 0, 3), GraphImpl::Local, &[FullIteration]));
}

/// Each micro-batch there and back before the next: all chunks forward, then all backward.
fn one_by_one(micro_batches: usize, chunks: usize) -> Vec<Turn> {
    (0..micro_batches)
        .flat_map(|micro_batch| {
            let turn = move |pass, chunk| Turn { pass, micro_batch, chunk };
            let forward = (0..chunks).map(move |c| turn(Pass::Forward, c));
            forward.chain((0..chunks).rev().map(move |c| turn(Pass::Backward, c)))
        })
        .collect()
}

/// Losses, gradients and weights after three steps do not depend on the order of the passes: each slot keeps its
/// micro-batch's activations, and a backward pass draws the random numbers of its own forward pass.
#[test]
fn the_order_of_passes_does_not_change_a_bit() {
    for (pp, vp, rank) in [(2, 1, 0), (4, 1, 0), (4, 1, 1), (4, 1, 3), (2, 2, 0), (2, 2, 1)] {
        let mut per_expert = moe(Dispatcher::Alltoall);
        // The router's own choice differs from micro-batch to micro-batch, and with it the counts on the host.
        for moe in per_expert.model.moe.iter_mut() {
            moe.expert_gemm = ExpertGemm::PerExpert;
            moe.force_load_balancing = false;
        }
        for base in [single(), moe(Dispatcher::Alltoall), per_expert, hybrid()] {
            let mut cfg = staged(base, pp, vp, rank, 5);
            (cfg.model.attention_dropout, cfg.model.hidden_dropout) = (0.1, 0.1);
            let trace = |program: Program| {
                let plan = plan(program, &cfg.graph, cfg.seed).unwrap();
                let (losses, mut digest) =
                    three_steps(&mut CpuExecutor::new(plan, None, None).unwrap(), Arm::Eager).unwrap();
                // The last transfer of a step is another one in another order.
                digest.retain(|(name, _)| !name.starts_with("sent."));
                assert!(digest.iter().any(|(name, _)| name.ends_with("main_grads")));
                (losses, digest)
            };
            assert_eq!(
                trace(program(&cfg)),
                trace(program_in_order(&cfg, &one_by_one(5, vp))),
                "pp {pp} vp {vp} rank {rank}"
            );
        }
    }
}

#[test]
fn without_a_pipeline_the_program_is_one_micro_batch_after_the_other() {
    for base in [dense(), moe(Dispatcher::Flex), hybrid()] {
        let cfg = staged(base, 1, 1, 0, 3);
        let text =
            |p: &Program| p.launches.iter().map(|l| format!("{:?}{:?};", l.op, l.args)).collect::<String>();
        let scheduled = program(&cfg);
        assert_eq!(text(&scheduled), text(&program_in_order(&cfg, &one_by_one(3, 1))));
        assert!(scheduled.launches.iter().all(|l| l.part != Part::Pipeline));
        assert!(scheduled.buffers.iter().all(|b| !b.name.contains("slot")), "one slot");
    }
}

/// Every launch that draws finds its own micro-batch in the step words.
#[test]
fn draws_are_those_of_the_launchs_micro_batch() {
    for (pp, vp, rank) in [(1, 1, 0), (2, 1, 0), (4, 1, 1), (2, 2, 0), (2, 2, 1)] {
        let mut cfg = staged(moe(Dispatcher::Alltoall), pp, vp, rank, 4);
        (cfg.model.attention_dropout, cfg.model.hidden_dropout) = (0.1, 0.1);
        let program = program(&cfg);
        let words = BufId(program.buffers.iter().position(|b| b.name == "step_words").unwrap() as u32);
        let (mut word, mut drawn) = (0, 0);
        for l in program.launches.iter().filter(|l| l.args.contains(&words)) {
            match l.op.name() {
                "step_begin" => word = 0,
                "micro_batch_set" => {
                    word = format!("{:?}", l.op)
                        .chars()
                        .filter(char::is_ascii_digit)
                        .collect::<String>()
                        .parse()
                        .unwrap();
                }
                "adam" | "step_end" => {}
                _ => {
                    assert_eq!(word, l.micro_batch, "{:?} {:?}", l.op, l.pass);
                    drawn += 1;
                }
            }
        }
        assert!(drawn > 20, "{drawn}");
    }
}

/// Activations grow with the micro-batches in flight, 4 to 1 over the stages, and not with those of the step.
#[test]
fn memory_follows_the_micro_batches_in_flight() {
    let peak = |rank, micro_batches| {
        let mut cfg = staged(dense(), 4, 1, rank, micro_batches);
        // The head's logits would hide the last stage's activations.
        cfg.model.vocab_size = 8;
        let memory = plan(program(&cfg), &cfg.graph, cfg.seed).unwrap().eager.memory;
        (memory.arena_bytes, memory.live_peak_bytes)
    };
    let by_rank: Vec<(usize, usize)> = (0..4).map(|rank| peak(rank, 8)).collect();
    for pair in by_rank.windows(2) {
        assert!(pair[0].0 > pair[1].0 && pair[0].1 > pair[1].1, "{by_rank:?}");
    }
    // What one more micro-batch in flight holds: the same from stage to stage.
    let held = by_rank[1].1 - by_rank[2].1;
    assert!(by_rank[0].1 > by_rank[2].1 + held * 3 / 2, "{by_rank:?}");
    assert_eq!(peak(1, 8), peak(1, 16), "in flight as many");
    assert!(peak(0, 2).1 < peak(0, 4).1, "fewer micro-batches than stages");
    // Chunks share the slots: what more passes in flight take of the arena comes near to what they hold.
    let chunks = |micro_batches| {
        let cfg = staged(dense(), 4, 2, 0, micro_batches);
        plan(program(&cfg), &cfg.graph, cfg.seed).unwrap().eager.memory
    };
    let (few, many) = (chunks(4), chunks(12));
    let (arena, live) = (many.arena_bytes - few.arena_bytes, many.live_peak_bytes - few.live_peak_bytes);
    assert!(live > 0 && arena * 5 <= live * 6, "{arena} of {live}");
    // Graphs: buffers by slot, so four slots of a layer's static memory and not eight.
    let graphs =
        |micro_batches| graph_arm(&te(staged(dense(), 4, 1, 0, micro_batches), &[])).memory.arena_bytes;
    assert_eq!(graphs(8), graphs(12));
    assert!(graphs(8) > graphs(2));
}

#[test]
fn a_stage_without_anything_is_refused() {
    let mut cfg = staged(single(), 3, 1, 1, 2);
    cfg.parallel.pipeline_layout = Some("Et||ttL".into());
    let share = crate::workloads::share::RankShare::of(&cfg).unwrap();
    let error = crate::workloads::build(&cfg, &share).unwrap_err().to_string();
    assert!(error.contains("pipeline rank 1 has no layers"), "{error}");
    // Embedding alone, loss alone: there is something to do.
    cfg.parallel.pipeline_layout = Some("E|ttt|L".into());
    for rank in [0, 2] {
        cfg.parallel.pp_rank = rank;
        both_arms(&with_graphs(cfg.clone(), GraphImpl::Local, &[FullIteration]));
        let none = plan(program(&cfg), &te(cfg.clone(), &[Attn]).graph, 1);
        assert!(matches!(none, Err(CaptureError::Nothing { .. })));
    }
}
