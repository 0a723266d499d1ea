"""The law of every op holds for its CUDA kernels, run on the host execution layer: the specs of tests/ops, in a process
that has loaded kernels and bindings as one library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
import device_coverage  # noqa: E402
import library  # noqa: E402
import verdicts as verdict  # noqa: E402

import build  # noqa: E402

TOOLS = [Path(__file__), Path(library.__file__), Path(device_coverage.__file__)]
GROUPS = [
    pytest.param(spec, marks=pytest.mark.xdist_group(f"sim law {library.family_of(spec)}"), id=spec.stem)
    for spec in library.specs()
]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None and "CXX" not in build.os.environ, reason="no C++ compiler")


def key(spec: Path, *how: object) -> str:
    made = library.key("coverage", library.family_of(spec))
    return verdict.key("sim law", [made], [spec.name, *how], [*TOOLS, *library.python_sources()])


@pytest.mark.parametrize("code", library.ASKED)
@pytest.mark.parametrize("spec", GROUPS)
def test_the_law_holds_on_simulated_kernels(spec: Path, code: int, verdicts, record_property) -> None:
    counted = build.BUILD / "coverage" / f"{spec.stem}-{code}.json"
    known = verdicts.known(key(spec, code))
    if known:
        counted.parent.mkdir(parents=True, exist_ok=True)
        counted.write_text(known.value)
    else:
        done, folder = device_coverage.run_law(spec, code)
        assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
        counts = device_coverage.Coverage()
        counts.add(folder)
        counts.dump(counted)
        verdicts.keep(key(spec, code), counted.read_text())
    record_property("sim coverage", str(counted))


@pytest.mark.full
@pytest.mark.parametrize("spec", [s for s in GROUPS if s.id in ("test_rope",)])
def test_the_law_holds_under_the_address_sanitizer(spec: Path, verdicts) -> None:
    """Tensors of torch have guards of their own there: a kernel that reads one element too many is found."""
    if verdicts.known(key(spec, "asan")):
        return
    built = library.library("asan", library.family_of(spec))
    done = library.law(built, library.checks(spec), timeout=900, variant="asan")
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    verdicts.keep(key(spec, "asan"))


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
    for code in library.ASKED:
        paths = os.pathsep.join([str(ROOT / "tools/sim"), os.environ.get("PYTHONPATH", "")])
        env = {
            **os.environ,
            library.VARIABLE: str(library.library()),
            library.CODE: str(code),
            "PYTHONPATH": paths,
        }
        done = subprocess.run([sys.executable, "-c", LONG_ROWS], capture_output=True, text=True, env=env, check=True)
        sums.add(done.stdout)
    assert len(sums) == len(library.ASKED)
