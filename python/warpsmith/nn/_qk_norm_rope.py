from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from warpsmith.nn._rms_norm import RMSNorm
from warpsmith.ops import _check
from warpsmith.ops.qk_norm_rope import qk_norm_rope

torch.fx.wrap("qk_norm_rope")  # torch.fx.symbolic_trace keeps the call whole


class QKNormRoPE(nn.Module):
    """RMS normalisation of the heads of queries and keys with their weights, and RoPE: :func:`warpsmith.qk_norm_rope`.

    The ``state_dict`` has ``q_norm.weight`` and ``k_norm.weight``, as the attention of Qwen3 in transformers.

    Args:
        head_dim: D, the length of the weights.
        eps: added to the mean square. None: the machine epsilon of the arithmetic, as in :func:`warpsmith.rms_norm`.
        interleaved: pairs of the rotation are neighbours; else halves.
        device, dtype: of the weights. float32 beside 16-bit activations is fine.

    Shapes, dtypes, gradients, determinism and errors: as :func:`warpsmith.qk_norm_rope`.

    Example:
        >>> import torch, warpsmith
        >>> rotary, norm = warpsmith.nn.RotaryEmbedding(64, max_positions=128), warpsmith.nn.QKNormRoPE(64)
        >>> q, k = norm(torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64), rotary.cos, rotary.sin)
        >>> q.shape, sorted(norm.state_dict())
        (torch.Size([2, 16, 8, 64]), ['k_norm.weight', 'q_norm.weight'])
    """

    def __init__(
        self,
        head_dim: int,
        eps: float | None = None,
        *,
        interleaved: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check.sizes("QKNormRoPE", 1, head_dim=head_dim)
        _check.refuse_non_eps("QKNormRoPE", eps, otherwise=True)
        _check.flags("QKNormRoPE", interleaved=interleaved)
        self.eps = eps
        self.interleaved = interleaved
        self.q_norm = RMSNorm(head_dim, eps, device=device, dtype=dtype)
        self.k_norm = RMSNorm(head_dim, eps, device=device, dtype=dtype)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        position_offset: int | Tensor = 0,
    ) -> tuple[Tensor, Tensor]:
        """Normalises and rotates ``q`` (B, S, Hq, D) or (T, Hq, D) and ``k``."""
        return qk_norm_rope(
            q,
            k,
            cast(Tensor, self.q_norm.weight),
            cast(Tensor, self.k_norm.weight),
            cos,
            sin,
            eps=self.eps,
            interleaved=self.interleaved,
            cu_seqlens=cu_seqlens,
            position_offset=position_offset,
        )

    def extra_repr(self) -> str:
        return f"interleaved={self.interleaved}"
