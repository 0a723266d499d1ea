"""Attention over dense batches and over packed sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith.ops import _attention

_OP = "attention"


def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
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
    layout: str = "bshd",
    seed: Tensor | None = None,
    kv_heads: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Scaled dot-product attention, in tiles: no matrix of queries times keys is ever stored.

    .. math:: \mathrm{out}_i = \sum_j e^{s_{ij} - \mathrm{lse}_i} \, v_j, \qquad
        \mathrm{lse}_i = \log \sum_j e^{s_{ij}}, \qquad s_{ij} = \mathrm{softmax\_scale} \cdot q_i^\top k_j

    over the keys that query i sees, for each batch entry and head. The options apply to the logits in this order:
    ``softcap`` (:math:`s \mapsto c \tanh(s / c)`), ``alibi_slopes`` (:math:`s_{ij} - m_h |i + \mathrm{shift} - j|`),
    ``bias`` (added), then the window and the mask.

    Args:
        q: shape (B, Sq, H, D); float32, float16, bfloat16, or float64 on the CPU. D is 8 to 256 in steps of 8. Any
            strides; a tensor whose last dimension is not contiguous is copied once.
        k: shape (B, Sk, Hk, D). Hk divides H: head h of ``q`` reads head h * Hk / H (MQA and GQA).
        v: shape (B, Sk, Hk, Dv). Dv is 8 to 256 in steps of 8, and need not equal D.
        causal: query i sees the keys j <= i + shift.
        causal_align: defines shift. "bottom_right": Sk - Sq, so that the last query sees all keys; "top_left": 0.
            Windows and ALiBi use the same shift.
        window_size: (left, right): query i sees i + shift - left <= j <= i + shift + right. -1: no limit. None: all.
        softmax_scale: default :math:`1 / \sqrt{D}`. At most 2^127 in size (float64: any).
        softcap: c >= 0; 0: no cap. At most 2^127, and at least 2^-127 of ``softmax_scale`` (float64: any).
        dropout_p: the probability p of dropping a weight, 0 to 1 (1 excluded), rounded to a multiple of 1 / 256 (0.1:
            26 / 256). Between 0 and 1 at least 1 and at most 255 of 256 weights are dropped. Kept weights are divided
            by 1 - p with the rounded p, so that the expectation is exact. ``lse`` counts all weights.
        alibi_slopes: float32, shape (H,) or (B, H); without gradient.
        bias: broadcasts to (B, H, Sq, Sk). Floating (the dtype of ``q``, or float32 if that has 16 bits): added to the
            logits, with a gradient, which is summed over broadcast dimensions. Boolean: True where a query sees a key.
            Only False and -inf hide a key: biases of ``torch.finfo(dtype).min`` follow the softmax as any other number.
        sink: shape (H,), dtype as for ``bias``: one more logit per head, which takes weight but has no value. ``lse``
            counts it.
        return_lse: return ``lse`` as well.
        deterministic: False allows a backward whose sums have no fixed order, where that is faster.
        layout: "bshd" as above; "bhsd" (B, H, S, D); "thd" (S, H, D), one sequence without a batch dimension. No
            layout is copied: kernels read by strides.
        seed: two int64 on the device of ``q``, which determine the dropout mask. None: drawn from torch's default
            generator of that device.
        kv_heads: Hk, if ``q`` holds q, k and v along its heads; None beside ``k``.

    Packed inputs: ``attention(q, kv)`` with ``kv`` of shape (B, Sk, 2, Hk, D); ``attention(qkv)`` with
    (B, S, 3, H, D), or with (B, S, H + 2 Hk, D) and ``kv_heads=Hk``. (In every layout,
    the new dimension stands before the heads.) Nothing is copied, and the gradient is one tensor, packed likewise.

    Returns:
        out, of the dtype of ``q`` and shape (B, Sq, H, Dv), with tokens and heads in the memory order of ``q``; or
        (out, lse) with lse (B, H, Sq), float32 (float64 for float64). Arithmetic is float32 (float64 for float64). A
        query that sees no key has out 0, lse -inf (the sink, if there is one) and no gradient. A logit of +inf makes
        the row NaN. Under autocast q, k, v and floating biases are cast to its dtype, as for
        ``torch.nn.functional.scaled_dot_product_attention``.

    Gradients flow from out and from lse to ``q``, ``k``, ``v``, ``bias`` and ``sink``. Second derivatives are refused.

    Deterministic: every sum has a fixed order, forward and backward. The dropout mask is a function of ``seed``, batch
    entry, head, query and key, and is the same on every device.

    Raises:
        ValueError: a dtype, shape, device or number that does not fit.

    Source: Dao et al., FlashAttention, 2022, and Milakov and Gimelshein, Online normalizer calculation for softmax,
    2018.

    Example:
        >>> import torch, warpsmith
        >>> q, k, v = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64), torch.randn(2, 16, 2, 64)
        >>> warpsmith.attention(q, k, v, causal=True).shape
        torch.Size([2, 16, 8, 64])
    """
    _attention.refuse_gradient(_OP, alibi_slopes=alibi_slopes)
    checks.flags(_OP, causal=causal, return_lse=return_lse, deterministic=deterministic)
    which = _attention.choice(_OP, "layout", layout, _attention.LAYOUTS)
    align = _attention.choice(_OP, "causal_align", causal_align, ("bottom_right", "top_left"))
    window = _attention.check_window(_OP, causal, window_size)
    _attention.check_numbers(_OP, softmax_scale, softcap)
    heads = _attention.kv_heads_of(_OP, k, v, kv_heads)
    q, k, v, bias = _attention.under_autocast(_OP, q, k, v, bias)
    inputs = _attention.with_seed(
        _OP,
        q,
        k,
        v,
        None,
        None,
        alibi_slopes,
        bias,
        sink,
        seed,
        0,
        0,
        which,
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


_VARLEN = "attention_varlen"
_LONGEST = 2**31 - 1


def _check_length(argument: str, length: object) -> None:
    if not checks.is_integer(length):
        got = "a tensor" if isinstance(length, Tensor) else type(length).__name__
        checks.refuse(_VARLEN, argument, "an integer", got)
    # The CPU goes over every block that a length allows. A traced length may be unknown: it cannot be compared.
    if not torch.compiler.is_compiling() and isinstance(length, int) and length > _LONGEST:
        checks.refuse(
            _VARLEN, argument, f"at most {_LONGEST}, which is the end of int32 offsets", checks.value_text(length)
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
    _attention.refuse_gradient(_VARLEN, alibi_slopes=alibi_slopes)
    checks.flags(_VARLEN, causal=causal, return_lse=return_lse, deterministic=deterministic)
    align = _attention.choice(_VARLEN, "causal_align", causal_align, ("bottom_right", "top_left"))
    window = _attention.check_window(_VARLEN, causal, window_size)
    if cu_seqlens_q is None:
        checks.refuse(_VARLEN, "cu_seqlens_q", "a tensor", "None")
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    max_seqlen_k = max_seqlen_q if max_seqlen_k is None else max_seqlen_k
    _check_length("max_seqlen_q", max_seqlen_q)
    _check_length("max_seqlen_k", max_seqlen_k)
    _attention.check_numbers(_VARLEN, softmax_scale, softcap)
    heads = _attention.kv_heads_of(_VARLEN, k, v, kv_heads)
    q, k, v, bias = _attention.under_autocast(_VARLEN, q, k, v, bias)
    inputs = _attention.with_seed(
        _VARLEN,
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
