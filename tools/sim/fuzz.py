"""Random cases by hypothesis: draws for the RANDOM_TESTs of tests/sim/sim_<op>.cpp, made smaller when a case fails.

    python tools/sim/fuzz.py --op attention --cases 2000
    python tools/sim/fuzz.py --op attention --variant asan --seed 7      # other draws, with the address sanitizer
    python tools/sim/fuzz.py --op row_absmax --replay any_size "0 2 33 33"
    python tools/sim/fuzz.py --budget 240                               # as CI does

The program runs once and asks for every draw (shape, stride, dtype, offset) over a pipe; a crash is a failing case like
any other. Without --op: all ops. What a RANDOM_TEST draws is written in its body, so that a new op needs nothing here.

With --budget all programs share that many seconds, and each stops at --cases. The store (tools/sim/store.py) knows how
many cases each program has passed as it is now: programs with none come first, others go on where they stopped.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import store
import verdicts
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import build

FIRST_BATCH, BATCH = 10, 250  # cases between two looks at the clock
TIMEOUT_S = 120.0  # for one answer of the program


@cache
def values(kind: str, low: int, high: int) -> st.SearchStrategy[int]:
    """Whole numbers from low to high; sizes are small, or next to a power of two, more often."""
    if kind == "draw" or high - low < 9:
        return st.integers(low, high)
    near = {p + d for p in (1 << n for n in range(63)) for d in (-1, 0, 1)}
    powers = sorted(n for n in near if low <= n <= high) or [low]

    def moved(chosen: tuple[int, int]) -> int:
        where, n = chosen
        return (n, low + (n - low) % 9, powers[(n - low) % len(powers)])[where]

    # Moved by a draw of its own, which shrinks to 0: then every number is within reach.
    return st.tuples(st.integers(0, 2), st.integers(low, high)).map(moved)


class Program:
    """A sim program that answers cases of one RANDOM_TEST; started again after a crash."""

    def __init__(self, path: Path, test: str) -> None:
        self.command = [str(path), "--ask", test, "--seeds", "1"]
        self.process: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, **build.ENVIRONMENT},
            cwd=build.ROOT,
            bufsize=0,
        )
        self.pending = b""
        if self._line() != "ready":
            raise RuntimeError(f"{self.command} has no such RANDOM_TEST")

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.communicate()
            self.errors.close()
            self.process = None

    def _line(self) -> str:
        assert self.process and self.process.stdout
        while b"\n" not in self.pending:
            if not select.select([self.process.stdout], [], [], TIMEOUT_S)[0]:
                self.close()
                raise AssertionError(f"no answer within {TIMEOUT_S:g} s")
            read = os.read(self.process.stdout.fileno(), 1 << 16)
            if not read:
                status = self.process.wait()
                self.errors.seek(0)
                text = self.errors.read().decode(errors="replace")[:4000]
                self.close()
                raise AssertionError(f"the program died (exit status {status}): {text}")
            self.pending += read
        line, self.pending = self.pending.split(b"\n", 1)
        return line.decode(errors="replace")

    def _answer(self, value: int) -> None:
        assert self.process and self.process.stdin
        os.write(self.process.stdin.fileno(), b"%d\n" % value)

    def run(self, pick: Callable[[str, int, int], int]) -> None:
        """One case, with the draws that `pick(kind, low, high)` gives; raises AssertionError where it fails."""
        if not self.process:
            self._start()
        first = [pick("draw", 0, 2**32 - 1), pick("draw", 0, 7)]  # seeds of the data and of the schedule
        for value in first:
            self._answer(value)
        while (line := self._line()) != "passed":
            kind, *rest = line.split()
            if kind == "failed":
                raise AssertionError(line)
            try:
                value = pick(kind, int(rest[0]), int(rest[1]))
            except BaseException:  # hypothesis has seen enough of this case
                self.close()
                raise
            self._answer(value)


@dataclass
class Outcome:
    cases: int
    seconds: float
    failure: str = ""  # of the smallest failing case, with its draws


def random_tests(program: Path) -> list[str]:
    lines = build.run(program, ["--list"]).stdout.splitlines()
    return [line.split()[0] for line in lines if line.endswith(" random")]


def fuzz(path: Path, test: str, cases: int, first_seed: int = 0, seconds: float = float("inf")) -> Outcome:
    """Runs cases in batches until there are enough or the time is over."""
    program = Program(path, test)
    started = time.monotonic()
    done = 0

    def case(data: st.DataObject) -> None:
        nonlocal done
        done += 1
        drawn: list[int] = []

        def pick(kind: str, low: int, high: int) -> int:
            drawn.append(data.draw(values(kind, low, high)))
            return drawn[-1]

        try:
            program.run(pick)
        except AssertionError as failed:
            draws = " ".join(map(str, drawn))
            raise AssertionError(f'{failed}\n  smallest failing case: --replay {test} "{draws}"') from None

    config = settings(
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    try:
        batch, size = 0, FIRST_BATCH
        while done < cases and (spent := time.monotonic() - started) < seconds:
            if done:
                size = min(BATCH, max(FIRST_BATCH, int((seconds - spent) * done / spent))) if seconds < 1e9 else BATCH
            wanted = settings(config, max_examples=min(size, cases - done))
            seed(first_seed * 1_000_003 + batch)(wanted(given(st.data())(case)))()
            batch += 1
    except AssertionError as failed:
        return Outcome(done, time.monotonic() - started, str(failed))
    finally:
        program.close()
    return Outcome(done, time.monotonic() - started)


def fuzz_op(path: Path, cases: int, first_seed: int = 0, seconds: float = float("inf")) -> tuple[str, bool]:
    """All RANDOM_TESTs of a program share the cases; (a line that says so, whether none failed)."""
    tests = random_tests(path)
    outcomes = [(name, fuzz(path, name, -(-cases // len(tests)), first_seed, seconds / len(tests))) for name in tests]
    total = sum(o.cases for _, o in outcomes)
    spent = sum(o.seconds for _, o in outcomes)
    lines = [f"{name}: {o.failure}" for name, o in outcomes if o.failure]
    summary = f"{path.name}: {total:,} random cases of {', '.join(tests) or 'no RANDOM_TEST'} in {spent:.1f} s"
    return "\n".join([summary, *lines]), not lines


@dataclass
class Fuzzed:
    """A program's random cases: those of earlier runs of the same program, and those of this one."""

    program: str
    tests: list[str]
    before: int
    seeds: int  # used so far
    cases: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def fuzz_all(tests: list[Path], variant: str, cases: int, seconds: float) -> list[Fuzzed]:
    """All programs, within so many seconds together. The time is divided among the programs without a verdict; what
    they leave is divided among the others, those with the fewest cases first."""
    found = [_known(test, variant) for test in tests]
    todo = sorted((f for f in found if f.before < cases), key=lambda f: (f.before, f.program))
    fresh = sum(not f.before for f in todo)
    paths = {test.stem: test for test in tests}
    for i, f in enumerate(todo):
        program = build.build(paths[f.program], variant)
        f.tests = random_tests(program)
        share = (seconds - sum(g.seconds for g in found)) / ((fresh if i < fresh else len(todo)) - i)
        if share <= 0:
            continue
        for name in f.tests:
            least = -(-(cases - f.before) // len(f.tests))
            outcome = fuzz(program, name, least, f.seeds, share / len(f.tests))
            f.cases += outcome.cases
            f.seconds += outcome.seconds
            f.failures += [f"{f.program} {name}: {outcome.failure}"] if outcome.failure else []
        if f.tests and not f.failures:
            value = {"tests": f.tests, "cases": f.before + f.cases, "seeds": f.seeds + 1}
            store.put(_key(build.made_from(program)), value)
    return found


def _key(program: str) -> str:
    return verdicts.key("fuzz", [program], importlib.metadata.version("hypothesis"), [Path(__file__)])


def _known(test: Path, variant: str) -> Fuzzed:
    entry = store.get(_key(build.program_key(test, variant)))
    known = entry.value if entry else {"tests": [], "cases": 0, "seeds": 0}
    return Fuzzed(test.stem, known["tests"], known["cases"], known["seeds"])


def report(found: list[Fuzzed]) -> list[str]:
    """A line for each program that ran, and one for all."""
    lines = [
        f"{f.program}: {f.cases:,} random cases of {', '.join(f.tests)} in {f.seconds:.1f} s"
        + (f", {f.before:,} before" if f.before else "")
        for f in found
        if f.cases
    ]
    cases, seconds = sum(f.cases for f in found), sum(f.seconds for f in found)
    return [*lines, f"random cases: {cases:,} in {seconds:.0f} s, {sum(f.before for f in found):,} from the store"]


def replay(path: Path, test: str, draws: list[int]) -> int:
    program, left = Program(path, test), iter(draws)
    try:
        program.run(lambda kind, low, high: next(left, low))
    except AssertionError as failed:
        print(failed)
        return 1
    finally:
        program.close()
    print("passed")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", help="default: all")
    parser.add_argument("--cases", type=int, default=2000, help="of an op (default 2000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new batch of cases of an op after that")
    parser.add_argument("--budget", type=float, help="seconds of all ops together; cases of earlier runs count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", choices=[*build.VARIANTS], default="plain")
    parser.add_argument("--replay", nargs=2, metavar=("TEST", "DRAWS"), help="run one case again")
    arguments = parser.parse_args()
    if arguments.budget:
        found = fuzz_all(build.tests_of(arguments.op), arguments.variant, arguments.cases, arguments.budget)
        failures = [line for f in found for line in f.failures]
        print("\n".join([*report(found), *failures]))
        return bool(failures)
    good = True
    for test in build.tests_of(arguments.op):
        program = build.build(test, arguments.variant)
        if arguments.replay:
            return replay(program, arguments.replay[0], [int(d) for d in arguments.replay[1].split()])
        if random_tests(program):
            text, passed = fuzz_op(program, arguments.cases, arguments.seed, arguments.seconds)
            print(text, flush=True)
            good = good and passed
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
