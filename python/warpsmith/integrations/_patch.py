"""Puts the parts into models and classes of transformers, and takes them out again."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from warpsmith.integrations._parts import PARTS, PREFIXES, TORCHS_LAYER_NORM, Forward, Part


def family_of(model_or_class: Any) -> str | None:
    """The name of a model's family, of those that are known."""
    cls = model_or_class if isinstance(model_or_class, type) else type(model_or_class)
    if not issubclass(cls, transformers.PreTrainedModel):
        return None
    family = cls.__module__.rsplit(".", 1)[-1].removeprefix("modeling_")
    return family if family in PARTS else None


def part_of(cls: type, family: str) -> Part | None:
    """What a class of a family gets."""
    prefix = PREFIXES[family]
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

    def patch_module(self, module: Any, part: Part) -> None:
        module.forward = types.MethodType(_marked(part.make(type(module).forward)), module)
        self._undo.append(lambda: module.__dict__.pop("forward", None))

    def set_attention(self, model: Any, name: str) -> None:
        old = model.config._attn_implementation
        model.set_attn_implementation(name)
        self.replaced["attn_implementation"] = name
        self._undo.append(lambda: model.set_attn_implementation(old))

    def patch_class(self, cls: Any, part: Part) -> None:
        old = cls.forward
        cls.forward = _marked(part.make(old))
        self._undo.append(lambda: setattr(cls, "forward", old))


def _marked(forward: Forward) -> Forward:
    forward.of_warpsmith = True  # type: ignore[attr-defined]
    return forward


def is_patched(target: Any) -> bool:
    """Whether the forward of a module or of its class is ours."""
    return getattr(target.forward, "of_warpsmith", False)


def patch_model(model: nn.Module, family: str) -> Patched:
    """Replaces the forwards of one model's modules."""
    done, counts, whats = Patched(), Counter[str](), {}
    for module in model.modules():
        cls = type(module)
        part = part_of(cls, family)
        if part is None:
            continue
        why = part.why_not(module)
        if "forward" in module.__dict__:
            why = "somebody else has replaced its forward"
        if why is not None:
            done.kept[cls.__name__] = why
            continue
        done.patch_module(module, part)
        counts[cls.__name__] += 1
        whats[cls.__name__] = part.what
    done.replaced = {name: f"{whats[name]} ({n})" for name, n in counts.items()}
    return done


def patch_class(model_class: type, family: str) -> Patched:
    """Replaces the forwards of a family's classes, for all models that are and will be."""
    done = Patched()
    for name, cls in vars(sys.modules[model_class.__module__]).items():
        if (
            isinstance(cls, type)
            and cls.__name__ == name
            and (part := part_of(cls, family))
            and cls is not nn.LayerNorm
        ):
            done.patch_class(cls, part)
            done.replaced[name] = part.what
    if family == "gpt2":
        done.kept["LayerNorm"] = "it is torch's own class: patch the model"
    return done
