from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from warpsmith.nn._norm import Norm
from warpsmith.ops._dropout import check_p
from warpsmith.ops.dropout_add_rms_norm import dropout_add_rms_norm

torch.fx.wrap("dropout_add_rms_norm")  # torch.fx.symbolic_trace keeps the call whole


class DropoutAddRMSNorm(Norm):
    """Dropout, a residual sum and its norm: :func:`warpsmith.dropout_add_rms_norm` with its weight.

    Takes the place of ``residual = residual + dropout(x)`` and of the ``torch.nn.RMSNorm`` that follows.
    ``state_dict`` and constructor are that module's, to which ``p`` as the second argument and
    ``weight_offset`` are added.

    Args:
        normalized_shape: the trailing dimensions to normalise over, an int for the last one alone.
        p: the probability of a drop in training mode, in [0, 1].
        eps: added to the mean square. None: the machine epsilon of the arithmetic.
        elementwise_affine: whether there is a ``weight`` of ``normalized_shape``.
        device, dtype: of the weight. float32 beside 16-bit activations is fine.
        weight_offset: added to the weight; the weight then starts at ``1 - weight_offset``.

    Shapes: x and residual ``(..., *normalized_shape)``; returns ``(y, residual_out)``, both of that shape. Dtypes,
    determinism and errors: as :func:`warpsmith.dropout_add_rms_norm`.

    Example:
        >>> import torch, warpsmith
        >>> norm = warpsmith.nn.DropoutAddRMSNorm(8, p=0.1)
        >>> x, residual = torch.ones(2, 8), torch.zeros(2, 8)
        >>> y, residual = norm(x, residual)
        >>> y.shape, residual.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        p: float = 0.5,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
    ) -> None:
        check_p(type(self).__name__, p)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, weight_offset=weight_offset, p=p)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Drops from ``x`` in training mode, adds ``residual`` and normalises the sum."""
        options = (self.p, self.eps, self.training)
        weight = self.flat_parameter("weight", residual)
        return self.with_residual(dropout_add_rms_norm, x, residual, weight, *options, weight_offset=self.weight_offset)
