"""gelu and its derivative in plain torch operations, for second derivatives."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from warpsmith.ops import _check


def gelu(x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """gelu(x), exact or by tanh, and its derivative."""
    if tanh:
        twice = 2 * math.sqrt(2 / math.pi)
        s = torch.sigmoid(twice * x * (1 + 0.044715 * x * x))
        return x * s, s + x * s * (1 - s) * twice * (1 + 3 * 0.044715 * x * x)
    cdf = 0.5 * torch.erfc(-x / math.sqrt(2))
    return x * cdf, cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def is_tanh(op: str, approximate: str) -> bool:
    """The flag of the raw ops for torch's argument ``approximate``."""
    if not isinstance(approximate, str) or approximate not in ("none", "tanh"):
        _check.refuse(
            op,
            "approximate",
            "'none' or 'tanh'",
            repr(approximate) if isinstance(approximate, str) else _check.value_text(approximate),
        )
    return approximate == "tanh"
