#!/usr/bin/env python3
"""Builds, tests, sanitizes and measures on this machine's GPU, without a network, within --budget seconds.

    python tools/gpu/run.py                       build, code, conformance, tests, alone, sanitize, bench
    python tools/gpu/run.py tests alone           some of them, of the package that is installed
    python tools/gpu/run.py bench --op rms_norm   one op
    python tools/gpu/run.py --code sm80           what A100, L40S and RTX 4090 run; builds into a folder of its own
    python tools/gpu/run.py --code both           what a build on a machine without a GPU holds
    python tools/gpu/run.py --code ptx            its PTX alone, what Blackwell cards run

A failing stage does not stop later ones, but the tests of another build than the one asked for are not run. Each stage
has a limit. What a limit cut off, or a tool that is missing, makes the exit status 1. $OUT (default build/gpu) gets
stages.json, logs.txt, and the rows of the benchmarks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(os.environ.get("OUT") or ROOT / "build/gpu")
CUT = 124  # the exit status of a command that its limit stopped
# Seconds. One H200 took 56 (an H100 over 120), 6, 24, 22, 87, 11, 28 beside torch.compile's 70, and 313.
LIMITS = {"build": 240, "code": 40, "conformance": 80, "compile": 90, "tests": 170, "alone": 90, "sanitize": 110,
          "bench": 600}  # fmt: skip
# The architectures to build for (of the card: CMake finds it), the code that the card must run, and the stages.
CODES = {
    "card": ("", r"sm_(\d+)a? .*\(sm_\1\) .*machine code", "build code conformance tests alone sanitize bench"),
    "sm80": ("80", r"sm_80 ", "build code compile tests alone sanitize bench"),
    "both": ("80;90", r"sm_90 .*machine code", "build code tests alone"),
    "ptx": ("80-virtual;90-virtual", r"sm_90 .*PTX", "build code compile tests alone"),
}
# Ops whose portable kernels differ most from those of sm_90 first.
PORTABLE = ("rms_norm", "layer_norm", "cross_entropy", "add_rms_norm", "qk_norm_rope", "rope", "swiglu", "bias_gelu")
GIB_OF_A_PROCESS = 10  # of the tests that run beside each other; those that take up to 30 GiB are marked alone
RACECHECK = "--racecheck-indirect-barrier-dependency --kernel-name-exclude kns=backward_sm90"
# The first option, of 2023.3, follows an order through __syncwarp to another lane's arrival at an mbarrier. racecheck
# does not follow the order from reads to one thread's bulk copy, as in backward_sm90's statistics: the thread sanitizer
# of the host layer does (docs/design/attention.md).
SANITIZERS = {"memcheck": "--padding 256", "racecheck": RACECHECK, "initcheck": "", "synccheck": ""}
CLEAN = r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)"
CARD = "import torch; print(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0], sep='; ')"
Judge = Callable[[int, str], tuple[bool, str]]
WORKLOAD = [sys.executable, "tools/gpu/sanitized_workload.py"]
PYTEST = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--continue-on-collection-errors"]


@dataclass
class Verdict:
    stage: str
    ok: bool
    detail: str
    seconds: float = 0.0
    cut: bool = False

    def __str__(self) -> str:
        word = "CUT" if self.cut else "ok" if self.ok else "FAILED"
        return f"{self.stage:20s} {word:6s} {self.seconds:4.0f} s  {self.detail}"


@dataclass(frozen=True)
class Job:
    """A command, and what its exit status and its output say: whether all is well, and a line for the table."""

    name: str
    command: list[str]
    judge: Judge
    env: Mapping[str, str] = field(default_factory=dict)


def matching(pattern: str) -> Judge:
    """A judge: the command ends well and prints this."""

    def judge(status: int, output: str) -> tuple[bool, str]:
        found = re.search(pattern, output, re.MULTILINE)
        told = [found[0]] if found else []
        return status == 0 and bool(told), "; ".join(told if told and status == 0 else [*told, f"exit status {status}"])

    return judge


did_work = matching(r"workload: [1-9]\d* op calls[^\n]*")


def sanitized(status: int, output: str) -> tuple[bool, str]:
    """The tool's own summaries must be clean, and the workload must have run: a tool that is missing must not pass."""
    summaries, (worked, told) = re.findall(r"[^\n]*SUMMARY: [^\n]*", output), did_work(status, output)
    clean = bool(summaries) and all(re.search(CLEAN, line) for line in summaries)
    return clean and worked, f"{summaries[-1].strip('= ') if summaries else 'no summary line'}; {told}"


