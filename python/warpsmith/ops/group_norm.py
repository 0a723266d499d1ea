"""Group norm in NHWC, alone or with SiLU behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith.ops._group_norm import NAME, function
from warpsmith.ops._pixels import warn_of_nchw


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
) -> Tensor:
    r"""Normalisation of each group of channels of each sample, behind it SiLU, in one op.

    .. math:: y = \operatorname{act}\left(\frac{x - \mu_{n,g}}{\sqrt{\sigma_{n,g}^2 + \epsilon}} \, w_c + b_c\right)

    with mean and variance (divided by the number of values) of a sample's group of adjacent channels:
    ``torch.nn.functional.group_norm``, with its order of arguments, then ``torch.nn.functional.silu``, rounded once.

    Args:
        x: shape (N, C) or (N, C, ...), float32, float16, bfloat16, or float64 on the CPU. Best in ``channels_last``:
            the channels of a pixel adjacent, the pixels at one stride. Any other layout is copied into that once.
        num_groups: of equally many channels; divides C.
        weight, bias: shape (C,), both of the dtype of ``x``, or both float32 beside a 16-bit ``x``. Each may be None.
        eps: added to the variance, >= 0.
        activation: None or ``"silu"``.

    Returns:
        A ``channels_last`` tensor of the shape and dtype of ``x``. Under autocast nothing is cast. Statistics and the
        reciprocal root are float32 (float64 for float64); no difference cancels, wherever the mean lies.

    Gradients for ``x``, ``weight`` and ``bias``, and theirs in turn. The second derivative is composed of plain torch
    operations. SiLU's input is computed again from ``x``.

    Deterministic: every sum has a fixed order. Moves 2 elements of memory for each of ``x`` forward and 3 backward;
    second reads come from shared memory and the L2 cache.

    Raises:
        ValueError: a dtype, shape, device or number that does not fit; the message names op, argument, expectation and
            finding.

    Source: Wu and He, Group Normalization, 2018.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.group_norm(torch.tensor([[1.0, 3.0, 10.0, 10.0]]), 2)
        tensor([[-1.0000,  1.0000,  0.0000,  0.0000]])
    """
    if activation is not None:
        checks.one_of(NAME, "activation", activation, (None, "silu"))
    if not torch.compiler.is_compiling():
        warn_of_nchw(NAME, x)
    return function(x, num_groups, weight, bias, eps, activation is not None)
