"""What the replaced forwards ask of modules: who hangs on their calls, whose their forward is; stand-ins for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[..., Any]
# The hooks of state_dict and of registration run without a call. Every other kind runs at a call or in its backward.
CALL_HOOKS = tuple(n for n in vars(nn.Module()) if n.endswith("_hooks") and "state_dict" not in n)
GLOBAL_HOOKS = tuple(
    hooks
    for n, hooks in vars(torch.nn.modules.module).items()
    if n.startswith("_global_") and n.endswith("_hooks") and "registration" not in n
)


def is_watched(module: nn.Module) -> bool:
    """Whether hooks hang on the calls of a module, its own or those of all modules. Then it must be called."""
    for name in CALL_HOOKS:
        if getattr(module, name):
            return True
    return any(GLOBAL_HOOKS)


def is_untouched(module: nn.Module, cls: type) -> bool:
    """Whether a module is of exactly this class, with the forward of the class and without hooks."""
    return type(module) is cls and "forward" not in module.__dict__ and not is_watched(module)


def is_ours(module: Any) -> bool:
    """Whether the forward of a module, or of a class, is one of ours."""
    return getattr(module.forward, "of_warpsmith", False)


def is_free(module: nn.Module) -> bool:
    """Whether our ops may stand in the place of a call of a module that we have patched."""
    return is_ours(module) and not is_watched(module)


def beside(weight: Tensor, x: Tensor) -> Tensor:
    """A 16-bit weight beside wider activations, as their product would cast it."""
    return weight if weight.dtype == x.dtype or x.element_size() == 2 else weight.to(x.dtype)


def by_name(old: Forward) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """A function that gives a call's arguments as ``old`` gets them: by name, with its defaults."""
    named = [p for p in inspect.signature(old).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    names = [p.name for p in named]
    defaults = {p.name: p.default for p in named if p.default is not p.empty}

    def given(arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        return {**defaults, **dict(zip(names, arguments, strict=False)), **options}

    return given


class StandIn:
    """Stands in the place of ``self`` in a module's own forward. What a subclass does not define is the module's."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)
