"""What the ops of the norm family share: checks and shapes of their fakes, and gradients in plain torch operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warpsmith.ops import _check


def _check_beside(op: str, argument: str, t: Tensor, dtype: torch.dtype) -> None:
    got = _check.float_dtype(op, argument, t)
    half = dtype.itemsize == 2
    if got != dtype and not (half and got == torch.float32):
        expected = _check.dtype_text(dtype) + (" or float32" if half else "")
        _check.refuse(op, argument, expected, _check.dtype_text(got))


def check_inputs(
    op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, residual: Tensor | None = None
) -> None:
    """The checks of the C++ binding, in its order."""
    dtype = _check.float_dtype(op, "x", x)
    _check.at_least_one_dimension(op, "x", x)
    if residual is not None:
        _check_beside(op, "residual", residual, dtype)
        _check.same_shape(op, "residual", residual, x.shape)
        _check.same_device(op, "residual", residual, x)
    for name, t in (("weight", weight), ("bias", bias)):
        if t is None:
            continue
        if name == "bias" and weight is not None:
            _check.same_dtype(op, name, t, weight)
        else:
            _check_beside(op, name, t, dtype)
        _check.same_shape(op, name, t, x.shape[-1:])
        _check.same_device(op, name, t, x)


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def new_statistics(x: Tensor) -> Tensor:
    """A fake mean or rstd: one element a row."""
    rows: Any = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return x.new_empty((rows,), dtype=statistics_dtype(x))


def new_output(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def new_gradient(like: Tensor | None, wanted: bool, none_like: Tensor) -> Tensor:
    """A fake gradient, without elements where it is not wanted."""
    return new_output(like) if wanted and like is not None else none_like.new_empty((0,))


def check_gradient(op: str, argument: str, grad: Tensor, like: Tensor) -> None:
    _check.same_dtype(op, argument, grad, like)
    _check.same_shape(op, argument, grad, like.shape)
    _check.same_device(op, argument, grad, like)


def layer_norm_gradients(dy: Tensor, s: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(ds, dy * s_hat, dy) of layer_norm in plain torch operations, in float32 or wider: differentiable in turn."""
    math = statistics_dtype(s)
    s_math, dy_math = s.to(math), dy.to(math)
    centred = s_math - s_math.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    s_hat = centred * rstd
    g = dy_math if weight is None else dy_math * weight.to(math)
    ds = rstd * (g - g.mean(-1, keepdim=True) - s_hat * (g * s_hat).mean(-1, keepdim=True))
    return ds, dy_math * s_hat, dy_math


def rms_norm_gradients(
    dy: Tensor, s: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    """(ds, dy * s_hat) of rms_norm, likewise."""
    math = statistics_dtype(s)
    s_math, dy_math = s.to(math), dy.to(math)
    rstd = torch.rsqrt(s_math.square().mean(-1, keepdim=True) + eps)
    s_hat = s_math * rstd
    g = dy_math if weight is None else dy_math * (weight.to(math) + weight_offset)
    ds = rstd * (g - s_hat * (g * s_hat).mean(-1, keepdim=True))
    return ds, dy_math * s_hat


def summed_to(columns: Tensor, like: Tensor) -> Tensor:
    """The sum over all rows, in the dtype of the weight or bias ``like``."""
    return columns.sum_to_size(like.shape).to(like.dtype)
