"""The stages of tools/gpu/run.sh, each with a time limit, a log and a verdict, and the table that ends them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 570.0  # of all stages together
LOG_LINES = 40  # of a failed stage's log that are printed
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
# What each tool must say itself: a tool that is missing, or saw no kernel, must not pass.
CLEAN = r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)"
WORKLOAD_DONE = r"workload: ((\d+) op calls[^\n]*)"
CPU_TESTS = ("testing", "ops", "optim", "nn", "host")


@dataclass
class Verdict:
    """How a command ended."""

    stage: str
    ok: bool
    seconds: float
    detail: str


def run_command(
    command: list[str], log: Path, limit_s: float, env: dict[str, str] | None = None
) -> tuple[int, str, float]:
    """Runs a command in a process group of its own; at the limit all of it is killed and the exit code is 124."""
    start = time.monotonic()
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment_of(env),
                start_new_session=True,
            )
        except OSError as error:
            file.write(f"{command[0]}: {error}\n".encode())
            code = 127
        else:
            try:
                code = process.wait(max(limit_s, 1.0))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = 124
    return code, log.read_text(errors="replace"), time.monotonic() - start


def environment_of(extra: dict[str, str] | None) -> dict[str, str]:
    """This process's environment with the CUDA tools on PATH, which a login shell may have left out."""
    tools = str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin")
    path = os.environ.get("PATH", os.defpath)
    return {
        **os.environ,
        "PATH": path if tools in path.split(os.pathsep) else path + os.pathsep + tools,
        **(extra or {}),
    }


def why(code: int, limit_s: float) -> str:
    """An exit code in words."""
    return f"stopped after {limit_s:.0f} s" if code == 124 else f"exit code {code}"


def build(logs: Path, limit_s: float) -> list[Verdict]:
    """Builds and installs the package against this machine's torch, for its architecture."""
    env = {"WARPSMITH_REQUIRE_CUDA": "1", "CMAKE_BUILD_PARALLEL_LEVEL": "16"}
    if not os.environ.get("CMAKE_ARGS") and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        env["TORCH_CUDA_ARCH_LIST"] = "9.0a"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-build-isolation",
        "--no-deps",
        "--force-reinstall",
        "-v",
        ".",
    ]
    code, output, seconds = run_command(command, logs / "build.log", limit_s, env)
    found = re.findall(r"warpsmith: CUDA [^\n]*", output)
    return [Verdict("build", code == 0, seconds, found[-1] if code == 0 and found else why(code, limit_s))]


def pytest_verdict(name: str, code: int, output: str, seconds: float, limit_s: float) -> Verdict:
    """Reads pytest's closing line. No test run is a failure too."""
    closing = re.findall(r"^=* ?(\d+ (?:passed|failed|skipped|error)[^\n=]*?) in [\d.:]+", output, re.MULTILINE)
    detail = closing[-1] if closing else why(code, limit_s)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    detail += "".join(f"\n  {name}" for name in failed[:12])
    return Verdict(name, code == 0 and "passed" in detail, seconds, detail)


def run_tests(name: str, arguments: list[str], logs: Path, limit_s: float) -> Verdict:
    base = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    code, output, seconds = run_command([*base, *arguments], logs / f"{name.replace(' ', '_')}.log", limit_s)
    return pytest_verdict(name, code, output, seconds, limit_s)


def spread(processes: int) -> list[str]:
    """pytest's arguments for so many processes, where it has the plugin."""
    return ["-n", str(processes)] if importlib.util.find_spec("xdist") else []


def ops(logs: Path, limit_s: float) -> list[Verdict]:
    """The ops' tests that need a GPU."""
    share = spread(6)  # of one card: the tests of more than 2^31 elements take up to 30 GB each
    return [run_tests("test gpu ops", [*share, "-m", "gpu", "tests/ops"], logs, limit_s)]


def test(logs: Path, limit_s: float) -> list[Verdict]:
    """All other tests that need a GPU, one by one: timings want the card for themselves."""
    return [run_tests("test gpu", ["-m", "gpu", "--ignore=tests/ops", "tests"], logs, limit_s)]


def test_cpu(logs: Path, limit_s: float) -> list[Verdict]:
    """The CPU tests of ops, here on another torch and Python than in development."""
    folders = [f"tests/{name}" for name in CPU_TESTS if (ROOT / "tests" / name).is_dir()]
    return [run_tests("test cpu", [*spread(8), "-m", "not gpu and not slow", *folders], logs, limit_s)]


