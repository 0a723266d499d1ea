"""The stages of tools/gpu/run.sh: what each runs, how long it may take, and by what its end is judged.

Limits are set from what was measured on one H200 with 16 cores, which stands beside them. A dry run (`--dry-run`) gives
every stage next to nothing to do, on the CPU, through the same commands and the same judgement.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from command import CUT, ROOT, Order, Verdict, run_command, why

SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZER_OPTIONS = {
    "memcheck": ["--padding", "256"],
    # Without the first racecheck misses an order that goes from a lane through __syncwarp to another lane's arrival at
    # an mbarrier, as attention's do (docs/design/2026-11-21-attention-fixture.md). Since 2023.3. It does not see that
    # order from reads to a bulk copy of one thread: these kernels' statistics, whose order is written down in
    # docs/design/2026-11-22-attention-sm90.md, and checked by the thread sanitizer on the host layer.
    "racecheck": ["--racecheck-indirect-barrier-dependency", "--kernel-name-exclude", "kns=backward_sm90"],
}
# What each tool must say itself: a tool that is missing, or saw no kernel, must not pass.
CLEAN = r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)"
WORKLOAD_DONE = r"workload: ((\d+) op calls[^\n]*)"
CPU_TESTS = ("testing", "ops", "optim", "nn", "host")
DRY_TESTS = ["--collect-only", "tests/optim/test_adamw_gpu.py", "tests/testing/test_timers.py"]
TEST_PROCESSES = 6  # of one card: the tests of more than 2^31 elements take up to 30 GB each
# Each takes several ops, so that contexts and imports are paid for once: 16 of them were slower than the card's driver
# makes contexts, and than the host's cores, beside the sanitizers, compile.
WARM_PROCESSES = 8
LAST_CALL_S = {"bench": 25.0, "warm": 20.0}  # nothing new is begun in a stage's last seconds: what is begun may end


def build(order: Order) -> list[Verdict]:
    """Builds and installs the package against this machine's torch, for its architecture."""
    env = {"WARPSMITH_REQUIRE_CUDA": "1", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 2)}
    if not os.environ.get("CMAKE_ARGS") and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        env["TORCH_CUDA_ARCH_LIST"] = "9.0a"
    install = ["pip", "install", "--no-build-isolation", "--no-deps", "--force-reinstall", "-v", "."]
    command = [sys.executable, "-m", *(["warpsmith", "info"] if order.dry else install)]
    code, output, seconds = run_command(command, order.logs / "build.log", order.limit_s, env)
    found = re.findall(r"warpsmith: CUDA [^\n]*|^warpsmith +\S[^\n]*", output, re.MULTILINE)
    detail = found[-1] if code == 0 and found else why(code, order.limit_s)
    return [Verdict("build", code == 0, seconds, detail, code == CUT)]


def failed_tests(output: str) -> list[str]:
    """From pytest's summary: each once, in order."""
    return list(dict.fromkeys(re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)))


def pytest_verdict(name: str, code: int, output: str, seconds: float, limit_s: float) -> Verdict:
    """Reads pytest's closing line. No test run is a failure too."""
    closing = re.findall(r"^=* ?(\d+ (?:passed|failed|skipped|error)[^\n=]*?) in [\d.:]+", output, re.MULTILINE)
    detail = closing[-1] if closing else why(code, limit_s)
    failed = failed_tests(output)
    files = Counter(test.split("::")[0] for test in failed)
    detail += "".join(f"\n  {test}" for test in failed[:12])
    if len(failed) > 12:
        detail += "\n  in all: " + ", ".join(f"{count} of {file}" for file, count in files.most_common())
    return Verdict(name, code == 0 and "passed" in detail, seconds, detail, code == CUT)


