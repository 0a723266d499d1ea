"""softmax and its logarithm over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from warpsmith.ops._softmax import softmax_of

_softmax = softmax_of("softmax", log=False)
_log_softmax = softmax_of("log_softmax", log=True)


def softmax(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    r"""Probabilities of the elements of each row.

    .. math:: y_i = \frac{e^{x_i - m}}{\sum_j e^{x_j - m}}, \qquad m = \max_j x_j

    Args:
        x: shape (..., C), float32, float16, bfloat16, or float64 on the CPU. Any strides: rows that lie at one stride
            with adjacent columns are read where they are, others are copied once.
        dtype: of the result, as for ``torch.softmax``: ``x`` is cast first. None: that of ``x``. float32 of a 16-bit
            ``x`` costs no pass of its own.

    Returns:
        A contiguous tensor of the shape of ``x``. Arithmetic is float32 (float64 for float64) and rounds once. Rows of
        -inf alone, with an inf or a NaN are NaN, as torch's. Under autocast nothing is cast.

    A gradient, and its own in turn (composed of plain torch operations). Nothing but the result is kept for it.

    Deterministic: sums of a row have a fixed order. Moves 2 elements of memory for each of ``x`` forward and 3
    backward; rows that are longer than the chip's shared memory are read twice. A gradient that begins elsewhere
    between addresses of 16 bytes than the result, row by row, is copied once.

    Raises:
        ValueError: a dtype that does not fit, or a tensor without dimensions.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.softmax(torch.tensor([[0.0, 0.0], [float("-inf"), 5.0]]))
        tensor([[0.5000, 0.5000],
                [0.0000, 1.0000]])
    """
    return _softmax(x, dtype)


def log_softmax(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    r"""The logarithm of :func:`softmax`, without its underflow.

    .. math:: y_i = x_i - m - \log \sum_j e^{x_j - m}, \qquad m = \max_j x_j

    Args:
        x: shape (..., C), float32, float16, bfloat16, or float64 on the CPU. Any strides, as for :func:`softmax`.
        dtype: of the result, as for ``torch.log_softmax``. None: that of ``x``.

    Returns:
        A contiguous tensor of the shape of ``x``; arithmetic, NaN and autocast are those of :func:`softmax`.

    A gradient, and its own in turn (composed of plain torch operations). Nothing but the result is kept for it.

    Deterministic. Moves 2 elements of memory for each of ``x`` forward and 3 backward.

    Raises:
        ValueError: a dtype that does not fit, or a tensor without dimensions.

    Source: as of :func:`softmax`.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.log_softmax(torch.tensor([0.0, 0.0]))
        tensor([-0.6931, -0.6931])
    """
    return _log_softmax(x, dtype)
