//! Every rule both ways: a command line that breaks it and the nearest one that does not, and the judgement of all
//! scopes on all implementations and kinds of model.
//!
//! Over 500 lines: one table of pairs, a line or a few for each rule.

use crate::common::{Outcome, outcome, outcome_of};
use mbperf::rules::rules;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const LLAMA: &str = "-m llama -mr llama3_8b -g h100";
const QWEN: &str = "-m qwen -mr qwen3_30b_a3b -g h100";
const HYBRID: &str = "-m nemotronh -mr nemotronh_56b -g h100 -c fp8_cs";
const DEEPSEEK: &str = "-m deepseek -mr deepseek_v3 -g h100";
const DEEPSEEK_V4: &str = "-m deepseek -mr deepseek_v4_flash -g gb200 -c fp8_mx --run_dtype bf16";
const DELTA: &str = "-m qwen -mr qwen3_next_80b_a3b -g h100";
const VISION: &str = "-m qwen_vl -mr qwen3_vl_30b_a3b -g h100";
const NO_GROUPS: &str = "model.moe_router_group_topk=null";
const NO_BIAS: &str = "model.moe_router_enable_expert_bias=false";
const EXPERT_SIZES: &str = "model.moe_router_topk=2 model.moe_ffn_hidden_size=512";
const LATENT: &str =
    "model.kv_lora_rank=512 model.qk_head_dim=128 model.qk_pos_emb_head_dim=64 model.v_head_dim=128";
const DELTA_SIZES: &str = "model.linear_num_key_heads=16 model.linear_num_value_heads=32 model.linear_key_head_dim=128 \
                           model.linear_value_head_dim=128";
const TE: &str = "--cuda_graph_impl transformer_engine --cuda_graph_scope";
const FULL: &str = "--cuda_graph_impl local --cuda_graph_scope full_iteration";
const DROP: &str = "--use_tokendrop true model.moe_token_dispatcher_type=alltoall";
const WARMUP: &str = "model.cuda_graph_warmup_steps=5";
const SEVERAL: &str = "--nproc_per_node 4";
const EXPANDABLE: &[(&str, &str)] = &[("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")];
const FIXED: &[(&str, &str)] =
    &[("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"), ("NCCL_GRAPH_REGISTER", "0")];

/// Rule, model, what breaks it, what keeps it.
type Pair = (&'static str, &'static str, String, String);

fn pair(id: &'static str, model: &'static str, broken: impl Into<String>, kept: impl Into<String>) -> Pair {
    (id, model, broken.into(), kept.into())
}

