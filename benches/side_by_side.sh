#!/usr/bin/env bash
# Side by side with the strongest PyTorch, on a machine with a GPU and PyTorch: one command, two CSVs.
# usage: benches/side_by_side.sh [MBPERF [OUTPUT FOLDER [WORKLOAD ...]]]
set -euo pipefail
cd "$(dirname "$0")/.."
mbperf=${1:-target/release/mbperf}
out=${2:-results/mine}
shift $(($# < 2 ? $# : 2))
mkdir -p "$out"
PYTHONPATH=benches:${PYTHONPATH:-} python3 benches/side_by_side.py "$mbperf" "$out/side_by_side.csv" "$@"
