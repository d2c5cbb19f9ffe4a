//! Where the launches of image towers and diffusion transformers lie, and both arms of each on the CPU device.

use super::tests::both_arms;
use super::*;
use crate::config::Scope::{Attn, FullIteration, Mlp};
use crate::workloads::share::RankShare;
use crate::workloads::testing::{diffusion, program, vision, with_graphs};

/// Launches of the tower, and how many of them lie in graphs.
fn tower(plan: &RunPlan) -> [usize; 2] {
    let arm = plan.graph.as_ref().expect("a graph arm");
    let of = |s: &Segment| {
        arm.program.launches[s.launches.clone()].iter().filter(|l| l.part == Part::Vision).count()
    };
    let captured = arm.segments.iter().filter(|s| s.graph.is_some());
    [arm.segments.iter().map(of).sum(), captured.map(of).sum()]
}

#[test]
fn a_tower_lies_in_no_layers_graph_and_in_that_of_an_iteration() {
    let te = with_graphs(vision(), GraphImpl::TransformerEngine, &[]);
    both_arms(&te);
    let [all, captured] = tower(&plan(program(&te), &te.graph, te.seed).expect("a plan"));
    assert!(all > 50 && captured == 0, "{captured} of {all}");
    let local = with_graphs(vision(), GraphImpl::Local, &[FullIteration]);
    both_arms(&local);
    let [all, captured] = tower(&plan(program(&local), &local.graph, local.seed).expect("a plan"));
    assert!(all > 50 && captured == all, "{captured} of {all}");
}

#[test]
fn both_attentions_of_a_diffusion_block_are_one_graph() {
    for scope in [&[Attn][..], &[Attn, Mlp]] {
        let cfg = with_graphs(diffusion(), GraphImpl::TransformerEngine, scope);
        both_arms(&cfg);
        let plan = plan(program(&cfg), &cfg.graph, cfg.seed).expect("a plan");
        let arm = plan.graph.expect("a graph arm");
        let attentions = |s: &Segment| {
            let mine = &arm.program.launches[s.launches.clone()];
            mine.iter().filter(|l| l.op.name().starts_with("attention")).count()
        };
        let of: Vec<usize> = arm.segments.iter().filter(|s| s.graph.is_some()).map(attentions).collect();
        assert!(of.iter().all(|n| *n == 2), "{of:?}");
    }
}

#[test]
fn an_image_that_a_sequence_does_not_hold_is_refused_with_numbers() {
    let mut cfg = vision();
    cfg.batch.seq_length = 5;
    let share = RankShare::of(&cfg).expect("the share");
    let said = crate::workloads::build(&cfg, &share).expect_err("too short").to_string();
    assert!(said.contains("5 tokens") && said.contains("4 tokens of its image"), "{said}");
}

/// Tensor, sequence and context parallel ranks, and whole layers repeated: both arms agree.
#[test]
fn ranks_of_split_models_run_too() {
    for cfg in [vision(), diffusion()] {
        let mut tensor = with_graphs(cfg.clone(), GraphImpl::TransformerEngine, &[Attn]);
        (tensor.parallel.tp, tensor.parallel.sequence_parallel, tensor.identity.num_gpus) = (2, true, 2);
        both_arms(&tensor);
        let mut context = with_graphs(cfg.clone(), GraphImpl::TransformerEngine, &[Attn]);
        (context.parallel.cp, context.identity.num_gpus) = (2, 2);
        both_arms(&context);
        let mut repeated = with_graphs(cfg, GraphImpl::Local, &[FullIteration]);
        repeated.recompute.granularity = Some("full".into());
        (repeated.recompute.method, repeated.recompute.num_layers) = (Some("uniform".into()), Some(2));
        both_arms(&repeated);
    }
}
