"""The raw ops over lists of tensors: an optimizer's table of addresses, column of gradients and step; moving averages;
the mean over ranks. They have no fakes: without memory there is nothing to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from warpsmith import _C
from warpsmith._core.library import call_raw, raw

COUNTER = "step"  # the name of a step counter among states
SCALES = "scales"  # of 8-bit states
EXTRAS = ("master", "compensation", "remainder")  # what a storage may keep of a parameter beside its states


def index_of(optimizer: str) -> int:
    """The number of an optimizer's row (csrc/kernels/optim/optim_ops.h)."""
    return _C.OPTIMIZERS[optimizer][0]


def state_names(optimizer: str) -> tuple[str, ...]:
    """The states of an optimizer's row."""
    return _C.OPTIMIZERS[optimizer][1]


def value_names(optimizer: str) -> tuple[str, ...]:
    """The hyperparameters of an optimizer's row, in the order of the columns of :data:`optim_step`'s constants."""
    return _C.OPTIMIZERS[optimizer][2]


def not_negative(optimizer: str) -> tuple[str, ...]:
    """The states of an optimizer's row that are never below 0."""
    mask = _C.OPTIMIZERS[optimizer][3]
    return tuple(name for i, name in enumerate(state_names(optimizer)) if mask >> i & 1)


def storage_index(storage: str) -> int:
    """The number of a storage (csrc/kernels/optim/optim.h)."""
    return _C.OPTIMIZER_STORAGES[storage]


def optim_table(
    optimizer: str,
    storage: str,
    params: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    groups: Sequence[int],
    first_elems: Sequence[int] = (),
    row_elems: Sequence[int] = (),
) -> tuple[Tensor, list[int]]:
    """The table of addresses and sizes of :data:`optim_step`, on the device of the parameters, and the facts by which
    the step knows it again.

    ``states[i]`` has the states of tensor ``i`` by name, its counter as ``step`` if its steps are counted, its
    ``scales`` if its states are 8-bit codes, and what the storage keeps of it by its name in :data:`EXTRAS`;
    ``groups[i]`` is the row of hyperparameters that tensor ``i`` takes. ``first_elems[i]``, where rounding is random:
    the index of its first element among those of all tensors. ``row_elems[i]``: the columns of a matrix that steps may
    cast to 8-bit floats, or 0. The table refers to the tensors without keeping them alive.
    """
    names = state_names(optimizer)
    arrays = [state[name] for state in states for name in (*names, COUNTER, SCALES, *EXTRAS) if name in state]
    has = [sum(1 << bit for bit, name in enumerate((*names, COUNTER, SCALES)) if name in state) for state in states]
    kind = (index_of(optimizer), storage_index(storage))
    given = list(params), arrays, has, list(groups), list(first_elems), list(row_elems)
    table, facts = call_raw(raw.optim_table.default, *kind, *given)
    return table, facts


optim_pointers = raw.optim_pointers.default
optim_step = raw.optim_step.default


def average_in_place(
    averages: Sequence[Tensor], values: Sequence[Tensor], weight: float, found_inf: Tensor | None
) -> None:
    """``average + weight (value - average)`` of dense tensors of one device; nothing where ``found_inf`` is not 0."""
    call_raw(raw.average_weights.default, list(averages), list(values), weight, found_inf)


def rank_mean(parts: Tensor, outs: Sequence[Tensor], *, own: Tensor | None = None, rank: int = 0) -> None:
    """Writes the mean of the rows of ``parts`` to each of ``outs``: a sum in float32 (float64 for float64) from the
    first row to the last, divided by their number and rounded once to the dtype of ``parts``.

    parts: (ranks, elements), rows of adjacent elements. own: stands for row ``rank``; float32 is rounded to the dtype
    of ``parts`` before it is added. outs: vectors in the dtype of ``parts`` or float32; one may be ``own``. On CUDA an
    output may lie in the memory of another GPU; float64 has no kernel there.
    """
    call_raw(raw.rank_mean.default, parts, own, rank, list(outs))
