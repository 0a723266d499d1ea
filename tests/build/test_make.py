"""What `make train` and `make test` would do in a fresh clone, by a dry run."""

import re
import shutil

import pytest
from environments import ROOT, run

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="no make on PATH")


def commands(target, folder):
    done = run("make", "-n", "-C", ROOT, target, f"VIRTUAL_ENV={folder / 'venv'}")
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
