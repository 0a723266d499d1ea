from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from warpsmith.nn._norm import Norm
from warpsmith.ops._dropout import check_p
from warpsmith.ops.dropout_add_layer_norm import dropout_add_layer_norm

torch.fx.wrap("dropout_add_layer_norm")  # torch.fx.symbolic_trace keeps the call whole


class DropoutAddLayerNorm(Norm):
    """Dropout, a residual sum and its norm: :func:`warpsmith.dropout_add_layer_norm` with its weight and
    bias.

    Takes the place of ``residual = residual + dropout(x)`` and of the ``torch.nn.LayerNorm`` that follows.
    ``state_dict`` and constructor are that module's, to which ``p`` as the second argument is added.

    Args:
        normalized_shape: the trailing dimensions to normalise over, an int for the last one alone.
        p: the probability of a drop in training mode, in [0, 1].
        eps: added to the variance.
        elementwise_affine: whether there is a ``weight`` of ``normalized_shape``.
        bias: whether there is a ``bias`` beside it.
        device, dtype: of weight and bias. float32 beside 16-bit activations is fine.

    Shapes: x and residual ``(..., *normalized_shape)``; returns ``(y, residual_out)``, both of that shape. Dtypes,
    determinism and errors: as :func:`warpsmith.dropout_add_layer_norm`.

    Example:
        >>> import torch, warpsmith
        >>> norm = warpsmith.nn.DropoutAddLayerNorm(8, p=0.1)
        >>> x, residual = torch.ones(2, 8), torch.zeros(2, 8)
        >>> y, residual = norm(x, residual)
        >>> y.shape, residual.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    eps: float

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        p: float = 0.5,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_p(type(self).__name__, p)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, bias=bias, p=p)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Drops from ``x`` in training mode, adds ``residual`` and normalises the sum."""
        parameters = self.flat_parameter("weight", residual), self.flat_parameter("bias", residual)
        return self.with_residual(dropout_add_layer_norm, x, residual, *parameters, self.p, self.eps, self.training)