fn pairs() -> Vec<Pair> {
    vec![
        pair("M01", LLAMA, "--num_layers 0", "--num_layers 1"),
        pair("M01", LLAMA, "-ms 0", "-ms 1"),
        pair("M01", LLAMA, "model.num_layers=-3", "model.num_layers=3"),
        pair("M01", LLAMA, "-mb 0", "-mb 1"),
        pair("M01", LLAMA, "-tp 0", "-tp 1"),
        pair("M01", LLAMA, "--hidden_size 99999999999", "--hidden_size 2048"),
        pair("M01", LLAMA, "--equality_steps 0", "--equality_steps 2 --aa eager"),
        pair("M02", LLAMA, "model.attention_dropout=1.5", "model.attention_dropout=0.5"),
        pair("M02", LLAMA, "--margin -0.1", format!("--margin 0.1 {FULL}")),
        pair("M02", QWEN, "--moe_row_bound 0.5", format!("--moe_row_bound 1.5 {SEVERAL}")),
        pair("M01", QWEN, "model.mtp_num_layers=8192", "model.mtp_num_layers=2"),
        pair("M01", QWEN, "model.moe_latent_size=9223372036854775807", "model.moe_latent_size=1024"),
        pair("M01", DEEPSEEK_V4, "model.q_lora_rank=1000000007", "model.q_lora_rank=512"),
        pair("M01", LLAMA, "model.window_size=[-5,0]", "model.window_size=[-1,-1]"),
        pair("M01", LLAMA, "ddp.bucket_size=-1", "ddp.bucket_size=40000000 --nproc_per_node 2"),
        pair("M01", LLAMA, "dataset.seq_length=16777216 model.seq_length=1024 -mb 2", "-mb 2"),
        pair("M01", LLAMA, "--distributed_timeout_minutes 0", "--distributed_timeout_minutes 1"),
        pair("M02", LLAMA, "--margin 1e-300", format!("--margin 1e-3 {TE} attn")),
        pair("M02", LLAMA, "--watchdog 1e300", "--watchdog 0"),
        pair("M02", LLAMA, "--rendezvous_timeout 1e300", "--rendezvous_timeout 0.5 --nproc_per_node 2"),
        pair("M02", LLAMA, "--spin_percent 1e300", "--spin_percent 10 --aa eager"),
        pair("M02", QWEN, "--moe_row_bound 1e300", format!("--moe_row_bound 16 {SEVERAL}")),
        pair("M02", LLAMA, "model.rotary_percent=1e-300", "model.rotary_percent=0.5"),
        pair("M02", LLAMA, "optimizer.adam_eps=1e-300", "optimizer.adam_eps=1e-15"),
        pair(
            "M02",
            QWEN,
            "model.moe_expert_rank_capacity_factor=1e300",
            "model.moe_expert_rank_capacity_factor=1.5",
        ),
        pair("M02", QWEN, "model.moe_expert_capacity_factor=-1e300", "model.moe_expert_capacity_factor=-1"),
        pair("M14", DEEPSEEK_V4, "model.num_query_groups=2", "model.num_query_groups=1"),
        pair("M14", DEEPSEEK_V4, "model.num_query_groups=null", ""),
        pair("M14", LLAMA, "model.attention_variant=dsv4_hybrid", "model.attention_variant=null"),
        pair("M03", LLAMA, "--domain vlm", "--domain llm"),
        pair("M04", LLAMA, "--data c4", "--data mock"),
        pair("M05", LLAMA, "-ng 9", "-ng 8"),
        pair("M05", QWEN, "-ng 8", "-ng 8 -ep 8"),
        pair("M06", LLAMA, "-gb 129", "-gb 128"),
        pair("M07", LLAMA, "-tp 3 -cp 1 -ng 3 -gb 3", "-tp 4 -cp 1 -ng 4 -gb 4"),
        pair("M08", LLAMA, "--hidden_size 4100", "--hidden_size 4104"),
        pair("M09", LLAMA, "-ep 2", "-ep 1"),
        pair("M09", QWEN, "--num_moe_experts 120", "--num_moe_experts 64"),
        pair("M33", DEEPSEEK, "model.moe_router_num_groups=7", "model.moe_router_num_groups=16"),
        pair("M33", DEEPSEEK, "model.moe_router_group_topk=9", "model.moe_router_group_topk=2"),
        pair("M33", DEEPSEEK, "model.moe_router_group_topk=null", "model.moe_router_num_groups=4"),
        pair(
            "M33",
            DEEPSEEK,
            "model.moe_router_num_groups=128 model.moe_router_group_topk=3",
            "model.moe_router_num_groups=128 model.moe_router_group_topk=4",
        ),
        pair(
            "M33",
            QWEN,
            "model.moe_router_group_topk=2",
            "model.moe_router_group_topk=2 model.moe_router_num_groups=4",
        ),
        pair(
            "M34",
            QWEN,
            "--cuda_graph_impl none model.moe_expert_capacity_factor=100",
            "--cuda_graph_impl none model.moe_expert_capacity_factor=16",
        ),
        pair(
            "M33",
            DEEPSEEK,
            "model.moe_router_num_groups=null",
            format!("model.moe_router_num_groups=null {NO_GROUPS}"),
        ),
        pair(
            "M35",
            LLAMA,
            "model.multi_latent_attention=true",
            format!("model.multi_latent_attention=true {LATENT}"),
        ),
        pair("M35", DEEPSEEK, "model.v_head_dim=null", "model.q_lora_rank=null"),
        pair("M35", DEEPSEEK, "model.moe_ffn_hidden_size=null", "model.moe_ffn_hidden_size=1024"),
        pair("M35", DELTA, "model.linear_key_head_dim=null", "model.linear_key_head_dim=64"),
        pair(
            "M35",
            QWEN,
            "model.attention_variant=gated_delta_net model.linear_attention_freq=4",
            format!("model.attention_variant=gated_delta_net model.linear_attention_freq=4 {DELTA_SIZES}"),
        ),
        pair("M35", LLAMA, "--num_moe_experts 8", format!("--num_moe_experts 8 {EXPERT_SIZES}")),
        pair("M35", HYBRID, "model.mamba_state_dim=null", "model.mamba_num_groups=8"),
        pair(
            "M35",
            HYBRID,
            "--num_layers 2 model.hybrid_override_pattern=ME",
            "--num_layers 2 model.hybrid_override_pattern=M-",
        ),
        pair("M36", VISION, "model.mrope_section=[1,2,3]", "model.mrope_section=[32,16,16]"),
        pair(
            "M37",
            DEEPSEEK,
            "model.moe_router_score_function=softmax",
            format!("model.moe_router_score_function=softmax {NO_BIAS}"),
        ),
        pair(
            "M38",
            LLAMA,
            "model.window_size=[64,0] model.window_attn_skip_freq=0",
            "model.window_size=[64,0] model.window_attn_skip_freq=2",
        ),
        // Multi-latent attention has a key a query head, whatever the groups are.
        pair(
            "M08",
            LLAMA,
            "model.num_attention_heads=12",
            format!("model.multi_latent_attention=true model.num_attention_heads=12 {LATENT}"),
        ),
        pair("M32", LLAMA, "model.attention_backend=flash", "model.attention_backend=auto"),
        pair(
            "M32",
            LLAMA,
            "model.recompute_num_layers=4",
            "model.recompute_granularity=full model.recompute_method=block model.recompute_num_layers=4",
        ),
        pair("M32", LLAMA, "model.sequence_parallel=true", "model.sequence_parallel=true -tp 2 -cp 1"),
        pair("M32", HYBRID, "model.rotary_base=5000", ""),
        pair("M32", LLAMA, "model.glu_linear_offset=1", "train.manual_gc_interval=7"),
        pair("M32", LLAMA, "model.offload_modules=[mlp]", "model.seq_length=512 dataset.seq_length=512"),
        pair("M10", LLAMA, "-sl 1023", "-sl 1024"),
        pair("M11", LLAMA, "-vp 2", "-vp 2 -pp 2 -cp 1"),
        pair("M11", LLAMA, "--pp_rank 1", "--pp_rank 0"),
        pair("M13", LLAMA, "-vp 2 -pp 8 -cp 1 -gb 4", "-vp 2 -pp 8 -cp 1 -gb 8"),
        pair("M13", LLAMA, "-vp 2 -pp 8 -cp 1 -gb 12", "-vp 2 -pp 8 -cp 1 -gb 16"),
        pair(
            "M13",
            LLAMA,
            "-vp 2 -pp 4 -cp 1 model.microbatch_group_size_per_vp_stage=3",
            "-vp 2 -pp 4 -cp 1 model.microbatch_group_size_per_vp_stage=4",
        ),
        pair(
            "M12",
            HYBRID,
            "model.hybrid_override_pattern=M-",
            "model.hybrid_override_pattern=M- --num_layers 2",
        ),
        pair("M20", LLAMA, "--aa graph", "--aa eager"),
        pair("M20", LLAMA, format!("--graph_staging none {FULL}"), format!("--graph_staging none {TE} attn")),
        pair("M21", LLAMA, "--moe_routing balanced", "--moe_routing recipe"),
        pair("M20", LLAMA, WARMUP, format!("{TE} attn {WARMUP}")),
        pair("M20", QWEN, format!("--cuda_graph_impl none {WARMUP}"), WARMUP),
        pair(
            "M20",
            LLAMA,
            "model.cuda_graph_use_single_mempool=true",
            format!("{FULL} model.cuda_graph_use_single_mempool=true"),
        ),
        pair("M21", LLAMA, "--moe_row_bound 2", ""),
        pair("M21", LLAMA, "-et 2", "-et 1"),
        pair("M23", LLAMA, "--margin 0.01", format!("{TE} attn --margin 0.01")),
        pair(
            "M23",
            LLAMA,
            "--cuda_graph_impl none --cuda_graph_scope attn --margin 0.1",
            "--margin 0.1 --aa eager",
        ),
        pair("M23", QWEN, "--cuda_graph_impl none --equality_steps 4", "--equality_steps 4"),
        pair("M23", LLAMA, "--spin_percent 2", "--spin_percent 0"),
        pair("M24", LLAMA, "--optimizer none --lr 1e-4", "--optimizer adam --lr 1e-4"),
        pair("M24", LLAMA, "--optimizer none --min_lr 1e-5", "--optimizer none"),
        pair("M24", LLAMA, "--optimizer none --warmup_iters 10", "--warmup_iters 10"),
        pair("M24", LLAMA, "--optimizer none optimizer.clip_grad=0.5", "optimizer.clip_grad=0.5"),
        pair("M24", LLAMA, "--optimizer none scheduler.lr_decay_iters=9", "scheduler.lr_decay_iters=9"),
        pair("M24", LLAMA, "--stack_only optimizer.adam_beta1=0.8", "--optimizer none --optimizer_type adam"),
        pair("M25", LLAMA, "--stack_only --max_microbatches 4", "--max_microbatches 4"),
        pair("M25", LLAMA, "--stack_only --extrapolate", "--extrapolate"),
        pair("M25", LLAMA, "--stack_only --comm_model nvlink", "--stack_only --comm_model copy"),
        pair("M25", LLAMA, "--stack_only --vocab_size 1024", "--vocab_size 1024"),
        pair(
            "M26",
            QWEN,
            format!("{DROP} --moe_row_bound 1.5 {SEVERAL}"),
            format!("--moe_row_bound 1.5 {SEVERAL}"),
        ),
        pair("M26", QWEN, "--moe_row_bound 2", SEVERAL),
        pair(
            "M26",
            QWEN,
            "--moe_row_bound 2 --nproc_per_node 2 -ep 1",
            "--moe_row_bound 2 --nproc_per_node 2 -ep 2",
        ),
        pair(
            "M26",
            QWEN,
            format!("model.moe_expert_rank_capacity_factor=1.5 --moe_row_bound 2 {SEVERAL}"),
            format!("model.moe_expert_rank_capacity_factor=1.5 {SEVERAL}"),
        ),
        pair(
            "M27",
            LLAMA,
            "model.moe_router_topk=2",
            "--num_moe_experts 8 model.moe_router_topk=2 model.moe_ffn_hidden_size=512",
        ),
        pair("M27", LLAMA, "model.moe_grouped_gemm=true", "model.moe_paged_stash=false"),
        pair("M27", LLAMA, "model.mamba_chunk_size=64", "model.mamba_chunk_size=null"),
        pair("M27", LLAMA, "model.kv_lora_rank=512", "model.kv_lora_rank=null"),
        pair("M27", LLAMA, "model.linear_conv_kernel_dim=4", "model.linear_conv_kernel_dim=null"),
        pair(
            "M27",
            LLAMA,
            "model.mtp_loss_scaling_factor=0.1",
            "model.mtp_num_layers=1 model.mtp_loss_scaling_factor=0.1",
        ),
        pair(
            "M27",
            LLAMA,
            "model.window_attn_skip_freq=2",
            "model.window_attn_skip_freq=2 model.window_size=[64,0]",
        ),
        pair("M27", LLAMA, "model.vision_cuda_graph_impl=local", "model.vision_cuda_graph_impl=none"),
        pair("M27", LLAMA, "model.mhc_recompute_layer_num=2", "model.mhc_recompute_layer_num=null"),
        pair("M27", LLAMA, "peft.dim=8", "peft.dim=8 peft.scheme=lora"),
        pair("M27", HYBRID, "model.linear_key_head_dim=64", "model.mamba_chunk_size=64"),
        pair("M28", LLAMA, "--rendezvous_timeout 5", "--rendezvous_timeout 5 --nproc_per_node 2"),
        pair("M28", LLAMA, "--full_size --device cuda", "--full_size --device auto"),
        pair("M28", LLAMA, "--attention_backend own --device cpu", "--attention_backend own --device auto"),
        pair(
            "M28",
            LLAMA,
            "--attention_deterministic false --device cpu",
            "--attention_deterministic true --device cpu",
        ),
        pair("M28", LLAMA, "--overlap_wgrad --device cpu", "--overlap_wgrad"),
        pair("M28", LLAMA, "--no_samplers --device cpu", "--no_samplers"),
        pair("M28", LLAMA, "--alternate_samplers --device cpu", "--alternate_samplers"),
        pair("M28", LLAMA, "--kernel_cache folder --device cpu", "--kernel_cache folder --device auto"),
        pair("M28", LLAMA, "--cuda_path folder --device cpu", "--cuda_path folder"),
        pair("M28", LLAMA, "--comm_model ib:50 -ng 1 -cp 1 -gb 8", "--comm_model ib:50"),
        pair("M28", LLAMA, "--comm_model nvlink --device cpu", "--comm_model copy --device cpu"),
        pair("M29", LLAMA, "--extrapolate --max_microbatches 0", "--extrapolate --max_microbatches 1"),
        pair("M30", LLAMA, "--max_time 5 -ms 50", "-ms 50"),
        pair("M30", LLAMA, "--max_time 5 train.train_iters=50", "--max_time 5"),
        pair("M30", LLAMA, "--block_steps 10 -ms 50", "--block_steps 10"),
        pair(
            "M31",
            LLAMA,
            "--deterministic --attention_deterministic false",
            "--deterministic --attention_deterministic true",
        ),
        // One arm too takes cuDNN's faster kernels.
        pair(
            "M31",
            LLAMA,
            "--attention_deterministic false --deterministic --cuda_graph_impl none",
            "--attention_deterministic false --cuda_graph_impl none",
        ),
        pair("M22", QWEN, "--first_k_dense_replace 48", "--first_k_dense_replace 47"),
        pair("R11", LLAMA, format!("{TE} full_iteration"), FULL),
        pair("R12", LLAMA, format!("{FULL},mlp"), FULL),
        pair("R13", LLAMA, "--cuda_graph_impl local --cuda_graph_scope mlp", FULL),
        pair("R16", LLAMA, "-rl 2 --recompute_modules mlp", "-rl 2"),
        pair("R19", QWEN, "--use_tokendrop true", DROP),
        pair(
            "R19",
            QWEN,
            format!("{DROP} model.moe_router_load_balancing_type=sinkhorn"),
            format!("{DROP} model.moe_router_load_balancing_type=none"),
        ),
        pair("R25", LLAMA, format!("{TE} attn -ol 1"), format!("{TE} attn -ol 0")),
        pair("R25", LLAMA, format!("{FULL} -ol 1"), "--cuda_graph_impl none -ol 1"),
        pair("R25b", LLAMA, "-ol 32", "-ol 31"),
        pair("R26", QWEN, format!("{DROP} {TE} moe,moe_router"), format!("{DROP} {TE} moe")),
        pair("R27", QWEN, format!("{TE} moe_preprocess"), format!("{TE} moe_preprocess,moe_router")),
        pair("R28", LLAMA, format!("{TE} moe_router"), format!("{TE} attn")),
        pair("R29", QWEN, format!("{TE} mlp"), format!("{TE} attn")),
        pair("R29", QWEN, format!("{TE} mlp"), format!("{TE} mlp --first_k_dense_replace 1")),
        pair("R30", QWEN, format!("{TE} moe"), format!("{DROP} {TE} moe")),
        pair(
            "R23",
            LLAMA,
            "model.cuda_graph_impl=transformer_engine model.cuda_graph_scope=[full,attn]",
            "model.cuda_graph_impl=transformer_engine model.cuda_graph_scope=[full] model.use_te_rng_tracker=true",
        ),
        pair(
            "R30b",
            QWEN,
            "model.moe_pad_expert_input_to_capacity=true",
            "model.moe_pad_expert_input_to_capacity=true model.moe_expert_capacity_factor=1.0",
        ),
        pair(
            "R31",
            QWEN,
            format!(
                "{TE} moe_router,moe_preprocess model.moe_token_dispatcher_type=alltoall model.moe_expert_capacity_factor=1.0"
            ),
            format!(
                "{TE} moe_router model.moe_token_dispatcher_type=alltoall model.moe_expert_capacity_factor=1.0"
            ),
        ),
        pair(
            "R31",
            QWEN,
            format!(
                "{TE} moe_router,moe_preprocess model.moe_token_dispatcher_type=alltoall model.moe_router_padding_for_quantization=true"
            ),
            format!("{TE} moe_router,moe_preprocess model.moe_token_dispatcher_type=alltoall"),
        ),
        pair("R33", LLAMA, format!("{TE} attn -rl 2"), format!("{FULL} -rl 2")),
        pair(
            "R34",
            QWEN,
            format!("{TE} moe_router --recompute_modules moe"),
            format!("{TE} attn --recompute_modules moe"),
        ),
        pair(
            "R35",
            LLAMA,
            format!("{TE} attn --recompute_modules core_attn model.attention_dropout=0.1"),
            format!("{TE} mlp --recompute_modules core_attn model.attention_dropout=0.1"),
        ),
        pair(
            "R36",
            LLAMA,
            format!("{TE} mlp --recompute_modules mlp model.hidden_dropout=0.1"),
            format!("{TE} attn --recompute_modules mlp model.hidden_dropout=0.1"),
        ),
        pair(
            "R37",
            QWEN,
            format!("{DROP} {TE} moe --recompute_modules moe model.moe_input_jitter_eps=0.01"),
            format!("{DROP} {TE} moe --recompute_modules moe"),
        ),
        pair("R38", LLAMA, "--recompute_modules mlpp", "--recompute_modules mlp"),
        pair("R38", LLAMA, "--recompute_modules mla_up_proj", "--recompute_modules core_attn"),
        pair("R38", LLAMA, "--recompute_modules gdn_norm_out", "--recompute_modules gdp_qkv"),
        pair(
            "R38",
            LLAMA,
            "model.recompute_granularity=selective model.recompute_num_layers=2",
            "model.recompute_granularity=selective",
        ),
        pair("R38", LLAMA, "--recompute_modules mhc", "--recompute_modules layernorm"),
        pair("R38b", LLAMA, "model.recompute_granularity=full", "model.recompute_granularity=selective"),
        pair(
            "R38b",
            LLAMA,
            "model.recompute_granularity=full model.recompute_method=block",
            "model.recompute_granularity=full model.recompute_method=block model.recompute_num_layers=-1",
        ),
        pair(
            "R38b",
            DEEPSEEK,
            "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=2",
            "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1",
        ),
        pair(
            "R38b",
            LLAMA,
            "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=0",
            "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=2",
        ),
        pair(
            "R39",
            LLAMA,
            format!("{FULL} rerun_state_machine.check_for_nan_in_loss=true"),
            format!("{TE} attn rerun_state_machine.check_for_nan_in_loss=true"),
        ),
        pair(
            "R40",
            LLAMA,
            format!("{FULL} ddp.check_for_nan_in_grad=true"),
            format!("{FULL} ddp.check_for_nan_in_grad=false"),
        ),
        pair(
            "R41",
            LLAMA,
            "model.cuda_graph_impl=transformer_engine model.cuda_graph_scope=[attn]",
            "model.cuda_graph_impl=transformer_engine model.cuda_graph_scope=[attn] model.use_te_rng_tracker=true",
        ),
        pair(
            "R42",
            DEEPSEEK,
            format!("{TE} mlp --moe_a2a_overlap true"),
            format!("{TE} attn --moe_a2a_overlap true"),
        ),
        pair("R42b", LLAMA, "--moe_a2a_overlap true", "--moe_a2a_overlap false"),
        pair(
            "R42b",
            QWEN,
            "--moe_a2a_overlap true --recompute_modules moe --cuda_graph_impl none",
            "--moe_a2a_overlap true --recompute_modules moe_act --cuda_graph_impl none",
        ),
        pair(
            "R43",
            QWEN,
            "comm_overlap.delay_wgrad_compute=true",
            "comm_overlap.delay_wgrad_compute=true comm_overlap.overlap_moe_expert_parallel_comm=true",
        ),
        pair(
            "R44",
            QWEN,
            format!("{TE} attn --moe_a2a_overlap true model.gradient_accumulation_fusion=false"),
            format!("{TE} attn --moe_a2a_overlap true"),
        ),
        pair(
            "R44",
            QWEN,
            format!("{TE} attn --moe_a2a_overlap true model.add_qkv_bias=true"),
            format!("{TE} moe_router --moe_a2a_overlap true model.add_qkv_bias=true"),
        ),
        pair("R45", LLAMA, format!("{TE} attn --packed_sequence"), format!("{TE} mlp --packed_sequence")),
        pair(
            "R46",
            QWEN,
            format!("{TE} moe_router --data squad_packed"),
            format!("{TE} attn --data squad_packed"),
        ),
        pair(
            "R48",
            LLAMA,
            format!("{FULL} model.fine_grained_activation_offloading=true"),
            format!(
                "{FULL} model.fine_grained_activation_offloading=true model.fine_grained_offloading_max_inflight_offloads=2"
            ),
        ),
        pair(
            "R49",
            QWEN,
            format!("{TE} attn --moe_a2a_overlap true --use_megatron_fsdp true"),
            format!("{TE} attn --use_megatron_fsdp true"),
        ),
        pair("R56", LLAMA, format!("{TE} attn -ms 4"), format!("{TE} attn -ms 5")),
        pair(
            "R56",
            LLAMA,
            format!("{TE} attn model.cuda_graph_warmup_steps=-1"),
            format!("{TE} attn model.cuda_graph_warmup_steps=0"),
        ),
        pair("R57", LLAMA, format!("{TE} mamba"), format!("{TE} mamba,attn")),
        pair("R63", QWEN, FULL, format!("{DROP} {FULL}")),
        pair("R63", QWEN, FULL, format!("{FULL} model.moe_expert_rank_capacity_factor=1.5")),
        // Without flex and HybridEP the factor makes nothing static; whole layers are as the iteration.
        pair(
            "R63",
            QWEN,
            format!(
                "{FULL} model.moe_expert_rank_capacity_factor=1.5 model.moe_token_dispatcher_type=alltoall"
            ),
            format!("{FULL} model.moe_expert_rank_capacity_factor=1.5"),
        ),
        pair(
            "R63",
            QWEN,
            "--cuda_graph_impl transformer_engine model.cuda_graph_scope=[]",
            "--cuda_graph_impl transformer_engine model.cuda_graph_scope=[] model.moe_expert_rank_capacity_factor=1.5",
        ),
    ]
}

