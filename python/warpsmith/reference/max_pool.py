"""Max pooling in plain torch operations."""

import torch.nn.functional as F
from torch import Tensor


def max_pool2d(
    x: Tensor,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """torch's own, on a tensor in NCHW: the definition."""
    return F.max_pool2d(x.contiguous(), kernel_size, stride, padding, dilation, ceil_mode)
