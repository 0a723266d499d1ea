import torch
from torch import Tensor


def bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    """``relu(x + bias)`` in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.relu(x.to(wide) + bias.to(wide)).to(x.dtype)