def tested(status: int, output: str) -> tuple[bool, str]:
    """Something must have passed. pytest -v names each test as it ends, so that a run that was cut has names, too."""
    closing = re.findall(r"^=+ (\d+ [a-z][^\n=]*) in [\d.:]+", output, re.MULTILINE)
    failed = dict.fromkeys(re.findall(r"^(?:\[gw\d+\] \[ *\d+%\] )?(?:FAILED|ERROR) (\S+)", output, re.MULTILINE))
    passed = len(re.findall(r"\bPASSED\b", output))
    detail = closing[-1] if closing else f"exit status {status}; {passed} passed, {len(failed)} failed until then"
    files = ", ".join(f"{n} of {name}" for name, n in Counter(test.split("::")[0] for test in failed).most_common())
    return status == 0 and passed > 0, "\n    ".join(
        [detail, *list(failed)[:12], *([f"in all {files}"] if failed else [])]
    )


def measured(status: int, output: str) -> tuple[bool, str]:
    rows = sum(int(n) for n in re.findall(r"^\S+ on \S+: (\d+) rows in", output, re.MULTILINE))
    missing = re.findall(r"^(?:failed|left_out): \[.+\]", output, re.MULTILINE)
    return status == 0 and rows > 0 and not missing, "; ".join([f"{rows} rows, exit status {status}", *missing])


def log_of(name: str) -> Path:
    return ROOT / "build/gpu-logs" / f"{name.replace(' ', '_')}.log"


