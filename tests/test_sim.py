"""Kernels on the CPU: every tests/sim/sim_*.cpp in three builds, its coverage, and random cases by hypothesis.

By hand: `python tools/sim/run.py --op <op>`, `device_coverage.py` and `fuzz.py` beside it. `figure` prints a line,
and the coverage table, at the end of the session. What passed before with the same content answers from the store.
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
import crash  # noqa: E402
import device_coverage  # noqa: E402
import library  # noqa: E402
import tiers  # noqa: E402
import verdicts as verdict  # noqa: E402

import build  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and "CXX" not in build.os.environ, reason="no C++ compiler")
TESTS = build.tests_of(None)
DRAWING = [t for t in TESTS if "RANDOM_TEST(" in t.read_text()]
# All ops must have some: in the program of their name, in the one whose name theirs goes on from (sim_x_edges), or in
# the law, which draws cases of its own.
DRAWN = [d.stem for d in DRAWING] + [f"sim_{library.family_of(spec)}" for spec in library.specs()]
LACKING = [t for t in TESTS if build.kernel_sources(t) and not any(f"{t.stem}_".startswith(f"{d}_") for d in DRAWN)]
RANDOM = DRAWING + LACKING
# The plain build is the one that measures coverage; its random cases run under every seed, those of fuzz.py under one.
FLAGS = {
    "coverage": ["--seeds", "8", "--random", "5"],
    "asan": ["--seeds", "2", "--random", "5"],
    "tsan": ["--seeds", "3", "--random", "3"],  # 1 and 2: see harness.cpp
}
AS_CODE_OF_SM80 = ["--code", "80", "--seeds", "1", "--random", "2"]
TOOLS = [Path(__file__), Path(device_coverage.__file__)]
STANDING = ("sim_async", "sim_row_absmax")  # their sanitizers run every time: does the machinery still work?
CASES, SECONDS = 2000, 60  # of each program, and for all programs together


def each_variant():
    for test in TESTS:
        for variant in FLAGS:
            marks = [pytest.mark.xdist_group(f"{test.stem} {variant}")]
            if variant != "coverage":
                marks += [pytest.mark.full, *([pytest.mark.early] if test.stem in STANDING or lately(test) else [])]
            yield pytest.param(test, variant, id=f"{test.stem}-{variant}", marks=marks)


def lately(test: Path) -> bool:
    return tiers.lately(test, *{source.parent for source in build.kernel_sources(test)})


@pytest.fixture
def fuzz():
    return pytest.importorskip("fuzz")  # where hypothesis is installed


@pytest.mark.parametrize(("test", "variant"), [*each_variant()])
def test_kernels_on_the_host(test: Path, variant: str, verdicts, sanitizers, figure, record_property) -> None:
    started = time.monotonic()
    counted = build.BUILD / "coverage" / f"{test.stem}.json"
    key = sim_key(build.program_key(test, variant), variant)
    always = variant != "coverage" and test.stem in STANDING
    if not always and (known := verdicts.known(key)):
        if variant == "coverage":
            counted.parent.mkdir(parents=True, exist_ok=True)
            counted.write_text(known.value)
            record_property("sim coverage", str(counted))
        return
    if variant != "coverage" and not always and sanitizers.used_up:
        pytest.skip(sanitizers.used_up)
    counts = None
    if variant == "coverage":
        result, folder = device_coverage.run(test, FLAGS[variant])
    else:
        result = build.run(build.build(test, variant), FLAGS[variant])
    assert result.returncode == 0, result.stdout + result.stderr + crash.explain(test, variant, result)
    assert "passed" in result.stdout, "the program ran no test"
    assert "WARNING: ThreadSanitizer" not in result.stderr, result.stderr
    if variant == "coverage":
        counts = device_coverage.Coverage()
        counts.add(folder)
        counts.dump(counted)
        record_property("sim coverage", str(counted))
    program = build.made_from(build.BUILD / variant / test.stem)
    verdicts.keep(sim_key(program, variant), counted.read_text() if counts else None)
    if variant != "coverage":
        sanitizers.add(time.monotonic() - started)
    figure(f"{test.stem} [{variant}]: built and run in {time.monotonic() - started:.1f} s")


@pytest.mark.parametrize(
    "test", [pytest.param(t, id=t.stem, marks=pytest.mark.xdist_group(f"{t.stem} coverage")) for t in TESTS]
)
def test_kernels_as_code_of_sm80_on_a_device_of_sm90(test: Path, verdicts, figure, tmp_path: Path) -> None:
    """What is compiled out below sm_90 does nothing, and every chooser must know it. Of an op, all tests run but
    those that ask for sm_90's code by hand; a program of Hopper kernels shows that they are refused."""
    key = verdict.key("sim as sm_80", [build.program_key(test, "coverage")], AS_CODE_OF_SM80, TOOLS)
    if verdicts.known(key):
        return
    program = build.build(test, "coverage")
    started = time.monotonic()
    result = build.run(program, AS_CODE_OF_SM80, folder=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr + crash.explain(test, "coverage", result, 80)
    ran, not_run = (len(re.findall(rf"^{words}", result.stdout, re.M)) for words in ("passed ", "not run, "))
    of_sm90a = re.search(r"^// links: .*_sm90a\.cu$", test.read_text(), re.M)
    needed = 0 if of_sm90a else not_run
    assert ran > needed or not build.kernel_sources(test), result.stdout
    figure(f"{test.stem} [code of sm_80]: {ran} tests run, {not_run} not, in {time.monotonic() - started:.1f} s")
    verdicts.keep(key)


def sim_key(program: str, variant: str) -> str:
    return verdict.key("sim", [program], FLAGS[variant], TOOLS)


def test_the_standing_programs_exist() -> None:
    assert {*STANDING} <= {t.stem for t in TESTS}


@pytest.mark.full
@pytest.mark.xdist_group("sim random cases")
def test_random_cases(fuzz, figure, request, record_property) -> None:
    """All programs share the seconds; those without a verdict for what they are now come first."""
    seconds = float("inf") if request.config.getoption("--slow") else SECONDS
    outcomes = fuzz.fuzz_all(RANDOM, "coverage", CASES, seconds)
    assert not (without := [o.program for o in outcomes if not o.tests]), f"no RANDOM_TEST: {without}"
    failures = [line for o in outcomes for line in o.failures]
    assert not failures, "\n".join(failures)
    for line in fuzz.report(outcomes):
        figure(line)


@pytest.mark.xdist_group("sim_optim coverage")
def test_launches_are_printed_with_their_predicted_time() -> None:
    (test,) = build.tests_of("optim")
    flags = ["--seeds", "1", "--only", "bytes_are_the_floor", "--counters"]
    text = build.run(build.build(test, "coverage"), flags).stdout
    launch = re.search(
        r"optim::step<warpsmith::AdamWithDecay<true>, warpsmith::optim::Stored<float, float, false>, 3u>, "
        r"\d+ blocks: read (\d+), written (\d+) bytes;.*predicted ([\d.]+) us",
        text,
    )
    assert launch, text
    read, written, predicted = (float(g) for g in launch.groups())
    assert read * 12 == written * 16  # param, grad and two moments; param and two moments
    assert predicted == pytest.approx((read + written) / 3.96e6, abs=1e-3)  # the measured rate of a copy


CRASHING = """
#include "harness.h"
namespace warpsmith::test {
TEST(is_fine) {}
RANDOM_TEST(writes_past_the_end) {
  Buffer<int> x(8);
  under_every_seed([&] {
    if (random.drawn.size() < 1) random.integer(0, 9);
    if (sim::options().seed == 2) x.data()[8] = 1, std::abort();
  });
}
TEST(never_ends) {
  while (sim::options().seed == 0) {}
}
}
"""


def test_a_crash_names_its_test_and_is_run_again_under_asan() -> None:
    source = build.BUILD / "sim_crashing.cpp"  # always the same path, so that it is compiled once
    if not source.exists() or source.read_text() != CRASHING:
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(CRASHING)
    result = build.run(build.build(source, "plain"), ["--seeds", "8", "--only", "past"])
    assert result.returncode == -6 and "died in: writes_past_the_end, case 1, schedule seed 2" in result.stderr
    text = crash.explain(source, "plain", result)
    assert "heap-buffer-overflow" in text and "died in: writes_past_the_end, case 1, schedule seed 2" in text, text
    with pytest.raises(build.subprocess.TimeoutExpired) as late:
        build.run(build.build(source, "plain"), ["--only", "never_ends"], timeout=1)
    assert "died in: never_ends" in (late.value.stderr or "")


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
    flags = [*build.VARIANTS["plain"].kernel, f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'sim'}"]
    objects = [build.machine_object("plain"), build.main_object(source, "plain")]
    program = build.link([*objects, build.compile_object(source, flags, tmp_path)], "plain", tmp_path / "sim_failing")
    text, passed = fuzz.fuzz_op(program, 400)
    assert not passed
    assert 'failed wrong\n  smallest failing case: --replay fails_above_forty "0 0 41 3"' in text, text
    assert "the program died (exit status -6)" in text and '--replay crashes_above_forty "0 0 41"' in text, text
    assert fuzz.replay(program, "fails_above_forty", [0, 0, 41, 3]) == 1
    assert fuzz.replay(program, "fails_above_forty", [0, 0, 40, 3]) == 0


def test_coverage_below_the_floor_is_noticed() -> None:
    counts = device_coverage.Coverage()
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


def test_a_wgmma_that_the_device_lacks_does_not_compile(tmp_path: Path) -> None:
    source = tmp_path / "sim_unknown.cpp"
    kernel = "warpsmith::device::wgmma<warpsmith::bfloat16, {n}>(d, uint64_t{{0}}, uint64_t{{0}}, false);"
    for n, known in ((72, False), (80, True)):
        body = f"float d[{n // 2}];\n" + kernel.format(n=n)
        source.write_text(f'#include "device/wgmma.h"\n__global__ void k() {{ {body} }}\n')
        if known:
            build.compile_object(source, [f"-I{ROOT / 'csrc'}"], tmp_path)
            continue
        with pytest.raises(build.BuildError, match=r"add this N to device/wgmma_instruction\.h"):
            build.compile_object(source, [f"-I{ROOT / 'csrc'}"], tmp_path)


def test_an_unknown_primitive_says_where_to_add_it(tmp_path: Path) -> None:
    source = tmp_path / "sim_unknown.cpp"
    source.write_text(
        '#include "device/vector.h"\n__global__ void k(int* p) { warpsmith::device::load_non_temporal(p); }\n'
    )
    with pytest.raises(build.BuildError, match=r"a header of csrc/device with a device body and a host body"):
        build.compile_object(source, [f"-I{ROOT / 'csrc'}"], tmp_path)
