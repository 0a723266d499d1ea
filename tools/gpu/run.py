#!/usr/bin/env python3
"""Builds, tests, sanitizes and measures on this machine's GPU, without a network, within --budget seconds.

    python tools/gpu/run.py                       build, code, conformance, tests, alone, sanitize, bench
    python tools/gpu/run.py tests alone           some of them, of the package that is installed
    python tools/gpu/run.py bench --op rms_norm   one op
    python tools/gpu/run.py --code sm80           what A100, L40S and RTX 4090 run; builds into a folder of its own
    python tools/gpu/run.py --code both           what a build on a machine without a GPU holds
    python tools/gpu/run.py --code ptx            its PTX alone, what Blackwell cards run

Each stage has a limit. A failing stage does not stop later ones, but another build than the one asked for is not
tested. $OUT (default build/gpu) gets stages.json, logs.txt, and the rows of the benchmarks.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(os.environ.get("OUT") or ROOT / "build/gpu")
PYTHON, CORES = shlex.quote(sys.executable), os.cpu_count() or 2
# Seconds. One H200 took 56 (an H100 over 120), 6, 24, 22, 159, 11, 28 beside torch.compile's 70, and 313.
LIMITS = {"build": 240, "code": 40, "conformance": 80, "compile": 90, "tests": 240, "alone": 90, "sanitize": 110,
          "bench": 600}  # fmt: skip
# The architectures to build for (of the card: CMake finds it), how `info` names the code that runs, and the stages.
CODES = {
    "card": ("", r"\(sm_(\d+)\) with code of sm_\1a? \(machine code\)$",
             "build code conformance tests alone sanitize bench"),
    "sm80": ("80", r"with code of sm_80 \(.*\)$", "build code compile tests alone sanitize bench"),
    "both": ("80;90", r"with code of sm_90 \(machine code\)$", "build code tests alone"),
    "ptx": ("80-virtual;90-virtual", r"with code of sm_90 \(PTX.*\)$", "build code compile tests alone"),
}  # fmt: skip
# Ops whose portable kernels differ most from those of sm_90.
PORTABLE = ("rms_norm", "layer_norm", "cross_entropy", "add_rms_norm", "qk_norm_rope", "rope", "swiglu", "bias_gelu")
GIB_OF_A_PROCESS = 10  # of the tests that run beside each other; those that take up to 30 GiB are marked alone
RACECHECK = "--racecheck-indirect-barrier-dependency --kernel-name-exclude kns=backward_sm90"
# The first option, of 2023.3, follows an order through __syncwarp to another lane's arrival at an mbarrier. racecheck
# does not follow the order from reads to one thread's bulk copy, as in backward_sm90's statistics: the thread sanitizer
# of the host layer does (docs/design/attention.md).
SANITIZERS = {"memcheck": "--padding 256", "racecheck": RACECHECK, "initcheck": "", "synccheck": ""}
# The caching allocator would hide overruns.
SANITIZER = "PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 --print-limit 20 --tool"
WORKLOAD, WORKED = f"{PYTHON} tools/gpu/sanitized_workload.py", r"workload: [1-9]\d* op calls.*"
PYTEST = f"{PYTHON} -m pytest -v -p no:cacheprovider --continue-on-collection-errors tests"
PASSED = r"^=+ .*\b[1-9]\d* passed\b.* in [\d.:]+"
# What no stage may print: a sanitizer's summary that is not clean, benchmarks without rows, the name of a failed test.
BAD = (
    r"^=+ (?:ERROR SUMMARY: (?!0 errors)|RACECHECK SUMMARY: (?!0 hazards displayed \(0 errors, 0 warnings\))).*"
    r"|^(?:failed|left_out): \[.+\]|^(?:\[gw\d+\] \[ *\d+%\] )?(?:FAILED|ERROR) \S+"
)
CARD = "import torch; print(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0], sep='; ')"
Job = tuple[str, str, list[str]]  # its name, a line of the shell, and patterns, each of which it must print


def judge(status: int, output: str, prints: list[str]) -> tuple[str, str]:
    """ok, CUT (by its limit) or FAILED; and what is to tell."""
    found = [[match[0].strip("= ") for match in re.finditer(p, output, re.MULTILINE)][-1:] for p in prints]
    bad = list(dict.fromkeys(match[0] for match in re.finditer(BAD, output, re.MULTILINE)))
    word = "ok" if status == 0 and all(found) and not bad else "CUT" if status == -9 else "FAILED"
    return word, "; ".join([*sum(found, []), f"exit status {status}", *bad[:12], *(["..."] if bad[12:] else [])])


def told(stage: str, word: str, detail: str, since: float) -> dict[str, str | float]:
    """A line of the table."""
    seconds = time.monotonic() - since
    print(f"{stage:20s} {word:6s} {seconds:4.0f} s  {detail}", flush=True)
    return {"stage": stage, "word": word, "seconds": round(seconds, 1), "detail": detail}


def run(job: Job, end: float) -> dict[str, str | float]:
    """Runs a command, which is killed with its children at the end of its time."""
    (name, command, prints), start = job, time.monotonic()
    limited = ["timeout", "--signal=KILL", f"{max(1.0, end - start):.1f}", "sh", "-c", command]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        status = subprocess.run(limited, cwd=ROOT, stdout=log, stderr=log).returncode
        log.seek(0)
        output = log.read()
    with (OUT / "logs.txt").open("a") as logs:
        logs.write(f"==== {name}: {command}\n{output}\n")
    verdict = told(name, *judge(status, output, prints), start)
    if verdict["word"] != "ok":
        print(*[f"  | {line[:200]}" for line in output.splitlines()[-40:]], sep="\n", flush=True)
    return verdict


def processes(free_bytes: int) -> str:
    """pytest's option for as many processes as the card's memory and the host's cores serve, if it has xdist."""
    count = max(1, min(8, CORES // 2, free_bytes // (GIB_OF_A_PROCESS * 2**30)))
    return f"-n {count}" if importlib.util.find_spec("xdist") else ""


def jobs_of(stage: str, code: str, ops: list[str], free_bytes: int, limit_s: float) -> list[Job]:
    """What a stage runs, all at the same time."""
    architectures, runs, _ = CODES[code]
    folder, library, how = ROOT / f"build/gpu-{code}", [], ""
    build = f"WARPSMITH_REQUIRE_CUDA=1 CMAKE_BUILD_PARALLEL_LEVEL={CORES} {PYTHON} -m pip install --force-reinstall "
    build += "--no-build-isolation --no-deps -v ."
    if architectures:  # beside the installed package
        library, how = [rf"^library +{re.escape(str(folder))}/.*"], "--no-compile --rounds 15"
        build = f"TORCH_CUDA_ARCH_LIST= CMAKE_ARGS='-DCMAKE_CUDA_ARCHITECTURES={architectures}' {build} --upgrade"
        package, objects = (shlex.quote(f"{folder}/{name}") for name in ("package", "objects"))
        build += f" --target {package} --config-settings=build-dir={objects}"
    until = time.time() + limit_s - min(25, limit_s / 2)  # what is begun may end
    bench = f"{PYTHON} -m benchmarks --device cuda --until {until:.0f} {how}"
    bench += "".join(f" --op {op}" for op in ops or (PORTABLE if architectures else ()))
    # Compiles what will be timed; the host is free meanwhile.
    warm = [("warm", f"{bench} --warm-compile {max(1, min(8, CORES - 2))}", ["compiled: .*"])]
    texts = [path.read_text() for path in (ROOT / "python/warpsmith/ops").glob("[a-z]*.py")]
    names = sorted({name for text in texts for name in re.findall(r"^def ([a-z]\w*)", text, re.MULTILINE)})
    replayed = [r"[1-9]\d* vectors checked on (?!host|no device).*, 0 differ"]
    jobs: dict[str, list[Job]] = {
        "build": [(stage, build, ["warpsmith: CUDA .*"])],
        "code": [(stage, f"{PYTHON} -m warpsmith info", [rf"^cuda:0 +runs: .*{runs}", *library])],
        "conformance": [(stage, f"{PYTHON} tools/gpu/conformance/pins.py replay", replayed)],
        # By the driver, before many tests ask for the same.
        "compile": [(f"compile {op}", f"{WORKLOAD} --cases 1 --op {op}", [WORKED]) for op in names],
        "tests": [(stage, f"{PYTEST} -m 'gpu and not alone' {processes(free_bytes)}", [PASSED])],
        "alone": [(stage, f"{PYTEST} -m 'gpu and alone'", [PASSED])],
        "sanitize": [(f"sanitize {tool}", f"{SANITIZER} {tool} {options} {WORKLOAD}", ["SUMMARY: .*", WORKED])
                     for tool, options in SANITIZERS.items()] + ([] if architectures else warm),
        "bench": [(stage, f"{bench} --json {shlex.quote(f'{OUT}/bench.json')}", [r": [1-9]\d* rows in .* s"])],
    }  # fmt: skip
    return jobs[stage]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="stage", help=", ".join(LIMITS))
    parser.add_argument("--code", choices=CODES, default="card", help="to build for; default: %(default)s")
    parser.add_argument("--budget", type=float, default=570.0, metavar="SECONDS", help="in all; default: %(default)s")
    parser.add_argument("--op", action="append", default=[], help="to measure; may be repeated; default: all")
    given = parser.parse_args()
    if unknown := set(given.stages) - LIMITS.keys():
        parser.error(f"stage: expected one of {', '.join(LIMITS)}, got {', '.join(sorted(unknown))}")
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "logs.txt").unlink(missing_ok=True)
    card = subprocess.run([sys.executable, "-c", CARD], capture_output=True, text=True)
    if card.returncode:
        print(card.stderr)
        return 1
    name, free_bytes = card.stdout.strip().splitlines()[-1].split("; ")
    start, folder, known = time.monotonic(), ROOT / f"build/gpu-{given.code}", os.environ.get
    os.environ["PATH"] = f"{known('PATH', os.defpath)}:{known('CUDA_HOME', '/usr/local/cuda')}/bin"
    if CODES[given.code][0]:  # with a cache of its own for what the driver compiles
        os.environ["PYTHONPATH"] = ":".join([f"{folder}/package", *filter(None, [known("PYTHONPATH")])])
        os.environ |= {"CUDA_CACHE_PATH": f"{folder}/compiled", "CUDA_CACHE_MAXSIZE": str(4 << 30)}
    verdicts: list[dict[str, str | float]] = []
    # Without `code` a stage could test another build than the one that was asked for.
    chosen = ["code", *given.stages] if given.stages else CODES[given.code][2].split()
    for stage in [stage for stage in LIMITS if stage in chosen]:
        now = time.monotonic()
        limit_s = min(LIMITS[stage], start + given.budget - now)
        broken = [v["stage"] for v in verdicts if v["stage"] in ("build", "code") and v["word"] != "ok"]
        if broken and stage not in ("code", "conformance"):
            verdicts.append(told(stage, "FAILED", f"not run: {broken[0]} failed, this is not the build to test", now))
        elif limit_s < 5:
            verdicts.append(told(stage, "CUT", "no time left", now))
        else:
            jobs = jobs_of(stage, given.code, given.op, int(free_bytes), limit_s)
            with ThreadPoolExecutor(10) as pool:
                verdicts += pool.map(run, jobs, [now + limit_s] * len(jobs))
        facts = {"card": name, "code": given.code, "seconds": round(time.monotonic() - start, 1)}
        (OUT / "stages.json").write_text(json.dumps({**facts, "stages": verdicts}, indent=1) + "\n")
    table = [f"{v['stage']:20s} {v['word']:6s} {v['detail']}" for v in verdicts]
    print(f"\n{facts}; logs: {OUT}/logs.txt", *table, sep="\n")
    return 0 if all(v["word"] == "ok" for v in verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
