"""Linear layers with what stands behind them, in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


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
) -> Tensor:
    """``activation(x @ weight^T + bias) + residual``; main_grad, where a gradient goes, has no meaning here."""
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
