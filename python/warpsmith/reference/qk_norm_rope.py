import torch
from torch import Tensor

from warpsmith.reference.rope import rope


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
