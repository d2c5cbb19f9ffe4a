//! Segments of each scope against expectations written by hand, and the proofs on the CPU device.
//!
//! Over 500 lines: the expectations are read side by side.

use super::*;
use crate::config::{Dispatcher, LayerKind, RunConfig, Scope::*};
use crate::device::cpu::CpuExecutor;
use crate::device::{Arm, DeviceError, Executor};
use crate::workloads::testing::{
    deepseek, deepseek_v4, delta_net, dense, hybrid, moe, padded, program, staged, with_graphs,
};

/// One line a segment of the first micro-batch's first layer and its neighbours: `G` or `e`, then the op names
/// with runs of equal part abbreviated. Staging copies are shown as `copy`.
fn story(cfg: &RunConfig, micro_batch: usize, layer: usize) -> Vec<String> {
    let plan = plan(program(cfg), &cfg.graph, cfg.seed).expect("a plan");
    let arm = plan.graph.expect("a graph arm");
    arm.segments
        .iter()
        .filter_map(|s| {
            let mine: Vec<_> = s
                .launches
                .clone()
                .map(|i| &arm.program.launches[i])
                .filter(|l| l.layer == Some(layer) && l.micro_batch == micro_batch)
                .collect();
            (!mine.is_empty()).then(|| {
                let names: Vec<&str> = mine.iter().map(|l| l.op.name()).collect();
                format!("{} {}", if s.graph.is_some() { "G" } else { "e" }, names.join(" "))
            })
        })
        .collect()
}

const ATTN_F: &str = "rmsnorm_fwd gemm qkv_rope_fwd attention_fwd gemm";
const MLP_F: &str = "rmsnorm_fwd gemm swiglu_fwd gemm";
const MLP_B: &str = "gemm gemm swiglu_bwd gemm gemm rmsnorm_bwd";
const ATTN_B: &str = "gemm gemm attention_bwd qkv_rope_bwd gemm gemm rmsnorm_bwd";

#[test]
fn dense_attn_captures_attention_alone() {
    let cfg = with_graphs(dense(), GraphImpl::TransformerEngine, &[Attn]);
    // Layer 0's input comes from the embedding and is staged; the gradient from the eager MLP too.
    let want = [
        "e copy".to_string(),
        format!("G {ATTN_F}"),
        format!("e {MLP_F}"),
        format!("e {MLP_B} copy"),
        format!("G {ATTN_B}"),
    ];
    assert_eq!(story(&cfg, 0, 0), want);
}

#[test]
fn dense_attn_mlp_is_one_graph_a_layer_and_pass() {
    let cfg = with_graphs(dense(), GraphImpl::TransformerEngine, &[Attn, Mlp]);
    let want = [
        "e copy".to_string(),
        format!("G {ATTN_F} {MLP_F}"),
        "e copy".to_string(),
        format!("G {MLP_B} {ATTN_B}"),
    ];
    assert_eq!(story(&cfg, 1, 1), want);
    let whole = with_graphs(dense(), GraphImpl::TransformerEngine, &[]);
    assert_eq!(story(&whole, 1, 1), want);
}

#[test]
fn micro_batches_share_graphs_and_a_full_iteration_is_one() {
    let te = with_graphs(dense(), GraphImpl::TransformerEngine, &[Attn]);
    let arm = plan(program(&te), &te.graph, 1).unwrap().graph.unwrap();
    assert_eq!(
        (arm.graphs(), arm.replays()),
        (4, 8),
        "2 layers x 2 passes, each replayed by 2 micro-batches"
    );
    let local = with_graphs(dense(), GraphImpl::Local, &[FullIteration]);
    let arm = plan(program(&local), &local.graph, 1).unwrap().graph.unwrap();
    assert_eq!((arm.graphs(), arm.replays(), arm.segments.len()), (1, 1, 3));
    let eager: Vec<&str> = arm
        .segments
        .iter()
        .filter(|s| s.graph.is_none())
        .flat_map(|s| s.launches.clone())
        .map(|i| arm.program.launches[i].op.name())
        .collect();
    assert!(eager.contains(&"token_gen") && eager.contains(&"adam") && !eager.contains(&"gemm"), "{eager:?}");
}

const ROUTER_F: &str = "rmsnorm_fwd gemm router_fwd";
const ROUTER_B: &str = "router_bwd gemm gemm rmsnorm_bwd";
const EXPERTS_F: &str = "grouped_gemm_nt swiglu_fwd grouped_gemm_nt";
const QK_ATTN_B: &str = "gemm gemm attention_bwd qkv_rope_bwd column_sum gemm gemm rmsnorm_bwd";
const EXPERTS_B: &str = "grouped_gemm_nn grouped_gemm_tn swiglu_bwd grouped_gemm_tn grouped_gemm_nn";

