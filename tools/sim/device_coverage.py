"""Line and branch coverage of device code and launchers, executed on the CPU.

    python tools/sim/device_coverage.py --op norm
    python tools/sim/device_coverage.py       # all; exit status 1 below 95 % of lines or 85 % of branches

Counts csrc/kernels and csrc/device, per file; a template's instances are one line. Device bodies (PTX) are not compiled
here and do not count. A line with `// not covered on the host: <reason>` is left out. The floor holds for the whole and
for every folder of kernels and launchers. tests/test_sim.py measures the same way, and prints the same table.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import library
import store
import verdicts

import build

LINE_FLOOR, BRANCH_FLOOR = 95.0, 85.0
FLOOR = f"below the floor of {LINE_FLOOR:g} % of lines and {BRANCH_FLOOR:g} % of branches"
LAUNCHES = "launches"  # the file that a law's run leaves
MARKER = "not covered on the host:"
ONLY_RAISES = re.compile(r"WARPSMITH_RETURN_IF_FAILED|return Status::")  # the failing branch hands an error up


class Coverage:
    def __init__(self) -> None:
        self.lines: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        # Of each line, the counts of the instances with the most branches: in others some conditions are constants.
        self.branches: dict[str, dict[int, list[int]]] = defaultdict(dict)
        self.launches: list[str] = []  # lines of sim::write_launched_kernels

    def add(self, folder: Path) -> None:
        """Adds what a run left in `folder`, beside the notes of its objects."""
        if (launches := folder / LAUNCHES).exists():
            self.launches += launches.read_text().splitlines()
        for notes in sorted(folder.glob("*.gcno")):
            command = ["gcov", "--json-format", "--stdout", "--branch-probabilities", notes.name]
            result = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True)
            for text in result.stdout.splitlines():
                for file in json.loads(text)["files"]:
                    self._add_file(file)

    def dump(self, to: Path) -> None:
        to.write_text(json.dumps({"lines": self.lines, "branches": self.branches, "launches": self.launches}))

    def merge(self, dumped: Path) -> None:
        other = json.loads(dumped.read_text())
        for name, lines in other["lines"].items():
            for number, count in lines.items():
                self.lines[name][int(number)] += count
        for name, branches in other["branches"].items():
            for number, counts in branches.items():
                self._add_branches(name, int(number), counts)
        self.launches += other["launches"]

    def _add_branches(self, name: str, number: int, counts: list[int]) -> None:
        known = self.branches[name].setdefault(number, [])
        if len(counts) > len(known):
            self.branches[name][number] = counts
        elif len(counts) == len(known):
            self.branches[name][number] = [a + b for a, b in zip(known, counts, strict=True)]

    def _add_file(self, file: dict) -> None:
        path = Path(file["file"])
        path = (path if path.is_absolute() else build.ROOT / path).resolve()
        room = build.ROOT / "csrc"
        if not any(path.is_relative_to(room / name) for name in ("kernels", "tiles", "device")):
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
            self._add_branches(name, number, counts)

    def counts(self, name: str) -> list[int]:
        """Of a file: lines that ran, lines, branches that were taken, branches."""
        lines = self.lines[name].values()
        branches = [c for counts in self.branches[name].values() for c in counts]
        return [sum(c > 0 for c in lines), len(lines), sum(c > 0 for c in branches), len(branches)]

    def table(self, missing: bool = False) -> tuple[str, list[str]]:
        """The printed table, and what is below the floor."""
        rows = [f"{'file':52} {'lines':>16} {'branches':>16}"]
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        for name in sorted(self.lines):
            counts = self.counts(name)
            rows.append(row(name, counts))
            room, family = name.split("/")[:2]
            for whole in ([f"{room}/{family}"] if room == "kernels" else []) + ["all"]:
                sums[whole] = [a + b for a, b in zip(sums[whole], counts, strict=True)]
            if missing:
                lines = sorted(n for n, c in self.lines[name].items() if c == 0)
                untaken = sorted({n for n, c in self.branches[name].items() if 0 in c} - set(lines))
                if lines or untaken:
                    rows.append(f"    lines not executed: {lines}\n    branches not taken at lines: {untaken}")
        wholes = sorted(sums, key=lambda name: (name == "all", name))
        rows += ["", *(row(name, sums[name]) for name in wholes)]
        return "\n".join(rows), [name for name in wholes if below_floor(sums[name])]


def row(name: str, counts: list[int]) -> str:
    return f"{name:52} {percent(*counts[:2]):>16} {percent(*counts[2:]):>16}"


def below_floor(counts: list[int]) -> bool:
    return 100 * counts[0] < LINE_FLOOR * counts[1] or 100 * counts[2] < BRANCH_FLOOR * counts[3]


def percent(hit: int, count: int) -> str:
    return f"{hit}/{count} {100 * hit / count:5.1f}%" if count else "-"


def emptied(name: str) -> Path:
    # Of this process: another one may run the same law, and a run whose folder is gone fails where it asks for it.
    folder = build.BUILD / "coverage" / f"{name}.{os.getpid()}.data"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def beside_notes(folder: Path) -> Path:
    """Moves the counts that a run left below the folder into it, to the notes of their objects."""
    for counts in (folder / build.COUNTS).glob("*.gcda"):  # named by the path of the object, with # for /
        name = Path(counts.name.split("#")[-1])
        counts.rename(folder / name)
        shutil.copy((build.BUILD / "coverage" / name).with_suffix(".gcno"), folder)
    return folder


def run(test: Path, arguments: list[str]) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Runs a test in the coverage build; its counts are written to a folder of its own."""
    program, folder = build.build(test, "coverage"), emptied(test.stem)
    return build.run(program, arguments, folder=folder), beside_notes(folder)


