"""What the linear losses may hold, their fakes and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warpsmith import _C
from warpsmith._core import checks
from warpsmith._core.library import Gradients, Saved, Wants, call_raw, differentiable, may_give_away, raw, register_fake
from warpsmith._core.main_grad import Destination
from warpsmith.ops._cross_entropy import (
    MEAN,
    NONE,
    check_class_weight,
    check_divisor,
    check_options,
    check_target,
)
from warpsmith.ops._linear import cast_operands


def check_max_bytes(op: str, max_bytes: int | None, max_chunk_bytes: int | None, dw_dtype: torch.dtype | None) -> None:
    """Refuses a bound that is no integer, or that is not alone: it chooses what the other two arguments say."""
    if max_bytes is None:
        return
    checks.sizes(op, 1, max_bytes=max_bytes)
    if max_chunk_bytes is not None or dw_dtype is not None:
        checks.refuse(op, "max_bytes", "None beside max_chunk_bytes or dw_dtype", str(max_bytes))


def within(op: str, hidden: Tensor, weight: Tensor, target: Tensor, max_bytes: int) -> tuple[int, torch.dtype | None]:
    """Bound of the chunks and dtype of the weight's sum, with which a call takes at most ``max_bytes``."""
    if torch.compiler.is_compiling():
        checks.refuse(op, "max_bytes", "None under torch.compile; warpsmith.plan says what it stands for", "a number")
    if hidden.dtype not in (torch.float32, torch.float16, torch.bfloat16) or hidden.dim() < 1 or weight.dim() != 2:
        return 0, None  # what the op refuses, and float64, of which nothing is said
    sizes = {"rows": target.numel(), "classes": weight.shape[0], "hidden_size": weight.shape[1]}
    found = _C.plan(op, **sizes, dtype=hidden.dtype, cuda=hidden.is_cuda, max_bytes=max_bytes)
    if not found["fits"]:
        checks.refuse(op, "max_bytes", f"at least {found['peak_bytes']} for this problem", str(max_bytes))
    return max(1, found["logits_bytes"]), getattr(torch, found["dw_dtype"])


_CROSS_ENTROPY = "linear_cross_entropy"
_ROWS_BACKWARD = "linear_cross_entropy_rows_backward"
_LOG_PROB = "linear_log_prob"
_LOG_PROB_BACKWARD = "linear_log_prob_backward"


