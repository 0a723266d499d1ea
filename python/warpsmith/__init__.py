"""Fused operators for PyTorch training: forward and backward, CPU and CUDA, compiled ahead of time."""

from warpsmith import _start as _start  # isort: skip  # first: it has one message for each thing that can be wrong
import gc
import importlib
from typing import Any

import torch

_collects = gc.isenabled()
gc.disable()  # what an import makes stays, and a collection that falls into it looks at all of torch: 80 ms
try:
    from warpsmith import nn, ops, optim
    from warpsmith._version import __version__
    from warpsmith.nn._dispatch import plan
    from warpsmith.ops import *  # noqa: F403
finally:
    if _collects:
        gc.enable()

__all__ = ["__version__", "nn", "optim", "plan"]
__all__ += ops.__all__

for _name in ops.__all__:
    torch.fx.wrap(_name)  # torch.fx.symbolic_trace keeps a call whole: what an op asks of a tensor no symbol can answer


def __getattr__(name: str) -> Any:
    """What few programs need is imported when it is asked for."""
    if name == "patch":
        return importlib.import_module("warpsmith.integrations.patch").patch
    if name not in ("amp", "distributed", "reference", "testing", "train"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
