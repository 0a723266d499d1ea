from __future__ import annotations

from torch import Tensor

from warpsmith.ops._norm import norm

_layer_norm = norm("layer_norm")


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