#[test]
fn alltoall_router_and_preprocess_hold_the_first_permutation_but_not_the_counts() {
    let cfg = with_graphs(
        moe(Dispatcher::Alltoall),
        GraphImpl::TransformerEngine,
        &[Attn, MoeRouter, MoePreprocess],
    );
    let sent = "counts_to_host stand_in_all_to_all stand_in_all_to_all chunk_map gather_rows";
    let back = "gather_rows stand_in_all_to_all combine_rows";
    let want = [
        "e copy".to_string(),
        format!("G {ATTN_F} {ROUTER_F} moe_sort gather_rows"),
        format!("e {sent} {EXPERTS_F} {back}"),
        format!(
            "e gather_rows stand_in_all_to_all gather_rows {EXPERTS_B} gather_rows stand_in_all_to_all stand_in_all_to_all copy copy copy"
        ),
        format!("G combine_rows {ROUTER_B} {QK_ATTN_B}"),
    ];
    assert_eq!(story(&cfg, 0, 0), want);
}

/// Three gradients enter a captured router: of its probabilities, of the normed tokens, and the residual's.
#[test]
fn alltoall_router_and_attention_are_captured_apart_from_the_dispatch() {
    let of = |scope: &[Scope]| {
        story(&with_graphs(moe(Dispatcher::Alltoall), GraphImpl::TransformerEngine, scope), 0, 0)
    };
    let dispatch =
        "moe_sort gather_rows counts_to_host stand_in_all_to_all stand_in_all_to_all chunk_map gather_rows";
    let experts = format!("{dispatch} {EXPERTS_F} gather_rows stand_in_all_to_all combine_rows");
    let back = format!(
        "gather_rows stand_in_all_to_all gather_rows {EXPERTS_B} gather_rows stand_in_all_to_all stand_in_all_to_all combine_rows"
    );
    let want = [
        "e copy".to_string(),
        format!("G {ATTN_F}"),
        format!("e {ROUTER_F} {experts}"),
        format!("e {back} {ROUTER_B} copy"),
        format!("G {QK_ATTN_B}"),
    ];
    assert_eq!(of(&[Attn]), want);
    let want = [
        "e copy".to_string(),
        format!("G {ATTN_F} {ROUTER_F}"),
        format!("e {experts}"),
        format!("e {back} copy copy copy"),
        format!("G {ROUTER_B} {QK_ATTN_B}"),
    ];
    assert_eq!(of(&[Attn, MoeRouter]), want);
    let want = [
        format!("e {ATTN_F} copy"),
        format!("G {ROUTER_F}"),
        format!("e {experts}"),
        format!("e {back} copy copy copy"),
        format!("G {ROUTER_B}"),
        format!("e {QK_ATTN_B}"),
    ];
    assert_eq!(of(&[MoeRouter]), want);
}

#[test]
fn flex_dispatch_permutes_outside_the_preprocess_scope() {
    let cfg = with_graphs(moe(Dispatcher::Flex), GraphImpl::TransformerEngine, &[MoeRouter, MoePreprocess]);
    let want = [
        format!("e {ATTN_F} copy"),
        format!("G {ROUTER_F} moe_sort"),
        format!("e counts_to_host gather_rows {EXPERTS_F} combine_rows"),
        format!("e gather_rows {EXPERTS_B} combine_rows copy copy copy"),
        format!("G {ROUTER_B}"),
        format!("e {QK_ATTN_B}"),
    ];
    assert_eq!(story(&cfg, 0, 0), want);
    let router = with_graphs(moe(Dispatcher::Flex), GraphImpl::TransformerEngine, &[Attn, MoeRouter]);
    assert_eq!(story(&router, 0, 0)[1], format!("G {ATTN_F} {ROUTER_F}"));
}

#[test]
fn padded_experts_can_be_captured_whole() {
    let cfg = with_graphs(padded(), GraphImpl::TransformerEngine, &[Moe]);
    let got = story(&cfg, 0, 0);
    assert!(got.iter().any(|s| s.starts_with("G rmsnorm_fwd") && s.ends_with("combine_rows")), "{got:?}");
    assert!(!got.iter().any(|s| s.contains("counts_to_host")), "static shapes need no counts: {got:?}");
    let local = with_graphs(padded(), GraphImpl::Local, &[FullIteration]);
    assert!(plan(program(&local), &local.graph, 1).is_ok());
}

#[test]
fn dropless_full_iteration_would_wait_inside_the_graph() {
    let cfg = with_graphs(moe(Dispatcher::Alltoall), GraphImpl::Local, &[FullIteration]);
    assert!(matches!(plan(program(&cfg), &cfg.graph, 1), Err(CaptureError::HostSync { .. })));
}

/// Rules file, section 5: the whole Mamba layer, norm to residual, and nothing of the other kinds.
const MAMBA_F: &str = "rmsnorm_fwd gemm mamba_conv_fwd ssd_fwd gated_norm_fwd gemm";
const MAMBA_B: &str = "gemm gemm gated_norm_bwd ssd_bwd mamba_conv_bwd column_sum gemm gemm rmsnorm_bwd";

