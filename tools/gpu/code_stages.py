"""Stages of tools/gpu/run.sh that build the package for other architectures, in a folder of its own, and test on an
H200 the code that other cards take.

`sm80`: PTX of sm_80, which A100, L40S and RTX 4090 have as machine code. `both`: what a build on a machine without a
GPU holds, of which an H200 takes the machine code of sm_90. `ptx`: the same PTX and nothing else, so that the driver
compiles that of sm_90, as it does on every Blackwell card. (CUDA_FORCE_PTX_JIT=1 would do so to a library that has
both, but also to torch's own kernels, whose wheels hold no PTX that an H200 can take.)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import stages
from command import CUT, ROOT, Order, Verdict, run_command, why
from stages import Stage

DEFAULT = "80;90"  # of csrc/cmake/architectures.cmake
COMPILE_PROCESSES = 10
# Of the portable kernels: those whose kernels differ most from sm_90's first.
BENCHMARKS = ("rms_norm", "layer_norm", "cross_entropy", "add_rms_norm", "add_layer_norm", "qk_norm_rope", "rope",
              "swiglu", "bias_gelu", "dropout_add", "relu_squared")  # fmt: skip


@dataclass(frozen=True)
class Code:
    """A build: the stage's name, CMAKE_CUDA_ARCHITECTURES, the code that an H200 must take from it, and how."""

    name: str
    architectures: str
    expected: str
    compiled_by_driver: bool

    @property
    def folder(self) -> Path:
        return ROOT / "build" / f"gpu-{self.name}"

    @property
    def environment(self) -> dict[str, str]:
        """For processes that use this build instead of the installed one, with a cache of their own for what the driver
        compiles, so that no process compiles what another did."""
        cache = {"CUDA_CACHE_PATH": str(self.folder / "compiled"), "CUDA_CACHE_MAXSIZE": str(4 << 30)}
        paths = [str(self.folder / "package"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(paths), **cache}


SM80 = Code("sm80", "80", "sm_80", compiled_by_driver=True)
BOTH = Code("both", DEFAULT, "sm_90", compiled_by_driver=False)
PTX = Code("ptx", ";".join(f"{a}-virtual" for a in DEFAULT.split(";")), "sm_90", compiled_by_driver=True)

Step = Callable[[Code, Order], list[Verdict]]


def install(code: Code, order: Order) -> list[Verdict]:
    """Builds and installs into the build's own folder; the package that is installed stays as it is."""
    package, name = code.folder / "package", f"{code.name} build"
    if order.dry:
        command = [sys.executable, "-m", "warpsmith", "info"]
    else:
        shutil.rmtree(package, ignore_errors=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-build-isolation",
            "--no-deps",
            "--target",
            str(package),
        ]
        command += [f"--config-settings=build-dir={code.folder / 'objects'}", "-v", "."]
    env = {
        "WARPSMITH_REQUIRE_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": "",
        "CMAKE_ARGS": f"-DCMAKE_CUDA_ARCHITECTURES={code.architectures}",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 2),
    }
    result, _, seconds = run_command(command, order.logs / f"{code.name}_build.log", order.limit_s, env)
    libraries = list(package.glob("warpsmith/libwarpsmith_ops*"))
    detail = f"for {code.architectures}" if result == 0 else why(result, order.limit_s)
    detail += f", {libraries[0].stat().st_size / 2**20:.1f} MiB" if libraries else ""
    return [Verdict(name, result == 0 and (order.dry or bool(libraries)), seconds, detail, result == CUT)]


def which_code(code: Code, order: Order) -> list[Verdict]:
    """That processes use this build, and that the card runs the code which it is meant to test."""
    log = order.logs / f"{code.name}_code.log"
    command = [sys.executable, "-m", "warpsmith", "info", "--json"]
    result, output, seconds = run_command(command, log, order.limit_s, order.env)
    try:
        facts = json.loads(output[output.index("{") :])
        kernel = facts["kernels"]["cpu" if order.dry else "cuda:0"]
    except (ValueError, KeyError, TypeError):
        return [Verdict(f"{code.name} code", False, seconds, why(result, order.limit_s), result == CUT)]
    ours = order.dry or Path(facts["library"]).is_relative_to(code.folder)
    right = order.dry or (kernel["code"] == code.expected and ("PTX" in kernel["why"]) == code.compiled_by_driver)
    detail = kernel["why"] + ("" if ours else f"; but the library is {facts['library']}")
    detail += "" if right else f"; expected code of {code.expected}"
    return [Verdict(f"{code.name} code", result == 0 and kernel["runs"] and ours and right, seconds, detail)]


