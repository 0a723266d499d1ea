"""The package, compiled once for these tests: an sdist, a wheel built from it, a fresh environment with the wheel."""

import os
import resource
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from environments import ROOT, Environment, ccache_of, cpu_only, succeed


def processor_seconds():
    """What child processes have used so far; the clock would measure what else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Built(NamedTuple):
    """A wheel, the processor seconds that its build took, the folder in which it was compiled, what it printed."""

    path: Path
    seconds: float
    build_dir: Path
    output: str


@pytest.fixture(scope="session")
def unpacked(sdist, tmp_path_factory):
    """The source tree that the sdist holds."""
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(sdist, folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


@pytest.fixture(scope="session")
def wheel(unpacked, tmp_path_factory):
    """A CPU wheel, built from what the sdist holds and nothing else. ccache compiles it where verdicts may be kept."""
    folder = tmp_path_factory.mktemp("wheel")
    kept = shutil.which("ccache") and os.environ.get("WARPSMITH_CACHE") != "off"
    compiler = ccache_of(tmp_path_factory.getbasetemp()) if kept else {}
    before = processor_seconds()
    output = succeed(
        sys.executable, "-m", "pip", "wheel", "-v", "--disable-pip-version-check", "--no-index", "--no-deps",
        "--no-build-isolation", *cpu_only(folder / "build"), "-w", folder, unpacked, errors=True, **compiler,
    )  # fmt: skip
    seconds = processor_seconds() - before
    (path,) = folder.glob("*.whl")
    return Built(path, seconds, folder / "build", output)


@pytest.fixture(scope="session")
def sdist(tmp_path_factory):
    """The sdist of the source tree."""
    folder = tmp_path_factory.mktemp("sdist")
    code = "import sys; sys.path.insert(0, 'build_backend'); import backend; backend.build_sdist(sys.argv[1])"
    succeed("sh", "-c", f"cd '{ROOT}' && '{sys.executable}' -c \"{code}\" '{folder}'")
    (path,) = folder.glob("*.tar.gz")
    return path


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """A fresh environment with the wheel."""
    made = Environment.create(tmp_path_factory.mktemp("from_wheel") / "venv")
    made.install(wheel.path)
    return made


@pytest.fixture
def package_copy(installed, tmp_path):
    """A copy of the installed package to damage: its parent goes first on PYTHONPATH."""
    shutil.copytree(installed.site_packages / "warpsmith", tmp_path / "warpsmith")
    return tmp_path / "warpsmith"
