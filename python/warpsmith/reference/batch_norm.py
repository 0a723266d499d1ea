"""Batch norm in plain torch operations."""

import torch
from torch import Tensor


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """``activation((x - mean) / sqrt(var + eps) * weight + bias + residual)``, in float32 or wider, with the mean and
    the variance of each channel; training updates the running ones."""
    wide = x if x.dtype == torch.float64 else x.float()
    dims = [d for d in range(x.dim()) if d != 1]
    if training:
        mean = wide.mean(dims)
        squares = (wide - _channels(mean, x)).square().sum(dims)
        rows = x.numel() // max(1, x.shape[1])
        var = squares / torch.full_like(squares, rows)  # by a number CUDA multiplies by the reciprocal
        if running_mean is not None and running_var is not None and x.numel():
            for running, value in ((running_mean, mean), (running_var, squares / torch.full_like(squares, rows - 1))):
                old = running.to(wide.dtype)
                running.copy_((old * (1 - momentum) + value.detach() * momentum).to(running.dtype))
    else:
        if running_mean is None or running_var is None:
            raise ValueError("batch_norm: running_mean: expected a tensor when training is False, got None")
        mean, var = running_mean.to(wide.dtype), running_var.to(wide.dtype)
    y = (wide - _channels(mean, x)) * _channels(torch.rsqrt(var + eps), x)
    if weight is not None:
        y = y * _channels(weight.to(wide.dtype), x)
    if bias is not None:
        y = y + _channels(bias.to(wide.dtype), x)
    if residual is not None:
        y = y + residual.to(wide.dtype)
    return (torch.relu(y) if activation == "relu" else y).to(x.dtype)


def _channels(values: Tensor, x: Tensor) -> Tensor:
    """A value a channel, to go with x."""
    return values.view(-1, *(1,) * (x.dim() - 2))
