"""Names the gradients for which the host waits in a backward pass, and the lines of the forward pass that they are of.

A backward pass is one line of a program, and torch tells that the host has waited only after the whole of it. What ran
within is in the record of torch's profiler, by autograd's names and the sequence numbers of the forward pass.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler_legacy  # without Kineto: it starts at once, and says nothing
from torch.overrides import TorchFunctionMode

from warpsmith.train.source_lines import Line, callers, line_of

# torch's operators for which the host waits where tensors are on a device.
WAITING_OPS = (
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
)
_EVENTS = frozenset(f"aten::{name}" for name in WAITING_OPS)
_BACKWARD = 1  # torch's RecordScope::BACKWARD_FUNCTION
_KEPT = 100_000  # calls whose lines are known


def next_node() -> int:
    """The sequence number of the next node of autograd's graph that this thread makes."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


class Made(NamedTuple):
    """A call that made autograd's nodes: the sequence numbers before and after it, and its line."""

    first: int
    last: int
    line: Line


class ForwardLines:
    """The lines that made the nodes of autograd's graph."""

    def __init__(self) -> None:
        self._made: deque[Made] = deque(maxlen=_KEPT)

    def note(self, first: int, frame: FrameType) -> None:
        """Notes the line of a call that has just ended, if it made nodes. first: :func:`next_node` before it."""
        last = next_node()
        if last > first:
            self._made.append(Made(first, last, line_of(callers(frame))))

    def of(self, number: int) -> Line | None:
        """The line that made a node."""
        return next((made.line for made in reversed(self._made) if made.first <= number < made.last), None)


class NotedCalls(TorchFunctionMode):
    """Notes the lines of all calls of torch functions."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = ForwardLines()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next_node()
        result = func(*args, **(kwargs or {}))
        self.lines.note(first, sys._getframe(1))
        return result


class BackwardWaits:
    """What a profiled backward pass waited for: text in words, empty where nothing was found."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []  # node, sequence number

    def text(self, lines: ForwardLines) -> str:
        """``ProdBackward1, the gradient of train.py:3: y = x.prod(-1)`` of each."""
        return ", ".join(dict.fromkeys(_with_line(node, lines.of(number)) for node, number in self.found))


def _with_line(node: str, line: Line | None) -> str:
    return node if line is None or not line.file else f"{node}, the gradient of {line}"


@contextlib.contextmanager
def backward_waits() -> Iterator[BackwardWaits]:
    """Finds the waits of backward passes that run within. Finds none where another profiler runs."""
    waits = BackwardWaits()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this profiler is an old one
        profiler = profiler_legacy.profile()
    try:
        profiler.__enter__()
    except RuntimeError:  # there is one already
        yield waits
        return
    try:
        yield waits
    finally:
        profiler.__exit__(None, None, None)
        waits.found = [found for event in profiler.function_events or [] if (found := _wait_of(event))]


def _wait_of(event: Any) -> tuple[str, int] | None:
    """The node in whose formula an operation is that waits."""
    if event.name not in _EVENTS:
        return None
    parent = event.cpu_parent
    while parent is not None and parent.name not in _EVENTS:
        if parent.scope == _BACKWARD:
            return parent.name, parent.sequence_nr
        parent = parent.cpu_parent
    return None
