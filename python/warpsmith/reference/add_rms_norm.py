import torch
from torch import Tensor

from warpsmith.reference.rms_norm import rms_norm


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``(y, residual_out)``: the sum in the dtype of ``residual``, and its rms_norm in that of ``x``."""
    wide = torch.promote_types(residual.dtype, torch.float32)
    residual_out = (x.to(wide) + residual.to(wide)).to(residual.dtype)
    return rms_norm(residual_out.to(wide), weight, eps, weight_offset).to(x.dtype), residual_out
