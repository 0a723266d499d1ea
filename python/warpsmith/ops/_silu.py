"""silu and its derivative in plain torch operations, for second derivatives."""

from __future__ import annotations

import torch
from torch import Tensor


def silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """silu(x) and its derivative."""
    s = torch.sigmoid(x)
    return x * s, s * (1 + x * (1 - s))
