#!/usr/bin/env python3
"""Times ops of two builds of the package on one machine, in processes by turns, and prints where they differ.

    python tools/gpu/compare.py OLD NEW --op attention           two folders of `pip install --target`
    python tools/gpu/compare.py OLD NEW --most 1.01 --turns 9    exit status 1 where a row of NEW is slower than that

A process runs the benchmarks of this tree for one build, our contenders alone. A row's time is the median over the
processes of a build; its spread is their standard deviation, of the build where that is larger.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REST_S = 0.05  # before each cell: the card's clock and temperature are then those of the first one


def child(ops: list[str], device: str, rounds: int) -> int:
    """Prints a line of JSON: milliseconds by op, shape, dtype, direction and contender."""
    from warpsmith.testing import op_timing
    from warpsmith.testing.rows import OURS

    make = op_timing.timer_of

    def timer_of(*arguments, **options):
        measure = make(*arguments, **options)

        def ours_alone(calls):
            time.sleep(REST_S)
            return measure({name: call for name, call in calls.items() if name.startswith(OURS)})

        return ours_alone

    op_timing.timer_of = timer_of  # before the benchmarks take its name
    from benchmarks.cells import Options, runners

    def runner_of(op):  # of its family's file: the other benchmarks ask for what an old build may lack
        family = op
        while family and not importlib.util.find_spec(f"benchmarks.bench_{family}"):
            family = family.rpartition("_")[0]
        return importlib.import_module(f"benchmarks.bench_{family}").OPS[op] if family else runners()[op]

    options = Options(rounds=rounds, compile=False)
    rows = [row for op in ops for row in runner_of(op)(device, options)]
    times = {json.dumps([r.op, r.shape, r.dtype, r.direction, r.contender]): r.value for r in rows if r.unit == "ms"}
    print("\n" + json.dumps(times))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="*", type=Path, metavar="BUILD", help="OLD and NEW")
    parser.add_argument("--op", action="append", help="of `python -m benchmarks`; may be repeated; default: attention")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--turns", type=int, default=5, help="processes of each build; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="samples of a row in a process; default: %(default)s")
    parser.add_argument("--most", type=float, default=1.01, help="NEW may take this many times OLD's time")
    parser.add_argument(
        "--until", type=float, default=float("inf"), metavar="T", help="begin no turn after this Unix time"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    ops = given.op or ["attention"]
    if given.child:
        return child(ops, given.device, given.rounds)
    if len(given.builds) != 2 or not all((build / "warpsmith").is_dir() for build in given.builds):
        parser.error("BUILD: expected two folders that hold the package")
    again = [sys.executable, __file__, "--child", "--device", given.device, "--rounds", str(given.rounds)]
    again += [word for op in ops for word in ("--op", op)]
    found: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for turn in range(given.turns):
        if time.time() > given.until:
            print(f"{turn} turns of {given.turns}: no time left")
            break
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            paths = f"{given.builds[which].resolve()}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
            done = subprocess.run(again, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
            if done.returncode:
                print(f"{given.builds[which]}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
                return 2
            for row, ms in json.loads(done.stdout.splitlines()[-1]).items():
                if ms is not None:
                    found[row][which].append(ms)
    both = {row: times for row, times in found.items() if all(times)}
    ratios = {row: statistics.median(new) / statistics.median(old) for row, (old, new) in both.items()}
    for row, ratio in sorted(ratios.items(), key=lambda pair: -pair[1]):
        spread = max(statistics.pstdev(times) / statistics.median(times) for times in both[row])
        old, new = map(statistics.median, both[row])
        print(f"{ratio:6.3f}  {old:9.4f} -> {new:9.4f} ms  +-{spread:5.1%}  {' '.join(map(str, json.loads(row)))}")
    slower = [row for row, ratio in ratios.items() if ratio > given.most]
    print(f"{len(slower)} of {len(ratios)} rows take more than {given.most} times as long")
    if len(found) > len(both):
        print(f"{len(found) - len(both)} rows are of one build alone")
    return 1 if slower or not ratios else 0


if __name__ == "__main__":
    raise SystemExit(main())
