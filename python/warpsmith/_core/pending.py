"""Totals on a device that many small results are added to: a few launches take those of all totals."""

from collections.abc import Iterator
from threading import Lock

import torch
from torch import Tensor
from torch.compiler import is_compiling

from warpsmith._core.captures import capturing

_MOST = 2048
_Pair = tuple[Tensor, Tensor]  # a total and a result
_pending: dict[tuple[int, int], list[_Pair]] = {}  # by device and stream
_lock = Lock()


def stream_of(t: Tensor) -> int:
    """The current stream of a tensor's device, by the call that Triton makes: torch.cuda's takes 5 us."""
    return torch._C._cuda_getCurrentRawStream(t.device.index) if t.is_cuda else 0


@torch.no_grad()
def note(total: Tensor | None, found: Tensor | None) -> None:
    """Adds to a total: with a dimension it is a sum, without one a maximum of magnitudes. In graphs, which are captured
    or compiled, at once. What has another number of dimensions is no result."""
    if total is None or found is None or found.dim() != total.dim():
        return
    if not is_compiling() and type(found) is Tensor and not capturing():
        note_later(total, found.detach(), stream_of(found))
    elif total.dim():
        total.add_(found)
    else:
        torch.maximum(total, found, out=total)


def note_later(total: Tensor, found: Tensor, stream: int | None) -> None:
    """The same of a plain result of the current stream; None: it is captured."""
    if stream is None:
        note(total, found)
        return
    place = found.get_device(), stream
    pairs = _pending.get(place)
    if pairs is None:
        pairs = _pending.setdefault(place, [])
    pairs.append((total, found))
    if len(pairs) >= _MOST:
        _settle(pairs)


def _rounds(pairs: list[_Pair]) -> Iterator[list[_Pair]]:
    """What is pending, and no longer is, each total once in a round. What another thread notes meanwhile stays."""
    with _lock:
        rest = pairs[:]
        del pairs[: len(rest)]
    while rest:
        first: dict[int, _Pair] = {}
        rest = [pair for pair in rest if first.setdefault(id(pair[0]), pair) is not pair]
        yield list(first.values())


@torch.no_grad()
def _settle(pairs: list[_Pair]) -> None:
    for some in _rounds(pairs):
        for sums in (True, False):
            totals = [total for total, _ in some if bool(total.dim()) is sums]
            found = [found for total, found in some if bool(total.dim()) is sums]
            if not totals:
                continue
            # Forwards have kept them for a backward, and must not find them changed.
            with torch.autograd._unsafe_preserve_version_counter(tuple(totals)):  # type: ignore[attr-defined]
                (torch._foreach_add_ if sums else torch._foreach_maximum_)(totals, found)


def settle() -> None:
    """Settles all totals: before somebody reads them, or tensors of which he does not know what they are. Not into a
    graph that is captured, which would add at each replay."""
    if _pending and not capturing():
        for pairs in list(_pending.values()):
            _settle(pairs)


def settled(total: Tensor) -> Tensor:
    """A total with all that is pending."""
    settle()
    return total
