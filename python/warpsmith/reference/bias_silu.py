import torch
from torch import Tensor


def bias_silu(x: Tensor, bias: Tensor) -> Tensor:
    """``silu(x + bias)`` in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.silu(x.to(wide) + bias.to(wide)).to(x.dtype)
