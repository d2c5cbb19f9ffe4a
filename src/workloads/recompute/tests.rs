//! The same bits with and without recompute, the memory it saves, and where the repeated launches stand.

use super::*;
use crate::capture;
use crate::config::{LayerKind, RunConfig};
use crate::device::cpu::{CpuExecutor, Storage};
use crate::device::{Arm, Executor};
use crate::program::memory::{self, lifetimes};
use crate::workloads::testing::{
    deepseek, deepseek_v4, delta_net, dense, hybrid, moe, padded, program, staged,
};

fn selective(mut cfg: RunConfig, modules: &[&str]) -> RunConfig {
    cfg.recompute.granularity = Some("selective".into());
    cfg.recompute.modules = modules.iter().map(|m| m.to_string()).collect();
    cfg
}

fn full(mut cfg: RunConfig, method: &str, layers: usize) -> RunConfig {
    cfg.recompute.granularity = Some("full".into());
    cfg.recompute.method = Some(method.into());
    cfg.recompute.num_layers = Some(layers);
    cfg
}

fn with_dropout(mut cfg: RunConfig) -> RunConfig {
    (cfg.model.attention_dropout, cfg.model.hidden_dropout) = (0.1, 0.1);
    cfg
}

fn shared(dispatcher: Dispatcher) -> RunConfig {
    let mut cfg = moe(dispatcher);
    if let Some(moe) = &mut cfg.model.moe {
        moe.shared_expert_intermediate_size = Some(48);
    }
    cfg
}

fn split(mut cfg: RunConfig) -> RunConfig {
    (cfg.parallel.tp, cfg.parallel.sequence_parallel, cfg.parallel.cp) = (2, true, 2);
    cfg.identity.num_gpus = 4 * cfg.parallel.ep;
    cfg
}

/// Multi-latent attention, and a depth of multi-token prediction.
fn predicting() -> RunConfig {
    let mut cfg = deepseek();
    cfg.model.mtp_num_layers = 1;
    cfg
}

fn repeated(program: &Program) -> Vec<&Launch> {
    program.launches.iter().filter(|l| l.recompute).collect()
}

fn names(program: &Program) -> Vec<&'static str> {
    repeated(program).iter().map(|l| l.op.name()).collect()
}

/// Loss bits of two steps; then gradients, weights and moments.
fn two_steps(cfg: &RunConfig) -> (Vec<u32>, Vec<(String, u64)>) {
    let plan = capture::plan(program(cfg), &cfg.graph, cfg.seed).unwrap();
    let mut executor = CpuExecutor::new(plan, None, None).unwrap();
    executor.reset().unwrap();
    let mut losses = Vec::new();
    for _ in 0..2 {
        let step = executor.submit(Arm::Eager).unwrap();
        losses.extend(executor.wait(step).unwrap().loss.map(f32::to_bits));
    }
    (losses, executor.digest().unwrap())
}

/// One step in which every buffer is spoilt as soon as the memory planner may give its bytes away.
fn spoilt_step(cfg: &RunConfig) -> Vec<u64> {
    let program = program(cfg);
    let mut ends: Vec<Vec<BufId>> = vec![Vec::new(); program.launches.len()];
    for (id, intervals) in lifetimes(&program).iter().enumerate() {
        for &(_, last) in intervals {
            ends[last].push(BufId(id as u32));
        }
    }
    let mut storage = Storage::new(&program, cfg.seed).unwrap();
    storage.reset(&program).unwrap();
    for (launch, ends) in program.launches.iter().zip(ends) {
        storage.run(&program, launch).unwrap();
        ends.into_iter().for_each(|id| storage.spoil(&program, id));
    }
    program.digest.iter().map(|&id| storage.digest(&program, id)).collect()
}