/// A rank capacity factor: rows are static and their counts stay on the device, so that whole layers and the iteration
/// are graphs, without a copy to the host or a wait.
#[test]
fn a_rank_capacity_factor_makes_dropless_rows_static() {
    let with_factor = |factor| {
        let mut cfg = moe(Dispatcher::Flex);
        let moe = cfg.model.moe.as_mut().unwrap();
        moe.rank_capacity_factor = Some(factor);
        // Balance is not forced, so that experts differ in their rows.
        moe.force_load_balancing = false;
        cfg
    };
    let cfg = with_factor(1.5);
    let built = program(&cfg);
    assert!(!built.launches.iter().any(|l| l.op.host_sync()));
    let rows = built.buffers.iter().find(|b| b.name.ends_with("l0.moe.rows")).unwrap();
    assert_eq!(rows.shape[0], cfg.batch.seq_length * 2 * 3 / 2);
    let sorts = built.launches.iter().filter(|l| l.op.name() == "moe_sort").count();
    assert_eq!((built.faults.len(), sorts), (2, 4));
    let full = with_graphs(cfg.clone(), GraphImpl::Local, &[FullIteration]);
    let arm = plan(program(&full), &full.graph, full.seed).unwrap().graph.unwrap();
    assert_eq!(arm.segments.iter().filter(|s| s.graph.is_some()).count(), 1);
    both_arms(&full);
    let layers = with_graphs(cfg, GraphImpl::TransformerEngine, &[]);
    let arm = plan(program(&layers), &layers.graph, layers.seed).unwrap().graph.unwrap();
    assert!(arm.segments.iter().all(|s| {
        s.graph.is_some()
            || arm.program.launches[s.launches.clone()]
                .iter()
                .all(|l| l.op.name() == "copy" || l.layer.is_none())
    }));
    both_arms(&layers);
    // Fewer rows than arrive: the step is a failure in both arms.
    let overflow = with_graphs(with_factor(0.9), GraphImpl::Local, &[FullIteration]);
    let plan = plan(program(&overflow), &overflow.graph, overflow.seed).unwrap();
    let mut executor = CpuExecutor::new(plan, None, None).unwrap();
    let why = three_steps(&mut executor, Arm::Eager).unwrap_err().to_string();
    assert!(why.contains("rank capacity factor"), "{why}");
}

#[test]
fn mamba_captures_whole_mamba_layers_alone() {
    let cfg = with_graphs(hybrid(), GraphImpl::TransformerEngine, &[Mamba]);
    let mamba = ["e copy".to_string(), format!("G {MAMBA_F}"), "e copy".to_string(), format!("G {MAMBA_B}")];
    assert_eq!(story(&cfg, 0, 0), mamba);
    for layer in 1..4 {
        assert!(story(&cfg, 0, layer).iter().all(|s| s.starts_with('e')), "layer {layer}");
    }
    let arm = plan(program(&cfg), &cfg.graph, 1).unwrap().graph.unwrap();
    assert_eq!((arm.graphs(), arm.replays()), (2, 4), "one layer, two micro-batches");
}

/// A gated delta net stands where self-attention does: `attn` captures it, `mamba` finds no layer.
const DELTA_F: &str = "rmsnorm_fwd gemm mamba_conv_fwd delta_net_fwd norm_gate_fwd gemm";
const DELTA_B: &str = "gemm gemm norm_gate_bwd delta_net_bwd mamba_conv_bwd column_sum gemm gemm rmsnorm_bwd";
const GATED_ATTN_F: &str = "rmsnorm_fwd gemm qkv_rope_fwd attention_fwd output_gate_fwd gemm";
const GATED_ATTN_B: &str = "gemm gemm output_gate_bwd attention_bwd qkv_rope_bwd column_sum gemm gemm \
                            rmsnorm_bwd";

#[test]
fn attn_captures_gated_delta_nets() {
    let cfg = with_graphs(delta_net(), GraphImpl::TransformerEngine, &[Attn, MoeRouter]);
    for (layer, forward, backward) in [(0, DELTA_F, DELTA_B), (1, GATED_ATTN_F, GATED_ATTN_B)] {
        let got = story(&cfg, 0, layer);
        assert!(got.contains(&format!("G {forward} {ROUTER_F}")), "{got:?}");
        assert!(got.contains(&format!("G {ROUTER_B} {backward}")), "{got:?}");
    }
    let mamba = with_graphs(delta_net(), GraphImpl::TransformerEngine, &[Mamba]);
    assert!(matches!(plan(program(&mamba), &mamba.graph, 1), Err(CaptureError::Nothing { .. })));
}

#[test]
fn scopes_of_a_hybrid_name_one_layer_kind_each() {
    let cfg =
        with_graphs(hybrid(), GraphImpl::TransformerEngine, &[Attn, Mlp, MoeRouter, MoePreprocess, Mamba]);
    let attn = story(&cfg, 0, 1);
    assert!(attn.contains(&format!("G {ATTN_F}")) && attn.contains(&format!("G {ATTN_B}")), "{attn:?}");
    let mlp = story(&cfg, 0, 2);
    assert!(mlp.contains(&format!("G {}", MLP_F.replace("swiglu", "squared_relu"))), "{mlp:?}");
    assert!(mlp.contains(&format!("G {}", MLP_B.replace("swiglu", "squared_relu"))), "{mlp:?}");
    let moe = story(&cfg, 0, 3);
    assert!(moe.contains(&format!("G {ROUTER_F} moe_sort gather_rows")), "{moe:?}");
    let arm = plan(program(&cfg), &cfg.graph, 1).unwrap().graph.unwrap();
    assert_eq!(arm.graphs(), 8, "four layers, two passes");
    let two = with_graphs(hybrid(), GraphImpl::TransformerEngine, &[Attn, Mamba]);
    let arm = plan(program(&two), &two.graph, 1).unwrap().graph.unwrap();
    assert_eq!(arm.graphs(), 4);
}

