"""Tests on several ranks: ``@multirank(2)``, ranks that stay alive between tests, and planted faults.

Gloo processes on this machine; also a pytest plugin, which ends the ranks with the session::

    pytest_plugins = ["warpsmith.testing.distributed"]          # in conftest.py
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import importlib
import inspect
import os
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import FileStore

ENDINGS = ("returned", "raised", "died", "hung")
FAULTS = ("kill", "stop", "slow", "exception")
_START_S = 120.0  # to import torch on a busy machine
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


class InjectedFault(RuntimeError):
    """What the fault ``exception`` raises.

    Example:
        >>> with fault("exception", rank=0):
        ...     torch.distributed.barrier()
        Traceback (most recent call last):
        ...
        warpsmith.testing.distributed.InjectedFault: planted before barrier on rank 0
    """


@contextlib.contextmanager
def fault(kind: str, *, rank: int, call: str | None = None, nth: int = 1, seconds: float = 1.0) -> Iterator[None]:
    """Plants a fault on one rank, before the n-th call of a function of torch.distributed in the block.

    Args:
        kind: ``kill`` (SIGKILL), ``stop`` (SIGSTOP, and SIGCONT after so many seconds), ``slow`` (sleeps), or
            ``exception`` (raises ``InjectedFault``).
        rank: on which it happens; 0 where there is no process group.
        call: a function such as ``"all_reduce"``; default: ``"barrier"``.
        nth: of its calls, from 1.
        seconds: of ``stop`` and ``slow``.

    Only calls through ``torch.distributed.<call>`` are seen, not those that DDP makes in C++.

    Example:
        >>> with fault("slow", rank=1, call="all_reduce", seconds=0.1):
        ...     pass
    """
    if kind not in FAULTS:
        raise ValueError(f"fault: kind: expected one of {', '.join(FAULTS)}, got {kind}")
    if nth < 1:
        raise ValueError(f"fault: nth: expected at least 1, got {nth}")
    call = call or "barrier"
    original = getattr(dist, call, None)
    if not callable(original):
        raise ValueError(f"fault: call: expected a function of torch.distributed, got {call}")
    own = dist.get_rank() if dist.is_initialized() else 0
    calls = 0

    @functools.wraps(original)
    def planted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            _happen(kind, f"planted before {call} on rank {own}", seconds)
        return original(*args, **kwargs)

    if own == rank:
        setattr(dist, call, planted)
    try:
        yield
    finally:
        if own == rank:
            setattr(dist, call, original)


def _happen(kind: str, words: str, seconds: float) -> None:
    if kind == "exception":
        raise InjectedFault(words)
    if kind == "slow":
        time.sleep(seconds)
        return
    if kind == "stop":
        # A stopped process cannot wake itself up.
        subprocess.Popen(["sh", "-c", f"sleep {seconds:g}; kill -CONT {os.getpid()}"], stdin=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


class RankPool:
    """Processes that run functions as the ranks of a job, one function after the other.

    Each call gets a process group of its own, so nothing of a test is left for the next one but what the module keeps.
    After a call in which a rank did not return, the processes are ended, and the next call starts new ones. The ranks
    meet through a file and talk over loopback.

    Example:
        >>> import operator
        >>> with RankPool(2) as pool:
        ...     [outcome.value for outcome in pool.run(operator.add)]
        [2, 3]
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        if world_size < 1:
            raise ValueError(f"RankPool: world_size: expected at least 1, got {world_size}")
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
        """
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
        context = mp.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, theirs), daemon=True)
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


def _serve(rank: int, world_size: int, pipe: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            module, name, arguments, store, backend, timeout_s = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                backend,
                store=FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
            fn: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
            value = inspect.unwrap(fn)(rank, world_size, **arguments)
            dist.barrier()
            dist.destroy_process_group()
            pipe.send(("returned", value, ""))
        except BaseException:
            pipe.send(("raised", None, traceback.format_exc()))
            os._exit(1)  # as a program ends with an exception: the other ranks see closed connections


_pools: dict[tuple[int, str], RankPool] = {}


def multirank(
    world_size: int, *, backend: str = "gloo", timeout_s: float = 60.0, ends: Mapping[int, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test function on several ranks: its first two parameters are ``rank`` and ``world_size``.

    The others are fixtures and parameters as pytest has them, which are sent to the ranks. The processes stay alive for
    the next test with as many ranks.

    Args:
        world_size: how many ranks. backend: of torch.distributed.
        timeout_s: for the test; also of its collectives.
        ends: ``{rank: ending}`` for ranks that must not return: ``raised``, ``died`` or ``hung``. All others must.

    Raises:
        AssertionError: a rank ended otherwise; the message has every such rank's traceback.

    Example:
        >>> import torch.distributed as dist
        >>> @multirank(2)
        ... def test_total(rank, world_size):
        ...     total = torch.tensor([rank + 1])
        ...     dist.all_reduce(total)
        ...     assert total == 3
    """
    wanted = dict(ends or {})
    bad = [ending for ending in wanted.values() if ending not in ENDINGS]
    if bad:
        raise ValueError(f"multirank: ends: expected {', '.join(ENDINGS)}, got {bad[0]}")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        names = list(signature.parameters)
        if names[:2] != ["rank", "world_size"]:
            raise ValueError(f"multirank: {test.__name__}: expected parameters rank, world_size first, got {names}")

        @functools.wraps(test)
        def on_ranks(**arguments: Any) -> None:
            pool = _pools.setdefault((world_size, backend), RankPool(world_size, backend))
            outcomes = pool.run(test, arguments, timeout_s)
            wrong = [o for o in outcomes if o.ending != wanted.get(o.rank, "returned")]
            words = [f"rank {o.rank} {o.ending}, expected {wanted.get(o.rank, 'returned')}: {o.text}" for o in wrong]
            assert not wrong, "\n".join(words)

        on_ranks.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(signature.parameters.values())[2:]
        )
        return on_ranks

    return decorate


def close_pools() -> None:
    """Ends all ranks that wait for a next test.

    Example:
        >>> close_pools()
    """
    while _pools:
        _pools.popitem()[1].close()


def pytest_sessionfinish() -> None:
    """The hook of the pytest plugin."""
    close_pools()


atexit.register(close_pools)
