"""The inputs of a captured step: which of them one capture serves, and their copies on the device."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from warpsmith._core import checks


def input_key(op: str, leaves: Sequence[Any], spec: Hashable) -> tuple[Any, ...]:
    """What two calls must have in common for one capture: shapes, dtypes and all that is no tensor, and the modes in
    which torch is.

    Raises:
        ValueError: a tensor that requires a gradient or is not dense.
        TypeError: what is neither a tensor nor hashable.
    """
    entries: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                checks.refuse(op, "inputs", "tensors that require no gradient", "one that does")
            if leaf.layout != torch.strided:
                checks.refuse(op, "inputs", "dense tensors", str(leaf.layout).removeprefix("torch."))
            last = leaf.dim() == 4 and leaf.is_contiguous(memory_format=torch.channels_last)
            entries.append((leaf.shape, leaf.dtype, last))
            continue
        try:
            hash(leaf)
        except TypeError:
            hint = "; tensors may be in tuples, lists and dicts"
            checks.refuse_type(op, "inputs", "tensors and hashable values", leaf, hint)
        entries.append((type(leaf), leaf))
    casts = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
    return (tuple(entries), spec, casts, torch.is_grad_enabled())


def on_device(leaves: Sequence[Any], device: torch.device) -> list[Any]:
    """The leaves with their tensors on the device."""
    return [leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def static_copies(leaves: Sequence[Any], device: torch.device) -> list[Any]:
    """The leaves with copies of their tensors on the device."""
    return [
        torch.empty_like(leaf, device=device, requires_grad=False).copy_(leaf) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]


def fill(static: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Writes new values into static copies."""
    for copy, leaf in zip(static, leaves, strict=True):
        if isinstance(copy, Tensor):
            copy.copy_(leaf, non_blocking=True)


def shapes_text(leaves: Sequence[Any]) -> str:
    """The inputs in a message."""
    shown = [
        f"{checks.dtype_text(leaf.dtype)} {checks.shape_text(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    ]
    return ", ".join(shown) if shown else "none"