#[test]
fn a_whole_layer_of_a_hybrid_is_one_graph_a_pass() {
    let mut cfg = hybrid();
    cfg.model.moe = padded().model.moe;
    let cfg = with_graphs(cfg, GraphImpl::TransformerEngine, &[]);
    for layer in 0..4 {
        let graphs: Vec<String> = story(&cfg, 0, layer).into_iter().filter(|s| s.starts_with('G')).collect();
        assert_eq!(graphs.len(), 2, "layer {layer}: {graphs:?}");
    }
    let arm = plan(program(&cfg), &cfg.graph, 1).unwrap().graph.unwrap();
    assert_eq!((arm.graphs(), arm.replays()), (8, 16), "four layers, two passes, two micro-batches");
}

/// Modules that the backward pass runs again.
fn recomputing(mut cfg: RunConfig, modules: &[&str]) -> RunConfig {
    cfg.recompute.granularity = Some("selective".into());
    cfg.recompute.modules = modules.iter().map(|m| m.to_string()).collect();
    cfg
}

fn with_shared_expert(mut cfg: RunConfig) -> RunConfig {
    if let Some(moe) = &mut cfg.model.moe {
        moe.shared_expert_intermediate_size = Some(48);
    }
    cfg
}

#[test]
fn recomputed_launches_lie_in_the_backward_graph() {
    let cfg = recomputing(dense(), &["mlp", "core_attn"]);
    let mlp = "gemm rmsnorm_fwd gemm swiglu_fwd gemm gemm swiglu_bwd gemm gemm rmsnorm_bwd";
    let attn = "gemm gemm attention_fwd attention_bwd qkv_rope_bwd gemm gemm rmsnorm_bwd";
    let both = with_graphs(cfg.clone(), GraphImpl::TransformerEngine, &[Attn, Mlp]);
    let want = [
        "e copy".to_string(),
        format!("G {ATTN_F} {MLP_F}"),
        "e copy".to_string(),
        format!("G {mlp} {attn}"),
    ];
    assert_eq!(story(&both, 0, 1), want);
    // A module outside the scope runs again outside.
    let attention = with_graphs(cfg, GraphImpl::TransformerEngine, &[Attn]);
    let want = [
        "e copy".to_string(),
        format!("G {ATTN_F}"),
        format!("e {MLP_F}"),
        format!("e {mlp} copy"),
        format!("G {attn}"),
    ];
    assert_eq!(story(&attention, 0, 0), want);
    let arm = plan(program(&both), &both.graph, 1).unwrap().graph.unwrap();
    assert_eq!((arm.graphs(), arm.replays()), (4, 8), "as many graphs as without recompute");
}

#[test]
fn recompute_beside_a_captured_router_stays_on_its_side_of_the_edge() {
    let cfg = recomputing(
        with_shared_expert(moe(Dispatcher::Alltoall)),
        &["layernorm", "shared_experts", "moe_act"],
    );
    let cfg = with_graphs(cfg, GraphImpl::TransformerEngine, &[Attn, MoeRouter, MoePreprocess]);
    let got = story(&cfg, 0, 0);
    let experts = "grouped_gemm_nn swiglu_fwd grouped_gemm_tn swiglu_bwd grouped_gemm_tn grouped_gemm_nn";
    assert!(got[3].starts_with("e ") && got[3].contains(experts), "{got:?}");
    // The norm before the router's weight gradient; the shared expert's three launches before that of its second product.
    let router = "router_bwd rmsnorm_fwd gemm gemm";
    let shared = "gemm gemm swiglu_fwd gemm gemm swiglu_bwd gemm gemm";
    assert_eq!(got[4], format!("G combine_rows {router} {shared} rmsnorm_bwd {QK_ATTN_B}"));
}

#[test]
fn a_recomputed_dispatch_waits_for_its_counts_outside_the_graphs() {
    let cfg = recomputing(moe(Dispatcher::Alltoall), &["moe"]);
    let attention = with_graphs(cfg.clone(), GraphImpl::TransformerEngine, &[Attn]);
    let eager = &story(&attention, 0, 0)[3];
    assert!(eager.starts_with("e ") && eager.contains("counts_to_host"), "{eager}");
    let padded = with_graphs(recomputing(padded(), &["moe"]), GraphImpl::TransformerEngine, &[Moe]);
    let graph = story(&padded, 0, 0);
    assert_eq!(
        graph.iter().filter(|s| s.starts_with('G') && s.contains("router_fwd")).count(),
        2,
        "{graph:?}"
    );
}

