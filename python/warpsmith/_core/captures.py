"""Captured steps that are alive. NCCL waits for graphs that hold its collectives before it lets a process group end."""

import weakref
from typing import Any

import torch

alive: "weakref.WeakSet[Any]" = weakref.WeakSet()


def forget_all() -> None:
    """Drops their graphs. A step that is called again is captured anew."""
    for step in list(alive):
        step.forget()


def capturing() -> bool:
    """Whether the current stream is captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
