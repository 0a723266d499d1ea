"""Images on their way into a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from warpsmith.ops._image import NAME, normalize, three
from warpsmith.ops._quantize import FLOATS, call, check_dtype


def normalize_image(
    x: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    flip: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    r"""Bytes of images as normalised numbers, some samples mirrored.

    .. math:: y_{n,c,h,w} = \frac{x_{n,h,v,c} / 255 - \text{mean}_c}{\text{std}_c}, \qquad
        v = W - 1 - w \text{ where } \text{flip}_n, \text{ else } w

    Args:
        x: shape (N, H, W, 3), uint8, as decoders give it. What is not contiguous is copied once.
        mean, std: three numbers each, as torchvision's ``Normalize`` takes them: of values from 0 to 1.
        flip: shape (N,), bool: which samples are mirrored left to right. None: no one.
        dtype: of the result: float32, float16 or bfloat16. It is computed in float32 and rounded once.

    Returns:
        A ``channels_last`` tensor of shape (N, 3, H, W).

    Not differentiable. Deterministic. Moves 1 byte and those of an element of the result for each of ``x``.

    Raises:
        ValueError: a shape, dtype, device or number that does not fit, a ``std`` that is not positive.

    Source: the arithmetic is torchvision's ``ToTensor``, ``Normalize`` and ``RandomHorizontalFlip``.

    Example:
        >>> import torch, warpsmith
        >>> x = torch.tensor([[[[0, 51, 255], [255, 204, 0]]]], dtype=torch.uint8)
        >>> y = warpsmith.normalize_image(x, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), flip=torch.tensor([True]))
        >>> y[0, :, 0].T
        tensor([[ 1.0000,  0.6001, -1.0000],
                [-1.0000, -0.6001,  1.0000]], dtype=torch.float16)
    """
    means, stds = three("mean", mean), three("std", std)
    check_dtype(NAME, "dtype", dtype, FLOATS)
    found: Tensor = call(normalize, x, means, stds, flip, dtype)
    return found
