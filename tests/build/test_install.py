"""An sdist, and the wheel built from it, in a fresh environment; what the op library is made of."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from environments import IN_ONE_PROCESS, ROOT, Environment, cpu_only, run, succeed

pytestmark = IN_ONE_PROCESS
MIB = 2**20
WHEEL_LIMIT_BYTES = 64 * MIB
CPU_BUILD_LIMIT_S = 2 * 120  # of processor time: the budget is two minutes of two cores
USE = """
import sys, torch, warpsmith
assert warpsmith.__file__.startswith(sys.prefix), warpsmith.__file__
x = torch.randn(4, 64, requires_grad=True)
y = warpsmith.rms_norm(x)
assert torch.allclose(y, torch.nn.functional.rms_norm(x, (64,)), atol=1e-6)
y.sum().backward()
layer = warpsmith.nn.RMSNorm(64)
warpsmith.optim.AdamW(layer.parameters()).zero_grad()
print("used", warpsmith.__version__)
"""


def assert_works(environment):
    done = environment.run(USE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("used ")
    facts = json.loads(succeed(environment.python, "-m", "warpsmith", "info", "--json"))
    assert facts["problems"] == []
    assert str(environment.site_packages) in facts["library"]


def test_a_wheel_installs_into_a_fresh_environment(installed):
    assert_works(installed)
    assert (installed.site_packages / "warpsmith/py.typed").exists()
    assert (installed.site_packages / "warpsmith/_C.pyi").exists()
    directory = succeed(installed.python, "-m", "warpsmith", "info", "--cmake-dir").strip()
    assert directory == str(installed.site_packages / "warpsmith/cmake")


def test_pip_takes_the_sdist(sdist, wheel, tmp_path):
    # The rest of such an install is what `installed` is: a wheel from what the sdist holds, in a fresh environment.
    environment = Environment.create(tmp_path / "venv")
    text = environment.install("--dry-run", *cpu_only(tmp_path / "build"), sdist)
    assert "Would install warpsmith-" + wheel.path.name.split("-")[1] in text


def test_an_editable_install_finds_library_headers_and_sources(wheel, unpacked, tmp_path):
    environment = Environment.create(tmp_path / "venv")
    environment.install(*cpu_only(wheel.build_dir), "-e", unpacked)  # compiled already
    where = environment.run("import warpsmith; print(warpsmith.__file__)")
    assert where.returncode == 0, where.stderr
    assert where.stdout.startswith(str(unpacked / "python/warpsmith"))
    directory = succeed(environment.python, "-m", "warpsmith", "info", "--cmake-dir").strip()
    assert directory == str(environment.site_packages / "warpsmith/cmake")
    assert (environment.site_packages / "warpsmith/include/warpsmith/norm.h").exists()


@pytest.mark.slow
def test_build_isolation_takes_the_torch_of_the_environment(tmp_path):
    # Downloads the build tools, not torch: its headers are found in the environment that started the build.
    environment = Environment.create(tmp_path / "venv")
    succeed(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "-v", *cpu_only(tmp_path / "build"), "-w", tmp_path, ROOT
    )
    (wheel,) = tmp_path.glob("*.whl")
    environment.install(wheel)
    assert_works(environment)


def test_budgets_of_the_cpu_build(wheel, sdist):
    sizes = [path.stat().st_size / MIB for path in (wheel.path, sdist)]
    print(f"CPU wheel: {sizes[0]:.2f} MiB, built in {wheel.seconds:.0f} s of one core; sdist: {sizes[1]:.2f} MiB")
    assert wheel.path.stat().st_size <= WHEEL_LIMIT_BYTES
    assert wheel.seconds <= CPU_BUILD_LIMIT_S


def test_the_build_has_no_warnings(wheel):
    """The compiler's are errors anyhow; with link-time optimisation some come only from the linker."""
    assert "Linking CXX" in wheel.output
    assert not [line for line in wheel.output.splitlines() if " warning: " in line]


