"""What a training step changes: where its tensors and numbers are, whether they are still there, and copies of them."""

from __future__ import annotations

import dis
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, getitem, is_
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from warpsmith import _C
from warpsmith._core.pending import settle
from warpsmith._core.tensor_list import ADDRESS_READER, local

Skip = Callable[[Any, Any], bool]  # (container, key): an entry that is not looked at

_REQUIRES_GRAD = attrgetter("requires_grad")
_NUMBERS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_CONTAINERS = (dict, list, tuple, WeakKeyDictionary)
_NATIVE = (dict, OrderedDict, defaultdict, list, tuple)  # that _C.StepWatch reads
# Objects that are looked into where another one refers to them; any class where it is given itself.
_KNOWN = ("warpsmith.amp.", "warpsmith.optim.", "torch.amp.", "torch.optim.")
# A scaler's notes between two of its calls, and where it last found gradients, have no part in the next step.
_PASSING = ("_per_optimizer_states", "kept")


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS) or (isinstance(value, tuple) and all(map(_is_number, value)))


def is_known(value: Any) -> bool:
    """Whether an object is one of a training step: a scaler, a schedule, an average, of torch or of this package."""
    return f"{type(value).__module__}.".startswith(_KNOWN) and not isinstance(value, (type, FunctionType))


class Cells(dict[str, Any]):
    """The variables of a function's closure under their names, as they are at each look."""

    def __init__(self, names: Sequence[str], cells: Sequence[Any]) -> None:
        super().__init__()
        self._cells = dict(zip(names, cells, strict=True))

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].cell_contents


