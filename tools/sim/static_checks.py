"""Compiles kernels for sm_80 and sm_90a and checks what ptxas makes of them, without a GPU.

    python tools/sim/static_checks.py                 # every <op>.cu that has a <op>_budget.json
    python tools/sim/static_checks.py --op rms_norm --op layer_norm --print
    python tools/sim/static_checks.py --op rms_norm --launches   # also the blocks that the op's sim tests launch

Each kernel instance: no spills, no stack frame, wgmma not serialised, registers, static shared memory and code within
the op's budget, and the instructions in PTX and SASS that the budget expects. With --launches the op's tests on the
host execution layer say which block sizes its launchers use: the compiled launch bounds and registers must allow them.
A budget lies beside its source, csrc/kernels/<family>/<op>_budget.json:

    {"registers": {"forward": 128, "*": 255}, "shared_bytes": 16384, "ptx": ["ld.global.v4"],
     "sass": {"forward": ["LDG.E.128", "STG.E.128"]}, "code_bytes": 65536, "object_bytes": 400000}

Names are kernel names without template arguments; "*" is for all others. Some instance of a kernel must have each
instruction of its list in "sass" on every architecture: beginnings of names, in which * stands for anything. Optional:
"architectures" (default both), "sim" (the name of the sim test, default the op's). SASS needs cuobjdump, which the
wheels nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm bring; without it these checks are skipped, and it is said.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import build

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = {"sm_80": "arch=compute_80,code=sm_80", "sm_90a": "arch=compute_90a,code=sm_90a"}
REGISTERS_OF_A_MULTIPROCESSOR = 65536
CODE_BYTES, OBJECT_BYTES = 64 * 1024, 4 << 20  # of a kernel, of an object; unless the budget says otherwise
BUDGET_FOLDERS = ("csrc/kernels", "tools/gpu")
NO_CUOBJDUMP = "no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"


@dataclass
class Kernel:
    symbol: str
    name: str = ""  # demangled
    stack: int = 0
    spills: int = 0
    registers: int = 0
    shared_bytes: int = 0
    max_threads: int = 0  # of its launch bounds; 0: none
    sass: Counter = field(default_factory=Counter)  # instructions by name; empty if not disassembled

    @property
    def short(self) -> str:
        return re.sub(r"<.*", "", self.name.removeprefix("void ")).split("(")[0].split("::")[-1]


def nvcc() -> str | None:
    return shutil.which("nvcc") or next((str(p) for p in [Path("/usr/local/cuda/bin/nvcc")] if p.exists()), None)


def cuobjdump() -> str | None:
    """From its wheel, which is pinned; else the toolkit's."""
    try:
        files = importlib.metadata.files("nvidia-cuda-cuobjdump") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "cuobjdump" and file.locate().exists():
            return str(file.locate())
    return shutil.which("cuobjdump")


def demangle(names: list[str]) -> list[str]:
    tool = shutil.which("c++filt")
    if not tool or not names:
        return names
    return subprocess.run(
        [tool], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()


def parse(report: str) -> list[Kernel]:
    """From the output of `ptxas -v`."""
    kernels: list[Kernel] = []
    for line in report.splitlines():
        if m := re.search(r"Compiling entry function '(\S+)'", line):
            kernels.append(Kernel(m[1]))
        elif m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            kernels[-1].stack, kernels[-1].spills = int(m[1]), int(m[2]) + int(m[3])
        elif m := re.search(r"Used (\d+) registers", line):
            kernels[-1].registers = int(m[1])
            if s := re.search(r"(\d+) bytes smem", line):
                kernels[-1].shared_bytes = int(s[1])
    for kernel, name in zip(kernels, demangle([k.symbol for k in kernels]), strict=True):
        kernel.name = name
    return kernels


def launch_bounds(ptx: str) -> dict[str, int]:
    """Threads of `.maxntid` by symbol, for the kernels that have it."""
    bounds = {}
    for m in re.finditer(r"\.entry (\w+)\s*\([^)]*\)\s*\.maxntid (\d+)(?:, (\d+), (\d+))?", ptx):
        bounds[m[1]] = int(m[2]) * int(m[3] or 1) * int(m[4] or 1)
    return bounds


def disassembled(listing: str) -> dict[str, Counter]:
    """Instructions of each function in the output of `cuobjdump -sass`."""
    functions: dict[str, Counter] = {}
    for line in listing.splitlines():
        if m := re.search(r"Function : (\S+)", line):
            current = functions.setdefault(m[1], Counter())
        elif m := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)", line):
            current[m[1]] += 1
    return functions


def check(kernel: Kernel, budget: dict) -> list[str]:
    """What is wrong with one instance."""
    limits = budget["registers"]
    limit = limits.get(kernel.short, limits.get("*", 255))
    wrong = []
    if kernel.stack:
        wrong.append(f"{kernel.stack} bytes of stack")
    if kernel.spills:
        wrong.append(f"{kernel.spills} bytes of spills")
    if kernel.registers > limit:
        wrong.append(f"{kernel.registers} registers, budget {limit}")
    if kernel.shared_bytes > budget.get("shared_bytes", 48 * 1024):
        wrong.append(f"{kernel.shared_bytes} bytes of static shared memory, budget {budget['shared_bytes']}")
    code = 16 * kernel.sass.total()
    if code > budget.get("code_bytes", CODE_BYTES):
        wrong.append(f"{code} bytes of code, budget {budget.get('code_bytes', CODE_BYTES)}")
    return wrong


def check_sass(kernels: list[Kernel], expected: dict[str, list[str]]) -> list[str]:
    """Instructions that no instance of a kernel has."""
    missing = []
    for short, instructions in expected.items():
        instances = [k for k in kernels if k.short == short]
        for wanted in instructions:
            if not any(fnmatchcase(name, f"{wanted}*") for k in instances for name in k.sass):
                missing.append(f"{short}: no {wanted} in its SASS")
    return missing


