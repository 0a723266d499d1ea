from __future__ import annotations

import torch
from torch import Tensor

from warpsmith.nn._norm import RMSNormBase
from warpsmith.ops.add_rms_norm import add_rms_norm

torch.fx.wrap("add_rms_norm")  # torch.fx.symbolic_trace keeps the call whole


class AddRMSNorm(RMSNormBase):
    """A residual sum and its norm: :func:`warpsmith.add_rms_norm` with its weight.

    Takes the place of ``residual = residual + x`` and of the ``torch.nn.RMSNorm`` that follows. ``state_dict``
    and constructor are that module's, to which ``weight_offset`` is added.

    Args:
        normalized_shape: the trailing dimensions to normalise over, an int for the last one alone.
        eps: added to the mean square. None: the machine epsilon of the arithmetic.
        elementwise_affine: whether there is a ``weight`` of ``normalized_shape``.
        device, dtype: of the weight. float32 beside 16-bit activations is fine.
        weight_offset: added to the weight; the weight then starts at ``1 - weight_offset``.

    Shapes: x and residual ``(..., *normalized_shape)``; returns ``(y, residual_out)``, both of that shape. Dtypes,
    determinism and errors: as :func:`warpsmith.add_rms_norm`.

    Example:
        >>> import torch, warpsmith
        >>> norm = warpsmith.nn.AddRMSNorm(8)
        >>> x, residual = torch.ones(2, 8), torch.zeros(2, 8)
        >>> y, residual = norm(x, residual)
        >>> y.shape, residual.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Adds ``residual`` to ``x`` and normalises the sum."""
        weight = self.flat_parameter("weight", residual)
        return self.with_residual(add_rms_norm, x, residual, weight, self.eps, self.weight_offset)
