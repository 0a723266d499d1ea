"""Batches on their way to the device while the step before them runs."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpsmith._core import checks


class PrefetchStats(NamedTuple):
    """What a :class:`Prefetcher` has measured in its newest pass. Printed it is a sentence.

    Attributes:
        batches: how many the loader has given.
        seconds: since the pass began.
        loading_s: in which the host waited for the loader.
        waits: how many batches were not there when the device had nothing left to do.
        waiting_s: the most that the device can have waited for these.

    Example:
        >>> from warpsmith.train import PrefetchStats
        >>> print(PrefetchStats(batches=100, seconds=20.0, loading_s=9.0, waits=3, waiting_s=0.3))
        the device waited for 3 of 100 batches, at most 0.300 of 20.000 s; the loader took 9.000 s
    """

    batches: int = 0
    seconds: float = 0.0
    loading_s: float = 0.0
    waits: int = 0
    waiting_s: float = 0.0

    def __str__(self) -> str:
        waited = f"the device waited for {self.waits} of {self.batches} batches, at most {self.waiting_s:.3f}"
        return f"{waited} of {self.seconds:.3f} s; the loader took {self.loading_s:.3f} s"


def _each(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same with other tensors: in mappings, lists, tuples, named tuples and dataclasses, of which it makes new."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        found = {k: _each(v, function) for k, v in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return found
        if not isinstance(value, (dict, UserDict)):  # a copy may share its entries with the loader's own
            return found
        copied: Any = copy.copy(value)
        for k, v in found.items():
            copied[k] = v
        return copied
    if isinstance(value, (list, tuple)):
        items = [_each(v, function) for v in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, _each(getattr(value, field.name), function))
        return copied
    return value


class _Fetched(NamedTuple):
    """A batch and the event behind its copies; or what the loader raised."""

    batch: Any = None
    copied: Any = None
    error: Exception | None = None


class Prefetcher:
    """Iterates over a loader's batches with their tensors on a device; the next one is copied during each step.

    Copies go from pinned memory on a stream of their own, and the stream that runs at the loop's ``next`` waits for
    them: the host waits for the loader alone. On the CPU the batches are the loader's own, none is read ahead.

    Args:
        loader: any iterable, each ``iter`` of which is a pass: a ``DataLoader``, a list, a generator. Best with
            ``pin_memory=True``; what is not pinned is copied into pinned memory first. A pinned tensor that was given
            must not be written again before its step.
        device: where tensors go: ``"cuda"``, ``"cuda:1"``, ``"cpu"``.
        transform: None, or what is made of each batch on the device, behind its copy on the same stream, for instance
            :func:`warpsmith.normalize_image`. It may read tensors that were there when the pass began.

    Tensors may be nested in mappings, lists, tuples, named tuples and dataclasses; all else stays as it is. Batches
    come in the loader's order. What the loader raises comes behind the batches before it, as itself. ``len`` is the
    loader's. :meth:`stats` says whether the device waits for data.

    Deterministic: the loader is asked by the calling thread, for the first two batches at first, then for one each.

    Raises:
        TypeError: ``loader`` is not iterable.
        ValueError: a device that is neither the CPU nor CUDA.

    Source: the idea is NVIDIA's ``data_prefetcher`` in Apex's ImageNet example.

    Example:
        >>> import torch
        >>> from warpsmith.train import Prefetcher
        >>> batches = Prefetcher([{"x": torch.ones(2)}, {"x": torch.zeros(2)}], "cpu")
        >>> [float(batch["x"].sum()) for batch in batches], len(batches), batches.stats().batches
        ([2.0, 0.0], 2, 2)
    """

    def __init__(
        self, loader: Iterable[Any], device: torch.device | str, *, transform: Callable[[Any], Any] | None = None
    ) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            checks.refuse_type("Prefetcher", "loader", "an iterable of batches", loader)
        if not isinstance(device, (str, torch.device)):
            checks.refuse_type("Prefetcher", "device", "a torch.device or its name", device)
        try:
            found = torch.device(device)
        except RuntimeError:
            found = torch.device("meta")
        if found.type not in ("cpu", "cuda"):
            checks.refuse("Prefetcher", "device", "the CPU or CUDA", str(device))
        if transform is not None and not callable(transform):
            checks.refuse_type("Prefetcher", "transform", "a function of a batch, or None", transform)
        self.loader, self.device, self.transform = loader, found, transform
        self._stats = PrefetchStats()
        self._began: float | None = None
        self._ended: float | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self._stats, self._began, self._ended = PrefetchStats(), time.perf_counter(), None
        try:
            yield from (self._on_cuda if self.device.type == "cuda" else self._on_cpu)(iter(self.loader))
        finally:
            self._ended = time.perf_counter()

    def stats(self) -> PrefetchStats:
        """Of the newest pass, while it runs and after its end. Costs no wait."""
        if self._began is None:
            return self._stats
        now = time.perf_counter() if self._ended is None else self._ended
        return self._stats._replace(seconds=now - self._began)

    def _count(self, seconds: float, waited: bool) -> None:
        s = self._stats
        self._stats = PrefetchStats(
            s.batches + 1, 0.0, s.loading_s + seconds, s.waits + waited, s.waiting_s + seconds * waited
        )

    def _on_cpu(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            asked = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._count(time.perf_counter() - asked, True)
            yield batch if self.transform is None else self.transform(batch)

    def _on_cuda(self, batches: Iterator[Any]) -> Iterator[Any]:
        with torch.cuda.device(self.device):
            side, index = torch.cuda.Stream(), torch.cuda.current_device()
            side.wait_stream(torch.cuda.current_stream())  # for what the transform reads
        device = torch.device("cuda", index)
        ahead = self._fetch(batches, side, device)
        while ahead is not None:
            if ahead.error is not None:
                raise ahead.error
            batch, copied = ahead.batch, ahead.copied
            ahead = None  # so that one batch fewer is held
            ahead = self._fetch(batches, side, device)
            current = torch.cuda.current_stream(device)
            current.wait_event(copied)
            _each(batch, lambda t, stream=current: _record(t, stream))  # type: ignore[misc]
            yield batch
            del batch

    def _fetch(self, batches: Iterator[Any], side: Any, device: torch.device) -> _Fetched | None:
        """The next batch, on its way; None: there is none."""
        current = torch.cuda.current_stream(device)
        launched, asked = current.record_event(), time.perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            return None
        except Exception as error:
            return _Fetched(error=error)
        self._count(time.perf_counter() - asked, launched.query())
        try:
            with torch.cuda.stream(side):
                batch = _each(batch, lambda t: _copy(t, device, current))
                if self.transform is not None:
                    batch = self.transform(batch)
                return _Fetched(batch, side.record_event())
        except Exception as error:  # the batch before it comes first
            return _Fetched(error=error)


def _copy(t: Tensor, device: torch.device, current: Any) -> Tensor:
    """On the current stream; what is on a device already was made on ``current``."""
    if t.is_cuda:
        torch.cuda.current_stream(device).wait_stream(current)
    if t.device.type == "cpu" and t.layout == torch.strided and t.numel() and not t.is_pinned():
        t = t.pin_memory()
    return t.to(device, non_blocking=True)


# What the memory of a sparse tensor is in.
_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _ROWS),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _COLUMNS),
}


def _record(t: Tensor, stream: Any) -> Tensor:
    """Keeps the memory of a tensor of another stream until this one has read it."""
    if t.is_cuda:
        for name in _PARTS.get(t.layout, ("detach",)):
            getattr(t, name)().record_stream(stream)
    return t