fn judged(model: &str, rest: &str, env: &[(&str, &str)]) -> Outcome {
    outcome(
        &format!("{model} {rest}"),
        &env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
    )
}

#[test]
fn every_rule_is_broken_and_kept() {
    let mut seen: BTreeSet<&str> = ["R55", "R49b"].into(); // `the_environment_is_judged`
    for (id, model, broken, kept) in pairs().into_iter() {
        match judged(model, &broken, &[]) {
            Outcome::Error { rule, message } => {
                assert_eq!(rule, Some(id), "{broken}: {message}");
                assert!(message.starts_with(id) && message.contains("\n  "), "no remedy: {message}");
            }
            Outcome::Ok(_) => panic!("{id} lets pass: {model} {broken}"),
        }
        if let Outcome::Error { message, .. } = judged(model, &kept, &[]) {
            panic!("{id}: {model} {kept} should pass: {message}");
        }
        seen.insert(id);
    }
    let without: Vec<&str> = rules().map(|r| r.id).filter(|id| !seen.contains(id)).collect();
    assert!(without.is_empty(), "rules without a pair: {without:?}");
}

/// What the split over ranks refuses, beyond the table.
#[test]
fn impossible_splits_are_refused() {
    for (broken, kept) in [
        ("-pp 2 -cp 1 --num_layers 31", "-pp 2 -cp 1 --num_layers 32"),
        (
            "-pp 2 -cp 1 --pipeline_model_parallel_layout Et|t",
            "-pp 2 -cp 1 --pipeline_model_parallel_layout Et*16|t*16L",
        ),
    ] {
        assert!(matches!(judged(LLAMA, broken, &[]), Outcome::Error { .. }), "{broken}");
        assert!(matches!(judged(LLAMA, kept, &[]), Outcome::Ok(_)), "{kept}");
    }
}

