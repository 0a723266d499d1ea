"""Modules of rotary position embeddings, and what transformers calls rope scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from warpsmith._core import checks
from warpsmith.nn._norm import RMSNorm
from warpsmith.ops.rope import qk_norm_rope, rope

_OWNER = "RotaryEmbedding"
TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def _number(scaling: Mapping[str, Any], key: str, otherwise: float | None = None) -> float:
    value = scaling.get(key)
    if value is None:
        value = otherwise
    if value is None or not checks.is_number(value) or not 0 < value < math.inf:
        checks.refuse(_OWNER, f"scaling[{key!r}]", "a number > 0", str(value))
    return value


def _linear(frequencies: Tensor, scaling: Mapping[str, Any], base: float, positions: int) -> Tensor:
    """Positions are divided by the factor."""
    return frequencies / _number(scaling, "factor")


def _dynamic(frequencies: Tensor, scaling: Mapping[str, Any], base: float, positions: int) -> Tensor:
    """A larger base for longer sequences, here for one as long as the tables."""
    dim, factor = 2 * frequencies.numel(), _number(scaling, "factor")
    trained = _number(scaling, "original_max_position_embeddings")
    stretch = factor * max(positions, trained) / trained - (factor - 1)
    # base -> base * stretch ** (dim / (dim - 2)), in each frequency base ** (-2 i / dim)
    places = torch.arange(frequencies.numel(), dtype=torch.float64)
    return frequencies * stretch ** (-2 * places / (dim - 2)) if dim > 2 else frequencies


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any], base: float, positions: int) -> Tensor:
    """Long waves are stretched by the factor, short ones stay, and between them it goes smoothly."""
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    turns = _number(scaling, "original_max_position_embeddings") * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / _number(scaling, "factor"))


def _yarn(frequencies: Tensor, scaling: Mapping[str, Any], base: float, positions: int) -> Tensor:
    """The same by pairs: those that turn often within the trained length stay, those that do not are stretched."""
    pairs, trained = frequencies.numel(), _number(scaling, "original_max_position_embeddings")

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(trained / (times * 2 * math.pi)) / math.log(base)

    first = pair_that_turns(_number(scaling, "beta_fast", 32))
    last = pair_that_turns(_number(scaling, "beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 1e-3
    stretched = ((torch.arange(pairs, dtype=torch.float64) - first) / width).clamp(0, 1)
    return frequencies * (1 - stretched + stretched / _number(scaling, "factor"))


_FREQUENCIES: dict[str, Callable[[Tensor, Mapping[str, Any], float, int], Tensor]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}


def kind_of(scaling: Mapping[str, Any]) -> str:
    """The name of a scaling; older configurations have it under ``type``."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in TYPES:
        checks.refuse(_OWNER, "scaling['rope_type']", " or ".join(TYPES), str(kind))
    return kind


def scaled(frequencies: Tensor, scaling: Mapping[str, Any], base: float, positions: int) -> Tensor:
    """The frequencies (dim / 2,), float64, under a scaling, in tables of so many positions."""
    kind = kind_of(scaling)
    return frequencies if kind == "default" else _FREQUENCIES[kind](frequencies, scaling, base, positions)


def attention_factor(scaling: Mapping[str, Any]) -> float:
    """What cos and sin are multiplied by; not 1 for YaRN alone."""
    if kind_of(scaling) != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    factor = _number(scaling, "factor")

    def of(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return of(scaling["mscale"]) / of(scaling["mscale_all_dim"])
    return of(1.0)


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
            checks.refuse_non_int64("RotaryEmbedding", name, size, "an integer")
        checks.refuse_non_number("RotaryEmbedding", "base", base, "a number > 0")
        checks.flags("RotaryEmbedding", interleaved=interleaved)
        if dim < 2 or dim % 2:
            checks.refuse("RotaryEmbedding", "dim", "an even number >= 2", str(dim))
        if max_positions < 1:
            checks.refuse("RotaryEmbedding", "max_positions", "a number >= 1", str(max_positions))
        if not 0 < base < math.inf:
            checks.refuse("RotaryEmbedding", "base", "a number > 0", checks.value_text(base))
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
        checks.sizes("QKNormRoPE", 1, head_dim=head_dim)
        checks.refuse_non_eps("QKNormRoPE", eps, otherwise=True)
        checks.flags("QKNormRoPE", interleaved=interleaved)
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