def test_the_wheel_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel.path).namelist()
    assert {n.split("/")[0].split("-")[0] for n in names} == {"warpsmith"}
    assert not [n for n in names if n.endswith((".cpp", ".cu", ".cuh", ".o"))]
    assert any(re.search(r"licenses/LICENSE$", n) for n in names)


def test_the_sdist_holds_what_a_build_needs_and_no_build(sdist):
    with tarfile.open(sdist) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    for needed in (
        "CMakeLists.txt",
        "build_backend/backend.py",
        "csrc/bindings/norm.cpp",
        "python/warpsmith/_C.pyi",
        "LICENSE",
    ):
        assert needed in names
    assert not [n for n in names if n.startswith(("build/", ".git/", "runs/")) or n.endswith((".so", ".pyc"))]


@pytest.fixture
def library(installed):
    (path,) = (installed.site_packages / "warpsmith").glob("libwarpsmith_ops.*")
    return path


def readelf(option, path):
    if not sys.platform.startswith("linux") or not shutil.which("readelf"):
        pytest.skip("needs Linux and readelf")
    return succeed("readelf", option, "-W", path)


# The C and C++ run-time libraries, which every Linux has.
SYSTEM = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}


def test_the_library_needs_libtorch_alone_and_stores_no_path(library):
    dynamic = readelf("-d", library)
    needed = {n for n in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic) if not n.startswith("ld-linux")}
    assert needed - SYSTEM == {"libtorch.so"}
    assert not re.search(r"\((RPATH|RUNPATH)\)", dynamic)


def test_the_host_module_knows_no_torch(installed):
    (module,) = (installed.site_packages / "warpsmith").glob("_C.*.so")
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("-d", module)))
    assert needed <= SYSTEM | {n for n in needed if n.startswith("ld-linux")}


def test_the_library_exports_nothing_of_its_own(library):
    exported = [
        line.split()[-1]
        for line in readelf("--dyn-syms", library).splitlines()
        if re.search(r"\s(GLOBAL|WEAK|UNIQUE)\s+DEFAULT\s+\d+\s", line)
    ]
    ours = [name for name in exported if "warpsmith" in name or "rms_norm" in name or "adamw" in name]
    assert ours == []


def test_the_library_keeps_to_the_stable_abi(library):
    pytest.importorskip("torch_abi_audit")
    done = run(
        sys.executable,
        "-c",
        "import sys; from torch_abi_audit.cli import main; sys.exit(main())",
        library,
        "--check",
        "torch",
        "--json",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (audited,) = json.loads(done.stdout)["bundled_libs"]
    assert audited["torch"]["uses_torch"]
    assert audited["torch"]["stable"]
    assert tuple(map(int, audited["torch"]["min_torch_version"].split("."))) <= (2, 11, 0)


OLD_TORCH_PYTHON = os.environ.get("WARPSMITH_TORCH211_PYTHON")


@pytest.mark.slow
@pytest.mark.skipif(
    not OLD_TORCH_PYTHON,
    reason="WARPSMITH_TORCH211_PYTHON does not name the Python 3.12 of an environment with a CUDA build of torch 2.11",
)
def test_the_same_library_loads_into_torch_211_of_another_python(library):
    code = f"""
import json, sys, torch
torch.ops.load_library({str(library)!r})
x = torch.randn(8, 96, dtype=torch.float64)
y, rstd = torch.ops.warpsmith.rms_norm_forward(x, None, 1e-6, 0.0)
error = (y - torch.nn.functional.rms_norm(x, (96,), eps=1e-6)).abs().max().item()
try:
    torch.ops.warpsmith.rms_norm_forward(x, x[0, :3], 1e-6, 0.0)
    refused = ""
except (ValueError, RuntimeError) as problem:
    refused = str(problem)
print(json.dumps([list(sys.version_info[:2]), torch.__version__, torch.version.cuda, error, refused]))
"""
    done = subprocess.run([OLD_TORCH_PYTHON, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    python, version, cuda, error, refused = json.loads(done.stdout.splitlines()[-1])
    assert python == [3, 12]
    assert version.startswith("2.11.")
    assert cuda is not None
    assert error < 1e-12
    assert "rms_norm: weight: expected shape (96), got (3)" in refused