#[test]
fn the_environment_is_judged() {
    let te = format!("{TE} attn");
    assert_eq!(judged(LLAMA, &te, EXPANDABLE).rule(), Some("R55"));
    assert_eq!(judged(LLAMA, FULL, EXPANDABLE).rule(), Some("R55"));
    assert!(matches!(judged(LLAMA, &te, FIXED), Outcome::Ok(_)));
    assert!(matches!(judged("-m llama -mr llama3_8b -g b200", FULL, EXPANDABLE), Outcome::Ok(_)));
    assert_eq!(judged("-m llama -mr llama3_8b -g b200", &te, EXPANDABLE).rule(), Some("R55"));
    assert_eq!(judged(LLAMA, "--nccl_ub true", EXPANDABLE).rule(), Some("R49b"));
    assert!(matches!(judged(LLAMA, "--nccl_ub true", &[]), Outcome::Ok(_)));
}

/// A launcher's processes count as `--nproc_per_node`'s do.
#[test]
fn processes_of_a_launcher_are_several() {
    let torchrun = [
        ("WORLD_SIZE", "2"),
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "a"),
        ("MASTER_PORT", "29500"),
    ];
    for (model, rest, id) in [(LLAMA, "--rendezvous_timeout 5", "M28"), (QWEN, "--moe_row_bound 2", "M26")] {
        assert_eq!(judged(model, rest, &[]).rule(), Some(id));
        assert!(matches!(judged(model, rest, &torchrun), Outcome::Ok(_)), "{rest}");
    }
}

