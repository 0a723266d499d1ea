from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from warpsmith.nn._norm import Norm
from warpsmith.ops.layer_norm import layer_norm


class LayerNorm(Norm):
    """Layer normalisation: :func:`warpsmith.layer_norm` with its weight and bias.

    Constructor and ``state_dict`` are those of ``torch.nn.LayerNorm``, in whose place it stands.

    Args:
        normalized_shape: the trailing dimensions to normalise over, an int for the last one alone.
        eps: added to the variance.
        elementwise_affine: whether there is a ``weight`` of ``normalized_shape``.
        bias: whether there is a ``bias`` beside it.
        device, dtype: of weight and bias. float32 beside 16-bit activations is fine and gives the activation's dtype.

    Shapes: x ``(..., *normalized_shape)`` to the same. Dtypes, determinism and errors: as :func:`warpsmith.layer_norm`.

    Example:
        >>> import torch, warpsmith
        >>> norm = warpsmith.nn.LayerNorm(8)
        >>> norm(torch.ones(2, 8)).shape
        torch.Size([2, 8])
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

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``x`` over its last ``len(normalized_shape)`` dimensions."""
        weight, bias = self.flat_parameter("weight"), self.flat_parameter("bias")
        return layer_norm(self.flat("x", x), weight, bias, self.eps).view(x.shape)