def run_tests(name: str, arguments: list[str], order: Order) -> list[Verdict]:
    base = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command = [*base, *arguments]
    code, output, seconds = run_command(command, order.log(name), order.limit_s, order.env)
    if order.dry:
        collected = re.findall(r"^(\d+(?:/\d+)? tests collected[^\n]*?) in ", output, re.MULTILINE)
        detail = collected[-1] if collected else why(code, order.limit_s)
        return [Verdict(name, code == 0 and bool(collected), seconds, detail, code == CUT)]
    failed = failed_tests(output)
    if failed:
        order.log(f"{name}_failed").with_suffix(".txt").write_text("".join(f"{test}\n" for test in failed))
    return [pytest_verdict(name, code, output, seconds, order.limit_s)]


def spread(processes: int) -> list[str]:
    """pytest's arguments for so many processes, where it has the plugin."""
    return ["-n", str(processes)] if importlib.util.find_spec("xdist") else []


def tests(order: Order) -> list[Verdict]:
    """The tests that need a GPU, but those that want it for themselves."""
    where = DRY_TESTS if order.dry else [*spread(TEST_PROCESSES), "tests"]
    return run_tests("tests", ["-m", "gpu and not alone", *where], order)


def alone(order: Order) -> list[Verdict]:
    """The tests of a GPU's timings, and of nearly all of its memory, one by one. Only their files are collected."""
    files = [str(p) for p in sorted((ROOT / "tests").rglob("test_*.py")) if "\n@pytest.mark.alone" in p.read_text()]
    return run_tests("alone", ["-m", "gpu and alone", *(["--collect-only"] if order.dry else []), *files], order)


def cpu_tests(order: Order) -> list[Verdict]:
    """The CPU tests of ops, here on another torch and Python than in development."""
    folders = [f"tests/{name}" for name in CPU_TESTS if (ROOT / "tests" / name).is_dir()]
    where = DRY_TESTS if order.dry else [*spread(8), *folders]
    return run_tests("cpu_tests", ["-m", "not gpu and not slow", *where], order)


def sanitizer_verdict(tool: str, code: int, output: str, seconds: float, limit_s: float) -> Verdict:
    """A clean tool says so itself, after the workload said how much it ran."""
    summary = re.findall(r"[^\n]*SUMMARY: [^\n]*", output)
    done = re.search(WORKLOAD_DONE, output)
    clean = code == 0 and bool(summary) and all(re.search(CLEAN, line) for line in summary)
    worked = done is not None and int(done[2]) > 0
    parts = [summary[-1].strip("= ") if summary else f"no summary line, {why(code, limit_s)}"]
    parts.append(done[1] if done and worked else "the workload did not finish")
    return Verdict(f"sanitize {tool}", clean and worked, seconds, "; ".join(parts), code == CUT)


def names_of_ops() -> list[str]:
    """What tools/gpu/sanitized_workload.py knows: every op, the optimizers included."""
    return sorted(path.stem for path in (ROOT / "python/warpsmith/ops").glob("[a-z]*.py"))


def sanitize(order: Order, fixture: bool = True) -> list[Verdict]:
    """Every op at small shapes under compute-sanitizer's four tools, and the attention fixture under memcheck, at the
    same time."""
    ops = ["tools/gpu/sanitized_workload.py"]
    if order.dry:
        command = [sys.executable, *ops, "--device", "cpu", "--cases", "1"]
        code, output, seconds = run_command(command, order.log("sanitize_dry"), order.limit_s, order.env)
        done = re.search(WORKLOAD_DONE, output)
        detail = done[1] if done else why(code, order.limit_s)
        return [Verdict("sanitize", code == 0 and done is not None, seconds, detail, code == CUT)]

    def one(tool: str, name: str, options: list[str], workload: list[str], env: dict[str, str]) -> Verdict:
        command = ["compute-sanitizer", "--tool", tool, *options, "--error-exitcode", "9", "--print-limit", "20"]
        command += [sys.executable, *workload]
        log = order.log(f"sanitize_{name.replace(' ', '_')}")
        code, output, seconds = run_command(command, log, order.limit_s, {**order.env, **env})
        return sanitizer_verdict(name, code, output, seconds, order.limit_s)

    attention = ["tools/gpu/attention_fixture.py", "--check"]
    only = ["--kernel-name", "kns=attention_sm90"]  # not torch's, which make and check its inputs
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # the caching allocator would hide overruns
    jobs = [(t, t, SANITIZER_OPTIONS.get(t, []), ops, uncached) for t in SANITIZERS]
    if fixture:
        jobs.append(("memcheck", "attention memcheck", only, attention, {}))
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: one(*job), jobs))


