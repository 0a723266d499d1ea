"""``init``: the process group, the device and the seeds of a rank, and their end."""

from __future__ import annotations

import atexit
import datetime
import hashlib
import logging
import os
import random
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from warpsmith._core import captures, checks
from warpsmith.distributed.launch import output
from warpsmith.distributed.launch.environment import LaunchEnvironment, launch_environment
from warpsmith.distributed.launch.gloo_threads import wait_until_idle
from warpsmith.distributed.launch.meeting import first_line, keep_to_loopback, meet
from warpsmith.distributed.launch.stopping import Stopping

_DEVICES = ("cpu", "cuda")
_LONGEST_S = 1e9  # what torch's clocks can add


class Context:
    """What ``init`` returns: this rank's place in the job. A context manager that ends the process group.

    Attributes:
        rank: of this process in the job, from 0.
        world_size: processes in the job.
        local_rank: of this process on its host, from 0.
        local_world_size: processes on this host, where the launcher says so, else 1.
        device: the ``torch.device`` of this rank.
        backend: of the process group, as torch names it.
        launcher: ``"torchrun"``, ``"slurm"`` or ``"none"``.

    Example:
        >>> import warpsmith
        >>> with warpsmith.distributed.init(device="cpu") as ctx:
        ...     ctx.rank, ctx.world_size, ctx.device, ctx.is_main
        (0, 1, device(type='cpu'), True)
    """

    def __init__(self, place: LaunchEnvironment, device: torch.device, backend: str) -> None:
        self.rank, self.world_size = place.rank, place.world_size
        self.local_rank, self.local_world_size = place.local_rank, place.local_world_size
        self.device, self.backend, self.launcher = device, backend, place.launcher
        self._open = True
        self._stopping = Stopping(self._last_words)
        atexit.register(self._at_exit)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def __repr__(self) -> str:
        return f"Context(rank={self.rank}, world_size={self.world_size}, device={str(self.device)!r})"

    def mesh(self, **sizes: int) -> DeviceMesh:
        """torch's ``DeviceMesh`` over all ranks, with named dimensions: ``ctx.mesh(data=2, tensor=4)``.

        Raises:
            TypeError: a size is no int.
            ValueError: the sizes' product is not the world size.
        """
        product = 1
        for name, size in sizes.items():
            checks.refuse_non_int("Context.mesh", name, size)
            product *= max(size, 0)
        if not sizes or product != self.world_size:
            raise ValueError(
                f"Context.mesh: sizes: expected a product of {self.world_size}, the world size, got {sizes}"
            )
        return init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def logger(self, name: str = "warpsmith", level: int = logging.INFO) -> logging.Logger:
        """The logger of that name, set up so that a job writes a message once.

        Messages below ``WARNING`` come from rank 0 alone, unless they are logged with ``extra={"all_ranks": True}``;
        warnings and errors come from every rank, and each line names its rank.
        """
        return output.rank_logger(name, self.rank, self.world_size, level)

    def progress(self, iterable: Iterable[Any] | None = None, **options: Any) -> Any:
        """``tqdm(iterable, **options)``, shown by rank 0 alone. Needs tqdm."""
        return output.progress(self.rank, iterable, options)

    def barrier(self) -> None:
        """Waits until every rank is here.

        Raises:
            RuntimeError: after :meth:`close`.
        """
        if not self._open:
            raise RuntimeError("Context.barrier: expected an open process group, got one that close() has ended")
        if self.world_size > 1:
            dist.barrier()

    def close(self, failed: bool = False) -> None:
        """Ends the process group, and drops the graphs of captured steps; calling it again does nothing. failed: the
        other ranks may be anywhere, so pending collectives are aborted instead of waited for."""
        if not self._open:
            return
        self._open = False
        atexit.unregister(self._at_exit)
        self._stopping.close()
        if not dist.is_initialized():
            return
        if failed:
            with self._stopping.or_by_force():
                _abort()
        else:
            captures.forget_all()
            dist.destroy_process_group()
        wait_until_idle()

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            # Before the teardown, in which a broken job may still hold things up.
            print(
                f"rank {self.rank} of {self.world_size}: {type(error).__name__}: {error}", file=sys.stderr, flush=True
            )
            self.close(failed=True)
        self.close()

    def _at_exit(self) -> None:
        # Python sets sys.last_value when it prints the exception that ends a program.
        self.close(failed=getattr(sys, "last_value", None) is not None)

    def _last_words(self, number: int) -> None:
        print(
            f"rank {self.rank} of {self.world_size}: signal {number} while waiting, probably for another rank: ended",
            file=sys.stderr,
            flush=True,
        )


def _abort() -> None:
    """Ends the process group without waiting for the other ranks, who see closed connections."""
    group = dist.group.WORLD
    for end in (group.abort if group is not None else None, dist.destroy_process_group):
        try:
            if end is not None:
                end()
        except Exception as error:  # the exception that led here must reach the user, not one of the teardown
            print(f"warpsmith: teardown: {error}", file=sys.stderr, flush=True)


