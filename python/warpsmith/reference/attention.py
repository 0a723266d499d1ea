from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warpsmith.reference.dropout import philox

_WORD = 0xFFFFFFFF


def dropout_mask(
    seed: Tensor,
    row_blocks: Tensor,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    p: float,
    place: Sequence[int] | None = None,
) -> Tensor:
    """Which weights are kept, shape (sequences, heads, seqlen_q, seqlen_k).

    ``row_blocks``: for each sequence the number of its first block of 16 queries, in the larger call if there is one.
    ``place``: as ``dropout_place`` of the raw op: (first_query, queries, first_key, first_head, heads).

    One Philox4x32-7 call serves the queries q, q + 8 and the keys k + 8 i, k + 8 i + 1 of a block of 16 x 32, in the
    order that ``csrc/kernels/attention/attention_dropout.h`` states.
    """
    seed = seed.to(row_blocks.device)
    q, k = (torch.arange(n, device=seed.device) for n in (seqlen_q, seqlen_k))
    first_query, _, first_key, first_head, all_heads = place or (0, seqlen_q, 0, 0, heads)
    q, k = q[:, None] + first_query, k[None, :] + first_key
    head = torch.arange(heads, device=seed.device)[:, None, None] + first_head
    call = (k // 32) * 32 + 4 * (q % 8) + k % 8 // 2
    row = (row_blocks[:, None, None, None] + q // 16) * all_heads + head
    counter = [call & _WORD, row & _WORD, seed[1] & _WORD, (seed[1] >> 32) & _WORD]
    counter = list(torch.broadcast_tensors(*counter))
    words = torch.stack(philox(counter, [seed[0] & _WORD, (seed[0] >> 32) & _WORD], rounds=7), -1)
    which = (k // 8 % 4).expand(words.shape[:-1])[..., None]
    byte = words.gather(-1, which)[..., 0] >> (16 * (q // 8 % 2) + 8 * (k % 2)) & 0xFF
    return byte >= dropped_of_256(p)


def dropped_of_256(p: float) -> int:
    """How many of 256 values of a byte drop a weight: 256 p, rounded (half up), but 1 to 255 if 0 < p < 1."""
    return min(max(int(p * 256 + 0.5), 1), 255) if 0 < p < 1 else int(256 * p)


def keep_scale(p: float) -> float:
    """By what kept weights are multiplied: the inverse of the share that is kept."""
    return 256 / (256 - dropped_of_256(p))


def window_of(seqlen_q: int, seqlen_k: int, causal: bool, align: str, window: tuple[int, int] | None) -> tuple:
    """(offset of each key from its query's own position, the mask of keys in the window), shape (Sq, Sk)."""
    shift = seqlen_k - seqlen_q if align == "bottom_right" else 0
    distance = torch.arange(seqlen_k)[None, :] - torch.arange(seqlen_q)[:, None] - shift
    left, right = window or (-1, -1)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    if causal:
        visible &= distance <= 0
    return distance, visible


def weights_of(
    s: Tensor,
    *,
    window: tuple,
    softcap: float,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    kept: Tensor | None,
    keep_scale: float,
) -> tuple[Tensor, Tensor]:
    """The weights of the values, and lse, from the scaled products, (B, H, Sq, Sk)."""
    distance, visible = (t.to(s.device) for t in window)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s.dtype)[..., None, None] * distance.abs()
    if bias is not None and bias.dtype == torch.bool:
        visible = visible & bias
    elif bias is not None:
        s = s + bias.to(s.dtype)
    visible = visible.expand(s.shape)
    no_sink = s.new_full((), -torch.inf)
    sinks = (no_sink if sink is None else sink.to(s.dtype)[:, None, None]).expand(*s.shape[:-1], 1)
    s = torch.cat([torch.where(visible, s, -torch.inf), sinks], -1)
    # A row without anything to attend to takes logits of 0 on the way, so that nothing becomes NaN.
    empty = (s == -torch.inf).all(-1, keepdim=True)
    s = torch.where(empty, 0.0, s)
    # Of differences from the maximum: exp(s - lse), of which the gradient of lse is made, would carry lse's rounding.
    most = s.detach().amax(-1, keepdim=True)
    most = torch.where(most.isfinite(), most, 0.0)
    lse = most + (s - most).logsumexp(-1, keepdim=True)
    weights = torch.where(empty, 0.0, s.softmax(-1)[..., :-1])
    if kept is not None:
        weights = torch.where(kept, weights * keep_scale, 0.0)
    return weights, torch.where(empty, -torch.inf, lse)[..., 0]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, **options: Any) -> tuple[Tensor, Tensor]:
    """The definition, on (B, H, S, D): out and lse. Products have the dtype of ``q``, the weights float32 or wider."""
    ratio = q.shape[1] // max(k.shape[1], 1)
    k, v = (t.repeat_interleave(ratio, 1) for t in (k, v))
    s = q @ k.transpose(-1, -2) * scale
    weights, lse = weights_of(s.to(torch.promote_types(q.dtype, torch.float32)), **options)
    return weights.to(q.dtype) @ v, lse


def unpack(q: Tensor, k: Tensor | None, v: Tensor | None, heads: int, kv_heads: int | None) -> tuple:
    """q, k and v, of which one tensor may hold several before or along its dimension of ``heads``."""
    if k is not None:
        return (q, *k.unbind(heads)) if v is None else (q, k, v)
    if kv_heads is None:
        return q.unbind(heads)
    return q.split([q.shape[heads] - 2 * kv_heads, kv_heads, kv_heads], heads)


def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    causal: bool = False,
    causal_align: str = "bottom_right",
    window_size: tuple[int, int] | None = None,
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
    products: torch.dtype | None = None,
    dropout_place: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(q k^T * softmax_scale) v`` in float32 or wider, with every option of the op.

    ``products``: another dtype for the two matrix products and what goes into them. ``dropout_place``: of a larger
    call of which this one is a part, as of the raw op.
    """
    q, k, v = unpack(q, k, v, 2 if layout == "bshd" else 1, kv_heads)
    wide = torch.promote_types(q.dtype, torch.float32) if products is None else products
    in_bhsd = {"bshd": lambda t: t.transpose(1, 2), "bhsd": lambda t: t, "thd": lambda t: t.transpose(0, 1)[None]}
    heads = [in_bhsd[layout](t).to(wide) for t in (q, k, v)]
    batch, heads_q, seqlen_q, head_dim = heads[0].shape
    seqlen_k = heads[1].shape[2]
    kept = None
    if dropout_p > 0 and seed is not None:
        queries = dropout_place[1] if dropout_place else seqlen_q
        row_blocks = torch.arange(batch, device=q.device) * ((queries + 15) // 16)
        kept = dropout_mask(seed, row_blocks, heads_q, seqlen_q, seqlen_k, dropout_p, dropout_place)
    out, lse = attend(
        heads[0],
        heads[1],
        heads[2],
        head_dim**-0.5 if softmax_scale is None else softmax_scale,
        window=window_of(seqlen_q, seqlen_k, causal, causal_align, window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        sink=sink,
        kept=kept,
        keep_scale=keep_scale(dropout_p),
    )
    out = out.to(q.dtype)
    if layout == "thd":
        out, lse = out[0], lse[0]
    out = out if layout == "bhsd" else out.transpose(-2, -3)
    return (out, lse) if return_lse else out


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
    window_size: tuple[int, int] | None = None,
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
    products: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`warpsmith.reference.attention.attention` of each packed sequence alone, in a loop."""
    assert cu_seqlens_q is not None
    q, k, v = unpack(q, k, v, 1, kv_heads)
    wide = torch.promote_types(q.dtype, torch.float32) if products is None else products
    total_q, heads_q, head_dim = q.shape
    starts_q, starts_k = (c.tolist() for c in (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k))
    sequences = len(starts_q) - 1
    out, lse = [], []
    for b in range(sequences):
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        parts = [t.transpose(0, 1)[None].to(wide) for t in (q[rows], k[keys], v[keys])]
        seqlen_q, seqlen_k = parts[0].shape[2], parts[1].shape[2]
        kept = None
        if dropout_p > 0 and seed is not None:
            row_block = torch.tensor([starts_q[b] // 16 + b], device=q.device)
            kept = dropout_mask(seed, row_block, heads_q, seqlen_q, seqlen_k, dropout_p)
        own_bias = bias
        if bias is not None:
            own_bias = bias.expand(sequences, *bias.shape[1:])[b : b + 1] if bias.dim() == 4 else bias
            own_bias = own_bias[..., :seqlen_q, :] if own_bias.shape[-2] > 1 else own_bias
            own_bias = own_bias[..., :seqlen_k] if own_bias.shape[-1] > 1 else own_bias
        result = attend(
            parts[0],
            parts[1],
            parts[2],
            head_dim**-0.5 if softmax_scale is None else softmax_scale,
            window=window_of(seqlen_q, seqlen_k, causal, causal_align, window_size),
            softcap=softcap,
            alibi_slopes=None if alibi_slopes is None else alibi_slopes.expand(sequences, heads_q)[b : b + 1],
            bias=own_bias,
            sink=sink,
            kept=kept,
            keep_scale=keep_scale(dropout_p),
        )
        out.append(result[0][0].transpose(0, 1))
        lse.append(result[1][0])
    rest = total_q - starts_q[-1]  # tokens behind the last sequence
    out.append(q.new_zeros((rest, heads_q, v.shape[-1]), dtype=wide))
    lse.append(q.new_full((heads_q, rest), -torch.inf, dtype=torch.promote_types(wide, torch.float32)))
    together = torch.cat(out).to(q.dtype)
    return (together, torch.cat(lse, 1)) if return_lse else together
