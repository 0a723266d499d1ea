"""Calls of torch's scaled_dot_product_attention in the code of a model: ours by registration, while a patch lasts."""

import threading
import types
from typing import Any

from torch import nn
from torch.nn import attention

from warpsmith.integrations import sdpa

_NAME, _CALL = "warpsmith", "scaled_dot_product_attention"
_lock = threading.Lock()
_patches = 0  # that want ours


def _calls(cls: Any) -> bool:
    """Whether the code of a class, but of torch and transformers, names the function."""
    for base in cls.__mro__:
        if not base.__module__.startswith(("torch.", "transformers.", "warpsmith.")):
            functions = [f for f in vars(base).values() if isinstance(f, types.FunctionType)]
            if any(_CALL in f.__code__.co_names for f in functions):
                return True
    return False


def attend_by_registration(done: Any, model: nn.Module) -> None:
    """Activates our flash attention in this process, where a class of the model calls torch's function."""
    global _patches
    if not any(map(_calls, {type(m) for m in model.modules()})):
        return
    with _lock:
        current = attention.current_flash_attention_impl()
        if current not in (None, _NAME):
            done.kept[_CALL] = f"somebody has activated {current}"
            return
        if current is None:
            sdpa.register(_NAME)
            attention.activate_flash_attention_impl(_NAME)
            _patches = 0
        elif not _patches:  # by the program itself
            done.kept[_CALL] = "it is patched already"
            return
        _patches += 1
    done.replaced[_CALL] = "warpsmith.attention, in this process"
    done.on_undo(_release)


def _release() -> None:
    global _patches
    with _lock:
        _patches -= 1
        if not _patches and attention.current_flash_attention_impl() == _NAME:
            attention.restore_flash_attention_impl()
