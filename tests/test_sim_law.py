"""The law of every op holds for its CUDA kernels, run on the host execution layer: the specs of tests/ops, in a process
that has loaded kernels and bindings as one library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
import device_coverage  # noqa: E402
import library  # noqa: E402
import tiers  # noqa: E402
import verdicts as verdict  # noqa: E402

import build  # noqa: E402

IN_TURN = set(library.MACHINES) - library.COUNTED
pytestmark = pytest.mark.skipif(shutil.which("g++") is None and "CXX" not in build.os.environ, reason="no C++ compiler")


def laws():
    for family in library.FAMILIES:
        for machine in library.MACHINES:
            marks = [pytest.mark.xdist_group(f"sim law {family}")]
            marks += [pytest.mark.full] if machine != "sm90" else []
            marks += [pytest.mark.in_turn(library.CSRC / "kernels" / family, of=3)] if machine in IN_TURN else []
            yield pytest.param(family, machine, marks=marks, id=f"{family}-{machine}")


@pytest.mark.parametrize(("family", "machine"), [*laws()])
def test_the_law_holds_on_simulated_kernels(family: str, machine: str, request, record_property) -> None:
    counted, known = device_coverage.counted_law(family, machine, request.config.stash[tiers.PLAN].full)
    record_property("verdict", "known" if known else "made")
    record_property("sim coverage", str(counted))


def sanitized():
    for family in library.FAMILIES:
        kernels = library.CSRC / "kernels" / family
        marks = [pytest.mark.in_turn(kernels, of=8), *([pytest.mark.early] if tiers.lately(kernels) else [])]
        for variant in ("asan", "tsan"):
            group = pytest.mark.xdist_group(f"sim law {family} {variant}")
            yield pytest.param(family, variant, marks=[group, *marks], id=f"{family}-{variant}")


@pytest.mark.full
@pytest.mark.parametrize(("family", "variant"), [*sanitized()])
def test_sanitizers_find_nothing_in_the_law(family: str, variant: str, verdicts, sanitizers) -> None:
    runs = library.sanitized_runs(family, variant)
    key = device_coverage.law_key(family, variant, "sanitized", runs)
    if verdicts.known(verdict.with_imports(key)):
        return
    if not sanitizers.begin():
        pytest.skip(tiers.SANITIZED)
    started = time.monotonic()
    built = library.library(variant, family)
    imported: set[str] = set()
    for checks in runs:
        done = library.law(built, checks, timeout=1800, variant=variant)
        assert done.returncode == 0, library.failures(done)
        imported |= library.imported(done)
    sanitizers.end(time.monotonic() - started)
    verdicts.keep(verdict.keep_imports(key, imported))


CODES = {machine.code for machine in library.MACHINES.values()}
LONG_ROWS = """
import library; library.load()
import torch, warpsmith
x = torch.randn(4, 30_000, generator=torch.Generator().manual_seed(0), requires_grad=True)
weight = torch.ones(30_000, requires_grad=True)
print(torch.autograd.grad(warpsmith.layer_norm(x, weight).square().sum(), (x, weight))[0].double().sum().item())
"""


def test_the_code_asked_for_is_the_code_that_runs() -> None:
    """Rows that a cluster of sm_90 shares are added up in another order by code of sm_80."""
    sums = set()
    for code in CODES:
        paths = os.pathsep.join([str(ROOT / "tools/sim"), os.environ.get("PYTHONPATH", "")])
        env = {
            **os.environ,
            library.VARIABLE: str(library.library()),
            library.CODE: str(code),
            "PYTHONPATH": paths,
        }
        done = subprocess.run([sys.executable, "-c", LONG_ROWS], capture_output=True, text=True, env=env, check=True)
        sums.add(done.stdout)
    assert len(sums) == len(CODES)
