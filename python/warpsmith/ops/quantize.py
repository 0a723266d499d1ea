"""Casts to 8-bit floats with scales, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith.ops._quantize import (
    DEQUANTIZE,
    FLOAT8,
    FLOATS,
    QUANTIZE,
    SCALINGS,
    TRANSPOSES,
    Fp8Tensor,
    call,
    check_dtype,
    dequantize,
    number_of,
    quantize,
)


def quantize_fp8(
    x: Tensor,
    scaling: str = "row",
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scale: Tensor | None = None,
    transpose: str = "no",
    power_of_two: bool = True,
) -> Fp8Tensor:
    r"""A tensor as 8-bit floats and float32 scales, the transpose beside it if asked for.

    .. math:: \text{data} = \operatorname{round}(x / \text{scale}), \qquad
        \text{scale} = 2^k \text{ with the least } k \text{ such that } \max |x| / 2^k \le \max(\text{dtype})

    The maximum is that of the finite elements that share a scale. Rounding is to nearest even, bit for bit that of
    ``(x.float() / scale).to(dtype)``. Elements that are not finite are NaN in float8_e4m3fn; in float8_e5m2 infinities
    stay infinite. A given scale may be too small: what lies beyond the range becomes the largest value. Both are
    counted, without a wait of the host.

    Args:
        x: (..., K), float32, float16 or bfloat16, any strides; seen as rows of K columns.
        scaling: what has a scale of its own. "row": ``x.shape[:-1] + (1,)``; "tensor": ``()``; "block": each 128
            columns of a row, ``x.shape[:-1] + (ceil(K / 128),)``; "block2d": each square of 128 rows by 128 columns,
            ``(ceil(rows / 128), ceil(K / 128))``.
        dtype: torch.float8_e4m3fn (largest value 448) or torch.float8_e5m2 (57344).
        scale: float32, positive and finite, instead of a computed one (delayed scaling). For "tensor", and for "row"
            with one kind of bytes: of ``data``, or with ``transpose="only"`` of ``transposed``, (K, 1).
        transpose: "no", "also" or "only" makes ``transposed``, (K, rows), by scales of its own rows, which are the
            columns of x; "tensor" and "block2d" have one set of scales.
        power_of_two: False: the least float32 scale instead of the least power of two.

    Returns:
        :class:`warpsmith.Fp8Tensor`: ``(data, scale, transposed, transposed_scale, counts)``.

    A scale is at least 2^-126, and 1 where there are only zeros: smaller values lose bits, none becomes NaN.

    Not differentiable: the results require no gradient. Deterministic: the same bits on the CPU and on CUDA. Moves one
    byte and the bytes of an element for each of x; with "tensor" (no ``scale``), and with "row" beside a transpose, x
    is read twice; each kind of bytes is one more.

    Raises:
        ValueError: a shape, dtype, device or word that does not fit. Nothing was written.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022; blocks as in the DeepSeek-V3 report, 2024.

    Example:
        >>> import torch, warpsmith
        >>> t = warpsmith.quantize_fp8(torch.tensor([[8.0, 1000.0], [2.0, 3.1]]))
        >>> t.data.float()
        tensor([[  2., 256.],
                [256., 384.]])
        >>> warpsmith.dequantize_fp8(t)
        tensor([[   8., 1024.],
                [   2.,    3.]])
    """
    number = number_of(QUANTIZE, "scaling", scaling, SCALINGS)
    how = number_of(QUANTIZE, "transpose", transpose, TRANSPOSES)
    check_dtype(QUANTIZE, "dtype", dtype, FLOAT8)
    checks.flags(QUANTIZE, power_of_two=power_of_two)
    data, made, transposed, transposed_scale, counts, _ = call(
        quantize, x, scale, number, how, dtype, bool(power_of_two), False
    )
    of_data = made if scale is None else scale
    of_transposed = of_data if scaling == "tensor" or scale is not None else transposed_scale
    return Fp8Tensor(
        data if transpose != "only" else None,
        of_data if transpose != "only" else None,
        transposed if transpose != "no" else None,
        of_transposed if transpose != "no" else None,
        counts,
    )


def dequantize_fp8(t: Fp8Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    r"""The values of 8-bit floats.

    .. math:: y = \text{data} \cdot \text{scale}

    Args:
        t: what :func:`quantize_fp8` returned, or any such tuple. Without ``data`` the values are those of
            ``transposed``, (K, rows). The shape of the scale says what one scale is for.
        dtype: float32, float16 or bfloat16; the product is rounded once.

    Not differentiable. Deterministic. Moves one byte and the bytes of an element for each of ``data``.

    Raises:
        ValueError: a shape, dtype or device that does not fit.

    Source: as :func:`quantize_fp8`.

    Example:
        >>> import torch, warpsmith
        >>> warpsmith.dequantize_fp8(warpsmith.quantize_fp8(torch.tensor([[3.0, 100.0]])), torch.bfloat16)
        tensor([[ 3., 96.]], dtype=torch.bfloat16)
    """
    if not isinstance(t, Fp8Tensor):
        checks.refuse_type(DEQUANTIZE, "t", "an Fp8Tensor", t)
    check_dtype(DEQUANTIZE, "dtype", dtype, FLOATS)
    data, scale = (t.transposed, t.transposed_scale) if t.data is None else (t.data, t.scale)
    return call(dequantize, data, scale, dtype)
