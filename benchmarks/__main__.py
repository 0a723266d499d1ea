"""Runs benchmarks and prints one table.

    python -m benchmarks                                all ops, on the CPU and (if there is one) the GPU
    python -m benchmarks --op rms_norm --json out.json  one op
    python -m benchmarks --warm-compile 8               compile alone, by 8 processes, for a timing run after it

The rows join benchmarks/results.csv, in place of older ones of the same GPU, device and op (recorded.py).

Each `bench_<family>.py` has `OPS`, `{op: run}`, or one `run` for the op of its own name; `run(device, options)` returns
the rows of one device. How a time is taken, and what the columns mean, is in `warpsmith.testing` (GpuTimer, time_cpu,
Row).
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from warpsmith.testing import Row, environment, format_table, write_json
from warpsmith.testing.gpu_timer import NOT_TIMED
from warpsmith.testing.rows import OURS

from benchmarks import recorded, rivals, warm
from benchmarks.cells import Options, compile_seconds, runners

FOLDER = Path(__file__).resolve().parent
STAT = Path("/proc/stat")
# First what times the host, in a fresh process into which no rival has been loaded; then the longest, so that a run
# that must end early leaves short ones out.
HOST = ("host", "linear_host", "adamw")
LONGEST = ("gpt2", "linear_cross_entropy", "linear_loss_curve", "rms_norm", "cross_entropy", "layer_norm")


def available():
    """Names of the benchmarks, in the order in which they run."""
    names = sorted(runners())
    first = [name for name in HOST + LONGEST if name in names]
    return first + [name for name in names if name not in first]


def parser():
    made = argparse.ArgumentParser(prog="benchmarks", description="Speed of warpsmith's ops beside their rivals.")
    made.add_argument("--op", action="append", choices=available(), help="may be repeated; default: all")
    made.add_argument("--device", choices=("cpu", "cuda", "all"), default="all", help="default: all that are there")
    made.add_argument(
        "--results", type=Path, metavar="FOLDER", help="of the results.csv that takes the rows; default: $OUT, or "
        "benchmarks; --quick has no default",
    )  # fmt: skip
    made.add_argument("--json", type=Path, help="also write the rows and the environment to this file")
    made.add_argument("--skip", type=int, default=0, metavar="N", help="go on: the --json file has N ops and devices")
    made.add_argument(
        "--until", type=float, metavar="T", help="begin nothing after this Unix time; say what is left out"
    )
    made.add_argument("--rounds", type=int, default=25, help="samples of each contender (default 25)")
    made.add_argument("--no-compile", action="store_true", help="leave torch.compile out: it takes most of the time")
    made.add_argument("--warm-compile", type=int, metavar="N", help="time nothing: compile it all, by N processes")
    made.add_argument("--quick", action="store_true", help="tiny sizes, few samples: it runs, and measures nothing")
    return made


def compiling():
    """Seconds spent in torch.compile so far, graphs loaded from the cache, graphs compiled."""
    seconds = compile_seconds()
    if "torch._dynamo" not in sys.modules:
        return seconds, 0, 0
    from torch._dynamo.utils import counters

    cache = counters["inductor"]
    return seconds, cache["fxgraph_cache_hit"], cache["fxgraph_cache_miss"] + cache["fxgraph_cache_bypass"]


def run_op(op, device, settings):
    """The rows of one benchmark on one device, which say which device it was."""
    start, before = time.monotonic(), compiling()
    rows = [replace(row, device=device) for row in runners()[op](device, settings)]
    seconds, loaded, compiled = (after - b for after, b in zip(compiling(), before, strict=True))
    print(
        f"{op} on {device}: {len(rows)} rows in {time.monotonic() - start:.0f} s, torch.compile {seconds:.0f} s: "
        f"{loaded} graphs from its cache, {compiled} not",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return rows


def without_our_time(rows):
    """Cells in which our own contender failed, each with its error."""
    failed = (r for r in rows if r.contender == OURS and r.value is None and r.note != NOT_TIMED.error)
    return list(dict.fromkeys(f"{r.shape}: {r.note}" for r in failed))


def context_is_lost():
    """Whether the GPU answers nothing any more, as after an illegal access in some contender's kernel."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def busy_seconds():
    """Seconds that all cores have worked since the machine started, or None where the system does not say."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text().splitlines()[0].split()[1:9])
    except (OSError, ValueError, IndexError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class HostLoad:
    """How busy other processes keep the host from here on: a host time taken beside them is not the op's."""

    def __init__(self):
        self.start, self.busy, self.own = time.monotonic(), busy_seconds(), self._own_seconds()

    @staticmethod
    def _own_seconds():
        t = os.times()
        return t.user + t.system + t.children_user + t.children_system

    def others_busy_cores(self):
        """Cores' worth of work of other processes, on average; None where the system does not say."""
        wall, busy = time.monotonic() - self.start, busy_seconds()
        if busy is None or self.busy is None or not wall:
            return None
        return round(max(0.0, busy - self.busy - (self._own_seconds() - self.own)) / wall, 2)


