"""Says which sim tests a changed file affects: those whose sources include it.

    python tools/sim/affected.py csrc/kernels/norm/row.cuh csrc/device/reduce.h
    python tools/sim/affected.py                   # what differs from main, committed or not
    python tools/sim/affected.py --run             # and runs them: plain build, then a few random cases

By the compiler's list of what each source includes, which does not depend on earlier builds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import build

MACHINE = (build.ROOT / "csrc" / "sim", build.ROOT / "tests" / "sim" / "harness.cpp")


def includes(source: Path) -> frozenset[Path]:
    """The source and what it includes."""
    flags = [f"-I{build.ROOT / 'csrc'}", f"-I{build.ROOT / 'tests' / 'sim'}"]
    return frozenset(p.resolve() for p in build.dependencies(source, flags))


def affected(changed: list[Path]) -> dict[str, list[Path]]:
    """{test: the changed files that it sees}; every test sees the machine and the harness."""
    tests = build.tests_of(None)
    sources = sorted({s for t in tests for s in [t, *build.kernel_sources(t)]})
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        seen = dict(zip(sources, pool.map(includes, sources), strict=True))
    found = {}
    for test in tests:
        sees = frozenset().union(*(seen[s] for s in [test, *build.kernel_sources(test)]))
        why = [f for f in changed if f in sees or any(f == m or m in f.parents for m in MACHINE)]
        if why:
            found[test.stem.removeprefix("sim_")] = why
    return found


def changed_files(base: str) -> list[Path]:
    command = ["git", "-C", str(build.ROOT), "diff", "--name-only", "--merge-base", base]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    command = ["git", "-C", str(build.ROOT), "ls-files", "--others", "--exclude-standard"]
    names += subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return [build.ROOT / n for n in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="default: what differs from --base")
    parser.add_argument("--base", default="main")
    parser.add_argument("--run", action="store_true", help="run.py for each of them")
    arguments = parser.parse_args()
    changed = [Path(f).resolve() for f in arguments.files] or changed_files(arguments.base)
    found = affected(changed)
    for op, why in found.items():
        print(f"{op:28} {', '.join(str(f.relative_to(build.ROOT)) for f in why)}")
    if not found:
        print("no sim test includes what changed")
    if not arguments.run:
        return 0
    run = Path(__file__).with_name("run.py")
    return max((subprocess.run([sys.executable, str(run), "--op", op]).returncode for op in found), default=0)


if __name__ == "__main__":
    sys.exit(main())
