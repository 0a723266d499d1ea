"""max_pool2d's fakes and gradients.

The raw ops take ``(x, kernel_size, stride, padding, ceil_mode, height, width)``. Height and width are those of x: the
backward takes them from there, since it keeps no x.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.library import Gradients, Saved, Wants, call_raw, differentiable, raw, register_fake

NAME = "max_pool2d"
MOST_AREA = 255  # of a window whose places have one byte
_MOST = 2**30  # rows and columns


def _windows(size: Any, kernel: int, stride: int, padding: int, ceil_mode: bool) -> Any:
    """How many windows a row or column of ``size`` pixels has."""
    count = (size + 2 * padding - kernel + (stride - 1 if ceil_mode else 0)) // stride + 1
    # The last one may lack pixels, but not all of them.
    return count - 1 if ceil_mode and checks.known((count - 1) * stride >= size + padding) else count


def check_numbers(op: str, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> None:
    for argument, numbers, least in (("kernel_size", kernel, 1), ("stride", stride, 1), ("padding", padding, 0)):
        if len(numbers) != 2:
            checks.refuse(op, argument, "two numbers", f"{len(numbers)} of them")
        for n in numbers:
            if n < least:
                checks.refuse(op, argument, f"numbers >= {least}", str(n))
    if kernel[0] * kernel[1] > MOST_AREA:
        checks.refuse(op, "kernel_size", f"an area of at most {MOST_AREA}", f"{kernel[0]} x {kernel[1]}")
    for k, p in zip(kernel, padding, strict=True):
        if p > k // 2:
            checks.refuse(op, "padding", f"at most half of the kernel's size, {k // 2}", str(p))


def check_shape(x: Tensor) -> None:
    if x.dim() != 4 or any(checks.known(n == 0) for n in x.shape[1:]):
        checks.refuse(NAME, "x", "shape (N, C, H, W) with C, H and W >= 1", checks.shape_text(x.shape))


def _check_size(op: str, height: Any, width: Any) -> None:
    if checks.known(height > _MOST) or checks.known(width > _MOST):
        checks.refuse(op, "x", "at most 2^30 rows and columns", f"{height} x {width}")


def _fake_inference(a: Any) -> Tensor:
    x, kernel, stride, padding = a.x, a.kernel_size, a.stride, a.padding
    checks.float_dtype(NAME, "x", x)
    check_shape(x)
    if checks.known(a.height != x.shape[2]) or checks.known(a.width != x.shape[3]):
        checks.refuse(NAME, "x", f"{a.height} rows of {a.width} pixels", checks.shape_text(x.shape))
    check_numbers(NAME, kernel, stride, padding)
    _check_size(NAME, a.height, a.width)
    sizes = [_windows(x.shape[2 + i], kernel[i], stride[i], padding[i], a.ceil_mode) for i in range(2)]
    if any(checks.known(n < 1) for n in sizes):
        expected = f"at least ({kernel[0]}, {kernel[1]}) pixels with its padding"
        checks.refuse(NAME, "x", expected, checks.shape_text(x.shape))
    return x.new_empty((x.shape[0], *sizes, x.shape[1])).movedim(-1, 1)


def _fake_forward(a: Any) -> tuple[Tensor, Tensor]:
    y = _fake_inference(a)
    return y, torch.empty_like(y.movedim(1, -1), dtype=torch.uint8)


def _fake_backward(a: Any) -> Tensor:
    op, dy, index = NAME + "_backward", a.dy, a.index
    checks.float_dtype(op, "dy", dy)
    if dy.dim() != 4:
        checks.refuse(op, "dy", "shape (N, C, H, W)", checks.shape_text(dy.shape))
    if index.dtype != torch.uint8:
        checks.refuse(op, "index", "uint8", checks.dtype_text(index.dtype))
    checks.same_shape(op, "index", index, (dy.shape[0], *dy.shape[2:], dy.shape[1]))
    checks.same_device(op, "index", index, dy)
    check_numbers(op, a.kernel_size, a.stride, a.padding)
    _check_size(op, a.height, a.width)
    for i, (size, word) in enumerate(((a.height, "rows"), (a.width, "columns"))):
        given, found = (size, a.kernel_size[i], a.stride[i], a.padding[i]), dy.shape[2 + i]
        if checks.known(found < 1) or all(checks.known(found != _windows(*given, ceil)) for ceil in (False, True)):
            checks.refuse(op, "dy", f"{max(0, _windows(*given, False))} {word}", checks.shape_text(dy.shape))
    return dy.new_empty((dy.shape[0], a.height, a.width, dy.shape[1])).movedim(-1, 1)


register_fake(NAME, _fake_forward, named=True)
register_fake(NAME + "_forward", _fake_forward, named=True)
register_fake(NAME + "_inference", _fake_inference, named=True)
register_fake(NAME + "_backward", _fake_backward, named=True)


def _backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    given = saved.kernel_size, saved.stride, saved.padding, saved.height, saved.width
    return {"x": call_raw(raw.max_pool2d_backward.default, dy, saved.index, *given)}


def _plain_backward(saved: Saved, wants: Wants, dy: Tensor) -> Gradients:
    """In plain torch operations, in float32 or wider: differentiable in turn. dy at its place in each window, and the
    sum of the windows."""
    kernel, stride = saved.kernel_size, saved.stride
    places = torch.arange(kernel[0] * kernel[1], device=dy.device).view(-1, 1, 1)
    here = saved.index.movedim(-1, 1).unsqueeze(2) == places
    placed = torch.where(here, dy.to(checks.wide_dtype(dy)).unsqueeze(2), 0)
    whole = tuple((n - 1) * s + k for n, s, k in zip(dy.shape[2:], stride, kernel, strict=True))
    dx = F.fold(placed.flatten(3).flatten(1, 2), whole, tuple(kernel), stride=tuple(stride))
    edges = []
    for size, found, before in ((saved.width, whole[1], saved.padding[1]), (saved.height, whole[0], saved.padding[0])):
        edges += [-before, size + before - found]
    return {"x": F.pad(dx, edges).to(dy.dtype)}


def _plain(x: Tensor, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, height: Any, width: Any) -> Tensor:
    return F.max_pool2d(x, kernel, stride, padding, 1, ceil_mode)


function = differentiable(
    NAME,
    forward=raw.max_pool2d_forward.default,
    inference=raw.max_pool2d_inference.default,
    public=1,
    save=("index", "kernel_size", "stride", "padding", "height", "width"),
    backward=_backward,
    differentiable_backward=_plain_backward,
    plain=_plain,
)
