from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warpsmith.ops import _check
from warpsmith.ops._library import Saved, call_raw, differentiable, raw, register_fake
from warpsmith.ops._linear_loss import (
    check_inputs,
    may_give_away,
    new_like,
    real_dtype,
    under_autocast,
    wants_gradient,
)
from warpsmith.ops.cross_entropy import CrossEntropyStats

_OP = "linear_cross_entropy"
_ROWS_BACKWARD = "linear_cross_entropy_rows_backward"
_REDUCTIONS = ("none", "mean", "sum")


def _check_loss(op: str, hidden: Tensor, weight: Tensor, class_weight: Tensor | None, main_grad: Tensor | None) -> None:
    if main_grad is not None:
        _check.float_dtype(op, "main_grad", main_grad)
        if main_grad.dtype != real_dtype(hidden):
            _check.refuse(op, "main_grad", *map(_check.dtype_text, (real_dtype(hidden), main_grad.dtype)))
        _check.same_shape(op, "main_grad", main_grad, weight.shape)
        _check.same_device(op, "main_grad", main_grad, hidden)
        if not main_grad.is_contiguous():
            _check.refuse(op, "main_grad", "a contiguous tensor", "other strides")
    if class_weight is not None:
        _check.float_dtype(op, "class_weight", class_weight)
        if class_weight.dtype not in (hidden.dtype, real_dtype(hidden)):
            expected = dict.fromkeys(map(_check.dtype_text, (hidden.dtype, real_dtype(hidden))))
            _check.refuse(op, "class_weight", " or ".join(expected), _check.dtype_text(class_weight.dtype))
        _check.same_shape(op, "class_weight", class_weight, weight.shape[:1])
        _check.same_device(op, "class_weight", class_weight, hidden)


def _check_sum_dtype(hidden: Tensor, dw_dtype: torch.dtype) -> None:
    if dw_dtype not in (hidden.dtype, real_dtype(hidden)):
        own, wide = _check.dtype_text(hidden.dtype), _check.dtype_text(real_dtype(hidden))
        got = _check.dtype_text(dw_dtype) if isinstance(dw_dtype, torch.dtype) else type(dw_dtype).__name__
        _check.refuse(_OP, "dw_dtype", own if own == wide else f"{own} or {wide}", got)


def _several_chunks(hidden: Tensor, classes: Any, rows: Any, max_chunk_bytes: int) -> Any:
    """Whether the logits of all rows exceed the limit, as choose_linear_loss_chunks has it."""
    size = hidden.dtype.itemsize
    elems = 16 // size
    default = 2**30 if _check.device_of(hidden).type == "cuda" else 2**26
    most = max(1, (max_chunk_bytes or default) // ((classes + elems - 1) // elems * elems * size))
    return rows > most


def _fake_forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    check_labels: bool,
    return_stats: bool,
    max_chunk_bytes: int,
    dw_dtype: torch.dtype | None,
    main_grad: Tensor | None,
    want_dhidden: bool,
    want_dweight: bool,
    want_dbias: bool,
) -> tuple[Tensor, ...]:
    check_inputs(_OP, hidden, weight, target, bias)
    _check_loss(_OP, hidden, weight, class_weight, main_grad)
    _check.loss_options(_OP, label_smoothing, z_loss, softcap)
    real, reduced = real_dtype(hidden), reduction != "none"
    loss = target.new_empty(() if reduced else target.shape, dtype=real)
    lse = new_like(target, return_stats, real)
    argmax = new_like(target, return_stats)
    accuracy = target.new_empty(() if return_stats else (0,), dtype=real)
    wants = [reduced and want for want in (want_dhidden, want_dweight, want_dbias)]
    later = any(wants) and reduction == "mean" and hidden.dtype == torch.float16
    sums = weight.dtype
    if wants[1] and weight.dtype.itemsize == 2:
        sums = dw_dtype or weight.dtype
        if dw_dtype is None and (
            weight.dtype == torch.float16 or _several_chunks(hidden, weight.shape[0], target.numel(), max_chunk_bytes)
        ):
            sums = torch.float32
    denominator = target.new_empty(() if later else (0,), dtype=real)
    dbias = target.new_empty(weight.shape[:1] if wants[2] else (0,), dtype=real)
    return loss, lse, argmax, accuracy, denominator, new_like(hidden, wants[0]), new_like(weight, wants[1], sums), dbias