def run_law(family: str, machine: str, random: bool) -> tuple[Path, set[str]]:
    """Runs the family's laws on simulated kernels, its own in the coverage build; AssertionError where one fails.

    Returns the folder of the counts, and what was imported.
    """
    chosen = library.MACHINES[machine].checks + ("" if random else " and not random_cases")
    built, folder = library.library("coverage", family), emptied(f"law_{family}-{machine}")
    written = {library.LAUNCHES: str(folder / LAUNCHES)}
    imported = set()
    for checks in library.runs(family, chosen):
        done = library.law(built, checks, timeout=1800, folder=folder, machine=machine, **written)
        assert done.returncode in library.HOLDS, library.failures(done)
        imported |= library.imported(done)
    return beside_notes(folder), imported


def law_key(family: str, variant: str, how: object, runs: list[list[str]]) -> str:
    """Of a run, without what it imports."""
    named = [[word.removeprefix(f"{build.ROOT}/") for word in words] for words in runs]
    tools = [Path(__file__), Path(library.__file__)]
    return verdicts.key("sim law", [library.key(variant, family)], [how, named], tools)


def counted_law(family: str, machine: str, random: bool = True) -> tuple[Path, bool]:
    """The counts of a run of the family's laws, and whether the store had them; AssertionError where one fails.

    ``random``: with its random cases.
    """
    counted = build.BUILD / "coverage" / f"law_{family}-{machine}.json"
    key = law_key(family, "coverage", [machine, random], library.runs(family))
    if known := store.get(verdicts.with_imports(key)):
        counted.parent.mkdir(parents=True, exist_ok=True)
        counted.write_text(known.value)
        return counted, True
    counts = Coverage()
    folder, imported = run_law(family, machine, random)
    counts.add(folder)
    counts.dump(counted)
    store.put(verdicts.keep_imports(key, imported), counted.read_text())
    return counted, False


def measure(op: str | None, arguments: list[str]) -> Coverage:
    coverage = Coverage()
    for test in build.tests_of(op, none_is_fine=True):
        result, folder = run(test, arguments)
        if result.returncode:
            sys.exit(f"{test.stem} fails:\n{result.stdout}{result.stderr}")
        coverage.add(folder)
    for family in library.FAMILIES:
        for machine in library.MACHINES if op in (None, family) else ():
            coverage.merge(counted_law(family, machine)[0])
    return coverage


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", help="one op's test, and its family's laws; default: all")
    parser.add_argument("--seeds", default="2")
    parser.add_argument("--random", default="30")
    parser.add_argument("--missing", action="store_true", help="list what was not executed")
    arguments = parser.parse_args()
    coverage = measure(arguments.op, ["--seeds", arguments.seeds, "--random", arguments.random])
    table, low = coverage.table(arguments.missing)
    print(table)
    if low:
        print(f"{FLOOR}: {', '.join(low)}")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
