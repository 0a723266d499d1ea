"""Tests on several ranks: ``@multirank(2)``, ranks that stay alive between tests, and planted faults.

Gloo processes on this machine; also a pytest plugin, which ends the ranks with the session::

    pytest_plugins = ["warpsmith.testing.distributed"]          # in conftest.py
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from warpsmith.testing.ranks import RankPool

ENDINGS = ("returned", "raised", "died", "hung")
FAULTS = ("kill", "stop", "slow", "exception")


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
