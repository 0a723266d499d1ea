"""The build backend and the CMake files: which torch, which compilers, which GPUs."""

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from environments import ROOT, STEERING, cpu_only, environment, run, succeed

HEADER = "include/torch/csrc/stable/library.h"
TORCH = Path(torch.__path__[0])


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.delenv("WARPSMITH_TORCH_DIR", raising=False)
    spec = importlib.util.spec_from_file_location("backend", ROOT / "build_backend/backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_torch(folder, version="2.11.0", header=True):
    folder.mkdir(parents=True)
    if version:
        (folder / "version.py").write_text(f"__version__ = '{version}'\n")
    if header:
        (folder / HEADER).parent.mkdir(parents=True)
        (folder / HEADER).write_text("")
    return folder


def test_the_torch_of_the_environment_is_found(backend):
    assert backend.find_torch() == TORCH
    assert not [r for r in backend.get_requires_for_build_wheel() if r.startswith("torch")]
    assert not [r for r in backend.get_requires_for_build_editable() if r.startswith("torch")]


def test_the_named_torch_comes_first(backend, tmp_path, monkeypatch):
    named = fake_torch(tmp_path / "named")
    monkeypatch.setenv("WARPSMITH_TORCH_DIR", str(named))
    assert backend.find_torch() == named


@pytest.mark.parametrize(
    ("version", "header", "message"),
    [
        ("2.10.0", True, "warpsmith: WARPSMITH_TORCH_DIR: expected torch >= 2.11, got 2.10 in "),
        ("2.13.0", False, "warpsmith: WARPSMITH_TORCH_DIR: expected the directory of a torch package with include/"),
        (None, False, "warpsmith: WARPSMITH_TORCH_DIR: expected the directory of a torch package with include/"),
    ],
)
def test_a_wrong_named_torch_is_refused(backend, tmp_path, monkeypatch, version, header, message):
    monkeypatch.setenv("WARPSMITH_TORCH_DIR", str(fake_torch(tmp_path / "named", version, header)))
    with pytest.raises(SystemExit) as refused:
        backend.find_torch()
    assert str(refused.value).startswith(message)


SPOILT = [None, {"version": None}, {"version": "unknown"}, {"header": False}, {"version": "2.9.1"}]


@pytest.mark.parametrize("spoilt", SPOILT, ids=str)
@pytest.mark.parametrize("place", ["imported", "platlib", "a folder of that name"])
def test_what_is_no_torch_to_build_against_is_passed_over(backend, tmp_path, monkeypatch, place, spoilt):
    """Of the places where a torch may be, the next is asked."""
    if spoilt is not None:
        fake_torch(tmp_path / place / "torch", **spoilt)
    good = fake_torch(tmp_path / "purelib/torch")
    origin = str(tmp_path / "imported/torch/__init__.py") if place == "imported" else None
    spec = None if place == "platlib" else SimpleNamespace(origin=origin)
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: spec)
    paths = {key: str(tmp_path / key) for key in ("platlib", "purelib")}
    monkeypatch.setattr(backend.sysconfig, "get_paths", lambda: paths)
    assert backend.find_torch() == good


def test_under_isolation_the_outer_site_packages_are_searched(backend, tmp_path, monkeypatch):
    outer = fake_torch(tmp_path / "torch", "2.12.1")
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(backend.sysconfig, "get_paths", lambda: {"platlib": str(tmp_path), "purelib": str(tmp_path)})
    assert backend.find_torch() == outer


def test_an_old_torch_is_passed_over_and_a_new_one_required(backend, tmp_path, monkeypatch, capsys):
    old = fake_torch(tmp_path / "torch", "2.9.1")
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(backend.sysconfig, "get_paths", lambda: {"platlib": str(tmp_path), "purelib": str(tmp_path)})
    assert backend.find_torch() is None
    assert f"warpsmith: ignoring torch 2.9 at {old}: expected 2.11 or newer" in capsys.readouterr().out
    for kind in ("wheel", "editable"):
        assert "torch>=2.11" in getattr(backend, f"get_requires_for_build_{kind}")()
        with pytest.raises(SystemExit, match=r"no torch >= 2\.11 found; install torch first or set WARPSMITH_TORCH"):
            getattr(backend, f"build_{kind}")(str(tmp_path))


def test_pip_shows_one_message_for_a_wrong_torch_directory(tmp_path):
    done = run(
        sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation",
        *cpu_only(tmp_path / "build"), "-w", tmp_path, ROOT, WARPSMITH_TORCH_DIR=str(tmp_path),
    )  # fmt: skip
    assert done.returncode != 0
    output = done.stdout + done.stderr
    message = f"warpsmith: WARPSMITH_TORCH_DIR: expected the directory of a torch package with {HEADER}, got {tmp_path}"
    assert output.count(message) == 1
    assert "Traceback" not in output


