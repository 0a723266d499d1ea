"""What rope and qk_norm_rope share: the checks of csrc/torch/support/rotary.h for fake and meta tensors, in the same
words, and the layout of outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warpsmith.ops import _check
from warpsmith.ops._check import dtype_text, refuse, shape_text


def check_inputs(
    op: str,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    offsets: Tensor | None,
    position_offset: Any,
) -> None:
    """Everything that does not depend on values, and the offset beside cos of a row for each token."""
    dtype = _check.float_dtype(op, "q", q)
    _check_heads(op, q, k, cu_seqlens is not None)
    _check.same_dtype(op, "k", k, q)
    _check.same_device(op, "k", k, q)
    cos_dtype = _check.float_dtype(op, "cos", cos)
    half = dtype.itemsize == 2
    if cos_dtype != dtype and not (half and cos_dtype == torch.float32):
        refuse(op, "cos", dtype_text(dtype) + (" or float32" if half else ""), dtype_text(cos_dtype))
    _check.same_device(op, "cos", cos, q)
    _check_angles(op, q, cos)
    _check.same_dtype(op, "sin", sin, cos)
    _check.same_shape(op, "sin", sin, cos.shape)
    _check.same_device(op, "sin", sin, cos)
    _check_positions(op, q, cos, cu_seqlens, offsets, position_offset)


def _check_heads(op: str, q: Tensor, k: Tensor, packed: bool) -> None:
    if packed and q.dim() != 3:
        refuse(op, "q", "shape (tokens, heads, head_dim) beside cu_seqlens", shape_text(q.shape))
    if q.dim() not in (3, 4):
        expected = "shape (batch, tokens, heads, head_dim) or (tokens, heads, head_dim)"
        refuse(op, "q", expected, shape_text(q.shape))
    same = k.dim() == q.dim() and all(k.shape[i] == q.shape[i] for i in range(q.dim()) if i != q.dim() - 2)
    if not same:
        refuse(op, "k", f"the shape of q but for its heads, {shape_text(q.shape)}", shape_text(k.shape))


def _check_angles(op: str, q: Tensor, cos: Tensor) -> None:
    if cos.dim() not in (2, 3):
        expected = "shape (positions, rotary_dim / 2) or (batch, tokens, rotary_dim)"
        refuse(op, "cos", expected, shape_text(cos.shape))
    rotary_dim = 2 * cos.shape[-1]
    if cos.dim() == 3:
        rotary_dim = cos.shape[-1]
        batch, tokens = (q.shape[0] if q.dim() == 4 else 1), q.shape[-3]
        if (cos.shape[0] != batch and cos.shape[0] != 1) or cos.shape[1] != tokens:
            refuse(op, "cos", f"shape ({batch} or 1, {tokens}, rotary_dim)", shape_text(cos.shape))
        if rotary_dim % 2:
            refuse(op, "cos", "an even rotary dimension", shape_text(cos.shape))
    if rotary_dim > q.shape[-1]:
        got = f"{rotary_dim} of shape {shape_text(cos.shape)}"
        refuse(op, "cos", f"a rotary dimension of at most {q.shape[-1]}", got)


def _check_positions(
    op: str, q: Tensor, cos: Tensor, cu_seqlens: Tensor | None, offsets: Tensor | None, position_offset: Any
) -> None:
    if cos.dim() == 3:
        if cu_seqlens is not None:
            refuse(op, "cu_seqlens", "None beside cos of a row for each token", "a tensor")
        if offsets is not None:
            refuse(op, "position_offset", "0 beside cos of a row for each token", "a tensor")
        if position_offset != 0:
            refuse(op, "position_offset", "0 beside cos of a row for each token", str(position_offset))
        return
    entries = q.shape[0] if q.dim() == 4 else 1
    if cu_seqlens is not None:
        if cu_seqlens.dtype != torch.int32:
            refuse(op, "cu_seqlens", "int32", dtype_text(cu_seqlens.dtype))
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            refuse(op, "cu_seqlens", "shape (sequences + 1)", shape_text(cu_seqlens.shape))
        _check.same_device(op, "cu_seqlens", cu_seqlens, q)
        entries = cu_seqlens.shape[0] - 1
    if offsets is not None:
        if offsets.dtype not in (torch.int32, torch.int64):
            refuse(op, "position_offset", "int32 or int64", dtype_text(offsets.dtype))
        if offsets.dim() > 1 or (offsets.dim() == 1 and offsets.shape[0] != entries):
            refuse(op, "position_offset", f"shape () or ({entries})", shape_text(offsets.shape))
        _check.same_device(op, "position_offset", offsets, q)


def empty_heads(x: Tensor) -> Tensor:
    """A new tensor like ``x``, contiguous in the order in which tokens and heads of ``x`` lie."""
    tokens, heads = x.shape[-3], x.shape[-2]
    if tokens > 1 and heads > 1 and x.stride(-2) > x.stride(-3):
        return x.new_empty((*x.shape[:-3], heads, tokens, x.shape[-1])).transpose(-3, -2)
    return x.new_empty(x.shape)


def split_offset(op: str, position_offset: Any) -> tuple[Tensor | None, Any]:
    """``position_offset`` as the raw ops take it: a tensor or None, and a number."""
    if isinstance(position_offset, Tensor):
        return position_offset, 0
    if not isinstance(position_offset, (int, torch.SymInt)) or isinstance(position_offset, bool):
        refuse(op, "position_offset", "an integer or a tensor of integers", type(position_offset).__name__)
    return None, position_offset


def refuse_gradient_of_angles(op: str, cos: Tensor, sin: Tensor) -> None:
    """cos and sin have no gradient: one that wants it is refused, not given none."""
    for name, t in (("cos", cos), ("sin", sin)):
        if torch.is_grad_enabled() and getattr(t, "requires_grad", False):
            refuse(op, name, "a tensor that requires no gradient", "one that does")
