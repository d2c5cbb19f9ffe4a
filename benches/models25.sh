#!/usr/bin/env bash
# models.csv: an eager and a graph row of each of the 25 models, on a machine with a GPU of 139 GiB: a quarter of an hour or so.
# usage: benches/models25.sh [MBPERF [OUTPUT FOLDER [MODEL ...]]]
# Without a folder: results/mine; results/h200 holds committed figures and is written by naming it. Without models: all 25.
# Paths are from the repository's root, wherever it is called from. Rows are appended: several calls make one file.
# DRYRUN=1: plans every row and runs none (no GPU needed). MAX_TIME: seconds of measuring a row (default 6).
# DEVICE=cpu: tries the script without a GPU; such rows are no figures.
# Exit code: 0 all rows there and equal, 1 one is not, 2 nothing was begun, 130 interrupted.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. benches/common.sh
help_if_asked "$@"
mbperf=${1:-target/release/mbperf}
out=${2:-results/mine}
shift $(($# < 2 ? $# : 2))
max_time=${MAX_TIME:-6}
switch_in DRYRUN

# Planned memory of the larger arm at most. An H200 has 143156 MiB; a process took up to 511 MiB more than planned (results/h200).
LIMIT_MIB=142400 # 139 GiB, 756 MiB less than the card has
# Seconds of a row beside those of measuring: the longest steps take 3 to 4 s, some twenty are run beside those that
# are timed, and a fresh machine compiles kernels and tunes products first.
ROW_S=240

# What is simpler than the recipe asks for, unless it is switched off, and would stand in `approximations`:
STATE=optimizer.use_precision_aware_optimizer=false   # state below fp32
AUX=model.moe_router_load_balancing_type=aux_loss     # the recipe's loss is over all ranks and micro-batches
NO_TP_OVERLAP=comm_overlap.tp_comm_overlap=false
FUSED=model.gradient_accumulation_fusion=true         # the recipe adds gradients up in launches of their own
# What is not built:
NO_A2A_OVERLAP="--moe_a2a_overlap false"
NO_OFFLOAD="-ol 0 model.fine_grained_activation_offloading=false"
NO_STASH=model.moe_paged_stash=false
NO_PACKING=dataset.packed_sequence_specs.packed_sequence_size=null
# For recipes without graphs: the first scope that `--sweep --dryrun` lists, the narrowest that is legal. Others keep their own.
SCOPE="--cuda_graph_impl transformer_engine --cuda_graph_scope"
WHOLE="--cuda_graph_impl local --cuda_graph_scope full_iteration"

# The h100 bf16 recipe, or the nearest that can be run. Second column: what `approximations` may hold, `-` nothing: what is
# approximated by design (compressed and sparse attention, graphs of the tower). Rows that run in bf16 for want of a recipe of that type
# say so in recipe_dtype and compute_dtype.
read -rd '' table <<END
llama3_8b               -                                    -m llama -g h100 -c bf16 $STATE $SCOPE mlp
llama3_70b              -                                    -m llama -g h100 -c bf16 $STATE $NO_TP_OVERLAP $SCOPE mlp
llama31_405b            -                                    -m llama -g h100 -c bf16 $STATE $NO_TP_OVERLAP $SCOPE mlp
qwen3_30b_a3b           -                                    -m qwen -g h100 -c bf16 $STATE
qwen3_235b_a22b         -                                    -m qwen -g h100 -c bf16 $STATE $NO_A2A_OVERLAP $SCOPE moe_router
# Scope attn holds the gated delta nets, too.
qwen3_next_80b_a3b      -                                    -m qwen -g h100 -c bf16 $STATE $AUX $SCOPE attn
# Scope mlp, here and in those like it: the dense layers ahead of those with experts, which lie on the first stage.
deepseek_v3             -                                    -m deepseek -g h100 -c bf16 $STATE $SCOPE mlp
# For gb200 and gb300 and in fp8_mx alone. All 43 layers are planned at 141053 MiB.
deepseek_v4_flash       compressed_attention                 -m deepseek -g gb200 -c fp8_mx --run_dtype bf16 $STATE $NO_STASH
# For gb300 and in fp8_mx alone. All 61 layers are planned at 223 GiB, 48 at 131 with one
# micro-batch; its stages and chunks take multiples of 16.
deepseek_v4_pro         compressed_attention                 -m deepseek -g gb300 -c fp8_mx --run_dtype bf16 $STATE $NO_STASH $NO_OFFLOAD --num_layers 48 --max_microbatches 1
# Muon is not built.
kimi_k2                 -                                    -m kimi -g h100 -c bf16 optimizer.optimizer=adam $SCOPE mlp
# Fine-tuning alone. With the recipe's full recompute no scope is legal (R33), without it two micro-batches of glm51 do not fit.
glm51                   sparse_attention                     -m glm_moe_dsa -g h100 -c bf16 --task sft $STATE $NO_PACKING model.recompute_granularity=null --max_microbatches 1 $SCOPE mlp
glm52                   sparse_attention                     -m glm_moe_dsa -g h100 -c bf16 --task sft $STATE $NO_PACKING model.recompute_granularity=null $SCOPE mlp
gpt_oss_120b            -                                    -m gpt_oss -g h100 -c bf16 $STATE $SCOPE moe_router
# No recipe for h100, none in bf16. NCCL's user buffers are not built.
gpt_oss_20b             -                                    -m gpt_oss -g gb200 -c nvfp4 --run_dtype bf16 --nccl_ub false
# For h100 in fp8_cs alone; those in bf16, for b200 and gb300, have a global batch that does not divide (M06).
nemotronh_56b           -                                    -m nemotronh -g h100 -c fp8_cs --run_dtype bf16 $NO_TP_OVERLAP
nemotron_3_nano         -                                    -m nemotronh -g h100 -c bf16 $STATE
nemotron_3_5_lightning  -                                    -m nemotronh -g h100 -c bf16 $STATE $NO_OFFLOAD
nemotron_3_super        -                                    -m nemotronh -g h100 -c bf16 $STATE $SCOPE attn
# For gb200 and gb300 and in fp8_mx alone. FSDP is not built. All 108 layers are planned at 251 GiB, 56 at 138.
nemotron_3_ultra        -                                    -m nemotronh -g gb200 -c fp8_mx --run_dtype bf16 $FUSED $NO_OFFLOAD --use_megatron_fsdp false --num_layers 56 $SCOPE attn
qwen3_vl_30b_a3b        -                                    -m qwen_vl -g h100 -c bf16 $STATE $NO_A2A_OVERLAP
# For h100 it is refused as it stands: 94 layers do not fill 8 stages.
qwen3_vl_235b_a22b      -                                    -m qwen_vl -g b200 -c bf16 $STATE $NO_A2A_OVERLAP
qwen35_vl_35b_a3b       vision_graphs                        -m qwen_vl -g h100 -c bf16 $STATE $AUX
qwen35_vl_122b_a10b     -                                    -m qwen_vl -g h100 -c bf16 $STATE $AUX $NO_A2A_OVERLAP $SCOPE attn
# For h100 and b200 it is refused as it stands: 60 layers do not fill 8 stages. All 60 are planned at 209 GiB, 37 at 136.
qwen35_vl_397b_a17b     -                                    -m qwen_vl -g b300 -c bf16 $STATE $AUX --num_layers 37 $SCOPE attn
# Full recompute of eight layers: with it one graph of the whole step is the one legal scope (R33).
wan_14b                 -                                    -m wan -g h100 -c bf16 $STATE $FUSED $WHOLE
END

known=$(sed 's/#.*//' <<<"$table" | awk 'NF { print $1 }' | tr '\n' ' ')
read -rd '' -a models <<<"${*:-$known}"
for model in "${models[@]}"; do
    [[ " $known" == *" $model "* ]] || refuse "no model $model: known are $known"
done
[[ $max_time =~ ^[0-9]+(\.[0-9]+)?$ && $max_time =~ [1-9] ]] || refuse "MAX_TIME=$max_time: a number of seconds above 0 is needed, such as 6 or 0.5"
"$mbperf" --version </dev/null >/dev/null 2>&1 || refuse "mbperf cannot be run: $mbperf --version: exit $? (in $PWD)"
if [ -z "${DRYRUN:-}" ]; then
    mkdir -p "$out" && [ -w "$out" ] || refuse "the output folder $out cannot be made or written (in $PWD)"
fi
limit_s=$((ROW_S + 10#${max_time%.*}))
logs=$(mktemp -d) || exit 1
trap 'rm -rf "$logs"' EXIT
trap 'exit 130' INT TERM

failed=0
fails() { # MODEL WHAT...
    echo "$1: FAILED: ${*:2}"
    failed=$((failed + 1))
}
row() { # MODEL ALLOWED ARGUMENTS...
    local model=$1 allowed=$2 start=$SECONDS code approximations mib
    shift 2
    "$mbperf" "$@" --dryrun </dev/null >"$logs/plan" 2>"$logs/said"
    code=$?
    if [ $code != 0 ]; then
        fails "$model" "exit $code: $(tail -1 "$logs/said") ($*)"
        return
    fi
    approximations=$(sed -n 's/^approximations: //p' "$logs/plan")
    mib=$(sed -n 's/^graph arm: .* memory \([0-9]*\) MiB.*/\1/p' "$logs/plan")
    if [ -z "$mib" ]; then # Not built, or no graph: the plan says which.
        fails "$model" "no graph arm: $(grep -E '^(No program|graphs):' "$logs/plan" | tail -1) ($*)"
        return
    fi
    [ "$allowed" != - ] || allowed=none
    if [ "${approximations//, /,}" != "$allowed" ]; then
        fails "$model" "approximations: $approximations; expected: $allowed ($*)"
        return
    fi
    if [ "$mib" -gt $LIMIT_MIB ]; then
        fails "$model" "$mib MiB are planned, over $LIMIT_MIB ($*)"
        return
    fi
    if [ -n "${DRYRUN:-}" ]; then
        echo "$model: planned, $mib MiB, approximations $approximations: $*"
        return
    fi
    # In the foreground: Ctrl-C reaches mbperf, which then ends with 130.
    timeout --foreground -k 20 $limit_s "$mbperf" "$@" --device "${DEVICE:-cuda}" --max_time "$max_time" -q -o "$out/models.csv" </dev/null >"$logs/said" 2>&1
    code=$?
    [ $code != 130 ] || exit 130
    if [ $code = 0 ]; then
        echo "$model: exit 0, $((SECONDS - start)) s, $mib MiB planned: $*"
    else
        [[ $code != 124 && $code != 137 ]] || echo "ended: it ran past $limit_s s" >>"$logs/said"
        fails "$model" "exit $code, $((SECONDS - start)) s: $*"
        tail -3 "$logs/said"
    fi
}
for model in "${models[@]}"; do
    read -r _ allowed words <<<"$(grep "^$model " <<<"$table")"
    # Words without quotes: none holds a blank.
    row "$model" "$allowed" -mr "$model" $words
done

if [ -z "${DRYRUN:-}" ] && [ -f "$out/models.csv" ]; then
    # Cells in quotes, which may hold commas, are none of those that are read.
    awk -F, '
        { gsub(/"[^"]*"/, "quoted") }
        NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
        { rows++; equal += $at["digest_match"] == "true"; simpler += $at["approximations"] != "" }
        END { printf "models.csv: %d rows, %d with digest_match=true, %d with approximations\n", rows, equal, simpler }
    ' "$out/models.csv"
fi
echo "${#models[@]} models, $failed failed, $SECONDS s"
[ $failed = 0 ]
