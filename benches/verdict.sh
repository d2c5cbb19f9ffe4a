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
    echo "== host submit of pairs of blocks behind a reading of the card and behind none, in turn: at most 1 % apart"
    run samplers $LLAMA --aa eager --alternate_samplers --repeat 8 --max_time 4
fi
rm -f "$out/last.log"
python3 - "$out" <<'PY'
import csv, math, os, statistics, sys
folder = sys.argv[1]
for name in ("aa", "spin", "neighbour"):
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
        print(name, *key, {v: verdicts.count(v) for v in sorted(set(verdicts))},
              "half-width %% median %.2f max %.2f" % (statistics.median(widths), widths[-1]) if widths else "no interval",
              "disturbed", sorted({r["disturbed_fraction"] for r in rows}), {r["status"] for r in rows})

# Pairs of blocks in order, whether the card was read at the end of the one before, and the host's time a step. Ratios are
# of neighbouring pairs, so that the host's own drift cancels. The launch queue is never full here: some 130 launches a step.
path = os.path.join(folder, "samplers.steps.csv")
if os.path.exists(path):
    read = {(b["run_id"], int(b["block"])): b["sm_clock_mhz"] != "" for b in csv.DictReader(open(path.replace("steps", "blocks"), newline=""))}
    pairs = {}
    for s in csv.DictReader(open(path, newline="")):
        if s["pacing"] == "run_ahead" and s["phase"] == "steady":
            pairs.setdefault(s["run_id"], {}).setdefault(int(s["block"]) // 2, []).append(float(s["submit_ms"]))
    logs = []
    for run, of in pairs.items():
        order = sorted(of)
        for before, one, two in zip(order, order[1:], order[2:]):
            behind = read.get((run, 2 * before)), read.get((run, 2 * one))
            if behind in ((True, False), (False, True)):
                change = math.log(statistics.median(of[two]) / statistics.median(of[one]))
                logs.append(-change if behind[0] else change)
    mean, error = statistics.mean(logs), statistics.stdev(logs) / len(logs) ** 0.5
    print("samplers: host submit behind a reading over behind none: %+.2f %% +- %.2f (95 %%), %d pairs of neighbours"
          % (mean * 100, 1.96 * error * 100, len(logs)))
PY
