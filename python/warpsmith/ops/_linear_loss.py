"""What the linear losses share: checks of their inputs, autocast, and what a backward may do with what it keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from warpsmith.ops import _check


def check_inputs(op: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    """The checks of csrc/torch/support/linear_loss.h, in their order."""
    dtype = _check.float_dtype(op, "hidden", hidden)
    _check.at_least_one_dimension(op, "hidden", hidden)
    _check.float_dtype(op, "weight", weight)
    _check.same_dtype(op, "weight", weight, hidden)
    width = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != width or weight.shape[0] < 1:
        _check.refuse(op, "weight", f"shape (V, {width}) with V >= 1", _check.shape_text(weight.shape))
    _check.same_device(op, "weight", weight, hidden)
    if target.dtype != torch.int64:
        _check.refuse(op, "target", "int64", _check.dtype_text(target.dtype))
    _check.same_shape(op, "target", target, hidden.shape[:-1])
    _check.same_device(op, "target", target, hidden)
    if bias is not None:
        _check.float_dtype(op, "bias", bias)
        if bias.dtype != dtype:
            _check.refuse(op, "bias", _check.dtype_text(dtype), _check.dtype_text(bias.dtype))
        _check.same_shape(op, "bias", bias, weight.shape[:1])
        _check.same_device(op, "bias", bias, hidden)


def real_dtype(t: Tensor) -> torch.dtype:
    """The dtype of losses and row statistics."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def new_like(t: Tensor, wanted: bool, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous result of a tensor's shape for a fake kernel, without elements if it is not wanted."""
    dtype = t.dtype if dtype is None else dtype
    return t.new_empty(t.shape if wanted else (0,), dtype=dtype)


def under_autocast(
    op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As torch does for a linear layer: under autocast the product's operands are cast to its dtype."""
    for name, t in (("hidden", hidden), ("weight", weight)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name}: expected a tensor, got {type(t).__name__}")
    kind = hidden.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t

    return cast(hidden), cast(weight), None if bias is None else cast(bias)


def wants_gradient(t: Tensor | None) -> bool:
    """Whether a gradient of this tensor may be asked for."""
    return t is not None and torch.is_grad_enabled() and t.requires_grad


def may_give_away(t: Tensor) -> bool:
    """Whether a backward may write to a tensor that it kept and return it: nobody will run this backward again, the
    tensor is a plain one (a traced backward must not write to what its forward made), and no transform maps it."""
    if torch._C._are_functorch_transforms_active():
        return False
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return type(t) is Tensor and keeps_graph is not None and not keeps_graph()
