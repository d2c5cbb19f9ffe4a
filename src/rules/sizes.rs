//! Rules about numbers (judged first: later rules may rely on sane sizes) and about the rank layout (judged last).
//!
//! Over 500 lines: one table, a rule a row.

use super::{Effective, Rule};
use crate::config::{Ddp, Parallel};
use crate::keys::{self, Kind, MAX_CAPACITY_FACTOR, MAX_LENGTH, MAX_SIZE, figure};
use crate::recipe::{SHARED_KV, layer_kinds};
use crate::workloads::share::layout_stages;
use serde_json::Value;

/// FLOPs of a rank's step beyond which no GPU ends it within a quarter of an hour (at 10^15 a second); products of
/// sizes below it also fit their integers.
const MAX_STEP_FLOPS: f64 = 1e18;
/// Layers times micro-batches of a rank's step: some hundred launches each, all planned and kept one by one.
const MAX_LAYER_PASSES: f64 = 32768.0;
/// Longest time that an option names: a month. A longer one is none.
const MAX_TIME_S: f64 = 30.0 * 24.0 * 3600.0;
/// Shortest time that an option names: no step and no answer of another rank takes less.
const MIN_TIME_S: f64 = 1e-3;
const SECONDS_A_MINUTE: f64 = 60.0;
/// Margins that can be judged: clocks tick in microseconds of steps of seconds; at 1 all arms are equivalent.
const MARGIN: (f64, f64) = (1e-6, 0.999);
/// `--spin_percent` beyond this is no step with a delay, but a delay.
const MAX_SPIN_PERCENT: f64 = 1000.0;
/// Settings of DeepSeek-V4's attention beside those of `model.sparse_attention`.
const SHARED_KV_SIZES: [&str; 3] = ["model.q_lora_rank", "model.kv_channels", "model.qk_pos_emb_head_dim"];
/// Widths of vectors that kernels load at once, in bf16 elements (16 bytes).
const VECTOR: i64 = 8;

fn when(broken: bool, text: impl FnOnce() -> String) -> Option<String> {
    broken.then(text)
}

/// The first setting whose numbers are outside their range: factors and rates, or all else.
fn out_of_range(e: &Effective, real: bool) -> Option<String> {
    let of_kind = |key: &str| keys::find(key).is_ok_and(|row| (row.kind == Kind::Float) == real);
    let mut settings = e.values.0.iter().filter(|(key, _)| of_kind(key));
    settings.find_map(|(key, value)| keys::out_of_range(key, value))
}

/// Micro-batches of the job's step on a rank.
pub(super) fn micro_batches_of_job(e: &Effective) -> f64 {
    let of = |key: &str| e.values.int(key).map_or(1.0, |v| v as f64);
    of("train.global_batch_size") / (of("train.micro_batch_size") * e.dp() as f64).max(1.0)
}

/// Micro-batches of a step that are run.
fn micro_batches(e: &Effective) -> f64 {
    let job = micro_batches_of_job(e);
    let most = e.args.mbperf.max_microbatches as f64;
    if most > 0.0 { job.min(most).max(1.0) } else { job.max(1.0) }
}

/// Tokens of a sequence: both lengths are one unless a recipe says otherwise.
fn sequence(e: &Effective) -> i64 {
    e.size("model.seq_length").max(e.size("dataset.seq_length"))
}

/// Layers of all depths of multi-token prediction.
fn prediction_layers(e: &Effective) -> f64 {
    let depths = e.values.int("model.mtp_num_layers").unwrap_or(0) as f64;
    let letters = e.values.text("model.mtp_hybrid_override_pattern").map_or(1, str::len);
    depths * letters.max(1) as f64
}