#[test]
fn losses_and_gradients_have_the_same_bits_as_without() {
    let mut latent = shared(Dispatcher::Flex);
    if let Some(moe) = &mut latent.model.moe {
        (moe.latent_size, moe.shared_expert_gate) = (Some(24), true);
    }
    let cases: [(&str, RunConfig, &[&[&str]]); 12] = [
        (
            "predicting",
            predicting(),
            &[&["mla_up_proj"], &["mla_up_proj", "core_attn", "mlp", "moe_act"], &["mla_up_proj", "moe"]],
        ),
        (
            "latent attention",
            deepseek(),
            &[&["mla_up_proj"], &["mla_up_proj", "core_attn", "layernorm", "mlp", "moe"]],
        ),
        ("split latent attention", split(deepseek()), &[&["mla_up_proj", "core_attn", "layernorm"]]),
        (
            "latent experts",
            latent,
            &[&["layernorm", "moe_act", "shared_experts"], &["moe", "shared_experts"]],
        ),
        ("dense", dense(), &[&["core_attn"], &["mlp"], &["core_attn", "mlp"]]),
        (
            "alltoall",
            moe(Dispatcher::Alltoall),
            &[&["layernorm"], &["moe_act"], &["moe"], &["core_attn", "layernorm", "moe", "moe_act"]],
        ),
        ("flex", moe(Dispatcher::Flex), &[&["layernorm", "moe_act"], &["moe"]]),
        ("padded", padded(), &[&["moe_act", "layernorm"], &["moe"]]),
        (
            "shared",
            shared(Dispatcher::Alltoall),
            &[&["shared_experts"], &["shared_experts", "moe", "layernorm"]],
        ),
        (
            "split",
            split(shared(Dispatcher::Alltoall)),
            &[&["core_attn", "shared_experts", "moe_act"], &["moe"]],
        ),
        ("delta net", delta_net(), &[&["gdn_norm_out"], &["gdn_norm_out", "core_attn", "moe"]]),
        ("hybrid", hybrid(), &[&["core_attn", "mlp", "moe", "layernorm"]]),
    ];
    for (what, cfg, modules) in cases {
        let cfg = with_dropout(cfg);
        let plain = two_steps(&cfg);
        assert_eq!(plain.0.len(), 2);
        assert!(plain.0.iter().all(|b| f32::from_bits(*b).is_finite()));
        let spoilt = spoilt_step(&cfg);
        let selected = modules.iter().map(|m| (m.join(","), selective(cfg.clone(), m)));
        let whole = [("block", 1), ("uniform", 1), ("uniform", 2)]
            .map(|(method, n)| (format!("{method} {n}"), full(cfg.clone(), method, n)));
        for (how, cfg) in selected.chain(whole) {
            assert!(!repeated(&program(&cfg)).is_empty(), "{what} {how} repeats nothing");
            assert_eq!(two_steps(&cfg), plain, "{what} {how}");
            assert_eq!(spoilt_step(&cfg), spoilt, "{what} {how}: read after the planner gave it away");
        }
    }
}

/// Streams computed anew from the beginning of a block: the same bits, whatever the blocks are, and less memory.
#[test]
fn residual_streams_have_the_same_bits_as_without() {
    let mut cfg = deepseek_v4();
    cfg.model.layers = vec![LayerKind::Moe; 4];
    cfg.model.mtp_num_layers = 1;
    if let Some(kv) = &mut cfg.model.shared_kv {
        kv.compress_ratios = vec![0, 4, 128, 4, 0];
    }
    let (plain, spoilt, before) = (two_steps(&cfg), spoilt_step(&cfg), planned(&cfg).0);
    let modules: [&[&str]; 3] = [&["mla_up_proj"], &["mhc"], &["mhc", "mla_up_proj", "layernorm", "moe_act"]];
    let selected = modules.iter().flat_map(|m| {
        [None, Some(1), Some(3)].map(|size| {
            let mut cfg = selective(cfg.clone(), m);
            cfg.recompute.mhc_layers = size;
            cfg
        })
    });
    let whole = [("block", 1), ("uniform", 2)].map(|(method, n)| full(cfg.clone(), method, n));
    for cfg in selected.chain(whole) {
        let what = format!("{:?}", cfg.recompute);
        assert!(!repeated(&program(&cfg)).is_empty(), "{what}");
        assert_eq!(two_steps(&cfg), plain, "{what}");
        assert_eq!(spoilt_step(&cfg), spoilt, "{what}");
        assert!(planned(&cfg).0 < before, "{what}: {} not below {before}", planned(&cfg).0);
    }
    // Each sublayer's sum and the streams after it, but those at the ends of the blocks; the depth is a block of its own.
    let mut blocks = selective(cfg, &["mhc"]);
    blocks.recompute.mhc_layers = Some(2);
    let program = program(&blocks);
    let count = |name: &str| names(&program).iter().filter(|n| **n == name).count();
    assert_eq!([count("hyper_pre_fwd"), count("hyper_post_fwd")], [2 * 10, 2 * (4 * 2 - 2 + 1)]);
}

