from __future__ import annotations

from torch import Tensor

from warpsmith.ops._biased import biased
from warpsmith.ops._silu import silu

_bias_silu = biased("bias_silu", silu)


def bias_silu(x: Tensor, bias: Tensor) -> Tensor:
    r"""A bias and a sigmoid linear unit in one pass, for what a matrix product without bias gives.

    .. math:: y = \operatorname{silu}(x + b), \qquad \operatorname{silu}(z) = \frac{z}{1 + e^{-z}}

    Args:
        x: shape (..., F), float32, float16, bfloat16, or float64 on the CPU. Any strides: rows that lie at one stride
            with adjacent columns are read where they are, others are copied once.
        bias: shape (F,), the dtype of ``x``, or float32 beside a 16-bit ``x``.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``. The sum and all arithmetic are float32 (float64 for
        float64), rounded once. Under autocast nothing is cast.

    Gradients for both inputs, and theirs in turn (composed of plain torch operations). The backward recomputes the
    activation: nothing but the inputs is kept.

    Deterministic: the sum over rows that is the gradient of the bias has a fixed order. Moves 2 elements of memory for
    each of ``x`` forward and 3 backward.

    Raises:
        ValueError: a dtype, shape or device that does not fit.

    Source: Elfwing, Uchibe and Doya, Sigmoid-Weighted Linear Units, 2017.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.bias_silu(torch.tensor([[0.0, 1.0]]), torch.tensor([0.0, 1.0]))
        tensor([[0.0000, 1.7616]])
    """
    return _bias_silu(x, bias)