def compile_all(code: Code, order: Order) -> list[Verdict]:
    """Has the driver compile every op's kernels, several ops at once, before many tests ask for the same."""
    start = time.monotonic()
    names = stages.names_of_ops()[:1] if order.dry else stages.names_of_ops()

    def one(op: str) -> str:
        command = [sys.executable, "tools/gpu/sanitized_workload.py", "--op", op, "--cases", "1"]
        command += ["--device", "cpu"] if order.dry else []
        log = order.logs / f"{code.name}_compile_{op}.log"
        left_s = order.limit_s - (time.monotonic() - start)
        result, output, _ = run_command(command, log, left_s, order.env)
        done = result == 0 and re.search(stages.WORKLOAD_DONE, output)
        if done:
            log.unlink()
        return "" if done else f"{op}: {why(result, left_s)}"

    with ThreadPoolExecutor(COMPILE_PROCESSES) as pool:
        failed = [text for text in pool.map(one, names) if text]
    detail = f"{len(names) - len(failed)} of {len(names)} ops" + "".join(f"\n  {text}" for text in failed)
    return [Verdict(f"{code.name} compile", not failed, time.monotonic() - start, detail)]


def gpu_tests(code: Code, order: Order) -> list[Verdict]:
    return renamed(code, stages.tests(order))


def alone_tests(code: Code, order: Order) -> list[Verdict]:
    return renamed(code, stages.alone(order))


def sanitizers(code: Code, order: Order) -> list[Verdict]:
    """The four tools, without the attention fixture, which is built for sm_90a by itself."""
    return renamed(code, stages.sanitize(order, fixture=False))


def bench(code: Code, order: Order) -> list[Verdict]:
    """Rows of the portable kernels. The benchmarks put the code that runs behind the GPU's name."""
    what = ["cpu", "--quick", "--op", "relu_squared"] if order.dry else ["cuda", "--rounds", "15"]
    what += [] if order.dry else [word for op in BENCHMARKS for word in ("--op", op)]
    name = f"{code.name}_bench"
    found = stages.measure(name, order, "--no-compile", "--device", *what)
    rows = order.logs / f"{name}_rows.json"
    if rows.exists():
        rows.rename(order.logs / f"{code.name}_rows.json")
    return renamed(code, [replace(verdict, stage="bench") for verdict in found])


def renamed(code: Code, verdicts: list[Verdict]) -> list[Verdict]:
    return [replace(verdict, stage=f"{code.name} {verdict.stage}") for verdict in verdicts]


# A step's limit in seconds; the last one gets what the others leave. Without the first two the others would test
# something else.
NEEDED: tuple[tuple[Step, float], ...] = ((install, 130.0), (which_code, 40.0))
COMPILE: tuple[Step, float] = (compile_all, 90.0)
TESTS: tuple[tuple[Step, float], ...] = ((gpu_tests, 150.0), (alone_tests, 40.0))


def steps_of(code: Code, steps: tuple[tuple[Step, float], ...], order: Order) -> Iterator[Verdict]:
    end = time.monotonic() + order.limit_s
    for number, (step, limit_s) in enumerate(steps):
        left_s = end - time.monotonic()
        if left_s < 5:
            yield Verdict(f"{code.name} {step.__name__}", False, 0.0, "no time left", cut=True)
            continue
        limit_s = left_s if number == len(steps) - 1 else min(left_s, limit_s)
        made = step(
            code, replace(order, limit_s=limit_s, env={**order.env, **code.environment}, prefix=f"{code.name}_")
        )
        yield from made
        if number < len(NEEDED) and not all(v.ok for v in made):
            yield Verdict(f"{code.name} tests", False, 0.0, "not run: the build is not the one to test")
            return


def sm80(order: Order) -> list[Verdict]:
    """Code of sm_80: all GPU tests, the four sanitizers at small shapes, a short benchmark."""
    return list(steps_of(SM80, (*NEEDED, COMPILE, *TESTS, (sanitizers, 110.0), (bench, 60.0)), order))


def both(order: Order) -> list[Verdict]:
    """The default of a machine without a GPU: all GPU tests."""
    return list(steps_of(BOTH, (*NEEDED, *TESTS), order))


def ptx(order: Order) -> list[Verdict]:
    """Its PTX alone: all GPU tests."""
    return list(steps_of(PTX, (*NEEDED, COMPILE, *TESTS), order))


# One of them fills a command of ten minutes.
STAGES = {
    "sm80": Stage(sm80, 570.0, default=False),  # not measured
    "both": Stage(both, 380.0, default=False),  # not measured
    "ptx": Stage(ptx, 460.0, default=False),  # not measured
}