def configure(folder, *options, torch=TORCH, **changes):
    """CMake's output for the project without pip, and whether it succeeded."""
    if not shutil.which("cmake", path=environment()["PATH"]):
        pytest.skip("no cmake on PATH")
    pybind11 = pytest.importorskip("pybind11")
    done = run(
        "cmake", "-S", ROOT, "-B", folder, f"-DWARPSMITH_TORCH_DIR={torch}", "-DSKBUILD_PROJECT_VERSION=0",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", f"-DPython_EXECUTABLE={sys.executable}", *options, **changes,
    )  # fmt: skip
    # CMake breaks long messages into lines.
    return " ".join((done.stdout + done.stderr).split()), done.returncode == 0


NO_NVCC = {"CUDACXX": "/nonexistent/nvcc"}


def test_without_a_cuda_compiler_the_build_is_for_the_cpu(tmp_path):
    output, ok = configure(tmp_path, **NO_NVCC)
    assert ok, output
    assert "warpsmith: no CUDA compiler found (PATH, CUDACXX): building for the CPU only" in output


def test_a_folder_once_built_for_the_cpu_alone_does_not_stay_so(tmp_path):
    output, ok = configure(tmp_path, "-DWARPSMITH_CUDA=OFF", **NO_NVCC)
    assert ok, output
    assert "warpsmith: WARPSMITH_CUDA=OFF: building for the CPU only" in output
    output, ok = configure(tmp_path, **NO_NVCC)
    assert ok, output
    assert "warpsmith: no CUDA compiler found" in output


def test_a_required_cuda_compiler_that_is_missing_is_an_error(tmp_path):
    output, ok = configure(tmp_path, WARPSMITH_REQUIRE_CUDA="1", **NO_NVCC)
    assert not ok
    assert (
        "warpsmith: WARPSMITH_REQUIRE_CUDA=1, but no CUDA compiler was found. Put nvcc on PATH or set CUDACXX."
        in output
    )


def test_cmake_refuses_a_wrong_torch_directory(tmp_path):
    output, ok = configure(tmp_path / "build", torch=tmp_path, **NO_NVCC)
    assert not ok
    assert f"warpsmith: WARPSMITH_TORCH_DIR: expected a torch >= 2.11 package, got '{tmp_path}'" in output


CMAKE = "".join(file.read_text() for file in (ROOT / "CMakeLists.txt", *(ROOT / "csrc/cmake").glob("*.cmake")))
TO_THE_CACHE = re.findall(r'set\((\w+) "\$ENV\{(\w+)\}" CACHE', CMAKE)


def test_no_variable_that_cmake_reads_steers_these_tests():
    read = set(re.findall(r"\$ENV\{(\w+)\}", CMAKE))
    assert {name for _, name in TO_THE_CACHE} == {"WARPSMITH_TORCH_DIR", "WARPSMITH_CUBLAS_INCLUDE"}
    assert {name for _, name in TO_THE_CACHE} < read <= set(STEERING)


@pytest.mark.parametrize(("entry", "variable"), TO_THE_CACHE)
def test_the_environment_wins_over_a_folder_that_was_configured_before(tmp_path, entry, variable):
    for name in ("first", "second"):
        (tmp_path / name).symlink_to(TORCH)
        output, ok = configure(tmp_path / "build", **NO_NVCC, **{variable: str(tmp_path / name)})
        assert ok, output
        assert f"{entry}:PATH={tmp_path / name}\n" in (tmp_path / "build/CMakeCache.txt").read_text()


def parse_architectures(tmp_path, text):
    script = tmp_path / "parse.cmake"
    script.write_text(
        f'include("{ROOT}/csrc/cmake/torch_cuda_arch_list.cmake")\n'
        f'torch_cuda_arch_list("{text}" found)\nmessage("found=${{found}}")\n'
    )
    done = run("cmake", "-P", script)
    return " ".join(done.stderr.split()), done.returncode == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8.0", "80-real"),
        ("8.0;9.0a", "80-real;90a-real"),
        ("8.0 8.6, 9.0a+PTX", "80-real;86-real;90a"),
        ("8.0+PTX", "80"),
        ("10.0f 12.0", "100f-real;120-real"),
        ("9.0", "90a-real"),
        ("9.0+PTX", "90"),
        ("8.0+PTX 9.0+PTX", "80;90"),
        ("9.0 9.0a", "90a-real"),
        ("7.5 8.0 8.6 9.0 10.0 12.0+PTX", "80-real;86-real;90a-real;100-real;120"),
        (" 8.0 8.0 ", "80-real"),
    ],
)
def test_torch_cuda_arch_list_is_understood(tmp_path, text, expected):
    output, ok = parse_architectures(tmp_path, text)
    assert ok
    assert output == f"found={expected}"


