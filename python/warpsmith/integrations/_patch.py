"""Puts the parts into models and classes of transformers, and takes them out again."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from warpsmith.integrations._check import check
from warpsmith.integrations._modules import Forward, is_ours
from warpsmith.integrations._parts import Part
from warpsmith.integrations._rows import ROWS, part_of, row_of
from warpsmith.integrations._rows import stock as stock_of


class Patched:
    """What :func:`patch` did. As a context manager it undoes that at the end.

    Attributes:
        replaced: by class, what its forward is made of now, and how many modules have it.
        kept: by class, why it is as it was.
        unchecked: by class, why what replaces it was not compared with it on random rows.

    Example:
        >>> from warpsmith.integrations.transformers import Patched
        >>> Patched().replaced
        {}
    """

    def __init__(self) -> None:
        self.replaced: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self.unchecked: dict[str, str] = {}
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
        lines = [f"{name}: {what}" for name, what in self.replaced.items()]
        lines += [f"{name}: as it was: {why}" for name, why in self.kept.items()]
        return "\n".join([*lines, *(f"{name}: not compared: {why}" for name, why in self.unchecked.items())])

    def patch_module(self, module: Any, ours: type) -> None:
        """Gives a module a class of :func:`_subclass`."""
        stock = stock_of(ours)
        module.__class__ = ours

        def undo() -> None:
            if "forward" in vars(ours):
                del ours.forward  # type: ignore[attr-defined]  # also of what has been copied from the module
            if type(module) is ours:
                module.__class__ = stock

        self._undo.append(undo)

    def set_attention(self, model: Any, name: str) -> None:
        old = model.config._attn_implementation
        model.set_attn_implementation(name)
        self.replaced["attn_implementation"] = name
        self._undo.append(lambda: model.set_attn_implementation(old))

    def patch_class(self, cls: Any, forward: Forward) -> None:
        old = cls.forward
        cls.forward = forward
        self._undo.append(lambda: setattr(cls, "forward", old))


def _subclass(cls: Any, part: Part) -> Any:
    """A subclass with our forward and the name of its base; None where the forward is not the one that we know.

    The transformers classes that wrap the forward of every subclass do so here too: checkpoints of activations are one
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


def _classes(model_class: type) -> list[tuple[type, Part]]:
    """The classes with a part in the file of a model's class."""
    found = [(cls, part_of(cls)) for n, cls in vars(sys.modules[model_class.__module__]).items() if _is(cls, n)]
    return [(cls, part) for cls, part in found if part is not None and cls.__module__ == model_class.__module__]


def _is(thing: Any, name: str) -> bool:
    return isinstance(thing, type) and thing.__name__ == name


def is_patched(target: Any) -> bool:
    """Whether a module of a model, or a class of a family, has a forward of ours."""
    if isinstance(target, type):
        return is_ours(target) or any(is_ours(cls) for cls, _ in _classes(target))
    return any(map(is_ours, target.modules()))


_UNKNOWN = "its forward is not the one of transformers that warpsmith knows"


def _why_not(module: nn.Module, part: Part, ours: type | None) -> str | None:
    if ours is None:
        return _UNKNOWN
    return "somebody else has replaced its forward" if "forward" in module.__dict__ else part.why_not(module)


def patch_model(done: Patched, model: nn.Module) -> None:
    """Replaces the forwards of one model's modules."""
    counts, whats, classes, candidates = Counter[str](), {}, dict[type, Any](), dict[nn.Module, type]()
    # A model may hold models of other families. torch's layer norms get what the innermost one's row says.
    norms = {m: row.layer_norm for root in model.modules() if (row := row_of(root)) for m in root.modules()}
    for module in model.modules():
        cls = type(module)
        part = part_of(cls, norms.get(module))
        if part is None:
            if isinstance(module, transformers.PreTrainedModel) and row_of(module) is None:
                done.kept[cls.__name__] = "warpsmith does not know its class"
            elif module is model and getattr(model, "base_model", model) is not model:
                done.kept[cls.__name__] = "its head and loss stay as they are"
            elif cls.__name__.endswith("Experts"):
                done.kept[cls.__name__] = "experts stay as they are"
            continue
        if cls not in classes:
            classes[cls] = _subclass(cls, part)
        why = _why_not(module, part, classes[cls])
        if why is None:
            candidates[module] = classes[cls]
            whats[cls.__name__] = part.what
        else:
            done.kept[cls.__name__] = why
    failed, done.unchecked = check(model, candidates)
    for module, ours in candidates.items():
        name = type(module).__name__
        if module in failed:
            done.kept[name] = failed[module]
            continue
        done.patch_module(module, ours)
        counts[name] += 1
    done.replaced = {name: f"{whats[name]} ({n})" for name, n in counts.items()}


def patch_class(done: Patched, model_class: type) -> None:
    """Replaces the forwards of a family's classes, for all models that are and will be."""
    for cls, part in _classes(model_class):
        ours = _subclass(cls, part)
        if ours is None:
            done.kept[cls.__name__] = _UNKNOWN
            continue
        done.patch_class(cls, ours.forward)
        done.replaced[cls.__name__] = part.what
    if ROWS[model_class.__module__].layer_norm is not None:
        done.kept["LayerNorm"] = "it is torch's own class: patch the model"
