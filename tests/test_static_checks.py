"""What ptxas makes of every kernel: within the budget beside its config, with the instructions that it should have."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
import static_checks  # noqa: E402

OPS = static_checks.budgeted_ops()


def test_every_launcher_has_a_budget() -> None:
    launchers = sorted((ROOT / "csrc" / "kernels").rglob("*.cu"))
    missing = [f.name for f in launchers if f not in OPS]
    assert not missing, f"no <op>_budget.json beside {missing}"


@pytest.mark.skipif(static_checks.nvcc() is None, reason="no nvcc on this machine")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler for the sim")
@pytest.mark.parametrize(
    "source",
    # In the process that has built the op's sim tests.
    [pytest.param(s, id=s.stem, marks=pytest.mark.xdist_group(f"sim_{static_checks.sim_test(s)}")) for s in OPS],
)
def test_kernels_stay_within_their_budget(source: Path) -> None:
    problems = static_checks.check_op(source, launched=static_checks.launched_blocks(source))
    assert not problems, "\n".join(problems)


def test_every_op_that_is_named_is_checked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    checked = []
    monkeypatch.setattr(static_checks, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(static_checks, "check_op", lambda source, *_: checked.append(source.stem) or [source.stem])
    assert static_checks.main(["--op", "rope", "--op", "adamw"]) == 1
    assert sorted(checked) == ["adamw", "rope"] == sorted(capsys.readouterr().out.split()[-2:])
    checked.clear()
    assert static_checks.main([]) == 1 and checked == [source.stem for source in OPS]
    with pytest.raises(SystemExit):
        static_checks.main(["--op", "rope", "--op", "no_such_op"])
    assert "no_such_op" in capsys.readouterr().err


@pytest.mark.skipif(static_checks.nvcc() is None, reason="no nvcc on this machine")
@pytest.mark.skipif(static_checks.cuobjdump() is None, reason=static_checks.NO_CUOBJDUMP)
def test_sass_is_read(tmp_path: Path) -> None:
    source = tmp_path / "copy.cu"
    source.write_text("__global__ void __launch_bounds__(96) copy(const int4* x, int4* y) { *y = *x; }\n")
    budget = '{"registers": {"*": 32}, "sass": {"copy": ["LDG.E.128", "STG.E.128", "HGMMA"]}, "code_bytes": 16}'
    source.with_name("copy_budget.json").write_text(budget)
    problems = static_checks.check_op(source, launched={"_Z4copyPK4int4PS_": 128})
    assert len(problems) == 6 and {p.split(" ")[1] for p in problems} == {"sm_80:", "sm_90a:"}
    for part in ("no HGMMA in its SASS", "bytes of code, budget 16", "launched with 128 threads, compiled for 96"):
        assert sum(part in p for p in problems) == 2, problems


REPORT = """ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90a'
ptxas info    : Function properties for _Z1kPf
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 70 registers, used 1 barriers, 1024 bytes smem
"""


def test_spills_stack_and_registers_are_noticed() -> None:
    (kernel,) = static_checks.parse(REPORT)
    kernel.sass = Counter({"FADD": 5000})
    wrong = static_checks.check(kernel, {"registers": {"*": 64}, "shared_bytes": 512})
    assert [w.split(" ")[0] for w in wrong] == ["16", "20", "70", "1024", "80000"], wrong


def test_launches_that_do_not_fit_are_noticed() -> None:
    (kernel,) = static_checks.parse(REPORT)
    assert static_checks.check_launches([kernel], {"_Z1kPf": 896}) == []
    (too_many,) = static_checks.check_launches([kernel], {"_Z1kPf": 928})  # 72 registers for 29 warps
    assert "928 threads of 70 registers do not fit" in too_many
    kernel.max_threads = 256
    (beyond,) = static_checks.check_launches([kernel], {"_Z1kPf": 288})
    assert "launched with 288 threads, compiled for 256" in beyond
    (strangers,) = static_checks.check_launches([kernel], {"_Z1mPf": 32})
    assert "none of the kernels" in strangers and "m(float*)" in strangers


def test_launch_bounds_and_listings_are_read() -> None:
    ptx = ".visible .entry _Z1aPf(\n\t.param .u64 _Z1aPf_param_0\n)\n.maxntid 64, 2, 1\n{}\n.entry _Z1bv()\n{}\n"
    assert static_checks.launch_bounds(ptx) == {"_Z1aPf": 128}
    listing = """\t\tFunction : _Z1aPf
        /*0000*/                   LDC R1, c[0x0][0x28] ;    /* 0x00000a00ff017b82 */
                                                             /* 0x000fc00000000800 */
        /*0010*/              @!P0 LDG.E.128 R4, [R2.64] ;   /* 0x0000000402047981 */
        /*12340*/            @UP1 UIADD3 UR4, UR4, 0x1, URZ ; /* 0x0000000402047981 */
"""
    assert static_checks.disassembled(listing) == {"_Z1aPf": Counter(["LDC", "LDG.E.128", "UIADD3"])}
