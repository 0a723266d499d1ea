from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from warpsmith.nn._norm import Norm
from warpsmith.ops.rms_norm import rms_norm


class RMSNorm(Norm):
    """Root-mean-square layer normalisation: :func:`warpsmith.rms_norm` with its weight.

    Constructor and ``state_dict`` are those of ``torch.nn.RMSNorm``, to which ``weight_offset`` is added.

    Args:
        normalized_shape: the trailing dimensions to normalise over, an int for the last one alone.
        eps: None: the machine epsilon of the arithmetic, as in :func:`warpsmith.rms_norm`.
        elementwise_affine: whether there is a ``weight`` of ``normalized_shape``.
        device, dtype: of the weight. float32 beside 16-bit activations is fine and gives the activation's dtype.
        weight_offset: added to the weight; the weight then starts at ``1 - weight_offset``.

    Shapes: x ``(..., *normalized_shape)`` to the same. Dtypes, determinism and errors: as :func:`warpsmith.rms_norm`.

    Example:
        >>> import torch, warpsmith
        >>> norm = warpsmith.nn.RMSNorm(8)
        >>> norm(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, weight_offset=weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``x`` over its last ``len(normalized_shape)`` dimensions."""
        y = rms_norm(self.flat("x", x), self.flat_parameter("weight"), self.eps, self.weight_offset)
        return y.view(x.shape)