class StepState:
    """Every tensor and number that can be reached from some objects, and the way to each.

    Modules are known by parameters, buffers, ``training`` and numbers; optimizers by groups and states; containers and
    other objects by all they hold.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any, Any]],
        device: torch.device | None = None,
        skip: Skip = lambda container, key: False,
    ) -> None:
        """roots: names, each with a container and the key under which it holds an object. device: tensors elsewhere are
        watched for being written to."""
        self.tensors: list[Tensor] = []
        self.paths: list[str] = []  # of the tensors
        self.parts: list[Tensor] = []  # of the tensors what this rank holds
        self.objects: list[Any] = []  # that were looked into, and the tensors
        self._seen: set[int] = set()
        self._skip = skip
        self._links: list[tuple[Any, Any, Any, str]] = []  # container, key, the tensor or container there, path
        self._numbers: list[tuple[Any, Any, Any, str]] = []
        self._sized: list[tuple[Any, str]] = []
        for name, container, key in roots:
            self._visit(container, key, container[key], name)
        self._containers, self._keys, self._children, _ = self._columns(self._links)
        self._number_containers, self._number_keys, self._values, _ = self._columns(self._numbers)
        self._lengths = [len(c) for c, _ in self._sized]
        self.parts = [local(t) for t in self.tensors]
        self._trained = [t.requires_grad for t in self.tensors]
        self._addresses = [t.data_ptr() for t in self.parts]
        self._elsewhere = [t for t in self.parts if device is not None and t.device != device]
        self._versions = [t._version for t in self._elsewhere]
        self._watch: _C.StepWatch | None = None
        self._watches = 3  # that may be made: one that finds fault with equal objects every time is of no use
        self._other_links: list[tuple[Any, Any, Any, str]] = []  # which that does not see
        self._other_numbers: list[tuple[Any, Any, Any, str]] = []
        self._other_sizes: list[tuple[Any, int]] = []

    @staticmethod
    def _columns(rows: list[tuple[Any, Any, Any, str]]) -> tuple[list[Any], ...]:
        return tuple(map(list, zip(*rows, strict=True))) if rows else ([], [], [], [])

    # The walk.

    def _visit(self, container: Any, key: Any, value: Any, path: str, given: bool = True) -> None:
        if self._skip(container, key):
            return
        if _is_number(value):
            self._numbers.append((container, key, value, path))
            return
        entries = None if isinstance(value, Tensor) else self._entries(value, path, given)
        if entries is None and not isinstance(value, Tensor):
            return
        self._links.append((container, key, value, path))
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self.objects.append(value)
        if entries is None:
            self.tensors.append(value)
            self.paths.append(path)
            return
        for inner, inner_key, child, inner_path in entries:
            self._visit(inner, inner_key, child, inner_path, given=False)

    def _entries(self, value: Any, path: str, given: bool) -> Iterator[tuple[Any, Any, Any, str]] | None:
        if isinstance(value, nn.Module):
            return self._of_module(value, path)
        if isinstance(value, torch.optim.Optimizer):
            return self._of_optimizer(value, path)
        if isinstance(value, _CONTAINERS):
            return self._of_container(value, path)
        if (
            (given or is_known(value))
            and hasattr(value, "__dict__")
            and not isinstance(value, (type, FunctionType, ModuleType))
        ):
            return self._of_object(value, path)
        return None

    def _of_module(self, module: nn.Module, path: str) -> Iterator[tuple[Any, Any, Any, str]]:
        own = vars(module)
        for name, value in list(own.items()):
            if _is_number(value) and not name.startswith("_"):
                yield own, name, value, f"{path}.{name}"
        for holder in (module._parameters, module._buffers, module._modules):
            self._sized.append((holder, path))
            for name, child in list(holder.items()):
                yield holder, name, child, f"{path}.{name}"

    def _of_optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> Iterator[tuple[Any, Any, Any, str]]:
        own = vars(optimizer)
        yield own, "param_groups", optimizer.param_groups, f"{path}.param_groups"
        yield own, "state", optimizer.state, f"{path}.state"

    def _of_container(self, value: Any, path: str) -> Iterator[tuple[Any, Any, Any, str]]:
        self._sized.append((value, path))
        items = list(value.items()) if isinstance(value, (dict, WeakKeyDictionary)) else list(enumerate(value))
        for i, (key, child) in enumerate(items):
            shown = key if isinstance(key, (str, int)) else i
            yield value, key, child, f"{path}[{shown!r}]"

    def _of_object(self, value: Any, path: str) -> Iterator[tuple[Any, Any, Any, str]]:
        own = vars(value)
        for name, child in list(own.items()):
            if name not in _PASSING:
                yield own, name, child, f"{path}.{name}"

    # Looks.

    def changed(self) -> str | None:
        """What differs from when this was made, in words: another tensor, address, number or count of entries."""
        try:
            if self._watch is not None and self._watch.same() and self._same_for_python():
                return None
            if (
                all(map(is_, map(getitem, self._containers, self._keys), self._children))
                and list(map(getitem, self._number_containers, self._number_keys)) == self._values
                and [len(c) for c, _ in self._sized] == self._lengths
                and list(map(Tensor.data_ptr, self.parts)) == self._addresses
                and list(map(_REQUIRES_GRAD, self.tensors)) == self._trained
                and [t._version for t in self._elsewhere] == self._versions
            ):
                if self._watches > 0:
                    self._watch, self._watches = self._native_watch(), self._watches - 1
                return None
        except (KeyError, IndexError, ValueError):
            pass
        return self._difference()

    @property
    def watches_natively(self) -> bool:
        """Whether the next look takes a tenth of the time of the first."""
        return self._watch is not None

    def _same_for_python(self) -> bool:
        """Of what no native watch sees: entries of other containers, such as a closure's, and what was written to."""
        return (
            all(container[key] is child for container, key, child, _ in self._other_links)
            and all(container[key] == value for container, key, value, _ in self._other_numbers)
            and all(len(container) == length for container, length in self._other_sizes)
            and [t._version for t in self._elsewhere] == self._versions
        )

    def _native_watch(self) -> _C.StepWatch | None:
        """Compares the same as :meth:`changed` in a tenth of the time. Everything must be as it was."""
        if not ADDRESS_READER:
            return None
        sized = {id(container) for container, _ in self._sized}
        containers: dict[int, Any] = {id(c): c for c, _ in self._sized if type(c) in _NATIVE}
        self._other_sizes = [
            (c, n) for (c, _), n in zip(self._sized, self._lengths, strict=True) if id(c) not in containers
        ]
        watched: dict[int, dict[Any, tuple[Any, Any, int]]] = {}  # of each container: key, object, kind
        self._other_links, self._other_numbers = [], []
        for kind, rows, others in ((1, self._links, self._other_links), (2, self._numbers, self._other_numbers)):
            for container, key, value, path in rows:
                if type(container) in _NATIVE:
                    containers[id(container)] = container
                    watched.setdefault(id(container), {})[id(key) if type(key) is not int else key] = (key, value, kind)
                else:
                    others.append((container, key, value, path))
        of_native = []
        for identity, container in containers.items():
            entries = watched.get(identity, {})
            if isinstance(container, dict) and identity not in sized:
                of_native.append((container, False, list(entries.values())))
                continue
            items = container.items() if isinstance(container, dict) else enumerate(container)
            in_order = [entries.pop(key if type(key) is int else id(key), (key, value, 0)) for key, value in items]
            if entries:  # a key is another object, though equal
                return None
            of_native.append((container, True, in_order))
        # Nobody asks whether states of optimizers require gradients, or tensors in a list that do not.
        modules = [o for o in self.objects if isinstance(o, nn.Module)]
        of_modules = {id(t) for m in modules for t in (*m._parameters.values(), *m._buffers.values())}
        pairs = zip(self.tensors, self._trained, strict=True)
        trained = [(t, now) for t, now in pairs if now or id(t) in of_modules or isinstance(t, nn.Parameter)]
        tensors, flags = [t for t, _ in trained], [now for _, now in trained]
        return _C.StepWatch(of_native, self.parts, self._addresses, tensors, flags, ADDRESS_READER)

    def _difference(self) -> str | None:
        gone = object()

        def now(container: Any, key: Any) -> Any:
            try:
                return container[key]
            except (KeyError, IndexError, ValueError):
                return gone

        for container, key, child, path in self._links:
            found = now(container, key)
            if found is not child:
                return f"{path} is {'gone' if found is gone else 'another object'}"
        for container, key, value, path in self._numbers:
            found = now(container, key)
            if found is not value and found != value:
                return f"{path} was {value} and is {'gone' if found is gone else found}"
        for (container, path), length in zip(self._sized, self._lengths, strict=True):
            if len(container) != length:
                return f"{path} had {length} entries and has {len(container)}"
        for part, address, path in zip(self.parts, self._addresses, self.paths, strict=True):
            if part.data_ptr() != address:
                return f"{path} has moved to another address"
        for tensor, trained, path in zip(self.tensors, self._trained, self.paths, strict=True):
            if tensor.requires_grad != trained:
                return f"{path} had requires_grad={trained} and has {tensor.requires_grad}"
        written = [t for t, v in zip(self._elsewhere, self._versions, strict=True) if t._version != v]
        for part, path in zip(self.parts, self.paths, strict=True):
            if any(part is t for t in written):
                return f"{path}, which lies on {part.device}, was written to"
        return None

    def restore_numbers(self) -> None:
        """Sets the numbers that were changed to what they were."""
        for container, key, value, _ in self._numbers:
            if container[key] != value:
                container[key] = value

    def copies(self) -> list[Tensor]:
        """A copy of every tensor: on its device if there is room for it twice, else on the host."""
        return copies_of(self.parts)

    @torch.no_grad()
    def restore(self, copies: Sequence[Tensor]) -> None:
        """Writes copies back in place."""
        settle()
        for part, copy in zip(self.parts, copies, strict=True):
            part.detach().copy_(copy)


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies: each on its tensor's device if there is room for all of them twice, else on the host."""
    settle()
    by_device: dict[torch.device, int] = {}
    for t in tensors:
        by_device[t.device] = by_device.get(t.device, 0) + t.numel() * t.element_size()
    fits = {d: d.type != "cuda" or 2 * size < torch.cuda.mem_get_info(d)[0] for d, size in by_device.items()}
    return [t.detach().clone() if fits[t.device] else t.detach().cpu() for t in tensors]


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits. The host waits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a.detach(), b.detach()))
    bits = _BITS[a.element_size()]
    return torch.equal(a.resolve_neg().contiguous().view(bits), b.to(a.device).resolve_neg().contiguous().view(bits))


