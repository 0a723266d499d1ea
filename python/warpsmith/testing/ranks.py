"""Runs functions as the ranks of a job on this machine: no hang, and every rank's error reported."""

from __future__ import annotations

import datetime
import functools
import importlib
import inspect
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import FileStore

from warpsmith._core import checks

_START_S = 300.0  # to import torch on a busy machine
_IMPORTED = ["torch._dynamo", "torch.distributed.tensor", "warpsmith.testing.ranks"]
_GRACE_S = 5.0  # that ranks have to end by themselves when another one has failed


@dataclass(frozen=True)
class Outcome:
    """How a rank ended. ending: one of ``returned``, ``raised``, ``died``, ``hung``; text: the traceback or the exit
    code; seconds: from the start of the call.

    Example:
        >>> Outcome(1, "died", text="exit code -9", seconds=0.2)
        Outcome(rank=1, ending='died', value=None, text='exit code -9', seconds=0.2)
    """

    rank: int
    ending: str
    value: Any = None
    text: str = ""
    seconds: float = 0.0


class RankPool:
    """Processes that run functions as the ranks of a job, one function after the other.

    Each call gets a process group of its own, so nothing of a test is left for the next one but what the module keeps.
    After a call in which a rank did not return, the processes are ended, and the next call starts new ones. The ranks
    meet through a file and talk over loopback. With NCCL the ranks take the GPUs in turn, and several share
    one where GPUs are fewer (:func:`nccl_environment`).

    Example:
        >>> import operator
        >>> with RankPool(2) as pool:
        ...     [outcome.value for outcome in pool.run(operator.add)]
        [2, 3]
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        checks.refuse_non_int("RankPool", "world_size", world_size, 1)
        self.world_size, self.backend = world_size, backend
        self._folder = tempfile.TemporaryDirectory(prefix="warpsmith-ranks-")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._calls = 0

    def run(
        self, fn: Callable[..., Any], arguments: Mapping[str, Any] | None = None, timeout_s: float = 60.0
    ) -> list[Outcome]:
        """Calls ``fn(rank, world_size, **arguments)`` on every rank; how each ended, in rank order.

        fn: can be imported by its module and name. What it takes and returns must survive multiprocessing; tensors
        among the results do not. Where one rank fails, the others have 5 seconds to end by themselves.

        Raises:
            TypeError: fn is no function of a module's top level.
        """
        _check_call("RankPool.run", fn, timeout_s)
        if not self._processes:
            self._start()
        self._calls += 1
        store = str(Path(self._folder.name) / f"store-{self._calls}")
        call = (fn.__module__, fn.__qualname__, dict(arguments or {}), store, self.backend, timeout_s)
        for pipe in self._pipes:
            pipe.send(call)
        outcomes = self._collect(timeout_s)
        if any(outcome.ending != "returned" for outcome in outcomes):
            self.close()
        return outcomes

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        context = _context(self.backend)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = rank, self.world_size, theirs, self.backend, dict(os.environ)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_START_S):
                self.close()
                raise RuntimeError(f"RankPool: rank {rank} has not started within {_START_S:g} s")
            try:
                pipe.recv()
            except EOFError:
                self.close()
                raise RuntimeError(f"RankPool: rank {rank} died before its first call") from None

    def _collect(self, timeout_s: float) -> list[Outcome]:
        start = time.monotonic()
        deadline = start + timeout_s
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.world_size and (left := deadline - time.monotonic()) > 0:
            waiting = [p for r, p in enumerate(self._pipes) if r not in outcomes]
            for pipe in wait(waiting, left):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                seconds = time.monotonic() - start
                try:
                    ending, value, text = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join()
                    ending, value, text = "died", None, f"exit code {self._processes[rank].exitcode}"
                outcomes[rank] = Outcome(rank, ending, value, text, seconds)
                if ending != "returned":
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        seconds = time.monotonic() - start
        for rank in range(self.world_size):
            outcomes.setdefault(rank, Outcome(rank, "hung", None, f"still running after {seconds:.1f} s", seconds))
        return [outcomes[rank] for rank in range(self.world_size)]


def _check_call(op: str, fn: Any, timeout_s: Any) -> None:
    """Refuses what the ranks, fresh processes, could not import."""
    name = getattr(fn, "__qualname__", "")
    if not callable(fn) or "<" in name or not name:
        expected = "a function at the top level of a module, which fresh processes can import"
        if name:
            raise TypeError(f"{op}: fn: expected {expected}, got {name}")
        checks.refuse_type(op, "fn", expected, fn)
    checks.refuse_non_number(op, "timeout_s", timeout_s)


def nccl_environment(rank: int, world_size: int, gpus: int) -> dict[str, str]:
    """Variables by which NCCL takes several ranks of one GPU. It refuses two ranks of a host with the same GPU; with a
    ``NCCL_HOSTID`` each, ranks are on hosts of their own, and talk through sockets on loopback. Such ranks show that
    code is right, not how fast it is.

    Example:
        >>> nccl_environment(1, 2, gpus=1)
        {'NCCL_HOSTID': 'warpsmith-rank-1', 'NCCL_NET': 'Socket', 'NCCL_SOCKET_IFNAME': 'lo'}
        >>> nccl_environment(1, 2, gpus=2)
        {}
    """
    if world_size <= gpus:
        return {}
    return {"NCCL_HOSTID": f"warpsmith-rank-{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


def _context(backend: str) -> Any:
    """Ranks are copies of a process that has imported torch, which takes 1.5 s of each rank else, and 3 s of one that
    uses an optimizer. NCCL's are new processes: what a GPU's libraries start while they are imported is not copied."""
    if "nccl" in backend:
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def _serve(rank: int, world_size: int, pipe: Connection, backend: str, variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gpus = torch.cuda.device_count() if "nccl" in backend else 0
    if gpus:
        os.environ.update(nccl_environment(rank, world_size, gpus))
        torch.cuda.set_device(rank % gpus)
    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            module, name, arguments, store, backend, timeout_s = pipe.recv()
        except EOFError:
            return
        try:
            timeout = datetime.timedelta(seconds=timeout_s)
            file = FileStore(store, world_size)
            dist.init_process_group(backend, store=file, rank=rank, world_size=world_size, timeout=timeout)
            # A rank that fails while another one still connects would end it with a closed connection.
            file.set(f"connected-{rank}", "")
            file.wait([f"connected-{other}" for other in range(world_size)], timeout)
            fn: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
            value = inspect.unwrap(fn)(rank, world_size, **arguments)
            dist.barrier()
            dist.destroy_process_group()
            pipe.send(("returned", value, ""))
        except BaseException:
            pipe.send(("raised", None, traceback.format_exc()))
            os._exit(1)  # as a program ends with an exception: the other ranks see closed connections


def run_ranks(
    fn: Callable[..., Any], world_size: int = 2, *args: Any, backend: str = "gloo", timeout_s: float = 60.0
) -> list[Any]:
    """Calls ``fn(rank, world_size, *args)`` in ``world_size`` new processes that share a process group.

    The ranks meet through a file and talk over the loopback interface, so nothing listens elsewhere. Each rank
    computes with one thread.

    Args:
        fn: a function that can be imported (defined at the top level of a module): ranks are fresh processes.
        args: passed on; they and the results must survive multiprocessing.
        backend: of torch.distributed.
        timeout_s: for the call. A collective that waits for a dead rank gives up after the same time.

    Returns:
        What each rank returned, in rank order.

    Raises:
        TypeError: ``fn`` is no function of a module's top level, or takes fewer arguments.
        RuntimeError: one or more ranks raised, died or were still running at the timeout; the message has every
            rank's traceback. All processes are gone when it is raised.
    """
    _check_call("run_ranks", fn, timeout_s)
    names = list(inspect.signature(fn).parameters)[2:]
    if len(args) > len(names):
        raise TypeError(f"run_ranks: {fn.__name__}: expected at most {len(names)} argument(s), got {len(args)}")
    with RankPool(world_size, backend) as pool:
        outcomes = pool.run(fn, dict(zip(names, args, strict=False)), timeout_s)
    wrong = [f"rank {o.rank} {o.ending}: {o.text}" for o in outcomes if o.ending != "returned"]
    if wrong:
        raise RuntimeError("run_ranks:\n" + "\n".join(wrong))
    return [outcome.value for outcome in outcomes]
