from __future__ import annotations

import torch
from torch import Tensor

from warpsmith.ops._biased import biased

_bias_relu = biased("bias_relu", lambda x: (torch.relu(x), (x > 0).to(x.dtype)))


def bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    r"""Adds a bias and applies a rectifier in one pass, to the result of a matrix product without bias.

    .. math:: y = \max(x + b, 0)

    Args:
        x: shape (..., F), float32, float16, bfloat16, or float64 on the CPU. Any strides: rows that lie at one stride
            with adjacent columns are read where they are, others are copied once.
        bias: shape (F,), the dtype of ``x``, or float32 beside a 16-bit ``x``.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``. The sum is float32 (float64 for float64), and the result is
        rounded once. Under autocast nothing is cast.

    Gradients for both inputs, and theirs in turn (composed of plain torch operations). As in torch, the derivative is 0
    at 0. The backward recomputes the sum: nothing but the inputs is kept.

    Deterministic: the sum over rows that is the gradient of the bias has a fixed order. Moves 2 elements of memory for
    each of ``x`` forward and 3 backward.

    Raises:
        ValueError: a dtype, shape or device that does not fit.

    Source: Nair and Hinton, Rectified Linear Units Improve Restricted Boltzmann Machines, 2010.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.bias_relu(torch.tensor([[-2.0, 1.0]]), torch.tensor([1.0, 1.0]))
        tensor([[0., 2.]])
    """
    return _bias_relu(x, bias)
