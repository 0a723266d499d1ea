"""What the replaced forwards ask of modules: whose their forward is; stand-ins for them."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from warpsmith._core.modules import is_watched
from warpsmith.nn._linear import is_product
from warpsmith.ops._norm_linears import linears, may_join

Forward = Callable[..., Any]


class Part(NamedTuple):
    """What stands in the place of a class's forward."""

    switch: str  # of ``patch``
    what: str  # for reports
    make: Callable[[Forward], Forward | None]  # from the old forward; None: it is not the one that we know
    why_not: Callable[[Any], str | None] = lambda module: None  # of one module; "": for no reason to be told


def is_ours(module: Any) -> bool:
    """Whether the forward of a module, or of a class, is one of ours."""
    return getattr(module.forward, "of_warpsmith", False)


def is_free(module: nn.Module) -> bool:
    """Whether our ops may stand in the place of a call of a module that we have patched."""
    return is_ours(module) and not is_watched(module)


def joined(layers: Sequence[Any], x: Tensor) -> Sequence[Tensor] | None:
    """What linear layers that we have patched make of one input, if that may be one launch."""
    if type(x) is not Tensor or not all(is_ours(layer) and is_product(layer) for layer in layers):
        return None
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    return linears(x, weights, biases) if may_join(x, weights, biases) else None


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
