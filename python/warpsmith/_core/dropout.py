"""Where dropout masks come from: a seed tensor, drawn once a call and shared by forward and backward.

The mask itself is never stored. ``csrc/common/dropout.h`` defines it as a function of the seed tensor and the element's
index, with the same bits on the CPU, on CUDA and in ``warpsmith.reference.dropout``.
"""

import torch
from torch import Tensor

from warpsmith._core import checks


def draw_seed(x: Tensor) -> Tensor:
    """Two int64, (seed, offset), drawn on the device of ``x`` from torch's default generator there.

    One small torch op, so it does what torch's own random ops do: it follows ``torch.manual_seed``, never makes the
    host wait, gives new values at each replay of a CUDA graph, is repeated by activation checkpointing, and under
    ``torch.compile`` becomes part of the graph (where Inductor has a generator of its own unless
    ``torch._inductor.config.fallback_random`` is set).
    """
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=x.device)


def check_p(op: str, p: float) -> None:
    """Refuses what is no probability. True is ``training`` in the place of ``p``."""
    checks.refuse_non_number(op, "p", p, "a number in [0, 1]")
    if not 0.0 <= p <= 1.0:
        checks.refuse(op, "p", "a number in [0, 1]", checks.value_text(p))


def check_seed(op: str, seed: Tensor | None, like: Tensor) -> None:
    """The checks of the C++ binding on a seed tensor; None stands for no dropout."""
    if seed is not None:
        checks.exactly(op, "seed", seed, torch.int64, (2,), like)
