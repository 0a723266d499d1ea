"""The device "sim": an op's CUDA kernels on the CPU, on the host execution layer of a source checkout.

A process that has loaded kernels, bindings and that layer as one library, instead of the package's own, runs every op
by its kernels on CPU tensors. ``tools/sim/library.py`` builds the library; ``python -m pytest --sim tests/ops/...``
loads it. One process has one library, so the device "cpu" is not there in it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

LIBRARY, CODE = "WARPSMITH_SIM_LIBRARY", "WARPSMITH_SIM_CODE"  # variables of the environment
SIZE = "WARPSMITH_SIM_MULTIPROCESSORS"  # likewise
# Seeds of the machine that repeats go through: late, early and random arrivals, twice. Of a spec's random cases one in
# so many is drawn. Under a sanitizer, which takes many times as long, both are fewer (tools/sim/library.py).
SCHEDULES = int(os.environ.get("WARPSMITH_SIM_SCHEDULES", "6"))
RANDOM_SHARE = int(os.environ.get("WARPSMITH_SIM_RANDOM_SHARE", "4"))


@dataclass(frozen=True)
class Machine:
    """How kernels run.

    Args:
        seed: gives the order of threads and the moments at which asynchronous copies arrive.
        multiprocessors: of the machine.
        approximation: 0: approximate instructions are exact to rounding. 1: their results are as large as their
            documented bound allows. 2: as small.
        last_blocks: only so many blocks at the end of a grid run; 0: all.
        shared_bytes: most dynamic shared memory of a block. With little of it, short rows are too long for a chip.
    """

    seed: int = 0
    multiprocessors: int = field(default_factory=lambda: int(os.environ.get(SIZE, "4")))
    approximation: int = 0
    last_blocks: int = 0
    shared_bytes: int = 227 * 1024

    def configure(self) -> None:
        code = int(os.environ.get(CODE, "90"))
        _library().warpsmith_sim_configure(
            self.seed, self.multiprocessors, code, self.approximation, self.last_blocks, self.shared_bytes
        )


def is_loaded() -> bool:
    """Whether this process runs ops by their kernels on the CPU."""
    return LIBRARY in os.environ


def torch_device(device: str) -> str:
    """Where the tensors of a device of the tests lie."""
    return "cpu" if device == "sim" else device


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ[LIBRARY])
    library.warpsmith_sim_configure.argtypes = [
        ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint, ctypes.c_int
    ]  # fmt: skip
    for counter in (library.warpsmith_sim_launches, library.warpsmith_sim_bytes, library.warpsmith_sim_bytes_written):
        counter.restype = ctypes.c_int64
    return library


@contextmanager
def machine(**how: int) -> Iterator[None]:
    """Inside the block kernels run as the fields of :class:`Machine` say; a field not given stays as it is outside."""
    _machines.append(replace(_now(), **how))
    _now().configure()
    try:
        yield
    finally:
        _machines.pop()
        _now().configure()


_machines: list[Machine] = []  # of the blocks around


def _now() -> Machine:
    return _machines[-1] if _machines else Machine()


def plan(op: str, **problem: Any) -> dict[str, Any]:
    """What ``warpsmith.plan`` says of a problem on this machine."""
    import warpsmith

    machine = {"multiprocessors": _now().multiprocessors, "code_capability": int(os.environ.get(CODE, "90"))}
    known = warpsmith.plan(op)["keys"]
    return warpsmith.plan(op, **problem, **{key: value for key, value in machine.items() if key in known})


def launches() -> int:
    """Kernels launched so far."""
    return int(_library().warpsmith_sim_launches())


def write_launched_kernels(path: str) -> None:
    """A line for each kernel: its symbol, the threads of its largest block, what launches asked of its code."""
    library = _library()
    library.warpsmith_sim_write_launched_kernels.restype = ctypes.c_bool
    if not library.warpsmith_sim_write_launched_kernels(path.encode()):
        raise OSError(f"cannot write {path}")


def bytes_moved() -> int:
    """Bytes of global memory that kernels have read and written so far, through the loads and stores of the house."""
    return int(_library().warpsmith_sim_bytes())


def bytes_written() -> int:
    """Those of them that kernels have written."""
    return int(_library().warpsmith_sim_bytes_written())


def counted(call: Callable[[], Any]) -> tuple[Any, tuple[int, int]]:
    """What a call returns, and the bytes of global memory that its kernels read and wrote."""
    moved, written = bytes_moved(), bytes_written()
    result = call()
    written = bytes_written() - written
    return result, (bytes_moved() - moved - written, written)
