"""Fresh environments, and commands that no variable of the caller steers."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
IN_ONE_PROCESS = pytest.mark.xdist_group("the built package")  # which compiles it
SCRIPTS = sysconfig.get_path("scripts")
# Environment variables that would change what is built or found.
STEERING = (
    *("PYTHONPATH", "WARPSMITH_TORCH_DIR", "WARPSMITH_REQUIRE_CUDA", "WARPSMITH_REQUIRE_CUBLAS_LT"),
    *("TORCH_CUDA_ARCH_LIST", "CUDACXX", "WARPSMITH_CUBLAS_INCLUDE"),
)
STEERING += ("CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_CUDA_COMPILER_LAUNCHER")  # or building would take no time


def ccache_of(folder):
    """Variables with which ccache knows objects again whose sources lie in another folder of pytest's."""
    return {"CMAKE_CXX_COMPILER_LAUNCHER": "ccache", "CCACHE_BASEDIR": str(folder), "CCACHE_NOHASHDIR": "1"}


def environment(**changes):
    """This process' environment without what steers a build; its own CMake and Ninja come first on PATH."""
    clean = {k: v for k, v in os.environ.items() if k not in STEERING}
    clean["PATH"] = os.pathsep.join([SCRIPTS, clean["PATH"]])
    return clean | changes


def run(*command, timeout=900, **changes):
    return subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, timeout=timeout, cwd="/", env=environment(**changes)
    )


def succeed(*command, errors=False, **changes):
    """What the command printed; with `errors`, what it wrote to standard error too."""
    done = run(*command, **changes)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout + done.stderr if errors else done.stdout


class Environment(NamedTuple):
    """A fresh virtual environment that sees torch and the build tools of this one, but no editable install of it."""

    python: Path

    @classmethod
    def create(cls, folder):
        succeed(sys.executable, "-m", "venv", "--without-pip", folder)
        made = cls(folder / "bin/python")
        outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (made.site_packages / "outer.pth").write_text("\n".join(sorted(outer)) + "\n")
        return made

    @property
    def site_packages(self):
        (found,) = (self.python.parents[1] / "lib").glob("python*/site-packages")
        return found

    def install(self, *what):
        # --ignore-installed: a warpsmith of the outer environment is visible here, and stays.
        return succeed(
            sys.executable, "-m", "pip", "--python", self.python, "install", "--disable-pip-version-check",
            "--no-index", "--no-deps", "--ignore-installed", "--no-build-isolation", *what,
        )  # fmt: skip

    def run(self, code, **changes):
        return run(self.python, "-c", code, **changes)


def cpu_only(build_dir):
    """pip's options for a CPU build in a folder of its own, so that the tree's own build folder is left alone."""
    return ("-C", "cmake.define.WARPSMITH_CUDA=OFF", "-C", f"build-dir={build_dir}")
