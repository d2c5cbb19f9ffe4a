//! What graphs hold, of whole command lines: segments of a layer as written here by hand, for the scopes that
//! `src/capture/tests.rs` does not write out in full. `G` is a graph, `e` eager; ops by name, staging copies as `copy`.

use crate::common::{Outcome, outcome};
use mbperf::capture::{RunPlan, plan};
use mbperf::workloads::{self, share::RankShare};
use std::collections::BTreeMap;

fn planned(line: &str) -> RunPlan {
    let Outcome::Ok(resolved) = outcome(line, &BTreeMap::new()) else { panic!("{line} is refused") };
    let cfg = &resolved.config;
    plan(workloads::build(cfg, &RankShare::of(cfg).unwrap()).unwrap(), &cfg.graph, cfg.seed).unwrap()
}

/// One line a segment that holds launches of layer 1 in the first micro-batch.
fn story(line: &str) -> Vec<String> {
    let plan = planned(line);
    let arm = plan.graph.unwrap();
    let of_segment = |s: &mbperf::capture::Segment| {
        let own = arm.program.launches[s.launches.clone()]
            .iter()
            .filter(|l| l.layer == Some(1) && l.micro_batch == 0);
        let names: Vec<&str> = own.map(|l| l.op.name()).collect();
        (!names.is_empty())
            .then(|| format!("{} {}", if s.graph.is_some() { 'G' } else { 'e' }, names.join(" ")))
    };
    arm.segments.iter().filter_map(of_segment).collect()
}

const LLAMA: &str = "-m llama -mr llama3_8b -g h100 -cp 1 --num_layers 3 -sl 512 --max_microbatches 2";
/// The recipe's dispatcher: flex.
const QWEN: &str = "-m qwen -mr qwen3_30b_a3b -g h100 --num_layers 3 -sl 512 --max_microbatches 2";
const ALLTOALL: &str = "model.moe_token_dispatcher_type=alltoall";
const PADDED: &str = "model.moe_token_dispatcher_type=alltoall --use_tokendrop true";

const ATTN_F: &str = "rmsnorm_fwd gemm qkv_rope_fwd attention_fwd gemm";
const ATTN_B: &str = "gemm gemm attention_bwd qkv_rope_bwd gemm gemm rmsnorm_bwd";
/// With the gradients of the q and k norms.
const QWEN_ATTN_B: &str = "gemm gemm attention_bwd qkv_rope_bwd column_sum gemm gemm rmsnorm_bwd";
const MLP_F: &str = "rmsnorm_fwd gemm swiglu_fwd gemm";
const MLP_B: &str = "gemm gemm swiglu_bwd gemm gemm rmsnorm_bwd";
const ROUTER_F: &str = "rmsnorm_fwd gemm router_fwd";
const ROUTER_B: &str = "router_bwd gemm gemm rmsnorm_bwd";
/// Between the sort and the combination, dropless by flex: sized on the host, one permutation.
const FLEX_F: &str = "counts_to_host gather_rows grouped_gemm_nt swiglu_fwd grouped_gemm_nt combine_rows";
/// Its gradients of the normed tokens and of the probabilities come with the combination, outside of any graph.
const FLEX_B: &str =
    "gather_rows grouped_gemm_nn grouped_gemm_tn swiglu_bwd grouped_gemm_tn grouped_gemm_nn combine_rows";
/// Dropless by alltoall, behind the first permutation: counts to the host, rows and probabilities sent, sorted by expert.
const ALLTOALL_F: &str = "counts_to_host stand_in_all_to_all stand_in_all_to_all chunk_map gather_rows grouped_gemm_nt \
                          swiglu_fwd grouped_gemm_nt gather_rows stand_in_all_to_all combine_rows";
const ALLTOALL_B: &str = "gather_rows stand_in_all_to_all gather_rows grouped_gemm_nn grouped_gemm_tn swiglu_bwd \
                          grouped_gemm_tn grouped_gemm_nn gather_rows stand_in_all_to_all stand_in_all_to_all";
/// Padded to the capacity: nothing is asked of the host, the experts' products have one size.
const PADDED_F: &str = "moe_sort gather_rows stand_in_all_to_all stand_in_all_to_all chunk_map gather_rows gemm swiglu_fwd \
                        gemm gather_rows stand_in_all_to_all combine_rows";
const PADDED_B: &str = "gather_rows stand_in_all_to_all gather_rows gemm gemm swiglu_bwd gemm gemm gather_rows \
                        stand_in_all_to_all stand_in_all_to_all combine_rows";

#[test]
fn dense_mlp_alone_stages_what_attention_leaves() {
    let want = [
        format!("e {ATTN_F} copy"),
        format!("G {MLP_F}"),
        "e copy".into(),
        format!("G {MLP_B}"),
        format!("e {ATTN_B}"),
    ];
    assert_eq!(story(&format!("{LLAMA} --cuda_graph_scope mlp")), want);
}

