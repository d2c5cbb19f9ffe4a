#!/usr/bin/env bash
# How far a verdict can be trusted, on a machine with a GPU: A/A, a known 2 % slowdown, a neighbour, the samplers' cost.
# usage: benches/verdict.sh [MBPERF [OUTPUT FOLDER [PART ...]]]      parts: aa (5 minutes) spin neighbour samplers
set -uo pipefail
cd "$(dirname "$0")/.."
mbperf=${1:-target/release/mbperf}
out=${2:-results/h200}
shift $(($# < 2 ? $# : 2))
parts=${*:-aa spin neighbour samplers}
mkdir -p "$out"
wants() { [[ " $parts " == *" $1 "* ]]; }
LLAMA="-m llama -mr llama3_8b -g h100 -cp 1 --num_layers 4 -sl 512 --stack_only --cuda_graph_scope attn"
QWEN="-m qwen -mr qwen3_30b_a3b -g h100 --num_layers 4 -sl 4096 --stack_only --cuda_graph_scope attn,moe_router model.moe_token_dispatcher_type=alltoall"
run() { # FILE ARGUMENTS...
    local file=$1 start=$SECONDS
    shift
    timeout 120 "$mbperf" "$@" -q -o "$out/$file.csv" >"$out/last.log" 2>&1
    local code=$?
    echo "exit $code, $((SECONDS - start)) s: $*"
    [ $code = 0 ] || tail -3 "$out/last.log"
}
if wants aa; then
    echo "== A/A, twenty measurements each: at least 18 equivalent, none faster or slower"
    for arm in graph eager; do
        run aa $LLAMA --aa $arm --repeat 20 --max_time 4
        run aa $QWEN --aa $arm --repeat 20 --max_time 6
    done
fi
if wants spin; then
    echo "== one arm 2 % slower: at least 19 of 20 slower"
    run spin $LLAMA --aa graph --repeat 20 --max_time 4 --spin_percent 2 --no_samplers
    run spin $QWEN --aa graph --repeat 20 --max_time 6 --spin_percent 2 --no_samplers
fi
if wants neighbour; then
    echo "== beside a second process that loads the GPU (a notice; --strict exits 1), and alone"
    "$mbperf" $QWEN --aa eager --max_time 16 -q -o /dev/null >/dev/null 2>&1 &
    load=$!
    sleep 6
    run neighbour $LLAMA --strict --max_time 5
    wait $load
    run neighbour $LLAMA --strict --max_time 5
fi
if wants samplers; then
    echo "== host submit with samplers on and off, in turn: at most 1 % apart"
    for round in 1 2 3; do
        run samplers_on $LLAMA --max_time 3
        run samplers_off $LLAMA --max_time 3 --no_samplers
    done
fi
rm -f "$out/last.log"
python3 - "$out" <<'PY'
import csv, os, statistics, sys
folder = sys.argv[1]
for name in ("aa", "spin", "neighbour", "samplers_on", "samplers_off"):
    path = os.path.join(folder, name + ".csv")
    if not os.path.exists(path):
        continue
    groups = {}
    for row in csv.DictReader(open(path, newline="")):
        groups.setdefault((row["model_recipe"], row.get("aa", ""), row["seq_length"]), []).append(row)
    for key, rows in groups.items():
        second = rows[1::2]
        verdicts = [row["verdict"] for row in second]
        ends = [(float(r["speedup_ci95_low"]), float(r["speedup_ci95_high"])) for r in second if r["speedup_ci95_low"]]
        widths = sorted((high / low - 1) / 2 * 100 for low, high in ends)
        # What a full queue holds up says nothing of the samplers.
        submit = [float(r["host_issue_ms_median"]) for r in rows if r["host_issue_ms_median"]]
        print(name, *key, {v: verdicts.count(v) for v in sorted(set(verdicts))},
              "half-width %% median %.2f max %.2f" % (statistics.median(widths), widths[-1]) if widths else "no interval",
              "host issue ms %.3f" % statistics.median(submit) if submit else "",
              "disturbed", sorted({r["disturbed_fraction"] for r in rows}), {r["status"] for r in rows})
PY
