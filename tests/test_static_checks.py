"""What ptxas makes of every kernel: within the budget beside its config, with the instructions that it should have."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "sim"))
import cuda  # noqa: E402
import static_checks  # noqa: E402

from tools import compare_sass  # noqa: E402

OPS = static_checks.budgeted_ops()


def test_every_launcher_has_a_budget() -> None:
    launchers = sorted((ROOT / "csrc" / "kernels").rglob("*.cu"))
    missing = [f.name for f in launchers if f not in OPS and static_checks.holds_kernels(f)]
    assert not missing, f"no <op>_budget.json beside {missing}"


needs_tools = [
    pytest.mark.skipif(cuda.nvcc() is None, reason="no nvcc on this machine"),
    pytest.mark.skipif(cuda.cuobjdump() is None, reason=cuda.NO_CUOBJDUMP),
]


def with_tools(test):
    for mark in needs_tools:
        test = mark(test)
    return test


def test_budgets_name_kernels_that_exist() -> None:
    """A family's budget is for all of its .cu files, none of which has every kernel that it names."""
    shared = [*(ROOT / "csrc" / "tiles").glob("*.cuh")]
    for budget in (ROOT / "csrc" / "kernels").rglob("*_budget.json"):
        own = [p for p in static_checks.build.family_folder(budget).rglob("*.*") if p.suffix in (".cu", ".cuh")]
        sources = "".join(p.read_text() for p in own + shared)
        named = {*json.loads(budget.read_text())["registers"], *json.loads(budget.read_text()).get("sass", {})} - {"*"}
        unknown = [name for name in named if not re.search(rf"\b{name}\(", sources)]
        assert not unknown, f"{budget.name} names {unknown}"


@with_tools
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler for the sim")
@pytest.mark.parametrize(
    "source",
    [pytest.param(s, id=s.stem, marks=pytest.mark.xdist_group(static_checks.group(s))) for s in OPS],
)
def test_kernels_stay_within_their_budget(source: Path, verdicts) -> None:
    if verdicts.known(static_checks.key(source)):
        return
    problems = static_checks.check_op(source, launched=static_checks.launches(source))
    assert not problems, "\n".join(problems)
    verdicts.keep(static_checks.key(source))


