"""softmax and its logarithm over the last dimension, in plain torch operations."""

import torch
from torch import Tensor


def softmax(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """``exp(x) / sum exp(x)``, in float32 (float64 for that)."""
    e = _differences(x, dtype).exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype if dtype is None else dtype)


def log_softmax(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """``x - log sum exp(x)``, in float32 (float64 for that)."""
    z = _differences(x, dtype)
    return (z - z.exp().sum(-1, keepdim=True).log()).to(x.dtype if dtype is None else dtype)


def _differences(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """From the largest of a row."""
    x = x.to(torch.promote_types(x.dtype if dtype is None else dtype, torch.float32))
    return x - x.detach().amax(-1, keepdim=True) if x.shape[-1] else x
