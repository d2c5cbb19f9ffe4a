#!/usr/bin/env bash
# The host model against PyTorch, in turns: recalibrates and measures PyTorch's own ratios in the same rounds, runs mbperf
# under the fresh model, and sets modelled beside measured. Leaves host_model.json (a model of this machine),
# host_model_pytorch.json, host_model_check.csv and host_model_check.txt (what was printed; the table is its end) in the
# output folder. Exit code 1 if a ratio or an eager host time is off by over 10 %, a run failed, or the sides replayed unlike
# numbers of graphs; 2 if the arguments are wrong, or name Mamba layers where Python has not got their package. Needs a GPU with
# 25 GB free and PyTorch; on an H200 110 s with 4 rounds, about 200 s with 16 (estimated).
# usage: benches/host_model_check.sh [MBPERF [OUTPUT FOLDER [ROUNDS]]]      default: target/release/mbperf results/mine 16
# POINTS=mamba:512,mamba:8192: these stacks in place of the default ones; POINTS=default,mamba:512: those and these. Kinds of layers
# and what Mamba's need: benches/calibrate_host_model.py --help (--points).
# Paths are from the repository's root, wherever it is called from. results/h200 holds committed figures and is written by
# naming it.
set -euo pipefail
cd "$(dirname "$0")/.."
. benches/common.sh
help_if_asked "$@"
[ $# -le 3 ] || refuse "$4: one argument too many"
mbperf=${1:-target/release/mbperf}
out=${2:-results/mine}
rounds=${3:-16}
[[ $rounds =~ ^[0-9]*[1-9][0-9]*$ ]] || refuse "$rounds rounds: a whole number above 0 is needed"
points=(${POINTS:+--points "$POINTS"})
python3 benches/calibrate_host_model.py --look ${points[@]+"${points[@]}"}
begin
said=$out/host_model_check.txt
{
    code=0
    python3 benches/calibrate_host_model.py -o "$out/host_model.json" --check "$out/host_model_pytorch.json" --rounds "$rounds" \
        ${points[@]+"${points[@]}"} &&
        python3 benches/host_model_check.py "$mbperf" "$out" || code=$?
    exit $code
} 2>&1 | tee "$said.new" || code=$?
# An earlier text is kept where this one has no table at its end.
if grep -q 'ratios and .* eager host times within' "$said.new"; then
    mv "$said.new" "$said"
else
    echo "host_model_check.sh: nothing was compared: $said is not written anew; $said.new holds what was said" >&2
fi
exit ${code:-0}