#[test]
fn micro_batches_in_flight_repeat_their_own_launches() {
    let cases = [
        ("first stage", staged(dense(), 2, 1, 0, 4)),
        ("last stage of two chunks", staged(dense(), 2, 2, 1, 3)),
        ("experts", staged(shared(Dispatcher::Alltoall), 2, 1, 0, 3)),
    ];
    for (what, cfg) in cases {
        let cfg = with_dropout(cfg);
        let (plain, spoilt) = (two_steps(&cfg), spoilt_step(&cfg));
        let modules = selective(cfg.clone(), &["core_attn", "mlp", "moe", "layernorm"]);
        for cfg in [full(cfg.clone(), "block", 1), full(cfg, "uniform", 2), modules] {
            assert!(!repeated(&program(&cfg)).is_empty());
            assert_eq!(two_steps(&cfg), plain, "{what} {:?}", cfg.recompute);
            assert_eq!(spoilt_step(&cfg), spoilt, "{what} {:?}", cfg.recompute);
        }
    }
}

#[test]
fn a_bare_stack_has_the_same_bits_as_without() {
    for mut cfg in [with_dropout(dense()), shared(Dispatcher::Flex), hybrid()] {
        cfg.stack_only = true;
        cfg.batch.num_microbatches = 1;
        let (plain, spoilt) = (two_steps(&cfg), spoilt_step(&cfg));
        for cfg in [full(cfg.clone(), "uniform", 1), selective(cfg, &["core_attn", "mlp", "moe"])] {
            assert_eq!((two_steps(&cfg), spoilt_step(&cfg)), (plain.clone(), spoilt.clone()));
        }
    }
}

#[test]
fn repeated_launches_are_their_originals_in_the_backward_pass() {
    let cfg = with_dropout(selective(shared(Dispatcher::Alltoall), &["moe", "core_attn"]));
    let program = program(&cfg);
    for (i, l) in program.launches.iter().enumerate().filter(|(_, l)| l.recompute) {
        assert_eq!(l.pass, Pass::Backward);
        let original = program.launches[..i].iter().find(|o| {
            !o.recompute
                && o.pass == Pass::Forward
                && (o.layer, o.part, o.micro_batch) == (l.layer, l.part, l.micro_batch)
                && o.args == l.args
                && format!("{:?}", o.op) == format!("{:?}", l.op)
        });
        assert!(original.is_some(), "launch {i} {:?} has no original", l.op);
    }
    // The dispatch runs again with the experts, its copy of the counts included; the residual add does not.
    let again = names(&program);
    assert!(again.contains(&"counts_to_host") && again.contains(&"stand_in_all_to_all"), "{again:?}");
    assert!(!again.contains(&"dropout_add_fwd"), "{again:?}");
}

#[test]
fn each_module_repeats_its_launches_once_a_layer_and_micro_batch() {
    let of = |cfg: RunConfig, modules: &[&str]| {
        let program = program(&selective(cfg, modules));
        let first: Vec<&str> = repeated(&program)
            .iter()
            .filter(|l| (l.micro_batch, l.layer) == (0, Some(0)))
            .map(|l| l.op.name())
            .collect();
        assert_eq!(names(&program).len(), 4 * first.len(), "two layers, two micro-batches");
        first.join(" ")
    };
    assert_eq!(of(dense(), &["core_attn"]), "attention_fwd");
    assert_eq!(of(deepseek(), &["mla_up_proj"]), "rmsnorm_fwd rmsnorm_fwd gemm gemm mla_rope_fwd");
    assert_eq!(of(dense(), &["mlp"]), "rmsnorm_fwd gemm swiglu_fwd gemm");
    // Upstream fuses the norms of a dense layer with the products behind them.
    assert_eq!(of(dense(), &["layernorm", "moe", "moe_act", "shared_experts"]), "");
    assert_eq!(of(moe(Dispatcher::Flex), &["layernorm"]), "rmsnorm_fwd");
    assert_eq!(of(moe(Dispatcher::Flex), &["moe_act"]), "swiglu_fwd");
    assert_eq!(of(moe(Dispatcher::Flex), &["mlp"]), "");
    assert_eq!(of(shared(Dispatcher::Flex), &["shared_experts"]), "gemm swiglu_fwd gemm");
    assert_eq!(
        of(moe(Dispatcher::Flex), &["moe"]),
        "gemm router_fwd moe_sort counts_to_host gather_rows grouped_gemm_nt swiglu_fwd grouped_gemm_nt combine_rows"
    );
    // Nested: the experts' activation is dropped by the repeated forward too, and computed a third time.
    assert_eq!(
        of(moe(Dispatcher::Flex), &["moe", "moe_act"]),
        "gemm router_fwd moe_sort counts_to_host gather_rows grouped_gemm_nt swiglu_fwd grouped_gemm_nt combine_rows swiglu_fwd"
    );
}

