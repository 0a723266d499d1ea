"""Modules of the norms: alone, after a residual addition, and after dropout and a residual addition."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from warpsmith._core import checks
from warpsmith._core.dropout import check_p
from warpsmith.ops.norm import (
    add_layer_norm,
    add_rms_norm,
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    layer_norm,
    rms_norm,
)


def flat(x: Tensor, owner: str, name: str, shape: tuple[int, ...], checked_later: bool) -> Tensor:
    """``x`` with the dimensions of ``shape`` as one. ``checked_later``: an op compares the length of a single one with
    the weight's."""
    if len(shape) == 1 and checked_later:
        return x
    if tuple(x.shape[-len(shape) :]) != shape:
        expected = f"trailing shape {checks.shape_text(shape)}"
        checks.refuse(owner, name, expected, checks.shape_text(x.shape))
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
for _op in (add_layer_norm, add_rms_norm, dropout_add_layer_norm, dropout_add_rms_norm, layer_norm, rms_norm):
    torch.fx.wrap(_op.__name__)
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
            checks.refuse_non_int64(owner, "normalized_shape", size, "one or more sizes >= 1")
        shape = tuple(map(operator.index, sizes))  # NumPy's integers too
        if not shape or any(size < 1 for size in shape):
            checks.refuse(owner, "normalized_shape", "one or more sizes >= 1", str(shape))
        checks.refuse_non_eps(owner, eps, otherwise=bias is None)
        checks.refuse_non_number(owner, "weight_offset", weight_offset)
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
        checks.finite(owner, "weight_offset", weight_offset, torch.float64 if weight is None else weight.dtype)
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


class AddRMSNorm(RMSNormBase):
    """A residual sum and its norm: :func:`warpsmith.add_rms_norm` with its weight.

    Takes the place of ``residual = residual + x`` and of the ``torch.nn.RMSNorm`` that follows. ``state_dict``
    and constructor are that module's, to which ``weight_offset`` is added.

    Args: those of :class:`RMSNorm`.

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


class AddLayerNorm(LayerNormBase):
    """A residual sum and its norm: :func:`warpsmith.add_layer_norm` with its weight and bias.

    Takes the place of ``residual = residual + x`` and of the ``torch.nn.LayerNorm`` that follows.
    ``state_dict`` and constructor are that module's.

    Args: those of :class:`LayerNorm`.

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


class DropoutAddRMSNorm(Norm):
    """Dropout, a residual sum and its norm: :func:`warpsmith.dropout_add_rms_norm` with its weight.

    Takes the place of ``residual = residual + dropout(x)`` and of the ``torch.nn.RMSNorm`` that follows.
    ``state_dict`` and constructor are that module's, to which ``p`` as the second argument and
    ``weight_offset`` are added.

    Args: those of :class:`RMSNorm`, and ``p``, the probability of a drop in training mode, in [0, 1].

    Shapes: x and residual ``(..., *normalized_shape)``; returns ``(y, residual_out)``, both of that shape. Dtypes,
    determinism and errors: as :func:`warpsmith.dropout_add_rms_norm`.

    Example:
        >>> import torch, warpsmith
        >>> norm = warpsmith.nn.DropoutAddRMSNorm(8, p=0.1)
        >>> x, residual = torch.ones(2, 8), torch.zeros(2, 8)
        >>> y, residual = norm(x, residual)
        >>> y.shape, residual.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        p: float = 0.5,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
    ) -> None:
        check_p(type(self).__name__, p)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, weight_offset=weight_offset, p=p)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Drops from ``x`` in training mode, adds ``residual`` and normalises the sum."""
        options = (self.p, self.eps, self.training)
        weight = self.flat_parameter("weight", residual)
        return self.with_residual(dropout_add_rms_norm, x, residual, weight, *options, weight_offset=self.weight_offset)


class DropoutAddLayerNorm(Norm):
    """Dropout, a residual sum and its norm: :func:`warpsmith.dropout_add_layer_norm` with its weight and
    bias.

    Takes the place of ``residual = residual + dropout(x)`` and of the ``torch.nn.LayerNorm`` that follows.
    ``state_dict`` and constructor are that module's, to which ``p`` as the second argument is added.

    Args: those of :class:`LayerNorm`, and ``p``, the probability of a drop in training mode, in [0, 1].

    Shapes: x and residual ``(..., *normalized_shape)``; returns ``(y, residual_out)``, both of that shape. Dtypes,
    determinism and errors: as :func:`warpsmith.dropout_add_layer_norm`.

    Example:
        >>> import torch, warpsmith
        >>> norm = warpsmith.nn.DropoutAddLayerNorm(8, p=0.1)
        >>> x, residual = torch.ones(2, 8), torch.zeros(2, 8)
        >>> y, residual = norm(x, residual)
        >>> y.shape, residual.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    eps: float

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        p: float = 0.5,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_p(type(self).__name__, p)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, bias=bias, p=p)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Drops from ``x`` in training mode, adds ``residual`` and normalises the sum."""
        parameters = self.flat_parameter("weight", residual), self.flat_parameter("bias", residual)
        return self.with_residual(dropout_add_layer_norm, x, residual, *parameters, self.p, self.eps, self.training)
