"""Kernels on the CPU: every tests/cpp/sim_<op>.cpp in three builds, its coverage, and random cases by hypothesis.

By hand: `python tools/sim/run.py --op <op>`, `coverage.py` and `fuzz.py` beside it. The tests of an op run in one
process of pytest-xdist (`--dist loadgroup`). `figure` prints a line, and the coverage table, at the end of the session.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
import coverage  # noqa: E402

import build  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and "CXX" not in build.os.environ, reason="no C++ compiler")
TESTS = build.tests_of(None)
RANDOM = [t for t in TESTS if build.kernel_sources(t) or "RANDOM_TEST(" in t.read_text()]  # all ops must have some
# The plain build is the one that measures coverage; its random cases run under every seed, those of fuzz.py under one.
FLAGS = {
    "coverage": ["--seeds", "8", "--random", "5"],
    "asan": ["--seeds", "2", "--random", "5"],
    "tsan": ["--seeds", "3", "--random", "3"],  # 1 and 2: see harness.cpp
}
CASES, SECONDS = 2000, 16


def each(tests: list[Path]):
    return [pytest.param(t, id=t.stem, marks=pytest.mark.xdist_group(t.stem)) for t in tests]


@pytest.fixture
def fuzz():
    return pytest.importorskip("fuzz")  # where hypothesis is installed


@pytest.mark.parametrize("variant", FLAGS)
@pytest.mark.parametrize("test", each(TESTS))
def test_kernels_on_the_host(test: Path, variant: str, figure, record_property) -> None:
    started = time.monotonic()
    if variant == "coverage":
        result, folder = coverage.run(test, FLAGS[variant])
    else:
        result = build.run(build.build(test, variant), FLAGS[variant])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout, "the program ran no test"
    assert "WARNING: ThreadSanitizer" not in result.stderr, result.stderr
    if variant == "coverage":
        counts = coverage.Coverage()
        counts.add(folder)
        counts.dump(folder / "coverage.json")
        record_property("sim coverage", str(folder / "coverage.json"))
    figure(f"{test.stem} [{variant}]: built and run in {time.monotonic() - started:.1f} s")


@pytest.mark.parametrize("test", each(RANDOM))
def test_random_cases(test: Path, fuzz, figure, request) -> None:
    seconds = float("inf") if request.config.getoption("--slow") else SECONDS
    program = build.build(test, "coverage")
    assert fuzz.random_tests(program), "the op has no RANDOM_TEST"
    text, passed = fuzz.fuzz_op(program, CASES, seconds=seconds)
    assert passed, text
    figure(text)


@pytest.mark.xdist_group("sim_adamw")
def test_launches_are_printed_with_their_predicted_time() -> None:
    (test,) = build.tests_of("adamw")
    flags = ["--seeds", "1", "--only", "bytes_are_the_floor", "--counters"]
    text = build.run(build.build(test, "coverage"), flags).stdout
    launch = re.search(r"adamw::step<false>, \d+ blocks: read (\d+), written (\d+) bytes;.*predicted ([\d.]+) us", text)
    assert launch, text
    read, written, predicted = (float(g) for g in launch.groups())
    assert read * 12 == written * 16  # param, grad and two moments; param and two moments
    assert predicted == pytest.approx((read + written) / 3.96e6, abs=1e-3)  # the measured rate of a copy


FAILING = """
#include "harness.h"
namespace warpsmith::test {
RANDOM_TEST(fails_above_forty) {
  const int64_t rows = random.size(1, 1000), columns = random.integer(0, 9);
  expect(rows <= 40 || columns < 3, "wrong");
}
RANDOM_TEST(crashes_above_forty) {
  if (random.size(1, 1000) > 40) std::abort();
}
}
"""


def test_failing_random_cases_are_made_smaller(fuzz, tmp_path: Path) -> None:
    source = tmp_path / "sim_failing.cpp"
    source.write_text(FAILING)
    flags = [*build.VARIANTS["plain"].kernel, f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'cpp'}"]
    objects = [build.machine_object("plain"), build.main_object(source, "plain")]
    program = build.link([*objects, build.compile_object(source, flags, tmp_path)], "plain", tmp_path / "sim_failing")
    text, passed = fuzz.fuzz_op(program, 400)
    assert not passed
    assert 'failed wrong\n  smallest failing case: --replay fails_above_forty "0 0 41 3"' in text, text
    assert "the program died (exit status -6)" in text and '--replay crashes_above_forty "0 0 41"' in text, text
    assert fuzz.replay(program, "fails_above_forty", [0, 0, 41, 3]) == 1
    assert fuzz.replay(program, "fails_above_forty", [0, 0, 40, 3]) == 0


def test_coverage_below_the_floor_is_noticed() -> None:
    counts = coverage.Coverage()
    counts.lines["kernels/a/a.cu"] = {1: 1, 2: 0}
    counts.lines["device/b.h"] = dict.fromkeys(range(100), 1)
    counts.branches["kernels/a/a.cu"] = {1: [1, 0]}
    table, low = counts.table()
    assert low == ["kernels/a", "all"], table
    assert "50.0%" in table


def test_an_unknown_builtin_says_where_to_add_it(tmp_path: Path) -> None:
    source = tmp_path / "sim_unknown.cpp"
    source.write_text('#include "device/platform.h"\n__global__ void k(int* p) { *p = __vabsdiffs4(*p, 1); }\n')
    with pytest.raises(build.BuildError, match=r"csrc/device/host_builtins\.h"):
        build.compile_object(source, [f"-I{ROOT / 'csrc'}"], tmp_path)


def test_an_unknown_primitive_says_where_to_add_it(tmp_path: Path) -> None:
    source = tmp_path / "sim_unknown.cpp"
    source.write_text(
        '#include "device/vector.h"\n__global__ void k(int* p) { warpsmith::device::load_non_temporal(p); }\n'
    )
    with pytest.raises(build.BuildError, match=r"a header of csrc/device with a device body and a host body"):
        build.compile_object(source, [f"-I{ROOT / 'csrc'}"], tmp_path)
