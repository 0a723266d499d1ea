"""What the norms of pixels share: checks and shapes of (N, C, ...) tensors in channels_last."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from warpsmith._core import checks


def check_pair(op: str, x: Tensor, **pair: Tensor | None) -> None:
    """Two parameters or statistics of a channel, of one dtype: that of x, or float32 beside a 16-bit x."""
    found: Tensor | None = None
    for name, t in pair.items():
        if t is None:
            continue
        if found is not None:
            checks.same_dtype(op, name, t, found)
        else:
            checks.dtype_beside(op, name, t, x.dtype)
        checks.same_shape(op, name, t, x.shape[1:2])
        checks.same_device(op, name, t, x)
        found = t


def check_dimensions(op: str, x: Tensor) -> None:
    if x.dim() < 2:
        checks.refuse(op, "x", "at least two dimensions, (N, C, ...)", checks.shape_text(x.shape))


def new_pixels(x: Tensor) -> Tensor:
    """A fake tensor like x in which the channels of a pixel are adjacent."""
    return x.new_empty((x.shape[0], *x.shape[2:], x.shape[1])).movedim(-1, 1)


def wide_dtype(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def channels(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *(1,) * (x.dim() - 2))


def warn_of_nchw(op: str, x: Tensor) -> None:
    """Says what to write where each call copies x into channels_last; Python shows it once."""
    if isinstance(x, Tensor) and x.dim() > 2 and x.stride(1) != 1 and x.shape[1] > 1 and x.is_contiguous():
        text = (
            f"{op}: x: expected channels_last, got NCHW, which every call copies once; write "
            "model.to(memory_format=torch.channels_last), and the same for its input"
        )
        warnings.warn(text, stacklevel=3)
