from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warpsmith.ops import _rotary
from warpsmith.ops._check import refuse
from warpsmith.ops._library import Saved, call_raw, differentiable, raw, register_fake

_OP = "rope"


def _fake(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    offsets: Tensor | None,
    position_offset: Any,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    _rotary.check_inputs(_OP, q, k, cos, sin, cu_seqlens, offsets, position_offset)
    return _rotary.empty_heads(q), _rotary.empty_heads(k)


def _fake_inplace(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any) -> None:
    _fake(q, k, cos, sin, *others)


register_fake("rope", _fake)
register_fake("rope_forward", _fake)
register_fake("rope_inplace", _fake_inplace)

_raw_forward = raw.rope_forward.default
_raw_inplace = raw.rope_inplace.default


def _save(inputs: Sequence[Any], outputs: Any) -> Saved:
    _, _, cos, sin, interleaved, cu_seqlens, offsets, position_offset, inverse = inputs
    return (cos, sin, cu_seqlens, offsets), (interleaved, position_offset, inverse)


def _no_heads(x: Tensor) -> Tensor:
    return x.narrow(-2, 0, 0)


def _turn_back(
    call: Any, needs: Sequence[bool], tensors: Any, values: Any, dq: Tensor | None, dk: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients: the same rotation by the negative angle."""
    want_q, want_k = needs[0] and dq is not None, needs[1] and dk is not None
    if not (want_q or want_k):
        return (None,) * 9
    q = dq if want_q else _no_heads(dk)  # type: ignore[arg-type]
    k = dk if want_k else _no_heads(dq)  # type: ignore[arg-type]
    cos, sin, cu_seqlens, offsets = tensors
    interleaved, position_offset, inverse = values
    grads = call(q, k, cos, sin, interleaved, cu_seqlens, offsets, position_offset, not inverse)
    return grads[0] if want_q else None, grads[1] if want_k else None, *(None,) * 7


def _backward(needs: Sequence[bool], tensors: Any, values: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _turn_back(lambda *a: call_raw(_raw_forward, *a), needs, tensors, values, *grads)


def _differentiable_backward(
    needs: Sequence[bool], tensors: Any, values: Any, *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    return _turn_back(rotate, needs, tensors, values, *grads)


# (q, k, cos, sin, interleaved, cu_seqlens, offsets, position_offset, inverse) -> (q, k)
rotate = differentiable(
    "rope",
    forward=_raw_forward,
    public=2,
    save=_save,
    backward=_backward,
    differentiable_backward=_differentiable_backward,
)


class _Written(torch.autograd.Function):
    """The gradient of one tensor that has been rotated in place; the rotation itself is done by the caller."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        tensors, ctx.values = _save((x, x, *arguments), None)
        ctx.save_for_backward(*tensors)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call = rotate if torch.is_grad_enabled() else lambda *a: call_raw(_raw_forward, *a)
        back = _turn_back(call, (True, False), ctx.saved_tensors, ctx.values, grads[0], None)
        return back[0], *back[2:]


def _check_graph(name: str, x: Tensor) -> None:
    """What torch itself would refuse, but only after the memory has been written."""
    base = x._base if x._is_view() else x
    if base is not None and base.is_leaf and base.requires_grad:
        refuse(_OP, name, "no leaf that requires a gradient to be written in place", "one")
    if x._is_view() and torch._C._autograd._get_creation_meta(x) != torch._C._autograd.CreationMeta.DEFAULT:
        refuse(_OP, name, "a view that torch lets be written in place, a slice", "one of several outputs, as of split")


def _rotate_inplace(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """One launch for both; then a node of the graph for each, because torch allows a function one output where the
    input that it writes to is a view, as q and k of one projection are."""
    in_graph = [torch.is_grad_enabled() and x.requires_grad for x in (q, k)]
    for name, x, graph in zip(("q", "k"), (q, k), in_graph, strict=True):
        if graph:
            _check_graph(name, x)
    with torch.no_grad():
        call_raw(_raw_inplace, q, k, *arguments)
    for x in (q, k):
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)
    if in_graph[0]:
        q = _Written.apply(q, *arguments)
    if in_graph[1] and k.numel():
        k = _Written.apply(k, *arguments)
    return q, k


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    position_offset: int | Tensor = 0,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:
    r"""Rotary position embedding of queries and keys, both in one launch.

    Each pair :math:`(a, b)` of elements of a head is rotated by the angle :math:`\theta` of its token's position:

    .. math:: (a, b) \mapsto (a \cos\theta - b \sin\theta, \; b \cos\theta + a \sin\theta)

    The first ``rotary_dim`` elements of a head make the pairs, the others pass through.

    Args:
        q: shape (B, S, Hq, D), or (T, Hq, D) for one sequence or packed ones; float32, float16, bfloat16, or float64 on
            the CPU. Any strides: a head's elements must be adjacent to be read where they are, so views of a fused QKV
            tensor and ``transpose(1, 2)`` of (B, H, S, D) are not copied.
        k: as ``q``, with any number of heads; None: only ``q`` is rotated.
        cos, sin: the dtype of ``q``, or float32 beside a 16-bit one. With two dimensions a table
            (positions, rotary_dim / 2), indexed by position. With three, (B or 1, S, rotary_dim): one row for each
            token, position ids applied, as transformers makes them: ``q * cos + rotate(q) * sin``, where both elements
            of a pair have the same angle (the first one's is read). No gradient: one that requires it is refused.
        interleaved: pairs are neighbours (2i, 2i + 1), as in GPT-J; else (i, i + rotary_dim / 2), as in Llama.
        cu_seqlens: int32 (sequences + 1) on the device of ``q``: where packed sequences begin, and T. Positions start
            at 0 in each. Only with three-dimensional ``q``.
        position_offset: added to every position: an int, or an int32 or int64 tensor on the device of ``q``, of shape
            (), or (B,) or (sequences,): one for each batch entry or packed sequence, as decoding needs it.
        inplace: write to ``q`` and ``k`` and return them; they must not overlap. Under ``torch.compile`` and
            ``torch.func`` the result is copied into them.

    Returns:
        (q, k): new tensors, contiguous in the order in which tokens and heads of the input lie; with ``inplace`` the
        inputs. Arithmetic is float32 (float64 for float64). Under autocast nothing is cast.

    Gradients of every order for ``q`` and ``k``: the same kernel, by the negative angle; only ``cos``, ``sin`` and the
    positions are kept. In place, forward is one launch and backward one for each of ``q`` and ``k``.

    Deterministic. Moves 2 elements of memory for each of ``q`` and ``k`` (in place: for each rotated one).

    Raises:
        ValueError: a dtype, shape or device that does not fit; a position without a row of ``cos``. Positions that only
            a CUDA device knows (``cu_seqlens``, an offset in a tensor) are not looked at by the host: a token whose
            position has no row, or that lies in no sequence, gets NaN in its rotated elements.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.

    Example:
        >>> import torch, warpsmith
        >>> angle = torch.arange(3.0)[:, None]
        >>> q, k = warpsmith.rope(torch.tensor([1.0, 0.0]).expand(3, 1, 2), None, angle.cos(), angle.sin())
        >>> q[:, 0]
        tensor([[ 1.0000,  0.0000],
                [ 0.5403,  0.8415],
                [-0.4161,  0.9093]])
    """
    _rotary.refuse_gradient_of_angles(_OP, cos, sin)
    offsets, offset = _rotary.split_offset(_OP, position_offset)
    keys = _no_heads(q) if k is None else k
    arguments = (cos, sin, interleaved, cu_seqlens, offsets, offset, False)
    if not inplace:
        q_out, k_out = rotate(q, keys, *arguments)
    elif torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        q_out, k_out = rotate(q, keys, *arguments)
        q_out, k_out = q.copy_(q_out), keys.copy_(k_out)
    else:
        q_out, k_out = _rotate_inplace(q, keys, *arguments)
    return q_out, None if k is None else k_out
