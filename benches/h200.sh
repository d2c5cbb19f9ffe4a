#!/usr/bin/env bash
# Every figure under results/h200/, on a machine with a GPU (PyTorch and compute-sanitizer beside it): builds nothing.
# usage: benches/h200.sh [MBPERF [OUTPUT FOLDER [PART ...]]]     parts: selftest qwen llama cold referee sanitizer side ops verdict host_model
set -uo pipefail
cd "$(dirname "$0")/.."
mbperf=${1:-target/release/mbperf}
out=${2:-results/h200}
shift $(($# < 2 ? $# : 2))
parts=${*:-selftest qwen llama cold referee sanitizer side ops}
mkdir -p "$out"
wants() { [[ " $parts " == *" $1 "* ]]; }
row() { # FILE ARGUMENTS...
    local file=$1 start=$SECONDS
    shift
    "$mbperf" "$@" -q -o "$out/$file.csv" >"$out/last.log" 2>&1
    local code=$?
    echo "exit $code, $((SECONDS - start)) s: $*"
    [ $code = 0 ] || tail -3 "$out/last.log"
}
LLAMA="-m llama -mr llama3_8b -g h100 -cp 1"
QWEN="-m qwen -mr qwen3_30b_a3b -g h100"
PADDED="--use_tokendrop true model.moe_token_dispatcher_type=alltoall"

if wants selftest; then
    echo "== selftest"
    "$mbperf" selftest >"$out/selftest.txt" 2>&1
    tail -1 "$out/selftest.txt"
    grep FAILED "$out/selftest.txt" | cut -c1-300
fi
# Steps of 0.1, 0.5 and 1.5 s in the default time, which grows to what eight pairs need: about 3 and 6 minutes.
if wants qwen; then
    echo "== rows of qwen3_30b_a3b"
    row qwen3_30b_a3b $QWEN
    row qwen3_30b_a3b $QWEN --cuda_graph_scope attn,moe_router
    row qwen3_30b_a3b $QWEN --cuda_graph_scope attn,moe_router,moe_preprocess
    row qwen3_30b_a3b $QWEN $PADDED --cuda_graph_impl transformer_engine --cuda_graph_scope moe
    row qwen3_30b_a3b $QWEN $PADDED --cuda_graph_impl local --cuda_graph_scope full_iteration
fi
if wants llama; then
    echo "== rows of llama3_8b"
    for seq in 8192 512; do
        row llama3_8b $LLAMA -sl $seq --cuda_graph_scope attn
        row llama3_8b $LLAMA -sl $seq --cuda_graph_scope attn,mlp
        row llama3_8b $LLAMA -sl $seq --cuda_graph_impl transformer_engine
        row llama3_8b $LLAMA -sl $seq --cuda_graph_scope full_iteration
    done
fi
if wants cold; then
    echo "== the main command, process start to CSV, with a cold and then a warm kernel cache"
    cache=$(mktemp -d)
    for state in cold warm; do
        start=$(date +%s%N)
        "$mbperf" $QWEN --cuda_graph_scope attn,moe_router --kernel_cache "$cache" -q -o "$out/main_command_$state.csv" >/dev/null 2>&1
        echo "$state cache: exit $?, $(($(($(date +%s%N) - start)) / 1000000)) ms"
    done | tee "$out/main_command.txt"
    rm -rf "$cache"
fi
if wants referee; then
    echo "== PyTorch referee"
    dumps=$(mktemp -d)
    small="--num_layers 2 --hidden_size 512 -sl 256 --vocab_size 1024 --max_microbatches 1 -q --max_time 0.5 -o $dumps/rows.csv"
    dump() { local name=$1; shift; "$mbperf" "$@" $small --dump "$dumps/$name" >/dev/null 2>&1; }
    for device in cuda cpu; do
        dump ${device}_llama3_8b $LLAMA --device $device
        dump ${device}_qwen3_dropless $QWEN --device $device
        dump ${device}_qwen3_dropless_own_routing $QWEN --device $device model.moe_router_force_load_balancing=false
        dump ${device}_qwen3_padded $QWEN --device $device $PADDED --cuda_graph_impl none
    done
    python3 tests/pytorch/check.py "$dumps"/*/ >"$out/referee.txt" 2>&1
    echo "exit $?"
    sed -i "s|$dumps/||" "$out/referee.txt"
    grep -c agrees "$out/referee.txt"
    rm -rf "$dumps"
fi
if wants sanitizer; then
    echo "== compute-sanitizer on small shapes"
    : >"$out/sanitizer.txt"
    check() { # TOOL NAME SECONDS
        local log
        log=$(mktemp)
        # Our own kernels: cuDNN's have checks of their own.
        timeout "$3" compute-sanitizer --tool "$1" --log-file "$log" "$mbperf" selftest --only "$2" --except cudnn >/dev/null 2>&1
        echo "$1 selftest --only $2 --except cudnn: exit $? $(grep -h SUMMARY "$log" | sed 's/=* *//')" | tee -a "$out/sanitizer.txt"
        rm -f "$log"
    }
    for op in attention_fwd attention_bwd grouped_gemm_n grouped_gemm_tn moe_sort combine_rows gather_rows router rmsnorm qkv_rope swiglu cross_entropy embedding adam grad_norm column_sum copy "arms equal: llama attn,mlp" "arms equal: qwen alltoall"; do
        check memcheck "$op" 60
    done
    for op in attention_fwd attention_bwd grouped_gemm_n grouped_gemm_tn moe_sort router rmsnorm qkv_rope cross_entropy embedding grad_norm column_sum ssd gated_norm mamba_conv; do
        check racecheck "$op" 60
    done
fi
if wants side; then
    echo "== side by side with PyTorch"
    benches/side_by_side.sh "$mbperf" "$out" 2>"$out/last.log" || tail -5 "$out/last.log"
fi
if wants ops; then
    echo "== pieces"
    "$mbperf" ops -m llama -mr llama3_8b -g h100 -cp 1 --num_layers 1 --max_microbatches 1 --format csv >"$out/pieces.csv"
    "$mbperf" ops $QWEN --num_layers 1 --stack_only --format csv | tail -n +2 >>"$out/pieces.csv"
    "$mbperf" ops gemm $QWEN $PADDED --num_layers 1 --stack_only --format csv | tail -n +2 >>"$out/pieces.csv"
fi
if wants verdict; then
    benches/verdict.sh "$mbperf" "$out"
fi
if wants host_model; then
    echo "== host model against PyTorch"
    benches/host_model_check.sh "$mbperf" "$out"
fi
rm -f "$out/last.log"
