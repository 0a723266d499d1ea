"""Rotary position embeddings, alone and behind a norm of each head."""

from __future__ import annotations

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith.ops import _rope
from warpsmith.ops._norm import default_eps


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
    checks.flags("rope", interleaved=interleaved, inplace=inplace)
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


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    position_offset: int | Tensor = 0,
) -> tuple[Tensor, Tensor]:
    r"""RMS normalisation of each head of queries and keys, and their rotary position embedding, in one pass.

    .. math:: q \mapsto R\left(\frac{q}{\sqrt{\operatorname{mean}(q^2) + \epsilon}} \, w_q\right), \qquad
        k \mapsto R\left(\frac{k}{\sqrt{\operatorname{mean}(k^2) + \epsilon}} \, w_k\right)

    over the last dimension, where :math:`R` is :func:`warpsmith.rope`. Nothing is rounded in between.

    Args:
        q: shape (B, S, Hq, D), or (T, Hq, D) for one sequence or packed ones; float32, float16, bfloat16, or float64 on
            the CPU; strides as for :func:`warpsmith.rope`.
        k: as ``q``, with any number of heads.
        q_weight, k_weight: shape (D,), both of the dtype of ``q``, or float32 beside a 16-bit one.
        cos, sin, interleaved, cu_seqlens, position_offset: as for :func:`warpsmith.rope`.
        eps: added to the mean square, >= 0. None: the machine epsilon of the arithmetic, as for
            :func:`warpsmith.rms_norm`.

    Returns:
        (q, k): new tensors, contiguous in the order in which tokens and heads of the input lie. Sums and arithmetic are
        float32 (float64 for float64). Under autocast nothing is cast.

    Gradients for ``q``, ``k``, ``q_weight`` and ``k_weight``, and theirs in turn; the second derivative is composed of
    plain torch operations. The inputs are kept; the reciprocal roots are computed again.

    Deterministic: every sum has a fixed order, those of the weights' gradients too. Moves 2 elements of memory for each
    of ``q`` and ``k`` forward and 3 backward.

    Raises:
        ValueError: a dtype, shape, device or eps that does not fit; a position without a row of ``cos``, as for
            :func:`warpsmith.rope`. Where only a CUDA device knows such a position, the rotated elements of its token
            become NaN, and the weights' gradients with them.

    Source: Henry et al., Query-Key Normalization for Transformers, 2020, with RMS normalisation and RoPE as in Qwen3.

    Example:
        >>> import torch, warpsmith
        >>> rotary, w = warpsmith.nn.RotaryEmbedding(64, max_positions=16), torch.ones(64)
        >>> q, k = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64)
        >>> q, k = warpsmith.qk_norm_rope(q, k, w, w, rotary.cos, rotary.sin)
        >>> q.square().mean(-1).allclose(torch.ones(2, 16, 8))
        True
    """
    _rope.refuse_gradient_of_angles("qk_norm_rope", cos, sin)
    offsets, offset = _rope.split_offset("qk_norm_rope", position_offset)
    arguments = (cos, sin, default_eps(q) if eps is None else eps, interleaved, cu_seqlens, offsets, offset)
    q_out, k_out = _rope.norm_and_rotate(q, k, q_weight, k_weight, *arguments)
    return q_out, k_out
