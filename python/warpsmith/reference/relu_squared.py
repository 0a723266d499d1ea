import torch
from torch import Tensor


def relu_squared(x: Tensor) -> Tensor:
    """``relu(x)^2`` in float32 or wider."""
    return torch.relu(x.to(torch.promote_types(x.dtype, torch.float32))).square().to(x.dtype)
