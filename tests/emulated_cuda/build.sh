#!/bin/sh
# Builds the emulated libraries into the folder $1, if they are not there or older than their sources.
set -e
from=$(cd "$(dirname "$0")" && pwd)
to=${1:?folder}
mkdir -p "$to"
cxx=${CXX:-c++}
flags="-std=gnu++17 -O2 -w -fPIC"
# A number that changes with the sources.
mark=$(cat "$from"/*.cpp "$from"/*.h "$from/build.sh" | cksum | cut -d' ' -f1)
if [ -f "$to/mark" ] && [ "$(cat "$to/mark")" = "$mark $cxx" ]; then exit 0; fi
$cxx $flags -march=native -ffp-contract=off -fno-exceptions -fvisibility=hidden -c "$from/runtime.cpp" -o "$to/runtime.o"
$cxx $flags -shared "$from/driver.cpp" -o "$to/libcuda.so.1" -ldl -lpthread
$cxx $flags -shared -DEMULATION=$((mark % 1000000)) "$from/nvrtc.cpp" -o "$to/libnvrtc.so.13" -ldl
$cxx $flags -O3 -march=native -ffp-contract=off -shared "$from/cublaslt.cpp" -o "$to/libcublasLt.so.13"
$cxx $flags -shared "$from/nccl.cpp" -o "$to/libnccl.so.2"
$cxx $flags -shared "$from/nvtx.cpp" -o "$to/libmbperf_nvtx.so"
mkdir -p "$to/cupti"
$cxx $flags -shared "$from/cupti.cpp" -o "$to/cupti/libcupti.so.13" -ldl
cp "$from/device.h" "$from/runtime.h" "$to"
echo "$mark $cxx" > "$to/mark"
