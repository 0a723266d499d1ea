#!/usr/bin/env bash
# Builds, tests, sanitizes and measures on this machine's GPU, without a network, in under 10 minutes. One table at the end.
#
#   tools/gpu/run.sh                     all stages
#   tools/gpu/run.sh build test          some of: build ops test cpu sanitize warm bench
#
# ops: the ops' tests on the GPU; test: the other ones there; cpu: the ops' tests on the CPU; warm: compiles for bench,
# many graphs at a time (bench alone compiles what it finds missing, which takes minutes). cpu, sanitize and warm run at
# the same time. Each stage has a limit (stages.py), and all together have ten minutes.
#
# A failing stage does not stop the later ones, but makes the exit code non-zero. Results go to $OUT (default
# benchmarks/results), logs to $OUT too (default build/gpu-logs). PYTHON names the interpreter that holds torch.
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" tools/gpu/stages.py "$@"
