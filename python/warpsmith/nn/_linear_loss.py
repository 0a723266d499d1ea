from __future__ import annotations

import torch
from torch import Tensor, nn

from warpsmith._core import checks
from warpsmith.ops._cross_entropy import check_loss_numbers, reduction_number
from warpsmith.ops._linear_loss import bound_of_chunks, check_max_bytes
from warpsmith.ops.cross_entropy import CrossEntropyStats
from warpsmith.ops.linear_loss import linear_cross_entropy

_OWNER = "LinearCrossEntropyHead"

torch.fx.wrap("linear_cross_entropy")  # torch.fx.symbolic_trace keeps the call whole


class LinearCrossEntropyHead(nn.Linear):
    """A language-model head and its loss: :func:`warpsmith.linear_cross_entropy` with its weight.

    Constructor and ``state_dict`` are those of ``torch.nn.Linear``, so that a head's checkpoint loads. To share the
    weight with an embedding, assign it: ``head.weight = embedding.weight``. ``torch.nn.LinearCrossEntropyLoss`` of
    torch 2.13 is another module: its ``weight`` holds the weights of the classes, and its layer is ``.linear``.

    Args:
        in_features: H, the width of the hidden states.
        out_features: V, the number of classes.
        bias: whether there is a ``bias`` of V elements. False by default, as in language models.
        device, dtype: of weight and bias; the dtype of the hidden states, unless autocast casts them.
        ignore_index, reduction, label_smoothing, z_loss, softcap, check_labels, max_chunk_bytes, max_bytes, dw_dtype:
            as in :func:`warpsmith.linear_cross_entropy`.

    ``forward(hidden, target)`` takes hidden states (..., H) and targets (...), int64, and gives the loss, float32; with
    ``return_stats=True`` the pair of loss and stats. ``logits(hidden)`` is the linear layer alone, for generation.
    Dtypes, determinism and errors: as :func:`warpsmith.linear_cross_entropy`.

    Example:
        >>> import torch, warpsmith
        >>> head = warpsmith.nn.LinearCrossEntropyHead(8, 100)
        >>> loss = head(torch.zeros(2, 3, 8), torch.ones(2, 3, dtype=torch.int64))
        >>> round(loss.item(), 4)
        4.6052
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        check_labels: bool = False,
        max_chunk_bytes: int | None = None,
        max_bytes: int | None = None,
        dw_dtype: torch.dtype | None = None,
    ) -> None:
        checks.sizes(_OWNER, in_features=in_features)
        checks.sizes(_OWNER, 1, out_features=out_features)
        super().__init__(in_features, out_features, bias, device, dtype)
        reduction_number(_OWNER, reduction)
        numbers = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap}
        check_loss_numbers(_OWNER, self.weight.dtype, ignore_index=ignore_index, **numbers)
        checks.flags(_OWNER, check_labels=check_labels)
        bound_of_chunks(_OWNER, max_chunk_bytes)
        if dw_dtype is not None and not (isinstance(dw_dtype, torch.dtype) and dw_dtype in checks.FLOAT_DTYPES):
            checks.refuse_type(_OWNER, "dw_dtype", "a floating dtype or None", dw_dtype)
        check_max_bytes(_OWNER, max_bytes, max_chunk_bytes, dw_dtype)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.check_labels = check_labels
        self.max_chunk_bytes = max_chunk_bytes
        self.max_bytes = max_bytes
        self.dw_dtype = dw_dtype

    def forward(  # type: ignore[override]  # a linear layer takes no target
        self, hidden: Tensor, target: Tensor, *, return_stats: bool = False
    ) -> Tensor | tuple[Tensor, CrossEntropyStats]:
        """The loss of the hidden states' next tokens."""
        return linear_cross_entropy(
            hidden,
            self.weight,
            target,
            self.bias,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            check_labels=self.check_labels,
            return_stats=return_stats,
            max_chunk_bytes=self.max_chunk_bytes,
            max_bytes=self.max_bytes,
            dw_dtype=self.dw_dtype,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden @ weight^T + bias`` by torch, softcap included."""
        z = super().forward(hidden)
        return self.softcap * torch.tanh(z / self.softcap) if self.softcap else z

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ignore_index={self.ignore_index}, reduction={self.reduction!r}"
