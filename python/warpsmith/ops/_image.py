"""The image family's fake, and the words of its arguments."""

from collections.abc import Sequence

import torch
from torch import Tensor

from warpsmith._core import checks
from warpsmith._core.library import raw, register_fake
from warpsmith.ops._quantize import FLOATS, check_dtype

NAME = "normalize_image"


def three(argument: str, values: object) -> list[float]:
    """A number a channel."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        checks.refuse_type(NAME, argument, "three numbers", values)
    for value in values:
        checks.refuse_non_number(NAME, argument, value, "three numbers")
    found = [float(value) for value in values]
    _check_numbers(argument, found)
    return found


def _check_numbers(argument: str, values: Sequence[float]) -> None:
    if len(values) != 3:
        checks.refuse(NAME, argument, "three numbers", f"{len(values)} of them")
    for value in values:
        checks.finite(NAME, argument, value, torch.float32)
        if argument == "std" and value < torch.finfo(torch.float32).tiny:
            checks.refuse(NAME, argument, "positive numbers", f"{value:g}")


def _fake(x: Tensor, mean: Sequence[float], std: Sequence[float], flip: Tensor | None, dtype: torch.dtype) -> Tensor:
    checks.dtype_is(NAME, "x", x, torch.uint8)
    if x.dim() != 4 or not checks.possible(x.shape[3] == 3):
        checks.refuse(NAME, "x", "shape (N, H, W, 3)", checks.shape_text(x.shape))
    _check_numbers("mean", mean)
    _check_numbers("std", std)
    if flip is not None:
        checks.exactly(NAME, "flip", flip, torch.bool, x.shape[:1], x)
    check_dtype(NAME, "dtype", dtype, FLOATS)
    return x.new_empty(x.shape, dtype=dtype).permute(0, 3, 1, 2)


register_fake(NAME, _fake)

normalize = raw.normalize_image.default
