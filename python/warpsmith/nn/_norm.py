"""What the modules of the norm family share: the shape, weight and bias."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from warpsmith.ops import _check


class Norm(nn.Module):
    """Holds a weight, perhaps a bias, of ``normalized_shape``, and flattens those dimensions for the ops."""

    normalized_shape: tuple[int, ...]
    eps: float | None
    elementwise_affine: bool
    weight_offset: float

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None,
        elementwise_affine: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        *,
        bias: bool | None = None,
        weight_offset: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = normalized_shape if isinstance(normalized_shape, Iterable) else (normalized_shape,)
        shape = tuple(map(operator.index, sizes))  # NumPy's integers too
        if not shape or any(size < 1 for size in shape):
            _check.refuse(type(self).__name__, "normalized_shape", "one or more sizes >= 1", str(shape))
        self.normalized_shape = shape
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.weight_offset = weight_offset
        names = {"weight": elementwise_affine}
        if bias is not None:
            names["bias"] = elementwise_affine and bias
        for name, wanted in names.items():
            parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight so that the layer's scale is one, and the bias to zero."""
        for name, parameter in self.named_parameters(recurse=False):
            nn.init.constant_(parameter, 0.0 if name == "bias" else 1.0 - self.weight_offset)

    def flat(self, name: str, x: Tensor) -> Tensor:
        """``x`` with the normalised dimensions as one."""
        shape = self.normalized_shape
        if len(shape) == 1 and self.weight is not None:
            return x  # whose length the op compares with the weight's
        if tuple(x.shape[-len(shape) :]) != shape:
            expected = f"trailing shape {_check.shape_text(shape)}"
            _check.refuse(type(self).__name__, name, expected, _check.shape_text(x.shape))
        return x if len(shape) == 1 else x.flatten(-len(shape))

    def flat_parameter(self, name: str) -> Tensor | None:
        parameter = getattr(self, name)
        return parameter if parameter is None or parameter.dim() == 1 else parameter.flatten()

    def eps_for(self, x: Tensor) -> float:
        """``eps``, or the machine epsilon of the arithmetic where it is None."""
        if self.eps is not None:
            return self.eps
        return torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps

    def extra_repr(self) -> str:
        text = f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        return text + (f", weight_offset={self.weight_offset}" if self.weight_offset else "")
