from __future__ import annotations

from typing import Literal, NamedTuple, overload

from torch import Tensor

from warpsmith._core import checks
from warpsmith.ops._cross_entropy import (
    check_inputs,
    check_labels_on_host,
    fused_cross_entropy,
    reduction_number,
    refuse_learned_class_weight,
)

_OP = "cross_entropy"


class CrossEntropyStats(NamedTuple):
    """What :func:`cross_entropy` finds on its way. None of it has a gradient.

    Attributes:
        lse: logsumexp of each row's logits, after softcap; float32, shape of the target.
        argmax: class of each row's largest logit, the first of equal ones; int64, shape of the target.
        accuracy: share of the rows that count whose argmax is the target; a float32 scalar, NaN if no row counts.

    Example:
        >>> import torch, warpsmith
        >>> logits, target = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
        >>> loss, stats = warpsmith.cross_entropy(logits, target, return_stats=True)
        >>> stats.argmax, stats.accuracy
        (tensor([0, 1]), tensor(0.5000))
    """

    lse: Tensor
    argmax: Tensor
    accuracy: Tensor


@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: str = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    softcap: float = ...,
    inplace_backward: bool = ...,
    check_labels: bool = ...,
    return_stats: Literal[False] = ...,
) -> Tensor: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: str = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    softcap: float = ...,
    inplace_backward: bool = ...,
    check_labels: bool = ...,
    return_stats: Literal[True],
) -> tuple[Tensor, CrossEntropyStats]: ...
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    inplace_backward: bool = False,
    check_labels: bool = False,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, CrossEntropyStats]:
    r"""Cross-entropy of logits and class indices, its gradient computed in the same pass over the logits.

    With :math:`z = c \tanh(\text{logits} / c)` for a softcap c (z the logits without one), V classes,
    :math:`p = \operatorname{softmax}(z)`, target t, weights w and smoothing :math:`\epsilon`, the loss of a row is

    .. math::

        -(1 - \epsilon)\, w_t \log p_t - \frac{\epsilon}{V} \sum_j w_j \log p_j
        + z_{\text{loss}} \operatorname{logsumexp}(z)^2

    and 0 where the target is ``ignore_index``. ``"mean"`` divides the sum by :math:`\sum w_t` of the rows that count,
    which is their number without weights: torch's rule.

    Args:
        logits: shape (..., V), classes last (torch's function has them second), float32, float16, bfloat16, or float64
            on the CPU. Rows may lie at any one stride, so ``padded[..., :V]`` is read where it is.
        target: shape (...), int64 or uint8.
        class_weight: shape (V,), float32 or the dtype of ``logits``; it has no gradient.
        ignore_index: rows with this target have no loss, and a gradient of exact zeros.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: :math:`\epsilon`, from 0 to 1.
        z_loss: factor of the squared logsumexp, >= 0, a number of float32 (float64 for float64).
        softcap: c, 2^-126 to 2^126 (2^-1022 to 2^1022 for float64); 0 for none.
        inplace_backward: allows the gradient to be written over the logits, which saves their memory once more. They
            hold nothing of use afterwards, a second backward is refused, and torch's version check refuses the
            backward of anything else that needs their values. They must not be a leaf. No effect under
            ``torch.compile``.
        check_labels: on CUDA, find labels out of range before any work; the host waits for the device. On the CPU this
            is always done.
        return_stats: also return :class:`CrossEntropyStats`.

    Returns:
        The loss, float32 (float64 for float64 logits) whatever the dtype of the logits, also under autocast: a scalar,
        or for ``"none"`` the shape of ``target``. With ``return_stats`` the pair of loss and stats.

    The gradient for ``logits`` has their dtype. With mean and sum it is computed in the forward, and the backward
    multiplies it with the incoming gradient, if that is not 1 (found out on the device); float16 logits and
    ``"none"`` compute it in the backward. A second derivative is refused. Moves 2 elements of memory for each logit
    forward and backward together, 3 where the gradient waits for the backward, 1 without gradients.

    Deterministic: every sum has a fixed order. Sums are float32 (float64 for float64). A label out of range gives a NaN
    loss on CUDA, and NaN in its row's gradient.

    Raises:
        ValueError: a dtype, shape, device or value that does not fit, or on the CPU a label out of range; the message
            names op, argument, expectation and finding.

    Source: label smoothing: Szegedy et al., Rethinking the Inception Architecture, 2015. z-loss: de Brebisson and
    Vincent, The Z-loss, 2016. Softcap: Gemma 2, 2024.

    Example:
        >>> import torch, warpsmith
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> warpsmith.cross_entropy(logits, torch.tensor([0, 0]))
        tensor(0.7201)
    """
    checks.flags(_OP, inplace_backward=inplace_backward, check_labels=check_labels, return_stats=return_stats)
    number = reduction_number(_OP, reduction)
    refuse_learned_class_weight(_OP, class_weight)
    if check_labels and target.is_cuda:
        check_inputs(_OP, logits, target, class_weight)
        check_labels_on_host(_OP, target.long(), logits.shape[-1], ignore_index)
    loss, lse, argmax, accuracy = fused_cross_entropy(
        logits, target, class_weight, ignore_index, number, label_smoothing, z_loss, softcap, return_stats,
        inplace_backward,
    )  # fmt: skip
    if not return_stats:
        return loss
    return loss, CrossEntropyStats(lse.detach(), argmax, accuracy.detach())
