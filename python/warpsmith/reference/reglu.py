import torch
from torch import Tensor


def reglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``relu(gate) * up``; without ``up`` the last dimension is ``[gate, up]``."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (torch.relu(gate.to(wide)) * up.to(wide)).to(gate.dtype)
