"""Every planted bug is noticed: those of tests/sim/planted_*.cpp by their check, which finds nothing in the same kernel
without the bug, and those of tools/sim/kernel_bugs.py in real kernels by the op's tests."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
import kernel_bugs  # noqa: E402
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


ASKS_THE_DEVICE = "sim::options().device_capability"
IN_LAUNCHERS = {
    # the family whose tests must notice: file, what stands there, what is planted
    "norm": ("kernels/norm/norm.cu", "= device.code_capability;", f"= {ASKS_THE_DEVICE};"),
    "cross_entropy": ("kernels/cross_entropy/cross_entropy.cu", "device.code_capability,", f"{ASKS_THE_DEVICE},"),
    "activation": ("device/launch.h", "programmatic_dependent = code >= kSm90;", "programmatic_dependent = true;"),
}


@pytest.mark.parametrize("refuses", [True, False], ids=["refused", "launched"])
@pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.xdist_group(f"sim_{op}")) for op in IN_LAUNCHERS])
def test_a_launcher_that_asks_the_device_is_noticed(op: str, refuses: bool, tmp_path: Path) -> None:
    """In the real launchers: the tests of the op, run as code of sm_80 on a device of sm_90, fail: by the wrapper's
    refusal and, where that is gone as well, by what the kernel does with its waits compiled out."""
    (test,) = build.tests_of(op)
    changes = [IN_LAUNCHERS[op]]
    if not refuses:
        changes.append(
            ("device/launch.h", "if (code_capability >= kSm90) return {};", "if (code_capability) return {};")
        )
    for name, old, new in changes:
        planted_file = tmp_path / name
        text = (planted_file if planted_file.exists() else ROOT / "csrc" / name).read_text()
        assert text.count(old) == 1, f"{name}: expected one {old}"
        planted_file.parent.mkdir(parents=True, exist_ok=True)
        with_machine = '#include "sim/sim.h"\n' if ASKS_THE_DEVICE in new else ""
        planted_file.write_text(with_machine + text.replace(old, new))
    sources = [tmp_path / s.relative_to(ROOT / "csrc") for s in build.kernel_sources(test)]
    sources = [s if s.exists() else ROOT / "csrc" / s.relative_to(tmp_path) for s in sources]
    flags = [*build.VARIANTS["plain"].kernel, *(f"-I{p}" for p in (tmp_path, ROOT / "csrc", ROOT / "tests" / "sim"))]
    objects = [build.machine_object("plain"), build.main_object(test, "plain")]
    objects += [build.compile_object(s, flags, tmp_path) for s in [*sources, test]]
    program = build.link(objects, "plain", tmp_path / test.stem)
    result = build.run(program, ["--code", "80", "--seeds", "2", "--random", "0", "--stop"], timeout=120)
    assert result.returncode != 0, result.stdout
    assert ("expected code of sm_90 or newer for" in result.stdout) == refuses, result.stdout
    fine = build.run(program, ["--code", "90", "--seeds", "1", "--only", "bytes_moved"], timeout=120)
    assert fine.returncode == 0, "on a device whose code is as new nothing is wrong:\n" + fine.stdout


# In the process that builds the family's programs.
BUGS = [
    pytest.param(b, id=b.name, marks=pytest.mark.xdist_group(f"sim_{b.family} {b.variant}")) for b in kernel_bugs.BUGS
]


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_in_real_kernels_are_noticed(bug: kernel_bugs.Bug, verdicts) -> None:
    (test,) = build.tests_of(bug.family)
    tools = [Path(__file__), Path(kernel_bugs.__file__)]
    key = verdict.key("kernel bug", [build.program_key(test, bug.variant)], asdict(bug), tools)
    if verdicts.known(key):
        return
    noticed, text = kernel_bugs.noticed(bug)
    assert noticed, f"expected '{bug.noticed_as}' from {bug.test}, got: {text[:800]}"
    verdicts.keep(key)


def test_there_are_enough(figure) -> None:
    known = {file: store.get(key(file)) for file in FILES}
    count = sum(entry.value if entry else len(planted(file)) for file, entry in known.items())
    figure(f"{count} planted bugs, each noticed by its check; {len(kernel_bugs.BUGS)} in real kernels")
    assert count >= 25
