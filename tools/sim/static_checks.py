"""Compiles kernels for sm_80 and sm_90a and checks what ptxas says, without a GPU.

    python tools/sim/static_checks.py                 # every csrc/kernels/**/<op>.cu that has a <op>_budget.json
    python tools/sim/static_checks.py --op rms_norm --print

Each kernel instance: no spills, no stack frame, registers and static shared memory within the op's budget, and PTX that
contains the instructions the budget expects. A budget is csrc/kernels/<family>/<op>_budget.json:

    {"registers": {"forward": 128, "*": 255}, "shared_bytes": 16384, "ptx": ["ld.global.cs.v4"], "object_bytes": 4000}

Names are kernel names without template arguments; "*" is for all others.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = {"sm_80": "arch=compute_80,code=sm_80", "sm_90a": "arch=compute_90a,code=sm_90a"}


@dataclass
class Kernel:
    name: str  # demangled
    stack: int = 0
    spills: int = 0
    registers: int = 0
    shared_bytes: int = 0

    @property
    def short(self) -> str:
        return re.sub(r"<.*", "", self.name.removeprefix("void ")).split("(")[0].split("::")[-1]


def nvcc() -> str | None:
    return shutil.which("nvcc") or next((str(p) for p in [Path("/usr/local/cuda/bin/nvcc")] if p.exists()), None)


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
    for kernel, name in zip(kernels, demangle([k.name for k in kernels]), strict=True):
        kernel.name = name
    return kernels


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
    return wrong


def check_op(source: Path, show: bool = False) -> list[str]:
    """Problems of all instances of one .cu on all architectures."""
    budget = json.loads(source.with_name(f"{source.stem}_budget.json").read_text())
    problems = []
    for architecture, code in ARCHITECTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [nvcc(), "-std=c++20", "-O3", f"-I{ROOT / 'csrc'}", f"-gencode={code}", "-Xptxas", "-v", "--keep"]
            command += ["--keep-dir", folder, "-c", str(source), "-o", f"{folder}/o.o"]
            result = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=folder)
            if result.returncode:
                return [f"{source.name} does not compile for {architecture}:\n{result.stderr}"]
            ptx = "".join(p.read_text() for p in Path(folder).glob("*.ptx"))
            size = Path(f"{folder}/o.o").stat().st_size
        kernels = parse(result.stderr)
        if not kernels:
            problems.append(f"{source.stem} {architecture}: ptxas reports no kernel")
        for kernel in kernels:
            problems += [f"{architecture} {kernel.name}: {wrong}" for wrong in check(kernel, budget)]
            if show:
                print(f"{architecture} {kernel.registers:4} registers {kernel.shared_bytes:6} shared  {kernel.name}")
        problems += [f"{source.stem} {architecture}: no {i} in its PTX" for i in budget.get("ptx", []) if i not in ptx]
        if size > budget.get("object_bytes", 1 << 62):
            problems.append(f"{source.stem} {architecture}: object of {size} bytes, budget {budget['object_bytes']}")
    return problems


def budgeted_ops() -> list[Path]:
    found = sorted((ROOT / "csrc" / "kernels").rglob("*_budget.json"))
    return [f.with_name(f.stem.removesuffix("_budget") + ".cu") for f in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op")
    parser.add_argument("--print", action="store_true", dest="show", help="print every instance")
    arguments = parser.parse_args()
    if not nvcc():
        print("skipped: no nvcc")
        return 0
    problems = []
    for source in budgeted_ops():
        if arguments.op in (None, source.stem):
            problems += check_op(source, arguments.show)
    print("\n".join(problems) or "static checks passed")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
