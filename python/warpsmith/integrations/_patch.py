"""Puts parts in the place of modules' forwards, and takes them out again."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from warpsmith._core.modules import stock as stock_of
from warpsmith.integrations._check import check
from warpsmith.integrations._modules import Forward, Part, is_ours
from warpsmith.integrations._registration import attend_by_registration
from warpsmith.integrations._torch_parts import table as table_of_torch

# What gives a module's class its part; None: it has none.
Table = Callable[[type], Part | None]


class Patched:
    """What :func:`warpsmith.patch` did. As a context manager it undoes that at the end; printed it is a table.

    Attributes:
        replaced: by class, what its forward is made of now, and how many modules have it.
        kept: by class, why it is as it was.
        unchecked: by class, why what replaces it was not compared with it on random rows.
        saved_bytes: by class, how many bytes a token its modules keep less for the backward of training, as the check
            has measured; a layer's count holds what is in it.

    Example:
        >>> from warpsmith.integrations.patch import Patched
        >>> Patched().replaced
        {}
    """

    def __init__(self) -> None:
        self.replaced: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self.unchecked: dict[str, str] = {}
        self.saved_bytes: dict[str, int] = {}
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Puts everything back. May be called again."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Patched:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        saved = {name: f", {n:,} bytes a token less for the backward" for name, n in self.saved_bytes.items()}
        lines = [f"{name}: {what}{saved.get(name, '')}" for name, what in self.replaced.items()]
        lines += [f"{name}: as it was: {why}" for name, why in self.kept.items()]
        return "\n".join([*lines, *(f"{name}: not compared: {why}" for name, why in self.unchecked.items())])

    def patch_module(self, module: Any, ours: type) -> None:
        """Gives a module a class of :func:`subclass`."""
        before = type(module)
        module.__class__ = ours

        def undo() -> None:
            # Also of what has been copied from the module, and in what FSDP2 has made of our class.
            for cls in (*type(module).__mro__, ours):
                if issubclass(cls, ours) and getattr(vars(cls).get("forward"), "of_warpsmith", False):
                    del cls.forward  # type: ignore[attr-defined]
            if type(module) is ours:
                module.__class__ = before

        self._undo.append(undo)

    def on_undo(self, function: Callable[[], None]) -> None:
        self._undo.append(function)

    def patch_class(self, cls: Any, forward: Forward) -> None:
        old = cls.forward
        cls.forward = forward
        self._undo.append(lambda: setattr(cls, "forward", old))


@contextmanager
def undone_by_errors() -> Iterator[Patched]:
    """What is patched within; an exception undoes it."""
    done = Patched()
    try:
        yield done
    except BaseException:
        done.undo()
        raise


def subclass(cls: Any, part: Part) -> Any:
    """A subclass with our forward and the name of its base; None where the forward is not the one that we know.

    Classes of transformers that wrap the forward of every subclass do so here too: checkpoints of activations are one
    such wrapper. A deep copy is patched, and ``undo`` ends that too. A pickle names the base: what is loaded is not
    patched.
    """
    stock: Any = stock_of(cls)
    forward = part.make(stock.forward)
    if forward is None:
        return None
    forward.of_warpsmith = True  # type: ignore[attr-defined]

    def reduce(self: Any, protocol: Any) -> Any:
        # Protocol 1 makes the object by a function of any class. Later ones must name the object's own class.
        function, (own, *others), *state = stock.__reduce_ex__(self, 1)
        return function, (stock_of(own), *others), *state

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = self.__new__(type(self))
        copied.__setstate__(copy.deepcopy(stock.__reduce_ex__(self, 1)[2], memo))
        return copied

    names = {n: getattr(stock, n) for n in ("__module__", "__qualname__", "__doc__")}
    ours = {"forward": forward, "__reduce_ex__": reduce, "__deepcopy__": deepcopy, "_warpsmith_stock": stock}
    return type(stock)(stock.__name__, (stock,), {**names, **ours})


def _found(cls: type, tables: Sequence[Table]) -> tuple[type, Part] | None:
    """The first class among a class and its bases that a table knows, and its part."""
    for base in cls.__mro__:
        for table in tables:
            if (part := table(base)) is not None:
                return base, part
    return None


UNKNOWN = "its forward is not the one that warpsmith knows"


def why_kept(module: Any) -> str | None:
    """Why no forward of ours may stand in the place of a module's, whatever its class."""
    if hasattr(module, "parametrizations"):
        return "it is parametrized"
    return "somebody else has replaced its forward" if "forward" in module.__dict__ else None


def _why_not(module: Any, base: Any, part: Part, ours: type | None) -> str | None:
    if ours is None:
        return UNKNOWN
    # Classes of transformers wrap the forward that they inherit.
    if inspect.unwrap(type(module).forward) is not inspect.unwrap(stock_of(base).forward):
        return f"it is a {base.__name__} with a forward of its own"
    why = why_kept(module)
    return part.why_not(module) if why is None else why


def patch_modules(done: Patched, model: nn.Module, tables: Sequence[Table], choice: dict[str, bool]) -> None:
    """Replaces the forwards of one model's modules, of which the parts are chosen."""
    counts, whats, classes, candidates = Counter[str](), {}, dict[type, Any](), dict[nn.Module, type]()
    for module in model.modules():
        cls = type(module)
        found = _found(cls, tables)
        if found is None or not choice[found[1].switch] or cls.__module__.startswith("warpsmith."):
            continue
        if is_ours(module):
            done.kept[cls.__name__] = "it is patched already"
            continue
        base, part = found
        if cls not in classes:
            classes[cls] = subclass(cls, part)
        why = _why_not(module, base, part, classes[cls])
        if why is None:
            candidates[module] = classes[cls]
            whats[cls.__name__] = part.what
        elif why:
            done.kept[cls.__name__] = why
    failed, done.unchecked, done.saved_bytes = check(model, candidates)
    for module, ours in candidates.items():
        name = type(module).__name__
        if module in failed:
            done.kept[name] = failed[module]
            continue
        done.patch_module(module, ours)
        counts[name] += 1
    done.replaced = {name: f"{whats[name]} ({n})" for name, n in counts.items()}


def patch_model(model: nn.Module, logits: bool, **choice: bool) -> Patched:
    """What ``patch`` does with a model; an exception undoes it."""
    tables = [table_of_torch(**choice)]
    of_transformers: Any = None
    if any(base.__module__.startswith("transformers.") for m in model.modules() for base in type(m).__mro__):
        of_transformers = importlib.import_module("warpsmith.integrations.transformers")
        tables.insert(0, of_transformers.models.table(logits))
    with undone_by_errors() as done:
        patch_modules(done, model, tables, choice)
        if of_transformers is not None:
            of_transformers.models.say_what_stays(done, model)
        if choice["attention"]:
            attend_by_registration(done, model)
            if of_transformers is not None:
                of_transformers.models.set_attention(done, model, of_transformers.register)
    return done
