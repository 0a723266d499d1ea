"""The 8-bit casts of weights that a step writes beside them, for layers of :func:`warpsmith.amp.fp8`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from warpsmith import _C
from warpsmith.ops._scaled_linear import kept_by_rows


def row_elems(row: str, storage: str, part: Tensor) -> int:
    """The length of the rows of a weight, if the kernels can cast them; else 0."""
    fits = (row, storage) in _C.OPTIMIZERS_THAT_CAST and part.dim() == 2 and part.is_contiguous() and part.numel() > 0
    columns, (align, longest) = part.shape[1] if fits else 0, _C.OPTIMIZER_ROWS
    return columns if columns % align == 0 and columns <= longest and part.data_ptr() % 16 == 0 else 0


def to_write(weights: Sequence[Tensor], row_elems: Sequence[int]) -> tuple[list[int], Sequence[Any]]:
    """The casts that a step writes, and a column of their addresses. Those of a weight are written if its layers have a
    cast of its values as they are now: then that holds behind a skipped step too."""
    if not any(row_elems):
        return [], ()
    casts = [
        kept_by_rows(weight) if elems and weight.grad is not None else None
        for weight, elems in zip(weights, row_elems, strict=True)
    ]
    words = [word for kept in casts for word in (kept.addresses() if kept else (0, 0, 0))]
    return words, [kept for kept in casts if kept is not None]
