"""Kernels on the CPU: every tests/sim/sim_*.cpp in three builds, and its coverage.

By hand: `python tools/sim/run.py --op <op>`, and `device_coverage.py` beside it. `figure` prints a line,
and the coverage table, at the end of the session. What passed before with the same content answers from the store.
"""

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
import tiers  # noqa: E402
import verdicts as verdict  # noqa: E402

import build  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and "CXX" not in build.os.environ, reason="no C++ compiler")
TESTS = build.tests_of(None)
FLAGS = {
    "coverage": ["--seeds", "8", "--random", "5"],
    "asan": ["--seeds", "2", "--random", "5"],
    "tsan": ["--seeds", "3", "--random", "3"],  # 1 and 2: see harness.cpp
}
AS_CODE_OF_SM80 = ["--code", "80", "--seeds", "1", "--random", "2"]
TOOLS = [Path(__file__), Path(device_coverage.__file__)]
STANDING = ("sim_async", "sim_row_absmax")  # their sanitizers run every time: does the machinery still work?


def each_variant():
    for test in TESTS:
        for variant in FLAGS:
            marks = [pytest.mark.xdist_group(f"{test.stem} {variant}")]
            if variant != "coverage":
                about = [test, *{source.parent for source in build.kernel_sources(test)}]
                standing = test.stem in STANDING
                marks += [pytest.mark.full, *([pytest.mark.early] if standing or tiers.lately(*about) else [])]
                marks += [] if standing else [pytest.mark.in_turn(*about, of=8)]
            yield pytest.param(test, variant, id=f"{test.stem}-{variant}", marks=marks)


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
    if variant != "coverage" and not always and not sanitizers.begin():
        pytest.skip(tiers.SANITIZED)
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
        sanitizers.end(time.monotonic() - started)
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


@pytest.mark.xdist_group("sim_optim coverage")
def test_launches_are_printed_with_their_predicted_time() -> None:
    (test,) = build.tests_of("optim")
    flags = ["--seeds", "1", "--only", "bytes_are_the_floor", "--counters"]
    text = build.run(build.build(test, "coverage"), flags).stdout
    launch = re.search(
        r"optim::step<warpsmith::AdamWithDecay<true>, warpsmith::optim::Stored<float, float, false>, 3u, false>, "
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
