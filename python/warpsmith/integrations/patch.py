"""Any model: its modules by our ops, in place."""

from __future__ import annotations

import re
import sys
import warnings

from torch import nn

from warpsmith._core import checks
from warpsmith.integrations._patch import Patched as Patched
from warpsmith.integrations._patch import patch_model

#: A library, and its first and last version that the tests have run with.
TESTED = {"transformers": ("5.17", "5.23"), "peft": ("0.21", "0.21")}


def warn_of_versions() -> None:
    """Warns of libraries in this process whose versions are outside the tested range."""
    for name, (first, last) in TESTED.items():
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None and not _number(first) <= _number(version) <= _number(last):
            tested = first if first == last else f"{first} to {last}"
            warnings.warn(f"patch: {name}: tested with {tested}, this is {version}", stacklevel=3)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def patch(
    model: nn.Module,
    *,
    norms: bool = True,
    rope: bool = True,
    mlp: bool = True,
    attention: bool = True,
    linear: bool = True,
    loss: bool = True,
    logits: bool = False,
) -> Patched:
    """Puts our ops into a model: into torch's own modules in it, and into models of transformers.

    Parameters, ``state_dict``, arguments and outputs stay. Each kind of module is compared with itself as it was, on 8
    random rows, and left where the error law does not hold; a call that an op does not take is torch's. Hooks of
    modules are called as before. A deep copy is patched until ``undo()``; a pickle is one of the model as it was.
    A second call changes nothing. Models of transformers: :func:`warpsmith.integrations.transformers.patch`.

    Args:
        model: a module, also compiled, in DDP, sharded by FSDP2 or with adapters of PEFT. Its own classes stay.
        norms: ``LayerNorm``, ``RMSNorm``, and the residual sums of ``TransformerEncoderLayer`` and
            ``TransformerDecoderLayer`` with the norms behind them; the norms and sums of transformers' models.
        rope: the rotations of transformers' models.
        mlp: a ``Linear`` with a ``ReLU``, ``GELU`` or ``SiLU`` behind it in a ``Sequential`` or in a transformer layer;
            the feed-forward layers of transformers' models.
        attention: ``MultiheadAttention`` without dropout and weights; in this process also what the model's own classes
            give torch's ``scaled_dot_product_attention``; the ``attn_implementation`` of transformers' models.
        linear: ``Linear``.
        loss: ``CrossEntropyLoss``; the head and loss of transformers' models.
        logits: these make logits in training with labels, too.

    Returns:
        :class:`Patched`: what was replaced, what was not and why, and ``undo()``.

    Loss and gradients obey the error law beside the model as it was. Deterministic as the ops are.

    Raises:
        ValueError: no module. Nothing has changed.

    Source: the idea is Liger-Kernel's.

    Example:
        >>> import torch, warpsmith
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.GELU())
        >>> done = warpsmith.patch(model)
        >>> done.replaced["LayerNorm"]
        'warpsmith.layer_norm (1)'
        >>> model(torch.ones(2, 8)).shape
        torch.Size([2, 16])
        >>> done.undo()
    """
    if not isinstance(model, nn.Module):
        checks.refuse("patch", "model", "a torch.nn.Module", checks.value_text(model))
    choice = {"norms": norms, "rope": rope, "mlp": mlp, "attention": attention, "linear": linear, "loss": loss}
    checks.flags("patch", logits=logits, **choice)
    warn_of_versions()
    return patch_model(model, logits, **choice)
