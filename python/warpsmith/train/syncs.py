"""Finds where a program's host waits for the device."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from warpsmith._core import checks
from warpsmith.train.backward_waits import WAITING_OPS, ForwardLines, backward_waits, next_node
from warpsmith.train.source_lines import callers, line_of

_SYNC_TEXT = "called a synchronizing CUDA operation"

_PASSES: dict[Any, str] = {Tensor.backward: "torch.Tensor.backward", torch.autograd.grad: "torch.autograd.grad"}

# What a device would make the host wait for, for a dry run on the CPU.
_WAITING_METHODS = ("item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__")


@dataclass(frozen=True)
class Sync:
    """A line of a program on which the host waited.

    Example:
        >>> import torch, warpsmith
        >>> with warpsmith.train.sync_audit("cpu") as audit:
        ...     pair = torch.ones(2).tolist()
        >>> [(sync.operation, sync.count) for sync in audit.syncs]
        [('torch.Tensor.tolist', 1)]
    """

    operation: (
        str  #: torch's name of the function that waited, or of the kind of wait; of a backward pass with its node
    )
    file: str  #: the innermost file that is neither torch's nor Warpsmith's; empty where no line is to blame
    line: int
    source: str  #: the line's text
    count: int
    seconds: float  #: that the host spent in the calls, waits and work; 0 where torch only tells that it waited


@contextlib.contextmanager
def waits(found: Callable[[FrameType], None]) -> Iterator[None]:
    """Calls ``found`` with the frame for every wait that torch's debug mode tells of."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Any, *args: Any, **kwargs: Any) -> None:
            if _SYNC_TEXT in str(message):
                found(sys._getframe(1))
            else:
                others(message, *args, **kwargs)

        warnings.showwarning = show
        warnings.filterwarnings("always", message=f".*{_SYNC_TEXT}")
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        try:
            torch.cuda.set_sync_debug_mode("warn")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class SyncAudit:
    """What :func:`sync_audit` found; ``str()`` is a table.

    Attributes:
        steps: steps of optimizers while the audit ran.

    Example:
        >>> import warpsmith
        >>> with warpsmith.train.sync_audit("cpu") as audit:
        ...     pass
        >>> print(audit)
        no wait of the host in 0 steps
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, int, str], list[float]] = {}  # count, seconds
        self.steps = 0

    def add(self, operation: str, frame: FrameType | None, seconds: float = 0.0, count: int = 1) -> None:
        """Counts waits on the innermost line of the user's code."""
        entry = self._found.setdefault((operation, *line_of(callers(frame))), [0, 0.0])
        entry[0] += count
        entry[1] += seconds

    def clear(self) -> None:
        """Forgets what was found so far, for example in the first steps."""
        self._found.clear()
        self.steps = 0

    @property
    def syncs(self) -> list[Sync]:
        """One entry a line and operation, the most expensive first."""
        entries = [Sync(*key, int(count), seconds) for key, (count, seconds) in self._found.items()]
        return sorted(entries, key=lambda s: (-s.seconds, -s.count, s.file, s.line))

    @property
    def total(self) -> int:
        """How often the host waited."""
        return sum(s.count for s in self.syncs)

    def __str__(self) -> str:
        if not self.total:
            return f"no wait of the host in {self.steps} steps"
        lines = [f"the host waited {self.total} times in {self.steps} steps", f"{'count':>7}{'ms':>10}  where"]
        for s in self.syncs:
            where = f"{s.file}:{s.line}: {s.operation}: {s.source}" if s.file else s.operation
            lines.append(f"{s.count:7}{1e3 * s.seconds:10.3f}  {where}")
        return "\n".join(lines)


class _Calls(TorchFunctionMode):
    """Times every call of a torch function, and notes those in which the host waited."""

    def __init__(self, audit: SyncAudit, dry: bool) -> None:
        super().__init__()
        self.audit, self.dry = audit, dry
        self.depth = self.hits = 0
        self.lines = ForwardLines()

    def hit(self, frame: FrameType | None) -> None:
        """A wait: of the call that is running, else of the line that is."""
        if self.depth:
            self.hits += 1
        else:
            self.audit.add("a wait outside of torch's functions", frame)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.depth:
            return func(*args, **kwargs)
        name, frame = getattr(func, "__name__", str(func)), sys._getframe(1)
        self.depth, self.hits = 1, 0
        node, within = next_node(), ""
        began = time.perf_counter()
        try:
            if func in _PASSES:
                result, within = self._backward(func, args, kwargs)
            else:
                result = func(*args, **kwargs)
        finally:
            self.depth = 0
        seconds = time.perf_counter() - began
        self.lines.note(node, frame)
        if self.dry:
            self.hits += bool(within) or name in _WAITING_METHODS or _selects_by_mask(name, args)
        elif not self.hits and _copies_pageable(name, args, result):
            self.hits, name = 1, f"{name} with pageable memory"
        if self.hits:
            shown = name if " " in name else _PASSES.get(func) or resolve_name(func) or name
            self.audit.add(f"{shown} in {within}" if within else shown, frame, seconds)
        return result

    def _backward(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, str]:
        """A backward pass, and the gradients whose formulas wait.

        In a dry run torch must not see the mode that notes operators: formulas that would wait take another way then.
        """
        with backward_waits() as found, _disable_current_modes() if self.dry else contextlib.nullcontext():
            result = func(*args, **kwargs)
        return result, found.text(self.lines)


