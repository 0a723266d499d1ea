from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from warpsmith.nn._rope_scaling import attention_factor, kind_of, scaled
from warpsmith.ops import _check
from warpsmith.ops.rope import rope

torch.fx.wrap("rope")  # torch.fx.symbolic_trace keeps the call whole


class RotaryEmbedding(nn.Module):
    """Rotary position embedding with its tables: :func:`warpsmith.rope` of queries and keys.

    Angle of pair i at position p: ``p / base ** (2 i / dim)``. The tables ``cos`` and ``sin``, shape
    (max_positions, dim / 2), are made in float64, rounded once, and are no part of the ``state_dict``.

    Args:
        dim: the rotary dimension, even; up to the head dimension, of which the rest passes through.
        max_positions: rows of the tables; a position beyond them is refused (see :func:`warpsmith.rope`).
        base: of the geometric series of frequencies.
        interleaved: pairs are neighbours, as in GPT-J; else halves, as in Llama.
        scaling: ``rope_scaling`` or ``rope_parameters`` of a configuration of transformers, or None: ``rope_type``
            ``"linear"``, ``"dynamic"``, ``"llama3"`` or ``"yarn"``, ``factor``, and what each needs beside. The dynamic
            one is that of a sequence of ``max_positions`` tokens, and needs ``original_max_position_embeddings``, the
            length that was trained. ``rope_theta`` in it is the base.
        device, dtype: of the tables: float32, or the activation's dtype. Casting the module casts them.

    Shapes, dtypes, gradients, determinism and errors: as :func:`warpsmith.rope`. Source: Su et al., RoFormer, 2021;
    Chen et al., Extending Context Window via Positional Interpolation, 2023; Peng et al., YaRN, 2023.

    Example:
        >>> import torch, warpsmith
        >>> rotary = warpsmith.nn.RotaryEmbedding(64, max_positions=128)
        >>> q, k = rotary(torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64))
        >>> q.shape, k.shape
        (torch.Size([2, 16, 8, 64]), torch.Size([2, 16, 2, 64]))
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        dim: int,
        max_positions: int = 2048,
        base: float = 10000.0,
        *,
        interleaved: bool = False,
        scaling: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.scaling = dict(scaling or {})
        base = self.scaling.get("rope_theta", base)
        for name, size in (("dim", dim), ("max_positions", max_positions)):
            _check.refuse_non_int64("RotaryEmbedding", name, size, "an integer")
        _check.refuse_non_number("RotaryEmbedding", "base", base, "a number > 0")
        _check.flags("RotaryEmbedding", interleaved=interleaved)
        if dim < 2 or dim % 2:
            _check.refuse("RotaryEmbedding", "dim", "an even number >= 2", str(dim))
        if max_positions < 1:
            _check.refuse("RotaryEmbedding", "max_positions", "a number >= 1", str(max_positions))
        if not 0 < base < math.inf:
            _check.refuse("RotaryEmbedding", "base", "a number > 0", _check.value_text(base))
        self.dim = dim
        self.max_positions = max_positions
        self.base = base
        self.interleaved = interleaved
        for name in ("cos", "sin"):
            table = torch.empty((max_positions, dim // 2), device=device, dtype=dtype)
            self.register_buffer(name, table, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fills the tables: needed after ``to_empty`` of a module made on the meta device."""
        pairs = torch.arange(0, self.dim, 2, dtype=torch.float64)
        positions = torch.arange(self.max_positions, dtype=torch.float64)
        frequencies = scaled(self.base ** (-pairs / self.dim), self.scaling, self.base, self.max_positions)
        angles, factor = torch.outer(positions, frequencies), attention_factor(self.scaling)
        self.cos.copy_(angles.cos() * factor)
        self.sin.copy_(angles.sin() * factor)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        *,
        cu_seqlens: Tensor | None = None,
        position_offset: int | Tensor = 0,
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotates ``q`` (B, S, Hq, D) or (T, Hq, D) and ``k`` by the angles of their positions."""
        return rope(
            q,
            k,
            self.cos,
            self.sin,
            interleaved=self.interleaved,
            cu_seqlens=cu_seqlens,
            position_offset=position_offset,
            inplace=inplace,
        )

    def extra_repr(self) -> str:
        text = f"{self.dim}, max_positions={self.max_positions}, base={self.base}, interleaved={self.interleaved}"
        return text + (f", scaling={kind_of(self.scaling)}" if self.scaling else "")
