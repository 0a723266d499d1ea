"""A convolution and what follows it, in plain torch operations."""

from collections.abc import Sequence

import torch
from torch import Tensor


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(convolution(x, weight) + bias + residual)``, in float32 or wider, with torch's convolution."""
    wide = torch.promote_types(x.dtype, torch.float32)
    bias = None if bias is None else bias.to(wide)
    y = torch.nn.functional.conv2d(x.to(wide), weight.to(wide), bias, stride, padding, dilation, groups)
    y = y if residual is None else y + residual.to(wide)
    y = torch.relu(y) if activation == "relu" else torch.nn.functional.silu(y) if activation == "silu" else y
    return y.to(x.dtype)
