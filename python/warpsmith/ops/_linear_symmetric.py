"""matmul_symmetric: fakes, gradient, and the products of optimizers that are known to be symmetric."""

from __future__ import annotations

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.library import Gradients, Saved, Wants, call_raw, differentiable, raw, register_fake

NAME = "matmul_symmetric"


def _square(op: str, x: Tensor) -> Tensor:
    checks.float_dtype(op, "x", x)
    if x.dim() < 2:
        checks.refuse(op, "x", "at least two dimensions", checks.shape_text(x.shape))
    return x.new_empty((*x.shape[:-1], x.shape[-2]))


def _fake(x: Tensor) -> Tensor:
    return _square(NAME, x)


def _fake_product(x: Tensor, y: Tensor, z: Tensor | None, alpha: float, beta: float) -> Tensor:
    op = "symmetric_product"
    checks.float_dtype(op, "x", x)
    out = _square(op, x)
    checks.alike(op, "y", y, x)
    if z is not None:
        checks.alike(op, "z", z, x, out.shape)
    return out


register_fake(NAME, _fake)
register_fake("symmetric_product", _fake_product)


def _plain(x: Tensor) -> Tensor:
    return x @ x.mT


def _gradients(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    return {"x": (dy + dy.mT) @ saved.x}


matmul_symmetric = differentiable(
    NAME,
    forward=raw.matmul_symmetric.default,
    save=("x",),
    backward=_gradients,
    differentiable_backward=_gradients,
    plain=_plain,
)


def product(x: Tensor, y: Tensor, z: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """``alpha * x @ y.mT + beta * z``, where the caller knows that the product is symmetric, and z is; no gradients."""
    with torch.no_grad():
        return call_raw(raw.symmetric_product.default, x, y, z, alpha, beta)
