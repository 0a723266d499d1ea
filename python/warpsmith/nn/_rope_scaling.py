"""Rope scaling as transformers' configurations state it: what becomes of the frequencies of a rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from warpsmith.ops import _check

_OWNER = "RotaryEmbedding"
TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def _number(scaling: Mapping[str, Any], key: str, otherwise: float | None = None) -> float:
    value = scaling.get(key)
    if value is None:
        value = otherwise
    if value is None or not _check.is_number(value) or not 0 < value < math.inf:
        _check.refuse(_OWNER, f"scaling[{key!r}]", "a number > 0", str(value))
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
        _check.refuse(_OWNER, "scaling['rope_type']", " or ".join(TYPES), str(kind))
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
