import torch
from torch import Tensor


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(x + bias)`` in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.gelu(x.to(wide) + bias.to(wide), approximate=approximate).to(x.dtype)
