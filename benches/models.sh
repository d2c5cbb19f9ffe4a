#!/usr/bin/env bash
# Rows of the models beyond llama and qwen3 dense/MoE, and the rates of their own ops, on a machine with a GPU.
# usage: benches/models.sh [MBPERF [OUTPUT FOLDER [PART ...]]]   parts: mamba latent delta sinks images recompute pipeline ops
# Without a folder: results/mine; results/h200 holds committed figures and is written by naming it.
# DRYRUN=1: plans every row and runs none (no GPU needed).
set -uo pipefail
cd "$(dirname "$0")/.."
mbperf=${1:-target/release/mbperf}
out=${2:-results/mine}
shift $(($# < 2 ? $# : 2))
parts=${*:-mamba latent delta sinks images recompute pipeline ops}
mkdir -p "$out"
wants() { [[ " $parts " == *" $1 "* ]]; }
row() { # FILE ARGUMENTS...
    local file=$1 start=$SECONDS
    shift
    if [ -n "${DRYRUN:-}" ]; then
        "$mbperf" "$@" --dryrun --format json >"$out/last.json" 2>"$out/last.log"
        local code=$?
        grep -q '"program": null' "$out/last.json" && echo "NOT BUILT: $*"
    else
        timeout 150 "$mbperf" "$@" -q -o "$out/$file.csv" >"$out/last.log" 2>&1
        local code=$?
    fi
    echo "exit $code, $((SECONDS - start)) s: $*"
    [ $code = 0 ] || tail -3 "$out/last.log"
}
NANO="-m nemotronh -mr nemotron_3_nano -g h100"
H56="-m nemotronh -mr nemotronh_56b -g h100 -c fp8_cs --run_dtype bf16"
# One rank of the whole job's width; the layers that fit one GPU beside their optimizer state.
LATENT="-c bf16 --task pretrain -pp 1 -vp None -tp 1 -ep 64 optimizer.optimizer=adam model.mtp_num_layers=0"
DEEPSEEK="-m deepseek -mr deepseek_v3 -g h100 $LATENT --num_layers 4"
KIMI="-m kimi -mr kimi_k2 -g h100 $LATENT --num_layers 3"
OSS="-m gpt_oss -mr gpt_oss_120b -g h100 -c bf16 -pp 1 --num_layers 4"
NEXT="-m qwen -mr qwen3_next_80b_a3b -g h100 --num_layers 4"
VL="-m qwen_vl -c bf16 --moe_a2a_overlap false"
WAN="-m wan -mr wan_14b -g h100 model.recompute_granularity=null --max_microbatches 1"
TE="--cuda_graph_impl transformer_engine"

if wants mamba; then
    echo "== mamba and hybrids"
    for scope in mamba attn,mamba; do
        row nemotron_3_nano $NANO $TE --cuda_graph_scope $scope
        row nemotronh_56b $H56 $TE --cuda_graph_scope $scope
    done
    row nemotron_3_nano $NANO $TE
    row nemotronh_56b $H56 $TE
fi
if wants latent; then
    echo "== multi-latent attention"
    row deepseek_v3 $DEEPSEEK $TE --cuda_graph_scope attn,moe_router,moe_preprocess
    row kimi_k2 $KIMI $TE --cuda_graph_scope attn,moe_router,moe_preprocess
fi
if wants delta; then
    echo "== gated delta net"
    for scope in attn attn,moe_router attn,moe_router,moe_preprocess; do
        row qwen3_next_80b_a3b $NEXT $TE --cuda_graph_scope $scope
    done
fi
if wants sinks; then
    echo "== sliding windows, sinks, biases"
    row gpt_oss_120b $OSS $TE --cuda_graph_scope attn,moe_router,moe_preprocess
fi
if wants images; then
    echo "== image towers and a diffusion transformer"
    row qwen3_vl_30b_a3b $VL -mr qwen3_vl_30b_a3b -g h100
    row qwen3_vl_235b_a22b $VL -mr qwen3_vl_235b_a22b -g b200
    row qwen35_vl_35b_a3b $VL -mr qwen35_vl_35b_a3b -g h100
    row qwen35_vl_122b_a10b $VL -mr qwen35_vl_122b_a10b -g h100 $TE --cuda_graph_scope attn,moe_router,moe_preprocess
    row qwen35_vl_397b_a17b $VL -mr qwen35_vl_397b_a17b -g b300 --num_layers 24 $TE --cuda_graph_scope attn
    row wan_14b $WAN $TE --cuda_graph_scope attn
fi
if wants recompute; then
    echo "== recompute"
    row recompute -m qwen -mr qwen3_30b_a3b -g h100 --num_layers 8 --cuda_graph_scope attn --recompute_modules moe,layernorm
    row recompute -m qwen -mr qwen3_30b_a3b -g h100 --num_layers 8 --cuda_graph_scope attn
    row recompute -m llama -mr llama3_8b -g h100 -cp 1 --num_layers 8 --cuda_graph_impl local --cuda_graph_scope full_iteration -rl 5
    row recompute -m llama -mr llama3_8b -g h100 -cp 1 --num_layers 8 --cuda_graph_impl local --cuda_graph_scope full_iteration
fi
if wants pipeline; then
    echo "== pipeline stages"
    row pipeline -m qwen -mr qwen3_235b_a22b -g gb200 -ng 64 --pp_rank 4
    row pipeline -m qwen -mr qwen3_235b_a22b -g gb200 -ng 64 --pp_rank 0
    row pipeline -m llama -mr llama3_70b -g b200 -c bf16 --pp_rank 3
fi
if wants ops && [ -z "${DRYRUN:-}" ]; then
    echo "== ops of these models"
    ops() { "$mbperf" ops "$@" --format csv; }
    {
        ops ssd $NANO --num_layers 1 model.hybrid_override_pattern=M --stack_only model.recompute_granularity=null
        ops mamba_conv $NANO --num_layers 1 model.hybrid_override_pattern=M --stack_only model.recompute_granularity=null | tail -n +2
        ops gated_norm $NANO --num_layers 1 model.hybrid_override_pattern=M --stack_only model.recompute_granularity=null | tail -n +2
        ops ssd $H56 -tp 1 -ng 1 --num_layers 1 model.hybrid_override_pattern=M --stack_only | tail -n +2
        ops attention $DEEPSEEK | tail -n +2
        ops attention $DEEPSEEK --attention_backend own | tail -n +2
        ops delta_net $NEXT | tail -n +2
        ops attention $OSS | tail -n +2
        ops bias $OSS | tail -n +2
        ops clamped_glu $OSS | tail -n +2
        ops attention $WAN | tail -n +2
        ops attention $WAN --attention_backend own | tail -n +2
        ops wide_norm $WAN | tail -n +2
        ops layer_norm $WAN | tail -n +2
        ops gated_residual $WAN | tail -n +2
        ops layer_norm $VL -mr qwen3_vl_30b_a3b -g h100 --num_layers 24 | tail -n +2
        ops gelu $VL -mr qwen3_vl_30b_a3b -g h100 --num_layers 24 | tail -n +2
    } >"$out/pieces_models.csv"
    cut -d, -f1-8 "$out/pieces_models.csv"
fi
rm -f "$out/last.log" "$out/last.json"
