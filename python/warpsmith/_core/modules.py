"""Whether a module may be left out: our ops take its parameters in the place of a call."""

from typing import Any

import torch
from torch import nn

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


def stock(cls: type) -> Any:
    """A class as it is without ``warpsmith.patch``."""
    return vars(cls).get("_warpsmith_stock", cls)


def is_untouched(module: nn.Module, cls: type) -> bool:
    """Whether a module is of exactly this class, with the forward of the class or the patch's, and without hooks."""
    return stock(type(module)) is cls and "forward" not in module.__dict__ and not is_watched(module)
