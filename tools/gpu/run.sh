#!/usr/bin/env bash
# Builds, tests, sanitizes and measures on this machine's GPU, without a network, in under 10 minutes. One table at the end.
#
#   tools/gpu/run.sh                     build, tests, alone, sanitize, warm, bench
#   tools/gpu/run.sh build tests         some of them
#   tools/gpu/run.sh cpu_tests cpu_rows  what needs no GPU, by a command of its own: the CPU's tests, its rows of the benchmarks
#   tools/gpu/run.sh sm80                what other cards run, each in a command of its own (code_stages.py): code of sm_80,
#   tools/gpu/run.sh both, ... ptx       the default of a machine without a GPU, and its PTX alone
#   tools/gpu/run.sh --dry-run           every stage on the CPU, with next to nothing to do: does the script itself work?
#
# tests: those on the GPU, six processes; alone: those of them that want the card for themselves; warm: compiles what bench
# will time, beside sanitize. Each stage has a limit (stages.py); the limits of one command together are under ten minutes, so
# that it ends in time whatever happens. What a limit cut off is named in the table and in a JSON file beside the logs.
#
# A failing or cut stage does not stop the later ones, but makes the exit code non-zero. Rows of the benchmarks join
# $OUT/results.csv (default benchmarks/results.csv), logs go to $OUT too (default build/gpu-logs). WARPSMITH_COMMIT names
# the sources where they are a copy without git. PYTHON names the interpreter that holds torch.
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" tools/gpu/record.py "$@"