def run_job(job: Job, end: float) -> Verdict:
    """Runs the command in a process group of its own; at the end of its time all of the group is killed."""
    start, log = time.monotonic(), log_of(job.name)
    tools = f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"  # which a login shell may have left out
    env = {**os.environ, "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), tools]), **job.env}
    with log.open("wb") as out:
        try:
            child = subprocess.Popen(
                job.command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=env
            )
            status = child.wait(max(1.0, end - start))
        except OSError as error:
            out.write(f"{job.command[0]}: {error}\n".encode())
            status = 127
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            status = CUT
    output = log.read_text(errors="replace")
    ok, detail = job.judge(status, output)
    cut = status == CUT or "left_out: " in detail or "left out" in detail
    return Verdict(job.name, ok, detail, round(time.monotonic() - start, 1), cut)


def report(verdict: Verdict) -> None:
    """A line, and the end of the log of what failed; logs.txt gets all of the log."""
    print(verdict)
    log = log_of(verdict.stage).read_text(errors="replace") if log_of(verdict.stage).exists() else ""
    if not verdict.ok:
        print(*[f"  | {line[:200]}" for line in log.splitlines()[-40:]], sep="\n", flush=True)
    with (OUT / "logs.txt").open("a") as logs:
        logs.write(f"==== {verdict}\n{log}\n")


def runs_on_card(folder: Path | None, expected: str) -> Judge:
    """Reads `warpsmith info --json`: processes load the library of this folder, and the card runs the code expected."""

    def judge(status: int, output: str) -> tuple[bool, str]:
        try:
            facts = json.loads(output[output.index("{") :])
            kernel, library = facts["kernels"]["cuda:0"], str(facts["library"])
        except (ValueError, KeyError, TypeError):
            return False, f"exit status {status}"
        ours = folder is None or Path(library).is_relative_to(folder)
        right = kernel["runs"] and re.match(expected, f"{kernel['code']} {kernel['why']}") is not None
        detail = kernel["why"] + ("" if ours else f"; but the library is {library}")
        return status == 0 and ours and right, detail + ("" if right else f"; expected {expected}")

    return judge


def spread(free_bytes: int, cores: int) -> list[str]:
    """pytest's arguments for as many processes as the card's memory and the host's cores serve, if it has xdist."""
    count = max(1, min(8, cores // 2, free_bytes // (GIB_OF_A_PROCESS * 2**30)))
    return ["-n", str(count)] if importlib.util.find_spec("xdist") else []


def jobs_of(stage: str, code: str, ops: list[str], free_bytes: int, limit_s: float) -> list[Job]:
    """What a stage runs, all at the same time."""
    architectures, expected, stages = CODES[code]
    folder, cores = ROOT / f"build/gpu-{code}", os.cpu_count() or 2
    env = {}
    if architectures:  # beside the installed package, with a cache of its own for what the driver compiles
        paths = [f"{folder}/package", *filter(None, [os.environ.get("PYTHONPATH")])]
        cache = {"CUDA_CACHE_PATH": f"{folder}/compiled", "CUDA_CACHE_MAXSIZE": str(4 << 30)}
        env = {"PYTHONPATH": os.pathsep.join(paths), **cache}
    if stage == "build":
        pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "-v", "."]
        env = {"WARPSMITH_REQUIRE_CUDA": "1", "CMAKE_BUILD_PARALLEL_LEVEL": str(cores)}
        if architectures:
            env |= {"TORCH_CUDA_ARCH_LIST": "", "CMAKE_ARGS": f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"}
            pip += ["--target", f"{folder}/package", "--upgrade", f"--config-settings=build-dir={folder}/objects"]
        return [Job(stage, pip if architectures else [*pip, "--force-reinstall"], matching(r"warpsmith: CUDA .*"), env)]
    if stage == "code":
        judge = runs_on_card(folder if architectures else None, expected)
        return [Job(stage, [sys.executable, "-m", "warpsmith", "info", "--json"], judge, env)]
    if stage == "conformance":
        judge = matching(r"[1-9]\d* vectors checked on (?!host|no device).*, 0 differ")
        return [Job(stage, [sys.executable, "tools/gpu/conformance/pins.py", "replay"], judge)]
    if stage == "compile":  # by the driver, before many tests ask for the same
        texts = [path.read_text() for path in (ROOT / "python/warpsmith/ops").glob("[a-z]*.py")]
        names = sorted({name for text in texts for name in re.findall(r"^def ([a-z]\w*)", text, re.MULTILINE)})
        return [Job(f"compile {op}", [*WORKLOAD, "--op", op, "--cases", "1"], did_work, env) for op in names]
    if stage == "tests":
        return [Job(stage, [*PYTEST, "-m", "gpu and not alone", *spread(free_bytes, cores), "tests"], tested, env)]
    if stage == "alone":
        texts = {str(path): path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
        files = [path for path, text in texts.items() if "mark.alone" in text or "op_tests(" in text]
        return [Job(stage, [*PYTEST, "-m", "gpu and alone", *files], tested, env)]
    until = [f"{time.time() + limit_s - min(25, limit_s / 2):.0f}"]  # what is begun may end
    bench = [sys.executable, "-m", "benchmarks", "--device", "cuda", "--until", *until]
    bench += [word for op in ops or (PORTABLE if architectures else ()) for word in ("--op", op)]
    if stage == "bench":
        how = ["--no-compile", "--rounds", "15"] if architectures else []
        return [Job(stage, [*bench, *how, "--json", str(OUT / "bench.json")], measured, env)]
    uncached = {**env, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # the caching allocator would hide overruns
    tool = ["compute-sanitizer", "--error-exitcode", "9", "--print-limit", "20", "--tool"]
    jobs = [Job(f"sanitize {name}", [*tool, name, *options.split(), *WORKLOAD], sanitized, uncached)
            for name, options in SANITIZERS.items()]  # fmt: skip
    if "bench" in stages and not architectures:  # compiles what will be timed; the host is free meanwhile
        warm = [*bench, "--warm-compile", str(max(1, min(8, cores - 2)))]
        jobs.append(Job("warm", warm, matching(r"compiled: .*"), env))
    return jobs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"of {', '.join(LIMITS)}; default: see above")
    parser.add_argument("--code", choices=CODES, default="card", help="to build for; default: %(default)s")
    parser.add_argument("--budget", type=float, default=570.0, metavar="SECONDS", help="in all; default: %(default)s")
    parser.add_argument("--op", action="append", default=[], help="to measure; may be repeated; default: all")
    given = parser.parse_args()
    if unknown := set(given.stages) - LIMITS.keys():
        parser.error(f"stage: expected one of {', '.join(LIMITS)}, got {', '.join(sorted(unknown))}")
    start, plan = time.monotonic(), CODES[given.code][2].split()
    # Without `code` a stage could test another build than the one that was asked for.
    chosen = [stage for stage in LIMITS if stage in (["code", *given.stages] if given.stages else plan)]
    shutil.rmtree(log_of("").parent, ignore_errors=True)
    for folder in (OUT, log_of("").parent):
        folder.mkdir(parents=True, exist_ok=True)
    (OUT / "logs.txt").write_text("")
    card = subprocess.run([sys.executable, "-c", CARD], capture_output=True, text=True)
    if card.returncode:
        print(card.stderr)
        return 1
    name, free_bytes = card.stdout.strip().splitlines()[-1].split("; ")
    verdicts: list[Verdict] = []
    for stage in chosen:
        now = time.monotonic()
        limit_s = min(LIMITS[stage], start + given.budget - now)
        broken = [v for v in verdicts if v.stage in ("build", "code") and not v.ok]
        if broken and stage not in ("code", "conformance"):
            new = [Verdict(stage, False, f"not run: {broken[0].stage} failed, this is not the build to test")]
        elif limit_s < 5:
            new = [Verdict(stage, False, "no time left", cut=True)]
        else:
            print(f"== {stage}: at most {limit_s:.0f} s", flush=True)
            jobs = jobs_of(stage, given.code, given.op, int(free_bytes), limit_s)
            with ThreadPoolExecutor(10) as pool:
                new = list(pool.map(run_job, jobs, [now + limit_s] * len(jobs)))
        for verdict in new:
            report(verdict)
        verdicts += new
        facts = {"card": name, "code": given.code, "seconds": round(time.monotonic() - start, 1)}
        (OUT / "stages.json").write_text(
            json.dumps({**facts, "stages": [asdict(v) for v in verdicts]}, indent=1) + "\n"
        )
    print(
        f"\n{name}, code {given.code}, {time.monotonic() - start:.0f} s; logs: {OUT / 'logs.txt'}", *verdicts, sep="\n"
    )
    return 0 if all(v.ok and not v.cut for v in verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
