"""What `make train` and `make test` would do in a fresh clone, by a dry run."""

import os
import re
import shutil

import pytest
from environments import ROOT, environment, run

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="no make on PATH")


def commands(target, folder, stamps=(), gpu=False):
    """What make would do with these stamps in its environment, and a GPU or none."""
    kept = folder / "venv/.warpsmith"
    if stamps:
        kept.mkdir(parents=True)
    for name in ("environment", "torch", "needed", "tools", *stamps) if stamps else ():
        (kept / name).touch()
    (folder / "bin").mkdir(exist_ok=True)
    smi = folder / "bin/nvidia-smi"  # as it answers with a GPU, and where only the driver's tools are there
    smi.write_text(f"#!/bin/sh\necho '{'GPU 0: NVIDIA H200' if gpu else 'No devices found'}'; exit {0 if gpu else 6}\n")
    smi.chmod(0o755)
    path = os.pathsep.join([str(folder / "bin"), environment()["PATH"]])
    done = run("make", "-n", "-C", ROOT, target, f"VIRTUAL_ENV={folder / 'venv'}", PATH=path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_installs_no_tools_for_developers(tmp_path):
    training, testing = commands("train", tmp_path), commands("test", tmp_path)
    everything = "-r requirements-dev.txt"
    assert everything not in training
    assert everything in testing
    needed = re.search(r"-c requirements-dev.txt (.+)", training)[1].split()
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    assert set(needed) < set(pinned)
    assert not {"ruff", "mypy", "pytest", "sphinx"} & set(needed)


def test_an_environment_is_made_before_anything_is_installed(tmp_path):
    lines = commands("train", tmp_path).splitlines()
    steps = ["-m venv", "torch==", "-c requirements-dev.txt", "--no-build-isolation", "examples/train_gpt.py"]
    found = [next(i for i, line in enumerate(lines) if step in line) for step in steps]
    assert found == sorted(found)


CPU_ALONE = "WARPSMITH_CUDA=OFF"
BUILDS = "--force-reinstall"


def test_training_without_a_gpu_builds_the_cpu_library_alone(tmp_path):
    training = commands("train", tmp_path)
    assert CPU_ALONE in training
    assert "no GPU is visible: building the CPU library alone" in training
    assert CPU_ALONE not in commands("test", tmp_path)


def test_training_with_a_gpu_builds_for_it(tmp_path):
    training = commands("train", tmp_path, gpu=True)
    assert BUILDS in training
    assert CPU_ALONE not in training


@pytest.mark.parametrize("gpu", [False, True])
def test_what_the_tests_built_serves_training(tmp_path, gpu):
    assert BUILDS not in commands("train", tmp_path, ["package"], gpu)


def test_what_was_built_for_training_does_not_serve_the_tests(tmp_path):
    training = commands("train", tmp_path, ["package-cpu"])
    assert BUILDS not in training
    testing = commands("test", tmp_path)
    assert BUILDS in testing
    assert CPU_ALONE not in testing
    removed = re.search(r"rm -f (\S+)\n", testing)[1]
    assert removed == f"{tmp_path}/venv/.warpsmith/package-cpu"  # or training would go on without CUDA's
    assert BUILDS in commands("train", tmp_path, gpu=True)


def test_tests_run_in_three_processes_and_ci_calls_the_same(tmp_path):
    assert "-m pytest -n 3 --dist loadgroup" in commands("test", tmp_path)
    assert "test ARGS=--full\n" in (ROOT / ".ci/run").read_text()


def test_ccache_compiles_where_it_is_installed_and_nothing_else_is_named(tmp_path):
    (tmp_path / "Makefile").write_text(f"include {ROOT}/Makefile\nshow:\n\t@echo $$CMAKE_CXX_COMPILER_LAUNCHER\n")
    (tmp_path / "ccache").touch(mode=0o755)
    for own, expected in (
        ({"PATH": f"{tmp_path}"}, "ccache"),
        ({"PATH": f"{tmp_path}", "CMAKE_CXX_COMPILER_LAUNCHER": "mine"}, "mine"),
        ({"PATH": f"{tmp_path}/nothing"}, ""),
    ):
        assert run(shutil.which("make"), "-s", "-C", tmp_path, "show", **own).stdout.strip() == expected


def test_a_folder_may_have_a_space_in_its_name(tmp_path):
    folder = tmp_path / "my projects"
    for name in ("csrc", "build_backend", "python"):
        (folder / name).mkdir(parents=True)
    for name in ("CMakeLists.txt", "pyproject.toml", "requirements-dev.txt"):
        (folder / name).touch()
    shutil.copy(ROOT / "Makefile", folder)
    done = run("make", "-n", "-C", folder, "test", "VIRTUAL_ENV=", "CONDA_PREFIX=")
    assert done.returncode == 0
    assert done.stderr == ""
    stamps = re.findall(r"touch (.+)", done.stdout)
    assert stamps == [f".venv/.warpsmith/{name}" for name in ("environment", "torch", "needed", "tools", "package")]
