from __future__ import annotations

from torch import Tensor

from warpsmith.ops._norm import norm

_add_layer_norm = norm("add_layer_norm")


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    r"""Adds a residual stream and applies layer normalisation to the sum, over the last dimension.

    .. math::
        r' = x + r, \qquad y = \frac{r' - \operatorname{mean}(r')}{\sqrt{\operatorname{var}(r') + \epsilon}} \, w + b

    Args:
        x: shape (..., D), float32, float16, bfloat16, or float64 on the CPU. Any strides: rows that lie at one stride
            with adjacent columns are read where they are, others are copied once.
        residual: the shape of ``x``; its dtype, or float32 beside a 16-bit ``x``.
        weight, bias: shape (D,), both of the dtype of ``x``, or both float32 beside a 16-bit ``x``. Each may be None.
        eps: added to the variance, >= 0.

    Returns:
        ``(y, residual_out)``, contiguous: ``y`` in the dtype of ``x``, and :math:`r'` in that of ``residual``, rounded
        once. ``y`` is the norm of what ``residual_out`` holds. Under autocast nothing is cast. Mean, variance and
        reciprocal root are float32 (float64 for float64).

    Both outputs are differentiable: gradients for ``x``, ``residual``, ``weight`` and ``bias``, and theirs in turn. The
    second derivative is composed of plain torch operations.

    Deterministic: every sum has a fixed order, those of weight and bias gradient too. Moves 4 elements of memory for
    each of ``x`` forward and 4 backward (with a residual of the dtype of ``x``).

    Raises:
        ValueError: a dtype, shape, device or eps that does not fit; the message names op, argument, expectation and
            finding.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.add_layer_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 2.0]]), None, eps=0.0)
        (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
    """
    return _add_layer_norm(x, residual, weight, bias, eps)
