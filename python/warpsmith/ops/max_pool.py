"""Max pooling in NHWC."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from warpsmith._core import checks
from warpsmith.ops._max_pool import MOST_AREA, NAME, check_numbers, check_shape, function
from warpsmith.ops._pixels import warn_of_nchw


def max_pool2d(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    r"""The largest element of each window of an image, as ``torch.nn.functional.max_pool2d``.

    .. math:: y_{n,c,i,j} = \max_{a < k_h,\, b < k_w} x_{n,\, c,\, i s_h - p_h + a,\, j s_w - p_w + b}

    where pixels outside of x count as minus infinity.

    Args:
        x: shape (N, C, H, W) or (C, H, W), float32, float16, bfloat16, or float64 on the CPU. Best in
            ``channels_last``; any other layout is copied into that once.
        kernel_size, stride, padding: a number, or two: of rows, of columns. ``stride`` None: ``kernel_size``. The
            padding is at most half of the kernel's size.
        dilation: other than 1, torch's op runs. So it does for windows of more than 255 pixels and integer dtypes.
        ceil_mode: whether there is a last window that lacks pixels.

    Returns:
        A ``channels_last`` tensor of shape (N, C, H', W') or (C, H', W') and the dtype of ``x``, torch's bit for bit.
        NaN is the largest element. Under autocast nothing is cast.

    Gradient for ``x``, and its gradient in turn. The first of equal elements of a window, row by row, has the gradient,
    and the last NaN, as in torch. The forward keeps one byte for each element of the result, and not ``x``; the second
    derivative is composed of plain torch operations.

    Deterministic: a pixel adds up the windows that cover it in their order, in float32 (float64 for float64). Moves
    ``x``, the result and its bytes once forward, and the gradients and those bytes once backward.

    Raises:
        ValueError: a dtype, shape or number that does not fit; the message names op, argument, expectation and finding.

    Source: Scherer, Müller and Behnke, Evaluation of Pooling Operations in Convolutional Architectures, 2010.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.max_pool2d(torch.arange(8.0).view(1, 2, 4), 2)
        tensor([[[5., 7.]]])
    """
    if not isinstance(x, Tensor):
        checks.refuse_type(NAME, "x", "a tensor", x)
    kernel = checks.counts(NAME, "kernel_size", kernel_size, 1)
    step = kernel if stride is None else checks.counts(NAME, "stride", stride, 1)
    around, apart = checks.counts(NAME, "padding", padding, 0), checks.counts(NAME, "dilation", dilation, 1)
    checks.flags(NAME, ceil_mode=ceil_mode)
    if apart != (1, 1) or kernel[0] * kernel[1] > MOST_AREA or not (x.is_floating_point() or x.is_complex()):
        return F.max_pool2d(x, kernel, step, around, apart, ceil_mode)
    if x.dim() not in (3, 4):
        check_shape(x)
    check_numbers(NAME, kernel, step, around)
    images = x if x.dim() == 4 else x.unsqueeze(0)
    if not torch.compiler.is_compiling():
        warn_of_nchw(NAME, images)
    y: Tensor = function(images, kernel, step, around, ceil_mode, images.shape[2], images.shape[3])
    return y if x.dim() == 4 else y.squeeze(0)
