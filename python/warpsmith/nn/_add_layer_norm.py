from __future__ import annotations

import torch
from torch import Tensor

from warpsmith.nn._norm import LayerNormBase
from warpsmith.ops.add_layer_norm import add_layer_norm

torch.fx.wrap("add_layer_norm")  # torch.fx.symbolic_trace keeps the call whole


class AddLayerNorm(LayerNormBase):
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

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Adds ``residual`` to ``x`` and normalises the sum."""
        parameters = self.flat_parameter("weight", residual), self.flat_parameter("bias", residual)
        return self.with_residual(add_layer_norm, x, residual, *parameters, self.eps)
