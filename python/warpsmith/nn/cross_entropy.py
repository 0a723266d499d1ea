from __future__ import annotations

import torch
from torch import Tensor

from warpsmith.ops import _check
from warpsmith.ops.cross_entropy import cross_entropy


class CrossEntropyLoss(torch.nn.Module):
    """:func:`warpsmith.cross_entropy` as a module: constructor and ``state_dict`` of ``torch.nn.CrossEntropyLoss``.

    Args:
        weight: a weight for each class, shape (V,), or None; a buffer.
        size_average: deprecated by torch; must be None, use ``reduction``.
        ignore_index: targets without loss.
        reduce: deprecated by torch; must be None, use ``reduction``.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: from 0 to 1.
        z_loss: factor of the squared logsumexp, >= 0.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 for none.
        inplace_backward: allows the gradient to be written over the logits.
        check_labels: name the first label out of range on CUDA too, where the host then waits for the device.

    ``forward(logits, target)`` takes logits (..., V), classes last, and targets (...), int64. Torch's module has the
    classes second: move them, ``logits.movedim(1, -1)``.

    Example:
        >>> import torch, warpsmith
        >>> loss = warpsmith.nn.CrossEntropyLoss(label_smoothing=0.1)
        >>> loss(torch.zeros(2, 4), torch.tensor([1, 3]))
        tensor(1.3863)
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        inplace_backward: bool = False,
        check_labels: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("size_average", size_average), ("reduce", reduce)):
            if value is not None:
                _check.refuse("CrossEntropyLoss", name, "None, and reduction instead", str(value))
        if reduction not in ("none", "mean", "sum"):
            _check.refuse("CrossEntropyLoss", "reduction", "none, mean or sum", str(reduction))
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.inplace_backward = inplace_backward
        self.check_labels = check_labels

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            logits,
            target,
            class_weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            inplace_backward=self.inplace_backward,
            check_labels=self.check_labels,
        )

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, label_smoothing={self.label_smoothing}, "
            f"z_loss={self.z_loss}, softcap={self.softcap}"
        )
