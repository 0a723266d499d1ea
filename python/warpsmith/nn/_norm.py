"""What the modules of the norm family share: the shape, weight and bias."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from warpsmith.ops import _check


def flat(x: Tensor, owner: str, name: str, shape: tuple[int, ...], checked_later: bool) -> Tensor:
    """``x`` with the dimensions of ``shape`` as one. ``checked_later``: an op compares the length of a single one with
    the weight's."""
    if len(shape) == 1 and checked_later:
        return x
    if tuple(x.shape[-len(shape) :]) != shape:
        expected = f"trailing shape {_check.shape_text(shape)}"
        _check.refuse(owner, name, expected, _check.shape_text(x.shape))
    return x if len(shape) == 1 else x.flatten(-len(shape))


def flat_parameter(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """A weight or bias of one dimension. A 16-bit one beside a wider ``x`` is cast, as torch's RMS norm does."""
    if parameter is None:
        return None
    if parameter.dtype is not x.dtype and x.dtype in _WIDE and parameter.dtype in _HALVES:
        parameter = parameter.to(x.dtype)
    return parameter if parameter.dim() == 1 else parameter.flatten()


_WIDE, _HALVES = (torch.float32, torch.float64), (torch.float16, torch.bfloat16)
# torch.fx.symbolic_trace keeps these calls whole: what they ask of a tensor no symbol can answer.
torch.fx.wrap("flat")
torch.fx.wrap("flat_parameter")


class Norm(nn.Module):
    """Holds a weight, perhaps a bias, of ``normalized_shape``, and flattens those dimensions for the ops."""

    normalized_shape: tuple[int, ...]
    eps: float | None
    elementwise_affine: bool
    weight_offset: float
    p: float  # of the modules with dropout

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
        p: float | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not that of torch's norm, which a subclass may be as well
        several = isinstance(normalized_shape, Iterable) and not isinstance(normalized_shape, Tensor)
        sizes: Iterable[Any] = normalized_shape if several else (normalized_shape,)  # type: ignore[assignment]
        owner = type(self).__name__
        for size in sizes:
            _check.refuse_non_int64(owner, "normalized_shape", size, "one or more sizes >= 1")
        shape = tuple(map(operator.index, sizes))  # NumPy's integers too
        if not shape or any(size < 1 for size in shape):
            _check.refuse(owner, "normalized_shape", "one or more sizes >= 1", str(shape))
        _check.refuse_non_eps(owner, eps, otherwise=bias is None)
        _check.refuse_non_number(owner, "weight_offset", weight_offset)
        self.normalized_shape = shape
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.weight_offset = weight_offset
        if p is not None:
            self.p = p
        names = {"weight": elementwise_affine}
        if bias is not None:
            names["bias"] = elementwise_affine and bias
        for name, wanted in names.items():
            parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None
            self.register_parameter(name, parameter)
        weight = self._parameters["weight"]
        _check.finite(owner, "weight_offset", weight_offset, torch.float64 if weight is None else weight.dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight so that the layer's scale is one, and the bias to zero."""
        for name, parameter in self.named_parameters(recurse=False):
            nn.init.constant_(parameter, 0.0 if name == "bias" else 1.0 - self.weight_offset)

    def flat(self, name: str, x: Tensor) -> Tensor:
        """``x`` with the normalised dimensions as one."""
        return flat(x, type(self).__name__, name, self.normalized_shape, self.weight is not None)

    def flat_parameter(self, name: str, x: Tensor) -> Tensor | None:
        return flat_parameter(getattr(self, name), x)

    def shaped(self, y: Tensor, x: Tensor) -> Tensor:
        """An op's output in the shape of ``x``, which it has where one dimension is normalised: a view costs 2.5 us."""
        return y if len(self.normalized_shape) == 1 else y.view(x.shape)

    def with_residual(
        self, op: Callable[..., tuple[Tensor, Tensor]], x: Tensor, residual: Tensor, *others: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """``op(x, residual, *others, **options)``, its outputs in the shape of ``x``."""
        y, residual_out = op(self.flat("x", x), self.flat("residual", residual), *others, **options)
        return self.shaped(y, x), self.shaped(residual_out, x)

    def extra_repr(self) -> str:
        text = f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        text += f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return text + (f", p={self.p}" if hasattr(self, "p") else "")


class LayerNormBase(Norm):
    """A norm with the constructor of ``torch.nn.LayerNorm``."""

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


class RMSNormBase(Norm):
    """A norm with the constructor of ``torch.nn.RMSNorm``, and ``weight_offset``."""

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
