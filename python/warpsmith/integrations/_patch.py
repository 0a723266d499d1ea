"""Puts the parts into models and classes of transformers, and takes them out again."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from warpsmith.integrations._modules import Forward, is_ours
from warpsmith.integrations._parts import PARTS, PREFIXES, TORCHS_LAYER_NORM, Part


def family_of(model_or_class: Any) -> str | None:
    """The name of a model's family, of those that are known."""
    cls = model_or_class if isinstance(model_or_class, type) else type(model_or_class)
    if not issubclass(cls, transformers.PreTrainedModel):
        return None
    family = cls.__module__.rsplit(".", 1)[-1].removeprefix("modeling_")
    return family if family in PARTS else None


def part_of(cls: type, family: str) -> Part | None:
    """What a class of a family gets."""
    prefix, cls = PREFIXES[family], _stock(cls)
    if cls is nn.LayerNorm and family == "gpt2":
        return TORCHS_LAYER_NORM
    if not cls.__module__.endswith(f".modeling_{family}") or not cls.__name__.startswith(prefix):
        return None
    return PARTS[family].get(cls.__name__.removeprefix(prefix))


class Patched:
    """What :func:`patch` did. As a context manager it undoes that at the end.

    Attributes:
        replaced: by class, what its forward is made of now, and how many modules have it.
        kept: by class, why it is as it was.

    Example:
        >>> from warpsmith.integrations.transformers import Patched
        >>> Patched().replaced
        {}
    """

    def __init__(self) -> None:
        self.replaced: dict[str, str] = {}
        self.kept: dict[str, str] = {}
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
        return "\n".join([*lines, *(f"{name}: as it was: {why}" for name, why in self.kept.items())])

    def patch_module(self, module: Any, ours: type) -> None:
        """Gives a module a class of :func:`_subclass`."""
        stock = _stock(ours)
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


def _stock(cls: type) -> type:
    """A class as it is without a patch."""
    return vars(cls).get("_warpsmith_stock", cls)


def _subclass(cls: Any, part: Part) -> Any:
    """A subclass with our forward and the name of its base; None where the forward is not the one that we know.

    The transformers classes that wrap the forward of every subclass do so here too: checkpoints of activations are one
    such wrapper. A deep copy is patched, and ``undo`` ends that too. A pickle names the base: what is loaded is not
    patched.
    """
    stock: Any = _stock(cls)
    forward = part.make(stock.forward)
    if forward is None:
        return None
    forward.of_warpsmith = True  # type: ignore[attr-defined]

    def reduce(self: Any, protocol: Any) -> Any:
        # Protocol 1 makes the object by a function of any class. Later ones must name the object's own class.
        function, (own, *others), *state = stock.__reduce_ex__(self, 1)
        return function, (_stock(own), *others), *state

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = self.__new__(type(self))
        copied.__setstate__(copy.deepcopy(stock.__reduce_ex__(self, 1)[2], memo))
        return copied

    names = {n: getattr(stock, n) for n in ("__module__", "__qualname__", "__doc__")}
    ours = {"forward": forward, "__reduce_ex__": reduce, "__deepcopy__": deepcopy, "_warpsmith_stock": stock}
    return type(stock)(stock.__name__, (stock,), {**names, **ours})


def _classes(model_class: type, family: str) -> list[tuple[type, Part]]:
    """The classes of a family with a part, without those of torch."""
    found = [(cls, part_of(cls, family)) for n, cls in vars(sys.modules[model_class.__module__]).items() if _is(cls, n)]
    return [(cls, part) for cls, part in found if part is not None and cls is not nn.LayerNorm]


def _is(thing: Any, name: str) -> bool:
    return isinstance(thing, type) and thing.__name__ == name


def is_patched(target: Any, family: str) -> bool:
    """Whether a module of a model, or a class of a family, has a forward of ours."""
    if isinstance(target, type):
        return is_ours(target) or any(is_ours(cls) for cls, _ in _classes(target, family))
    return any(map(is_ours, target.modules()))


_UNKNOWN = "its forward is not the one of transformers that warpsmith knows"


def patch_model(done: Patched, model: nn.Module, family: str) -> None:
    """Replaces the forwards of one model's modules."""
    counts, whats, classes = Counter[str](), {}, dict[type, Any]()
    for module in model.modules():
        cls = type(module)
        part = part_of(cls, family)
        if part is None:
            continue
        if cls not in classes:
            classes[cls] = _subclass(cls, part)
        why = part.why_not(module)
        if "forward" in module.__dict__:
            why = "somebody else has replaced its forward"
        if classes[cls] is None:
            why = _UNKNOWN
        if why is not None:
            done.kept[cls.__name__] = why
            continue
        done.patch_module(module, classes[cls])
        counts[cls.__name__] += 1
        whats[cls.__name__] = part.what
    done.replaced = {name: f"{whats[name]} ({n})" for name, n in counts.items()}


def patch_class(done: Patched, model_class: type, family: str) -> None:
    """Replaces the forwards of a family's classes, for all models that are and will be."""
    for cls, part in _classes(model_class, family):
        ours = _subclass(cls, part)
        if ours is None:
            done.kept[cls.__name__] = _UNKNOWN
            continue
        done.patch_class(cls, ours.forward)
        done.replaced[cls.__name__] = part.what
    if family == "gpt2":
        done.kept["LayerNorm"] = "it is torch's own class: patch the model"
