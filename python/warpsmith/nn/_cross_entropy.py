from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith.nn import functional
from warpsmith.ops._cross_entropy import check_loss_numbers, reduction_number
from warpsmith.ops.cross_entropy import cross_entropy


def _loss(input: Tensor, target: Tensor, weight: Tensor | None, options: dict, ours: dict) -> Tensor:
    if not any(ours.values()):
        return functional.cross_entropy(input, target, weight, **options)
    if target.is_floating_point():
        checks.refuse("CrossEntropyLoss", "target", f"class indices beside {', '.join(ours)}", "class probabilities")
    loss = cross_entropy(functional.classes_last(input), target, class_weight=weight, **options, **ours)
    return loss if functional.is_autocast(input) else loss.to(input.dtype)


torch.fx.wrap("_loss")  # torch.fx.symbolic_trace keeps the call whole


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` by :func:`warpsmith.cross_entropy`, with torch's constructor and ``state_dict``.

    Args:
        weight: a weight for each class, shape (C,), or None; a buffer.
        size_average: deprecated by torch, use ``reduction``.
        ignore_index: targets without loss.
        reduce: deprecated by torch, use ``reduction``.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: from 0 to 1.
        z_loss: factor of the squared logsumexp, >= 0.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 for none.
        inplace_backward: allows the gradient to be written over the logits.
        check_labels: name the first label out of range on CUDA too, where the host then waits for the device.

    ``forward(input, target)`` takes logits (N, C), (C,) or (N, C, d1, ...), classes in dimension 1 as torch has them,
    and targets (N, d1, ...), int64 or uint8; class probabilities go to torch. The loss has the dtype of the logits,
    float32 under autocast. :func:`warpsmith.cross_entropy` takes logits with the classes last and gives a float32 loss.

    Example:
        >>> import torch, warpsmith
        >>> loss = warpsmith.nn.CrossEntropyLoss(label_smoothing=0.1)
        >>> loss(torch.zeros(2, 4, 5), torch.ones(2, 5, dtype=torch.int64))
        tensor(1.3863)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        inplace_backward: bool = False,
        check_labels: bool = False,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        reduction_number("CrossEntropyLoss", self.reduction)
        numbers: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap}
        check_loss_numbers("CrossEntropyLoss", ignore_index=ignore_index, **numbers)
        checks.flags("CrossEntropyLoss", inplace_backward=inplace_backward, check_labels=check_labels)
        self.z_loss = z_loss
        self.softcap = softcap
        self.inplace_backward = inplace_backward
        self.check_labels = check_labels

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of logits ``input`` for classes ``target``."""
        options = {
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
        }
        ours = {
            "z_loss": self.z_loss,
            "softcap": self.softcap,
            "inplace_backward": self.inplace_backward,
            "check_labels": self.check_labels,
        }
        return _loss(input, target, self.weight, options, ours)

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, label_smoothing={self.label_smoothing}, "
            f"z_loss={self.z_loss}, softcap={self.softcap}"
        )
