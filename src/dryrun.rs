//! `--dryrun`: what would run, without a device: rank share, launches, FLOPs and floors by part, segments and
//! graphs, memory plans of both arms.

use crate::capture::{ArmPlan, RunPlan};
use crate::config::{Recompute, RunConfig};
use crate::program::{Part, Pass, Program};
use crate::ranks::groups::Place;
use crate::workloads::rng::{State, Tracker};
use crate::workloads::schedule::{Pipeline, notation};
use crate::workloads::share::RankShare;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Dense bf16 rate (TFLOP/s) and memory bandwidth (GB/s) by `-g` name, from the vendor's datasheets of the SXM
/// or superchip part, without sparsity. Ceilings for the floor alone; runs are judged by what is measured.
const CEILINGS: [(&str, f64, f64); 5] = [
    ("h100", 989.0, 3350.0),
    ("b200", 2250.0, 8000.0),
    ("b300", 2250.0, 8000.0),
    ("gb200", 2500.0, 8000.0),
    ("gb300", 2500.0, 8000.0),
];

/// Sums over the launches of one part and pass.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PartCost {
    pub launches: usize,
    pub flops: f64,
    pub bytes: f64,
    /// Sum over launches of the larger of FLOPs and bytes over their ceilings; `None` without ceilings.
    pub floor_ms: Option<f64>,
}

/// Costs of a step by part, pass and whether the launches are repeated ones.
pub fn costs(program: &Program, gpu: &str) -> BTreeMap<(Part, Pass, bool), PartCost> {
    let ceiling = CEILINGS.iter().find(|c| c.0 == gpu);
    let mut out: BTreeMap<(Part, Pass, bool), PartCost> = BTreeMap::new();
    for l in &program.launches {
        let c = out
            .entry((l.part, l.pass, l.recompute))
            .or_insert(PartCost { floor_ms: ceiling.map(|_| 0.0), ..Default::default() });
        let (flops, bytes) = (l.op.flops(), l.op.bytes());
        c.launches += 1;
        c.flops += flops;
        c.bytes += bytes;
        if let (Some(ms), Some((_, tflops, gbps))) = (c.floor_ms.as_mut(), ceiling) {
            *ms += (flops / (tflops * 1e9)).max(bytes / (gbps * 1e6));
        }
    }
    out
}

fn name(x: impl serde::Serialize) -> String {
    serde_json::to_value(x).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}

/// `1 pass`, `2 passes`.
fn counted(n: &Value, what: &str) -> String {
    let end = match (n.as_u64(), what.ends_with('s')) {
        (Some(1), _) => "",
        (_, true) => "es",
        (_, false) => "s",
    };
    format!("{n} {what}{end}")
}

/// Repeated launches are a row of their own.
fn pass_name(pass: Pass, recompute: bool) -> String {
    if recompute { "recompute".into() } else { name(pass) }
}

const MIB: f64 = (1u64 << 20) as f64;

fn memory(arm: &ArmPlan) -> Value {
    json!({
        "persistent_mib": arm.memory.persistent_bytes as f64 / MIB,
        "activations_mib": arm.memory.arena_bytes as f64 / MIB,
        "activations_live_peak_mib": arm.memory.live_peak_bytes as f64 / MIB,
        "total_mib": (arm.memory.persistent_bytes + arm.memory.arena_bytes) as f64 / MIB,
    })
}

/// Passes of this stage: as many micro-batches as are run, and what the whole job would have in flight.
fn pipeline(cfg: &RunConfig) -> Option<Value> {
    if cfg.parallel.pp == 1 || cfg.stack_only {
        return None;
    }
    let run = Pipeline::of(cfg, cfg.batch.num_microbatches);
    let job = Pipeline::of(cfg, cfg.batch.num_microbatches_recipe);
    Some(json!({
        "pp_rank": run.pp_rank, "model_chunks": run.vp, "microbatch_group_size": run.group,
        "warm_up_passes": run.warm_up(), "in_flight": run.in_flight(), "in_flight_job": job.in_flight(),
        "order": notation(&run.order()),
    }))
}

/// The named random states of this rank, and what each adds to the seed.
fn random_states(cfg: &RunConfig) -> [(State, u32); 3] {
    let tracker = Tracker::of(&cfg.parallel, &Place::of(&cfg.parallel));
    State::ALL.map(|state| (state, tracker.seed_offset(state)))
}

