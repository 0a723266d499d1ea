"""Runs kernels on the CPU: builds csrc/sim, an op's launchers and tests/sim/sim_<op>.cpp, and runs the tests.

    python tools/sim/run.py --op optim                     # plain build, 8 schedule seeds
    python tools/sim/run.py --op optim --variant tsan      # every pair of conflicting accesses without a barrier
    python tools/sim/run.py --op optim --random 2000       # that many random cases for each RANDOM_TEST
    python tools/sim/run.py --variant asan --only backward     # all ops, tests whose name contains "backward"
    python tools/sim/run.py --op optim --code 80           # as code of sm_80 on a device of sm_90
    python tools/sim/run.py --op optim --only bytes --counters  # bytes, FLOPs, bank conflicts, predicted time

Variants: plain (fast), asan (address and undefined-behaviour sanitizers: out of bounds, misalignment, integer
overflow), tsan (data races between CUDA threads), coverage (see tools/sim/device_coverage.py).

--code 80: what csrc/device compiles out below sm_90 does nothing, choosers are told so. Tests that ask for such things
by hand are not run, and say so.

Schedule seeds: 0 runs threads in index order and asynchronous copies as late as is legal; others shuffle threads, warps
and blocks and execute copies early, late or at random moments. A failing random case is printed with its draws. A test
that crashes is run again by itself under the address sanitizer. A test links the op's own .cu; it names others in lines
`// links: csrc/kernels/<family>/<file>.cu`.
"""

import argparse
import sys
import time

import crash
import library

import build


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", help="runs tests/sim/sim_<op>.cpp, or where there is none sim_<op>_*.cpp; default: all")
    parser.add_argument("--variant", choices=[*build.VARIANTS], default="plain")
    parser.add_argument("--seeds", type=int, help="schedule seeds (plain: 8; tsan: 3, without seed 0; others: 2)")
    parser.add_argument("--random", type=int, default=20, help="random cases for each RANDOM_TEST (default 20)")
    parser.add_argument("--first-case", type=int, default=1, help="number of the first random case: reproduces one")
    parser.add_argument("--code", type=int, default=90, choices=[80, 90], help="the architecture of the code that runs")
    parser.add_argument("--only", default="", help="runs tests whose name contains this")
    parser.add_argument(
        "--counters", action="store_true", help="print what every launch moves and computes, and its predicted time"
    )
    arguments = parser.parse_args()
    default = {"plain": 8, "tsan": 3}.get(arguments.variant, 2)
    seeds = 1 if arguments.counters else arguments.seeds or default
    failed = 0
    tests = build.tests_of(arguments.op, none_is_fine=True)
    for test in tests or build.tests_of(f"{arguments.op}_*", none_is_fine=arguments.op in library.FAMILIES):
        started = time.perf_counter()
        try:
            program = build.build(test, arguments.variant)
        except build.BuildError as error:
            print(f"{test.stem}: does not build\n{error}")
            failed += 1
            continue
        built = time.perf_counter()
        flags = ["--seeds", str(seeds), "--random", str(arguments.random), "--first-case", str(arguments.first_case)]
        flags += ["--code", str(arguments.code), *["--counters"] * arguments.counters]
        result = build.run(program, [*flags, "--only", arguments.only])
        print(result.stdout + result.stderr + crash.explain(test, arguments.variant, result, arguments.code), end="")
        ran = time.perf_counter()
        state = "ok" if result.returncode == 0 else f"FAILED (exit status {result.returncode})"
        times = f"built in {built - started:.1f} s, ran in {ran - built:.1f} s"
        failed += result.returncode != 0
        print(f"{test.stem} [{arguments.variant}, code of sm_{arguments.code}]: {state}, {times}\n")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