def _fake_rows_backward(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    max_chunk_bytes: int,
    dw_dtype: torch.dtype | None,
    want_dhidden: bool,
    want_dweight: bool,
    want_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    check_inputs(_ROWS_BACKWARD, hidden, weight, target, bias)
    _check_loss(_ROWS_BACKWARD, hidden, weight, class_weight, None)
    _check.loss_options(_ROWS_BACKWARD, label_smoothing, z_loss, softcap)
    dbias = hidden.new_empty(weight.shape[:1] if want_dbias else (0,))
    return new_like(hidden, want_dhidden), new_like(weight, want_dweight), dbias


def _fake_rows_backward_main_grad(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    main_grad: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    want_dhidden, want_dbias = options[-2:]
    check_inputs(_ROWS_BACKWARD, hidden, weight, target, bias)
    _check_loss(_ROWS_BACKWARD, hidden, weight, class_weight, main_grad)
    return new_like(hidden, want_dhidden), hidden.new_empty(weight.shape[:1] if want_dbias else (0,))


def _fake_scaled(x: Tensor, factor: Tensor, denominator: Tensor | None, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _fake_in_place(*_: object) -> None:
    return None


for _name in ("linear_cross_entropy", "linear_cross_entropy_rows", "linear_cross_entropy_forward"):
    register_fake(_name, _fake_forward)
register_fake("linear_cross_entropy_rows_backward", _fake_rows_backward)
register_fake("linear_cross_entropy_rows_backward_main_grad", _fake_rows_backward_main_grad)
register_fake("linear_cross_entropy_scaled", _fake_scaled)
register_fake("linear_cross_entropy_scale_", _fake_in_place)
register_fake("linear_cross_entropy_add_", _fake_in_place)

_scaled = raw.linear_cross_entropy_scaled.default
_scale_ = raw.linear_cross_entropy_scale_.default
_add_ = raw.linear_cross_entropy_add_.default
_rows_backward = raw.linear_cross_entropy_rows_backward.default
_rows_backward_main_grad = raw.linear_cross_entropy_rows_backward_main_grad.default

_INPUTS, _BIAS, _MAIN_GRAD, _WANTS = 18, 3, 14, 15


def _gradients(dhidden: Tensor | None, dweight: Tensor | None, dbias: Tensor | None) -> tuple[Tensor | None, ...]:
    return (dhidden, dweight, None, dbias) + (None,) * (_INPUTS - _BIAS - 1)


def _wanted(needs: Sequence[bool], wants: Sequence[bool]) -> tuple[bool, bool, bool]:
    needed = needs[0], needs[1], needs[_BIAS]
    if any(need and not want for need, want in zip(needed, wants, strict=True)):
        raise RuntimeError(f"{_OP}: expected inputs that require a gradient when the loss is computed, got one later")
    return needed


def _finished(grad: Tensor, dloss: Tensor, denominator: Tensor | None, dtype: torch.dtype) -> Tensor:
    if grad.dtype == dtype and may_give_away(grad):
        call_raw(_scale_, grad, dloss, denominator)
        return grad
    return call_raw(_scaled, grad, dloss, denominator, dtype)


def _added(main_grad: Tensor, grad: Tensor, dloss: Tensor, denominator: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Adds to main_grad; gives the zeros that the parameter gets as its gradient, for the hooks that wait for one."""
    if not may_give_away(grad):
        grad = grad.clone()
    call_raw(_add_, main_grad, grad, dloss, denominator)
    return grad if grad.dtype == dtype else torch.zeros_like(grad, dtype=dtype)


def _save_reduced(inputs: Sequence[Any], outputs: Any) -> Saved:
    # Inputs are not read again: they tie the gradients to the graph, so that a second derivative is refused.
    given = tuple(t if t is not None and t.requires_grad else None for t in (*inputs[:2], inputs[_BIAS]))
    return (*outputs[4:], *given), (inputs[1].dtype, inputs[_MAIN_GRAD], inputs[_WANTS:])


def _reduced_backward(
    needs: Sequence[bool], tensors: Any, values: Any, dloss: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    denominator, *grads = tensors[:4]
    dtype, main_grad, wants = values
    if dloss is None:
        return _gradients(None, None, None)
    denominator = denominator if denominator.numel() else None
    found: list[Tensor | None] = [None, None, None]
    for i, need in enumerate(_wanted(needs, wants)):
        if need and i == 1 and main_grad is not None:
            found[i] = _added(main_grad, grads[i], dloss, denominator, dtype)
        elif need:
            found[i] = _finished(grads[i], dloss, denominator, dtype)
    return _gradients(*found)


def _save_rows(inputs: Sequence[Any], outputs: Any) -> Saved:
    hidden, weight, target, bias, class_weight, ignore_index, _, label_smoothing, z_loss, softcap = inputs[:10]
    max_chunk_bytes, dw_dtype, main_grad = inputs[12:15]
    options = ignore_index, label_smoothing, z_loss, softcap, max_chunk_bytes
    return (hidden, weight, target, bias, class_weight), (options, dw_dtype, main_grad)


def _rows_gradients(
    needs: Sequence[bool], tensors: Any, values: Any, dloss: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    options, dw_dtype, main_grad = values
    want_dhidden, want_dweight, want_dbias = needs[0], needs[1], needs[_BIAS]
    if dloss is None:
        return _gradients(None, None, None)
    dweight: Tensor | None
    if want_dweight and main_grad is not None:
        arguments = (dloss, *tensors, main_grad, *options, want_dhidden, want_dbias)
        dhidden, dbias = call_raw(_rows_backward_main_grad, *arguments)
        dweight = torch.zeros_like(tensors[1], memory_format=torch.contiguous_format)
    else:
        wants = want_dhidden, want_dweight, want_dbias
        dhidden, dweight, dbias = call_raw(_rows_backward, dloss, *tensors, *options, dw_dtype, *wants)
    return _gradients(
        dhidden if want_dhidden else None, dweight if want_dweight else None, dbias if want_dbias else None
    )


_reduced = differentiable(
    "linear_cross_entropy",
    forward=raw.linear_cross_entropy_forward.default,
    public=4,
    save=_save_reduced,
    backward=_reduced_backward,
)
_rows = differentiable(
    "linear_cross_entropy_rows",
    forward=raw.linear_cross_entropy_forward.default,
    public=4,
    save=_save_rows,
    backward=_rows_gradients,
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    check_labels: bool = False,
    return_stats: bool = False,
    max_chunk_bytes: int | None = None,
    dw_dtype: torch.dtype | None = None,
    main_grad: Tensor | None = None,
) -> Tensor | tuple[Tensor, CrossEntropyStats]:
    r"""Cross-entropy of a language-model head, without all logits in memory: a linear layer and :func:`cross_entropy`.

    With :math:`z = \mathrm{cap}(h W^T + b)`, where :math:`\mathrm{cap}(u) = s \tanh(u / s)` for a ``softcap``
    :math:`s > 0`, and for each row its target :math:`t`, class weights :math:`w` (ones) and label smoothing
    :math:`\epsilon` over :math:`V` classes:

    .. math::
        \mathrm{lse} = \log \sum_j e^{z_j}, \quad \mathrm{loss} = (1 - \epsilon) \, w_t (\mathrm{lse} - z_t)
        + \frac{\epsilon}{V} \sum_j w_j (\mathrm{lse} - z_j) + \lambda_z \mathrm{lse}^2

    Rows whose target is ``ignore_index`` have loss 0 and gradients of exact zeros. ``"mean"`` divides the sum by that
    of :math:`w_t` over the other rows, as torch does.

    The rows are taken in chunks: logits, loss and the chunk's part of all gradients, then the next. A reduced loss has
    its gradients computed in the forward, and the backward scales them by the incoming gradient, found on the device;
    where it is 1 they are not touched. With ``reduction="none"`` the backward makes the logits again.

    Args:
        hidden: shape (..., H), float32, float16, bfloat16, or float64 on the CPU.
        weight: shape (V, H), the dtype of ``hidden``.
        target: shape (...), int64 classes in [0, V), or ``ignore_index``.
        bias: shape (V,), the dtype of ``hidden``, or None.
        class_weight: shape (V,), float32 or the dtype of ``hidden``, or None; it has no gradient.
        ignore_index: target of rows that do not count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: :math:`\epsilon`, in [0, 1].
        z_loss: :math:`\lambda_z`, >= 0.
        softcap: :math:`s`, >= 0, 0 for none.
        check_labels: on CUDA, wait for the device and refuse targets out of range. On the CPU they always are refused.
        return_stats: also return logsumexp and argmax of each row, and the accuracy of the rows that count.
        max_chunk_bytes: logits in memory at a time; None: 1 GiB on CUDA, 64 MiB on the CPU. One row at least. Fewer
            bytes cost time: every chunk beyond the first reads and writes the weight's gradient once more.
        dw_dtype: dtype in which the weight's gradient is summed. None: float32 if there are several chunks or for
            float16, else that of ``weight``. The dtype of ``weight`` takes half the memory, and rounds once a chunk.
        main_grad: shape (V, H), float32 (float64 for float64), contiguous: the backward adds the weight's gradient to
            it, and the weight gets a gradient of zeros, so that hooks run. Not under ``torch.compile``.

    Returns:
        The loss, float32 (float64 for float64): a scalar, or for ``"none"`` of the shape of ``target``. With
        ``return_stats`` the pair of loss and :class:`CrossEntropyStats`. Under autocast ``hidden``,
        ``weight`` and ``bias`` are cast to its dtype, as for a linear layer.

    Gradients for ``hidden``, ``weight`` and ``bias``. Second derivatives are refused. The gradients of a reduced loss
    are kept from the forward and given away by the backward; with ``retain_graph=True`` they are copied.

    Logits and their gradients are rounded to the dtype of ``hidden``; everything between is float32 (float64 for
    float64). float16 gradients are divided by the mean's denominator in the backward, together with the loss scale.

    Deterministic: sums have a fixed order, and the matrix products are torch's, on CUDA deterministic as cuBLAS is.
    The host does not wait, but for ``check_labels``.

    Raises:
        ValueError: a dtype, shape, device or number that does not fit; on the CPU, or with ``check_labels``, a target
            that is neither a class nor ``ignore_index``. Otherwise on CUDA such a row makes the loss NaN, and nothing
            is read out of bounds. Nothing has changed.

    Source: gradients in the forward over chunks of rows are the idea of
    https://github.com/mgmalek/efficient_cross_entropy and Liger-Kernel.

    Example:
        >>> import torch, warpsmith
        >>> hidden, weight = torch.ones(2, 8, requires_grad=True), torch.zeros(4, 8, requires_grad=True)
        >>> loss = warpsmith.linear_cross_entropy(hidden, weight, torch.tensor([0, 3]))
        >>> loss.backward()
        >>> loss.item(), weight.grad[0, 0].item()
        (1.3862943649291992, -0.25)
    """
    hidden, weight, bias = under_autocast(_OP, hidden, weight, bias)
    if reduction not in _REDUCTIONS:
        _check.refuse(_OP, "reduction", "none, mean or sum", str(reduction))
    if max_chunk_bytes is not None and max_chunk_bytes < 1:
        _check.refuse(_OP, "max_chunk_bytes", "an integer >= 1", str(max_chunk_bytes))
    if main_grad is not None and torch.compiler.is_compiling():
        _check.refuse(_OP, "main_grad", "None under torch.compile", "a tensor")
    if dw_dtype is not None:
        _check_sum_dtype(hidden, dw_dtype)
    if class_weight is not None and class_weight.requires_grad:
        _check.refuse(_OP, "class_weight", "a tensor without gradient", "one that requires a gradient")
    function = _rows if reduction == "none" else _reduced
    outputs = function(
        hidden,
        weight,
        target,
        bias,
        class_weight,
        ignore_index,
        reduction,
        label_smoothing,
        z_loss,
        softcap,
        check_labels,
        return_stats,
        max_chunk_bytes or 0,
        dw_dtype,
        main_grad,
        wants_gradient(hidden),
        wants_gradient(weight),
        wants_gradient(bias),
    )
    loss, lse, argmax, accuracy = outputs
    return (loss, CrossEntropyStats(lse.detach(), argmax, accuracy.detach())) if return_stats else loss
