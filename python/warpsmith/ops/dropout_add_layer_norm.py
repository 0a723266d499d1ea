from __future__ import annotations

from torch import Tensor

from warpsmith.ops._norm import dropout_seed, norm

_OP = "dropout_add_layer_norm"
_dropout_add_layer_norm = norm(_OP)


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    p: float = 0.5,
    eps: float = 1e-5,
    training: bool = True,
    *,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Drops elements at random, adds a residual stream and applies layer normalisation to the sum.

    .. math::
        r' = \frac{m \odot x}{1 - p} + r, \qquad
        y = \frac{r' - \operatorname{mean}(r')}{\sqrt{\operatorname{var}(r') + \epsilon}} \, w + b

    with a mask :math:`m` that is zero with probability :math:`p`, each element by itself. The mask is never stored: the
    backward makes it again from the seed.

    Args:
        x: shape (..., D), float32, float16, bfloat16, or float64 on the CPU.
        residual: the shape of ``x``; its dtype, or float32 beside a 16-bit ``x``.
        weight, bias, eps: as in :func:`warpsmith.add_layer_norm`.
        p: the probability of a drop, in [0, 1], taken to the nearest multiple of 1/65536. With 1 nothing of ``x`` is
            kept.
        training: False: nothing is dropped nor scaled, as with ``p = 0``; the result is
            :func:`warpsmith.add_layer_norm`'s, bit for bit.
        seed: int64, shape (2,), on the device of ``x``: which mask. None: drawn from torch's default generator there;
            ``torch.manual_seed`` repeats it, activation checkpointing too, and a CUDA graph draws anew at each replay.

    Returns:
        ``(y, residual_out)`` as :func:`warpsmith.add_layer_norm`. The dropped, scaled and added value is rounded once.

    Both outputs are differentiable: gradients for ``x``, ``residual``, ``weight`` and ``bias``, and theirs in turn. The
    second derivative is composed of plain torch operations.

    Deterministic for a seed, with the same mask on CPU and CUDA. Moves 4 elements of memory for each of ``x`` forward
    and 5 backward (with a residual of the dtype of ``x``).

    Raises:
        ValueError: a dtype, shape, device, eps or p that does not fit; the message names op, argument, expectation and
            finding. The generator is left as it was.

    Source: Srivastava et al., Dropout, 2014; Ba, Kiros and Hinton, Layer Normalization, 2016; the random numbers are
    those of Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.

    Example:
        >>> import torch, warpsmith
        >>> x, residual = torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 2.0]])
        >>> warpsmith.dropout_add_layer_norm(x, residual, None, None, p=0.1, eps=0.0, training=False)
        (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
    """
    seed = dropout_seed(_OP, x, residual, weight, bias, p, eps, training, seed)
    return _dropout_add_layer_norm(x, residual, weight, bias, seed, p, eps)