PROJECT = """
cmake_minimum_required(VERSION 3.28)
project(toy LANGUAGES CXX CUDA)
set(warpsmith_cuda ON)
add_library(torch_stable INTERFACE)
function(add_cublas_lt target)
endfunction()
include("{ops}")
add_op_library(toy)
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
@pytest.mark.parametrize(
    ("architectures", "own", "others"),
    [
        ("80;90", "code=[sm_90a]", {"compute_80,code=[compute_80,sm_80]", "compute_90,code=[compute_90,sm_90]"}),
        ("90a-real", "code=[sm_90a]", {"compute_90a,code=[sm_90a]"}),
        ("80", None, {"compute_80,code=[compute_80,sm_80]"}),
    ],
)
def test_kernels_are_compiled_for_equal_architectures_but_sm90a(tmp_path, architectures, own, others):
    """The probe of csrc/device/code_probe.cu answers for all of them."""
    files = (
        "device/code_probe.cu",
        "kernels/a/a.cu",
        "kernels/b/b.cu",
        "kernels/b/hopper/b_sm90a.cu",
        "bindings/a.cpp",
        "cpu/a.cpp",
    )
    for name in files:
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"int {path.stem}_{path.suffix[1:]};\n")
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(ops=ROOT / "csrc/cmake/ops.cmake"))
    arguments = (f"-DCMAKE_CUDA_ARCHITECTURES={architectures}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON")
    succeed("cmake", "-G", "Ninja", "-S", tmp_path, "-B", tmp_path / "build", *arguments, CUDACXX=shutil.which("nvcc"))
    commands = json.loads((tmp_path / "build/compile_commands.json").read_text())
    flags = {
        Path(c["file"]).relative_to(tmp_path / "csrc").as_posix(): c["command"]
        for c in commands
        if c["file"].endswith(".cu")
    }
    assert set(flags) == {name for name in files if name.endswith(".cu") and (own or "sm90a" not in name)}
    for name, command in flags.items():
        generated = set(re.findall(r"--generate-code=arch=(\S+?)\"?(?= |$)", command.replace('"', "")))
        assert generated == ({f"compute_90a,{own}"} if "sm90a" in name else others), command
        assert "--expt-relaxed-constexpr" in command
    assert own is None or all("WARPSMITH_SM90A" in flags[name] for name in flags if "sm90a" not in name)


@pytest.mark.parametrize("text", ["Hopper", "90", "9.0b", "8.0+ptx", "sm_80", "8.0 9"])
def test_other_words_in_torch_cuda_arch_list_are_refused(tmp_path, text):
    output, ok = parse_architectures(tmp_path, text)
    assert not ok
    wrong = text.split()[-1]
    assert f"warpsmith: TORCH_CUDA_ARCH_LIST: expected entries like 8.0 or 9.0a+PTX, got {wrong}" in output


def test_a_torch_cuda_arch_list_of_old_gpus_alone_is_refused(tmp_path):
    output, ok = parse_architectures(tmp_path, "7.0 7.5+PTX")
    assert not ok
    assert "warpsmith: TORCH_CUDA_ARCH_LIST: expected a GPU of 8.0 or newer, got 7.0 7.5+PTX" in output


@pytest.mark.parametrize(
    ("cores", "gib", "jobs"), [(2, 64.0, 2), (16, 64.0, 16), (64, 64.0, 32), (8, 5.9, 2), (8, 1.0, 1), (None, 8.0, 1)]
)
def test_as_many_files_compile_at_a_time_as_memory_holds(backend, monkeypatch, cores, gib, jobs):
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "")  # so that what the backend sets is taken back afterwards
    monkeypatch.delenv("CMAKE_BUILD_PARALLEL_LEVEL")
    monkeypatch.setattr(backend.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(backend, "_memory_gib", lambda: gib)
    monkeypatch.setenv("WARPSMITH_TORCH_DIR", str(TORCH))
    backend._configure()
    assert os.environ["CMAKE_BUILD_PARALLEL_LEVEL"] == str(jobs)


def test_a_number_that_was_asked_for_stays(backend, monkeypatch):
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "3")
    monkeypatch.setenv("WARPSMITH_TORCH_DIR", str(TORCH))
    backend._configure()
    assert os.environ["CMAKE_BUILD_PARALLEL_LEVEL"] == "3"


def test_memory_is_the_machines_or_8_gib_where_it_does_not_say(backend, monkeypatch):
    assert 0.1 < backend._memory_gib() < 2**20

    def unknown(name):
        raise ValueError(name)

    monkeypatch.setattr(backend.os, "sysconf", unknown)
    assert backend._memory_gib() == 8.0