def _selects_by_mask(name: str, args: Any) -> bool:
    if name not in ("__getitem__", "__setitem__") or len(args) < 2:
        return False
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    return name == "__getitem__" and any(isinstance(k, Tensor) and k.dtype in (torch.bool, torch.uint8) for k in keys)


def _copies_pageable(name: str, args: Any, result: Any) -> bool:
    """A copy between host and device without ``non_blocking``'s effect: of memory that is not pinned."""
    if name not in ("to", "cpu", "cuda", "copy_") or not isinstance(result, Tensor) or not args:
        return False
    source, target = (args[1], args[0]) if name == "copy_" and len(args) > 1 else (args[0], result)
    if not isinstance(source, Tensor) or not isinstance(target, Tensor) or not source.numel():
        return False
    kinds = {source.device.type, target.device.type}
    if kinds != {"cpu", "cuda"}:
        return False
    return not (source if source.device.type == "cpu" else target).is_pinned()


class _DryRun(TorchDispatchMode):
    """Notes the operators on the CPU for which a host waits where tensors are on a device."""

    def __init__(self, hit: Callable[[FrameType], None]) -> None:
        super().__init__()
        self.hit = hit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITING_OPS:
            self.hit(sys._getframe(1))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _methods_that_wait(audit: SyncAudit) -> Iterator[None]:
    """Notes waits that are asked for by name, of which torch's debug mode does not tell."""
    targets: list[tuple[Any, str]] = [
        (torch.cuda, "synchronize"),
        (torch.cuda, "empty_cache"),
        (torch.cuda.Stream, "synchronize"),
        (torch.cuda.Event, "synchronize"),
    ]

    def timed(function: Any, name: str) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                audit.add(name, sys._getframe(1), time.perf_counter() - began)

        return call

    own = [(owner, name, vars(owner).get(name), getattr(owner, name)) for owner, name in targets]
    for owner, name, _, function in own:
        setattr(owner, name, timed(function, f"{owner.__name__}.{name}"))
    try:
        yield
    finally:
        for owner, name, defined, _ in own:
            if defined is None:
                delattr(owner, name)
            else:
                setattr(owner, name, defined)


_ALLOCATOR = {
    "num_alloc_retries": "memory was full: the allocator freed its cache and tried again",
    "num_sync_all_streams": "the allocator waited for all streams",
}


def _allocator_counts() -> dict[str, int]:
    if not torch.cuda.is_initialized():
        return {}
    counts: dict[str, int] = {}
    for device in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(device)
        for name in _ALLOCATOR:
            counts[name] = counts.get(name, 0) + stats.get(name, 0)
    return counts


@contextlib.contextmanager
def sync_audit(device: str | None = None) -> Iterator[SyncAudit]:
    """Finds every wait of the host for the device, with file, line, count and time.

    Three sources: torch's ``set_sync_debug_mode``, which tells of waits within torch's operators; calls of
    ``torch.cuda.synchronize``, ``Stream.synchronize``, ``Event.synchronize`` and ``empty_cache``; and copies between
    host and device of memory that is not pinned, which wait even with ``non_blocking=True``. Where memory was full,
    the allocator's retries are counted without a line.

    Where ``backward()`` waits, the operation names the gradients for which it does, with the line of the forward pass
    that each is of. That comes from torch's profiler; if the program runs one itself, the names are missing.

    Args:
        device: ``"cuda"``, or ``"cpu"`` for a dry run: counts the operations on CPU tensors for which the host would
            wait if the tensors were on a GPU. Default: ``"cuda"`` where there is one.

    Yields:
        a :class:`SyncAudit`: ``syncs``, ``total``, ``str()`` is a table. ``clear()`` after the first steps leaves out
        what happens once.

    The time of a line is that of its calls on the host, waits included. Every call of a torch function costs a few
    microseconds more while the audit runs. Waits in C++ extensions that do not go through torch are not seen.

    Raises:
        ValueError: another device.

    Source: ``torch.cuda.set_sync_debug_mode``.

    Example:
        >>> import torch, warpsmith
        >>> with warpsmith.train.sync_audit("cpu") as audit:
        ...     loss = torch.ones(3).sum()
        ...     if loss.item() > 2:
        ...         pass
        >>> audit.total, audit.syncs[0].operation
        (1, 'torch.Tensor.item')
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        checks.refuse("sync_audit", "device", "cpu or cuda", device)
    if device == "cuda" and not torch.cuda.is_available():
        checks.refuse("sync_audit", "device", "cpu, since torch finds no GPU", device)
    audit = SyncAudit()
    calls = _Calls(audit, dry=device == "cpu")
    before = _allocator_counts()

    def note_allocator() -> None:
        nonlocal before
        now = _allocator_counts()
        for name, count in now.items():
            if count > before.get(name, 0):
                audit.add(_ALLOCATOR[name], None, count=count - before.get(name, 0))
        before = now

    def count_step(*_: Any) -> None:
        note_allocator()
        audit.steps += 1

    hook = register_optimizer_step_post_hook(count_step)
    try:
        with contextlib.ExitStack() as stack:
            if device == "cpu":
                stack.enter_context(_DryRun(calls.hit))
            else:
                stack.enter_context(waits(calls.hit))
                stack.enter_context(_methods_that_wait(audit))
            stack.enter_context(calls)
            yield audit
    finally:
        hook.remove()
        note_allocator()
