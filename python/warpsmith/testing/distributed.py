"""Tests on several ranks: ``@multirank(2)``, ranks that stay alive between tests, and planted faults.

Gloo processes on this machine; also a pytest plugin, which ends the ranks with the session::

    pytest_plugins = ["warpsmith.testing.distributed"]          # in conftest.py
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore

from warpsmith._core import checks
from warpsmith.testing.ranks import RankPool

ENDINGS = ("returned", "raised", "died", "hung")
FAULTS = ("kill", "stop", "slow", "exception", "mismatch", "nan", "torn", "store")
# torch's names of what a rank gives to a collective. "tensor" comes last: in scatter it is an output.
_INPUTS = ("input", "input_list", "input_tensor", "input_tensor_list", "scatter_list", "tensor")


class InjectedFault(RuntimeError):
    """What the fault ``exception`` raises.

    Example:
        >>> import torch
        >>> with fault("exception", rank=0):
        ...     torch.distributed.barrier()
        Traceback (most recent call last):
        ...
        warpsmith.testing.distributed.InjectedFault: planted before barrier on rank 0
    """


@contextlib.contextmanager
def fault(
    kind: str,
    *,
    rank: int,
    call: str | None = None,
    nth: int = 1,
    seconds: float = 1.0,
    path: str | os.PathLike[str] | None = None,
) -> Iterator[None]:
    """Plants a fault on one rank, before the n-th call of a function of torch.distributed in the block.

    Args:
        kind: one of these.

            - ``kill``: SIGKILL.
            - ``stop``: SIGSTOP, and SIGCONT after so many seconds.
            - ``slow``: sleeps.
            - ``exception``: raises ``InjectedFault``.
            - ``mismatch``: this rank calls ``barrier`` instead. On gloo all ranks then wait.
            - ``nan``: the first element of the tensor that this rank gives to the call becomes NaN, in place.
            - ``torn``: the file ``path`` loses its second half.
            - ``store``: the job's store fails on all ranks until this rank leaves the block. Only the store of
              ``multirank``, a file.
        rank: on which it happens; 0 where there is no process group.
        call: a function such as ``"all_reduce"``; default: ``"all_reduce"`` for ``mismatch`` and ``nan``, else
            ``"barrier"``.
        nth: of its calls, from 1.
        seconds: of ``stop`` and ``slow``.
        path: of ``torn``.

    Only calls through ``torch.distributed.<call>`` are seen, not those that DDP makes in C++. Plant a fault inside the
    block of ``warpsmith.distributed.watch``, whose report then has what the planted rank calls.

    Raises:
        TypeError: an argument of another Python type.
        ValueError: an argument is none of these, or a ``mismatch`` of ``barrier``; at the call: ``nan`` finds no
            floating-point element, ``store`` another store.

    Example:
        >>> with fault("slow", rank=1, call="all_reduce", seconds=0.1):
        ...     pass
    """
    checks.one_of("fault", "kind", kind, FAULTS)
    checks.refuse_non_int("fault", "rank", rank)
    checks.refuse_non_int("fault", "nth", nth, 1)
    checks.refuse_non_number("fault", "seconds", seconds)
    if (path is None) == (kind == "torn"):
        wanted = "a file" if kind == "torn" else f"none for {kind}"
        raise ValueError(f"fault: path: expected {wanted}, got {path}")
    call = call or ("all_reduce" if kind in ("mismatch", "nan") else "barrier")
    if kind == "mismatch" and call == "barrier":
        raise ValueError("fault: call: expected another function than barrier for mismatch, got barrier")
    original = getattr(dist, call, None)
    if not callable(original):
        raise ValueError(f"fault: call: expected a function of torch.distributed, got {call}")
    own = dist.get_rank() if dist.is_initialized() else 0
    calls = 0
    # What ends with the block.
    mending = contextlib.ExitStack()

    @functools.wraps(original)
    def planted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            if kind == "mismatch":
                given = inspect.signature(original).bind(*args, **kwargs).arguments
                return dist.barrier(**{name: given[name] for name in ("group", "async_op") if name in given})
            if kind == "nan":
                _write_nan(original, args, kwargs)
            elif kind == "torn":
                os.truncate(path, os.path.getsize(path) // 2)  # type: ignore[arg-type]
            elif kind == "store":
                mending.enter_context(_dead_store())
            else:
                _happen(kind, f"planted before {call} on rank {own}", seconds)
        return original(*args, **kwargs)

    if own == rank:
        setattr(dist, call, planted)
    try:
        with mending:
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


def _write_nan(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Writes a NaN into the first tensor that the rank gives to a call."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    value = next((given[name] for name in _INPUTS if given.get(name) is not None), None)
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    if not (isinstance(first, Tensor) and first.is_floating_point() and first.numel()):
        found = f"{first.numel()} of {first.dtype}" if isinstance(first, Tensor) else "no tensor"
        raise ValueError(f"fault: nan: expected floating-point elements in {original.__name__}, got {found}")
    first.detach()[(0,) * first.dim()] = math.nan


@contextlib.contextmanager
def _dead_store() -> Iterator[None]:
    """A link that leads nowhere lies where the store's file was: every access of every rank fails at once."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, FileStore):
        raise ValueError(f"fault: store: expected the FileStore of multirank, got {type(store).__name__}")
    file: str = store.path  # type: ignore[attr-defined]  # torch's stub lacks it
    aside, broken = f"{file}.aside", f"{file}.broken"
    os.link(file, aside)
    # Below a file there is none, so that opening fails. A missing file would be waited for, or made anew.
    os.symlink(f"{os.devnull}/store", broken)
    os.replace(broken, file)
    try:
        yield
    finally:
        os.replace(aside, file)


_pools: dict[tuple[int, str], RankPool] = {}


def multirank(
    world_size: int, *, backend: str = "gloo", timeout_s: float = 60.0, ends: Mapping[int, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test function on several ranks: its first two parameters are ``rank`` and ``world_size``.

    The others are fixtures and parameters as pytest has them, which are sent to the ranks. The processes stay alive for
    the next test with as many ranks.

    Args:
        world_size: how many ranks.
        backend: of torch.distributed. With ``"nccl"`` ranks take the GPUs in turn, and several may share one.
        timeout_s: for the test; also of its collectives.
        ends: ``{rank: ending}`` for ranks that must not return: ``raised``, ``died`` or ``hung``. All others must.

    Raises:
        TypeError, ValueError: an argument that does not fit.
        AssertionError: a rank ended otherwise; the message has every such rank's traceback.

    Example:
        >>> import torch.distributed as dist
        >>> @multirank(2)
        ... def test_total(rank, world_size):
        ...     total = torch.tensor([rank + 1])
        ...     dist.all_reduce(total)
        ...     assert total == 3
    """
    if callable(world_size):
        raise TypeError("multirank: world_size: expected an int, got a function: write @multirank(2)")
    checks.refuse_non_int("multirank", "world_size", world_size)
    checks.refuse_non_number("multirank", "timeout_s", timeout_s)
    wanted = dict(ends or {})
    for rank in wanted:
        if rank not in range(world_size):
            raise ValueError(f"multirank: ends: expected ranks from 0 to {world_size - 1}, got {rank!r}")
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
