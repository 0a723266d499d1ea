import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None, weight_offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)`` over the last dimension, in float32 or wider."""
    wide = x if x.dtype == torch.float64 else x.float()
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.to(wide.dtype) + weight_offset)
    return y.to(x.dtype)
