from __future__ import annotations

from torch import Tensor

from warpsmith.ops import _rope
from warpsmith.ops._norm import default_eps


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
