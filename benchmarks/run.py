"""Runs benchmarks and prints one table.

    python -m benchmarks                                    all ops, on the CPU and (if there is one) the GPU
    python benchmarks/run.py --op rms_norm --json out.json  one op

Each `bench_<op>.py` has `run(device, options)`, which returns the rows of one device. How a time is taken, and what the
columns mean, is in `warpsmith.testing` (GpuTimer, time_cpu, Row).
"""

import argparse
import importlib
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
if __package__ in (None, ""):
    sys.path.insert(0, str(FOLDER.parent))

import torch  # noqa: E402
from warpsmith.testing import environment, format_table, write_json  # noqa: E402

from benchmarks.cells import Options  # noqa: E402


def available():
    """Names of the benchmarks: the bench_<op>.py files beside this one."""
    return sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="benchmarks", description="Speed of warpsmith's ops beside their rivals.")
    parser.add_argument("--op", action="append", choices=available(), help="may be repeated; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda", "all"), default="all", help="default: all that are there")
    parser.add_argument("--json", type=Path, help="also write the rows and the environment to this file")
    parser.add_argument("--rounds", type=int, default=25, help="samples of each contender (default 25)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: it takes most of the time")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, few samples: shows that it runs, measures nothing"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: expected at least 1")
    devices = ["cpu", "cuda"] if options.device == "all" else [options.device]
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device")
    devices = [d for d in devices if d == "cpu" or torch.cuda.is_available()]

    rows = []
    settings = Options(rounds=options.rounds, quick=options.quick, compile=not options.no_compile)
    for op in options.op or available():
        module = importlib.import_module(f"benchmarks.bench_{op}")
        for device in devices:
            start = time.monotonic()
            new = module.run(device, settings)
            print(f"{op} on {device}: {len(new)} rows in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            rows += new
            if options.json:
                write_json(options.json, rows)
    facts = environment()
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    if options.quick:
        print("--quick: the sizes are tiny, the figures mean nothing")
    print(format_table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