#[test]
fn a_mamba_layer_takes_at_most_forty_launches_a_step() {
    let launches = MAMBA_F.split_whitespace().count() + MAMBA_B.split_whitespace().count();
    // The scan is three kernels forward and five backward.
    assert!(launches + 2 + 4 <= 40, "{launches}");
}

#[test]
fn a_scope_without_layers_is_an_error() {
    let cfg = with_graphs(dense(), GraphImpl::TransformerEngine, &[Mamba]);
    assert!(matches!(plan(program(&cfg), &cfg.graph, 1), Err(CaptureError::Nothing { .. })));
}

/// Loss bits of every step, and the digests after the last.
pub(super) type Trace = (Vec<u32>, Vec<(String, u64)>);

pub(super) fn three_steps(executor: &mut CpuExecutor, arm: Arm) -> Result<Trace, DeviceError> {
    executor.reset()?;
    let mut losses = Vec::new();
    for _ in 0..3 {
        let step = executor.submit(arm)?;
        losses.extend(executor.wait(step)?.loss.map(f32::to_bits));
    }
    Ok((losses, executor.digest()?))
}

pub(super) fn both_arms(cfg: &RunConfig) {
    let plan = plan(program(cfg), &cfg.graph, cfg.seed).unwrap();
    let has_loss = plan.eager.program.loss.is_some();
    let mut executor = CpuExecutor::new(plan, None, None).unwrap();
    let eager = three_steps(&mut executor, Arm::Eager).unwrap();
    assert!(eager.0.iter().all(|b| f32::from_bits(*b).is_finite()), "{:?}", eager.0);
    assert_eq!(eager.0.len(), if has_loss { 3 } else { 0 });
    executor.capture().unwrap();
    let graph = three_steps(&mut executor, Arm::Graph).unwrap();
    assert_eq!(eager, graph);
}

#[test]
fn arms_are_equal_with_dropout_on() {
    for cfg in [dense(), moe(Dispatcher::Alltoall), moe(Dispatcher::Flex), padded()] {
        let mut cfg = with_graphs(cfg, GraphImpl::TransformerEngine, &[Attn]);
        cfg.model.attention_dropout = 0.1;
        cfg.model.hidden_dropout = 0.1;
        both_arms(&cfg);
    }
    both_arms(&with_graphs(hybrid(), GraphImpl::TransformerEngine, &[Attn, Mamba]));
    let mut groups = with_graphs(hybrid(), GraphImpl::TransformerEngine, &[Mamba]);
    (groups.parallel.tp, groups.parallel.sequence_parallel, groups.identity.num_gpus) = (2, true, 4);
    both_arms(&groups);
    let mut delta = with_graphs(delta_net(), GraphImpl::TransformerEngine, &[Attn, MoeRouter]);
    both_arms(&delta);
    (delta.parallel.tp, delta.parallel.sequence_parallel, delta.identity.num_gpus) = (2, true, 4);
    both_arms(&delta);
    both_arms(&with_graphs(dense(), GraphImpl::Local, &[FullIteration]));
    both_arms(&with_graphs(padded(), GraphImpl::Local, &[FullIteration]));
    let mut split = with_graphs(moe(Dispatcher::Alltoall), GraphImpl::TransformerEngine, &[Attn, MoeRouter]);
    (split.parallel.tp, split.parallel.sequence_parallel, split.parallel.cp) = (2, true, 2);
    split.identity.num_gpus = 8;
    both_arms(&split);
}

const MLA_F: &str =
    "rmsnorm_fwd gemm gemm split_columns rmsnorm_fwd rmsnorm_fwd gemm gemm mla_rope_fwd attention_fwd gemm";
const MLA_B: &str = "gemm gemm attention_bwd mla_rope_bwd gemm gemm rmsnorm_bwd gemm gemm gemm gemm \
                     rmsnorm_bwd join_columns gemm gemm rmsnorm_bwd";

#[test]
fn latent_attention_is_captured_whole_and_experts_keep_their_scopes() {
    let te = GraphImpl::TransformerEngine;
    let cfg = with_graphs(deepseek(), te, &[Attn, MoeRouter, MoePreprocess]);
    let dense = story(&cfg, 0, 0);
    assert_eq!(dense[1], format!("G {MLA_F}"));
    assert_eq!(dense[dense.len() - 1], format!("G {MLA_B}"));
    let experts = story(&cfg, 0, 1);
    let shared = "gemm swiglu_fwd gemm";
    assert_eq!(experts[1], format!("G {MLA_F} rmsnorm_fwd {shared} gemm router_fwd moe_sort gather_rows"));
    let last = &experts[experts.len() - 1];
    assert!(last.starts_with("G combine_rows count_add router_bwd") && last.ends_with(MLA_B), "{last}");
}

const V4_F: &str = "gemm hyper_pre_fwd rmsnorm_fwd gemm gemm rmsnorm_fwd rmsnorm_fwd gemm shared_kv_fwd attention_fwd \
                    turn_heads_back block_gemm gemm hyper_post_fwd";

