"""Runs kernels on the CPU: builds csrc/sim, an op's launchers and tests/cpp/sim_<op>.cpp, and runs the tests.

    python tools/sim/run.py --op rms_norm                      # plain build, 8 schedule seeds
    python tools/sim/run.py --op rms_norm --variant tsan       # every pair of conflicting accesses without a barrier
    python tools/sim/run.py --op rms_norm --random 2000        # that many random cases for each RANDOM_TEST
    python tools/sim/run.py --variant asan --only backward     # all ops, tests whose name contains "backward"
    python tools/sim/run.py --op rms_norm --only bytes --counters  # bytes, FLOPs, bank conflicts, predicted time

Variants: plain (fast), asan (address and undefined-behaviour sanitizers: out of bounds, misalignment, integer
overflow), tsan (data races between CUDA threads), coverage (see tools/sim/coverage.py).

Schedule seeds: 0 runs threads in index order and asynchronous copies as late as is legal; others shuffle threads, warps
and blocks and execute copies early, late or at random moments. A failing random case is made smaller and printed with
its draws. A test links the op's own .cu; it names others in lines `// links: csrc/kernels/<family>/<file>.cu`.
"""

from __future__ import annotations

import argparse
import sys
import time

import build


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", help="runs tests/cpp/sim_<op>.cpp; default: all")
    parser.add_argument("--variant", choices=[*build.VARIANTS], default="plain")
    parser.add_argument("--seeds", type=int, help="schedule seeds (plain: 8; tsan: 3, without seed 0; others: 2)")
    parser.add_argument("--random", type=int, default=20, help="random cases for each RANDOM_TEST (default 20)")
    parser.add_argument("--first-case", type=int, default=1, help="number of the first random case: reproduces one")
    parser.add_argument("--only", default="", help="runs tests whose name contains this")
    parser.add_argument(
        "--counters", action="store_true", help="print what every launch moves and computes, and its predicted time"
    )
    arguments = parser.parse_args()
    default = {"plain": 8, "tsan": 3}.get(arguments.variant, 2)
    seeds = 1 if arguments.counters else arguments.seeds or default
    failed = 0
    for test in build.tests_of(arguments.op):
        started = time.perf_counter()
        try:
            program = build.build(test, arguments.variant)
        except build.BuildError as error:
            print(f"{test.stem}: does not build\n{error}")
            failed += 1
            continue
        built = time.perf_counter()
        flags = ["--seeds", str(seeds), "--random", str(arguments.random), "--first-case", str(arguments.first_case)]
        flags += ["--counters"] * arguments.counters
        result = build.run(program, [*flags, "--only", arguments.only])
        print(result.stdout + result.stderr, end="")
        ran = time.perf_counter()
        state = "ok" if result.returncode == 0 else f"FAILED (exit status {result.returncode})"
        times = f"built in {built - started:.1f} s, ran in {ran - built:.1f} s"
        print(f"{test.stem} [{arguments.variant}]: {state}, {times}\n")
        failed += result.returncode != 0
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
