from __future__ import annotations

from torch import Tensor

from warpsmith.ops._norm import default_eps, dropout_seed, norm

_OP = "dropout_add_rms_norm"
_dropout_add_rms_norm = norm(_OP)


def dropout_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    p: float = 0.5,
    eps: float | None = None,
    training: bool = True,
    *,
    weight_offset: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Drops elements at random, adds a residual stream and normalises the sum by its root mean square.

    .. math::
        r' = \frac{m \odot x}{1 - p} + r, \qquad
        y = \frac{r'}{\sqrt{\operatorname{mean}(r'^2) + \epsilon}} \, (w + w_0)

    with a mask :math:`m` that is zero with probability :math:`p`, each element by itself. The mask is never stored: the
    backward makes it again from the seed.

    Args:
        x: shape (..., D), float32, float16, bfloat16, or float64 on the CPU.
        residual: the shape of ``x``; its dtype, or float32 beside a 16-bit ``x``.
        weight, eps, weight_offset: as in :func:`warpsmith.add_rms_norm`.
        p: the probability of a drop, in [0, 1], taken to the nearest multiple of 1/65536. With 1 nothing of ``x`` is
            kept.
        training: False: nothing is dropped nor scaled, as with ``p = 0``; the result is
            :func:`warpsmith.add_rms_norm`'s, bit for bit.
        seed: int64, shape (2,), on the device of ``x``: which mask. None: drawn from torch's default generator there;
            ``torch.manual_seed`` repeats it, activation checkpointing too, and a CUDA graph draws anew at each replay.

    Returns:
        ``(y, residual_out)`` as :func:`warpsmith.add_rms_norm`. The dropped, scaled and added value is rounded once.

    Both outputs are differentiable: gradients for ``x``, ``residual`` and ``weight``, and theirs in turn. The second
    derivative is composed of plain torch operations.

    Deterministic for a seed, with the same mask on CPU and CUDA. Moves 4 elements of memory for each of ``x`` forward
    and 5 backward (with a residual of the dtype of ``x``).

    Raises:
        ValueError: a dtype, shape, device, eps or p that does not fit; the message names op, argument, expectation and
            finding. The generator is left as it was.

    Source: Srivastava et al., Dropout, 2014; Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; the random
    numbers are those of Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.

    Example:
        >>> import torch, warpsmith
        >>> x, residual = torch.tensor([[2.0, -4.0]]), torch.tensor([[1.0, 0.0]])
        >>> warpsmith.dropout_add_rms_norm(x, residual, None, p=0.1, eps=0.0, training=False)
        (tensor([[ 0.8485, -1.1314]]), tensor([[ 3., -4.]]))
    """
    if eps is None:
        eps = default_eps(x)
    seed = dropout_seed(_OP, x, residual, weight, None, p, eps, training, seed, weight_offset)
    return _dropout_add_rms_norm(x, residual, weight, seed, p, eps, weight_offset)
