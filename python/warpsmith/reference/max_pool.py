"""Max pooling in plain torch operations."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def max_pool2d(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """torch's own, on a tensor in NCHW: the definition."""
    return F.max_pool2d(x.contiguous(), kernel_size, stride, padding, dilation, ceil_mode)
