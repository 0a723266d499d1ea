"""Checks what ptxas made of the kernels for sm_80 and sm_90, without a GPU.

    python tools/sim/static_checks.py                 # every .cu that a budget covers
    python tools/sim/static_checks.py --op gated --op biased --print
    python tools/sim/static_checks.py --op gated --launches      # also how the family's laws launch them

The code is that of the package, read from the objects of its build folder; an architecture for which the package was
not built, or a source that has changed since, is compiled here. Each kernel instance: no spills, no stack frame, wgmma
not serialised, registers, static shared memory and code within the op's budget, and the instructions that the budget
expects. With --launches the family's laws on the host execution layer, run as code of each architecture, say how its
launchers use it: the compiled launch bounds and registers must allow the blocks, and the machine code must have what a
launch asks for (cluster barriers, the wait of a programmatic launch, bulk copies).
A family has one budget, csrc/kernels/<family>/<family>_budget.json, for all of its .cu files; a .cu may have its own,
<name>_budget.json, or share one with others whose names begin with the same words (portable_budget.json for
portable_float16.cu):

    {"registers": {"forward": 128, "*": 255}, "shared_bytes": 16384,
     "sass": {"forward": ["LDG.E.128", "STG.E.128"]}, "code_bytes": 65536, "object_bytes": 400000}

Names are kernel names without template arguments; "*" is for all others. Some instance of a kernel must have each
instruction of its list in "sass" on every architecture: beginnings of names, in which * stands for anything. Optional:
"uniform", the kernels whose wgmmas no R2UR may precede (ptxas took their loop as divergent); "architectures" (default
both). Needs nvcc, or objects that it made, and cuobjdump, which the wheels
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm bring.
"""

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import cuda
import device_coverage
import library
import store
import verdicts

import build

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("sm_80", "sm_90")  # those of a build on a machine without a GPU
# What a launch may ask for, as the sim writes it, and the instruction without which it would be wrong or hang.
ASKED = {"cluster": "UCGABAR_ARV", "programmatic": "ACQBULK", "bulk": "UBLKCP"}
REGISTERS_OF_A_MULTIPROCESSOR = 65536
SYSTEM_SHARED_BYTES = 1024
CODE_BYTES, OBJECT_BYTES = 64 * 1024, 4 << 20  # of a kernel, of an object; unless the budget says otherwise


@dataclass
class Kernel:
    symbol: str
    name: str = ""  # demangled
    stack: int = 0
    registers: int = 0
    shared_bytes: int = 0
    max_threads: int = 0  # of its launch bounds; 0: none
    sass: Counter = field(default_factory=Counter)  # instructions by name
    most_wgmmas: int = 0  # one after the other without a wait
    moved_for_wgmma: int = 0  # wgmmas with an R2UR among the eight instructions before

    @property
    def short(self) -> str:
        return re.sub(r"<.*", "", self.name.removeprefix("void ")).split("(")[0].split("::")[-1]


@dataclass(frozen=True)
class Launched:
    """How the laws launched a kernel: threads of the largest block, and which of ASKED some launch asked for."""

    threads: int
    asked: frozenset[str] = frozenset()


def demangle(names: list[str]) -> list[str]:
    tool = shutil.which("c++filt")
    if not tool or not names:
        return names
    return subprocess.run(
        [tool], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()


def parse(usage: str) -> list[Kernel]:
    """From the output of `cuobjdump -res-usage`."""
    pattern = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)"
    kernels = [Kernel(m[1], "", int(m[3]), int(m[2]), int(m[4])) for m in re.finditer(pattern, usage)]
    for kernel, name in zip(kernels, demangle([k.symbol for k in kernels]), strict=True):
        kernel.name = name
    return kernels


def launch_bounds(elf: str) -> dict[str, int]:
    """Threads of `__launch_bounds__` by symbol, for the kernels that have them, from `cuobjdump -elf`."""
    bounds, symbol = {}, ""
    for m in re.finditer(r"^\.nv\.info\.(\S+)$|EIATTR_MAX_THREADS\s+Format:\s*\S+\s+Value:\s*([^\n]+)", elf, re.M):
        if m[1]:
            symbol = m[1]
        else:
            bounds[symbol] = math.prod(int(size, 16) for size in m[2].split())
    return bounds


def disassembled(listing: str) -> tuple[dict[str, Counter], dict[str, int], dict[str, int]]:
    """By function in the output of `cuobjdump -sass`: its instructions, the most wgmmas in a row without a wait, and
    the wgmmas that follow an R2UR."""
    functions: dict[str, Counter] = {}
    most: Counter = Counter()
    moved: Counter = Counter()
    for line in listing.splitlines():
        if m := re.search(r"Function : (\S+)", line):
            symbol, row, since = m[1], 0, 9
            current = functions.setdefault(symbol, Counter())
        elif m := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)", line):
            current[m[1]] += 1
            is_wgmma = m[1].startswith(("HGMMA", "QGMMA", "IGMMA"))
            row = 0 if m[1].startswith("WARPGROUP.DEPBAR") else row + is_wgmma
            most[symbol] = max(most[symbol], row)
            since = 0 if m[1].startswith("R2UR") else since + 1
            moved[symbol] += is_wgmma and since <= 8
    return functions, most, moved


