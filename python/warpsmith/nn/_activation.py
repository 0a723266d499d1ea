"""Modules of the activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from warpsmith._core import checks
from warpsmith._core.dropout import check_p
from warpsmith.ops._activation import is_tanh
from warpsmith.ops.activation import bias_gelu, dropout_add

for _op in (bias_gelu, dropout_add):
    torch.fx.wrap(_op.__name__)  # torch.fx.symbolic_trace keeps the call whole


class BiasGELU(nn.Module):
    """A bias and a Gaussian error linear unit: :func:`warpsmith.bias_gelu` with its bias.

    Behind ``torch.nn.Linear(..., bias=False)`` it takes the place of a bias and ``torch.nn.GELU``.

    Args:
        num_features: of the last dimension.
        approximate: "none" or "tanh", as in ``torch.nn.GELU``.
        device, dtype: of the bias, which starts at zero. float32 beside 16-bit activations is fine.

    Shapes: x ``(..., num_features)`` to the same. Dtypes, determinism and errors: as :func:`warpsmith.bias_gelu`.

    Example:
        >>> import torch, warpsmith
        >>> layer = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), warpsmith.nn.BiasGELU(8))
        >>> layer(torch.ones(2, 4)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        num_features: int,
        approximate: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.sizes("BiasGELU", num_features=num_features)
        is_tanh("BiasGELU", approximate)
        self.approximate = approximate
        self.bias = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the bias to zero."""
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``gelu(x + bias)``."""
        return bias_gelu(x, self.bias, self.approximate)

    def extra_repr(self) -> str:
        return f"{self.bias.shape[0]}, approximate={self.approximate!r}"


class DropoutAdd(nn.Module):
    """Dropout and the addition to the residual stream: :func:`warpsmith.dropout_add`, in training mode alone.

    Args:
        p: the probability of dropping an element, 0 to 1.

    Shapes: x and residual of one shape, to the same. Dtypes, determinism and errors: as :func:`warpsmith.dropout_add`.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.nn.DropoutAdd(0.1).eval()(torch.ones(3), torch.ones(3))
        tensor([2., 2., 2.])
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        check_p("DropoutAdd", p)
        self.p = p

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + dropout(x)``."""
        return dropout_add(x, residual, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"
