"""The device "sim": an op's CUDA kernels on the CPU, on the host execution layer of a source checkout.

A process that has loaded kernels, bindings and that layer as one library, instead of the package's own, runs every op
by its kernels on CPU tensors. ``tools/sim/library.py`` builds the library; ``python -m pytest --sim tests/ops/...``
loads it. One process has one library, so the device "cpu" is not there in it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

LIBRARY, CODE = "WARPSMITH_SIM_LIBRARY", "WARPSMITH_SIM_CODE"  # variables of the environment
MULTIPROCESSORS = 4
SCHEDULES = 6  # seeds of the machine that repeats go through: late, early and random arrivals, twice


def is_loaded() -> bool:
    """Whether this process runs ops by their kernels on the CPU."""
    return LIBRARY in os.environ


def torch_device(device: str) -> str:
    """Where the tensors of a device of the tests lie."""
    return "cpu" if device == "sim" else device


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ[LIBRARY])
    library.warpsmith_sim_configure.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_int]
    library.warpsmith_sim_launches.restype = ctypes.c_int64
    return library


@contextmanager
def schedule(seed: int) -> Iterator[None]:
    """Inside the block kernels run in the order of threads and the moments of arrival that the seed gives."""
    configure(seed)
    try:
        yield
    finally:
        configure(0)


def configure(seed: int) -> None:
    """Sets schedule, machine size and code: once after the library is loaded, and for each other schedule."""
    _library().warpsmith_sim_configure(seed, MULTIPROCESSORS, int(os.environ.get(CODE, "90")))


def launches() -> int:
    """Kernels launched so far."""
    return int(_library().warpsmith_sim_launches())


def bytes_moved() -> tuple[int, int]:
    """Bytes of global memory that kernels have read and written so far, through the helpers that count."""
    read, written = ctypes.c_int64(), ctypes.c_int64()
    _library().warpsmith_sim_bytes_moved(ctypes.byref(read), ctypes.byref(written))
    return read.value, written.value