/// What only a recipe sets is never refused as idle, and what has no effect by design is told.
#[test]
fn settings_of_recipes_are_not_the_users() {
    // qwen3_30b_a3b sets warm-up steps and optimizer, and both are idle here.
    for rest in ["--cuda_graph_impl none", "--optimizer none", "--stack_only", DROP] {
        assert!(matches!(judged(QWEN, rest, &[]), Outcome::Ok(_)), "{rest}");
    }
    let told = |rest: &str, id: &str| match judged(LLAMA, rest, &[]) {
        Outcome::Ok(resolved) => resolved.notices.iter().any(|n| n.id == id),
        Outcome::Error { message, .. } => panic!("{rest}: {message}"),
    };
    assert!(told("--cuda_graph_impl none model.use_te_rng_tracker=true", "rng_tracker_ignored"));
    assert!(!told("--cuda_graph_impl none model.use_te_rng_tracker=false", "rng_tracker_ignored"));
    assert!(told("--optimizer none --optimizer_type adam", "optimizer_left_out"));
}

/// `rng.seed` is the seed where no `--seed` is given.
#[test]
fn the_seed_may_be_an_override() {
    let seed = |rest: &str| match judged(LLAMA, rest, &[]) {
        Outcome::Ok(resolved) => resolved.config.seed,
        Outcome::Error { message, .. } => panic!("{rest}: {message}"),
    };
    assert_eq!(
        [seed(""), seed("rng.seed=7"), seed("rng.seed=7 --seed 9"), seed("rng.seed=7 --seed 1234")],
        [1234, 7, 9, 1234]
    );
}

