"""Kernels as nvcc compiles them: the package's own objects where they are fresh, else objects made for the purpose."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import store

import build

ROOT = build.ROOT
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-I", "csrc"]
NO_CUOBJDUMP = "no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"


def nvcc() -> str | None:
    return shutil.which("nvcc") or next((str(p) for p in [Path("/usr/local/cuda/bin/nvcc")] if p.exists()), None)


def cuobjdump() -> str | None:
    """From its wheel, which is pinned; else the toolkit's."""
    try:
        files = importlib.metadata.files("nvidia-cuda-cuobjdump") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "cuobjdump" and file.locate().exists():
            return str(file.locate())
    compiler = nvcc()
    beside = Path(os.path.realpath(compiler)).parent / "cuobjdump" if compiler else None
    return shutil.which("cuobjdump") or (str(beside) if beside and beside.exists() else None)


def _output(command: list[str], folder: Path = ROOT) -> str:
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if result.returncode:
        raise build.BuildError(f"{' '.join(command)}\n{result.stderr}{result.stdout}")
    return result.stdout


@cache
def nvcc_version() -> str:
    return _output([str(nvcc()), "--version"])


def command_of(source: Path, architecture: str, flags: list[str]) -> list[str]:
    number = architecture.removeprefix("sm_")
    name = str(source.relative_to(ROOT) if source.is_relative_to(ROOT) else source)
    return [str(nvcc()), *FLAGS, *flags, f"-gencode=arch=compute_{number},code=sm_{number}", "-c", name]


def compile_key(source: Path, architecture: str, flags: list[str]) -> str:
    """Of the object that nvcc makes of the source as it is now."""
    command = command_of(source, architecture, flags)
    listing = _output([*command[:-2], "-M", command[-1]]).replace("\\\n", " ").split(":", 1)[1]
    included = store.digests([ROOT / name for name in listing.split()], ROOT)
    return store.key("cuda object", nvcc_version(), command[1:], included)


def compile_object(source: Path, architecture: str, folder: Path, flags: list[str] | None = None) -> Path:
    """An object of one architecture, in the folder."""
    target = folder / f"{source.stem}.{architecture}.o"
    _output([*build.ccache(), *command_of(source, architecture, flags or []), "-o", str(target)])
    return target


def package_object(source: Path) -> Path | None:
    """The package's object, of all its architectures; None where there is none, or only one of older sources."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    ninja = shutil.which("ninja", path=path)
    if not ninja or not source.is_relative_to(ROOT):
        return None
    # Of the library, or of its part for one architecture.
    found = (ROOT / "build").glob(f"*/CMakeFiles/*.dir/{source.relative_to(ROOT)}.o")
    for target in sorted(found, key=lambda f: -f.stat().st_mtime):
        folder = target.parents[len(source.relative_to(ROOT).parts) + 1]
        relative = str(target.relative_to(folder))
        known = subprocess.run([ninja, "-t", "deps", relative], capture_output=True, text=True, cwd=folder).stdout
        built = target.stat().st_mtime_ns
        included = [folder / line.strip() for line in known.splitlines()[1:] if line.strip()]  # absolute ones stay so
        if " (VALID)" in known and all(f.exists() and f.stat().st_mtime_ns <= built for f in included):
            return target
    return None


def extract(object_file: Path, folder: Path) -> dict[str, Path]:
    """The code of each architecture that an object holds, as files in the folder."""
    into = Path(tempfile.mkdtemp(dir=folder))
    _output([str(cuobjdump()), "-xelf", "all", str(object_file.resolve())], into)
    found = {}
    for file in into.glob("*.cubin"):
        if m := re.search(r"\.(sm_\w+)\.cubin$", file.name):
            found[m[1]] = file
    return found


def listing(kind: str, cubin: Path) -> str:
    """What cuobjdump prints: kind is "-res-usage", "-elf" or "-sass"."""
    return _output([str(cuobjdump()), kind, str(cubin)])