/// Hyper-connections lie in the parts that they surround; experts keep their scopes; token ids reach the hash.
#[test]
fn deepseek_v4_is_captured_with_its_hyper_connections() {
    let te = GraphImpl::TransformerEngine;
    let cfg = with_graphs(deepseek_v4(), te, &[Attn, MoeRouter]);
    let layer = story(&cfg, 0, 0);
    let router = "gemm hyper_pre_fwd rmsnorm_fwd gemm clamped_glu_fwd gemm gemm router_fwd";
    assert_eq!(layer[1], format!("G {V4_F} {router}"));
    assert!(layer[2].ends_with("combine_rows hyper_post_fwd"), "{}", layer[2]);
    assert!(layer[3].starts_with("e hyper_post_bwd"), "{}", layer[3]);
    both_arms(&cfg);
    let mut blocks = recomputing(cfg, &["mhc", "mla_up_proj"]);
    both_arms(&blocks);
    blocks =
        with_graphs(recomputing(predicting(deepseek_v4(), 1), &["mhc"]), GraphImpl::Local, &[FullIteration]);
    both_arms(&blocks);
    let arm = plan(program(&blocks), &blocks.graph, blocks.seed).unwrap().graph.unwrap();
    assert_eq!(arm.segments.iter().filter(|s| s.graph.is_some()).count(), 1);
    both_arms(&with_graphs(deepseek_v4(), te, &[]));
    let mut bare = with_graphs(deepseek_v4(), te, &[Attn]);
    (bare.stack_only, bare.batch.num_microbatches) = (true, 1);
    both_arms_without_loss(&bare);
    // A stage passes streams on, and one without embedding or loss draws token ids where it needs them.
    for rank in [0, 1] {
        let mut stage = staged(predicting(deepseek_v4(), 1), 2, 1, rank, 3);
        if let Some(moe) = &mut stage.model.moe {
            moe.hash_layers = 3;
        }
        let stage = with_graphs(stage, te, &[Attn]);
        let width = program(&stage).buffers.iter().find(|b| b.name.starts_with("sent.")).unwrap().shape[1];
        assert_eq!(width, 4 * 64);
        both_arms_without_loss(&stage);
    }
}

#[test]
fn recomputed_up_projections_lie_in_the_backward_graph() {
    let te = GraphImpl::TransformerEngine;
    let cfg = with_graphs(recomputing(deepseek(), &["mla_up_proj", "layernorm"]), te, &[Attn]);
    let got = story(&cfg, 0, 0);
    // Latent norms and up-projections before attention's backward; the input norm before the first gradient of a
    // down-projection.
    let up = "rmsnorm_fwd rmsnorm_fwd gemm gemm mla_rope_fwd";
    let repeated = MLA_B
        .replace("gemm gemm attention_bwd", &format!("gemm gemm {up} attention_bwd"))
        .replace("join_columns gemm", "join_columns rmsnorm_fwd gemm");
    let unordered = |s: &str| {
        let mut words: Vec<&str> = s.split_whitespace().collect();
        words.sort_unstable();
        words.join(" ")
    };
    let last = &got[got.len() - 1];
    assert!(last.starts_with(&format!("G gemm gemm {up} attention_bwd mla_rope_bwd")), "{last}");
    assert_eq!(unordered(&last[2..]), unordered(&repeated));
}

#[test]
fn arms_of_latent_attention_are_equal() {
    let te = GraphImpl::TransformerEngine;
    let up = recomputing(deepseek(), &["mla_up_proj", "layernorm", "mlp", "moe_act", "shared_experts"]);
    both_arms(&with_graphs(up, te, &[Attn, MoeRouter, MoePreprocess]));
    both_arms(&with_graphs(deepseek(), te, &[Attn, MoeRouter, MoePreprocess]));
    let mut kimi = with_graphs(deepseek(), te, &[Attn, MoeRouter, MoePreprocess]);
    if let Some(moe) = &mut kimi.model.moe {
        (moe.num_groups, moe.group_topk, moe.dispatcher) = (1, 1, Dispatcher::Flex);
    }
    (kimi.model.attention_dropout, kimi.model.hidden_dropout) = (0.1, 0.1);
    both_arms(&kimi);
    let mut split = with_graphs(deepseek(), te, &[Attn, MoeRouter]);
    (split.parallel.tp, split.parallel.sequence_parallel, split.parallel.cp) = (2, true, 2);
    split.identity.num_gpus = 8;
    both_arms(&split);
    split.parallel.sequence_parallel = false;
    both_arms(&split);
}

/// With `depths` depths of multi-token prediction.
fn predicting(mut cfg: RunConfig, depths: usize) -> RunConfig {
    cfg.model.mtp_num_layers = depths;
    cfg
}

