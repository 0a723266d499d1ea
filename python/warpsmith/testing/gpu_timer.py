"""Times GPU work with CUDA events: cold L2, launch latency hidden, contenders interleaved in random order.

Every sample is: a spin kernel, so that the host is ahead and launch latency stays out; a write of 256 MB, so that the
inputs are not in L2; an event, the call, an event. Contenders take turns in a new random order each round, so that
clocks and temperature favour none.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

FLUSH_BYTES = 256 * 2**20
SPIN_CYCLES = 2_000_000  # about 1 ms at 1.9 GHz
WARM_UP_CALLS = 3


@dataclass(frozen=True)
class Timing:
    """Times of one contender.

    Attributes:
        ms: median, or None if the contender failed.
        low_ms, high_ms: 10th and 90th percentile.
        samples: how many.
        error: why there is no time.
    """

    ms: float | None
    low_ms: float = 0.0
    high_ms: float = 0.0
    samples: int = 0
    error: str = ""

    @property
    def spread(self) -> float:
        """(90th - 10th percentile) / median."""
        return (self.high_ms - self.low_ms) / self.ms if self.ms else 0.0


NOT_TIMED = Timing(None, error="not timed")


def timing_of(samples: list[float]) -> Timing:
    """Median and percentiles of samples in milliseconds.

    Example:
        >>> timing_of([3.0, 1.0, 2.0]).ms
        2.0
    """
    ordered = sorted(samples)
    n = len(ordered)
    median = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return Timing(median, ordered[n // 10], ordered[min(n - 1, 9 * n // 10)], n)


def first_line(error: BaseException) -> str:
    """An exception in one short line."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:160]


def first_calls(
    contenders: Mapping[str, Callable[[], Any]], count: int, wait: Callable[[], Any] = lambda: None
) -> tuple[dict[str, list[float]], dict[str, Timing]]:
    """Calls each so often. Empty lists for the samples of those that work, and errors of the others."""
    alive: dict[str, list[float]] = {}
    failed: dict[str, Timing] = {}
    for name, fn in contenders.items():
        try:
            for _ in range(count):
                fn()
            wait()
            alive[name] = []
        except Exception as error:
            failed[name] = Timing(None, error=first_line(error))
    return alive, failed


@dataclass
class GpuTimer:
    """Times contenders on the current CUDA device.

    Args:
        rounds: samples of each contender. 0: each is called once and none is timed, so that it is compiled.
        budget_s: rounds stop when the measured work has taken this long, after at least three.
        spin_cycles: length of the spin kernel; for contenders that launch many kernels from a slow host, make it
            longer.
        seed: of the random order.

    A contender that raises gets a :class:`Timing` with its error, and the others go on. Nothing may be freed or
    allocated by other threads meanwhile; the timer itself synchronises the device once a round.
    """

    rounds: int = 25
    budget_s: float = 2.0
    spin_cycles: int = SPIN_CYCLES
    seed: int = 0
    _flush: torch.Tensor | None = field(default=None, init=False, repr=False)

    def time(self, contenders: Mapping[str, Callable[[], Any]]) -> dict[str, Timing]:
        """Times each ``{name: callable}``; what the callables return is dropped."""
        if not torch.cuda.is_available():
            raise RuntimeError("GpuTimer.time: expected a CUDA device, found none")
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        alive, failed = first_calls(contenders, WARM_UP_CALLS if self.rounds else 1, torch.cuda.synchronize)
        if not self.rounds:
            return {name: failed.get(name, NOT_TIMED) for name in contenders}
        gc.collect()
        collecting = gc.isenabled()
        gc.disable()  # a collection in the middle of a sample lasts longer than the spin kernel
        try:
            self._rounds(contenders, alive)
        finally:
            if collecting:
                gc.enable()
        return {name: failed[name] if name in failed else timing_of(alive[name]) for name in contenders}

    def _rounds(self, contenders: Mapping[str, Callable[[], Any]], alive: dict[str, list[float]]) -> None:
        order = random.Random(self.seed)
        spent_ms = 0.0
        for number in range(self.rounds):
            if number >= 3 and spent_ms > 1e3 * self.budget_s:
                break
            names = list(alive)
            order.shuffle(names)
            events = {name: self._sample(contenders[name]) for name in names}
            torch.cuda.synchronize()
            for name, (start, end) in events.items():
                alive[name].append(start.elapsed_time(end))
                spent_ms += alive[name][-1]

    def _sample(self, fn: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        assert self._flush is not None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(self.spin_cycles)
        self._flush.zero_()
        start.record()
        fn()
        end.record()
        return start, end


def copy_call(total_bytes: int) -> Callable[[], Any]:
    """The yardstick of memory-bound ops: a ``copy_`` that reads half of ``total_bytes`` and writes the other half."""
    elements = max(1, total_bytes // 8)
    source = torch.randn(elements, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def copy_yardstick_ms(total_bytes: int, timer: GpuTimer | None = None) -> float:
    """Milliseconds of a device copy that moves ``total_bytes`` in all (read + written), timed like an op.

    For a fair fraction pass :func:`copy_call` as one more contender instead: then it is interleaved with the op.
    """
    timing = (timer or GpuTimer()).time({"copy": copy_call(total_bytes)})["copy"]
    if timing.ms is None:
        raise RuntimeError(f"copy_yardstick_ms: {timing.error}")
    return timing.ms
