"""Sums of squares of gradients, taken where they were written: norms from them need not read the gradients again."""

import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from warpsmith._core.grad_norm import chunk_elems, partial_power_sums
from warpsmith._core.of_tensors import OfTensors
from warpsmith._core.tensor_list import moved

_MOST_ORDERS = 64
_SAMPLE_ELEMS = 256


class Sums(NamedTuple):
    """The chunks of one tensor among those of all tensors whose sums were taken together."""

    of_all: Tensor  # float64: the sums of squares of chunks
    begin: int
    end: int
    total_elems: int  # for which the chunks' length was chosen
    sample: Tensor | None  # of one of the tensors: a copy of its first elements in memory


class Joined(NamedTuple):
    """The sums of several tensors: what ``partial_power_sums(tensors, 2, total_elems)`` gives, or NaN in place of all.
    For its argument ``known``: it then reads the chunks whose sums are not finite."""

    of_all: Tensor
    total_elems: int


class _Known(NamedTuple):
    sums: Sums
    gradient: weakref.ref[Tensor]
    version: int  # of the gradient: torch counts what is written in place


_known = OfTensors[_Known]()  # by parameter
_orders: dict[tuple[torch.device, tuple[tuple[int, int], ...]], Tensor] = {}


def sums_of(tensors: Sequence[Tensor], total_elems: int) -> list[Sums]:
    """Reads dense tensors of one device once. ``total_elems``: of all tensors of which somebody will want the norm."""
    of_all = partial_power_sums(tensors, 2.0, total_elems)
    smallest = min(range(len(tensors)), key=lambda i: tensors[i].numel() or 1 << 62)
    elems, found, begin = chunk_elems(tensors[0], total_elems), list[Sums](), 0
    for i, t in enumerate(tensors):
        end = begin + max(1, -(-t.numel() // elems))  # a tensor without elements has a chunk
        found.append(Sums(of_all, begin, end, total_elems, _first_of(t).clone() if i == smallest else None))
        begin = end
    return found


def _first_of(t: Tensor) -> Tensor:
    return t.detach().as_strided((min(t.numel(), _SAMPLE_ELEMS),), (1,))


def has_sums(params: Sequence[Tensor]) -> bool:
    """Whether sums of some gradients are kept, be they valid or not."""
    return bool(_known) and any(param in _known for param in params)


def remember(param: Tensor, sums: Sums) -> None:
    """From now on ``sums`` are those of ``param.grad``, until it is replaced or written to."""
    gradient = param.grad
    assert gradient is not None
    _known[param] = _Known(sums, weakref.ref(gradient), gradient._version)


def known_sums(params: Sequence[Tensor], *, any_chunks: bool = False) -> Joined | None:
    """The sums of the gradients of ``params``, without a read of them; None if those of one gradient are not known, or
    their chunks are not those of ``grad_norm``. ``any_chunks``: chunks of any length will do."""
    if torch.compiler.is_compiling() or not _known:
        return None
    found, gradients = list[Sums](), list[Tensor]()
    for param in params:
        known, gradient = _known.get(param), param.grad
        if known is None or gradient is None or known.gradient() is not gradient or known.version != gradient._version:
            return None
        found.append(known.sums)
        gradients.append(gradient)
    if not found:
        return None
    return joined(found, gradients, found[0].total_elems if any_chunks else sum(g.numel() for g in gradients))


def joined(found: Sequence[Sums], tensors: Sequence[Tensor], total_elems: int) -> Joined | None:
    """The sums of ``tensors`` in their order; None where they are on several devices, or of other chunks than those of
    so many elements.

    Some writes in place are not counted by torch: those of ``torch.amp.GradScaler.unscale_`` and of collectives. So the
    sums are NaN where a sample is not as it was; also where all are zeros, which a factor does not change."""
    first = found[0].of_all
    elems = chunk_elems(first, total_elems)
    other = {s.total_elems for s in found} - {total_elems}
    if any(chunk_elems(first, n) != elems for n in other) or any(s.of_all.device != first.device for s in found):
        return None
    begins: dict[int, int] = {}  # of sums that were taken together, among all
    together, ranges, count = list[Tensor](), list[tuple[int, int]](), 0
    for s in found:
        if id(s.of_all) not in begins:
            begins[id(s.of_all)] = count
            together.append(s.of_all)
            count += len(s.of_all)
        begin = begins[id(s.of_all)]
        ranges.append((begin + s.begin, begin + s.end))
    samples = [(_first_of(t), s.sample) for t, s in zip(tensors, found, strict=True) if s.sample is not None]
    order = _order(first.device, tuple(ranges))
    if order is None or len(samples) < len(together):
        return None
    now, then = (torch.cat(values) for values in zip(*samples, strict=True))
    unchanged = (now == then).all() & then.any()
    return Joined(torch.where(unchanged, torch.cat(together)[order], math.nan), total_elems)


def _order(device: torch.device, ranges: tuple[tuple[int, int], ...]) -> Tensor | None:
    """The numbers of all ranges on the device; None where a graph is captured, into which they cannot be copied."""
    order = _orders.get((device, ranges))
    if order is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        if len(_orders) == _MOST_ORDERS:
            _orders.clear()
        order = moved(torch.cat([torch.arange(begin, end) for begin, end in ranges]), device)
        _orders[device, ranges] = order
    return order