class Gradients:
    """The gradients of some parameters at one moment, and a way back to it."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self.tensors = [p.grad for p in params]
        self._copies = copies_of([g for g in self.tensors if g is not None])

    def clear(self) -> None:
        """Takes all gradients away, until :meth:`restore`."""
        for p in self.params:
            p.grad = None

    def restore(self) -> None:
        """Gradients, and their values, are as they were."""
        copies = iter(self._copies)
        with torch.no_grad():
            for p, g in zip(self.params, self.tensors, strict=True):
                p.grad = g
                if g is not None:
                    g.detach().copy_(next(copies))


def parameters_of(state: StepState) -> list[Tensor]:
    """The tensors of a state that can have a gradient."""
    return [t for t in state.tensors if t.requires_grad and t.is_leaf]


def names_of(function: Any) -> dict[str, tuple[Any, Any]]:
    """The global and closure variables that a function reads or writes: for each its container and the key there."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    scope: Mapping[str, Any] = function.__globals__
    found: dict[str, tuple[Any, Any]] = {name: (scope, name) for name in sorted(_globals_of(code)) if name in scope}
    cells = Cells(code.co_freevars, function.__closure__ or ())
    for name in code.co_freevars:
        try:
            cells[name]
        except ValueError:  # not assigned yet
            continue
        found[name] = (cells, name)
    return found


def _globals_of(code: CodeType) -> set[str]:
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")}
    return own.union(*(_globals_of(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
