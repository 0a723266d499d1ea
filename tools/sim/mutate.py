"""Mutation testing of kernels and primitives: changes one thing, runs the op's test on the CPU, expects it to fail.

    python tools/sim/mutate.py --op rms_norm --sample 40
    python tools/sim/mutate.py --op rms_norm --files csrc/device/reduce.h --sample 20 --asan

Prints survivors with their line. A survivor is a missing test or an equivalent change; a line that ends with
`// equivalent under mutation: <reason>` is not mutated. The unchanged sources must pass and a mutant whose kernels
return at once must fail, else the run itself is wrong and says so.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import build

# (what it does, pattern, replacement). Patterns see code without comments.
OPERATORS = [
    ("drop a block barrier", r"__syncthreads\(\);", ";"),
    ("drop a warp barrier", r"__syncwarp\([^;]*\);", ";"),
    ("drop a fence", r"(?:device::)?(?:__threadfence|fence_async_shared|fence_async|mbarrier_init_fence)\(\);", ";"),
    ("drop the wait for the previous kernel", r"device::wait_for_previous_kernel\(\);", ";"),
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


@dataclass(frozen=True)
class Mutant:
    file: Path
    line: int
    what: str
    text: str  # of the whole file

    def __str__(self) -> str:
        code = self.text.splitlines()[self.line - 1].strip()
        return f"{self.file.relative_to(build.ROOT)}:{self.line}: {self.what}: {code}"


def without_comments(line: str) -> str:
    return re.sub(r"//.*", lambda m: " " * len(m.group()), line)


def mutants_of(file: Path) -> list[Mutant]:
    lines = file.read_text().splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        code = without_comments(line)
        skip = ("#", "template", "static_assert", "using ", "namespace", "asm", "constexpr bool", '"')
        if code.strip().startswith(skip) or "equivalent under mutation:" in line:
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


def verdict(test: Path, mutant: Mutant, folder: Path, variants: list[str], arguments: list[str], timeout: float) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    shadow = folder / mutant.file.relative_to(build.ROOT / "csrc")
    shadow.parent.mkdir(parents=True)
    shadow.write_text(mutant.text)
    for variant in variants:
        try:
            program = build.build(test, variant, include_first=folder)
            if build.run(program, arguments, timeout=timeout).returncode:
                return f"killed ({variant})"
        except build.BuildError:
            return "does not compile"
        except subprocess.TimeoutExpired:
            return "killed (timeout)"
        finally:
            shutil.rmtree(folder / "objects", ignore_errors=True)
    return "survived"


def fatal_mutant(file: Path) -> Mutant:
    """Every block of the op's kernels returns at once: nothing can be right after that."""
    text = file.read_text()
    changed, count = re.subn(r"(__global__ [^;{]*?\)\s*\{)", r"\1 if (blockDim.x > 0) return;", text)
    if not count:
        sys.exit(f"{file}: no kernel found for the fatal mutant")
    return Mutant(file, 1, "every kernel returns at once", changed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", required=True)
    parser.add_argument("--files", nargs="*", help="files to mutate; default: the op's .cuh and .cu files")
    parser.add_argument("--sample", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--asan", action="store_true", help="also run survivors in the sanitizer build")
    parser.add_argument("--random", type=int, default=20, help="random cases a mutant")
    parser.add_argument("--floor", type=float, default=0, help="fail below this share of killed mutants, in percent")
    arguments = parser.parse_args()

    (test,) = build.tests_of(arguments.op)
    kernels = build.kernel_sources(test)
    default = sorted({f for k in kernels for f in k.parent.glob(f"{arguments.op}*") if f.suffix in (".cu", ".cuh")})
    files = [Path(f).resolve() for f in arguments.files] if arguments.files else default
    flags = ["--seeds", "3", "--random", str(arguments.random)]
    started = time.perf_counter()
    result = build.run(build.build(test, "plain"), flags)
    if result.returncode:
        sys.exit(f"the unchanged sources fail:\n{result.stdout}{result.stderr}")
    timeout = 10 + 5 * (time.perf_counter() - started)
    folder = build.BUILD / "mutants" / arguments.op
    for file in [f for f in default if "__global__" in f.read_text()][:1]:
        if not verdict(test, fatal_mutant(file), folder, ["plain"], flags, timeout).startswith("killed"):
            sys.exit("a kernel that does nothing survives: the tests or this tool do not run the mutated file")

    possible = [m for f in files for m in mutants_of(f)]
    sample = random.Random(arguments.seed).sample(possible, min(arguments.sample, len(possible)))
    print(f"{len(possible)} possible mutants in {len(files)} files, {len(sample)} sampled", flush=True)
    variants = ["plain", "asan"] if arguments.asan else ["plain"]
    verdicts: Counter[str] = Counter()
    for mutant in sample:
        outcome = verdict(test, mutant, folder, variants, flags, timeout)
        verdicts[outcome.split(" ")[0] if outcome.startswith("killed") else outcome] += 1
        if outcome == "survived":
            print(f"  survived: {mutant}", flush=True)
    judged = verdicts["killed"] + verdicts["survived"]
    share = 100 * verdicts["killed"] / judged if judged else 100.0
    print(f"{dict(verdicts)}: {share:.0f} % killed in {time.perf_counter() - started:.0f} s")
    return 0 if share >= arguments.floor else 1


if __name__ == "__main__":
    sys.exit(main())
