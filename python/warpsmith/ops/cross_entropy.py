from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from warpsmith.ops import _check
from warpsmith.ops._library import Saved, differentiable, raw, register_fake

_OP = "cross_entropy"
_BACKWARD = "cross_entropy_backward"
_SCALE = "cross_entropy_scale"
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_NONE, _MEAN = _REDUCTIONS["none"], _REDUCTIONS["mean"]

Reduction = Literal["none", "mean", "sum"]


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


def _real(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _check_inputs(op: str, logits: Tensor, target: Tensor, class_weight: Tensor | None) -> None:
    _check.float_dtype(op, "logits", logits)
    _check.at_least_one_dimension(op, "logits", logits)
    if target.dtype != torch.int64:
        _check.refuse(op, "target", "int64 class indices", _check.dtype_text(target.dtype))
    _check.same_shape(op, "target", target, logits.shape[:-1])
    _check.same_device(op, "target", target, logits)
    if logits.shape[-1] == 0:
        _check.refuse(op, "logits", "at least one class in the last dimension", "none")
    if class_weight is None:
        return
    if class_weight.dtype != _real(logits):
        _check.refuse(op, "class_weight", _check.dtype_text(_real(logits)), _check.dtype_text(class_weight.dtype))
    _check.same_shape(op, "class_weight", class_weight, logits.shape[-1:])
    _check.same_device(op, "class_weight", class_weight, logits)


Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _fake_forward(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    stats: bool,
    inplace_backward: bool = False,
) -> Outputs:
    _check_inputs(_OP, logits, target, class_weight)
    _check.loss_options(_OP, label_smoothing, z_loss, softcap)
    real = _real(logits)
    none = logits.new_empty((0,), dtype=real)
    loss = logits.new_empty(target.shape if reduction == _NONE else (), dtype=real)
    lse = logits.new_empty(target.shape, dtype=real)
    argmax = logits.new_empty(target.shape if stats else (0,), dtype=torch.int64)
    accuracy = logits.new_empty((), dtype=real) if stats else none
    denominator = logits.new_empty((), dtype=real) if reduction == _MEAN else none.clone()
    return loss, lse, argmax, accuracy, denominator, lse.clone(), lse.clone()


def _fake_with_gradient(logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *_fake_forward(logits, *rest), torch.empty_like(logits, memory_format=torch.contiguous_format)


def _fake_backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    row_max: Tensor,
    row_sum: Tensor,
    denominator: Tensor,
    late: bool,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    _check_inputs(_BACKWARD, logits, target, class_weight)
    _check.loss_options(_BACKWARD, label_smoothing, z_loss, softcap)
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _fake_backward_inplace(*inputs: Any) -> None:
    _fake_backward(*inputs)


def _fake_scale(dlogits: Tensor, factor: Tensor) -> None:
    _check.float_dtype(_SCALE, "dlogits", dlogits)
    _check.same_shape(_SCALE, "factor", factor, ())


register_fake("cross_entropy", _fake_forward)
register_fake("cross_entropy_forward", _fake_forward)
register_fake("cross_entropy_with_gradient", _fake_with_gradient)
register_fake("cross_entropy_with_gradient_", _fake_forward)
register_fake("cross_entropy_backward", _fake_backward)
register_fake("cross_entropy_backward_", _fake_backward_inplace)
register_fake("cross_entropy_scale_", _fake_scale)

_raw_forward = raw.cross_entropy_forward.default
_raw_with_gradient = raw.cross_entropy_with_gradient.default
_raw_with_gradient_inplace = raw.cross_entropy_with_gradient_.default
_raw_backward = raw.cross_entropy_backward.default
_raw_backward_inplace = raw.cross_entropy_backward_.default
_raw_scale = raw.cross_entropy_scale_.default


class _Eager:
    """What an eager forward leaves for its backward beside tensors: the gradient, handed out once."""

    __slots__ = ("gradient", "inplace", "spent")

    def __init__(self, inplace: bool) -> None:
        self.gradient: Tensor | None = None
        self.inplace = inplace
        self.spent = False


def _late(logits: Tensor, reduction: int) -> bool:
    """Whether the incoming gradient multiplies a gradient that is already there, and rounded.

    Not with reduction none, where each row has its own; and float16 would lose what is small before a loss scale comes.
    """
    return reduction != _NONE and logits.dtype != torch.float16


def _check_writable_rows(logits: Tensor) -> None:
    """What the op that writes to the logits refuses, for a backward that would come to it only after the forward."""
    classes = logits.shape[-1]
    try:
        rows = logits.detach().view(-1, classes)
    except RuntimeError:
        rows = None
    if rows is None or (classes > 1 and rows.stride(1) != 1) or (rows.shape[0] > 1 and rows.stride(0) < classes):
        got = f"shape {_check.shape_text(logits.shape)} with other strides"
        _check.refuse(_OP, "logits", "rows at one stride that do not overlap, to hold their gradient", got)


def _forward(*inputs: Any) -> tuple[Any, ...]:
    logits, reduction, inplace = inputs[0], inputs[4], inputs[9]
    arguments = inputs[:9]
    if torch._C._are_functorch_transforms_active():
        return _raw_forward(*arguments)
    if inplace and logits.is_leaf:
        _check.refuse(_OP, "logits", "the result of an operation, to hold their gradient", "a leaf of the graph")
    state = _Eager(inplace)
    if not _late(logits, reduction):
        outputs = _raw_forward(*arguments)
        if inplace:
            _check_writable_rows(logits)
        return *outputs, state
    if inplace:
        outputs = _raw_with_gradient_inplace(*arguments)
        torch.autograd.graph.increment_version(logits)  # whoever saved the logits must not take these for them
        state.gradient = logits.detach()
    else:
        *outputs, state.gradient = _raw_with_gradient(*arguments)
    return *outputs, state


def _inference(*inputs: Any) -> Outputs:
    return _raw_forward(*inputs[:9])


def _save(inputs: Sequence[Any], outputs: Any) -> Saved:
    logits, target, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap, *_ = inputs
    denominator, row_max, row_sum = outputs[4:7]
    options = _late(logits, reduction), ignore_index, label_smoothing, z_loss, softcap
    state = outputs[7] if len(outputs) > 7 else None
    return (logits, target, class_weight, row_max, row_sum, denominator), (options, state)


def _backward(
    needs: Sequence[bool], tensors: Any, values: Any, dloss: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 10
    logits, *rest = tensors
    options, state = values
    if state is None or (not state.inplace and torch._C._are_functorch_transforms_active()):
        grad = _raw_backward(dloss, logits, *rest, *options)
    elif state.gradient is not None:
        grad, state.gradient = state.gradient, None
        _raw_scale(grad, dloss)
    elif not state.inplace:
        grad = _raw_backward(dloss, logits, *rest, *options)
    elif state.spent:
        _check.refuse(_OP, "inplace_backward", "one backward", "a second one: the logits hold the first one's gradient")
    else:
        grad = logits.detach()
        _raw_backward_inplace(dloss, grad, *rest, *options)
        torch.autograd.graph.increment_version(grad)
    if state is not None:
        state.spent = True
    return grad, *(None,) * 9


_cross_entropy = differentiable(
    "cross_entropy", forward=_forward, inference=_inference, public=4, save=_save, backward=_backward
)


def _weight_of_classes(logits: Tensor, class_weight: Tensor) -> Tensor:
    if class_weight.requires_grad:
        _check.refuse(_OP, "class_weight", "a tensor without gradient", "one that requires a gradient")
    if class_weight.dtype not in (logits.dtype, _real(logits)):
        expected = " or ".join(dict.fromkeys(_check.dtype_text(d) for d in (logits.dtype, _real(logits))))
        _check.refuse(_OP, "class_weight", expected, _check.dtype_text(class_weight.dtype))
    return class_weight.to(_real(logits))


def _check_labels(logits: Tensor, target: Tensor, ignore_index: int) -> None:
    """On the CPU the op itself does this; here the host waits for the device."""
    classes = logits.shape[-1]
    bad = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(bad.any()):
        row = int(bad.flatten().nonzero()[0])
        found = f"{int(target.flatten()[row])} in row {row}"
        _check.refuse(_OP, "target", f"classes from 0 to {classes - 1}, or ignore_index {ignore_index}", found)


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
        target: shape (...), int64.
        class_weight: shape (V,), float32 or the dtype of ``logits``; it has no gradient.
        ignore_index: rows with this target have no loss, and a gradient of exact zeros.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: :math:`\epsilon`, from 0 to 1.
        z_loss: factor of the squared logsumexp, >= 0.
        softcap: c; 0 for none.
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
    number = _REDUCTIONS.get(reduction)
    if number is None:
        _check.refuse(_OP, "reduction", "none, mean or sum", str(reduction))
    if class_weight is not None:
        class_weight = _weight_of_classes(logits, class_weight)
    if check_labels and target.is_cuda:
        _check_inputs(_OP, logits, target, class_weight)
        _check_labels(logits, target, ignore_index)
    loss, lse, argmax, accuracy = _cross_entropy(
        logits, target, class_weight, ignore_index, number, label_smoothing, z_loss, softcap, return_stats,
        inplace_backward,
    )  # fmt: skip
    if not return_stats:
        return loss
    return loss, CrossEntropyStats(lse.detach(), argmax, accuracy.detach())