#[test]
fn rule_ids_are_unique_and_printed() {
    let ids: Vec<&str> = rules().map(|r| r.id).collect();
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len());
    let page = mbperf::rules::print();
    assert!(rules().all(|r| page.contains(r.id) && page.contains(r.wrong) && page.contains(r.remedy)));
}

/// All subsets of the 7 scopes on 3 implementations and 3 kinds of model: legal, or refused by a rule with a remedy.
#[test]
fn every_subset_of_scopes_is_judged() {
    let names = ["full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"];
    let mut legal: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for model in [LLAMA, QWEN, HYBRID] {
        for implementation in ["none", "local", "transformer_engine"] {
            for subset in 1u32..1 << names.len() {
                let scope: Vec<&str> =
                    (0..names.len()).filter(|i| subset >> i & 1 == 1).map(|i| names[i]).collect();
                let rest =
                    format!("--cuda_graph_impl {implementation} --cuda_graph_scope {}", scope.join(","));
                match judged(model, &rest, &[]) {
                    Outcome::Ok(_) => *legal.entry((model, implementation)).or_default() += 1,
                    Outcome::Error { rule, message } => {
                        assert!(rule.is_some() && message.contains("\n  "), "{model} {rest}: {message}");
                    }
                }
            }
        }
    }
    // Counted by hand: none drops every scope; local takes full_iteration alone, and no dropless MoE;
    // by layer {attn,mlp} x {mamba or not} (not mamba alone), {attn} x {-, router, router+preprocess} x {mamba}
    // without nothing and mamba alone, and all of {attn,mlp,mamba}.
    let expected = BTreeMap::from([
        ((LLAMA, "none"), 127),
        ((LLAMA, "local"), 1),
        ((LLAMA, "transformer_engine"), 6),
        ((QWEN, "none"), 127),
        ((QWEN, "transformer_engine"), 10),
        ((HYBRID, "none"), 127),
        ((HYBRID, "local"), 1),
        ((HYBRID, "transformer_engine"), 7),
    ]);
    assert_eq!(legal, expected);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is typed, an answer comes back.
    #[test]
    fn no_command_line_panics(words in prop::collection::vec(prop_oneof![
        "[-=a-z_.0-9,*|()\\[\\] ]{0,16}",
        prop::sample::select(vec![
            "-m", "llama", "qwen", "-mr", "llama3_8b", "qwen3_30b_a3b", "-g", "h100", "-ng", "-tp", "-pp", "-cp", "-ep", "-et", "-vp",
            "-gb", "-mb", "-sl", "-ms", "0", "-1", "9223372036854775807", "--num_layers", "--hidden_size", "--cuda_graph_scope",
            "--cuda_graph_impl", "attn,mlp", "transformer_engine", "nan", "None", "--", "--help", "-rl", "recipes",
            "--pipeline_model_parallel_layout", "(t*9|)*9", "model.num_layers=4", "model.moe_layer_freq=[0]*3",
        ]).prop_map(str::to_owned),
    ], 0..10)) {
        let base: Vec<String> = LLAMA.split(' ').map(str::to_owned).collect();
        let _ = outcome_of(&words, &BTreeMap::new());
        let _ = outcome_of(&[base, words].concat(), &BTreeMap::new());
    }

    /// Sizes of any kind are judged, never overflow.
    #[test]
    fn no_size_panics(model in prop::sample::select(vec![LLAMA, QWEN, HYBRID, DEEPSEEK]),
                      flag in prop::sample::select(vec!["-ng", "-tp", "-pp", "-cp", "-ep", "-et", "-vp", "-gb", "-mb", "-sl", "-ms", "-rl", "-ol",
                          "--num_layers", "--hidden_size", "--vocab_size", "--num_moe_experts", "--first_k_dense_replace", "--pp_rank",
                          "--max_microbatches", "--equality_steps", "--warmup_iters"]),
                      value in prop_oneof![any::<i64>(), -3i64..300]) {
        if let Outcome::Ok(resolved) = outcome(&format!("{model} {flag} {value}"), &BTreeMap::new()) {
            let c = resolved.config;
            prop_assert!(c.batch.num_microbatches >= 1 && c.parallel.dp >= 1 && !c.model.layers.is_empty());
        }
    }
}
