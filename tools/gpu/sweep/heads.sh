#!/usr/bin/env bash
# The sweeps of docs/design/2026-11-22-rope-and-heads.md: builds them side by side (25 s of a core each), then runs one
# after the other on the GPU (about 45 s). Their tables also go to FOLDER (default build/sweep).
#   tools/gpu/sweep/heads.sh [FOLDER]            both
#   tools/gpu/sweep/heads.sh --build [FOLDER]    builds alone: needs nvcc, no GPU
set -euo pipefail
cd "$(dirname "$0")/../../.."
only_build=false
if [ "${1:-}" = --build ]; then only_build=true && shift; fi
out=${1:-build/sweep}
mkdir -p "$out"

build() { # NAME ARGUMENT...
  nvcc -std=c++20 -O3 --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a "${@:2}" -o "$out/$1"
}

pids=()
build log_prob tools/gpu/sweep/log_prob.cu csrc/kernels/cross_entropy/cross_entropy.cu & pids+=($!)
build rope tools/gpu/sweep/rope.cu csrc/kernels/rope/rope.cu & pids+=($!)
build elementwise tools/gpu/sweep/elementwise.cu & pids+=($!)
for pid in "${pids[@]}"; do wait "$pid"; done
$only_build && exit

run() { # NAME COMMAND...
  echo "== $1"
  "${@:2}" 2>&1 | tee "$out/$1.txt"
}
run log_prob "$out/log_prob"
run rope "$out/rope"
run rope_others "$out/rope" others
run elementwise "$out/elementwise" swiglu
run linear_loss python tools/gpu/sweep/linear_loss.py