def check_launches(kernels: list[Kernel], launched: dict[str, int]) -> list[str]:
    """Kernels whose launch bounds or registers do not allow the blocks that their launcher uses."""
    wrong = []
    for kernel in kernels:
        threads = launched.get(kernel.symbol, 0)
        if kernel.max_threads and threads > kernel.max_threads:
            wrong.append(f"{kernel.name}: launched with {threads} threads, compiled for {kernel.max_threads}")
        # A warp gets registers for 32 threads, a thread's share rounded up to 8.
        threads = max(threads, kernel.max_threads)
        needed = (threads + 31) // 32 * 32 * ((kernel.registers + 7) // 8 * 8)
        if needed > REGISTERS_OF_A_MULTIPROCESSOR:
            wrong.append(f"{kernel.name}: {threads} threads of {kernel.registers} registers do not fit")
    if launched and not any(k.symbol in launched for k in kernels):
        wrong.append(f"none of the kernels that the sim launched is compiled: {', '.join(demangle([*launched]))}")
    return wrong


def budget_of(source: Path) -> dict:
    return json.loads(source.with_name(f"{source.stem}_budget.json").read_text())


def sim_test(source: Path) -> str:
    """The op whose tests on the host execution layer launch these kernels."""
    return budget_of(source).get("sim", source.stem)


def launched_blocks(source: Path) -> dict[str, int]:
    """Threads of the largest block of each kernel, by symbol, in the op's tests on the host execution layer."""
    (test,) = build.tests_of(sim_test(source))
    # The build that the tests of coverage have made already; its counts go elsewhere.
    program = build.build(test, "coverage")
    with tempfile.TemporaryDirectory() as folder:
        listing = Path(folder) / "launches"
        command = [str(program), "--seeds", "1", "--random", "5", "--launches", str(listing)]
        result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "GCOV_PREFIX": folder})
        if result.returncode:
            raise build.BuildError(f"{test.stem} fails:\n{result.stdout}{result.stderr}")
        return {line.split()[0]: int(line.split()[1]) for line in listing.read_text().splitlines()}


def check_op(source: Path, show: bool = False, launched: dict[str, int] | None = None) -> list[str]:
    """Problems of all instances of one .cu on all architectures."""
    budget = budget_of(source)
    problems = []
    for architecture in budget.get("architectures", [*ARCHITECTURES]):
        with tempfile.TemporaryDirectory() as folder:
            command = [nvcc(), "-std=c++20", "-O3", f"-I{ROOT / 'csrc'}", f"-gencode={ARCHITECTURES[architecture]}"]
            command += ["-Xptxas", "-v", "--keep", "--keep-dir", folder, "-c", str(source), "-o", f"{folder}/o.o"]
            result = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=folder)
            if result.returncode:
                return [f"{source.name} does not compile for {architecture}:\n{result.stderr}"]
            ptx = "".join(p.read_text() for p in Path(folder).glob("*.ptx"))
            size = Path(f"{folder}/o.o").stat().st_size
            sass = {}
            if tool := cuobjdump():
                dump = subprocess.run([tool, "-sass", f"{folder}/o.o"], capture_output=True, text=True, check=True)
                sass = disassembled(dump.stdout)
        kernels = parse(result.stderr)
        bounds = launch_bounds(ptx)
        for kernel in kernels:
            kernel.max_threads = bounds.get(kernel.symbol, 0)
            kernel.sass = sass.get(kernel.symbol, Counter())
        found = [f"{kernel.name}: {wrong}" for kernel in kernels for wrong in check(kernel, budget)]
        if not kernels:
            found.append("ptxas reports no kernel")
        if show:
            for k in kernels:
                print(
                    f"{architecture} {k.registers:4} registers {k.shared_bytes:6} shared {16 * k.sass.total():6} code "
                    f"{k.max_threads:5} threads  {k.name}"
                )
        # C7510 to C7518: wgmmas wait for each other. C7519 only says that ptxas added an arrive.
        found += re.findall(r"\(C751[0-8]\)[^\n]*", result.stderr)
        found += [f"no {i} in its PTX" for i in budget.get("ptx", []) if i not in ptx]
        if sass:
            found += check_sass(kernels, budget.get("sass", {}))
        found += check_launches(kernels, launched or {})
        if size > budget.get("object_bytes", OBJECT_BYTES):
            found.append(f"object of {size} bytes, budget {budget.get('object_bytes', OBJECT_BYTES)}")
        problems += [f"{source.stem} {architecture}: {problem}" for problem in found]
    return problems


def budgeted_ops() -> list[Path]:
    found = sorted(f for folder in BUDGET_FOLDERS for f in (ROOT / folder).rglob("*_budget.json"))
    return [f.with_name(f.stem.removesuffix("_budget") + ".cu") for f in found]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sources = budgeted_ops()
    names = [source.stem for source in sources]
    parser.add_argument("--op", action="append", choices=names, metavar="OP", help="can be repeated; default: all")
    parser.add_argument("--print", action="store_true", dest="show", help="print every instance")
    parser.add_argument("--launches", action="store_true", help="run the sim tests and check their block sizes")
    arguments = parser.parse_args(argv)
    if not nvcc():
        print("skipped: no nvcc")
        return 0
    if not cuobjdump():
        print(f"SASS is not checked: {NO_CUOBJDUMP}")
    problems = []
    for source in sources:
        if source.stem in (arguments.op or names):
            problems += check_op(source, arguments.show, launched_blocks(source) if arguments.launches else None)
    print("\n".join(problems) or "static checks passed")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
