"""Builds the C++ example and the test library, once a session."""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
import warpsmith

ROOT = Path(__file__).resolve().parents[2]
# The environment's own CMake first, which need not be active.
CMAKE = shutil.which("cmake", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])) or "cmake"


def run_command(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def headers_of_the_tree(folder):
    """A folder with the layout of the installed headers and links to the tree's (CMakeLists.txt installs both)."""
    detail = folder / "warpsmith/detail"
    detail.mkdir(parents=True)
    for header in (ROOT / "csrc/include/warpsmith").iterdir():
        (folder / "warpsmith" / header.name).symlink_to(header)
    for header in (ROOT / "csrc/kernels").glob("*/*_ops.h"):
        (detail / header.name).symlink_to(header)
    return folder


@pytest.fixture(scope="session")
def run():
    """Runs a command and returns what it prints; fails with all of its output."""
    return run_command


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """Configures and builds a CMake project that uses find_package(warpsmith), with one compiler at a time.

    Torch is not named: the package's config finds the one of the same Python. The headers are the source tree's, which
    stand before the installed ones: an editable install has copied those, and would hide a change.
    """
    headers = headers_of_the_tree(tmp_path_factory.mktemp("include"))
    cmake_dir = run_command(sys.executable, "-m", "warpsmith", "info", "--cmake-dir").strip()

    def build(source):
        folder = tmp_path_factory.mktemp(source.name)
        start = time.perf_counter()
        version = f"-DEXPECTED_VERSION={warpsmith.__version__}"
        options = [f"-Dwarpsmith_DIR={cmake_dir}", version, f"-DCMAKE_CXX_FLAGS=-I{headers}"]
        # With these ccache, where it is installed, knows objects again whose headers lie in another folder of pytest's.
        kept = {**os.environ, "CCACHE_BASEDIR": str(tmp_path_factory.getbasetemp()), "CCACHE_NOHASHDIR": "1"}
        run_command(CMAKE, "-S", source, "-B", folder, *options, env=kept)
        run_command(CMAKE, "--build", folder, "--parallel", "1", env=kept)
        print(f"{source.name}: configured and built in {time.perf_counter() - start:.0f} s")
        return folder

    return build


@pytest.fixture(scope="session")
def cpp(build):
    """The C++ functions as torch ops."""
    torch.ops.load_library(str(next(build(ROOT / "tests/cpp_api").glob("libcpp_api.*"))))
    return torch.ops.warpsmith_cpp_api


@pytest.fixture
def undefined(cpp):
    """In the test that asks for it, what Python leaves out arrives as an undefined tensor."""
    cpp.none_is_undefined(True)
    yield
    cpp.none_is_undefined(False)
