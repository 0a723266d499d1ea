"""The softmax family's fakes and differentiable functions, made of its rows: raw ops of ``(x, wide)``."""

from collections.abc import Callable

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.library import Gradients, Saved, Wants, call_raw, differentiable, raw, register_fake
from warpsmith.ops._quantize import check_dtype

HALVES = (torch.float16, torch.bfloat16)


def softmax_of(name: str, log: bool) -> Callable[..., Tensor]:
    """The function ``(x, dtype) -> y`` of an op."""
    raw_backward = getattr(raw, name + "_backward").default

    def fake_forward(x: Tensor, wide: bool) -> Tensor:
        checks.float_dtype(name, "x", x)
        checks.at_least_one_dimension(name, "x", x)
        dtype = torch.float32 if wide and x.dtype in HALVES else x.dtype
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

    def fake_backward(dy: Tensor, y: Tensor, x_dtype: torch.dtype) -> Tensor:
        op = name + "_backward"
        checks.float_dtype(op, "y", y)
        checks.float_dtype(op, "dy", dy)
        checks.alike(op, "dy", dy, y)
        if x_dtype != y.dtype and not (y.dtype == torch.float32 and x_dtype in HALVES):
            checks.refuse(op, "x_dtype", "that of y, or 16 bits beside float32", checks.dtype_text(x_dtype))
        return torch.empty_like(y, dtype=x_dtype, memory_format=torch.contiguous_format)

    register_fake((name, name + "_forward"), fake_forward)
    register_fake(name + "_backward", fake_backward)

    def backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
        return {"x": call_raw(raw_backward, dy, saved.y, saved.x_dtype)}

    def differentiable_backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
        """In float32 or wider. The kept result leads back to x."""
        wide = torch.promote_types(dy.dtype, torch.float32)
        y, g = saved.y.to(wide), dy.to(wide)
        if log:
            dx = g - y.exp() * g.sum(-1, keepdim=True)
        else:
            dx = y * (g - (y * g).sum(-1, keepdim=True))
        return {"x": dx.to(saved.x_dtype)}

    def plain(x: Tensor, wide: bool) -> Tensor:
        dtype = torch.float32 if wide and x.dtype in HALVES else x.dtype
        return (torch.log_softmax if log else torch.softmax)(x, -1, dtype)

    call = differentiable(
        name,
        forward=getattr(raw, name + "_forward").default,
        rows=1,
        save=("y", "x.dtype"),
        backward=backward,
        differentiable_backward=differentiable_backward,
        plain=plain,
    )

    def function(x: Tensor, dtype: torch.dtype | None) -> Tensor:
        if dtype is None or not isinstance(x, Tensor):
            return call(x, False)
        check_dtype(name, "dtype", dtype, checks.FLOAT_DTYPES)
        if dtype == torch.float32 and x.dtype in HALVES:
            return call(x, True)
        checks.float_dtype(name, "x", x)
        return call(x.to(dtype), False)

    return function
