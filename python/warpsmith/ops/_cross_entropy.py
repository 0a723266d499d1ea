"""The fakes and the gradient of cross_entropy, and the checks that the linear losses share with it."""

import math
from typing import Any

import torch
from torch import Tensor

from warpsmith import _C
from warpsmith._core import checks
from warpsmith._core.library import (
    MADE,
    STATE,
    Gradients,
    Saved,
    Wants,
    call_raw,
    differentiable,
    is_batched,
    may_give_away,
    raw,
    register_fake,
)

_OP = "cross_entropy"
_BACKWARD = "cross_entropy_backward"
_SCALE = "cross_entropy_scale"

_NUMBERS = _C.REDUCTIONS  # of the raw ops' argument `reduction`, by name
NONE, MEAN = _NUMBERS["none"], _NUMBERS["mean"]


def reduction_number(op: str, reduction: str) -> int:
    """The number by which raw ops know a reduction."""
    number = _NUMBERS.get(reduction) if isinstance(reduction, str) else None
    if number is None:
        *others, last = _NUMBERS
        checks.refuse(op, "reduction", f"{', '.join(others)} or {last}", checks.value_text(reduction))
    return number


def check_divisor(op: str, argument: str, value: float, dtype: torch.dtype) -> None:
    """Refuses a divisor that is no normal number in the arithmetic of the dtype, or whose reciprocal is none."""
    exponent = 1022 if dtype == torch.float64 else 126
    if not 2.0**-exponent <= value <= 2.0**exponent:
        checks.refuse(op, argument, f"a number from 2^-{exponent} to 2^{exponent}", f"{value:g}")


def check_options(
    op: str, label_smoothing: float, z_loss: float, softcap: float, dtype: torch.dtype = torch.float64
) -> None:
    """dtype: of the logits. Its default is the one with the widest range."""
    if not 0 <= label_smoothing <= 1:
        checks.refuse(op, "label_smoothing", "a number from 0 to 1", f"{label_smoothing:f}")
    for name, value in (("z_loss", z_loss), ("softcap", softcap)):
        if not (value >= 0 and math.isfinite(value)):
            checks.refuse(op, name, "a finite number >= 0", f"{value:f}")
    checks.finite(op, "z_loss", z_loss, dtype)
    if softcap > 0:
        check_divisor(op, "softcap", softcap, dtype)


def check_loss_numbers(op: str, dtype: torch.dtype = torch.float64, **numbers: Any) -> None:
    """The kinds and ranges of a loss's ``ignore_index``, ``label_smoothing``, ``z_loss`` and ``softcap``: what the op
    would refuse at the first call, for a module."""
    checks.refuse_non_int64(op, "ignore_index", numbers.pop("ignore_index"))
    for name, value in numbers.items():
        checks.refuse_non_number(op, name, value)
    check_options(op, **numbers, dtype=dtype)


def check_target(op: str, target: Tensor, rows: Tensor) -> None:
    if target.dtype not in (torch.int64, torch.uint8):
        checks.refuse(op, "target", "int64 or uint8 class indices", checks.dtype_text(target.dtype))
    checks.same_shape(op, "target", target, rows.shape[:-1])
    checks.same_device(op, "target", target, rows)


def check_class_weight(op: str, class_weight: Tensor | None, rows: Tensor, classes: Any) -> None:
    if class_weight is None:
        return
    checks.parameter(op, "class_weight", class_weight, rows, (classes,))


def refuse_learned_class_weight(op: str, class_weight: Tensor | None) -> None:
    if getattr(class_weight, "requires_grad", False):
        checks.refuse(op, "class_weight", "a tensor without gradient", "one that requires a gradient")


