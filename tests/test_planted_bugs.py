"""Every planted bug of tests/cpp/planted_*.cpp is noticed by its check, and the same kernel without the bug is not."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
import build  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and "CXX" not in build.os.environ, reason="no C++ compiler")
FILES = sorted((ROOT / "tests" / "cpp").glob("planted_*.cpp"))
FILES = [f for f in FILES if f.stem != "planted_main"]


def planted(file: Path) -> list[list[str]]:
    program = build.build(file, "plain")
    return [line.split("|") for line in build.run(program, []).stdout.splitlines()]


@pytest.mark.parametrize("file", [pytest.param(f, id=f.stem, marks=pytest.mark.xdist_group(f.stem)) for f in FILES])
def test_planted_bugs_are_noticed(file: Path) -> None:
    unnoticed = []
    for name, variant, expected in planted(file):
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


def test_there_are_enough(figure) -> None:
    count = sum(len(planted(file)) for file in FILES)
    figure(f"{count} planted bugs, each noticed by its check")
    assert count >= 25
