"""Tensors of every layout and edge value from a seed, and whether two have the same bits."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "padded_rows", "every_second", "transposed", "expanded", "misaligned")


class Random:
    """Float64 and integer tensors from one seed, the same on every device because they are drawn on the CPU.

    Example:
        >>> Random(0).normal((2, 3)).dtype
        torch.float64
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, shape: Sequence[int], mean: float = 0.0, std: float = 1.0) -> Tensor:
        """Normal values, float64."""
        return mean + std * torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)

    def uniform(self, shape: Sequence[int], low: float = 0.0, high: float = 1.0) -> Tensor:
        """Uniform values in [low, high), float64."""
        return low + (high - low) * torch.rand(tuple(shape), generator=self.generator, dtype=torch.float64)

    def integers(self, shape: Sequence[int], low: int, high: int) -> Tensor:
        """Uniform integers in [low, high), int64."""
        return torch.randint(low, high, tuple(shape), generator=self.generator)


def seed_of(*parts: Any) -> int:
    """A seed that depends on the words alone, so that a test draws the same values in every order and process."""
    return zlib.crc32(" ".join(map(str, parts)).encode())


def lay_out(t: Tensor, layout: str) -> Tensor:
    """A tensor of ``t``'s shape, dtype and device that lies in memory as ``layout`` says.

    - ``contiguous``
    - ``padded_rows``: the last dimension is a slice of a wider one, so rows are apart. The first begins at a multiple
      of 16 bytes, and where it holds whole vectors of 16 bytes, the second does not;
    - ``every_second``: the last stride is 2;
    - ``transposed``: the last two dimensions are swapped in memory;
    - ``expanded``: the first dimension has stride 0, so all of it repeats ``t``'s first entry;
    - ``misaligned``: contiguous, one element behind an allocation's start;
    - ``vectors_apart``, which is not one of ``LAYOUTS``: rows are apart by 32 bytes, so that vectors stay aligned;
    - ``odd_stride_<d>``, nor is this: of all strides but the last, that of dimension d alone is no
      multiple of 16 bytes.

    The values are ``t``'s, but for ``expanded``. A tensor without dimensions is returned as it is.

    Example:
        >>> lay_out(torch.zeros(4, 6), "padded_rows").stride()
        (15, 1)
    """
    if layout.startswith("odd_stride_"):
        return _with_odd_stride(t, int(layout.removeprefix("odd_stride_")))
    if layout not in (*LAYOUTS, "vectors_apart"):
        raise ValueError(f"lay_out: layout: expected one of {', '.join(LAYOUTS)}, got {layout}")
    if layout == "contiguous" or t.dim() == 0:
        return t.contiguous()
    shape = tuple(t.shape)
    if layout == "expanded":
        return t[:1].contiguous().expand(shape)
    if layout == "transposed":
        if t.dim() == 1:
            return lay_out(t, "every_second")
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout in ("padded_rows", "vectors_apart"):
        before = 16 // t.element_size()
        behind = 5 if layout == "padded_rows" else before
        view = t.new_zeros((*shape[:-1], before + shape[-1] + behind))[..., before : before + shape[-1]]
    elif layout == "every_second":
        view = t.new_zeros((*shape[:-1], 2 * shape[-1]))[..., ::2]
    else:
        view = t.new_zeros((t.numel() + 1,))[1:].view(shape)
    view.copy_(t)
    return view


def _with_odd_stride(t: Tensor, odd: int) -> Tensor:
    vector, strides, span = 16 // t.element_size(), [1], t.shape[-1]
    for dim in range(t.dim() - 2, -1, -1):
        strides.insert(0, -(-span // vector) * vector + (dim == odd))
        span = strides[0] * t.shape[dim]
    return t.new_zeros(span).as_strided(t.shape, strides).copy_(t)


def repeat_batch(t: Tensor, times: int) -> Tensor:
    """``t`` repeated along its first dimension."""
    return t.repeat(times, *(1 for _ in t.shape[1:]))


def edge_values(dtype: torch.dtype) -> dict[str, float]:
    """Values at the borders of a floating dtype, by name.

    Example:
        >>> edge_values(torch.float16)["max"]
        65504.0
    """
    info = torch.finfo(dtype)
    return {
        "zero": 0.0,
        "minus_zero": -0.0,
        "subnormal": info.smallest_normal * info.eps,
        "smallest_normal": info.smallest_normal,
        "large": info.max**0.5 / 2,
        "max": info.max,
        "lowest": info.min,
        "inf": float("inf"),
        "minus_inf": float("-inf"),
        "nan": float("nan"),
    }


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bits: NaNs are compared by their bits, and 0 is not
    -0.

    Example:
        >>> nan, zero = torch.tensor(float("nan")), torch.tensor(0.0)
        >>> bitwise_equal(nan, nan), bitwise_equal(zero, -zero)
        (True, False)
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bits(a), _bits(b))


def differing(a: Tensor, b: Tensor) -> Tensor:
    """Whether two tensors differ in shape, dtype or bits, as a boolean tensor on their device: the host does not wait
    for it."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return torch.ones((), dtype=torch.bool, device=a.device)
    if a.is_floating_point():
        a, b = (t.detach().view(INTEGER_OF_SIZE[t.element_size()]) for t in (a, b))
    return torch.ne(a, b).any()


INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(t: Tensor) -> Tensor:
    # One element is contiguous whatever its stride, and only a stride of 1 can be seen as bytes.
    return t.detach().reshape(-1).contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8)


def different_bits(a: Tensor, b: Tensor) -> str:
    """How two tensors that are not bitwise equal differ, for a message."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    rows = _bits(a).view(-1, a.element_size()) != _bits(b).view(-1, a.element_size())
    return f"{int(rows.any(1).sum())} of {a.numel()} elements differ"
