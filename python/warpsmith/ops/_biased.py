"""What the biased activations share: fakes and autograd of ``y = f(x + bias)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from warpsmith.ops import _check
from warpsmith.ops._library import Gradients, Saved, Wants, call_raw, differentiable, raw, register_fake

# f and its derivative in plain torch operations, for second derivatives: (x, *extra) -> (f(x), f'(x)).
Function = Callable[..., tuple[Tensor, Tensor]]


def _check_inputs(op: str, x: Tensor, bias: Tensor) -> None:
    dtype = _check.float_dtype(op, "x", x)
    _check.dtype_beside(op, "bias", bias, dtype)
    _check.at_least_one_dimension(op, "x", x)
    _check.same_shape(op, "bias", bias, x.shape[-1:])
    _check.same_device(op, "bias", bias, x)


def biased(name: str, function: Function) -> Callable[..., Tensor]:
    """The function ``(x, bias, *extra) -> y`` of an op whose raw ops ``name``, ``name_forward`` and ``name_backward``
    take ``extra`` last."""
    raw_backward = getattr(raw, name + "_backward").default

    def fake_forward(x: Tensor, bias: Tensor, *extra: Any) -> Tensor:
        _check_inputs(name, x, bias)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def fake_backward(
        dy: Tensor, x: Tensor, bias: Tensor, want_dx: bool, want_dbias: bool, *extra: Any
    ) -> tuple[Tensor, Tensor]:
        op = name + "_backward"
        _check_inputs(op, x, bias)
        _check.float_dtype(op, "dy", dy)
        _check.same_dtype(op, "dy", dy, x)
        _check.same_shape(op, "dy", dy, x.shape)
        _check.same_device(op, "dy", dy, x)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if want_dx else x.new_empty((0,))
        return dx, bias.new_empty(bias.shape) if want_dbias else x.new_empty((0,))

    register_fake(name, fake_forward)
    register_fake(name + "_forward", fake_forward)
    register_fake(name + "_backward", fake_backward)

    options = [a.name for a in raw_backward._schema.arguments[5:]]

    def backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
        extra = [getattr(saved, option) for option in options]
        dx, dbias = call_raw(raw_backward, dy, saved.x, saved.bias, wants.x, wants.bias, *extra)
        return {"x": dx, "bias": dbias}

    def differentiable_backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
        x, bias = saved.x, saved.bias
        math = torch.float64 if x.dtype == torch.float64 else torch.float32
        derivative = function(x.to(math) + bias.to(math), *(getattr(saved, option) for option in options))[1]
        g = dy.to(math) * derivative
        return {"x": g.to(x.dtype), "bias": g.sum_to_size(bias.shape).to(bias.dtype)}

    def plain(x: Tensor, bias: Tensor, *extra: Any) -> Tensor:
        math = torch.float64 if x.dtype == torch.float64 else torch.float32
        return function(x.to(math) + bias.to(math), *extra)[0].to(x.dtype)

    return differentiable(
        name,
        forward=getattr(raw, name + "_forward").default,
        rows=1,
        save=("x", "bias", *options),
        backward=backward,
        differentiable_backward=differentiable_backward,
        plain=plain,
    )
