"""Lines of a user's program: which of them a frame of torch or of this package runs for."""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_OURS = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["warpsmith"]))
_LIBRARY = (*_OURS, *(str(module.__file__) for module in (contextlib, functools, warnings)), "<frozen")
_AUTOGRAD = str(Path(torch.autograd.__file__ or "").parent)
_PASSES = ("backward", "grad", "_engine_run_backward")  # torch's functions that run a backward pass


class Line(NamedTuple):
    """A line of a program."""

    file: str
    number: int
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.source}" if self.file else "unknown line"


def line_of(frames: Iterable[tuple[FrameType, int]]) -> Line:
    """The first line that is neither torch's nor Warpsmith's among frames with their current lines, innermost first."""
    for frame, number in frames:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARY):
            return Line(file, number, linecache.getline(file, number).strip())
    return Line("", 0, "")


def callers(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """A running frame and those that called it, with their current lines."""
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def in_backward(frame: FrameType | None) -> bool:
    """Whether a frame runs for a backward pass, whose operations have no line of their own."""
    codes = (caller.f_code for caller, _ in callers(frame))
    return any(code.co_name in _PASSES and code.co_filename.startswith(_AUTOGRAD) for code in codes)
