import torch
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``gate * sigmoid(gate) * up`` in float32 or wider; without ``up`` the last dimension is ``[gate, up]``."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)