# What a run says of itself beside the machine. others_busy_cores: cores that other processes kept busy meanwhile.
FACTS = {"recording": str, "rivals": dict, "failed": list, "left_out": list, "others_busy_cores": dict}


def machine():
    """The environment. The GPU's name says so where code of other GPUs runs: "NVIDIA H200, sm_80 code"."""
    found = environment()
    if "gpu" in found:
        command = [sys.executable, "-m", "warpsmith", "info", "--json"]
        told = subprocess.run(command, capture_output=True, text=True).stdout
        kernels = json.loads(told[told.index("{") :])["kernels"].get("cuda:0", {})
        found["gpu"] = named_by_code(found["gpu"], kernels, torch.cuda.get_device_capability())
    return found


def named_by_code(gpu, kernels, capability):
    """The GPU's name, and the code where that is no machine code of its own; `kernels`: what `info` says of it."""
    code = kernels.get("code")
    own = not code or (code.startswith("sm_{}{}".format(*capability)) and "PTX" not in kernels["why"])
    return gpu if own else f"{gpu}, {code} code"


def keep(rows, facts, place, options):
    """Writes what was measured until now, as CSV and as JSON, where they are wanted."""
    if options.results:
        recorded.add(facts["recording"], rows, {**place, **facts}, options.results)
    if options.json:
        write_json(options.json, rows, **facts)


def main(arguments=None):
    made = parser()
    options = made.parse_args(arguments)
    if options.rounds < 1:
        made.error("--rounds: expected at least 1")
    if options.skip and not (options.json and options.json.exists()):
        made.error("--skip: expected a --json file that exists")
    devices = ["cuda", "cpu"] if options.device == "all" else [options.device]
    if options.device == "cuda" and not torch.cuda.is_available():
        made.error("--device cuda: no CUDA device")
    devices = [d for d in devices if d == "cpu" or torch.cuda.is_available()]
    ops = options.op or available()
    if options.warm_compile:
        warm.warm_compile(ops, devices, options.warm_compile, options.until)
        return 0
    if not options.results and not options.quick:
        options.results = Path(os.environ.get("OUT") or FOLDER)

    settings = Options(rounds=options.rounds, quick=options.quick, compile=not options.no_compile)
    kept = json.loads(options.json.read_text()) if options.skip else {"rows": [], "environment": {}}
    rows = [Row(**row) for row in kept["rows"]]
    facts = {name: kept["environment"].get(name, made_of()) for name, made_of in FACTS.items()}
    place = machine()
    facts["recording"] = facts["recording"] or recorded.name_of(place)
    todo = [(op, device) for device in devices for op in ops]
    for done, (op, device) in enumerate(todo[options.skip :], options.skip + 1):
        if options.until and time.time() > options.until:
            facts["left_out"] = [f"{op} on {device}" for op, device in todo[done - 1 :]]
            break
        if "cuda" in devices and op not in HOST and not facts["rivals"]:
            facts["rivals"] = rivals.installed()
        load = HostLoad()
        try:
            of_op = run_op(op, device, settings)
            rows += of_op
            facts["failed"] += [f"{op} on {device}: {cell}" for cell in without_our_time(of_op)]
        except Exception:
            traceback.print_exc()
            facts["failed"].append(f"{op} on {device}")
        facts["others_busy_cores"][f"{op} on {device}"] = load.others_busy_cores()
        keep(rows, facts, place, options)
        if options.json and context_is_lost() and todo[done:]:  # no kernel runs in this process any more
            same = sys.argv[1 : sys.argv.index("--skip")] if options.skip else sys.argv[1:]
            os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *same, "--skip", str(done)])
    keep(rows, facts, place, options)
    print("\n".join(f"{name}: {value}" for name, value in {**environment(), **facts}.items()))
    if options.quick:
        print("--quick: the sizes are tiny, the figures mean nothing")
    print(format_table(rows))
    return 1 if facts["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
