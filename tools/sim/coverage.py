"""Line and branch coverage of device code and launchers, executed on the CPU.

    python tools/sim/coverage.py --op rms_norm
    python tools/sim/coverage.py                     # all tests; exit status 1 below 95 % of lines or 85 % of branches

Counts csrc/kernels and csrc/device, per file; a template's instances are one line. Device bodies (PTX) are not compiled
here and do not count. A line with `// not covered on the host: <reason>` is left out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import build

LINE_FLOOR, BRANCH_FLOOR = 95.0, 85.0
MARKER = "not covered on the host:"
ONLY_RAISES = re.compile(r"WARPSMITH_RETURN_IF_FAILED|return Status::")  # the failing branch hands an error up


class Coverage:
    def __init__(self) -> None:
        self.lines: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        # Of each line, the counts of the instances with the most branches: in others some conditions are constants.
        self.branches: dict[str, dict[int, list[int]]] = defaultdict(dict)

    def add(self, notes: Path) -> None:
        command = ["gcov", "--json-format", "--stdout", "--branch-probabilities", notes.name]
        result = subprocess.run(command, capture_output=True, text=True, cwd=notes.parent, check=True)
        for text in result.stdout.splitlines():
            for file in json.loads(text)["files"]:
                self._add_file(file)

    def _add_file(self, file: dict) -> None:
        path = Path(file["file"])
        path = (path if path.is_absolute() else build.ROOT / path).resolve()
        room = build.ROOT / "csrc"
        if not (path.is_relative_to(room / "kernels") or path.is_relative_to(room / "device")):
            return
        name = str(path.relative_to(room))
        source = path.read_text().splitlines()
        left_out = {i for i, line in enumerate(source, 1) if MARKER in line}
        for line in file["lines"]:
            number = line["line_number"]
            if number in left_out:
                continue
            self.lines[name][number] += line["count"]
            counts = [b["count"] for b in line["branches"] if not b["throw"]]
            if ONLY_RAISES.search(source[number - 1]):
                continue
            if len(counts) > 8:  # a lambda's instances are reported as one: does the condition go both ways?
                counts = [sum(counts[0::2]), sum(counts[1::2])]
            known = self.branches[name].setdefault(number, [])
            if len(counts) > len(known):
                self.branches[name][number] = counts
            elif len(counts) == len(known):
                self.branches[name][number] = [a + b for a, b in zip(known, counts, strict=True)]

    def report(self, missing: bool) -> bool:
        total = [0, 0, 0, 0]
        print(f"{'file':52} {'lines':>14} {'branches':>14}")
        for name in sorted(self.lines):
            hit = sum(c > 0 for c in self.lines[name].values())
            branches = [c for counts in self.branches[name].values() for c in counts]
            counts = [hit, len(self.lines[name]), sum(c > 0 for c in branches), len(branches)]
            total = [a + b for a, b in zip(total, counts, strict=True)]
            print(f"{name:52} {percent(*counts[:2]):>14} {percent(*counts[2:]):>14}")
            if missing:
                lines = sorted(n for n, c in self.lines[name].items() if c == 0)
                branches = sorted({n for (n, _), c in self.branches[name].items() if c == 0} - set(lines))
                print(
                    f"    lines not executed: {lines}\n    branches not taken at lines: {branches}"
                    * bool(lines or branches)
                )
        print(f"{'all':52} {percent(*total[:2]):>14} {percent(*total[2:]):>14}")
        return 100 * total[0] >= LINE_FLOOR * total[1] and 100 * total[2] >= BRANCH_FLOOR * total[3]


def percent(hit: int, count: int) -> str:
    return f"{hit}/{count} {100 * hit / count:5.1f}%" if count else "-"


def measure(op: str | None, arguments: list[str]) -> Coverage:
    coverage = Coverage()
    for stale in (build.BUILD / "coverage").glob("*.gcda"):
        stale.unlink()
    for test in build.tests_of(op):
        result = build.run(build.build(test, "coverage"), arguments)
        if result.returncode:
            sys.exit(f"{test.stem} fails:\n{result.stdout}{result.stderr}")
    for data in sorted((build.BUILD / "coverage").glob("*.gcda")):
        coverage.add(data)
    return coverage


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", help="one op's test; default: all")
    parser.add_argument("--seeds", default="2")
    parser.add_argument("--random", default="30")
    parser.add_argument("--missing", action="store_true", help="list what was not executed")
    arguments = parser.parse_args()
    coverage = measure(arguments.op, ["--seeds", arguments.seeds, "--random", arguments.random])
    enough = coverage.report(arguments.missing)
    if not enough:
        print(f"below the floor of {LINE_FLOOR:g} % of lines and {BRANCH_FLOOR:g} % of branches")
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
