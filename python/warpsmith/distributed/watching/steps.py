"""How long the steps of each rank take, which rank the others wait for, and whose numbers are not finite."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping

from torch import Tensor

from warpsmith.distributed.watching.report import State

_KEPT = 50  # steps that a median is of
STRAGGLER = 1.25  # times the ranks' median of a rank's own time
_LEAST_MS = 1.0  # more than the median, too: shorter differences are noise


class Steps:
    """The steps of this rank."""

    def __init__(self) -> None:
        self.count = 0
        self._last: tuple[float, float] | None = None  # the clock, and the seconds in collectives, at the last step
        self._took_ms: deque[float] = deque(maxlen=_KEPT)
        self._own_ms: deque[float] = deque(maxlen=_KEPT)
        self._unread: deque[tuple[int, str, float | Tensor]] = deque(maxlen=1000)
        self._named: set[str] = set()

    def end(self, waited_s: float, values: Mapping[str, float | Tensor]) -> None:
        """A step ends. waited_s: what this rank has spent in collectives so far. values: numbers of the step."""
        now = time.monotonic()
        if self._last is not None:
            took, waited = now - self._last[0], waited_s - self._last[1]
            self._took_ms.append(took * 1e3)
            self._own_ms.append(max(0.0, took - waited) * 1e3)
        self._last = now, waited_s
        self.count += 1
        for name, value in values.items():
            self._unread.append((self.count, name, value.detach() if isinstance(value, Tensor) else value))

    def medians_ms(self) -> tuple[float, float]:
        """Of a step, and of the part of it outside of collectives."""
        took, own = list(self._took_ms), list(self._own_ms)
        return (statistics.median(took), statistics.median(own)) if own else (0.0, 0.0)

    def not_finite(self) -> list[str]:
        """What was given since the last call and is NaN or infinite, each name once. May wait for the device.

        Example:
            >>> steps = Steps()
            >>> steps.end(0.0, {"loss": float("nan")})
            >>> steps.not_finite()
            ['loss is nan in step 1']
        """
        found = []
        while self._unread:
            step, name, value = self._unread.popleft()
            try:
                number = _worst(value)
            except RuntimeError:  # the device has failed: the program hears of it itself
                continue
            if not math.isfinite(number) and name not in self._named:
                self._named.add(name)
                found.append(f"{name} is {number} in step {step}")
        return found


def _worst(value: float | Tensor) -> float:
    """The value; of several the sum, which is finite only if all are, but for those that overflow."""
    return float(value.double().sum()) if isinstance(value, Tensor) else float(value)


def stragglers(states: Mapping[int, State | None]) -> list[int]:
    """The ranks that take much longer outside of collectives than most.

    Example:
        >>> stragglers({r: State(r, 1, steps=9, step_ms=20.0, own_ms=19.0 if r == 2 else 9.0) for r in range(4)})
        [2]
    """
    own = {rank: s.own_ms for rank, s in states.items() if s is not None and s.steps > 1}
    if len(own) < 2:
        return []
    # The lower median: of two ranks the faster one.
    usual = statistics.median_low(own.values())
    return [rank for rank, ms in sorted(own.items()) if ms > STRAGGLER * usual and ms - usual > _LEAST_MS]


def table(states: Mapping[int, State | None]) -> str:
    """The text: a line for each rank."""
    slow = stragglers(states)
    lines = [f"{'rank':>5} {'steps':>7} {'ms a step':>11} {'own ms':>9}"]
    for rank, s in sorted(states.items()):
        if s is None:
            lines.append(f"{rank:>5} never came to watch()")
        else:
            flag = "  straggler" if rank in slow else ""
            lines.append(f"{rank:>5} {s.steps:>7} {s.step_ms:>11.2f} {s.own_ms:>9.2f}{flag}")
    return "\n".join(lines) + "\n"
