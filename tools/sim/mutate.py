"""Mutation testing of kernels and primitives: changes one thing, runs the tests on the CPU, expects one to fail.

    python tools/sim/mutate.py --sample 120                            # norm, optim and csrc/device, a third each
    python tools/sim/mutate.py --op rope --sample 40                   # one op's sources, its family's included
    python tools/sim/mutate.py --files csrc/device/reduce.h --sample 20

A mutant is compiled alone (without optimisation, the other objects are kept) and given to every test that includes its
file, the op's own first, to the vectors from a card, and to the laws of the families that include it. What the plain
build lets pass goes to the thread sanitizer if it weakens an order, else to the address sanitizer. Prints survivors
with their line. A survivor is a missing test or an equivalent change: those are listed, with the reason, in
equivalent_mutants.txt and do not count. The unchanged sources must pass and a mutant whose kernels return at once must
fail, else the run itself is wrong and says so.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import library

import build

CSRC = build.ROOT / "csrc"
CONFORMANCE = build.ROOT / "tools" / "gpu" / "conformance"
sys.path.insert(0, str(CONFORMANCE))
import vectors  # noqa: E402

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
SOURCES = (".cu", ".cuh", ".h")
DEFAULT = ("norm", "optim", "csrc/device")

# (what it does, pattern, replacement). Patterns see code without comments.
OPERATORS = [
    ("drop a block barrier", r"__syncthreads\([A-Z_]*\);", ";"),
    ("drop a warp barrier", r"__syncwarp\([^;]*\);", ";"),
    (
        "drop a fence",
        r"(?:device::)?(?:__threadfence|fence_async_shared|fence_async|mbarrier_init_fence)\([A-Z_]*\);",
        ";",
    ),
    ("drop the wait for the previous kernel", r"(?:device::)?wait_for_previous_kernel\([A-Z_]*\);", ";"),
    ("weaken a wait", r"(copy_async_wait|bulk_wait|bulk_wait_read|wgmma_wait)<0>", r"\1<1>"),
    ("weaken a wait", r"(copy_async_wait|bulk_wait|bulk_wait_read|wgmma_wait)<1>", r"\1<2>"),
    ("drop a named barrier", r"device::named_barrier_wait\([^;]*\);", ";"),
    ("flip a parity", r"parity \^ 1", "parity"),
    ("swap a mask", r"0xffffffffu", "0x7fffffffu"),
    ("off by one: <", r"(?<=[\w)\]]) < (?=[\w(])", " <= "),
    ("off by one: <=", r"(?<=[\w)\]]) <= (?=[\w(])", " < "),
    ("turn a comparison", r"(?<=[\w)\]]) >= (?=[\w(])", " < "),
    ("turn a comparison", r"(?<=[\w)\]]) == (?=[\w(])", " != "),
    ("shift an index", r"(?<=[\w)\]]) \+ (?=[\w(])", " - "),
    ("shift an index", r"(?<=[\w)\]]) - (?=[\w(])", " + "),
    ("change a product", r"(?<=[\w)\]]) \* (?=[\w(])", " + "),
    ("change a quotient", r"(?<=[\w)\]]) / (?=[\w(])", " * "),
    ("change a remainder", r"(?<=[\w)\]]) % (?=[\w(])", " / "),
    ("overwrite instead of accumulate", r" \+= ", " = "),
    ("and becomes or", r" && ", " || "),
    ("or becomes and", r" \|\| ", " && "),
    ("swap minimum and maximum", r"\bfmaxf\(", "fminf("),
    ("swap a condition", r"(?<=[\w)\]]) \? ", " == 0 ? "),
    ("change a rounding", r"0x7fff \+ ", "0x0 + "),
    ("narrow an index", r"static_cast<int64_t>\(|int64_t\{", None),
    ("start late", r"= threadIdx\.x", "= threadIdx.x + 1"),
    ("negate a condition", r"\bif \(", "if (!"),
]


ORDER = ("barrier", "fence", "wait", "parity", "mask")  # in what it does: a mutant for the thread sanitizer


@dataclass(frozen=True)
class Mutant:
    file: Path
    line: int
    what: str
    text: str  # of the whole file

    @property
    def code(self) -> str:
        return self.text.splitlines()[self.line - 1].strip()

    def __str__(self) -> str:
        return f"{self.file.relative_to(build.ROOT)}:{self.line}: {self.what}: {self.code}"


def without_comments(line: str) -> str:
    return re.sub(r"//.*", lambda m: " " * len(m.group()), line)


@cache
def compiled_lines(file: Path) -> frozenset[int]:
    """Lines of a header that the host compiles: device bodies are not among them."""
    command = [build.compiler(), *build.COMMON[:2], "-w", f"-I{CSRC}", "-x", "c++", "-E", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found, here, number = set(), False, 0
    for line in text.splitlines():
        if marker := re.match(r'# (\d+) "([^"]*)"', line):
            number, here = int(marker[1]), Path(marker[2]) == file
        else:
            if here and line.strip():
                found.add(number)
            number += 1
    return frozenset(found)


def mutants_of(file: Path) -> list[Mutant]:
    lines = file.read_text().splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        code = without_comments(line)
        skip = ("#", "template", "static_assert", "using ", "namespace", "asm", "constexpr bool", '"')
        if number not in compiled_lines(file) or code.strip().startswith(skip):
            continue
        for what, pattern, replacement in OPERATORS:
            for match in re.finditer(pattern, code):
                new = match.expand(replacement) if replacement is not None else narrowed(match.group())
                if what == "negate a condition":
                    changed = negate(code, match.end())
                else:
                    changed = code[: match.start()] + new + code[match.end() :]
                if changed is None or changed == code:
                    continue
                text = "\n".join([*lines[: number - 1], changed.rstrip(), *lines[number:]]) + "\n"
                found.append(Mutant(file, number, what, text))
    return found


def narrowed(cast: str) -> str:
    return "static_cast<int32_t>(" if cast.startswith("static_cast") else "int{"


def negate(code: str, start: int) -> str | None:
    """`if (a) b` -> `if (!(a)) b`; None if the condition does not end on its line."""
    depth = 1
    for i in range(start, len(code)):
        depth += {"(": 1, ")": -1}.get(code[i], 0)
        if depth == 0:
            return f"{code[:start]}!({code[start:i]}){code[i:]}"
    return None


def equivalents() -> dict[tuple[str, str], str]:
    """{(file, changed line): reason}"""
    entries = [line.split(" | ") for line in EQUIVALENT.read_text().splitlines() if line and line[0] != "#"]
    return {(file, code.strip()): reason for file, code, reason in entries}


@dataclass(frozen=True)
class Check:
    """A program, or a module of laws on the simulated kernels; `seconds` without a mutant."""

    name: str
    parts: Callable[[str], Iterable[build.Part]]  # of a variant
    arguments: tuple[str, ...]
    family: str = ""  # of a law: whose kernels it runs
    seconds: float = 0.0

    def sees(self, file: Path) -> bool:
        return file in seen(self)

    def build(self, variant: str, mutant: Mutant | None = None, folder: Path | None = None) -> Path:
        texts = {mutant.file: mutant.text} if mutant else {}
        objects = build.changed_objects(self.parts(variant), texts, (folder or build.BUILD) / variant, self.family)
        target = (folder or build.BUILD) / variant / self.name
        return library.link(objects, variant, target) if self.family else build.link(objects, variant, target)

    def run(self, made: Path, variant: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        if self.family:
            return library.law(made, self.arguments, timeout, variant=variant)
        return build.run(made, self.arguments, timeout)


@cache
def seen(check: Check) -> frozenset[Path]:
    """What the sources include that a mutant is compiled for."""
    found = (
        build.dependencies(source, flags)
        for source, flags, _ in check.parts("plain")
        if not check.family or build.family_folder(source).name == check.family
    )
    return frozenset(p.resolve() for paths in found for p in paths)


def checks() -> list[Check]:
    """Of the vocabulary, then of the ops, then the vectors from a card, then the laws."""
    found = []
    for test in sorted(build.tests_of(None), key=lambda t: bool(build.kernel_sources(t))):
        flags = ("--stop", "--seeds", "3", "--random", "10")
        found.append(Check(test.stem, partial(build.parts, test), flags))
    flags = ("check", str(vectors.unpacked(build.BUILD)), "5")
    found.append(Check("conformance", partial(build.own_parts, CONFORMANCE / "conformance.cu"), flags))
    for spec in library.specs():
        family = library.family_of(spec)
        made_of = partial(library.parts, family=family)
        found.append(Check(f"law_{spec.stem}", made_of, ("-x", *library.checks(spec)), family))
    return found


def measured(check: Check) -> Check:
    program = check.build("plain")
    started = time.perf_counter()
    result = check.run(program, "plain")
    if result.returncode:
        sys.exit(f"the unchanged sources fail:\n{result.stdout}{result.stderr}")
    return replace(check, seconds=time.perf_counter() - started)


def verdict(mutant: Mutant, suite: list[Check], folder: Path) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    op = mutant.file.stem.removesuffix("_kernel").removesuffix("_config")
    seeing = sorted((c for c in suite if c.sees(mutant.file)), key=lambda c: (c.name != f"sim_{op}", c.seconds))
    sanitizer = "tsan" if any(word in mutant.what for word in ORDER) else "asan"
    sanitized = [c for c in seeing if c.name != "conformance"][:3]
    for variant, chosen in (("plain", seeing), (sanitizer, sanitized)):
        for check in chosen:
            try:
                program = check.build(variant, mutant, folder)
                timeout = 10 + (5 if variant == "plain" else 60) * check.seconds
                if check.run(program, variant, timeout).returncode:
                    return f"killed ({check.name}, {variant})"
            except build.BuildError:
                return "does not compile"
            except subprocess.TimeoutExpired:
                return f"killed ({check.name}, {variant}, timeout)"
    return "survived"


def fatal_mutant(file: Path) -> Mutant:
    """Every block of the op's kernels returns at once: nothing can be right after that."""
    text = file.read_text()
    changed, count = re.subn(r"(__global__ [^;{]*?\)\s*\{)", r"\1 if (blockDim.x > 0) return;", text)
    if not count:
        sys.exit(f"{file}: no kernel found for the fatal mutant")
    return Mutant(file, 1, "every kernel returns at once", changed)


