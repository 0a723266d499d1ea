from __future__ import annotations

from torch import Tensor

from warpsmith.ops._norm import default_eps, norm

_add_rms_norm = norm("add_rms_norm")


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    r"""Adds a residual stream and normalises the sum by its root mean square, over the last dimension.

    .. math:: r' = x + r, \qquad y = \frac{r'}{\sqrt{\operatorname{mean}(r'^2) + \epsilon}} \, (w + w_0)

    Args:
        x: shape (..., D), float32, float16, bfloat16, or float64 on the CPU. Any strides: rows that lie at one stride
            with adjacent columns are read where they are, others are copied once.
        residual: the shape of ``x``; its dtype, or float32 beside a 16-bit ``x``.
        weight: shape (D,), the dtype of ``x``, or float32 beside a 16-bit ``x``. None: no weight.
        eps: added to the mean square, >= 0. None: the machine epsilon of the arithmetic, as for
            :func:`warpsmith.rms_norm`.
        weight_offset: :math:`w_0`, added to the weight; 1.0 for weights stored around zero. Not used without a weight.

    Returns:
        ``(y, residual_out)``, contiguous: ``y`` in the dtype of ``x``, and :math:`r'` in that of ``residual``, rounded
        once. ``y`` is the norm of what ``residual_out`` holds. Under autocast nothing is cast. Sums and the reciprocal
        root are float32 (float64 for float64).

    Both outputs are differentiable: gradients for ``x``, ``residual`` and ``weight``, and theirs in turn. The second
    derivative is composed of plain torch operations.

    Deterministic: every sum has a fixed order, that of the weight gradient too. Moves 4 elements of memory for each of
    ``x`` forward and 4 backward (with a residual of the dtype of ``x``).

    Raises:
        ValueError: a dtype, shape, device or eps that does not fit; the message names op, argument, expectation and
            finding.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.add_rms_norm(torch.tensor([[2.0, -4.0]]), torch.tensor([[1.0, 0.0]]), None, eps=0.0)
        (tensor([[ 0.8485, -1.1314]]), tensor([[ 3., -4.]]))
    """
    return _add_rms_norm(x, residual, weight, default_eps(x) if eps is None else eps, weight_offset)
