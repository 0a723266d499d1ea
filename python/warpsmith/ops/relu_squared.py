from __future__ import annotations

import torch
from torch import Tensor

from warpsmith.ops import _check
from warpsmith.ops._library import Gradients, Saved, Wants, call_raw, differentiable, raw, register_fake

_OP = "relu_squared"


def _fake_forward(x: Tensor) -> Tensor:
    _check.float_dtype(_OP, "x", x)
    _check.at_least_one_dimension(_OP, "x", x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_backward(dy: Tensor, x: Tensor) -> Tensor:
    op = _OP + "_backward"
    _check.float_dtype(op, "x", x)
    _check.float_dtype(op, "dy", dy)
    _check.same_dtype(op, "dy", dy, x)
    _check.same_shape(op, "dy", dy, x.shape)
    _check.same_device(op, "dy", dy, x)
    _check.at_least_one_dimension(op, "x", x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


register_fake("relu_squared", _fake_forward)
register_fake("relu_squared_forward", _fake_forward)
register_fake("relu_squared_backward", _fake_backward)


def _backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    return {"x": call_raw(raw.relu_squared_backward.default, dy, saved.x)}


def _differentiable_backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    x = saved.x
    math = torch.float64 if x.dtype == torch.float64 else torch.float32
    return {"x": (dy.to(math) * 2 * torch.relu(x.to(math))).to(x.dtype)}


def _plain(x: Tensor) -> Tensor:
    math = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.relu(x.to(math)).square().to(x.dtype)


_relu_squared = differentiable(
    "relu_squared",
    forward=raw.relu_squared_forward.default,
    rows=1,
    save=("x",),
    backward=_backward,
    differentiable_backward=_differentiable_backward,
    plain=_plain,
)


def relu_squared(x: Tensor) -> Tensor:
    r"""The square of a rectifier.

    .. math:: y = \max(x, 0)^2

    Args:
        x: shape (..., F), float32, float16, bfloat16, or float64 on the CPU. Any strides: rows that lie at one stride
            with adjacent columns are read where they are, others are copied once.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``. Arithmetic is float32 (float64 for float64) and rounds
        once. Under autocast nothing is cast.

    A gradient, and its own in turn (composed of plain torch operations). Nothing but ``x`` is kept for it.

    Deterministic. Moves 2 elements of memory for each of ``x`` forward and 3 backward.

    Raises:
        ValueError: a dtype that does not fit, or a tensor without dimensions.

    Source: So et al., Primer: Searching for Efficient Transformers for Language Modeling, 2021.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.relu_squared(torch.tensor([-1.0, 0.0, 3.0]))
        tensor([0., 0., 9.])
    """
    return _relu_squared(x)