#[test]
fn full_recompute_repeats_the_layers_that_the_method_names() {
    let mut cfg = dense();
    cfg.model.layers = vec![LayerKind::Dense; 5];
    let layers = |cfg: &RunConfig| {
        let program = program(cfg);
        let mut seen: Vec<usize> =
            repeated(&program).iter().filter(|l| l.micro_batch == 0).filter_map(|l| l.layer).collect();
        seen.dedup();
        seen
    };
    assert_eq!(layers(&full(cfg.clone(), "block", 2)), [1, 0]);
    assert_eq!(layers(&full(cfg.clone(), "block", 9)), [4, 3, 2, 1, 0]);
    assert!(layers(&full(cfg.clone(), "block", 0)).is_empty());
    // Groups 0..2, 2..4 and 4..5, each forward before its own backward.
    assert_eq!(layers(&full(cfg.clone(), "uniform", 2)), [4, 2, 3, 0, 1]);
    // A depth of multi-token prediction is one more region under `uniform`, and none under `block`.
    let mut predicting = deepseek();
    predicting.model.mtp_num_layers = 1;
    let depth = |method: &str| {
        let program = program(&full(predicting.clone(), method, 1));
        repeated(&program).iter().any(|l| l.part == crate::program::Part::Mtp)
    };
    assert!(depth("uniform") && !depth("block"));
    let mut share = RankShare::of(&cfg).unwrap();
    share.chunks = vec![0..3, 3..5];
    assert_eq!(groups(&full(cfg.clone(), "block", 2), &share), [0..1, 1..2, 3..4, 4..5]);
    assert_eq!(groups(&full(cfg.clone(), "uniform", 2), &share), [0..2, 2..3, 3..5]);
    assert!(groups(&cfg, &share).is_empty());
    // A depth of multi-token prediction behind the chunks is repeated whatever the number of layers.
    cfg.model.mtp_num_layers = 1;
    assert_eq!(layers(&full(cfg, "block", 1)), [5, 0]);
}

/// Planned arena and least possible bytes of the eager arm.
fn planned(cfg: &RunConfig) -> (usize, usize) {
    let program = program(cfg);
    let plan = memory::plan(&program, &vec![false; program.launches.len()]);
    (plan.arena_bytes, plan.live_peak_bytes)
}

fn bytes(cfg: &RunConfig, what: &[&str]) -> usize {
    let program = program(cfg);
    let of = |n: &&str| program.buffers.iter().find(|b| b.name == format!("l0.{n}")).unwrap().bytes();
    what.iter().map(of).sum()
}