def kernels_of(cubin: Path) -> list[Kernel]:
    kernels = parse(cuda.listing("-res-usage", cubin))
    if ".sm_80." not in cubin.name:
        # Since sm_90 a kernel that uses any shared memory is listed with the system's own, too.
        for kernel in kernels:
            kernel.shared_bytes -= SYSTEM_SHARED_BYTES * (kernel.shared_bytes >= SYSTEM_SHARED_BYTES)
    bounds = launch_bounds(cuda.listing("-elf", cubin))
    sass, most, moved = disassembled(cuda.listing("-sass", cubin))
    for kernel in kernels:
        kernel.max_threads = bounds.get(kernel.symbol, 0)
        kernel.sass = sass.get(kernel.symbol, Counter())
        kernel.most_wgmmas = most.get(kernel.symbol, 0)
        kernel.moved_for_wgmma = moved.get(kernel.symbol, 0)
    return kernels


def check(kernel: Kernel, budget: dict) -> list[str]:
    """What is wrong with one instance."""
    limits = budget["registers"]
    limit = limits.get(kernel.short, limits.get("*", 255))
    wrong = []
    if kernel.stack:
        wrong.append(f"{kernel.stack} bytes of stack")
    if spills := sum(n for name, n in kernel.sass.items() if name.startswith(("STL", "LDL"))):
        wrong.append(f"{spills} spilling instructions (STL, LDL)")
    wgmmas = sum(n for name, n in kernel.sass.items() if name.startswith(("HGMMA", "QGMMA", "IGMMA")))
    if wgmmas > 1 and kernel.most_wgmmas == 1:  # as ptxas leaves them where it says C7510 to C7518
        wrong.append(f"all {wgmmas} wgmmas wait for each other")
    if kernel.moved_for_wgmma and kernel.short in budget.get("uniform", []):
        wrong.append(f"{kernel.moved_for_wgmma} wgmmas take descriptors from vector registers")
    if kernel.registers > limit:
        wrong.append(f"{kernel.registers} registers, budget {limit}")
    if kernel.shared_bytes > budget.get("shared_bytes", 48 * 1024):
        wrong.append(f"{kernel.shared_bytes} bytes of static shared memory, budget {budget['shared_bytes']}")
    code = 16 * kernel.sass.total()
    if code > budget.get("code_bytes", CODE_BYTES):
        wrong.append(f"{code} bytes of code, budget {budget.get('code_bytes', CODE_BYTES)}")
    return wrong


def check_sass(kernels: list[Kernel], expected: dict[str, list[str]]) -> list[str]:
    """Instructions that no instance of a kernel has, of the kernels that are there."""
    missing = []
    for short, instructions in expected.items():
        instances = [k for k in kernels if k.short == short]
        if not instances:  # of another .cu of the family
            continue
        for wanted in instructions:
            if not any(fnmatchcase(name, f"{wanted}*") for k in instances for name in k.sass):
                missing.append(f"{short}: no {wanted} in its SASS")
    return missing


def check_launches(kernels: list[Kernel], launched: dict[str, Launched]) -> list[str]:
    """Kernels whose launch bounds or registers do not allow the blocks that their launcher uses, or whose machine code
    lacks what it asks for."""
    wrong = []
    for kernel in kernels:
        use = launched.get(kernel.symbol, Launched(0))
        threads = use.threads
        for asked in sorted(use.asked):
            if kernel.sass and not any(name.startswith(ASKED[asked]) for name in kernel.sass):
                wrong.append(f"{kernel.name}: a launch asks for {asked}, its machine code has no {ASKED[asked]}")
        if kernel.max_threads and threads > kernel.max_threads:
            wrong.append(f"{kernel.name}: launched with {threads} threads, compiled for {kernel.max_threads}")
        # A warp gets registers for 32 threads, a thread's share rounded up to 8.
        threads = max(threads, kernel.max_threads)
        needed = (threads + 31) // 32 * 32 * ((kernel.registers + 7) // 8 * 8)
        if needed > REGISTERS_OF_A_MULTIPROCESSOR:
            wrong.append(f"{kernel.name}: {threads} threads of {kernel.registers} registers do not fit")
    return wrong


def budget_path(source: Path) -> Path:
    """Its own, one that is named by the first words of its name, or its family's."""
    words = source.stem.split("_")
    names = ["_".join(words[:n]) for n in range(len(words), 0, -1)]
    family = build.family_folder(source)
    budgets = [source.with_name(f"{name}_budget.json") for name in names] + [family / f"{family.name}_budget.json"]
    return next((budget for budget in budgets if budget.exists()), budgets[-1])


def budget_of(source: Path) -> dict:
    return json.loads(budget_path(source).read_text())


def group(source: Path) -> str:
    """Of the tests that run, in the same process, the laws that launch these kernels."""
    return f"sim law {build.family_folder(source).name}"


