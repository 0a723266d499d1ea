from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warpsmith.ops import _norm
from warpsmith.ops._library import Saved, call_raw, differentiable, raw, register_fake

_OP = "rms_norm"
_FLOAT32_EPS = torch.finfo(torch.float32).eps
_FLOAT64_EPS = torch.finfo(torch.float64).eps


def _fake_inference(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    _norm.check_inputs(_OP, x, weight)
    return _norm.new_output(x)


def _fake_forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> tuple[Tensor, Tensor]:
    y = _fake_inference(x, weight, eps, weight_offset)
    return y, _norm.new_statistics(x)


def _fake_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float, want_dx: bool, want_dweight: bool
) -> tuple[Tensor, Tensor]:
    op = _OP + "_backward"
    _norm.check_inputs(op, x, weight)
    _norm.check_gradient(op, "dy", dy, x)
    return _norm.new_gradient(x, want_dx, x), _norm.new_gradient(weight, want_dweight, x)


register_fake("rms_norm", _fake_forward)
register_fake("rms_norm_forward", _fake_forward)
register_fake("rms_norm_inference", _fake_inference)
register_fake("rms_norm_backward", _fake_backward)

_raw_backward = raw.rms_norm_backward.default


def _save(inputs: Sequence[Any], outputs: Any) -> Saved:
    x, weight, eps, weight_offset = inputs
    return (x, weight, outputs[1]), (eps, weight_offset)


def _backward(needs: Sequence[bool], tensors: Any, values: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, rstd = tensors
    want_dx, want_dweight = needs[0], needs[1]
    dx, dweight = call_raw(_raw_backward, dy, x, weight, rstd, values[1], want_dx, want_dweight)
    return dx if want_dx else None, dweight if want_dweight else None, None, None


def _differentiable_backward(needs: Sequence[bool], tensors: Any, values: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, _ = tensors
    eps, weight_offset = values
    dx, dweight = _norm.rms_norm_gradients(dy, x, weight, eps, weight_offset)
    return dx.to(x.dtype) if needs[0] else None, _norm.summed_to(dweight, weight) if needs[1] else None, None, None


_rms_norm = differentiable(
    "rms_norm",
    forward=raw.rms_norm_forward.default,
    inference=raw.rms_norm_inference.default,
    rows=1,
    save=_save,
    backward=_backward,
    differentiable_backward=_differentiable_backward,
)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None, weight_offset: float = 0.0) -> Tensor:
    r"""Root-mean-square layer normalisation over the last dimension.

    .. math:: y = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \, (w + w_0)

    Args:
        x: shape (..., D), float32, float16, bfloat16, or float64 on the CPU. Any strides: rows that lie at one stride
            with adjacent columns are read where they are, others are copied once.
        weight: shape (D,), the dtype of ``x``, or float32 beside a 16-bit ``x``. None: no weight.
        eps: added to the mean square, >= 0. None: the machine epsilon of the arithmetic, float32's (float64's for
            float64), which is what ``torch.nn.functional.rms_norm`` takes for 16-bit tensors too.
        weight_offset: :math:`w_0`, added to the weight; 1.0 for weights stored around zero. Not used without a weight.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``. Under autocast nothing is cast; the activation's dtype
        comes out, whatever the torch version. Sums and the reciprocal root are float32 (float64 for float64).

    Gradients for ``x`` and ``weight``, and theirs in turn. The second derivative is composed of plain torch operations.

    Deterministic: every sum has a fixed order, that of the weight gradient too. Moves 2 elements of memory for each of
    ``x`` forward and 3 backward.

    Raises:
        ValueError: a dtype, shape, device or eps that does not fit; the message names op, argument, expectation and
            finding.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.rms_norm(torch.tensor([[3.0, -4.0]]), eps=0.0)
        tensor([[ 0.8485, -1.1314]])
    """
    if eps is None:
        eps = _FLOAT64_EPS if isinstance(x, Tensor) and x.dtype is torch.float64 else _FLOAT32_EPS
    return _rms_norm(x, weight, eps, weight_offset)