#[test]
fn planned_memory_falls_by_what_the_other_layers_drop() {
    const LAYERS: usize = 6;
    let mut dense = dense();
    dense.model.layers = vec![LayerKind::Dense; LAYERS];
    let mut experts = shared(Dispatcher::Alltoall);
    experts.model.layers = vec![LayerKind::Moe; LAYERS];
    let mut latent = deepseek();
    latent.model.layers = vec![LayerKind::Dense; LAYERS];
    let cases: [(&RunConfig, RunConfig, &[&str]); 7] = [
        (
            &latent,
            selective(latent.clone(), &["mla_up_proj"]),
            &["attn.q", "attn.kv", "attn.k", "attn.v", "attn.q_norm.out", "attn.kv_norm.out"],
        ),
        (&dense, selective(dense.clone(), &["mlp"]), &["mlp.norm.out", "mlp.gate_up", "mlp.act"]),
        (&experts, selective(experts.clone(), &["layernorm"]), &["moe.norm.out"]),
        (&experts, selective(experts.clone(), &["moe_act"]), &["moe.act"]),
        (
            &experts,
            selective(experts.clone(), &["shared_experts"]),
            &["moe.shared.gate_up", "moe.shared.act"],
        ),
        (
            &experts,
            selective(experts.clone(), &["moe"]),
            &["moe.sorted", "moe.gate_up", "moe.act", "moe.shared.gate_up", "moe.shared.act", "moe.scores"],
        ),
        (
            &dense,
            full(dense.clone(), "uniform", 1),
            &[
                "mlp.norm.out",
                "mlp.gate_up",
                "mlp.act",
                "attn.norm.out",
                "attn.q",
                "attn.k",
                "attn.v",
                "attn.o",
                "attn.residual_out",
            ],
        ),
    ];
    for (plain, cfg, dropped) in cases {
        let (before, after) = (planned(plain), planned(&cfg));
        // The layer that is at work holds its own values again, and its neighbour may.
        let least = (LAYERS - 2) * bytes(plain, dropped);
        assert!(
            before.1 - after.1 >= least && before.0 - after.0 >= least,
            "{:?}: planned {before:?} and {after:?}, at least {least} bytes less were expected",
            cfg.recompute
        );
    }
    // Larger groups keep fewer inputs and hold more layers at once.
    let [one, three] = [1, 3].map(|n| planned(&full(dense.clone(), "uniform", n)));
    assert_ne!(one, three);
    // Blocks: each layer left out costs its values.
    let kept: Vec<usize> = (0..=LAYERS).map(|n| planned(&full(dense.clone(), "block", n)).1).collect();
    assert!(kept.windows(2).all(|w| w[1] <= w[0]) && kept[LAYERS] < kept[0], "{kept:?}");
}

#[test]
fn recompute_adds_no_model_flops() {
    let plain = program(&dense());
    let again = program(&full(dense(), "uniform", 1));
    assert_eq!(plain.model_flops(), again.model_flops());
    let all: f64 = again.launches.iter().map(|l| l.op.flops()).sum();
    assert!(all > 1.1 * again.model_flops());
}

#[test]
fn the_norm_before_captured_experts_is_kept_as_rule_r64_says() {
    use crate::config::Scope::{MoePreprocess, MoeRouter};
    use crate::workloads::testing::with_graphs;
    let te = GraphImpl::TransformerEngine;
    let norms = |cfg: RunConfig, scope: &[Scope]| {
        let program = program(&with_graphs(selective(cfg, &["layernorm"]), te, scope));
        names(&program).len()
    };
    assert_eq!(norms(moe(Dispatcher::Alltoall), &[Scope::Attn]), 4);
    assert_eq!(norms(moe(Dispatcher::Alltoall), &[MoeRouter, MoePreprocess]), 4);
    assert_eq!(norms(moe(Dispatcher::Alltoall), &[MoeRouter]), 0);
    assert_eq!(norms(moe(Dispatcher::Flex), &[MoeRouter, MoePreprocess]), 0);
    let mut overlapped = shared(Dispatcher::Alltoall);
    if let Some(moe) = &mut overlapped.model.moe {
        moe.shared_expert_overlap = true;
    }
    assert_eq!(norms(overlapped, &[MoeRouter, MoePreprocess]), 0);
    let mut latent = moe(Dispatcher::Flex);
    if let Some(moe) = &mut latent.model.moe {
        moe.latent_size = Some(24);
    }
    assert_eq!(norms(latent.clone(), &[MoeRouter, MoePreprocess]), 4);
    assert_eq!(norms(latent, &[MoeRouter]), 0);
}

#[test]
fn regions_that_overlap_or_lose_their_input_are_mistakes() {
    let plain = program(&dense());
    let forward = plain.launches.iter().position(|l| l.layer == Some(0)).unwrap();
    let region = |launches: Range<usize>| Region { launches, kept: vec![] };
    let overlapping = [region(forward..forward + 3), region(forward + 1..forward + 5)];
    assert!(insert(plain.clone(), &overlapping).is_err_and(|e| e.contains("overlap")));
    // A region whose input is written again before the backward pass: the second product of layer 0 stands in for it.
    let mut changed = plain.clone();
    let mut other = changed.launches[forward + 4].clone();
    other.args[3] = changed.launches[forward].args[0];
    let next = changed.launches.iter().position(|l| l.layer == Some(1)).unwrap();
    changed.launches.insert(next, other);
    let attention = [region(forward..forward + 5)];
    assert!(insert(plain, &attention).is_ok());
    let error = insert(changed, &attention).err().unwrap_or_default();
    assert!(error.contains("recompute changes what rmsnorm_fwd reads"), "{error}");
}
