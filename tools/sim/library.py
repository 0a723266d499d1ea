"""The op library on the host execution layer: kernels, bindings and csrc/sim in one file.

    python tools/sim/library.py     # builds it and prints its path

A Python process that loads it before it imports warpsmith runs every op by its CUDA kernels, on CPU tensors
(warpsmith.testing.sim). `python -m pytest --sim tests/ops/test_norm.py` does so for the laws of ops.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import build

VARIABLE = "WARPSMITH_SIM_LIBRARY"  # names the library that this process has loaded, or shall load
VARIANT = "plain"


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise build.BuildError("the op library needs torch's headers, and there is no torch")
    return Path(spec.origin).parent


def parts(variant: str = VARIANT) -> Iterator[build.Part]:
    csrc = build.ROOT / "csrc"
    kernel = [*build.VARIANTS[variant].kernel, f"-I{csrc}"]
    binding = [
        *kernel,
        "-fvisibility=hidden",
        "-isystem",
        f"{torch_folder()}/include",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
    ]
    yield build.machine(variant)
    for source in sorted((csrc / "kernels").rglob("*.cu")):
        yield source, kernel, build.BUILD / variant
    for source in sorted((csrc / "cpu").rglob("*.cpp")):
        yield source, kernel, build.BUILD / variant
    for source in sorted((csrc / "bindings").rglob("*.cpp")):
        yield source, binding, build.BUILD / variant


def library(variant: str = VARIANT) -> Path:
    """Returns the library, made if it is not there."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        objects = list(pool.map(lambda part: build.compile_object(*part), parts(variant)))
    # Torch's library is in the process that loads this one; names of this one's own are taken from itself.
    flags = ["-shared", "-Wl,-Bsymbolic,--no-as-needed,--allow-shlib-undefined", f"-L{torch_folder()}/lib", "-ltorch"]
    return build.link(objects, variant, build.BUILD / variant / "libwarpsmith_sim.so", flags)


def load() -> None:
    """Makes the library this process's op library. Before anything imports warpsmith."""
    import torch

    os.environ[VARIABLE] = path = os.environ.get(VARIABLE) or str(library())
    torch.ops.load_library(path)
    from warpsmith.testing import sim

    sim.configure(0)


if __name__ == "__main__":
    try:
        print(library())
    except (build.BuildError, subprocess.CalledProcessError) as error:
        raise SystemExit(str(error)) from None
