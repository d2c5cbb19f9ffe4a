#!/usr/bin/env bash
# Side by side with the strongest PyTorch, on a machine with a GPU and PyTorch: whole steps (side_by_side.csv), every piece
# of them (pieces.csv), dropless experts against padded ones (dropless.csv), in one go.
# usage: benches/side_by_side.sh [--check] [MBPERF [OUTPUT FOLDER [WORKLOAD ...]]]
# Without a folder: results/mine; paths are from the repository's root, wherever it is called from. The workloads are those of
# steps and pieces (benches/side_by_side.py; `all`: with those of Mamba layers); dropless has one of its own, whatever is named.
# MBPERF_SECONDS=1, PIECES_TURNS=1: shorter, with wider intervals.
# PARTS="pieces dropless": those alone, of: steps pieces dropless
# --check: looks at arguments, variables and what Python has, as is done before every measurement, and measures nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
. benches/common.sh
help_if_asked "$@"
check=
if [ "${1:-}" = --check ]; then
    check=$1
    shift
fi
mbperf=${1:-target/release/mbperf}
out=${2:-results/mine}
shift $(($# < 2 ? $# : 2))
choose "steps pieces dropless" "steps pieces dropless" "${PARTS:-}"
begin
export PYTHONPATH=benches:${PYTHONPATH:-}
declare -A file=([steps]=side_by_side [pieces]=pieces [dropless]=dropless)
# All of them before the first one measures.
for part in $parts; do
    python3 "benches/${file[$part]}.py" --check "$mbperf" "$out/${file[$part]}.csv" "$@"
done
[ -z "$check" ] || exit 0
for part in $parts; do
    start=$SECONDS
    if [ "$part" = dropless ]; then names=(); else names=("$@"); fi
    python3 "benches/${file[$part]}.py" "$mbperf" "$out/${file[$part]}.csv" ${names[@]+"${names[@]}"}
    echo "$part: $((SECONDS - start)) s"
done
