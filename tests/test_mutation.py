"""tools/sim/mutate.py tells killed mutants from survivors."""

import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
import mutate  # noqa: E402
import verdicts as verdict  # noqa: E402

import build  # noqa: E402

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None and "CXX" not in build.os.environ, reason="no C++ compiler"),
    pytest.mark.xdist_group("sim_row_absmax"),
]
REDUCE = ROOT / "csrc" / "device" / "reduce.h"


@pytest.fixture(scope="module")
def suite():
    """One check, of the example kernel: its blocks take several rows and reduce each."""
    (check,) = [c for c in mutate.checks() if c.name == "sim_row_absmax"]
    check.build("plain")
    return [mutate.measured(replace(check, arguments=(*check.arguments, "--only", "several")))]


def key(which: str) -> str:
    """Of a verdict on mutants of the example kernel: reduce.h is in its programs."""
    (test,) = build.tests_of("row_absmax")
    programs = [build.program_key(test, variant) for variant in ("plain", "asan", "tsan")]
    return verdict.key("mutation", programs, which, [Path(mutate.__file__), Path(__file__)])


def changed(old: str, new: str, what: str) -> mutate.Mutant:
    text = REDUCE.read_text()
    assert old in text
    return mutate.Mutant(REDUCE, 1, what, text.replace(old, new))


def test_mutants_are_killed_or_survive(verdicts, request, tmp_path: Path) -> None:
    if verdicts.known(key("chosen")):
        return
    suite = request.getfixturevalue("suite")
    outcome = mutate.verdict(changed("return fmaxf(a, b);", "return fminf(a, b);", "swap"), suite, tmp_path / "a")
    assert outcome == "killed (sim_row_absmax, plain)"
    assert mutate.verdict(changed("return fmaxf(a, b);", "return fmaxf(a, c);", "name"), suite, tmp_path / "b") == (
        "does not compile"
    )
    outcome = mutate.verdict(
        changed("__syncthreads(WARPSMITH_PASS_ONLY_SITE);", ";", "drop a block barrier"), suite, tmp_path / "c"
    )
    assert outcome.startswith("killed (sim_row_absmax")
    unseen = changed("return a + b;", "return a - b;", "swap")  # no test of the suite adds
    assert mutate.verdict(unseen, suite, tmp_path / "d") == "survived"
    verdicts.keep(key("chosen"))


def test_a_sample_of_mutants(verdicts, request, tmp_path: Path, figure) -> None:
    if verdicts.known(key("sample")):
        return
    suite = request.getfixturevalue("suite")
    sample = random.Random(2).sample([m for m in mutate.mutants_of(REDUCE) if "off by one" in m.what], 3)
    outcomes = [mutate.verdict(m, suite, tmp_path / str(i)) for i, m in enumerate(sample)]
    figure(f"mutants of csrc/device/reduce.h, the example kernel's test alone: {', '.join(outcomes)}")
    assert sum(v.startswith("killed") for v in outcomes) >= 2, list(zip(map(str, sample), outcomes, strict=True))
    verdicts.keep(key("sample"))


def test_only_lines_that_the_host_compiles_are_mutated() -> None:
    lines = (ROOT / "csrc" / "device" / "vector.h").read_text().splitlines()
    compiled = mutate.compiled_lines(ROOT / "csrc" / "device" / "vector.h")
    assert compiled and not [n for n in compiled if "asm volatile" in lines[n - 1]]


def test_an_op_is_mutated_with_what_its_family_shares() -> None:
    files = {f.name for f in mutate.files_of("norm")}
    assert {"norm.cu", "launch.h", "norm_config.h", "batches.cuh", "forward_bfloat16.cu"} <= files


def test_known_equivalents_are_mutants_still() -> None:
    for file, code in mutate.equivalents():
        assert code in {m.code for m in mutate.mutants_of(ROOT / file)}, f"{file}: no mutant gives: {code}"