/// FLOPs of a rank's step, roughly: six a weight and token, and attention's square. Every layer counts as one of each
/// kind whose sizes are set: the widest of them must fit the integers too.
fn step_flops(e: &Effective) -> f64 {
    let of = |key: &str| e.values.int(key).map_or(0.0, |v| v as f64);
    let or = |a: f64, b: f64| if a > 0.0 { a } else { b };
    let seq = sequence(e) as f64;
    let tokens = seq * of("train.micro_batch_size") / e.cp() as f64;
    let heads = of("model.num_attention_heads");
    let hidden = of("model.hidden_size");
    let width = heads * or(of("model.kv_channels"), hidden / heads.max(1.0));
    let latent = of("model.moe_latent_size");
    let active =
        of("model.moe_ffn_hidden_size") * of("model.moe_router_topk") * (1.0_f64).max(latent / hidden);
    let mlp = of("model.ffn_hidden_size").max(active).max(of("model.moe_shared_expert_intermediate_size"));
    let (q_rank, kv_rank) = (of("model.q_lora_rank"), of("model.kv_lora_rank"));
    let head = of("model.qk_head_dim") + of("model.qk_pos_emb_head_dim") + of("model.v_head_dim");
    let low_rank = (q_rank + kv_rank) * (hidden + heads * head) + heads * head * seq;
    let mamba = of("model.mamba_num_heads") * of("model.mamba_head_dim");
    let states = of("model.mamba_num_groups") * of("model.mamba_state_dim");
    let scan = hidden * (3.0 * mamba + 2.0 * states) + mamba * of("model.mamba_state_dim");
    let keys = of("model.linear_num_key_heads") * of("model.linear_key_head_dim");
    let values = of("model.linear_num_value_heads") * of("model.linear_value_head_dim");
    let delta = hidden * (2.0 * keys + 3.0 * values) + values * of("model.linear_key_head_dim");
    let layer = hidden * (4.0 * width + 3.0 * mlp + 2.0 * latent) + seq * width + low_rank + scan + delta;
    let ranks = (e.tp() * e.pp()) as f64;
    let head = hidden * of("model.vocab_size") / e.tp() as f64;
    let layers = of("model.num_layers") / ranks + prediction_layers(e);
    6.0 * tokens * micro_batches(e) * (layer * layers + head)
}

