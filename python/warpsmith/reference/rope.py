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
