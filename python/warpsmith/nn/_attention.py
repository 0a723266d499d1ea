from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from warpsmith._core import checks
from warpsmith.nn._norm import RMSNorm
from warpsmith.ops.attention import attention, attention_varlen
from warpsmith.ops.rope import qk_norm_rope, rope


class Attention(nn.Module):
    """Self-attention with its projections: MHA, GQA or MQA, with RoPE and normalised heads where wanted.

    One linear layer gives q, k and v, side by side along its output; :func:`warpsmith.attention` reads them there, and
    its gradient is one tensor. With angles q and k go through :func:`warpsmith.rope`, or with ``qk_norm`` through
    :func:`warpsmith.qk_norm_rope`, in between.

    Args:
        embed_dim: E, the width of the input and the output.
        num_heads: H, heads of q.
        num_kv_heads: Hk, heads of k and v, a divisor of H; default: H.
        head_dim: D; default: E / H.
        bias: whether the projections have one.
        causal, window_size, softcap, softmax_scale, deterministic: as for :func:`warpsmith.attention`.
        dropout_p: of the attention weights, in training.
        qk_norm: normalise the heads of q and k (RMS), with a weight (D,) for each.
        eps: of these norms; None: the machine epsilon of the arithmetic.
        sink: a learnable logit for each head, that takes weight and has no value; zero at first.
        interleaved: pairs of the rotation are neighbours; else halves.
        device, dtype: of the parameters.

    The ``state_dict`` has ``qkv_proj.weight`` ((H + 2 Hk) D, E), ``o_proj.weight`` (E, H D), and where wanted their
    ``bias``, ``q_norm.weight``, ``k_norm.weight`` and ``sink``.

    Dtypes, gradients, determinism and errors: as :func:`warpsmith.attention`; sizes and options are checked when the
    module is made. Source: Vaswani et al., Attention is all
    you need, 2017; Ainslie et al., GQA, 2023.

    Example:
        >>> import torch, warpsmith
        >>> rotary = warpsmith.nn.RotaryEmbedding(32, max_positions=128)
        >>> layer = warpsmith.nn.Attention(256, num_heads=8, num_kv_heads=2, qk_norm=True)
        >>> layer(torch.randn(2, 16, 256), rotary.cos, rotary.sin).shape
        torch.Size([2, 16, 256])
    """

    sink: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        causal: bool = True,
        window_size: Sequence[int] | None = None,
        softcap: float = 0.0,
        softmax_scale: float | None = None,
        dropout_p: float = 0.0,
        qk_norm: bool = False,
        eps: float | None = None,
        sink: bool = False,
        interleaved: bool = False,
        deterministic: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        checks.sizes("Attention", embed_dim=embed_dim)
        checks.sizes("Attention", 1, num_heads=num_heads)
        for name, size in (("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
            if size is not None:
                checks.refuse_non_int64("Attention", name, size, "an integer")
        checks.refuse_non_eps("Attention", eps, otherwise=True)
        checks.flags("Attention", bias=bias, qk_norm=qk_norm, sink=sink, interleaved=interleaved)
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            checks.refuse("Attention", "num_kv_heads", f"a divisor of {num_heads}", str(num_kv_heads))
        if head_dim is None and embed_dim % num_heads:
            checks.refuse("Attention", "embed_dim", f"a multiple of {num_heads} heads, or head_dim", str(embed_dim))
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if self.head_dim < 8 or self.head_dim > 256 or self.head_dim % 8:
            checks.refuse("Attention", "head_dim", "8 to 256 elements a head, in steps of 8", str(self.head_dim))
        self.dropout_p, self.eps, self.interleaved = dropout_p, eps, interleaved
        self.options: dict[str, Any] = {
            "causal": causal,
            "window_size": window_size,
            "softcap": softcap,
            "softmax_scale": softmax_scale,
            "deterministic": deterministic,
        }
        self._refuse_options(dtype)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        heads = num_heads + 2 * num_kv_heads
        self.qkv_proj = nn.Linear(embed_dim, heads * self.head_dim, bias, **made)
        self.o_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias, **made)
        self.q_norm = RMSNorm(self.head_dim, eps, **made) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps, **made) if qk_norm else None
        self.register_parameter("sink", nn.Parameter(torch.empty(num_heads, **made)) if sink else None)
        self.reset_parameters()

    def _refuse_options(self, dtype: torch.dtype | None) -> None:
        """Refuses what the op would refuse, but only at the first call, for dropout the first one in training."""
        heads, dtype = self.num_heads + 2 * self.num_kv_heads, dtype if dtype in checks.FLOAT_DTYPES else None
        nothing = torch.empty((0, 1, heads, self.head_dim), device="meta", dtype=dtype)
        try:
            attention(nothing, kv_heads=self.num_kv_heads, dropout_p=self.dropout_p, **self.options)
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).replace("attention", "Attention", 1)) from None

    def reset_parameters(self) -> None:
        """Zero sinks; the parts have their own."""
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    def _rotated(self, q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None, positions: dict) -> tuple:
        if self.q_norm is None or self.k_norm is None:
            if cos is None or sin is None:
                return q, k
            return rope(q, k, cos, sin, interleaved=self.interleaved, **positions)
        if cos is None or sin is None:
            return self.q_norm(q), self.k_norm(k)
        weights = cast(Tensor, self.q_norm.weight), cast(Tensor, self.k_norm.weight)
        return qk_norm_rope(q, k, *weights, cos, sin, eps=self.eps, interleaved=self.interleaved, **positions)

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        position_offset: int | Tensor = 0,
    ) -> Tensor:
        """Attention of ``x`` (B, S, E), or of packed sequences (T, E) with ``cu_seqlens`` and ``max_seqlen``.

        cos, sin, position_offset: of the rotation, as for :func:`warpsmith.rope`; None: no rotation.
        bias, alibi_slopes: as for :func:`warpsmith.attention`.
        """
        if (cos is None) != (sin is None):
            checks.refuse("Attention", "sin", "a tensor beside cos, or neither", "one of them")
        if (cu_seqlens is None) != (max_seqlen is None):
            checks.refuse("Attention", "max_seqlen", "an integer beside cu_seqlens, or neither", "one of them")
        kv_heads = self.num_kv_heads
        heads = self.qkv_proj(x).unflatten(-1, (self.num_heads + 2 * kv_heads, self.head_dim))
        tensors: dict[str, Any] = {"q": heads, "kv_heads": kv_heads}
        if cos is not None or self.q_norm is not None:
            # The gradients of the parts meet again in one tensor by one concatenation.
            q, k, v = heads.split((self.num_heads, kv_heads, kv_heads), dim=-2)
            q, k = self._rotated(q, k, cos, sin, {"cu_seqlens": cu_seqlens, "position_offset": position_offset})
            tensors = {"q": q, "k": k, "v": v}
        options = {**self.options, "bias": bias, "alibi_slopes": alibi_slopes, "sink": self.sink}
        options["dropout_p"] = self.dropout_p if self.training else 0.0
        if cu_seqlens is None:
            out = attention(**tensors, **options)
        else:
            out = attention_varlen(**tensors, cu_seqlens_q=cu_seqlens, max_seqlen_q=max_seqlen, **options)
        return self.o_proj(cast(Tensor, out).flatten(-2))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
