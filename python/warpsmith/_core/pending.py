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
    if not pending:
        _unsettled[total] = True
    pending.append(found)
    if len(pending) >= _MOST:
        settled(total)


def settled(total: Tensor) -> Tensor:
    """A total with all that is pending."""
    pending: list[Tensor] = total.pending  # type: ignore[attr-defined]
    if pending:
        some = torch.stack(pending)
        _add(total, some.sum(0) if total.dim() else some.amax())
        pending.clear()
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
    pending: list[list[Tensor]] = [t.pending for t in maxima]  # type: ignore[attr-defined]
    for i in range(max(map(len, pending), default=0)):
        some = [p[i] if i < len(p) else t for p, t in zip(pending, maxima, strict=True)]
        found = torch.maximum(found, torch.stack(some))
    for one in pending:
        one.clear()
    return found
