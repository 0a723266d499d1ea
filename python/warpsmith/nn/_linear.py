"""Linear layers, feed-forward layers, and a norm with the layers that read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from warpsmith._core import checks
from warpsmith._core.modules import is_untouched
from warpsmith.nn._norm import RMSNorm
from warpsmith.ops import _norm_linears
from warpsmith.ops._linear import activated, activation_number, gated
from warpsmith.ops._norm import default_eps
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
            adds the weight's gradient there, inside the product; ``weight.grad`` becomes zeros. Over ranks: as
            :func:`warpsmith.linear`.

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
        weight = self.weight
        main_grad = getattr(weight, "main_grad", None) if self.fuse_main_grad else None
        return linear(input, weight, self.bias, self.activation, residual=residual, main_grad=main_grad)

    def extra_repr(self) -> str:
        main_grad = ", fuse_main_grad=True" if self.fuse_main_grad else ""
        return f"{super().extra_repr()}, activation={self.activation!r}{main_grad}"


def is_product(layer: nn.Module) -> bool:
    """Whether a module is a linear layer and no more: its parameters may be used in the place of a call."""
    if is_untouched(layer, Linear):
        return layer.activation is None and not layer.fuse_main_grad
    return is_untouched(layer, nn.Linear)


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
    autocast all are cast. Where a layer has hooks, or was replaced (LoRA), both are called.

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
        if not (is_product(up) and is_product(down)):
            return down(activated(up(x), self.activation))
        return mlp(x, up.weight, up.bias, down.weight, down.bias, self.activation)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class GatedMLP(nn.Module):
    """The feed-forward layer of Llama and Gemma: ``down_proj(activation(gate_proj(x)) * up_proj(x))`` by
    :func:`warpsmith.gated_linear` and :func:`warpsmith.linear`.

    Its ``state_dict`` has the keys of transformers' ``LlamaMLP``: ``gate_proj``, ``up_proj`` and ``down_proj``.

    Args:
        hidden_size: features of the input and the output.
        intermediate_size: features in between.
        bias: whether the three linear layers have one.
        device, dtype: of the parameters.
        activation: "silu", "gelu" (exact), "gelu_tanh" or "relu".
        inplace_backward: lets the backward write the gradients of the two projections over their values, which saves
            two tensors of ``intermediate_size`` a token; the parts of the gradient of x are then added by autograd. A
            second backward over the same graph is refused.

    ``forward(x, residual=None)``: x ``(..., hidden_size)`` to the same, plus a residual of that shape. Dtypes,
    determinism and errors: as :func:`warpsmith.gated_linear`; under autocast all are cast. Where a layer has hooks, or
    was replaced (LoRA), it is called.

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
        inplace_backward: bool = False,
    ) -> None:
        super().__init__()
        checks.sizes("GatedMLP", hidden_size=hidden_size, intermediate_size=intermediate_size)
        activation_number("GatedMLP", activation)
        checks.flags("GatedMLP", inplace_backward=inplace_backward)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias, device=device, dtype=dtype)
        self.activation = activation
        self.inplace_backward = inplace_backward

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The layer's output for ``x``, plus ``residual``."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        apart = self.inplace_backward or not (is_product(gate) and is_product(up))
        if apart:
            hidden = gated(gate(x), up(x), self.activation, inplace_backward=self.inplace_backward)
        else:
            hidden = gated_linear(x, gate.weight, up.weight, gate.bias, up.bias, self.activation)
        if is_product(down):
            return linear(hidden, down.weight, down.bias, residual=residual)
        y = down(hidden)
        return y if residual is None else y + residual

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, inplace_backward={self.inplace_backward}"


class NormLinear(nn.Module):
    """An RMS norm and the linear layers that read it: ``linear(norm(x))``. Of the norm only x and the reciprocal root
    mean square of each row are kept for the backward, which makes the norm's output again; the layers' gradients are
    summed inside their products.

    Its ``state_dict`` has the keys of ``norm``, a :class:`warpsmith.nn.RMSNorm`, and of ``linears``, a
    ``torch.nn.ModuleList`` of ``torch.nn.Linear``.

    Args:
        in_features: of x.
        out_features: of the layer, or of each of several layers.
        bias: whether the layers have one.
        device, dtype: of the parameters.
        eps, weight_offset: of the norm.

    ``forward(x, residual=None)``: x ``(..., in_features)`` to ``(..., out_features)``; of several layers a tuple. With
    a residual of x's shape: these and then ``x + residual``, the sum that is normalised. Under autocast, tracing,
    functorch, without a gradient, with mixed dtypes, and where a norm or layer has hooks or was replaced, it is made of
    its modules. Dtypes, determinism and errors: as :func:`warpsmith.add_rms_norm` and ``torch.nn.Linear``.

    Example:
        >>> import torch, warpsmith
        >>> layer = warpsmith.nn.NormLinear(8, (8, 2, 2))
        >>> [y.shape[-1] for y in layer(torch.ones(3, 8))]
        [8, 2, 2]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float | None = None,
        weight_offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.several = isinstance(out_features, Sequence) and not isinstance(out_features, str)
        sizes: Sequence[int] = out_features if self.several else (out_features,)  # type: ignore[assignment]
        if not sizes:
            checks.refuse("NormLinear", "out_features", "one or more sizes >= 1", "none")
        for size in sizes:
            checks.sizes("NormLinear", 1, in_features=in_features, out_features=size)
        checks.refuse_non_eps("NormLinear", eps, otherwise=True)
        checks.refuse_non_number("NormLinear", "weight_offset", weight_offset)
        checks.finite("NormLinear", "weight_offset", weight_offset, dtype or torch.get_default_dtype())
        self.norm = RMSNorm(in_features, eps, device=device, dtype=dtype, weight_offset=weight_offset)
        self.linears = nn.ModuleList(nn.Linear(in_features, n, bias=bias, device=device, dtype=dtype) for n in sizes)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        """The layers' outputs, and behind them the sum that was normalised if there is a ``residual``."""
        norm, linears = self.norm, cast(list[nn.Linear], list(self.linears))
        tensors = [x, norm.weight, *(linear.weight for linear in linears)]
        tensors += [t for t in (residual, *(linear.bias for linear in linears)) if t is not None]
        plain = is_untouched(norm, RMSNorm) and all(map(is_product, linears))
        if plain and _norm_linears.fits(*tensors) and (residual is None or residual.shape == x.shape):
            weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
            eps = default_eps(x) if norm.eps is None else norm.eps
            s, *ys = _norm_linears.norm_linears(x, residual, norm.weight, eps, norm.weight_offset, weights, biases)
        else:
            s = x if residual is None else x + residual
            y = norm(s)
            ys = [linear(y) for linear in linears]
        outputs = (*ys, s) if residual is not None else tuple(ys)
        return outputs if self.several or residual is not None else outputs[0]
