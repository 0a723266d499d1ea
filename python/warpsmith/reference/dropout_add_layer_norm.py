import torch
from torch import Tensor

from warpsmith.reference.dropout import dropout
from warpsmith.reference.layer_norm import layer_norm


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    p: float = 0.5,
    eps: float = 1e-5,
    training: bool = True,
    *,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """``(y, residual_out)``: ``dropout(x) + residual`` in ``residual``'s dtype, its layer_norm in that of ``x``."""
    wide = torch.promote_types(residual.dtype, torch.float32)
    kept = dropout(x.to(wide), seed, p) if training else x.to(wide)
    residual_out = (kept + residual.to(wide)).to(residual.dtype)
    return layer_norm(residual_out.to(wide), weight, bias, eps).to(x.dtype), residual_out