pub const NUMBERS: &[Rule] = &[
    Rule {
        id: "M01",
        wrong: "a size, count or step number that is 0, negative or absurdly large",
        remedy: "Give a number within the limits; leave the option out to keep the recipe's value.",
        broken: |e| {
            let within = |name: &str, v: i64, least: i64, most: i64| {
                when(v < least || v > most, || format!("{name} is {v}, outside {least} to {most}"))
            };
            let option = |name: &str, v: i64, least: i64| within(name, v, least, MAX_SIZE);
            let minutes = (MAX_TIME_S / SECONDS_A_MINUTE) as i64;
            let a = &e.args;
            out_of_range(e, false)
                .or_else(|| option("-ng", e.num_gpus, 1))
                .or_else(|| e.max_steps.and_then(|v| option("-ms", v, 1)))
                .or_else(|| option("--max_microbatches", a.mbperf.max_microbatches, 0))
                .or_else(|| option("--pp_rank", a.mbperf.pp_rank, 0))
                .or_else(|| a.mbperf.equality_steps.and_then(|v| option("--equality_steps", v, 2)))
                .or_else(|| {
                    let given = a.training.distributed_timeout_minutes;
                    given.and_then(|v| within("--distributed_timeout_minutes", v, 1, minutes))
                })
                .or_else(|| a.performance.activation_offload_layers.and_then(|v| option("-ol", v, 0)))
                .or_else(|| {
                    let tokens = e.size("train.micro_batch_size").saturating_mul(sequence(e));
                    when(tokens > MAX_LENGTH, || {
                        format!("-mb x -sl is {tokens} tokens a micro-batch, above {MAX_LENGTH}")
                    })
                })
                .or_else(|| {
                    let layers = e.values.int("model.num_layers").unwrap_or(1) as f64 / e.pp() as f64;
                    let passes = ((layers + prediction_layers(e)) * micro_batches(e)).ceil();
                    when(passes > MAX_LAYER_PASSES, || {
                        format!(
                            "a rank's layers, those of multi-token prediction too, times the micro-batches to run \
                             (--max_microbatches) are {passes}, above \
                             {MAX_LAYER_PASSES}"
                        )
                    })
                })
                .or_else(|| {
                    let flops = step_flops(e);
                    when(flops.is_nan() || flops > MAX_STEP_FLOPS, || {
                        format!(
                            "a rank's step takes some {flops:.0e} FLOPs, above {MAX_STEP_FLOPS:.0e}: no GPU ends \
                             it within minutes"
                        )
                    })
                })
        },
    },
    Rule {
        id: "M02",
        wrong: "a rate, factor or time out of its range",
        remedy: "Give a number within the limits; leave it out to keep the default, or the recipe's value.",
        broken: |e| {
            let own = &e.args.mbperf;
            let within = |name: &str, v: Option<f64>, least: f64, most: f64| {
                v.filter(|v| !(least..=most).contains(v)).map(|v| {
                    format!("{name} is {}, outside {} to {}", figure(v), figure(least), figure(most))
                })
            };
            out_of_range(e, true)
                .or_else(|| within("--margin", Some(own.margin), MARGIN.0, MARGIN.1))
                .or_else(|| within("--max_time", own.max_time, MIN_TIME_S, MAX_TIME_S))
                .or_else(|| {
                    let limit = Some(own.watchdog).filter(|s| *s != 0.0);
                    within("--watchdog (if not 0)", limit, MIN_TIME_S, MAX_TIME_S)
                })
                .or_else(|| within("--rendezvous_timeout", own.rendezvous_timeout, MIN_TIME_S, MAX_TIME_S))
                .or_else(|| within("--spin_percent", own.spin_percent, 0.0, MAX_SPIN_PERCENT))
                .or_else(|| within("--moe_row_bound", Some(own.moe_row_bound), 1.0, MAX_CAPACITY_FACTOR))
        },
    },
    Rule {
        id: "M14",
        wrong: "DeepSeek-V4's attention with several key heads, or without its sizes",
        remedy: "Set model.num_query_groups=1, or model.attention_variant=null; state the missing size in a recipe of your own \
                 (--recipes_dir).",
        broken: |e| {
            let of = e.values.get("model.sparse_attention");
            let groups = e.values.int("model.num_query_groups");
            let lacks = |key: &str| when(!e.values.is_set(key), || key.to_owned());
            let lacks_part = |part: &str| {
                when(of.get(part).is_none_or(Value::is_null), || format!("model.sparse_attention.{part}"))
            };
            let shared = when(e.shared_kv() && groups != Some(1), || {
                let has = groups.map_or("null, one a query head".to_owned(), |n| n.to_string());
                format!(
                    "model.num_query_groups is {has}, but model.attention_variant {SHARED_KV} has one key head for all"
                )
            });
            let missing = || {
                let missing = ["o_groups", "o_lora_rank", "csa_window_size"].into_iter().find_map(lacks_part);
                missing.or_else(|| SHARED_KV_SIZES.into_iter().find_map(lacks)).filter(|_| e.shared_kv())
            };
            shared.or_else(|| missing().map(|key| format!("model.attention_variant {SHARED_KV} needs {key}")))
        },
    },
    Rule {
        id: "M12",
        wrong: "a pattern of layers with unknown letters, or of another length than the layers",
        remedy: "Write one entry per layer: M, *, -, E in model.hybrid_override_pattern; 0 or 1 in model.moe_layer_freq.",
        broken: |e| layer_kinds(&e.values.0).err().map(|why| why.to_string()),
    },
    Rule {
        id: "M03",
        wrong: "--domain other than the recipe's",
        remedy: "Leave --domain out.",
        broken: |e| {
            let domain = e.args.general.domain.as_deref()?;
            let fits: &[&str] = match e.family.as_str() {
                "qwen_vl" => &["vlm", "qwen3vl"],
                "wan" => &["diffusion"],
                _ => &["llm"],
            };
            when(!fits.contains(&domain), || {
                format!("--domain {domain}, but {} is of the domain {}", e.recipe, fits[0])
            })
        },
    },
    Rule {
        id: "M04",
        wrong: "--data with real data",
        remedy: "Leave --data out: tokens are synthetic.",
        broken: |e| {
            let data = e.args.data.data.as_str();
            when(!["mock", "squad_packed"].contains(&data), || {
                format!("--data {data}: mbperf reads no data set")
            })
        },
    },
];

