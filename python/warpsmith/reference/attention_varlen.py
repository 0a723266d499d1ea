import torch
from torch import Tensor

from warpsmith.reference.attention import attend, dropout_mask, keep_scale, unpack, window_of


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
