#!/usr/bin/env bash
# The sweep of docs/design/2026-11-22-norm-forward.md: builds its five programs side by side (30 s of a core each), then
# runs them one after the other on the GPU (a few seconds each, ended after 60). Tables also go to FOLDER.
#   tools/gpu/sweep/norm_forward.sh [--build] [FOLDER]    --build: no run, needs no GPU; FOLDER: default build/sweep
set -euo pipefail
cd "$(dirname "$0")/../../.."
only_build=false
[ "${1:-}" = --build ] && only_build=true && shift
folder=${1:-build/sweep}
mkdir -p "$folder"
jobs=()
for part in 0 1 2 3 4; do
  nvcc -std=c++20 -O3 --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a -DPART=$part \
    tools/gpu/sweep/norm_forward.cu -o "$folder/norm_forward_$part" &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
$only_build && exit
for part in 0 1 2 3 4; do
  timeout 60 "$folder/norm_forward_$part" | tee "$folder/norm_forward_$part.txt" || echo "part $part failed"
done
