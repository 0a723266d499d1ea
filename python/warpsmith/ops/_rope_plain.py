"""rope and qk_norm_rope in plain torch operations, which have derivatives of every kind."""

from typing import Any

import torch
from torch import Tensor

from warpsmith._core import checks


def _positions(q: Tensor, cu_seqlens: Tensor | None, offsets: Tensor | None, position_offset: Any) -> Tensor:
    """Rows of the tables: (tokens,), or (batch, tokens) where each entry has its own offset."""
    tokens = torch.arange(q.shape[-3], device=q.device)
    added = position_offset if offsets is None else offsets
    if cu_seqlens is not None:
        sequence = torch.searchsorted(cu_seqlens.to(tokens.dtype), tokens, right=True) - 1
        own = added[sequence] if isinstance(added, Tensor) and added.dim() else added
        return tokens - cu_seqlens.to(tokens.dtype)[sequence] + own
    if isinstance(added, Tensor) and added.dim() == 1 and q.dim() == 4:
        return tokens + added[:, None]
    return tokens + added


def _row_of_each_token(angle: Tensor, q: Tensor, interleaved: bool, positions: tuple[Any, ...]) -> Tensor:
    """cos or sin, of one element a pair, to broadcast over heads."""
    if angle.dim() == 3:
        half = angle[..., ::2] if interleaved else angle[..., : angle.shape[-1] // 2]
        rows = half if q.dim() == 4 else half[0]
    else:
        rows = angle[_positions(q, *positions)]
    return rows.unsqueeze(-2)


def plain_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *others: Any
) -> tuple[Tensor, Tensor]:
    """The arguments of the raw op; (q, k) rotated."""
    *positions, inverse = others
    wide = checks.wide_dtype(q)
    c, s = (_row_of_each_token(t, q, interleaved, tuple(positions)).to(wide) for t in (cos, sin))
    if inverse:
        s = -s

    def turned(x: Tensor) -> Tensor:
        turning, rest = x[..., : 2 * c.shape[-1]].to(wide), x[..., 2 * c.shape[-1] :]
        a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
        pair = a * c - b * s, b * c + a * s
        both = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return torch.cat([both.to(x.dtype), rest], -1)

    return turned(q), turned(k)


def plain_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool,
    *positions: Any,
) -> tuple[Tensor, Tensor]:
    """The arguments of the raw op; (q, k) normalised and rotated."""
    wide = checks.wide_dtype(q)
    heads = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        x_wide = x.to(wide)
        heads.append(x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide))
    q_out, k_out = plain_rope(heads[0], heads[1], cos, sin, interleaved, *positions, False)
    return q_out.to(q.dtype), k_out.to(k.dtype)