/// The layout of ranks as the configuration will hold it. Sizes are positive by M01.
pub fn layout_of(e: &Effective) -> Parallel {
    let size = |v: i64| usize::try_from(v).unwrap_or(1).max(1);
    let optional = |key: &str| e.values.int(key).and_then(|v| usize::try_from(v).ok());
    Parallel {
        tp: size(e.tp()),
        pp: size(e.pp()),
        cp: size(e.cp()),
        ep: size(e.ep()),
        etp: size(e.etp()),
        vp: virtual_stages(e),
        dp: size(e.dp()),
        sequence_parallel: e.values.on("model.sequence_parallel") && e.tp() > 1,
        pp_rank: size(e.args.mbperf.pp_rank.max(0).saturating_add(1)) - 1,
        pipeline_layout: e.values.text("model.pipeline_model_parallel_layout").map(str::to_owned),
        first_stage_layers: optional("model.num_layers_in_first_pipeline_stage"),
        last_stage_layers: optional("model.num_layers_in_last_pipeline_stage"),
        account_for_embedding: e.values.on("model.account_for_embedding_in_pipeline_split"),
        account_for_loss: e.values.on("model.account_for_loss_in_pipeline_split"),
        microbatch_group_size: optional("model.microbatch_group_size_per_vp_stage").filter(|n| *n > 0),
        use_distributed_optimizer: e.values.on("ddp.use_distributed_optimizer"),
        ddp: Ddp {
            overlap_grad_reduce: e.values.on("ddp.overlap_grad_reduce"),
            bucket_size: optional("ddp.bucket_size").filter(|n| *n > 0),
        },
        world: Default::default(),
    }
}

/// Virtual stages: as set, else what a layout string implies (its stages over pp), else 1.
fn virtual_stages(e: &Effective) -> usize {
    let size = |v: i64| usize::try_from(v).unwrap_or(1).max(1);
    match (
        e.values.int("model.virtual_pipeline_model_parallel_size"),
        e.values.text("model.pipeline_model_parallel_layout"),
    ) {
        (Some(vp), _) => size(vp),
        (None, Some(layout)) => layout_stages(layout).map_or(1, |n| (n / size(e.pp())).max(1)),
        (None, None) => 1,
    }
}