def check_labels_on_host(op: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """The check that the op makes of labels on the CPU. For CUDA: the host waits for the device."""
    bad = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(bad.any()):
        row = int(bad.flatten().nonzero()[0])
        expected = f"classes in [0, {classes}) or ignore_index {ignore_index}"
        checks.refuse(op, "target", expected, f"{int(target.flatten()[row])} at position {row}")


def check_inputs(op: str, logits: Tensor, target: Tensor, class_weight: Tensor | None) -> None:
    checks.float_dtype(op, "logits", logits)
    checks.at_least_one_dimension(op, "logits", logits)
    check_target(op, target, logits)
    if checks.known(logits.shape[-1] == 0):
        checks.refuse(op, "logits", "at least one class in the last dimension", "none")
    check_class_weight(op, class_weight, logits, logits.shape[-1])


def _check(op: str, a: Any) -> None:
    """a: the arguments of a raw op."""
    check_inputs(op, a.logits, a.target, a.class_weight)
    check_options(op, a.label_smoothing, a.z_loss, a.softcap, a.logits.dtype)


def _fake_forward(a: Any) -> tuple[Tensor, ...]:
    _check(_OP, a)
    logits, rows, real = a.logits, a.target.shape, checks.wide_dtype(a.logits)
    none = logits.new_empty((0,), dtype=real)
    loss = logits.new_empty(rows if a.reduction == NONE else (), dtype=real)
    lse = logits.new_empty(rows, dtype=real)
    argmax = logits.new_empty(rows if a.stats else (0,), dtype=torch.int64)
    accuracy = logits.new_empty((), dtype=real) if a.stats else none
    denominator = logits.new_empty((), dtype=real) if a.reduction == MEAN else none.clone()
    return loss, lse, argmax, accuracy, denominator, lse.clone(), lse.clone()


def _fake_with_gradient(a: Any) -> tuple[Tensor, ...]:
    return *_fake_forward(a), torch.empty_like(a.logits, memory_format=torch.contiguous_format)


def _fake_backward(a: Any) -> Tensor:
    _check(_BACKWARD, a)
    return torch.empty_like(a.logits, memory_format=torch.contiguous_format)


def _fake_scale(dlogits: Tensor, factor: Tensor) -> None:
    checks.float_dtype(_SCALE, "dlogits", dlogits)
    checks.same_shape(_SCALE, "factor", factor, ())


register_fake(("cross_entropy", "cross_entropy_forward", "cross_entropy_with_gradient_"), _fake_forward, named=True)
register_fake("cross_entropy_with_gradient", _fake_with_gradient, named=True)
register_fake("cross_entropy_backward", _fake_backward, named=True)
register_fake("cross_entropy_backward_", lambda a: _check(_BACKWARD, a), named=True)
register_fake("cross_entropy_scale_", _fake_scale)

_raw_forward = raw.cross_entropy_forward.default
_raw_with_gradient = raw.cross_entropy_with_gradient.default
_raw_with_gradient_inplace = raw.cross_entropy_with_gradient_.default
_raw_backward = raw.cross_entropy_backward.default
_raw_backward_inplace = raw.cross_entropy_backward_.default
_raw_scale = raw.cross_entropy_scale_.default


class _Eager:
    """What an eager forward leaves for its backward beside tensors: whether the gradient lies, or will lie, in the
    logits, and whether a backward has handed that out."""

    __slots__ = ("inplace", "spent")

    def __init__(self, inplace: bool) -> None:
        self.inplace = inplace
        self.spent = False


def _late(logits: Tensor, reduction: int) -> bool:
    """Whether the upstream gradient multiplies a gradient that is already there, and rounded.

    Not with reduction none, where each row has its own. Nor for float16, which would lose small gradients before a loss
    scale multiplies them.
    """
    return reduction != NONE and logits.dtype != torch.float16


def _check_writable_rows(logits: Tensor) -> None:
    """What the op that writes to the logits refuses, for a backward that calls it only after the forward."""
    classes = logits.shape[-1]
    try:
        rows = logits.detach().view(-1, classes)
    except RuntimeError:
        rows = None
    if rows is None or (classes > 1 and rows.stride(1) != 1) or (rows.shape[0] > 1 and rows.stride(0) < classes):
        got = f"shape {checks.shape_text(logits.shape)} with other strides"
        checks.refuse(_OP, "logits", "rows at one stride that do not overlap, to hold their gradient", got)


def _check_place(logits: Tensor, target: Tensor, class_weight: Tensor | None) -> None:
    """What torch would refuse only after the gradient has been written over the logits."""
    if logits.is_leaf:
        checks.refuse(_OP, "logits", "the result of an operation, to hold their gradient", "a leaf of the graph")
    with torch.enable_grad():  # a Function's forward runs without
        checks.overwritable(_OP, "logits", logits)
    for name, t in (("target", target), ("class_weight", class_weight)):
        checks.keepable(_OP, name, t)


def _forward(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    stats: bool,
    inplace: bool,
) -> tuple[Any, ...]:
    arguments = logits, target, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap, stats
    if torch._C._are_functorch_transforms_active():
        return _raw_forward(*arguments)
    state = _Eager(inplace)
    if inplace:
        _check_place(logits, target, class_weight)
    if not _late(logits, reduction):
        outputs = _raw_forward(*arguments)
        if inplace:
            _check_writable_rows(logits)
        return *outputs, None, state
    if inplace:
        outputs = _raw_with_gradient_inplace(*arguments)
        torch.autograd.graph.increment_version(logits)  # whoever saved the logits must not take these for them
        return *outputs, None, state
    return *_raw_with_gradient(*arguments), state


def _inference(*inputs: Any) -> tuple[Tensor, ...]:
    *arguments, _inplace_backward = inputs
    return _raw_forward(*arguments)


def _late_gradient(saved: Saved, dloss: Tensor, op: Any, logits: Tensor) -> Tensor:
    return call_raw(
        op,
        *(dloss, logits, saved.target, saved.class_weight, saved.row_max, saved.row_sum, saved.denominator),
        *(_late(logits, saved.reduction), saved.ignore_index, saved.label_smoothing, saved.z_loss, saved.softcap),
    )


def _backward(saved: Saved, wants: Wants, dloss: Tensor | None, *_: Tensor | None) -> Gradients:
    if dloss is None:
        return {}
    state, grad = saved.state, saved.made
    if state is not None and state.inplace:
        return {"logits": _gradient_in_the_logits(saved, dloss)}
    if grad is None or torch._C._are_functorch_transforms_active():
        return {"logits": _late_gradient(saved, dloss, _raw_backward, saved.logits)}
    if is_batched(dloss):
        return {"logits": (grad * dloss).to(grad.dtype)}
    if not may_give_away(grad, dloss):
        grad = grad.clone()
    call_raw(_raw_scale, grad, dloss)
    return {"logits": grad}


def _gradient_in_the_logits(saved: Saved, dloss: Tensor) -> Tensor:
    if is_batched(dloss):
        checks.refuse(_OP, "inplace_backward", "one upstream gradient", "several at once (is_grads_batched)")
    if saved.state.spent:
        checks.refuse(_OP, "inplace_backward", "one backward", "a second one: the logits hold the first one's gradient")
    saved.state.spent = True
    grad = saved.logits.detach()
    if _late(grad, saved.reduction):  # it is there
        call_raw(_raw_scale, grad, dloss)
    else:
        _late_gradient(saved, dloss, _raw_backward_inplace, grad)
        torch.autograd.graph.increment_version(grad)
    return grad


fused_cross_entropy = differentiable(
    _OP,
    forward=_forward,
    inference=_inference,
    public=4,
    save=(
        *("logits", "target", "class_weight", "row_max", "row_sum", "denominator"),
        *("ignore_index", "reduction", "label_smoothing", "z_loss", "softcap", MADE, STATE),
    ),
    backward=_backward,
)
