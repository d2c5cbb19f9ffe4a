#!/usr/bin/env bash
# Side by side with the strongest PyTorch, on a machine with a GPU and PyTorch: whole steps (side_by_side.csv), every piece
# of them (pieces.csv), dropless experts against padded ones (dropless.csv), in one go.
# usage: benches/side_by_side.sh [MBPERF [OUTPUT FOLDER [WORKLOAD ...]]]
# MBPERF_SECONDS=1, PIECES_TURNS=1: shorter, with wider intervals.
# PARTS="pieces dropless": those alone, of: steps pieces dropless
set -euo pipefail
cd "$(dirname "$0")/.."
mbperf=${1:-target/release/mbperf}
out=${2:-results/mine}
shift $(($# < 2 ? $# : 2))
parts=${PARTS:-steps pieces dropless}
mkdir -p "$out"
export PYTHONPATH=benches:${PYTHONPATH:-}
for part in $parts; do
    start=$SECONDS
    case $part in
        steps) python3 benches/side_by_side.py "$mbperf" "$out/side_by_side.csv" "$@" ;;
        pieces) python3 benches/pieces.py "$mbperf" "$out/pieces.csv" "$@" ;;
        dropless) python3 benches/dropless.py "$mbperf" "$out/dropless.csv" ;;
        *) echo "no part $part: steps pieces dropless" >&2; exit 2 ;;
    esac
    echo "$part: $((SECONDS - start)) s"
done
