import torch
from torch import Tensor


def positions_of(q: Tensor, cu_seqlens: Tensor | None = None, position_offset: int | Tensor = 0) -> Tensor:
    """The position of each token, shape (batch, tokens), or (tokens,) where q has three dimensions."""
    tokens = torch.arange(q.shape[-3], device=q.device)
    if cu_seqlens is None:
        offset = torch.as_tensor(position_offset, device=q.device)
        return tokens + offset.reshape(-1, 1) if q.dim() == 4 else tokens + offset.reshape(-1)
    sequence = torch.searchsorted(cu_seqlens.long(), tokens, right=True) - 1
    offset = torch.as_tensor(position_offset, device=q.device).expand(cu_seqlens.numel() - 1)
    return tokens - cu_seqlens.long()[sequence] + offset[sequence]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """``(a, b) -> (a cos - b sin, b cos + a sin)``; cos and sin have one entry a pair and broadcast over the heads."""
    rotary_dim = 2 * cos.shape[-1]
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    pairs = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((turned, rest), -1)


def angles_of(
    q: Tensor, cos: Tensor, interleaved: bool, cu_seqlens: Tensor | None, position_offset: int | Tensor
) -> Tensor:
    """cos (or sin) of each token, with an axis for the heads: one entry a pair."""
    if cos.dim() == 3:
        one_a_pair = cos[..., ::2] if interleaved else cos[..., : cos.shape[-1] // 2]
        return (one_a_pair if q.dim() == 4 else one_a_pair[0]).unsqueeze(-2)
    return cos[positions_of(q, cu_seqlens, position_offset)].unsqueeze(-2)


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    position_offset: int | Tensor = 0,
) -> tuple[Tensor, Tensor | None]:
    """Rotary position embedding of q and k, in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    c, s = (angles_of(q, t.to(wide), interleaved, cu_seqlens, position_offset) for t in (cos, sin))
    turned = rotate(q.to(wide), c, s, interleaved).to(q.dtype)
    return turned, None if k is None else rotate(k.to(wide), c, s, interleaved).to(k.dtype)


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


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
    """RMS normalisation of each head of q and k, then their rotary position embedding, in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    added = torch.finfo(wide).eps if eps is None else eps
    heads = [normalised(x.to(wide), w.to(wide), added) for x, w in ((q, q_weight), (k, k_weight))]
    positions = {"interleaved": interleaved, "cu_seqlens": cu_seqlens, "position_offset": position_offset}
    q_out, k_out = rope(heads[0], heads[1], cos, sin, **positions)  # type: ignore[arg-type]
    assert k_out is not None
    return q_out.to(q.dtype), k_out.to(k.dtype)
