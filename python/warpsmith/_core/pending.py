"""Totals on a device that many small results are added to: a launch takes many of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.weak import WeakIdKeyDictionary

_MOST = 32
_unsettled = WeakIdKeyDictionary()


def total_of(total: Tensor) -> Tensor:
    """Makes a tensor a total. With a dimension it is a sum, without one a maximum of magnitudes."""
    total.pending = []  # type: ignore[attr-defined]
    return total


def _capturing(t: Tensor) -> bool:
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


@torch.no_grad()
def _add(total: Tensor, found: Tensor) -> None:
    if total.dim():
        total.add_(found)
    else:
        torch.maximum(total, found, out=total)


def note(total: Tensor | None, found: Tensor | None) -> None:
    """Adds to a total: it keeps a list. In graphs, which are captured or compiled, at once. What has another number of
    dimensions is no result."""
    if total is None or found is None or found.dim() != total.dim():
        return
    found = found.detach() if found.requires_grad else found
    if is_compiling() or type(found) is not Tensor or _capturing(found):
        _add(total, found)
        return
    pending: list[Tensor] = total.pending  # type: ignore[attr-defined]
    pending.append(found)
    if len(pending) == 1 or total not in _unsettled:  # a copy's is not
        _unsettled[total] = True
    if len(pending) >= _MOST:
        settled(total)


def _taken(total: Tensor) -> list[Tensor]:
    """What is pending, and no longer is. What another thread notes meanwhile stays."""
    pending: list[Tensor] = total.pending  # type: ignore[attr-defined]
    taken = list(pending)
    del pending[: len(taken)]
    return taken


def settled(total: Tensor) -> Tensor:
    """A total with all that is pending."""
    some = _taken(total)
    if some:
        stacked = torch.stack(some)
        _add(total, stacked.sum(0) if total.dim() else stacked.amax())
    return total


def settle() -> None:
    """Settles all totals: before somebody reads tensors of which he does not know what they are."""
    for total in list(_unsettled):
        settled(total)
    _unsettled.clear()


def settled_all(maxima: Sequence[Tensor]) -> Tensor:
    """Several maxima with all that is pending, in few launches; what was pending is dropped."""
    found = torch.stack(list(maxima))
    if _capturing(found):
        return found
    pending = [_taken(t) for t in maxima]
    for i in range(max(map(len, pending), default=0)):
        some = [p[i] if i < len(p) else t for p, t in zip(pending, maxima, strict=True)]
        found = torch.maximum(found, torch.stack(some))
    return found
