from __future__ import annotations

import torch
from torch import Tensor

from warpsmith.ops import _check
from warpsmith.ops._dropout import check_p, check_seed, draw_seed
from warpsmith.ops._library import Gradients, Saved, Wants, call_raw, differentiable, raw, register_fake

_OP = "dropout_add"


def _fake_forward(x: Tensor, residual: Tensor, seed: Tensor | None, p: float) -> Tensor:
    _check.float_dtype(_OP, "x", x)
    _check.float_dtype(_OP, "residual", residual)
    _check.same_dtype(_OP, "residual", residual, x)
    _check.same_shape(_OP, "residual", residual, x.shape)
    _check.same_device(_OP, "residual", residual, x)
    check_p(_OP, p)
    check_seed(_OP, seed, x)
    _check.at_least_one_dimension(_OP, "x", x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_backward(dy: Tensor, seed: Tensor, p: float) -> Tensor:
    op = _OP + "_backward"
    _check.float_dtype(op, "dy", dy)
    check_p(op, p)
    check_seed(op, seed, dy)
    _check.at_least_one_dimension(op, "dy", dy)
    return torch.empty_like(dy, memory_format=torch.contiguous_format)


register_fake("dropout_add", _fake_forward)
register_fake("dropout_add_forward", _fake_forward)
register_fake("dropout_add_backward", _fake_backward)

_raw_backward = raw.dropout_add_backward.default


def _backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    dx = dy
    if wants.x and saved.seed is not None:
        dx = call_raw(_raw_backward, dy, saved.seed, saved.p)
    return {"x": dx, "residual": dy}


def _differentiable_backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    dx = dy
    if saved.seed is not None:
        math = torch.float64 if dy.dtype == torch.float64 else torch.float32
        factor = call_raw(_raw_backward, torch.ones_like(dy, dtype=math), saved.seed, saved.p)
        dx = torch.where(factor != 0, dy.to(math) * factor, 0).to(dy.dtype)
    return {"x": dx, "residual": dy}


def _plain(x: Tensor, residual: Tensor, seed: Tensor | None, p: float) -> Tensor:
    if seed is None:
        return x + residual
    math = torch.float64 if x.dtype == torch.float64 else torch.float32
    factor = call_raw(_raw_backward, torch.ones(tuple(x.shape), dtype=math, device=x.device), seed, p)
    return (torch.where(factor != 0, x.to(math) * factor, 0) + residual.to(math)).to(x.dtype)


_dropout_add = differentiable(
    "dropout_add",
    forward=raw.dropout_add_forward.default,
    rows=2,
    save=("seed", "p"),
    backward=_backward,
    differentiable_backward=_differentiable_backward,
    plain=_plain,
)


def dropout_add(
    x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True, *, seed: Tensor | None = None
) -> Tensor:
    r"""Dropout and the addition to the residual stream, in one pass and without a stored mask.

    .. math:: y = \text{residual} + \frac{m \cdot x}{1 - p}, \qquad m_i \sim \operatorname{Bernoulli}(1 - p)

    Args:
        x: shape (..., F), float32, float16, bfloat16, or float64 on the CPU. Any strides: rows that lie at one stride
            with adjacent columns are read where they are, others are copied once.
        residual: of the shape, dtype and device of ``x``.
        p: the probability of dropping an element, 0 to 1, in steps of 1 / 65536. 1 drops everything.
        training: False: ``residual + x``.
        seed: two int64 on the device of ``x`` that determine the mask. None: drawn from torch's default generator of
            that device, so the mask follows ``torch.manual_seed``, and a replayed CUDA graph draws anew.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``. Arithmetic is float32 (float64 for float64) and rounds
        once. Under autocast nothing is cast.

    Gradients for ``x`` and ``residual``, and theirs in turn. The backward makes the mask again from the seed: 16 bytes
    are kept.

    Deterministic: the mask is a function of seed and position (Philox4x32-10, ``warpsmith.reference.dropout``), the
    same bits on the CPU and on CUDA. Moves 3 elements of memory for each of ``x`` forward and 2 backward; the gradient
    of ``residual`` is the incoming one, untouched.

    Raises:
        ValueError: a dtype, shape, device or probability that does not fit.

    Source: Srivastava et al., Dropout, 2014; Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.

    Example:
        >>> import torch, warpsmith
        >>> x, residual = torch.ones(2, 3), torch.zeros(2, 3)
        >>> warpsmith.dropout_add(x, residual, p=1.0)
        tensor([[0., 0., 0.],
                [0., 0., 0.]])
        >>> warpsmith.dropout_add(x, residual, p=0.1, training=False)
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    check_p(_OP, p)
    _check.flags(_OP, training=training)
    if not training or p == 0.0:
        return _dropout_add(x, residual, None, 0.0)
    if seed is None and isinstance(x, Tensor):  # else the op will refuse it
        seed = draw_seed(x)
    return _dropout_add(x, residual, seed, p)
