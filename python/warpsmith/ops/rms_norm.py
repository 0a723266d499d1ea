from __future__ import annotations

from torch import Tensor

from warpsmith.ops._norm import default_eps, norm

_rms_norm = norm("rms_norm")


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
        eps = default_eps(x)
    return _rms_norm(x, weight, eps, weight_offset)
