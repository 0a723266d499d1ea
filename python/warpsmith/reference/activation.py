"""The activations in plain torch operations."""

import torch
from torch import Tensor

from warpsmith.reference.dropout import dropout


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``gate * sigmoid(gate) * up`` in float32 or wider; without ``up`` the last dimension is ``[gate, up]``."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """``gelu(gate) * up`` in float32 or wider; without ``up`` the last dimension is ``[gate, up]``."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (torch.nn.functional.gelu(gate.to(wide), approximate=approximate) * up.to(wide)).to(gate.dtype)


def reglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``relu(gate) * up``; without ``up`` the last dimension is ``[gate, up]``."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (torch.relu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(x + bias)`` in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.gelu(x.to(wide) + bias.to(wide), approximate=approximate).to(x.dtype)


def bias_silu(x: Tensor, bias: Tensor) -> Tensor:
    """``silu(x + bias)`` in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.silu(x.to(wide) + bias.to(wide)).to(x.dtype)


def bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    """``relu(x + bias)`` in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.relu(x.to(wide) + bias.to(wide)).to(x.dtype)


def relu_squared(x: Tensor) -> Tensor:
    """``relu(x)^2`` in float32 or wider."""
    return torch.relu(x.to(torch.promote_types(x.dtype, torch.float32))).square().to(x.dtype)


def dropout_add(x: Tensor, residual: Tensor, p: float, training: bool = True, *, seed: Tensor) -> Tensor:
    """``residual + dropout(x)`` in float32 or wider, with the package's mask for ``seed``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    dropped = dropout(x.to(wide), seed, p) if training and p > 0 else x.to(wide)
    return (residual.to(wide) + dropped).to(x.dtype)
