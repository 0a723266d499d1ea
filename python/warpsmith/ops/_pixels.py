"""What the norms of pixels share: checks and shapes of (N, C, ...) tensors in channels_last."""

import warnings
from typing import Any

import torch
from torch import Tensor

from warpsmith._core import checks


def check_dimensions(op: str, x: Tensor) -> None:
    if x.dim() < 2:
        checks.refuse(op, "x", "at least two dimensions, (N, C, ...)", checks.shape_text(x.shape))


def new_pixels(x: Tensor) -> Tensor:
    """A fake tensor like x in which the channels of a pixel are adjacent."""
    return x.new_empty((x.shape[0], *x.shape[2:], x.shape[1])).movedim(-1, 1)


def parameter_gradients(a: Any) -> list[Tensor]:
    """Fake gradients of weight and bias, for the arguments of a raw backward."""
    wanted = (a.want_dweight, a.weight), (a.want_dbias, a.bias)
    return [a.dy.new_empty((0,)) if t is None or not want else torch.empty_like(t) for want, t in wanted]


def other_dimensions(x: Tensor) -> list[int]:
    """All but the channels'."""
    return [d for d in range(x.dim()) if d != 1]


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
