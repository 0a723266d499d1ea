"""Casts to 8-bit floats and back, in plain PyTorch: what the kernels give, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128


def finite_amax(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The largest finite magnitude along dimensions; 0 where there is none."""
    m = x.float().abs()
    return m.where(m.isfinite(), 0).amax(dim, keepdim=True)


def scale_of(amax: Tensor, dtype: torch.dtype, power_of_two: bool = True) -> Tensor:
    """The least scale of at least 2^-126 with ``amax / scale`` within the dtype's range; 1 where amax is 0."""
    largest = torch.finfo(dtype).max
    if power_of_two:
        fraction, exponent = torch.frexp(amax.double() / largest)  # fraction in [0.5, 1): 1 is 0.5 * 2^1
        scale = torch.ldexp(torch.ones_like(fraction), exponent - (fraction == 0.5).int()).float()
    else:
        scale = amax / torch.full_like(amax, largest)  # by a number CUDA multiplies by the reciprocal
        scale = torch.where(amax / scale > largest, scale.nextafter(torch.full_like(scale, torch.inf)), scale)
    return scale.clamp(min=2.0**-126).where(amax != 0, 1.0)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x / scale`` to nearest even, and how many elements were saturated and how many not finite."""
    x, largest = x.float(), torch.finfo(dtype).max
    q = x / scale
    saturated = x.isfinite() & (q.abs() > largest)
    kept = q.clamp(-largest, largest)
    if dtype == torch.float8_e5m2:
        kept = x.where(x.isinf(), kept)
    nan = q.isnan() | x.isnan() if dtype == torch.float8_e5m2 else q.isnan() | ~x.isfinite()
    return kept.masked_fill(nan, torch.nan).to(dtype), torch.stack([saturated.sum(), (~x.isfinite()).sum()])


def _blocks(x: Tensor, high: int, wide: int) -> Tensor:
    """(rows, columns) as (blocks of rows, high, blocks of columns, wide), filled up with zeros."""
    rows, columns = x.shape
    x = torch.nn.functional.pad(x, (0, -columns % wide, 0, -rows % high))
    return x.view(x.shape[0] // high, high, x.shape[1] // wide, wide)


def _rows(
    x: Tensor, scaling: str, dtype: torch.dtype, scale: Tensor | None, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes, scales and counts of a matrix."""
    rows, columns = x.shape
    high, wide = {"tensor": (rows, columns), "row": (1, columns), "block": (1, BLOCK), "block2d": (BLOCK, BLOCK)}[
        scaling
    ]
    high, wide = max(high, 1), max(wide, 1)
    if scale is None:
        blocks = _blocks(x, high, wide)
        if blocks.numel():
            scale = scale_of(finite_amax(blocks, (1, 3))[:, 0, :, 0], dtype, power_of_two)
        else:
            scale = torch.ones(-(-rows // high), -(-columns // wide), device=x.device)
            if scaling in ("row", "tensor"):
                scale = scale.new_ones(rows if scaling == "row" else 1, 1)
    spread = scale.reshape(scale.shape[:-1].numel(), scale.shape[-1]) if scale.dim() else scale.view(1, 1)
    each = spread.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    data, counts = cast(x, each.expand(rows, columns), dtype)
    return data, scale, counts


def quantize_fp8(
    x: Tensor,
    scaling: str = "row",
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scale: Tensor | None = None,
    transpose: str = "no",
    power_of_two: bool = True,
) -> tuple[Tensor | None, ...]:
    """``(data, scale, transposed, transposed_scale, counts)`` of :func:`warpsmith.quantize_fp8`."""
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    data = new_scale = transposed = transposed_scale = counts = None
    if transpose != "no":
        if scale is None and scaling == "tensor":
            scale = _rows(flat, scaling, dtype, None, power_of_two)[1].view(())
        given = scale if scaling == "tensor" or transpose == "only" else None
        transposed, transposed_scale, counts = _rows(flat.t(), scaling, dtype, given, power_of_two)
    if transpose != "only":
        data, new_scale, counts = _rows(flat, scaling, dtype, scale, power_of_two)
        data = data.view(x.shape)
        if scaling != "block2d":
            new_scale = new_scale.view(() if scaling == "tensor" else (*x.shape[:-1], new_scale.shape[-1]))
    return data, new_scale, transposed, transposed_scale, counts


def dequantize_fp8(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``data * scale`` in float32, rounded once."""
    rows, columns = data.shape[:-1].numel(), data.shape[-1]
    if scale.dim() and scale.shape != (*data.shape[:-1], 1):
        if scale.shape[:-1] != data.shape[:-1]:
            scale = scale.repeat_interleave(BLOCK, 0)[:rows]
        scale = scale.repeat_interleave(BLOCK, -1)[..., :columns].reshape(data.shape)
    return (data.float() * scale).to(dtype)