def sanitizer_verdict(tool: str, code: int, output: str, seconds: float, limit_s: float) -> Verdict:
    """A clean tool says so itself, after the workload said how much it ran."""
    summary = re.findall(r"[^\n]*SUMMARY: [^\n]*", output)
    done = re.search(WORKLOAD_DONE, output)
    clean = code == 0 and bool(summary) and all(re.search(CLEAN, line) for line in summary)
    worked = done is not None and int(done[2]) > 0
    parts = [summary[-1].strip("= ") if summary else f"no summary line, {why(code, limit_s)}"]
    parts.append(done[1] if done and worked else "the workload did not finish")
    return Verdict(f"sanitize {tool}", clean and worked, seconds, "; ".join(parts))


def sanitize(logs: Path, limit_s: float) -> list[Verdict]:
    """Every op at small shapes under compute-sanitizer's four tools, and the attention fixture under memcheck, at the
    same time. (racecheck does not see an order that goes from a lane through __syncwarp to another lane's mbarrier
    arrival, as the fixture's does: docs/design/2026-11-21-attention-fixture.md.)"""

    def one(tool: str, name: str, options: list[str], workload: list[str], env: dict[str, str]) -> Verdict:
        command = ["compute-sanitizer", "--tool", tool, *options, "--error-exitcode", "9", "--print-limit", "20"]
        command += [sys.executable, *workload]
        code, output, seconds = run_command(command, logs / f"sanitize_{name.replace(' ', '_')}.log", limit_s, env)
        return sanitizer_verdict(name, code, output, seconds, limit_s)

    ops = ["tools/gpu/sanitized_workload.py"]
    fixture = ["tools/gpu/attention_fixture.py", "--check"]
    only = ["--kernel-name", "kns=attention_sm90"]  # not torch's, which make and check its inputs
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # the caching allocator would hide overruns
    jobs = [(t, t, ["--padding", "256"] if t == "memcheck" else [], ops, uncached) for t in SANITIZERS]
    jobs.append(("memcheck", "attention memcheck", only, fixture, {}))
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: one(*job), jobs))


def warm(logs: Path, limit_s: float) -> list[Verdict]:
    """Compiles what the benchmarks time, by many processes; a contender that fails is only told of."""
    command = [sys.executable, "-m", "benchmarks", "--warm-compile", str(max(2, (os.cpu_count() or 2) - 2))]
    code, output, seconds = run_command(command, logs / "warm.log", limit_s)
    done = re.findall(r"^compiled: ([^\n]*)", output, re.MULTILINE)
    return [Verdict("warm", code == 0 and bool(done), seconds, done[-1] if done else why(code, limit_s))]


def bench(logs: Path, limit_s: float) -> list[Verdict]:
    """The benchmarks; their rows are kept beside the log, also those of a run that was stopped."""
    rows = logs / "bench_rows.json"
    rows.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks", "--json", str(rows)]
    code, output, seconds = run_command(command, logs / "bench.log", limit_s)
    count = len(json.loads(rows.read_text())["rows"]) if rows.exists() else 0
    compiling = sum(float(s) for s in re.findall(r"torch.compile (\d+) s", output))
    missed = sum(int(n) for n in re.findall(r"from its cache, (\d+) not", output))
    detail = f"{count} rows, torch.compile {compiling:.0f} s, {missed} graphs not in its cache"
    detail += "" if code == 0 else f", {why(code, limit_s)}"
    return [Verdict("bench", code == 0 and count > 0, seconds, detail)]


# In order. Seconds: a stage's own limit; together they may not pass the deadline either.
STAGES = {
    "build": (build, 180.0),
    "ops": (ops, 150.0),
    "test": (test, 100.0),
    "cpu": (test_cpu, 200.0),
    "sanitize": (sanitize, 200.0),
    "warm": (warm, 200.0),
    "bench": (bench, 400.0),
}
TOGETHER = ("cpu", "sanitize", "warm")  # those chosen of these run at the same time: none of them times anything


