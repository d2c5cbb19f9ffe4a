#!/usr/bin/env bash
# Figures of two ranks with NCCL between them, on a machine with two GPUs: builds nothing.
# usage: benches/h200x2.sh [MBPERF [OUTPUT FOLDER [PART ...]]]
# Without a folder: results/mine; results/h200x2 is for figures that are committed and is written by naming it.
# parts: rows (of qwen llama nemotron, each a part too) captures bandwidth (PyTorch beside it); without one all
# DRYRUN=1: plans every run and starts none (no GPU needed).
# MAX_TIME: seconds of measuring a row, 20 if not given. CAPTURES: captures in a row, 200 if not given.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
# NVLink multicast (NVLS) is broken on some lent or virtualised machines: a program that uses it there can put the GPUs out of
# service. Off unless the caller says otherwise, for mbperf and for the bare loop alike.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
. benches/common.sh
help_if_asked "$@"
mbperf=${1:-target/release/mbperf}
out=${2:-results/mine}
shift $(($# < 2 ? $# : 2))
all="rows qwen llama nemotron captures bandwidth"
choose "$all" "rows captures bandwidth" "$@"
seconds_in MAX_TIME
switch_in DRYRUN
max_time=${MAX_TIME:-20}
captures=${CAPTURES:-200}
[[ $captures =~ ^[1-9][0-9]{0,5}$ ]] || refuse "CAPTURES=$captures: a number from 1 on is needed"
begin
if [ -z "${DRYRUN:-}" ]; then
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
    [ "$gpus" -ge 2 ] || refuse "two GPUs are needed, nvidia-smi -L lists $gpus: DRYRUN=1 plans without"
fi
failed=()
# Longest run: kernels compiled anew, choices of cuBLASLt, the measurement itself.
row_timeout=$((120 + 2 * 10#${max_time%%.*}))
after_last_row() { # FILE: how long ago it was written
    [ -n "${DRYRUN:-}" ] || [ ! -e "$1" ] || awk -v now="$(date +%s.%N)" -v then="$(stat -c %.9Y "$1")" 'BEGIN { printf ", ended %.1f s after the last row", now - then }'
}
row() { # FILE ARGUMENTS...: two ranks
    local file=$1 start=$SECONDS code
    shift
    if [ -n "${DRYRUN:-}" ]; then
        timeout 60 "$mbperf" "$@" --nproc_per_node 2 --dryrun --format json >"$out/last.json" 2>"$out/last.log"
        code=$?
        [ $code != 0 ] || ! grep -q '"program": null' "$out/last.json" || { echo "not built" >"$out/last.log"; code=1; }
    else
        timeout --foreground -k 20 "${timeout_s:-$row_timeout}" "$mbperf" "$@" --device cuda --nproc_per_node 2 -q -o "$out/$file.csv" >"$out/last.log" 2>&1
        code=$?
    fi
    echo "${DRYRUN:+planned, }exit $code, $((SECONDS - start)) s$(after_last_row "$out/$file.csv"): $* --nproc_per_node 2"
    [ $code != 130 ] || exit 130
    if [ $code != 0 ]; then
        tail -3 "$out/last.log"
        failed+=("exit $code: $*")
    fi
    return $code
}
timed() { row "$@" --max_time "$max_time"; }
FULL="--cuda_graph_impl local --cuda_graph_scope full_iteration"
PADDED="--use_tokendrop true model.moe_token_dispatcher_type=alltoall"
# The layers that fit 141 GB a GPU beside their optimizer state.
QWEN="-m qwen -mr qwen3_30b_a3b -g h100 -ng 2 --num_layers 12"
LLAMA="-m llama -mr llama3_8b -g h100 -ng 2 -cp 1"
NANO="-m nemotronh -mr nemotron_3_nano -g h100 -ng 2 -tp 2 -ep 2 -et 1 --num_layers 16"

# Each run has both arms, eager and graph; dropless experts are no full iteration's.
if wants rows || wants qwen; then
    echo "== qwen3_30b_a3b at ep 2, and at tp 2 with ep 2"
    for layout in "-ep 2" "-tp 2 -ep 2 -et 1"; do
        timed qwen3_30b_a3b $QWEN $layout --cuda_graph_scope attn,moe_router
        timed qwen3_30b_a3b $QWEN $layout --cuda_graph_scope attn,moe_router,moe_preprocess
        timed qwen3_30b_a3b $QWEN $layout $PADDED $FULL
    done
fi
if wants rows || wants llama; then
    echo "== llama3_8b at tp 2, and at dp 2"
    for tp in 2 1; do
        timed llama3_8b $LLAMA -tp $tp --cuda_graph_scope attn
        timed llama3_8b $LLAMA -tp $tp --cuda_graph_scope attn,mlp
        timed llama3_8b $LLAMA -tp $tp $FULL
    done
fi
if wants rows || wants nemotron; then
    echo "== nemotron_3_nano at tp 2"
    timed nemotron_3_nano $NANO
    timed nemotron_3_nano $NANO $PADDED $FULL
fi
if wants captures; then
    echo "== $captures captures in a row, the card being read"
    # Each repetition has its own equality check and captures all graphs anew in the same process (tensor-parallel
    # collectives within); mbperf reads the card after blocks, nvidia-smi beside it all the time.
    line="-m llama -mr llama3_8b -g h100 -ng 2 -cp 1 -tp 2 --num_layers 4 -sl 512 --cuda_graph_scope attn,mlp --repeat $captures --max_time 0.5"
    rows_of() { # FILE ROWS BEFORE: sums up the graph rows after those
        python3 - "$@" <<'PYTHON'
import csv, os, sys
path, before, wanted = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rows = list(csv.DictReader(open(path, newline=""))) if os.path.exists(path) else []
if wanted == 0:
    print(len(rows))
    sys.exit()
graph = [r for r in rows[before:] if r["arm"] == "graph"]
good = [r for r in graph if r["status"] == "ok" and r["digest_match"] == "true"]
graphs = {r["graphs"] for r in good}
print(f"{len(good)} of {wanted} captures: ok and digest_match=true; graphs each: {', '.join(sorted(graphs)) or 'none'}")
for r in graph:
    if r not in good:
        print(f"repetition {r['repetition']}: {r['status']}, digest_match={r['digest_match']}: {r['status_reason']}")
sys.exit(len(good) != wanted)
PYTHON
    }
    before=$(rows_of "$out/captures.csv" 0 0)
    if [ -z "${DRYRUN:-}" ]; then
        nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu,utilization.gpu --format=csv,noheader -lms 200 >"$out/last.smi" 2>&1 &
        sampler=$!
    fi
    timeout_s=$((120 + 2 * captures)) row captures $line
    if [ -z "${DRYRUN:-}" ]; then
        kill "$sampler" 2>/dev/null && wait "$sampler" 2>/dev/null
        {
            rows_of "$out/captures.csv" "$before" "$captures" || failed+=("captures: see $out/captures.txt")
            echo "nvidia-smi beside them: $(grep -c MHz "$out/last.smi") readings"
        } >"$out/captures.txt"
        cat "$out/captures.txt"
    fi
fi
if wants bandwidth; then
    echo "== collectives of the step against a bare loop"
    # Each run of mbperf in it has its own limit too.
    timeout -k 20 560 python3 benches/collectives.py "$mbperf" "$out/collectives.csv" ${DRYRUN:+--dryrun}
    code=$?
    [ $code = 0 ] || failed+=("exit $code: benches/collectives.py")
fi
rm -f "$out/last.log" "$out/last.json" "$out/last.smi"
if [ ${#failed[@]} != 0 ]; then
    echo "== failed: ${#failed[@]}"
    printf '%s\n' "${failed[@]}"
    exit 1
fi
