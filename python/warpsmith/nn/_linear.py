from __future__ import annotations

import torch
from torch import Tensor, nn

from warpsmith._core import checks
from warpsmith.ops._linear import activation_number
from warpsmith.ops.linear import gated_linear, linear, mlp

for _name in ("gated_linear", "linear", "mlp"):
    torch.fx.wrap(_name)  # torch.fx.symbolic_trace keeps the call whole


class Linear(nn.Linear):
    """A linear layer with an activation and a residual sum: :func:`warpsmith.linear` with its parameters.

    Constructor and ``state_dict`` are those of ``torch.nn.Linear``, whose place it takes.

    Args:
        in_features: K, of the input.
        out_features: N, of the output.
        bias: whether there is a ``bias`` of N elements.
        device, dtype: of weight and bias.
        activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu".
        fuse_main_grad: where you have set ``weight.main_grad``, a float32 tensor of the weight's shape, the backward
            adds the weight's gradient there, inside the product; ``weight.grad`` becomes zeros. Nobody but you sums it
            over ranks.

    ``forward(x, residual=None)`` takes x ``(..., K)`` and adds a residual ``(..., N)``. Dtypes, determinism and errors:
    as :func:`warpsmith.linear`; under autocast all are cast.

    Example:
        >>> import torch, warpsmith
        >>> layer = warpsmith.nn.Linear(8, 24, activation="silu")
        >>> layer(torch.ones(2, 8)).shape
        torch.Size([2, 24])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        fuse_main_grad: bool = False,
    ) -> None:
        checks.sizes("Linear", in_features=in_features, out_features=out_features)
        activation_number("Linear", activation, none_allowed=True)
        checks.flags("Linear", fuse_main_grad=fuse_main_grad)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation
        self.fuse_main_grad = fuse_main_grad

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """``activation(input @ weight^T + bias) + residual``."""
        main_grad = getattr(self.weight, "main_grad", None) if self.fuse_main_grad else None
        return linear(input, self.weight, self.bias, self.activation, residual=residual, main_grad=main_grad)

    def extra_repr(self) -> str:
        main_grad = ", fuse_main_grad=True" if self.fuse_main_grad else ""
        return f"{super().extra_repr()}, activation={self.activation!r}{main_grad}"


class MLP(nn.Module):
    """The feed-forward layer of GPT-2: ``down_proj(activation(up_proj(x)))`` by :func:`warpsmith.mlp`.

    Its ``state_dict`` has the keys of two ``torch.nn.Linear``: ``up_proj`` and ``down_proj``.

    Args:
        hidden_size: features of the input and the output.
        intermediate_size: features in between.
        bias: whether the two linear layers have one.
        device, dtype: of the parameters.
        activation: "relu", "gelu" (exact), "gelu_tanh" or "silu".

    Shapes: x ``(..., hidden_size)`` to the same. Dtypes, determinism and errors: as :func:`warpsmith.mlp`; under
    autocast all are cast. Hooks of the two layers are not called: their parameters alone are used.

    Example:
        >>> import torch, warpsmith
        >>> layer = warpsmith.nn.MLP(8, 32)
        >>> layer(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "gelu_tanh",
    ) -> None:
        super().__init__()
        checks.sizes("MLP", hidden_size=hidden_size, intermediate_size=intermediate_size)
        activation_number("MLP", activation)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias, device=device, dtype=dtype)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for ``x``."""
        up, down = self.up_proj, self.down_proj
        return mlp(x, up.weight, up.bias, down.weight, down.bias, self.activation)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class GatedMLP(nn.Module):
    """The feed-forward layer of Llama and Gemma: ``down_proj(activation(gate_proj(x)) * up_proj(x))`` by
    :func:`warpsmith.gated_linear` and :func:`warpsmith.linear`.

    Its ``state_dict`` has the keys of transformers' ``LlamaMLP`` and of :class:`warpsmith.nn.SwiGLUMLP`: ``gate_proj``,
    ``up_proj`` and ``down_proj``. Beside ``SwiGLUMLP`` it has every activation, adds the two parts of the gradient of x
    inside a product, and takes a residual; it does not write gradients over the projections.

    Args:
        hidden_size: features of the input and the output.
        intermediate_size: features in between.
        bias: whether the three linear layers have one.
        device, dtype: of the parameters.
        activation: "silu", "gelu" (exact), "gelu_tanh" or "relu".

    ``forward(x, residual=None)``: x ``(..., hidden_size)`` to the same, plus a residual of that shape. Dtypes,
    determinism and errors: as :func:`warpsmith.gated_linear`; under autocast all are cast. Hooks of the three layers
    are not called: their parameters alone are used.

    Example:
        >>> import torch, warpsmith
        >>> layer = warpsmith.nn.GatedMLP(8, 24, activation="gelu_tanh")
        >>> layer(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        checks.sizes("GatedMLP", hidden_size=hidden_size, intermediate_size=intermediate_size)
        activation_number("GatedMLP", activation)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias, device=device, dtype=dtype)
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The layer's output for ``x``, plus ``residual``."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        hidden = gated_linear(x, gate.weight, up.weight, gate.bias, up.bias, self.activation)
        return linear(hidden, down.weight, down.bias, residual=residual)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
