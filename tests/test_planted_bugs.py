"""Every planted bug is noticed: those of tests/sim/planted_*.cpp by their check, which finds nothing in the same kernel
without the bug, and those of tools/sim/kernel_bugs.py in real kernels by the op's tests."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
import kernel_bugs  # noqa: E402
import library  # noqa: E402
import store  # noqa: E402
import verdicts as verdict  # noqa: E402

import build  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and "CXX" not in build.os.environ, reason="no C++ compiler")
FILES = sorted((ROOT / "tests" / "sim").glob("planted_*.cpp"))
FILES = [f for f in FILES if f.stem != "planted_main"]


def planted(file: Path) -> list[list[str]]:
    program = build.build(file, "plain")
    return [line.split("|") for line in build.run(program, []).stdout.splitlines()]


def key(file: Path) -> str:
    programs = [build.program_key(file, variant) for variant in ("plain", "asan", "tsan")]
    return verdict.key("planted", programs, [], [Path(__file__)])


@pytest.mark.parametrize("file", [pytest.param(f, id=f.stem, marks=pytest.mark.xdist_group(f.stem)) for f in FILES])
def test_planted_bugs_are_noticed(file: Path, verdicts) -> None:
    if verdicts.known(key(file)):
        return
    bugs, unnoticed = planted(file), []
    for name, variant, expected in bugs:
        program = build.build(file, variant)
        result = build.run(program, [name], timeout=120)
        text = result.stdout + result.stderr
        if result.returncode == 0 or expected not in text:
            unnoticed.append(
                f"{name} [{variant}]: expected '{expected}', got exit status {result.returncode}: {text[:500]}"
            )
        right = build.run(program, [name, "--fixed"], timeout=120)
        if right.returncode:
            unnoticed.append(f"{name} [{variant}] without the bug: {(right.stdout + right.stderr)[:800]}")
    assert not unnoticed, "\n".join(unnoticed)
    verdicts.keep(key(file), len(bugs))


def in_turn(bug: kernel_bugs.Bug) -> pytest.MarkDecorator:
    about = [*bug.files(), ROOT / shlex.split(bug.test)[0]]
    return pytest.mark.in_turn(*about, of=3)


# In the process that builds the family's programs.
BUGS = [
    pytest.param(b, id=b.name, marks=[pytest.mark.xdist_group(f"sim_{b.family} {b.variant}"), in_turn(b)])
    for b in kernel_bugs.BUGS
]


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_in_real_kernels_are_noticed(bug: kernel_bugs.Bug, verdicts) -> None:
    tools = [Path(__file__), Path(kernel_bugs.__file__)]
    key = verdict.key("kernel bug", [build.parts_key(kernel_bugs.parts(bug), bug.variant)], asdict(bug), tools)
    if verdicts.known(verdict.with_imports(key)):
        return
    noticed, run = kernel_bugs.noticed(bug)
    assert noticed, f"expected '{bug.noticed_as}' from {bug.test}, got: {run.stdout[:800]}{run.stderr[:800]}"
    if imported := library.imported(run):  # a crash names none
        verdicts.keep(verdict.keep_imports(key, imported))


def test_every_bug_finds_its_text() -> None:
    for bug in kernel_bugs.BUGS:
        assert bug.texts(), bug.name


def test_there_are_enough(figure) -> None:
    known = {file: store.get(key(file)) for file in FILES}
    count = sum(entry.value if entry else len(planted(file)) for file, entry in known.items())
    figure(f"{count} planted bugs, each noticed by its check; {len(kernel_bugs.BUGS)} in real kernels")
    assert count >= 25
