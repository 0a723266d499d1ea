"""What ptxas says about every kernel: no spills, no stack frame, registers within the budget beside its config."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
import static_checks  # noqa: E402

OPS = [
    pytest.param(f, id=f.stem, marks=pytest.mark.xdist_group(f"static checks of {f.stem}"))
    for f in static_checks.budgeted_ops()
]


def test_every_launcher_has_a_budget() -> None:
    launchers = sorted((ROOT / "csrc" / "kernels").rglob("*.cu"))
    missing = [f.name for f in launchers if f not in static_checks.budgeted_ops()]
    assert not missing, f"no <op>_budget.json beside {missing}"


@pytest.mark.skipif(static_checks.nvcc() is None, reason="no nvcc on this machine")
@pytest.mark.parametrize("source", OPS)
def test_kernels_stay_within_their_budget(source: Path) -> None:
    problems = static_checks.check_op(source)
    assert not problems, "\n".join(problems)


REPORT = """ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90a'
ptxas info    : Function properties for _Z1kPf
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 70 registers, used 1 barriers, 1024 bytes smem
"""


def test_spills_stack_and_registers_are_noticed() -> None:
    (kernel,) = static_checks.parse(REPORT)
    wrong = static_checks.check(kernel, {"registers": {"*": 64}, "shared_bytes": 512})
    assert [w.split(" ")[0] for w in wrong] == ["16", "20", "70", "1024"], wrong