def files_of(target: str) -> list[Path]:
    """The sources of the kernels that an op's tests link with what the family shares, or the headers of a folder."""
    if (build.ROOT / target).is_dir():
        hidden = ("host_hooks", "host_builtins", "platform")  # the machine's own side
        return [f for f in sorted((build.ROOT / target).glob("*.h")) if not f.name.startswith(hidden)]
    family = CSRC / "kernels" / target
    if family.is_dir() and not (build.ROOT / "tests" / "sim" / f"sim_{target}.cpp").exists():
        return sorted(f for f in family.rglob("*.*") if f.suffix in SOURCES)
    (test,) = build.tests_of(target)
    linked = build.kernel_sources(test)
    folders = {build.family_folder(source) for source in linked}
    sources = [f for folder in folders for f in folder.rglob("*.*") if f.suffix in SOURCES]
    others = tuple(f.stem for f in sources if f.suffix == ".cu" and f not in linked)
    found = sorted(f for f in sources if f in linked or f.stem.startswith(target) or not f.stem.startswith(others))
    return found or sys.exit(f"{target}: no kernels")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", help=f"may be repeated; default: {', '.join(DEFAULT)}")
    parser.add_argument("--files", nargs="*", default=[], help="files to mutate instead")
    parser.add_argument("--by", default="", help="only tests whose name contains this: law_ for the laws alone")
    parser.add_argument("--sample", type=int, default=30, help="mutants in all, as many of each op")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--floor", type=float, default=0, help="fail below this share of killed mutants, in percent")
    parser.add_argument("--verbose", action="store_true", help="print every mutant and what noticed it")
    arguments = parser.parse_args()

    started = time.perf_counter()
    groups = [[Path(f).resolve() for f in arguments.files]] if arguments.files else []
    groups = groups or [files_of(t) for t in arguments.op or DEFAULT]
    known_checks = [check for check in checks() if arguments.by in check.name]
    groups = [[f for f in group if any(c.sees(f) for c in known_checks)] for group in groups]  # not the device's alone
    files = [f for group in groups for f in group]
    suite = [measured(c) for c in known_checks if any(c.sees(f) for f in files)]
    folder = build.BUILD / f"mutant-{os.getpid()}"
    fatal = [f for f in files if "__global__" in f.read_text()]
    for file in fatal[:1]:
        if not verdict(fatal_mutant(file), suite, folder).startswith("killed"):
            sys.exit("a kernel that does nothing survives: the tests or this tool do not run the mutated file")

    possible = [[m for f in group for m in mutants_of(f)] for group in groups]
    pick = random.Random(arguments.seed)
    each = -(-arguments.sample // len(possible))
    sample = [m for group in possible for m in pick.sample(group, min(each, len(group)))]
    print(f"{sum(map(len, possible))} possible mutants in {len(files)} files, {len(sample)} sampled", flush=True)
    known = equivalents()
    verdicts: Counter[str] = Counter()
    for mutant in sample:
        if (str(mutant.file.relative_to(build.ROOT)), mutant.code) in known:
            verdicts["equivalent"] += 1
            continue
        outcome = verdict(mutant, suite, folder)
        verdicts[outcome.split(" (")[0]] += 1
        if arguments.verbose:
            print(f"  {outcome}: {mutant}", flush=True)
        elif outcome == "survived":
            print(f"  survived: {mutant}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    judged = verdicts["killed"] + verdicts["survived"]
    share = 100 * verdicts["killed"] / judged if judged else 100.0
    print(f"{dict(verdicts)}: {share:.0f} % killed in {time.perf_counter() - started:.0f} s")
    return 0 if share >= arguments.floor else 1


if __name__ == "__main__":
    sys.exit(main())