def launches(source: Path) -> dict[str, dict[str, Launched]]:
    """How the laws of the family launch each kernel, by symbol, as code of each architecture."""
    architectures = budget_of(source).get("architectures", ARCHITECTURES)
    return {a: launches_of_laws(build.family_folder(source).name, int(a[3:5])) for a in architectures}


def launched(lines: list[str]) -> dict[str, Launched]:
    found: dict[str, Launched] = {}
    for symbol, threads, *asked in map(str.split, lines):
        other = found.get(symbol, Launched(0))
        found[symbol] = Launched(max(int(threads), other.threads), other.asked | {*asked})
    return found


@cache  # asked for three times for each of a family's sources; its key reads all that the laws depend on
def launches_of_laws(family: str, code: int) -> dict[str, Launched]:
    counts = device_coverage.Coverage()
    for name in library.COUNTED:
        if library.MACHINES[name].code == code:
            counts.merge(device_coverage.counted_law(family, name)[0])
    return launched(counts.launches)


def key(source: Path) -> str:
    """Of the verdict on a source: its code on all architectures, its budget, and what launches it."""
    package = cuda.package_object(source)
    architectures = budget_of(source).get("architectures", ARCHITECTURES)
    code = [store.digest(package)] if package else []
    code += [cuda.compile_key(source, a, []) for a in architectures if not package]
    use = store.key(repr(sorted(launches(source).items())))
    tools = [Path(__file__), Path(cuda.__file__), budget_path(source)]
    return verdicts.key("static", [*code, use], source.stem, tools)


def check_op(source: Path, show: bool = False, launched: dict[str, dict[str, Launched]] | None = None) -> list[str]:
    """Problems of all instances of one .cu on all architectures; `launched` as `launches` gives it."""
    budget = budget_of(source)
    problems, symbols = [], set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = cuda.package_object(source)
        code = cuda.extract(package, folder) if package else {}
        for architecture in budget.get("architectures", ARCHITECTURES):
            if architecture not in code:
                try:
                    code |= cuda.extract(cuda.compile_object(source, architecture, folder), folder)
                except build.BuildError as error:
                    return [f"{source.name} does not compile for {architecture}:\n{error}"]
            of_launches = (launched or {}).get(architecture, {})
            kernels = kernels_of(code[architecture])
            symbols.update(kernel.symbol for kernel in kernels)
            found = check_code(code[architecture], kernels, budget, of_launches, architecture if show else "")
            problems += [f"{source.stem} {architecture}: {problem}" for problem in found]
    # The laws on one machine launch few kernels of a family; those on all machines launch some of every source.
    known = {symbol for of_launches in (launched or {}).values() for symbol in of_launches}
    if known and symbols.isdisjoint(known):
        problems.append(f"{source.stem}: none of the kernels that the sim launched is compiled: {demangle([*known])}")
    return problems


def check_code(cubin: Path, kernels: list[Kernel], budget: dict, launched: dict[str, Launched], show: str) -> list[str]:
    """Problems of all instances on one architecture."""
    size = cubin.stat().st_size
    found = [f"{kernel.name}: {wrong}" for kernel in kernels for wrong in check(kernel, budget)]
    if not kernels:
        found.append("no kernel in the object")
    if show:
        for k in kernels:
            print(
                f"{show} {k.registers:4} registers {k.shared_bytes:6} shared {16 * k.sass.total():6} code "
                f"{k.max_threads:5} threads  {k.name}"
            )
    found += check_sass(kernels, budget.get("sass", {}))
    found += check_launches(kernels, launched)
    if size > budget.get("object_bytes", OBJECT_BYTES):
        found.append(f"object of {size} bytes, budget {budget.get('object_bytes', OBJECT_BYTES)}")
    return found


def holds_kernels(source: Path) -> bool:
    """Some .cu only call others."""
    return bool(re.search(r"\.cuh\"|__global__", source.read_text()))


def budgeted_ops() -> list[Path]:
    """The .cu files that a budget covers: the one of its own name, or, named as its folder, all that hold kernels."""
    budgets = sorted((ROOT / "csrc" / "kernels").rglob("*_budget.json"))
    found = []
    for budget in budgets:
        name = budget.stem.removesuffix("_budget")
        sources = sorted(budget.parent.rglob("*.cu" if name == budget.parent.name else f"{name}.cu"))
        found += [source for source in sources if holds_kernels(source)]
    return list(dict.fromkeys(found))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sources = budgeted_ops()
    names = [source.stem for source in sources]
    parser.add_argument("--op", action="append", choices=names, metavar="OP", help="can be repeated; default: all")
    parser.add_argument("--print", action="store_true", dest="show", help="print every instance")
    parser.add_argument("--launches", action="store_true", help="run the laws on the sim and check how they launch")
    arguments = parser.parse_args(argv)
    if not cuda.nvcc() or not cuda.cuobjdump():
        print(f"skipped: {'no nvcc' if not cuda.nvcc() else cuda.NO_CUOBJDUMP}")
        return 0
    problems = []
    for source in sources:
        if source.stem in (arguments.op or names):
            problems += check_op(source, arguments.show, launches(source) if arguments.launches else None)
    print("\n".join(problems) or "static checks passed")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
