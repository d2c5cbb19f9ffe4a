//! Rules about options and settings that would change nothing in this configuration. Only what the user gave himself is
//! refused: a recipe's own settings are upstream's, and many have no meaning here. A setting that says `off` of a part
//! that is not there states a fact, and passes.

use super::{Effective, Rule};
use crate::args::{Arm, AttentionKernels, DeviceChoice, OptimizerChoice, OrNone, Staging};
use crate::config::LayerKind;
use crate::ops::collective::held::CommModel;
use serde_json::Value;

fn when(broken: bool, text: impl FnOnce() -> String) -> Option<String> {
    broken.then(text)
}

/// The first of these that the user gave.
fn first<'a>(of: &[(&'a str, bool)]) -> Option<&'a str> {
    of.iter().find(|(_, given)| *given).map(|(name, _)| *name)
}

/// One row of results: there is no arm to compare the eager one with.
fn one_arm(e: &Effective) -> bool {
    !e.graphs() && e.args.mbperf.aa.is_none()
}

/// Why the step has no optimizer.
fn without_optimizer(e: &Effective) -> Option<&'static str> {
    let own = &e.args.mbperf;
    match (own.stack_only, own.optimizer) {
        (true, _) => Some("--stack_only runs the layer stack without the optimizer"),
        (false, OptimizerChoice::None) => Some("--optimizer none leaves the optimizer out of the step"),
        (false, OptimizerChoice::Adam) => None,
    }
}

/// Settings of graphs.
const OF_GRAPHS: [&str; 2] = ["model.cuda_graph_warmup_steps", "model.cuda_graph_use_single_mempool"];

/// Beginnings of keys of what is around the layer stack.
const OUTSIDE_STACK: [&str; 4] =
    ["model.vocab_size", "model.share_embeddings_and_output_weights", "ddp.bucket_size", "ddp.overlap_"];

/// A part that a model may have: its settings, whether the model has it, and how to say that it has not.
struct Part {
    /// Whole keys, or beginnings of keys that end in `_` or `.`.
    keys: &'static [&'static str],
    there: fn(&Effective) -> bool,
    without: &'static str,
}

const PARTS: &[Part] = &[
    Part { keys: &["model.moe_"], there: Effective::moe, without: "experts" },
    Part {
        keys: &["model.mamba_"],
        there: |e| e.layers.contains(&LayerKind::Mamba),
        without: "Mamba layers (model.hybrid_override_pattern)",
    },
    Part {
        keys: &["model.linear_"],
        there: Effective::delta_net,
        without: "gated delta nets (model.attention_variant)",
    },
    Part {
        keys: &[
            "model.q_lora_rank",
            "model.kv_lora_rank",
            "model.qk_head_dim",
            "model.qk_pos_emb_head_dim",
            "model.v_head_dim",
        ],
        there: |e| e.values.on("model.multi_latent_attention") || e.shared_kv(),
        without: "multi-latent attention",
    },
    Part {
        keys: &[
            "model.mtp_hybrid_override_pattern",
            "model.mtp_use_repeated_layer",
            "model.mtp_loss_scaling_factor",
        ],
        there: |e| e.size("model.mtp_num_layers") > 0,
        without: "multi-token prediction (model.mtp_num_layers)",
    },
    Part {
        keys: &["model.moe_shared_expert_overlap", "model.moe_shared_expert_gate"],
        there: Effective::shared_expert,
        without: "a shared expert (model.moe_shared_expert_intermediate_size)",
    },
    Part {
        keys: &["model.window_attn_skip_freq"],
        there: |e| e.values.is_set("model.window_size"),
        without: "attention windows (model.window_size)",
    },
    Part {
        keys: &["model.vision_cuda_graph_impl"],
        there: |e| e.values.is_set("model.vision"),
        without: "an image tower",
    },
    Part {
        keys: &["model.mhc_recompute_layer_num"],
        there: |e| e.values.is_set("model.hyper_connections"),
        without: "hyper-connections",
    },
    Part { keys: &["peft."], there: |e| e.values.is_set("peft.scheme"), without: "adapters (peft.scheme)" },
];

/// Says that something is off, or is not there.
pub fn off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::String(s) => s == "none",
        Value::Array(list) => list.is_empty(),
        _ => false,
    }
}

