#!/usr/bin/env bash
# How far a verdict can be trusted, on a machine with a GPU: A/A, a known 2 % slowdown, a neighbour, the samplers' cost.
# usage: benches/verdict.sh [MBPERF [OUTPUT FOLDER [PART ...]]]      parts: aa (5 minutes) spin neighbour samplers
# Without a folder: results/mine; results/h200 holds committed figures and is written by naming it. Paths are from the
# repository's root, wherever it is called from.
# benches/verdict_summary.py [OUTPUT FOLDER] prints the figures of rows that are there.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. benches/common.sh
help_if_asked "$@"
mbperf=${1:-target/release/mbperf}
out=${2:-results/mine}
shift $(($# < 2 ? $# : 2))
all="aa spin neighbour samplers"
choose "$all" "$all" "$@"
begin
LLAMA=(-m llama -mr llama3_8b -g h100 -cp 1 --num_layers 4 -sl 512 --stack_only --cuda_graph_scope attn)
QWEN=(-m qwen -mr qwen3_30b_a3b -g h100 --num_layers 4 -sl 4096 --stack_only --cuda_graph_scope "attn,moe_router"
    model.moe_token_dispatcher_type=alltoall)
# Seconds until a process that loads the GPU must have measured once.
LOAD_STARTS_S=90
run() { # FILE ARGUMENTS...
    local file=$1 start=$SECONDS
    shift
    timeout --foreground 120 "$mbperf" "$@" --device cuda -q -o "$out/$file.csv" >"$out/last.log" 2>&1
    local code=$?
    echo "exit $code, $((SECONDS - start)) s: $*"
    [ $code != 130 ] || exit 130
    [ $code = "${expected:-0}" ] && return
    failed
    tail -3 "$out/last.log"
}
if wants aa; then
    echo "== A/A, twenty measurements each: at least 18 equivalent, none faster or slower"
    for arm in graph eager; do
        run aa "${LLAMA[@]}" --aa $arm --repeat 20 --max_time 4
        run aa "${QWEN[@]}" --aa $arm --repeat 20 --max_time 6
    done
fi
if wants spin; then
    echo "== one arm 2 % slower: at least 19 of 20 slower"
    run spin "${LLAMA[@]}" --aa graph --repeat 20 --max_time 4 --spin_percent 2
    run spin "${QWEN[@]}" --aa graph --repeat 20 --max_time 6 --spin_percent 2
fi
if wants neighbour; then
    echo "== beside a second process that loads the GPU (a notice; --strict exits 1), and alone"
    beside=$(mktemp -d)
    # A measurement ends when it is precise, after some 4 s: twenty of them last longer than the run beside them.
    "$mbperf" "${QWEN[@]}" --aa eager --repeat 20 --max_time 6 -q -o "$beside/load.csv" >"$beside/log" 2>&1 &
    load=$!
    alive() { if kill -0 $load 2>/dev/null; then echo "runs"; else echo "has ended: $(tail -1 "$beside/log")"; fi; }
    for ((waited = 0; waited < LOAD_STARTS_S; waited++)); do
        # Once its first rows are there it computes.
        if [ -s "$beside/load.csv" ] || ! kill -0 $load 2>/dev/null; then break; fi
        sleep 1
    done
    rows() { if [ -s "$beside/load.csv" ]; then grep -c ok "$beside/load.csv"; else echo 0; fi; }
    echo "the load, before: $(alive), $(rows) rows"
    expected=1 run neighbour "${LLAMA[@]}" --strict --max_time 5
    echo "the load, after: $(alive), $(rows) rows"
    kill -INT $load 2>/dev/null
    wait $load
    rm -r "$beside"
    run neighbour "${LLAMA[@]}" --strict --max_time 5
fi
if wants samplers; then
    echo "== host submit of pairs of blocks behind a reading of the card and behind none, in turn: at most 1 % apart"
    run samplers "${LLAMA[@]}" --aa eager --alternate_samplers --repeat 20 --max_time 4
fi
rm -f "$out/last.log"
python3 benches/verdict_summary.py "$out" || failed
ended
