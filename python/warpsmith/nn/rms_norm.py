from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from warpsmith.ops import _check
from warpsmith.ops.rms_norm import rms_norm


class RMSNorm(nn.Module):
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

    normalized_shape: tuple[int, ...]
    eps: float | None
    elementwise_affine: bool
    weight_offset: float

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
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape or any(size < 1 for size in shape):
            _check.refuse("RMSNorm", "normalized_shape", "one or more sizes >= 1", str(shape))
        self.normalized_shape = shape
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.weight_offset = weight_offset
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight so that the layer's scale is one."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``x`` over its last ``len(normalized_shape)`` dimensions."""
        shape = self.normalized_shape
        if len(shape) == 1:
            return rms_norm(x, self.weight, self.eps, self.weight_offset)
        if tuple(x.shape[-len(shape) :]) != shape:
            _check.refuse("RMSNorm", "x", f"trailing shape {_check.shape_text(shape)}", _check.shape_text(x.shape))
        weight = None if self.weight is None else self.weight.flatten()
        return rms_norm(x.flatten(-len(shape)), weight, self.eps, self.weight_offset).view(x.shape)

    def extra_repr(self) -> str:
        text = f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        return text + (f", weight_offset={self.weight_offset}" if self.weight_offset else "")