pub const LAYOUT: &[Rule] = &[
    Rule {
        id: "M05",
        wrong: "GPUs that do not divide by tp x pp x cp, or by etp x ep x pp where there are experts",
        remedy: "Give -ng a multiple of both products, or change -tp, -pp, -cp, -ep or -et.",
        broken: |e| {
            let dense = e.tp().saturating_mul(e.pp()).saturating_mul(e.cp());
            let expert = e.etp().saturating_mul(e.ep()).saturating_mul(e.pp());
            when(e.num_gpus % dense != 0, || {
                format!(
                    "-ng {} does not divide by tp {} x pp {} x cp {} = {dense}",
                    e.num_gpus,
                    e.tp(),
                    e.pp(),
                    e.cp()
                )
            })
            .or_else(|| {
                when(e.moe() && e.num_gpus % expert != 0, || {
                    format!(
                        "-ng {} does not divide by etp {} x ep {} x pp {} = {expert}",
                        e.num_gpus,
                        e.etp(),
                        e.ep(),
                        e.pp()
                    )
                })
            })
        },
    },
    Rule {
        id: "M06",
        wrong: "a global batch that does not divide by micro-batch size x dp",
        remedy: "Give -gb a multiple of -mb times the data-parallel ranks.",
        broken: |e| {
            let (global, micro) = (e.size("train.global_batch_size"), e.size("train.micro_batch_size"));
            let share = micro.saturating_mul(e.dp().max(1));
            when(global % share != 0, || {
                format!("-gb {global} does not divide by -mb {micro} x dp {} = {share}", e.dp())
            })
        },
    },
    Rule {
        id: "M07",
        wrong: "tensor parallelism that does not divide the heads, the widths or the vocabulary",
        remedy: "Choose -tp that divides heads, query groups (or is a multiple of them), MLP and expert widths and the vocabulary.",
        broken: |e| {
            let (tp, etp) = (e.tp(), e.etp());
            let not = |key: &str, by: i64, what: &str| {
                e.values
                    .int(key)
                    .filter(|v| v % by != 0)
                    .map(|v| format!("{what} {by} does not divide {key} {v}"))
            };
            let groups = e
                .values
                .int("model.num_query_groups")
                .filter(|g| !e.own_keys() && *g % tp != 0 && tp % *g != 0);
            let vocab =
                if e.values.on("model.should_pad_vocab") { None } else { not("model.vocab_size", tp, "-tp") };
            not("model.num_attention_heads", tp, "-tp")
                .or_else(|| {
                    groups.map(|g| {
                        format!("-tp {tp} and model.num_query_groups {g}: neither divides the other")
                    })
                })
                .or_else(|| not("model.ffn_hidden_size", tp, "-tp"))
                .or_else(|| not("model.moe_shared_expert_intermediate_size", tp, "-tp"))
                .or_else(|| not("model.moe_ffn_hidden_size", etp, "-et"))
                .or(vocab)
        },
    },
    Rule {
        id: "M08",
        wrong: "heads that do not divide by the query groups, or a hidden size that does not divide by the heads",
        remedy: "Choose --hidden_size a multiple of 8 and of the heads; heads a multiple of model.num_query_groups.",
        broken: |e| {
            let (heads, hidden) = (e.size("model.num_attention_heads"), e.size("model.hidden_size"));
            // What attention does not read is not judged.
            let read = |key: &str| e.values.int(key).filter(|_| !e.own_keys());
            let groups = read("model.num_query_groups").unwrap_or(heads);
            let channels = read("model.kv_channels");
            when(heads % groups != 0, || {
                format!(
                    "model.num_attention_heads {heads} does not divide by model.num_query_groups {groups}"
                )
            })
            .or_else(|| {
                when(
                    channels.is_none() && !e.values.on("model.multi_latent_attention") && hidden % heads != 0,
                    || format!("model.hidden_size {hidden} does not divide by {heads} heads"),
                )
            })
            .or_else(|| {
                when(hidden % VECTOR != 0, || {
                    format!("model.hidden_size {hidden} is no multiple of {VECTOR}")
                })
            })
            .or_else(|| {
                channels
                    .filter(|c| c % VECTOR != 0)
                    .map(|c| format!("model.kv_channels {c} is no multiple of {VECTOR}"))
            })
        },
    },
    Rule {
        id: "M09",
        wrong: "experts that do not divide by -ep, fewer experts than a token needs, a single expert, or expert parallelism without experts",
        remedy: "Choose -ep that divides the experts, and at least model.moe_router_topk experts.",
        broken: |e| {
            let (experts, ep) = (e.experts(), e.ep());
            let topk = e.size("model.moe_router_topk");
            when(!e.moe() && ep > 1, || format!("-ep {ep} on {}, which has no experts", e.recipe))
                .or_else(|| {
                    when(experts == 1, || "model.num_moe_experts 1: one expert is a dense MLP".to_owned())
                })
                .or_else(|| {
                    when(e.moe() && experts % ep != 0, || {
                        format!("-ep {ep} does not divide {experts} experts")
                    })
                })
                .or_else(|| {
                    when(e.moe() && topk > experts, || {
                        format!("model.moe_router_topk {topk} of {experts} experts")
                    })
                })
        },
    },
    Rule {
        id: "M33",
        wrong: "group-limited routing whose groups do not fit the experts or the choices of a token",
        remedy: "Choose model.moe_router_num_groups that divides the experts, and model.moe_router_group_topk from 1 to the \
                 groups and to model.moe_router_topk, with room for the top-k in the chosen groups; or set both to null.",
        broken: |e| {
            let key = "model.moe_router_num_groups";
            let (groups, chosen) = (e.values.int(key), e.values.int("model.moe_router_group_topk"));
            let (experts, topk) = (e.experts(), e.size("model.moe_router_topk"));
            let explicit = |key: &str| e.explicit.contains(key);
            let wrong = match (groups, chosen) {
                (None, None) => return None,
                (None, Some(c)) => {
                    // Of a recipe that has neither groups nor a user's word on them, it is upstream's.
                    let asked = explicit("model.moe_router_group_topk") || explicit(key);
                    return when(e.moe() && asked, || {
                        format!("model.moe_router_group_topk {c} without {key}: it would limit nothing")
                    });
                }
                (Some(g), None) => format!("{key} {g} without model.moe_router_group_topk"),
                (Some(g), Some(_)) if experts % g.max(1) != 0 => {
                    format!("{key} {g} does not divide {experts} experts")
                }
                (Some(g), Some(c)) if c > g => format!("model.moe_router_group_topk {c} of {g} groups"),
                (Some(_), Some(c)) if c > topk => {
                    format!("model.moe_router_group_topk {c} groups for a model.moe_router_topk of {topk}")
                }
                (Some(g), Some(c)) if topk > c.saturating_mul(experts / g.max(1)) => format!(
                    "model.moe_router_topk {topk} of {c} groups (model.moe_router_group_topk) of {} experts",
                    experts / g.max(1)
                ),
                _ => return None,
            };
            when(e.moe(), || wrong)
        },
    },
    Rule {
        id: "M34",
        wrong: "a capacity factor by which an expert could hold more rows than a micro-batch has tokens",
        remedy: "Lower model.moe_expert_capacity_factor to at most experts / top-k; null drops no token.",
        broken: |e| {
            let factor = e.capacity_factor().filter(|_| e.moe())?;
            let (experts, topk) = (e.experts(), e.size("model.moe_router_topk"));
            // A token goes to an expert once.
            let most = experts as f64 / topk.max(1) as f64;
            when(factor > most, || {
                format!(
                    "model.moe_expert_capacity_factor {}: an expert of {experts} with top-k {topk} would hold {:.3} times the \
                     tokens, and can get each once (factor {})",
                    figure(factor),
                    factor / most,
                    figure(most)
                )
            })
        },
    },
    Rule {
        id: "M10",
        wrong: "a sequence that does not divide over context- and tensor-parallel ranks",
        remedy: "Choose -sl a multiple of 2 x cp (cp above 1), and of tp x cp with sequence parallelism.",
        broken: |e| {
            let (seq, cp, tp) = (e.size("dataset.seq_length"), e.cp(), e.tp());
            when(cp > 1 && seq % cp.saturating_mul(2) != 0, || {
                format!("-sl {seq} does not divide by 2 x cp {cp}")
            })
            .or_else(|| {
                let by = cp.saturating_mul(tp);
                when(tp > 1 && e.values.on("model.sequence_parallel") && seq % by != 0, || {
                    format!("-sl {seq} does not divide by tp {tp} x cp {cp}")
                })
            })
        },
    },
    Rule {
        id: "M11",
        wrong: "a pipeline stage that does not exist, or virtual stages without a pipeline",
        remedy: "Choose --pp_rank below -pp, and -vp only with -pp above 1 (-vp None switches it off).",
        broken: |e| {
            let p = layout_of(e);
            when(p.pp_rank >= p.pp, || format!("--pp_rank {} with {} pipeline stages", p.pp_rank, p.pp))
                .or_else(|| {
                    when(p.vp > 1 && p.pp == 1, || format!("-vp {} without pipeline stages (-pp 1)", p.vp))
                })
        },
    },
    Rule {
        id: "M13",
        wrong: "virtual stages with fewer micro-batches than the interleaved order needs",
        remedy: "Raise -gb, lower -mb or -pp, set model.microbatch_group_size_per_vp_stage between -pp and the micro-batches, \
                 or give -vp None.",
        broken: |e| {
            // Megatron-Core, schedules.py: the checks at the start of the interleaved schedule.
            let p = layout_of(e);
            let share = e.size("train.micro_batch_size").saturating_mul(e.dp().max(1)).max(1);
            let job = usize::try_from(e.size("train.global_batch_size") / share).unwrap_or(0);
            let group = p.microbatch_group_size.unwrap_or(p.pp);
            let rest = job % group.max(1);
            when(p.vp > 1 && (group < p.pp || group > job), || {
                format!(
                    "-vp {} runs groups of {group} micro-batches: a group has at least -pp {} and at most the job's {job}",
                    p.vp, p.pp
                )
            })
            .or_else(|| {
                when(p.vp > 1 && rest > 0 && rest < p.pp, || {
                    format!(
                        "-vp {} runs {job} micro-batches in groups of {group}: the last has {rest}, fewer than -pp {}",
                        p.vp, p.pp
                    )
                })
            })
        },
    },
];