/// The `program` object of the dry run's JSON.
pub fn describe(plan: &RunPlan, cfg: &RunConfig) -> Value {
    let program = &plan.eager.program;
    let parts: Vec<Value> = costs(program, &cfg.identity.gpu)
        .into_iter()
        .map(|((part, pass, recompute), c)| {
            json!({"part": name(part), "pass": pass_name(pass, recompute), "launches": c.launches, "gflops": c.flops / 1e9,
                   "mib_moved": c.bytes / MIB, "floor_ms": c.floor_ms})
        })
        .collect();
    let repeated: Vec<_> = program.launches.iter().filter(|l| l.recompute).collect();
    let graph = plan.graph.as_ref().map(|g| {
        let captured: usize = g.segments.iter().filter(|s| s.graph.is_some()).map(|s| s.launches.len()).sum();
        let mut labels: Vec<(String, usize)> = Vec::new();
        for s in g.segments.iter().filter(|s| s.graph.is_some()) {
            match labels.iter_mut().find(|(l, _)| *l == s.label) {
                Some((_, n)) => *n += 1,
                None => labels.push((s.label.clone(), 1)),
            }
        }
        json!({
            "graphs": g.graphs(), "replays_per_step": g.replays(), "segments": g.segments.len(),
            "launches_captured": captured,
            "launches_eager": g.program.launches.len() - captured,
            "staging_copies": g.program.launches.iter().filter(|l| l.staging).count(),
            "captured": labels.iter().map(|(l, n)| json!({"what": l, "replays_per_step": n})).collect::<Vec<_>>(),
            "memory": memory(g),
        })
    });
    let seed_offsets = BTreeMap::from(random_states(cfg).map(|(state, offset)| (name(state), offset)));
    json!({
        "launches": program.launches.len(),
        "buffers": program.buffers.len(),
        "gflops": program.model_flops() / 1e9,
        "recompute": {
            "launches": repeated.len(),
            // A sum of nothing is -0.
            "gflops": repeated.iter().map(|l| l.op.flops()).sum::<f64>() / 1e9 + 0.0,
        },
        "parts": parts,
        "memory": memory(&plan.eager),
        "graph_arm": graph,
        "pipeline": pipeline(cfg),
        "rng_seed_offsets": seed_offsets,
    })
}

fn recompute(r: &Recompute) -> String {
    match r.granularity.as_deref() {
        None => "none".into(),
        Some("full") => {
            let n = r.num_layers.unwrap_or(0);
            match r.method.as_deref() {
                Some("uniform") => format!("full, all layers in groups of {n}"),
                _ if n == 0 => "full, no layer".into(),
                _ => format!("full, the first {n} layers of the stage, as far as it has so many"),
            }
        }
        Some(_) if r.modules.is_empty() => "selective, no module".into(),
        Some(_) => format!("selective: {}", r.modules.join(", ")),
    }
}

/// What was understood, for a person.
pub fn heading(cfg: &RunConfig, function: &str) -> String {
    let (p, b, g) = (&cfg.parallel, &cfg.batch, &cfg.graph);
    let scope: Vec<String> = g.scope.iter().map(name).collect();
    let scope = if scope.is_empty() { "-".into() } else { scope.join(",") };
    let stage = pipeline(cfg).map_or(String::new(), |p| {
        format!(
            " ({}, {} in flight, {} in the whole job)",
            counted(&p["model_chunks"], "model chunk"),
            counted(&p["in_flight"], "pass"),
            p["in_flight_job"]
        )
    });
    let states = random_states(cfg).map(|(state, offset)| format!("{} {offset}", state.name())).join(", ");
    format!(
        "{function}\n\
         {} GPUs: tp {} pp {} cp {} ep {} dp {}; pipeline rank {}{stage}\n\
         micro-batch {}, sequence {}, micro-batches {} of {}\n\
         graphs: {} scope {scope}, layers {}, warm-up {}, RNG tracker {}\n\
         random states, added to the seed: {states}\n\
         recompute: {}\n\
         approximations: {}\n",
        cfg.identity.num_gpus,
        p.tp,
        p.pp,
        p.cp,
        p.ep,
        p.dp,
        p.pp_rank,
        b.micro_batch_size,
        b.seq_length,
        b.num_microbatches,
        b.num_microbatches_recipe,
        name(g.implementation),
        RankShare::of(cfg).map_or("-".into(), |s| s.captured_layers(g)),
        g.warmup_steps,
        if g.te_rng_tracker { "on" } else { "off" },
        recompute(&cfg.recompute),
        if cfg.approximations.is_empty() { "none".into() } else { cfg.approximations.join(", ") }
    )
}

