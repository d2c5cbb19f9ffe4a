#!/usr/bin/env bash
# The host model against PyTorch, both in the same minutes on the same machine: recalibrates, then runs mbperf under the
# fresh model, and sets modelled beside measured ratios. Needs a GPU and PyTorch; about four minutes.
# usage: benches/host_model_check.sh [MBPERF [OUTPUT FOLDER]]
set -euo pipefail
cd "$(dirname "$0")/.."
mbperf=${1:-target/release/mbperf}
out=${2:-results/h200}
mkdir -p "$out"
python3 benches/calibrate_host_model.py -o "$out/host_model.json" --check "$out/host_model_pytorch.json"
python3 benches/host_model_check.py "$mbperf" "$out"
