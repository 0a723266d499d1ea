from __future__ import annotations

import torch
from torch import Tensor

from warpsmith.nn._norm import LayerNormBase
from warpsmith.ops.layer_norm import layer_norm

torch.fx.wrap("layer_norm")  # torch.fx.symbolic_trace keeps the call whole


class LayerNorm(LayerNormBase, torch.nn.LayerNorm):
    """Layer normalisation: :func:`warpsmith.layer_norm` with its weight and bias.

    A ``torch.nn.LayerNorm``, with its constructor and ``state_dict``.

    Args:
        normalized_shape: the trailing dimensions to normalise over, an int for the last one alone.
        eps: added to the variance.
        elementwise_affine: whether there is a ``weight`` of ``normalized_shape``.
        bias: whether there is a ``bias`` beside it.
        device, dtype: of weight and bias. float32 beside 16-bit activations is fine and gives the activation's dtype.

    Shapes: input ``(..., *normalized_shape)`` to the same. Dtypes, determinism and errors: as
    :func:`warpsmith.layer_norm`; 16-bit parameters beside a wider ``input`` are cast.

    Example:
        >>> import torch, warpsmith
        >>> norm = warpsmith.nn.LayerNorm(8)
        >>> norm(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalises ``input`` over its last ``len(normalized_shape)`` dimensions."""
        weight, bias = self.flat_parameter("weight", input), self.flat_parameter("bias", input)
        return self.shaped(layer_norm(self.flat("input", input), weight, bias, self.eps), input)
