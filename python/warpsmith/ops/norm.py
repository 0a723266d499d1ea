"""The norms: RMS and layer norm, alone, after a residual addition, and after dropout and a residual addition."""

from __future__ import annotations

from torch import Tensor

from warpsmith.ops._norm import default_eps, dropout_seed, norm

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


_layer_norm = norm("layer_norm")


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    r"""Layer normalisation over the last dimension.

    .. math:: y = \frac{x - \operatorname{mean}(x)}{\sqrt{\operatorname{var}(x) + \epsilon}} \, w + b

    with the variance of the population (divided by D), as ``torch.nn.functional.layer_norm`` over one dimension.

    Args:
        x: as in :func:`warpsmith.rms_norm`.
        weight, bias: shape (D,), both of the dtype of ``x``, or both float32 beside a 16-bit ``x``. Each may be None.
        eps: added to the variance, >= 0.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``. Under autocast nothing is cast; the activation's dtype
        comes out, whatever the torch version. Mean, variance and reciprocal root are float32 (float64 for float64); the
        variance is that of the differences from the mean, so a mean that dwarfs it does no harm.

    Gradients for ``x``, ``weight`` and ``bias``, and theirs in turn. The second derivative is composed of plain torch
    operations.

    Deterministic: every sum has a fixed order, those of weight and bias gradient too. Moves 2 elements of memory for
    each of ``x`` forward and 3 backward.

    Raises:
        ValueError: as :func:`warpsmith.rms_norm`.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
        tensor([[-1.,  1.]])
    """
    return _layer_norm(x, weight, bias, eps)


_add_rms_norm = norm("add_rms_norm")


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    r"""Adds a residual stream and normalises the sum by its root mean square, over the last dimension.

    .. math:: r' = x + r, \qquad y = \frac{r'}{\sqrt{\operatorname{mean}(r'^2) + \epsilon}} \, (w + w_0)

    Args:
        x: as in :func:`warpsmith.rms_norm`.
        residual: of the shape of ``x``; its dtype, or float32 beside a 16-bit ``x``.
        weight, eps, weight_offset: as in :func:`warpsmith.rms_norm`.

    Returns:
        ``(y, residual_out)``, contiguous: ``y`` in the dtype of ``x``, and :math:`r'` in that of ``residual``, rounded
        once. ``y`` is the norm of what ``residual_out`` holds. Under autocast nothing is cast. Sums and the reciprocal
        root are float32 (float64 for float64).

    Both outputs are differentiable: gradients for ``x``, ``residual`` and ``weight``, and theirs in turn. The second
    derivative is composed of plain torch operations.

    Deterministic: every sum has a fixed order, that of the weight gradient too. Moves 4 elements of memory for each of
    ``x`` forward and 4 backward (with a residual of the dtype of ``x``).

    Raises:
        ValueError: as :func:`warpsmith.rms_norm`.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.add_rms_norm(torch.tensor([[2.0, -4.0]]), torch.tensor([[1.0, 0.0]]), None, eps=0.0)
        (tensor([[ 0.8485, -1.1314]]), tensor([[ 3., -4.]]))
    """
    return _add_rms_norm(x, residual, weight, default_eps(x) if eps is None else eps, weight_offset)


_add_layer_norm = norm("add_layer_norm")


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    r"""Adds a residual stream and applies layer normalisation to the sum, over the last dimension.

    .. math::
        r' = x + r, \qquad y = \frac{r' - \operatorname{mean}(r')}{\sqrt{\operatorname{var}(r') + \epsilon}} \, w + b

    Args:
        x: as in :func:`warpsmith.rms_norm`.
        residual: of the shape of ``x``; its dtype, or float32 beside a 16-bit ``x``.
        weight, bias, eps: as in :func:`warpsmith.layer_norm`.

    Returns:
        ``(y, residual_out)`` as :func:`warpsmith.add_rms_norm`; mean and variance are float32 (float64 for float64).

    Gradients as :func:`warpsmith.add_rms_norm`'s, and for ``bias``.

    Deterministic: every sum has a fixed order, those of weight and bias gradient too. Moves 4 elements of memory for
    each of ``x`` forward and 4 backward (with a residual of the dtype of ``x``).

    Raises:
        ValueError: as :func:`warpsmith.rms_norm`.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.add_layer_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 2.0]]), None, eps=0.0)
        (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
    """
    return _add_layer_norm(x, residual, weight, bias, eps)


_DROPOUT_ADD_RMS_NORM = "dropout_add_rms_norm"
_dropout_add_rms_norm = norm(_DROPOUT_ADD_RMS_NORM)


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
        x, residual, weight, eps, weight_offset: as in :func:`warpsmith.add_rms_norm`; ``x`` of shape (..., D), float32,
            float16, bfloat16, or float64 on the CPU.
        p: the probability of a drop, in [0, 1], taken to the nearest multiple of 1/65536. With 1 nothing of ``x`` is
            kept.
        training: False: nothing is dropped nor scaled, as with ``p = 0``; the result is
            :func:`warpsmith.add_rms_norm`'s, bit for bit.
        seed: int64, shape (2,), on the device of ``x``: which mask. None: drawn from torch's default generator there;
            ``torch.manual_seed`` repeats it, activation checkpointing too, and a CUDA graph draws anew at each replay.

    Returns:
        ``(y, residual_out)`` as :func:`warpsmith.add_rms_norm`. The dropped, scaled and added value is rounded once.

    Gradients as :func:`warpsmith.add_rms_norm`'s.

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
    seed = dropout_seed(_DROPOUT_ADD_RMS_NORM, x, residual, weight, None, p, eps, training, seed, weight_offset)
    return _dropout_add_rms_norm(x, residual, weight, seed, p, eps, weight_offset)


_DROPOUT_ADD_LAYER_NORM = "dropout_add_layer_norm"
_dropout_add_layer_norm = norm(_DROPOUT_ADD_LAYER_NORM)


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

    with a mask :math:`m` as in :func:`warpsmith.dropout_add_rms_norm`.

    Args:
        x, residual, weight, bias, eps: as in :func:`warpsmith.add_layer_norm`; ``x`` of shape (..., D), float32,
            float16, bfloat16, or float64 on the CPU.
        p, seed: as in :func:`warpsmith.dropout_add_rms_norm`.
        training: False: nothing is dropped nor scaled, as with ``p = 0``; the result is
            :func:`warpsmith.add_layer_norm`'s, bit for bit.

    Returns:
        ``(y, residual_out)`` as :func:`warpsmith.add_layer_norm`. The dropped, scaled and added value is rounded once.

    Gradients as :func:`warpsmith.add_layer_norm`'s.

    Deterministic for a seed, with the same mask on CPU and CUDA. Moves 4 elements of memory for each of ``x`` forward
    and 5 backward (with a residual of the dtype of ``x``).

    Raises:
        ValueError: as :func:`warpsmith.dropout_add_rms_norm`.

    Source: Srivastava et al., Dropout, 2014; Ba, Kiros and Hinton, Layer Normalization, 2016; the random numbers are
    those of Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.

    Example:
        >>> import torch, warpsmith
        >>> x, residual = torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 2.0]])
        >>> warpsmith.dropout_add_layer_norm(x, residual, None, None, p=0.1, eps=0.0, training=False)
        (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
    """
    seed = dropout_seed(_DROPOUT_ADD_LAYER_NORM, x, residual, weight, bias, p, eps, training, seed)
    return _dropout_add_layer_norm(x, residual, weight, bias, seed, p, eps)
