"""Tiers of tests, the order of their groups, verdicts of earlier runs, and the table of times that ends a session."""

from __future__ import annotations

import hashlib
import json
import subprocess
import uuid
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import store

import build

ROOT = Path(__file__).resolve().parents[1]
# Tests that ask whether the sources are right, not whether the package works here. Others carry the mark `full`.
FULL = (
    "tests/build/",
    "tests/convergence/",
    "tests/structure/",
    "tests/testing/",
    "tests/test_aoti_packages.py",
    "tests/test_compiled_cache.py",
    "tests/test_conformance.py",
    "tests/test_mutation.py",
    "tests/test_planted_bugs.py",
    "tests/test_planted_glue.py",
    "tests/test_static_checks.py",
    "tests/test_store.py",
)
# Seconds of groups before a machine has measured them, by the beginning of their names (two cores, 2026-11-22).
GUESSES = {
    "the built package": 280.0,
    "sim law attention": 350.0,
    "sim law norm": 170.0,
    "sim law optim": 170.0,
    "sim law": 50.0,
    "sim_": 60.0,
    "planted_": 60.0,
    "tests/test_aoti_packages.py": 66.0,
    "tests/testing/test_benchmarks.py": 64.0,
    "tests/examples/": 40.0,
    "tests/cpp_api/": 42.0,
    "tests/test_notebooks.py": 60.0,
    "tests/structure/": 35.0,
    "tests/convergence/": 28.0,
    "tests/testing/": 25.0,
}
SANITIZED_GUESS_S = 150.0  # with the build
DURATIONS = store.key("durations of groups of tests")
LONGEST = 20
SANITIZERS_S = 240  # of building and running, without --slow; what changed lately comes first
SANITIZED = f"{SANITIZERS_S} s of sanitizers are used up; --slow runs all"
RECENT_COMMITS = 40  # those of a day or two


def lately(*folders: Path) -> bool:
    """Whether the last commits or the working tree changed a file in one of these folders, or such a file itself."""
    changed = (ROOT / name for name in recently_changed(ROOT))
    return any(path == folder or path.is_relative_to(folder) for path in changed for folder in folders)


def drawn(name: str) -> int:
    """A random number of a name, another one for each commit."""
    return int.from_bytes(hashlib.sha256(f"{commit(ROOT)} {name}".encode()).digest()[:8], "big")


def has_its_turn(name: str, of: int) -> bool:
    """One commit in so many runs a test; which of them follows from the commit. Without a repository all run."""
    return not commit(ROOT) or drawn(name) % of == 0


@cache
def commit(root: Path) -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    return done.stdout.strip()


@cache
def recently_changed(root: Path) -> set[str]:
    """Files that the last commits or the working tree changed; empty where there is no repository."""
    found: set[str] = set()
    for command in (["log", f"-{RECENT_COMMITS}", "--name-only", "--format="], ["diff", "--name-only", "HEAD"]):
        done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
        found.update(done.stdout.split())
    return found


def is_full(item: pytest.Item) -> bool:
    return item.nodeid.startswith(FULL) or item.get_closest_marker("full") is not None


@dataclass
class Plan:
    """What a session runs, the same in all of its processes. whole: no file or folder was named. seconds: what each
    group took before. session: a name for what its processes share."""

    whole: bool = True
    full: bool = False
    session: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: pytest.Config) -> Plan:
        if hasattr(config, "workerinput"):
            return cls(**json.loads(config.workerinput["warpsmith"]))
        whole = config.args_source != pytest.Config.ArgsSource.ARGS
        full = not whole or config.getoption("--full") or config.getoption("--slow")
        known = store.get(DURATIONS)
        return cls(whole, full, uuid.uuid4().hex, known.value if known else {})

    def text(self) -> str:
        return json.dumps(asdict(self))

    def expected(self, group: str) -> float:
        starts = (seconds for start, seconds in GUESSES.items() if group.startswith(start))
        guess = SANITIZED_GUESS_S if group.endswith((" asan", " tsan")) else next(starts, 0.0)
        return self.seconds.get(group, guess)

    def longest_first(self, items: list[pytest.Item]) -> list[pytest.Item]:
        """In groups, the longest first: a long one that comes last leaves the other process idle. What is early and
        shares a budget comes in an order of the commit's own, so that each has its turn."""

        def place(item: pytest.Item) -> tuple[bool, float, str]:
            group = group_of(item)
            if item.get_closest_marker("early") is None:
                return True, -self.expected(group), group
            return False, float(drawn(group)), group

        return sorted(items, key=place)


PLAN = pytest.StashKey[Plan]()


