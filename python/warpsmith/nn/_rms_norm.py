from __future__ import annotations

import torch
from torch import Tensor

from warpsmith.nn._norm import RMSNormBase
from warpsmith.ops.rms_norm import rms_norm

torch.fx.wrap("rms_norm")  # torch.fx.symbolic_trace keeps the call whole


class RMSNorm(RMSNormBase, torch.nn.RMSNorm):
    """Root-mean-square layer normalisation: :func:`warpsmith.rms_norm` with its weight.

    A ``torch.nn.RMSNorm``, with its constructor and ``state_dict``, to which ``weight_offset`` is added.

    Args:
        normalized_shape: the trailing dimensions to normalise over, an int for the last one alone.
        eps: None: the machine epsilon of the arithmetic, as in :func:`warpsmith.rms_norm`.
        elementwise_affine: whether there is a ``weight`` of ``normalized_shape``.
        device, dtype: of the weight. float32 beside 16-bit activations is fine and gives the activation's dtype.
        weight_offset: added to the weight; the weight then starts at ``1 - weight_offset``.

    Shapes: x ``(..., *normalized_shape)`` to the same. Dtypes, determinism and errors: as :func:`warpsmith.rms_norm`;
    a 16-bit weight beside a wider ``x`` is cast.

    Example:
        >>> import torch, warpsmith
        >>> norm = warpsmith.nn.RMSNorm(8)
        >>> norm(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``x`` over its last ``len(normalized_shape)`` dimensions."""
        y = rms_norm(self.flat("x", x), self.flat_parameter("weight", x), self.eps, self.weight_offset)
        return self.shaped(y, x)
