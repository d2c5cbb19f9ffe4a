#!/usr/bin/env bash
# Rows of the models beyond llama and qwen3 dense/MoE, and the rates of their own ops, on a machine with a GPU.
# usage: benches/models.sh [MBPERF [OUTPUT FOLDER [PART ...]]]   parts: mamba latent delta sinks images recompute pipeline ops
#        variants (rates of attention's variants beside plain attention, of delta nets beside their floor: attention_variants.csv)
# Without a folder: results/mine; results/h200 holds committed figures and is written by naming it.
# DRYRUN=1: plans every row and runs none (no GPU needed).
# MAX_TIME: seconds of measuring a row, in place of the default, which grows to what eight pairs need.
# Exit code: 0 all rows there, 1 one is not, 2 nothing was begun.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. benches/common.sh
help_if_asked "$@"
mbperf=${1:-target/release/mbperf}
out=${2:-results/mine}
shift $(($# < 2 ? $# : 2))
all="mamba latent delta sinks images recompute pipeline ops variants"
choose "$all" "$all" "$@"
seconds_in MAX_TIME
switch_in DRYRUN
begin
row() { # FILE ARGUMENTS...
    local file=$1 start=$SECONDS
    shift
    if [ -n "${DRYRUN:-}" ]; then
        "$mbperf" "$@" --dryrun --format json >"$out/last.json" 2>"$out/last.log"
        local code=$?
        if grep -q '"program": null' "$out/last.json"; then
            echo "NOT BUILT: $*"
            failed
        fi
    else
        timeout --foreground 150 "$mbperf" "$@" --device cuda ${MAX_TIME:+--max_time "$MAX_TIME"} -q -o "$out/$file.csv" >"$out/last.log" 2>&1
        local code=$?
    fi
    echo "${DRYRUN:+planned, }exit $code, $((SECONDS - start)) s: $*"
    [ $code != 130 ] || exit 130
    [ $code = 0 ] && return
    failed
    tail -3 "$out/last.log"
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
PADDED="--use_tokendrop true model.moe_token_dispatcher_type=alltoall"

if wants mamba; then
    echo "== mamba and hybrids"
    for scope in mamba attn,mamba; do
        row nemotron_3_nano $NANO $TE --cuda_graph_scope $scope
        row nemotronh_56b $H56 $TE --cuda_graph_scope $scope
    done
    # Whole layers: without a scope on the command line the recipe's would stay (R10), and they take no dropless experts (R63).
    row nemotron_3_nano $NANO $PADDED $TE model.cuda_graph_scope=[]
    row nemotronh_56b $H56 $TE model.cuda_graph_scope=[]
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
if wants ops && [ -n "${DRYRUN:-}" ]; then
    echo "== ops of these models: none is timed in a dry run"
elif wants ops; then
    echo "== ops of these models"
    # The earlier file is kept until all of the new one is there.
    table=$out/pieces_models.csv
    missed=0
    ops() { # ARGUMENTS...: their rows, below one line of columns in all
        "$mbperf" ops "$@" --format csv >"$out/last.ops" 2>"$out/last.log"
        local code=$?
        [ $code != 130 ] || exit 130
        if [ $code = 0 ] && [ -s "$out/last.ops" ]; then
            tail -n +$((1 + (rows > 0))) "$out/last.ops"
            rows=1
        else
            echo "exit $code: ops $*" >&2
            tail -3 "$out/last.log" >&2
            missed=1
            failed
        fi
    }
    rows=0
    {
        ops ssd $NANO --num_layers 1 model.hybrid_override_pattern=M --stack_only model.recompute_granularity=null
        ops mamba_conv $NANO --num_layers 1 model.hybrid_override_pattern=M --stack_only model.recompute_granularity=null
        ops gated_norm $NANO --num_layers 1 model.hybrid_override_pattern=M --stack_only model.recompute_granularity=null
        ops ssd $H56 -tp 1 -ng 1 --num_layers 1 model.hybrid_override_pattern=M --stack_only
        ops attention $DEEPSEEK
        ops attention $DEEPSEEK --attention_backend own
        ops delta_net $NEXT
        ops attention $OSS
        ops bias $OSS
        ops clamped_glu $OSS
        ops attention $WAN
        ops attention $WAN --attention_backend own
        ops wide_norm $WAN
        ops layer_norm $WAN
        ops gated_residual $WAN
        ops layer_norm $VL -mr qwen3_vl_30b_a3b -g h100 --num_layers 24
        ops gelu $VL -mr qwen3_vl_30b_a3b -g h100 --num_layers 24
    } >"$table.new"
    cut -d, -f1-8 "$table.new"
    if [ $missed = 0 ]; then
        mv "$table.new" "$table"
    else
        echo "not all was timed: $table is not written anew; $table.new holds what was"
    fi
fi
if wants variants && [ -z "${DRYRUN:-}" ]; then
    echo "== attention's variants beside plain attention, delta nets beside their floor"
    python3 benches/attention_variants.py "$mbperf" "$out/attention_variants.csv" || failed
fi
rm -f "$out/last.log" "$out/last.json" "$out/last.ops"
ended
