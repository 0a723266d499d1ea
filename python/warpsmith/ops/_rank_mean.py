"""The raw op of gradient reduction: the mean over ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from warpsmith.ops._library import call_raw, raw


def rank_mean(parts: Tensor, outs: Sequence[Tensor], *, own: Tensor | None = None, rank: int = 0) -> None:
    """Writes the mean of the rows of ``parts`` to each of ``outs``: a sum in float32 (float64 for float64) from the
    first row to the last, divided by their number and rounded once to the dtype of ``parts``.

    parts: (ranks, elements), rows of adjacent elements. own: stands for row ``rank``; float32 is rounded to the dtype
    of ``parts`` before it is added. outs: vectors in the dtype of ``parts`` or float32; one may be ``own``. On CUDA an
    output may lie in the memory of another GPU; float64 has no kernel there.
    """
    call_raw(raw.rank_mean.default, parts, own, rank, list(outs))
