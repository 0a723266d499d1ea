"""The quantize family: what it returns, fakes, and the words of its arguments."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpsmith import _C
from warpsmith._core import checks, dtensor
from warpsmith._core.library import call_raw, raw, refuse_wrong_kinds, register_fake

QUANTIZE, DEQUANTIZE, AMAX, SCALE = "quantize_fp8", "dequantize_fp8", "fp8_amax", "fp8_scale"
SCALINGS: tuple[str, ...] = _C.FP8_SCALINGS  # by their numbers in the schemas
TRANSPOSES = ("no", "also", "only")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 128


class Fp8Tensor(NamedTuple):
    """What :func:`warpsmith.quantize_fp8` returns. None: not asked for.

    Attributes:
        data: 8-bit floats, of the shape of x.
        scale: float32; ``data.float() * scale`` is nearly x.
        transposed: 8-bit floats, (columns, rows), contiguous.
        transposed_scale: of ``transposed``, by its own rows.
        counts: int64, two elements: how many elements of x were saturated, and how many were not finite.

    Example:
        >>> import torch, warpsmith
        >>> t = warpsmith.Fp8Tensor(torch.ones(2).to(torch.float8_e5m2), torch.tensor(3.0), None, None, None)
        >>> warpsmith.dequantize_fp8(t)
        tensor([3., 3.])
    """

    data: Tensor | None
    scale: Tensor | None
    transposed: Tensor | None
    transposed_scale: Tensor | None
    counts: Tensor | None


def number_of(op: str, argument: str, value: object, words: Sequence[str]) -> int:
    """The place of a word among those of an argument."""
    if not isinstance(value, str):
        checks.refuse_type(op, argument, "a string", value)
    if value not in words:
        checks.refuse(op, argument, f"one of {', '.join(map(repr, words))}", repr(value))
    return words.index(value)


def check_dtype(op: str, argument: str, dtype: object, known: Sequence[torch.dtype]) -> None:
    if not isinstance(dtype, torch.dtype):
        checks.refuse_type(op, argument, "a torch.dtype", dtype)
    if dtype not in known:
        names = [checks.dtype_text(d) for d in known]
        checks.refuse(op, argument, f"{', '.join(names[:-1])} or {names[-1]}", checks.dtype_text(dtype))


def call(op: Any, *inputs: Any) -> Any:
    """Calls a raw op whose outputs have no gradient."""
    if not torch.compiler.is_compiling():
        name, arguments = op._schema.name.split("::")[1], op._schema.arguments
        dtensor.refuse(name, [a.name for a in arguments], inputs)
        refuse_wrong_kinds(name, arguments, inputs)
    return call_raw(op, *(t.detach() if isinstance(t, Tensor) and t.requires_grad else t for t in inputs))


def _check_x(op: str, x: Tensor) -> None:
    check_dtype(op, "x", x.dtype, FLOATS)
    checks.at_least_one_dimension(op, "x", x)


def blocks_of(n: Any) -> Any:
    return (n + BLOCK - 1) // BLOCK


def _scale_shape(scaling: str, shape: Sequence[Any], rows: Any) -> tuple[Any, ...]:
    across = blocks_of(shape[-1])
    return {
        "tensor": (),
        "row": (*shape[:-1], 1),
        "block": (*shape[:-1], across),
        "block2d": (blocks_of(rows), across),
    }[scaling]


def _fake_quantize(a: Any) -> tuple[Tensor, ...]:
    op, x, scale, scaling, transpose, dtype = QUANTIZE, a.x, a.scale, a.scaling, a.transpose, a.dtype
    _check_x(op, x)
    check_dtype(op, "dtype", dtype, FLOAT8)
    if not 0 <= scaling < len(SCALINGS):
        checks.refuse(op, "scaling", "0 (row), 1 (tensor), 2 (block) or 3 (block2d)", str(scaling))
    if not 0 <= transpose < len(TRANSPOSES):
        checks.refuse(op, "transpose", "0 (no), 1 (also) or 2 (only)", str(transpose))
    kind, how = SCALINGS[scaling], TRANSPOSES[transpose]
    rows: Any = math.prod(x.shape[:-1])
    turned = (x.shape[-1], rows)
    scales, turned_scales = _scale_shape(kind, x.shape, rows), _scale_shape(kind, turned, x.shape[-1])
    if scale is not None:
        checks.dtype_is(op, "scale", scale, torch.float32)
        if kind.startswith("block") or (kind == "row" and how == "also"):
            checks.refuse(op, "scale", "None: these scales are computed", "a tensor")
        checks.same_shape(op, "scale", scale, turned_scales if how == "only" else scales)
    data, one = how != "only", kind == "tensor"

    def made(wanted: bool, shape: Sequence[Any], of: torch.dtype) -> Tensor:
        return x.new_empty(tuple(shape) if wanted else (0,), dtype=of)

    return (
        made(data, x.shape, dtype),
        made(scale is None and (data or one), scales, torch.float32),
        made(how != "no", turned, dtype),
        made(scale is None and how != "no" and not one, turned_scales, torch.float32),
        x.new_empty((2,), dtype=torch.int64),
        made(a.column_sums, x.shape[-1:], torch.float32),
    )


def _fake_dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    op = DEQUANTIZE
    check_dtype(op, "data", data.dtype, FLOAT8)
    checks.dtype_is(op, "scale", scale, torch.float32)
    check_dtype(op, "dtype", dtype, FLOATS)
    checks.at_least_one_dimension(op, "data", data)
    rows: Any = math.prod(data.shape[:-1])
    shapes = [_scale_shape(kind, data.shape, rows) for kind in SCALINGS]
    if not any(
        len(scale.shape) == len(shape) and all(checks.possible(a == b) for a, b in zip(scale.shape, shape, strict=True))
        for shape in shapes
    ):
        expected = "shape (), of rows, of blocks of 128 or of squares of 128 by 128 of data"
        checks.refuse(op, "scale", expected, checks.shape_text(scale.shape))
    return data.new_empty(data.shape, dtype=dtype)


def _fake_amax(x: Tensor, by_row: bool) -> Tensor:
    _check_x(AMAX, x)
    return x.new_empty((*x.shape[:-1], 1) if by_row else (), dtype=torch.float32)


def _fake_scale(amax: Tensor, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    checks.dtype_is(SCALE, "amax", amax, torch.float32)
    check_dtype(SCALE, "dtype", dtype, FLOAT8)
    return amax.new_empty(amax.shape)


register_fake(QUANTIZE, _fake_quantize, named=True)
register_fake(DEQUANTIZE, _fake_dequantize)
register_fake(AMAX, _fake_amax)
register_fake(SCALE, _fake_scale)

quantize, dequantize = raw.quantize_fp8.default, raw.dequantize_fp8.default
