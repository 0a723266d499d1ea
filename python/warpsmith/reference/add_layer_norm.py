import torch
from torch import Tensor

from warpsmith.reference.layer_norm import layer_norm


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """``(y, residual_out)``: the sum in the dtype of ``residual``, and its layer_norm in that of ``x``."""
    wide = torch.promote_types(residual.dtype, torch.float32)
    residual_out = (x.to(wide) + residual.to(wide)).to(residual.dtype)
    return layer_norm(residual_out.to(wide), weight, bias, eps).to(x.dtype), residual_out
