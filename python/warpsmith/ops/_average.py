"""The raw op of moving averages. For eager code: it has no fake."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from warpsmith.ops._library import call_raw, raw


def average_in_place(
    averages: Sequence[Tensor], values: Sequence[Tensor], weight: float, found_inf: Tensor | None
) -> None:
    """``average + weight (value - average)`` of dense tensors of one device; nothing where ``found_inf`` is not 0."""
    call_raw(raw.average_weights.default, list(averages), list(values), weight, found_inf)
