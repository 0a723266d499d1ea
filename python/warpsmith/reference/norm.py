"""The norms in plain torch operations."""

import torch
from torch import Tensor

from warpsmith.reference.dropout import dropout


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None, weight_offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)`` over the last dimension, in float32 or wider."""
    wide = x if x.dtype == torch.float64 else x.float()
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.to(wide.dtype) + weight_offset)
    return y.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimension, in float32 or wider."""
    wide = x if x.dtype == torch.float64 else x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    return y.to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``(y, residual_out)``: the sum in the dtype of ``residual``, and its rms_norm in that of ``x``."""
    wide = torch.promote_types(residual.dtype, torch.float32)
    residual_out = (x.to(wide) + residual.to(wide)).to(residual.dtype)
    return rms_norm(residual_out.to(wide), weight, eps, weight_offset).to(x.dtype), residual_out


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """``(y, residual_out)``: the sum in the dtype of ``residual``, and its layer_norm in that of ``x``."""
    wide = torch.promote_types(residual.dtype, torch.float32)
    residual_out = (x.to(wide) + residual.to(wide)).to(residual.dtype)
    return layer_norm(residual_out.to(wide), weight, bias, eps).to(x.dtype), residual_out


def dropout_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    p: float = 0.5,
    eps: float | None = None,
    training: bool = True,
    *,
    weight_offset: float = 0.0,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """``(y, residual_out)``: ``dropout(x) + residual`` in the dtype of ``residual``, its rms_norm in that of ``x``."""
    wide = torch.promote_types(residual.dtype, torch.float32)
    kept = dropout(x.to(wide), seed, p) if training else x.to(wide)
    residual_out = (kept + residual.to(wide)).to(residual.dtype)
    return rms_norm(residual_out.to(wide), weight, eps, weight_offset).to(x.dtype), residual_out


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    p: float = 0.5,
    eps: float = 1e-5,
    training: bool = True,
    *,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """``(y, residual_out)``: ``dropout(x) + residual`` in ``residual``'s dtype, its layer_norm in that of ``x``."""
    wide = torch.promote_types(residual.dtype, torch.float32)
    kept = dropout(x.to(wide), seed, p) if training else x.to(wide)
    residual_out = (kept + residual.to(wide)).to(residual.dtype)
    return layer_norm(residual_out.to(wide), weight, bias, eps).to(x.dtype), residual_out
