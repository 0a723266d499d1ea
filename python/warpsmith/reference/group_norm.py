"""Group norm in plain torch operations."""

import torch
from torch import Tensor


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
) -> Tensor:
    """``activation((x - mean) / sqrt(var + eps) * weight + bias)``, in float32 or wider, with the mean and the variance
    of each group of channels of each sample."""
    wide = x if x.dtype == torch.float64 else x.float()
    grouped = wide.unflatten(1, (num_groups, x.shape[1] // num_groups))
    dims = list(range(2, grouped.dim()))
    centered = grouped - grouped.mean(dims, keepdim=True)
    y = (centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + eps)).flatten(1, 2)
    if weight is not None:
        y = y * _channels(weight.to(wide.dtype), x)
    if bias is not None:
        y = y + _channels(bias.to(wide.dtype), x)
    return (torch.nn.functional.silu(y) if activation == "silu" else y).to(x.dtype)


def _channels(values: Tensor, x: Tensor) -> Tensor:
    """A value a channel, to go with x."""
    return values.view(-1, *(1,) * (x.dim() - 2))
