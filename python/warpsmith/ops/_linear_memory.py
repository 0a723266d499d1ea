"""What the linear losses may hold and write: a bound on their memory, and the place of a weight's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from warpsmith import _C
from warpsmith.ops import _check


def check_max_bytes(op: str, max_bytes: int | None, max_chunk_bytes: int | None, dw_dtype: torch.dtype | None) -> None:
    """Refuses a bound that is no integer, or that is not alone: it chooses what the other two arguments say."""
    if max_bytes is None:
        return
    _check.sizes(op, 1, max_bytes=max_bytes)
    if max_chunk_bytes is not None or dw_dtype is not None:
        _check.refuse(op, "max_bytes", "None beside max_chunk_bytes or dw_dtype", str(max_bytes))


def within(op: str, hidden: Tensor, weight: Tensor, target: Tensor, max_bytes: int) -> tuple[int, torch.dtype | None]:
    """Bound of the chunks and dtype of the weight's sum, with which a call takes at most ``max_bytes``."""
    if torch.compiler.is_compiling():
        _check.refuse(op, "max_bytes", "None under torch.compile; warpsmith.plan says what it stands for", "a number")
    if hidden.dtype not in (torch.float32, torch.float16, torch.bfloat16) or hidden.dim() < 1 or weight.dim() != 2:
        return 0, None  # what the op refuses, and float64, of which nothing is said
    sizes = {"rows": target.numel(), "classes": weight.shape[0], "hidden_size": weight.shape[1]}
    found = _C.plan(op, **sizes, dtype=hidden.dtype, cuda=hidden.is_cuda, max_bytes=max_bytes)
    if not found["fits"]:
        _check.refuse(op, "max_bytes", f"at least {found['peak_bytes']} for this problem", str(max_bytes))
    return max(1, found["logits_bytes"]), getattr(torch, found["dw_dtype"])


def _bytes_of(t: Tensor) -> tuple[int, int]:
    """First and last byte, plus one, of a tensor with elements."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + elements * t.element_size()


def check_main_grad(op: str, main_grad: Tensor, **inputs: Tensor | None) -> None:
    """Refuses a place for the weight's gradient that is the place of something else, or has a gradient itself."""
    if not isinstance(main_grad, Tensor):
        _check.refuse_type(op, "main_grad", "a tensor", main_grad)
    if main_grad.requires_grad:
        _check.refuse(op, "main_grad", "a tensor that requires no gradient", "one that does")
    if main_grad.is_neg():
        _check.refuse(op, "main_grad", "a tensor that holds its values", "one with the negative bit")
    plain = (Tensor, torch.nn.Parameter)
    for name, t in inputs.items():
        if type(t) not in plain or type(main_grad) not in plain or t.is_meta or main_grad.is_meta:  # type: ignore[union-attr]
            continue
        if t.numel() and main_grad.numel():  # type: ignore[union-attr]
            (first, end), (other_first, other_end) = _bytes_of(main_grad), _bytes_of(t)  # type: ignore[arg-type]
            if first < other_end and other_first < end:
                _check.refuse(op, "main_grad", f"other memory than that of {name}", f"bytes that {name} holds")