def stage_table(verdicts: list[Verdict]) -> str:
    """One line a verdict."""
    width = max(len(v.stage) for v in verdicts)
    return "\n".join(
        f"{v.stage.ljust(width)}  {'ok    ' if v.ok else 'FAILED'}  {v.seconds:5.0f} s  {v.detail}" for v in verdicts
    )


def merge_logs(logs: Path) -> None:
    """The four tools' logs as one file."""
    parts = sorted(logs.glob("sanitize_*.log"))
    if parts:
        (logs / "sanitize.log").write_text("".join(f"==== {p.stem}\n{p.read_text(errors='replace')}\n" for p in parts))
    for path in parts:
        path.unlink()


def own_rows(log: str) -> str:
    """The lines of the benchmarks' table that are this package's; the JSON has all."""
    if "\nop " not in log:
        return "the benchmarks printed no table"
    head, rule, *lines = log[log.rfind("\nop ") + 1 :].splitlines()
    return "\n".join([head, rule, *(line for line in lines if "  warpsmith  " in line)])


def row_by_row(kept: dict[str, Any]) -> str:
    """JSON with one line for each of the rows, of which there are more than a thousand."""
    rest = json.dumps({name: value for name, value in kept.items() if name != "rows"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(row)}" for row in kept["rows"])
    return f'{rest[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def finish(verdicts: list[Verdict], logs: Path, results: Path) -> None:
    """Prints the benchmark's table and the stages', and writes both as one JSON file named by date and GPU."""
    kept: dict[str, Any] = {"environment": {}, "rows": []}
    rows = logs / "bench_rows.json"
    if any(v.stage == "bench" for v in verdicts) and rows.exists():
        kept = json.loads(rows.read_text())
        rows.unlink()
        print(own_rows((logs / "bench.log").read_text(errors="replace")))
    merge_logs(logs)
    gpu = re.sub(r"\W+", "-", str(kept["environment"].get("gpu", "gpu"))).lower()
    results.mkdir(parents=True, exist_ok=True)
    target = results / f"{time.strftime('%Y-%m-%d-%H%M', time.gmtime())}-{gpu}.json"
    target.write_text(row_by_row({"stages": [asdict(v) for v in verdicts], **kept}))
    print("\n".join(f"{name}: {value}" for name, value in kept["environment"].items()))
    print(stage_table(verdicts))
    print(f"written: {target}")


def groups(stages: list[str]) -> list[list[str]]:
    """The stages in order; those that may run at the same time as one group, where the first of them stands."""
    together = [name for name in stages if name in TOGETHER]
    found = [[name] for name in stages if name not in together[1:]]
    return [together if name in together else [name] for (name,) in found]


def main(arguments: list[str] | None = None) -> int:
    """Runs the stages asked for and returns 0 if all are ok."""
    parser = argparse.ArgumentParser(
        prog="tools/gpu/run.sh", description="Build, test, sanitize and measure on this GPU."
    )
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"of {', '.join(STAGES)}; default: all")
    chosen = parser.parse_args(arguments).stages or list(STAGES)
    for stage in chosen:
        if stage not in STAGES:
            parser.error(f"stage: expected one of {', '.join(STAGES)}, got {stage}")
    out = os.environ.get("OUT")
    results = Path(out) if out else ROOT / "benchmarks/results"
    logs = Path(out) if out else ROOT / "build/gpu-logs"
    logs.mkdir(parents=True, exist_ok=True)

    start = time.monotonic()
    verdicts: list[Verdict] = []
    for group in groups([name for name in STAGES if name in chosen]):
        left = DEADLINE_S - (time.monotonic() - start)
        print(f"== {', '.join(group)}: {left:.0f} s left of {DEADLINE_S:.0f}", flush=True)

        def one(stage: str, left: float = left) -> list[Verdict]:
            function, limit_s = STAGES[stage]
            return function(logs, min(limit_s, left)) if left > 5 else [Verdict(stage, False, 0.0, "no time left")]

        with ThreadPoolExecutor(len(group)) as pool:
            new = [verdict for stage in pool.map(one, group) for verdict in stage]
        verdicts += new
        print(stage_table(new), flush=True)
        for verdict in new:
            log = logs / f"{verdict.stage.replace(' ', '_')}.log"
            if not verdict.ok and log.exists():
                tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                print("\n".join(f"  | {line[:200]}" for line in tail), flush=True)
    finish(verdicts, logs, results)
    return 0 if all(v.ok for v in verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