#[test]
fn arms_of_multi_token_prediction_are_equal_and_its_layers_are_captured() {
    let te = GraphImpl::TransformerEngine;
    let cfg = with_graphs(predicting(deepseek(), 2), te, &[Attn, MoeRouter, MoePreprocess]);
    both_arms(&cfg);
    // Layers 2 and 3 are those of the two depths.
    for layer in [2, 3] {
        let story = story(&cfg, 1, layer);
        assert!(story.iter().any(|s| s.starts_with(&format!("G {MLA_F}"))), "{story:?}");
        assert!(story.iter().any(|s| s.starts_with("G ") && s.ends_with(MLA_B)), "{story:?}");
    }
    let program = program(&cfg);
    assert!(program.launches.iter().all(|l| l.part != Part::Mtp || l.layer.is_none()));
    // One loss a depth and micro-batch beside the main one.
    let losses = program.launches.iter().filter(|l| l.op.name() == "cross_entropy").count();
    assert_eq!(losses, 2 * 3);

    let mut split = predicting(with_graphs(deepseek(), te, &[Attn]), 1);
    (split.parallel.tp, split.parallel.sequence_parallel, split.parallel.cp) = (2, true, 2);
    split.identity.num_gpus = 8;
    both_arms(&split);
    split.parallel.sequence_parallel = false;
    both_arms(&split);
    both_arms(&with_graphs(predicting(padded_latent(), 1), GraphImpl::Local, &[FullIteration]));
}

/// Static rows, so that all can be one graph.
fn padded_latent() -> RunConfig {
    let mut cfg = padded();
    let of = deepseek();
    (cfg.model.mla, cfg.model.rope_scaling) = (of.model.mla, of.model.rope_scaling);
    cfg
}

/// Depths that share one layer hold its weights once, and both add to their gradient.
#[test]
fn repeated_depths_share_their_weights() {
    let mut own = predicting(dense(), 2);
    own.model.mtp_layers = vec![LayerKind::AttnOnly, LayerKind::MlpOnly];
    let mut shared = own.clone();
    shared.model.mtp_repeated = true;
    let weights = |cfg: &RunConfig, of: &str| {
        let program = program(cfg);
        let named = |b: &&crate::program::Buffer| {
            b.view_of.is_some() && b.lifetime == crate::program::Lifetime::Weight && b.name.starts_with(of)
        };
        program.buffers.iter().filter(named).count()
    };
    // Layers 0 and 1 are the decoder's; 2 and 3 one depth's, 4 and 5 another's.
    assert_eq!([weights(&own, "layer4"), weights(&own, "mtp")], [3, 8]);
    assert_eq!([weights(&shared, "layer4"), weights(&shared, "mtp")], [0, 4]);
    for cfg in [own, shared] {
        both_arms(&with_graphs(cfg, GraphImpl::TransformerEngine, &[Attn]));
    }
}

/// The last stage of a pipeline holds an embedding of its own for the depths; the first has no depth.
#[test]
fn depths_lie_with_the_loss() {
    let last = staged(predicting(deepseek(), 1), 2, 1, 1, 3);
    both_arms_without_loss(&with_graphs(last.clone(), GraphImpl::TransformerEngine, &[Attn]));
    let parts = |cfg: &RunConfig, part| program(cfg).launches.iter().filter(|l| l.part == part).count();
    assert!(parts(&last, Part::Mtp) > 0 && parts(&last, Part::Embedding) > 0);
    let first = staged(predicting(deepseek(), 1), 2, 1, 0, 3);
    assert_eq!(parts(&first, Part::Mtp), 0);
}

pub(super) fn both_arms_without_loss(cfg: &RunConfig) {
    let plan = plan(program(cfg), &cfg.graph, cfg.seed).unwrap();
    let mut executor = CpuExecutor::new(plan, None, None).unwrap();
    let eager = three_steps(&mut executor, Arm::Eager).unwrap();
    executor.capture().unwrap();
    assert_eq!(eager, three_steps(&mut executor, Arm::Graph).unwrap());
}

/// The bias of every expert layer moves by the rate, against the counts; that of a dense layer stays.
#[test]
fn expert_biases_move_once_a_step() {
    let cfg = deepseek();
    let program = program(&cfg);
    let find = |name: &str| {
        let at = program.buffers.iter().position(|b| b.name == name).unwrap();
        crate::program::BufId(at as u32)
    };
    let (bias, total) = (find("moe.expert_bias"), find("moe.tokens_per_expert"));
    let mut storage = crate::device::cpu::Storage::new(&program, 5).unwrap();
    storage.reset(&program).unwrap();
    let mut counts = vec![0.0; 8];
    for l in &program.launches {
        if l.op.name() == "expert_bias_update" {
            counts = storage.read(&program, total)[8..].to_vec();
        }
        storage.run(&program, l).unwrap();
    }
    // Two micro-batches of 16 tokens, two experts each: a mean of 8.
    assert_eq!(counts.iter().sum::<f32>(), 64.0);
    let want = counts.iter().map(|n| (8.0 - n).signum() * if *n == 8.0 { 0.0 } else { 1e-3 });
    let bias = storage.read(&program, bias);
    assert_eq!(bias[..8], [0.0; 8]);
    assert_eq!(bias[8..].to_vec(), want.collect::<Vec<f32>>());
    assert!(bias.iter().any(|b| *b != 0.0));
}

