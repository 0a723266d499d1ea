"""Linear layers with what stands behind them, in plain torch operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from warpsmith.reference.quantize import dequantize_fp8, quantize_fp8


def _projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As torch: a product, its bias in the same dtype."""
    return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _activated(z: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return z
    if activation.startswith("gelu"):
        return functional.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")
    return {"relu": torch.relu, "silu": functional.silu}[activation](z)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    residual: Tensor | None = None,
    main_grad: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """``activation(x @ weight^T + bias) + residual``; main_grad, where a gradient goes, and batch_invariant have no
    meaning here."""
    y = _activated(_projected(x, weight, bias), activation)
    return y if residual is None else y + residual


def mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str = "gelu_tanh"
) -> Tensor:
    """``activation(x @ w1^T + b1) @ w2^T + b2``."""
    return _projected(_activated(_projected(x, w1, b1), activation), w2, b2)


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    activation: str = "silu",
    *,
    main_grads: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``activation(x @ gate_weight^T + gate_bias) * (x @ up_weight^T + up_bias)``; main_grads have no meaning here."""
    return _activated(_projected(x, gate_weight, gate_bias), activation) * _projected(x, up_weight, up_bias)


class _Symmetric(torch.autograd.Function):
    """One product in the backward, of the sum of g and its transpose; torch's has two, whose infinities may cancel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x @ x.mT

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return dx @ x.mT + x @ dx.mT

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return (dy + dy.mT) @ ctx.saved_tensors[0]


def matmul_symmetric(x: Tensor) -> Tensor:
    """``x @ x^T`` over the last two dimensions."""
    y: Any = _Symmetric.apply(x)
    return y


class _Scaled(torch.autograd.Function):
    """Three products of what casts leave of their factors. Scales of rows are absorbed: the gradients' products take
    the same bytes of x and of the weight, and the gradient is multiplied by their scales before it is cast."""

    @staticmethod
    def kept(t: Tensor, ctx: Any, dtype: torch.dtype, weight: bool = False, columns: bool = False) -> Tensor:
        """Rows and back; with ``columns`` t is turned before and after."""
        scaling = "block2d" if ctx.scaling == "block" and weight else ctx.scaling
        data, scale, *turned, _ = quantize_fp8(
            t, scaling, dtype, transpose="only" if columns else "no", power_of_two=ctx.power_of_two
        )
        values = dequantize_fp8(*(turned if columns else (data, scale)))
        return (values.t() if columns else values).to(torch.promote_types(t.dtype, torch.float32))

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
        ctx.scaling, ctx.power_of_two, ctx.wgrad = (options[k] for k in ("scaling", "power_of_two", "wgrad"))
        ctx.grad_dtype = torch.float8_e5m2 if options["grad_dtype"] == "e5m2" else torch.float8_e4m3fn
        ctx.save_for_backward(x, weight, bias)
        e4m3 = torch.float8_e4m3fn
        y = _Scaled.kept(x, ctx, e4m3) @ _Scaled.kept(weight, ctx, e4m3, weight=True).t()
        return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        e4m3, wide = torch.float8_e4m3fn, torch.promote_types(dy.dtype, torch.float32)
        of_rows = of_columns = dy
        if ctx.scaling == "row":
            (x_bytes, x_scale), (w_bytes, w_scale) = (
                quantize_fp8(t, "row", e4m3, power_of_two=ctx.power_of_two)[:2] for t in (x, weight)
            )
            assert x_bytes is not None and x_scale is not None and w_bytes is not None and w_scale is not None
            of_rows, of_columns = dy.float() * w_scale.t(), dy.float() * x_scale
            w_turned, x_turned = w_bytes.to(wide), x_bytes.to(wide)
        else:
            w_turned, x_turned = (
                _Scaled.kept(t, ctx, e4m3, weight=t is weight, columns=True).to(wide) for t in (weight, x)
            )
        dx = _Scaled.kept(of_rows, ctx, ctx.grad_dtype).to(wide) @ w_turned
        if ctx.wgrad == "high":
            dweight = (dy.t() if weight.dtype == dy.dtype else dy.t().to(wide)) @ x.to(
                dy.dtype if weight.dtype == dy.dtype else wide
            )
        else:
            dweight = _Scaled.kept(of_columns, ctx, ctx.grad_dtype, columns=True).t().to(wide) @ x_turned
        dbias = None if bias is None else dy.to(wide).sum(0).to(bias.dtype)
        return dx.to(dy.dtype), dweight.to(weight.dtype), dbias, None


def scaled_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scaling: str = "row",
    grad_dtype: str = "e4m3",
    wgrad: str = "fp8",
    power_of_two: bool = True,
) -> Tensor:
    """``x @ weight^T + bias`` and its gradients, each factor cast to 8-bit floats and back."""
    options = {"scaling": scaling, "grad_dtype": grad_dtype, "wgrad": wgrad, "power_of_two": power_of_two}
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y: Any = _Scaled.apply(rows, weight, bias, options)
    return y.view(*x.shape[:-1], weight.shape[0])
