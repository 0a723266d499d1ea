"""What ``patch`` does with models of transformers beside the rows of their classes."""

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import PreTrainedModel, masking_utils

from warpsmith.integrations._modules import Forward, Part, by_name, is_ours
from warpsmith.integrations._patch import UNKNOWN, Patched, subclass
from warpsmith.integrations._rows import ROWS, part_of, row_of
from warpsmith.nn._dispatch import reason_for_torch_scaled_dot_product_attention


def _classes(model_class: type) -> list[tuple[type, Part]]:
    """The classes with a part in the file of a model's class."""
    named = vars(sys.modules[model_class.__module__]).items()
    found = [(cls, part_of(cls)) for name, cls in named if isinstance(cls, type) and cls.__name__ == name]
    return [(cls, part) for cls, part in found if part is not None and cls.__module__ == model_class.__module__]


def is_patched(model_class: type) -> bool:
    """Whether a class of a family has a forward of ours."""
    return is_ours(model_class) or any(is_ours(cls) for cls, _ in _classes(model_class))


def patch_class(done: Patched, model_class: type, choice: dict[str, bool]) -> None:
    """Replaces the forwards of a family's classes, for all models that are and will be."""
    for cls, part in _classes(model_class):
        if not choice[part.switch]:
            continue
        ours = subclass(cls, part)
        if ours is None:
            done.kept[cls.__name__] = UNKNOWN
            continue
        done.patch_class(cls, ours.forward)
        done.replaced[cls.__name__] = part.what
    if ROWS[model_class.__module__].layer_norm and choice["norms"]:
        done.kept["LayerNorm"] = "it is torch's own class: patch the model"


def table(logits: bool) -> Callable[[type], Part | None]:
    """The part of each class; with ``logits`` heads have none."""

    def part(cls: type) -> Part | None:
        found = part_of(cls)
        return None if found is not None and logits and found.switch == "loss" else found

    return part


def say_what_stays(done: Patched, model: nn.Module) -> None:
    for module in model.modules():
        cls, base = type(module), getattr(module, "base_model", module)
        known = any(map(row_of, cls.__mro__))
        if isinstance(module, PreTrainedModel) and not known:
            done.kept[cls.__name__] = "warpsmith does not know its class"
        elif module is model and known and base is not module and not any(map(part_of, cls.__mro__)):
            done.kept[cls.__name__] = "its head and loss stay as they are"
        elif cls.__name__.endswith("Experts"):
            done.kept[cls.__name__] = "experts stay as they are"


def _why_not_attention(model: Any) -> str | None:
    """Why a model's attention is not :func:`warpsmith.attention`."""
    config = model.config
    if config._attn_implementation not in ("eager", "sdpa"):
        return f"somebody has chosen {config._attn_implementation}"
    if not model._can_set_attn_implementation():
        return "its class takes no other implementation"
    if getattr(config, "output_attentions", False):
        return "its config asks for attention weights"
    configs = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    sizes = {size for c in configs if (size := _head_dim(c))}
    reasons = [reason_for_torch_scaled_dot_product_attention(model.dtype, model.device.type, size) for size in sizes]
    return next(filter(None, reasons), None) if reasons else "its config does not say the size of heads"


def _head_dim(config: Any) -> int | None:
    heads, size = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    found = getattr(config, "head_dim", None)
    return found or (size // heads if isinstance(heads, int) and isinstance(size, int) else None)


# The config of the model that runs, if it counts the positions of its tokens itself.
_counts_positions: ContextVar[Any] = ContextVar("counts_positions", default=None)


def _look_for_packed_rows_where_they_may_be() -> None:
    """Without a mask transformers looks in the positions whether sequences are packed, and the host waits for the
    device in each forward. Positions that a model has counted itself show none."""
    look = masking_utils.find_packed_sequence_indices
    if getattr(look, "of_warpsmith", False):
        return

    @functools.wraps(look)
    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        if is_compiling():  # compiled code always makes the mask
            return look(position_ids)
        counts = _counts_positions.get()  # who asks may be another model, in a hook of the one that runs
        asks = None if counts is None else sys._getframe(1).f_locals.get("config")
        return None if counts is not None and asks is counts else look(position_ids)

    find_packed_sequence_indices.of_warpsmith = True  # type: ignore[attr-defined]
    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices


def _says_who_counts(old: Forward) -> Forward:
    given = by_name(inspect.unwrap(old))

    @functools.wraps(old)
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        if is_compiling():
            return old(self, *arguments, **options)
        counts = given(arguments, options)["position_ids"] is None
        before = _counts_positions.set(self.config if counts else None)
        try:
            return old(self, *arguments, **options)
        finally:
            _counts_positions.reset(before)

    return forward


_COUNTS = Part("attention", "positions", _says_who_counts)


def _let_hosts_run_ahead(done: Patched, model: nn.Module) -> None:
    """In the base models of transformers, ``LlamaModel`` and such, whose own forward counts the positions that it is
    not given, from 0 to the end. A model of somebody's own may begin anew behind each document."""
    _look_for_packed_rows_where_they_may_be()
    classes: dict[type, Any] = {}
    for module in model.modules():
        cls = type(module)
        if not isinstance(module, PreTrainedModel) or not cls.__name__.endswith("Model") or "forward" in vars(module):
            continue
        known = cls.__module__.startswith("transformers.models.") and row_of(cls) is not None
        known = known and part_of(cls) is None and not is_ours(module)
        if known and "position_ids" in inspect.signature(inspect.unwrap(cls.forward)).parameters:
            if cls not in classes:
                classes[cls] = subclass(cls, _COUNTS)
            done.patch_module(module, classes[cls])


def set_attention(done: Patched, model: nn.Module, register: Callable[[], None]) -> None:
    """Gives the outermost models of transformers in a model our attention, once it is registered."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            inside |= set(module.modules())
            if module.config._attn_implementation == "warpsmith":
                continue
            why = _why_not_attention(module)
            if why is not None:
                done.kept["attn_implementation"] = why
                continue
            register()
            old = module.config._attn_implementation
            module.set_attn_implementation("warpsmith")
            done.replaced["attn_implementation"] = "warpsmith.attention"
            done.on_undo(functools.partial(module.set_attn_implementation, old))
            _let_hosts_run_ahead(done, module)
