"""What a rank is doing: its calls of torch.distributed, and the line where its program is."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from warpsmith.distributed.watching.report import EVERYBODY, PAIRS

CALLS = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all"),
    *(
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "recv",
        "reduce",
    ),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
    *("batch_isend_irecv", "irecv", "isend", "monitored_barrier"),
)
_KEPT = 32  # calls of a group: a rank runs ahead of one that waits in a collective to which both gave other tensors
# Calls of a pair of ranks: the numbers of others say nothing about them.
CALLS_OF_PAIRS = ("batch_isend_irecv", "irecv", "isend", "recv", "send")
_NOT_THE_USERS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}", "<frozen")
_STANDARD_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"


class Call(NamedTuple):
    """A call of torch.distributed. number: of the group's calls, from 1; what: the tensors given; at: whose line."""

    op: str
    group: str
    number: int
    what: str
    at: str
    since: float


class Recorder:
    """Sees the calls that a rank makes through ``torch.distributed.<name>`` while it is open."""

    def __init__(self) -> None:
        self.waiting: Call | None = None
        self.last: dict[str, Call] = {}  # by group
        self.recent: dict[str, deque[Call]] = {}  # by group, the last one included
        self.calls = 0
        self.waited_s = 0.0  # in all calls so far
        self._originals: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def open(self) -> None:
        for name in CALLS:
            original = getattr(dist, name, None)
            if original is not None:
                ours = self._recording(name, original)
                self._originals[name] = original, ours
                setattr(dist, name, ours)

    def close(self) -> None:
        for name, (original, ours) in self._originals.items():
            if getattr(dist, name) is ours:
                setattr(dist, name, original)
        self._originals.clear()

    def _recording(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(original).parameters)
        at = names.index("group") if "group" in names else len(names)

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            # One collective made of others; or one of a group without this rank, which returns at once.
            given = args[at] if at < len(args) else kwargs.get("group")
            if self.waiting is not None or given == dist.GroupMember.NON_GROUP_MEMBER:
                return original(*args, **kwargs)
            group = PAIRS if name in CALLS_OF_PAIRS else _group_of(args, kwargs)
            before = self.last.get(group)
            number = 1 if before is None else before.number + 1
            call = Call(name, group, number, _tensors(args, kwargs), user_line(sys._getframe(1)), time.monotonic())
            self.last[group], self.waiting = call, call
            self.recent.setdefault(group, deque(maxlen=_KEPT)).append(call)
            self.calls += 1
            try:
                return original(*args, **kwargs)
            finally:
                self.waiting = None
                self.waited_s += time.monotonic() - call.since

        return recorded


def _group_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
    if not found or found[0] is dist.group.WORLD:
        return EVERYBODY
    return "ranks " + ", ".join(map(str, dist.get_process_group_ranks(found[0])))


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(_tensor(value))
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            found.append(f"{len(value)} of {_tensor(value[0])}")
    return ", ".join(found)


def _tensor(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"


def user_line(frame: FrameType | None) -> str:
    """File, line and function of the innermost frame that is neither torch's nor Python's nor ours."""
    innermost = frame
    while frame is not None and is_not_the_users(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "nowhere"
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"


@functools.cache
def is_not_the_users(file: str) -> bool:
    in_python = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return in_python or file.startswith(_NOT_THE_USERS)