def init(
    backend: str | None = None,
    timeout_s: float = 600.0,
    *,
    device: str | torch.device | None = None,
    seed: int | None = None,
) -> Context:
    """Makes this process a rank of its job: process group, device and seeds, in one line.

    The place comes from the environment: of torchrun (or RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT set by
    hand), of a task that ``srun`` started, or, with neither, a world of one process. Everything of torch.distributed
    works afterwards, also in a world of one.

    Args:
        backend: ``"nccl"``, ``"gloo"`` or what ``torch.distributed.init_process_group`` takes. Default: NCCL for CUDA
            tensors with gloo for those on the CPU where a CUDA device is visible, else gloo.
        timeout_s: seconds that the ranks wait for each other, here and in every collective.
        device: ``"cuda"`` or ``"cpu"``. Default: the CPU for the backend gloo, else CUDA where visible. Rank r of a
            host takes its GPU r, which also becomes torch's current device.
        seed: of torch's generators, of ``random`` and, where it is loaded, of ``numpy.random``: each rank gets its own
            streams, a function of (seed, rank). Default: they stay as they are.

    Use it in a ``with`` statement, or call ``close()``; else the end of the program closes it. An exception names its
    rank, aborts what is pending and goes on upwards. On SIGTERM the main thread leaves through ``SystemExit``, so that
    the teardown runs; a rank that does not react within 5 seconds, since it waits for another one, is ended.

    Nothing listens on other interfaces than loopback while all ranks are on one host. Where they are not, rank 0
    listens at MASTER_ADDR. (Under torchrun the store is torchrun's.)

    Raises:
        TypeError: an argument of another Python type.
        ValueError: an argument or a variable of the environment is not as expected.
        RuntimeError: MASTER_ADDR is missing, a port is in use, NCCL or the rank's GPU is absent, or ranks have not come
            within the timeout. The message names the rank and the remedy.

    Example:
        >>> import torch, torch.distributed as dist, warpsmith
        >>> with warpsmith.distributed.init(device="cpu", seed=1) as ctx:
        ...     total = torch.ones(2, device=ctx.device)
        ...     dist.all_reduce(total)
        >>> total
        tensor([1., 1.])
    """
    checks.refuse_non_number("init", "timeout_s", timeout_s)
    if not 0 < timeout_s <= _LONGEST_S:
        raise ValueError(f"init: timeout_s: expected more than 0 seconds and at most {_LONGEST_S:g}, got {timeout_s}")
    if seed is not None:
        checks.refuse_non_int("init", "seed", seed)
    device = _type_of(device)
    backend = None if backend is None else _known_backend(backend)
    if dist.is_initialized():
        raise RuntimeError("init: expected no process group, got one: call init() once, without init_process_group()")
    place = launch_environment(os.environ)
    chosen = _choose_device(place, backend, device)
    backend = _choose_backend(place, backend, chosen)
    if place.one_host:
        keep_to_loopback()
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)  # before anything touches CUDA: else every rank leaves a context on GPU 0
    store = meet(place, float(timeout_s))
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=datetime.timedelta(seconds=float(timeout_s)),
            device_id=chosen if chosen.type == "cuda" and "nccl" in backend else None,
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"init: {place.name}: {backend}: the ranks have met, but not connected within {timeout_s:g} s: look for "
            f"messages of the others, of which one may have ended ({first_line(error)})"
        ) from error
    if seed is not None:
        _seed(seed, place.rank)
    return Context(place, chosen, backend)


def _type_of(device: Any) -> str | None:
    if isinstance(device, torch.device):
        device = str(device)
    if device is not None and not isinstance(device, str):
        checks.refuse_type("init", "device", f"{' or '.join(_DEVICES)}", device)
    if device not in (None, *_DEVICES):
        which = ": each rank takes the GPU of its LOCAL_RANK" if device.startswith("cuda:") else ""
        raise ValueError(f"init: device: expected one of {', '.join(_DEVICES)}, got {device}{which}")
    return device


def _known_backend(backend: Any) -> str:
    """The backend's name as torch has it, such as "gloo" or "cpu:gloo,cuda:nccl"."""
    if not isinstance(backend, str):
        checks.refuse_type("init", "backend", "a name or None", backend)
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2]
        if name not in known:
            raise ValueError(f"init: backend: expected one of {', '.join(known)}, got {backend!r}")
        if name != "nccl" and not dist.is_backend_available(name):  # that of NCCL says more
            raise RuntimeError(f"init: backend: expected one that this torch is built with, got {name}")
    return backend.lower()


def _choose_device(place: LaunchEnvironment, backend: str | None, device: str | None) -> torch.device:
    if device == "cpu" or (device is None and (backend == "gloo" or not torch.cuda.is_available())):
        if backend is not None and "nccl" in backend:
            raise RuntimeError(_no_nccl(place, "there is no CUDA device for it" if device is None else "device is cpu"))
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(f"init: {place.name}: device: expected cpu, since no CUDA device is visible, got cuda")
    count = torch.cuda.device_count()
    if place.launcher == "slurm" and count == 1:
        return torch.device("cuda", 0)  # Slurm shows each task its own GPU
    if place.local_rank >= count:
        raise RuntimeError(
            f"init: {place.name}: expected a GPU for local rank {place.local_rank}, {count} visible: start at most "
            f"{count} processes on this host (torchrun --nproc-per-node {count}), or look at CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", place.local_rank)


def _choose_backend(place: LaunchEnvironment, backend: str | None, device: torch.device) -> str:
    if backend is None:
        return "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    if "nccl" in backend and not dist.is_nccl_available():
        raise RuntimeError(_no_nccl(place, "this torch is built without it"))
    return backend


def _no_nccl(place: LaunchEnvironment, why: str) -> str:
    remedy = "leave the backend out, or install a CUDA build of torch"
    return f"init: {place.name}: backend: expected gloo, got nccl, but {why}: {remedy}"


def _seed(seed: int, rank: int) -> None:
    """Neighbouring seeds must not share streams, so seed and rank are hashed instead of added."""
    digest = hashlib.sha256(f"warpsmith {seed} {rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    random.seed(digest)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(int.from_bytes(digest[:4], "little"))
