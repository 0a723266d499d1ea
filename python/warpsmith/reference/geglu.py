import torch
from torch import Tensor


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """``gelu(gate) * up`` in float32 or wider; without ``up`` the last dimension is ``[gate, up]``."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (torch.nn.functional.gelu(gate.to(wide), approximate=approximate) * up.to(wide)).to(gate.dtype)
