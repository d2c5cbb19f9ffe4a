//! Rules about numbers (judged first: later rules may rely on sane sizes) and about the rank layout (judged last).

use super::{Effective, Rule};
use crate::config::{Ddp, Parallel};
use crate::recipe::{MAX_LAYERS, layer_kinds};
use crate::workloads::share::layout_stages;

/// Counts beyond this are typing errors.
const MAX_SIZE: i64 = 1 << 30;
/// Widths of the model beyond this are typing errors: the widest today are under 1 << 17.
const MAX_WIDTH: i64 = 1 << 20;
/// Tokens of a micro-batch, and words of a vocabulary: kernels count elements of a row of them in 32 bits.
const MAX_LENGTH: i64 = 1 << 24;
/// Experts, and choices a token: the largest models have under 1 << 10.
const MAX_EXPERTS: i64 = 1 << 14;
/// FLOPs of a rank's step beyond which no GPU ends it within a quarter of an hour (at 10^15 a second); products of
/// sizes below it also fit their integers.
const MAX_STEP_FLOPS: f64 = 1e18;
/// Layers times micro-batches of a rank's step: some hundred launches each, all planned and kept one by one.
const MAX_LAYER_PASSES: f64 = 32768.0;
/// Widths of vectors that kernels load at once, in bf16 elements (16 bytes).
const VECTOR: i64 = 8;

fn when(broken: bool, text: impl FnOnce() -> String) -> Option<String> {
    broken.then(text)
}

/// A number as a person writes it: 1e308 is not spelt out in 309 digits.
fn figure(x: f64) -> String {
    if x == 0.0 || (1e-6..1e15).contains(&x.abs()) { x.to_string() } else { format!("{x:e}") }
}

/// The first of these settings that is set and outside its range.
fn out_of_range(e: &Effective, keys: &[&str], least: i64, most: i64) -> Option<String> {
    let bad = |key: &&str| {
        e.values
            .int(key)
            .filter(|v| *v < least || *v > most)
            .map(|v| format!("{key} is {v}, outside {least} to {most}"))
    };
    keys.iter().find_map(bad)
}

/// Micro-batches of a step that are run.
fn micro_batches(e: &Effective) -> f64 {
    let of = |key: &str| e.values.int(key).map_or(1.0, |v| v as f64);
    let job = of("train.global_batch_size") / (of("train.micro_batch_size") * e.dp() as f64).max(1.0);
    let most = e.args.mbperf.max_microbatches as f64;
    if most > 0.0 { job.min(most).max(1.0) } else { job.max(1.0) }
}

/// FLOPs of a rank's step, roughly: six a weight and token, and attention's square.
fn step_flops(e: &Effective) -> f64 {
    let of = |key: &str| e.values.int(key).map_or(0.0, |v| v as f64);
    let or = |a: f64, b: f64| if a > 0.0 { a } else { b };
    let tokens = of("model.seq_length") * of("train.micro_batch_size") / e.cp() as f64;
    let heads = of("model.num_attention_heads");
    let hidden = of("model.hidden_size");
    let width = heads * or(of("model.kv_channels"), hidden / heads.max(1.0));
    let active = of("model.moe_ffn_hidden_size") * of("model.moe_router_topk");
    let layer = hidden * (4.0 * width + 3.0 * of("model.ffn_hidden_size").max(active))
        + of("model.seq_length") * width;
    let ranks = (e.tp() * e.pp()) as f64;
    let head = hidden * of("model.vocab_size") / e.tp() as f64;
    6.0 * tokens * micro_batches(e) * (layer * of("model.num_layers") / ranks + head)
}

