"""A small op in all the forms the checks look at: y = x * scale; and how a fault of it is planted and caught."""

import re
from dataclasses import replace

import pytest
import torch
from torch.autograd.function import once_differentiable
from warpsmith.testing import BadInput, Case, OpSpec

library = torch.library.Library("warpsmith_toy", "FRAGMENT")
library.define("scale_forward(Tensor x, Tensor scale) -> Tensor")
library.define("scale_backward(Tensor dy, Tensor x, Tensor scale) -> (Tensor, Tensor)")
library.define("scale(Tensor x, Tensor scale) -> Tensor")
raw = torch.ops.warpsmith_toy


def refuse_bad(x, scale):
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise ValueError(f"scale: x: expected a floating dtype, got {x.dtype}")
    if scale.shape != x.shape[-1:]:
        raise ValueError(f"scale: scale: expected shape {tuple(x.shape[-1:])}, got {tuple(scale.shape)}")


def forward(x, scale):
    refuse_bad(x, scale)
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * scale.to(wide.dtype)).to(x.dtype).contiguous()


def backward(dy, x, scale):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    dx = (dy.to(wide) * scale.to(wide)).to(x.dtype).contiguous()
    return dx, (dy.to(wide) * x.to(wide)).sum_to_size(scale.shape).to(scale.dtype)


def fake_forward(x, scale):
    refuse_bad(x, scale)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def fake_backward(dy, x, scale):
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(
        scale, memory_format=torch.contiguous_format
    )


def formula(ctx, dy):
    return raw.scale_backward.default(dy, *ctx.saved_tensors)


for name, kernel, fake in (
    ("scale", forward, fake_forward),
    ("scale_forward", forward, fake_forward),
    ("scale_backward", backward, fake_backward),
):
    library.impl(name, kernel, "CPU")
    torch.library.register_fake(f"warpsmith_toy::{name}", fake, lib=library)
torch.library.register_autograd(
    "warpsmith_toy::scale",
    once_differentiable(formula),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=library,
)


class Refused(torch.autograd.Function):
    """Ties gradients to what they were made of: ``once_differentiable`` refuses only if ``dy`` requires a gradient."""

    @staticmethod
    def forward(ctx, dx, dscale, *sources):
        return dx.view_as(dx), dscale.view_as(dscale)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("scale: no second derivative")


class Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return raw.scale_forward.default(x, scale)

    @staticmethod
    def backward(ctx, dy):
        with torch.no_grad():
            dx, dscale = formula(ctx, dy)
        if torch.is_grad_enabled():
            dx, dscale = Refused.apply(dx, dscale, dy, *ctx.saved_tensors)
        return dx if ctx.needs_input_grad[0] else None, dscale if ctx.needs_input_grad[1] else None

    @classmethod
    def apply_by_name(cls, x, scale):
        return cls.apply(x, scale)


def scale(x, scale):
    if torch.compiler.is_compiling():
        return raw.scale.default(x, scale)
    return Apply.apply(x, scale)


def reference(x, scale):
    return (x * scale).to(x.dtype)


def inputs(case, rng):
    return {"x": rng.normal(case.shape), "scale": rng.normal(case.shape[-1:])}


SPEC = OpSpec(
    name="scale",
    op=scale,
    reference=reference,
    inputs=inputs,
    cases=[
        Case(shape, dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        for shape in ((5, 3), (4, 17, 33), (129,))
    ],
    differentiable=("x", "scale"),
    outputs=("y",),
    traced="warpsmith_toy::scale",
    opcheck=dict.fromkeys(op.default for op in (raw.scale_forward, raw.scale_backward, raw.scale)),
    bad_inputs=[
        BadInput("x of integers", lambda i: {**i, "x": i["x"].int()}, "expected a floating dtype, got torch.int32"),
        BadInput(
            "long scale",
            lambda i: {**i, "scale": i["scale"].repeat(2)},
            re.escape("scale: scale: expected shape (3,), got (6,)"),
        ),
    ],
    devices=("cpu",),
)


def caught(check, *arguments, match):
    with pytest.raises((AssertionError, RuntimeError), match=match):
        check(*arguments)


def with_op(op, **changes):
    return replace(SPEC, op=op, **changes)
