"""Models of images: norms, and what is around them, by our ops, in place."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from warpsmith._core import checks
from warpsmith.integrations import _vision as parts
from warpsmith.integrations._modules import Part, is_ours
from warpsmith.integrations._patch import Patched as Patched
from warpsmith.integrations._patch import subclass, undone_by_errors, why_kept
from warpsmith.integrations._vision_graph import Fused, Joined, Reader, Unread

_NORMS: dict[type, tuple[str, Fused]] = {
    nn.BatchNorm2d: ("warpsmith.batch_norm", Fused(True, "relu")),
    nn.GroupNorm: ("warpsmith.group_norm", Fused(False, "silu")),
}
_ALONE = {cls: Part("", what, parts.norm_alone) for cls, (what, _) in _NORMS.items()}
_ALONE[nn.MaxPool2d] = Part("", "warpsmith.max_pool2d", parts.pooled)


def _part_of(module: nn.Module, reader: Reader) -> tuple[Any, Part, Joined | None] | None:
    """(what is equal in modules of one part, the part, its graph); None: it has none. Raises Unread."""
    cls = type(module)
    alone = _ALONE.get(cls) or parts.block_of_diffusers(cls)
    if alone is not None:
        return cls, alone, None
    joined = None if cls.__module__.startswith("warpsmith.") else reader.read(module)
    if joined is None:
        return None
    return (cls, joined.key), Part("", "its norms with what is behind them", joined.make), joined


def _replace(done: Patched, model: nn.Module, fold: bool) -> None:
    norms = {cls: fused for cls, (_, fused) in _NORMS.items()}
    reader, counts, whats = Reader(norms, parts.normed, parts.folded if fold else None), Counter[str](), {}
    classes: dict[Any, tuple[Any, str | None]] = {}
    found: list[tuple[nn.Module, Any]] = []
    for module in model.modules():
        name = type(module).__name__
        try:
            part = _part_of(module, reader)
        except Unread as unread:
            done.kept[name] = str(unread)
            continue
        if part is None:
            if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)) and not is_ours(module):
                done.kept[name] = "no op of ours does what it does"
            continue
        why = "it is patched already" if is_ours(module) else why_kept(module)
        key, made, joined = part
        if why is None:
            if key not in classes:
                ours = subclass(type(module), made)
                classes[key] = ours, None if joined is None else joined.why_not(module, ours)
            why = classes[key][1]
        if why is not None:
            done.kept[name] = why
            continue
        found.append((module, classes[key][0]))
        whats[name] = made.what
        counts[name] += 1
    for module, ours in found:
        done.patch_module(module, ours)
    done.replaced = {name: f"{whats[name]} ({n})" for name, n in counts.items()}


def _put(tensor: Tensor, layout: torch.memory_format) -> None:
    tensor.data = tensor.data.contiguous(memory_format=layout)


def _channels_last(done: Patched, model: nn.Module) -> None:
    """Weights of convolutions into channels_last; undo puts those back that are still so."""
    count = 0
    for module in model.modules():
        if not isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            continue
        weight = module.weight
        if type(weight) not in (Tensor, nn.Parameter):  # a fake, a DTensor
            continue
        if not weight.is_contiguous(memory_format=torch.channels_last):
            _put(weight, torch.channels_last)
            done.on_undo(functools.partial(_put, weight, torch.contiguous_format))
            count += 1
    if count:
        done.replaced["weights of convolutions"] = f"channels_last ({count})"


def patch(model: nn.Module, *, channels_last: bool = True, fold: bool = False) -> Patched:
    """Puts our ops into a model of images, in place: torchvision's, timm's, transformers', diffusers' or your own.

    ``BatchNorm2d`` becomes :func:`warpsmith.batch_norm`, in evaluation and training; a ``ReLU`` behind it, a sum, or a
    sum and a ``ReLU``, becomes part of that op. ``GroupNorm``, and a ``SiLU`` behind it, become
    :func:`warpsmith.group_norm`. torch.fx finds these in the forward of any class, also where the norm is the last
    layer of a module whose result is added. Under autocast on CUDA a group norm gives 16 bits where torch gives
    float32. ``MaxPool2d`` becomes :func:`warpsmith.max_pool2d`.

    Parameters, ``state_dict``, arguments, outputs and attributes stay. Hooks are called as before: a module with hooks
    is not joined to its neighbours. What a forward decides by an attribute or by whether it trains is as it was; a
    forward that torch.fx cannot follow, or that computes something else on random values, is left. A call that the op
    does not take is torch's: NCHW, dtypes that do not fit, one value a channel. A deep copy is patched until
    ``undo()``; a pickle is one of the model as it was.

    Args:
        model: a module, also in DDP. Patch it before ``torch.compile``.
        channels_last: put the weights of convolutions into ``channels_last``. Then they give such tensors whatever they
            get; ``x.view(len(x), -1)`` behind them must be ``x.flatten(1)``. False: what is NCHW stays torch's.
        fold: in evaluation without gradients, put a ``BatchNorm2d`` into the weights of the ``Conv2d`` before it, anew
            whenever one of them has changed.

    Returns:
        :class:`Patched`: what was replaced, what was not and why, and ``undo()``.

    Outputs and gradients obey the error law beside the model as it was. Deterministic as the ops are.

    Raises:
        ValueError: no module. Nothing has changed.

    Example:
        >>> import torch
        >>> from warpsmith.integrations.vision import patch
        >>> layers = [torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU()]
        >>> done = patch(torch.nn.Sequential(*layers))
        >>> done.replaced["BatchNorm2d"], done.replaced["Sequential"]
        ('warpsmith.batch_norm (1)', 'its norms with what is behind them (1)')
        >>> done.undo()
    """
    if not isinstance(model, nn.Module):
        checks.refuse("patch", "model", "a torch.nn.Module", checks.value_text(model))
    checks.flags("patch", channels_last=channels_last, fold=fold)
    with undone_by_errors() as done:
        with torch.inference_mode(False), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
            _replace(done, model, fold)
        if channels_last and len(done.replaced):
            with torch.no_grad():
                _channels_last(done, model)
    return done