#[test]
fn flex_attention_alone_leaves_the_router_eager() {
    let want = [
        "e copy".into(),
        format!("G {ATTN_F}"),
        format!("e {ROUTER_F} moe_sort {FLEX_F}"),
        format!("e {FLEX_B} {ROUTER_B} copy"),
        format!("G {QWEN_ATTN_B}"),
    ];
    assert_eq!(story(&format!("{QWEN} --cuda_graph_scope attn")), want);
}

#[test]
fn flex_router_alone_takes_three_gradients() {
    let want = [
        format!("e {ATTN_F} copy"),
        format!("G {ROUTER_F}"),
        format!("e moe_sort {FLEX_F}"),
        format!("e {FLEX_B} copy copy copy"),
        format!("G {ROUTER_B}"),
        format!("e {QWEN_ATTN_B}"),
    ];
    assert_eq!(story(&format!("{QWEN} --cuda_graph_scope moe_router")), want);
}

#[test]
fn flex_preprocess_is_the_sort_alone() {
    for (scope, captured, eager) in [("", "", "moe_sort "), (",moe_preprocess", " moe_sort", "")] {
        let want = [
            "e copy".into(),
            format!("G {ATTN_F} {ROUTER_F}{captured}"),
            format!("e {eager}{FLEX_F}"),
            format!("e {FLEX_B} copy copy copy"),
            format!("G {ROUTER_B} {QWEN_ATTN_B}"),
        ];
        assert_eq!(story(&format!("{QWEN} --cuda_graph_scope attn,moe_router{scope}")), want);
    }
}

#[test]
fn alltoall_preprocess_without_attention() {
    let want = [
        format!("e {ATTN_F} copy"),
        format!("G {ROUTER_F} moe_sort gather_rows"),
        format!("e {ALLTOALL_F}"),
        format!("e {ALLTOALL_B} copy copy copy"),
        format!("G combine_rows {ROUTER_B}"),
        format!("e {QWEN_ATTN_B}"),
    ];
    assert_eq!(story(&format!("{QWEN} {ALLTOALL} --cuda_graph_scope moe_router,moe_preprocess")), want);
}

#[test]
fn padded_experts_are_captured_forward_and_backward() {
    let line = format!("{QWEN} {PADDED} --cuda_graph_impl transformer_engine");
    let want = [
        format!("e {ATTN_F} copy"),
        format!("G {ROUTER_F} {PADDED_F}"),
        "e copy".into(),
        format!("G {PADDED_B} {ROUTER_B}"),
        format!("e {QWEN_ATTN_B}"),
    ];
    assert_eq!(story(&format!("{line} --cuda_graph_scope moe")), want);
    // An empty scope is the whole layer.
    let want = [
        "e copy".into(),
        format!("G {ATTN_F} {ROUTER_F} {PADDED_F}"),
        "e copy".into(),
        format!("G {PADDED_B} {ROUTER_B} {QWEN_ATTN_B}"),
    ];
    assert_eq!(story(&format!("{line} model.cuda_graph_scope=[]")), want);
}

/// Forward and backward of every micro-batch and the reduction of the gradients are one graph; before it are the step's
/// tokens, after it clipping and the optimizer.
#[test]
fn a_full_iteration_is_all_between_the_tokens_and_the_optimizer() {
    let full = "--cuda_graph_impl local --cuda_graph_scope full_iteration";
    for (line, layer) in [
        (format!("{LLAMA} {full}"), format!("{ATTN_F} {MLP_F} {MLP_B} {ATTN_B}")),
        (
            format!("{QWEN} {PADDED} {full}"),
            format!("{ATTN_F} {ROUTER_F} {PADDED_F} {PADDED_B} {ROUTER_B} {QWEN_ATTN_B}"),
        ),
    ] {
        assert_eq!(story(&line), [format!("G {layer}")]);
        let arm = planned(&line).graph.unwrap();
        assert_eq!(arm.segments.iter().map(|s| s.graph.is_some()).collect::<Vec<_>>(), [false, true, false]);
        let names = |at: usize| -> Vec<&str> {
            arm.program.launches[arm.segments[at].launches.clone()].iter().map(|l| l.op.name()).collect()
        };
        let before = ["step_begin", "token_gen", "micro_batch_set", "zero"];
        assert!(names(0).iter().all(|n| before.contains(n)), "{:?}", names(0));
        let inside = names(1);
        let count = |wanted: &str| inside.iter().filter(|n| **n == wanted).count();
        assert_eq!(["embedding_fwd", "cross_entropy", "embedding_bwd"].map(count), [2; 3]);
        // The reduction over data-parallel ranks, a stand-in, is the last of the graph.
        assert_eq!(inside.last(), Some(&"stand_in_in_place"));
        assert!(["token_gen", "adam", "counts_to_host"].map(count) == [0; 3]);
        let after = names(2);
        let of_optimizer = ["grad_norm_partial", "grad_norm_finish", "adam", "stand_in_in_place", "step_end"];
        assert!(after.iter().all(|n| of_optimizer.contains(n)) && after.contains(&"adam"), "{after:?}");
    }
}