def benchmarks(name: str, order: Order, *arguments: str) -> tuple[int, str, float]:
    """Runs the benchmarks, which begin nothing new shortly before the limit."""
    until = time.time() + order.limit_s - min(LAST_CALL_S.get(name, 15.0), order.limit_s / 2)
    command = [sys.executable, "-m", "benchmarks", "--until", f"{until:.0f}", *arguments]
    return run_command(command, order.logs / f"{name}.log", order.limit_s, order.env)


def warm(order: Order) -> list[Verdict]:
    """Compiles what the benchmarks time on the GPU, by several processes; a contender that fails is only told of."""
    what = ["cpu", "--op", "host"] if order.dry else ["cuda"]
    processes = 1 if order.dry else max(1, min(WARM_PROCESSES, (os.cpu_count() or 2) - 2))
    code, output, seconds = benchmarks("warm", order, "--device", *what, "--warm-compile", str(processes))
    done = re.findall(r"^compiled: ([^\n]*)", output, re.MULTILINE)
    detail = done[-1] if done else why(code, order.limit_s)
    cut = code == CUT or "left out" in detail
    return [Verdict("warm", code == 0 and bool(done), seconds, detail, cut)]


def measure(name: str, order: Order, *what: str) -> list[Verdict]:
    """Benchmarks; their rows are kept beside the log, also those of a run that was stopped."""
    rows = order.logs / f"{name}_rows.json"
    rows.unlink(missing_ok=True)
    code, output, seconds = benchmarks(name, order, *what, "--json", str(rows))
    kept = json.loads(rows.read_text()) if rows.exists() else {"rows": [], "environment": {}}
    left_out = kept["environment"].get("left_out", [])
    compiling = sum(float(s) for s in re.findall(r"torch.compile (\d+) s", output))
    missed = sum(int(n) for n in re.findall(r"from its cache, (\d+) not", output))
    detail = f"{len(kept['rows'])} rows, torch.compile {compiling:.0f} s, {missed} graphs not in its cache"
    detail += "" if code == 0 else f", {why(code, order.limit_s)}"
    detail += f"; no time for {', '.join(left_out)}" if left_out else ""
    return [Verdict(name, code == 0 and bool(kept["rows"]), seconds, detail, code == CUT or bool(left_out))]


def bench(order: Order) -> list[Verdict]:
    """The GPU's rows. Nothing else runs on the machine: some of them are the host's times."""
    tiny = ["cpu", "--quick", "--no-compile", "--op", "host", "--op", "adamw"]
    return measure("bench", order, "--device", *(tiny if order.dry else ["cuda"]))


def cpu_rows(order: Order) -> list[Verdict]:
    """The CPU's rows."""
    return measure("cpu_rows", order, "--device", "cpu", *(["--quick", "--op", "rope"] if order.dry else []))


@dataclass(frozen=True)
class Stage:
    """run: what it does. limit_s: how long it may take. beside: the stage that runs at the same time, if both do."""

    run: Callable[[Order], list[Verdict]]
    limit_s: float
    beside: str = ""
    default: bool = True


# In order. No stage that times anything, the host's own times included, has another beside it.
STAGES = {
    "build": Stage(build, 85.0),  # 58 s
    "tests": Stage(tests, 125.0),  # ops 76 s by six processes; the others 77 s one by one, of which the longest 48
    "alone": Stage(alone, 35.0),  # not measured
    "sanitize": Stage(sanitize, 100.0),  # 27 s
    "warm": Stage(warm, 100.0, beside="sanitize"),  # not measured by eight processes
    "bench": Stage(
        bench, 235.0
    ),  # gets what the others leave as well; 330 s where a third of the graphs were not compiled
    "cpu_tests": Stage(cpu_tests, 300.0, default=False),  # 190 s
    "cpu_rows": Stage(cpu_rows, 250.0, default=False),
}
