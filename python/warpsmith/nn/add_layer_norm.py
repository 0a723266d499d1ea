from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from warpsmith.nn._norm import Norm
from warpsmith.ops.add_layer_norm import add_layer_norm


class AddLayerNorm(Norm):
    """A residual sum and its norm: :func:`warpsmith.add_layer_norm` with its weight and bias.

    Takes the place of ``residual = residual + x`` and of the ``torch.nn.LayerNorm`` that follows.
    ``state_dict`` and constructor are that module's.

    Args:
        normalized_shape: the trailing dimensions to normalise over, an int for the last one alone.
        eps: added to the variance.
        elementwise_affine: whether there is a ``weight`` of ``normalized_shape``.
        bias: whether there is a ``bias`` beside it.
        device, dtype: of weight and bias. float32 beside 16-bit activations is fine.

    Shapes: x and residual ``(..., *normalized_shape)``; returns ``(y, residual_out)``, both of that shape. Dtypes,
    determinism and errors: as :func:`warpsmith.add_layer_norm`.

    Example:
        >>> import torch, warpsmith
        >>> norm = warpsmith.nn.AddLayerNorm(8)
        >>> x, residual = torch.ones(2, 8), torch.zeros(2, 8)
        >>> y, residual = norm(x, residual)
        >>> y.shape, residual.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    eps: float

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, bias=bias)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Adds ``residual`` to ``x`` and normalises the sum."""
        y, residual_out = add_layer_norm(
            self.flat("x", x),
            self.flat("residual", residual),
            self.flat_parameter("weight"),
            self.flat_parameter("bias"),
            self.eps,
        )
        return y.view(x.shape), residual_out.view(x.shape)