#[test]
fn arms_are_equal_with_recompute() {
    let te = GraphImpl::TransformerEngine;
    let scope = &[Attn, MoeRouter, MoePreprocess];
    let mut cases = vec![
        with_graphs(recomputing(dense(), &["mlp", "core_attn"]), te, &[Attn, Mlp]),
        with_graphs(recomputing(dense(), &["mlp", "core_attn"]), te, &[Mlp]),
        with_graphs(recomputing(moe(Dispatcher::Flex), &["moe"]), te, &[Attn]),
        with_graphs(recomputing(padded(), &["moe", "moe_act", "layernorm"]), te, &[Moe]),
        with_graphs(recomputing(hybrid(), &["mlp", "layernorm", "moe_act"]), te, &[Attn, Mamba, MoeRouter]),
    ];
    let shared = recomputing(
        with_shared_expert(moe(Dispatcher::Alltoall)),
        &["layernorm", "shared_experts", "moe_act", "core_attn"],
    );
    cases.push(with_graphs(shared, te, scope));
    for (base, method, layers) in [(dense(), "block", 1), (padded(), "uniform", 2), (dense(), "uniform", 1)] {
        let mut cfg = with_graphs(base, GraphImpl::Local, &[FullIteration]);
        cfg.recompute.granularity = Some("full".into());
        (cfg.recompute.method, cfg.recompute.num_layers) = (Some(method.into()), Some(layers));
        cases.push(cfg);
    }
    for mut cfg in cases {
        (cfg.model.attention_dropout, cfg.model.hidden_dropout) = (0.1, 0.1);
        both_arms(&cfg);
    }
}

#[test]
fn each_launch_left_out_of_the_graphs_is_noticed() {
    let te = |cfg, scope: &[Scope]| with_graphs(cfg, GraphImpl::TransformerEngine, scope);
    for (cfg, least) in [
        (te(dense(), &[Attn, Mlp]), 21),
        (te(moe(Dispatcher::Alltoall), &[Attn, MoeRouter, MoePreprocess]), 21),
        (te(moe(Dispatcher::Flex), &[MoeRouter, MoePreprocess]), 8),
        (te(padded(), &[Moe]), 21),
        (with_graphs(padded(), GraphImpl::Local, &[FullIteration]), 80),
    ] {
        each_is_noticed(&cfg, least);
    }
}

fn each_is_noticed(cfg: &RunConfig, least: usize) {
    let plan = plan(program(cfg), &cfg.graph, cfg.seed).unwrap();
    let arm = plan.graph.clone().unwrap();
    // The first segment of each graph is the one that is recorded.
    let mut seen = Vec::new();
    let captured = arm
        .segments
        .iter()
        .filter(|s| {
            s.graph.is_some_and(|g| {
                !seen.contains(&g) && {
                    seen.push(g);
                    true
                }
            })
        })
        .flat_map(|s| s.launches.clone());
    let mut checked = 0;
    for i in captured.collect::<Vec<_>>() {
        let mut executor = CpuExecutor::new(plan.clone(), None, Some(i)).unwrap();
        assert!(
            matches!(executor.capture(), Err(DeviceError::Unequal(_))),
            "launch {i} ({}) was not missed",
            arm.program.launches[i].op.name()
        );
        checked += 1;
    }
    assert!(checked >= least, "{checked}");
}

/// Runs one step launch by launch; the first launch that leaves a value that is not finite is named.
#[test]
fn every_launch_writes_finite_values() {
    let mut split = moe(Dispatcher::Alltoall);
    (split.parallel.tp, split.parallel.sequence_parallel, split.parallel.cp) = (2, true, 2);
    split.identity.num_gpus = 8;
    for (what, mut cfg) in [
        ("dense", dense()),
        ("alltoall", moe(Dispatcher::Alltoall)),
        ("flex", moe(Dispatcher::Flex)),
        ("padded", padded()),
        ("split", split),
        ("hybrid", hybrid()),
        ("delta_net", delta_net()),
        ("deepseek", deepseek()),
        ("multi-token prediction", predicting(deepseek(), 2)),
        ("between two stages", staged(dense(), 3, 1, 1, 3)),
        ("last stage of two chunks", staged(dense(), 2, 2, 1, 3)),
    ] {
        cfg.model.attention_dropout = 0.1;
        cfg.model.hidden_dropout = 0.1;
        let program = program(&cfg);
        let mut storage = crate::device::cpu::Storage::new(&program, 5).unwrap();
        storage.reset(&program).unwrap();
        for (i, l) in program.launches.iter().enumerate() {
            storage.run(&program, l).unwrap();
            for (spec, id) in l.op.args().iter().zip(&l.args) {
                let bad = storage.read(&program, *id).iter().filter(|v| !v.is_finite()).count();
                assert_eq!(
                    bad,
                    0,
                    "{what}: launch {i} {:?} leaves {bad} of {} values of {} not finite",
                    l.op,
                    spec.len(),
                    spec.name
                );
            }
        }
    }
}
