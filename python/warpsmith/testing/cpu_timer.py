"""Times CPU work, and the host's part of GPU work: interleaved contenders, medians. And sets the number of threads."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from warpsmith.testing.gpu_timer import NOT_TIMED, Timing, first_calls, timing_of


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Inside, torch works with ``count`` threads; afterwards with as many as before.

    Example:
        >>> before = torch.get_num_threads()
        >>> with cpu_threads(1):
        ...     torch.get_num_threads()
        1
        >>> torch.get_num_threads() == before
        True
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def time_cpu(
    contenders: Mapping[str, Callable[[], Any]], *, rounds: int = 25, budget_s: float = 3.0, seed: int = 0
) -> dict[str, Timing]:
    """Wall-clock milliseconds of one call of each contender on the CPU, in random order, medians of ``rounds``.

    Rounds stop when ``budget_s`` is spent, after at least three; with ``rounds=0`` each is called once and none is
    timed. A contender that raises gets its error instead of a time.

    Example:
        >>> times = time_cpu({"sort": lambda: sorted(range(100)), "fail": lambda: 1 / 0}, rounds=3)
        >>> times["sort"].ms > 0, times["fail"].error
        (True, 'ZeroDivisionError: division by zero')
    """
    return _interleaved(contenders, rounds, budget_s, seed, lambda fn: 1e3 * _seconds(fn, 1))


def host_time_us(
    contenders: Mapping[str, Callable[[], Any]], *, calls: int = 1000, rounds: int = 7, seed: int = 0
) -> dict[str, Timing]:
    """Host microseconds of one call of each contender: ``calls`` in a row from an idle device, without waiting for it.

    The times are in the ``ms`` fields of the result, in microseconds. Use small tensors: a full launch queue would be
    waited for.
    """

    def sample(fn: Callable[[], Any]) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return 1e6 * _seconds(fn, calls) / calls

    return _interleaved(contenders, rounds, 60.0, seed, sample)


def _seconds(fn: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    return time.perf_counter() - start


def _interleaved(
    contenders: Mapping[str, Callable[[], Any]],
    rounds: int,
    budget_s: float,
    seed: int,
    sample: Callable[[Callable[[], Any]], float],
) -> dict[str, Timing]:
    samples, failed = first_calls(contenders, 2 if rounds else 1)
    if not rounds:
        return {name: failed.get(name, NOT_TIMED) for name in contenders}
    order = random.Random(seed)
    end = time.perf_counter() + budget_s
    for number in range(rounds):
        if number >= 3 and time.perf_counter() > end:
            break
        names = list(samples)
        order.shuffle(names)
        for name in names:
            samples[name].append(sample(contenders[name]))
    return {name: failed[name] if name in failed else timing_of(samples[name]) for name in contenders}
