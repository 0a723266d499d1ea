"""Captured steps that are alive. NCCL waits for graphs that hold its collectives before it lets a process group end."""

import weakref
from typing import Any

alive: "weakref.WeakSet[Any]" = weakref.WeakSet()


def forget_all() -> None:
    """Drops their graphs. A step that is called again is captured anew."""
    for step in list(alive):
        step.forget()
