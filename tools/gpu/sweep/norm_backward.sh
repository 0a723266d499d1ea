#!/usr/bin/env bash
# The sweep of docs/design/2026-11-21-norms.md: builds a program for each op side by side (20 s of a core each), then
# runs them one after the other on the GPU (a few seconds each, ended after 25). Tables also go to FOLDER.
#   tools/gpu/sweep/norm_backward.sh [--build] [FOLDER]    --build: no run, needs no GPU; FOLDER: default build/sweep
set -euo pipefail
cd "$(dirname "$0")/../../.."
only_build=false
[ "${1:-}" = --build ] && only_build=true && shift
folder=${1:-build/sweep}
mkdir -p "$folder"
ops=(000 100 010 111)  # layer, residual, dropout
jobs=()
for op in "${ops[@]}"; do
  nvcc -std=c++20 -O3 --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a -DLAYER="${op:0:1}" \
    -DRESIDUAL="${op:1:1}" -DDROPOUT="${op:2:1}" tools/gpu/sweep/norm_backward.cu -o "$folder/norm_backward_$op" &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
$only_build && exit
for op in "${ops[@]}"; do
  timeout 25 "$folder/norm_backward_$op" 24 | tee "$folder/norm_backward_$op.txt" || echo "op $op failed"
done
