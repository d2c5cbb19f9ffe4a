#!/bin/sh
# Runs mbperf (the debug build, or $MBPERF) on the emulated GPU: run.sh selftest --only rmsnorm
set -e
from=$(cd "$(dirname "$0")" && pwd)
root=$from/../..
libraries=${MBPERF_EMULATED_DIR:-$root/target/emulated_cuda}
sh "$from/build.sh" "$libraries"
LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# Kernels and choices of this device stay apart from those of a real one.
: "${XDG_CACHE_HOME:=$libraries/cache}"
: "${MBPERF_EMULATED_CACHE:=$libraries/kernels}"
export LD_LIBRARY_PATH XDG_CACHE_HOME MBPERF_EMULATED_CACHE
program=${MBPERF:-$root/target/debug/mbperf}
[ -x "$program" ] || { echo "run.sh: no $program: run \`cargo build\` first, or set MBPERF" >&2; exit 2; }
exec "$program" "$@"
