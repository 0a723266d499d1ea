from __future__ import annotations

import torch
from torch import Tensor

from warpsmith.ops import _check, _rope


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
    _check.flags("rope", interleaved=interleaved, inplace=inplace)
    _rope.refuse_gradient_of_angles("rope", cos, sin)
    offsets, offset = _rope.split_offset("rope", position_offset)
    keys = _rope.keys_or_none("rope", q, k)
    arguments = (cos, sin, interleaved, cu_seqlens, offsets, offset, False)
    if not inplace:
        q_out, k_out = _rope.rotate(q, keys, *arguments)
    elif torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        q_out, k_out = _rope.rotate(q, keys, *arguments)
        q_out, k_out = q.copy_(q_out), keys.copy_(k_out)
    else:
        q_out, k_out = _rope.rotate_inplace(q, keys, *arguments)
    return q_out, None if k is None else k_out