/// The same for a person.
pub fn text(plan: &RunPlan, gpu: &str) -> String {
    let mut out = String::new();
    let program = &plan.eager.program;
    let _ = writeln!(
        out,
        "A step, one rank in full size, as on a GPU (on a CPU a run shrinks it): {} launches; a library's call is one, and may \
         issue several kernels\n",
        program.launches.len()
    );
    let _ = writeln!(
        out,
        "{:<16}{:<10}{:>9}{:>13}{:>12}{:>11}",
        "part", "pass", "launches", "GFLOP", "MiB moved", "floor ms"
    );
    let none = || PartCost { floor_ms: Some(0.0), ..Default::default() };
    let (mut total, mut repeated) = (none(), none());
    for ((part, pass, recompute), c) in costs(program, gpu) {
        let floor = c.floor_ms.map_or("-".into(), |ms| format!("{ms:.3}"));
        let _ = writeln!(
            out,
            "{:<16}{:<10}{:>9}{:>13.1}{:>12.0}{floor:>11}",
            name(part),
            pass_name(pass, recompute),
            c.launches,
            c.flops / 1e9,
            c.bytes / MIB
        );
        for sum in [Some(&mut total), recompute.then_some(&mut repeated)].into_iter().flatten() {
            sum.launches += c.launches;
            sum.flops += c.flops;
            sum.bytes += c.bytes;
            sum.floor_ms = sum.floor_ms.zip(c.floor_ms).map(|(a, b)| a + b);
        }
    }
    let mut sum = |label: &str, of: &PartCost| {
        let floor = of.floor_ms.map_or("-".into(), |ms| format!("{ms:.3}"));
        let (gflop, mib) = (of.flops / 1e9, of.bytes / MIB);
        let _ = writeln!(out, "{label:<26}{:>9}{gflop:>13.1}{mib:>12.0}{floor:>11}", of.launches);
    };
    sum("all", &total);
    if repeated.launches > 0 {
        sum("  of them recompute", &repeated);
    }
    let _ = writeln!(
        out,
        "Model FLOPs: {:.1} GFLOP, without {}what a backward pass computes again (scores, states).",
        program.model_flops() / 1e9,
        if repeated.launches > 0 { "recompute and " } else { "" }
    );
    let _ = match total.floor_ms {
        Some(_) => writeln!(
            out,
            "Floor: the larger of FLOPs and bytes over the {gpu} datasheet's rates, launch by launch.\n"
        ),
        None => writeln!(out, "No floor: the rates of {gpu} are not known here.\n"),
    };
    let mut arm = |label: &str, a: &ArmPlan| {
        let m = &a.memory;
        let _ = writeln!(
            out,
            "{label}: {} graphs, {} replays a step; memory {:.0} MiB = {:.0} persistent + {:.0} activations (least possible {:.0})",
            a.graphs(),
            a.replays(),
            (m.persistent_bytes + m.arena_bytes) as f64 / MIB,
            m.persistent_bytes as f64 / MIB,
            m.arena_bytes as f64 / MIB,
            m.live_peak_bytes as f64 / MIB
        );
    };
    arm("eager arm", &plan.eager);
    if let Some(g) = &plan.graph {
        arm("graph arm", g);
        let staging = g.program.launches.iter().filter(|l| l.staging).count();
        let captured: usize = g.segments.iter().filter(|s| s.graph.is_some()).map(|s| s.launches.len()).sum();
        let _ = writeln!(
            out,
            "           {captured} launches in graphs, {} eager, {staging} staging copies",
            g.program.launches.len() - captured - staging
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture;
    use crate::workloads::testing::{dense, program};

    #[test]
    fn recompute_is_listed_apart_from_the_model() {
        let described = |cfg: &RunConfig| {
            let plan = capture::plan(program(cfg), &cfg.graph, cfg.seed).unwrap();
            (describe(&plan, cfg), text(&plan, "h100"))
        };
        let mut cfg = dense();
        let (plain, page) = described(&cfg);
        assert_eq!(plain["recompute"], json!({"launches": 0, "gflops": 0.0}));
        assert!(!page.to_lowercase().contains("recompute"), "{page}");
        assert!(heading(&cfg, "tiny").contains("recompute: none"));
        let states =
            "random states, added to the seed: data-parallel 0, model-parallel 2718, expert-parallel 1024\n";
        assert!(heading(&cfg, "tiny").contains(states));
        let states = json!({"data_parallel": 0, "model_parallel": 2718, "expert_parallel": 1024});
        assert_eq!(plain["rng_seed_offsets"], states);
        cfg.recompute.granularity = Some("selective".into());
        cfg.recompute.modules = vec!["mlp".into()];
        let (again, page) = described(&cfg);
        assert!(heading(&cfg, "tiny").contains("recompute: selective: mlp"));
        assert!(page.contains("mlp             recompute") && page.contains("  of them recompute"), "{page}");
        assert_eq!(again["gflops"], plain["gflops"]);
        // Norm, two products and the activation, of two layers and two micro-batches.
        assert_eq!(again["recompute"]["launches"], 16);
        let launches = |v: &Value| v["launches"].as_u64().unwrap();
        assert_eq!(launches(&again), launches(&plain) + 16);
        let parts = again["parts"].as_array().unwrap();
        let row = parts.iter().find(|p| p["pass"] == "recompute").unwrap();
        assert_eq!((&row["part"], &row["gflops"]), (&json!("mlp"), &again["recompute"]["gflops"]));
        assert_eq!(parts.iter().map(launches).sum::<u64>(), launches(&again));
        assert!(
            again["memory"]["activations_mib"].as_f64().unwrap()
                < plain["memory"]["activations_mib"].as_f64().unwrap()
        );
    }
}