@with_tools
def test_the_packages_own_objects_are_read_where_they_are_fresh(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = {source: cuda.package_object(source) for source in OPS if source.is_relative_to(ROOT / "csrc")}
    built = [source for source, path in found.items() if path]
    if not built:
        pytest.skip("the package was built without CUDA, or not as the sources are now")
    monkeypatch.setattr(cuda, "compile_object", lambda *_: pytest.fail("compiled a second time"))
    smallest = min(built, key=lambda source: found[source].stat().st_size)
    held = cuda.extract(found[smallest], tmp_path)
    wanted = [a for a in static_checks.ARCHITECTURES if a in held]
    assert wanted
    monkeypatch.setattr(static_checks, "ARCHITECTURES", wanted)
    assert static_checks.check_op(smallest) == []


def test_an_object_older_than_its_source_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ninja = pytest.importorskip("ninja")
    monkeypatch.setattr(cuda, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", ninja.BIN_DIR, prepend=os.pathsep)
    source, target = tmp_path / "a.cu", "CMakeFiles/warpsmith_ops.dir/a.cu.o"
    folder = tmp_path / "build" / "cp311"
    (folder / target).parent.mkdir(parents=True)
    assert cuda.package_object(source) is None
    header = tmp_path / "a.h"
    source.write_text("")
    header.write_text("")
    (folder / target).write_text("")
    rule = f"rule copy\n  command = cp $in $out && echo '$out: {header}' > d\n  depfile = d\n  deps = gcc\n"
    (folder / "build.ninja").write_text(f"{rule}build {target}: copy {source}\n")
    assert cuda.package_object(source) is None  # not built by these rules
    subprocess.run([Path(ninja.BIN_DIR) / "ninja"], cwd=folder, check=True, capture_output=True)
    assert cuda.package_object(source) == folder / target
    os.utime(header, ns=(2**61, 2**61))
    assert cuda.package_object(source) is None


def test_every_op_that_is_named_is_checked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    checked = []
    monkeypatch.setattr(cuda, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(cuda, "cuobjdump", lambda: "cuobjdump")
    monkeypatch.setattr(static_checks, "check_op", lambda source, *_: checked.append(source.stem) or [source.stem])
    assert static_checks.main(["--op", "rope", "--op", "optim"]) == 1
    assert sorted(checked) == ["optim", "rope"] == sorted(capsys.readouterr().out.split()[-2:])
    checked.clear()
    assert static_checks.main([]) == 1 and checked == [source.stem for source in OPS]
    with pytest.raises(SystemExit):
        static_checks.main(["--op", "rope", "--op", "no_such_op"])
    assert "no_such_op" in capsys.readouterr().err


@with_tools
def test_sass_is_read(tmp_path: Path) -> None:
    source = tmp_path / "copy.cu"
    source.write_text("__global__ void __launch_bounds__(96) copy(const int4* x, int4* y) { *y = *x; }\n")
    budget = '{"registers": {"*": 32}, "sass": {"copy": ["LDG.E.128", "STG.E.128", "HGMMA"]}, "code_bytes": 16}'
    source.with_name("copy_budget.json").write_text(budget)
    launched = {"_Z4copyPK4int4PS_": static_checks.Launched(128)}
    problems = static_checks.check_op(source, launched=dict.fromkeys(static_checks.ARCHITECTURES, launched))
    assert len(problems) == 6 and {p.split(" ")[1] for p in problems} == {"sm_80:", "sm_90:"}
    strangers = {"sm_80": {"_Z1mPf": launched["_Z4copyPK4int4PS_"]}, "sm_90": launched}
    assert not any("none of the kernels" in p for p in static_checks.check_op(source, launched=strangers))
    (*_, none) = static_checks.check_op(source, launched={**strangers, "sm_90": {}})
    assert none == "copy: none of the kernels that the sim launched is compiled: ['m(float*)']"
    for part in ("no HGMMA in its SASS", "bytes of code, budget 16", "launched with 128 threads, compiled for 96"):
        assert sum(part in p for p in problems) == 2, problems


def sass(name: str, instruction: str, architecture: str = "sm_80", unnamed: str = "4cc366e5_7_norm_cu_d9575be3") -> str:
    """As cuobjdump prints a kernel of an unnamed namespace."""
    half = "/* 0x000fe40000000f00 */"
    lines = f"        /*0000*/    {instruction} ;    /* 0x00000a0000017a02 */\n        {half}\n"
    space = f"_GLOBAL__N__{unnamed}"
    return f"\tcode for {architecture}\n\t\tFunction : _ZN9warpsmith{len(space)}{space}{name}\n{lines}"


def test_compared_code_differs_by_instructions_alone() -> None:
    def found(*listings: str) -> list[str]:
        return compare_sass.differences(*(compare_sass.kernels(listing.splitlines()) for listing in listings))

    before = sass("3sumEv", "FADD R1, R2, R3") + sass("3maxEv", "FMNMX R1, R2, R3, PT")
    moved = "01234567_15_forward_row_cu_89abcdef"
    again = sass("3maxEv", "FMNMX  R1, R2, R3, PT", unnamed=moved) + sass("3sumEv", "FADD R1, R2, R3", unnamed=moved)
    assert found(before, again) == []
    other = again.replace("FADD R1, R2, R3", "FADD R1, R2, R4")
    assert found(before, other) == ["sm_80 _ZN9warpsmithunnamed3sumEv: other instructions"]
    for encoding in ("0x00000a0000017a02", "0x000fe40000000f00"):
        assert len(found(before, again.replace(encoding, "0x00000a0000017a03", 1))) == 1
    assert found(before, again + sass("3minEv", "EXIT", "sm_90")) == ["sm_90 _ZN9warpsmithunnamed3minEv: only after"]
    assert found(again + again, before) == [
        f"sm_80 _ZN9warpsmithunnamed3{name}Ev: other instructions" for name in ("max", "sum")
    ]


SPILLING = """
__global__ void __launch_bounds__(1024, 2) spill(const float* x, float* y) {
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = x[i * blockDim.x + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) y[i * blockDim.x + threadIdx.x] = a[i] * a[(i + 7) % 64] + a[i * 31 % 64];
}
"""
SERIALISED = """
#include "device/wgmma.h"
using namespace warpsmith;
__global__ void __launch_bounds__(128) accumulate(const uint64_t* operands, float* out, int n) {
  float sums[64] = {};
  for (int i = 0; i < n; ++i) {
    device::wgmma_fence();
    for (int k = 0; k < 4; ++k)
      device::wgmma<bfloat16, 128, device::Major::k, device::Major::k>(sums, operands[0] + k, operands[1] + k, true);
    device::wgmma_commit();
    READ_IN_FLIGHT
    device::wgmma_wait<0>();
  }
  for (int i = 0; i < 64; ++i) out[threadIdx.x * 64 + i] = sums[i];
}
"""


def compiled(tmp_path: Path, text: str, architecture: str) -> static_checks.Kernel:
    source = tmp_path / "one.cu"
    source.write_text(text)
    code = cuda.extract(cuda.compile_object(source, architecture, tmp_path), tmp_path)
    (kernel,) = static_checks.kernels_of(code[architecture])
    return kernel


@with_tools
@pytest.mark.parametrize("architecture", static_checks.ARCHITECTURES)
def test_spills_are_noticed(tmp_path: Path, architecture: str) -> None:
    wrong = static_checks.check(compiled(tmp_path, SPILLING, architecture), {"registers": {}})
    assert [w.split(" ", 1)[1] for w in wrong] == ["bytes of stack", "spilling instructions (STL, LDL)"]


@with_tools
def test_wgmmas_that_wait_for_each_other_are_noticed(tmp_path: Path) -> None:
    right = compiled(tmp_path, SERIALISED.replace("READ_IN_FLIGHT", ""), "sm_90a")
    assert right.most_wgmmas == 4 and static_checks.check(right, {"registers": {}}) == []
    wrong = compiled(tmp_path, SERIALISED.replace("READ_IN_FLIGHT", "out[i] = sums[3]; sums[5] += 1;"), "sm_90a")
    (found,) = static_checks.check(wrong, {"registers": {}})
    assert "wgmmas wait for each other" in found


USAGE = """Resource usage:
 Common:
  GLOBAL:0
 Function _Z1kPf:
  REG:70 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:372 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_stack_registers_shared_memory_and_code_are_noticed() -> None:
    (kernel,) = static_checks.parse(USAGE)
    kernel.sass = Counter({"FADD": 4990, "STL.64": 4, "LDL": 6})
    wrong = static_checks.check(kernel, {"registers": {"*": 64}, "shared_bytes": 512})
    assert [w.split(" ")[0] for w in wrong] == ["16", "10", "70", "1024", "80000"], wrong


def test_launches_that_do_not_fit_are_noticed() -> None:
    (kernel,) = static_checks.parse(USAGE)
    launched = static_checks.Launched
    assert static_checks.check_launches([kernel], {"_Z1kPf": launched(896)}) == []
    (too_many,) = static_checks.check_launches([kernel], {"_Z1kPf": launched(928)})  # 72 registers for 29 warps
    assert "928 threads of 70 registers do not fit" in too_many
    kernel.max_threads = 256
    (beyond,) = static_checks.check_launches([kernel], {"_Z1kPf": launched(288)})
    assert "launched with 288 threads, compiled for 256" in beyond


@with_tools
def test_launches_that_ask_for_what_the_code_lacks_are_noticed(tmp_path: Path) -> None:
    """One kernel has what its launches ask for, one has not; of sm_80's code neither has."""
    source = tmp_path / "asks.cu"
    source.write_text(
        '#include "device/bulk_copy.h"\n#include "device/cluster.h"\n#include "device/programmatic_launch.h"\n'
        'using namespace warpsmith;\nextern "C" __global__ void has(float* x) {\n'
        "  __shared__ device::Mbarrier full;\n  __shared__ int4 tile;\n  device::wait_for_previous_kernel();\n"
        "  device::cluster_barrier();\n  device::bulk_load(&tile, x, 16, &full);\n  device::mbarrier_wait(&full, 0);\n"
        '  x[0] = tile.x;\n}\nextern "C" __global__ void lacks(float* x) { x[0] = 1; }\n'
    )
    source.with_name("asks_budget.json").write_text('{"registers": {"*": 64}}')
    asks_all = static_checks.Launched(32, frozenset(static_checks.ASKED))
    launched = dict.fromkeys(static_checks.ARCHITECTURES, {"has": asks_all, "lacks": asks_all})
    problems = static_checks.check_op(source, launched=launched)
    assert len(problems) == 9, problems
    assert sum("sm_80: has: a launch asks for" in p for p in problems) == 3
    assert sum(": lacks: a launch asks for" in p for p in problems) == 6
    assert any(p.endswith("asks for programmatic, its machine code has no ACQBULK") for p in problems)


def test_launch_bounds_and_listings_are_read() -> None:
    elf = """.nv.info._Z1aPf
\t<0x1>
\tAttribute:\tEIATTR_REGCOUNT
.nv.info._Z1bv
\t<0x5>
\tAttribute:\tEIATTR_MAX_THREADS
\tFormat:\tEIFMT_SVAL
\tValue:\t0x40 0x2 0x1\x20

"""
    assert static_checks.launch_bounds(elf) == {"_Z1bv": 128}
    listing = """\t\tFunction : _Z1aPf
        /*0000*/                   LDC R1, c[0x0][0x28] ;    /* 0x00000a00ff017b82 */
                                                             /* 0x000fc00000000800 */
        /*0010*/              @!P0 LDG.E.128 R4, [R2.64] ;   /* 0x0000000402047981 */
        /*12340*/            @UP1 UIADD3 UR4, UR4, 0x1, URZ ; /* 0x0000000402047981 */
        /*12350*/                   R2UR UR4, R2 ;           /* 0x0000000402047981 */
        /*12360*/                   HGMMA.64x8x16.F32 R4, gdesc[UR4], R4 ; /* 0x0000000402047981 */
"""
    functions, most, moved = static_checks.disassembled(listing)
    assert functions == {"_Z1aPf": Counter(["LDC", "LDG.E.128", "UIADD3", "R2UR", "HGMMA.64x8x16.F32"])}
    assert most["_Z1aPf"] == moved["_Z1aPf"] == 1
