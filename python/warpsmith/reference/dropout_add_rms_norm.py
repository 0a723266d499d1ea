import torch
from torch import Tensor

from warpsmith.reference.dropout import dropout
from warpsmith.reference.rms_norm import rms_norm


def dropout_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    p: float = 0.5,
    eps: float | None = None,
    training: bool = True,
    *,
    weight_offset: float = 0.0,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """``(y, residual_out)``: ``dropout(x) + residual`` in the dtype of ``residual``, its rms_norm in that of ``x``."""
    wide = torch.promote_types(residual.dtype, torch.float32)
    kept = dropout(x.to(wide), seed, p) if training else x.to(wide)
    residual_out = (kept + residual.to(wide)).to(residual.dtype)
    return rms_norm(residual_out.to(wide), weight, eps, weight_offset).to(x.dtype), residual_out