def under_autocast(op: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Sequence[Any]:
    """As torch does for a linear layer: under autocast the product's operands are cast to its dtype."""
    checks.tensors(op, hidden=hidden, weight=weight, target=target)
    checks.tensors(op, True, bias=bias)
    return cast_operands(hidden, weight, bias)


def wants_gradient(t: Tensor | None) -> bool:
    """Whether a gradient of this tensor may be asked for. torch.compile shows a tensor that a function of torch.func
    differentiates as one that requires none."""
    if t is None or not torch.is_grad_enabled():
        return False
    return t.requires_grad or (torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active())


def bound_of_chunks(op: str, max_chunk_bytes: int | None) -> int:
    """The raw ops' form of ``max_chunk_bytes``; 0: the default of the device."""
    if max_chunk_bytes is None:
        return 0
    checks.refuse_non_int64(op, "max_chunk_bytes", max_chunk_bytes, "an integer >= 1")
    if max_chunk_bytes < 1:
        checks.refuse(op, "max_chunk_bytes", "an integer >= 1", str(max_chunk_bytes))
    return max_chunk_bytes


def check_sum_dtype(hidden: Tensor, dw_dtype: torch.dtype) -> None:
    if not isinstance(dw_dtype, torch.dtype) or dw_dtype not in (hidden.dtype, checks.wide_dtype(hidden)):
        expected = dict.fromkeys(map(checks.dtype_text, (hidden.dtype, checks.wide_dtype(hidden))))
        got = checks.dtype_text(dw_dtype) if isinstance(dw_dtype, torch.dtype) else type(dw_dtype).__name__
        checks.refuse(_CROSS_ENTROPY, "dw_dtype", " or ".join(expected), got)


def logits_stride(hidden: Tensor, classes: Any) -> Any:
    """Elements from row to row of the logits: whole vectors of 16 bytes."""
    elems = 16 // hidden.dtype.itemsize
    return (classes + elems - 1) // elems * elems


# ---- fakes


def _check_inputs(op: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    """The checks of csrc/bindings/support/linear_loss.h, in their order."""
    checks.float_dtype(op, "hidden", hidden)
    checks.at_least_one_dimension(op, "hidden", hidden)
    checks.float_dtype(op, "weight", weight)
    checks.same_dtype(op, "weight", weight, hidden)
    width = hidden.shape[-1]
    if weight.dim() != 2 or checks.known(weight.shape[1] != width) or checks.known(weight.shape[0] < 1):
        checks.refuse(op, "weight", f"shape (V, {width}) with V >= 1", checks.shape_text(weight.shape))
    checks.same_device(op, "weight", weight, hidden)
    check_target(op, target, hidden)
    if bias is not None:
        checks.float_dtype(op, "bias", bias)
        checks.alike(op, "bias", bias, hidden, weight.shape[:1])


def _new_like(t: Tensor, wanted: bool, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous result of a tensor's shape, without elements if it is not wanted."""
    return t.new_empty(t.shape if wanted else (0,), dtype=dtype or t.dtype)


def _new_gradients(a: Any, want_dweight: bool) -> tuple[Tensor, Tensor, Tensor]:
    dbias = a.hidden.new_empty(a.weight.shape[:1] if a.want_dbias else (0,))
    return _new_like(a.hidden, a.want_dhidden), _new_like(a.weight, want_dweight), dbias


def sum_dtype(hidden: Tensor, classes: Any, rows: Any, max_chunk_bytes: int) -> torch.dtype:
    """The dtype in which the weight's gradient is summed by default: weight_sum_dtype and choose_linear_loss_chunks.
    Rows whose number comes from data may be of several chunks."""
    limit = max_chunk_bytes or (2**30 if checks.device_of(hidden).type == "cuda" else 2**26)
    several = checks.possible(rows > max(1, limit // (logits_stride(hidden, classes) * hidden.dtype.itemsize)))
    return checks.wide_dtype(hidden) if hidden.dtype == torch.float16 or several else hidden.dtype


def _check_cross_entropy(op: str, a: Any) -> None:
    _check_inputs(op, a.hidden, a.weight, a.target, a.bias)
    check_class_weight(op, a.class_weight, a.hidden, a.weight.shape[0])
    check_options(op, a.label_smoothing, a.z_loss, a.softcap, a.hidden.dtype)


def _fake_cross_entropy(a: Any) -> tuple[Tensor, ...]:
    hidden, weight, target = a.hidden, a.weight, a.target
    _check_cross_entropy(_CROSS_ENTROPY, a)
    checks.main_grad(_CROSS_ENTROPY, a.main_grad, weight)
    real, reduced = checks.wide_dtype(hidden), a.reduction != NONE
    loss = target.new_empty(() if reduced else target.shape, dtype=real)
    lse = _new_like(target, a.return_stats, real)
    argmax = _new_like(target, a.return_stats, torch.int64)
    accuracy = target.new_empty(() if a.return_stats else (0,), dtype=real)
    wanted = reduced and (a.want_dhidden or a.want_dweight or a.want_dbias)
    divide_later = wanted and a.reduction == MEAN and hidden.dtype == torch.float16
    denominator = target.new_empty(() if divide_later else (0,), dtype=real)
    dhidden = _new_like(hidden, reduced and a.want_dhidden)
    dweight = _new_like(weight, False)
    if reduced and a.want_dweight:
        dtype = a.dw_dtype or sum_dtype(hidden, weight.shape[0], target.numel(), a.max_chunk_bytes)
        dweight = _new_like(weight, True, dtype)
    dbias = target.new_empty(weight.shape[:1] if reduced and a.want_dbias else (0,), dtype=real)
    return loss, lse, argmax, accuracy, denominator, dhidden, dweight, dbias


def _fake_rows_backward(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check_cross_entropy(_ROWS_BACKWARD, a)
    return _new_gradients(a, a.want_dweight)


def _fake_rows_backward_main_grad(a: Any) -> tuple[Tensor, Tensor]:
    checks.main_grad(_ROWS_BACKWARD, a.main_grad, a.weight)
    _check_cross_entropy(_ROWS_BACKWARD, a)
    dhidden, _, dbias = _new_gradients(a, False)
    return dhidden, dbias


def _fake_scaled(x: Tensor, factor: Tensor, denominator: Tensor | None, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _check_temperature(temperature: float, hidden: Tensor) -> None:
    if not 0 < temperature < math.inf:
        checks.refuse(_LOG_PROB, "temperature", "a finite number > 0", f"{temperature:f}")
    check_divisor(_LOG_PROB, "temperature", temperature, hidden.dtype)


def _fake_log_prob(a: Any) -> tuple[Tensor, ...]:
    hidden, target = a.hidden, a.target
    _check_inputs(_LOG_PROB, hidden, a.weight, target, a.bias)
    _check_temperature(a.temperature, hidden)
    of_rows = (_new_like(target, True, checks.wide_dtype(hidden)) for _ in range(5))
    rows = target.numel() if a.save_logits else 0
    return *of_rows, hidden.new_empty((rows, logits_stride(hidden, a.weight.shape[0])))


def _fake_log_prob_backward(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check_inputs(_LOG_PROB_BACKWARD, a.hidden, a.weight, a.target, a.bias)
    return _new_gradients(a, a.want_dweight)


_FORWARDS = "linear_cross_entropy", "linear_cross_entropy_rows", "linear_cross_entropy_forward"
register_fake(_FORWARDS, _fake_cross_entropy, named=True)
register_fake("linear_cross_entropy_rows_backward", _fake_rows_backward, named=True)
register_fake("linear_cross_entropy_rows_backward_main_grad", _fake_rows_backward_main_grad, named=True)
register_fake("linear_cross_entropy_scaled", _fake_scaled)
register_fake(("linear_cross_entropy_scale_", "linear_cross_entropy_add_"), lambda *_: None)
register_fake(("linear_log_prob", "linear_log_prob_forward"), _fake_log_prob, named=True)
register_fake("linear_log_prob_backward", _fake_log_prob_backward, named=True)

# ---- gradients

_scaled = raw.linear_cross_entropy_scaled.default
_scale_ = raw.linear_cross_entropy_scale_.default
_add_ = raw.linear_cross_entropy_add_.default
_rows_backward = raw.linear_cross_entropy_rows_backward.default
_rows_backward_main_grad = raw.linear_cross_entropy_rows_backward_main_grad.default
_log_prob_backward = raw.linear_log_prob_backward.default


def _finished(grad: Tensor, dloss: Tensor, denominator: Tensor | None, dtype: torch.dtype) -> Tensor:
    if grad.dtype == dtype and may_give_away(grad, dloss):
        call_raw(_scale_, grad, dloss, denominator)
        return grad
    return call_raw(_scaled, grad, dloss, denominator, dtype)


def _added(main_grad: Tensor, grad: Tensor, dloss: Tensor, denominator: Tensor | None) -> Tensor:
    """Adds to main_grad; gives zeros, in the memory of what was added or of a copy."""
    if not may_give_away(grad, dloss):
        grad = grad.clone()
    call_raw(_add_, main_grad, grad, dloss, denominator)
    return grad


def _save_reduced(inputs: Any, outputs: Any) -> dict[str, Any]:
    _loss, _lse, _argmax, _accuracy, denominator, dhidden, dweight, dbias = outputs
    hidden, weight, bias = inputs.hidden, inputs.weight, inputs.bias
    return {
        "denominator": denominator,
        "dhidden": dhidden,
        "dweight": dweight,
        "dbias": dbias,
        "dtype": weight.dtype,
        "destination": Destination.of(_CROSS_ENTROPY, inputs.main_grad),
        "made": (inputs.want_dhidden, inputs.want_dweight, inputs.want_dbias),
        # Not read again. They tie the gradients to the graph, so that a second derivative is refused.
        "hidden": hidden if hidden.requires_grad else None,
        "weight": weight if weight.requires_grad else None,
        "bias": bias if bias is not None and bias.requires_grad else None,
    }


def _reduced_backward(saved: Saved, wants: Wants, dloss: Tensor | None, *_: Any) -> Gradients:
    if dloss is None:
        return {}
    wanted = wants.hidden, wants.weight, wants.bias
    if any(want and not made for want, made in zip(wanted, saved.made, strict=True)):
        raise RuntimeError(
            f"{_CROSS_ENTROPY}: expected inputs that require a gradient when the loss is computed, got one later"
        )
    scale = dloss, saved.denominator if saved.denominator.numel() else None, saved.dtype
    main_grad = saved.destination.takes(wants.weight)
    gradients: dict[str, Tensor | None] = {}
    if wants.hidden:
        gradients["hidden"] = _finished(saved.dhidden, *scale)
    if main_grad is not None:
        zeros = _added(main_grad, saved.dweight, *scale[:2])
        gradients["weight"] = saved.destination.nothing_for(saved.weight, zeros)
    elif wants.weight:
        gradients["weight"] = _finished(saved.dweight, *scale)
    if wants.bias:
        gradients["bias"] = _finished(saved.dbias, *scale)
    return gradients


def _save_rows(inputs: Any, outputs: Any) -> dict[str, Any]:
    options = inputs.ignore_index, inputs.label_smoothing, inputs.z_loss, inputs.softcap, inputs.max_chunk_bytes
    return {
        "hidden": inputs.hidden,
        "weight": inputs.weight,
        "target": inputs.target,
        "bias": inputs.bias,
        "class_weight": inputs.class_weight,
        "options": options,
        "dw_dtype": inputs.dw_dtype,
        "destination": Destination.of(_CROSS_ENTROPY, inputs.main_grad),
    }


def _rows_gradients(saved: Saved, wants: Wants, dloss: Tensor | None, *_: Any) -> Gradients:
    if dloss is None:
        return {}
    inputs = dloss, saved.hidden, saved.weight, saved.target, saved.bias, saved.class_weight
    main_grad = saved.destination.takes(wants.weight)
    if main_grad is not None:
        wanted = wants.hidden, wants.bias
        dhidden, dbias = call_raw(_rows_backward_main_grad, *inputs, main_grad, *saved.options, *wanted)
        dweight = saved.destination.nothing_for(saved.weight)
    else:
        each = wants.hidden, wants.weight, wants.bias
        dhidden, dweight, dbias = call_raw(_rows_backward, *inputs, *saved.options, saved.dw_dtype, *each)
    return {"hidden": dhidden, "weight": dweight, "bias": dbias}


def _log_prob_gradients(saved: Saved, wants: Wants, *grads: Tensor | None) -> Gradients:
    if saved.temperature != 1.0:
        grads = tuple(None if g is None else g / saved.temperature for g in grads)
    dhidden, dweight, dbias = call_raw(
        _log_prob_backward,
        *grads,
        *(saved.hidden, saved.weight, saved.target, saved.bias),
        *(saved.row_max, saved.row_sum, saved.entropy, saved.logits),
        *(saved.temperature, saved.max_chunk_bytes),
        *(wants.hidden, wants.weight, wants.bias),
    )
    return {"hidden": dhidden, "weight": dweight, "bias": dbias}


reduced_cross_entropy = differentiable(
    "linear_cross_entropy",
    forward=raw.linear_cross_entropy_forward.default,
    public=4,
    save=_save_reduced,
    backward=_reduced_backward,
)
rows_cross_entropy = differentiable(
    "linear_cross_entropy_rows",
    forward=raw.linear_cross_entropy_forward.default,
    public=4,
    save=_save_rows,
    backward=_rows_gradients,
)
log_prob = differentiable(
    "linear_log_prob",
    forward=raw.linear_log_prob_forward.default,
    public=3,
    save=(
        *("hidden", "weight", "target", "bias", "temperature", "max_chunk_bytes"),
        *("row_max", "row_sum", "entropy", "logits"),
    ),
    backward=_log_prob_gradients,
)
