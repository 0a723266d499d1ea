"""Batch norm in NHWC, alone or with a residual and ReLU behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith.ops._batch_norm import function
from warpsmith.ops._pixels import warn_of_nchw


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    r"""Batch normalisation of each channel, behind it a residual and ReLU, in one op.

    .. math:: y = \operatorname{act}\left(\frac{x - \mu_c}{\sqrt{\sigma_c^2 + \epsilon}} \, w_c + b_c + r\right)

    with mean and variance (divided by the number of values) of channel c over the batch where ``training``, and the
    running ones otherwise: ``torch.nn.functional.batch_norm``, with its order of arguments, then ``+ residual`` and
    ``torch.relu``, rounded once.

    Args:
        x: shape (N, C) or (N, C, ...), float32, float16, bfloat16, or float64 on the CPU. Best in ``channels_last``:
            the channels of a pixel adjacent, the pixels at one stride. Any other layout is copied into that once.
        running_mean, running_var: shape (C,), both of the dtype of ``x``, or both float32 beside a 16-bit ``x``. In
            training they are updated in place, ``running_var`` with the variance divided by the number of values less
            one; both None: no update.
        weight, bias: shape (C,), both of the dtype of ``x``, or both float32 beside a 16-bit ``x``. Each may be None.
        training: statistics of the batch. Needs more than one value a channel.
        momentum: the share of the batch in the new running statistics.
        eps: added to the variance, >= 0.
        residual: shape and dtype of ``x``, added before the activation.
        activation: None or ``"relu"``.

    Returns:
        A ``channels_last`` tensor of the shape and dtype of ``x``. Under autocast nothing is cast. Sums, statistics and
        the reciprocal root are float32 (float64 for float64); no difference cancels, wherever the mean lies.

    Gradients for ``x``, ``weight``, ``bias`` and ``residual``, and theirs in turn. The second derivative is composed of
    plain torch operations. For a residual behind ReLU the forward keeps one byte for each 16 bytes of ``x``.

    Deterministic: every sum has a fixed order, those of the statistics and the parameter gradients too. Moves 3
    elements of memory for each of ``x`` forward and 5 backward; with a residual 4 and 5, behind ReLU 4 and 6.

    Raises:
        ValueError: a dtype, shape, device or number that does not fit; one value a channel in training; the message
            names op, argument, expectation and finding.

    Source: Ioffe and Szegedy, Batch Normalization, 2015; the sums: Chan, Golub and LeVeque, Updating Formulae and a
    Pairwise Algorithm for Computing Sample Variances, 1979.

    Example:
        >>> import torch, warpsmith
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> mean, var = torch.zeros(1), torch.ones(1)
        >>> warpsmith.batch_norm(x, mean, var, training=True, activation="relu")
        tensor([[0.0000],
                [1.0000]])
        >>> mean, var
        (tensor([0.2000]), tensor([1.1000]))
    """
    if activation is not None:
        checks.one_of("batch_norm", "activation", activation, (None, "relu"))
    if not torch.compiler.is_compiling():
        warn_of_nchw("batch_norm", x)
    relu = activation is not None
    y, new_mean, new_var = function(x, residual, weight, bias, running_mean, running_var, training, momentum, eps, relu)
    if training and running_mean is not None and running_var is not None:
        if new_mean.shape == running_mean.shape:  # traced
            with torch.no_grad():
                running_mean.copy_(new_mean)
                running_var.copy_(new_var)
        else:  # written by the op, which autograd has not seen
            torch.autograd.graph.increment_version((running_mean, running_var))
    return y
