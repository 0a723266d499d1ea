import torch
from torch import Tensor

from warpsmith.reference.dropout import dropout


def dropout_add(x: Tensor, residual: Tensor, p: float, training: bool = True, *, seed: Tensor) -> Tensor:
    """``residual + dropout(x)`` in float32 or wider, with the package's mask for ``seed``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    dropped = dropout(x.to(wide), seed, p) if training and p > 0 else x.to(wide)
    return (residual.to(wide) + dropped).to(x.dtype)
