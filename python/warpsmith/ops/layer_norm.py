from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from warpsmith.ops import _norm
from warpsmith.ops._library import Saved, call_raw, differentiable, raw, register_fake

_OP = "layer_norm"


def _fake_inference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    _norm.check_inputs(_OP, x, weight, bias)
    return _norm.new_output(x)


def _fake_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_inference(x, weight, bias, eps), _norm.new_statistics(x), _norm.new_statistics(x)


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    want_dx: bool,
    want_dweight: bool,
    want_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    op = _OP + "_backward"
    _norm.check_inputs(op, x, weight, bias)
    _norm.check_gradient(op, "dy", dy, x)
    return (
        _norm.new_gradient(x, want_dx, x),
        _norm.new_gradient(weight, want_dweight, x),
        _norm.new_gradient(bias, want_dbias, x),
    )


register_fake("layer_norm", _fake_forward)
register_fake("layer_norm_forward", _fake_forward)
register_fake("layer_norm_inference", _fake_inference)
register_fake("layer_norm_backward", _fake_backward)

_raw_backward = raw.layer_norm_backward.default


def _save(inputs: Sequence[Any], outputs: Any) -> Saved:
    x, weight, bias, eps = inputs
    return (x, weight, bias, outputs[1], outputs[2]), (eps,)


def _backward(needs: Sequence[bool], tensors: Any, values: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    wanted = needs[0], needs[1], needs[2]
    grads = call_raw(_raw_backward, dy, *tensors, *wanted)
    return (*(g if want else None for g, want in zip(grads, wanted, strict=True)), None)


def _differentiable_backward(needs: Sequence[bool], tensors: Any, values: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, *_ = tensors
    ds, dweight, dbias = _norm.layer_norm_gradients(dy, x, weight, values[0])
    return (
        ds.to(x.dtype) if needs[0] else None,
        _norm.summed_to(dweight, weight) if needs[1] else None,
        _norm.summed_to(dbias, bias) if needs[2] else None,
        None,
    )


_layer_norm = differentiable(
    "layer_norm",
    forward=raw.layer_norm_forward.default,
    inference=raw.layer_norm_inference.default,
    rows=1,
    save=_save,
    backward=_backward,
    differentiable_backward=_differentiable_backward,
)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    r"""Layer normalisation over the last dimension.

    .. math:: y = \frac{x - \operatorname{mean}(x)}{\sqrt{\operatorname{var}(x) + \epsilon}} \, w + b

    with the variance of the population (divided by D), as ``torch.nn.functional.layer_norm`` over one dimension.

    Args:
        x: shape (..., D), float32, float16, bfloat16, or float64 on the CPU. Any strides: rows that lie at one stride
            with adjacent columns are read where they are, others are copied once.
        weight, bias: shape (D,), both of the dtype of ``x``, or both float32 beside a 16-bit ``x``. Each may be None.
        eps: added to the variance, >= 0.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``. Under autocast nothing is cast; the activation's dtype
        comes out, whatever the torch version. Mean, variance and reciprocal root are float32 (float64 for float64); the
        variance is that of the differences from the mean, so a mean that dwarfs it does no harm.

    Gradients for ``x``, ``weight`` and ``bias``, and theirs in turn. The second derivative is composed of plain torch
    operations.

    Deterministic: every sum has a fixed order, those of weight and bias gradient too. Moves 2 elements of memory for
    each of ``x`` forward and 3 backward.

    Raises:
        ValueError: a dtype, shape, device or eps that does not fit; the message names op, argument, expectation and
            finding.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
        tensor([[-1.,  1.]])
    """
    return _layer_norm(x, weight, bias, eps)
