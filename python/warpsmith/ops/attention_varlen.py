from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from warpsmith.ops import _attention, _check

_OP = "attention_varlen"
_LONGEST = 2**31 - 1


def _check_length(argument: str, length: object) -> None:
    if not _check.is_integer(length):
        got = "a tensor" if isinstance(length, Tensor) else type(length).__name__
        _check.refuse(_OP, argument, "an integer", got)
    # The CPU goes over every block that a length allows. A traced length may be unknown: it cannot be compared.
    if not torch.compiler.is_compiling() and isinstance(length, int) and length > _LONGEST:
        _check.refuse(
            _OP, argument, f"at most {_LONGEST}, which is the end of int32 offsets", _check.value_text(length)
        )


def attention_varlen(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    causal_align: str = "bottom_right",
    window_size: Sequence[int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    seed: Tensor | None = None,
    kv_heads: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention within packed sequences (documents), stored one after the other in one tensor.

    .. math:: \mathrm{out}_i = \sum_j e^{s_{ij} - \mathrm{lse}_i} \, v_j

    for each sequence separately: the result of :func:`warpsmith.attention` on that sequence.

    Args:
        q: shape (Tq, H, D): the tokens of all sequences. Dtypes, strides and D as for :func:`warpsmith.attention`.
        k: shape (Tk, Hk, D).
        v: shape (Tk, Hk, Dv).
        cu_seqlens_q: int32, shape (N + 1,): sequence n has the tokens from entry n to entry n + 1 (excluded) of ``q``.
            A sequence may be empty, and the last may end before the tensor does: the tokens after it get out 0, lse
            -inf and no gradient.
        cu_seqlens_k: the same for ``k`` and ``v``. None: ``cu_seqlens_q``.
        max_seqlen_q: the length of the longest sequence of ``q``, or more. A Python integer, so that the host never
            reads ``cu_seqlens``.
        max_seqlen_k: the same for ``k``. None: ``max_seqlen_q``.
        causal, causal_align, window_size: as for :func:`warpsmith.attention`, within each sequence.
        bias: broadcasts to (N, H, max_seqlen_q, max_seqlen_k); queries and keys count within their sequence.
        alibi_slopes: float32, shape (H,) or (N, H).
        softmax_scale, softcap, dropout_p, sink, return_lse, deterministic, seed: as for :func:`warpsmith.attention`.
        kv_heads: as for :func:`warpsmith.attention`. Packed inputs are ``kv`` (Tk, 2, Hk, D), ``qkv`` (T, 3, H, D)
            or (T, H + 2 Hk, D).

    Returns:
        out (Tq, H, Dv), or (out, lse) with lse (H, Tq). Dtypes as for :func:`warpsmith.attention`.

    Gradients as for :func:`warpsmith.attention`.

    Deterministic, as :func:`warpsmith.attention`.

    Raises:
        ValueError: a dtype, shape, device or number that does not fit; on the CPU also offsets that do not
            begin with 0, that fall or that exceed the tokens, and a sequence longer than its maximum. On CUDA the host
            does not read offsets; kernels clamp them, so that none leads out of bounds.

    Source: as for :func:`warpsmith.attention`.

    Example:
        >>> import torch, warpsmith
        >>> q = torch.randn(10, 8, 64)
        >>> cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> out = warpsmith.attention_varlen(q, q, q, cu_seqlens, max_seqlen_q=7, causal=True)
        >>> out[:3].allclose(warpsmith.attention(*(q[:3],) * 3, causal=True, layout="thd"))
        True
    """
    _attention.refuse_gradient(_OP, alibi_slopes=alibi_slopes)
    _check.flags(_OP, causal=causal, return_lse=return_lse, deterministic=deterministic)
    align = _attention.choice(_OP, "causal_align", causal_align, ("bottom_right", "top_left"))
    window = _attention.check_window(_OP, causal, window_size)
    if cu_seqlens_q is None:
        _check.refuse(_OP, "cu_seqlens_q", "a tensor", "None")
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    max_seqlen_k = max_seqlen_q if max_seqlen_k is None else max_seqlen_k
    _check_length("max_seqlen_q", max_seqlen_q)
    _check_length("max_seqlen_k", max_seqlen_k)
    _attention.check_numbers(_OP, softmax_scale, softcap)
    heads = _attention.kv_heads_of(_OP, k, v, kv_heads)
    q, k, v, bias = _attention.under_autocast(_OP, q, k, v, bias)  # type: ignore[assignment]
    inputs = _attention.with_seed(
        _OP,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        alibi_slopes,
        bias,
        sink,
        seed,
        max_seqlen_q,
        max_seqlen_k,
        _attention.LAYOUTS.index("thd"),
        heads,
        align == 0,
        *window,
        softmax_scale,
        softcap,
        dropout_p,
        deterministic,
        None,
    )
    out, lse = _attention.attend(*inputs)
    return (out, lse) if return_lse else out