pub const NUMBERS: &[Rule] = &[
    Rule {
        id: "M01",
        wrong: "a size, count or step number that is 0, negative or absurdly large",
        remedy: "Give a number within the limits; leave the option out to keep the recipe's value.",
        broken: |e| {
            let widths = [
                "model.hidden_size",
                "model.num_attention_heads",
                "model.num_query_groups",
                "model.kv_channels",
                "model.ffn_hidden_size",
                "model.moe_ffn_hidden_size",
                "model.moe_shared_expert_intermediate_size",
                "train.micro_batch_size",
            ];
            let lengths = [
                "model.vocab_size",
                "model.make_vocab_size_divisible_by",
                "model.seq_length",
                "dataset.seq_length",
            ];
            let experts = ["model.num_moe_experts", "model.moe_router_topk"];
            let sizes = [
                "train.global_batch_size",
                "train.train_iters",
                "model.tensor_model_parallel_size",
                "model.pipeline_model_parallel_size",
                "model.context_parallel_size",
                "model.expert_model_parallel_size",
                "model.expert_tensor_parallel_size",
                "model.virtual_pipeline_model_parallel_size",
                "model.microbatch_group_size_per_vp_stage",
            ];
            let option = |name: &str, v: i64, least: i64| {
                when(v < least || v > MAX_SIZE, || format!("{name} is {v}, outside {least} to {MAX_SIZE}"))
            };
            let a = &e.args;
            out_of_range(e, &["model.num_layers"], 1, i64::try_from(MAX_LAYERS).unwrap_or(i64::MAX))
                .or_else(|| out_of_range(e, &widths, 1, MAX_WIDTH))
                .or_else(|| out_of_range(e, &lengths, 1, MAX_LENGTH))
                .or_else(|| out_of_range(e, &experts, 1, MAX_EXPERTS))
                .or_else(|| out_of_range(e, &sizes, 1, MAX_SIZE))
                .or_else(|| {
                    let counts = [
                        "scheduler.lr_warmup_iters",
                        "model.cpu_offloading_num_layers",
                        "model.mtp_num_layers",
                        "model.num_layers_in_first_pipeline_stage",
                        "model.num_layers_in_last_pipeline_stage",
                    ];
                    out_of_range(e, &counts, 0, MAX_SIZE)
                })
                // Any number is legal there (R16): below 1, no layer is recomputed.
                .or_else(|| out_of_range(e, &["model.recompute_num_layers"], -MAX_SIZE, MAX_SIZE))
                .or_else(|| option("-ng", e.num_gpus, 1))
                .or_else(|| e.max_steps.and_then(|v| option("-ms", v, 1)))
                .or_else(|| option("--max_microbatches", a.mbperf.max_microbatches, 0))
                .or_else(|| option("--pp_rank", a.mbperf.pp_rank, 0))
                .or_else(|| a.mbperf.equality_steps.and_then(|v| option("--equality_steps", v, 2)))
                .or_else(|| a.performance.activation_offload_layers.and_then(|v| option("-ol", v, 0)))
                .or_else(|| {
                    let tokens = e.values.int("train.micro_batch_size").unwrap_or(1).saturating_mul(
                        e.values.int("model.seq_length").unwrap_or(1),
                    );
                    when(tokens > MAX_LENGTH, || {
                        format!("-mb x -sl is {tokens} tokens a micro-batch, above {MAX_LENGTH}")
                    })
                })
                .or_else(|| {
                    let layers = e.values.int("model.num_layers").unwrap_or(1) as f64 / e.pp() as f64;
                    let passes = (layers * micro_batches(e)).ceil();
                    when(passes > MAX_LAYER_PASSES, || {
                        format!(
                            "a rank's layers times the micro-batches to run (--max_microbatches) are {passes}, above \
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
        remedy: "Dropout and Adam's betas lie in [0, 1); learning rates and --margin are not negative; --moe_row_bound is 1 \
                 or more; all else is positive.",
        broken: |e| {
            let within = |name: &str, v: Option<f64>, low: f64, high: f64| {
                v.filter(|v| !v.is_finite() || *v < low || *v >= high)
                    .map(|v| format!("{name} is {}", figure(v)))
            };
            let setting = |key: &str, low: f64, high: f64| within(key, e.values.float(key), low, high);
            let least = f64::MIN_POSITIVE;
            setting("model.attention_dropout", 0.0, 1.0)
                .or_else(|| setting("model.hidden_dropout", 0.0, 1.0))
                .or_else(|| {
                    [
                        "optimizer.lr",
                        "optimizer.min_lr",
                        "optimizer.weight_decay",
                        "optimizer.clip_grad",
                        "model.moe_aux_loss_coeff",
                    ]
                    .into_iter()
                    .find_map(|k| setting(k, 0.0, f64::MAX))
                })
                .or_else(|| {
                    ["optimizer.adam_beta1", "optimizer.adam_beta2"]
                        .into_iter()
                        .find_map(|k| setting(k, 0.0, 1.0))
                })
                .or_else(|| {
                    [
                        "model.init_method_std",
                        "model.layernorm_epsilon",
                        "optimizer.adam_eps",
                        "model.rotary_base",
                        "model.moe_expert_rank_capacity_factor",
                        "model.moe_router_topk_scaling_factor",
                    ]
                    .into_iter()
                    .find_map(|k| setting(k, least, f64::MAX))
                })
                .or_else(|| setting("model.rotary_percent", least, 1.0 + f64::EPSILON))
                .or_else(|| within("model.moe_expert_capacity_factor", e.capacity_factor(), least, f64::MAX))
                .or_else(|| within("--margin", Some(e.args.mbperf.margin), 0.0, 1.0))
                .or_else(|| within("--max_time", e.args.mbperf.max_time, least, f64::MAX))
                .or_else(|| within("--moe_row_bound", Some(e.args.mbperf.moe_row_bound), 1.0, f64::MAX))
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
            let groups = e.values.int("model.num_query_groups").filter(|g| *g % tp != 0 && tp % *g != 0);
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
            let groups = e.values.int("model.num_query_groups").unwrap_or(heads);
            let channels = e.values.int("model.kv_channels");
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