pub const RULES: &[Rule] = &[
    Rule {
        id: "M20",
        wrong: "graph options that have no effect for the implementation",
        remedy: "Leave the option out, or give --cuda_graph_impl with a scope.",
        broken: |e| {
            let graph_only = e.args.mbperf.aa == Some(Arm::Graph) && !e.graphs();
            let staging = e.args.mbperf.graph_staging == Staging::None && !e.te();
            when(graph_only, || "--aa graph with implementation none: there is no graph arm".to_owned())
                .or_else(|| {
                    when(staging, || {
                        "--graph_staging none: only transformer_engine graphs have staging copies".to_owned()
                    })
                })
                .or_else(|| {
                    let key = OF_GRAPHS.into_iter().find(|k| e.explicit.contains(*k));
                    key.filter(|_| !e.graphs())
                        .map(|key| format!("{key} with implementation none: there are no graphs to make"))
                })
        },
    },
    Rule {
        id: "M21",
        wrong: "MoE options on a model without experts",
        remedy: "Leave the option out: it would change nothing.",
        broken: |e| {
            let a = &e.args;
            let flex = matches!(a.performance.moe_flex_dispatcher_backend, Some(OrNone::Value(_)));
            let split = matches!(a.parallelism.expert_tensor_parallel_size, Some(OrNone::Value(n)) if n > 1);
            let name = first(&[
                ("--moe_routing", a.mbperf.moe_routing != crate::config::Routing::Recipe),
                ("--expert_gemm", a.mbperf.expert_gemm != crate::config::ExpertGemm::Grouped),
                ("--moe_row_bound", e.given("moe_row_bound")),
                ("--first_k_dense_replace", a.general.first_k_dense_replace.is_some_and(|n| n > 0)),
                ("--moe_flex_dispatcher_backend", flex),
                ("-et", split),
            ])?;
            when(!e.moe(), || format!("{name} on {}, which has no experts", e.recipe))
        },
    },
    Rule {
        id: "M23",
        wrong: "options that compare two arms where implementation none leaves one (--margin, --equality_steps, --spin_percent)",
        remedy: "Leave the option out, or give --cuda_graph_impl with a scope, or --aa eager.",
        broken: |e| {
            let name = first(&[
                ("--margin", e.given("margin")),
                ("--equality_steps", e.given("equality_steps")),
                ("--spin_percent", e.args.mbperf.spin_percent.is_some_and(|p| p > 0.0)),
            ])?;
            when(one_arm(e), || {
                format!(
                    "{name} with implementation none: the eager arm stands alone, there is nothing to compare it with"
                )
            })
        },
    },
    Rule {
        id: "M24",
        wrong: "settings of the optimizer in a step without one (--optimizer none, --stack_only)",
        remedy: "Leave the setting out, or keep the optimizer.",
        broken: |e| {
            let why = without_optimizer(e)?;
            let option = first(&[
                ("--lr", e.given("lr")),
                ("--min_lr", e.given("min_lr")),
                ("--warmup_iters", e.given("warmup_iters")),
            ]);
            // Which optimizer is the recipe's business: notice optimizer_left_out.
            let of_it = |key: &&String| {
                (key.starts_with("optimizer.") && *key != "optimizer.optimizer")
                    || key.starts_with("scheduler.")
            };
            let name = option.or_else(|| e.explicit.iter().find(of_it).map(String::as_str))?;
            Some(format!("{name}: {why}"))
        },
    },
    Rule {
        id: "M25",
        wrong: "--stack_only together with what only a whole step has",
        remedy: "Leave one of the two out.",
        broken: |e| {
            let own = &e.args.mbperf;
            let (name, why) = [
                (
                    e.given("max_microbatches") && own.max_microbatches != 1,
                    "--max_microbatches",
                    "it runs one micro-batch",
                ),
                (
                    own.extrapolate,
                    "--extrapolate",
                    "it runs one micro-batch, and the job's step is not made of bare stacks",
                ),
                (own.comm_model != CommModel::Copy, "--comm_model", "it has no collectives"),
                (e.given("vocab_size"), "--vocab_size", "it has neither embedding nor head"),
            ]
            .into_iter()
            .find_map(|(given, name, why)| given.then_some((name, why)))
            .or_else(|| {
                let key = e.explicit.iter().find(|key| OUTSIDE_STACK.iter().any(|k| key.starts_with(k)))?;
                Some((key.as_str(), "it has no embedding, no head and no collectives"))
            })?;
            when(own.stack_only, || format!("{name} with --stack_only: {why}"))
        },
    },
    Rule {
        id: "M26",
        wrong: "--moe_row_bound where the rows that a rank receives are bounded already",
        remedy: "Leave it out; it is for dropless experts over several processes (--nproc_per_node N with -ep above 1).",
        broken: |e| {
            let why = if e.drop_and_pad() {
                "experts are padded to their capacity, which fixes the rows"
            } else if e.capacity_factor().is_none()
                && e.values.is_set("model.moe_expert_rank_capacity_factor")
            {
                "model.moe_expert_rank_capacity_factor fixes the rows"
            } else if !e.several_processes || e.ep() == 1 {
                "a process that shares its experts with no other receives exactly the rows that it sends"
            } else {
                return None;
            };
            when(e.moe() && e.given("moe_row_bound"), || format!("--moe_row_bound: {why}"))
        },
    },
    Rule {
        id: "M27",
        wrong: "a setting of a part that the model does not have (experts, Mamba layers, delta nets, latent attention, ...)",
        remedy: "Leave the setting out: it would change nothing.",
        broken: |e| {
            let of = |part: &Part, key: &str| {
                part.keys.iter().any(|k| if k.ends_with(['_', '.']) { key.starts_with(k) } else { key == *k })
            };
            e.explicit.iter().filter(|key| !off(e.values.get(key))).find_map(|key| {
                let part = PARTS.iter().find(|p| of(p, key) && !(p.there)(e))?;
                Some(format!("{key}: {} has no {}", e.recipe, part.without))
            })
        },
    },
    Rule {
        id: "M28",
        wrong: "options of another device, of several processes, or of a job of several GPUs",
        remedy: "Leave the option out: it would change nothing.",
        broken: |e| {
            let own = &e.args.mbperf;
            let (cpu, cuda) = (own.device == DeviceChoice::Cpu, own.device == DeviceChoice::Cuda);
            when(e.given("rendezvous_timeout") && !e.several_processes, || {
                "--rendezvous_timeout: one process waits for no other (--nproc_per_node starts several)"
                    .to_owned()
            })
            .or_else(|| {
                when(own.full_size && cuda, || {
                    "--full_size with --device cuda: only the CPU runs a model in small".to_owned()
                })
            })
            .or_else(|| {
                let given = [
                    (
                        own.attention_backend != AttentionKernels::Auto,
                        "--attention_backend",
                        "the CPU has one attention",
                    ),
                    (
                        !own.attention_deterministic,
                        "--attention_deterministic false",
                        "the CPU's attention adds in one order",
                    ),
                    (own.overlap_wgrad, "--overlap_wgrad", "the CPU has no streams"),
                    (own.no_samplers, "--no_samplers", "nothing of a card is read there"),
                    (own.alternate_samplers, "--alternate_samplers", "nothing of a card is read there"),
                    (own.kernel_cache.is_some(), "--kernel_cache", "the CPU compiles no kernels"),
                    (own.cuda_path.is_some(), "--cuda_path", "the CPU needs no CUDA library"),
                ];
                let (_, name, why) = given.into_iter().find(|(given, ..)| cpu && *given)?;
                Some(format!("{name} with --device cpu: {why}"))
            })
            .or_else(|| {
                let why = if cpu {
                    "--device cpu: the CPU holds nothing back"
                } else {
                    "-ng 1: a job of one GPU has no collectives"
                };
                when(own.comm_model != CommModel::Copy && (cpu || e.num_gpus == 1), || {
                    format!("--comm_model with {why}")
                })
            })
        },
    },
    Rule {
        id: "M29",
        wrong: "--extrapolate where all micro-batches of the job are run",
        remedy: "Leave it out, or let --max_microbatches run fewer.",
        broken: |e| {
            let (most, job) = (e.args.mbperf.max_microbatches, super::sizes::micro_batches_of_job(e));
            when(e.args.mbperf.extrapolate && (most == 0 || job <= most as f64), || {
                format!(
                    "--extrapolate with --max_microbatches {most}: the job's step has {job} micro-batches and all are run, \
                     there is nothing to extrapolate"
                )
            })
        },
    },
    Rule {
        id: "M30",
        wrong: "a length of timing that a number of steps replaces (--max_time or --block_steps beside -ms)",
        remedy: "Leave one of the two out.",
        broken: |e| {
            let steps = e.max_steps?;
            let own = &e.args.mbperf;
            let (name, why) = match (own.max_time, own.block_steps) {
                (Some(_), _) => ("--max_time", "so many steps are run, however long they take"),
                (None, Some(_)) => ("--block_steps", "so many steps are divided into blocks by their number"),
                (None, None) => return None,
            };
            let asked = if e.args.training.max_steps.is_some() { "-ms" } else { "train.train_iters=" };
            Some(format!("{name} with {asked} {steps}: {why}"))
        },
    },
    Rule {
        id: "M31",
        wrong: "--deterministic together with --attention_deterministic false",
        remedy: "Leave one of the two out.",
        broken: |e| {
            let both = e.args.performance.deterministic && !e.args.mbperf.attention_deterministic;
            when(both, || {
                "--deterministic asks for the same bits in every run, --attention_deterministic false lets attention add in any order"
                    .to_owned()
            })
        },
    },
    Rule {
        id: "M32",
        wrong: "a setting that changes nothing in what is run",
        remedy: "Leave it out, or set what it belongs to.",
        broken: |e| e.idle.first().cloned(),
    },
];