class Spent:
    """Seconds that the processes of a session spend on something that has a budget. What is expected of a test is set
    aside when it begins, so that those that run side by side do not spend the same seconds."""

    def __init__(self, file: Path, budget: float, expected: float = 0.0) -> None:
        self.file, self.budget, self.expected = file, budget, expected
        self.set_aside = 0.0

    @classmethod
    def of(cls, plan: Plan, budget: float, expected: float = 0.0) -> Spent:
        return cls(ROOT / "build" / "sessions" / plan.session, budget, expected)

    def begin(self) -> bool:
        """Whether the budget has the seconds; of a test that takes more, if it has not been touched."""
        with build.locked(self.file):
            spent = self.seconds()
            if spent and spent + self.expected > self.budget:
                return False
            self._add(self.expected)
        self.set_aside = self.expected
        return True

    def end(self, seconds: float) -> None:
        with build.locked(self.file):
            self._add(seconds - self.set_aside)

    def _add(self, seconds: float) -> None:
        with self.file.open("a") as file:
            file.write(f"{seconds:.3f}\n")

    def seconds(self) -> float:
        return sum(map(float, self.file.read_text().split())) if self.file.exists() else 0.0


def out_of_turn(item: pytest.Item) -> str:
    """Why a whole session without --slow leaves the test to other commits; empty: it runs."""
    mark = item.get_closest_marker("in_turn")
    if not mark or lately(*mark.args) or has_its_turn(item.name, mark.kwargs["of"]):
        return ""
    return f"runs for one commit in {mark.kwargs['of']}, and where what it is about has changed lately; --slow runs all"


def group_of(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    return str(mark.args[0] if mark and mark.args else mark.kwargs["name"] if mark else item.nodeid.split("::")[0])


def describe(item: pytest.Item) -> None:
    """Lets the reports of a test say what the table needs."""
    tier = "slow" if item.get_closest_marker("slow") else "full" if is_full(item) else "default"
    item.user_properties += [("tier", tier), ("group", group_of(item))]


class Verdicts:
    """What earlier runs have shown for the same content (tools/sim/store.py); only passes are kept."""

    def __init__(self, record_property: Any) -> None:
        self.record = record_property

    def known(self, key: str) -> store.Entry | None:
        entry = store.get(key)
        if entry:
            self.record("verdict", "known")
        return entry

    def keep(self, key: str, value: Any = None) -> None:
        """To be called after a test's last assert."""
        store.put(key, value)
        self.record("verdict", "made")


@dataclass
class Sum:
    tests: int = 0
    known: int = 0
    seconds: float = 0.0


def times(reports: list[Any]) -> tuple[dict[str, Sum], list[tuple[float, str]], dict[str, float]]:
    """Sums by tier and place, the seconds of each test, and of each group in which nothing came from the store."""
    sums: dict[str, Sum] = defaultdict(Sum)
    tests: dict[str, float] = defaultdict(float)
    groups: dict[str, float] = defaultdict(float)
    answered = set()
    for report in reports:
        properties = dict(report.user_properties)
        name = report.nodeid.split("@")[0]
        place = "/".join(name.split("::")[0].split("/")[:2])
        sum_ = sums[f"{properties.get('tier', 'default'):8} {place}"]
        sum_.seconds += report.duration
        tests[name] += report.duration
        groups[properties.get("group", name)] += report.duration
        if report.when == "call":
            sum_.tests += 1
            if properties.get("verdict") == "known":
                sum_.known += 1
                answered.add(properties.get("group", name))
    measured = {group: round(seconds, 2) for group, seconds in groups.items() if group not in answered}
    return sums, sorted(((s, n) for n, s in tests.items()), reverse=True), measured


def print_times(reporter: Any, plan: Plan) -> None:
    """Where the time went, and what was not run."""
    # "": of what comes before and after a test, where fixtures of a module are made
    outcomes = ("", "passed", "failed")
    reports = [r for outcome in outcomes for r in reporter.stats.get(outcome, []) if hasattr(r, "when")]
    if not reports:
        return
    sums, tests, measured = times(reports)
    if plan.whole:
        store.put(DURATIONS, {**plan.seconds, **measured})
    if tests[0][0] < 1:
        return
    reporter.section("seconds of one process")
    reporter.write_line(f"{'tier':8} {'tests of':32} {'tests':>6} {'from the store':>15} {'seconds':>8}")
    for name, s in sorted(sums.items(), key=lambda pair: -pair[1].seconds):
        if s.seconds >= 1:
            reporter.write_line(f"{name:41} {s.tests:6} {s.known or '':>15} {s.seconds:8.1f}")
    for seconds, name in tests[:LONGEST]:
        if seconds >= 1:
            reporter.write_line(f"{seconds:8.1f}  {name}")
    known = sum(s.known for s in sums.values())
    made = sum(dict(r.user_properties).get("verdict") == "made" for r in reports if r.when == "call")
    if known or made:
        reporter.write_line(f"verdicts: {known} from the store (--no-cache runs all), {made} made now")
    if not plan.full:
        reporter.write_line("left out: sanitizers, random cases, static checks and others of the tier full (--full)")
